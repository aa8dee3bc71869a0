"""Rows as files that a recipe names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Rows = Iterable[Mapping[str, Any]]


def row_files(folder: Path, train: Rows, validation: Rows | None = None) -> dict[str, str]:
    """train_file and validation_file as JSON lines; by default the same rows in reverse order.

    A file that says so already is left alone: `datasets` goes by its time of change.
    """
    train = list(train)
    splits = {"train": train, "validation": train[::-1] if validation is None else validation}
    paths = {}
    for split, rows in splits.items():
        path = folder / f"{split}.jsonl"
        # One more line end: the same rows are not the same file, which would be refused.
        text = "".join(json.dumps(row) + "\n" for row in rows) + "\n" * (split == "validation")
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        paths[f"{split}_file"] = str(path)
    return paths
