"""`hf-dpzero plan`: the noise that a budget needs, or the epsilon that a noise spends; of a recipe also
the memory of its run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_dpzero.cli.options import Plan
from hf_dpzero.privacy.correlated.correlation import step_deviation
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.words import gain_against_uniform, group_words, schedule_words
from hf_dpzero.values import encode

if TYPE_CHECKING:
    from hf_dpzero.experiments.plan import Overview
    from hf_dpzero.recipes.recipe import Recipe

RELATIONS = ("add_or_remove_one", "replace_one", "replace_special")


def run(arguments: Plan) -> None:
    """Computes and prints the plan; see `_facts` and `_recipe_facts` for the keys of --json."""
    from rich.console import Console

    sections: Mapping[str, Any] = {}
    with Console(stderr=True).status("planning: noise, epsilon, memory"):  # on terminals only
        if arguments.recipe is not None:
            privacy, sections = _plan_recipe(arguments)
        else:
            privacy = _plan_options(arguments)
    if arguments.json:
        print(json.dumps(encode({**privacy, **sections}), indent=2))
        return
    _print_table(privacy)
    if sections:
        from hf_dpzero.experiments.plan import print_sections

        print_sections(sections)


def _plan_options(arguments: Plan) -> dict[str, Any]:
    """`_facts` of a run of method dpzero that the options alone describe."""
    from hf_dpzero.settings.config import DPZeroConfig

    needed = ["num_examples", "max_steps", "expected_batch_size"]
    if arguments.sampling == "full_batch":
        needed.remove("expected_batch_size")
    for name in needed:
        if getattr(arguments, name) is None:
            raise ValueError(f"{name} is missing; give --{name} N, or --recipe FILE.")
    n = arguments.num_examples or 0
    with tempfile.TemporaryDirectory() as scratch:
        settings = {"clip": 1.0, "output_dir": scratch, "use_cpu": True, **_said(arguments)}
        config = DPZeroConfig(**settings)
    plan = config.plan(n)
    rate = {} if arguments.clip is None else _chosen(config, plan)
    return {**_facts(plan, config.delta(n), config.target_epsilon), **rate}


def _said(arguments: Plan) -> dict[str, Any]:
    """The options that are fields of a recipe, where they were given."""
    no_fields = ("recipe", "num_examples", "json", "traceback", "overrides")
    return {n: v for n, v in vars(arguments).items() if n not in no_fields and v is not None}


def _plan_recipe(arguments: Plan) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """`_recipe_facts` of --recipe with its overrides, and the sections on model and memory."""
    from hf_dpzero.experiments.plan import overview
    from hf_dpzero.recipes.recipe import load_recipe, parse_overrides

    with tempfile.TemporaryDirectory() as scratch:
        overrides = {
            "output_dir": scratch,
            **_said(arguments),
            **parse_overrides(arguments.overrides),
        }
        recipe = load_recipe(arguments.recipe or "", overrides)
        known = overview(recipe, arguments.num_examples)
    return _recipe_facts(recipe, known), known.sections


def _recipe_facts(recipe: Recipe, known: Overview) -> dict[str, Any]:
    """`_facts` of a recipe's plan, with the method and where n comes from.

    Without n there is no plan, and `missing` says what to give. Without privacy epsilon is infinite.
    """
    args = recipe.training
    head = {"method": args.method, "num_examples_from": known.rows.source}
    if known.plan is None:
        batch = {name: getattr(args, name) for name in ("expected_batch_size", "sampling")}
        return {
            **head,
            "num_examples": None,
            **batch,
            "epsilon": None,
            "missing": known.rows.source,
        }
    n = known.plan.sampler.num_examples
    if args.not_private:
        epsilon = {"epsilon": math.inf, "delta": None, "private": False}
        return {**head, **_setting(known.plan), **epsilon}
    facts = _facts(known.plan, args.delta(n), args.target_epsilon)
    return {**head, **facts, **_chosen(args, known.plan)}


def _chosen(config: Any, plan: PrivacyPlan) -> dict[str, Any]:
    """`chosen`: which settings are chosen for the run; and its first rate, if that is one of them."""
    from hf_dpzero.settings.defaults import learning_rate

    if not config.chosen:
        return {}
    rate = "learning_rate" in config.chosen and plan.private
    first = {"learning_rate": learning_rate(plan, config.lr_scheduler_type)} if rate else {}
    return {**first, "chosen": sorted(config.chosen)}


def _facts(plan: PrivacyPlan, delta: float, target_epsilon: float | None) -> dict[str, Any]:
    """The plan in numbers: what is printed.

    `noise_std` is the standard deviation of the noise on each of the K released means, in loss
    units per unit of smoothing; `noise_std_in_clip_over_batch` is the same in units of C / B, which
    for Gaussian noise is the noise multiplier and for Laplace noise sqrt(2) times it (that
    multiplier is the scale b / C); of noise that is correlated over steps, the largest of a step.
    `epsilon_by_relation` is what the *same* noise spends under each neighbouring relation; a text
    there says why it is not accounted.
    """
    mechanism: Any = plan.mechanism
    batch = mechanism.expected_batch_size
    laplace = getattr(mechanism, "distribution", "gaussian") == "laplace"
    std = (math.sqrt(2.0) if laplace else 1.0) * mechanism.noise_multiplier * step_deviation(plan)
    return {
        **_setting(plan),
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_std_in_clip_over_batch": std,
        "noise_std": std * mechanism.clip / batch,
        "target_epsilon": target_epsilon,
        "epsilon": plan.epsilon(delta),
        "delta": delta,
        "neighboring_relation": plan.relation,
        "accountant": plan.accountant_used,
        **_schedules(plan, delta),
        **({} if plan.groups is None else {"groups": group_words(plan)}),
        "epsilon_by_relation": {name: _epsilon_under(plan, name, delta) for name in RELATIONS},
    }


def _schedules(plan: PrivacyPlan, delta: float) -> dict[str, Any]:
    """What changes over the steps, what that is worth, and what is spent after each quarter of them."""
    words = {f"{name}_schedule": text for name, text in schedule_words(plan).items()}
    if "correlation_schedule" in words:
        words["noise_correlation"] = words.pop("correlation_schedule")
    if plan.noise_schedule is None:
        return words
    quarters = {round(plan.steps * part / 4): part for part in (1, 2, 3)}
    spent = {f"epsilon_after_{steps}_steps": plan.epsilon(delta, at=steps) for steps in quarters}
    return {**words, "gain_against_uniform": gain_against_uniform(plan, delta), **spent}


def _setting(plan: PrivacyPlan) -> dict[str, Any]:
    """What is sampled how often, clipped to what, along how many directions."""
    mechanism: Any = plan.mechanism
    return {
        "num_examples": plan.sampler.num_examples,
        "expected_batch_size": mechanism.expected_batch_size,
        "sampling": plan.sampler.name,
        "sampling_probability": plan.sampler.sampling_probability,
        "steps": plan.steps,
        "clip": mechanism.clip,
        "num_directions": getattr(mechanism, "num_directions", None),
        "noise_distribution": getattr(mechanism, "distribution", None),
    }


def _epsilon_under(plan: PrivacyPlan, relation: Any, delta: float) -> float | str:
    try:
        return dataclasses.replace(plan, relation=relation).epsilon(delta)
    except ValueError as error:
        return f"not accounted: {error}"


def _print_table(privacy: Mapping[str, Any]) -> None:
    """Prints `_facts` or `_recipe_facts` for people."""
    from rich.console import Console
    from rich.table import Table

    console, table = Console(), Table(title="privacy plan", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in privacy.items():
        if name != "epsilon_by_relation" and value is not None:
            table.add_row(name, _shown(value))
    console.print(table)
    if "epsilon_by_relation" in privacy:
        relations = Table(title="the same noise under each neighbouring relation")
        relations.add_column("relation")
        relations.add_column(f"epsilon at delta={_shown(privacy['delta'])}")
        for name, value in privacy["epsilon_by_relation"].items():
            relations.add_row(name, _shown(value))
        console.print(relations)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
