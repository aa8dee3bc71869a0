"""`hf-dpzero plan`: the noise that a budget needs, or the epsilon that a noise spends; of a recipe also
the memory of its run.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_dpzero.cli.many_runs import items_of
from hf_dpzero.cli.options import Plan
from hf_dpzero.privacy.correlated.correlation import step_deviation
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.words import gain_against_uniform, group_words, schedule_words
from hf_dpzero.values import encode

if TYPE_CHECKING:
    from hf_dpzero.experiments.plan import Section
    from hf_dpzero.recipes.recipe import Recipe
    from hf_dpzero.settings.config import DPZeroConfig


def run_plan(arguments: Plan) -> None:
    """Computes and prints the plan; see `_facts` and `_of_recipe` for the keys of --json."""
    from rich.console import Console
    from rich.table import Table

    from hf_dpzero.recipes.recipe import COMMAND_LINE, build_recipe, load_recipe, parse_overrides

    given, path = parse_overrides(arguments.overrides), arguments.recipe
    sections: Mapping[str, Section] = {}
    together = items_of("rows_of_one", arguments.rows_of_one, int) or ()
    with (
        Console(stderr=True).status("planning: noise, epsilon, memory"),  # on terminals only
        tempfile.TemporaryDirectory() as scratch,
    ):
        if arguments.propose is not None or arguments.rows_per_second is not None:
            given |= _proposed(arguments, {**given, "output_dir": scratch})
        if path is not None:
            recipe = load_recipe(path, {**given, "output_dir": scratch})
            privacy, sections = _of_recipe(recipe, arguments.num_examples, together)
        else:
            if arguments.num_examples is None:
                raise ValueError(
                    "num_examples is missing; give --num_examples N, or --recipe FILE."
                )
            needed = ["max_steps"]
            needed += ["expected_batch_size"] * (given.get("sampling") != "full_batch")
            for name in needed:  # no setting has a default for them
                if name not in given:
                    raise ValueError(f"{name} is missing; give --{name} N, or --recipe FILE.")
            clip = {"clip": 1.0} if arguments.propose is None else {}
            settings = {**clip, **given, "output_dir": scratch, "model_name_or_path": "any"}
            config = build_recipe([], {"use_cpu": True, **settings}, COMMAND_LINE).training
            privacy = _of_settings(config, config.plan(arguments.num_examples), together)
            if clip and "clip" not in given:  # then noise has no unit, and no rate is chosen for it
                privacy = {k: v for k, v in privacy.items() if k not in ("chosen", "learning_rate")}
    if arguments.json:
        print(json.dumps(encode({**privacy, **sections}), indent=2))
        return
    shown = dict(privacy)
    for relation, epsilon in shown.pop("epsilon_by_relation", {}).items():
        shown[f"epsilon under {relation}"] = epsilon  # of the same noise
    for rows, epsilon in shown.pop("epsilon_of_rows", {}).items():
        shown[f"epsilon of {rows} rows of one person"] = epsilon
    table = Table(title="privacy plan", show_header=False)
    for name, value in shown.items():
        if value is not None:
            table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if sections:
        from hf_dpzero.experiments.plan import print_sections

        print_sections(sections)


def _proposed(arguments: Plan, given: Mapping[str, Any]) -> dict[str, str]:
    """Returns K, B and T for the time at hand, as one would write them on the command line."""
    from hf_dpzero.estimators.finite_differences import passes_of
    from hf_dpzero.experiments.plan import count_rows
    from hf_dpzero.recipes.recipe import COMMAND_LINE, build_recipe, load_recipe
    from hf_dpzero.settings.defaults import differences_for
    from hf_dpzero.settings.proposal import propose

    rate, minutes = arguments.rows_per_second, arguments.propose
    if not (rate and minutes and 0 < rate < math.inf and 0 < minutes < math.inf):
        raise ValueError(
            f"--propose {minutes} --rows_per_second {rate}: both are needed, above 0; "
            "`hf-dpzero evaluate RECIPE --zero_shot` says eval_samples_per_second, which is about that."
        )
    if "max_steps" in given:
        raise ValueError(
            f"max_steps={given['max_steps']} is what --propose chooses; leave one of them out."
        )
    n = arguments.num_examples
    if arguments.recipe is not None:
        recipe = load_recipe(arguments.recipe, given)
        n = count_rows(recipe, n).train
    else:
        settings = {"use_cpu": True, "max_steps": "1", **given, "model_name_or_path": "any"}
        recipe = build_recipe([], settings, COMMAND_LINE)
    config = recipe.training
    if config.method != "dpzero" or n is None or config.target_epsilon is None:
        raise ValueError(
            f"--propose needs method: dpzero (it is {config.method}), n (it is {n}; --num_examples N) "
            f"and target_epsilon (it is {config.target_epsilon})."
        )
    chosen = propose(
        n, config.target_epsilon, config.delta(n), minutes, rate,
        lambda k: passes_of(differences_for(config, k), k),
        *(int(float(given[name])) if name in given else None
          for name in ("num_directions", "expected_batch_size")),
    )  # fmt: skip
    words = zip(("num_directions", "expected_batch_size", "max_steps"), chosen[:3], strict=True)
    return {name: str(value) for name, value in words}


def _of_settings(config: DPZeroConfig, plan: PrivacyPlan, together: Sequence[int] = ()) -> Section:
    """Returns `_facts` of a plan, and what is chosen for it; without privacy epsilon is infinite.

    With `epsilon_of_rows` of one person for each number in `together`.

    The first rate stands there if it is `chosen`.
    """
    if config.not_private:
        return {**_setting(plan), "epsilon": math.inf, "delta": None, "private": False}
    from hf_dpzero.settings.defaults import learning_rate

    facts = _facts(plan, config.delta(plan.sampler.num_examples), config.target_epsilon)
    if "learning_rate" in config.chosen and plan.private:
        facts["learning_rate"] = learning_rate(plan, config.lr_scheduler_type)
    if together:
        if config.unit_column is not None or min(together) < 1:
            raise ValueError(
                f"--rows_of_one {' '.join(map(str, together))} with unit_column={config.unit_column!r}: "
                "give numbers of at least 1, and only where each row is a unit (with unit_column "
                "epsilon holds for all rows of a unit)."
            )
        delta = config.delta(plan.sampler.num_examples)
        facts["epsilon_of_rows"] = {m: plan.epsilon_of_group(delta, m) for m in together}
    return facts | ({"chosen": sorted(config.chosen)} if config.chosen else {})


def _of_recipe(
    recipe: Recipe, num_examples: int | None, together: Sequence[int]
) -> tuple[Section, Mapping[str, Section]]:
    """Returns `_facts` of a recipe's plan, with the method and where n comes from; and its memory.

    Without n there is no plan, and `missing` says what to give.
    """
    from hf_dpzero.experiments.plan import overview

    known, args = overview(recipe, num_examples), recipe.training
    facts: Section = {"method": args.method, "num_examples_from": known.rows.source}
    if known.plan is not None:
        return facts | _of_settings(args, known.plan, together), known.sections
    facts |= {"num_examples": None, "expected_batch_size": args.expected_batch_size}
    facts |= {"sampling": args.sampling, "epsilon": None, "missing": known.rows.source}
    return facts, known.sections


def _facts(plan: PrivacyPlan, delta: float, target_epsilon: float | None) -> Section:
    """Returns the plan in numbers: what is printed.

    `noise_std` is the standard deviation of the noise on each of the K released means, in loss
    units per unit of smoothing; `noise_std_in_clip_over_batch` is the same in units of C / B, which
    for Gaussian noise is the noise multiplier and for Laplace noise sqrt(2) times it (that
    multiplier is the scale b / C); of noise that is correlated over steps, the largest of a step.
    `epsilon_by_relation` is what the *same* noise spends under each neighbouring relation; a text
    there says why it is not accounted.
    """
    mechanism = plan.mechanism
    deviation = math.sqrt(2.0) if mechanism.distribution == "laplace" else 1.0
    std = deviation * mechanism.noise_multiplier * step_deviation(plan)
    facts = {
        **_setting(plan),
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_std_in_clip_over_batch": std,
        "noise_std": std * mechanism.clip / mechanism.expected_batch_size,
        "target_epsilon": target_epsilon,
        "epsilon": plan.epsilon(delta),
        "delta": delta,
        "neighboring_relation": plan.relation,
        "accountant": plan.accountant_used,
    }
    for name, text in schedule_words(plan).items():
        facts["noise_correlation" if name == "correlation" else f"{name}_schedule"] = text
    if plan.noise_schedule is not None:
        facts["gain_against_uniform"] = gain_against_uniform(plan, delta)
        for quarter in (1, 2, 3):
            steps = round(plan.steps * quarter / 4)
            facts[f"epsilon_after_{steps}_steps"] = plan.epsilon(delta, at=steps)
    if plan.groups is not None:
        facts["groups"] = group_words(plan)
    return {**facts, "epsilon_by_relation": plan.epsilon_by_relation(delta)}


def _setting(plan: PrivacyPlan) -> Section:
    """Returns what is sampled how often, clipped to what, along how many directions."""
    return {
        "num_examples": plan.sampler.num_examples,
        "expected_batch_size": plan.mechanism.expected_batch_size,
        "sampling": plan.sampler.name,
        "sampling_probability": plan.sampler.sampling_probability,
        "steps": plan.steps,
        "clip": plan.mechanism.clip,
        "num_directions": getattr(plan.mechanism, "num_directions", None),
        "noise_distribution": getattr(plan.mechanism, "distribution", None),
    }
