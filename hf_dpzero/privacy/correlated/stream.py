"""The noise of a run's steps from base draws that can be made again: C^{-1} Z, row by row.

Base draws come from a secret key by step, so that no R x d numbers are kept, and a resumed run has the
draws that its earlier steps used. The key is as secret as the noise: whoever has it can subtract it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from hf_dpzero.privacy.correlated.matrices import Factorization, groups_of
from hf_dpzero.privacy.noise import NoiseSource, SecureNoise, normal_quantiles
from hf_dpzero.privacy.sampling import KEY_BYTES

BLOCK = 1 << 12
"""Coordinates whose sums are made at a time; their draws stay in the processor's cache."""
AHEAD = 4
"""Steps whose sums of older draws are made at once: `groups_of` begins a group at that age."""
CACHE_BYTES = 1 << 30
"""Memory that base draws may take; those that do not fit are made again at every step."""


_Group = tuple[list[int], np.ndarray]
"""Draws, and their weights float64 [m]."""


def new_noise_key() -> bytes:
    """Draws 32 bytes of operating-system entropy."""
    return os.urandom(KEY_BYTES)


@dataclass(frozen=True)
class KeyedNoise(NoiseSource):
    """Normal draws that are a function of (key, step, part), for keys that nobody else knows.

    The bits are SHAKE-256(domain || key || step || part): to anyone without the key they are
    indistinguishable from independent uniform bits, as the batches of `sampling.py` are.

    Attributes:
      keys: (first step, key) of each start of the run, in order of steps. A start draws a key of its own
        for the steps that it adds: two runs that go on from one copied folder then share the noise
        of the steps that both have behind them, and no other.
    """

    keys: tuple[tuple[int, bytes], ...] = field(repr=False)

    name: ClassVar[str] = "os_entropy_key_exact"
    secure: ClassVar[bool] = True

    def __post_init__(self) -> None:
        first = [step for step, _ in self.keys]
        lengths = {len(key) for _, key in self.keys}
        if first[:1] != [0] or first != sorted(first) or lengths != {KEY_BYTES}:
            raise ValueError(
                f"keys for steps from {first} of {sorted(lengths)} bytes: give {KEY_BYTES} bytes each, "
                "in order of steps, the first from step 0."
            )

    def normals(self, size: int, step: int, part: int) -> np.ndarray:
        # the key of the start that added the step: earlier ones know it in every copy of the folder
        key = next(key for first, key in reversed(self.keys) if first <= step)
        address = key + step.to_bytes(8, "little") + part.to_bytes(8, "little")

        def words(count: int, domain: bytes = b"more") -> np.ndarray:
            label = b"hf_dpzero.noise." + domain.ljust(16, b"\0")
            stream = hashlib.shake_256(label + address).digest(8 * count)
            return np.frombuffer(stream, dtype="<u8")

        return normal_quantiles(words(size, b"normals"), words)

    def laplaces(self, size: int, step: int, part: int) -> np.ndarray:
        # from fresh entropy, never from the key
        return SecureNoise().laplaces(size, step, part)


