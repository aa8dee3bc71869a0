"""`python -m scripts.checks_reference` writes the checks before step 0 to docs/privacy_reference.md."""

from __future__ import annotations

import re
from pathlib import Path

from hf_dpzero.checks.table import CHECKS, Check

PAGE = Path(__file__).resolve().parent.parent / "docs" / "privacy_reference.md"
BETWEEN = re.compile(r"(?<=<!-- checks: begin -->\n).*?(?=<!-- checks: end -->)", re.DOTALL)


def line(check: Check) -> str:
    """The check as an item of a list; runs are named where it is not made in all."""
    runs = "" if check.when == "always" else f" ({check.when})"
    passes = f" (passes: up to {check.passes})" if check.passes else ""
    return f"- **{check.name}**{runs}: {check.rules_out}{passes}\n"


def page() -> str:
    """Returns docs/privacy_reference.md with the checks, in the order in which they are made."""
    lines = "".join(line(check) for check in CHECKS)
    return BETWEEN.sub(lambda _: lines, PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
