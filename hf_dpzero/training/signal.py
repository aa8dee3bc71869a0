"""Do the released numbers hold anything but noise? A running statistic of them, and what a run says.

A release v is a clipped mean plus noise of a public variance s^2 = (sigma C_t / B)^2, so

    E[v^2] / s^2 - 1 = mean^2 / s^2,

0 where there is noise alone. `Signal.ratio` is the mean of v^2 / s^2 over n numbers, minus 1. Noise
alone gives it the deviation sqrt(2 / n) (Gaussian; sqrt(5 / n) for Laplace, whose kurtosis is 6).

Where the noise of a step depends on that of earlier ones, v is what a release holds beyond the noise
that earlier releases foretell, and s^2 the variance of what is left (`factorization.Innovations`):
numbers that are nearly independent again, and in which a mean that stays shows most.

Privacy: post-processing of what is released, and therefore free. Nothing here sees a batch or a loss.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from hf_dpzero.ledger.replay import terms_of
from hf_dpzero.ledger.trajectory import Release
from hf_dpzero.parallel.collectives import sum_over_processes
from hf_dpzero.parallel.fsdp import is_split
from hf_dpzero.perturbation.sharding import local
from hf_dpzero.perturbation.trainable import num_trainable
from hf_dpzero.privacy.correlated.correlation import sensitivity
from hf_dpzero.privacy.correlated.factorization import Innovations
from hf_dpzero.privacy.discretization import dense_grid
from hf_dpzero.privacy.mechanisms import Mechanism
from hf_dpzero.privacy.mechanisms.adaptive import AdaptiveClipping
from hf_dpzero.privacy.mechanisms.base import DenseNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.schedules import MechanismSchedule
from hf_dpzero.run import Run
from hf_dpzero.settings.config import DPZeroConfig

logger = logging.get_logger(__name__)

WINDOW = 50
"""Steps that the logged statistic is a mean over."""

DEVIATIONS = 2.0
"""The whole run's statistic within so many deviations of 0 cannot be told from noise."""

LEAST_STEPS = 20
"""Before so many steps nothing is said of a run."""

REMEMBERED = 1 << 18
"""Coordinates of a vector with correlated noise that are looked at: 32 MB hold 32 releases of them."""

LEAST_SIZE = 1e-2
"""Root mean square of a coordinate below which weights have no size yet that an update is long beside:
a head or an adapter that starts at zero takes its size from its first steps."""


@dataclass(frozen=True)
class Signal:
    """The statistic over some steps.

    Attributes:
      ratio: mean(v^2) over the variance of the noise, minus 1.
      deviation: of `ratio` if there is noise alone.
    """

    ratio: float
    deviation: float

    @property
    def visible(self) -> bool:
        """Whether it is more than two deviations above 0.

        >>> Signal(ratio=0.5, deviation=0.2).visible, Signal(ratio=0.3, deviation=0.2).visible
        (True, False)
        """
        return self.ratio > DEVIATIONS * self.deviation


