"""A categorical table made of labelled sentences, and its two-way marginals as linear queries."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEGATIONS = {"no", "not", "n't", "never", "nothing", "none", "without"}
LETTERS = 27


@dataclass(frozen=True)
class Table:
    """Rows of categories.

    Attributes:
      names: of the attributes.
      sizes: how many categories each has; public.
      rows: int64 [n, attributes].
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: NDArray[np.int64]

    @property
    def num_cells(self) -> int:
        """|Z|."""
        return int(np.prod(self.sizes))

    @property
    def cells(self) -> NDArray[np.int64]:
        """The cell of each row, int64 [n]."""
        return np.ravel_multi_index(tuple(self.rows.T), self.sizes)

    def without(self, *names: str) -> Table:
        """A table without these attributes."""
        keep = [i for i, name in enumerate(self.names) if name not in names]
        kept = tuple(self.names[i] for i in keep)
        return Table(kept, tuple(self.sizes[i] for i in keep), self.rows[:, keep])

    def marginals(self) -> NDArray[np.float64]:
        """The indicators of all pairs of categories of two attributes, [m, |Z|], values 0 and 1."""
        values = np.stack(np.unravel_index(np.arange(self.num_cells), self.sizes))
        pairs = itertools.combinations(range(len(self.sizes)), 2)
        return np.array(
            [
                (values[i] == a) & (values[j] == b)
                for i, j in pairs
                for a in range(self.sizes[i])
                for b in range(self.sizes[j])
            ],
            dtype=np.float64,
        )


def text_table(folder: Path) -> Table:
    """The table of a folder's train.jsonl: label, lengths, some words, first letter.

    Each line is an object with an integer label and a sentence or text; the set of labels is public.

    Raises:
      ValueError: no such file, or a line without label or text.
    """
    path = Path(folder) / "train.jsonl"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; give a folder with a train.jsonl of labelled texts."
        )
    rows = np.array(list(_rows(path)), dtype=np.int64)
    sizes = (int(rows[:, 0].max()) + 1, 4, 3, 2, 2, 2, LETTERS)
    names = ("label", "words", "word length", "comma", "negation", "article", "letter")
    return Table(names, sizes, rows)


def _rows(path: Path) -> Iterator[tuple[int, ...]]:
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            values = json.loads(line)
            text = values.get("sentence", values.get("text"))
            if not isinstance(text, str) or not isinstance(values.get("label"), int):
                raise ValueError(
                    f"{path}, line {number}: needs an integer label and a sentence or text."
                )
            yield (values["label"], *_categories(text))


def _categories(text: str) -> tuple[Any, ...]:
    words = text.lower().split() or [""]
    length = sum(map(len, words)) / len(words)
    letter = ord(words[0][:1] or " ") - ord("a")
    return (
        int(np.searchsorted([4, 8, 16], len(words), side="right")),
        int(np.searchsorted([4.0, 5.0], length, side="right")),
        "," in text,
        not NEGATIONS.isdisjoint(words),
        not {"a", "an", "the"}.isdisjoint(words),
        letter if 0 <= letter < LETTERS - 1 else LETTERS - 1,
    )
