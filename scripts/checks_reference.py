"""The checks before step 0: `python -m scripts.checks_reference` writes them to docs/privacy.md."""

from __future__ import annotations

import re
from pathlib import Path

from hf_dpzero.checks.table import CHECKS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "privacy.md"
BETWEEN = re.compile(r"(?<=<!-- checks: begin -->\n).*?(?=<!-- checks: end -->)", re.DOTALL)


def table() -> str:
    """Returns the checks as Markdown, in the order in which they are made."""
    rows = [
        f"| {check.name} | {check.when} | {check.rules_out} | {check.passes or ''} |"
        for check in CHECKS
    ]
    head = [
        "| what is looked at | in which runs | what is refused | passes at most |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def page() -> str:
    """Returns docs/privacy.md with that table."""
    return BETWEEN.sub(lambda _: table(), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
