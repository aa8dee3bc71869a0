"""`hf-dpzero compare`: the grid, what it refuses, its rows and tables, and how it continues."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hf_dpzero.cli import main
from hf_dpzero.experiments import results, tables
from hf_dpzero.experiments.compare import _settings_of, build_grid, compare, left_out, used_by
from hf_dpzero.experiments.results import (
    Cell,
    Exit,
    Record,
    Row,
    Run,
    aggregate,
    append_row,
    read_rows,
    row_of,
    zero_shot_group,
)
from hf_dpzero.experiments.runner import Attempt, Process, discard_weights, locked
from hf_dpzero.experiments.tables import plot_comparison
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.recipe import load_recipe
from hf_dpzero.values import decode

PNG = b"\x89PNG\r\n\x1a\n"
Settings = dict[str, Any]
BASE: Settings = {
    "model_name_or_path": "some/model", "task": "quickstart", "max_train_samples": 64,
    "method": "dpzero", "target_epsilon": 4.0, "target_delta": 1e-3, "expected_batch_size": 8,
    "max_steps": 4, "use_cpu": True,
}  # fmt: skip


def write_recipe(folder: Path, name: str = "tiny-dpzero", **settings: Any) -> Path:
    """A recipe file; a setting that is None is left out."""
    values = {key: value for key, value in {**BASE, **settings}.items() if value is not None}
    path = folder / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def grid(path: Path, methods: str = "dpzero", **settings: Any) -> list[Run]:
    """`build_grid` with one epsilon and one seed unless told otherwise."""
    asked = {"epsilons": [2.0], "seeds": [42], **settings}
    return build_grid(path, methods=[m for m in methods.split(",") if m], **asked)


# ---- the grid


def test_private_methods_run_once_an_epsilon_and_others_once_a_seed(tmp_path):
    """A seed sets everything public and nothing secret; without epsilons, seeds: the recipe's own."""
    runs = grid(write_recipe(tmp_path), "dpzero,mezo", epsilons=[2.0, 6.0], seeds=[42, 13])
    names = ("dpzero-eps2", "dpzero-eps6", "mezo-epsinf")
    assert [run.name for run in runs] == [f"{n}-seed{seed}" for seed in (42, 13) for n in names]
    assert [run.recipe.training.target_epsilon for run in runs[:3]] == [2.0, 6.0, None]
    assert [run.private for run in runs[:3]] == [True, True, False]
    assert len({run.digest for run in runs}) == 6
    recipe, training = runs[3].recipe, runs[3].recipe.training
    assert recipe.data.subset_seed == recipe.model.init_seed == training.seed == 13
    testing = training.testing
    assert testing.direction_key == 13 and training.noise_multiplier is None
    assert testing.sampler_key is None and testing.insecure_noise_seed is None
    (run,) = grid(write_recipe(tmp_path), epsilons=[], seeds=[])
    assert (run.epsilon, run.recipe.training.seed) == (4.0, 42)
    path = write_recipe(tmp_path, target_epsilon=None, noise_multiplier=2.0)
    assert grid(path, "mezo", epsilons=[])[0].epsilon == math.inf
    with pytest.raises(ValueError, match="there are no epsilons"):
        grid(path, epsilons=[])


def test_the_recipe_beside_is_taken_where_there_is_one(tmp_path):
    path = write_recipe(tmp_path)
    write_recipe(tmp_path, "tiny-mezo", method="mezo", target_epsilon=None, learning_rate=0.125)
    of_its_own, fallback = (grid(p, "mezo")[0] for p in (path, write_recipe(tmp_path, "other")))
    assert of_its_own.recipe.training.learning_rate == 0.125
    assert of_its_own.source == str(tmp_path / "tiny-mezo.yaml")
    assert fallback.recipe.training.learning_rate != 0.125 and not fallback.private
    assert fallback.source == f"{tmp_path / 'other.yaml'} with method: mezo"


def test_a_recipe_file_is_a_method_too_but_not_under_two_names(tmp_path):
    path = write_recipe(tmp_path)
    other = write_recipe(tmp_path, "elsewhere/more-directions", num_directions=4)
    runs = grid(path, f"dpzero,{other}")
    assert [run.method for run in runs] == ["dpzero", "more-directions"]
    # None: chosen for the model
    assert [run.recipe.training.num_directions for run in runs] == [None, 4]
    with pytest.raises(ValueError, match="'dpzero' and 'copy' have the same settings"):
        grid(path, f"dpzero,{write_recipe(tmp_path, 'copy')}")


