"""`python -m scripts.checks_reference` writes the checks before step 0 to docs/privacy_reference.md."""

from __future__ import annotations

import re
from pathlib import Path

from hf_dpzero.checks.table import CHECKS
from scripts.markdown import table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "privacy_reference.md"
BETWEEN = re.compile(r"(?<=<!-- checks: begin -->\n).*?(?=<!-- checks: end -->)", re.DOTALL)


HEAD = ("what is looked at", "in which runs", "what is refused", "passes at most")


def page() -> str:
    """Returns docs/privacy_reference.md with the checks, in the order in which they are made."""
    rows = [(c.name, c.when, c.rules_out, c.passes or "") for c in CHECKS]
    return BETWEEN.sub(lambda _: table(HEAD, rows), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
