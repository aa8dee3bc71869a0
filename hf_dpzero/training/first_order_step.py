"""One first-order step: per-example gradients, clip, sum, noise, write down; torch's optimizer updates.

g = (sum_i w_i grad f(theta; xi_i) + noise) / B,   ||w_i grad f(theta; xi_i)|| <= C

(DP-SGD, Abadi et al. 2016). The result is left in the parameters' `grad`; the optimizer's update is
post-processing. Knows nothing of transformers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.forward_passes import ParameterGuard
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.objectives.losses import (
    PerExampleLoss,
    batch_size,
    check_differentiable,
    check_per_example,
    evaluation_mode,
    num_examples,
)
from hf_dpzero.parallel.collectives import broadcast_, is_main, sum_tensor_
from hf_dpzero.perturbation.trainable import has_plain_storage
from hf_dpzero.privacy.mechanisms import GradientReleases
from hf_dpzero.privacy.mechanisms.adaptive import AdaptiveGradientMechanism
from hf_dpzero.privacy.mechanisms.base import check_dimension
from hf_dpzero.privacy.mechanisms.gradient import row_norms
from hf_dpzero.training.private_step import PrivateStep
from hf_dpzero.training.signal import ReleasedSignal, noise_variance

logger = logging.getLogger(__name__)

Microbatch = Mapping[str, Tensor]
_BACKWARD_HOOK = (
    "{} has a backward hook, which would see private gradients before clipping and noise (a logger that "
    "watches gradients, such as wandb.watch): take it off."
)
CHUNK = 1 << 19  # noise is drawn for this many coordinates at a time


class Gradients(Protocol):
    """Sums gradients of examples (see `PerExampleGradients`)."""

    model: nn.Module
    parameters: list[nn.Parameter]

    def weighted_sum(
        self, microbatches: Sequence[Any], weigh: Callable[[Tensor], Tensor], /
    ) -> tuple[list[Tensor], Tensor]:
        """Returns sum_i w_i g_i for each parameter, float64, and the norms [B] that weights are of."""


class PlainGradients:
    """The sum of the examples' gradients by one backward pass: for runs that are not private.

    Args:
      model: run in eval mode, as the private methods do.
      objective: (model, inputs) -> per-example losses [B].

    Raises:
      ValueError: the objective is not differentiable.
    """

    def __init__(self, model: nn.Module, objective: PerExampleLoss) -> None:
        check_differentiable(objective)
        self.model, self.objective = model, objective
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def weighted_sum(
        self, microbatches: Sequence[Microbatch], weigh: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """As `PerExampleGradients.weighted_sum`, but every weight is 1, and no norm is computed ([0]).

        An example whose loss is not finite counts as zero.

        Args:
          microbatches: none give zeros.
          weigh: not called.

        Returns:
          sum_i g_i for each parameter, float64; no norms.
        """
        totals = [torch.zeros_like(p, dtype=torch.float64) for p in self.parameters]
        with evaluation_mode(self.model), torch.enable_grad():
            for part in microbatches:
                losses = check_per_example(self.objective(self.model, part), batch_size(part))
                losses = losses[: num_examples(part)]
                loss = torch.where(losses.isfinite(), losses, 0.0).sum()
                gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
                for total, gradient in zip(totals, gradients, strict=True):
                    if gradient is not None:
                        total.add_(gradient.nan_to_num(0.0, 0.0, 0.0))
        return totals, torch.zeros(0)


class GroupMeans:
    """The mean gradient of each group of examples, weighted and summed (averaged clipping).

    One ordinary backward pass a microbatch: no per-example gradients, unless an example is a group.

    Args:
      plain: sums gradients.
    """

    def __init__(self, plain: PlainGradients) -> None:
        self.plain, self.model, self.parameters = plain, plain.model, plain.parameters

    def weighted_sum(
        self,
        groups: Sequence[Sequence[Microbatch] | Microbatch],
        weigh: Callable[[Tensor], Tensor],
    ) -> tuple[list[Tensor], Tensor]:
        """Sums the groups' mean gradients m_j.

        Args:
          groups: the microbatches of each group that was sampled, or the one that it has; none gives
            zeros.
          weigh: norm [1] of a mean -> w [1]. A mean that is not finite counts as zero.

        Returns:
          sum_j w_j m_j for each parameter, float64; the norms [groups] on the CPU.
        """
        totals = [torch.zeros_like(p, dtype=torch.float64) for p in self.parameters]
        norms = [torch.zeros(0)]
        for group in groups:
            parts = [group] if isinstance(group, Mapping) else group
            mean, _ = self.plain.weighted_sum(parts, weigh)
            count = sum(num_examples(part) for part in parts)
            flat = [row_norms(m.view(1, -1)) for m in mean]
            norm = torch.stack(flat).norm(dim=0) / count
            weight = float(weigh(norm)) / count
            for total, m in zip(totals, mean, strict=True):
                total.add_(m.nan_to_num(0.0, 0.0, 0.0), alpha=weight)
            norms.append(norm.float().cpu())
        return totals, torch.cat(norms)


@dataclass(frozen=True, kw_only=True)
class FirstOrderStep(PrivateStep):
    """Takes the steps of a first-order run, one a call, and leaves the noised mean in every `grad`.

    Guarantee: Gaussian mechanism on the clipped sum; the ledger is written before the gradient is
    handed on.

    Attributes:
      gradients: with the `model`, its trainable `parameters` and `weighted_sum` of what it is made of:
        `PerExampleGradients`, `PlainGradients` or `GroupMeans`; in group-robust training of
        `weighting.objective`.
      signal: what the noised means are added to, a statistic of releases; None for none.
    """

    gradients: Gradients
    signal: ReleasedSignal | None = None

    def __post_init__(self) -> None:
        check_dimension(self.mechanism, sum(p.numel() for p in self.gradients.parameters))

    def __call__(
        self,
        step: int,
        microbatches: Sequence[Any],
        learning_rate: float,
        row_groups: Sequence[int] = (),
        batch_digest: int = 0,
    ) -> Tensor | None:
        """Takes a step.

        A step that the ledger holds already was paid for before a crash, and its gradient is lost:
        every `grad` becomes None, so that optimizers skip it. No data, no noise.

        Args:
          step: its number, from 0.
          microbatches: this process' share of the batch (averaged clipping: of each group), maybe
            none.
          learning_rate: written to the ledger.
          row_groups: group-robust training: the group of each example, in order.
          batch_digest: of `logical_batch.fingerprint`; compared between processes before any release.

        Returns:
          The un-noised gradient norms [B, 1] (private: for opt-in diagnostics only), or None for a
          step that the ledger holds.
        """
        if self.trajectory.get(step) is not None:
            logger.warning("step %s was paid for but its update is lost.", step)
            self._hand_on([None] * len(self.gradients.parameters))
            return None
        named = list(self.gradients.model.named_parameters())
        if self.mechanism.private:
            self._refuse_backward_hooks(named)
        mechanism = self._schedule.after(self.trajectory.appended)  # `get` has waited
        assert isinstance(mechanism, GradientReleases)
        if self.weighting is not None:
            microbatches = self.weighting.weighed(microbatches, row_groups)
        # A forward pass that writes to a weight would carry un-noised data past the mechanism.
        guard = ParameterGuard((name, p) for name, p in named if has_plain_storage(p))
        with isolated_randomness(), guard.watching():
            totals, norms = self.gradients.weighted_sum(microbatches, mechanism.weights)
        count: list[int] = []
        released: Callable[[], tuple[float, ...]] = tuple  # no numbers beside the gradient
        if isinstance(mechanism, AdaptiveGradientMechanism):  # the count of unclipped examples
            count = self.mesh.sum_checked(mechanism.count(norms), batch_digest)
            released = functools.partial(mechanism.release_count, count, step, self.noise)
        else:
            self.mesh.sum_checked(count, batch_digest)
        self._release(step, learning_rate, mechanism, released)
        means = list(self._noised_means(mechanism, totals, step))
        if self.signal is not None:
            self.signal.add_means(step, means, noise_variance(mechanism))
        self._hand_on(means)
        return norms.unsqueeze(1)

    def _refuse_backward_hooks(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Refuses hooks that would see gradients before they are clipped and noised.

        Checked at every step, because callbacks may add them late.
        """
        for name, parameter in named:
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise ValueError(_BACKWARD_HOOK.format(name))
        for name, module in self.gradients.model.named_modules():
            if module._backward_hooks or module._backward_pre_hooks:
                raise ValueError(_BACKWARD_HOOK.format(name or "the model"))

    def _noised_means(
        self, mechanism: GradientReleases, totals: Sequence[Tensor], step: int
    ) -> Iterator[Tensor]:
        """(total + noise) / divisor for each parameter, float32; rank 0 noises the sum of all ranks."""
        flat = [total.view(-1) for total in totals]
        for total in flat:
            sum_tensor_(total)

        def release_(part: int, piece: Tensor) -> None:
            mean = mechanism.release_part(piece.cpu().numpy(), self.noise, step, part)
            piece.copy_(torch.from_numpy(mean))

        if is_main():
            pieces = [piece for total in flat for piece in total.split(CHUNK)]
            if sum(map(torch.numel, pieces)) < CHUNK:  # not worth starting threads for
                list(map(release_, range(len(pieces)), pieces))
            else:
                with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                    list(threads.map(release_, range(len(pieces)), pieces))
        for total, noised in zip(totals, flat, strict=True):
            mean = noised.float()
            broadcast_(mean)
            yield mean.view(total.shape)

    def _hand_on(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.gradients.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
