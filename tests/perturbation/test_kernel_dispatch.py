"""Kernels over a flat tensor: compiled against plain torch and exact arithmetic, bit for bit."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_dpzero.perturbation import directions
from hf_dpzero.perturbation.directions import DITHER_STEP, Direction
from hf_dpzero.perturbation.kernels import dispatch, numba_kernels, torch_reference
from hf_dpzero.perturbation.kernels.dispatch import Members, Sweep
from hf_dpzero.perturbation.kernels.torch_reference import (
    Decay,
    half_precision,
    stochastically_rounded,
)
from hf_dpzero.perturbation.parameter_space import ParameterSpace

HALVES = [torch.bfloat16, torch.float16]
KINDS = ["signs", "normals", "bfloat16 signs", "bfloat16 normals", "float16 signs",
         "float16 normals"]  # fmt: skip


class Case(NamedTuple):
    """A source and arguments; `run` applies any of the backends."""

    kind: str
    source: Tensor
    offset: int
    rest: tuple[Any, ...]
    members: Members | None
    decay: Decay | None = None

    def run(self, backend: Any, out: Tensor, source: Tensor, pieces: Any = None) -> Tensor:
        added = self.sweep
        function = backend.sweep if backend is dispatch else getattr(backend, added.name)
        function(added, out, source, self.offset, self.members, pieces)
        return out

    @property
    def sweep(self) -> Sweep:
        keys, *numbers = self.rest
        if self.kind in ("signs", "normals"):
            return Sweep(f"add_{self.kind}", keys, numbers, decay=self.decay)
        return Sweep("add_rounded", keys, numbers[2:], tuple(numbers[:2]), self.decay)

    def decaying(self, after: int) -> Case:
        """The same with weight decay before that term (before all of them where sums are rounded)."""
        draw, m = np.random.default_rng(1), 1 if self.members is None else len(self.members.starts)
        rates, dithers = 0.1 * draw.random(m), draw.integers(0, 1 << 32, m, dtype=np.uint32)
        spacing, rates = (2.0 ** -draw.integers(20, 26, m)).astype(np.float32), rates.astype("f4")
        if self.source.dtype == torch.float32:
            return self._replace(decay=Decay(after, -rates / spacing, spacing, dithers))
        return self._replace(decay=Decay(0, rates, spacing, dithers))

    def of(self, backend: Any) -> Tensor:
        """Out of place, on a fresh tensor of other values."""
        return self.run(backend, torch.full_like(self.source, 7.0), self.source)


def case(kind: str, n: int, offset: int, terms: int, members: Members | None = None, seed: int = 0):
    """Random coefficients of many sizes; on the grids where the function wants that."""
    draw, m = np.random.default_rng(seed), 1 if members is None else len(members.starts)
    keys = draw.integers(0, 1 << 32, (terms, 4), dtype=np.uint32)
    dithers = draw.integers(0, 1 << 32, (terms, m), dtype=np.uint32)
    spacing = (2.0 ** -draw.integers(20, 26, m)).astype(np.float32)
    if kind in ("signs", "normals"):
        steps = draw.standard_normal(n) * 2.0**16
        source = torch.from_numpy(np.rint(steps).astype(np.float32) * np.float32(2.0**-20))
    if kind == "signs":
        amounts = draw.integers(-1000, 1000, (terms, m)) * spacing
        return Case(kind, source, offset, (keys, amounts.astype(np.float32)), members)
    if kind == "normals":
        new, old = (draw.standard_normal((2, terms, m)) * 1000).astype(np.float32)
        update = draw.standard_normal((terms, m)).astype(np.float32)
        update[1::2] = 0.0  # a term without an update
        return Case(kind, source, offset, (keys, new, old, update, spacing, dithers), members)
    sizes = 10.0 ** draw.integers(-8, 3, n)
    source = torch.from_numpy(draw.standard_normal(n) * sizes).to(getattr(torch, kind.split()[0]))
    coefficients = (draw.standard_normal(terms) * 1e-3).astype(np.float32)
    rest = (keys, kind.endswith("normals"), coefficients, dithers[0])
    return Case(kind, source, offset, rest, members)


def same_bits(a: Tensor, b: Tensor) -> bool:
    raw = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.view(raw), b.view(raw))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("terms", [1, 2, 17])
def test_compiled_equals_torch_bit_for_bit(kind, terms):
    """Sizes and offsets on, before and after the ends of rows and tiles, and beyond 2^32."""
    sizes = [0, 1, 31, 32, 33, 768, 4096, 5000, 12_321]
    offsets = [0, 32, 96, 4064, 4096, (1 << 33) + 96, (1 << 41) - 32]
    for i, n in enumerate(sizes):
        offset = offsets[(2 * i + terms) % 7]
        made = case(kind, n, offset, terms, seed=i)
        expected, before = made.of(torch_reference), made.source.clone()
        assert same_bits(made.of(dispatch), expected), (n, offset)
        assert same_bits(made.source, before)
        for backend in (dispatch, torch_reference):
            in_place = made.source.clone()
            assert same_bits(made.run(backend, in_place, in_place), expected), (n, offset)
        assert n < 32 or not same_bits(expected, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [4064, (1 << 33) + 96])
def test_members_get_their_own_parameters(kind, offset):
    """As each member alone, and as torch; members within and across tiles."""
    starts, n = [0, 32, 320, 320 + 4096, 9024], 9024 + 77
    members = Members.at(starts, n)
    made = case(kind, n, offset, 3, members)
    found = made.of(dispatch)
    assert same_bits(found, made.of(torch_reference))
    for m, (start, end) in enumerate(zip(starts, [*starts[1:], n])):
        own = [v[..., m : m + 1] for v in made.rest[1:] if isinstance(v, np.ndarray)]
        if made.source.dtype != torch.float32:
            own = [*made.rest[1:3], made.rest[3][m : m + 1]]
        alone = Case(kind, made.source[start:end], offset + start, (made.rest[0], *own), None)
        assert same_bits(alone.of(dispatch), found[start:end]), m


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_before_a_term(kind):
    """Compiled as in torch: of one tensor, of members and from within a row, in place too."""
    starts, n = [0, 32, 320, 320 + 4096, 9024], 9024 + 77
    for made in (
        case(kind, 12_321, (1 << 33) + 96, 3),
        case(kind, n, 4064, 3, Members.at(starts, n)),
        case(kind, 5000, 7, 3),
    ):
        for after in (0, 2):
            decayed = made.decaying(after)
            row = made.offset % 32
            # Torch's own dithers begin where the tensor does.
            added = decayed.sweep.shifted(np.uint32(-row * DITHER_STEP % 2**32))
            whole = torch.cat([made.source.new_zeros(row), made.source])
            getattr(torch_reference, added.name)(
                added, whole, whole.clone(), made.offset - row, made.members, None
            )
            expected = whole[row:]
            assert same_bits(decayed.of(dispatch), expected)
            in_place = made.source.clone()
            assert same_bits(decayed.run(dispatch, in_place, in_place), expected)
            assert not same_bits(made.of(dispatch), expected)


def test_members_at_maps_rows_and_starts():
    members = Members.at([0, 32, 128, 128, 160], 200)  # the third is empty
    assert members.rows.tolist() == [0, 1, 1, 1, 3, 4, 4]
    assert members.rows.dtype == np.int32
    assert members.starts.tolist() == [0, 32, 128, 128, 160]
    assert members.starts.dtype == np.int64
    assert Members.at([0], 33).rows.tolist() == [0, 0]
    for n in (1, 31, 32, 33, 4097):
        assert len(Members.at([0], n).rows) == math.ceil(n / 32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [96, 5120])
def test_pieces_are_rows_of_the_whole(kind, width, monkeypatch):
    """Rows of an embedding, in any order and repeated, compiled and in plain torch."""
    rows = np.array([3, 0, 7, 3, 5])
    made = case(kind, 9 * width, (1 << 33) + 64, 2)
    dense = made.of(dispatch).view(9, width)[rows]
    source = made.source.view(9, width)[rows].reshape(-1)
    for backend in (numba_kernels, None):
        monkeypatch.setattr(dispatch, "_cpu_kernels", lambda backend=backend: backend)
        found = made.run(dispatch, torch.zeros_like(source), source, rows * width)
        assert same_bits(found.view(5, width), dense)
        found = made.run(dispatch, torch.zeros_like(source), source, (rows + 1) * width)
        assert not same_bits(found.view(5, width), dense)


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("compiled", [True, False])
def test_coordinates_are_the_directions(gaussian, compiled, monkeypatch):
    """From any start, aligned or not, in the units of the direction; norms in exact integers."""
    if not compiled:
        monkeypatch.setattr(dispatch, "_cpu_kernels", lambda: None)
    key, unit = np.arange(4, dtype=np.uint32), 2.0**-21 if gaussian else 1.0
    for start, count in [(0, 1), (7, 100), (4090, 5000), ((1 << 33) + 31, 1), (32, 0)]:
        found = dispatch.coordinates(key, gaussian, start, count, torch.device("cpu"))
        assert found.dtype == torch.float32
        expected = directions.coordinates(key, gaussian, start, count)
        assert torch.equal(found.double() / unit, torch.from_numpy(expected).double())


def test_sums_of_squares_are_the_same_integers():
    """Over several places; and no sum that int64 holds can overflow, at the widest normal."""
    key, places = np.arange(4, dtype=np.uint32), [(17, 300_000), (400_000, 3)]
    z = np.concatenate([directions.coordinates(key, True, *place) for place in places])
    exact = int((z.astype(object) ** 2).sum())
    assert dispatch.sum_of_squared_normals(key, places, torch.device("cpu")) == exact
    assert directions.sum_of_squared_normals(key, places) == exact
    widest = round(directions.largest_coordinate("gaussian") * 2**21)
    assert directions._PART * widest**2 < 2**63  # what is summed in int64 cannot overflow
    assert 4 * 2**13 * widest**2 < 2**63  # four words of a program's tiles, on a GPU


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def both(kind: str, n: int, offset: int, terms: tuple[int, int], members: Members | None = None):
    """Settled values, and the terms of an update and of a perturbation by other directions."""
    made = [case(kind, n, offset, count, members, seed) for seed, count in enumerate(terms)]
    update = made[0].decaying(0) if terms == (2, 2) else made[0]
    return made[0].source, update.sweep, made[1].sweep


def in_two_sweeps(settled: Tensor, offset: int, update: Sweep, new: Sweep, members: Any):
    """What `perturb_rounded` leaves in (out, settled), in plain torch, one sum after the other."""
    moved, out = settled.clone(), torch.empty_like(settled)
    torch_reference.add_rounded(update, moved, moved, offset, members, None)
    torch_reference.add_rounded(new, out, moved, offset, members, None)
    return out, moved


def in_other_memory(values: Tensor, first: int) -> Tensor:
    """A copy that begins `first` elements after the beginning of a cache line."""
    memory = values.new_empty(values.numel() + 64)
    aligned = -memory.data_ptr() % 64 // 2
    place = memory[aligned + first : aligned + first + values.numel()]
    return place.copy_(values)


@pytest.mark.parametrize("kind", KINDS[2:])
@pytest.mark.parametrize("terms", [(1, 1), (1, 3), (17, 1), (2, 2)])
def test_update_and_perturbation_at_once_are_two_sweeps_bit_for_bit(kind, terms):
    """Sizes and offsets as above; members that begin and end within and across tiles."""
    starts = [0, 32, 320, 320 + 4096, 9024]
    parts = [(0, 0), (31, 64), (33, 4064), (4096, 1 << 33), (12_321, 96), (20_000, 4096 * 5)]
    for n, offset in [*parts, (9101, 32)]:
        members = Members.at(starts, n) if n == 9101 else None
        settled, update, new = both(kind, n, offset, terms, members)
        expected = in_two_sweeps(settled, offset, update, new, members)
        found = torch.full_like(settled, 7.0), settled.clone()
        moved = dispatch.perturb_rounded(*found, offset, new, update, members)
        assert moved == 6 * n
        assert all(map(same_bits, found, expected)), (n, offset)
        assert n < 32 or not same_bits(found[1], settled)
        alone = torch.full_like(settled, 7.0)
        assert dispatch.perturb_rounded(alone, found[1], offset, new, None, members) == 4 * n
        assert same_bits(alone, expected[0]) and same_bits(found[1], expected[1])


@pytest.mark.parametrize("kind", KINDS[2:])
def test_perturbing_at_once_within_a_row_and_without_numba_takes_two_sweeps(kind, monkeypatch):
    for offset in (0, 7, 4096 - 1):
        settled, update, new = both(kind, 5000, offset, (1, 2))
        rows = torch.cat([settled.new_zeros(offset % 32), settled])
        whole = in_two_sweeps(rows, offset - offset % 32, *(
            terms.shifted(np.uint32(-(offset % 32) * DITHER_STEP % 2**32))
            for terms in (update, new)
        ), None)  # fmt: skip
        expected = [part[offset % 32 :] for part in whole]
        for backend in (numba_kernels, None):
            monkeypatch.setattr(dispatch, "_cpu_kernels", lambda backend=backend: backend)
            found = torch.full_like(settled, 7.0), settled.clone()
            moved = dispatch.perturb_rounded(*found, offset, new, update)
            assert moved == (6 if backend and offset == 0 else 8) * 5000
            assert all(map(same_bits, found, expected)), (offset, backend)


@pytest.mark.parametrize("first", [0, 1, 2, 32])
def test_large_tensors_written_past_the_caches_have_the_same_bits(first, threads):
    """From the beginning of a cache line, and from elsewhere; the neighbours are left alone."""
    threads(2)
    n, offset = (1 << 17) + 4096 + 160, 96
    settled, update, new = both("bfloat16 signs", n, offset, (1, 1))
    expected = in_two_sweeps(settled, offset, update, new, None)
    memory = torch.full((n + 128,), 7.0, dtype=torch.bfloat16)
    aligned = -memory.data_ptr() % 64 // 2
    out = memory[aligned + first : aligned + first + n]
    held = in_other_memory(settled, first)
    dispatch.perturb_rounded(out, held, offset, new, update)
    assert same_bits(out, expected[0]) and same_bits(held, expected[1])
    assert bool((memory[: aligned + first] == 7).all())
    assert bool((memory[aligned + first + n :] == 7).all())
    out.fill_(7.0)
    dispatch.perturb_rounded(out, held, offset, new)
    assert same_bits(out, expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_number_of_threads_does_not_matter(kind, threads):
    """300 000 elements from the middle of a tile on, split in 1, 2 and 4."""
    n, offset = 300_000, 4096 * 5 + 96
    for members in (None, Members.at([0, 131_072 + 64, 131_072 + 128], n)):
        made = case(kind, n, offset, 2, members)
        threads(1)
        one = made.of(dispatch)
        for count in (2, 4):
            threads(count)
            assert same_bits(made.of(dispatch), one)


def test_an_error_in_any_thread_is_raised(threads):
    def work(begin: int, end: int) -> None:
        if begin:
            raise ZeroDivisionError

    threads(2)
    with pytest.raises(ZeroDivisionError):
        numba_kernels.in_parallel(work, 1 << 20, 0)


def test_work_put_together_is_done_at_the_end_by_threads_that_start_once(threads):
    """Shares of tensors of several sizes; a small one, which no thread shares, is done at once."""
    threads(3)
    done: list[tuple[str, int, int, int]] = []

    def note(name: str) -> Callable[[int, int], None]:
        return lambda a, b: done.append((name, a, b, threading.get_ident()))

    with dispatch.together():
        numba_kernels.in_parallel(note("large"), 1 << 20, 0, later=True)
        numba_kernels.in_parallel(note("middle"), 2 << 16, 0, later=True)  # two shares
        numba_kernels.in_parallel(note("now"), 1 << 20, 0)
        assert len(done) == 3 and done.clear() is None
        numba_kernels.in_parallel(note("small"), 100, 0, later=True)
        assert [entry[0] for entry in done] == ["small"]
    for name, size, shares in [("large", 1 << 20, 3), ("middle", 2 << 16, 2), ("small", 100, 1)]:
        parts = sorted(entry[1:3] for entry in done if entry[0] == name)
        assert len(parts) == shares and parts[0][0] == 0 and parts[-1][1] == size
        assert [a for a, _ in parts[1:]] == [b for _, b in parts[:-1]]
    assert len({entry[3] for entry in done}) <= 3
    numba_kernels.in_parallel(note("after"), 1 << 20, 0, later=True)
    assert sum(entry[0] == "after" for entry in done) == 3


def test_work_put_together_is_dropped_after_an_error(threads):
    """Half of a move that failed may not be made up for, nor wait for the next one."""
    threads(2)
    done: list[int] = []

    def note(begin: int, end: int) -> None:
        done.append(begin)

    with pytest.raises(KeyError), dispatch.together():
        numba_kernels.in_parallel(note, 1 << 20, 0, later=True)
        raise KeyError
    with dispatch.together():
        pass
    assert done == []


def test_without_numba_the_engine_runs_in_plain_torch():
    """A fresh process that cannot import numba gives the golden trajectory's bits."""
    program = (
        "import sys; sys.modules['numba'] = None; sys.path[:0] = sys.argv[1:]\n"
        "import json, test_trajectory as t\n"
        "from hf_dpzero.perturbation.kernels import dispatch\n"
        "assert dispatch._cpu_kernels() is None and 'triton' not in sys.modules\n"
        "print(json.dumps({d: t.golden(d) for d in t.DISTRIBUTIONS}))\n"
    )
    here = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program, str(here / "ledger"), str(here)],
        capture_output=True, text=True, cwd=here.parent, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    stored = json.loads((here / "golden" / "trajectory.json").read_text())
    assert json.loads(done.stdout) == stored


