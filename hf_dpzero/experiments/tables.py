"""Comparisons as Markdown, in the shape of the DPZero paper's Tables 2, 3 and 9.

`markdown` is one comparison: methods down, epsilons across. `merge` puts several tasks into one table:
methods down, tasks across. Figures are cut off, never rounded up, so that no table says more than what
was measured; a spent epsilon is rounded up, so that none says less.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from hf_dpzero.experiments.aggregate import JSON_FILE, Cell, Record
from hf_dpzero.experiments.plots import PLOT_FILE, plot_tasks
from hf_dpzero.experiments.results import STATUSES, Row
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.reporting.model_card import optional_plot
from hf_dpzero.reporting.wording import delta_words, relation_words, round_up
from hf_dpzero.values import encode

TABLE_FILE = "comparison.md"
Records = Sequence[tuple[str, Record]]
NONE = "–"
INFINITY = "∞"


def grid(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are figures.

    Args:
      head: names of the columns.
      body: rows, as long as the head.

    Returns:
      Lines without an end.

    >>> print(grid(["a", "b"], [["x|y", "1"]]))
    | a | b |
    |---|---:|
    | x\\|y | 1 |
    """
    rule = "|".join(["---", *["---:"] * (len(head) - 1)])
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, *body)]
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def score(cell: Cell | None) -> str:
    """Mean ± standard error in per cent, and how many runs are missing from it.

    >>> score(Cell(method="m", epsilon=2.0, planned=3, finished=2, mean=0.8769, standard_error=0.004))
    '87.69 ± 0.40 (2 of 3)'
    """
    if cell is None:
        return NONE
    some = "" if cell.finished == cell.planned else f" ({cell.finished} of {cell.planned})"
    if cell.mean is None:
        return f"none{some}"
    error = "" if cell.standard_error is None else f" ± {percent(cell.standard_error)}"
    return f"{percent(cell.mean)}{error}{some}"


def percent(share: float) -> str:
    """In per cent with two decimals, cut off.

    >>> percent(0.29), percent(0.87698)
    ('29.00', '87.69')
    """
    return _cut(100 * share, 2)


def seconds(value: float) -> str:
    """At most three significant digits, cut off.

    >>> seconds(0.34567), seconds(12.3999), seconds(1234.5)
    ('0.345', '12.3', '1234')
    """
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return _cut(value, max(0, digits))


