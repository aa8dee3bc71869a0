"""One privacy budget for a data set: a file that every release about its rows is charged to, beforehand.

JSON lines: the ceiling, then an entry for each run or private evaluation with all that its privacy
loss is computed from. Each line has the SHA-256 of the line before and its own content, so a file that
was edited anywhere is refused. A line is on disk before what it pays for begins, under a lock: a crash,
or two processes at once, may count a release that was never made, and never leave one out.

All entries count as releases about the same rows, with all their planned steps. Runs are composed by one
accountant (`privacy.accounting.epsilon_together`); a count has a pure epsilon, which is added to theirs:
(e, delta) and (e', 0) compose to (e + e', delta). A sum of pure epsilons holds also where each was
chosen by looking at what the earlier ones released; tighter compositions do not.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock

from hf_dpzero.ledger.log_file import LedgerError, append_whole, create_whole
from hf_dpzero.privacy.accounting import MIN_DELTA, epsilon_together
from hf_dpzero.privacy.counting import PrivateCount
from hf_dpzero.privacy.mechanisms.base import RELATIONS
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.reporting.wording import EXAMPLE, delta_words, number, relation_words, round_up

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What all releases about one data set may spend together.

    Attributes:
      epsilon: at most so much, > 0.
      delta: at which all of them are stated, in [1e-12, 1).
      neighboring_relation: when two data sets are neighbours, for all.
      privacy_unit: what the guarantee is for one of, as reports name it.

    Raises:
      ValueError: no such ceiling.
    """

    epsilon: float
    delta: float
    neighboring_relation: str = "add_or_remove_one"
    privacy_unit: str = EXAMPLE

    def __post_init__(self) -> None:
        if not (0 < self.epsilon < math.inf and MIN_DELTA <= self.delta < 1):
            raise ValueError(
                f"epsilon={self.epsilon}, delta={self.delta} for a budget file: give an epsilon above 0 "
                f"and a delta in [{MIN_DELTA}, 1), such as --epsilon 4 --delta 1e-6."
            )
        if self.neighboring_relation not in RELATIONS:
            raise ValueError(
                f"neighboring_relation={self.neighboring_relation!r} is unknown; use one of "
                f"{', '.join(RELATIONS)}."
            )


@dataclass(frozen=True, kw_only=True)
class Charge:
    """A release that is to be paid, or was: a run's plan, or the epsilon of a count.

    Attributes:
      what: "train" or "evaluate_privately".
      name: public: the run's folder, or what its record calls the rows.
      privacy_unit: what its guarantee is for one of.
      plan: of the whole run, without those that it extends; None for a count.
      epsilon: of a count, with delta 0 and under every relation; None for a run.
    """

    what: str
    name: str
    privacy_unit: str
    plan: PrivacyPlan | None = None
    epsilon: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns what a line holds of it; `from_dict` reads it back."""
        return {**vars(self), "plan": self.plan and self.plan.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Charge:
        """Reads `to_dict`; of another version's or a wrong kind: LookupError, TypeError, ValueError."""
        plan = None if values["plan"] is None else PrivacyPlan.from_dict(values["plan"])
        made = cls(**{**values, "plan": plan})
        if plan is None:
            PrivateCount(made.epsilon or 0.0)  # refuses what is no epsilon
        return made


def epsilon_of(charges: Iterable[Charge], delta: float) -> float:
    """Returns epsilon at `delta` of all of them together, an upper bound; infinity if one has none.

    Raises:
      ValueError: runs without a common accountant.
    """
    charges = list(charges)
    parts = (part for charge in charges if charge.plan for part in charge.plan.own_parts())
    counts = math.fsum(charge.epsilon or 0.0 for charge in charges)
    return epsilon_together(tuple(parts), delta) + counts


@dataclass(frozen=True)
class BudgetFile:
    """What a budget file holds.

    Attributes:
      path: of the file.
      ceiling: its first line.
      charges: its entries, oldest first.
      times: when each was paid, UTC.
      hashes: of all lines, the ceiling's first.
    """

    path: Path
    ceiling: Ceiling
    charges: tuple[Charge, ...]
    times: tuple[str, ...]
    hashes: tuple[str, ...]

    @cached_property
    def epsilon(self) -> float:
        """What all entries together cost, at the ceiling's delta."""
        return epsilon_of(self.charges, self.ceiling.delta)

    def epsilon_with(self, charge: Charge) -> float:
        """Returns what all entries and one more cost.

        Raises:
          ValueError: it is not of this file's relation or unit, has no common accountant with the
            entries, or would pass the ceiling; says what is spent, needed and left.
        """
        ceiling, relation = self.ceiling, charge.plan.relation if charge.plan else None
        ours = f"one {ceiling.privacy_unit} under {ceiling.neighboring_relation}"
        theirs = f"one {charge.privacy_unit} under {relation or ceiling.neighboring_relation}"
        if ours != theirs:
            raise ValueError(
                f"budget_file={str(self.path)!r} is for {ours}, and {charge.name} for {theirs}: their "
                "epsilons do not compose. Use the file's, or make one for this (what both spend on the "
                "same rows nothing adds up): `hf-dpzero budget FILE --epsilon EPSILON --delta "
                f"{number(ceiling.delta)} --privacy_unit {charge.privacy_unit!r}`."
            )
        total = epsilon_of((*self.charges, charge), ceiling.delta)
        if total > ceiling.epsilon:
            raise ValueError(
                f"budget_file={str(self.path)!r}: {round_up(self.epsilon)} of epsilon = "
                f"{number(ceiling.epsilon)} is spent at delta = {delta_words(ceiling.delta)} "
                f"(entries: {len(self.charges)}), {self.left_words} is left; {charge.what} in "
                f"{charge.name} alone needs {round_up(epsilon_of([charge], ceiling.delta))}, and "
                f"{round_up(total)} would be spent with it. Nothing was released. Give it a smaller "
                "target_epsilon (or epsilon), more noise or fewer steps."
            )
        return total

    def check_holds(self, entry: str, of: str) -> None:
        """Refuses (LedgerError) a file without the entry of this hash, which paid for `of`."""
        if entry not in self.hashes[1:]:
            raise LedgerError(
                f"budget_file={str(self.path)!r} has no entry of {of}: an older copy was put back, or "
                "that paid from another file or from none. Restore it or name the right one; leave "
                "budget_file out where there was none."
            )

    @property
    def left_words(self) -> str:
        """The ceiling less what is spent, rounded down: what one more pure epsilon may be."""
        left = max(0, math.floor(1000 * (self.ceiling.epsilon - self.epsilon)))
        more = Charge(what="", name="", privacy_unit="", epsilon=left / 1000)
        total = epsilon_of((*self.charges, more), self.ceiling.delta)
        left -= left > 0 and total > self.ceiling.epsilon  # floats do not add up as decimals do
        return f"{left / 1000:g}"

    def __str__(self) -> str:
        ceiling, width = self.ceiling, max((len(charge.what) for charge in self.charges), default=0)
        relation = relation_words(ceiling.neighboring_relation, ceiling.privacy_unit)
        lines = [
            f"epsilon = {round_up(self.epsilon)} of {number(ceiling.epsilon)} is spent at delta = "
            f"{delta_words(ceiling.delta)} (entries: {len(self.charges)}); {self.left_words} is left",
            f"  neighbours  {relation}",
        ]
        for time, charge in zip(self.times, self.charges, strict=True):
            alone = round_up(epsilon_of([charge], ceiling.delta))
            said = f"  {time}  {charge.what:<{width}}  epsilon = {alone} alone"
            lines.append(f"{said}  {charge.name}")
        return "\n".join(lines)