class ReleasedSignal:
    """Adds up released numbers in units of their noise.

    Args:
      mechanism: that releases them; the plan's own.
      plan: says how the noise depends on earlier steps, and how it is scheduled; None for neither.
      num_directions: K; a record's further values, such as an adaptive clip's count, are left out.

    Attributes:
      innovations: of noise that is correlated over steps; None for independent noise.
      steps: seen so far.
      last_norm: sqrt(sum v^2) of the last step.
    """

    def __init__(
        self, mechanism: Mechanism, plan: PrivacyPlan | None = None, num_directions: int = 1
    ) -> None:
        self.innovations: Innovations | None = None
        if plan is not None and plan.correlation is not None:
            self.innovations = Innovations(
                plan.correlation.factorization(plan.steps), sensitivity(plan)
            )
        self.steps, self.last_norm = 0, 0.0
        # E[v^4] / E[v^2]^2 of the noise decides how far a mean of its squares strays.
        self._kurtosis = 6.0 if mechanism.distribution == "laplace" else 3.0
        self._squares, self._numbers = 0.0, 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._num_directions, self._followed = num_directions, 0
        at = None if plan is None else plan.scheduled
        self._schedule: MechanismSchedule[Mechanism] = MechanismSchedule(mechanism, at)
        self._changes = isinstance(mechanism, AdaptiveClipping) or at is not None

    def add_release(
        self, step: int, values: np.ndarray, variance: float, norm: float | None = None
    ) -> None:
        """Adds a step.

        Args:
          step: its number.
          values: released numbers, or of a long vector always the same ones of them, float [n].
          variance: of the mechanism's noise, `noise_variance`; 0 (no noise) is not counted.
          norm: of all numbers; default of these.
        """
        rest, factor = np.asarray(values, dtype=np.float64), 1.0
        norm = float(np.linalg.norm(rest)) if norm is None else norm
        if self.innovations is not None:
            rest, factor = self.innovations.of(step, values)
        self._add(float(rest @ rest), rest.size, variance * factor, norm)

    def add_means(self, step: int, means: Sequence[Tensor], variance: float) -> None:
        """Adds a step's noised means, tensors of any shapes; arguments else as in `add_release`."""
        parts = torch.stack([torch.linalg.vector_norm(m, dtype=torch.float64) for m in means])
        squares = float(parts.square().sum())
        if self.innovations is not None:
            # Whitening needs the releases of earlier steps, and whole ones would not fit in memory.
            self.add_release(step, some_numbers(means), variance, math.sqrt(squares))
        else:
            self._add(squares, sum(m.numel() for m in means), variance, math.sqrt(squares))

    def follow(self, releases: Sequence[Release]) -> None:
        """Adds a zeroth-order run's releases since the last call, each at the clip of its step.

        Args:
          releases: a list that only grows.
        """
        for step in range(self._followed, len(releases)):
            # Only clips that change look back, so that the others do not copy the list at every step.
            before = releases[:step] if self._changes else ()
            variance = noise_variance(self._schedule.after(before))
            values = np.array(releases[step].values[: self._num_directions])
            self.add_release(step, values, variance)
        self._followed = len(releases)

    def _add(self, squares: float, numbers: int, variance: float, norm: float) -> None:
        self.last_norm = norm
        if variance:
            self.steps += 1
            self._squares += squares / variance
            self._numbers += numbers
            self._recent.append((squares / variance, numbers))

    @property
    def whole(self) -> Signal | None:
        """Over all steps seen; None before the first."""
        return self._signal(self._squares, self._numbers)

    @property
    def recent(self) -> Signal | None:
        """Over the last `WINDOW` steps; None before the first."""
        squares, numbers = zip(*self._recent, strict=True) if self._recent else ((), ())
        return self._signal(math.fsum(squares), sum(numbers))

    def _signal(self, squares: float, numbers: int) -> Signal | None:
        if not numbers:
            return None
        return Signal(squares / numbers - 1.0, math.sqrt((self._kurtosis - 1.0) / numbers))


def noise_variance(mechanism: Mechanism) -> float:
    """Variance of the noise on one released number.

    Args:
      mechanism: of that step, so that an adaptive clip is the step's own.

    Returns:
      (noise_scale / divisor)^2, twice that for Laplace noise; dense noise has that of its rounding to a
      grid too. 0 without noise.

    >>> from hf_dpzero.privacy.mechanisms import mechanism_from_dict
    >>> settings = {"name": "dpzero", "clip": 6.0, "noise_multiplier": 2.0, "expected_batch_size": 4}
    >>> noise_variance(mechanism_from_dict(settings))
    9.0
    """
    scale = mechanism.noise_scale
    if not scale:
        return 0.0
    variance = scale**2 * (2.0 if mechanism.distribution == "laplace" else 1.0)
    if isinstance(mechanism, DenseNoise):
        variance += dense_grid(scale) ** 2 / 12.0
    return variance / mechanism.divisor**2


