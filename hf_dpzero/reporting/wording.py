"""The sentences of a privacy report: what is guaranteed, why not, and what is not covered."""

from __future__ import annotations

import decimal
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_dpzero.privacy.noise import is_seeded
from hf_dpzero.privacy.schedules import Given, GivenFactors
from hf_dpzero.privacy.selection import Tuning

if TYPE_CHECKING:
    from hf_dpzero.privacy.plan import PrivacyPlan

RELATIONS = {
    "add_or_remove_one": "adding or removing one {unit}",
    "replace_one": "replacing one {unit} by another",
    "replace_special": "replacing one {unit} by an empty one",
}
SAMPLERS = {
    "poisson": "Poisson sampling with probability {q}",
    "truncated_poisson": "Poisson sampling with probability {q}, truncated at a maximum batch size",
    "fixed_size_without_replacement": "batches of a fixed size drawn without replacement",
    "full_batch": "every example in every step",
    "fixed_batches": "fixed batches, each example once an epoch",
}
EXAMPLE, BLOCK = "example", "block of text"
"""Privacy units: what one row of the training set is."""


def unit_words(column: str) -> str:
    """Names the unit whose rows have the same value in a column."""
    return f"{column} with all its rows"


NOT_PRIVATE_METHODS = ("mezo", "sgd", "adamw")
EQUAL, DECLARED, NOT_COMPARED = "equal_to_named", "declared_public", "not_compared"
EQUAL_BUT_NEW, EXTENDED = "equal_to_named_but_new_parts", "of_the_extended_run"
TRAINED = "trained_before"
BASE_WEIGHTS = {
    EQUAL: None,
    EXTENDED: None,
    EQUAL_BUT_NEW: "The weights at the start were those of the model that the configuration names, "
    "except for parts that it does not have, such as a new head or adapter. These are taken as freshly "
    "initialised, which nothing here can check.",
    DECLARED: "The weights at the start were not those of the model that the configuration names, or "
    "had been trained before in the same process. They were declared public (base_is_public), which "
    "nothing here can check.",
    TRAINED: "The weights at the start had been trained before, which a run that is not private may.",
    NOT_COMPARED: "The weights at the start were not compared with the model that the configuration "
    "names: it names none, none that lies on the machine that trained, or one that was not loaded.",
}
"""What the weights were at the start of a run, and the caveat that it takes."""


def round_up(value: float) -> str:
    """A number of at least 0 in words that never understates it: at most 4 significant digits.

    >>> round_up(1.99811), round_up(2.0), round_up(12.00001), round_up(math.inf)
    ('1.999', '2', '12.01', 'inf')
    """
    if math.isinf(value):
        return "inf"
    context = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
    text = f"{context.create_decimal(decimal.Decimal(value)):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def delta_words(delta: float) -> str:
    """A delta in words that never understates it: at most 6 significant digits, rounded up.

    >>> delta_words(1e-5), delta_words(0.1 / 67349), delta_words(0.0)
    ('1e-05', '1.48481e-06', '0')
    """
    context = decimal.Context(prec=6, rounding=decimal.ROUND_CEILING)
    # By repr: in binary 1e-5 is a trifle more than that, and would be rounded up to 1.00001e-05.
    return number(float(context.create_decimal(repr(delta))))


def number(value: float) -> str:
    """At most 6 significant digits, without a trailing ".0".

    >>> number(64.0), number(0.0625), number(1e-5)
    ('64', '0.0625', '1e-05')
    """
    return f"{value:.6g}"


def relation_words(relation: str, unit: str) -> str:
    """Says in words which two data sets a relation (a key of `RELATIONS`, or any text) compares."""
    of_rows = f"training {unit}" if unit in (EXAMPLE, BLOCK) else unit
    return RELATIONS.get(relation, relation).format(unit=of_rows)


def why_not_private(
    *,
    method: str,
    epsilon: float,
    noise_source: str,
    log_private_diagnostics: bool,
    batches_secret: bool = True,
) -> str | None:
    """The first reason why no (epsilon, delta) may be claimed for the run's output.

    Args:
      method: the mechanism's name.
      epsilon: of the run; inf if nothing bounds it.
      noise_source: the noise source's name; insecure ones start with "insecure".
      log_private_diagnostics: un-noised statistics were logged.
      batches_secret: the sampler key is secret, or the guarantee does not need it to be.

    Returns:
      The reason in words, or None for a private run.
    """
    if method in NOT_PRIVATE_METHODS:
        return f"the method {method} neither clips nor adds noise"
    if math.isinf(epsilon):
        return "no finite epsilon bounds what the run released"
    if is_seeded(noise_source):
        return "the noise came from a seeded generator, so anyone with the seed can subtract it"
    if not batches_secret:
        return (
            "testing.sampler_key was set by hand, so the batches can be known and are not amplified"
        )
    if log_private_diagnostics:
        return "un-noised statistics of the training data were logged (testing.log_private_diagnostics)"
    return None


