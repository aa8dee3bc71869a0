"""What a run shows while it trains: one banner, one progress bar, no loss that nobody may see.

The bar's times stay on the training machine (docs/privacy_reference.md, "Threat model");
nothing here is saved.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers import trainer as hf_trainer
from transformers.trainer_callback import CallbackHandler, PrinterCallback, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from hf_dpzero.estimators.landscape import Landscape
from hf_dpzero.parallel.mesh import process_words
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.words import LABELS, group_words, schedule_words
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.wording import delta_words, number, part_words, round_up
from hf_dpzero.run import Run
from hf_dpzero.run_folder.folder import report_of


class PrivateOutput(TrainOutput):
    """Hugging Face's `TrainOutput`, printed without its training loss, which is private (NaN)."""

    def __repr__(self) -> str:
        return f"TrainOutput(global_step={self.global_step}, metrics={self.metrics})"


def public_output(output: TrainOutput, report: PrivacyReport) -> PrivateOutput:
    """What Trainer returned without what depends on the data, and with the budget of a private run."""
    for name in ("train_loss", "total_flos", "train_samples_per_second"):
        output.metrics.pop(name, None)
    if report.private:
        aim = {} if report.target_epsilon is None else {"target_epsilon": report.target_epsilon}
        output.metrics.update({"epsilon": report.epsilon, "delta": report.delta, **aim})
    return PrivateOutput(output.global_step, math.nan, output.metrics)


class PrivacyProgressCallback(ProgressCallback):
    """Hugging Face's progress bar with spent epsilon and signal; a resumed run's starts where it is."""

    training_bar: Any
    _first = True  # no step of this training was shown yet

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Opens the bar; one that an interrupted run left open is closed."""
        self._first = True
        if self.training_bar is not None:
            self.training_bar.close()
        super().on_train_begin(args, state, control, **kwargs)
        self.current_step = state.global_step
        if self.training_bar is not None:
            self.training_bar.initial = self.training_bar.n = state.global_step
            self.training_bar.refresh()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Moves the bar; its clock starts after the first step, which compiles and allocates."""
        bar, first, self._first = self.training_bar, self._first, False
        if bar is None or not first:
            super().on_step_end(args, state, control, **kwargs)
            return
        bar.n = bar.initial = bar.last_print_n = self.current_step = state.global_step
        bar.start_t = bar.last_print_t = time.time()
        bar.refresh()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Shows the last logged epsilon and signal: at every step epsilon would cost too much."""
        if self.training_bar is not None and logs and "epsilon" in logs:
            shown = {"epsilon": f"{logs['epsilon']:.3f}"}
            if "released_signal" in logs:
                shown["signal"] = f"{logs['released_signal']:+.2g}"
            self.training_bar.set_postfix(shown, refresh=False)
        super().on_log(args, state, control, logs=logs, **kwargs)


@functools.cache
def notebook_progress() -> type[TrainerCallback]:
    """The notebook's progress bar and table with the spent epsilon where the training loss was."""
    from transformers.utils import notebook

    class NotebookPrivacyCallback(notebook.NotebookProgressCallback):
        """`NotebookProgressCallback` for runs whose loss is private."""

        training_tracker: Any
        epsilon = ""

        def on_train_begin(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            **kwargs: Any,
        ) -> None:
            super().on_train_begin(args, state, control, **kwargs)
            # Its own one has a column for the training loss.
            self.training_tracker = notebook.NotebookTrainingTracker(state.max_steps)

        def on_log(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            logs: Mapping[str, float] | None = None,
            **kwargs: Any,
        ) -> None:
            if self.training_tracker is None or not logs or "epsilon" not in logs:
                return
            self.epsilon = f"{logs['epsilon']:.3f}"
            if args.eval_strategy == "no":
                line = {"Step": state.global_step, "Epsilon": self.epsilon}
                self.training_tracker.write_line(line)

        def on_evaluate(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            metrics: Mapping[str, float] | None = None,
            **kwargs: Any,
        ) -> None:
            left_out = ("_per_second", "_runtime", "epoch")
            shown = {k: v for k, v in (metrics or {}).items() if not k.endswith(left_out)}
            if self.training_tracker is None:
                rows = [list(shown), list(shown.values())]
                notebook.disp.display(notebook.disp.HTML(notebook.text_to_html_table(rows)))
            else:
                named = {{"eval_loss": "Validation Loss"}.get(k, k): v for k, v in shown.items()}
                line = {"Step": state.global_step, "Epsilon": self.epsilon, **named}
                self.training_tracker.write_line(line)
                self.training_tracker.remove_child()
            self.prediction_bar, self._force_next_update = None, True

    return NotebookPrivacyCallback


