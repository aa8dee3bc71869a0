"""Which correlation the noise of a run has: the setting behind a factorisation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hf_dpzero.privacy.correlated_noise import factorization as factorizations
from hf_dpzero.privacy.correlated_noise.factorization import Factorization
from hf_dpzero.privacy.correlated_noise.participation import epoch_sensitivity

KINDS = ("independent", "toeplitz", "banded", "optimized", "tree")
"""What `Correlation.kind` may be."""


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """How the noise of a step depends on that of earlier steps.

    Attributes:
      kind: a factorisation of `factorization.py`; "independent" is the noise of DP-SGD.
      bands: of "banded": draws that a step's noise is made of; 0 elsewhere.
      restart: steps after which noise begins anew; 0 for never.

    Raises:
      ValueError: an unknown kind, bands where there are none or none where there must be some.
    """

    kind: str = "banded"
    bands: int = 0
    restart: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"noise_correlation={self.kind!r} is unknown; use one of {KINDS}.")
        if (self.kind == "banded") != (self.bands > 0):
            raise ValueError(
                f"noise_bands={self.bands} with noise_correlation={self.kind!r}: give at least 1 for "
                "'banded', and none for the others."
            )
        if self.restart < 0:
            raise ValueError(f"restart={self.restart} must be at least 0.")

    def factorization(self, steps: int) -> Factorization:
        """A = B C for a run of so many steps; the same object for the same arguments."""
        return _factorization(self, steps)

    def sensitivity(self, steps: int, steps_per_epoch: int, count: int | None = None) -> float:
        """Of the first `count` steps (default all), in clipping norms, under add-or-remove.

        Args:
          steps: R of the run.
          steps_per_epoch: an example takes part in every such step.
          count: 0 <= count <= steps.
        """
        return epoch_sensitivity(self.factorization(steps), steps_per_epoch, count)

    def words(self) -> str:
        """In a few words, for reports.

        >>> Correlation(kind="banded", bands=32).words()
        'banded, each noise made of the last 32 draws'
        """
        made_of = {
            "independent": "independent, one draw a step",
            "toeplitz": "Toeplitz square root, each noise made of all draws so far",
            "banded": f"banded, each noise made of the last {self.bands} draws",
            "optimized": "optimized factorization, each noise made of all draws so far",
            "tree": "binary tree",
        }
        anew = f", anew every {self.restart} steps" if self.restart else ""
        return made_of[self.kind] + anew

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; `correlation_from_dict` reads it back."""
        return dataclasses.asdict(self)


def correlation_from_dict(values: Mapping[str, Any]) -> Correlation:
    """Inverse of `to_dict`; unknown keys are errors."""
    known = {field.name for field in dataclasses.fields(Correlation)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"a correlation has no fields {unknown}; it has {sorted(known)}.")
    return Correlation(**values)


@lru_cache(maxsize=32)
def _factorization(correlation: Correlation, steps: int) -> Factorization:
    size = min(steps, correlation.restart or steps)
    if correlation.kind == "banded":
        block = factorizations.banded(size, correlation.bands)
    else:
        block = getattr(factorizations, correlation.kind)(size)
    return block if size == steps else factorizations.Restarted(block, steps)
