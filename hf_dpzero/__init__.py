"""Differentially private zeroth-order fine-tuning as a Hugging Face Trainer plugin.

The names below are imported on first use (PEP 562), so `import hf_dpzero` costs next to nothing
and the mathematics can be used without transformers.

>>> import hf_dpzero
>>> hf_dpzero.PoissonSampler(num_examples=1000, expected_batch_size=10).sampling_probability
0.01
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "DPZeroConfig": "arguments",
    "DPZeroTrainer": "trainer",
    "Direction": "directions",
    "FixedSizeSampler": "sampling",
    "FullBatchSampler": "sampling",
    "InsecureSeededNoise": "noise",
    "NonPrivateMean": "mechanisms",
    "ParameterSpace": "perturbation",
    "PoissonSampler": "sampling",
    "PrivacyPlan": "plan",
    "PrivacyReport": "report",
    "Release": "trajectory",
    "ScalarMechanism": "mechanisms",
    "SecureNoise": "noise",
    "Trajectory": "trajectory",
    "TruncatedPoissonSampler": "sampling",
    "VectorMechanism": "mechanisms",
    "load_recipe": "recipe",
    "replay": "trajectory",
}

__all__ = [*sorted(_HOME), "__version__"]

if TYPE_CHECKING:
    from hf_dpzero.arguments import DPZeroConfig as DPZeroConfig
    from hf_dpzero.directions import Direction as Direction
    from hf_dpzero.mechanisms import NonPrivateMean as NonPrivateMean
    from hf_dpzero.mechanisms import ScalarMechanism as ScalarMechanism
    from hf_dpzero.mechanisms import VectorMechanism as VectorMechanism
    from hf_dpzero.noise import InsecureSeededNoise as InsecureSeededNoise
    from hf_dpzero.noise import SecureNoise as SecureNoise
    from hf_dpzero.perturbation import ParameterSpace as ParameterSpace
    from hf_dpzero.plan import PrivacyPlan as PrivacyPlan
    from hf_dpzero.recipe import load_recipe as load_recipe
    from hf_dpzero.report import PrivacyReport as PrivacyReport
    from hf_dpzero.sampling import FixedSizeSampler as FixedSizeSampler
    from hf_dpzero.sampling import FullBatchSampler as FullBatchSampler
    from hf_dpzero.sampling import PoissonSampler as PoissonSampler
    from hf_dpzero.sampling import TruncatedPoissonSampler as TruncatedPoissonSampler
    from hf_dpzero.trainer import DPZeroTrainer as DPZeroTrainer
    from hf_dpzero.trajectory import Release as Release
    from hf_dpzero.trajectory import Trajectory as Trajectory
    from hf_dpzero.trajectory import replay as replay


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