def test_add_signs_is_the_exact_sum():
    """Grid multiples: the float32 result equals the sum of rationals at every element."""
    made = case("signs", 500, 4064, 3)
    keys, amounts = made.rest
    us = [torch_reference.coordinates(key, False, 4064, 500).tolist() for key in keys]
    found = made.of(dispatch).tolist()
    for e, start in enumerate(made.source.tolist()):
        exact = Fraction(start) + sum(
            Fraction(float(a)) * u[e] for a, u in zip(amounts[:, 0], us, strict=True)
        )
        assert Fraction(found[e]) == exact


def float32(value: float) -> float:
    return float(np.float32(value))


def test_add_normals_is_the_documented_formula():
    """Element by element in Python's integers and float32 products, as the docstring says."""
    made, offset = case("normals", 300, 4064, 2), 4064
    keys, new, old, update, spacing, dithers = made.rest
    zs = [torch_reference.coordinates(key, True, offset, 300).tolist() for key in keys]
    found = made.of(dispatch).tolist()
    for e, total in enumerate(made.source.tolist()):
        for t in range(2):
            z = zs[t][e] * 2.0**-21
            c = float32(z * float(update[t, 0]))
            d = (int(dithers[t, 0]) + e * DITHER_STEP) % 2**32
            fraction = float32(float32(c - math.floor(c)) + (d >> 8) * 2.0**-24)
            n = round(float32(z * float(new[t, 0]))) - round(float32(z * float(old[t, 0])))
            total = float32(total + (n + math.floor(c) + math.floor(fraction)) * float(spacing[0]))
        assert found[e] == total


