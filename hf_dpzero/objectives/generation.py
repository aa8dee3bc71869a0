"""Greedy decoding of padded prompts, each row as if it were alone.

The next token is the most probable one, y_t = argmax_v p(v | prompt, y_<t), until a stop token or
`max_new_tokens`: how generation tasks are scored in MeZO (Malladi et al. 2023, arXiv:2305.17333,
appendix D), but that no answer begins with its end: the first token is the most probable one that is
no stop token.
Nothing is drawn, so no generator moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.objectives.host import sent
from hf_dpzero.objectives.losses import (
    IGNORE_INDEX,
    Inputs,
    base_model,
    is_compiled,
    model_logits,
    right_padded,
    take_columns,
    takes,
    token_losses,
)

Decoded = tuple[Tensor, Tensor]
"""New tokens `[B, n]`, and float32 logits: `[B, n]` of each, or `[B]`."""


@torch.no_grad()
def greedy(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    pad_token_id: int,
    cache: Any = None,
) -> Decoded:
    """The tokens that a decoder goes on with, the most probable one each time.

    The checkpoint's own `generation_config` (sampling, lengths, forced or suppressed tokens) has no
    say, and is as it was afterwards. Rows are padded on the left for it, whatever their padding, so
    that a row's tokens are those that it gets alone, up to ties within float rounding.

    Args:
      model: a decoder with `generate`, also under PEFT; in eval mode.
      input_ids, attention_mask: prompts `[B, T]`, padded on either side.
      max_new_tokens: N >= 1.
      stop_token_ids: where a row ends, after a token that is none of them; () for never.
      pad_token_id: any token that the model knows; it is never attended to.
      cache: from `answer_losses` of these prompts, which are then not run again.

    Returns:
      `[B, N]` int64: a row's tokens before its first stop token, then -100; and `[B]` float32, the mean
      logit of what was decoded, for comparisons of batches of one: tokens alone hide small changes, and
      a row that has ended counts while another one goes on.

    Raises:
      ValueError: a row without a token; prompts that leave no room for N tokens in the model's
        context; a model that does not generate.
    """
    if not len(input_ids):
        empty = input_ids.new_full((0, max_new_tokens), IGNORE_INDEX)
        return empty, torch.zeros(0, device=input_ids.device)
    (ids, mask), stops = left_padded(input_ids, attention_mask), tuple(stop_token_ids)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: it must be at least 1.")
    virtual = _virtual_tokens(model)
    config: Any = getattr(base_model(model), "config", None)
    context, prompt = getattr(config, "max_position_embeddings", None), virtual + ids.shape[1]
    if context is not None and prompt + max_new_tokens > context:
        raise ValueError(
            f"a prompt of {prompt} tokens and max_new_tokens={max_new_tokens} exceed the model's "
            f"context of {context}: shorten the prompts to {context - max_new_tokens} tokens, or lower "
            "max_new_tokens."
        )
    ids = ids.masked_fill(mask == 0, pad_token_id)
    if virtual or _counts_behind_padding(model):  # they lose count of positions in a cache
        tokens, logits = _without_cache(model, ids, mask, max_new_tokens, stops)
    else:
        tokens, logits = _with_cache(model, ids, mask, max_new_tokens, stops, pad_token_id, cache)
    # What stands behind a stop token was made because other rows went on.
    tokens = tokens.masked_fill(_stopped(tokens, stops), IGNORE_INDEX)
    missing = tokens.new_full((len(tokens), max_new_tokens - tokens.shape[1]), IGNORE_INDEX)
    return torch.cat([tokens, missing], dim=1), logits.mean(dim=1)


def left_padded(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows rolled so that each ends with its last attended token, and no wider than the longest.

    Args:
      input_ids, attention_mask: `[B, T]`, padded on either side.

    Returns:
      The same two, `[B, longest]`.

    Raises:
      ValueError: a row without an attended token.

    >>> ids, mask = torch.tensor([[5, 6, 0], [0, 7, 0]]), torch.tensor([[1, 1, 0], [0, 1, 0]])
    >>> left_padded(ids, mask)[0]
    tensor([[5, 6],
            [0, 7]])
    """
    attended = attention_mask.ne(0)
    empty = (~attended.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"row {empty[0]} has no prompt to go on from: keep at least one token before the answer."
        )
    width = attended.shape[1]
    behind = attended.flip(1).int().argmax(dim=1, keepdim=True)
    # Column c of a row comes from c - (padding behind it): each row is rolled by its own amount.
    index = (torch.arange(width, device=attended.device) - behind) % width
    ids, mask = take_columns(input_ids, index), take_columns(attention_mask, index)
    unused = int(mask.ne(0).any(dim=0).int().argmax()) if width else 0
    return ids[:, unused:], mask[:, unused:]