def some_numbers(vectors: Sequence[Tensor]) -> np.ndarray:
    """Of tensors that are one long vector evenly spread coordinates, at most `REMEMBERED`.

    Args:
      vectors: of any shapes, dtype and device; the same shapes give the same coordinates.

    Returns:
      float32 [n].
    """
    stride = max(1, -(-sum(v.numel() for v in vectors) // REMEMBERED))
    chosen, start = [], 0
    for vector in vectors:
        chosen.append(vector.reshape(-1)[-start % stride :: stride].float().cpu())
        start += vector.numel()
    return np.asarray(torch.cat(chosen))


class SignalCallback(TrainerCallback):
    """Tells a run that fails to learn: warns once of each thing, names the setting, stops where asked.

    Looks at public numbers alone: releases, settings, and the weights that a run releases.

    - After a quarter of the planned steps, at least 20, the whole run's statistic within two deviations
      of 0 is what `on_no_signal` is for: a warning, or training ends there.
    - An update longer than the weights that it moves is warned of, unless they start at zero.
    - An update or weights that are not finite end training whatever is set.

    Attributes:
      run: that trains.
      signal: statistic of the run's releases; a first-order step adds to it, and after a resume it
        starts anew there. It stays empty for dpgd-0th and runs without noise.
    """

    run: Run
    signal: ReleasedSignal

    def open(self, run: Run) -> None:
        """Starts anew, for a run whose ledger is open."""
        self.run, self._said_large = run, False
        # d, and the sum of squares of the weights' norm; of parameters in parts known once it trains
        self._dimension, self._squares, self._sized = 0, 0.0, False
        self.signal = ReleasedSignal(run.plan.mechanism, run.plan, run.args.num_directions)

    def logs(self) -> dict[str, float]:
        """`released_signal`, where there is one."""
        recent = self.signal.recent
        return {} if recent is None else {"released_signal": recent.ratio}

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Measures the weights that updates are compared with; others may write to them from here on."""
        self.run.method.weights.note()
        norms = [float(torch.linalg.vector_norm(p, dtype=torch.float64)) for p in self._trained()]
        self._squares, self._dimension = (
            math.hypot(*norms) ** 2,
            num_trainable(self.run.model, None),
        )
        if is_split(self.run.model):
            self._squares = sum_over_processes([self._squares])[0]
        self._sized = self._squares > self._dimension * LEAST_SIZE**2

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Adds the step, and says what it shows."""
        trajectory = self.run.opened
        released = trajectory.appended  # perhaps not on disk yet: `_say` waits
        if len(released) < state.global_step or not self._dimension:
            return
        release = released[state.global_step - 1]
        if self.run.plan.mechanism.replayable:
            self.signal.follow(released)
        update = self._update_norm(release)
        if not math.isfinite(update) or (self.run.args.first_order and not self._finite()):
            self._stop_not_finite(state, control)
        elif update * update > self._squares and self._sized:
            self._say_large(state, release, update)
        # Updates along fresh random directions are nearly orthogonal to each other and to the weights.
        self._squares += update * update
        replayed = len(released) > state.global_step  # was looked at when it was taken
        first_look = max(LEAST_STEPS, math.ceil(self.run.plan.steps / 4))
        if state.global_step == first_look and not replayed:
            self._look(state, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Looks at the weights of a zeroth-order run, whose steps need no pass over them."""
        if "epsilon" in (logs or {}) and not self.run.args.first_order and not self._finite():
            self._stop_not_finite(state, control)

    def _trained(self) -> list[torch.Tensor]:
        """What is trained, of parameters in parts what lies here."""
        trained = (p.detach() for p in self.run.model.parameters() if p.requires_grad)
        return [part for part in map(local, trained) if part.numel()]

    def _finite(self) -> bool:
        # The largest magnitude, because squares overflow in half precision.
        norms = [torch.linalg.vector_norm(p, ord=math.inf).float() for p in self._trained()]
        finite = not norms or all(math.isfinite(norm) for norm in torch.stack(norms).tolist())
        if is_split(self.run.model):
            return sum_over_processes([int(not finite)]) == [0]
        return finite

    def _update_norm(self, release: Release) -> float:
        """Euclidean norm of the step's update: exact for SGD, as expected for random directions.

        AdamW moves no coordinate by much more than the learning rate, which stands for it. Of a dense
        zeroth-order update the noise is counted.
        """
        args, rate, root = self.run.args, release.learning_rate, math.sqrt(self._dimension)
        if self.run.plan.mechanism.replayable:
            terms = terms_of(self.run.opened, release.step)
            return root * math.hypot(*(term.coefficient for term in terms))
        if not args.first_order:
            return rate * root * math.sqrt(noise_variance(self.run.plan.mechanism_at(release.step)))
        norm = self.signal.last_norm
        if args.optim_name != "sgd":
            return rate * root if math.isfinite(norm) else norm
        return rate * (min(norm, args.max_grad_norm) if args.max_grad_norm else norm)

    def _say_large(self, state: TrainerState, release: Release, update: float) -> None:
        if self._said_large:
            return
        self._said_large = True
        advice = "Lower it."
        if "learning_rate" in self.run.chosen:
            final = ", with learning_rate_is_final=True" if self.run.rate_said else ""
            advice = f"It was chosen from the plan: give a smaller one{final}, or more max_steps."
        self._say(
            state,
            f"step {release.step} moved the trained weights by about {update:.2g}, more than their own "
            f"norm: learning_rate={release.learning_rate:g} is far too large. {advice}",
        )

    def _stop_not_finite(self, state: TrainerState, control: TrainerControl) -> None:
        if not control.should_training_stop:
            text = "the weights or their update are no longer finite: lower learning_rate="
            self._say(state, f"{text}{self.run.args.learning_rate:g}. {self._stopped(state)}")
        control.should_training_stop = True

    def _look(self, state: TrainerState, control: TrainerControl) -> None:
        whole = self.signal.whole
        if whole is None or whole.visible or self.run.args.on_no_signal == "ignore":
            return
        if self.signal.steps < LEAST_STEPS:  # after a resume of a first-order run
            return
        text = (
            f"the releases cannot be told from noise so far: released_signal={whole.ratio:.2g} over "
            f"{self.signal.steps} steps, where noise alone gives 0 +- {whole.deviation:.2g}. "
            + advice(self.run.args)
        )
        if self.run.args.on_no_signal == "stop":
            control.should_training_stop = True
            text = f"{text} on_no_signal='stop': {self._stopped(state)}"
        self._say(state, text)

    def _say(self, state: TrainerState, text: str) -> None:
        self.run.opened.wait()
        if state.is_world_process_zero:
            logger.warning(text)

    def _stopped(self, state: TrainerState) -> str:
        run = self.run
        return (
            f"Training stops after {state.global_step} of {run.plan.steps} steps, with epsilon "
            f"{run.epsilon_spent:.3g} spent of {run.plan.epsilon(run.delta):.3g} planned; "
            "the report says which one to claim."
        )


def advice(args: DPZeroConfig) -> str:
    """What may be wrong with a run whose releases are noise, by the settings that it has."""
    what = "gradients" if args.first_order else "finite differences"
    noise = (
        f"raise target_epsilon={args.target_epsilon:g}"
        if args.target_epsilon is not None
        else f"lower noise_multiplier={args.noise_multiplier:g}"
    )
    causes = []
    if args.clipping == "fixed":
        causes = [f"lower clip={args.clip:g} if the {what} of most examples are far below it"]
    size = f"expected_batch_size={args.expected_batch_size:g}"
    causes.append(f"{noise}, or raise {size}, for less noise")
    if not args.first_order:
        causes.append(f"raise smoothing={args.smoothing:g} if losses are rounded that coarsely")
    causes.append(f"lower learning_rate={args.learning_rate:g} if it broke the model")
    return f"What may help: {'; '.join(causes)}."
