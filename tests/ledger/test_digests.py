"""A model's digest names everything that its losses depend on, quantised layers' buffers included."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor, nn

from hf_dpzero.ledger import digests
from hf_dpzero.ledger.digests import checksums, digest_model, digest_tensors, state_digest


class PackedLinear(nn.Module):
    """As layers of GPTQ, AWQ and BitNet: integers and half-precision scales, all in buffers."""

    def __init__(self, integers: torch.dtype = torch.int32) -> None:
        super().__init__()
        values = torch.arange(-6, 6).view(3, 4)
        self.register_buffer("qweight", values.to(integers))
        self.register_buffer("scales", torch.full((3,), 0.5, dtype=torch.float16))
        self.register_buffer("g_idx", torch.arange(4, dtype=torch.int32))
        self.register_buffer("shifts", torch.arange(8, dtype=torch.int32), persistent=False)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.qweight.float() * self.scales.float()[:, None]
        return x[:, self.g_idx.long()] @ weight.T + self.bias


def changed(name: str) -> nn.Module:
    """A model whose packed layer differs in one element of one buffer."""
    model = nn.Sequential(PackedLinear(), nn.Linear(3, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.25)
    if name:
        buffer = getattr(model[0], name).view(-1)
        buffer[-1] = buffer[-1] - 1
    return model


@pytest.mark.parametrize("name", ["qweight", "scales", "g_idx"])
def test_quantised_bases_that_differ_in_a_buffer_have_different_digests(name: str):
    """A vector that is not saved is scratch: it may be as long as the device likes."""
    x = torch.ones(2, 4) * torch.arange(4)
    assert not torch.equal(changed("")(x), changed(name)(x))  # they are different models
    assert (
        digest_model(changed("")) == digest_model(changed("shifts")) != digest_model(changed(name))
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.float8_e4m3fn])
def test_every_narrow_type_of_weights_counts(dtype: torch.dtype):
    models = [nn.Sequential(PackedLinear(dtype)) for _ in range(2)]
    assert digest_model(models[0]) == digest_model(models[1])
    models[1][0].qweight = (models[1][0].qweight.float() + 1).to(dtype)
    assert digest_model(models[0]) != digest_model(models[1])


class Tables(nn.Module):
    """Buffers of models that are not quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))
        self.register_buffer("position_ids", torch.arange(6).view(1, 6))
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool))
        self.register_buffer("sines", torch.rand(3, 3).half())
        self.register_buffer("frequencies", torch.rand(3, 3))
        self.register_buffer("phases", torch.ones(2, 2, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(0, dtype=torch.int32))
        self.register_buffer("running_mean", torch.rand(3))


def test_models_that_are_not_quantised_are_named_by_their_parameters_alone(language_model):
    """Their digests stand in the headers of trajectories, and must not move."""
    texts = [language_model(family).bfloat16() for family in ("roberta", "llama")]
    for model in (Tables(), nn.Linear(3, 2), nn.BatchNorm1d(3).half(), *texts):
        assert digest_model(model) == digest_tensors(model.named_parameters())


def test_digest_sees_names_shapes_dtypes_and_every_bit():
    base = {"a": torch.zeros(4), "b": torch.ones(2, 2)}
    variants = [
        base,
        {"a": torch.zeros(4), "c": torch.ones(2, 2)},
        {"a": torch.zeros(4), "b": torch.ones(4)},
        {"a": torch.zeros(4), "b": torch.ones(2, 2).bfloat16()},
        {"a": torch.tensor([0.0, 0.0, -0.0, 0.0]), "b": torch.ones(2, 2)},
        {"a": torch.zeros(4), "b": torch.ones(2, 2) + 2**-23},
        {"b": torch.ones(2, 2), "a": torch.zeros(4)},
    ]
    digests = {digest_tensors(v.items()) for v in variants}
    assert len(digests) == len(variants)
    assert digest_tensors({k: v.clone() for k, v in base.items()}.items()) in digests


def test_digest_of_a_model_counts_frozen_parameters():
    model = nn.Linear(2, 2)
    before = digest_model(model)
    model.requires_grad_(False)
    assert digest_model(model) == before
    model.bias.data[0] += 1
    assert digest_model(model) != before


def test_a_tensor_may_be_hashed_in_a_thread_known_or_read_late(monkeypatch):
    """The digest is one of digests in the order of the tensors, however they came."""
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 5), PackedLinear()])
    sums = checksums(model.named_parameters())
    expected = hashlib.sha256()
    for name, tensor in model.named_parameters():
        content = hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
        expected.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{content}|".encode())
    alone = digest_tensors(model.named_parameters())
    assert alone == expected.hexdigest()
    states = state_digest(model), digest_model(model)
    monkeypatch.setattr(digests, "_SMALL", 0)  # each in a thread
    monkeypatch.setattr(digests, "_THREADS", 1)  # a window of two
    assert digest_tensors(model.named_parameters()) == alone
    assert (state_digest(model), digest_model(model)) == states
    held, most = 0, 0

    def late():
        nonlocal held, most
        for name, tensor in model.named_parameters():
            held += 1
            most = max(most, held)
            yield name, tensor

    for _ in digests._each(late(), {}):
        held -= 1
    assert most == 3
    with monkeypatch.context() as no_reading:
        no_reading.setattr(digests, "_checksum", lambda tensor: pytest.fail("read again"))
        assert digest_tensors(model.named_parameters(), sums) == alone
    assert (state_digest(model, sums), digest_model(model, sums)) == states


def test_no_name_reads_as_several_tensors():
    first, second = torch.arange(2.0), torch.arange(3.0)
    entry = f"a|{first.dtype}|{tuple(first.shape)}|{checksums([('a', first)])['a']}|b"
    both = digest_tensors([("a", first), ("b", second)])
    assert digest_tensors([(entry, second)]) != both
