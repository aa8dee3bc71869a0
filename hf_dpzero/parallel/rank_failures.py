"""What a process says when the others cannot be reached, or differ from it.

gloo fails at once where a peer's process has ended, and after `ddp_timeout` where one hangs, but names
nobody. torchrun (and so `accelerate launch`) prints which rank ended first and how, and ends the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


class RankError(Exception):
    """Another process failed, or differs from this one. No subclass of RuntimeError: nothing retries."""


def active() -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextlib.contextmanager
def exchanging() -> Iterator[None]:
    """Turns the failure of a collective operation inside into a `RankError` with advice.

    Raises:
      RankError: another process ended, or did not come in time.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"rank {dist.get_rank()} stops, because an exchange with the other processes failed: one of "
            "them ended, or did not come within ddp_timeout. The launcher's last lines name the rank "
            "that ended first and how (exit code -9: killed, or out of memory), and its own output says "
            "more. What was released is in the ledger: start again with resume_from_checkpoint=True, "
            "with as many processes as you like."
        ) from error
