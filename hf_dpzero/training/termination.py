"""SIGTERM, which Slurm, Kubernetes and spot machines send some seconds before they kill.

Inside `train` it is only noted. The trainer asks after each step, cuts an evaluation short, writes a
whole checkpoint and raises `Terminated`. Several processes stop after the same step: a step's sums carry
how many of them were asked (`collectives.sum_checked`), in bits that are sent anyway.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

from tqdm.auto import tqdm
from transformers import TrainerCallback

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.parallel import collectives
from hf_dpzero.run import Run
from hf_dpzero.run_folder.checkpoints import complete_checkpoints, step_of
from hf_dpzero.run_folder.folder import check_resumed

EXIT_STATUS = 128 + signal.SIGTERM


class Terminated(SystemExit):
    """Leaves `train` after SIGTERM: with 143, as schedulers know a process that was asked to end.

    `finally` blocks and context managers run, and a script without a handler of its own exits.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_STATUS)


@contextlib.contextmanager
def heeding() -> Iterator[None]:
    """Inside, SIGTERM is noted for `collectives.stop_agreed`, however often; where ignored, it stays so.

    Only the main thread receives signals; in others nothing is changed. One that comes when nothing asks
    any more is delivered on exit, to the handler that stood before.
    """
    before = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    collectives.stop.asked = collectives.stop.heard = False
    if not main or before in (signal.SIG_IGN, None):
        yield
        return

    def note(*_: object) -> None:
        collectives.stop.asked = True

    signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        late, collectives.stop.asked = collectives.stop.asked, False
    if late:
        signal.raise_signal(signal.SIGTERM)


def left_to_parent(worker: int) -> None:
    """Has a loader's worker ignore SIGTERM: whoever sends it to a whole job asks its trainer."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class TerminationCallback(TrainerCallback):
    """Stops before the first step, and in an evaluation of one process.

    Attributes:
      cuts: whether an evaluation may be cut short here: no paid step is lost by that.
    """

    cuts = False

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Nothing has been paid since the start, so nothing is written."""
        self.cuts = True
        if collectives.stop_agreed(ask=True):
            raise Terminated

    def on_step_begin(self, *_: object, **__: object) -> None:
        """From here on the trainer says when."""
        self.cuts = False

    def on_prediction_step(self, *_: object, **__: object) -> None:
        """Several processes would wait for each other, so they evaluate to the end."""
        if self.cuts and not collectives.active() and collectives.stop.asked:
            raise Terminated


def say(run: Run, error: BaseException) -> None:
    """Prints one line on stderr: where a run was stopped, and how it goes on.

    Args:
      run: whose ledger is open.
      error: `Terminated`, Ctrl-C's, or one of a script's, of compute_metrics say.
    """
    ledger, plan = run.ledger, run.plan
    if ledger is None or not collectives.is_main():
        return
    kept = complete_checkpoints(run.output_dir)
    last, at = (str(kept[-1]), step_of(kept[-1])) if kept else ("the base model", 0)
    lost = ledger.next_step - at
    way = "resume_from_checkpoint=True goes on from"
    try:
        check_resumed(plan, ledger)
    except LedgerError as refusal:
        text = str(refusal)
    else:
        if ledger.header["replayable"] or lost <= 0:
            text = f"{way} {last} and the ledger, exactly and at no cost in privacy."
        elif kept:
            text = f"{way} {last}; the updates of {lost} later steps are lost, and they stay paid."
        else:
            text = f"no checkpoint has the weights of {ledger.next_step} steps, which stay paid."
    what = "stopped by SIGTERM" if isinstance(error, Terminated) else "interrupted"
    what = f"stopped by {type(error).__name__}" if isinstance(error, Exception) else what
    tqdm.write(f"{what} after step {ledger.next_step} of {plan.steps}: {text}", file=sys.stderr)
