"""A write by someone else is noticed: version counters and addresses, or checksums of the bytes."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

from hf_dpzero.estimators.forward_passes import ParameterChanged, ParameterGuard
from hf_dpzero.ledger import digests
from hf_dpzero.ledger.digests import checksums


def two() -> list[tuple[str, nn.Parameter]]:
    return [("first", nn.Parameter(torch.ones(3))), ("second", nn.Parameter(torch.ones(2, 2)))]


@torch.no_grad()
def test_writes_and_new_storage_are_noticed_and_named():
    named = two()
    watch = ParameterGuard(named)
    for write in (
        lambda p: p.add_(1.0),
        lambda p: p.detach().view(-1)[0].zero_(),
        lambda p: setattr(p, "data", p.data.clone()),
    ):
        with watch.watching():  # own writes come before and between
            (named[0][1] * 2).sum()
        with (
            pytest.raises(ParameterChanged, match="^second was written to during a forward pass"),
            watch.watching(),
        ):
            write(named[1][1])


def test_data_swapped_and_put_back_is_no_write():
    """What a layer-by-layer perturbation does: another storage for a while, then its own again."""
    named = two()
    parameter = named[0][1]
    with ParameterGuard(named).watching():
        own, parameter.data = parameter.data, torch.full((3,), 5.0)
        assert parameter.sum() == 15.0
        parameter.data = own


def test_exceptions_come_through():
    named = two()
    with pytest.raises(KeyError), ParameterGuard(named).watching(), torch.no_grad():
        named[0][1].add_(1.0)
        raise KeyError


def test_what_the_counters_miss_the_checksums_see():
    named = two()
    before = checksums(named)
    with ParameterGuard(named).watching():
        named[1][1].data.add_(1.0)
    after = checksums(named)
    assert after["first"] == before["first"] and after["second"] != before["second"]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("size", [0, 40])
def test_checksum_is_sha256_of_the_bytes(dtype, size, monkeypatch):
    monkeypatch.setattr(digests, "_CHUNK", 16)
    generator = torch.Generator().manual_seed(size)
    tensor = torch.randint(0, 99, (size,), generator=generator).to(dtype)
    expected = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert checksums([("t", tensor)]) == {"t": expected}


def test_names_keep_their_sums_and_a_scalar_has_one():
    named = [(str(i), torch.tensor(float(i))) for i in range(40)]
    sums = checksums(named)
    assert list(sums) == [name for name, _ in named]
    assert all(checksums([pair]) == {pair[0]: sums[pair[0]]} for pair in named)
    assert len(set(sums.values())) == 40


def test_shape_does_not_matter_but_order_in_memory_does():
    tensor = torch.arange(6.0).view(2, 3)
    assert checksums([("t", tensor)]) == checksums([("t", tensor.view(-1))])
    assert checksums([("t", tensor.t())]) != checksums([("t", tensor)])
    assert checksums([("t", tensor.t())]) == checksums([("t", tensor.t().contiguous())])


def test_tensors_without_plain_memory_are_left_out():
    odd = torch.ones(2, device="meta"), torch.eye(2).to_sparse()
    assert checksums([("meta", odd[0]), ("sparse", odd[1]), ("plain", torch.ones(1))]).keys() == {
        "plain"
    }
