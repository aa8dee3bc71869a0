"""What all mechanisms share: what they state, neighbouring relations, checks of fields, JSON."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from hf_dpzero.privacy.described import Described, check_count
from hf_dpzero.privacy.discretization import noised_on_grid
from hf_dpzero.privacy.noise import NoiseSource
from hf_dpzero.privacy.sampling import KEY_BYTES

Relation = Literal["add_or_remove_one", "replace_one", "replace_special"]
RELATIONS: tuple[Relation, ...] = ("add_or_remove_one", "replace_one", "replace_special")

MIN_NOISE_MULTIPLIER = 2.0**-10
MAX_NOISE_MULTIPLIER = 2.0**25
MAX_CLIP = 2.0**64

DISPLACEMENT = 2.0**-8
"""Another place moves what a row adds by this share of the radius: A2 of `batches.placement`."""

MOST_ROWS = 256
"""Rows that a unit of several may have in a step; as many displaced rows cost half of the radius."""


@dataclass(frozen=True, kw_only=True)
class MechanismBase(Described):
    """What every mechanism says about itself.

    A mechanism noises the sum of its examples' contributions. Its sensitivities are stated in clipping
    norms C.

    Attributes:
      replayable: whether the weights follow from what a run writes down.
      distribution: "gaussian", "laplace" or "none".
      sensitivity_add_remove: sensitivity of the sum when one example is added or removed.
      sensitivity_replace: the same when one example is replaced by another.
      noise_draws: coordinates of a step that receive discrete noise (1 where it is dense).
      expected_batch_size: B, public.
    """

    expected_batch_size: float

    replayable: ClassVar[bool]
    sensitivity_add_remove: ClassVar[int] = 1
    sensitivity_replace: ClassVar[int] = 2

    def __post_init__(self) -> None:
        self._as_floats("expected_batch_size")
        if not (math.isfinite(self.expected_batch_size) and self.expected_batch_size > 0):
            raise ValueError(
                f"expected_batch_size={self.expected_batch_size} must be finite and positive; "
                "it is the public divisor of every release."
            )

    @property
    def divisor(self) -> float:
        """Returns what the noised sum is divided by: B."""
        return self.expected_batch_size

    @property
    def dense_draws(self) -> int:
        """Returns how many coordinates of a step have noise that is rounded to a grid afterwards."""
        return 0

    @property
    def values_per_release(self) -> int:
        """Returns how many numbers a step writes to the ledger."""
        return 0

    def _as_floats(self, *fields: str) -> None:
        # 64 becomes 64.0, so that equal mechanisms have equal JSON and equal digests.
        for field in fields:
            object.__setattr__(self, field, float(getattr(self, field)))

    def _check_total(self, total: Sequence[float], count: int) -> None:
        if len(total) != count:
            raise ValueError(
                f"total has {len(total)} entries, this mechanism sums {count}; pass the summed result "
                "of clip_sum."
            )


@dataclass(frozen=True, kw_only=True)
class NoisedSum(MechanismBase):
    """A sum of bounded contributions with noise.

    Guarantee: with a noise multiplier above 0, a step is a Gaussian (Laplace) mechanism whose noise
    scale is `effective_noise_multiplier` times the sensitivity under add-or-remove; `events.py` states
    what that costs.

    Attributes:
      clip: C, the sensitivity of the sum when one example is added or removed.
      noise_multiplier: sigma; 0 releases without noise and is not private.
      rows_per_unit: m, rows that one example of the plan stands for, at most (`batches.units`).
    """

    clip: float
    noise_multiplier: float
    rows_per_unit: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._as_floats("clip", "noise_multiplier")
        check_count("rows_per_unit", self.rows_per_unit)
        if self.rows_per_unit > MOST_ROWS:
            raise ValueError(f"rows_per_unit={self.rows_per_unit} is above {MOST_ROWS}: lower it.")
        if not (1 / MAX_CLIP <= self.clip <= MAX_CLIP):
            raise ValueError(
                f"clip={self.clip} must be finite and positive (between 2^-64 and 2^64); "
                "use method mezo (NonPrivateMean) to train without clipping."
            )
        check_multiplier("noise_multiplier", self.noise_multiplier)

    @property
    def caveats(self) -> tuple[str, ...]:
        """Returns what the accounting idealises, for the report."""
        return ()

    @property
    def private(self) -> bool:
        """Says whether noise is added at all."""
        return self.noise_multiplier > 0

    @property
    def radius(self) -> float:
        """Returns C / (1 + m 2^-8), the clip; the rest of C pays for m displaced rows.

        >>> from hf_dpzero.privacy.mechanisms import DPSGD
        >>> DPSGD(clip=257.0, noise_multiplier=1.0, expected_batch_size=8).radius
        256.0
        """
        return self.clip / (1 + self.rows_per_unit * DISPLACEMENT)

    @property
    def noise_scale(self) -> float:
        """Returns the noise scale on the sum, sigma * C, in the units of `clip`."""
        return self.noise_multiplier * self.clip

    @property
    def effective_noise_multiplier(self) -> float:
        """Returns the noise scale of a step's one Gaussian (Laplace) over R."""
        return self.noise_multiplier / self.sensitivity_add_remove

    def sensitivity(self, relation: Relation) -> float:
        """Returns the sum's sensitivity (L2; L1 for Laplace noise) under `relation`, in units of `clip`.

        One example more adds at most `radius` and may put `rows_per_unit` other rows in other places,
        each of which moves what is added by at most 2^-8 radii (`batches.placement`): together C. A
        replaced example is one less and one more.
        """
        return self.clip * sensitivity_factor(
            relation, self.sensitivity_add_remove, self.sensitivity_replace
        )

    def to_dict(self) -> dict[str, Any]:
        """As `Described.to_dict`, without `rows_per_unit` where an example is a row."""
        values = super().to_dict()
        if self.rows_per_unit == 1:
            del values["rows_per_unit"]
        return values


