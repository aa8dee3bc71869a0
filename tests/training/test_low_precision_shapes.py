"""Several examples in a forward pass in low precision: fixed shapes, their trial, its refusals."""

from __future__ import annotations

import dataclasses
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import build, tiny_model
from tiny_texts import differences, pad, passes_of, texts
from torch import Tensor, nn
from transformers import (
    OPTConfig,
    OPTForSequenceClassification,
    Phi3Config,
    Phi3ForSequenceClassification,
)

from hf_dpzero.batches.shapes import PassShapes, unmasked
from hf_dpzero.checks.precision import couples_values
from hf_dpzero.objectives.heads import sequence_classification_objective
from hf_dpzero.training.preparation import prepare


def tiny_opt() -> OPTForSequenceClassification:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return OPTForSequenceClassification(
            OPTConfig(
                vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
                max_position_embeddings=32, word_embed_proj_dim=16, pad_token_id=1, init_std=0.5,
            )
        )  # fmt: skip


def trainer_of(folder: Any, model: nn.Module, evaluation: Any = "texts", **settings: Any) -> Any:
    settings = {"expected_batch_size": 30, "microbatch_size": 4, "max_steps": 2, **settings}
    public = texts(40, 9) if evaluation == "texts" else evaluation
    given = {"eval_dataset": public, **settings.pop("trainer_settings", {})}
    trainer = build(folder, model, data=texts(), trainer_settings=given, **settings)
    trainer.data_collator = pad
    return trainer


KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "autocast": torch.float32}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [tiny_model, tiny_opt], ids=["bert", "opt"])
def test_removing_an_example_moves_no_bit_of_the_others(tmp_path, make: Any, kind: str):
    """The trainer's own microbatches and strategy, with and without each of several rows."""
    trainer = trainer_of(tmp_path, make().to(KINDS[kind]), bf16=kind == "autocast")
    trainer.train()
    assert trainer.run.shapes.placement.largest == 4
    chosen = list(range(24))
    expected = differences(trainer, chosen)
    assert len(set(expected.values())) > 12
    for removed in (0, 7, 23):
        assert differences(trainer, [i for i in chosen if i != removed]).items() <= expected.items()
    shuffled = torch.randperm(24, generator=torch.Generator().manual_seed(2)).tolist()
    assert differences(trainer, shuffled) == expected


class RoundsByNeighbours(nn.Module):
    """Scales every loss by a bit more than 1 by how many rows of the batch begin with a high token."""

    single_pass = True

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        losses = sequence_classification_objective(model, inputs)
        return losses * (1 + 2.0**-7 * (inputs["input_ids"][:, 0] >= 25).float().mean())


def test_coupled_rounding_in_bfloat16_is_caught_and_falls_back(tmp_path, caplog):
    """As large as bfloat16's own rounding, far beyond float32's: no refusal, one example a pass."""
    logging.getLogger("transformers").propagate = True
    objective = {"compute_per_example_loss": RoundsByNeighbours()}
    trainer = trainer_of(tmp_path, tiny_model().bfloat16(), trainer_settings=objective)
    trainer.train()
    assert trainer.run.shapes.one_by_one
    assert "every example is evaluated by itself" in caplog.text
    report = trainer.privacy_report()
    assert report.forward_passes == "one example"
    found = differences(trainer, list(range(12)))
    assert found == differences(trainer, list(range(12))[::-1])
    # In passes of four, which the trial refused, a removed example does move the others.
    trainer.run.shapes = dataclasses.replace(trainer.run.shapes, placement=passes_of(4))
    whole = differences(trainer, list(range(24)))
    parts = [differences(trainer, [i for i in range(24) if i != r]) for r in range(6)]
    assert not all(part.items() <= whole.items() for part in parts)


@pytest.mark.parametrize(("size", "told"), [(4, "fixed shapes"), (1, "one example")])
@pytest.mark.parametrize("method", ["dpzero", "dp-sgd"])
def test_the_report_says_how_losses_were_evaluated(tmp_path, method, size, told):
    model = tiny_model().bfloat16() if method == "dpzero" else tiny_model()
    trainer = trainer_of(tmp_path, model, method=method, microbatch_size=size, max_steps=1)
    trainer.train()
    report = trainer.privacy_report()
    assert report.forward_passes == told and trainer.run.shapes.one_by_one == (size == 1)
    assert not any("rounding" in caveat for caveat in report.caveats)


# ---- kernels that look at the mask


class MaskKernel(nn.Module):
    """Rounds otherwise where no row of the batch is masked, as another attention kernel does."""

    single_pass = True

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        losses = sequence_classification_objective(model, inputs)
        return losses * (1 + 2.0**-20) if bool(inputs["attention_mask"].all()) else losses


