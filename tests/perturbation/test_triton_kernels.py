"""The Triton passes against plain torch, bit for bit: in the interpreter, and on CUDA.

`test_kernel_dispatch.py` holds plain torch against the documented formulas.
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
from typing import Any

import numpy as np
import pytest
import torch
from test_kernel_dispatch import HALVES, KINDS, Case, case, same_bits

from hf_dpzero.perturbation import directions
from hf_dpzero.perturbation.kernels import dispatch, torch_reference
from hf_dpzero.perturbation.kernels.dispatch import Members, Parts, Sweep

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the triton package"
)

ROOT = Path(__file__).resolve().parents[2]
DEVICE_CODE = "hf_dpzero.perturbation.kernels.triton_kernels"
LOADED_ANEW = (DEVICE_CODE, "hf_dpzero.perturbation.kernels.triton_device")


@pytest.fixture(scope="module", params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the tensors of a test live; the device code is loaded anew for the one or the other."""
    interpreted = request.param == "interpreter"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
        before = {name: sys.modules.pop(name, None) for name in LOADED_ANEW}
        importlib.import_module(DEVICE_CODE)
        yield torch.device("cpu" if interpreted else "cuda")
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def kernels() -> Any:
    """The module as the fixture has loaded it."""
    return sys.modules[DEVICE_CODE]


