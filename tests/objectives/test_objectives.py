"""Per-example losses: right values, no coupling through batch or padding, clear refusals."""

from __future__ import annotations

import peft
import pytest
import tiny_heads
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from hf_dpzero.objectives import heads
from hf_dpzero.objectives import losses as objectives


def test_select_objective_looks_through_wrappers_and_subclasses():
    class Mine(transformers.BertForSequenceClassification):
        pass

    model = Mine(transformers.BertConfig(**tiny_heads.ENCODER))
    lora = peft.get_peft_model(
        tiny_heads.build("classes-bert"), peft.LoraConfig(task_type="SEQ_CLS", r=2)
    )
    for wrapped in (model, lora, nn.DataParallel(model), torch.compile(model)):
        chosen = heads.select_objective(wrapped)
        assert chosen is heads.sequence_classification_objective


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("causal-gpt2", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"])),
        ("causal-opt", peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        ("causal-llama", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        ("summary-t5", peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=2)),
        ("classes-roberta", peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)),
    ],
)
@torch.no_grad()
def test_peft_models_do_not_couple_examples(name, config):
    model = peft.get_peft_model(tiny_heads.build(name), config).eval()
    objective, rows = heads.select_objective(model), tiny_heads.rows(name)
    alone = torch.cat([objective(model, row) for row in rows])
    for side in ("left", "right"):
        together = objective(model, tiny_heads.padded(rows, side))
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_only_needed_logits_are_computed():
    """Labels on the last two tokens: the head answers for four positions, not for all nine."""
    model, row = tiny_heads.build("causal-gpt2"), tiny_heads.rows("causal-gpt2")[1]
    row["labels"][:, :-2] = -100
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda _m, _i, output: seen.append(output.shape[1]))
    loss = heads.causal_lm_objective(model, row)
    assert seen == [4]  # three, rounded up to a power of two
    torch.testing.assert_close(loss, model(**row).loss.reshape(1), atol=1e-4, rtol=1e-4)


def test_classification_values():
    logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    expected = torch.tensor([2.0 + torch.log1p(torch.tensor(-2.0).exp()), torch.tensor(2.0).log()])
    found = objectives.classification_losses(logits, torch.tensor([1, 0]))
    torch.testing.assert_close(found, expected)
    targets = torch.tensor([[1.0, 2.0], [0.0, 2.0]])
    found = objectives.classification_losses(logits, targets, "regression")
    torch.testing.assert_close(found, torch.tensor([2.5, 2.0]))
    multi_label = objectives.classification_losses(logits, torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    log2 = torch.tensor(2.0).log()
    sigmoid = torch.log1p(torch.tensor(-2.0).exp())
    torch.testing.assert_close(multi_label, torch.stack([(sigmoid + log2) / 2, log2]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    """Half precision cannot tell 600 + 1e-2 from 600; the float32 loss of the same logits can."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 200, 30, generator=generator).to(dtype)
    labels = torch.randint(0, 30, (2, 200), generator=generator)
    rows = zip(logits.float(), labels, strict=True)
    expected = torch.stack([F.cross_entropy(row, label) for row, label in rows])
    actual = objectives.token_losses(logits, labels)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    by_class = objectives.classification_losses(logits[:, 0], labels[:, 0])
    expected = F.cross_entropy(logits[:, 0].float(), labels[:, 0], reduction="none")
    torch.testing.assert_close(by_class, expected)


def test_an_example_without_label_tokens_has_loss_zero():
    labels = torch.full((2, 5), -100)
    labels[1, 0] = 3  # the first token has no predictor in a causal model
    model = tiny_heads.build("causal-gpt2")
    batch = {"input_ids": torch.randint(4, 9, (2, 5)), "labels": labels}
    assert heads.causal_lm_objective(model, batch).tolist() == [0.0, 0.0]
    row = {**tiny_heads.rows("causal-gpt2")[1]}
    row["labels"] = torch.full_like(row["labels"], -100)
    assert heads.causal_lm_objective(model, row).tolist() == [0.0]


def test_a_bad_example_stays_alone_and_an_empty_batch_has_no_losses():
    logits = torch.zeros(3, 4, 5)
    logits[1] = float("nan")
    losses = objectives.token_losses(logits, torch.zeros(3, 4).long())
    assert losses.isnan().tolist() == [False, True, False]
    assert objectives.token_losses(torch.zeros(0, 4, 5), torch.zeros(0, 4).long()).shape == (0,)
    assert objectives.classification_losses(torch.zeros(0, 2), torch.zeros(0).long()).shape == (0,)


def test_right_padded_leaves_aligned_or_explicit_inputs_alone():
    right = {"input_ids": torch.tensor([[5, 1]]), "attention_mask": torch.tensor([[1, 0]])}
    assert objectives.right_padded(right) is right
    explicit = {
        "attention_mask": torch.tensor([[0, 1]]),
        "position_ids": torch.tensor([[0, 0]]),
        "input_ids": torch.tensor([[1, 5]]),
    }
    assert objectives.right_padded(explicit) is explicit


REFUSED = [
    (torch.tensor(0.5), r"shape \[\] where \[4\]"),
    (torch.zeros(4, 3), r"shape \[4, 3\]"),
    (torch.zeros(3), r"shape \[3\] where \[4\]"),
    (torch.zeros(4, dtype=torch.long), r"dtype torch.int64"),
    (0.5, r"is a float"),
]


@pytest.mark.parametrize(("losses", "message"), REFUSED)
def test_losses_that_are_not_one_an_example_are_refused(losses, message):
    with pytest.raises((TypeError, ValueError), match=message):
        objectives.check_per_example(losses, batch_size=4)
    found = objectives.check_per_example(torch.ones(4, dtype=torch.bfloat16), batch_size=4)
    assert found.dtype == torch.float32 and found.tolist() == [1.0] * 4


def test_targets_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="problem_type='ranking'"):
        objectives.classification_losses(torch.zeros(1, 2), torch.tensor([0]), "ranking")
    row = {k: v for k, v in tiny_heads.rows("causal-gpt2")[0].items() if k != "labels"}
    with pytest.raises(ValueError, match="no 'labels'"):
        heads.causal_lm_objective(tiny_heads.build("causal-gpt2"), row)