def needs_secret_batches(plan: PrivacyPlan) -> bool:
    """Whether the guarantee rests on a secret sampler key: for sampled batches, or drawn groups."""
    averaged = getattr(plan.mechanism, "clipping", "fixed") == "averaged"
    return averaged or plan.sampler.name != "full_batch"


def statement(facts: Mapping[str, Any], plan: PrivacyPlan, tuning: Tuning = "none") -> str:
    """The guarantee in one sentence, and one more where training stopped early or settings were tuned.

    Args:
      facts: of a report: epsilon (the total, where tuning is accounted), delta, steps, earlier runs,
        and so on.
      plan: that ran.
      tuning: the report's `tuning` entry.
    """
    sampling = SAMPLERS.get(facts["sampling"], facts["sampling"])
    _, _, released, trials, afterword = _search(tuning)
    earlier = facts["parts"][:-1]
    if earlier:
        runs = f"this run and of {len(earlier)} before it"
        released = f"The weights and the trajectories of {runs} are together"
        afterword = f" That includes {'; '.join(map(part_words, earlier))}.{afterword}"
    if leaky := [run["folder"] for run in facts["earlier_runs"] if not run["private"]]:
        afterword += (
            f" This does not cover the base model, which came out of an earlier run, {leaky[0]}, which "
            "is NOT PRIVATE for its own training rows."
        )
    if facts["steps"] < facts["planned_steps"]:
        afterword = (
            f" That is of the {facts['steps']} of {facts['planned_steps']} steps that were taken: if "
            "released values or metrics decided when to stop, as in early stopping, claim the epsilon "
            f"of the whole plan, {round_up(plan.epsilon(facts['delta']))}.{afterword}"
        )
    groups = f", group losses ({facts['groups']})" if facts["groups"] else ""
    changing = {name: f"{name} schedule {text}" for name, text in facts["schedules"].items()}
    if "correlation" in changing:  # its kind; the table has the rest
        kind = facts["schedules"]["correlation"].partition(";")[0]
        changing["correlation"] = f"correlated over steps: {kind}"
    schedules = "".join(f" ({text})" for text in changing.values())
    noise = f"{plan.mechanism.distribution} noise"
    return (
        f"{released} ({round_up(facts['epsilon'])}, "
        f"{delta_words(facts['delta'])})-differentially private under "
        f"{relation_words(facts['neighboring_relation'], facts['privacy_unit'])}: "
        f"{trials}{facts['steps']} steps of {facts['method']} with "
        f"{sampling.format(q=number(facts['sampling_probability']))}, {noise} of "
        f"multiplier {number(facts['noise_multiplier'])}{schedules}{groups}, "
        f"accountant {facts['accountant']}.{afterword}"
    )


def part_words(part: Mapping[str, Any]) -> str:
    """Says in a few words what one run of a chain (an entry of the report's `parts`) did and cost."""
    return (
        f"{part['folder']}: {part['steps']} of {part['planned_steps']} steps of {part['method']}, noise "
        f"multiplier {number(part['noise_multiplier'])}, epsilon {round_up(part['epsilon'])} alone"
    )


def set_aside_words(set_aside: Mapping[str, Any]) -> str:
    """The runs that were set aside in a run's folder (the report's `set_aside`), for a table."""
    runs = "; ".join(
        f"{run['folder']}: {run['steps']} of {run['planned_steps']} steps of {run['method']}, "
        + ("NOT PRIVATE" if run["epsilon"] is None else f"epsilon {round_up(run['epsilon'])} alone")
        for run in set_aside["runs"]
    )
    together = set_aside["epsilon"]
    added = "no epsilon is known" if together is None else f"epsilon {round_up(together)}"
    return f"{runs}; NOT COVERED by this epsilon: on the same rows, {added} for all together"


def budget_words(paid: Mapping[str, Any]) -> str:
    """What a report says of its entry in a budget file (its `budget`), for a table."""
    return (
        f"epsilon = {round_up(paid['epsilon'])} of {number(paid['ceiling'])} at delta = "
        f"{delta_words(paid['delta'])}, of a budget file as this run began (entries: "
        f"{paid['entries']}), its whole plan included"
    )


def base_words(earlier_runs: Sequence[Mapping[str, Any]]) -> str:
    """The runs that the base model came out of, in a few words, for a table."""
    names = (f"{run['folder']}{'' if run['private'] else ' (NOT PRIVATE)'}" for run in earlier_runs)
    return f"from earlier runs, NOT COVERED by this epsilon: {', '.join(names)}"


