"""Objectives of the heads: transformers' own loss of an example alone, whatever it is padded to."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import tiny_heads
import torch
import transformers
from torch import Tensor, nn

from hf_dpzero.objectives import heads, register_objective, select_objective
from hf_dpzero.objectives.heads import span_losses

PADDED = [
    (name, side)
    for name in tiny_heads.HEADS
    for side in ("right", "left")
    if name.startswith(tiny_heads.TEXTS) or (name, side) == ("sound-wav2vec2", "right")
]


@pytest.mark.parametrize("name", sorted(tiny_heads.HEADS))
@torch.no_grad()
def test_an_examples_loss_is_the_models_own(name):
    """The fourth span is cut off, where transformers' mean over no label is NaN."""
    model, rows = tiny_heads.build(name), tiny_heads.rows(name)
    objective = select_objective(model)
    losses = torch.cat([objective(model, row) for row in rows])
    assert losses.shape == (4,) and losses.dtype == torch.float32
    assert losses.max() - losses.min() > 1e-2, "the examples must be told apart"
    for loss, row in zip(losses[:3], rows):
        torch.testing.assert_close(loss, model(**row).loss.float(), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_two_encoders_make_an_encoder_decoder():
    parts = [transformers.BertConfig(**tiny_heads.ENCODER) for _ in range(2)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id, config.pad_token_id = 0, tiny_heads.PAD
    model = transformers.EncoderDecoderModel(config=config).eval()
    rows = tiny_heads.rows("summary-t5")
    objective = select_objective(model)
    assert objective is heads.seq2seq_objective
    alone = torch.cat([objective(model, row) for row in rows])
    torch.testing.assert_close(alone[1], model(**rows[1]).loss, atol=1e-5, rtol=1e-5)
    for side in ("right", "left"):
        together = objective(model, tiny_heads.padded(rows, side))
        torch.testing.assert_close(together, alone, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("name", "side"), PADDED)
@torch.no_grad()
def test_padding_and_neighbours_do_not_count(name, side):
    model, rows = tiny_heads.build(name), tiny_heads.rows(name)
    objective = select_objective(model)
    alone = torch.cat([objective(model, row) for row in rows])
    batch = tiny_heads.padded(rows, side)
    torch.testing.assert_close(objective(model, batch), alone, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("name", "kind"), [("span-bert", "QUESTION_ANS"), ("tokens-bert", "TOKEN_CLS")]
)
@torch.no_grad()
def test_virtual_tokens_are_no_tokens_of_the_text(name, kind):
    settings = peft.PromptTuningConfig(task_type=kind, num_virtual_tokens=3)
    model = peft.get_peft_model(tiny_heads.build(name), settings).eval()
    rows = tiny_heads.rows(name)
    objective = select_objective(model)
    alone = torch.cat([objective(model, row) for row in rows])
    for side in ("right", "left"):
        together = objective(model, tiny_heads.padded(rows, side))
        torch.testing.assert_close(together, alone, atol=2e-5, rtol=2e-5)


def test_span_losses_ignore_what_lies_outside():
    """Two of four tokens are the row's own: log 2 for each position that counts, halved."""
    logits = torch.zeros(6, 4)
    mask = torch.tensor([[1, 1, 0, 0]]).expand(6, 4)
    starts, ends = torch.tensor([0, 1, -3, 2, 4, 99]), torch.tensor([1, 9, 1, 1, 4, 3])
    counts = torch.tensor([2.0, 1.0, 2.0, 1.0, 0.0, 0.0])
    expected = counts * torch.tensor(2.0).log() / 2
    torch.testing.assert_close(span_losses(logits, logits, starts, ends, mask), expected)
    column = span_losses(logits, logits, starts[:, None], ends[:, None], mask)
    torch.testing.assert_close(column, expected)


def test_gradients_of_span_losses_are_finite():
    logits = torch.zeros(2, 4, requires_grad=True)
    mask, outside = torch.tensor([[1, 1, 0, 0]] * 2), torch.tensor([1, 4])
    span_losses(logits, logits, outside, outside, mask).sum().backward()
    assert logits.grad is not None and logits.grad.tolist() == [[0.5, -0.5, 0.0, 0.0], [0.0] * 4]


@pytest.mark.parametrize("missing", ["start_positions", "end_positions"])
def test_both_ends_of_a_span_are_needed(missing):
    row = tiny_heads.rows("span-bert", 1)[0]
    del row[missing]
    with pytest.raises(ValueError, match=f"no '{missing}'.*add a {missing} column"):
        heads.question_answering_objective(tiny_heads.build("span-bert"), row)


@torch.no_grad()
def test_beam_search_for_spans_runs_one_by_one_with_the_models_loss():
    config = transformers.XLNetConfig(vocab_size=40, d_model=16, n_layer=1, n_head=2, d_inner=24)
    model = transformers.XLNetForQuestionAnswering(config).eval()
    rows = tiny_heads.rows("span-bert", 3)
    objective = select_objective(model)
    assert objective is heads.own_loss_objective and not heads.own_loss_objective.single_pass
    same_length = [
        {k: v[:, :3] if v.dim() > 1 else v.clamp(max=2) for k, v in r.items()} for r in rows
    ]
    alone = torch.stack([model(**row).loss for row in same_length])
    torch.testing.assert_close(objective(model, tiny_heads.padded(same_length)), alone)


def test_a_model_without_a_loss_has_no_loss_of_its_own():
    model = tiny_heads.build("tokens-bert")
    row = {k: v for k, v in tiny_heads.rows("tokens-bert", 1)[0].items() if k != "labels"}
    with pytest.raises(
        ValueError, match="BertForTokenClassification returns no loss for.*input_ids"
    ):
        heads.own_loss_objective(model, row)


# ---------------------------------------------------------------- the table


class TinyForReranking(nn.Module):
    """A head that nobody knows."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids.float()


def mine(model: nn.Module, inputs: Any) -> Tensor:
    return model(inputs["input_ids"]).mean(1)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A table of registered heads that is empty before each test and forgotten after it."""
    table: dict[str, Any] = {}
    monkeypatch.setattr(heads, "_REGISTERED", table)
    return table


def test_an_unknown_head_is_refused_with_what_to_write():
    with pytest.raises(ValueError, match="no per-example loss") as refusal:
        select_objective(TinyForReranking())
    for words in (
        "known for TinyForReranking", "ForQuestionAnswering, ", "compute_per_example_loss=objective",
        "register_objective('TinyForReranking', objective)", "own_loss_objective",
    ):  # fmt: skip
        assert words in str(refusal.value)


class Regression(nn.Module):
    """A model of nobody's, as scripts have them: its forward returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(2.0))

    def forward(self, input_x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        predicted = self.slope * input_x
        return (predicted,) if labels is None else (((predicted - labels) ** 2).mean(), predicted)


def test_an_unknown_model_that_takes_labels_gives_its_own_loss_row_by_row():
    rows = {"input_x": torch.tensor([1.0, 3.0]), "labels": torch.tensor([1.0, 2.0])}

    losses = select_objective(Regression())(Regression(), rows)

    assert losses.tolist() == [1.0, 16.0]  # (2 - 1)^2 and (6 - 2)^2


def test_registered_heads_are_known_and_the_longest_ending_counts():
    register_objective("Reranking", heads.masked_lm_objective)
    register_objective("ForReranking", mine)
    assert select_objective(TinyForReranking()) is mine
    bert = tiny_heads.build("tokens-bert")
    assert select_objective(bert) is heads.token_classification_objective
    register_objective("ForTokenClassification", mine)
    assert select_objective(bert) is mine
    register_objective("BertForTokenClassification", heads.own_loss_objective)
    assert select_objective(bert) is heads.own_loss_objective


def test_a_language_model_stays_one_whatever_is_registered():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**tiny_heads.GPT2))
    register_objective("GPT2LMHeadModel", mine)
    assert select_objective(model) is mine and heads.is_language_model(model)
    assert not heads.is_language_model(TinyForReranking())
    assert not heads.is_language_model(tiny_heads.build("tokens-bert"))


@pytest.mark.parametrize(
    ("head", "objective", "error", "words"),
    [("", mine, ValueError, "head=''"), ("ForReranking", 3, TypeError, "ForReranking is a int")],
)
def test_what_cannot_be_registered(head, objective, error, words):
    with pytest.raises(error, match=words):
        register_objective(head, objective)
