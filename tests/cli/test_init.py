"""`hf-dpzero init`: starters for a user's own files, that load, compile and train."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import datasets
import pytest
from tiny_language_models import save_causal_lm

from hf_dpzero.cli import main
from hf_dpzero.recipes.build import build_trainer
from hf_dpzero.recipes.recipe import load_recipe
from hf_dpzero.tasks import build_task

ROWS = {
    "text": ({"review": "it was good", "label": "pos"}, {"review": "it was bad", "label": "neg"}),
    "pair": (
        {"premise": "it was", "hypothesis": "good", "label": 0},
        {"premise": "it was", "hypothesis": "bad", "label": 1},
    ),
    "answers": ({"question": "who?", "context": "a man was", "answers": {"text": ["a man"]}},),
    "completion": ({"prompt": "was it?", "completion": "it was"},),
    "messages": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ),
}
TINY = ["--use_cpu", "--disable_tqdm", "--max_steps=2", "--num_directions=1", "--max_seq_length=32"]


def rows_of(kind: str, count: int, start: int = 0) -> list[dict[str, Any]]:
    """Rows that differ by a number in their first text."""
    made = []
    for number in range(start, start + count):
        row = dict(ROWS[kind][number % len(ROWS[kind])])
        first = next(iter(row))
        if isinstance(row[first], str):
            row[first] = f"{row[first]} {number}"
        made.append(row)
    return made


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = datasets.Dataset.from_list(rows)
    if path.suffix == ".csv":
        table.to_csv(path)
    elif path.suffix == ".tsv":
        table.to_csv(path, sep="\t")
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        table.to_json(path)
    return path


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def init(capsys: Any, *words: Any, status: int = 0) -> str:
    found = main.main(["init", "--target_epsilon", "2", *map(str, words)])
    captured = capsys.readouterr()
    assert found == status, captured.err
    return captured.out if status == 0 else captured.err.strip().splitlines()[-1]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_a_starter_recipe_loads_and_says_n(suffix, capsys):
    train = write(Path(f"mine.{suffix}"), rows_of("text", 24))
    public = write(Path(f"public.{suffix}"), rows_of("text", 6, 100))
    out = init(capsys, "--train_file", train, "--validation_file", public)
    assert "n = 24" in out and "'review'" in out
    recipe = load_recipe("mine.yaml")
    assert (recipe.data.text_column, recipe.data.label_column) == ("review", "label")
    assert recipe.training.target_epsilon == 2 and recipe.training.target_delta < 1 / 24
    assert len(build_task(recipe.data).splits["train"]) == 24
    assert recipe.training.plan(24).mechanism.noise_multiplier > 0
    before = Path("mine.yaml").read_text()
    assert "mine.yaml exists" in init(capsys, "--train_file", train, status=2)
    assert Path("mine.yaml").read_text() == before


def test_a_starter_of_pairs(capsys):
    train = write(Path("mine.jsonl"), rows_of("pair", 16))
    assert "'premise' and 'hypothesis'" in init(capsys, "--train_file", train)
    recipe = load_recipe("mine.yaml")
    assert recipe.data.text_pair_column == "hypothesis"
    assert recipe.model.pair_features == "siamese" and recipe.data.validation_file == "public.jsonl"


def test_a_starter_of_a_classification_trains(bert_checkpoint, capsys):
    train = write(Path("mine.csv"), rows_of("text", 24))
    public = write(Path("public.csv"), rows_of("text", 6, 100))
    words = ["--train_file", train, "--validation_file", public, "--model", bert_checkpoint]
    init(capsys, *words)
    assert main.main(["train", "mine.yaml", *TINY]) == 0
    assert json.loads(Path("out/mine/privacy_report.json").read_text())["steps"] == 2


def test_rate_clip_and_directions_of_a_starter_are_chosen_and_the_plan_shows_them(
    bert_checkpoint, capsys
):
    train = write(Path("mine.csv"), rows_of("text", 24))
    public = write(Path("public.csv"), rows_of("text", 6, 100))
    words = ["--train_file", train, "--validation_file", public, "--model", bert_checkpoint]
    init(capsys, *words)
    assert load_recipe("mine.yaml").training.chosen == {"learning_rate", "num_directions"}
    text = Path("mine.yaml").read_text()
    assert "hf-dpzero plan --recipe mine.yaml` shows what is chosen" in text
    changes = ["--max_steps=2", "--max_seq_length=32", "--use_cpu"]
    assert main.main(["plan", "--recipe", "mine.yaml", "--json", *changes]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["chosen"] == ["learning_rate", "num_directions"]
    quick = [*changes, "--disable_tqdm", "--logging_steps=1", "--lr_scheduler_type=constant"]
    assert main.main(["plan", "--recipe", "mine.yaml", "--json", *quick]) == 0
    plan = json.loads(capsys.readouterr().out)
    recipe = load_recipe("mine.yaml", [*quick, "--output_dir=out/x"])
    trainer = build_trainer(recipe)
    trainer.train()
    first = trainer.state.log_history[0]["learning_rate"]
    assert first == pytest.approx(plan["learning_rate"], rel=1e-6)
    assert trainer.run.args.num_directions == plan["num_directions"] == 32
    capsys.readouterr()
    rate = ["--learning_rate=1e-3", "--clip=2"]
    assert main.main(["plan", "--recipe", "mine.yaml", "--json", *quick, *rate]) == 0
    assert "chosen" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["answers", "completion"])
def test_a_starter_of_answers_trains(kind, tmp_path, capsys):
    folder = tmp_path / "sub"
    folder.mkdir()
    train = write(Path("mine.jsonl"), rows_of(kind, 16))
    public = write(Path("public.jsonl"), rows_of(kind, 4, 100))
    model = save_causal_lm(tmp_path / "model")
    words = ["--train_file", train, "--validation_file", public, "--model", model]
    init(capsys, *words, "--output", folder / "mine.yaml")
    assert sorted(path.name for path in folder.iterdir()) == ["mine-task.yaml", "mine.yaml"]
    small = [*TINY, "--max_seq_length=128", "--max_new_tokens=4"]
    assert main.main(["train", "sub/mine.yaml", *small]) == 0, capsys.readouterr().err
    assert json.loads(Path("out/mine/privacy_report.json").read_text())["steps"] == 2


@pytest.mark.parametrize("kind", ["text", "pair", "completion", "messages"])
def test_a_starter_script_compiles(kind, capsys):
    train = write(Path("mine.jsonl"), rows_of(kind, 16))
    init(capsys, "--train_file", train, "--script")
    text = Path("mine.py").read_text()
    compile(text, "mine.py", "exec")
    assert "<" not in text.replace("<MODEL>", "<") and "target_epsilon=2.0" in text


def test_a_starter_script_trains(bert_checkpoint, capsys, monkeypatch):
    train = write(Path("mine.csv"), rows_of("text", 24))
    public = write(Path("public.csv"), rows_of("text", 6, 100))
    words = ["--train_file", train, "--validation_file", public, "--model", bert_checkpoint]
    init(capsys, *words, "--script")
    text = Path("mine.py").read_text()
    short = text.replace("max_steps=10000", "max_steps=2, use_cpu=True").replace("=128", "=32")
    Path("mine.py").write_text(short)
    runpy.run_path("mine.py")
    assert "eval_accuracy" in capsys.readouterr().out


def test_init_refuses(capsys):
    train = write(Path("mine.csv"), [{"a": "x", "b": "y", "c": 1}] * 3)
    assert "--label_column" in init(capsys, "--train_file", train, status=2)
    words = ["--train_file", train, "--label_column", "c"]
    assert "a, b hold text" in init(capsys, *words, status=2)
    assert "'n'" not in init(capsys, *words, "--text_column", "n", status=2)
    assert "ends in .yaml" in init(
        capsys, *words, "--text_column", "a", "--output", "a.txt", status=2
    )
    chats = write(Path("chats.jsonl"), rows_of("messages", 4))
    assert "--script" in init(capsys, "--train_file", chats, status=2)
    assert main.main(["init", "--train_file", str(train), "--target_epsilon", "-1"]) == 2
