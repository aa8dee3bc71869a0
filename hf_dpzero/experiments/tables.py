"""A comparison as Markdown, in the shape of the DPZero paper's Tables 2, 3 and 9.

Figures are cut off, never rounded up, so that no table says more than what was measured; a spent
epsilon is rounded up, so that none says less.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Iterable, Sequence

from hf_dpzero.experiments.aggregate import Cell, Record
from hf_dpzero.experiments.results import STATUSES, Row
from hf_dpzero.reporting.wording import relation_words, round_up

TABLE_FILE = "comparison.md"
MIB = 2**20
NONE = "–"
INFINITY = "∞"


def markdown(record: Record) -> str:
    """Heading, table, what the figures are, the arms, and the runs that failed or are missing."""
    parts = [f"# {_title(record)}", table(record), *caption(record), arms(record)]
    return "\n\n".join([*parts, *troubles(record)]) + "\n"


def table(record: Record) -> str:
    """One row a method: scores by epsilon, and what they cost."""
    head = ["method", *(f"{_metric(record)}, {at(e)}" for e in record.epsilons)]
    head += ["epsilon spent", "s/step", "peak MiB", "example-forwards", "example-backwards"]
    body = [_method_row(record, method) for method in record.methods]
    body += [_zero_shot_row(record, cell) for cell in record.zero_shot]
    return grid(head, body)


def grid(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are figures.

    >>> print(grid(["a", "b"], [["x|y", "1"]]))
    | a | b |
    |---|---:|
    | x\\|y | 1 |
    """
    rule = "|".join(["---", *["---:"] * (len(head) - 1)])
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, *body)]
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def _method_row(record: Record, method: str) -> list[str]:
    cells = [cell for e in record.epsilons if (cell := record.cell(method, e)) is not None]
    scores = [score(record.cell(method, epsilon)) for epsilon in record.epsilons]
    return [
        method,
        *scores,
        _listed(cells, lambda cell: cell.epsilon_spent, spent),
        _one(_mean(c.seconds_per_step for c in cells), seconds),
        _one(max(_known(c.peak_memory_bytes for c in cells), default=None), mebibytes),
        _one(max(_known(c.forwards for c in cells), default=None), passes),
        _one(max(_known(c.backwards for c in cells), default=None), passes),
    ]


def _zero_shot_row(record: Record, cell: Cell) -> list[str]:
    """It holds at any epsilon: nothing was learnt from the private rows."""
    return [cell.method, *[score(cell)] * len(record.epsilons), "0", NONE, NONE, NONE, NONE]


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
    return _cut(100 * share, "0.01")


def seconds(value: float) -> str:
    """At most three significant digits, cut off.

    >>> seconds(0.34567), seconds(12.3999), seconds(1234.5)
    ('0.345', '12.3', '1234')
    """
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return _cut(value, f"1e-{max(0, digits)}")


def mebibytes(value: float) -> str:
    """Whole MiB, cut off.

    >>> mebibytes(3 * 2**20 + 2**19)
    '3'
    """
    return str(int(value // MIB))


def passes(value: float) -> str:
    """A count with thin separators: 1,280,000."""
    return f"{math.floor(value):,}"


def spent(epsilon: float) -> str:
    """Rounded up to four significant digits; inf is the sign."""
    return INFINITY if math.isinf(epsilon) else round_up(epsilon)


def _cut(value: float, unit: str) -> str:
    """`value` down to a multiple of `unit`, after taking off what binary fractions add."""
    exact = decimal.Decimal(f"{value:.9f}")
    return f"{exact.quantize(decimal.Decimal(unit), rounding=decimal.ROUND_FLOOR):f}"


def _listed(
    cells: Iterable[Cell], figure: Callable[[Cell], float | None], show: Callable[[float], str]
) -> str:
    return " / ".join(show(found) for found in _known(figure(cell) for cell in cells)) or NONE


def _one(value: float | None, show: Callable[[float], str]) -> str:
    return NONE if value is None else show(value)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) / len(known) if known else None


def at(epsilon: float) -> str:
    return f"ε = {INFINITY if math.isinf(epsilon) else f'{epsilon:.12g}'}"


def _metric(record: Record) -> str:
    names = {row.metric for row in record.rows if row.metric}
    return f"{' / '.join(sorted(names)) or 'accuracy'} (%)"


def _title(record: Record) -> str:
    return f"{record.settings['task']}: {', '.join(record.methods)}"


# ---------------------------------------------------------------- what stands under the table


def caption(record: Record) -> list[str]:
    """What the figures are and what they do not say."""
    settings = record.settings
    seeds = ", ".join(str(seed) for seed in settings["seeds"])
    texts = [
        f"Mean ± standard error (sample standard deviation / √n) over seeds {seeds}; a seed sets "
        "the draw of the training rows, fresh weights and the public directions. Figures are cut "
        "off, not rounded; spent epsilons are rounded up.",
        _privacy(record),
        "s/step is the mean over runs of the median training step, evaluation left out. Peak memory "
        f"is that of the training steps, {_memory(record)}. Example-forwards are steps x B x 2K "
        "for zeroth-order methods and steps x B for first-order ones, which take as many backward "
        "passes too, counted beside them. Seconds and memory of private runs depend on their secret "
        "batches, and no epsilon covers them.",
    ]
    jobs = max((row.jobs for row in record.rows), default=1)
    if jobs > 1:
        texts.append(f"Up to {jobs} runs shared the machine: seconds per step are noisy.")
    return texts


def _privacy(record: Record) -> str:
    rows = [row for row in record.rows if row.private and row.done]
    relation = record.settings.get("neighboring_relation")
    if relation is None:
        return "No method here is private (ε = ∞)."
    deltas = ", ".join(sorted({f"{row.delta:.6g}" for row in rows})) or record.settings["delta"]
    return (
        f"Each epsilon is that of one run, at δ = {deltas} under "
        f"{relation_words(relation, 'example')}; it does not add up the "
        "runs of the table, which on private data would all be paid for. Private runs cannot be "
        "repeated bit for bit, by design: their noise and their batches come from the operating "
        "system's entropy, whatever the seed."
    )


def _memory(record: Record) -> str:
    devices = {row.device for row in record.rows if row.device}
    if "cuda" in devices:
        return "as allocated by torch on the GPU"
    return "as resident in the process, libraries included"


def arms(record: Record) -> str:
    """What each method's settings are."""
    lines = [f"- {arm['name']}: `{arm['source']}`" for arm in record.settings["arms"]]
    overrides = " ".join(record.settings["overrides"])
    if overrides:
        lines.append(f"- all of them: `{overrides}`")
    return "\n".join(["Settings:", "", *lines])


def troubles(record: Record) -> list[str]:
    """Paragraphs on runs that did not finish; none if all did."""
    failed = [row for row in record.rows if not row.done]
    parts = []
    if failed:
        lines = [f"- {trouble(row)}" for row in failed]
        parts.append("\n".join([f"Runs that do not count ({len(failed)}):", "", *lines]))
    if record.pending:
        lines = [f"- {name}" for name in record.pending]
        parts.append(
            "\n".join([f"Runs that are still to be made ({len(record.pending)}):", "", *lines])
        )
    return parts


def trouble(row: Row) -> str:
    what = f"{row.method}, {at(row.target_epsilon)}, seed {row.seed}"
    return f"{what}: **{row.status}** ({STATUSES.get(row.status, row.status)}): {row.error}"
