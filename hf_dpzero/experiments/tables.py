"""Comparisons as Markdown, in the shape of the DPZero paper's Tables 2, 3 and 9, and as plots.

`markdown` is one comparison: methods down, epsilons across. Figures are cut off,
never rounded up, so that no table says more than what was measured; a spent epsilon is rounded up, so
that none says less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dpzero.experiments.results import STATUSES, Cell, Record, known
from hf_dpzero.reporting.model_card import new_figure
from hf_dpzero.reporting.wording import EXAMPLE, delta_words, relation_words, round_up

TABLE_FILE = "comparison.md"
PLOT_FILE = "comparison.png"
NONE = "–"
INFINITY = "∞"


def grid(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; the first column is text, the others are figures.

    >>> print(grid(["a", "b"], [["x|y", "1"]]))
    | a | b |
    |---|---:|
    | x\\|y | 1 |
    """
    rule = "|".join(["---", *["---:"] * (len(head) - 1)])
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, *body)]
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def score(cell: Cell | None) -> str:
    """Returns mean ± standard error in per cent, and how many runs are missing from it.

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
    """Returns a share in per cent with two decimals, cut off.

    >>> percent(0.29), percent(0.87698)
    ('29.00', '87.69')
    """
    return _cut(100 * share, 2)


def seconds(value: float) -> str:
    """Returns at most three significant digits, cut off.

    >>> seconds(0.34567), seconds(12.3999), seconds(1234.5)
    ('0.345', '12.3', '1234')
    """
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return _cut(value, max(0, digits))


def _cut(value: float, digits: int) -> str:
    # 29 per cent are 28.999999999999996 in binary: what fractions lose is added first.
    return f"{math.floor(value * 10**digits + 1e-7) / 10**digits:.{digits}f}"


_COSTS: tuple[tuple[str, Callable[[list[float]], float], Callable[[float], str]], ...] = (
    ("seconds_per_step", statistics.fmean, seconds),
    ("peak_memory_bytes", max, lambda size: str(int(size // 2**20))),
    ("forwards", max, lambda count: f"{math.floor(count):,}"),
    ("backwards", max, lambda count: f"{math.floor(count):,}"),
)
"""Figure of a cell, which one of several epsilons stands for the method, and how it is written."""


def _at(epsilon: float) -> str:
    return f"ε = {INFINITY if math.isinf(epsilon) else f'{epsilon:.12g}'}"


def markdown(record: Record) -> str:
    """Returns heading, table, what its figures are, the methods, and runs that failed or are missing."""
    lists = {"Settings:": [_settings(method) for method in record.settings["methods"]]}
    if overrides := " ".join(record.settings["overrides"]):
        lists["Settings:"].append(f"- all of them: `{overrides}`")
    failed = [
        f"- {row.method}, {_at(row.target_epsilon)}, seed {row.seed}: **{row.status}** "
        f"({STATUSES.get(row.status, row.status)}): {row.error}"
        for row in record.rows
        if not row.done
    ]
    lists[f"Runs that do not count ({len(failed)}):"] = failed
    pending = [f"- {name}" for name in record.pending]
    lists[f"Runs that are still to be made ({len(pending)}):"] = pending
    title = f"# {record.settings['task']}: {', '.join(record.methods)}"
    parts = ["\n".join([head, "", *lines]) for head, lines in lists.items() if lines]
    return "\n\n".join([title, table(record), *_caption(record), *parts]) + "\n"


def _settings(method: Mapping[str, Any]) -> str:
    """Returns a line of the list: where a method's settings come from, and those that decide."""
    values = [
        f"{name}: {'chosen in each run' if value is None else f'{value:g}'}"
        for name, value in method.get("settings", {}).items()
    ]
    words = [f"`{method['source']}`", *([", ".join(values)] if values else [])]
    warned = [f"**{unsearched(method)}**"] if method.get("left_out") else []
    return f"- {method['name']}: {'; '.join([*words, *warned])}"


def unsearched(method: Mapping[str, Any]) -> str:
    """Returns what a method's figures are worth where its rate or clip is a default."""
    names = " and ".join(method["left_out"])
    return (
        f"its {names} {'are defaults' if len(method['left_out']) > 1 else 'is a default'} that nothing "
        "chose for this task, where dpzero chooses its own: its figures say little until a recipe gives "
        "them"
    )