def quiet_replicas(args: TrainingArguments) -> None:
    """Keeps this package's warnings back on processes that do not log: the first says the same.

    Errors are shown by all, and warnings too where `log_level_replica` was set.

    Args:
      args: `TrainingArguments`.
    """
    if not args.should_log and args.log_level_replica == "warning":
        logging.getLogger("hf_dpzero").setLevel(logging.ERROR)


def replace_progress(handler: CallbackHandler, args: TrainingArguments) -> None:
    """Puts this package's progress bar in place of the one that transformers chose, and no second one.

    A bar that the user has passed stays, alone.

    Args:
      handler: of the trainer's callbacks; changed in place.
      args: of the trainer.
    """
    default: type[TrainerCallback] = hf_trainer.DEFAULT_PROGRESS_CALLBACK
    kept = [c for c in handler.callbacks if type(c) is not default]
    handler.callbacks = kept  # remove_callback would take a subclass
    kinds = [type(callback) for callback in kept]
    in_notebook = default is not ProgressCallback
    shown = (PrinterCallback, ProgressCallback, default)
    if args.disable_tqdm or any(issubclass(kind, shown) for kind in kinds):
        return
    handler.add_callback(notebook_progress()() if in_notebook else PrivacyProgressCallback())


@contextlib.contextmanager
def finished(run: Run) -> Iterator[None]:
    """Says that a resumed run is finished; inside, Trainer does not say that its data are empty."""
    if run.args.should_log:
        logging.getLogger(__name__).warning(
            f"this run is finished: {run.output_dir} holds all {run.plan.steps} steps of it, and "
            "nothing more is sampled or paid. extends_run, in a new output_dir, trains on and "
            "adds up both budgets."
        )

    warning = hf_trainer.logger.warning

    def other(message: str, *args: Any, **settings: Any) -> None:
        if "single sample in your epoch_iterator" not in message:
            warning(message, *args, **settings)

    vars(hf_trainer.logger)["warning"] = other
    try:
        yield
    finally:
        vars(hf_trainer.logger)["warning"] = warning


