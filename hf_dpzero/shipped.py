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
    """Where the package's "recipes" or "configs" are; a folder that is not there if it has none."""
    inside, checkout = PACKAGE / f"_{kind}", PACKAGE.parent
    return checkout / kind if (checkout / "setup.cfg").is_file() else inside


def shipped_file(path: str | Path, kind: str) -> Path | None:
    """The shipped file that a name means, or None.

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
    """Every shipped recipe by its name, such as "sst2/minilm-dpzero"; bases (`_*.yaml`) left out."""
    folder = shipped_folder("recipes")
    paths = sorted(folder.rglob("[!_]*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def find_recipe(path: str | Path) -> Path:
    """A local recipe, or the shipped one of that name.

    Args:
      path: of a file, .yaml may be left out; or a name as in `shipped_recipes`.

    Returns:
      The file. A local file goes before a shipped one.

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
    near = _near(str(path))
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise FileNotFoundError(
        f"recipe {str(path)!r} not found: {hint}Give the path of a YAML file, or a name that "
        "`hf-dpzero recipes` lists."
    )


def find_config(path: str | Path) -> Path:
    """A local file, or the shipped config of that name; the path itself where there is neither."""
    local = Path(path)
    return local if local.is_file() else shipped_file(path, "configs") or local


def _file(path: Path) -> Path | None:
    """The path, or with .yaml behind it, if it is a file."""
    names = [path.name] if path.suffix in SUFFIXES else [path.name, f"{path.name}.yaml"]
    return next((p for p in map(path.with_name, names) if p.is_file()), None) if path.name else None


def _near(path: str) -> list[str]:
    """Up to three shipped names like a path; those that share its last part come first."""
    word = path.removeprefix("recipes/").removesuffix(".yaml").removesuffix(".yml")
    names = list(shipped_recipes())
    same_end = [name for name in names if name.split("/")[-1] == word.split("/")[-1]]
    return list(dict.fromkeys([*difflib.get_close_matches(word, names, 3, 0.7), *same_end]))[:3]