@dataclass(frozen=True, kw_only=True)
class DenseNoise(NoisedSum):
    """A noised sum with Gaussian noise on each of d coordinates, released on a public grid.

    Guarantee: what the floating-point arithmetic behind it may reveal is bounded by `dense_slack`, which
    the accounting adds. The noise is not written down, so a run cannot be replayed from its releases.

    Attributes:
      dimension: at least d, the number of trainable coordinates; the slack grows with its square root.
    """

    dimension: int = 1 << 27

    replayable: ClassVar[bool] = False
    distribution: ClassVar[str] = "gaussian"
    noise_draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("dimension", self.dimension)

    @property
    def dense_draws(self) -> int:
        return self.dimension

    def release_part(
        self, total: np.ndarray, noise: NoiseSource, step: int, part: int
    ) -> np.ndarray:
        """Returns the noised mean of some coordinates.

        Args:
          total: of the clipped sum, float64 [n], over all processes.
          noise: the source.
          step: only insecure sources use it.
          part: index of the chunk; only insecure sources use it.

        Returns:
          (total + noise) / divisor, float64 [n]; the numerator is on `dense_grid` of the deviation of
          the source's draws. Without noise the plain mean.
        """
        if not self.private:
            return total / self.divisor
        scale, place = self.noise_scale * noise.base_deviation, (len(total), step, part)
        return noised_on_grid(total, noise.normals(*place), scale, noise.dither(*place)) / (
            self.divisor
        )


AVERAGED_CAVEAT = (
    "clipping='averaged' moves a group's mean by up to 2C, so the accounting uses half of the stated "
    "noise multiplier"
)
"""What the noise multiplier of averaged clipping means; for the report."""


