"""Averaged clipping of finite differences: its sensitivity, its groups, whole runs, refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_runs import build, same, tiny_model, weights

from hf_dpzero.ledger.replay import replay
from hf_dpzero.privacy.mechanisms import AveragedScalarMechanism
from hf_dpzero.training.zeroth_order_method import ZerothOrderMethod

ROW = 2**38 // 257
"""What a row adds at most, in units of 2^-30 C: 2^30 / (1 + 2^-8)."""


def mechanism(groups: int = 1, directions: int = 1, **more) -> AveragedScalarMechanism:
    settings = {
        "clip": 2.0 * 257 / 256,
        "noise_multiplier": 1.0,
        "expected_batch_size": 8.0,
        **more,
    }
    return AveragedScalarMechanism(clip_groups=groups, num_directions=directions, **settings)


def test_the_mean_of_each_group_is_clipped_once():
    x = torch.tensor([[9.0], [-1.0], [0.5], [1.5], [-40.0]])
    total = mechanism(3).clip_sum(x, [0, 0, 1, 1, 2])
    assert mechanism().radius == 2.0
    accounted = mechanism(3, noise_multiplier=3.0)
    assert accounted.effective_noise_multiplier == 1.5
    assert accounted.sensitivity("add_or_remove_one") == 2 * accounted.clip
    assert total == [ROW + ROW // 2 - ROW]  # means 4, 1, -40 clipped at 2


def test_rows_that_are_not_finite_are_left_out():
    m = mechanism()
    assert m.clip_sum(torch.tensor([[1.0], [float("nan")]]), [0, 0]) == [ROW // 2]
    assert m.clip_sum(torch.tensor([[float("inf")]]), [0]) == [0]
    assert m.clip_sum(torch.empty(0, 1), []) == [0]
    assert abs(m.clip_sum(torch.full((3, 1), 1.5e308, dtype=torch.float64), [0] * 3)[0] - ROW) <= 1


@pytest.mark.parametrize("settings", [{}, {"clipping_config.groups": 2, "num_directions": 4}])
def test_runs_release_clipped_means_of_groups_and_replay(settings, tmp_path):
    trainer = build(tmp_path, clipping="averaged", clip=5.0, **settings)
    seen = []
    original = AveragedScalarMechanism.clip_sum

    def spy(self, x, groups=()):
        seen.append((x.clone(), list(groups)))
        return original(self, x, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AveragedScalarMechanism, "clip_sum", spy)
        trainer.train()
    k = settings.get("clipping_config.groups", 1)
    assert all(len(x) == len(of) and set(of) <= set(range(k)) for x, of in seen)
    assert k == 1 or len({g for _, of in seen for g in of}) > 1
    report = trainer.privacy_report()
    assert report.method == "dpzero-averaged"
    assert any("half of the stated noise multiplier" in caveat for caveat in report.caveats)
    base = tiny_model()
    replay(base, trainer.trajectory)
    assert same(weights(base), weights(trainer.model))


def test_passes_hold_examples_of_several_groups(tmp_path, monkeypatch):
    """One forward pass needs no group of its own: as many microbatches as without groups."""
    trainer = build(
        tmp_path,
        clipping="averaged",
        clip=5.0,
        clipping_config={"groups": 8},
        microbatch_size=7,
        max_steps=1,
    )
    taken, take = [], ZerothOrderMethod.take
    monkeypatch.setattr(
        ZerothOrderMethod,
        "take",
        lambda self, batch, lr: taken.append(batch) or take(self, batch, lr),
    )
    trainer.train()
    (batch,) = taken
    count = sum(batch["examples"])
    assert len(batch["groups"]) == count and 1 < len(set(batch["groups"][:7])) <= 8
    width = batch["microbatches"][0]["input_ids"].shape[1]
    begun = trainer.run.shapes.placement.filled(width, count)
    assert batch["examples"] == [len(places) for places in begun]
    assert len(begun) < count


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise_distribution": "laplace", "target_delta": None}, "use 'gaussian'"),
        ({"clipping_config.groups": 0}, "clipping_config.groups"),
        ({"method": "dpgd-0th"}, "clipping='averaged' with method='dpgd-0th'"),
        ({"method": "mezo", "noise_multiplier": None}, "clipping='averaged' with method='mezo'"),
    ],
)
def test_what_cannot_be_accounted_is_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, clipping="averaged", clip=5.0, **settings).plan  # noqa: B018


def test_a_mean_does_not_follow_from_the_order_of_its_rows():
    """Rows that cancel: in a float64 sum what is left of 60 depends on who comes first."""
    mechanism = AveragedScalarMechanism(clip=4.0, noise_multiplier=1.0, expected_batch_size=3)
    rows = [2.0**60, -(2.0**60), 60.0]
    sums = {
        tuple(mechanism.clip_sum(torch.tensor([[v] for v in order], dtype=torch.float64), [0] * 3))
        for order in itertools.permutations(rows)
    }
    assert len(sums) == 1