def test_a_method_without_a_recipe_takes_its_own_file_and_leaves_the_recipes_own_out(tmp_path):
    """Adapters of the recipe's method do not stay; what else the recipe extends does, few-shot too."""
    write_recipe(tmp_path, "task/_tiny", method=None, target_epsilon=None, trainable="^head")
    (tmp_path / "methods").mkdir()
    files = {
        "_tiny-lora": "peft_method: lora\nlora_r: 2\ntrainable: null\nmethod: adamw\n",
        "_tiny-dp-sgd": "method: dp-sgd\ntarget_epsilon: 1.0\nlearning_rate: 0.125\n",
        "_fewshot": "num_examples_per_class: 8\n",
    }
    for name, text in files.items():
        (tmp_path / "methods" / f"{name}.yaml").write_text(text)
    recipe = tmp_path / "task" / "tiny-fewshot-lora.yaml"
    extended = ("_tiny.yaml", "../methods/_tiny-lora.yaml", "../methods/_fewshot.yaml")
    recipe.write_text(f"extends: [{', '.join(extended)}]\n")
    lora, sgd = grid(recipe, "lora,dp-sgd")
    assert (lora.source, lora.recipe.model.lora_r) == (str(recipe), 2)
    assert sgd.source == f"{recipe} with {tmp_path / 'methods' / '_tiny-dp-sgd.yaml'}"
    assert sgd.recipe.model.peft_method is None and sgd.recipe.training.trainable == "^head"
    assert sgd.recipe.training.learning_rate == 0.125
    assert sgd.recipe.data.num_examples_per_class == 8


def test_the_repositorys_method_files_serve_every_task():
    """`compare recipes/sst2/minilm-dpzero.yaml --methods dpzero,dp-adamw,dp-lora,adamw`."""
    folder = Path(__file__).resolve().parents[2] / "recipes"
    recipes = sorted(folder.glob("*/minilm-dpzero.yaml"))
    assert len(recipes) >= 3
    for path in recipes:
        found = [run.recipe for run in grid(path, "dpzero,dp-adamw,dp-lora,adamw", epsilons=[])]
        methods = [recipe.training.method for recipe in found]
        assert methods == ["dpzero", "dp-adamw", "dp-adamw", "adamw"]
        assert [recipe.model.peft_method for recipe in found] == [None, None, "lora", None]
        assert len({recipe.training.learning_rate for recipe in found}) > 2


def test_a_run_as_a_file_loads_to_the_same_settings_and_its_digest_changes_with_them(tmp_path):
    path = write_recipe(tmp_path)
    (run,), (again,), (other,) = grid(path), grid(path), grid(path, overrides=["--clip", "0.5"])
    assert run.digest == again.digest != other.digest
    (tmp_path / "run.yaml").write_text(run.to_yaml("out/x"), encoding="utf-8")
    assert load_recipe(tmp_path / "run.yaml").values == {**run.recipe.values, "output_dir": "out/x"}
    # an override makes methods comparable, and only private ones need share a delta
    write_recipe(tmp_path, "tiny-mezo", method="mezo", max_train_samples=32, target_delta=1e-7)
    runs = grid(path, "dpzero,mezo", overrides=["--max_train_samples", "48"])
    assert [run.recipe.data.max_train_samples for run in runs] == [48, 48]


