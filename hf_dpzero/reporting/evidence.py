"""What a stranger can check of a published folder, claim by claim, and what nobody can.

Each check returns what it found in words, or raises where a claim does not hold: `NotChecked` where the
folder has nothing to check. Rebuilding the weights needs a model, and is the caller's.
"""

from __future__ import annotations

import fnmatch
import math
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from hf_dpzero.ledger.trajectory import Release, Trajectory
from hf_dpzero.privacy.accounting import epsilon_together
from hf_dpzero.privacy.bracket import epsilon_bracket
from hf_dpzero.privacy.noise import SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.schedules import MechanismSchedule
from hf_dpzero.privacy.selection import WORDS
from hf_dpzero.reporting.caveats import CLAIMED
from hf_dpzero.reporting.hub import CARD_FILE
from hf_dpzero.reporting.privacy_report import PACKAGES, REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.private_evaluations import PrivateEvaluation, evaluations_in, together
from hf_dpzero.reporting.public import RECIPE_FILE, recipe_settings
from hf_dpzero.reporting.verification import TRAJECTORY_FILE, agreeing
from hf_dpzero.reporting.weights import SHARDS, WEIGHTS
from hf_dpzero.reporting.wording import (
    BASE_WEIGHTS,
    BLOCK,
    EQUAL,
    EXAMPLE,
    EXTENDED,
    RATE_FAR_OFF,
    RATE_OF_HEAD,
    counted_steps,
    number,
    round_up,
    unit_words,
)

CHANCE = 1e-9
"""Probability at most with which noise of the stated scale fails `noise_holds`."""

UNCHECKED = (
    "that noise and batches were drawn afresh and in secret: whoever knows the key of one can take it "
    "away, and the released values look the same",
    "that the values were clipped, and are of the rows, their number and the sampling that are claimed",
    "that this is the only release on these rows: other runs, and settings chosen by looking at them, "
    "add to epsilon",
    "that the unit is what has to be protected (where it is a row, a person may have several), that "
    "evaluation rows are public, and that the base model never saw the private rows",
    "the scores on the card, which need the evaluation rows; whether private evaluations are as their "
    "record says, and others were made; settings in recipe.yaml beyond target, neighbours and unit; "
    "and files that no digest covers, which may be other weights, code, or a page of other claims",
)
"""What no check of a folder can see."""


def unchecked(names: Iterable[str]) -> list[str]:
    """What no check can see of a folder with files of such names; the page ends with it."""
    seen = (CARD_FILE, REPORT_FILE, TRAJECTORY_FILE, *WEIGHTS, SHARDS)
    others = sorted(
        ascii(name)
        for name in names
        if "/" in name or not any(fnmatch.fnmatchcase(name, known) for known in seen)
    )
    return [*UNCHECKED[:-1], f"{UNCHECKED[-1]}: {', '.join(others) or 'none is here'}"]


_VERSION = re.compile(rf"(?:{'|'.join(PACKAGES).replace('-', '_')}) \d[\w.+!-]{{0,60}}")
_CLAIM = re.compile(r"[|<>*`\[\]]|epsilon|\beps\b|[\u03b5\u03f5]|differential", re.I)
_WORD = r"\w[\w.+~-]{0,60}"
_NAME = rf"{_WORD}(?:[ /]{_WORD}){{0,3}}"
_RATE = "|".join(map(re.escape, (RATE_OF_HEAD, RATE_FAR_OFF)))
_GRIDS = SecureNoise.name.replace("_exact", "(_exact|(_key)?_on_grid)")
_NOISE = rf"none|{_GRIDS}|(?i:insecure)\w{{0,60}}"
_GRAMMAR = {
    "learning_rate": _RATE.replace(r"\{\}", r"[\d.e+-]+"),
    "processes": r"|\d+(?: \((?:\d+ shares of the (?:rows|directions)(?: x )?){1,2}"
    r"(?:, parameters in parts by FSDP2)?\))?",
    "noise_source": _NOISE,
    "direction": "none|rademacher|gaussian|sphere", "public_texts": "[0-9a-f]{64}",
    "method": _WORD, "steps": r"\d+", "planned_steps": r"\d+",
}  # fmt: skip
"""Texts of a log that go into sentences, in the form that a run of ours gives them."""
_SAID = re.compile(rf"{_CLAIM.pattern}|\bDP\b|priva", re.I)
_FREE = re.compile(rf"{_SAID.pattern}|(?:^|[ /])\d*\.\d+(?:$|[ /])|\de-\d", re.I)
"""What a name that is its owner's choice could claim with; a bare fraction too."""
_DIGEST, _COUNT = "[0-9a-f]{0,64}", "(?!)"
_ENTRIES: dict[str, str] = {
    "folder": r"(?s:.*)",
    "method": r"(mezo|sgd|adamw|dpzero|dpgd-0th|dp-sgd|dp-adamw)(-adaptive|-averaged)?",
    "base_weights": "|".join(BASE_WEIGHTS), "tuning": "|".join(WORDS), "swept": r"[\w.]{1,60}",
    "weights_digest": _DIGEST, "trajectory_digest": _DIGEST, "entry": _DIGEST,
    **dict.fromkeys(("steps", "planned_steps", "epsilon", "noise_multiplier", "entries", "ceiling",
    "delta", "runs", "count", "mean_trials", "epsilon_one_run", "plan", "plans", "composition",
    "repeat_and_select"), _COUNT),
}  # fmt: skip
"""Keys of a report's entries about other runs, and the form of texts there; `_COUNT` is no text's."""


