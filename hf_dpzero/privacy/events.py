"""What one step is to an accountant, and which combinations have a sound account at all.

The numbers come from Google's `dp-accounting` 0.6. This module decides which of its events and
accountants is a sound description of a run, and refuses every combination for which it has none.

| sampler | relation | noise | event, accountant |
|---|---|---|---|
| poisson | add_or_remove_one, replace_special | Gaussian | PoissonSampled(Gaussian), PLD or RDP |
| poisson | replace_one | Gaussian | the same event, PLD with REPLACE_ONE |
| poisson | add_or_remove_one, replace_special | Laplace | PoissonSampled(Laplace), PLD |
| truncated_poisson | all three | Gaussian | TruncatedSubsampledGaussian, PLD |
| fixed_size_without_replacement | replace_one | Gaussian | SampledWithoutReplacement, RDP |
| full_batch | all three | Gaussian | T Gaussians = one Gaussian; exact, or RDP |
| full_batch | all three | Laplace | Laplace, PLD or RDP |
| full_batch | replace_one | Gaussian | `advanced_composition`: Lemma 2.2 of the DPZero paper |

Notes on soundness
------------------
*What is assumed of a step.* Given the rest of the batch, the sum with an example lies within R of
the sum without it, whatever the example is (R is the sensitivity under add-or-remove), and the noise
has scale sigma R. Hence the sensitivity under replacement is at most 2R. Contributions clipped to C
have R = C; averaged clipping has R = 2C, but a replacement moves its sum by R only
(`sensitivity_replace` = 1). Only a full batch, where a replacement is all that happens, makes use of
that; with sampling the row for 2R is an upper bound, and is what is reported.

*Several noises in a step* (adaptive clipping: a sum and a count). Independent Gaussians with
multipliers z_1, z_2, .. on one example's contributions are, each divided by its scale, one vector
with unit noise that an example moves by at most (z_1^-2 + z_2^-2 + ..)^(1/2) = 1/z: one Gaussian
event of multiplier z on vectors, for every sampler and relation of the table. Nothing is lost where
one example attains all bounds at once. Accounting them as separate subsampled events would be
wrong in general: the same sampled batch feeds all of them.

*Vectors under replace_one.* With P = (1-q) N(0) + q N(a) and Q = (1-q) N(0) + q N(b), a and b in
the unit ball of R^K, every hockey-stick divergence is largest at b = -a, |a| = 1, which is the
one-dimensional pair that the PLD uses. Proof: for alpha >= 1, H_alpha(P || Q) is q times the
divergence of N(a) from w1 N(b) + w0 N(0), w1 + w0 >= 1. Its optimal set S = {c1 exp<b-a, x> +
c0 exp<-a, x> <= 1} has an outward normal that is a positive combination of b - a and -a, so by the
envelope theorem and the divergence theorem turning b away from a at fixed |b| increases the
divergence; once b points against a the problem is one-dimensional and grows with |a| and |b|.
alpha < 1 follows by exchanging P and Q.

*Truncation.* `TruncatedSubsampledGaussianDpEvent` describes what `TruncatedPoissonSampler` does: a
uniformly random subset, without replacement, of an oversized Poisson sample. Condition on the
sample of the other examples. If it is below the cap, the step is ordinary Poisson sampling. If not,
the batch without example x is a uniform cap-subset of the others, and with x, whatever the number
sampled, is that or, with the event's conditional probability, a uniform (cap-1)-subset plus x: a
batch in which x has replaced another example. That moves the sum by at most 2C from the untouched
batch and by at most 2C between two values of x, which the library bounds by a replace-one pair with
noise sigma / 2, under all three relations. The event's `dataset_size` counts x. For
add_or_remove_one a data set of n has neighbours on both sides, so epsilon is the larger of those
for dataset_size n and n + 1.

*Laplace vectors.* A product of Laplace shifts s_1..s_K (in units of b) is dominated by one shift
S = sum s_i. Proof for two, s >= t: the curve of one shift s is
d(eps; s) = max(0, 1 - e^((eps - s)/2), 1 - e^eps). By symmetry take eps >= 0. The product's
divergence is E[d(eps - L; s)] over the second loss |L| <= t <= s; there eps - L >= -s, so the third
branch is never the larger one, and pointwise
d(eps - L; s) <= max(0, 1 - e^((eps - t - s)/2)) = d(eps; s + t). Induction gives K, and Poisson
sampling preserves domination.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hf_dpzero.privacy.mechanisms.base import RELATIONS, Relation, sensitivity_factor

if TYPE_CHECKING:
    from dp_accounting import DpEvent, NeighboringRelation

Accountant = Literal["pld", "rdp", "advanced_composition"]
ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "advanced_composition")

LAPLACE_MARGIN = 1.0 - 1e-12
"""Shrinks b for the discreteness of the noise; see the docstring of `discretization.py`."""


_CHOICES: dict[str, tuple[str, ...]] = {
    "accountant": ACCOUNTANTS,
    "neighboring_relation": RELATIONS,
    "noise_distribution": ("gaussian", "laplace"),
    "sampling": ("poisson", "full_batch"),
}
"""What a refusal proposes instead, by setting."""

_EXTRA_ROW, _REPLACE = ("add_or_remove_one", "replace_special"), ("replace_one",)
ACCOUNTED: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("poisson", "gaussian"): {"pld": RELATIONS, "rdp": _EXTRA_ROW},
    ("poisson", "laplace"): {"pld": _EXTRA_ROW},
    ("truncated_poisson", "gaussian"): {"pld": RELATIONS},
    # Under add-or-remove a fixed batch size would reveal that an example is missing.
    ("fixed_size_without_replacement", "gaussian"): {"pld": _REPLACE, "rdp": _REPLACE},
    # Lemma 2.2 is stated for Gaussian noise, replacement and no sampling.
    ("full_batch", "gaussian"): {
        "pld": RELATIONS, "rdp": RELATIONS, "advanced_composition": _REPLACE,
    },
    ("full_batch", "laplace"): {"pld": RELATIONS, "rdp": RELATIONS},
}  # fmt: skip
"""The module docstring's table: (sampler, noise) -> accountant that may be asked for -> relations."""


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Everything about one step that its privacy depends on. Hashable.

    Attributes:
      sampling: name of the sampler.
      num_examples: n.
      batch_size: expected batch size B; q = B / n.
      max_batch_size: the cap of truncated_poisson, else 0.
      distribution: "gaussian" or "laplace".
      noise_multiplier: sigma, noise scale over R, the sensitivity under add-or-remove.
      num_directions: numbers that receive discrete noise in a step: K, or K + 1 with a count.
      relation: the neighbouring relation.
      accountant: the accountant asked for.
      sensitivity_replace: sensitivity under replacement over R: 2, or 1 for averaged clipping.
      dense_draws: coordinates of a step whose Gaussian noise is rounded to a grid afterwards.
    """

    sampling: str
    num_examples: int
    batch_size: float
    max_batch_size: int = 0
    distribution: str = "gaussian"
    noise_multiplier: float = 1.0
    num_directions: int = 1
    relation: Relation = "add_or_remove_one"
    accountant: Accountant = "pld"
    sensitivity_replace: int = 2
    dense_draws: int = 0

    @property
    def probability(self) -> float:
        """Returns q, the probability that one example is in the batch."""
        return 1.0 if self.sampling == "full_batch" else self.batch_size / self.num_examples

    @property
    def sensitivity(self) -> int:
        """Returns the sensitivity over R under the relation: 1, or with replace_one 2."""
        replace = self.sensitivity_replace if self.sampling == "full_batch" else 2
        return sensitivity_factor(self.relation, replace=replace)


Part = tuple[StepSpec, int]
"""Steps as the accounting sees them: one of a kind, and how many of them were taken."""


def check_sound(spec: StepSpec) -> None:
    """Refuses, with what to use instead, every combination that has no sound event here.

    Raises:
      ValueError: unknown names, or a combination outside the table in the module docstring.
    """
    chosen = {
        "accountant": spec.accountant,
        "neighboring_relation": spec.relation,
        "noise_distribution": spec.distribution,
        "sampling": spec.sampling,
    }
    for setting in ("neighboring_relation", "accountant"):
        if chosen[setting] not in _CHOICES[setting]:
            raise ValueError(
                f"{setting}={chosen[setting]!r} is unknown; use one of {_CHOICES[setting]}."
            )
    if _has_account(chosen):
        return
    ways = [
        f"{setting}={value!r}"
        for setting, values in _CHOICES.items()
        for value in values
        if value != chosen[setting] and _has_account({**chosen, setting: value})
    ]
    raise ValueError(
        f"{', '.join(f'{setting}={value!r}' for setting, value in chosen.items())} have no sound "
        f"account together; use {' or '.join(ways) or 'the default of one more of them'}."
    )


def _has_account(chosen: Mapping[str, str]) -> bool:
    accounted = ACCOUNTED.get((chosen["sampling"], chosen["noise_distribution"]), {})
    return chosen["neighboring_relation"] in accounted.get(chosen["accountant"], ())


def accountant_used(spec: StepSpec) -> str:
    """Names the accountant whose number is reported: `gaussian_exact`, `pld`, `rdp` or the lemma.

    Fixed-size sampling is always RDP (a PLD for it is not in the library); a Gaussian full batch
    under "pld" is exact, because T Gaussians compose to one.
    """
    if spec.sampling == "fixed_size_without_replacement":
        return "rdp"
    if (spec.accountant, spec.sampling, spec.distribution) == ("pld", "full_batch", "gaussian"):
        return "gaussian_exact"
    return spec.accountant


def library_relation(spec: StepSpec) -> NeighboringRelation:
    """Returns dp-accounting's relation."""
    from dp_accounting import NeighboringRelation

    laplace = spec.distribution == "laplace"  # events that carry the sensitivity of replace_one
    return NeighboringRelation["ADD_OR_REMOVE_ONE" if laplace else spec.relation.upper()]