@pytest.mark.parametrize(
    ("other", "asked", "message"),
    [
        # the recipe beside it, of the second method
        ({"max_train_samples": 32}, {}, "max_train_samples is 64 in the first and 32 in the second"),
        ({"task": "sst2"}, {}, "task is 'quickstart' in the first and 'sst2' in the second"),
        ({"train_file": "a.csv"}, {}, "train_file is None in the first and 'a.csv' in the second"),
        (
            {"neighboring_relation": "replace_one"}, {},
            "neighboring_relation is add_or_remove_one in the first and replace_one in the second",
        ),
        ({"target_delta": 1e-5}, {}, "target_delta is 0.001 in the first and 1e-05 in the second"),
        ({"target_delta": None}, {}, "target_delta is 0.001 in the first and 1 / (10 n)"),
        ({"push_to_hub": True}, {}, "would publish every run"),
        # what was asked for
        ({}, {"methods": ""}, "there are no methods"),
        ({}, {"methods": "dance"}, "'dance' is no method (dpzero,"),
        ({}, {"methods": "dpzero,dpzero"}, "'dpzero' is given more than once"),
        ({}, {"seeds": [1, 1]}, "seeds: 1 is given more than once"),
        ({}, {"seeds": [-1]}, "seed=-1 must lie in 0.."),
        ({}, {"epsilons": [0.0]}, "epsilon=0 must be a finite number above 0"),
        ({}, {"epsilons": [math.inf]}, "epsilon=inf must be"),
        ({}, {"epsilons": [2.0, 2.0]}, "epsilons: 2.0 is given more than once"),
        ({}, {"overrides": ["--seed", "3"]}, "--seed 3: set by --seeds"),
        ({}, {"overrides": ["--clip", "0"]}, "clip=0"),
        ({}, {"overrides": ["--max_step", "3"]}, "did you mean 'max_steps'"),
    ],
)  # fmt: skip
def test_a_grid_that_makes_no_sense_is_refused(other, asked, message, tmp_path):
    path = write_recipe(tmp_path)
    write_recipe(tmp_path, "tiny-dpgd-0th", method="dpgd-0th", **other)
    with pytest.raises(ValueError, match=re.escape(message)):
        grid(path, **{"methods": "dpzero,dpgd-0th", **asked})


def test_a_warning_about_a_method_is_said_once(tmp_path, caplog):
    write_recipe(tmp_path, "tiny-dp-sgd", method="dp-sgd", num_directions=11)
    grid(write_recipe(tmp_path), "dp-sgd", seeds=[1, 2])
    assert caplog.text.count("num_directions=11 (it is for method=") == 1


def test_a_table_says_which_settings_nothing_chose(tmp_path):
    """Of any method but dpzero a rate or clip that is left out is a default; all others are named."""
    given = {"learning_rate": None, "clip": None}
    write_recipe(tmp_path, "tiny-dp-adamw", method="dp-adamw", num_directions=None, **given)
    runs = grid(write_recipe(tmp_path, **given), "dpzero,dp-adamw,mezo")
    left = {run.method: left_out(run.recipe) for run in runs}
    assert left == {"dpzero": [], "dp-adamw": ["clip", "learning_rate"], "mezo": ["learning_rate"]}
    assert used_by(runs[1].recipe)["clip"] == 1.0
    of = _settings_of(runs, "a.yaml", (), 1)["methods"]
    lines = [tables._settings(method) for method in of]
    assert "learning_rate: chosen in each run" in lines[0] and "default" not in lines[0]
    assert (
        "learning_rate: 0.0005" in lines[1]
        and "**its clip and learning_rate are defaults" in lines[1]
    )
    assert "its learning_rate is a default" in lines[2]
    full = grid(write_recipe(tmp_path, learning_rate=0.1), "mezo")
    assert left_out(full[0].recipe) == []


def test_a_budget_that_a_method_does_not_take_is_not_spoken_of(tmp_path, caplog):
    grid(write_recipe(tmp_path), "mezo,dpzero", epsilons=[2.0])
    assert "target_" not in caplog.text


# ---- rows


def row(**settings: Any) -> Row:
    values: Settings = {
        "method": "dpzero", "algorithm": "dpzero", "private": True, "target_epsilon": 2.0, "seed": 42,
        "digest": "d0", "folder": "dpzero-eps2-seed42", "status": "done", "metric": "accuracy",
        "score": 0.5, "zero_shot": 0.25, "epsilon": 1.99, "delta": 1e-5,
    }  # fmt: skip
    return Row(**{**values, **settings})


