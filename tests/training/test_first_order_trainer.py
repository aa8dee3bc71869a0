"""dp-sgd, dp-adamw, sgd and adamw in the trainer: the same plan, sampler, ledger, report and resume."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from tiny_runs import build, config, same, stopping, tiny_model, weights, with_lora
from torch import nn
from transformers import TrainerCallback, default_data_collator

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.privacy.noise import InsecureSeededNoise
from hf_dpzero.privacy.schedules import MechanismSchedule

FIRST = {"learning_rate": 0.1, "lr_scheduler_type": "constant"}


def naive_sum(model, rows, clip):
    """sum_i min(1, C/||g_i||) g_i by one backward pass an example, in torch only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    totals = [torch.zeros_like(p) for p in parameters]
    for row in rows:
        batch = default_data_collator([row])
        loss = select_objective(model)(model, batch).sum()
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.stack([g.norm() for g in gradients]).norm()
        weight = min(1.0, clip / float(norm)) if clip else 1.0
        for total, g in zip(totals, gradients):
            total += weight * g
    return totals


@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_a_dp_sgd_step_is_algorithm_1_of_abadi_et_al(tmp_path, clip):
    trainer = build(
        tmp_path, method="dp-sgd", clip=clip, max_steps=1, expected_batch_size=12, **FIRST
    )
    expected = tiny_model().eval()
    chosen = trainer.plan.sampler.batch(0, bytes.fromhex("ab" * 32))
    rows = [trainer.train_dataset[int(i)] for i in chosen]
    totals = naive_sum(expected, rows, clip / (1 + 2.0**-8))  # see `batches.placement`
    trainer.train()
    noise, grid = InsecureSeededNoise(3), 2.0 ** (math.floor(math.log2(clip)) - 8)
    for part, (p, total) in enumerate(zip(expected.parameters(), totals)):
        drawn = torch.from_numpy(noise.normals(p.numel(), 0, part)).view(p.shape) * clip
        p.data -= 0.1 * ((total + drawn) / grid).round().float() * grid / 12
    for (name, found), p in zip(trainer.model.named_parameters(), expected.parameters()):
        scale = float(p.norm()) + 0.1 * clip
        cell = 0.1 * grid / 12  # a coordinate on the edge of a cell may be rounded the other way
        torch.testing.assert_close(found, p, atol=cell + 3e-6 * scale, rtol=1e-4, msg=name)


def test_adamw_without_privacy_is_torchs_on_the_poisson_batches(tmp_path):
    trainer = build(
        tmp_path, method="adamw", noise_multiplier=None, max_steps=4, learning_rate=1e-3,
        lr_scheduler_type="constant",
    )  # fmt: skip
    model = tiny_model().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(4):
        rows = trainer.plan.sampler.batch(step, bytes.fromhex("ab" * 32))
        totals = naive_sum(model, [trainer.train_dataset[int(i)] for i in rows], None)
        for p, total in zip(model.parameters(), totals):
            p.grad = total / 12
        optimizer.step()
    trainer.train()
    for found, p in zip(trainer.model.parameters(), model.parameters()):
        torch.testing.assert_close(found, p, atol=2e-5, rtol=1e-3)
    assert not trainer.privacy_report().private


def test_the_microbatch_size_does_not_matter(tmp_path):
    found = []
    for size in (1, 8):
        trainer = build(tmp_path / str(size), method="dp-adamw", microbatch_size=size, **FIRST)
        trainer.train()
        found.append(weights(trainer.model))
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], atol=1e-5, rtol=1e-3)


def test_resume_from_a_checkpoint_at_the_ledgers_end_is_a_straight_run(tmp_path):
    """From an earlier one it is not: what the ledger holds beyond it is paid for, its updates lost."""
    settings = {"method": "dp-adamw", "save_strategy": "steps", "save_steps": 3, **FIRST}
    straight = build(tmp_path / "a", **settings)
    straight.train()
    for stopped in (3, 5):
        folder = tmp_path / str(stopped)
        with pytest.raises(KeyboardInterrupt):
            build(folder, trainer_settings=stopping(stopped, KeyboardInterrupt), **settings).train()
        resumed = build(folder, **settings)
        resumed.train(resume_from_checkpoint=True)
        assert len(resumed.trajectory.releases) == 6
        assert same(weights(resumed.model), weights(straight.model)) == (stopped == 3)