def step_event(spec: StepSpec, smaller: bool = False) -> DpEvent:
    """Returns the `DpEvent` of one step, in the convention of the accountant that reads it.

    The PLD accountant doubles the sensitivity of a Gaussian by itself under REPLACE_ONE; the RDP
    accountant and Laplace events do not, so there it is divided out of the noise.

    Args:
      spec: the step.
      smaller: of truncated_poisson under add_or_remove_one the pair (n, n - 1) in place of (n + 1, n).

    Raises:
      ValueError: as in `check_sound`.
    """
    import dp_accounting as dp

    check_sound(spec)
    sigma, q = spec.noise_multiplier, spec.probability
    if spec.distribution == "laplace":
        inner: DpEvent = dp.LaplaceDpEvent(sigma * LAPLACE_MARGIN / spec.sensitivity)
        return inner if spec.sampling == "full_batch" else dp.PoissonSampledDpEvent(q, inner)
    if spec.sampling == "truncated_poisson":
        size = spec.num_examples + (spec.relation == "add_or_remove_one" and not smaller)
        return dp.TruncatedSubsampledGaussianDpEvent(size, q, spec.max_batch_size, sigma)
    doubled = accountant_used(spec) in ("pld", "gaussian_exact") and spec.relation == "replace_one"
    gaussian = dp.GaussianDpEvent(sigma / (spec.sensitivity / 2 if doubled else spec.sensitivity))
    if spec.sampling == "poisson":
        return dp.PoissonSampledDpEvent(q, gaussian)
    if spec.sampling == "fixed_size_without_replacement":
        return dp.SampledWithoutReplacementDpEvent(
            spec.num_examples, int(spec.batch_size), gaussian
        )
    return gaussian


def composed_event(parts: Sequence[Part], smaller: bool = False) -> DpEvent:
    """Returns the `DpEvent` of all steps of all parts; `smaller` is as in `step_event`."""
    import dp_accounting as dp

    events = [dp.SelfComposedDpEvent(step_event(spec, smaller), count) for spec, count in parts]
    return events[0] if len(events) == 1 else dp.ComposedDpEvent(events)