class NotChecked(Exception):
    """The folder has nothing that this check could be made with; says what is missing."""


@dataclass(frozen=True)
class Finding:
    """What became of one claim: `holds` is None where it could not be checked."""

    claim: str
    holds: bool | None
    text: str


def findings(
    folder: Path, weights_hold: Callable[[PrivacyReport, Trajectory], str]
) -> list[Finding]:
    """Checks all that a published folder claims, in the order of the page.

    Without a trajectory and a report that can be read the first two findings say why, and there are no
    others. `weights_hold` is a check as those here.
    """

    def finding(claim: str, check: Callable[..., str], *given: Any) -> Finding:
        holds: bool | None = True
        try:
            text = check(*given)
        except NotChecked as missing:
            holds, text = None, str(missing)
        except Exception as error:  # a stranger's file may break any code
            told = isinstance(error, ValueError | OSError | ImportError)
            why = str(error) if told else f"cannot be read ({type(error).__name__}: {error})"
            holds, text = False, " ".join(why.split())
        return Finding(claim, holds, _printable(text))

    found = [finding("log", _log_holds, folder), finding("report", report_holds, folder)]
    try:
        run = PrivacyReport.load(folder / REPORT_FILE), Trajectory.load(folder / TRAJECTORY_FILE)
    except Exception:
        return found
    return [
        *found,
        finding("epsilon", epsilon_holds, *run),
        finding("noise", noise_holds, *run),
        finding("card", card_holds, folder, *run),
        finding("weights", weights_hold, *run),
    ]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _log_holds(folder: Path) -> str:
    log = Trajectory.load(folder / TRAJECTORY_FILE)
    return f"{log.next_step} releases of {log.num_values} numbers, whole by their checksum"


def report_holds(folder: Path) -> str:
    """Computes numbers and words of the report again, from the plan and the releases in the log."""
    stated = PrivacyReport.load(folder / REPORT_FILE)
    derived, trajectory = agreeing(stated, folder)
    if derived != stated:
        raise ValueError(
            f"{REPORT_FILE} does not say in words what its numbers mean, which is: {derived.statement} "
            "It was edited, or is of another version of this package, with which it may be verified: "
            f"{stated.versions.get('hf_dpzero')}, it says."
        )
    for package in map(" ".join, stated.versions.items()):
        if not _VERSION.fullmatch(package) or _SAID.search(package):
            raise ValueError(f"{REPORT_FILE} names {package!r}, which is no package and version.")
    _check_texts(stated, trajectory.header)
    recipe = folder / RECIPE_FILE
    if recipe.is_file() and stated.private:
        federated = trajectory.header.get("federated") is not None
        _check_recipe(recipe_settings(recipe.read_text("utf-8")), stated, federated)
    names = sorted(_names(stated, trajectory), key=len, reverse=True)
    for text in (stated.statement, *stated.caveats, *map(" ".join, stated.rows())):
        for name in (name for name in names if name.splitlines() == [name]):
            text = text.replace(name, "")
        if not text.isprintable() or re.search(r"<[A-Za-z!/?]", text):
            raise ValueError(f"{REPORT_FILE} says {text[:80]!r}, with line ends or HTML in it.")
    if odd := _odd_name(names):
        raise NotChecked(
            f"it follows from the log, and quotes {odd[:80]!r}, a name that could be a claim. It "
            f"says: {stated.statement}"
        )
    if stated.steps < trajectory.next_step:
        raise NotChecked(
            f"it follows from the log but for its {stated.steps} steps, said to be those of one client, "
            f"of {trajectory.next_step} in the log. It says: {stated.statement}"
        )
    return f"follows from the plan and the releases in the log. It says: {stated.statement}"