@pytest.mark.parametrize("dtype", HALVES)
def test_add_rounded_is_the_documented_formula(dtype):
    """Products and sums rounded one by one: a fused multiply-add would differ somewhere."""
    made = case(f"{str(dtype)[6:]} normals", 4000, 4064, 2)
    keys, _, coefficients, dithers = made.rest
    zs = [torch_reference.coordinates(key, True, 4064, 4000) * np.float32(2.0**-21) for key in keys]
    total = made.source.float().numpy()
    fused = total.copy()
    for z, c in zip(zs, coefficients, strict=True):
        z = z.astype(np.float32)
        total = (total + (z * c).astype(np.float32)).astype(np.float32)
        fused = (fused.astype(np.float64) + z.astype(np.float64) * float(c)).astype(np.float32)
    d = (int(dithers[0]) + np.arange(4000) * DITHER_STEP) % 2**32
    expected = half_precision(torch.from_numpy(total), torch.from_numpy(d), dtype)
    assert same_bits(made.of(dispatch), expected)
    assert not np.array_equal(fused, total)


def all_dithers(dtype: torch.dtype) -> Tensor:
    """One 32-bit dither for each of the values that the rounding distinguishes, in the middle."""
    bits = 16 if dtype == torch.bfloat16 else 13
    return (torch.arange(1 << bits) << (32 - bits)) + (1 << (31 - bits))


