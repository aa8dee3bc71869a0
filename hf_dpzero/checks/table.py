"""The table of checks: what is refused before step 0, each once, in this order.

Settings are checked where they are made (`settings`), weights that something else writes to between
steps in `checks.between_steps`, and a base model against its name in `run_folder.base_model`. What
guards against nobody but a user who wants to fool himself is not here: docs/privacy_reference.md names
it under "not covered".
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Literal, NamedTuple

from hf_dpzero.checks import data, model, passes, precision, processes, public_rows
from hf_dpzero.parallel import collectives
from hf_dpzero.parallel.offload import check_offload
from hf_dpzero.run import Run

Stage = Literal["model", "objective", "passes"]
When = Literal["always", "private", "private, first order", "several processes"]


class Check(NamedTuple):
    """One check.

    Attributes:
      name: of what is looked at.
      stage: "model": before an objective is chosen; "objective": after it, and after a cut by FSDP2;
        "passes": on the compiled model, by evaluating it.
      when: which runs it is for.
      refuse: raises ValueError; its docstring begins with what it refuses.
      takes: what of a run it is called with; nothing for the run itself.
      passes: forward passes that it makes, at most.
    """

    name: str
    stage: Stage
    when: When
    refuse: Callable[..., None]
    takes: tuple[str, ...] = ()
    passes: int = 0

    @property
    def rules_out(self) -> str:
        """What a run that is let through has not."""
        first = (inspect.getdoc(self.refuse) or "").partition("\n")[0]
        return first.removeprefix("Refuses ").rstrip(".")

    def run(self, run: Run) -> None:
        """Makes the check."""
        self.refuse(*([operator.attrgetter(name)(run) for name in self.takes] or [run]))


def check_evaluation_rows(run: Run) -> None:
    """Refuses metrics of private training rows."""
    run.check_evaluation_rows()


CHECKS: tuple[Check, ...] = (
    Check("process group", "model", "several processes", collectives.check_world, ("args",)),
    Check("evaluation rows", "model", "always", check_evaluation_rows),
    Check("adapters", "model", "always", model.check_adapters, ("model",)),
    Check("trained weights", "model", "always", model.check_trained, ("model",)),
    Check("saving", "model", "always", model.check_saving, ("model",)),
    Check("layers over the batch", "model", "always", model.check_layers, ("model",)),
    Check("offload", "model", "always", check_offload, ("model", "args")),
    Check("same rows", "objective", "several processes", processes.check_same_rows, ("dataset",)),
    Check("mixed precision", "objective", "always",
          precision.check_mixed_precision, ("args", "args.device.type")),
    Check("random generators", "objective", "private", data.check_draws, ("collator", "dataset")),
    Check("compiled model", "objective", "private, first order", model.check_not_compiled),
    Check("precision of gradients", "objective", "private, first order",
          precision.check_precision, ("model", "args")),
    Check("attention that remembers", "objective", "private", model.check_widths, ("model",)),
    Check("timed kernels", "objective", "private",
          model.check_kernels_are_fixed, ("args.device.type",)),
    Check("unit of privacy", "objective", "private", data.check_unit),
    Check("lengths", "objective", "always", data.check_lengths),
    Check("labels", "objective", "always", data.check_labels, ("dataset",)),
    Check("memory of rows", "passes", "private", passes.check_memory, passes=3),
    Check("row 0", "passes", "always", passes.check_first_row, passes=1),
    Check("collator", "passes", "always", passes.check_collator),
    Check("neighbours and places", "passes", "always", passes.choose_passes, passes=30),
    Check("finite losses", "passes", "always", public_rows.check_finite, passes=2),
)  # fmt: skip


def run_checks(run: Run, stage: Stage) -> None:
    """Makes the checks of a stage that are for this run, in order.

    Raises:
      ValueError: what cannot be accounted or would break the guarantee; says what to change.
    """
    private = run.plan.mechanism.private
    made: dict[When, bool] = {
        "always": True,
        "private": private,
        "private, first order": private and run.args.first_order,
        "several processes": collectives.active(),
    }
    for check in CHECKS:
        if check.stage == stage and made[check.when]:
            check.run(run)
