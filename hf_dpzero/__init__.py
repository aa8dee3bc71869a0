"""Differentially private zeroth-order fine-tuning as a Hugging Face Trainer plugin.

The names below are imported on first use (PEP 562), so `import hf_dpzero` costs next to nothing
and the mathematics can be used without transformers.

>>> import hf_dpzero
>>> hf_dpzero.PoissonSampler(num_examples=1000, expected_batch_size=10).sampling_probability
0.01
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "DPZeroConfig": "settings.config",
    "DPZeroMixin": "training.trainer",
    "DPZeroSeq2SeqConfig": "training.dpzero_trainer",
    "DPZeroSeq2SeqTrainer": "training.dpzero_trainer",
    "DPZeroTrainer": "training.dpzero_trainer",
    "Direction": "perturbation.directions",
    "FixedBatchesSampler": "privacy.sampling",
    "FixedSizeSampler": "privacy.sampling",
    "FullBatchSampler": "privacy.sampling",
    "InsecureSeededNoise": "privacy.noise",
    "NonPrivateMean": "privacy.mechanisms",
    "ParameterSpace": "perturbation.parameter_space",
    "PoissonSampler": "privacy.sampling",
    "PrivacyPlan": "privacy.plan",
    "PrivacyReport": "reporting.privacy_report",
    "Release": "ledger.trajectory",
    "ScalarMechanism": "privacy.mechanisms",
    "SecureNoise": "privacy.noise",
    "Trajectory": "ledger.trajectory",
    "TruncatedPoissonSampler": "privacy.sampling",
    "VectorMechanism": "privacy.mechanisms",
    "load_recipe": "recipes.recipe",
    "register_objective": "objectives.heads",
    "replay": "ledger.replay",
}

__all__ = [*sorted(_HOME), "__version__"]

if TYPE_CHECKING:
    from hf_dpzero.ledger.replay import replay as replay
    from hf_dpzero.ledger.trajectory import Release as Release
    from hf_dpzero.ledger.trajectory import Trajectory as Trajectory
    from hf_dpzero.objectives.heads import register_objective as register_objective
    from hf_dpzero.perturbation.directions import Direction as Direction
    from hf_dpzero.perturbation.parameter_space import ParameterSpace as ParameterSpace
    from hf_dpzero.privacy.mechanisms import NonPrivateMean as NonPrivateMean
    from hf_dpzero.privacy.mechanisms import ScalarMechanism as ScalarMechanism
    from hf_dpzero.privacy.mechanisms import VectorMechanism as VectorMechanism
    from hf_dpzero.privacy.noise import InsecureSeededNoise as InsecureSeededNoise
    from hf_dpzero.privacy.noise import SecureNoise as SecureNoise
    from hf_dpzero.privacy.plan import PrivacyPlan as PrivacyPlan
    from hf_dpzero.privacy.sampling import FixedBatchesSampler as FixedBatchesSampler
    from hf_dpzero.privacy.sampling import FixedSizeSampler as FixedSizeSampler
    from hf_dpzero.privacy.sampling import FullBatchSampler as FullBatchSampler
    from hf_dpzero.privacy.sampling import PoissonSampler as PoissonSampler
    from hf_dpzero.privacy.sampling import TruncatedPoissonSampler as TruncatedPoissonSampler
    from hf_dpzero.recipes.recipe import load_recipe as load_recipe
    from hf_dpzero.reporting.privacy_report import PrivacyReport as PrivacyReport
    from hf_dpzero.settings.config import DPZeroConfig as DPZeroConfig
    from hf_dpzero.training.dpzero_trainer import DPZeroSeq2SeqConfig as DPZeroSeq2SeqConfig
    from hf_dpzero.training.dpzero_trainer import DPZeroSeq2SeqTrainer as DPZeroSeq2SeqTrainer
    from hf_dpzero.training.dpzero_trainer import DPZeroTrainer as DPZeroTrainer
    from hf_dpzero.training.trainer import DPZeroMixin as DPZeroMixin


def _is_no_missing_kernel(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")


# bitsandbytes, which transformers loads, says at each start that an optional kernel is not installed.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_no_missing_kernel)


def _refuse_older_releases() -> None:
    from importlib import metadata

    from packaging.requirements import Requirement

    with contextlib.suppress(metadata.PackageNotFoundError):  # a checkout that was not installed
        for asked in map(Requirement, metadata.requires(__name__) or ()):
            has = "" if asked.marker else metadata.version(asked.name)  # a marker: an extra's
            if has and not asked.specifier.contains(has, prereleases=True):
                raise ImportError(
                    f"{asked.name} {has} is not what hf_dpzero was tested with: "
                    f"pip install -U '{asked.name}{asked.specifier}'."
                )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOME[name].startswith(("settings", "training")):  # the mathematics asks for less
        _refuse_older_releases()
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