def neighbours(value: Fraction, dtype: torch.dtype) -> tuple[Fraction, Fraction]:
    """The grid of `dtype` around a value of its range: subnormals evenly spaced below the least."""
    digits, least = (8, -126) if dtype == torch.bfloat16 else (11, -14)
    power = max(least, math.frexp(float(abs(value)))[1] - 1) if value else least
    spacing = Fraction(2) ** (power - digits + 1)
    low = math.floor(value / spacing) * spacing
    return (low, low) if low == value else (low, low + spacing)


def mean_rounded(value: float, dtype: torch.dtype, rounding: Callable = half_precision) -> Fraction:
    """Over all dithers, in exact arithmetic."""
    dithers = all_dithers(dtype)
    rounded = rounding(torch.full((dithers.numel(),), value), dithers, dtype).double()
    values, counts = rounded.unique(return_counts=True)
    total = sum(Fraction(v) * c for v, c in zip(values.tolist(), counts.tolist()))
    return total / dithers.numel()


def nearest(values: Tensor, dithers: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype)


VALUES = {
    torch.bfloat16: [1.0 + 0.3 * 2**-7, 0.999, 1e-3, 1e-30, 200.7, 1.0, 0.0, 3e-39],
    torch.float16: [1.0003, 0.99999, 1e-3, 6.2e-5, 5e-5, 4e-8, 1e-9, 2.0**-24, 2.0**-14,
                    2.0**-14 - 2.0**-26, 60_001.7, 65_504.0, 0.0],
}  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_unbiased_over_all_dithers(dtype):
    """The mean over all dithers is the value to one dither's share; only its neighbours occur. Nearest
    rounding would be far off."""
    dithers = all_dithers(dtype)
    for value, sign in itertools.product(map(float32, VALUES[dtype]), (1.0, -1.0)):
        low, high = neighbours(Fraction(sign * value), dtype)
        rounded = half_precision(torch.full((dithers.numel(),), sign * value), dithers, dtype)
        assert {Fraction(v) for v in rounded.double().unique().tolist()} <= {low, high}
        bias = abs(mean_rounded(sign * value, dtype) - Fraction(sign * value))
        assert bias <= (high - low) / dithers.numel()
        assert low == high or math.copysign(1.0, float(rounded[0])) == sign
    value = float32(1.0 + 0.3 * (2**-7 if dtype == torch.bfloat16 else 2**-10))
    low, high = neighbours(Fraction(value), dtype)
    bias = abs(mean_rounded(value, dtype, nearest) - Fraction(value))
    assert bias > 1000 * (high - low) / all_dithers(dtype).numel()


