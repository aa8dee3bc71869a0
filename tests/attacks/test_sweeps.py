"""Attack: a sweep on private rows that claims to have spent nothing, or that chooses by a secret."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_dpzero.cli import main
from hf_dpzero.experiments.results import metrics_of_trial
from hf_dpzero.tasks import description_of


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, bert_checkpoint: Path) -> Path:
    """A recipe on two private files; other files lie beside it."""
    folder = tmp_path_factory.mktemp("sweep")
    for name in ("train", "validation", "public", "public_validation"):
        rows = [{"text": f"{name} film {i}", "label": i % 2} for i in range(24)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    shutil.copy(folder / "train.jsonl", folder / "copy.jsonl")
    values = {
        "model_name_or_path": str(bert_checkpoint), "train_file": str(folder / "train.jsonl"),
        "validation_file": str(folder / "validation.jsonl"), "max_seq_length": 16,
        "target_epsilon": 4.0, "target_delta": 1e-3, "expected_batch_size": 4, "max_steps": 2,
        "use_cpu": True, "save_strategy": "no", "output_dir": str(folder / "out"),
    }  # fmt: skip
    (folder / "r.yaml").write_text(yaml.safe_dump(values))
    return folder / "r.yaml"


def sweep(recipe: Path, *words: Any, tuning: str = "public") -> int:
    shown = ["--grid", "learning_rate=0.01,0.001", "--dry_run", "--tuning", tuning]
    folder = ["--output_dir", str(recipe.parent / "D")]
    return main.main(["sweep", str(recipe), *shown, *folder, *map(str, words)])


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--train_file", "copy.jsonl"),
        ("--subset_seed", 5, "--max_train_samples", 12),
        ("--text_column", "text"),
        ("--validation_file", "public_validation.jsonl"),
    ],
)
def test_the_recipes_own_rows_are_not_public(recipe, words, capsys, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    assert sweep(recipe, *words) == 2
    said = capsys.readouterr().err
    assert "--tuning public" in said and "--tuning composed" in said and "not_accounted" in said


def test_the_same_data_set_of_the_hub_is_not_public_by_another_name(recipe, capsys):
    own = yaml.safe_load(recipe.read_text())
    del own["train_file"], own["validation_file"]
    named = recipe.parent / "sst2.yaml"
    named.write_text(yaml.safe_dump({**own, "task": "sst2"}))
    source = description_of("sst2").source
    assert source is not None
    words = ("--task", "text_classification", "--dataset_name", source.name)
    for given in ((), words):
        assert sweep(named, *given) == 2 and "--tuning composed" in capsys.readouterr().err


def test_other_rows_may_be_declared_public(recipe, capsys, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    words = ("--train_file", "public.jsonl", "--validation_file", "public_validation.jsonl")
    assert sweep(recipe, *words) == 0 and "declared public" in capsys.readouterr().out
    assert sweep(recipe, tuning="not_accounted") == 0


SECRETS = "seconds_per_step train_runtime eval_runtime peak_memory_bytes eval_mem_cpu_peaked_delta"


@pytest.mark.parametrize("metric", [*SECRETS.split(), "train_loss", "epsilon"])
@pytest.mark.parametrize("tuning", ["composed", "not_accounted"])
def test_no_choice_by_what_may_not_be_published(recipe, capsys, metric, tuning):
    """How long a step took depends on which rows it drew, and the choice would be released."""
    assert sweep(recipe, "--metric", metric, tuning=tuning) == 2
    assert f"metric='{metric}' is no metric of the validation rows" in capsys.readouterr().err


def test_a_metric_may_be_called_by_its_own_name(recipe, capsys):
    for metric in ("accuracy", "eval_accuracy", "eval_loss"):
        assert sweep(recipe, "--metric", metric, tuning="composed") == 0


def test_the_table_of_all_trials_has_no_times(tmp_path):
    results = {"eval_accuracy": 0.5, "eval_runtime": 1.0, "eval_mem_cpu_alloc_delta": 7, "x": 1}
    assert metrics_of_trial(results) == {"eval_accuracy": 0.5}


def test_a_run_that_trials_extend_is_no_setting_to_try(recipe, capsys):
    """Trials from another run's weights cost what that run spent too: one event does not count it."""
    words = [
        "sweep",
        str(recipe),
        "--grid",
        "extends_run=null,out",
        "--tuning",
        "composed",
        "--dry_run",
    ]
    assert main.main([*words, "--output_dir", str(recipe.parent / "D")]) == 2
    assert "extends_run may not be in a composed grid" in capsys.readouterr().err