def test_the_ledger_is_written_before_the_update_and_the_report_is_honest(tmp_path):
    trainer = build(
        tmp_path,
        method="dp-adamw",
        testing={"insecure_noise_seed": None, "sampler_key": None},
        **FIRST,
    )
    trainer.train()
    trainer.save_model()
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    assert report["private"] and report["method"] == "dp-adamw" and report["steps"] == 6
    assert math.isclose(report["epsilon"], trainer.plan.epsilon(1e-3))
    assert report["noise_source"] == "os_entropy_on_grid"
    log = Trajectory.load(tmp_path / "trajectory.safetensors")
    assert [r.values for r in log.releases] == [()] * 6
    with pytest.raises(LedgerError, match="use the saved"):
        replay(tiny_model(), log)


@pytest.mark.parametrize("clipping", ["automatic", "averaged"])
def test_other_clippings_bound_the_release(tmp_path, clipping):
    """Without noise the first step's gradient is at most C B / divisor long."""
    extra = {"clipping_config.groups": 3} if clipping == "averaged" else {}
    trainer = build(
        tmp_path, method="dp-sgd", clipping=clipping, clip=0.01, noise_multiplier=2.0**-10,
        max_steps=1, learning_rate=1.0, lr_scheduler_type="constant", **extra,
    )  # fmt: skip
    trainer.train()
    moved = [a - b for a, b in zip(trainer.model.parameters(), tiny_model().parameters())]
    size = float(torch.cat([m.detach().view(-1) for m in moved]).norm())
    mechanism = trainer.plan.mechanism
    count = (
        3
        if clipping == "averaged"
        else len(trainer.plan.sampler.batch(0, bytes.fromhex("ab" * 32)))
    )
    dimension = sum(p.numel() for p in trainer.model.parameters())
    noise = mechanism.noise_scale / mechanism.divisor * math.sqrt(dimension)
    assert 0 < size <= 0.01 * count / mechanism.divisor + 2 * noise


def test_adaptive_clipping_moves_the_clip_and_logs_the_count(tmp_path):
    trainer = build(
        tmp_path, method="dp-sgd", clipping="adaptive", clip=1e-3,
        clipping_config={"learning_rate": 1.0, "count_noise": 2.0},
        noise_multiplier=0.5, max_steps=8, **FIRST,
    )  # fmt: skip
    trainer.train()
    values = [r.values for r in trainer.trajectory.releases]
    assert all(len(v) == 1 for v in values)
    # nothing lies below a clip of 1e-3, so the count is low and the clip grows towards exp(8 / 2)
    assert MechanismSchedule(trainer.plan.mechanism).after(trainer.trajectory.releases).clip > 5e-3


def test_lora_under_dp_adamw_is_dp_lora(tmp_path):
    model = with_lora(tiny_model())
    before = weights(model)
    build(tmp_path, model=model, method="dp-adamw", **FIRST).train()
    moved = {n for n, p in model.named_parameters() if not torch.equal(before[n], p)}
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert moved == trainable and any("lora_B" in n for n in moved)


