"""`hf-dpzero audit`: attacks what a recipe's plan would release; one line and one row of a file each."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hf_dpzero.auditing.releases import CONFIDENCES, Audit, audits_of
from hf_dpzero.cli import options
from hf_dpzero.experiments.plan import overview
from hf_dpzero.recipes.recipe import load_recipe, parse_overrides, read_recipe
from hf_dpzero.reporting.model_card import new_figure, optional_plot
from hf_dpzero.values import encode

JSON_FILE, PLOT_FILE = "audit.json", "audit.png"


def run_audit(arguments: options.Audit) -> int:
    """Prints claims and lower bounds and writes them into output_dir; 1 where a claim is refuted."""
    given = parse_overrides(arguments.overrides)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = load_recipe(arguments.recipe, {**given, "output_dir": scratch})
        known = overview(recipe, arguments.num_examples)
    plan, config = known.plan, recipe.training
    if plan is None:
        raise ValueError(f"{arguments.recipe} has no plan yet: {known.rows.source}")
    if (unsafe := config.testing.not_private) or config.not_private:
        names = "".join(f", testing.{name}" for name in unsafe)
        raise ValueError(
            f"{arguments.recipe} is not private (method {config.method}{names}): there is no claim to "
            "audit. Give target_epsilon and a private method, without settings of testing."
        )
    own = str(read_recipe(arguments.recipe).get("output_dir", "out/run")).rstrip("/")
    folder = Path(arguments.output_dir or f"{own}-audit")
    delta = config.delta(plan.sampler.num_examples)
    print(
        f"the run: {plan.steps} steps, noise multiplier {plan.mechanism.noise_multiplier:.6g}, epsilon "
        f"{plan.epsilon(delta):.4g} at delta {delta:.3g}, {plan.relation}",
        flush=True,
    )
    found = []
    for audit in audits_of(plan, delta, arguments.runs, arguments.steps):
        print(_line(audit), flush=True)
        found.append(audit)
    holds = all(audit.holds for audit in found)
    audits = [
        dataclasses.asdict(a) | {"holds": a.holds, "bounds": [b._asdict() for b in a.bounds]}
        for a in found
    ]
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"recipe": arguments.recipe, "holds": holds, "plan": plan.to_dict(), "audits": audits}
    (folder / JSON_FILE).write_text(json.dumps(encode(facts), indent=2) + "\n", encoding="utf-8")
    with optional_plot(PLOT_FILE):
        _plot(found, folder / PLOT_FILE)
    print("no claim is refuted" if holds else "a claim is REFUTED: more is spent than is claimed")
    print("written:", *(str(p) for n in (JSON_FILE, PLOT_FILE) if (p := folder / n).is_file()))
    return int(not holds)


def _line(audit: Audit) -> str:
    likely, sure = (bound.epsilon for bound in audit.bounds)
    return (
        f"{audit.what}: claim {audit.claim:.4g}, at least {likely:.4g} (95 %), {sure:.4g} (1 - 1e-6); "
        f"{audit.runs} runs each, {audit.seconds:.1f} s" + ("" if audit.holds else "  REFUTED")
    )


def _plot(audits: Sequence[Audit], target: Path) -> None:
    """Draws each claim, and below it what is at least spent."""
    figure = new_figure(1, 7.0, 0.6 * len(audits) + 1.2)
    axes, rows = figure.subplots(), range(len(audits))
    axes.barh(rows, [audit.claim for audit in audits], color="lightgrey", label="claim")
    for place, confidence in enumerate(CONFIDENCES):
        found = [audit.bounds[place].epsilon for audit in audits]
        axes.plot(found, rows, "o|"[place], ms=8, label=f"at least, confidence {confidence:.6g}")
    axes.set(yticks=rows, yticklabels=[audit.what for audit in audits], xlabel="epsilon")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(target, dpi=120)
