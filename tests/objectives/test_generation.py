"""Greedy decoding: every row as if alone, deaf to the checkpoint's settings, within the context."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GenerationConfig,
    RobertaConfig,
    RobertaForCausalLM,
)

from hf_dpzero.objectives.generation import greedy

FAMILIES = ("opt", "gpt2", "llama", "qwen2")
STOPS, PAD, NEW = (5, 6, 7, 8, 9, 10), 0, 8
LENGTHS = (3, 9, 1, 6)
ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def prompts(seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(11, 64, (length,), generator=generator) for length in LENGTHS]


def padded(rows: Sequence[Tensor], side: str, width: int = 11) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, width]; what is not attended to is noise."""
    ids, mask = torch.full((len(rows), width), 63), torch.zeros(len(rows), width).long()
    for i, row in enumerate(rows):
        own = slice(width - len(row), None) if side == "left" else slice(len(row))
        ids[i, own], mask[i, own] = row, 1
    return ids, mask


def by_full_passes(model: nn.Module, prompt: Tensor, stops: Sequence[int] = STOPS) -> list[int]:
    """The definition: one full pass over the row alone for every token."""
    row, found = prompt.unsqueeze(0), list[int]()
    while len(found) < NEW:
        with torch.no_grad():
            logits = model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False)[0]
        ranked = logits[0, -1].argsort(descending=True).tolist()
        # No answer begins with its end: the first token is the most probable one that does not end it.
        token = ranked[0] if found else next(t for t in ranked if t not in stops)
        if token in stops:
            break
        found.append(token)
        row = torch.cat([row, torch.tensor([[token]])], dim=1)
    return found + [-100] * (NEW - len(found))


def decode(model: nn.Module, ids: Tensor, mask: Tensor, **changed: Any) -> Tensor:
    settings = {"max_new_tokens": NEW, "stop_token_ids": STOPS, "pad_token_id": PAD}
    return greedy(model, ids, mask, **{**settings, **changed})[0]


def with_adapter(model: Any, name: str) -> nn.Module:
    """Every matrix of the adapter is far from its neutral start."""
    adapted = peft.get_peft_model(model, ADAPTERS[name]())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.3, generator=generator)
    return adapted.eval()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_decoded_as_if_alone(family, side, language_model):
    model, rows = language_model(family), prompts()
    expected = [by_full_passes(model, row) for row in rows]
    assert len({tuple(row) for row in expected}) > 2, "the rows must be told apart"
    assert decode(model, *padded(rows, side)).tolist() == expected
    assert [decode(model, *padded([row], side))[0].tolist() for row in rows] == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_that_a_model_counts_behind_padding(side):
    small = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    own = {"num_hidden_layers": 1, "is_decoder": True, "pad_token_id": PAD}
    torch.manual_seed(0)
    model = RobertaForCausalLM(RobertaConfig(vocab_size=64, **small, **own, initializer_range=0.5))
    rows = prompts()
    expected = [by_full_passes(model.eval(), row) for row in rows]
    assert decode(model, *padded(rows, side)).tolist() == expected


@pytest.mark.parametrize("adapter", [None, "prompt"])
@pytest.mark.filterwarnings("ignore")
def test_a_stop_token_that_the_model_does_not_have(adapter, language_model):
    model, (ids, mask) = language_model("opt"), padded(prompts(), "left")
    model = with_adapter(model, adapter) if adapter else model
    found = decode(model, ids, mask, stop_token_ids=(*STOPS, 64, 1000))
    assert torch.equal(found, decode(model, ids, mask))


def test_some_rows_stop_and_some_do_not(language_model):
    """Otherwise the tests above say nothing about stopping."""
    found = torch.cat([decode(language_model(f), *padded(prompts(), "left")) for f in FAMILIES])
    stopped = (found == -100).any(dim=1)
    assert stopped.any()
    assert not stopped.all()
    assert not torch.isin(found, torch.tensor(STOPS)).any()


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
@pytest.mark.parametrize("family", ["opt", "llama"])
@pytest.mark.filterwarnings("ignore")
def test_adapters(family, adapter, language_model):
    plain = [by_full_passes(language_model(family), row) for row in prompts()]
    model, rows = with_adapter(language_model(family), adapter), prompts()
    expected = [by_full_passes(model, row) for row in rows]
    assert expected != plain, "the adapter must matter"
    assert decode(model, *padded(rows, "left")).tolist() == expected


