"""Private fine-tuning under TRL's SFTTrainer: one row stays one example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from tiny_language_models import save_causal_lm

from hf_dpzero import DPZeroConfig, DPZeroMixin, DPZeroTrainer

trl = pytest.importorskip("trl")


@dataclass
class Config(DPZeroConfig, trl.SFTConfig):  # type: ignore[misc, name-defined]
    pass


class Private(DPZeroMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
    pass


def fine_tuning(tmp_path, rows: list[dict[str, Any]], kind: type = Private, **settings: Any) -> Any:
    """SFTTrainer with the private step, of a model given by name and a new adapter."""
    folder = save_causal_lm(tmp_path / "model")
    return kind(
        model=str(folder),
        args=Config(
            output_dir=str(tmp_path / "out"), target_epsilon=8.0, max_steps=2, expected_batch_size=8,
            microbatch_size=4, report_to="none", use_cpu=True, max_length=16, disable_tqdm=True,
            **settings,
        ),
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip


def test_sft_with_prompts_and_completions_trains_an_adapter_on_completions_only(tmp_path):
    rows = [{"prompt": f"red {i % 5}", "completion": " great" * (1 + i % 3)} for i in range(40)]
    trainer = fine_tuning(tmp_path, rows)
    assert trainer.train_dataset[0]["labels"][0] == -100
    trainer.train()
    trainer.save_model()
    assert trainer.privacy_report().private
    names = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    assert names and all("lora_" in name for name in names)
    assert (tmp_path / "out" / "privacy_report.json").exists()


ROWS = [{"prompt": f"red {i % 5}", "completion": " great"} for i in range(40)]


def test_sft_settings_that_change_the_loss_are_refused(tmp_path, caplog):
    """The default loss is the objective's, and nothing is said of it."""
    fine_tuning(tmp_path, ROWS)
    assert "compute_loss" not in caplog.text
    with pytest.raises(
        ValueError, match="loss_type='dft' would not be trained on: leave it at 'nll'"
    ):
        fine_tuning(tmp_path, ROWS, loss_type="dft")
    with pytest.raises(ValueError, match="use_liger_kernel=True replaces layers"):
        fine_tuning(tmp_path, ROWS, use_liger_kernel=True)


def test_a_subclass_of_sft_that_logs_beside_its_loss_is_refused(tmp_path):
    """TRL's own compute_loss keeps entropies for its logs."""

    class Distilling(trl.SFTTrainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, *args: Any, **settings: Any) -> Any:
            return super().compute_loss(*args, **settings)

    class Mine(DPZeroMixin, Distilling):
        pass

    trainer = fine_tuning(tmp_path, ROWS, kind=Mine)
    with pytest.raises(ValueError, match="the loss wrote to _metrics"):
        trainer.train()


def test_parents_and_arguments_of_another_order_are_refused_in_words(tmp_path):
    class Both(DPZeroTrainer, trl.SFTTrainer):  # type: ignore[misc, name-defined]
        pass

    class Swapped(trl.SFTTrainer, DPZeroMixin):  # type: ignore[misc, name-defined]
        pass

    fine_tuning(tmp_path, ROWS, kind=Both)
    with pytest.raises(ValueError, match=r"training_step .*name DPZeroMixin before SFTTrainer"):
        fine_tuning(tmp_path, ROWS, kind=Swapped)
    with pytest.raises(ValueError, match=r"SFTTrainer takes a SFTConfig: make a dataclass Config"):
        Both("model", DPZeroConfig(str(tmp_path), target_epsilon=1, use_cpu=True), ROWS)


def test_arguments_reach_a_trainer_of_another_order(tmp_path):
    """DPOTrainer's second is ref_model: the arguments went there, and TRL made some of its own."""

    @dataclass
    class Preferences(DPZeroConfig, trl.DPOConfig):  # type: ignore[misc, name-defined]
        pass

    class Preferring(DPZeroMixin, trl.DPOTrainer):  # type: ignore[misc, name-defined]
        pass

    args = Preferences(str(tmp_path), target_epsilon=1, use_cpu=True, report_to="none")
    rows = [{"prompt": "red", "chosen": " great", "rejected": " bad"}] * 8
    with pytest.raises(ValueError, match=r"loss_type=\['sigmoid'\] would not be trained on"):
        Preferring(
            str(save_causal_lm(tmp_path / "model")), args, train_dataset=Dataset.from_list(rows)
        )


def test_sft_with_packing_is_refused(tmp_path):
    rows = [{"prompt": f"red {i % 5}", "completion": " great" * (1 + i % 3)} for i in range(40)]
    with pytest.raises(ValueError, match="packing=False"):
        fine_tuning(tmp_path, rows, packing=True)


def test_sft_that_leaves_out_long_rows_is_refused(tmp_path):
    """TRL drops rows whose completion is cut off, so n would tell how many private rows are long."""
    rows = [{"prompt": f"red {i % 5}", "completion": " great"} for i in range(40)]
    rows[7]["prompt"] = "red " * 20
    with pytest.raises(ValueError, match="max_length"):
        fine_tuning(tmp_path, rows)
