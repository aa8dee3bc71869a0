"""The recipes and configs that come with the package, found by name from any folder.

A wheel has them as `hf_dpzero/_recipes` and `hf_dpzero/_configs` (see setup.py); in a checkout and an
editable install they are the folders `recipes` and `configs` beside the package.
"""

from __future__ import annotations

import difflib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SUFFIXES = (".yaml", ".yml")


def shipped_folder(kind: str) -> Path:
    """Returns where the package's "recipes" or "configs" are; it need not exist."""
    inside, checkout = PACKAGE / f"_{kind}", PACKAGE.parent
    return checkout / kind if (checkout / "setup.cfg").is_file() else inside


def shipped_file(path: str | Path, kind: str) -> Path | None:
    """Returns the shipped file that a name means, or None.

    Args:
      path: inside the folder, with or without the folder's own name in front and .yaml behind:
        "sst2/minilm-dpzero", "recipes/sst2/minilm-dpzero.yaml".
      kind: "recipes" or "configs".

    >>> shipped_file("quickstart", "recipes").name
    'quickstart.yaml'
    """
    parts = Path(path).parts
    if parts[:1] == (kind,):
        parts = parts[1:]
    if not parts or Path(path).is_absolute() or ".." in parts:
        return None
    return _file(shipped_folder(kind).joinpath(*parts))


def shipped_recipes() -> dict[str, Path]:
    """Returns every shipped recipe by its name, such as "sst2/minilm-dpzero"; not bases (`_*.yaml`)."""
    folder = shipped_folder("recipes")
    paths = sorted(folder.rglob("[!_]*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def find_recipe(path: str | Path) -> Path:
    """Finds a local recipe, .yaml may be left out, or else the shipped one of that name.

    Raises:
      FileNotFoundError: neither; names recipes of similar names.
      IsADirectoryError: a folder.
    """
    found = _file(Path(path)) or shipped_file(path, "recipes")
    if found is not None:
        return found
    if Path(path).is_dir():
        raise IsADirectoryError(
            f"recipe {str(path)!r} is a folder; give the path of a YAML file in it."
        )
    # Up to three names like it; those that share its last part are what other tasks call it.
    word = str(path).removeprefix("recipes/").removesuffix(".yaml").removesuffix(".yml")
    names = list(shipped_recipes())
    same_end = [name for name in names if name.split("/")[-1] == word.split("/")[-1]]
    alike = difflib.get_close_matches(word, names, 3, 0.7)
    near = list(dict.fromkeys([*alike, *same_end]))[:3]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise FileNotFoundError(
        f"recipe {str(path)!r} not found: {hint}Give the path of a YAML file, or a name that "
        "`hf-dpzero recipes` lists."
    )


def find_config(path: str | Path) -> Path:
    """Finds a local file, or the shipped config of that name; else returns the path itself."""
    local = Path(path)
    return local if local.is_file() else shipped_file(path, "configs") or local


def _file(path: Path) -> Path | None:
    """Returns the path, or with .yaml behind it, if it is a file."""
    names = [path.name] if path.suffix in SUFFIXES else [path.name, f"{path.name}.yaml"]
    return next((p for p in map(path.with_name, names) if p.is_file()), None) if path.name else None
