"""What a claim assumes and does not cover, each with a grade of how much a reader should look at it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_dpzero.privacy.schedules import Given, GivenFactors
from hf_dpzero.privacy.selection import Tuning
from hf_dpzero.reporting.wording import (
    BASE_WEIGHTS,
    BLOCK,
    EXAMPLE,
    delta_words,
    number,
    round_up,
    search_words,
)

if TYPE_CHECKING:
    from hf_dpzero.privacy.plan import PrivacyPlan


CLAIMED = re.compile(
    r"[\w ,]{1,120} (\((?:inf|[\d.]+), [\d.e-]+\)-differentially private under (?:adding or removing|"
    r"replacing) one (?:training example|training block of text|[\w.-]{1,40} with all its rows)"
    r"(?: by another| by an empty one)?): "
)


def base_caveats(earlier_runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What an epsilon leaves out where the base model was trained before; not private runs first."""
    found = []
    for run in sorted(earlier_runs, key=lambda run: bool(run["private"])):
        claim = CLAIMED.match(run["statement"])  # the rest is its publisher's words
        known = claim[1] if claim else "private"
        says = known if run["private"] else "NOT PRIVATE"
        same = (
            "if private rows of it are among this run's, the budgets add up."
            if run["private"]
            else "with respect to the rows that it was trained on this model is not private either."
        )
        found.append(
            f"The base model came out of an earlier run ({run['folder']}), which says that it "
            f"is {says}. The epsilon of this run does not cover that one: {same}"
        )
    return found


GRADES = ("check first", "depends on the deployment", "exotic")


