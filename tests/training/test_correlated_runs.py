"""Correlated noise and held directions in runs: what was released, reports, resumes, refusals."""

from __future__ import annotations

import json
import os
import shutil
import stat

import numpy as np
import pytest
import torch
from tiny_runs import SECRET, build, config, same, stopping, tiny_model, weights
from transformers import TrainerCallback

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import directions_of, replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.privacy.correlated.factorization import banded, toeplitz
from hf_dpzero.privacy.correlated.stream import CorrelatedNoise
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.noise import InsecureSeededNoise, NoiseSource, SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.reporting.verification import agreeing
from hf_dpzero.run_folder.keys import FILE, FOLDER

HELD = {
    "method": "dpzero",
    "correlated_noise.hold_direction_for": 4,
    "clipping": "fixed",
    "num_directions": 2,
    "max_steps": 10,
}
CORRELATED = {**HELD, "sampling": "fixed_batches", "correlated_noise.kind": "toeplitz"}
RUN = {
    "method": "dp-sgd",
    "sampling": "fixed_batches",
    "correlated_noise.kind": "toeplitz",
    "lr_scheduler_type": "constant",
    "learning_rate": 0.1,
    "max_steps": 8,
}


class _Recorder(TrainerCallback):
    """The gradient that the optimizer got in each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        self.seen.append(torch.cat([g.detach().flatten() for g in grads]) if grads else None)


def released(tmp_path, data=None, **settings) -> tuple[np.ndarray, object]:
    """float64 [R, d] that a run released, and its trainer."""
    recorder = _Recorder()
    trainer = build(
        tmp_path, data=data, trainer_settings={"callbacks": [recorder]}, **{**RUN, **settings}
    )
    trainer.train()
    return torch.stack(recorder.seen).double().numpy(), trainer


def test_a_run_releases_the_stream_that_its_plan_accounts_for(tmp_path):
    """Two runs on the same batches at rate 0, with and without noise, differ by C^{-1} Z S sigma C."""
    still = {"learning_rate": 0.0, "correlated_noise.kind": "banded", "correlated_noise.bands": 3}
    noisy, trainer = released(tmp_path / "a", **still)
    quiet, _ = released(
        tmp_path / "b", **{**still, "correlated_noise.kind": "none"}, noise_multiplier=1e-3
    )
    factorization, sensitivity = banded(8, 3), trainer.plan.correlation.sensitivity(8, 10)
    assert sensitivity == pytest.approx(factorization.sensitivity)
    base, sizes = InsecureSeededNoise(3), [p.numel() for p in tiny_model().parameters()]
    scale = 1.0 * 5.0 * sensitivity / 12
    for step in range(8):
        row = factorization.noise_row(step)
        expected = sum(
            weight * np.concatenate([base.normals(n, int(j), part) for part, n in enumerate(sizes)])
            for j, weight in zip(row.draws, row.weights)
        )
        found = (noisy - quiet)[step] / scale
        assert np.abs(found - expected).max() < 2.0**-8 + 0.02


@pytest.mark.parametrize("method", ["dp-sgd", pytest.param("dp-adamw", marks=pytest.mark.slow)])
def test_the_report_the_banner_and_the_files_say_it(tmp_path, method, capsys):
    trainer = build(tmp_path, **{**RUN, **SECRET, "method": method, "max_steps": 12})
    trainer.train()
    trainer.save_model()
    report = trainer.privacy_report()
    assert report.private and report.sampling == "fixed_batches"
    assert report.noise_source == "os_entropy_key_on_grid"
    assert report.accountant == "gaussian_exact"
    assert "correlated over steps: Toeplitz square root" in report.statement
    assert any(label == "correlated" and "sensitivity" in text for label, text in report.rows())
    assert "correlated" in capsys.readouterr().out
    agreed, trajectory = agreeing(report, tmp_path)
    assert agreed.statement == report.statement
    assert PrivacyPlan.from_dict(trajectory.header["plan"]) == trainer.plan
    assert report.epsilon == pytest.approx(trainer.plan.epsilon(1e-3))


def text_of(folder) -> bytes:
    """Everything that is in a folder but its `_private` folder."""
    files = [p for p in folder.rglob("*") if p.is_file() and FOLDER not in p.parts]
    assert files
    return b"".join(path.read_bytes() for path in files)


def killed(folder, step=5, **settings):
    trainer = build(
        folder,
        trainer_settings=stopping(step, KeyboardInterrupt),
        **{**RUN, **SECRET, "save_strategy": "steps", "save_steps": 2, **settings},
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return trainer


def test_the_keys_are_for_their_owner_alone_until_the_run_ends(tmp_path):
    killed(tmp_path)
    file = tmp_path / FOLDER / FILE
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(file.parent).st_mode) == 0o700
    stored = json.loads(file.read_text())
    secrets = [stored["order"], *(key for _, key in stored["noise"])]
    assert len(secrets) == 2
    shown = text_of(tmp_path)
    for secret in secrets:
        assert secret.encode() not in shown and bytes.fromhex(secret) not in shown
    build(tmp_path, **{**RUN, **SECRET}).train(resume_from_checkpoint=True)
    assert not file.exists()
    build(tmp_path, **{**RUN, **SECRET}).train(resume_from_checkpoint=True)  # nothing left to do
    assert not file.exists()


def test_a_killed_run_goes_on_with_its_own_noise_and_order(tmp_path, monkeypatch):
    """Killed after 6 steps with a checkpoint there: their draws come back, later ones have a new key."""
    drawn: dict[str, dict[int, np.ndarray]] = {"first": {}, "second": {}}
    batches: dict[str, dict[int, list[int]]] = {"first": {}, "second": {}}
    now = "first"
    normals = CorrelatedNoise.normals

    def recorded(self: CorrelatedNoise, size: int, step: int, part: int) -> np.ndarray:
        if part == 0:
            for j in range(step + 1):
                drawn[now][j] = self.base.normals(8, j, 0)
            batches[now][step] = trainer.plan.sampler.batch(step, trainer._keys.sampler).tolist()
        return normals(self, size, step, part)

    monkeypatch.setattr(CorrelatedNoise, "normals", recorded)
    settings = {**RUN, **SECRET, "save_strategy": "steps", "save_steps": 2, "max_steps": 12}
    trainer = build(tmp_path, trainer_settings=stopping(6, KeyboardInterrupt), **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    now, trainer = "second", build(tmp_path, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert sorted(drawn["first"]) == list(range(6)) and sorted(drawn["second"]) == list(range(12))
    for step in range(6):
        assert np.array_equal(drawn["first"][step], drawn["second"][step])
    every = {**batches["first"], **batches["second"]}
    assert sorted(every) == list(range(12))
    assert sorted(row for step in range(10) for row in every[step]) == list(range(120))
    assert every[10] == every[0] and every[11] == every[1]


@pytest.mark.slow
def test_two_copies_of_a_killed_run_share_only_the_noise_behind_them(tmp_path, monkeypatch):
    """A copy that goes on may not let anyone subtract its releases from the other's."""
    killed(tmp_path / "a", step=4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    seen = []
    for name in "ab":
        trainer = build(tmp_path / name, **{**RUN, **SECRET})
        trainer.train(resume_from_checkpoint=True)
        seen.append(weights(trainer.model))
    assert not same(*seen)
    apart = torch.cat([(seen[0][n] - seen[1][n]).flatten() for n in seen[0]])
    # four steps, each with fresh noise of at least sigma C S / B in either run
    least = 0.1 * 5.0 * toeplitz(8).sensitivity / 12 * 2**0.5
    assert float(apart.std()) > least


@pytest.mark.parametrize("broken", ["missing", "another run's"])
def test_a_run_whose_keys_are_lost_is_refused(tmp_path, broken):
    killed(tmp_path)
    file = tmp_path / FOLDER / FILE
    if broken == "missing":
        file.unlink()
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), "run": "0" * 32}))
    before = Trajectory.load(tmp_path / "trajectory.ledger").next_step
    with pytest.raises(LedgerError, match="start afresh in another"):
        build(tmp_path, **{**RUN, **SECRET}).train(resume_from_checkpoint=True)
    assert Trajectory.load(tmp_path / "trajectory.ledger").next_step == before


