"""`hf-dpzero audit`: claims and lower bounds of a recipe's plan, and the status where one is refuted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_dpzero.cli import main
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
