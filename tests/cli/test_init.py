"""`hf-dpzero init`: starters for a user's own files, that load, compile and train."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tiny_language_models import save_causal_lm

from hf_dpzero.cli import main
from hf_dpzero.recipes.build import build_trainer
from hf_dpzero.recipes.recipe import load_recipe
from hf_dpzero.tasks import build_task

ROWS: dict[str, tuple[dict[str, Any], ...]] = {
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
SHORT = ["--use_cpu", "--max_steps=2", "--max_seq_length=32"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, kind: str, count: int, start: int = 0) -> str:
    """A file of rows that differ by a number in their first text."""
    rows = [dict(ROWS[kind][i % len(ROWS[kind])]) for i in range(start, start + count)]
    for number, row in enumerate(rows, start):
        first = next(iter(row))
        if isinstance(row[first], str):
            row[first] = f"{row[first]} {number}"
    table, suffix = pd.DataFrame(rows), Path(name).suffix
    if suffix in (".csv", ".tsv"):
        table.to_csv(name, sep="\t" if suffix == ".tsv" else ",", index=False)
    elif suffix == ".parquet":
        table.to_parquet(name)
    else:
        table.to_json(name, orient="records", lines=suffix == ".jsonl")
    return name


def files(kind: str, suffix: str = "csv") -> list[str]:
    """Options for 24 private and 6 public rows."""
    train, public = write(f"mine.{suffix}", kind, 24), write(f"public.{suffix}", kind, 6, 100)
    return ["--train_file", train, "--validation_file", public]


def init(capsys: Any, *words: Any, status: int = 0) -> str:
    found = main.main(["init", "--target_epsilon", "2", *map(str, words)])
    captured = capsys.readouterr()
    assert found == status, captured.err
    return captured.out if status == 0 else captured.err.strip().splitlines()[-1]


def plan(capsys: Any, *words: str) -> dict[str, Any]:
    assert main.main(["plan", "--recipe", "mine.yaml", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_a_starter_recipe_loads_and_says_n(suffix, capsys):
    words = files("text", suffix)
    out = init(capsys, *words)
    assert "n = 24" in out and "'review'" in out
    recipe = load_recipe("mine.yaml")
    assert (recipe.data.text_column, recipe.data.label_column) == ("review", "label")
    assert recipe.training.target_epsilon == 2 and recipe.training.target_delta < 1 / 24
    assert len(build_task(recipe.data).splits["train"]) == 24
    assert recipe.training.plan(24).mechanism.noise_multiplier > 0
    before = Path("mine.yaml").read_text()
    assert "mine.yaml exists" in init(capsys, *words, status=2)
    assert Path("mine.yaml").read_text() == before


def test_a_starter_is_planned_before_there_are_public_rows(capsys):
    said = init(capsys, "--train_file", write("mine.csv", "text", 24))
    assert "next: write public rows to evaluate on into public.csv" in said
    planned = plan(capsys)
    assert planned["num_examples"] == 24 and "not there yet" in planned["num_examples_from"]
    unset = plan(capsys, "--validation_file", "null", "--max_train_samples", "20")
    assert unset["num_examples"] == 20
    assert main.main(["train", "mine.yaml"]) == 2 and "public.csv" in capsys.readouterr().err


def test_script_and_recipe_of_one_file_are_the_same_run(capsys):
    words = files("text")
    init(capsys, *words), init(capsys, *words, "--script")
    recipe, script = load_recipe("mine.yaml"), Path("mine.py").read_text()
    for name in ("max_steps", "expected_batch_size", "target_epsilon", "target_delta", "trainable"):
        value = json.dumps(getattr(recipe.training, name))
        assert f"    {name}={value}," in script.replace("=3,", "=3.0,")
    assert f"logit_scale={recipe.model.logit_scale}" in script
    assert recipe.model.model_name_or_path in script


@pytest.mark.parametrize("kind", ["text", "people", "answers"])
def test_a_starter_without_public_rows_trains_and_is_evaluated(
    kind, tmp_path, bert_checkpoint, capsys
):
    """By the two commands that it prints."""
    people, texts = kind == "people", kind != "answers"
    model = bert_checkpoint if texts else save_causal_lm(tmp_path / "model")
    named = ["--class_names", "neg,pos"] if texts else []
    train = ["--train_file", write("mine.jsonl", "text" if texts else kind, 60), "--holdout", "0.5"]
    if people:
        table = pd.read_json("mine.jsonl", lines=True)
        table.assign(who=[f"p{i // 3}" for i in range(60)]).to_json(
            "mine.jsonl", orient="records", lines=True
        )
        named += ["--unit_column", "who"]
    said, units = init(capsys, *train, *named, "--model", model), 20 if people else 60
    assert f"n = about {units // 2}" in said and "public" not in said
    first, second = re.findall(r"^then: hf-dpzero (.*)$", said, re.MULTILINE)
    small = [*SHORT, "--num_directions=1"] if texts else ["--use_cpu", "--max_steps=2"]
    small += [] if texts else ["--max_seq_length=128", "--max_new_tokens=4"]
    assert main.main([*first.split(), *small]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main.main([*second.split(), *small, "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    report = json.loads(Path("out/mine/privacy_report.json").read_text())
    assert found["epsilon"] == 2 and 0 < found["num_rows"] == units - report["num_examples"] < units
    assert "epsilon = 2, " in found["together"]  # the larger of the two, not the sum
    if people:
        assert (
            "for each who with all its rows that was trained on or evaluated and not both"
            in found["together"]
        )
        table = pd.read_json("mine.jsonl", lines=True).assign(review="other words")
        table.to_json("again.jsonl", orient="records", lines=True)
        assert main.main([*second.split(), *small, "--private_file", "again.jsonl"]) == 2
        assert "of some unit" in capsys.readouterr().err


def test_a_starter_of_pairs(capsys):
    train = write("mine.jsonl", "pair", 16)
    assert "'premise' and 'hypothesis'" in init(capsys, "--train_file", train)
    recipe = load_recipe("mine.yaml")
    assert recipe.data.text_pair_column == "hypothesis"
    assert recipe.model.pair_features == "siamese" and recipe.data.validation_file == "public.jsonl"


def test_rate_clip_and_directions_of_a_starter_are_chosen_and_the_plan_shows_them(
    bert_checkpoint, capsys
):
    """And they are those that training takes."""
    init(capsys, *files("text"), "--model", bert_checkpoint)
    assert load_recipe("mine.yaml").training.chosen == {"learning_rate", "num_directions"}
    text = Path("mine.yaml").read_text()
    assert "hf-dpzero plan --recipe mine.yaml` shows what is chosen" in text
    quick = [*SHORT, "--disable_tqdm", "--logging_steps=1", "--lr_scheduler_type=constant"]
    planned = plan(capsys, *quick)
    assert planned["chosen"] == ["learning_rate", "num_directions"]
    trainer = build_trainer(load_recipe("mine.yaml", quick))
    trainer.train()
    first = trainer.state.log_history[0]["learning_rate"]
    assert first == pytest.approx(planned["learning_rate"], rel=1e-6)
    assert trainer.run.args.num_directions == planned["num_directions"] == 32
    capsys.readouterr()
    assert "chosen" not in plan(capsys, *quick, "--learning_rate=1e-3", "--clip=2")


@pytest.mark.parametrize("kind", ["text", "answers", "completion"])
def test_a_starter_trains(kind, tmp_path, bert_checkpoint, capsys):
    model = bert_checkpoint if kind == "text" else save_causal_lm(tmp_path / "model")
    (tmp_path / "sub").mkdir()
    init(capsys, *files(kind, "jsonl"), "--model", model, "--output", "sub/mine.yaml")
    task = [] if kind == "text" else ["mine-task.yaml"]
    assert sorted(path.name for path in Path("sub").iterdir()) == [*task, "mine.yaml"]
    small = [] if kind == "text" else ["--max_seq_length=128", "--max_new_tokens=4"]
    words = [*SHORT, "--disable_tqdm", "--num_directions=1", *small]
    assert main.main(["train", "sub/mine.yaml", *words]) == 0, capsys.readouterr().err
    assert json.loads(Path("out/mine/privacy_report.json").read_text())["steps"] == 2


@pytest.mark.parametrize("kind", ["text", "pair", "completion", "messages"])
def test_a_starter_script_compiles(kind, capsys):
    init(capsys, "--train_file", write("mine.jsonl", kind, 16), "--script")
    text = Path("mine.py").read_text()
    compile(text, "mine.py", "exec")
    assert "${" not in text and "target_epsilon=2.0" in text
    assert ("pair_features" in text) == (kind == "pair")


@pytest.mark.parametrize(("count", "steps"), [(16, 800), (640, 1000), (16_000, 10_000)])
def test_steps_of_a_chat_follow_from_its_rows(count, steps, capsys):
    """100 passes over the rows, in batches of an eighth of them, at most 64; at most 10,000 steps."""
    init(capsys, "--train_file", write("mine.jsonl", "messages", count), "--script")
    assert f"    max_steps={steps}," in Path("mine.py").read_text()


def test_a_starter_script_trains(bert_checkpoint, capsys):
    init(capsys, *files("text"), "--model", bert_checkpoint, "--script")
    text = Path("mine.py").read_text()
    short = re.sub(r"max_steps=\d+", "max_steps=2, use_cpu=True", text).replace("=128", "=32")
    Path("mine.py").write_text(short)
    runpy.run_path("mine.py")
    assert "eval_accuracy" in capsys.readouterr().out


def test_init_refuses(capsys):
    """tests/cli/test_bad_invocations.py has more."""
    pd.DataFrame([{"a": "x", "b": "y", "c": 1}] * 3).to_csv("mine.csv", index=False)
    asked = ["--train_file", "mine.csv"]
    assert "--label_column" in init(capsys, *asked, status=2)
    asked += ["--label_column", "c"]
    assert "a, b hold text" in init(capsys, *asked, status=2)
    asked += ["--text_column", "a", "--output", "a.txt"]
    assert "ends in .yaml" in init(capsys, *asked, status=2)
    numbers = [{"text": f"a {i}", "label": f"u{i // 2}"} for i in range(50)]
    pd.DataFrame(numbers).to_csv("rows.csv", index=False)
    words = ["--train_file", "rows.csv", "--output", "numbers.yaml"]
    assert "fewer than 10 rows for each" in init(capsys, *words, status=2)
    Path("rows.csv").write_text("text,label\n")
    assert "rows.csv has no rows: line 1 names" in init(capsys, *words, status=2)
    held = [*files("text"), "--holdout", "0.1", "--output", "held.yaml"]
    assert "--class_names a,b" in init(capsys, *held[:2], *held[4:], status=2)
    assert "leave --script out" in init(capsys, *held[:-1], "held.py", "--script", status=2)
    assert "is no share of the rows" in init(capsys, *held[:4], "--holdout", "1", status=2)
    init(capsys, *held)  # with public rows too: these name the labels
    assert load_recipe("held.yaml").data.holdout == 0.1
    asked = [*files("text")[:2], "--output", "units.yaml", "--unit_column"]
    assert "is no column" in init(capsys, *asked, "who", status=2)
    assert "another value for each row" in init(capsys, *asked, "review", status=2)
    chats = write("chats.jsonl", "messages", 4)
    assert "--script" in init(capsys, "--train_file", chats, status=2)
