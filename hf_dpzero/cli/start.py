"""`hf-dpzero recipes` lists what comes with the package; `init` starts from a user's file, and
`certificates` a federation's server.
"""

from __future__ import annotations

import json
from pathlib import Path

from hf_dpzero.cli.options import Certificates, Init, Recipes

_COLUMNS = ("recipe", "task", "model", "method", "privacy", "paper")


def run_recipes(arguments: Recipes) -> None:
    """Prints a table, or with --json all that is known of each recipe."""
    from hf_dpzero.recipes.catalogue import catalogue

    rows = catalogue(arguments.task)
    if arguments.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    lines = [_COLUMNS, *([str(row[name] or "-") for name in _COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    print(
        "\nprivacy: (epsilon, delta). paper: what Zhang et al. 2024 report (arXiv:2310.09639). Run one "
        "by its name:\n  hf-dpzero train quickstart"
    )


def run_init(arguments: Init) -> None:
    """Reads the columns, counts n, writes a starter recipe or script and says what to do next."""
    suffix = ".py" if arguments.script else ".yaml"
    train, public = arguments.train_file, arguments.validation_file
    target = Path(arguments.output or f"{Path(train).stem}{suffix}")
    if target.suffix != suffix:
        raise ValueError(f"--output {target}: give a name that ends in {suffix}.")
    _check_new(target)  # before seconds of imports

    from datasets import DatasetDict

    from hf_dpzero.checks.data import units_of
    from hf_dpzero.recipes.starter import Starter, detect_columns
    from hf_dpzero.settings.config import DPZeroConfig
    from hf_dpzero.tasks.description import DataArguments
    from hf_dpzero.tasks.rows import load_splits, read_rows, require_columns
    from hf_dpzero.values import listed

    epsilon, delta = arguments.target_epsilon, arguments.target_delta
    # Refuses impossible ones.
    DPZeroConfig(use_cpu=True, target_epsilon=epsilon, target_delta=delta)
    held, names = arguments.holdout, listed(arguments.class_names)
    given = DataArguments(train_file=train, validation_file=public, holdout=held, class_names=names)
    unit = arguments.unit_column
    if arguments.script and (held or names or unit):
        raise ValueError(
            "--holdout, --class_names and --unit_column are of recipes: leave --script out."
        )
    splits = load_splits(given, None) if public else DatasetDict(train=read_rows(Path(train)))
    rows, named = splits["train"], (arguments.text_column, arguments.text_pair_column)
    units = len(rows) if unit is None else len(units_of(rows, unit, 1))
    others = rows.remove_columns([unit] if unit else [])
    columns = detect_columns(others, *named, arguments.label_column)
    require_columns(splits, [name for name in (*columns.texts, columns.label) if name])
    if columns.kind == "classification" and held and not (public or names):
        raise ValueError(
            "--holdout without public rows: name all labels in order, such as --class_names a,b. Their "
            "names become public, so they are not read from private rows."
        )
    if unit and columns.kind != "classification":
        raise ValueError(
            f"--unit_column {unit}: a recipe keeps the column of classifications only, and these rows "
            f"are {columns}. Pass a train_dataset with it to DPZeroTrainer."
        )
    starter = Starter(
        columns=columns,
        num_examples=max(1, round(units * (1 - held))),
        train_file=train,
        validation_file=public,
        holdout=held,
        class_names=names,
        unit_column=unit,
        model=arguments.model,
        target_epsilon=epsilon,
        target_delta=delta,
    )
    texts = {target.name: starter.script()} if arguments.script else starter.recipe(target.name)
    files = {target.with_name(name): text for name, text in texts.items()}
    for path in files:  # all or none are written
        _check_new(path)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    print(f"{columns}; n = {'about ' if held else ''}{starter.num_examples:,}")
    print(f"written: {', '.join(map(str, files))}")
    if starter.public_file != public:
        print(f"next: write public rows to evaluate on into {starter.public_file}")
    print(f"then: {'python' if arguments.script else 'hf-dpzero train'} {target}")
    if held:
        out = f"--model_name_or_path out/{target.stem}"
        print(f"then: hf-dpzero evaluate {target} {out} --epsilon {arguments.target_epsilon}")


def run_certificates(arguments: Certificates) -> None:
    """Writes them, or with --check says until when they hold."""
    from hf_dpzero.federated import certificates

    folder = Path(arguments.folder)
    if not arguments.check:
        clients, hosts = arguments.clients or [], arguments.host or []
        made = certificates.make(folder, hosts, clients, arguments.days)
        print(f"written, for your eyes alone: {', '.join(map(str, made))}")
    print(certificates.check(folder))


def _check_new(path: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path} exists; remove it, or choose another --output.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} of --output does not exist; make it.")