def test_a_row_without_padding_is_rounded_alike_beside_rows_with_and_without(tmp_path):
    """Rows of the longest length alone have no masked column: they stand among themselves."""
    objective = {"compute_per_example_loss": MaskKernel()}
    trainer = trainer_of(tmp_path, tiny_model(), trainer_settings=objective)
    trainer.train()
    assert trainer.run.shapes.placement.largest == 4
    unpadded = [i for i, row in enumerate(texts()) if len(row["input_ids"]) == 16]
    others = [i for i in range(60) if i not in unpadded][:16]
    assert len(unpadded) > 2
    together = differences(trainer, unpadded + others)
    assert differences(trainer, unpadded).items() <= together.items()
    for i in unpadded:
        assert differences(trainer, [i])[i] == together[i]


def test_microbatches_are_never_unmasked_by_chance():
    rows = [pad([row]) for row in texts(80, 6)]
    shapes = PassShapes(lambda chosen: [rows[i] for i in chosen], passes_of(3), context_length=16)
    made = shapes.microbatches(range(80))
    assert sorted(i for m in made for i in m.places) == list(range(80))
    full = [bool(m["attention_mask"].all()) for m in made]
    own = [{bool(unmasked(shapes.in_bucket(rows[i]))) for i in m.places} for m in made]
    assert any(full) and all(kinds == {whole} for kinds, whole in zip(own, full, strict=True))


def test_models_that_take_no_blank_run_one_by_one(tmp_path):
    class NeedsAToken(nn.Module):
        single_pass = True

        def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
            if not bool((inputs["input_ids"][:, 0] > 4).all()):
                raise ValueError("every row needs its first token")
            return sequence_classification_objective(model, inputs)

    objective = {"compute_per_example_loss": NeedsAToken()}
    trainer = trainer_of(tmp_path, tiny_model().bfloat16(), trainer_settings=objective)
    trainer.train()
    assert trainer.run.shapes.one_by_one


# ---- architectures and quantisations judged by name


def phi() -> Phi3ForSequenceClassification:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Phi3ForSequenceClassification(
            Phi3Config(
                vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=1,
                original_max_position_embeddings=8, initializer_range=0.5, bos_token_id=2,
                rope_parameters={
                    "rope_type": "longrope", "rope_theta": 100.0, **factors,
                    "original_max_position_embeddings": 8,
                },
            )
        )  # fmt: skip


def test_longrope_needs_no_single_rows_in_fixed_shapes(tmp_path):
    """Rows of up to eight tokens have short positions, whatever long row is in the batch."""
    trainer = trainer_of(tmp_path, phi())
    trainer.train()
    assert trainer.run.shapes.placement.largest == 4
    short = [i for i, row in enumerate(texts()) if len(row["input_ids"]) <= 8]
    whole = differences(trainer, list(range(60)))
    assert differences(trainer, short).items() <= whole.items()
    settings = {"method": "dp-sgd", "trainable": "proj|score"}
    prepare(trainer_of(tmp_path / "sgd", phi(), **settings).run)


def eight_bit(threshold: float) -> nn.Module:
    class Linear8bitLt(nn.Linear):
        state = SimpleNamespace(threshold=threshold)

    return nn.Sequential(Linear8bitLt(2, 2))


def configured(**settings: Any) -> nn.Module:
    model: Any = nn.Linear(2, 2)
    model.config = SimpleNamespace(quantization_config=settings)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(2, 2).bfloat16(), ""),
        (lambda: configured(quant_method="bitsandbytes", load_in_4bit=True), ""),
        (lambda: configured(quant_method="gptq"), ""),
        (lambda: configured(quant_method="quanto", activations=None), ""),
        (
            lambda: configured(quant_method="quanto", activations="int8"),
            "not known to be of weights",
        ),
        (lambda: configured(quant_method="fp8"), "not known to be of weights"),
        (lambda: eight_bit(6.0), "llm_int8_threshold=6.*outlier"),
        (lambda: eight_bit(0.0), ""),
    ],
)
def test_quantisation_that_looks_at_other_rows_values_is_known(make: Any, reason: str):
    found = couples_values(make())
    assert re.search(reason, found) if reason else not found


def test_dynamic_quantisation_is_no_matter_of_shapes(tmp_path, caplog):
    """One range for all activations of a batch: a trial may miss it where every row has the largest."""
    logging.getLogger("transformers").propagate = True
    model = tiny_model()
    with pytest.warns(DeprecationWarning, match="quantization"):
        frozen = torch.ao.quantization.quantize_dynamic(
            model.bert.encoder, {nn.Linear}, dtype=torch.qint8
        )
    model.bert.encoder = frozen
    assert "whole batch" in couples_values(model)
    trainer = trainer_of(tmp_path, model, trainable="classifier")
    prepare(trainer.run)
    assert trainer.run.shapes.one_by_one and "every example is evaluated by itself" in caplog.text
