"""The Triton passes against a slow reference, bit for bit: in the interpreter, and on CUDA.

The reference below follows the definition coordinate by coordinate, in uint64 for the integers and
numpy's float32 for the rest, and shares nothing with the package but the table of normals.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_dpzero.perturbation.directions import normal_tables
from hf_dpzero.perturbation.kernels import triton_launch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the triton package"
)

ROOT = Path(__file__).resolve().parents[2]
DEVICE_CODE = "hf_dpzero.perturbation.kernels.triton_kernels"


@pytest.fixture(scope="module", params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the tensors of a test live; the device code is loaded anew for the one or the other."""
    interpreted = request.param == "interpreter"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
        before = sys.modules.pop(DEVICE_CODE, None)
        yield torch.device("cpu" if interpreted else "cuda")
        sys.modules.pop(DEVICE_CODE, None)
        if before is not None:
            sys.modules[DEVICE_CODE] = before


LOW = 0xFFFFFFFF
KEY = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


def philox(c: list, k: list[int]) -> list:
    """Philox4x32-10 of counters: four words, Python's integers or uint64 arrays."""
    for turn in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        k0, k1 = (k[0] + turn * 0x9E3779B9) & LOW, (k[1] + turn * 0xBB67AE85) & LOW
        c = [second >> 32 ^ c[1] ^ k0, second & LOW, first >> 32 ^ c[3] ^ k1, first & LOW]
    return c


def words_at(calls: np.ndarray, key: np.ndarray) -> np.ndarray:
    """uint32 [4, n]."""
    k0, k1, n0, n1 = (int(k) for k in key)
    calls = calls.astype(np.uint64)
    c = [
        calls & np.uint64(LOW),
        calls >> np.uint64(32),
        *(np.full_like(calls, n) for n in (n0, n1)),
    ]
    return np.array(philox(c, [k0, k1])).astype(np.uint32)


KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([LOW] * 4, [LOW] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def signs_at(index: np.ndarray, key: np.ndarray) -> np.ndarray:
    row, lane = index % 4096 // 32, index % 32
    words = words_at(index // 4096 * 32 + lane, key)
    word = words[(row // 32).astype(int), np.arange(len(index))]
    return np.where(word >> (row % 32).astype(np.uint32) & np.uint32(1), 1, -1).astype(np.float32)


def normal_of(x: np.ndarray) -> np.ndarray:
    center, half = (table.astype(np.int64) for table in normal_tables())
    x = x.astype(np.int64)
    s = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255)
    b = x >> 24 & 127
    return (center[s] + (2 * b - 127) * half[s]).astype(np.float32) * np.float32(2.0**-21)


def normals_at(index: np.ndarray, key: np.ndarray) -> np.ndarray:
    word, lane = index % 128 // 32, index % 32
    words = words_at(index // 128 * 32 + lane, key)
    return normal_of(words[word.astype(int), np.arange(len(index))])


def indices(offset: int, count: int) -> np.ndarray:
    return np.uint64(offset) + np.arange(count, dtype=np.uint64)


class Layout:
    """Tensors of given sizes in one flat tensor, each from a multiple of 32 on."""

    def __init__(self, sizes: list[int]) -> None:
        padded = [-(-size // 32) * 32 for size in sizes]
        self.starts = np.cumsum([0, *padded[:-1]])
        self.count = int(self.starts[-1]) + sizes[-1]
        self.rows = np.repeat(np.arange(len(sizes)), np.array(padded) // 32)
        self.number = len(sizes)

    @property
    def member(self) -> np.ndarray:
        """Of each element."""
        return np.repeat(self.rows, 32)[: self.count]

    @property
    def index(self) -> np.ndarray:
        """Of each element within its own tensor."""
        return np.arange(self.count) - self.starts[self.member]

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.number == 1:
            return None
        rows = torch.from_numpy(self.rows.astype(np.int32))
        return rows.to(device), torch.from_numpy(self.starts.astype(np.int64)).to(device)

    def dither(self, start: np.ndarray) -> np.ndarray:
        """uint32 of each element, from the members' starts [M]."""
        wide = start.astype(object)[self.member] + self.index.astype(object) * 0x9E3779B9
        return (wide & LOW).astype(np.uint32)


def reference_signs(source, offset, keys, amounts, layout):
    index, acc = indices(offset, layout.count), source.copy()
    for key, amount in zip(keys, amounts):
        acc = acc + signs_at(index, key) * amount[layout.member]
    return acc


def reference_normals(source, offset, keys, new, old, update, spacing, dithers, layout):
    index, acc, member = indices(offset, layout.count), source.copy(), layout.member
    for t, key in enumerate(keys):
        z = normals_at(index, key)
        a, b, c = (z * coefficient[t][member] for coefficient in (new, old, update))
        uniform = (layout.dither(dithers[t]) >> np.uint32(8)).astype(np.float32)
        fraction = (c - np.floor(c)) + uniform * np.float32(2.0**-24)
        n = np.rint(a) - np.rint(b) + (np.floor(c) + np.floor(fraction))
        acc = acc + n * spacing[member]
    assert acc.dtype == np.float32
    return acc


def round_to_bfloat16(acc: np.ndarray, dither: np.ndarray) -> np.ndarray:
    """The bits, uint16."""
    return ((acc.view(np.uint32) + (dither >> np.uint32(16))) >> np.uint32(16)).astype(np.uint16)


def round_to_float16(acc: np.ndarray, dither: np.ndarray) -> np.ndarray:
    """The bits, uint16."""
    least, size = np.float32(2.0**-14), np.abs(acc)
    small = size < least
    bits = np.where(small, size + least, size).view(np.uint32) + (dither >> np.uint32(19))
    cut = (bits & np.uint32(LOW - 0x1FFF)).view(np.float32)
    cut = np.minimum(np.where(small, cut - least, cut), np.float32(65504))
    with np.errstate(all="raise"):
        exact = np.copysign(cut, acc).astype(np.float16)
    assert np.array_equal(exact.astype(np.float32), np.copysign(cut, acc))
    return exact.view(np.uint16)


def reference_rounded(source, offset, keys, gaussian, coefficients, dither, layout, dtype):
    acc, index = source.float().numpy(), indices(offset, layout.count)
    for key, coefficient in zip(keys, coefficients):
        u = normals_at(index, key) if gaussian else signs_at(index, key)
        acc = acc + u * coefficient
    rounding = round_to_bfloat16 if dtype == torch.bfloat16 else round_to_float16
    return rounding(acc, layout.dither(dither))


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def draw_keys(terms: int, seed: int = 1) -> np.ndarray:
    return generator(seed).integers(0, 1 << 32, (terms, 4), np.uint32)


def draw(shape: tuple[int, ...], scale: float = 1.0, seed: int = 2) -> np.ndarray:
    return (generator(seed).standard_normal(shape) * scale).astype(np.float32)


def bits(tensor: torch.Tensor) -> np.ndarray:
    unsigned = {4: np.uint32, 2: np.uint16}[tensor.element_size()]
    integers = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.cpu().view(integers).numpy().view(unsigned)


def same(tensor: torch.Tensor, expected: np.ndarray) -> bool:
    """Bit for bit: 0 and -0 differ."""
    wanted = expected.view(np.uint32) if expected.dtype == np.float32 else expected
    return np.array_equal(bits(tensor), wanted)


PLACES = [(1, 0), (33, 4064), (4096, 96), (150, (1 << 32) - 64), (4200, (1 << 45) + 160)]
"""(elements, offset): tails, tiles cut at either end, coordinates beyond 2^32."""

SEVERAL = [1, 33, 4096, 64, 70]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_signs_and_normals_are_made_of_the_known_answers(device, counter, key, words):
    assert philox(counter, key) == words
    call, stream = counter[0] | counter[1] << 32, np.array([[*key, *counter[2:]]], np.uint32)
    one, zero = np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)
    signs, normals = (torch.zeros(n, device=device) for n in (4096, 128))
    triton_launch.add_signs(signs, signs, call // 32 * 4096, stream, one)
    column = signs.cpu().view(4, 32, 32)[:, :, call % 32]  # word, bit
    assert [sum(1 << b for b in range(32) if word[b] > 0) for word in column] == words
    unit, start = np.float32([2.0**-21]), np.zeros((1, 1), np.uint32)
    place = (call // 32 * 128, stream, one / unit)
    triton_launch.add_normals(normals, normals, *place, zero, zero, unit, start)
    expected = normal_of(np.array(words, np.uint32))
    assert normals.cpu().view(4, 32)[:, call % 32].tolist() == expected.tolist()


@pytest.mark.parametrize(("count", "offset"), PLACES)
def test_add_signs(device, count, offset):
    source, keys, amounts = draw((count,)), draw_keys(1), draw((1, 1), seed=3)
    theta = torch.from_numpy(source.copy()).to(device)
    triton_launch.add_signs(theta, theta, offset, keys, amounts)
    assert same(theta, reference_signs(source, offset, keys, amounts, Layout([count])))


@pytest.mark.parametrize("terms", [1, 3])
def test_add_signs_of_several_terms_and_members(device, terms):
    layout, keys = Layout(SEVERAL), draw_keys(terms)
    source, amounts = draw((layout.count,)), draw((terms, layout.number), seed=3)
    theta = torch.from_numpy(source.copy()).to(device)
    out = torch.full_like(theta, 9.0)
    triton_launch.add_signs(out, theta, 64, keys, amounts, layout.on(device))
    expected = reference_signs(source, 64, keys, amounts, layout)
    assert same(out, expected)
    assert same(theta, source)  # left alone
    triton_launch.add_signs(theta, theta, 64, keys, amounts, layout.on(device))
    assert same(theta, expected)


def grid_numbers(terms: int, members: int, updating: bool) -> dict[str, np.ndarray]:
    spacing = 2.0 ** -np.arange(20, 20 + members).astype(np.float32)
    dither = generator(7).integers(0, 1 << 32, (terms, members), np.uint32)
    return {
        "new": draw((terms, members), 300.0, seed=4),
        "old": draw((terms, members), 3.0, seed=5),
        "update": draw((terms, members), 0.7 * updating, seed=6),
        "spacing": spacing,
        "dithers": dither,
    }


@pytest.mark.parametrize("updating", [False, True])
@pytest.mark.parametrize(("count", "offset"), PLACES)
def test_add_normals(device, count, offset, updating):
    keys, numbers = draw_keys(1), grid_numbers(1, 1, updating)
    source = np.rint(draw((count,), 2.0**18)) * numbers["spacing"]
    theta = torch.from_numpy(source.copy()).to(device)
    triton_launch.add_normals(theta, theta, offset, keys, **numbers)
    assert same(theta, reference_normals(source, offset, keys, **numbers, layout=Layout([count])))


@pytest.mark.parametrize("terms", [1, 3])
def test_add_normals_of_several_terms_and_members(device, terms):
    layout, keys = Layout(SEVERAL), draw_keys(terms)
    numbers = grid_numbers(terms, layout.number, True)
    source = np.rint(draw((layout.count,), 2.0**18)) * numbers["spacing"][layout.member]
    theta = torch.from_numpy(source.copy()).to(device)
    out = torch.full_like(theta, 9.0)
    triton_launch.add_normals(out, theta, 4128, keys, **numbers, members=layout.on(device))
    assert same(out, reference_normals(source, 4128, keys, **numbers, layout=layout))
    assert same(theta, source)


@pytest.mark.parametrize("scale", [2.0**20, 2.0**24, 2.0**-130, 1e-9], ids=str)
def test_roundings_at_the_edges(device, scale):
    """z is an integer times 2^-21: ties to even at 2^20; no fractions, and next to nothing."""
    keys, count = draw_keys(1), 600
    each = np.full((1, 1), scale, np.float32)
    one, start = np.ones(1, np.float32), np.full((1, 1), 0xFFFFFF00, np.uint32)
    z = normals_at(indices(0, count), keys[0])
    if scale == 2.0**20:
        assert np.mean(np.abs(z * each[0] % 1) == 0.5) > 0.3  # ties indeed
    for new, old, update in [(each, 0 * each, 0 * each), (0 * each, each, each)]:
        theta = torch.zeros(count, device=device)
        triton_launch.add_normals(theta, theta, 0, keys, new, old, update, one, start)
        expected = reference_normals(
            np.zeros(count, np.float32), 0, keys, new, old, update, one, start, Layout([count])
        )
        assert same(theta, expected)


def test_a_fraction_that_rounds_to_one_meets_the_largest_uniform(device):
    """(step - floor) + U = 2 for a negative step near 0 with U = 1 - 2^-24: floor gives 2, not 1."""
    keys, scale = draw_keys(1), np.full((1, 1), 1e-9, np.float32)
    z = normals_at(indices(0, 1), keys[0])
    update = -scale * np.sign(z)
    start, zero = np.full((1, 1), LOW, np.uint32), np.zeros((1, 1), np.float32)
    theta = torch.zeros(1, device=device)
    triton_launch.add_normals(
        theta, theta, 0, keys, zero, zero, update, np.ones(1, np.float32), start
    )
    assert theta.item() == -1 + 2


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("gaussian", [False, True], ids=["signs", "normals"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("count", "offset"), PLACES[1::3])
def test_add_rounded(device, count, offset, dtype, gaussian):
    source = torch.from_numpy(draw((count,))).to(dtype)
    keys, coefficients = draw_keys(1), draw((1,), 1e-2, seed=3)
    dither, theta = np.array([0x12345678], np.uint32), source.clone().to(device)
    triton_launch.add_rounded(theta, theta, offset, keys, gaussian, coefficients, dither)
    numbers = (keys, gaussian, coefficients, dither)
    assert same(theta, reference_rounded(source, offset, *numbers, Layout([count]), dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("gaussian", [False, True])
def test_add_rounded_of_several_terms_and_members(device, dtype, gaussian):
    layout, keys = Layout(SEVERAL), draw_keys(3)
    source = torch.from_numpy(draw((layout.count,), 0.03)).to(dtype)
    coefficients = draw((3,), 1e-3, seed=3)
    dither = generator(7).integers(0, 1 << 32, layout.number, np.uint32)
    theta, out = source.to(device), torch.zeros_like(source, device=device)
    numbers = (keys, gaussian, coefficients, dither)
    triton_launch.add_rounded(out, theta, 96, *numbers, layout.on(device))
    assert same(out, reference_rounded(source, 96, *numbers, layout, dtype))
    assert torch.equal(theta.cpu(), source)


@pytest.mark.parametrize("value", [2e-8, 5e-5, 1.0, 1000.3, 65000.0, 3e38])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_least_dither_truncates_and_the_largest_rounds_away(device, dtype, value):
    """The source is 0 and u = +-1, so the sum is +-value: its neighbours are known."""
    keys, largest = draw_keys(1), torch.tensor(65504.0).to(dtype)
    nearest = torch.tensor(value).to(dtype)
    size = torch.tensor(value) if dtype == torch.bfloat16 else torch.tensor(min(value, 65504.0))
    below = nearest if nearest.float() <= size else _next_down(nearest)
    for dither in (0, LOW):
        theta, amount = torch.zeros(1, dtype=dtype, device=device), np.array([value], np.float32)
        start = np.array([dither], np.uint32)
        triton_launch.add_rounded(theta, theta, 0, keys, False, amount, start)
        wanted = below if dither == 0 or below.float() == size else _next_up(below)
        if dtype == torch.float16:
            wanted = torch.minimum(wanted, largest)
        assert theta.cpu().abs().item() == wanted.item()
        assert bool(theta.signbit().item()) == (signs_at(indices(0, 1), keys[0])[0] < 0)


def _next_up(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int16) + 1).view(x.dtype)


def _next_down(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int16) - 1).view(x.dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_sign_of_a_zero_sum_is_kept(device, dtype):
    theta, keys = torch.full((32,), -0.0, dtype=dtype, device=device), draw_keys(1)
    zero, start = np.zeros(1, np.float32), np.zeros(1, np.uint32)
    triton_launch.add_rounded(theta, theta, 0, keys, False, zero, start)
    negative = signs_at(indices(0, 32), keys[0]) < 0  # -0 + -0, else -0 + 0
    assert theta.signbit().tolist() == negative.tolist()
    assert not theta.any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_stochastic_rounding_goes_up_as_often_as_the_distance_says(device, dtype):
    value = 1.0 + 0.3 * torch.finfo(dtype).eps
    theta, keys = torch.ones(4096, dtype=dtype, device=device), draw_keys(1)
    start, step = np.array([99], np.uint32), np.array([value - 1.0], np.float32)
    triton_launch.add_rounded(theta, theta, 0, keys, False, step, start)
    raised = theta.cpu().float().numpy()[signs_at(indices(0, 4096), keys[0]) > 0]
    assert set(raised.tolist()) == {1.0, 1.0 + torch.finfo(dtype).eps}
    assert (raised > 1.0).mean() == pytest.approx(0.3, abs=0.05)  # 5 sigma over 2000 of them


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_product_is_rounded_before_it_is_added(device, dtype):
    """z c - z c is 0 where both products are rounded; a fused multiply-add leaves a rounding error."""
    coefficient, count = np.float32(1e3 / 3), 200
    keys = np.repeat(draw_keys(1), 2, axis=0)
    product = normals_at(indices(0, count), keys[0]).astype(np.float64) * coefficient
    left = np.abs(product.astype(np.float32) - product)
    assert (left > 1e-7).mean() > 0.5  # what fusing would leave, visible in both precisions
    theta, start = torch.zeros(count, dtype=dtype, device=device), np.array([5], np.uint32)
    both = np.array([coefficient, -coefficient])
    triton_launch.add_rounded(theta, theta, 0, keys, True, both, start)
    assert theta.abs().max().item() == 0.0


def test_a_product_is_rounded_before_it_is_rounded_to_the_grid(device):
    """On these numbers contraction into the rounding gives other integers."""
    keys, count, new = draw_keys(1), 2000, np.full((1, 1), 1.3 * 2**20, np.float32)
    z, theta = normals_at(indices(0, count), keys[0]), torch.zeros(count, device=device)
    contracted, apart = np.rint(z.astype(np.float64) * new[0, 0]), np.rint(z * new[0, 0])
    assert (contracted != apart).mean() > 0.01
    zero, one, start = np.zeros((1, 1), np.float32), np.ones(1, np.float32), np.uint32([[5]])
    triton_launch.add_normals(theta, theta, 0, keys, new, zero, zero, one, start)
    assert np.array_equal(theta.cpu().numpy(), apart)


PIECES = np.array([42 * 96, 5000 * 96, 0])
"""Rows 42 (which straddles two tiles), 5000 and 0 of a tensor with rows of 96."""


@pytest.mark.parametrize("size", [90, 4128], ids=["short", "long"])
def test_pieces_are_what_the_whole_tensor_has_there(device, size):
    keys, offset = draw_keys(2), (1 << 33) + 64
    source, amounts = draw((len(PIECES), size)), draw((2, 1), seed=3)
    theta = torch.from_numpy(source.copy()).to(device)
    triton_launch.add_signs(theta, theta, offset, keys, amounts, pieces=PIECES)
    for row, first, values in zip(theta, PIECES, source):
        assert same(row, reference_signs(values, offset + first, keys, amounts, Layout([size])))


def test_the_dither_of_a_piece_is_the_whole_tensor_s(device):
    keys, size, numbers = draw_keys(2), 96, grid_numbers(2, 1, True)
    source = np.rint(draw((len(PIECES), size), 2.0**18)) * numbers["spacing"]
    theta = torch.from_numpy(source.copy()).to(device)
    half = torch.from_numpy(source).bfloat16()
    rounded, start = half.clone().to(device), numbers["dithers"][0]
    triton_launch.add_normals(theta, theta, 32, keys, **numbers, pieces=PIECES)
    terms = (keys, True, draw((2,), 1e-2, seed=3))
    triton_launch.add_rounded(rounded, rounded, 32, *terms, start, pieces=PIECES)
    for row, first in enumerate(PIECES.tolist()):
        moved = numbers | {"dithers": numbers["dithers"] + np.uint32(first * 0x9E3779B9 & LOW)}
        place = (32 + first, keys)
        expected = reference_normals(source[row], *place, **moved, layout=Layout([size]))
        assert same(theta[row], expected)
        dither = moved["dithers"][0]
        expected = reference_rounded(
            half[row], 32 + first, *terms, dither, Layout([size]), half.dtype
        )
        assert same(rounded[row], expected)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_nothing_beside_the_tensor_is_written(device, dtype):
    buffer = torch.full((9000,), 7.0, dtype=dtype, device=device)
    part, keys, start = buffer[4000:4070], draw_keys(1), np.zeros(1, np.uint32)
    one = np.ones((1, 1), np.float32)
    if dtype == torch.float32:
        triton_launch.add_signs(part, part, 4064, keys, 30 * one)
        triton_launch.add_normals(part, part, 4064, keys, one, 0 * one, one, one[0], start[None])
    else:
        triton_launch.add_rounded(part, part, 4064, keys, True, one[0], start)
        triton_launch.add_rounded(part, part, 4064, keys, False, 30 * one[0], start)
    assert (buffer[:4000] == 7).all() and (buffer[4070:] == 7).all()
    assert (part != 7).all()


class Recorder:
    """Stands in for the device code: `walk[grid](...)` notes what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[SimpleNamespace] = []
        self.walk = self

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*given: object, **options: object) -> None:
            self.launches.append(
                SimpleNamespace(grid=grid, table=given[2], integers=given[7:], options=options)
            )

        return launch


def test_what_is_launched(device, monkeypatch: pytest.MonkeyPatch):
    """A program for each tile; no table for one term of one tensor; one launch for all pieces; never
    contraction."""
    recorder, one = Recorder(), np.ones((1, 1), np.float32)
    monkeypatch.setattr(triton_launch, "_device_code", lambda: recorder)

    def launched() -> SimpleNamespace:
        assert len(recorder.launches) == 1
        assert recorder.launches[0].options["enable_fp_fusion"] is False
        return recorder.launches.pop()

    keys = draw_keys(1)
    for count, offset, programs in [
        (1, 0, 1), (4096, 0, 1), (4096, 32, 2), (4097, 0, 2), (32, 4064, 1), (64, 4064, 2),
    ]:  # fmt: skip
        theta = torch.zeros(count, device=device)
        triton_launch.add_signs(theta, theta, offset, keys, one)
        launch = launched()
        assert launch.grid == (programs,)
        assert launch.table is None
        assert all(-(2**31) <= word < 2**31 for word in launch.integers[5:])  # one compiled variant
        assert [word & LOW for word in launch.integers[5:10]] == [*keys[0].tolist(), 0x3F800000]
    layout, numbers = Layout(SEVERAL), grid_numbers(3, 5, True)
    theta = torch.zeros(layout.count, device=device)
    members = layout.on(device)
    triton_launch.add_normals(theta, theta, 0, draw_keys(3), **numbers, members=members)
    launch = launched()
    assert launch.table.dtype == torch.int32 and launch.table.numel() == 3 * 4 + 5 * 3 * 5
    assert launch.integers[:2] == (3, 5)
    half = torch.zeros(len(PIECES), 96, dtype=torch.bfloat16, device=device)
    start = np.zeros(1, np.uint32)
    triton_launch.add_rounded(half, half, 0, keys, True, one[0], start, pieces=PIECES)
    assert launched().grid == (len(PIECES), 2)
    empty = torch.empty(0, device=device)
    triton_launch.add_signs(empty, empty, 0, keys, one)
    assert not recorder.launches
    for out, source, offset in [(half, half, 0), (theta, theta, 31), (theta, theta[:5], 0)]:
        with pytest.raises(AssertionError):
            triton_launch.add_signs(out, source, offset, keys, one)


def test_where_the_kernel_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not triton_launch.available("cpu")
    assert triton_launch.available("cuda") <= torch.cuda.is_available()
    theta = torch.zeros(40)
    with pytest.raises(ValueError, match="does not run on cpu"):
        triton_launch.add_signs(theta, theta, 0, draw_keys(1), np.ones((1, 1), np.float32))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_launch.available("cpu") and not triton_launch.available("meta")
    monkeypatch.setattr(triton_launch, "_triton_is_installed", lambda: False)
    assert not triton_launch.available("cpu")


@pytest.mark.gpu
def test_a_pass_neither_waits_nor_allocates(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.delitem(sys.modules, DEVICE_CODE, raising=False)
    theta = torch.zeros(1 << 22, device="cuda")
    layout = Layout([1 << 21, 1 << 21])
    members, keys, numbers = layout.on(theta.device), draw_keys(3), grid_numbers(3, 2, True)
    triton_launch.add_normals(theta, theta, 0, keys, **numbers, members=members)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton_launch.add_normals(theta, theta, 0, keys, **numbers, members=members)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 1 << 16


COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from hf_dpzero.perturbation.kernels import triton_kernels as code, triton_launch

def ptx(pointer, fusion, **variant):
    names, absent = code.walk.arg_names, {"table", "rows", "starts", "pieces"}
    if not variant["GAUSSIAN"]:
        absent = absent | {"normals"}
    kinds = dict.fromkeys(names, "i32") | {"out": pointer, "source": pointer, "normals": "*i64"}
    constants = dict.fromkeys(absent) | variant
    kinds |= dict.fromkeys(constants, "constexpr")
    where = {name: (place,) for place, name in enumerate(names)}
    aligned = {where[n]: [["tt.divisibility", 16]] for n in names if kinds[n].startswith("*")}
    source = ASTSource(
        code.walk, {n: kinds[n] for n in names}, {where[n]: v for n, v in constants.items()}, aligned
    )
    warps = triton_launch.NORMALS_WARPS if variant["GAUSSIAN"] else triton_launch.SIGNS_WARPS
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": fusion}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

print(json.dumps([ptx(**wanted) for wanted in json.loads(sys.argv[1])]))
"""


def compiled(tmp_path: Path, *variants: dict[str, object]) -> list[str]:
    """The PTX of variants of the kernel for compute capability 9.0; needs no GPU."""
    if tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) < (3, 3):
        pytest.skip("written against the compiler's interface since Triton 3.3")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(variants)],
        capture_output=True, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


NORMALS = {"GAUSSIAN": True, "GRID": True, "UPDATE": True, "ROUND": 0, "EVEN": True}
SIGNS = {"GAUSSIAN": False, "GRID": False, "UPDATE": False, "ROUND": 0, "EVEN": True}
FUSED = ("fma.", "mad.f32", "mad.rn.f32")


def check_compiled(text: str) -> None:
    """Nothing fused, no subnormal flushed, no register spilled, 8 or 16 bytes at a time."""
    assert not any(name in text for name in FUSED)
    assert ".ftz" not in text and ".local" not in text
    assert all(re.search(rf"{access}\.global\.v[24]\.b32", text) for access in ("ld", "st"))
    assert "add.rn.f32" in text and "mul.wide.u32" in text


@pytest.mark.slow
def test_no_variant_is_compiled_into_fused_operations(tmp_path):
    variants = [
        {"pointer": "*fp32", **NORMALS},
        {"pointer": "*fp32", **SIGNS},
        {"pointer": "*fp32", **NORMALS, "UPDATE": False},
        {"pointer": "*i16", **NORMALS, "GRID": False, "ROUND": 1},
        {"pointer": "*fp16", **NORMALS, "GRID": False, "ROUND": 2},
        {"pointer": "*i16", **SIGNS, "ROUND": 1},
        {"pointer": "*fp16", **SIGNS, "ROUND": 2},
    ]
    apart = [{"fusion": False, **variant} for variant in variants]
    fused, *texts = compiled(tmp_path, {"fusion": True, **variants[0]}, *apart)
    assert any(name in fused for name in FUSED)  # it would, were it allowed to
    for text in texts:
        check_compiled(text)
