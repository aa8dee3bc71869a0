"""`hf-dpzero init --train_file FILE --target_epsilon E`: a starter recipe, or script, for a file."""

from __future__ import annotations

import filecmp
import math
from pathlib import Path

from hf_dpzero.cli.options import Init


def run(arguments: Init) -> None:
    """Reads the columns, counts n, writes the starter and says what to do next."""
    from hf_dpzero.recipes.starter import Starter, detect_columns
    from hf_dpzero.tasks.rows import read_rows
    from hf_dpzero.values import positive

    positive(arguments, "target_epsilon", "target_delta")
    _check_numbers(arguments)
    rows = read_rows(Path(arguments.train_file))
    columns = detect_columns(
        rows, arguments.text_column, arguments.text_pair_column, arguments.label_column
    )
    if arguments.validation_file is not None:
        _check_other_file(arguments.train_file, arguments.validation_file)
        _check_same_columns(arguments.validation_file, [*columns.texts, columns.label])
    starter = Starter(
        columns=columns,
        num_examples=len(rows),
        train_file=arguments.train_file,
        validation_file=arguments.validation_file,
        target_epsilon=arguments.target_epsilon,
        target_delta=arguments.target_delta,
        model=arguments.model,
    )
    suffix = ".py" if arguments.script else ".yaml"
    target = Path(arguments.output or f"{Path(arguments.train_file).stem}{suffix}")
    if target.suffix != suffix:
        raise ValueError(f"--output {target}: give a name that ends in {suffix}.")
    texts = {target.name: starter.script()} if arguments.script else starter.recipe(target.name)
    _write({target.with_name(name): text for name, text in texts.items()})
    print(f"{columns}; n = {len(rows):,}")
    print(f"written: {', '.join(str(target.with_name(name)) for name in texts)}")
    if arguments.validation_file is None:
        print("next: put the file of public rows into it (validation_file), to evaluate on")
    print(f"then: {'python' if arguments.script else 'hf-dpzero train'} {target}")


def _check_numbers(arguments: Init) -> None:
    if not math.isfinite(arguments.target_epsilon):
        raise ValueError(
            f"target_epsilon={arguments.target_epsilon} must be a finite number above 0."
        )
    if arguments.target_delta is not None and arguments.target_delta >= 1:
        raise ValueError(
            f"target_delta={arguments.target_delta} must be a number in (0, 1), e.g. 1e-5."
        )


def _check_other_file(train: str, validation: str) -> None:
    if Path(validation).is_file() and filecmp.cmp(train, validation, shallow=False):
        raise ValueError(
            f"validation_file={validation!r} holds the private rows of train_file: give other rows, "
            "which are public."
        )


def _check_same_columns(file: str, wanted: list[str | None]) -> None:
    from hf_dpzero.tasks.rows import read_rows

    there = read_rows(Path(file)).column_names
    for column in wanted:
        if column is not None and column not in there:
            raise ValueError(
                f"{file} has no column {column!r} (it has {', '.join(there)}), as train_file does."
            )


def _write(texts: dict[Path, str]) -> None:
    """Writes new files, all or none; none is overwritten."""
    for path in texts:
        if path.exists():
            raise FileExistsError(f"{path} exists; remove it, or choose another --output.")
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"the folder {path.parent} of --output does not exist; make it."
            )
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