def answer_losses(
    model: nn.Module, prompts: tuple[Tensor, Tensor], answers: Tensor
) -> tuple[Tensor, Any] | None:
    """Mean cross entropy of given answers, and the keys and values of the prompts, from one pass.

    Args:
      model: a decoder, in eval mode.
      prompts: ids and mask `[B, T]`, padded on the left.
      answers: `[B, A]` int64 tokens that follow them, then -100.

    Returns:
      Losses `[B]` float32, and the cache of all but the prompts' last token, for `greedy`. None where
      it cannot be cut off there or would depend on the answer: see `_empty_cache`.
    """
    (ids, mask), present = prompts, answers.ne(IGNORE_INDEX)
    cache = _empty_cache(model, ids.shape[1] + answers.shape[1])
    if cache is None:
        return None
    own = mask.ne(0).sum(dim=1, keepdim=True)
    mask = torch.cat([mask, present.to(mask.dtype)], dim=1)
    inputs: dict[str, Any] = {
        "input_ids": torch.cat([ids, answers.masked_fill(~present, 0)], dim=1),
        "attention_mask": mask,
        "position_ids": (mask.ne(0).cumsum(dim=1) - 1).clamp(min=0),
        "past_key_values": cache,
        "use_cache": True,
    }
    places = own - 1 + torch.arange(answers.shape[1], device=own.device)
    losses = token_losses(selected_logits(model, inputs, places), answers)
    cache.crop(-answers.shape[1] - 1)
    return losses, cache


def _empty_cache(model: nn.Module, width: int) -> Any:
    """A cache of up to `width` tokens whose end can be cut off, or None.

    None for windows and states that forget, rotations that depend on the whole length, compiled code,
    tokens of PEFT's in front, and positions that the model counts by itself.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    base: Any = base_model(model)
    config: Any = getattr(base, "config", None)
    context = getattr(config, "max_position_embeddings", None)
    if (
        # What `generate` asks: in transformers 5.3 the layers of hybrids, below, do not tell.
        not getattr(base, "_supports_default_dynamic_cache", lambda: False)()
        or "longrope" in str(getattr(config, "rope_parameters", None))
        or (context is not None and width > context)
        or is_compiled(model)
        or _virtual_tokens(model)
        or _counts_behind_padding(model)
        or not all(takes(model, n) for n in ("position_ids", "past_key_values", "use_cache"))
    ):
        return None
    cache = DynamicCache(config=config)
    return cache if all(type(layer) is DynamicLayer for layer in cache.layers) else None


def _with_cache(
    model: nn.Module,
    ids: Tensor,
    mask: Tensor,
    count: int,
    stops: tuple[int, ...],
    pad: int,
    cache: Any,
) -> Decoded:
    """By the model's own `generate`, each token in a pass of its own."""
    from transformers import GenerationConfig, LogitsProcessorList

    largest = list[Tensor]()

    def noted(_: Tensor, logits: Tensor) -> Tensor:
        largest.append(logits.float().amax(dim=1))
        return logits

    settings = GenerationConfig(
        max_new_tokens=count,
        min_new_tokens=1,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        eos_token_id=list(stops) or None,
        pad_token_id=pad,
    )
    # `generate` fills what it was not told from what the checkpoint brought along.
    owners: list[Any] = [m for m in model.modules() if "generation_config" in vars(m)]
    own = [module.generation_config for module in owners]
    try:
        for module in owners:
            module.generation_config = GenerationConfig()
        tokens = _generator(model).generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=settings,
            logits_processor=LogitsProcessorList([noted]),
            **({} if cache is None else {"past_key_values": cache}),
        )
    finally:
        for module, config in zip(owners, own, strict=True):
            module.generation_config = config
    return tokens[:, ids.shape[1] :], torch.stack(largest, dim=1)