LOW = 0xFFFFFFFF
KEYS = np.array([[0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], np.uint32)


def assert_same(
    device: torch.device, made: Case, pieces: Any = None, in_place: bool = True
) -> torch.Tensor:
    """The bits are those of plain torch on the CPU, which are returned."""
    expected = made.run(torch_reference, torch.empty_like(made.source), made.source, pieces)
    theta = made.source.to(device, copy=True)
    out = theta if in_place else torch.full_like(theta, 9.0)
    assert same_bits(made.run(kernels(), out, theta, pieces).cpu(), expected)
    assert in_place or same_bits(theta.cpu(), made.source)
    return expected


PLACES = [(1, 0), (33, 4064), (4096, 96), (150, (1 << 32) - 64), (4200, (1 << 45) + 160)]
"""(elements, offset): tails, tiles cut at either end, coordinates beyond 2^32."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "offset"), PLACES)
def test_one_term_of_one_tensor(device, kind, count, offset):
    made = case(kind, count, offset, 1)
    assert count < 32 or not same_bits(assert_same(device, made), made.source)
    if kind == "normals":  # without an update another variant is launched
        keys, new, old, update, *rest = made.rest
        assert_same(device, made._replace(rest=(keys, new, old, 0 * update, *rest)))


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_before_a_term(device, kind):
    """Of one tensor, of one term, and of members."""
    for made in (case(kind, 33, 4064, 1), case(kind, COUNT, 96, 3, Members.at(STARTS, COUNT))):
        decayed = made.decaying(min(1, len(made.rest[0]) - 1))
        assert not same_bits(assert_same(device, decayed), assert_same(device, made))


STARTS, COUNT = [0, 32, 96, 4192, 4256], 4256 + 70
"""Members of 1, 33, 4096, 64 and 70 elements, each from a multiple of 32 on."""


@pytest.mark.parametrize(("kind", "terms"), [*((kind, 3) for kind in KINDS), ("signs", 1)])
def test_several_terms_and_members(device, kind, terms):
    made = case(kind, COUNT, 4128, terms, Members.at(STARTS, COUNT))
    assert_same(device, made, in_place=False)


def sweep_of(kind: str, members: int, terms: int) -> Sweep:
    made = case(
        kind, 32 * members, 0, terms, Members.at([32 * m for m in range(members)], 32 * members)
    )
    return (made.decaying(terms - 1) if terms > 1 else made).sweep


@pytest.mark.parametrize(("kind", "terms"), [*((kind, 2) for kind in KINDS), ("signs", 1)])
def test_tensors_at_places_of_their_own_in_one_launch(device, kind, terms):
    """Tails, an empty one, tiles cut at either end, one that lies where nothing is aligned."""
    sizes, columns = [64, 5000, 33, 0, 4096], [3, 0, 1, 2, 4]
    offsets = [0, 4064, 9000 * 32, 32, (1 << 33) + 96]
    sweep = sweep_of(kind, 5, terms)
    sources = [case(kind, size, 0, 1, seed=n).source for n, size in enumerate(sizes)]
    buffer = torch.full((70,), 3.0).to(sources[0].dtype)
    buffer[1:65] = sources[0]
    theta = [buffer.to(device)[1:65], *(source.to(device, copy=True) for source in sources[1:])]
    outs = [torch.full_like(t, 9.0) for t in theta]
    for written in (outs, theta):  # out of place, then in place
        kernels().add_each(sweep, Parts(written, theta, offsets, columns))
        for n, out in enumerate(written):
            expected = torch.empty_like(sources[n])
            place = expected, sources[n], offsets[n], None, None
            getattr(torch_reference, sweep.name)(sweep.of(columns[n]), *place)
            assert same_bits(out.cpu(), expected), n


@pytest.mark.parametrize("programs", [1, 2048])
def test_sums_of_squares_are_exact_over_gaps_and_runs(device, programs, monkeypatch):
    """Rows with gaps between tensors, a place far away, programs with several tiles."""
    monkeypatch.setattr(kernels(), "_PROGRAMS", programs)
    for places in ([(0, 5000), (5024, 33), (5088, 64), ((1 << 33) + 96, 7)], []):
        exact = directions.sum_of_squared_normals(KEYS[0], places)
        assert kernels().sum_of_squared_normals(KEYS[0], places, device) == exact
    if device.type == "cuda":
        places = [(96, 20_000_000)]
        exact = dispatch.sum_of_squared_normals(KEYS[0], places, torch.device("cpu"))
        assert kernels().sum_of_squared_normals(KEYS[0], places, device) == exact


PIECES = np.array([42 * 96, 5000 * 96, 0])
"""Rows 42 (which straddles two tiles), 5000 and 0 of a tensor with rows of 96."""


@pytest.mark.parametrize(
    ("kind", "size"), [("signs", 4128), ("normals", 90), ("bfloat16 normals", 90)]
)
def test_pieces_have_the_coordinates_and_dithers_of_the_whole_tensor(device, kind, size):
    assert_same(device, case(kind, len(PIECES) * size, (1 << 33) + 64, 2), PIECES)


def normals(
    count: int, new: float = 0.0, old: float = 0.0, update: float = 0.0, dither: int = 5
) -> Case:
    """On the grid of integers, from 0."""
    numbers = (np.full((1, 1), number, np.float32) for number in (new, old, update))
    rest = (KEYS, *numbers, np.ones(1, np.float32), np.full((1, 1), dither, np.uint32))
    return Case("normals", torch.zeros(count), 0, rest, None)


@pytest.mark.parametrize("scale", [2.0**20, 1.3 * 2**20, 2.0**24, 2.0**-130, 1e-9], ids=str)
def test_roundings_at_the_edges(device, scale):
    """z is an integer times 2^-21: ties to even at 2^20; products that contraction into the rounding
    would give other integers; no fractions; next to nothing."""
    assert_same(device, normals(2000, new=scale))
    assert_same(device, normals(2000, old=scale, update=scale, dither=0xFFFFFF00))


def test_a_fraction_that_rounds_to_one_meets_the_largest_uniform(device):
    """(step - floor) + U = 2 for a negative step near 0 with U = 1 - 2^-24: floor gives 2, not 1."""
    (z,) = directions.coordinates(KEYS[0], True, 0, 1)
    assert assert_same(device, normals(1, update=-1e-9 * np.sign(z), dither=LOW)).item() == -1 + 2


@pytest.mark.parametrize("value", [0.0, 2e-8, 5e-5, 1.0, 1000.3, 65000.0, 3e38])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_at_the_edges(device, dtype, value):
    """-0 + u value, u = +-1: signs of zero, subnormals and saturation, at the ends of the dither."""
    amount, source = np.array([value], np.float32), torch.full((64,), -0.0, dtype=dtype)
    for dither in (0, LOW):
        rest = (KEYS, False, amount, np.array([dither], np.uint32))
        expected = assert_same(device, Case("rounded", source, 0, rest, None))
        assert 0 < expected.signbit().sum() < 64


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_product_is_rounded_before_it_is_added(device, dtype):
    """z c - z c is 0 where both products are rounded; a fused multiply-add leaves a rounding error."""
    both = np.array([1e3 / 3, -1e3 / 3], np.float32)
    rest = (np.repeat(KEYS, 2, axis=0), True, both, np.array([5], np.uint32))
    assert not assert_same(device, Case("rounded", torch.zeros(200).to(dtype), 0, rest, None)).any()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_nothing_beside_the_tensor_is_written(device, dtype):
    buffer = torch.full((9000,), 7.0, dtype=dtype, device=device)
    part, keys, start = buffer[4000:4070], KEYS, np.zeros(1, np.uint32)
    one = np.ones((1, 1), np.float32)
    kinds = {
        "signs": (30 * one,), "normals": (one, 0 * one, one, one[0], start[None]),
    } if dtype == torch.float32 else {
        "half normals": (True, one[0], start), "half signs": (False, 30 * one[0], start),
    }  # fmt: skip
    for kind, rest in kinds.items():
        Case(kind, part, 4064, (keys, *rest), None).run(kernels(), part, part)
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
                SimpleNamespace(grid=grid, table=given[2], integers=given[9:], options=options)
            )

        return launch


def test_what_is_launched(device, monkeypatch):
    """A program for each tile; no table for one term of one tensor; one launch for all pieces; never
    contraction."""
    recorder, one = Recorder(), np.ones((1, 1), np.float32)
    triton_launch = kernels()
    monkeypatch.setattr(triton_launch, "walk", recorder)

    def launched() -> SimpleNamespace:
        assert len(recorder.launches) == 1
        assert recorder.launches[0].options["enable_fp_fusion"] is False
        return recorder.launches.pop()

    keys = KEYS

    def signs(theta: torch.Tensor, offset: int) -> Case:
        return Case("signs", theta, offset, (keys, one), None)

    for count, offset, programs in [
        (1, 0, 1), (4096, 0, 1), (4096, 32, 2), (4097, 0, 2), (32, 4064, 1), (64, 4064, 2),
    ]:  # fmt: skip
        theta = torch.zeros(count, device=device)
        signs(theta, offset).run(triton_launch, theta, theta)
        launch = launched()
        assert launch.grid == (programs,)
        assert launch.table is None
        assert all(-(2**31) <= word < 2**31 for word in launch.integers[5:])  # one compiled variant
        assert [word & LOW for word in launch.integers[5:10]] == [*keys[0].tolist(), 0x3F800000]
    theta, members = torch.zeros(COUNT, device=device), Members.at(STARTS, COUNT)
    made = case("normals", COUNT, 0, 3, members)
    made.run(triton_launch, theta, theta)
    launch = launched()
    assert launch.table.dtype == torch.int32 and launch.table.numel() == 3 * 4 + 5 * 3 * 5
    assert launch.integers[:2] == (3, 5)
    half = torch.zeros(len(PIECES), 96, dtype=torch.bfloat16, device=device)
    start = np.zeros(1, np.uint32)
    rest = keys, True, one[0], start
    Case("half", half, 0, rest, None).run(triton_launch, half, half, PIECES)
    assert launched().grid == (len(PIECES), 2)
    empty = torch.empty(0, device=device)
    signs(empty, 0).run(triton_launch, empty, empty)
    assert not recorder.launches
    for out, source, offset in [(half, half, 0), (theta, theta, 31), (theta, theta[:5], 0)]:
        with pytest.raises(AssertionError):
            signs(source, offset).run(triton_launch, out, source)


def test_where_the_kernel_runs(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not dispatch.triton_runs_on("cpu")
    assert dispatch.triton_runs_on("cuda") <= torch.cuda.is_available()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.triton_runs_on("cpu") and not dispatch.triton_runs_on("meta")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not dispatch.triton_runs_on("cpu")


@pytest.mark.gpu
def test_a_pass_neither_waits_nor_allocates(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.delitem(sys.modules, DEVICE_CODE, raising=False)
    theta = torch.zeros(1 << 22, device="cuda")
    members = Members.at([0, 1 << 21], 1 << 22)
    made, triton = case("normals", 1 << 22, 0, 3, members), importlib.import_module(DEVICE_CODE)
    made.run(triton, theta, theta)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.run(triton, theta, theta)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 1 << 16


COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from hf_dpzero.perturbation.kernels import triton_kernels as code

def ptx(pointer, fusion, **variant):
    names, absent = code.walk.arg_names, {"rows", "starts", "pieces"}
    absent |= {"out", "source"} if variant["ALIGNED"] else {"table", "parts", "owners"}
    if not variant["GAUSSIAN"]:
        absent = absent | {"normals"}
    kinds = dict.fromkeys(names, "i32") | {"out": pointer, "source": pointer, "normals": "*i64"}
    kinds |= {"table": "*i32", "parts": "*i64", "owners": "*i32"}
    constants = dict.fromkeys(absent) | variant
    kinds |= dict.fromkeys(constants, "constexpr")
    where = {name: (place,) for place, name in enumerate(names)}
    aligned = {where[n]: [["tt.divisibility", 16]] for n in names if kinds[n].startswith("*")}
    source = ASTSource(
        code.walk, {n: kinds[n] for n in names}, {where[n]: v for n, v in constants.items()}, aligned
    )
    warps = code.NORMALS_WARPS if variant["GAUSSIAN"] else code.SIGNS_WARPS
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


NORMALS = {
    "GAUSSIAN": True,
    "GRID": True,
    "UPDATE": True,
    "DECAY": 0,
    "ROUND": 0,
    "EVEN": True,
    "ALIGNED": False,
}
SIGNS = {
    "GAUSSIAN": False,
    "GRID": False,
    "UPDATE": False,
    "DECAY": 0,
    "ROUND": 0,
    "EVEN": True,
    "ALIGNED": False,
}
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
        {"pointer": "*fp32", **NORMALS, "ALIGNED": True},
        {"pointer": "*i16", **SIGNS, "ROUND": 1, "ALIGNED": True},
        {"pointer": "*fp32", **NORMALS, "ALIGNED": True, "DECAY": 5},
        {"pointer": "*fp32", **SIGNS, "ALIGNED": True, "DECAY": 1},
        {"pointer": "*i16", **SIGNS, "ROUND": 1, "ALIGNED": True, "DECAY": 2},
        {"pointer": "*fp16", **SIGNS, "ROUND": 2, "ALIGNED": True, "DECAY": 2},
    ]
    apart = [{"fusion": False, **variant} for variant in variants]
    fused, *texts = compiled(tmp_path, {"fusion": True, **variants[0]}, *apart)
    assert any(name in fused for name in FUSED)  # it would, were it allowed to
    for text in texts:
        check_compiled(text)