def caveats(
    facts: Mapping[str, Any], plan: PrivacyPlan, tuning: Tuning, header: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What the guarantee assumes and does not cover, each with its grade.

    Returns:
      (one of `GRADES`, sentence), by falling grade: first what nothing in the run can see, then a base
      model that is not private.
    """
    evaluation, constants, logs = _COMMON_CAVEATS
    rows = facts["privacy_unit"] in (EXAMPLE, BLOCK)
    coupled = _COUPLING_CAVEATS[facts["forward_passes"]]
    radii, unit = plan.mechanism.sensitivity_add_remove, "example" if rows else "unit"
    most = radii + 2 * getattr(plan.mechanism, "rows_per_unit", 1)
    exotic = [constants, coupled.format(unit=unit, most=most, radii=radii)]
    several = facts["processes"] not in ("", "1")
    links = [_LINKS_CAVEAT.format(facts["processes"])] if several else []
    of_base = base_caveats(facts["earlier_runs"])
    leaky = sum(not run["private"] for run in facts["earlier_runs"])
    earlier = facts["parts"][:-1]
    starts = [*(part["base_weights"] for part in earlier), facts["base_weights"]]
    known = search_words(tuning).caveat + ("" if facts.get("budget") else _ALONE)
    first = [UNSEEN_CAVEAT, *of_base[:leaky], *public_caveats(header), evaluation, known]
    first += [_BLOCKS_CAVEAT] if facts["privacy_unit"] == BLOCK else []
    first += [_ROW_UNIT_CAVEAT if rows else _UNIT_CAVEAT]
    first += [words for start in dict.fromkeys(starts) if (words := BASE_WEIGHTS[start])]
    first += [*([_CHAIN_CAVEAT] if earlier else []), *of_base[leaky:]]
    own = [f"{text[0].upper()}{text[1:]}." for text in plan.mechanism.caveats]
    own += [_GROUPS_CAVEAT] if plan.groups is not None else []
    if isinstance(plan.noise_schedule, Given) or isinstance(plan.clip_schedule, GivenFactors):
        own.append(
            "The schedule of noise or clip was given as numbers, which must not depend on the data."
        )
    own += [
        f"The run in {part['folder']} counts with the {part['steps']} of {part['planned_steps']} steps "
        "that it took, which holds if the decision to stop did not depend on released values or metrics."
        for part in earlier
        if part["steps"] < part["planned_steps"]
    ]
    weak = weak_claims(plan, facts["epsilon"], facts["delta"]) if facts["private"] else ()
    graded = ([*first, *own, *weak], [*federated_caveats(header), logs, *links], exotic)
    return [(grade, text) for grade, texts in zip(GRADES, graded, strict=True) for text in texts]


def weak_claims(plan: PrivacyPlan, epsilon: float, delta: float) -> list[str]:
    """Says why a claim that holds of a private plan says little; nothing where it says something."""
    n, part = plan.sampler.num_examples, plan.sampler.sampling_probability * plan.steps
    reasons = (
        (epsilon > 20, f"epsilon = {round_up(epsilon)} is above 20: one example may change the odds of "
         "an outcome by a factor of 4.8e8 and more."),
        (delta * n >= 1, f"delta = {delta_words(delta)} is not below 1/n = {number(1 / n)}: a mechanism "
         "that publishes a random example satisfies that too."),
        (part < delta and not plan.after, f"q T = {number(part)} is below delta = {delta_words(delta)}: "
         "a run without noise, which takes an example with no larger probability, satisfies it too."),
        (n < 100, f"n = {n} is below 100: noise that hides one of so few examples hides what they have "
         "in common too."),
    )  # fmt: skip
    return [WEAK + text for holds, text in reasons if holds]


WEAK = "The claim says little: "
"""What a sentence of `weak_claims` begins with."""

_CHAIN_CAVEAT = (
    "The epsilon is of this run and of those that it extends together, taken to be on the same rows. "
    "It assumes that their settings (noise, sampling, number of steps), and whether there would be a "
    "next run, were fixed without looking at what earlier ones released. Of two runs that extend the "
    "same one, each reports its own chain: together they cost more."
)

_GROUPS_CAVEAT = (
    "The names of the groups and their shares were given as public "
    "(group_robust.shares), from outside of the "
    "training rows, which nothing here can check; counted on these rows, they would be published "
    "without "
    "noise. Which group a row belongs to is private, as the rest of it."
)

_BLOCKS_CAVEAT = (
    "A training row is a block of text: it may hold parts of several examples or documents, and one "
    "document may lie in many blocks. The guarantee is for one block, not for an example, a document or "
    "a person."
)

_ALONE = (
    " Other releases about these rows (other runs, private evaluations) are not known here: budget_file "
    "would count them."
)
"""Of a run without a budget file."""

UNSEEN_CAVEAT = (
    "The loss, class weights, normalisation statistics, the vocabulary, the base model and the settings "
    "are assumed to be made without the private rows: a class weight counted on private labels lets one "
    "row move the loss of every other, and nothing here can see it."
)
"""The first of all: nothing in a run contradicts it where it does not hold."""

_COMMON_CAVEATS = (
    "Evaluation data is assumed public, or paid for elsewhere: its metrics are published without "
    "noise and may have chosen the checkpoint.",
    "The number of training examples, the sampling probability, the expected batch size, the number of "
    "steps and the noise multiplier are public constants of the claim: they are not derived again for "
    "the neighbouring data set, also where it has one row more or less.",
    "The guarantee covers the weights, the released numbers and what is computed from them. Logs, "
    "progress bars and monitoring files tell when a step ended, which depends on the rows it drew: they "
    "stay on the training machine. Memory use, aborted runs and other side channels are not covered "
    "either.",
)

_DRAWN = (
    " A subset drawn from a larger private set beforehand is taken as fixed. Of a file that a recipe "
    "draws from (few-shot, max_train_samples) one {0} more or less replaces at most one drawn {0}: the "
    "claim about the file under adding or removing is that about the draw under replacing one."
)

_ROW_UNIT_CAVEAT = (
    "The privacy unit is a row as it was given to the trainer: several rows of one person, and texts "
    "that were packed together or split up before, are not one unit (`hf-dpzero plan --rows_of_one 10` "
    "says what ten rows of a person are protected by, unit_column makes them one unit)."
    + _DRAWN.format("row")
)

_UNIT_CAVEAT = (
    "Which rows are one unit was read from a column of the private rows: what a person has under two "
    "values of it counts as two units. How many units there are is public." + _DRAWN.format("unit")
)

_LINKS_CAVEAT = (
    "The run began in several processes, {}; resumed, it may have gone on in another number. The links "
    "between them, and every machine that runs one, are assumed to be as private as one training "
    "machine: torch.distributed (gloo, NCCL) sends sums of finite differences or gradients before "
    "noise, with shares of the directions losses of single examples, with groups the sums of their "
    "losses, with FSDP2 numbers of forward passes, and the secret key that batches are drawn by, "
    "neither encrypted nor authenticated. The first process draws the noise, and neither its values nor "
    "its keys are sent; but a sum and the released number tell the noise that is between them."
)

_COUPLING_CAVEATS = {
    "fixed shapes": "What an example adds to a step is assumed not to depend on the others in its "
    "forward pass, and to move by at most 2^-8 of the clipping norm with its place there: both were "
    "tried before training on invented rows, at two widths. Where places move it further, adding or "
    "removing one {unit} moves the sum of a step by at most {most} clipping norms in place of {radii}.",
    "one example": "An example's loss is assumed not to depend on those evaluated before it; each was "
    "evaluated by itself.",
    "": "An example's loss or gradient is assumed not to depend on the others in its microbatch (tried "
    "on a few rows before training), but for rounding, which couples them, unaccounted.",
}
"""By a report's `forward_passes`."""

FEDERATED_CAVEATS = (
    "Local: the guarantee of each client holds against the server and everybody who reads the messages. "
    "The other clients, the metrics and the weights know no more than the messages.",
    "It is for one row of one client. All rows of a client together, and whether a client took part at "
    "all, are not covered.",
    "Which rows a client has is taken as fixed. Sizes of shards and the rounds a client takes part in "
    "are public. Being away must not depend on the rows.",
    "The time that an answer takes is not covered: it tells how many rows a round drew, and how long "
    "they are, to whoever sees when messages travel.",
    "A client that is not honest can spoil the model: it declares its number of rows, which weighs its "
    "mean, its noise, which bounds its values, and its delta: the run's own report is stated at the "
    "largest of all. Nothing here finds it. The others' guarantee stands.",
    "A row that is with several clients, or in several runs or output folders, is charged by each of "
    "them, and the charges add up; nothing here knows of the others.",
)


def public_caveats(header: Mapping[str, Any]) -> list[str]:
    """The caveat of a run on components that were fitted to public text; none for other runs.

    >>> public_caveats({})
    []
    """
    digest = header.get("public_texts")
    if digest is None:
        return []
    return [
        "The features are components that were fitted, without noise, to text that the user gave as "
        f"public (SHA-256 {str(digest)[:16]}). Only text that is exactly that of a training row was "
        "looked for when they were fitted; whatever else the two share is not covered."
    ]


def federated_caveats(header: Mapping[str, Any]) -> list[str]:
    """Caveats of a federated run; none for other runs.

    >>> federated_caveats({})
    []
    """
    common = header.get("federated")
    if common is None:
        return []
    return [
        "Federated: the numbers are those of the client with the largest epsilon, one of "
        f"{common['clients']:d}; the run's federated_report.json has them all.",
        *FEDERATED_CAVEATS,
    ]