def _without_cache(
    model: nn.Module, ids: Tensor, mask: Tensor, count: int, stops: tuple[int, ...]
) -> Decoded:
    """By passes over everything so far."""
    tokens, largest = ids[:, :0], list[Tensor]()
    one = mask.new_ones(len(mask), 1)
    for place in range(count):
        last = (mask.shape[1] - 1 - mask.ne(0).int().argmax(dim=1, keepdim=True)).long()
        logits = selected_logits(model, {"input_ids": ids, "attention_mask": mask}, last)[:, 0]
        if place == 0:
            logits[:, [stop for stop in stops if stop < logits.shape[1]]] = -torch.inf
        top = logits.float().max(dim=1)
        largest.append(top.values)
        new = top.indices.unsqueeze(1)
        tokens, ids, mask = (torch.cat(p, dim=1) for p in ((tokens, new), (ids, new), (mask, one)))
        if bool(_stopped(tokens, stops)[:, -1].all()):
            break
    return tokens, torch.stack(largest, dim=1)


def _virtual_tokens(model: nn.Module) -> int:
    """Positions that PEFT's prompt tuning and prefix tuning take."""
    adapter: Any = getattr(_generator(model), "active_peft_config", None)
    return getattr(adapter, "num_virtual_tokens", None) or 0


def _counts_behind_padding(model: nn.Module) -> bool:
    """Whether positions are numbered from the padding's own index on, as in RoBERTa."""
    return any(
        name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
        for name, module in base_model(model).named_modules()
    )


def _generator(model: nn.Module) -> Any:
    """The outermost module with a `generate` of its own, which knows of adapters."""
    outermost: Any = model
    while type(outermost).__name__ in ("DistributedDataParallel", "DataParallel"):
        outermost = outermost.module
    if not hasattr(outermost, "generate"):
        raise ValueError(f"{type(base_model(model)).__name__} does not generate: use a causal LM.")
    return outermost


def _stopped(tokens: Tensor, stops: Sequence[int]) -> Tensor:
    """Where a row of `[B, n]` has met a stop token, from that token on."""
    return torch.isin(tokens, tokens.new_tensor(list(stops))).cumsum(dim=1) > 0


def selected_logits(model: nn.Module, inputs: Inputs, positions: Tensor) -> Tensor:
    """Logits at P positions of each row, `[B, P, V]` in the model's dtype.

    Equal to the full logits at these positions (up to the rounding of a smaller matrix product): the
    hidden states are gathered as they enter the output embedding. Where that is not to be done (a
    compiled model, or one without an output embedding that takes `[B, T, h]`), all logits are
    computed and then gathered.

    Args:
      model: a language model, also under PEFT.
      inputs: what its forward takes, `[B, T]`; padded on either side.
      positions: `[B, P]` int64, counted from each row's first attended token.
    """
    batch, found = right_padded(inputs), list[Tensor]()
    width, mask = batch["input_ids"].shape[1], batch.get("attention_mask")
    if mask is not None and "position_ids" in batch:  # which `right_padded` leaves where they are
        start = mask.ne(0).int().argmax(dim=1, keepdim=True)
        positions = sent(positions, start.device) + start

    def gathered(states: Tensor) -> Tensor:
        """`[B, P, ...]`; virtual tokens of prompt tuning stand in front and are not counted."""
        return take_columns(states, sent(positions, states.device) + (states.shape[1] - width))

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        states = args[0] if len(args) == 1 else None
        if not isinstance(states, Tensor) or states.dim() != 3:
            return None  # not `[B, T, h]`: logits are gathered, in place of states
        if len(states) != len(positions) or states.shape[1] < width:
            return None
        found.append(gathered(states))
        return (found[0],)

    get: Any = getattr(base_model(model), "get_output_embeddings", None)
    # A hook on a compiled model would not be called, or would break its graph.
    head = None if get is None or is_compiled(model) else get()
    if not isinstance(head, nn.Module):
        return gathered(model_logits(model, batch))
    handle = head.register_forward_pre_hook(before)
    try:
        logits = model_logits(model, batch)
    finally:
        handle.remove()
    return logits if found else gathered(logits)