def create(path: str | os.PathLike[str], ceiling: Ceiling) -> None:
    """Makes a budget file without entries.

    Raises:
      FileExistsError: there is one; it stays as it is.
    """
    try:
        create_whole(Path(path), _line("", {"version": VERSION, **asdict(ceiling)}))
    except FileExistsError:
        raise FileExistsError(
            f"{path} exists, and a ceiling is set once: what was spent stays spent. Leave --epsilon and "
            "--delta out to see it."
        ) from None


def read(path: str | os.PathLike[str]) -> BudgetFile:
    """Reads a budget file while nobody writes to it.

    Raises:
      FileNotFoundError: there is none; says how to make it.
      LedgerError: it was edited or cut.
    """
    file = _found(path)
    with FileLock(f"{file}.lock"):
        return _read(file)


def pay(path: str | os.PathLike[str], charge: Charge) -> dict[str, Any]:
    """Appends an entry, durable; until this returns nothing that it pays for may be released.

    Returns:
      What a ledger's header says of it: `entry` (the hash of its line), `entries` with it, the `epsilon`
      of all, and the ceiling's `epsilon` and `delta`, as `ceiling` and `delta`.

    Raises:
      FileNotFoundError, LedgerError: as `read`.
      ValueError: as `BudgetFile.epsilon_with`.
      OSError: it cannot be written.
    """
    file = _found(path)
    # From reading to writing: of two at once one sees the other's entry. It goes with its process.
    with FileLock(f"{file}.lock"):
        budget = _read(file)
        epsilon = budget.epsilon_with(charge)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        line = _line(budget.hashes[-1], {"time": now, **charge.to_dict()})
        append_whole(file, line)
    paid = {"entry": json.loads(line)["hash"], "entries": len(budget.charges) + 1}
    ceiling = budget.ceiling
    return {**paid, "epsilon": epsilon, "ceiling": ceiling.epsilon, "delta": ceiling.delta}


def _found(path: str | os.PathLike[str]) -> Path:
    file = Path(path).resolve()  # one lock for all links to it
    if not file.is_file():
        raise FileNotFoundError(
            f"budget_file={str(path)!r} does not exist: make it with `hf-dpzero budget {path} --epsilon "
            "E --delta D`, the ceiling of all releases about these rows."
        )
    return file


def _line(before: str, content: Mapping[str, Any]) -> bytes:
    """One line behind the line whose hash is `before`."""
    text = _canonical(content)
    digest = hashlib.sha256((before + text).encode()).hexdigest()
    return (_canonical({**content, "hash": digest}) + "\n").encode()


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _read(file: Path) -> BudgetFile:
    raw, hashes, found = file.read_bytes(), [""], []
    *lines, rest = raw.split(b"\n")
    if rest:
        raise LedgerError(
            f"{file}: line {len(lines) + 1}, its last, is cut short. If a crash or a full disk cut it "
            "while it was written, nothing was released for it: remove that line. If not, restore the "
            "file from a copy."
        )
    for place, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
            hashes.append(content.pop("hash"))
            if line + b"\n" != _line(hashes[-2], content):
                raise ValueError("its hash is another")
            found.append(content)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            why = f"line {place} was edited, or lines before it are missing"
            raise _damaged(file, why) from error
    try:
        if (version := found[0].pop("version")) != VERSION:
            raise ValueError(f"version {version}")
        ceiling = Ceiling(**found[0])
        times = tuple(str(content.pop("time")) for content in found[1:])
        charges = tuple(map(Charge.from_dict, found[1:]))
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(file, f"it is no budget file of this version ({error})") from error
    return BudgetFile(file, ceiling, charges, times, tuple(hashes[1:]))


def _damaged(file: Path, why: str) -> LedgerError:
    return LedgerError(
        f"{file}: {why}, so nobody knows what was spent: restore the file from a copy."
    )
