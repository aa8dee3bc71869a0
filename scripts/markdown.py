"""Tables as the pages of the docs have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[Any], lines: Iterable[Sequence[Any]]) -> str:
    """A Markdown table.

    >>> table(["n", "risk"], [[10, "0.5 ± 0.1"]]).splitlines()
    ['| n | risk |', '|---|---|', '| 10 | 0.5 ± 0.1 |']
    """
    body = ["| " + " | ".join(map(str, line)) + " |" for line in (head, *lines)]
    return "\n".join([body[0], "|" + "---|" * len(head), *body[1:]]) + "\n"