def _names(stated: PrivacyReport, trajectory: Trajectory) -> list[str]:
    """What a report quotes of its owner's choice: folders of runs, what these say, groups, the unit."""
    runs = (*stated.parts, *stated.earlier_runs, *stated.set_aside.get("runs", ()))
    groups = PrivacyPlan.from_dict(trajectory.header["plan"]).groups
    column = [] if stated.privacy_unit in (EXAMPLE, BLOCK) else [_column(stated.privacy_unit)]
    said = [r["statement"] for r in stated.earlier_runs if r["private"]]
    said = [text for text in said if not CLAIMED.match(text)]
    return [*(run["folder"] for run in runs), *(groups.names if groups else ()), *column, *said]


def _column(unit: str) -> str:
    """The column that a unit's words name; other words as a quotation, which is no name."""
    return unit.removesuffix(end) if unit.endswith(end := unit_words("")) else repr(unit)


def _odd_name(names: Iterable[str]) -> str | None:
    """The first name that could be more than one, as another alphabet's letters read too."""
    return next(
        (
            name
            for name in names
            if not re.fullmatch(_NAME, name) or _FREE.search(unicodedata.normalize("NFKC", name))
        ),
        None,
    )


def _check_texts(stated: PrivacyReport, header: Mapping[str, Any]) -> None:
    """Refuses texts and sums of a log, which its publisher wrote, that no run of ours writes."""
    plan, aside = PrivacyPlan.from_dict(header["plan"]), stated.set_aside.get("runs", ())
    own = {**asdict(stated), "public_texts": header.get("public_texts")}
    for values in (own, *aside):
        for name, text in ((name, values.get(name)) for name in _GRAMMAR):
            if text is not None and (
                not re.fullmatch(_GRAMMAR[name], str(text)) or _CLAIM.search(str(text))
            ):
                raise ValueError(
                    f"{REPORT_FILE} says {name}: {str(text)[:80]!r}, which no run of ours does."
                )
    for entry in (stated.budget, stated.set_aside, *stated.parts, stated.tuning):
        _check_entry(entry)
    if stated.base_weights == (EQUAL if plan.after else EXTENDED):
        raise ValueError(
            f"{REPORT_FILE} says base_weights: {stated.base_weights}, after {len(plan.after)} runs."
        )
    aim = stated.target_epsilon
    if type(aim) not in (int, float, NoneType):
        raise ValueError(
            f"{REPORT_FILE} says target_epsilon: {str(aim)[:80]!r}, which is no number."
        )
    if paid := stated.budget:
        counted, known = paid["entries"], paid["epsilon"] <= paid["ceiling"]
        if type(counted) is not int or counted < 1 or not known:
            raise ValueError(f"{REPORT_FILE} says what no budget file does: {paid}.")
    if not plan.private:
        return
    own_aim = aim is not None and stated.tuning in WORDS and header.get("federated") is None
    planned = plan.epsilon(stated.target_delta) if own_aim and stated.target_delta else 0.0
    if aim is not None and planned > aim * (1 + 1e-6):
        raise ValueError(
            f"{REPORT_FILE} says target_epsilon: {aim}, and the plan costs {planned:.6g}."
        )
    alone = [run["epsilon"] for run in aside if run["epsilon"] is not None]
    for said, delta, others in (
        (stated.set_aside.get("epsilon"), stated.delta, alone),
        (paid.get("epsilon"), paid.get("delta", stated.delta), []),
    ):
        if said is None:
            continue
        bracket = epsilon_bracket(plan.own_parts(), delta, said)
        least = bracket[0] if bracket else epsilon_together(plan.own_parts(), delta)
        least = max(least, *others) if others else least
        if said * (1 + 1e-6) < least:
            raise ValueError(
                f"{REPORT_FILE} says {said:.6g} for several, and one of them alone is {least:.6g}."
            )


