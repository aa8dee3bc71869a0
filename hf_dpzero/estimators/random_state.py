"""Keeps global random generators out of the private step, in both directions.

Collators and datasets may draw from the global generators (masking, augmentation). A public seed
would let one example shift the masks of all others, and the generators' state, which Hugging Face
writes into checkpoints, would tell how many numbers the private data consumed. Inside
`isolated_randomness` the global generators run on fresh operating-system entropy; outside, they
are as they were.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import secrets
from collections.abc import Iterator

import numpy as np
import torch

_entropy: contextvars.ContextVar[int | None] = contextvars.ContextVar("entropy", default=None)


@contextlib.contextmanager
def drawing_from(entropy: int | None) -> Iterator[None]:
    """Inside, `isolated_randomness` runs the generators on this entropy; None leaves it fresh.

    Args:
      entropy: secret, and of one use: what is drawn inside repeats with it.
    """
    token = _entropy.set(entropy)
    try:
        yield
    finally:
        _entropy.reset(token)


@contextlib.contextmanager
def isolated_randomness(seed: int | None = None) -> Iterator[None]:
    """Another state for torch's, numpy's and Python's global generators; restored on exit.

    Args:
      seed: of the state, for trials that are repeated alike; None takes fresh secret entropy
        (or that of `drawing_from`).
    """
    given = _entropy.get() if seed is None else seed
    entropy = secrets.randbits(128) if given is None else given
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    # numpy has no public name for the generator behind np.random.rand
    legacy, python = np.random.mtrand._rand, random.getstate()
    state = legacy.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            words = np.random.SeedSequence(entropy).generate_state(2 + len(devices), np.uint64)
            torch.default_generator.manual_seed(int(words[0] >> np.uint64(1)))
            for device in devices:
                seed_of = int(words[2 + device] >> np.uint64(1))
                torch.cuda.default_generators[device].manual_seed(seed_of)
            legacy.seed(np.random.SeedSequence([entropy, 1]).generate_state(4))  # 128 bits
            random.seed(int(words[1]))
            yield
        finally:
            legacy.set_state(state)
            random.setstate(python)