def test_the_checkpoints_settings_have_no_say(language_model):
    model = language_model("opt")
    ids, mask = padded(prompts(), "right")
    expected = decode(model, ids, mask)
    model.generation_config = own = GenerationConfig(
        do_sample=True,
        temperature=9.0,
        max_length=5,
        min_new_tokens=7,
        repetition_penalty=8.0,
        no_repeat_ngram_size=1,
        suppress_tokens=expected[0, :1].tolist(),
        forced_eos_token_id=4,
        forced_bos_token_id=20,
        eos_token_id=[11, 12, 13, 14],
        num_return_sequences=2,
        return_dict_in_generate=True,
    )
    assert torch.equal(decode(model, ids, mask), expected)
    assert model.generation_config is own
    with pytest.raises(IndexError):  # they come back after an error too
        decode(model, torch.tensor([[99]]), torch.tensor([[1]]))
    assert model.generation_config is own
    assert (own.do_sample, own.max_length, own.eos_token_id) == (True, 5, [11, 12, 13, 14])


def test_nothing_is_drawn_and_nothing_is_said(language_model, caplog):
    model, (ids, mask) = language_model("gpt2"), padded(prompts(), "right")
    before = torch.random.get_rng_state()
    logging.getLogger("transformers").propagate = True
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        decode(model, ids, mask)
    logging.getLogger("transformers").propagate = False
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not caplog.records


def test_width_is_the_same_when_every_row_stops_early(language_model):
    """Batches of one width can be gathered from several processes."""
    model = language_model("opt")
    found = decode(model, *padded(prompts(), "left"), stop_token_ids=tuple(range(64)))
    assert found.tolist() == [[-100] * NEW] * len(LENGTHS)
    assert decode(model, *padded([], "left")).shape == (0, NEW)


@pytest.mark.parametrize(("family", "virtual"), [("opt", 0), ("gpt2", 0), ("llama", 0), ("opt", 3)])
@pytest.mark.filterwarnings("ignore")
def test_the_context_bounds_prompt_and_answer(family, virtual, language_model):
    """The tiny models have 40 positions: 32 + 8 fit, 33 + 8 do not; padding does not count."""
    model = language_model(family)
    model = with_adapter(model, "prompt") if virtual else model
    longest = 40 - NEW - virtual
    rows = [torch.arange(12, 12 + longest), prompts()[0]]
    assert decode(model, *padded(rows, "right", width=50)).shape == (2, NEW)
    rows = [torch.arange(12, 13 + longest), prompts()[0]]
    message = f"prompt of {longest + 1 + virtual} tokens and max_new_tokens=8.*context of 40"
    with pytest.raises(ValueError, match=message):
        decode(model, *padded(rows, "right", width=50))


def test_refusals(language_model):
    model = language_model("opt")
    ids, mask = padded([prompts()[0], prompts()[1][:0]], "left")
    with pytest.raises(ValueError, match="row 1 has no prompt"):
        decode(model, ids, mask)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        decode(model, *padded(prompts(), "left"), max_new_tokens=0)
    small = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    encoder = BertModel(BertConfig(vocab_size=64, num_hidden_layers=1, **small))
    with pytest.raises(ValueError, match="BertModel does not generate"):
        decode(encoder, *padded(prompts(), "left"))


@pytest.mark.parametrize("adapter", [None, "prompt"])
@pytest.mark.filterwarnings("ignore")
def test_greedy_logits_are_those_of_the_tokens(adapter, language_model):
    model, row = language_model("llama"), prompts()[1]
    model = with_adapter(model, adapter) if adapter else model
    settings = {"max_new_tokens": NEW, "stop_token_ids": (), "pad_token_id": PAD}
    _, found = greedy(model, *padded([row], "right"), **settings)
    tokens = torch.tensor(by_full_passes(model, row, stops=()))
    whole = torch.cat([row, tokens]).unsqueeze(0)
    with torch.no_grad():
        logits = model(input_ids=whole, attention_mask=torch.ones_like(whole), use_cache=False)[0]
    expected = logits[0, -NEW - 1 : -1].gather(1, tokens.unsqueeze(1)).mean()
    torch.testing.assert_close(found, expected.reshape(1), atol=1e-4, rtol=1e-4)