class _Own(NoiseSource):
    name, secure = "own", True

    def normals(self, size, step, part):
        return SecureNoise().normals(size, step, part)

    def _integers(self, distribution, scale, size, step):
        return []


def test_noise_that_cannot_be_drawn_again_is_refused(tmp_path):
    trainer = build(tmp_path, trainer_settings={"noise": _Own()}, **RUN)
    with pytest.raises(ValueError, match="leave `noise` out"):
        trainer.train()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sampling": "poisson"}, "Use sampling='fixed_batches'"),
        ({"sampling": "truncated_poisson", "max_batch_size": 20}, "Use sampling='fixed_batches'"),
        ({"sampling": "full_batch"}, "Use sampling='fixed_batches'"),
        ({"correlated_noise.kind": "topelitz"}, "did you mean 'toeplitz'"),
        ({"correlated_noise": {"kind": "banded", "bands": 0}}, "correlated_noise.bands=0"),
        ({"clipping": "adaptive"}, "clipping='fixed'"),
        ({"clipping": "averaged", "clipping_config.groups": 2}, "clipping='fixed'"),
        ({"schedules.noise": "exp(gamma=0.9)"}, "Leave it out"),
        ({"schedules.clip": "linear(0.5)"}, "Leave the schedule out"),
        ({"method": "dpzero", "clipping": "fixed"}, "hold_direction_for"),
        ({"method": "dpgd-0th"}, "use one of dp-sgd"),
        ({"method": "sgd", "noise_multiplier": None}, "'sgd' is not accounted"),
        ({**HELD, "correlated_noise.hold_direction_for": 1}, "fresh direction"),
        ({**HELD, "sampling": "poisson"}, "Use sampling='fixed_batches'"),
        ({**HELD, "noise_distribution": "laplace"}, "gaussian"),
        ({**HELD, "clip": None, "clipping": None}, "clipping='fixed'"),
    ],
)
def test_what_is_refused(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **{**RUN, **changed}).plan(120, 100)


