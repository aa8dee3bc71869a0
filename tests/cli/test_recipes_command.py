"""`hf-dpzero recipes` and recipes by their names."""

from __future__ import annotations

import json

from hf_dpzero.cli import main


def listed(capsys, *words: str) -> str:
    assert main.main(["recipes", *words]) == 0
    return capsys.readouterr().out


def test_recipes_lists_what_is_shipped(capsys):
    rows = json.loads(listed(capsys, "--json"))
    assert len(rows) > 50
    row = next(row for row in rows if row["recipe"] == "sst2/roberta-large-dpzero")
    assert (row["task"], row["model"], row["method"]) == ("sst2", "roberta-large", "dpzero")
    assert (row["target_epsilon"], row["target_delta"], row["privacy"]) == (2.0, 1e-5, "(2, 1e-5)")
    assert row["paper"].startswith("91.8 ± 0.1 % at epsilon = 2, ")
    mezo = next(row for row in rows if row["recipe"] == "sst2/roberta-large-mezo")
    assert mezo["privacy"] == "not private" and mezo["target_epsilon"] is None


def test_recipes_of_one_task(capsys):
    text = listed(capsys, "--task", "sst2")
    assert "sst2/minilm-dpzero" in text and "trec/" not in text and "91.8 ± 0.1 %" in text


def test_a_shipped_recipe_runs_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--num_examples", "65349", "--json"]
    assert main.main(["plan", "--recipe", "sst2/minilm-dpzero", *words]) == 0
    assert json.loads(capsys.readouterr().out)["num_examples"] == 65349