def table(record: Record) -> str:
    """Returns one row a method: scores by epsilon, and what they cost."""
    names = sorted({row.metric for row in record.rows if row.metric})
    metric = f"{' / '.join(names) or 'accuracy'} (%)"
    head = ["method", *(f"{metric}, {_at(e)}" for e in record.epsilons)]
    head += ["epsilon spent", "s/step", "peak MiB", "example-forwards", "example-backwards"]
    body = []
    for method in record.methods:
        cells = [cell for cell in record.cells if cell.method == method]
        spent = sorted(known(cells, "epsilon_spent"))
        line = [method, *(score(record.cell(method, epsilon)) for epsilon in record.epsilons)]
        line.append(" / ".join(INFINITY if math.isinf(e) else round_up(e) for e in spent) or NONE)
        for figure, of, show in _COSTS:
            values = known(cells, figure)
            line.append(show(of(values)) if values else NONE)
        body.append(line)
    for cell in record.zero_shot:  # at any epsilon: nothing was learnt from the private rows
        scores = [score(cell)] * len(record.epsilons)
        body.append([cell.method, *scores, "0", NONE, NONE, NONE, NONE])
    return grid(head, body)


def _caption(record: Record) -> list[str]:
    seeds = ", ".join(str(seed) for seed in record.settings["seeds"])
    private = "No method here is private (ε = ∞)."
    if (relation := record.settings["neighboring_relation"]) is not None:
        unit = record.settings.get("privacy_unit", EXAMPLE)
        done = [row for row in record.rows if row.private and row.done]
        deltas = {delta_words(row.delta) for row in done if row.delta is not None}
        private = (
            f"Each epsilon is that of one run, at δ = "
            f"{', '.join(sorted(deltas)) or record.settings['delta']} under "
            f"{relation_words(relation, unit)}; it does not add up the runs of the table, "
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
        "(K + 1 with forward differences) for zeroth-order methods and steps x B for first-order ones, "
        "which take as many backward passes too, counted beside them. Seconds and memory of private "
        "runs depend on their secret batches, and no epsilon covers them.",
    ]
    if (jobs := max((row.jobs for row in record.rows), default=1)) > 1:
        texts.append(f"Up to {jobs} runs shared the machine: seconds per step are noisy.")
    return texts


# ---- plots


def plot_comparison(record: Record, folder: Path) -> Path | None:
    """Draws comparison.png: score against epsilon, and score against peak memory.

    Private methods are points with error bars (standard error) joined by lines; methods without
    privacy and zero-shot models are horizontal lines.

    Returns:
      Its path, or None if no run has finished.
    """
    if all(cell.mean is None for cell in record.cells):
        return None
    figure = new_figure(2)
    left, right = figure.subplots(1, 2)
    for index, method in enumerate(record.methods):
        colour, line = f"C{index % 10}", list[tuple[float, float, float]]()
        for cell in record.cells:
            if cell.method != method or cell.mean is None:
                continue
            score, error = 100 * cell.mean, 100 * (cell.standard_error or 0.0)
            if math.isinf(cell.epsilon):
                left.axhline(score, label=f"{method} (ε = ∞)", linestyle="--", color=colour)
            else:
                line.append((cell.epsilon, score, error))
            if cell.peak_memory_bytes is not None:
                at = cell.peak_memory_bytes / 2**20, score
                right.errorbar(*at, yerr=error, marker="o", capsize=3, color=colour)
                right.annotate(
                    _at(cell.epsilon), at, xytext=(5, 4), textcoords="offset points", fontsize=6
                )
        if line:
            columns = zip(*sorted(line), strict=True)
            left.errorbar(*columns, marker="o", capsize=3, label=method, color=colour)
    for cell in record.zero_shot:
        left.axhline(100 * (cell.mean or 0.0), linestyle=":", color="grey", label=cell.method)
    if finite := [e for e in record.epsilons if math.isfinite(e)]:
        left.set_xscale("log")
        left.set_xticks(finite, [f"{e:g}" for e in finite])
        left.minorticks_off()
        left.set_xlim(min(finite) / 1.3, max(finite) * 1.3)
    left.set(xlabel="ε", ylabel="score (%)")
    left.grid(alpha=0.3)
    if left.get_legend_handles_labels()[1]:
        left.legend(fontsize=7)
    right.set(xlabel="peak memory of training steps (MiB)", ylabel="score (%)")
    right.margins(x=0.1)
    right.grid(alpha=0.3)
    figure.savefig(folder / PLOT_FILE, dpi=120)
    return folder / PLOT_FILE
