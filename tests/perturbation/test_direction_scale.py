"""Directions that are smaller in some tensors: S u in perturbations and updates, bit for bit undone."""

import numpy as np
import pytest
import torch
from torch import nn

from hf_dpzero import DPZeroConfig
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.perturbation.trainable import scales_of

SCALE = {"body": 0.125}
LARGE = 1 << 16  # a tensor of this many elements has a segment of its own


def model(dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    draw = torch.Generator().manual_seed(0)
    parts = {"body": nn.Linear(64, 9), "large": nn.Linear(LARGE // 8, 8), "head": nn.Linear(64, 3)}
    for part in parts.values():
        for p in part.parameters():
            p.data = (torch.rand(p.shape, generator=draw) - 0.5).to(dtype)
    return nn.ModuleDict(parts)


def changed(made: nn.Module, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: p.detach() - before[name] for name, p in made.named_parameters()}


def values(made: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in made.named_parameters()}


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "sphere"])
def test_perturbations_and_updates_are_scaled_and_restored(distribution):
    """Against the space without scales: s times in `body`, 1 elsewhere, in copies as in place."""
    moves, u = {}, Direction(7, 0, 0)
    for scaled in (False, True):
        made = model()
        space = ParameterSpace.from_model(
            made, distribution=distribution, scale=SCALE if scaled else {}
        )
        space.snap_()
        before = values(made)
        with space.perturbed(u, 1e-3):
            moves["perturbed", scaled] = changed(made, before)
        assert all(torch.equal(p, before[name]) for name, p in made.named_parameters())
        stack = space.new_stack(2)
        space.write_stack_([u], 1e-3, stack)
        for (name, move), copies in zip(
            moves["perturbed", scaled].items(), stack.tensors, strict=True
        ):
            assert torch.equal(copies[0] - before[name], move)
        space.step_([u], [0.25])
        moves["updated", scaled] = changed(made, before)
    step = 2.0**-22  # of a grid; scale and rounding commute up to one of them, or two
    for kind in ("perturbed", "updated"):
        for name, move in moves[kind, True].items():
            factor = 0.125 if name.startswith("body") else 1.0
            within = 2 * step if factor != 1 else 0.0
            expected = factor * moves[kind, False][name]
            torch.testing.assert_close(move, expected, rtol=0, atol=within)


def test_a_step_stays_within_a_scaled_tensors_grid():
    """Hundreds of updates: the grid grows by what the tensor itself moves, not by what others do."""
    made = model()
    space = ParameterSpace.from_model(made, scale={"body": 2.0**-6})
    space.snap_()
    start = {n: s["exponent"] for n, s in space.state_dict().items()}
    for t in range(64):
        space.step_([Direction(7, t, 0)], [0.25])
    grown = {n: s["exponent"] - start[n] for n, s in space.state_dict().items()}
    assert all(grown[n] == 0 for n in grown if n.startswith("body"))
    assert all(grown[n] > 0 for n in grown if not n.startswith("body"))


def test_the_first_pattern_that_matches_counts():
    names = ["body.0.weight", "body.1.weight", "head.bias"]
    assert scales_of(names, {r"\.1\.": 0.5, "body": 0.1}) == [0.1, 0.5, 1.0]
    with pytest.raises(ValueError, match="'bodi' matches no trainable parameter"):
        scales_of(names, {"bodi": 0.5})


def test_lost_scales_are_refused():
    with pytest.raises(ValueError, match=r"direction_scale=1e-05 of body.weight.*lost in rounding"):
        ParameterSpace.from_model(model(), scale={"body": 1e-5}).snap_()
    halves = ParameterSpace.from_model(model(torch.bfloat16), scale=SCALE)
    with pytest.raises(ValueError, match="only float32 tensors are scaled"):
        halves.snap_()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"direction_scale": {"body": 0.0}}, r"direction_scale\['body'\]=0.0 must be a number in"),
        (
            {"direction_scale": {"body": np.inf}},
            r"direction_scale\['body'\]=inf must be a number in",
        ),
        ({"direction_scale": {"(": 0.5}}, r"direction_scale='\(' is no regular expression"),
        ({"direction_scale": "0.5"}, "direction_scale=0.5 must map regular expressions to numbers"),
        (
            {"direction_scale": {"b": 0.5}, "method": "dp-sgd"},
            "direction_scale with method='dp-sgd'",
        ),
    ],
)
def test_settings_that_are_refused(given, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        DPZeroConfig(output_dir=str(tmp_path), target_epsilon=2.0, clip=1.0, **given)


def test_the_command_lines_text_is_read(tmp_path):
    config = DPZeroConfig(
        output_dir=str(tmp_path),
        target_epsilon=2.0,
        num_directions=1,
        direction_scale='{"body": 0.5}',
    )
    assert config.direction_settings()["direction_scale"] == {"body": 0.5}
