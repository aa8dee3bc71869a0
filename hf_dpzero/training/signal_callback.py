"""Tells a run that fails to learn: warns once of each thing, names the setting, and stops where asked.

Looks at public numbers alone: releases, settings, and the weights that a run releases.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from hf_dpzero.ledger.replay import terms_of
from hf_dpzero.ledger.trajectory import Release
from hf_dpzero.parallel.distributed import sum_over_processes
from hf_dpzero.parallel.sharded_runs import is_split
from hf_dpzero.perturbation.sharding import local
from hf_dpzero.perturbation.trainable import num_trainable
from hf_dpzero.training.released_signal import (
    LEAST_STEPS,
    ReleasedScalars,
    ReleasedSignal,
    WeightSize,
    first_look,
    noise_variance,
    signal_of,
)

logger = logging.get_logger(__name__)


class SignalCallback(TrainerCallback):
    """Follows the releases of a `DPZeroTrainer`.

    - After a quarter of the planned steps, at least 20, the whole run's statistic within two deviations
      of 0 is what `on_no_signal` is for: a warning, or training ends there.
    - An update longer than the weights that it moves is warned of.
    - An update or weights that are not finite end training whatever is set.

    Args:
      trainer: whose run it is.

    Attributes:
      signal: statistic of the run's releases; a first-order step adds to it, and after a resume it
        starts anew there. It stays empty for dpgd-0th and runs without noise.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.signal = ReleasedSignal()
        self._scalars: ReleasedScalars | None = None
        self._size: WeightSize | None = None
        self._said_large = False

    def open(self) -> None:
        """Starts anew, for a run whose ledger is open."""
        mechanism = self.trainer.plan.mechanism
        self.signal, self._scalars = signal_of(mechanism, self.trainer.plan), None
        self._said_large = False
        if mechanism.replayable:
            self._scalars = ReleasedScalars(
                mechanism,
                mechanism.num_directions,
                self.signal,
                self.trainer.plan.scheduled,
            )

    def logs(self) -> dict[str, float]:
        """`released_signal`, where there is one."""
        recent = self.signal.recent
        return {} if recent is None else {"released_signal": recent.ratio}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measures the weights that updates are compared with; others may write to them from here on."""
        self.trainer.method.weights.note()
        norms = [float(torch.linalg.vector_norm(p, dtype=torch.float64)) for p in self._trained()]
        norm, size = math.hypot(*norms), num_trainable(self.trainer.model, None)
        if is_split(self.trainer.model):
            norm = math.sqrt(sum_over_processes([norm**2])[0])
        self._size = WeightSize(norm, size)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds the step, and says what it shows."""
        trajectory = self.trainer.trajectory
        release = None if trajectory is None else trajectory.get(state.global_step - 1)
        if release is None or self._size is None:
            return
        if self._scalars is not None:
            self._scalars.follow(trajectory.releases)
        update = self._update_norm(release)
        if not math.isfinite(update) or (args.first_order and not self._finite()):
            self._stop_not_finite(state, control)
        elif self._size.exceeded_by(update) and not self._said_large:
            self._said_large = True
            _say(state, self._large(release, update))
        replayed = trajectory.next_step > state.global_step  # was looked at when it was taken
        if state.global_step == first_look(self.trainer.plan.steps) and not replayed:
            self._look(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Looks at the weights of a zeroth-order run, whose steps need no pass over them."""
        if "epsilon" in (logs or {}) and not args.first_order and not self._finite():
            self._stop_not_finite(state, control)

    def _trained(self) -> list[torch.Tensor]:
        """What is trained, of parameters in parts what lies here."""
        trained = (p.detach() for p in self.trainer.model.parameters() if p.requires_grad)
        return [part for part in map(local, trained) if part.numel()]

    def _finite(self) -> bool:
        norms = [torch.linalg.vector_norm(p, ord=math.inf).float() for p in self._trained()]
        finite = not norms or all(math.isfinite(norm) for norm in torch.stack(norms).tolist())
        if is_split(self.trainer.model):
            return sum_over_processes([int(not finite)]) == [0]
        return finite

    def _update_norm(self, release: Release) -> float:
        """Euclidean norm of the step's update: exact for SGD, as expected for random directions.

        AdamW moves no coordinate by much more than the learning rate, which stands for it. Of a dense
        zeroth-order update the noise is counted.
        """
        args, rate = self.trainer.args, release.learning_rate
        assert self._size is not None
        root = math.sqrt(self._size.dimension)
        if self._scalars is not None:
            terms = terms_of(self.trainer.trajectory, release.step)
            return root * math.hypot(*(term.coefficient for term in terms))
        if not args.first_order:
            return (
                rate
                * root
                * math.sqrt(noise_variance(self.trainer.plan.mechanism_at(release.step)))
            )
        norm = self.signal.last_norm
        if args.optim_name != "sgd":
            return rate * root if math.isfinite(norm) else norm
        return rate * (min(norm, args.max_grad_norm) if args.max_grad_norm else norm)

    def _large(self, release: Release, update: float) -> str:
        chosen = "learning_rate" in self.trainer.args.chosen
        advice = (
            "It was chosen from the plan, not by you: give a smaller learning_rate in the next run."
            if chosen
            else "Lower it."
        )
        return (
            f"step {release.step} moved the trained weights by about {update:.2g}, more than their own "
            f"norm: learning_rate={release.learning_rate:g} is far too large. {advice}"
        )

    def _stop_not_finite(self, state: Any, control: Any) -> None:
        if not control.should_training_stop:
            rate = self.trainer.resolved_args.learning_rate
            _say(
                state,
                f"the weights or their update are no longer finite: lower learning_rate={rate:g}. "
                + self._stopped(state),
            )
        control.should_training_stop = True

    def _look(self, args: Any, state: Any, control: Any) -> None:
        whole = self.signal.whole
        seen = whole is not None and self.signal.steps >= LEAST_STEPS
        if not seen or whole is None or whole.visible or args.on_no_signal == "ignore":
            return
        text = (
            f"the releases cannot be told from noise so far: released_signal={whole.ratio:.2g} over "
            f"{self.signal.steps} steps, where noise alone gives 0 +- {whole.deviation:.2g}. "
            + advice(self.trainer.resolved_args)
        )
        if args.on_no_signal == "stop":
            control.should_training_stop = True
            text = f"{text} on_no_signal='stop': {self._stopped(state)}"
        _say(state, text)

    def _stopped(self, state: Any) -> str:
        trainer = self.trainer
        return (
            f"Training stops after {state.global_step} of {trainer.plan.steps} steps, with epsilon "
            f"{trainer.epsilon_spent:.3g} spent of {trainer.plan.epsilon(trainer.delta):.3g} planned; "
            "the report says which one to claim."
        )


def advice(args: Any) -> str:
    """What may be wrong with a run whose releases are noise, by the settings that it has.

    Args:
      args: a `DPZeroConfig`.
    """
    what = "gradients" if args.first_order else "finite differences"
    noise = (
        f"raise target_epsilon={args.target_epsilon:g}"
        if args.target_epsilon is not None
        else f"lower noise_multiplier={args.noise_multiplier:g}"
    )
    causes = [f"{noise}, or raise expected_batch_size={args.expected_batch_size:g}, for less noise"]
    if args.clipping == "fixed":
        causes.insert(
            0, f"lower clip={args.clip:g} if the {what} of most examples are far below it"
        )
    if not args.first_order:
        causes.append(f"raise smoothing={args.smoothing:g} if losses are rounded that coarsely")
    causes.append(f"lower learning_rate={args.learning_rate:g} if it broke the model")
    return f"What may help: {'; '.join(causes)}."


def _say(state: Any, text: str) -> None:
    if state.is_world_process_zero:
        logger.warning(text)
