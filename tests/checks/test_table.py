"""Each check of the table refuses a run, by itself, and passes a run that is as it should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import build, tiny_data, tiny_model
from torch import nn
from transformers import BertForSequenceClassification, default_data_collator

from hf_dpzero.checks import model
from hf_dpzero.checks.table import CHECKS, Check, run_checks
from hf_dpzero.parallel import collectives
from hf_dpzero.run import Run
from scripts import checks_reference

BY_NAME = {check.name: check for check in CHECKS}


def with_layer(layer: nn.Module) -> BertForSequenceClassification:
    made = tiny_model()
    made.classifier = nn.Sequential(made.classifier, layer)
    return made


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    return get_peft_model(tiny_model(), config)


def sharing() -> nn.Module:
    made = tiny_model()
    made.classifier.bias.data = made.classifier.weight.data.view(-1)[: made.classifier.bias.numel()]
    return made


class Drawing:
    """A collator with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __call__(self, rows: list[Any]) -> Any:
        return default_data_collator(rows)


def joined(rows: list[Any]) -> Any:
    batch = default_data_collator(rows)
    return {name: value[:1] for name, value in batch.items()} if len(rows) > 1 else batch


def summed(net: nn.Module, inputs: Any) -> torch.Tensor:
    return net(**inputs).loss


def coupled(net: nn.Module, inputs: Any) -> torch.Tensor:
    logits = net(**{**inputs, "labels": None}).logits
    losses = nn.functional.cross_entropy(logits, inputs["labels"], reduction="none")
    return losses + losses.mean()


class Remembering:
    """A loss that grows with the rows that it saw."""

    seen = 0

    def __call__(self, net: nn.Module, inputs: Any) -> torch.Tensor:
        self.seen += 1
        return net(**{**inputs, "labels": None}).logits[:, 0] * self.seen


def infinite(net: nn.Module, inputs: Any) -> torch.Tensor:
    return net(**{**inputs, "labels": None}).logits[:, 0] * torch.inf


def with_rope(kind: str) -> nn.Module:
    made = tiny_model()
    made.config.rope_parameters = {"rope_type": kind}
    return made


Made = Callable[[Path], Run]


def run_of(*given: Any, loss: Any = None, collator: Any = None, **settings: Any) -> Made:
    """Returns what makes a run of `build`."""

    def made(folder: Path) -> Run:
        own = {"trainer_settings": {"compute_per_example_loss": loss}} if loss else {}
        trainer = build(folder, *(one() for one in given), **own, **settings)
        trainer.data_collator = collator or trainer.data_collator
        return trainer.run

    return made


def evaluated_on_training_rows(folder: Path) -> Run:
    trainer = build(folder)
    trainer.eval_dataset = trainer.train_dataset
    return trainer.run


REFUSED: dict[str, tuple[Made, str]] = {
    "evaluation rows": (evaluated_on_training_rows, "rows of train_dataset"),
    "adapters": (run_of(adapted, trainable="classifier"), "leave `trainable` at null"),
    "trained weights": (run_of(sharing), "memory"),
    "layers over the batch": (
        run_of(lambda: with_layer(nn.BatchNorm1d(2, track_running_stats=False))),
        "statistics of its batch",
    ),
    "random generators": (run_of(collator=Drawing()), "generator of its own"),
    "compiled model": (run_of(method="dp-sgd", torch_compile=True), "compiled code does not call"),
    "precision of gradients": (
        run_of(lambda: tiny_model().bfloat16(), method="dp-sgd", microbatch_size=4),
        "microbatch_size=4",
    ),
    "attention that remembers": (run_of(lambda: with_rope("dynamic")), "remembers"),
    "memory of rows": (run_of(loss=Remembering(), microbatch_size=1), "before and after"),
    "row 0": (run_of(loss=summed), "one loss per example|per-example|for each example"),
    "collator": (run_of(collator=joined), "examples became"),
    "neighbours and places": (run_of(loss=coupled), "other examples"),
    "finite losses": (run_of(loss=infinite), "NaN or infinite"),
}
"""Name of a check -> (a run that it must refuse, words of the message); others have tests below."""

