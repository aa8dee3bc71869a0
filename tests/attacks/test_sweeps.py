"""Attack: a sweep on private rows that claims to have spent nothing, or that chooses by a secret."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from attacked_runs import recipe_of

from hf_dpzero.cli import main
from hf_dpzero.experiments.results import metrics_of_trial
from hf_dpzero.tasks import description_of


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, bert_checkpoint: Path) -> Path:
    """A recipe on two private files; other files lie beside it."""
    folder = tmp_path_factory.mktemp("sweep")
    made = recipe_of(folder, bert_checkpoint, "public", "public_validation", max_steps=2)
    shutil.copy(folder / "train.jsonl", folder / "copy.jsonl")
    return made


def sweep(recipe: Path, *words: Any, grid: str = "learning_rate=0.01,0.001", **given: str) -> int:
    shown = ["--grid", grid, "--dry_run", "--tuning", given.get("tuning", "public")]
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


def test_other_rows_and_metrics_of_the_validation_rows_are_taken(recipe, capsys, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    words = ("--train_file", "public.jsonl", "--validation_file", "public_validation.jsonl")
    assert sweep(recipe, *words) == 0 and "declared public" in capsys.readouterr().out
    assert sweep(recipe, tuning="not_accounted") == 0
    for metric in ("accuracy", "eval_accuracy", "eval_loss"):
        assert sweep(recipe, "--metric", metric, tuning="composed") == 0


SECRETS = "seconds_per_step train_runtime eval_runtime peak_memory_bytes eval_mem_cpu_peaked_delta"


@pytest.mark.parametrize("metric", [*SECRETS.split(), "train_loss", "epsilon"])
@pytest.mark.parametrize("tuning", ["composed", "not_accounted"])
def test_no_choice_by_what_may_not_be_published(recipe, capsys, metric, tuning):
    """How long a step took depends on which rows it drew, and the choice would be released."""
    assert sweep(recipe, "--metric", metric, tuning=tuning) == 2
    assert f"metric='{metric}' is no metric of the validation rows" in capsys.readouterr().err


def test_the_table_of_all_trials_has_no_times():
    results = {"eval_accuracy": 0.5, "eval_runtime": 1.0, "eval_mem_cpu_alloc_delta": 7, "x": 1}
    assert metrics_of_trial(results) == {"eval_accuracy": 0.5}


def test_a_run_that_trials_extend_is_no_setting_to_try(recipe, capsys):
    """Trials from another run's weights cost what that run spent too: one event does not count it."""
    assert sweep(recipe, grid="extends_run=null,out", tuning="composed") == 2
    assert "extends_run may not be in a composed grid" in capsys.readouterr().err
