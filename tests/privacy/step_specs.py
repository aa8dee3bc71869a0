"""Steps as the accounting sees them, for tests of several modules."""

from __future__ import annotations

from hf_dpzero.privacy.events import StepSpec

FIXED = {"sampling": "fixed_size_without_replacement", "relation": "replace_one"}
TRUNCATED = {"sampling": "truncated_poisson", "max_batch_size": 32}
FULL = {"sampling": "full_batch", "batch_size": 1000.0}
LEMMA = {**FULL, "relation": "replace_one", "accountant": "advanced_composition"}


def spec(sigma: float = 2.0, n: int = 1000, batch: float = 16.0, **changes) -> StepSpec:
    """n = 1000, B = 16 (q = 0.016), sigma = 2, Poisson, add or remove one."""
    step = {
        "sampling": "poisson",
        "num_examples": n,
        "batch_size": batch,
        "noise_multiplier": sigma,
    }
    return StepSpec(**{**step, **changes})