ELSEWHERE = {
    "process group": "test_processes_that_each_take_the_whole_batch_are_refused",
    "saving": "test_a_layer_that_shares_the_heads_weights_is_refused_before_it_cannot_be_saved",
    "same rows": "test_processes_with_other_rows_are_refused",
    "offload": "test_several_processes_are_sent_to_fsdp2",
    "mixed precision": "test_autocast_around_the_call_is_refused",
    "timed kernels": "test_kernels_that_are_timed_are_refused",
    "unit of privacy": "test_run_clms_blocks_are_not_taken_nor_shipped_for_examples",
    "labels": "test_a_label_that_is_no_number_is_refused_by_its_row",
    "lengths": "test_a_row_without_positions_is_refused_before_the_first_step",
}
"""Checks whose runs need processes, devices or long rows: name -> what a test of it is called."""


def prepared_for(check: Check, run: Run) -> None:
    """Brings a run to where the check is made."""
    from hf_dpzero.checks import passes
    from hf_dpzero.objectives.heads import select_objective
    from hf_dpzero.perturbation.trainable import select_trainable

    select_trainable(run.model, run.args.trainable)
    if check.stage == "passes":
        run.objective = run.objective or select_objective(run.model)
        run.shapes = passes.shapes_of(run)


@pytest.mark.parametrize("name", REFUSED)
def test_a_check_refuses_a_run_by_itself_and_passes_a_sound_one(name: str, tmp_path: Path) -> None:
    check, (made, words) = BY_NAME[name], REFUSED[name]
    sound = build(tmp_path / "sound").run
    prepared_for(check, sound)
    check.run(sound)
    run = made(tmp_path / "refused")
    prepared_for(check, run)
    with pytest.raises(ValueError, match=words):
        check.run(run)


def test_every_check_has_a_run_that_it_refuses() -> None:
    assert REFUSED.keys() | ELSEWHERE.keys() == BY_NAME.keys()
    assert len(BY_NAME) == len(CHECKS) >= 18
    tests = [path.read_text() for path in Path(__file__).parent.parent.rglob("test_*.py")]
    for name in ELSEWHERE.values():
        assert any(f"def {name}(" in text for text in tests), name


def test_checks_are_made_in_their_stage_and_for_their_runs(
    tmp_path: Path, monkeypatch: Any
) -> None:
    private, plain = (
        build(tmp_path / "a"),
        build(tmp_path / "b", method="mezo", noise_multiplier=None),
    )
    made: list[str] = []
    noted = [
        check._replace(refuse=lambda *_, name=check.name: made.append(name)) for check in CHECKS
    ]
    monkeypatch.setattr("hf_dpzero.checks.table.CHECKS", noted)
    for stage in ("model", "objective", "passes"):
        run_checks(private.run, stage)
    several = {check.name for check in CHECKS if check.when == "several processes"}
    first_order = {check.name for check in CHECKS if check.when == "private, first order"}
    assert made == [c.name for c in CHECKS if c.name not in several | first_order]
    made.clear()
    run_checks(plain.run, "objective")
    assert made == ["mixed precision", "lengths", "labels"]


def test_rows_without_labels_are_refused(tmp_path: Path) -> None:
    run = build(tmp_path, data=tiny_data().remove_columns("labels")).run
    prepared_for(BY_NAME["row 0"], run)
    with pytest.raises(ValueError, match="no 'labels' .*labels column"):
        BY_NAME["row 0"].run(run)


def test_autocast_around_the_call_is_refused(tmp_path: Path) -> None:
    run = build(tmp_path).run
    with torch.autocast("cpu"), pytest.raises(ValueError, match="call it outside"):
        BY_NAME["mixed precision"].run(run)


def test_kernels_that_are_timed_are_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    model.check_kernels_are_fixed("cpu")
    with pytest.raises(ValueError, match="cudnn.benchmark"):
        model.check_kernels_are_fixed("cuda")


def test_processes_that_each_take_the_whole_batch_are_refused(
    tmp_path: Path, monkeypatch: Any
) -> None:
    run = build(tmp_path).run
    monkeypatch.setattr(collectives, "active", lambda: True)
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="2 processes were started"):
        BY_NAME["process group"].run(run)


def test_the_page_has_the_table() -> None:
    """`python -m scripts.checks_reference` writes it."""
    assert checks_reference.PAGE.read_text(encoding="utf-8") == checks_reference.page()
    assert all(check.name in checks_reference.page() for check in CHECKS)
