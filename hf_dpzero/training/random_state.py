"""Keeps global random generators out of the private step, in both directions.

Collators and datasets may draw from the global generators (masking, augmentation). A public seed
would let one example shift the masks of all others, and the generators' state, which Hugging Face
writes into checkpoints, would tell how many numbers the private data consumed. Inside
`isolated_randomness` the global generators run on fresh operating-system entropy; outside, they
are as they were.
"""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def isolated_randomness() -> Iterator[None]:
    """Fresh secret state for torch's, numpy's and Python's global generators; restored on exit."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    legacy, python = np.random.mtrand._rand, random.getstate()
    state = legacy.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            torch.default_generator.manual_seed(secrets.randbits(63))
            for device in devices:
                torch.cuda.default_generators[device].manual_seed(secrets.randbits(63))
            fresh = np.random.MT19937(np.random.SeedSequence(secrets.randbits(128)))
            legacy.set_state(np.random.RandomState(fresh).get_state())
            random.setstate(random.Random(secrets.randbits(128)).getstate())
            yield
        finally:
            legacy.set_state(state)
            random.setstate(python)