class RunCallback(TrainerCallback):
    """The banner at the start, rates of a given scheduler, and a straight run's count of epochs.

    Attributes:
      run: that trains; the trainer sets it.
      training: whether that run goes on; the trainer sets it.
      scale: of a given scheduler's rates, whose optimizer has another learning rate than the run.
    """

    run: Run
    training = False
    scale = 1.0
    _first_epoch: int | None = None  # while it runs

    def rescale(self, given: torch.optim.Optimizer) -> bool:
        """Takes the rates of a given optimizer's scheduler as shares of its own; False without one."""
        rate = given.defaults.get("lr")
        self.scale = self.run.args.learning_rate / rate if rate else 1.0
        return bool(rate)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Says what runs, once, on rank 0; finds the best checkpoint in a folder that was moved."""
        best = self.run.output_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        if state.best_model_checkpoint is None and best.is_dir():
            state.best_model_checkpoint = str(best)
        self._first_epoch = state.global_step // self.run.plan.sampler.steps_per_epoch
        if state.global_step == 0:  # later the checkpoint's optimizer has the rate
            follow_scheduler(self.scale, **kwargs)
        elif "learning_rate" in self.run.chosen:
            group = kwargs["optimizer"].param_groups[0]
            self.run.args.learning_rate = group.get("initial_lr", group["lr"])
        if state.is_world_process_zero and args.get_process_log_level() <= logging.WARNING:
            tqdm.write(banner(self.run, report_of(self.run)))

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Lowers a chosen rate where public rows' losses curve more than before, and says so."""
        if not (self.training and 0 < state.global_step < self.run.plan.steps):
            return
        if (factor := self.run.method.lower_rate()) < 1.0:
            for group in kwargs["optimizer"].param_groups:
                group["lr"] *= factor
                group["initial_lr"] = self.run.args.learning_rate
            scheduler = kwargs["lr_scheduler"]
            scheduler.base_lrs = [factor * rate for rate in scheduler.base_lrs]
            if state.is_world_process_zero:
                logging.getLogger(__name__).warning(
                    f"step {state.global_step}: losses of public rows curve more by now, and the "
                    f"learning rate is {factor:.2g} of what it was."
                )

    def on_epoch_end(self, *_: object, **__: object) -> None:
        """Leaves `state.epoch` to Trainer from here on."""
        self._first_epoch = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sets the next rate, and `state.epoch` after a resume, before other callbacks and logs."""
        follow_scheduler(self.scale, **kwargs)
        if (done := self._first_epoch) is not None:  # Trainer forgets the steps before a resume
            steps = self.run.plan.sampler.steps_per_epoch
            state.epoch = done + (state.global_step - done * steps) / steps


def follow_scheduler(
    scale: float, optimizer: torch.optim.Optimizer, lr_scheduler: LRScheduler, **_: Any
) -> None:
    """Sets the rate by a scheduler that was made with another optimizer: optimizers=(None, it)."""
    groups = optimizer.param_groups
    if getattr(getattr(lr_scheduler, "optimizer", None), "param_groups", None) is not groups:
        vars(lr_scheduler.optimizer)["_opt_called"] = True  # it takes no steps: torch would warn
        for group in groups:
            group["lr"] = scale * lr_scheduler.get_last_lr()[0]


def banner(run: Run, report: PrivacyReport) -> str:
    """What runs and what it costs, a line for each.

    Args:
      run: whose ledger is open.
      report: of the run.

    Returns:
      Lines without personal data: settings, counts of parameters, n.
    """
    plan, args, mechanism = run.plan, run.args, run.plan.mechanism
    sampler, paid = plan.sampler, run.opened.next_step
    trained = [p for p in run.model.parameters() if p.requires_grad]
    total = sum(p.numel() for p in run.model.parameters())
    count = sum(p.numel() for p in trained)
    lines = [
        ("method", f"{mechanism.name}, {args.learning_rate:g} learning rate"),
        ("examples" if run.units is None else "units", f"n = {sampler.num_examples}, expected batch B = "
                     f"{number(sampler.expected_batch_size)} ({sampler.name}, q = "
                     f"{number(sampler.sampling_probability)})"),
        ("steps", f"{plan.steps}{f', {paid} of them in the ledger' if paid else ''}"),
        ("budget", _budget(plan, run.delta, args.target_epsilon)),
        *(("of that", part_words(part)) for part in report.parts[:-1]),
        *([("rate", _rate_words(run.landscape))] if run.landscape else []),
        ("trained", f"{count:,} of {total:,} parameters in {len(trained)} tensors"),
    ]  # fmt: skip
    if plan.private:
        noise = f"{'Laplace ' * (report.noise_distribution == 'laplace')}multiplier "
        noise += f"{number(mechanism.noise_multiplier)}, clip C = {number(mechanism.clip)}"
        lines.insert(4, ("noise", noise))
        lines[5:5] = [(LABELS[name], text) for name, text in schedule_words(plan).items()]
    if not args.first_order:
        along = f"K = {args.num_directions} {args.direction}, smoothing {args.smoothing:g}"
        along += ", forward differences" * (args.differences == "forward")
        lines.insert(1, ("directions", along))
    if plan.groups is not None:
        lines.append(("groups", group_words(plan)))
    if args.world_size > 1:
        lines.append(("processes", process_words(plan, args, run.mesh, run.sharded, count)))
    title = "Private training" if plan.private else "Training WITHOUT privacy"
    return "\n".join([title, *(f"  {label:<12}{text}" for label, text in lines)])


def _rate_words(landscape: Landscape) -> str:
    slope, scatter, curvature, _, rows = landscape
    return (
        f"of {rows} public rows: slope {math.sqrt(slope):.2g}, scatter {math.sqrt(scatter):.2g}, "
        f"curvature {curvature:.2g}"
    )


def _budget(plan: PrivacyPlan, delta: float, target: float | None) -> str:
    epsilon = plan.epsilon(delta)
    if math.isinf(epsilon):
        return "none: nothing bounds what is released"
    aim = "" if target is None else f" (target {number(target)})"
    words = f"epsilon {round_up(epsilon)}{aim} at delta {delta_words(delta)}, {plan.relation}"
    before = f"{len(plan.after)} run{'s' if len(plan.after) > 1 else ''} before"
    return f"{words}, with {before}" if plan.after else words