def test_unsupported_layers_are_refused_by_name_before_a_step(tmp_path):
    class Scaled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.ones(1))
            self.config = inner.config

        def forward(self, input_ids=None, attention_mask=None, labels=None):
            out = self.inner(input_ids=input_ids, attention_mask=attention_mask)
            out.logits = out.logits * self.scale
            return out

    def losses(model, inputs):
        logits = model(inputs["input_ids"], inputs["attention_mask"]).logits
        return nn.functional.cross_entropy(logits, inputs["labels"], reduction="none")

    trainer = build(
        tmp_path, model=Scaled(tiny_model()), method="dp-adamw",
        trainer_settings={"compute_per_example_loss": losses}, **FIRST,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"Scaled.*freeze them, or use dpzero"):
        trainer.train()
    assert not list(tmp_path.rglob("*.ledger"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "dp-adamw", "optim": "adafactor"}, "use one of the adamw"),
        ({"method": "dp-sgd", "gradient_checkpointing": True}, "gradient_checkpointing"),
        (
            {"method": "dpzero", "clipping": "automatic"},
            "clipping='automatic' with method='dpzero'",
        ),
        ({"method": "mezo", "noise_multiplier": None, "clipping": "adaptive"}, "it is for dpzero"),
        ({"method": "dp-adamw", "noise_distribution": "laplace"}, "noise_distribution='laplace'"),
        ({"method": "dp-adamw", "update_rule": "momentum"}, "released scalars"),
        ({"method": "dp-adamw", "sampling": "fixed_size_without_replacement"}, "no sound account"),
    ],
)
def test_refusals(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings).plan(120)


def test_a_compiled_model_is_refused(tmp_path):
    model = tiny_model()
    model.compile(backend="eager")
    for compiled, settings in ((model, {}), (tiny_model(), {"torch_compile": True})):
        with pytest.raises(ValueError, match="compiled code"):
            build(tmp_path, model=compiled, method="dp-sgd", **FIRST, **settings).train()


@pytest.mark.false_alarm(2e-7)
@pytest.mark.statistical
def test_the_noise_on_the_weights_has_the_stated_deviation(tmp_path):
    """Power: the law of a frozen-gradient step rejects 2/3 and 3/2 of its deviation.

    False alarms: 1e-7 of Kolmogorov and Smirnov's test, 2e-9 of a mean beyond 6 deviations.
    """
    from scipy import stats

    trainer = build(tmp_path, method="dp-sgd", max_steps=1, learning_rate=1.0,
                    lr_scheduler_type="constant", testing={"insecure_noise_seed": None}, clip=4.0,
                    noise_multiplier=2.0)  # fmt: skip
    chosen = trainer.plan.sampler.batch(0, bytes.fromhex("ab" * 32))
    totals = naive_sum(tiny_model().eval(), [trainer.train_dataset[int(i)] for i in chosen], 4.0)
    trainer.train()
    pairs = zip(tiny_model().parameters(), totals, trainer.model.parameters())
    noise = torch.cat([(b - t / 12 - a).detach().view(-1) for b, t, a in pairs]).numpy()
    scaled = noise / (2.0 * 4.0 / 12)
    assert stats.kstest(scaled, "norm").pvalue > 1e-7
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(scaled * wrong, "norm").pvalue < 1e-9
    assert abs(float(np.mean(scaled))) < 6 / math.sqrt(len(scaled))


@pytest.mark.parametrize("place", ["parameter", "module"])
def test_backward_hooks_that_see_raw_gradients_are_refused(tmp_path, place):
    """A logger that watches gradients would see them before clipping and noise."""
    seen = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            if place == "parameter":
                next(model.parameters()).register_hook(seen.append)
            else:
                model.classifier.register_full_backward_hook(lambda *a: seen.append(a))

    trainer = build(tmp_path, method="dp-sgd", **FIRST)
    trainer.add_callback(Watch())
    with pytest.raises(ValueError, match=r"backward hook.*take it off"):
        trainer.train()
    assert not seen and not trainer.trajectory.releases
    free = build(tmp_path / "free", method="sgd", noise_multiplier=None, **FIRST)
    free.add_callback(Watch())
    free.train()  # nothing private to see


def test_groups_drawn_by_a_known_key_are_not_private(tmp_path):
    settings = {
        "method": "dp-sgd",
        "sampling": "full_batch",
        "testing.insecure_noise_seed": None,
        **FIRST,
    }
    averaged = build(tmp_path / "a", clipping="averaged", clipping_config={"groups": 4}, **settings)
    fixed = build(tmp_path / "b", **settings)
    assert averaged.args.testing.sampler_key is not None
    assert not averaged.privacy_report().private
    assert "sampler_key" in averaged.privacy_report().statement
    assert fixed.privacy_report().private
