"""Evaluation runs rows by their length, and what it shows of them is in the order of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from several_processes import padded, texts
from tiny_runs import GROUPS, config, tiny_data, tiny_model, with_groups
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dpzero import DPZeroTrainer
from hf_dpzero.objectives.prompted import LabelWords

N, BATCH, WORDS = 22, 4, LabelWords((7, 9))
ROWS = with_groups(texts(N))
LENGTHS = [len(ids) for ids in ROWS["input_ids"][:]]


class Prompts:
    """Pads prompts, whose answer stands behind the last token."""

    columns = ("positions",)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ends = torch.tensor([len(row["input_ids"]) - 1 for row in rows])
        return {**padded(rows), "positions": ends}


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes, **heads))


def made(tmp_path, kind: str = "heads", *, trainer=DPZeroTrainer, given=None, **arguments: Any):
    """A trainer, and the widths of the passes that its model makes."""
    prompted, widths = kind == "prompts", list[int]()
    model = llama() if prompted else tiny_model()
    own = {"compute_per_example_loss": WORDS} if prompted else {}
    made = trainer(
        model=model.eval(),
        args=config(tmp_path, per_device_eval_batch_size=BATCH, **arguments),
        train_dataset=with_groups(tiny_data()),
        eval_dataset=ROWS,
        data_collator=Prompts() if prompted else padded,
        **own,
        **(given or {}),
    )
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: widths.append(args[0].shape[1])
    )
    return made, widths


def alone(trainer: DPZeroTrainer, kind: str) -> torch.Tensor:
    """The scores of each row, from passes of one row."""
    with torch.no_grad():
        if kind == "prompts":
            return torch.cat([WORDS.predict(trainer.model, Prompts()([row])) for row in ROWS])
        return torch.cat([trainer.model(**padded([row])).logits for row in ROWS])


def widths_of(lengths: list[int]) -> list[int]:
    """A batch is as wide as its longest row."""
    return [max(lengths[start : start + BATCH]) for start in range(0, N, BATCH)]


@pytest.mark.parametrize("kind", ["prompts", "heads"])
def test_rows_run_by_length_and_come_back_in_the_order_of_the_data(tmp_path, kind):
    seen = []

    def compute(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        right = prediction.predictions.argmax(axis=1) == prediction.label_ids
        return {"accuracy": float(right.mean())}

    trainer, widths = made(tmp_path, kind, given={"compute_metrics": compute}, **GROUPS)
    scores, labels = alone(trainer, kind), torch.tensor(ROWS["labels"][:])
    widths.clear()
    predicted = trainer.predict(ROWS)
    assert widths == widths_of(sorted(LENGTHS, reverse=True))
    assert sum(widths) < sum(widths_of(LENGTHS))
    for found in (predicted, seen[0]):
        np.testing.assert_allclose(found.predictions, scores.numpy(), rtol=0, atol=2e-6)
        assert found.label_ids.tolist() == labels.tolist()
    metrics = trainer.evaluate()
    right = (scores.argmax(dim=1) == labels).double()
    few = torch.tensor([name == "few" for name in ROWS["where"][:]])
    assert metrics["eval_accuracy"] == pytest.approx(right.mean().item())
    assert metrics["eval_accuracy_of_few"] == pytest.approx(right[few].mean().item())
    loss = torch.nn.functional.cross_entropy(scores, labels)
    assert metrics["eval_loss"] == pytest.approx(loss.item(), abs=1e-6)
    order = [row.tolist() for batch in trainer.get_eval_dataloader() for row in batch["labels"]]
    assert order == labels.tolist(), "a loop of the user's own sees the order of the data"


def test_losses_of_groups_are_of_their_own_rows(tmp_path):
    trainer, widths = made(tmp_path, **GROUPS)
    scores, labels = alone(trainer, "heads"), torch.tensor(ROWS["labels"][:])
    losses = torch.nn.functional.cross_entropy(scores, labels, reduction="none")
    few = torch.tensor([name == "few" for name in ROWS["where"][:]])
    found = trainer.evaluate()
    assert found["eval_loss_of_few"] == pytest.approx(losses[few].mean().item(), abs=1e-6)
    assert widths[-1] == min(widths) == widths_of(sorted(LENGTHS, reverse=True))[-1]


class OwnStep(DPZeroTrainer):
    """A script's own step, which may keep what it saw."""

    def prediction_step(self, *args: Any, **settings: Any) -> Any:
        return super().prediction_step(*args, **settings)


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"preprocess_logits_for_metrics": lambda logits, labels: logits}, {}),
        ({}, {"eval_do_concat_batches": False}),
        ({}, {"include_for_metrics": ["loss"]}),
        ({"trainer": OwnStep}, {}),
    ],
)
def test_rows_stay_in_order_where_a_function_of_the_users_could_tell(tmp_path, given, arguments):
    kind = given.get("trainer", DPZeroTrainer)
    given = {name: value for name, value in given.items() if name != "trainer"}
    trainer, widths = made(tmp_path, "prompts", trainer=kind, given=given, **arguments)
    trainer.predict(ROWS)
    assert widths == widths_of(LENGTHS)


def test_rows_without_a_label_keep_all_in_order(tmp_path):
    """A batch's loss is no mean over its rows there."""
    trainer, widths = made(tmp_path)
    labels = [-100, *ROWS["labels"][1:]]
    unlabelled = ROWS.remove_columns("labels").add_column("labels", labels)
    trainer.predict(unlabelled)
    assert widths == widths_of(LENGTHS)


def test_rows_that_do_not_tell_their_length_stay_in_order(tmp_path):
    trainer, widths = made(tmp_path)
    trainer.predict(list(ROWS.remove_columns("where")))
    words = [" ".join(map(str, ids)) for ids in ROWS["input_ids"][:]]
    stored = ROWS.remove_columns("input_ids").add_column("input_ids", words)

    def read(rows: dict[str, Any]) -> dict[str, Any]:
        return {**rows, "input_ids": [[*map(int, w.split())] for w in rows["input_ids"]]}

    trainer.predict(stored.with_transform(read))
    assert widths == 2 * widths_of(LENGTHS)