def _mebibytes(value: float) -> str:
    return str(int(value // 2**20))


def _count(value: float) -> str:
    return f"{math.floor(value):,}"


def _spent(epsilon: float) -> str:
    return INFINITY if math.isinf(epsilon) else round_up(epsilon)


def _cut(value: float, digits: int) -> str:
    """`value` down to so many decimals, after taking off what binary fractions add."""
    return f"{math.floor(value * 10**digits + 1e-7) / 10**digits:.{digits}f}"


def _at(epsilon: float) -> str:
    return f"ε = {INFINITY if math.isinf(epsilon) else f'{epsilon:.12g}'}"


def markdown(record: Record) -> str:
    """Heading, table, what the figures are, the methods, and the runs that failed or are missing."""
    title = f"# {record.settings['task']}: {', '.join(record.methods)}"
    lines = [f"- {method['name']}: `{method['source']}`" for method in record.settings["methods"]]
    if overrides := " ".join(record.settings["overrides"]):
        lines.append(f"- all of them: `{overrides}`")
    parts = [title, table(record), *_caption(record), "\n".join(["Settings:", "", *lines])]
    failed = [f"- {_failure(row)}" for row in record.rows if not row.done]
    if failed:
        parts.append("\n".join([f"Runs that do not count ({len(failed)}):", "", *failed]))
    if record.pending:
        lines = [f"- {name}" for name in record.pending]
        parts.append("\n".join([f"Runs that are still to be made ({len(lines)}):", "", *lines]))
    return "\n\n".join(parts) + "\n"


def table(record: Record) -> str:
    """One row a method: scores by epsilon, and what they cost."""
    names = sorted({row.metric for row in record.rows if row.metric})
    metric = f"{' / '.join(names) or 'accuracy'} (%)"
    head = ["method", *(f"{metric}, {_at(e)}" for e in record.epsilons)]
    head += ["epsilon spent", "s/step", "peak MiB", "example-forwards", "example-backwards"]
    body = [_method_row(record, method) for method in record.methods]
    for cell in record.zero_shot:  # at any epsilon: nothing was learnt from the private rows
        scores = [score(cell)] * len(record.epsilons)
        body.append([cell.method, *scores, "0", NONE, NONE, NONE, NONE])
    return grid(head, body)


def _method_row(record: Record, method: str) -> list[str]:
    cells = [cell for cell in record.cells if cell.method == method]

    def shown(figure: str, show: Callable[[float], str], of: Callable[..., float] = max) -> str:
        known = [value for c in cells if (value := getattr(c, figure)) is not None]
        return show(of(known)) if known else NONE

    spent = sorted(cell.epsilon_spent for cell in cells if cell.epsilon_spent is not None)
    return [
        method,
        *(score(record.cell(method, epsilon)) for epsilon in record.epsilons),
        " / ".join(map(_spent, spent)) or NONE,
        shown("seconds_per_step", seconds, statistics.fmean),
        shown("peak_memory_bytes", _mebibytes),
        shown("forwards", _count),
        shown("backwards", _count),
    ]


def _caption(record: Record) -> list[str]:
    seeds = ", ".join(str(seed) for seed in record.settings["seeds"])
    private = "No method here is private (ε = ∞)."
    if record.relation is not None:
        done = [row for row in record.rows if row.private and row.done]
        deltas = {delta_words(row.delta) for row in done if row.delta is not None}
        private = (
            f"Each epsilon is that of one run, at δ = "
            f"{', '.join(sorted(deltas)) or record.settings['delta']} under "
            f"{relation_words(record.relation, 'example')}; it does not add up the runs of the table, "
            "which on private data would all be paid for. Private runs cannot be repeated bit for bit, "
            "by design: their noise and their batches come from the operating system's entropy, "
            "whatever the seed."
        )
    memory = "resident in the process, libraries included"
    if any(row.device == "cuda" for row in record.rows):
        memory = "allocated by torch on the GPU"
    texts = [
        f"Mean ± standard error (sample standard deviation / √n) over seeds {seeds}; a seed sets "
        "the draw of the training rows, fresh weights and the public directions. Figures are cut "
        "off, not rounded; spent epsilons are rounded up.",
        private,
        "s/step is the mean over runs of the median training step, evaluation left out. Peak memory "
        f"is that of the training steps, as {memory}. Example-forwards are steps x B x 2K "
        "for zeroth-order methods and steps x B for first-order ones, which take as many backward "
        "passes too, counted beside them. Seconds and memory of private runs depend on their secret "
        "batches, and no epsilon covers them.",
    ]
    if record.jobs > 1:
        texts.append(f"Up to {record.jobs} runs shared the machine: seconds per step are noisy.")
    return texts


def _failure(row: Row) -> str:
    run = f"{row.method}, {_at(row.target_epsilon)}, seed {row.seed}"
    return f"{run}: **{row.status}** ({STATUSES.get(row.status, row.status)}): {row.error}"


def merge(folders: Sequence[str | os.PathLike[str]], output_dir: str | os.PathLike[str]) -> str:
    """Writes comparison.json, comparison.md and comparison.png of all tasks.

    Args:
      folders: of comparisons; each is named by its task, or by its folder where two are of one task.
      output_dir: another folder.

    Returns:
      The Markdown.

    Raises:
      FileNotFoundError: a folder holds no comparison.
      ValueError: none or one folder, or their epsilons are of different neighbouring relations.
    """
    loaded = [Record.load(folder) for folder in folders]
    tasks = [str(record.settings["task"]) for record in loaded]
    folder_names = [Path(folder).name for folder in folders]
    pairs = zip(tasks, folder_names, strict=True)
    names = [folder if tasks.count(task) > 1 else task for task, folder in pairs]
    records = list(zip(names, loaded, strict=True))
    if len(records) < 2:
        raise ValueError(f"{len(records)} comparison to merge; give the folders of two or more.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]!r} stands for two comparisons; rename one of their folders.")
    private = [(name, record.relation) for name, record in records if record.relation]
    for name, relation in private:
        if relation != private[0][1]:
            raise ValueError(
                f"{private[0][0]} and {name} mean different things by epsilon: neighboring_relation "
                f"is {private[0][1]} in the first and {relation} in the second."
            )
    target = Path(output_dir)
    if target.resolve() in {Path(folder).resolve() for folder in folders}:
        raise ValueError(f"--output_dir {output_dir} is one of the folders; name another one.")
    target.mkdir(parents=True, exist_ok=True)
    text = _merged_markdown(records)
    write_atomically(target / TABLE_FILE, text)
    summary = encode({"tasks": {name: asdict(record) for name, record in records}})
    write_atomically(target / JSON_FILE, json.dumps(summary, indent=1) + "\n")
    with optional_plot(PLOT_FILE):
        plot_tasks(records, target)
    return text


def _merged_markdown(records: Records) -> str:
    """Scores, tasks across; down the methods as they first appear; then each task's own table."""
    keys = dict.fromkeys((c.method, c.epsilon) for _, record in records for c in record.cells)
    methods = list(dict.fromkeys(method for method, _ in keys))
    body = [
        [f"{method}, {_at(epsilon)}", *(score(r.cell(method, epsilon)) for _, r in records)]
        for method, epsilon in sorted(keys, key=lambda key: (methods.index(key[0]), -key[1]))
    ]
    for name in dict.fromkeys(cell.method for _, record in records for cell in record.zero_shot):
        cells = (next((c for c in r.zero_shot if c.method == name), None) for _, r in records)
        body.append([name, *map(score, cells)])
    names = [name for name, _ in records]
    scores = grid(["method, score (%)", *names], body)
    return "\n\n".join([f"# {', '.join(names)}", scores, *(f"#{markdown(r)}" for _, r in records)])
