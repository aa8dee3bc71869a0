"""What a comparison shows while it runs."""

from __future__ import annotations

from typing import Any

from hf_dpzero.experiments.results import Row
from hf_dpzero.experiments.runner import Attempt
from hf_dpzero.experiments.tables import percent


class Lines:
    """A line on stderr for each run that has ended, and one with a clock for each that runs.

    Args:
      total: runs of the grid.
      before: those that need not be run.
    """

    def __init__(self, total: int, before: int) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._total, self._ended = total, before
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Lines:
        if self._ended:
            self._print(f"{self._ended} of {self._total} runs are in the table already")
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def started(self, attempt: Attempt) -> None:
        """Adds the line of a run with its clock."""
        name = attempt.folder.name
        continued = f" from {attempt.checkpoint.name}" if attempt.checkpoint else ""
        self._tasks[name] = self._progress.add_task(f"{name}{continued}", total=None)

    def ended(self, attempt: Attempt, row: Row) -> None:
        """Turns it into what the run came to."""
        name = attempt.folder.name
        self._progress.remove_task(self._tasks.pop(name))
        self._ended += 1
        told = came_to(row)
        self._print(
            f"[{self._ended}/{self._total}] {name}: {told} in {row.wall_seconds or 0:.0f} s"
        )

    def _print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def came_to(row: Row) -> str:
    """The score of a run that counts, else its status and error."""
    if row.done and row.score is not None:
        return f"{row.metric} {percent(row.score)} %"
    return f"{row.status}: {row.error}"