def base_caveats(earlier_runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What an epsilon leaves out where the base model was trained before; not private runs first."""
    found = []
    for run in sorted(earlier_runs, key=lambda run: bool(run["private"])):
        same = (
            "if private rows of it are among this run's, the budgets add up."
            if run["private"]
            else "with respect to the rows that it was trained on this model is not private either."
        )
        found.append(
            f"The base model came out of an earlier run ({run['folder']}), which says: "
            f'"{run["statement"]}" The epsilon of this run does not cover that one: {same}'
        )
    return found


class _Search(NamedTuple):
    """Words for one way of choosing settings; {} are filled from the report's `tuning` entry."""

    row: str  # of a table
    caveat: str
    released: str = "The weights and the trajectory of this run are"
    trials: str = ""  # how many runs the epsilon is of
    afterword: str = ""


_SEARCHES = {
    "none": _Search(
        "not accounted; this run alone",
        "Hyper-parameter search is not accounted: epsilon covers this one run. Settings picked by "
        "looking at other runs on the same data spend budget of their own.",
    ),
    "public": _Search(
        "on data that the user declared public",
        "Hyper-parameters were chosen by a sweep on data that the user declared public, which spends "
        "nothing. The declaration is the user's; nothing here can check it.",
    ),
    "not_accounted": _Search(
        "NOT ACCOUNTED; epsilon is for one run alone",
        "Hyper-parameter search on the same data was done and is NOT ACCOUNTED: epsilon covers this one "
        "run, and choosing it among others spent budget that no number here states.",
        afterword=" Hyper-parameter tuning on the same data is NOT ACCOUNTED: this epsilon holds for "
        "one run whose settings were fixed beforehand, not for the best of several.",
    ),
    "repeat_and_select": _Search(
        "included: private selection of the best of a random number of trials (geometric, mean "
        "{mean_trials:.6g})",
        "Hyper-parameter search is accounted by private selection, which needs the number of trials and "
        "all the losing trials to stay secret, the time that the sweep took included. The grid itself "
        "is assumed to be chosen without looking at the private data.",
        "The choice of settings, the weights and the trajectory of this run are together",
        "the best of a secret random number of trials (geometric, mean {mean_trials:.6g}), each ",
        " Hyper-parameter tuning is included (one run alone: epsilon {one_run}).",
    ),
    "composition": _Search(
        "included: all {runs} runs of the sweep composed",
        "Hyper-parameter search is accounted for the runs of one sweep. The grid itself is assumed to "
        "be chosen without looking at the private data.",
        "The weights and the trajectories of all {runs} runs of the sweep are together",
        "{runs} runs, this one ",
        " Hyper-parameter tuning is included.",
    ),
}


def _search(tuning: Tuning) -> _Search:
    """The words for a report's `tuning`."""
    if isinstance(tuning, str):
        return _SEARCHES[tuning]
    ((kind, entry),) = tuning.items()
    known = {**entry, "one_run": round_up(entry.get("epsilon_one_run", 0.0))}
    return _Search(*(text.format(**known) for text in _SEARCHES[kind]))


def tuning_words(tuning: Tuning) -> str:
    """Says in a few words how settings were chosen (the report's `tuning`), for a table."""
    return _search(tuning).row


DEPLOYMENTS = {
    "central": "central: who holds the rows, and the machines that train, are trusted; others are not",
    "federated": "federated: each client is trusted with its own rows, nobody with those of others",
}
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
    most = 1 + 2 * getattr(plan.mechanism, "rows_per_unit", 1)
    exotic = [constants, coupled.format(unit="example" if rows else "unit", most=most)]
    several = facts["processes"] not in ("", "1")
    links = [_LINKS_CAVEAT.format(facts["processes"])] if several else []
    of_base = base_caveats(facts["earlier_runs"])
    leaky = sum(not run["private"] for run in facts["earlier_runs"])
    earlier = facts["parts"][:-1]
    starts = [*(part["base_weights"] for part in earlier), facts["base_weights"]]
    known = _search(tuning).caveat + ("" if facts.get("budget") else _ALONE)
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
    "removing one {unit} moves the sum of a step by at most {most} clipping norms in place of one.",
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
        f"public (SHA-256 {digest[:16]}). Only text that is exactly that of a training row was looked "
        "for when they were fitted; whatever else the two share is not covered."
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
        f"{common.get('clients')}; the run's federated_report.json has them all.",
        *FEDERATED_CAVEATS,
    ]


def counted_steps(header: Mapping[str, Any], releases: int) -> int:
    """Steps that the report of a trajectory counts.

    Returns:
      For a federated run those of the client that the report is about: it may have missed rounds, or
      have released in one that was never closed. Else `releases`.

    Raises:
      ValueError: a federated run that did not end, so that no report is about it.
    """
    common = header.get("federated")
    if common is None:
        return releases
    steps = common.get("steps")
    if "plan" not in header or not isinstance(steps, int) or steps < 0:
        raise ValueError(
            "this trajectory is of a federated run that did not end, and no report was written for "
            "it: finish the run with `hf-dpzero federate RECIPE --resume` (on several machines, "
            "submit it again)."
        )
    return steps
