"""Every mechanism by name: what a plan may hold and a description may name.

| name | module |
|---|---|
| dpzero, dpzero-averaged, mezo, dpgd-0th | `scalar.py` |
| dp-sgd, dp-adamw, sgd, adamw | `gradient.py` |
| dpzero-adaptive, dp-sgd-adaptive, dp-adamw-adaptive | `adaptive.py` |

`vertex.py` stands apart: draws from the exponential mechanism, which no plan of a training run holds.
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_dpzero.privacy.described import read
from hf_dpzero.privacy.mechanisms.adaptive import (
    AdaptiveDPAdamW,
    AdaptiveDPSGD,
    AdaptiveScalarMechanism,
)
from hf_dpzero.privacy.mechanisms.base import RELATIONS, NoisedSum, NotNoised, Relation
from hf_dpzero.privacy.mechanisms.gradient import DPSGD, DPAdamW, PlainAdamW, PlainSGD
from hf_dpzero.privacy.mechanisms.scalar import (
    AveragedScalarMechanism,
    NonPrivateMean,
    ScalarMechanism,
    VectorMechanism,
)

__all__ = [
    "DPSGD",
    "MECHANISMS",
    "RELATIONS",
    "AdaptiveDPAdamW",
    "AdaptiveDPSGD",
    "AdaptiveScalarMechanism",
    "AveragedScalarMechanism",
    "DPAdamW",
    "GradientReleases",
    "Mechanism",
    "NoisedSum",
    "NonPrivateMean",
    "NotNoised",
    "PlainAdamW",
    "PlainSGD",
    "Relation",
    "ScalarMechanism",
    "ScalarReleases",
    "VectorMechanism",
    "mechanism_from_dict",
]

ScalarReleases = (
    ScalarMechanism | AveragedScalarMechanism | AdaptiveScalarMechanism | NonPrivateMean
)
"""Mechanisms whose releases are scalars along public directions."""

GradientReleases = DPSGD | DPAdamW | AdaptiveDPSGD | AdaptiveDPAdamW | PlainSGD | PlainAdamW
"""Mechanisms that weigh per-example gradients."""

Mechanism = ScalarReleases | VectorMechanism | GradientReleases

MECHANISMS: dict[str, type[Mechanism]] = {
    cls.name: cls
    for cls in (
        ScalarMechanism,
        NonPrivateMean,
        VectorMechanism,
        DPSGD,
        DPAdamW,
        PlainSGD,
        PlainAdamW,
        AveragedScalarMechanism,
        AdaptiveScalarMechanism,
        AdaptiveDPSGD,
        AdaptiveDPAdamW,
    )
}
"""A new one is a dataclass, a row here and a row in the contract tests."""


def mechanism_from_dict(values: Mapping[str, object]) -> Mechanism:
    """Reads the mechanism that `to_dict` described; an unknown name and unknown keys are errors.

    >>> mechanism_from_dict({"name": "mezo", "expected_batch_size": 4.0}).private
    False
    """
    return read(MECHANISMS, "mechanism", values)
