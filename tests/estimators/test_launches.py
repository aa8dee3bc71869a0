"""How often a pass on a GPU launches a kernel, counted on the CPU in a launch's place."""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from hf_dpzero.estimators.layerwise import ModuleVisits
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.parameter_space import ParameterSpace

LAYERS = 40  # of OPT-13B


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_pass_launches_once_a_layer_or_once(dtype, monkeypatch):
    """layerwise: each layer, what lies around them, and the rows of two tables; whole_model: one."""
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=32, num_hidden_layers=LAYERS, num_attention_heads=2,
        word_embed_proj_dim=32, max_position_embeddings=32, dropout=0.0,
    )  # fmt: skip
    model, launches = OPTForCausalLM(config).to(dtype).eval(), [0]
    sweep, each = dispatch.sweep, dispatch.sweep_each

    def one(*given: object) -> None:
        launches[0] += 1
        sweep(*given)

    def all_at_once(added: dispatch.Sweep, parts: dispatch.Parts) -> None:
        before = launches[0]
        each(added, parts)  # on a CPU one after the other
        launches[0] = before + 1

    monkeypatch.setattr(dispatch, "sweep", one)
    monkeypatch.setattr(dispatch, "sweep_each", all_at_once)
    monkeypatch.setattr(dispatch, "together_on", lambda device: True)
    monkeypatch.setattr(dispatch, "together", contextlib.nullcontext)
    space, ids = ParameterSpace.from_model(model), torch.arange(8)[None]
    space.snap_()
    assert len(space.tensors) > 16 * LAYERS
    visits = ModuleVisits(model, space)
    with visits.installed():
        visits.position = ((Direction(1, 0), 1e-3),)
        model(input_ids=ids)
    assert LAYERS <= launches[0] <= LAYERS + 5
    launches[0] = 0
    space.move_to_(((Direction(1, 0), 1e-3),))
    assert launches[0] == 1
    space.step_([Direction(1, 0)], [1e-4], decay=0.1)
    assert launches[0] == 2
