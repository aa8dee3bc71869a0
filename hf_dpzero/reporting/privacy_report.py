"""The privacy report of a run.

A `PrivacyReport` is a plain record computed from the plan that ran; `privacy_report.json` is its
strict-JSON form. Infinite numbers are written as the string "inf" (JSON has no infinity, and null
means "not set"), and read back as infinity. An epsilon in words is rounded up, so that no sentence
claims more than the record.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.ledger.log_file import parsed, write_atomically
from hf_dpzero.privacy.selection import WORDS, check_tuning, total_epsilon
from hf_dpzero.privacy.words import LABELS
from hf_dpzero.reporting.caveats import GRADES, WEAK, caveats
from hf_dpzero.reporting.plan_facts import noise_name, other_terms, parts_of, plan_facts
from hf_dpzero.reporting.wording import (
    BASE_WEIGHTS,
    BLOCK,
    DEPLOYMENTS,
    EXAMPLE,
    NOT_COMPARED,
    Tuning,
    base_words,
    budget_words,
    delta_words,
    needs_secret_batches,
    number,
    part_words,
    relation_words,
    round_up,
    set_aside_words,
    statement,
    tuning_words,
    why_not_private,
)

if TYPE_CHECKING:
    from hf_dpzero.privacy.plan import PrivacyPlan

REPORT_FILE = "privacy_report.json"

PACKAGES = ("hf-dpzero", "torch", "transformers", "dp-accounting", "opendp", "numpy")
_REPEATED: Mapping[str, Any] = {
    "privacy_unit": EXAMPLE, "tuning": "none", "earlier_runs": [], "base_weights": NOT_COMPARED,
    "learning_rate": None, "forward_passes": "", "processes": "", "set_aside": {}, "budget": {},
}  # fmt: skip
"""Entries of a ledger's header that the report repeats, and what stands for a missing one."""
_RUN_ENTRY = {"folder": str, "private": bool, "statement": str}


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """The privacy of one run, in numbers and in words; the content of `privacy_report.json`.

    Attributes:
      target_epsilon: what the noise was calibrated for; None where the noise was given.
      target_delta: the delta of that target.
      epsilon: spent by the completed steps, at `delta`, and by the choice of settings where
        `tuning` accounts for it; inf when nothing bounds it.
      planned_epsilon: of the whole plan, at least `epsilon`.
      delta: the probability outside the bound, in [0, 1).
      accountant: what computed `epsilon`: "pld", "rdp", "gaussian_exact", "advanced_composition",
        or "none" for a method that is not private.
      neighboring_relation: which two data sets the guarantee compares.
      privacy_unit: what the guarantee is for one of: "example", "block of text" (`rows_are`), or all
        rows with one value in a column (`unit_column`).
      sampling: name of the sampler that ran, which is the one accounted.
      sampling_probability: expected batch size over number of examples.
      expected_batch_size: the public divisor of each sum.
      num_examples: units in the training set; treated as public.
      steps: completed steps, the ones paid for.
      planned_steps: steps the plan allowed.
      shipped_step: the weights are those after so many steps, where an earlier step than the last
        evaluated best; `epsilon` is of all steps. None: the weights are those of the last step.
      average_last: the weights are the mean of those after each of so many steps up to there, which
        costs nothing (post-processing of the releases); 1: of the last alone.
      noise_multiplier: noise scale on the sum, in units of `clip`.
      noise_distribution: "gaussian" or "laplace".
      clip: bound C on one example's contribution, in loss units per unit of smoothing; inf if none.
      schedules: what changes over the steps, in words, by "noise" and "clip"; empty where nothing does,
        and `noise_multiplier` and `clip` are of every step.
      groups: of group-robust training, what was released of the groups' losses, in words; else "".
      direction: distribution of the public directions; "none" for first-order methods.
      num_directions: K, directions in a step.
      learning_rate: of a given one that was replaced by the chosen one, both, in words.
      noise_source: where the noise came from.
      private: True only if (epsilon, delta) holds for everything that the run put out.
      method: the mechanism's name: "dpzero", "dpgd-0th", "dp-sgd", "dp-adamw", with "-adaptive" where
        the clip adapts; "mezo", "sgd" and "adamw" are not private.
      log_private_diagnostics: un-noised statistics of the training data went to the logs.
      tuning: how the settings were chosen, as far as this run knows. "none": epsilon is for this
        run alone; "public": on data declared public; "not_accounted": on the same data, for which
        nothing is claimed; or an entry of `hf-dpzero sweep` ("repeat_and_select", "composition")
        whose cost is in `epsilon`.
      earlier_runs: of this package, that the base model came out of, the latest first; `epsilon` does
        not cover them. Each has the `folder`'s name, and that run's `private` and `statement`.
      set_aside: `runs` that were made in the same folder before, and the `epsilon` of these and this
        run's whole plan together, if they are on the same rows; None where there is none. `epsilon` of
        the report does not cover them. {} where there were none.
      budget: what `budget_file.pay` said when the run began: the `epsilon` of all `entries` of one
        budget file, this run's whole plan included, and the `ceiling` at `delta`. {} for a run without
        one, which knows of itself alone.
      base_weights: what the weights were at the start. "equal_to_named": those of the model that the
        configuration names, wherever that has them; "declared_public": something else, which the user
        declared public; "not_compared": nothing on this machine to compare with; "trained_before": of
        a run that is not private.
      forward_passes: how examples were evaluated. "fixed shapes": several in a pass, whose size follows
        from their places (`batches.placement`); "one example": each by itself; "": several in batches
        of any shape, or not known.
      processes: how many processes began the run, and how they shared the work; "" if not known. A
        resumed run may have gone on with another number.
      parts: of a run that extends others (`extends_run`), all of them, oldest first and this one last:
        `folder`, `method`, `noise_multiplier`, `steps`, `planned_steps`, the `epsilon` of each alone,
        and for earlier ones what their reports say of `base_weights`, `tuning`, `weights_digest`,
        `trajectory_digest`. `epsilon` is of all together. Empty for a run that extends none.
      weights_digest: SHA-256 of the saved weights that the report was written for
        (`weights.digest_weights`); None for a report without weights.
      other_terms: what the same steps guarantee otherwise (docs/privacy_reference.md); {} in reports of
        checkpoints, without privacy and where a search is accounted.
      deployment: "central" or "federated", and whom one trusts.
      statement: the guarantee in one sentence.
      caveats: what the guarantee assumes and does not cover, by falling grade.
      caveat_grades: of each caveat one of `wording.GRADES`.
      versions: package name -> version.

    Raises:
      ValueError: the record contradicts itself (private with an infinite epsilon, and so on).
    """

    target_epsilon: float | None
    target_delta: float | None
    epsilon: float
    planned_epsilon: float
    delta: float
    accountant: str
    neighboring_relation: str
    privacy_unit: str
    sampling: str
    sampling_probability: float
    expected_batch_size: float
    num_examples: int
    steps: int
    planned_steps: int
    shipped_step: int | None
    average_last: int
    noise_multiplier: float
    noise_distribution: str
    clip: float
    schedules: dict[str, str]
    groups: str
    direction: str
    num_directions: int
    learning_rate: str | None
    noise_source: str
    private: bool
    method: str
    log_private_diagnostics: bool
    tuning: Tuning
    earlier_runs: list[dict[str, Any]]
    set_aside: dict[str, Any]
    budget: dict[str, Any]
    base_weights: str
    forward_passes: str
    processes: str
    parts: list[dict[str, Any]]
    weights_digest: str | None
    other_terms: dict[str, Any]
    deployment: str
    statement: str
    caveats: list[str]
    caveat_grades: list[str]
    versions: dict[str, str]

    def __post_init__(self) -> None:
        for name in ("epsilon", "planned_epsilon", "delta"):
            value = getattr(self, name)
            if math.isnan(value) or value < 0:
                raise ValueError(f"{name}={value!r} in a privacy report; it must be at least 0.")
        if not 0 <= self.steps <= self.planned_steps:
            raise ValueError(
                f"steps={self.steps} is outside 0..{self.planned_steps}, the steps of the plan."
            )
        if self.shipped_step is not None and not 0 <= self.shipped_step <= self.steps:
            raise ValueError(
                f"shipped_step={self.shipped_step} is outside 0..{self.steps}, the steps that were made."
            )
        if not 1 <= self.average_last <= max(self.steps, 1):
            raise ValueError(
                f"average_last={self.average_last} is outside 1..{self.steps}, the steps that were made."
            )
        check_tuning(self.tuning)
        if self.base_weights not in BASE_WEIGHTS:
            raise ValueError(
                f"base_weights={self.base_weights!r} in a privacy report; it must be one of "
                f"{', '.join(BASE_WEIGHTS)}."
            )
        runs = self.earlier_runs if isinstance(self.earlier_runs, list) else [self.earlier_runs]
        for run in runs:
            if not isinstance(run, dict) or {k: type(v) for k, v in run.items()} != _RUN_ENTRY:
                raise ValueError(
                    f"earlier_runs={self.earlier_runs!r} in a privacy report; it must list the "
                    f"{', '.join(_RUN_ENTRY)} of each. It was edited or damaged; take the file that "
                    "the run wrote."
                )
        reason = why_not_private(
            method=self.method,
            epsilon=self.epsilon,
            noise_source=self.noise_source,
            log_private_diagnostics=self.log_private_diagnostics,
        )
        if self.private and reason:
            raise ValueError(
                f"The report says private=true, but {reason}. It was edited or damaged; "
                "take the privacy_report.json that the run wrote."
            )

    @classmethod
    def from_header(
        cls,
        header: Mapping[str, Any],
        *,
        steps: int,
        delta: float,
        plan: PrivacyPlan | None = None,
        shipped_step: int | None = None,
        average_last: int = 1,
        in_other_terms: bool = False,
    ) -> PrivacyReport:
        """Reports what the first steps of a ledger spent, never more than was run.

        Args:
          header: of the ledger: the plan that ran, the noise's source and what else the attributes
            repeat; from it alone a reader computes the report again (`verification.agreeing`).
          steps: releases that count, 0..plan.steps.
          delta: at which epsilon is computed.
          plan: the header's, where it is made already.
          shipped_step, average_last: of the trajectory; see the attributes.
          in_other_terms: with `other_terms`, which takes a second or some.

        Returns:
          The report, of no weights yet.

        Raises:
          ValueError: `steps` is not within the plan.
        """
        from hf_dpzero.privacy.plan import PrivacyPlan

        plan = plan or PrivacyPlan.from_dict(header["plan"])
        if not 0 <= steps <= plan.steps:
            raise ValueError(
                f"steps={steps} is outside 0..{plan.steps}, the steps of the plan; report the plan "
                "that ran."
            )
        # Reasons that no number holds (a sampler key set by hand) stand in the header alone.
        logged = bool(header["log_private_diagnostics"])
        facts = plan_facts(plan, delta, steps)
        why_not = why_not_private(
            method=plan.mechanism.name,
            epsilon=facts["epsilon"] if plan.private else math.inf,
            noise_source=header["noise_source"],
            log_private_diagnostics=logged,
            batches_secret=header["sampler_key_is_secret"] or not needs_secret_batches(plan),
        )
        rows = header.get("privacy_unit", EXAMPLE) in (EXAMPLE, BLOCK)
        wanted = in_other_terms and why_not is None
        report = cls(
            **facts,
            other_terms=other_terms(plan, delta, steps, rows) if wanted else {},
            **{name: header.get(name, default) for name, default in _REPEATED.items()},
            target_epsilon=header.get("target_epsilon") if plan.private else None,
            target_delta=header.get("target_delta", delta) if plan.private else None,
            direction=header["direction"],
            noise_source=noise_name(plan, header["noise_source"]),
            private=why_not is None,
            shipped_step=shipped_step,
            average_last=average_last,
            log_private_diagnostics=logged,
            parts=parts_of(plan, delta, steps, header.get("extends", ())),
            weights_digest=None,
            # A private run's is written by `in_words`, from its numbers.
            statement=f"NOT PRIVATE: {why_not}; no differential privacy is claimed for this run.",
            deployment="",
            caveats=[],
            caveat_grades=[],
            versions=versions(),
        )
        return report.in_words(plan, header)

    def in_words(self, plan: PrivacyPlan, header: Mapping[str, Any]) -> PrivacyReport:
        """Derives all words from the numbers anew; why a run is not private stays."""
        facts, words = asdict(self), self.statement
        if self.private:
            words = statement(facts, plan, self.tuning)
        graded = caveats(facts, plan, self.tuning, header)
        deployment = DEPLOYMENTS["federated" if header.get("federated") else "central"]
        texts, grades = [text for _, text in graded], [grade for grade, _ in graded]
        own: dict[str, Any] = {"caveats": texts, "caveat_grades": grades}
        return replace(self, statement=words, deployment=deployment, **own)

    def with_tuning(
        self,
        tuning: Tuning,
        plan: PrivacyPlan,
        header: Mapping[str, Any],
        at_least: float = 0.0,
    ) -> PrivacyReport:
        """Adds how the settings of a run of a sweep were chosen to numbers, statement and caveats.

        Args:
          tuning: "none", "public", "not_accounted", or an entry of `privacy.selection`, whose
            total epsilon replaces the run's own.
          plan: the plan that ran.
          header: of the run's ledger.
          at_least: a total epsilon that this run's part of a search may not understate.

        Raises:
          ValueError: an unknown entry; or one that accounts for whole runs, for a part of a run.
        """
        check_tuning(tuning)
        if tuning not in WORDS and self.steps != self.planned_steps:
            raise ValueError(
                f"steps={self.steps} of {self.planned_steps}: tuning is accounted for whole runs; "
                "finish the run first (`hf-dpzero sweep`)."
            )
        epsilon = self.epsilon if tuning in WORDS else total_epsilon(plan, tuning, self.delta)
        epsilon = max(epsilon, at_least)
        planned = self.planned_epsilon if tuning in WORDS else epsilon
        terms = self.other_terms if tuning in WORDS else {}  # of one run
        tuned = replace(self, tuning=tuning, epsilon=epsilon, planned_epsilon=planned)
        tuned = replace(tuned, other_terms=terms)
        return tuned.in_words(plan, header)

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of `privacy_report.json`; infinite numbers are the string "inf"."""
        infinite = {k: "inf" for k, v in asdict(self).items() if v == math.inf}
        return {**asdict(self), **infinite}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyReport:
        """Reads what `to_dict` returns.

        Raises:
          ValueError: a key is missing or unknown, or the values contradict each other.
        """
        # Keys that later versions added: an older report goes on being read.
        older = dict.fromkeys(("groups", "forward_passes", "processes"), "")
        since: dict[str, Any] = {"learning_rate": None, "shipped_step": None, "average_last": 1}
        since |= {"set_aside": {}, "budget": {}, "other_terms": {}, "deployment": ""}
        since["noise_distribution"] = (
            "laplace" if ", laplace noise" in values.get("statement", "") else "gaussian"
        )
        since["caveat_grades"] = [GRADES[0]] * len(values.get("caveats", ()))
        values = {**since, **older, **values}
        expected = {field.name for field in fields(cls)}
        wrong = sorted(expected.symmetric_difference(values))
        if wrong:
            raise ValueError(
                f"A privacy report has exactly {len(expected)} keys; these are missing or "
                f"unknown: {', '.join(wrong)}."
            )
        infinite = {name: math.inf for name, value in values.items() if value == "inf"}
        return cls(**{**values, **infinite})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the JSON to `path`, or to `privacy_report.json` in the folder `path`; atomic.

        A reader sees the old file or the new one, never a half-written one.
        """
        target = _report_path(path)
        write_atomically(target, json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PrivacyReport:
        """Reads what `save` wrote.

        Raises:
          FileNotFoundError: there is no report there.
          ValueError: the file is not a privacy report.
        """
        target = _report_path(path)
        try:
            values = parsed(target.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{target} is not JSON ({error}); the file is damaged.") from error
        if not isinstance(values, dict):
            raise ValueError(f"{target} holds a {type(values).__name__}, not a privacy report.")
        try:
            return cls.from_dict(values)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{target} holds a value of a wrong type: {error}.") from error

    def __str__(self) -> str:
        """Returns a headline and the numbers behind it, for a terminal."""
        headline = self.statement
        if self.private:
            aim = "" if self.target_epsilon is None else f" (target {number(self.target_epsilon)})"
            headline = (
                f"(epsilon = {round_up(self.epsilon)}, delta = {delta_words(self.delta)})"
                f"-differentially private{aim}"
            )
            if self.steps < self.planned_steps:
                headline += (
                    f" after {self.steps} of {self.planned_steps} steps; the whole plan costs "
                    f"epsilon = {round_up(self.planned_epsilon)}"
                )
        return "\n".join([headline, *(f"  {label:<12}{text}" for label, text in self.rows())])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Prints `str` where a notebook shows what a cell ends in."""
        printer.text("..." if cycle else str(self))

    def rows(self) -> list[tuple[str, str]]:
        """Returns label and text of each line under the headline; a table in the model card."""
        along = f"K = {self.num_directions} {self.direction}, " if self.direction != "none" else ""
        clip = "no clipping" if math.isinf(self.clip) else f"clip C = {number(self.clip)}"
        mechanism = (
            f"{self.method}, {along}{clip}, {'Laplace ' * (self.noise_distribution == 'laplace')}"
            f"noise multiplier {number(self.noise_multiplier)}"
        )
        sampling = (
            f"{self.sampling}, q = {number(self.sampling_probability)} (expected batch "
            f"{number(self.expected_batch_size)} of {self.num_examples} "
            f"{'examples' if self.privacy_unit in (EXAMPLE, BLOCK) else 'units'})"
        )
        last, step = self.average_last, self.shipped_step
        shipped = "" if step is None else f"; the weights are of step {step}"
        if last > 1:
            upto = "" if step is None else f" up to {step}"
            shipped = f"; the weights are the mean of those after the last {last} steps{upto}"
        return [
            ("neighbours", relation_words(self.neighboring_relation, self.privacy_unit)),
            ("mechanism", mechanism),
            *((LABELS.get(name, name), text) for name, text in self.schedules.items()),
            *([("groups", self.groups)] if self.groups else []),
            ("sampling", sampling),
            ("steps", f"{self.steps} of {self.planned_steps} planned{shipped}"),
            *(("of that", part_words(part)) for part in self.parts),
            ("accountant", self.accountant),
            ("noise", self.noise_source),
            *([("rate", self.learning_rate)] if self.learning_rate else []),
            *([("processes", f"{self.processes} at the start")] if self.processes else []),
            ("tuning", tuning_words(self.tuning)),
            *([("base model", base_words(self.earlier_runs))] if self.earlier_runs else []),
            *(("says little", s.removeprefix(WEAK)) for s in self.caveats if s.startswith(WEAK)),
            *([("set aside", set_aside_words(self.set_aside))] if self.set_aside else []),
            *([("budget", budget_words(self.budget))] if self.budget else []),
            ("not covered", f"{len(self.caveats)} caveats, listed in {REPORT_FILE}"),
        ]


@cache  # 8 ms, in every header and report
def versions() -> dict[str, str]:
    """Returns the versions of installed packages that a privacy claim rests on; not to be changed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name.replace("-", "_")] = importlib.metadata.version(name)
    return found


def _report_path(path: str | os.PathLike[str]) -> Path:
    return Path(path) / REPORT_FILE if Path(path).is_dir() else Path(path)
