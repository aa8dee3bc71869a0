"""The sentences of a privacy report: what is guaranteed, and why not."""

from __future__ import annotations

import decimal
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_dpzero.privacy.noise import is_seeded
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


RATE_OF_HEAD = (
    "learning_rate={} was given, at which a fresh head makes {} of the movement that noise, clip, B "
    "and T allow: {} is taken, as if it were left out. learning_rate_is_final=True keeps a given one."
)
RATE_FAR_OFF = (
    "learning_rate={} was given; from the noise, the clip, B and T it would be {}, so the weights move "
    "{} of the way that they would. Rates of training with gradients do not carry over: leave it out, "
    "unless it was found for this method."
)
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
    _, _, released, trials, afterword = search_words(tuning)
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


def search_words(tuning: Tuning) -> _Search:
    """The words for a report's `tuning`."""
    if isinstance(tuning, str):
        return _SEARCHES[tuning]
    ((kind, entry),) = tuning.items()
    known = {**entry, "one_run": round_up(entry.get("epsilon_one_run", 0.0))}
    return _Search(*(text.format(**known) for text in _SEARCHES[kind]))


def tuning_words(tuning: Tuning) -> str:
    """Says in a few words how settings were chosen (the report's `tuning`), for a table."""
    return search_words(tuning).row


DEPLOYMENTS = {
    "central": "central: who holds the rows, and the machines that train, are trusted; others are not",
    "federated": "federated: each client is trusted with its own rows, nobody with those of others",
}


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
    if "plan" not in header or type(steps) is not int or steps < 1:
        raise ValueError(
            "this trajectory is of a federated run that did not end, and no report was written for "
            "it: finish the run with `hf-dpzero federate RECIPE --resume` (on several machines, "
            "submit it again)."
        )
    return steps
