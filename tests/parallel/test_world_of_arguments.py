"""Processes that the arguments do not know of are refused."""

from __future__ import annotations

import types

import pytest
import torch.distributed as dist

from hf_dpzero.parallel import collectives


@pytest.mark.parametrize("known", [1, 3])
def test_another_number_of_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    """Two processes that each believe to be alone would add every row up twice."""
    monkeypatch.setattr(collectives, "active", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    args = types.SimpleNamespace(world_size=known, fsdp=None, n_gpu=0)
    for check in (collectives.check_world, collectives.check_single_strategy):
        with pytest.raises(ValueError, match=f"2 processes were started.*know of {known}.*use_cpu"):
            check(args)
    collectives.check_single_strategy(types.SimpleNamespace(world_size=2, fsdp=None, n_gpu=0))


def test_one_process_needs_no_group() -> None:
    collectives.check_world(types.SimpleNamespace(world_size=1))
