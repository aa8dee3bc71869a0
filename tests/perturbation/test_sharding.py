"""A part of a tensor moves as the whole tensor does there, wherever it begins; processes are played."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch

from hf_dpzero.perturbation import sharding
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.perturbation.parts import GridParts, RoundedParts

SIZE, LAMBDA = 7000, 1e-2
CUTS = [0, 1, 33, 64, 3200, 3207, 5000, 5000, SIZE]
"""Rows of 32 begin at some; one part is empty, one is shorter than a row."""
FIRST, SECOND = Direction(5, 0, 0), Direction(5, 0, 1)


def space_of(values: torch.Tensor, distribution: str) -> ParameterSpace:
    named = [("before", torch.ones(10)), ("w", values)]
    return ParameterSpace(named, distribution=distribution, smoothing=LAMBDA)


def part_of(values: torch.Tensor, start: int, stop: int, distribution: str) -> ParameterSpace:
    """The space of the whole tensor, of which only elements start .. stop lie here."""
    space, here = space_of(values.clone(), distribution), values[start:stop].clone()
    whole = float(values.float().abs().max())
    kind = GridParts if values.dtype == torch.float32 else RoundedParts
    segment = kind([here], [space.offsets[1]], [start], [1], lambda value: max(value, whole))
    space._segments = [segment]
    space._grids = [segment] if hasattr(segment, "exponents") else []
    space._follow_storage_ = lambda: None
    space.tensors = [here]
    return space


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "sphere"])
def test_parts_move_bit_for_bit_with_the_whole(monkeypatch, distribution, dtype, compiled):
    if not compiled:
        monkeypatch.setattr(dispatch, "_cpu_kernels", lambda: None)
    values = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = space_of(values.clone(), distribution)
    spans = list(itertools.pairwise(CUTS))
    parts = [part_of(values, *span, distribution) for span in spans]
    moves = [
        lambda s: s.snap_(),
        lambda s: s.move_to_(((FIRST, LAMBDA),)),
        lambda s: s.move_to_(((SECOND, -LAMBDA),)),
        lambda s: s.step_([FIRST, SECOND], [0.01, -0.003], decay=0.1),
        lambda s: s.step_([FIRST, SECOND], [0.02, 0.003], defer=True, ages=[3, 1]),
        lambda s: s.move_to_(((FIRST, LAMBDA / 2),)),
        lambda s: s.settle_(),
    ]
    seen = []
    for number, move in enumerate(moves):
        for space in (whole, *parts):
            move(space)
        for space, (start, stop) in zip(parts, spans, strict=True):
            assert torch.equal(space.tensors[0], whole.tensors[1][start:stop]), (number, start)
        seen.append(whole.tensors[1].clone())
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert changed == [True, True, True, False, True, True]  # an update waits for the next move


def test_a_grid_follows_the_largest_of_all_parts():
    """Here 0.1 alone would have a grid eight times as fine; another part holds 0.9."""
    values = torch.full((64,), 0.1)
    values[-1] = 0.9
    part = part_of(values, 0, 32, "rademacher")
    alone = part_of(values[:32], 0, 32, "rademacher")
    for space in (part, alone):
        space.snap_()
    assert part._grids[0].exponents[0] == 1 and alone._grids[0].exponents[0] == -2


def test_plain_tensors_pass_through():
    tensor = torch.arange(6.0).view(2, 3)
    assert not sharding.is_sharded(tensor) and sharding.mesh_of(tensor) is None
    assert sharding.local(tensor) is tensor and sharding.whole(tensor) is tensor
    assert sharding.own_part("w", tensor) == (tensor, 0)
    assert math.isnan(sharding.largest_over(tensor)(math.nan))
    assert sharding.own_class(torch.nn.Linear(1, 1)) is torch.nn.Linear
    done = []
    sharding.on_first([tensor], lambda: done.append(1))
    assert done == [1]


ONE_PROCESS = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.ledger.digests import checksums, digest_model
from hf_dpzero.perturbation import sharding
from hf_dpzero.perturbation.parameter_space import ParameterSpace

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
plain, cut = nn.Linear(5, 3), nn.Linear(5, 3)
cut.load_state_dict(plain.state_dict())
before = digest_model(plain)
fully_shard(cut)
assert sharding.is_sharded(cut.weight) and sharding.own_class(cut) is nn.Linear
assert digest_model(cut) == before
assert checksums(cut.named_parameters()) == checksums(plain.named_parameters())
assert torch.equal(sharding.whole(cut.weight), plain.weight)
space = ParameterSpace.from_model(cut)
assert space.sharded and space.dimension == 18
space.check_is_of(cut)
cut.bias.data.fill_(float("nan"))
try:
    space.snap_()
except ValueError as error:
    assert "a parameter holds inf" in str(error), error
else:
    raise AssertionError("NaN was taken")
mesh = cut.weight.device_mesh
for place in (Replicate(), Shard(1)):
    try:
        sharding.own_part("w", distribute_tensor(torch.ones(4, 4), mesh, [place]))
    except ValueError as error:
        assert "w is placed as" in str(error) and "fsdp_version: 2" in str(error)
    else:
        raise AssertionError(place)
for strategy in ("layerwise", "stacked"):
    try:
        FiniteDifferences(cut, space, lambda m, x: m(x["x"]).sum(1), 1e-3, strategy=strategy)
    except ValueError as error:
        assert "whole_model" in str(error)
    else:
        raise AssertionError(strategy)
chosen = FiniteDifferences(cut.bfloat16(), space, lambda m, x: m(x["x"]).sum(1), 1e-3)
assert chosen.strategy == "whole_model" and chosen.prefix is None
asked = []
sharding.on_first(list(cut.parameters()), lambda: asked.append(sharding.whole(cut.weight).shape))
assert asked == [(3, 5)]
print("all of it", flush=True)
dist.destroy_process_group()
os._exit(0)  # torch's threads may outlive the interpreter's end
"""


PLAYED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from hf_dpzero.perturbation import sharding

for rank, rows in enumerate([2, 2, 1, 0]):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    mesh, here = init_device_mesh("cpu", (4,)), torch.ones(rows, 3)
    cut = DTensor.from_local(here, mesh, [Shard(0)], shape=torch.Size([5, 3]), stride=(3, 1))
    part = sharding.own_part("w", cut)
    assert part.tensor.shape == here.shape
    print("begins at", part.first)
    dist.destroy_process_group()
"""


def test_a_part_begins_after_those_of_the_processes_before_it():
    """Four processes of five rows of three; the last one has none. The others are played."""
    begins = [int(word) for word in in_own_process(PLAYED).split("begins at ")[1:]]
    assert begins == [0, 6, 12, 0]


def in_own_process(code, *words):
    """What code prints; a process group cannot be taken back without traces."""
    found = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


@pytest.mark.slow
def test_dtensors_of_one_process():
    assert "all of it" in in_own_process(ONE_PROCESS)
