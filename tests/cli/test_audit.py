"""`hf-dpzero audit`: claims and lower bounds of a recipe's plan, and the status where one is refuted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_dpzero.cli import audit, main
from hf_dpzero.privacy.noise import SecureNoise

RECIPE = "audit sst2/minilm-dpzero --num_examples 65349 --num_directions 1 --steps 2"


def audited(folder: Path, words: str, runs: int = 400) -> tuple[int, dict[str, Any]]:
    status = main.main(
        [*RECIPE.split(), "--runs", str(runs), "--output_dir", str(folder), *words.split()]
    )
    return status, json.loads((folder / "audit.json").read_text())


@pytest.mark.false_alarm(5e-6)  # five verdicts
def test_a_sound_plan_holds(tmp_path, capsys):
    status, said = audited(tmp_path, "")
    page = capsys.readouterr().out
    assert status == 0 and said["holds"] and len(said["audits"]) == 5
    assert "the run: 4000 steps" in page and "no claim is refuted" in page
    assert (tmp_path / "audit.png").is_file()
    assert [bound["confidence"] for bound in said["audits"][0]["bounds"]] == [0.95, 1 - 1e-6]
    assert all(f"claim {row['claim']:.4g}" in page for row in said["audits"])


def test_noise_that_is_not_there_is_refuted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(SecureNoise, "_integers", lambda self, kind, scale, size, step: [0] * size)
    status, said = audited(tmp_path, "--max_steps 4 --target_epsilon 0.5")
    assert status == 1 and not said["holds"] and not said["audits"][0]["holds"]
    assert "REFUTED" in capsys.readouterr().out


def test_a_plan_that_is_not_private_is_refused(tmp_path, capsys):
    words = ["--method", "mezo", "--target_epsilon", "null", "--output_dir", str(tmp_path / "out")]
    assert main.main([*RECIPE.split(), *words]) == 2
    assert "there is no claim to audit" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--testing.insecure_noise_seed 0", "testing.insecure_noise_seed.*no claim"),
        ("--runs 199", "runs=199 .*steps=2: give at least 200"),
    ],
)
def test_what_shows_nothing_is_refused_at_once(tmp_path, capsys, words, said):
    assert main.main([*RECIPE.split(), *words.split(), "--output_dir", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert re.search(said, told.err) and "one step" not in told.out


def members(folder: Path, recipe: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """What is found of a model that was trained with these settings."""
    file, out, target = folder / "r.json", folder / "out", folder / "found"
    file.write_text(json.dumps({**recipe, **settings, "output_dir": str(out)}))
    assert main.main(["train", str(file)]) == 0
    words = ["--model", str(out), "--output_dir", str(target)]
    assert main.main(["audit", str(file), *words]) == 0
    for name in ("membership.json", "membership.png"):
        assert (target / name).stat().st_mode & 0o777 == 0o600 and (target / name).stat().st_size
    return json.loads((target / "membership.json").read_text())


@pytest.fixture
def recipe(tmp_path: Path, bert_checkpoint: Path) -> dict[str, Any]:
    """Of 400 rows, good ones of label 1; in the 40 validation rows it is the other way round."""
    for turned, name in enumerate(("train", "validation")):
        texts = [f"{['film', 'it was'][turned]} {i} {['bad', 'good'][i % 2]}" for i in range(400)]
        rows = [{"text": text, "label": (i + turned) % 2} for i, text in enumerate(texts)]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows[: 40 if turned else None])
        (tmp_path / f"{name}.jsonl").write_text(lines)
    return {
        "model_name_or_path": str(bert_checkpoint), "train_file": str(tmp_path / "train.jsonl"),
        "method": "adamw", "learning_rate": 3e-3, "max_steps": 60, "expected_batch_size": 20,
        "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
    }  # fmt: skip


def test_rows_that_a_model_learnt_are_told_from_others(tmp_path, recipe, capsys):
    found = members(tmp_path, recipe, validation_file=str(tmp_path / "validation.jsonl"))
    fell, loss, base = (attack["area"] for attack in found["attacks"])
    assert fell > 0.95 and loss > 0.95 and 0.2 < base < 0.8 and found["one_run"] is None
    page = capsys.readouterr().out
    assert "400 rows that it was trained on, 40 validation rows" in page
    assert "permits an area of 1.000" in page and "not for publication" in page
    words = ["audit", str(tmp_path / "r.json"), "--model", str(tmp_path / "out")]
    for more, said in (
        (
            ["--train_file", str(tmp_path / "more.jsonl")],
            "the recipe has 401 training rows or units",
        ),
        (["--holdout", "0.5"], "the run there held no rows out"),
        (["--model", str(tmp_path)], "Name the folder of a finished run"),
    ):
        rows = (tmp_path / "train.jsonl").read_text()
        (tmp_path / "more.jsonl").write_text(rows + json.dumps({"text": "x", "label": 0}))
        assert main.main([*words, *more]) == 2
        assert said in capsys.readouterr().err


PRIVATE = {"method": "dpzero", "target_epsilon": 0.1, "target_delta": 1e-3, "max_steps": 2}


def test_rows_held_out_by_coins_are_the_others_of_a_private_run(
    tmp_path, recipe, monkeypatch, capsys
):
    found = members(tmp_path, recipe, holdout=0.5, class_names=["dull", "fine"], **PRIVATE)
    assert 0.099 <= found["epsilon"] <= 0.1 and found["others"] == "held out"
    one = found["one_run"]
    assert (one["coins"], one["guesses"], one["delta"]) == (400, 120, 1e-12)
    assert 0.1 < one["claim"] < 2 and one["sure"] == 0 and one["holds"]
    rows = re.search(r"(\d+) rows that it was trained on, (\d+) held out", capsys.readouterr().out)
    assert rows is not None and int(rows[1]) + int(rows[2]) == 400
    words = ["--model", str(tmp_path / "out"), "--output_dir", str(tmp_path / "found")]
    # as if the weights told of each row on which side it lay
    losses = iter([lambda asked: 1.0 * asked.out, lambda asked: 0.0 * asked.out])
    monkeypatch.setattr(audit, "_losses", lambda recipe, asked, *_: next(losses)(asked))
    assert main.main(["audit", str(tmp_path / "r.json"), *words]) == 1
    assert "120 of 120 guesses of 400 coins" in (page := capsys.readouterr().out)
    assert "REFUTED" in page


def test_what_a_run_held_out_is_known_from_its_folder(tmp_path, recipe, capsys):
    """The recipe may say another share, or no holdout; no other coins than fair ones are counted."""
    recipe |= {"class_names": ["dull", "fine"], **PRIVATE}
    found = members(tmp_path, recipe, holdout=0.3)
    aside = re.search(r"(\d+) held out", capsys.readouterr().out)
    assert found["one_run"] is None and aside is not None and 60 < int(aside[1]) < 190
    words = [
        "--validation_file",
        str(tmp_path / "validation.jsonl"),
        "--model",
        str(tmp_path / "out"),
    ]
    assert main.main(["audit", str(tmp_path / "r.json"), *words, "--holdout", "0.5"]) == 0
    page = capsys.readouterr().out
    assert f"{aside[1]} held out" in page and "one run" not in page
    assert main.main(["audit", str(tmp_path / "r.json"), *words, "--holdout", "0"]) == 0
    assert f"{aside[1]} held out" in capsys.readouterr().out