def _check_entry(value: Any, key: str = "") -> None:
    """Refuses keys and texts that no run of ours writes, but in plans, which are plans and no more."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name not in _ENTRIES:
                raise ValueError(f"{REPORT_FILE} has {name[:80]!r}, which no run of ours writes.")
            if name != "plan":
                _check_entry(item, name)
    elif isinstance(value, list):
        for item in value:
            _check_entry(item, key)
    elif isinstance(value, str | bool) and not re.fullmatch(_ENTRIES.get(key, _WORD), str(value)):
        raise ValueError(
            f"{REPORT_FILE} says {key}: {str(value)[:80]!r}, which no run of ours does."
        )


def _check_recipe(settings: Mapping[str, Any], stated: PrivacyReport, federated: bool) -> None:
    """Refuses a published recipe of another target, relation or unit than the report's."""
    unit = stated.privacy_unit
    wanted: dict[str, Any] = {"neighboring_relation": stated.neighboring_relation}
    wanted["unit_column"] = None if unit in (EXAMPLE, BLOCK) else _column(unit)
    # a sweep's target is another one, and clients may have their own
    if stated.tuning in WORDS and not federated:
        wanted |= {"target_epsilon": stated.target_epsilon, "target_delta": stated.target_delta}
    for name, value in wanted.items():
        said = settings.get(name)
        other = said is not None and (said != value or isinstance(said, bool))
        if other or (name == "unit_column" and said != value):
            raise ValueError(f"{RECIPE_FILE} says {name}: {said}, and {REPORT_FILE} {value}.")


def epsilon_holds(report: PrivacyReport, trajectory: Trajectory) -> str:
    """Compares epsilon with that of the plan in the log by `privacy.bracket`, another accountant.

    A claim below its lower end is false of the plan. One above its upper end says more than the plan
    costs, as those of looser accountants and of whole searches for settings do.
    """
    if not report.private:
        raise NotChecked("none is claimed: the report says NOT PRIVATE")
    plan = PrivacyPlan.from_dict(trajectory.header["plan"])
    if (counted := counted_steps(trajectory.header, trajectory.next_step)) < trajectory.next_step:
        raise NotChecked(
            f"of the {trajectory.next_step} releases {counted} are said to be of the client that the "
            "report is about, which no log shows"
        )
    parts = [part for before, done in plan.after for part in before.own_parts(done)]
    parts += plan.own_parts(counted)
    bracket = epsilon_bracket(parts, report.delta, report.epsilon)
    if bracket is None:
        raise NotChecked(
            f"only by {report.accountant}, as the report: the second accountant knows no truncated "
            "batches, Laplace noise, long schedules of noise, or delta below 1e-10"
        )
    low, high = bracket
    if report.epsilon * (1 + 1e-6) < low:
        raise ValueError(
            f"{REPORT_FILE} states epsilon = {report.epsilon:.6g} at delta = {report.delta:g}, and the "
            f"plan in {TRAJECTORY_FILE} costs at least {low:.6g}."
        )
    alone = "" if report.tuning in WORDS else ", for one run without the search for settings"
    ends = f"between {low:.4g} and {high:.4g}" if report.epsilon <= high else f"at least {low:.4g}"
    return (
        f"{round_up(report.epsilon)} at delta {number(report.delta)} by {report.accountant}; a second "
        f"accountant, of other code, says {ends}{alone}"
    )


def noise_holds(report: PrivacyReport, trajectory: Trajectory) -> str:
    """Compares the released values with the noise that the plan says is in them.

    Given the past, a value is a signal and Gaussian noise, so the sum of squares over the noise's
    variance is, in distribution, at least a chi-square (Anderson 1955). Where it is too small for that
    the values were not noised as stated; where not, nothing is known of where the noise came from.
    """
    from scipy.special import chdtri

    plan = PrivacyPlan.from_dict(trajectory.header["plan"])
    mechanism: Any = plan.mechanism
    numbers = mechanism.replayable and mechanism.distribution == "gaussian"
    if not report.private or not trajectory.releases or not numbers:
        raise NotChecked("the log has no numbers with Gaussian noise")
    if trajectory.header.get("federated") or plan.correlation is not None:
        raise NotChecked("means over clients, and correlated noise, have other scales")
    schedule, seen, squares = MechanismSchedule(mechanism, plan.scheduled), list[Release](), 0.0
    for release in trajectory.releases:
        own: Any = schedule.after(seen)
        scale = own.noise_scale / own.divisor
        squares += math.fsum((v / scale) ** 2 for v in release.values[: trajectory.num_directions])
        seen.append(release)
    count = len(seen) * trajectory.num_directions
    share = math.sqrt(squares / float(chdtri(count, 1 - CHANCE)))
    if share < 1:
        raise ValueError(
            f"the {count} released values hold at most {share:.3g} times the noise that the plan in the "
            f"log states, but for a chance of {CHANCE:g}: it is not the plan that ran."
        )
    return f"the {count} released values can hold the stated noise, and not {share:.3g} times it"


