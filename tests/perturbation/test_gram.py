"""Norms and inner products of directions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from whole_directions import direction_vector

from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.parameter_space import ParameterSpace

KEY = 0x0123_4567_89AB_CDEF_0000_FFFF_1234_A5A5


def some_tensors() -> dict[str, Tensor]:
    """Matrices, a small one, rows, a scalar, zeros of both signs, an empty tensor, a 3-D one."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"wide": (33, 57), "tall": (90, 21), "small": (2, 100), "row": (1000,), "one": (),
             "cube": (5, 6, 7), "large": (300, 230)}  # fmt: skip
    scales = {"row": 1e-3, "one": 1.0, "cube": 30.0}
    made = {n: torch.randn(s, generator=generator) * scales.get(n, 0.05) for n, s in sizes.items()}
    made["zero"], made["empty"] = torch.zeros(40), torch.empty(0, 4)
    made["zero"][::2] = -0.0
    return made


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "sphere"])
def test_gram_of_the_full_space(distribution, monkeypatch):
    """Of one Rademacher direction, without drawing anything."""
    space = ParameterSpace(some_tensors().items(), distribution=distribution)
    us = [Direction(KEY, 2, k) for k in range(5)]
    rows = [direction_vector(u, distribution, space.layout, torch.float64) for u in us]
    matrix = torch.stack(rows)
    gram, expected = space.gram(us), matrix @ matrix.T
    if distribution == "rademacher":
        assert torch.equal(gram, expected.round())
        monkeypatch.setattr(dispatch, "coordinates", lambda *_: pytest.fail("drew coordinates"))
        assert space.gram([Direction(KEY, 0)]).tolist() == [[float(space.dimension)]]
    else:
        assert torch.allclose(gram, expected, rtol=1e-6, atol=1e-6 * space.dimension)
    fixed = distribution != "gaussian"  # the norm of a drawn one is its stream's
    norms = [space.dimension if fixed else space.stream(u).squared_norm() for u in us]
    assert gram.diag().tolist() == pytest.approx(norms)
