"""What private rows were evaluated with noise: the record beside a run, and what all of it spent.

`private_evaluations.jsonl` has a line for each release, on disk before anybody sees the value. It knows
of what was released into its folder alone: the same rows may have been evaluated elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path

from hf_dpzero.ledger.log_file import append_whole, flush_folder, locked, parsed
from hf_dpzero.privacy.counting import COVERAGE, PrivateCount
from hf_dpzero.privacy.noise import is_seeded
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.wording import BLOCK, EXAMPLE, delta_words, number, round_up

EVALUATIONS_FILE = "private_evaluations.jsonl"


@dataclass(frozen=True, kw_only=True)
class PrivateEvaluation:
    """One release of how many private rows a model answers right.

    Attributes:
      rows: a public name of the data, such as the file's.
      num_rows: n, of units one row each; counts as public.
      metric: what is 1 for a right answer: "accuracy" or "exact_match".
      step: the weights are those after so many steps; None where nobody says.
      epsilon: of this release; delta is 0.
      sensitivity: the most by which one unit moves the count.
      noise_source: where the discrete Laplace noise came from.
      trained_on: rows may be rows of train_dataset too.
      released: the count of right answers with noise, any integer.
      privacy_unit: what the guarantee is for one of, as reports name it.
      budget_entry: hash of the line of a budget file that paid for it; "" without one.
    """

    rows: str
    num_rows: int
    metric: str
    step: int | None
    epsilon: float
    sensitivity: int
    noise_source: str
    trained_on: bool
    released: int
    privacy_unit: str = EXAMPLE
    budget_entry: str = ""

    def __post_init__(self) -> None:
        for text in (self.rows, self.metric, self.noise_source, self.privacy_unit):
            check_printed(text)

    @property
    def mechanism(self) -> PrivateCount:
        """What the count was released by."""
        return PrivateCount(self.epsilon, self.sensitivity)

    @property
    def value(self) -> float:
        """The released share of right answers, in [0, 1]."""
        return min(max(self.released / self.num_rows, 0.0), 1.0)

    @property
    def interval_of_noise(self) -> tuple[float, float]:
        """Holds the share of right answers among these rows, with `COVERAGE` over the noise."""
        low, high = self.mechanism.count_interval(self.released, self.num_rows)
        return low / self.num_rows, high / self.num_rows

    @property
    def interval_of_noise_and_sampling(self) -> tuple[float, float]:
        """Holds the share in the population, over noise and the draw of the rows."""
        return self.mechanism.share_interval(self.released, self.num_rows)

    def results(self) -> dict[str, object]:
        """Returns the record with what follows from it, for JSON."""
        found = {"delta": 0.0, self.metric: self.value, "coverage": COVERAGE}
        both = ("interval_of_noise", "interval_of_noise_and_sampling")
        return {**asdict(self), **found, **{name: getattr(self, name) for name in both}}

    def __str__(self) -> str:
        headline = (
            f"{self.metric} {_percent(self.value)} on {self.num_rows} private rows ({self.rows}"
            f"{', one of each unit' * self.of_units}), released with epsilon = "
            f"{round_up(self.epsilon)}, delta = 0"
        )
        if is_seeded(self.noise_source):
            headline = f"NOT PRIVATE: the noise is {self.noise_source}. {headline}"
        these, population = self.interval_of_noise, self.interval_of_noise_and_sampling
        scale, counted = number(self.mechanism.scale), "units" if self.of_units else "rows"
        return f"""{headline}
  these rows  {_percent(*these)} (at least 95 %, over the noise alone)
  population  {_percent(*population)} (at least 95 %, over noise and sampling of the rows)
  released    {self.released} right answers, with discrete Laplace noise of scale {scale}
  neighbours  adding, removing or replacing one {self.unit}; the number of {counted} is public"""

    @property
    def of_units(self) -> bool:
        """Whether one row of each unit was drawn."""
        return self.privacy_unit not in (EXAMPLE, BLOCK)

    @property
    def unit(self) -> str:
        """What the guarantee is for one of, in words of evaluations."""
        return "row" if self.privacy_unit == EXAMPLE else self.privacy_unit


def check_printed(text: str) -> None:
    """Refuses a name that could be more than a name where a card prints it."""
    if not text.isprintable() or set(text) & set("`<>|") or len(text) > 200:
        raise ValueError(
            f"{text[:80]!r} is printed on cards: give a name of at most 200 letters, on one line and "
            "without ` < > |."
        )


def _percent(low: float, high: float | None = None) -> str:
    """One share to a tenth of a point; of an interval the ends are rounded outwards."""
    if high is None:
        return f"{100 * low:.1f} %"
    tenths = [round(1000 * share, 6) for share in (low, high)]  # 0.857 is 856.9999999999999
    return f"{math.floor(tenths[0]) / 10} to {math.ceil(tenths[1]) / 10} %"


def append_evaluation(folder: Path, made: PrivateEvaluation) -> None:
    """Writes a release down, durable; until this returns nobody may see it.

    Raises:
      OSError, LedgerError: it could not be written, or another process writes just now.
    """
    path = folder / EVALUATIONS_FILE
    folder.mkdir(parents=True, exist_ok=True)
    path.touch()
    flush_folder(folder)
    with contextlib.closing(locked(path)):
        evaluations_in(folder)  # nothing is put behind what cannot be read
        append_whole(path, (json.dumps(asdict(made)) + "\n").encode())


def evaluations_in(folder: str | os.PathLike[str]) -> list[PrivateEvaluation]:
    """Returns the releases on record in a folder, oldest first; [] where there is no record.

    Raises:
      ValueError: the record was edited or damaged.
    """
    path = Path(folder) / EVALUATIONS_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    try:
        return [PrivateEvaluation(**parsed(line)) for line in lines]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as a record of private evaluations: restore it from a copy, or move "
            "it away and count what it held yourself; what was spent stays spent."
        ) from error


def together(report: PrivacyReport | None, evaluations: Sequence[PrivateEvaluation]) -> str:
    """Says what the releases on record cost a row or unit, alone and with the training of `report`.

    Pure epsilons add up (basic composition), as if all evaluations were on the same rows. A row that was
    either trained on or evaluated is protected by the larger epsilon (parallel composition): the other
    part does not change with it. One that was both is protected by the sum; equal rows are refused only
    where those that were trained on are at hand. What protects a unit protects each of its rows.
    """
    units = {made.privacy_unit: made.unit for made in evaluations}
    protected, unit = units.popitem() if len(units) == 1 else (EXAMPLE, "row")
    if BLOCK in units:  # beside others: a block protects no example
        protected = ""
    spent = float(sum(Decimal(repr(made.epsilon)) for made in evaluations))
    releases = f"{len(evaluations)} private evaluation{'s' * (len(evaluations) > 1)} on record"
    if any(is_seeded(made.noise_source) for made in evaluations):
        return f"NOT PRIVATE: {releases}, and seeded noise can be subtracted by anybody."
    words = (
        f"{releases}: epsilon = {round_up(spent)}, delta = 0 for each evaluated {unit}, added up."
    )
    if report is None or not report.private:
        return f"{words} No epsilon is claimed for rows of a training."
    if report.privacy_unit != protected:
        return (
            f"{words} The training states epsilon for one {report.privacy_unit}: for another unit, so "
            "the two are not put together."
        )
    end = f", delta = {delta_words(report.delta)}"
    both = f"epsilon = {round_up(report.epsilon + spent)}{end}"
    if any(made.trained_on for made in evaluations):
        return f"{words} Where it was trained on too: {both} in all."
    whole = round_up(max(report.epsilon, spent))
    return (
        f"{words} With the training: epsilon = {whole}{end} for each {unit} that was trained on or "
        f"evaluated and not both, {both} for one that was both."
    )