class KeyedGroups:
    """Gives each example one of `clip_groups` groups.

    Attributes:
      clip_groups: k >= 1.
    """

    clip_groups: int = 1

    def group_of(self, indices: Sequence[int] | np.ndarray, key: bytes) -> np.ndarray:
        """Returns the group of each example, in 0..k-1: a function of its index and the key.

        Args:
          indices: positions in the data set, [B].
          key: secret (the run's sampler key); see `gradient.py`.

        Returns:
          int64 [B].

        Raises:
          ValueError: a key that is not 32 bytes long.

        >>> KeyedGroups().group_of([3, 5], key=bytes(32)).tolist()
        [0, 0]
        """
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"group key of {len(key)} bytes given; use the run's sampler key, {KEY_BYTES} bytes."
            )
        label = b"hf_dpzero.gradient_groups." + key
        digests = (
            hashlib.shake_256(label + int(i).to_bytes(8, "little")).digest(8) for i in indices
        )
        words = [int.from_bytes(digest, "little") for digest in digests]
        return np.array([word % self.clip_groups for word in words], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class AlongDirections(MechanismBase):
    """A sum of finite differences along directions that a step's examples share.

    Attributes:
      num_directions: K.
    """

    num_directions: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_directions", self.num_directions)


@dataclass(frozen=True, kw_only=True)
class NotNoised(MechanismBase):
    """A plain sum over B: no clip, no noise, no privacy. What is not finite counts as zero.

    Attributes:
      private_counterpart: the method to use where privacy is wanted.
    """

    private_counterpart: ClassVar[str]
    private: ClassVar[bool] = False
    clip: ClassVar[float] = math.inf
    noise_multiplier: ClassVar[float] = 0.0
    effective_noise_multiplier: ClassVar[float] = 0.0
    noise_scale: ClassVar[float] = 0.0
    noise_draws: ClassVar[int] = 0
    distribution: ClassVar[str] = "none"

    @property
    def caveats(self) -> tuple[str, ...]:
        return (f"method {self.name} is not private",)

    def sensitivity(self, relation: Relation) -> float:
        # nothing bounds what one example contributes
        return math.inf * sensitivity_factor(relation)


def check_multiplier(name: str, sigma: float) -> float:
    """Returns a noise multiplier, 0 or one that the accounting of discrete noise covers.

    Raises:
      ValueError: it is not 0 and out of [2^-10, 2^25].
    """
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"{name}={sigma} must be finite and >= 0.")
    # 0 is a run without privacy, which says so; between it and 2^-10 the slack would not be small
    if sigma > 0 and not MIN_NOISE_MULTIPLIER <= sigma <= MAX_NOISE_MULTIPLIER:
        raise ValueError(
            f"{name}={sigma} is outside [2^-10, 2^25], where the discrete noise on the "
            "grid is accounted as Gaussian; use 0 for no noise, or a larger (smaller) multiplier."
        )
    return sigma


def check_dimension(mechanism: MechanismBase, dimension: int) -> None:
    """Refuses more noisy coordinates than the plan accounts for.

    Raises:
      ValueError: `dimension` exceeds that of a mechanism with dense noise.
    """
    if isinstance(mechanism, DenseNoise) and dimension > mechanism.dimension:
        raise ValueError(
            f"{dimension} trainable coordinates, but the privacy plan was made for at most "
            f"{mechanism.dimension}: choose what is trained before the plan is made."
        )


def sensitivity_factor(relation: Relation, add_remove: int = 1, replace: int = 2) -> int:
    """Returns the sensitivity under `relation`, in clipping norms.

    Args:
      relation: replace_special counts as adding or removing: the special example contributes zero.
      add_remove: sensitivity when one example is added or removed.
      replace: sensitivity when one example is replaced by another.

    Raises:
      ValueError: an unknown relation.

    >>> sensitivity_factor("add_or_remove_one"), sensitivity_factor("replace_one")
    (1, 2)
    """
    if relation not in RELATIONS:
        raise ValueError(f"neighboring_relation={relation!r} is unknown; use one of {RELATIONS}.")
    return replace if relation == "replace_one" else add_remove
