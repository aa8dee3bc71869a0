"""MkDocs hook: links into the source, which GitHub follows, lead to the API page of the room."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces `](../hf_dpzero/privacy/noise.py)` by `](api/privacy.md)`.

    >>> on_page_markdown("[noise](../hf_dpzero/privacy/noise.py)")
    '[noise](api/privacy.md)'
    """
    return re.sub(r"\]\(\.\./hf_dpzero/(\w+)/[\w/]+\.py\)", r"](api/\1.md)", markdown)