def test_rows_come_back_as_they_were_written(tmp_path):
    """A torn last line is cut off, any other damaged line is named."""
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == []
    rows = [row(), row(digest="d1", target_epsilon=math.inf, epsilon=math.inf, private=False)]
    append_row(path, rows[0])
    path.write_bytes(path.read_bytes() + b'{"method": "mez')
    assert read_rows(path) == rows[:1]
    append_row(path, rows[1])
    assert read_rows(path) == rows
    path.write_text('{"method": 3}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: not a row"):
        read_rows(path)


@pytest.mark.parametrize(
    ("status", "errors", "expected", "line"),
    [
        (2, "loading\nerror: clip=0 must be positive.\n", "refused", "clip=0"),
        (1, "Traceback:\n  x\nRuntimeError: bad\n", "failed", "RuntimeError: bad"),
        (-9, "half a line", "out_of_memory", "killed by SIGKILL"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried", "out_of_memory", "CUDA out of"),
        (1, "numpy.core.MemoryError: Unable", "out_of_memory", "Unable"),
        (2, "error: [Errno 12] Cannot allocate memory", "out_of_memory", "Errno 12"),
        (-11, "", "failed", "ended by SIGSEGV; it said nothing"),
        (1, "1%|#\r2%|#\nValueError: no\n/x.py:3: leaked\n", "failed", "ValueError: no"),
        (1, "x" * 5000, "failed", "x" * 400),
    ],
)
def test_how_a_process_ended_is_a_status(status, errors, expected, line, tmp_path):
    """What a private run says of its error may quote a row, so only a refusal's message is kept."""
    for method in ("mezo", "dpzero"):
        (run,) = grid(write_recipe(tmp_path), method)
        found = row_of(run, tmp_path / "a", errors, Exit(status, 1.0))
        said = found.error or ""
        assert found.status == expected
        if method == "mezo":
            assert line in said and len(said) < 480
        else:
            assert "may be private" in said or expected == "refused"
            assert not any(word in said for word in ("bad", "Unable", "Errno", "x" * 9))


RESULTS: Settings = {
    "eval_accuracy": 0.75, "eval_loss": 0.5, "eval_runtime": 1.0, "zero_shot_accuracy": 0.5,
    "zero_shot_loss": 0.7, "seconds_per_step": 0.125, "peak_memory_bytes": 3 * 2**20,
}  # fmt: skip


@pytest.fixture
def report(monkeypatch) -> Settings:
    """The privacy report that is found in every folder; tests change it."""
    values: Settings = {
        "epsilon": 1.99, "delta": 1e-3, "neighboring_relation": "add_or_remove_one", "steps": 4,
        "expected_batch_size": 8.0, "private": True, "statement": "private", "num_directions": 3,
    }  # fmt: skip
    monkeypatch.setattr(results.PrivacyReport, "load", lambda path: SimpleNamespace(**values))
    return values


def leave_results(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "all_results.json").write_text(json.dumps({**RESULTS, **changes}), encoding="utf-8")
    return folder


def test_a_finished_run_is_a_row_of_figures(tmp_path, report):
    (run,) = grid(write_recipe(tmp_path), overrides=["--num_directions", "3"])
    found = row_of(run, leave_results(tmp_path / "a"), "", Exit(0, 12.345))
    assert (found.status, found.error) == ("done", None)
    assert (found.score, found.zero_shot, found.metric) == (0.75, 0.5, "accuracy")
    assert (found.seconds_per_step, found.peak_memory_bytes) == (0.125, 3 * 2**20)
    assert found.wall_seconds in (12.34, 12.35)
    assert (found.epsilon, found.delta, found.steps) == (1.99, 1e-3, 4)
    assert (found.forwards, found.backwards) == (4 * 8 * 2 * 3, 0)
    (first_order,) = grid(write_recipe(tmp_path), "dp-sgd")
    found = row_of(first_order, tmp_path / "a", "", Exit(0, 1.0))
    assert (found.forwards, found.backwards) == (32, 32)


@pytest.mark.parametrize(
    ("method", "reported", "changes", "status", "message"),
    [
        ("dpzero", {"private": False, "statement": "seeded"}, {}, "not_private", "seeded"),
        ("dpzero", {"epsilon": 2.00001}, {}, "not_private", "epsilon = 2.001, more than the 2"),
        ("mezo", {"private": False, "epsilon": math.inf}, {}, "done", "None"),
        ("mezo", {}, {"eval_accuracy": math.nan}, "failed", "its accuracy is nan after training"),
        ("dpzero", {}, {"zero_shot_accuracy": None}, "done", "None"),
    ],
)
def test_a_run_must_keep_its_promise(method, reported, changes, status, message, tmp_path, report):
    """A private one an epsilon, any a score."""
    report.update(reported)
    (run,) = grid(write_recipe(tmp_path), method)
    found = row_of(run, leave_results(tmp_path / "a", **changes), "", Exit(0, 1.0))
    assert (found.status, found.done) == (status, status == "done") and message in str(found.error)
    assert (found.delta is None) == (method == "mezo") == (found.epsilon == math.inf)


def test_results_that_cannot_be_read_are_a_failure_and_other_metrics_are_read(tmp_path, report):
    (run,) = grid(write_recipe(tmp_path))
    found = row_of(run, tmp_path / "none", "", Exit(0, 1.0))
    assert found.status == "failed" and "left no readable results" in str(found.error)
    folder = leave_results(tmp_path / "a", eval_f1=0.5, zero_shot_f1=0.25)
    found = row_of(run, folder, "", Exit(0, 1.0))
    assert (found.metric, found.score, found.zero_shot) == ("f1", 0.5, 0.25)


# ---- means and tables


def three_seeds() -> list[Row]:
    """dpzero at 2: 0.8, 0.9, one failure; mezo: 0.96 three times; zero-shot 0.5, 0.6 and 0.7."""
    plain: Settings = {"method": "mezo", "algorithm": "mezo", "private": False, "score": 0.96}
    plain |= {"target_epsilon": math.inf, "epsilon": math.inf, "zero_shot_group": "g"}
    figures: Settings = {"forwards": 128.0, "backwards": 0.0, "zero_shot_group": "g"}
    first = {"seconds_per_step": 0.1, "peak_memory_bytes": 2**21, "epsilon": 1.99, **figures}
    second = {"seconds_per_step": 0.2, "peak_memory_bytes": 4 * 2**20 - 1, "epsilon": 1.99801}
    return [
        row(seed=42, score=0.8, zero_shot=0.5, **first),
        row(seed=13, score=0.9, zero_shot=0.6, **figures, **second),
        row(seed=21, status="out_of_memory", error="killed by SIGKILL", score=None),
        *(row(seed=seed, zero_shot=z, **plain) for seed, z in ((42, 0.5), (13, 0.6), (21, 0.7))),
    ]


PLANNED = {("dpzero", 2.0): 3, ("dpzero", 6.0): 3, ("mezo", math.inf): 3}


def record(**settings: Any) -> Record:
    cells, zero_shot = aggregate(three_seeds(), PLANNED)
    values: Settings = {
        "task": "trec", "seeds": [42, 13, 21], "jobs": 1, "delta": "1e-05",
        "neighboring_relation": "add_or_remove_one", "overrides": ["--max_steps", "9"],
        "methods": [{"name": "dpzero", "source": "a.yaml", "method": "dpzero", "private": True}],
    }  # fmt: skip
    return Record(
        settings={**values, **settings}, rows=three_seeds(), cells=cells, zero_shot=zero_shot,
        pending=[f"dpzero-eps6-seed{seed}" for seed in (42, 13, 21)],
    )  # fmt: skip


def test_a_cell_counts_only_runs_that_count():
    cell = record().cell("dpzero", 2.0)
    assert cell is not None and (cell.planned, cell.finished) == (3, 2)
    assert cell.mean == pytest.approx(0.85)
    assert cell.standard_error == pytest.approx(0.05)  # sd 0.0707 / sqrt(2)
    assert cell.seconds_per_step == pytest.approx(0.15)
    assert cell.peak_memory_bytes == 4 * 2**20 - 1 and cell.epsilon_spent == 1.99801
    rows = [row(score=0.5), row(seed=13, score=1.0, status="not_private")]
    cells, _ = aggregate(rows, {("dpzero", 2.0): 2})
    assert (cells[0].mean, cells[0].finished, cells[0].standard_error) == (0.5, 1, None)


def test_zero_shot_counts_each_seed_once_and_tells_models_apart():
    """0.5 and 0.6 stand twice (dpzero and mezo), 0.7 once: the mean over seeds is 0.6."""
    plain = ModelArguments(model_name_or_path="m")
    lora = dataclasses.replace(plain, peft_method="lora", lora_r=2, init_seed=7)
    prefix = dataclasses.replace(plain, peft_method="prefix")
    zero = dataclasses.replace(plain, head_init="zero")
    groups = [zero_shot_group(arguments) for arguments in (plain, lora, prefix, zero)]
    assert groups[0] == groups[1] and len(set(groups)) == 3
    (cell,) = record().zero_shot
    assert cell.mean == pytest.approx(0.6)
    assert cell.standard_error == pytest.approx(0.1 / math.sqrt(3))
    assert (cell.method, cell.finished) == ("zero-shot", 3)
    rows = [row(zero_shot_group="a"), row(method="mezo", zero_shot_group="b", zero_shot=0.75)]
    found = [(c.method, c.mean) for c in aggregate(rows, PLANNED)[1]]
    assert found == [("zero-shot (dpzero)", 0.25), ("zero-shot (mezo)", 0.75)]


def test_the_table_by_hand():
    """Nothing is rounded up but epsilon."""
    lines = tables.table(record()).splitlines()
    assert lines[0] == (
        "| method | accuracy (%), ε = 2 | accuracy (%), ε = 6 | accuracy (%), ε = ∞ | epsilon spent "
        "| s/step | peak MiB | example-forwards | example-backwards |"
    )
    assert lines[2] == (
        "| dpzero | 85.00 ± 5.00 (2 of 3) | none (0 of 3) | – | 1.999 | 0.150 | 3 | 128 | 0 |"
    )
    assert lines[3] == "| mezo | – | – | 96.00 ± 0.00 | ∞ | – | – | – | – |"
    assert lines[4].startswith("| zero-shot | 60.00 ± 5.77 | 60.00 ± 5.77 | 60.00 ± 5.77 | 0 |")
    assert len(lines) == 5
    assert [tables.percent(0.99999), *map(tables.seconds, (0.9999, 59.99))] == [
        "99.99", "0.999", "59.9",
    ]  # fmt: skip


def test_what_stands_under_the_table():
    text = tables.markdown(record())
    assert text.startswith("# trec: dpzero, mezo\n") and "noisy" not in text
    for words in (
        "seeds 42, 13, 21",
        "δ = 1e-05 under adding or removing one training example",
        "cannot be repeated bit for bit, by design",
        "- dpzero: `a.yaml`\n- all of them: `--max_steps 9`",
        "Runs that do not count (1):\n\n- dpzero, ε = 2, seed 21: **out_of_memory**",
        "killed by SIGKILL",
        "Runs that are still to be made (3):",
    ):
        assert words in text
    shared = record()
    shared.rows[0] = dataclasses.replace(shared.rows[0], jobs=2)
    assert "Up to 2 runs shared the machine: seconds per step are noisy" in tables.markdown(shared)


def saved(folder: Path) -> Record:
    """What comparison.json holds."""
    text = (folder / "comparison.json").read_text(encoding="utf-8")
    values = decode(json.loads(text, parse_constant=pytest.fail))
    values["rows"] = [Row.from_dict(row) for row in values["rows"]]
    cells = {name: [Cell(**cell) for cell in values[name]] for name in ("cells", "zero_shot")}
    return Record(**{**values, **cells})


def test_a_record_is_saved_whole_and_is_drawn(tmp_path):
    record().save(tmp_path)
    assert saved(tmp_path) == record()
    path = plot_comparison(record(), tmp_path)
    assert path is not None and path.read_bytes().startswith(PNG)
    empty = [dataclasses.replace(cell, mean=None) for cell in record().cells]
    assert plot_comparison(dataclasses.replace(record(), cells=empty), tmp_path) is None


# ---- running


@dataclasses.dataclass
class Fake:
    """Starts attempts that end at once with the given status, leaving what a run would."""

    status: Callable[[Attempt], int] = lambda attempt: 0
    seen: list[Attempt] = dataclasses.field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    stopped: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, attempt: Attempt) -> Any:
        self.seen.append(attempt)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        attempt.folder.mkdir(parents=True, exist_ok=True)
        (attempt.folder / "trajectory.ledger").touch()
        return SimpleNamespace(
            poll=lambda: self.end(attempt), stop=lambda: self.stopped.append(attempt.folder.name)
        )

    def end(self, attempt: Attempt) -> Exit:
        status = self.status(attempt)
        self.at_once -= 1
        if status == 0:
            leave_results(attempt.folder)
        Path(f"{attempt.log}.err").write_text("error: it was asked to\n")
        return Exit(status, 1.0)

    @property
    def names(self) -> list[str]:
        return [attempt.folder.name for attempt in self.seen]


def run_all(folder: Path, runs: list[Run], fake: Any, **settings: Any) -> Record:
    return compare(folder, runs, recipe="tiny.yaml", start=fake, **settings)


def names_run(folder: Path, runs: list[Run], **settings: Any) -> list[str]:
    """Folders of the runs that a comparison has started."""
    fake = Fake()
    run_all(folder, runs, fake, **settings)
    return fake.names


def test_a_comparison_leaves_rows_record_table_and_plot(tmp_path, report):
    runs = grid(write_recipe(tmp_path), epsilons=[2.0, 6.0], seeds=[1, 2])
    out, fake = tmp_path / "out", Fake()
    found = run_all(out, runs, fake, jobs=2)
    assert fake.most_at_once == 2 and {row.jobs for row in found.rows} == {2}
    left = {row.folder for row in read_rows(out / "rows.jsonl")}
    assert left == {run.name for run in runs} and saved(out) == found
    assert "75.00 ± 0.00" in (out / "comparison.md").read_text(encoding="utf-8")
    assert (out / "comparison.png").read_bytes().startswith(PNG)
    assert load_recipe(out / "recipes" / f"{runs[0].name}.yaml").training.target_epsilon == 2.0


def test_a_rerun_skips_what_has_a_row_and_changed_settings_take_another_folder(tmp_path, report):
    path, out = write_recipe(tmp_path), tmp_path / "out"
    names_run(out, grid(path, seeds=[1, 2]))
    before = (out / "rows.jsonl").read_bytes()
    assert names_run(out, grid(path, seeds=[1, 2, 3])) == ["dpzero-eps2-seed3"]
    assert (out / "rows.jsonl").read_bytes().startswith(before)
    changed = grid(path, seeds=[1], overrides=["--clip", "3"])
    assert names_run(out, changed) == ["dpzero-eps2-seed1-attempt2"]


def test_failures_are_rows_and_are_retried_only_on_request(tmp_path, report):
    runs, out = grid(write_recipe(tmp_path), seeds=[1, 2, 3]), tmp_path / "out"
    ends = {1: 2, 2: 1, 3: -int(signal.SIGKILL)}
    fake = Fake(status=lambda attempt: ends[attempt.run.recipe.training.seed])
    found = run_all(out, runs, fake)
    assert [row.status for row in found.rows] == ["refused", "failed", "out_of_memory"]
    assert "it was asked to" in str(found.rows[0].error)  # a refusal names the mistake
    assert not any("asked to" in str(row.error) for row in found.rows[1:])
    assert found.cells[0].finished == 0
    assert names_run(out, runs) == []
    leave_checkpoint(out / "runs" / "dpzero-eps2-seed2", 2)  # which is not continued: it has a row
    again = [f"dpzero-eps2-seed{seed}-attempt2" for seed in (1, 2, 3)]
    assert names_run(out, runs, retry_failed=True) == again
    assert [row.status for row in saved(out).rows] == ["done"] * 3
    assert len(read_rows(out / "rows.jsonl")) == 6


@pytest.fixture
def interrupted(tmp_path, report) -> Path:
    """The folder of a comparison that was interrupted while its first run trained."""

    def ctrl_c(attempt: Attempt) -> int:
        raise KeyboardInterrupt

    fake, out = Fake(status=ctrl_c), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_all(out, grid(write_recipe(tmp_path)), fake)
    assert fake.stopped == ["dpzero-eps2-seed42"] and read_rows(out / "rows.jsonl") == []
    return out


def leave_checkpoint(folder: Path, step: Any, whole: bool = True) -> None:
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    if whole:
        (checkpoint / "dpzero_state.json").write_text("{}")


def test_a_half_finished_run_continues_from_its_last_whole_checkpoint(interrupted, tmp_path):
    folder = interrupted / "runs" / "dpzero-eps2-seed42"
    for step, whole in ((2, True), (10, True), (20, False)):
        leave_checkpoint(folder, step, whole)
    fake = Fake()
    found = run_all(interrupted, grid(write_recipe(tmp_path)), fake)
    assert fake.names == ["dpzero-eps2-seed42"]
    assert fake.seen[0].checkpoint == folder / "checkpoint-10"
    assert fake.seen[0].words[-2:] == ["--resume_from_checkpoint", str(folder / "checkpoint-10")]
    assert found.rows[0].resumed


def test_a_ledger_without_a_checkpoint_is_left_and_a_new_folder_taken(interrupted, tmp_path):
    runs = grid(write_recipe(tmp_path))
    assert names_run(interrupted, runs) == ["dpzero-eps2-seed42-attempt2"]
    (interrupted / "rows.jsonl").unlink()
    folder = interrupted / "runs" / "dpzero-eps2-seed42"
    (folder / "trajectory.ledger").unlink()  # where nothing was spent the folder is used again
    assert names_run(interrupted, runs) == [folder.name]
    (interrupted / "rows.jsonl").unlink()
    leave_checkpoint(folder, 2)
    (folder / "all_results.json").unlink()  # a checkpoint of other settings is not continued
    other, fake = grid(write_recipe(tmp_path), overrides=["--clip", "3"]), Fake()
    run_all(interrupted, other, fake)
    assert fake.seen[0].checkpoint is None and fake.names != [folder.name]


def test_discarded_weights_leave_results_and_ledger(tmp_path):
    for name in ("model.safetensors", "trajectory.safetensors", "trajectory.ledger", "a.json"):
        (tmp_path / name).touch()
    leave_checkpoint(tmp_path, 3)
    discard_weights(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["a.json", "trajectory.ledger", "trajectory.safetensors"]


def python(tmp_path: Path, code: str, lock: int | None = None, **environment: str) -> Process:
    return Process([sys.executable, "-c", code], tmp_path / "log", environment, lock)


def test_a_process_gets_its_environment(tmp_path):
    child = python(tmp_path, "import os; print(os.environ['OMP_NUM_THREADS'])", OMP_NUM_THREADS="3")
    deadline = time.monotonic() + 300
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / "log.out").read_text() == "3\n"


def test_the_lock_lasts_as_long_as_a_process_that_outlives_its_comparison(tmp_path):
    refused = "another comparison or sweep, or a run that outlived one"
    with locked(tmp_path) as lock:
        orphan = python(tmp_path, "import time; time.sleep(60)", lock)
    with pytest.raises(OSError, match=refused), locked(tmp_path):
        pass
    orphan.stop()
    assert orphan.poll() is not None and orphan.poll().status != 0
    with locked(tmp_path):
        pass


# ---- the command; tests/cli/test_bad_invocations.py has what it refuses


def test_the_command_names_only_the_files_it_wrote(tmp_path, capsys, monkeypatch):
    """A run that was refused leaves nothing to draw, and without matplotlib nothing is drawn."""
    start = lambda jobs, lock: Fake(status=lambda attempt: 2)  # noqa: E731
    monkeypatch.setattr("hf_dpzero.experiments.runner.train_in_process", start)
    recipe, out = str(write_recipe(tmp_path)), tmp_path / "out"
    words = ["--methods", "dpzero", "--seeds", "1", "--output_dir", str(out)]
    assert main.main(["compare", recipe, *words]) == 0
    written, left = capsys.readouterr().out.strip().splitlines()[-2:]
    assert written == f"written: {out / 'comparison.json'} {out / 'comparison.md'}"
    assert left.startswith("left on disk by its runs: nothing; ")


@pytest.mark.slow
def test_compare_from_the_command_line(tmp_path, bert_checkpoint, capsys):
    """dpzero and mezo in real processes; a second call has nothing left to do."""
    tiny = {
        "max_eval_samples": 16,
        "max_seq_length": 16,
        "num_directions": 2,
        "save_strategy": "no",
    }
    path = write_recipe(tmp_path, model_name_or_path=str(bert_checkpoint), **tiny)
    out = tmp_path / "out"
    words = ["compare", path, "--methods", "dpzero,mezo", "--epsilons", "4", "--seeds", "42"]
    words += ["--output_dir", out, "--jobs", "2", "--max_steps", "3"]
    assert main.main([str(word) for word in words]) == 0
    said = capsys.readouterr().out
    assert "| dpzero |" in said and "arguments (SECRET where" in said
    found = saved(out)
    assert [row.status for row in found.rows] == ["done"] * 2, [r.error for r in found.rows]
    assert [row.method for row in found.rows] == ["dpzero", "mezo"]
    for each in found.rows:
        assert each.steps == 3 and each.forwards == 3 * 8 * 4
        assert 0 < (each.seconds_per_step or 0) < (each.wall_seconds or 0)
        assert (each.peak_memory_bytes or 0) > 2**20
        assert each.epsilon == math.inf if not each.private else 0 < (each.epsilon or 0) <= 4
    assert found.rows[0].zero_shot == found.rows[1].zero_shot  # the same draw, the same head
    assert [cell.method for cell in found.zero_shot] == ["zero-shot"]
    assert (out / "comparison.png").read_bytes().startswith(PNG)
    assert "noisy" in (out / "comparison.md").read_text(encoding="utf-8")
    before = (out / "rows.jsonl").read_bytes()
    assert main.main([str(word) for word in words]) == 0
    assert (out / "rows.jsonl").read_bytes() == before
