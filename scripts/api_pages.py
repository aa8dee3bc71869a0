"""An extension of griffe, which reads the package for the API pages (see mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)
"""From a prompt at the left margin to the next empty line."""


class ApiPages(griffe.Extension):
    """Doctests become code blocks; a package lists what it passes on from its modules."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Puts a fence around each doctest.

        Markdown would read a line that begins with `>>>` as a quotation, and a printed list of lists as
        a link.
        """
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(
                lambda block: f"```pycon\n{block[0].rstrip()}\n```\n", obj.docstring.value
            )

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        """Names imported into `__all__` become links: their text stands where they are defined."""
        links = []
        for name in map(str, mod.exports or ()):
            member = mod.members.get(name)
            if isinstance(member, griffe.Alias) and not member.is_module:
                del mod.members[name]
                target = member.final_target
                link = f"[`{name}`][{target.path}]" if target.has_docstring else f"`{name}`"
                links.append(f"[](){{#{mod.path}.{name}}}{link}")  # annotations name this path
        if links:
            text = mod.docstring.value if mod.docstring else ""
            mod.docstring = griffe.Docstring(f"{text}\n\nNames: {', '.join(links)}.", parent=mod)
