"""Ghost clipping: norms of per-example gradients without the gradients, then one weighted sum.

(Li et al. 2022, arXiv:2110.05679.) The gradient of a weight that meets an example's tokens is a sum of
outer products, sum_t left_t right_t^T, and its norm needs none of them:

||sum_t left_t right_t^T||_F^2 = sum_{s,t} (left_s . left_t) (right_s . right_t)

A weight with fewer numbers than the two `[T, T]` tables takes its gradient instead, which is
smaller (mixed ghost clipping, Bu et al. 2022, arXiv:2205.10683); so do biases and norm layers. The
norm is that of all uses of a weight together: of a layer that runs twice, of a tied embedding (Opacus
has no ghost clipping of tied weights).

The sum is made of what was measured: left_t and right_t are kept and multiplied once more,
sum_i w_i sum_t left_it right_it^T (book-keeping, Bu et al. 2023, arXiv:2210.00038).

*Rounding.* The norm rounds in proportion to S = sum_t |left_t| |right_t|, not to itself. With float32's
2^-24, a squared norm is off by no more than about 2^-23 S^2; while S <= 16 ||g|| that is 2^-16 of the
norm at the very worst. Where S is larger, the example's gradient is multiplied out by itself, and what
is added is w times that very array. The weighted sum is taken in float64.

*Layers.* Linear layers and embeddings have a rule here; norm layers and convolutions have Opacus', which
is imported when first used. A call is recorded by wrapping the layer's forward, and its output's
gradient arrives in a hook on that very tensor, so that each gradient meets its own call's inputs. Made
to fit Hugging Face's models: positions looked up once for the whole batch, and layers that see
`[B * T, h]` rows instead of `[B, T, h]`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_dpzero.estimators.forward_passes import replaced_forward
from hf_dpzero.privacy.mechanisms.gradient import row_norms

Rows = Tensor | slice  # bool [B], or all
WAY_OUT = "Freeze it, or use dpzero, which needs no gradients."
PIECE = 1 << 13
"""Coordinates of a microbatch's gradients that are held in float64 at a time."""
CANCELLED = 16.0
"""Largest S / ||g|| that products without the gradient are trusted with."""
VANISHING = 2.0**-34
"""Counts as rounding, for scaled factors below 2: products whose squares leave float32's range."""
SMALLEST = 2.0**-80
"""Smallest w ||g|| for which weighted factors below float32's range do not matter."""


@dataclass(frozen=True)
class Products:
    """Uses of a weight `[n, m]`: its gradient is factor sum_t left_t right_t^T for each example.

    Attributes:
      left: float32 `[B, T, n]`, or ids `[B, T]` that stand for one-hot rows.
      right: float32 `[B, T, m]`.
      factor: float64 `[B]`; None for 1.
    """

    left: Tensor
    right: Tensor
    factor: Tensor | None = None

    @property
    def looked_up(self) -> bool:
        """Whether `left` holds ids."""
        return not self.left.is_floating_point()

    def scaled(self) -> Products:
        """Returns the same product of factors below 2, whose squares stay in float32's range."""
        right, factor = _over_power_of_two(self.right)
        if self.looked_up:
            return Products(self.left, right, factor)
        left, other = _over_power_of_two(self.left)
        return Products(left, right, factor * other)

    def _factored(self, rows: Tensor) -> Tensor:
        """`[B, ...]` times the factor, in float32."""
        if self.factor is None:
            return rows
        return rows * self.factor.float().view(-1, *[1] * (rows.dim() - 1))

    def dense(self, weight: Tensor) -> Tensor:
        """Returns the gradients themselves, `[B, n, m]`."""
        if not self.looked_up:
            return self._factored(self.left.mT @ self.right)
        gradient = self.right.new_zeros(len(self.right), *weight.shape)
        index = self.left.unsqueeze(-1).expand_as(self.right)
        return self._factored(gradient.scatter_add_(1, index, self.right))

    def of(self, i: int) -> Products:
        """Returns the product of example i alone."""
        factor = None if self.factor is None else self.factor[i : i + 1]
        return Products(self.left[i : i + 1], self.right[i : i + 1], factor)

    def scale(self) -> Tensor:
        """Returns sum_t |left_t| |right_t| [B] float64, of scaled ones: the rounding goes by it."""
        assert self.factor is not None
        lengths = self.right.norm(dim=2, dtype=torch.float64)
        if not self.looked_up:
            lengths = lengths * self.left.norm(dim=2, dtype=torch.float64)
        return self.factor * (lengths.sum(dim=1) + VANISHING)

    def squared_norm(self) -> Tensor:
        """Returns ||sum_t left_t right_t^T||_F^2 [B] float64 of scaled ones, without that sum."""
        assert self.factor is not None
        rights = self.right @ self.right.mT
        if self.looked_up:
            lefts = (self.left.unsqueeze(2) == self.left.unsqueeze(1)).double()
        else:
            lefts = (self.left @ self.left.mT).double()
        return (lefts * rights).sum(dim=(1, 2)).clamp(min=0) * self.factor.square()

    def add_weighted_(self, total: Tensor, kept: Rows, weights: Tensor) -> None:
        """Makes total += sum_i w_i g_i over some examples; total `[n, m]` and weights [B] float64."""
        # Not by a second backward pass with weighted losses, as Opacus does: that rounds differently, so
        # where huge terms cancel on the way back it gives a gradient that nobody measured, and one
        # example then moves the sum by up to 14 clipping norms
        # (`test_huge_tokens_that_cancel_move_the_sum_by_no_more_than_the_clip`).
        w = (weights if self.factor is None else weights * self.factor)[kept][:, None, None]
        left, right = self.left[kept], self.right[kept].double()
        if self.looked_up:
            total.index_add_(0, left.flatten(), (right * w).flatten(0, 1))
        else:
            total.addmm_((left * w).flatten(0, 1).mT, right.flatten(0, 1))

    def total(self, weight: Tensor) -> Tensor:
        """Returns their sum over the examples, projected: `[n]`."""
        lengths = self._factored(self.right @ signs(self.right))
        if not self.looked_up:
            return torch.einsum("btn,bt->n", self.left, lengths)
        return lengths.new_zeros(len(weight)).index_add_(0, self.left.flatten(), lengths.flatten())


