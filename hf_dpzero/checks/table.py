"""The table of checks: what is refused before step 0, each once, in this order.

Settings are checked where they are made (`settings`), weights that something else writes to between
steps in `checks.between_steps`, and a base model against its name in `run_folder.base_model`. What
guards against nobody but a user who wants to fool himself is not here: docs/privacy.md names it under
"not covered".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from hf_dpzero.checks import data, model, passes, precision, processes, public_rows
from hf_dpzero.objectives.prompted import PromptObjective
from hf_dpzero.parallel import collectives
from hf_dpzero.parallel.offload import check_offload
from hf_dpzero.run import Run

Stage = Literal["model", "objective", "passes"]
When = Literal["always", "private", "private, first order", "no loss given", "several processes"]


class Check(NamedTuple):
    """One check.

    Attributes:
      name: of what is looked at.
      stage: "model": before an objective is chosen; "objective": after it, and after a cut by FSDP2;
        "passes": on the compiled model, by evaluating it.
      when: which runs it is for.
      rules_out: what would happen without it.
      run: raises ValueError.
      passes: forward passes that it makes, at most.
    """

    name: str
    stage: Stage
    when: When
    rules_out: str
    run: Callable[[Run], None]
    passes: int = 0


def _check_unit(run: Run) -> None:
    told = run.args.rows_are is not None or run.examples_known
    if not told and not isinstance(run.objective, PromptObjective):
        data.check_unit(run.model, run.rows.collate_rows, len(run.dataset))


CHECKS: tuple[Check, ...] = (
    Check(
        *("process group", "model", "several processes"),
        "processes that each take the whole batch, so that a row counts once for each",
        lambda run: collectives.check_world(run.args),
    ),
    Check(
        *("evaluation rows", "model", "always"),
        "metrics of private training rows, which are published without noise",
        lambda run: run.check_evaluation_rows(),
    ),
    Check(
        *("adapters", "model", "always"),
        "a PEFT model whose adapter is not what trains, or an unused copy of the head that does",
        lambda run: model.check_adapters(run.model),
    ),
    Check(
        *("trained weights", "model", "always"),
        "weights of a dtype that is not restored exactly, or in memory that something else uses too",
        lambda run: model.check_trained(run.model),
    ),
    Check(
        *("layers over the batch", "model", "always"),
        "batch statistics, by which an example's loss depends on others, and embeddings that are "
        "rewritten when private rows look them up",
        lambda run: model.check_layers(run.model),
    ),
    Check(
        *("offload", "model", "always"),
        "offloaded weights in a method that cannot follow them",
        lambda run: check_offload(run.model, run.args),
    ),
    Check(
        *("labels", "model", "no loss given"),
        "rows without labels for the objective that follows from the model's head",
        lambda run: data.check_labels_of(run),
    ),
    Check(
        *("same rows", "objective", "several processes"),
        "processes with other rows, or another order of them: a row under two numbers counts twice",
        lambda run: processes.check_same_rows(run.dataset),
    ),
    Check(
        *("mixed precision", "objective", "always"),
        "autocast around train(), whose copies of weights no perturbation reaches, and float16",
        lambda run: precision.check_mixed_precision(run.args, run.args.device.type),
    ),
    Check(
        *("random generators", "objective", "private"),
        "a collator or data set whose draws for a row follow from the rows before it",
        lambda run: data.check_draws(run.collator, run.dataset),
    ),
    Check(
        *("precision of gradients", "objective", "private, first order"),
        "low-precision gradients of several examples, which round by their neighbours",
        lambda run: precision.check_precision(run.model, run.args),
    ),
    Check(
        *("attention that remembers", "objective", "private"),
        "block-sparse attention and dynamic rotary positions, which follow from earlier rows",
        lambda run: model.check_widths(run.model),
    ),
    Check(
        *("timed kernels", "objective", "private"),
        "kernels that are chosen by timing them on private batches",
        lambda run: model.check_kernels_are_fixed(run.args.device.type),
    ),
    Check(
        *("unit of privacy", "objective", "private"),
        "rows that look packed, of which nobody said whether one is one example",
        _check_unit,
    ),
    Check(
        *("lengths", "objective", "always"),
        "a row of more tokens than the model has positions, which stops the run when it is drawn",
        data.check_lengths,
    ),
    Check(
        *("row 0", "passes", "always"),
        "a loss that is not one number for each example, and forward passes that write to parameters",
        passes.check_first_row,
        passes=1,
    ),
    Check(
        *("collator", "passes", "always"),
        "a collator that joins or splits rows",
        passes.check_collator,
    ),
    Check(
        *("neighbours and places", "passes", "always"),
        "losses that depend on the other rows of a pass; sizes of passes in which places matter are "
        "left out",
        passes.choose_passes,
        passes=30,
    ),
    Check(
        *("finite losses", "passes", "always"),
        "a model whose loss is NaN or infinite on every public row",
        public_rows.check_finite,
        passes=2,
    ),
)


def applying(first_order: bool, private: bool, loss_given: bool) -> list[Check]:
    """Returns the checks that are for a run, in order.

    Args:
      first_order: whether it takes gradients.
      private: whether it adds noise.
      loss_given: whether it has an objective that does not follow from the model's head.
    """
    kinds: dict[When, bool] = {
        "always": True,
        "private": private,
        "private, first order": private and first_order,
        "no loss given": not loss_given,
        "several processes": collectives.active(),
    }
    return [check for check in CHECKS if kinds[check.when]]


def run_checks(run: Run, stage: Stage) -> None:
    """Makes the checks of a stage that are for this run, in order.

    Raises:
      ValueError: what cannot be accounted or would break the guarantee; says what to change.
    """
    private, loss_given = run.plan.mechanism.private, run.objective is not None
    for check in applying(run.args.first_order, private, loss_given):
        if check.stage == stage:
            check.run(run)