def card_holds(folder: Path, report: PrivacyReport, trajectory: Trajectory) -> str:
    """Compares what the card says of privacy with the report and the record of private evaluations.

    Below its metadata and a title the card has the statement, the table, private evaluations and
    limitations, line for line, so nothing of its author's stands between them; the rest is the
    author's. Only a private run has the tag.
    """
    from huggingface_hub import ModelCard

    if not (folder / CARD_FILE).is_file():
        raise NotChecked(f"there is no {CARD_FILE}")
    text, made = (folder / CARD_FILE).read_text("utf-8"), evaluations_in(folder)
    front, _, body = text.removeprefix("---\n").partition("\n---\n")
    ends = re.search(r"(?m)^(---|\.\.\.)", front)  # for some readers
    if not text.startswith("---\n") or ends:  # a viewer would show it
        raise ValueError(f"{CARD_FILE} does not begin with a line --- and metadata.")
    title, _, stated = body.strip("\n").partition("\n")
    if not title.startswith("# "):
        raise ValueError(f"{CARD_FILE} begins with {title!r}, which is no title.")
    if other := _other_words(stated, report, made):
        if not all(_other_words(stated, report, made[:count]) for count in range(len(made))):
            raise ValueError(
                f"{CARD_FILE} was written before the last of the {len(made)} private evaluations on "
                "record. `hf-dpzero push` writes it again, or `reporting.hub.write_model_card`."
            )
        raise ValueError(
            f"{CARD_FILE} says below its title {other}: it was edited, or is of another run or version "
            "of this package. Words of your own come behind the limitations; "
            "`hf_dpzero.reporting.hub.write_model_card` writes the rest from the report."
        )
    units = [_column(m.privacy_unit) for m in made if m.of_units]
    names = [*_names(report, trajectory), *(t for m in made for t in (m.rows, m.metric)), *units]
    sources = [m.noise_source for m in made if not re.fullmatch(_NOISE, m.noise_source)]
    if odd := _odd_name(names) or next(iter(sources), None):
        raise NotChecked(f"it prints {odd!r}, a name that could be a claim")
    if "<" in front + title or not title.isprintable():
        raise NotChecked(f"its metadata, or title {title!r}, could hide from a viewer what follows")
    tags = ModelCard(text).data.to_dict().get("tags") or ()
    if not report.private and "differential-privacy" in tags:
        raise ValueError(f"{CARD_FILE} is tagged differential-privacy, and is NOT PRIVATE.")
    joint = ""
    if made:
        joint = f" By the record of {len(made)} private evaluations: {together(report, made)}"
    return (
        f"statement, table and {len(report.caveats)} limitations are the report's; metadata, the "
        f"title {title[2:]!r} and all that follows the limitations are its author's.{joint}"
    )


_NEXT = "\n## "


def _other_words(
    stated: str, report: PrivacyReport, made: Sequence[PrivateEvaluation]
) -> str | None:
    """Where a card does not begin with its claims: what it says and what it should; else None."""
    from hf_dpzero.reporting.model_card import model_card

    _, _, written = model_card(report, evaluations=made).text.strip().partition("\n")
    before, limits, after = written.partition("\n## Limitations\n")
    wanted = _lines(f"{before}{limits}{after.partition(_NEXT)[0].rstrip()}\n\n")
    found = _lines(stated)
    at = next((i for i, line in enumerate(wanted) if line not in found[i : i + 1]), len(wanted))
    if at == len(wanted) and next(filter(None, found[at:]), "## ").startswith("## "):
        return None
    said, meant = (" ".join(lines[at : at + 1]) for lines in (found, wanted))
    return f"{said[:200]!r} where the report has {meant[:200]!r}"


def _lines(text: str) -> list[str]:
    """Lines as Markdown sees them, of which spaces at the end say nothing."""
    return [line.rstrip(" \t") for line in [*text.rstrip().split("\n"), ""]]


def page(name: str, found: Sequence[Finding], unseen: Sequence[str]) -> str:
    """The findings as one page of text, which ends with what was not seen."""
    marks = {True: "verified", False: "REFUSED", None: "not checked"}
    verdict = "Whatever could be checked holds."
    if any(f.holds is False for f in found):
        verdict = "NOT VERIFIED: what is refused above does not hold, or could not be seen to."
    paragraphs = [
        *((f"{marks[f.holds]:<12} {f.claim:<8} ", f.text) for f in found),
        ("", f"{_printable(name)}: {verdict} No check of a folder can show:"),
        *(("  - ", text) for text in unseen),
    ]
    return "\n".join(
        textwrap.fill(text, 100, initial_indent=first, subsequent_indent=" " * len(first))
        for first, text in paragraphs
    )