@pytest.mark.parametrize("dtype", HALVES)
def test_values_of_the_type_itself_never_move(dtype):
    """All 65 536 bit patterns but infinities and NaN, under the smallest and largest dithers."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    finite = patterns[patterns.isfinite()]
    assert finite.numel() == (65_280 if dtype == torch.bfloat16 else 63_488)
    key, zero = np.zeros((1, 4), np.uint32), np.zeros(1, np.float32)
    for d in (0, 0x80000000, 0xFFFFFFFF):
        rounded = half_precision(finite.float(), torch.full(finite.shape, d), dtype)
        assert same_bits(rounded, finite)
        out = torch.empty_like(finite)
        rest = (key, False, zero, np.array([d], np.uint32))
        Case("rounded", finite, 0, rest, None).run(dispatch, out, finite)
        unsigned = lambda t: torch.where(t == 0, torch.zeros_like(t), t)  # noqa: E731  -0 + 0 = 0
        assert same_bits(unsigned(out), unsigned(finite))


def test_float16_saturates_instead_of_overflowing():
    for value in (65_504.0, 65_519.9, 65_520.0, 1e6, 3e38):
        values = torch.tensor([value, -value])
        for d in (0, 0xFFFFFFFF):
            rounded = half_precision(values, torch.full((2,), d), torch.float16)
            assert rounded.tolist() == [65_504.0, -65_504.0]
        out, source = torch.empty(64).half(), torch.full((64,), 65_504.0).half()
        key, c = np.zeros((1, 4), np.uint32), np.array([value], np.float32)
        rest = (key, False, c, np.array([0xFFFFFFFF], np.uint32))
        Case("rounded", source, 0, rest, None).run(dispatch, out, source)
        raised = torch.from_numpy(torch_reference.coordinates(key[0], False, 0, 64)) > 0
        assert (out[raised] == 65_504.0).all()
        assert out.isfinite().all()


@pytest.mark.parametrize("value", [0.3, -0.3, 17.0, -2.5, 1e-4, 8_000_000.5])
def test_stochastic_rounding_to_integers_is_unbiased(value):
    """Over 2^16 equidistant dithers: the mean is the value to one dither's share."""
    value = float32(value)
    rounded = stochastically_rounded(torch.full((1 << 16,), value), all_dithers(torch.bfloat16))
    assert set(rounded.tolist()) <= {math.floor(value), math.floor(value) + 1.0}
    assert abs(float(rounded.double().mean()) - value) <= 2.0**-16
    if value != round(value):
        assert abs(round(value) - value) > 2.0**-16  # nearest rounding would fail


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "sphere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moves_are_those_of_one_thread(threads, kind, dtype):
    """Also where a move needs what threads compute: a sphere's norm."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(size, generator=generator) for size in [(1 << 17, 3), (300_001,), (40,)]]
    found = []
    for number in (1, 2):
        threads(number)
        named = [(str(i), value.to(dtype, copy=True)) for i, value in enumerate(made)]
        space = ParameterSpace(named, distribution=kind, smoothing=1e-2)
        for step in range(2):
            u = Direction(5, step)
            for scale in (1e-2, -1e-2):
                space.move_to_(((u, scale),))
                found.append([value.clone() for _, value in named])
            space.step_([u], [0.1], defer=True)
        space.settle_()
        found.append([value.clone() for _, value in named])
    half = len(found) // 2
    assert not torch.equal(found[0][0], found[half - 1][0])
    for one, two in zip(found[:half], found[half:], strict=True):
        assert all(map(torch.equal, one, two))