def joined(uses: Sequence[Products]) -> list[Products]:
    """Scales uses; those of one kind are one use of more tokens. Those looked up come first."""
    kinds = [[u for u in uses if u.looked_up], [u for u in uses if not u.looked_up]]
    return [
        Products(
            torch.cat([u.left for u in kind], 1),
            torch.cat([u._factored(u.right) for u in kind], 1),
        ).scaled()
        for kind in kinds
        if kind
    ]


def _over_power_of_two(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, T, n]` over a power of two for each example, so that it is below 2; these [B] float64."""
    # dividing by a power of two is exact
    largest = rows.abs().amax(dim=(1, 2)).clamp(min=torch.finfo(torch.float32).tiny)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # its exponent alone
    return rows / power[:, None, None], power.double()


def is_small(weight: Tensor, uses: Sequence[Products]) -> bool:
    """Whether a weight's gradient takes less memory than its tables."""
    return weight.numel() < 2 * sum(u.right.shape[1] for u in uses) ** 2


def squared_norms(joined: Sequence[Products]) -> tuple[Tensor, Tensor]:
    """Returns ||sum over the uses||_F^2 without the gradients, and its rounding's scale; float64 [B]."""
    squares = functools.reduce(torch.add, [u.squared_norm() for u in joined])
    if len(joined) == 2:  # a tied weight: twice the inner product of its two gradients
        looked_up, multiplied = joined
        assert looked_up.factor is not None and multiplied.factor is not None
        rights = multiplied.right @ looked_up.right.mT
        tokens = looked_up.left.unsqueeze(1).expand_as(rights)
        inner = (multiplied.left.gather(2, tokens).double() * rights).sum(dim=(1, 2))
        squares = (squares + 2 * looked_up.factor * multiplied.factor * inner).clamp(min=0)
    return squares, functools.reduce(torch.add, [u.scale() for u in joined])


def signs(like: Tensor) -> Tensor:
    """Returns fixed +-1, as many as the last dimension of `like`; they only serve a check."""
    drawn = torch.randint(0, 2, like.shape[-1:], generator=torch.Generator().manual_seed(0))
    return drawn.to(like) * 2 - 1


def owned(module: nn.Module) -> list[nn.Parameter]:
    """Returns the module's own trainable parameters."""
    return [p for p in module.parameters(recurse=False) if p.requires_grad]


def supported(module: nn.Module) -> bool:
    """Whether there is a rule for the layer's per-example gradients."""
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq
    if type(module) is nn.Linear:
        return True
    return type(module) in opacus_rules() and not list(module.buffers(recurse=False))


@functools.lru_cache(maxsize=1)
def opacus_rules() -> Mapping[type, Callable[..., dict[nn.Parameter, Tensor]]]:
    """Returns Opacus' rules by layer type: (layer, inputs, output gradients) -> their gradients."""
    try:
        from opacus.grad_sample.grad_sample_module import GradSampleHooks
    except ImportError:
        raise ImportError(
            "per-example gradients need opacus, which is not installed; run pip install opacus "
            "(in a checkout pip install -e '.[first-order]')"
        ) from None
    rules: Mapping[type, Callable[..., dict[nn.Parameter, Tensor]]] = GradSampleHooks.GRAD_SAMPLERS
    return rules


class LayerRecord:
    """Per-example gradients of one microbatch, as products (ghost) or multiplied out.

    Args:
      size: B, its examples.
      ghost: keep the factors of large weights' gradients in place of the gradients.

    Attributes:
      uses: the factors, by parameter.
      samples: the other parameters' gradients `[B, *shape]`.
      seen: leading dimensions of what a layer was given in each of its calls, by the layer's name.
      coarse: the type of a layer that computed in half precision, if any.
    """

    def __init__(self, size: int, ghost: bool) -> None:
        self.size, self.ghost = size, ghost
        self.uses: dict[Tensor, list[Products]] = {}
        self.samples: dict[Tensor, Tensor] = {}
        self.seen: dict[str, list[int]] = {}
        self.coarse, self._looked_up = "", 0

    @contextlib.contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Records the calls of the trained layers inside, and their gradients whenever they come.

        Raises:
          ValueError: inside and in the backward pass, for rows that are no multiple of the examples;
            for an embedding that does more than look up rows.
        """
        with contextlib.ExitStack() as stack:
            for name, module in model.named_modules():
                if owned(module) and supported(module):
                    name = f"{name or 'the model itself'} ({type(module).__name__})"
                    call = functools.partial(self._call, name, module)
                    stack.enter_context(replaced_forward(module, call))
            yield

    def _call(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Tensor],
        *args: Tensor,
        **kwargs: Tensor,
    ) -> Tensor:
        if isinstance(module, nn.Embedding):
            ids, output = self._lookup(module, forward, *args, **kwargs)
            inputs = [ids]
        else:
            output = forward(*args, **kwargs)
            inputs = [*args, *kwargs.values()]
        if not output.requires_grad:  # under no_grad: no part of any gradient
            return output
        if inputs[0].shape[:1] != output.shape[:1]:
            raise _unattributed(name)
        inputs = [self._by_example(name, t.detach()) for t in inputs]

        def heard(gradient: Tensor) -> None:
            self._add_call(module, inputs, self._by_example(name, gradient))
            inputs.clear()  # the graph holds this function until the backward pass is over

        output.register_hook(heard)
        return output

    def _lookup(
        self, module: nn.Embedding, forward: Callable[..., Tensor], *args: Tensor, **kwargs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The ids that are looked up and their rows; one row for all examples is given to each."""
        with _Lookups(module.weight) as lookups:
            output = forward(*args, **kwargs)
        if len(lookups.seen) != 1 or lookups.seen[0][1] is not output:
            raise ValueError(
                f"{type(module).__name__} does more than look up rows, so the rule for embeddings "
                "does not give its per-example gradient: freeze it."
            )
        ids = lookups.seen[0][0]
        if ids.dim() > 1 and ids.shape[0] > 1:
            self._looked_up = self._looked_up or ids.shape[0]
        elif ids.dim() > 1 and self.size > 1:
            rows = self._looked_up or self.size  # C rows for each example where it has C choices
            ids, output = (t.expand(rows, *t.shape[1:]) for t in (ids, output))
        return ids, output

    def _by_example(self, name: str, tensor: Tensor) -> Tensor:
        """`[B, ...]` as it is; rows flattened to `[B * T, h]` as `[B, T, h]` again."""
        rows = tensor.shape[0] if tensor.dim() else 0
        self.seen.setdefault(name, []).append(rows)
        if rows == self.size:
            return tensor
        if rows % self.size or rows == 0:
            raise _unattributed(name)
        return tensor.reshape(self.size, rows // self.size, *tensor.shape[1:])

    def _add_call(self, module: nn.Module, inputs: list[Tensor], gradient: Tensor) -> None:
        if gradient.element_size() < 4:
            self.coarse = type(module).__name__
        if self.ghost and gradient.dtype == torch.float64:
            raise ValueError(
                f"a {type(module).__name__} computes in float64, and ghost clipping's products are of "
                "float32: use performance.per_example_gradients: dense, or float32 throughout."
            )
        if isinstance(module, nn.Embedding):
            if module.padding_idx is not None:  # autograd leaves that row without a gradient
                padding = (inputs[0] == module.padding_idx).unsqueeze(-1)
                gradient = gradient.masked_fill(padding, 0.0)
            self._add_use(module.weight, Products(inputs[0].flatten(1), _by_token(gradient)))
        elif type(module) is nn.Linear:
            left = _by_token(gradient)
            self._add_use(module.weight, Products(left, _by_token(inputs[0].to(left.dtype))))
            if module.bias is not None:
                self._add_samples(module.bias, left.sum(1))
        else:  # a convolution's rule reads its inputs' memory in order
            rule = opacus_rules()[type(module)]
            for p, samples in rule(module, [t.contiguous() for t in inputs], gradient).items():
                self._add_samples(p, samples)

    def _add_use(self, weight: Tensor, use: Products) -> None:
        if self.ghost and weight.requires_grad:
            self.uses.setdefault(weight, []).append(use)
        elif weight.requires_grad:
            self._add_samples(weight, use.dense(weight))

    def _add_samples(self, p: Tensor, samples: Tensor) -> None:
        if p.requires_grad:
            self.samples[p] = self.samples[p] + samples if p in self.samples else samples

    def measure(self) -> tuple[Tensor, Tensor]:
        """Returns ||g_i|| and the scale S_i of its rounding (see above), after the backward pass.

        Products of small weights, and of those that have samples too, are multiplied out. S_i is 0
        where nothing else is left, and not finite where some factor is not.

        Returns:
          float64 [B] each, over all parameters.
        """
        norms, scales = list[Tensor](), list[Tensor]()
        for p in list(self.uses):
            uses = joined(self.uses.pop(p))
            if p in self.samples or is_small(p, uses):
                for use in uses:
                    self._add_samples(p, use.dense(p))
                continue
            self.uses[p] = uses
            squares, scale = squared_norms(uses)
            norms.append(squares.sqrt())
            scales.append(scale)
        norms += [row_norms(samples.flatten(1)) for samples in self.samples.values()]
        device = norms[0].device if norms else None
        none = torch.zeros(self.size, dtype=torch.float64, device=device)
        return torch.stack([none, *norms]).norm(dim=0), torch.stack([none, *scales]).norm(dim=0)

    def complete(self, p: nn.Parameter) -> bool:
        """Whether there is a gradient of each example for the parameter."""
        samples = self.samples.get(p)
        return p in self.uses if samples is None else samples.shape == (self.size, *p.shape)

    def error(self, p: nn.Parameter, gradient: Tensor) -> float:
        """Returns ||sum_i g_i - gradient||, of products only estimated: through a fixed vector of signs.

        Over random signs, the mean square of a matrix times them is its squared Frobenius norm.
        """
        if p in self.samples:
            return float(self.samples[p].sum(0, dtype=torch.float32).sub_(gradient).norm())
        total = functools.reduce(torch.add, [use.total(p) for use in self.uses[p]])
        return float((total - gradient @ signs(gradient)).norm())

    def gradient(self, parameters: Sequence[nn.Parameter], i: int) -> list[Tensor | None]:
        """Returns example i's own gradient, multiplied out; None where nothing was seen."""
        gradients: list[Tensor | None] = []
        for p in parameters:
            uses = [use.of(i).dense(p)[0] for use in self.uses.get(p, [])]
            own = [self.samples[p][i]] if p in self.samples else uses
            gradients.append(functools.reduce(torch.add, own) if own else None)
        return gradients

    def add_weighted_(
        self,
        totals: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
        kept: Tensor,
        weights: Tensor,
    ) -> None:
        """Makes totals += sum_i weights_i g_i over the examples in `kept` [B] bool; all in float64."""
        if not bool(kept.any()):
            return
        rows: Rows = slice(None) if bool(kept.all()) else kept
        for total, p in zip(totals, parameters, strict=True):
            if p in self.samples:
                add_rows_(total.view(-1), weights, self.samples[p].flatten(1), rows)
            for use in self.uses.get(p, []):
                use.add_weighted_(total, rows, weights)


def add_rows_(total: Tensor, weights: Tensor, gradients: Tensor, rows: Rows) -> None:
    """Makes total += sum_i w_i g_i over `rows`: total [n] and weights [B] float64, gradients [B, n]."""
    # In float64, whatever the gradients' dtype and however products are rounded: to round the sum would
    # move it, as the examples come and go, by more than their clip.
    for piece, into in zip(gradients.split(PIECE, dim=1), total.split(PIECE), strict=True):
        into.add_(weights[rows] @ piece[rows].double())


def _unattributed(name: str) -> ValueError:
    return ValueError(f"{name} sees rows that cannot be attributed to single examples. {WAY_OUT}")


def _by_token(rows: Tensor) -> Tensor:
    """`[B, ..., h]` as `[B, T, h]`; T = 1 for `[B, h]`."""
    return rows.reshape(len(rows), -1, rows.shape[-1])


class _Lookups(TorchFunctionMode):
    """Notes (ids, rows) of every `F.embedding` of one weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.seen = weight, list[tuple[Tensor, Tensor]]()

    def __torch_function__(
        self,
        func: Callable[..., Tensor],
        types: Sequence[type],
        args: tuple[Tensor, ...] = (),
        kwargs: dict[str, Tensor] | None = None,
    ) -> object:
        output = func(*args, **(kwargs or {}))
        if func is F.embedding:
            call = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
            if call["weight"] is self.weight:
                self.seen.append((call["input"], output))
        return output