class CorrelatedNoise(NoiseSource):
    """The noise C^{-1} Z of a run, one step a call, times the sensitivity of C.

    With Z of deviation 1, the noise of step t is `base_deviation` * sum_j (C^{-1})_tj Z_j: times a
    mechanism's noise scale sigma C it is the noise of ONE Gaussian mechanism of multiplier sigma over
    all steps of the run (`PrivacyPlan`).

    Args:
      base: independent draws that are a function of (step, part): `KeyedNoise`, or a seeded source in
        tests.
      factorization: of the run's steps.
      sensitivity: of C G under add-or-remove, in clipping norms.
      dimension: coordinates of a step, over all parts; says how many draws fit into memory.
      cache_bytes: memory for draws.

    Raises:
      ValueError: a sensitivity that is not positive.
    """

    correlated: ClassVar[bool] = True
    name: str  # type: ignore[misc]
    secure: bool  # type: ignore[misc]

    def __init__(
        self,
        base: NoiseSource,
        factorization: Factorization,
        sensitivity: float,
        dimension: int,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        if not sensitivity > 0:
            raise ValueError(f"sensitivity={sensitivity} must be positive.")
        self.base, self.factorization, self.base_deviation = base, factorization, sensitivity
        self.name, self.secure = base.name, base.secure
        most = max(len(factorization.kept(step)) for step in _sample(factorization.rounds))
        # sums that wait for later steps take as much memory as draws do
        fit = cache_bytes // (8 * max(dimension, 1)) - (AHEAD - 1)
        self.held = min(most, max(0, fit))
        self._parts: dict[int, _Draws] = {}

    def normals(self, size: int, step: int, part: int) -> np.ndarray:
        """Returns row `step` of C^{-1} Z, float64 [size]; the same for the same arguments.

        Error: each draw is within 2^-46 of an exactly normal one, and sums are in float64, over the
        groups of `matrices.groups_of` (`discretization.correlated_draws` counts that in).
        """
        row, needed = self.factorization.noise_row(step), self.factorization.kept(step)
        draws = self._parts.get(part)
        if draws is None or draws.size != size:
            draws = self._parts[part] = _Draws(self.held, size)

        def drawn(draw: int) -> np.ndarray:
            return self.base.normals(size, draw, part)

        total = draws.ahead.pop(step, None)
        if total is None:
            total = self._older(draws, step, drawn)
        for some, weights in self._groups(step)[1]:
            total += draws.weighted(some, weights, drawn)
        fresh = drawn(step)
        draws.keep(needed)
        if step in needed:
            draws.put(step, fresh)
        weight = float(row.weights[-1])
        total += fresh if weight == 1.0 else weight * fresh
        return total

    def _groups(self, step: int) -> tuple[list[_Group], list[_Group]]:
        """Returns the groups of a row but its newest draw: those of age `AHEAD` on; the rest."""
        row = self.factorization.noise_row(step)
        count = len(row.draws)
        older: list[_Group] = []
        rest: list[_Group] = []
        for group in groups_of(count)[:-1]:
            found = (row.draws[group].tolist(), row.weights[group])
            (older if group.stop <= count - AHEAD else rest).append(found)
        return older, rest

    def _older(self, draws: _Draws, step: int, drawn: Callable[[int], np.ndarray]) -> np.ndarray:
        """Sums a step's older draws; if they are held, those of the next steps with it."""
        draws.ahead.clear()
        last = min(step + AHEAD, self.factorization.rounds)
        jobs = [self._groups(later)[0] for later in range(step, last)]
        held = [draws.holds(groups) for groups in jobs]
        if held[0] and jobs[0]:
            jobs = jobs[: [*held, False].index(False)]
            first, *others = draws.held_sums(jobs)
            draws.ahead = dict(enumerate(others, start=step + 1))
            return first
        total = np.zeros(draws.size)
        for some, weights in jobs[0]:
            total += draws.weighted(some, weights, drawn)
        return total

    def dither(self, size: int, step: int, part: int) -> np.ndarray | None:
        # of the base: Laplace draws that no other step has
        return self.base.laplaces(size, step, part)


class _Draws:
    """Base draws of one part of the coordinates that later rows need: rows of a matrix.

    Neighbouring draws lie in neighbouring rows where they can, so that they are multiplied at once.
    `ahead` has sums of older draws for steps to come.
    """

    def __init__(self, capacity: int, size: int) -> None:
        self.size = size
        self.matrix = np.zeros((capacity, size))
        self.ahead: dict[int, np.ndarray] = {}
        self.slots: dict[int, int] = {}
        self.taken: dict[int, int] = {}

    def holds(self, groups: Sequence[_Group]) -> bool:
        return all(draw in self.slots for some, _ in groups for draw in some)

    def held_sums(self, jobs: Sequence[Sequence[_Group]]) -> list[np.ndarray]:
        """Returns for each job the sum of its groups' sums, in order, float64 [size]; all are held."""
        runs = [[self._runs(draws, weights) for draws, weights in groups] for groups in jobs]
        totals = [np.zeros(self.size) for _ in jobs]
        for start in range(0, self.size, BLOCK):
            block = slice(start, start + BLOCK)
            for total, groups in zip(totals, runs, strict=True):
                for pieces in groups:
                    total[block] += sum(
                        weights @ self.matrix[rows, block] for rows, weights in pieces
                    )
        return totals

    def _runs(self, draws: list[int], weights: np.ndarray) -> list[tuple[slice, np.ndarray]]:
        slots = np.array([self.slots[draw] for draw in draws])
        cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
        return [
            (slice(int(slots[a]), int(slots[a]) + b - a), weights[a:b])
            for a, b in itertools.pairwise(cuts)
        ]

    def weighted(
        self, draws: list[int], weights: np.ndarray, drawn: Callable[[int], np.ndarray]
    ) -> np.ndarray:
        """Returns sum_i weights[i] Z[draws[i]]; makes and puts draws that are not held."""
        total = np.zeros(self.size)
        for draw, weight in zip(draws, weights.tolist(), strict=True):
            if draw in self.slots:
                total += weight * self.matrix[self.slots[draw]]
            else:
                again = drawn(draw)
                total += weight * again
                self.put(draw, again)
        return total

    def keep(self, draws: Sequence[int]) -> None:
        for draw in self.slots.keys() - set(draws):
            del self.taken[self.slots.pop(draw)]

    def put(self, draw: int, values: np.ndarray) -> None:
        # held if there is room
        if draw in self.slots or len(self.taken) == len(self.matrix):
            return
        slot = draw % len(self.matrix)
        while slot in self.taken:
            slot = (slot + 1) % len(self.matrix)
        self.slots[draw], self.taken[slot] = slot, draw
        self.matrix[slot] = values


def _sample(rounds: int) -> list[int]:
    """Returns steps among which is the one that needs most draws afterwards."""
    powers = [2**k - 2 for k in range(1, rounds.bit_length() + 1)]
    return [step for step in {0, rounds - 2, rounds - 1, *powers} if 0 <= step < rounds]