def test_plans_of_settings(tmp_path):
    """Epochs are whole, 32 bands are the default, and every kind meets a target."""
    epochs = config(tmp_path, **{**RUN, "max_steps": -1, "num_train_epochs": 3})
    assert epochs.steps(120) == 30 and epochs.steps(121) == 33
    assert epochs.plan(121, 10).sampler.period == 11
    aim = {**RUN, "noise_multiplier": None, "target_epsilon": 2.0}
    for kind in ("none", "toeplitz", "banded", "tree", "optimized"):
        plan = config(tmp_path, **{**aim, "correlated_noise.kind": kind}).plan(120, 500)
        assert 1.99 < plan.epsilon(1e-3) <= 2.0
        assert kind != "banded" or plan.correlation.bands == 32


# ---- directions that are held for some steps


def test_steps_share_the_directions_of_their_block():
    header = {"direction_key": f"{7:032x}", "num_directions": 2, "hold_direction_for": 4}
    held = [directions_of(step, header) for step in range(9)]
    assert held[0] == held[3] == [Direction(7, 0, 0), Direction(7, 0, 1)]
    assert held[4] == held[7] == [Direction(7, 1, 0), Direction(7, 1, 1)]
    assert held[8] == [Direction(7, 2, 0), Direction(7, 2, 1)]
    del header["hold_direction_for"]
    assert directions_of(3, header)[0] == Direction(7, 3, 0)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(HELD, marks=pytest.mark.slow),
        {**HELD, "update_rule": "momentum", "update_window": 6},
        {**CORRELATED, "direction": "gaussian"},
        pytest.param(
            {**CORRELATED, "performance.defer_updates": False, "weight_decay": 0.1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_is_replayed_bit_for_bit(tmp_path, settings):
    trainer = build(tmp_path, **settings)
    trainer.train()
    rebuilt = tiny_model()
    replay(rebuilt, Trajectory.load(tmp_path / "trajectory.ledger"))
    assert same(weights(rebuilt), weights(trainer.model))


def test_the_weights_move_in_the_span_of_the_blocks_directions(tmp_path):
    """Ten steps with K = 2 held for 4: theta - theta_0 lies in the span of six directions."""
    trainer = build(tmp_path, **HELD, learning_rate=1e-3)
    trainer.train()
    before, space = tiny_model(), trainer.space
    start = torch.cat([p.detach().flatten() for p in before.parameters()]).double()
    end = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).double()
    basis = []
    for block in range(3):
        for query in range(2):
            stream = space.stream(Direction(7, block, query))
            basis.append(torch.cat([stream.raw(*place).double() for place in stream.layout]))
    moved = (end - start).numpy()
    span = torch.stack(basis, dim=1).numpy()
    rest = moved - span @ np.linalg.lstsq(span, moved, rcond=None)[0]
    assert np.linalg.norm(rest) < 0.02 * np.linalg.norm(moved)  # the start's snap to the grid


def test_what_is_released_has_the_blocks_noise(tmp_path):
    """At rate 0 with and without noise: numbers differ by S sigma C / B times C^{-1} Z, anew at 4, 8."""
    noisy = build(tmp_path / "a", **CORRELATED, learning_rate=0.0)
    noisy.train()
    quiet = build(
        tmp_path / "b", **{**CORRELATED, "correlated_noise.kind": "none"}, learning_rate=0.0,
        **{"noise_multiplier": 1e-3},
    )  # fmt: skip
    quiet.train()
    sensitivity = noisy.plan.correlation.sensitivity(10, 10)
    assert sensitivity == pytest.approx(toeplitz(4).sensitivity)
    base, scale = InsecureSeededNoise(3), 5.0 * sensitivity / 12
    for step, (one, other) in enumerate(zip(noisy.trajectory.releases, quiet.trajectory.releases)):
        row = toeplitz(4).noise_row(step % 4)
        expected = sum(
            weight * base.normals(2, int(j) + step - step % 4, 0)
            for j, weight in zip(row.draws, row.weights)
        )
        found = (np.array(one.values) - np.array(other.values)) / scale
        assert np.abs(found - expected).max() < 2.0**-8 + 0.01


def test_rounded_scalars_follow_the_clipped_total():
    mechanism = ScalarMechanism(
        clip=3.0, noise_multiplier=1.0, expected_batch_size=4, num_directions=2
    )

    class Known(InsecureSeededNoise):
        correlated = True
        base_deviation = 2.0

        def normals(self, size, step, part):
            return np.full(size, 0.25)

    values = mechanism.release([2**30, -(2**29)], 0, Known())
    assert values == pytest.approx([(3.0 + 1.5) / 4, (-1.5 + 1.5) / 4], abs=3.0 * 2 * 2.0**-9)


def test_the_report_says_where_noise_begins_anew(tmp_path):
    trainer = build(tmp_path, **{**CORRELATED, **SECRET})
    trainer.train()
    report = trainer.privacy_report()
    assert report.private and "anew every 4 steps" in report.statement
    assert report.noise_source == "os_entropy_key_on_grid"
