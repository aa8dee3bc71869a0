"""Correlated noise as settings write it: `noise_correlation`, `noise_bands`, `hold_direction_for`."""

from __future__ import annotations

from typing import Any

from hf_dpzero.privacy.correlated.correlation import Correlation

CORRELATIONS = ("none", "toeplitz", "banded", "optimized", "tree")
BANDS = 32
"""`noise_bands` where none are given: within 3 % of `toeplitz` at 256 steps."""


def correlation_of(config: Any) -> Correlation | None:
    """The correlation that a `DPZeroConfig` asks for; None for independent noise."""
    if config.noise_correlation == "none":
        return None
    bands = (config.noise_bands or BANDS) if config.noise_correlation == "banded" else 0
    restart = 0 if config.first_order else max(config.hold_direction_for, 0)
    return Correlation(kind=config.noise_correlation, bands=bands, restart=restart)


def check_correlation(config: Any) -> None:
    """Refuses what has no account whatever the data, before there is any.

    Raises:
      ValueError: says what to use instead.
    """
    if config.noise_correlation == "none":
        return
    if config.method == "dpzero" and config.hold_direction_for == 1:
        raise ValueError(
            f"noise_correlation={config.noise_correlation!r} with method='dpzero' and a fresh direction "
            "in each step does harm: the noise of a step lies along its own direction, nearly "
            "orthogonal to those of other steps, so nothing cancels and the noise is only larger. Set "
            "hold_direction_for, e.g. to 64, or leave noise_correlation out."
        )
    if config.sampling != "fixed_batches":
        raise ValueError(
            f"noise_correlation={config.noise_correlation!r} with sampling={config.sampling!r}: its "
            "account needs to know in which steps an example takes part, and amplification by sampling "
            "does not hold for noise that is correlated over steps. Use sampling='fixed_batches' (each "
            "example once an epoch, no amplification claimed)."
        )
