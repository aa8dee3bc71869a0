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
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import Sampler, sampler_from_dict

if TYPE_CHECKING:
    from hf_dpzero.experiments.plan import Overview
    from hf_dpzero.recipes.recipe import Recipe

RELATIONS = ("add_or_remove_one", "replace_one", "replace_special")
DEFAULTS: dict[str, Any] = {  # with --recipe they are the recipe's
    "clip": 1.0, "num_directions": 1, "sampling": "poisson", "accountant": "pld",
    "neighboring_relation": "add_or_remove_one", "noise_distribution": "gaussian",
}  # fmt: skip


def run(arguments: Plan) -> None:
    """Computes and prints the plan; see `_facts` and `_recipe_facts` for the keys of --json."""
    sections: Mapping[str, Any] = {}
    if arguments.recipe is not None:
        privacy, sections = _plan_recipe(arguments)
    else:
        for name in ("num_examples", "max_steps"):
            if getattr(arguments, name) is None:
                raise ValueError(f"{name} is missing; give --{name} N, or --recipe FILE.")
        unsaid = {n: v for n, v in DEFAULTS.items() if getattr(arguments, n) is None}
        plan, delta = _calibrated(dataclasses.replace(arguments, **unsaid))
        privacy = _facts(plan, delta, arguments.target_epsilon)
    if arguments.json:
        print(json.dumps(_finite({**privacy, **sections}), indent=2))
        return
    _print_table(privacy)
    if sections:
        from hf_dpzero.experiments.plan import print_sections

        print_sections(sections)


def _plan_recipe(arguments: Plan) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """`_recipe_facts` of --recipe with its overrides, and the sections on model and memory."""
    from hf_dpzero.experiments.plan import overview
    from hf_dpzero.recipes.recipe import load_recipe, parse_overrides

    no_fields = ("recipe", "num_examples", "json", "traceback", "overrides")
    said = {n: v for n, v in vars(arguments).items() if n not in no_fields and v is not None}
    with tempfile.TemporaryDirectory() as scratch:
        overrides = {"output_dir": scratch, **said, **parse_overrides(arguments.overrides)}
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
    return {**head, **_facts(known.plan, args.delta(n), args.target_epsilon)}


def _calibrated(arguments: Any) -> tuple[PrivacyPlan, float]:
    """The plan that the options describe, its noise calibrated if a target is given, and delta."""
    if (arguments.target_epsilon is None) == (arguments.noise_multiplier is None):
        raise ValueError(
            f"target_epsilon={arguments.target_epsilon} and noise_multiplier="
            f"{arguments.noise_multiplier}: give exactly one; the other is computed."
        )
    noise = arguments.noise_multiplier
    plan = PrivacyPlan(
        sampler=_sampler(arguments),
        mechanism=ScalarMechanism(
            clip=arguments.clip,
            noise_multiplier=1.0 if noise is None else noise,
            expected_batch_size=float(arguments.expected_batch_size or arguments.num_examples),
            num_directions=arguments.num_directions,
            distribution=arguments.noise_distribution,
        ),
        steps=arguments.max_steps,
        relation=arguments.neighboring_relation,
        accountant=arguments.accountant,
    )
    delta = arguments.target_delta
    if delta is None:  # the default of `DPZeroConfig`
        delta = 0.0 if arguments.noise_distribution == "laplace" else 0.1 / arguments.num_examples
    if arguments.target_epsilon is None:
        return plan, delta
    return plan.calibrate(epsilon=arguments.target_epsilon, delta=delta), delta


def _sampler(arguments: Any) -> Sampler:
    n, size = arguments.num_examples, arguments.expected_batch_size
    if size is None and arguments.sampling != "full_batch":
        raise ValueError("expected_batch_size is missing; give --expected_batch_size B.")
    size = n if size is None else size
    values = {"name": arguments.sampling, "num_examples": n, "expected_batch_size": size}
    if arguments.max_batch_size is not None:
        values["max_batch_size"] = arguments.max_batch_size
    elif arguments.sampling == "truncated_poisson":
        raise ValueError("sampling='truncated_poisson' needs --max_batch_size, e.g. 2 B.")
    return sampler_from_dict(values)


def _facts(plan: PrivacyPlan, delta: float, target_epsilon: float | None) -> dict[str, Any]:
    """The plan in numbers: what is printed.

    `noise_std` is the standard deviation of the noise on each of the K released means, in loss
    units per unit of smoothing; `noise_std_in_clip_over_batch` is the same in units of C / B, which
    for Gaussian noise is the noise multiplier and for Laplace noise sqrt(2) times it (that
    multiplier is the scale b / C). `epsilon_by_relation` is what the *same* noise spends under each
    neighbouring relation; a text there says why it is not accounted.
    """
    mechanism: Any = plan.mechanism
    batch = mechanism.expected_batch_size
    laplace = getattr(mechanism, "distribution", "gaussian") == "laplace"
    std = (math.sqrt(2.0) if laplace else 1.0) * mechanism.noise_multiplier
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
        "epsilon_by_relation": {name: _epsilon_under(plan, name, delta) for name in RELATIONS},
    }


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


def _finite(value: Any) -> Any:
    """JSON has no infinity: it is written as the string "inf", as in privacy_report.json."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return "inf" if isinstance(value, float) and math.isinf(value) else value
