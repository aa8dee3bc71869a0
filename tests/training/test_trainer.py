"""The trainer end to end on tiny models: the invariances and refusals of docs/privacy_reference.md."""

from __future__ import annotations

import logging
import math
import os

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny_runs import (
    GROUPS,
    SECRET,
    StopAt,
    build,
    config,
    same,
    stopping,
    tiny_data,
    tiny_model,
    weights,
    with_groups,
    with_lora,
)
from transformers import (
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    default_data_collator,
)
from transformers.utils import logging as hf_logging
from whole_directions import direction_vector

from hf_dpzero import DPZeroTrainer
from hf_dpzero.estimators.forward_passes import ParameterChanged
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.perturbation.directions import Direction, DirectionStream
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.privacy.noise import InsecureSeededNoise, SecureNoise
from hf_dpzero.reporting import hub
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.run_folder import keys

GROUPED = {"data": with_groups(tiny_data()), **GROUPS}

# ---- the step is Algorithm 2


def test_limit_no_clip_no_noise_is_mezo_bit_for_bit(tmp_path):
    """MeZO written out here with torch only: same grid, same directions, no engine calls."""
    trainer = build(
        tmp_path,
        method="mezo",
        noise_multiplier=None,
        sampling="full_batch",
        max_steps=4,
        microbatch_size=200,
        lr_scheduler_type="constant",
    )
    model, data = tiny_model().eval(), tiny_data()
    trainer.train()
    batch = default_data_collator([data[i] for i in range(len(data))])
    labels = batch.pop("labels")
    space = ParameterSpace.from_model(model)  # only for its grid and layout
    space.snap_()
    spacings = [2.0 ** (state["exponent"] - 24) for state in space.state_dict().values()]

    @torch.no_grad()
    def losses(u, coefficient):
        for p, o, q in zip(space.tensors, space.offsets, spacings):
            part = u[o : o + p.numel()].view_as(p)
            p.add_(part * (round(coefficient / q) * q))
        out = torch.nn.functional.cross_entropy(model(**batch).logits, labels, reduction="none")
        for p, o, q in zip(space.tensors, space.offsets, spacings):
            p.sub_(u[o : o + p.numel()].view_as(p) * (round(coefficient / q) * q))
        return out.double()

    for step in range(4):
        whole = [(0, space.offsets[-1] + space.tensors[-1].numel())]
        u = direction_vector(Direction(7, step), "rademacher", whole)
        difference = (losses(u, 1e-3) - losses(u, -1e-3)) / 2e-3
        value = float(torch.tensor(float(difference.sum()) / len(data), dtype=torch.float32))
        stream = DirectionStream(Direction(7, step), "rademacher", space.layout)
        uniforms = stream.coefficient_uniforms(np.arange(len(spacings), dtype=np.uint64))
        with torch.no_grad():
            for p, o, q, r in zip(space.tensors, space.offsets, spacings, uniforms):
                steps = math.floor(-1e-2 * value / q + r)  # public stochastic rounding
                p.add_(u[o : o + p.numel()].view_as(p) * (steps * q))
    assert same(weights(trainer.model), weights(model))


def test_values_are_clipped_sum_plus_noise_over_expected_batch(tmp_path):
    """One step by hand: same batch, same directions; the difference is exactly the seeded noise."""
    trainer = build(tmp_path, max_steps=1, num_directions=3)
    trainer.train()
    quiet = build(tmp_path / "quiet", max_steps=1, num_directions=3, noise_multiplier=1e-3)
    quiet.train()
    noisy, clean = (t.trajectory.releases[0].values for t in (trainer, quiet))
    mechanism = trainer.plan.mechanism
    noise = InsecureSeededNoise(3).gaussian(1.0 * mechanism.clip / mechanism.granularity, 3, 0)
    for value, base, integer in zip(noisy, clean, noise, strict=True):
        expected = integer * mechanism.granularity / 12
        assert value - base == pytest.approx(expected, abs=0.01)
        assert abs(expected) < 5 * 5.0 / 12


# ---- invariances


def test_same_everything_gives_same_weights_and_microbatching_does_not_matter(tmp_path):
    runs = [build(tmp_path / str(size), microbatch_size=size, max_steps=3) for size in (1, 8)]
    for trainer in runs:
        trainer.train()
    values = [[r.values[0] for r in t.trajectory.releases] for t in runs]
    for other in values[1:]:  # losses of other batch shapes differ by float32 rounding only
        assert other == pytest.approx(values[0], abs=2e-3)
    again = build(tmp_path / "again", microbatch_size=8, max_steps=3)
    again.train()
    assert same(weights(again.model), weights(runs[1].model))


def test_same_direction_key_different_noise(tmp_path):
    runs = [
        build(tmp_path / str(i), testing={"insecure_noise_seed": None}, max_steps=2)
        for i in range(2)
    ]
    for trainer in runs:
        assert isinstance(trainer.noise, SecureNoise)
        trainer.train()
    first, second = (t.trajectory.releases for t in runs)
    assert first[0].values != second[0].values
    assert runs[0].trajectory.header["direction_key"] == runs[1].trajectory.header["direction_key"]


@pytest.mark.parametrize("direction", ["rademacher", "sphere"])
def test_replay_rebuilds_the_weights_bit_for_bit(tmp_path, direction):
    trainer = build(
        tmp_path,
        direction=direction,
        num_directions=2,
        weight_decay=0.1,
        warmup_steps=2,
        lr_scheduler_type="cosine",
    )
    trainer.train()
    trainer.save_model()
    rebuilt = tiny_model()
    replay(rebuilt, Trajectory.load(tmp_path / "trajectory.safetensors"))
    assert same(weights(trainer.model), weights(rebuilt))
    saved = BertForSequenceClassification.from_pretrained(tmp_path)
    assert same(weights(saved), weights(rebuilt))
    assert not same(weights(tiny_model()), weights(rebuilt))


@pytest.mark.parametrize("crash_after", [4, 5])  # at a checkpoint, and one step past it
def test_resume_equals_a_straight_run(tmp_path, crash_after):
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 9, "warmup_steps": 3}
    straight = build(tmp_path / "straight", **settings)
    straight.train()
    first = build(
        tmp_path / "cut", trainer_settings=stopping(crash_after, KeyboardInterrupt), **settings
    )
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert first.trajectory.next_step == crash_after
    second = build(tmp_path / "cut", **settings)
    second.train(resume_from_checkpoint=True)
    assert same(weights(straight.model), weights(second.model))
    assert second.trajectory.releases == straight.trajectory.releases
    assert second.state.global_step == 9
    assert second.state.epoch == pytest.approx(9 * 12 / 120)


def test_replayed_steps_draw_no_noise_and_touch_no_data(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    first = build(tmp_path, trainer_settings=stopping(5, KeyboardInterrupt), **settings)
    with pytest.raises(KeyboardInterrupt):
        first.train()

    class Counting(InsecureSeededNoise):
        steps: list[int] = []

        def gaussian(self, scale, size, step):
            self.steps.append(step)
            return super().gaussian(scale, size, step)

    second = build(tmp_path, trainer_settings={"noise": Counting(3)}, **settings)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert Counting.steps == [5]


def test_interrupt_inside_a_forward_leaves_settled_weights(tmp_path):
    calls = []

    def loss(model, inputs):
        if trainer.trajectory is not None:  # past the trials before training
            calls.append(1)
        if len(calls) == 16:
            raise KeyboardInterrupt
        logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
        return torch.nn.functional.cross_entropy(logits, inputs["labels"], reduction="none")

    trainer = build(
        tmp_path,
        trainer_settings={"compute_per_example_loss": loss},
        performance={"reuse_frozen_prefix": False},
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    fresh = tiny_model()
    replay(fresh, Trajectory.load(tmp_path / "trajectory.ledger"))
    assert same(weights(trainer.model), weights(fresh))


@pytest.mark.parametrize("method", ["dpzero", "dpgd-0th", "dp-sgd"])
def test_a_step_that_cannot_be_written_down_changes_nothing(tmp_path, monkeypatch, method):
    """The ledger comes first: with the disk full, neither weights nor gradients know of the step."""

    def full(descriptor):
        raise OSError(28, "No space left on device")

    class FullDisk(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            monkeypatch.setattr(os, "fsync", full)

    expected = tiny_model()
    if method != "dp-sgd":
        ParameterSpace.from_model(expected).snap_()
    trainer = build(tmp_path, method=method, trainer_settings={"callbacks": [FullDisk()]})
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert same(weights(trainer.model), weights(expected))
    assert all(p.grad is None for p in trainer.model.parameters())
    assert Trajectory.load(tmp_path / "trajectory.ledger").next_step == 0


# ---- what leaves the process


def test_only_released_values_are_logged(tmp_path):
    trainer = build(tmp_path, eval_strategy="steps", eval_steps=2)
    output = trainer.train()
    keys = {key for row in trainer.state.log_history for key in row}
    assert {"epsilon", "released_value", "learning_rate", "eval_loss"} <= keys
    assert not keys & {"loss", "grad_norm", "train_loss"}
    assert "train_loss" not in output.metrics and math.isnan(output.training_loss)
    epsilons = [row["epsilon"] for row in trainer.state.log_history if "epsilon" in row]
    assert epsilons == sorted(epsilons) and epsilons[-1] == pytest.approx(
        trainer.plan.epsilon(1e-3)
    )


@pytest.mark.parametrize("method", ["mezo", "sgd", "adamw"])
def test_diagnostics_of_a_run_that_does_not_clip_have_no_share_of_clipped_examples(
    tmp_path, method
):
    """sgd and adamw take no norms of single examples either, and still tell how many there were."""
    given = {"method": method, "noise_multiplier": None, "testing.log_private_diagnostics": True}
    trainer = build(tmp_path, max_steps=2, **given)
    trainer.train()
    (shown,) = [row for row in trainer.state.log_history if "private_batch_size" in row]
    assert shown["private_batch_size"] > 0
    assert ("private_difference_norm" in shown) == (method == "mezo")
    assert "private_clip_fraction" not in shown


def test_diagnostics_of_averaged_clipping_count_examples_and_not_groups(tmp_path):
    given = {"method": "dp-sgd", "clipping": "averaged", "clipping_config": {"groups": 2}}
    trainer = build(
        tmp_path,
        sampling="full_batch",
        max_steps=2,
        **given,
        **{"testing.log_private_diagnostics": True},
    )
    trainer.train()
    (shown,) = [row for row in trainer.state.log_history if "private_batch_size" in row]
    assert shown["private_batch_size"] == len(trainer.train_dataset) > 2


class _Switches(TrainerCallback):
    """Turns log_private_diagnostics over at given steps of a run."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step in self.steps:
            args.testing.log_private_diagnostics = not args.testing.log_private_diagnostics


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("method", ["dpzero", "dp-sgd"])
def test_diagnostics_are_what_the_ledger_says_however_a_callback_switches_them(
    tmp_path, caplog, method, on
):
    """On for steps 2 and 3 of six, or off there: the report at the end cannot tell by the settings."""
    hf_logging.get_logger("hf_dpzero").warning_once.__func__.cache_clear()
    given = {"method": method, "logging_steps": 1, "testing.log_private_diagnostics": on, **SECRET}
    trainer = build(tmp_path, trainer_settings={"callbacks": [_Switches(2, 4)]}, **given)
    trainer.train()
    shown = [any("private_" in key for key in row) for row in trainer.state.log_history]
    assert shown[:6] == [on] * 6
    assert any("private_clip_fraction" in row for row in trainer.state.log_history) is on
    assert trainer.privacy_report().private is not on
    assert ("NOT PRIVATE" in str(trainer.privacy_report())) is on
    assert "log_private_diagnostics was changed" in caplog.text
    trainer.args.testing.log_private_diagnostics = not on
    assert trainer.privacy_report().log_private_diagnostics is on


def test_a_diagnostic_is_logged_with_its_own_step_only(tmp_path):
    """The third step is replayed from the ledger, without any row."""
    saved = {"save_strategy": "steps", "save_steps": 2}
    given = {"logging_steps": 1, "testing.log_private_diagnostics": True, **saved, **SECRET}
    trainer = build(tmp_path, trainer_settings=stopping(3), **given)
    trainer.train()
    trainer.remove_callback(StopAt)
    trainer.train(resume_from_checkpoint=True)
    shown = ["private_batch_size" in row for row in trainer.state.log_history]
    assert shown[:6] == [True, True, False, True, True, True]


def test_insecure_noise_and_mezo_are_not_private(tmp_path):
    insecure = build(tmp_path / "a", testing={"sampler_key": None})
    known_batches = build(tmp_path / "b", testing={"insecure_noise_seed": None})
    mezo = build(tmp_path / "c", method="mezo", noise_multiplier=None, **SECRET)
    for trainer in (insecure, known_batches, mezo):
        assert not trainer.privacy_report().private
        assert "NOT PRIVATE" in str(trainer.privacy_report())


def test_an_insecure_source_by_another_name_is_not_private(tmp_path):
    """The report is computed from the ledger's header, which has to say what the source itself says."""

    class Replayed(InsecureSeededNoise):
        name = "replayed"

    trainer = build(tmp_path, trainer_settings={"noise": Replayed(3)}, **SECRET)
    trainer.train()
    trainer.save_model()
    assert not trainer.privacy_report().private
    assert not PrivacyReport.load(tmp_path / "privacy_report.json").private
    with pytest.raises(ValueError, match="NOT PRIVATE"):
        hub.build_hub_folder(tmp_path, tmp_path / "public")


def test_secrets_stay_out_of_saved_files(tmp_path, monkeypatch):
    secret = bytes(range(100, 132))
    monkeypatch.setattr(keys, "new_sampler_key", lambda: secret)
    trainer = build(tmp_path, save_strategy="steps", save_steps=3, testing={"sampler_key": None})
    trainer.train()
    trainer.save_model()
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) > 8
    for path in files:
        assert secret.hex().encode() not in path.read_bytes(), path
        assert secret not in path.read_bytes(), path
    assert not (tmp_path / "_private").exists()
    assert secret not in vars(trainer).values()


@pytest.mark.parametrize("grouped", [False, True])
def test_nan_losses_never_reach_the_weights(tmp_path, grouped):
    """Nor, in group-robust training, the releases of the groups' losses."""

    def loss(model, inputs):
        logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
        losses = torch.nn.functional.cross_entropy(logits, inputs["labels"], reduction="none")
        return torch.where(inputs["labels"] == 1, torch.nan, losses)

    settings = GROUPED if grouped else {}
    trainer = build(tmp_path, trainer_settings={"compute_per_example_loss": loss}, **settings)
    trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    values = [v for release in trainer.trajectory.releases for v in release.values]
    assert len(values) == 6 * (3 if grouped else 1) and all(map(math.isfinite, values))


@pytest.mark.parametrize("settings", [{}, GROUPED])
def test_empty_batches_still_release_noise(tmp_path, settings):
    trainer = build(tmp_path, expected_batch_size=0.01, max_steps=4, clip=0.01, **settings)
    trainer.train()
    values = [v for release in trainer.trajectory.releases for v in release.values]
    assert len(values) == 4 * (3 if settings else 1) and all(values)


# ---- other methods


def test_dpgd_0th_moves_every_coordinate_independently(tmp_path):
    trainer = build(tmp_path, method="dpgd-0th", max_steps=1, learning_rate=1.0)
    before = tiny_model()
    space = ParameterSpace.from_model(before)
    space.snap_()
    start = torch.cat([t.detach().view(-1) for t in space.tensors])
    trainer.train()
    moved = torch.cat([p.detach().view(-1) for p in trainer.model.parameters()]) - start
    noise = 5.0 / 12  # sigma C / B, per coordinate
    assert moved.std() == pytest.approx(noise, rel=0.05)
    assert len(moved.unique()) > 0.5 * len(moved)  # of about 1,500 cells within three deviations
    assert trainer.trajectory.releases[0].values == ()
    with pytest.raises(LedgerError, match="dpgd-0th"):
        replay(tiny_model(), trainer.trajectory)


@pytest.mark.parametrize("sampling", ["truncated_poisson", "full_batch"])
def test_samplers_run(tmp_path, sampling):
    cap = {"max_batch_size": 20} if sampling == "truncated_poisson" else {}
    trainer = build(tmp_path, sampling=sampling, max_steps=2, **cap)
    trainer.train()
    assert trainer.privacy_report().sampling == sampling


# ---- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be"),
        ({"direction": "cauchy"}, "direction='cauchy'"),
        ({"method": "newton"}, "method='newton'"),
        ({"debug": "underflow_overflow"}, "debug"),
    ],
)
def test_bad_settings_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": tiny_data().remove_columns("labels")}, "labels"),
        ({"trainable": "nowhere"}, "matches no parameter"),
        ({"trainer_settings": {"compute_per_example_loss": lambda m, i: m(**i).loss}}, "shape"),
        ({"sampling": "fixed_size_without_replacement"}, "replace_one"),
    ],
)
def test_refusals_before_training_write_nothing(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **settings).train()
    assert not (tmp_path / "trajectory.ledger").exists()


def test_half_precision_layer_norms_at_one_are_trained(tmp_path):
    """In bfloat16 the neighbours of 1 are 2^-7 away: rounded to nearest, 1e-3 would do nothing."""
    model = tiny_model().bfloat16()
    assert bool((model.bert.embeddings.LayerNorm.weight == 1).all())
    settings = {
        "max_steps": 12,
        "learning_rate": 4e-3,
        "performance.perturbation_strategy": "layerwise",
    }
    trainer = build(tmp_path, model, expected_batch_size=4, **settings)
    trainer.train()
    assert bool((model.bert.embeddings.LayerNorm.weight != 1).any())
    rebuilt = tiny_model().bfloat16()
    replay(rebuilt, trainer.trajectory)
    assert same(weights(rebuilt), weights(trainer.model))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"clip": 6.0, "weight_decay": 0.5}, r"clip: 5\.0 -> 6\.0\n  weight_decay: 0\.0 -> 0\.5\n"),
        ({"noise_multiplier": 2.0}, "noise_multiplier: 1.0 -> 2.0"),
        ({"smoothing": 2e-3}, "smoothing"),
        ({"method": "dp-sgd"}, "plan.mechanism.name"),
        ({"schedules": {"noise": "exp(gamma=0.9)"}}, "noise_schedule"),
        ({"testing.insecure_noise_seed": None}, "noise_source"),
        ({"testing.sampler_key": None}, "sampler_key_is_secret"),
        ({"testing.log_private_diagnostics": True}, "log_private_diagnostics: false -> true"),
    ],
)
def test_a_resume_with_another_plan_is_refused(tmp_path, changed, words):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    build(tmp_path, **settings).train()
    with pytest.raises(
        LedgerError, match=f"(?s){words}.*continues only.*put the values on the left"
    ):
        build(tmp_path, **settings, **changed).train(resume_from_checkpoint=True)


def test_delta_that_is_not_below_one_over_n_warns_once(tmp_path, caplog):
    delta = 0.0502173  # of no other test: what was said is remembered
    trainer = build(tmp_path, target_delta=delta)
    logging.getLogger("hf_dpzero").propagate = True
    with caplog.at_level(logging.WARNING):
        assert trainer.run.delta == trainer.run.delta == trainer.args.delta(120) == delta
    assert caplog.text.count("not below 1/n") == 1


def test_perturbations_follow_a_replaced_storage():
    """Wrappers such as DistributedDataParallel give parameters new storage: no stale views."""
    model = tiny_model()
    space = ParameterSpace.from_model(model)
    space.snap_()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    before = weights(model)
    with space.perturbed(Direction(1, 0), 1e-3):
        assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert same(weights(model), before)
    model.classifier.weight = torch.nn.Parameter(model.classifier.weight.detach().clone())
    with pytest.raises(RuntimeError, match="were replaced"):
        space.check_is_of(model)


# ---- attacks that were once open


def test_the_report_is_the_ledgers_whatever_the_arguments_say_since(tmp_path):
    trainer = build(tmp_path, testing={"insecure_noise_seed": None})
    trainer.train()
    before = trainer.privacy_report()
    assert not before.private and trainer.args.to_dict()["testing"]["sampler_key"]
    trainer.args.testing.sampler_key, trainer.args.rows_are = None, "text"
    trainer.args.testing.log_private_diagnostics, trainer.args.target_epsilon = True, 0.1
    assert trainer.privacy_report() == before


def test_resuming_with_the_same_trainer_reports_every_step(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, **SECRET}
    trainer = build(tmp_path, trainer_settings=stopping(2), **settings)
    trainer.train()
    trainer.callback_handler.pop_callback(StopAt)
    trainer.train(resume_from_checkpoint=True)
    assert (
        trainer.privacy_report().steps
        == 6
        == len(Trajectory.load(trainer.trajectory.path).releases)
    )
    assert trainer.privacy_report().epsilon == trainer.plan.epsilon(1e-3)
    trainer.args.output_dir = str(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="trained on the private data already"):
        trainer.train()


def test_a_collator_must_keep_one_row_for_each_example(tmp_path):
    def flattening(rows):
        batch = default_data_collator(rows)
        return {k: v.reshape(1, -1) if v.dim() > 1 else v[:1] for k, v in batch.items()}

    def windows(rows):
        return {k: v.repeat_interleave(4, 0) for k, v in default_data_collator(rows).items()}

    for number, collate in enumerate((flattening, windows)):
        trainer = build(tmp_path / str(number))
        trainer.data_collator = collate
        with pytest.raises(ValueError, match="one row for each example"):
            trainer.train()


def test_data_cannot_move_the_global_generators(tmp_path):
    """A randomly masking collator consumes random numbers; the checkpoint must not tell how many."""

    def masking(rows):
        batch = default_data_collator(rows)
        torch.rand(int(batch["input_ids"].sum()) % 97)
        return batch

    states = []
    for number in range(2):
        trainer = build(tmp_path / str(number), data=tiny_data(120, seed=10 + number))
        trainer.data_collator = masking
        torch.manual_seed(5)
        trainer.train()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_checkpoints_and_ledger_must_belong_together(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2}
    build(tmp_path / "a", **settings).train()
    build(tmp_path / "b", method="mezo", noise_multiplier=None, **settings).train()
    foreign = str(tmp_path / "b" / "checkpoint-2")
    with pytest.raises(LedgerError, match="made by another run"):
        build(tmp_path / "a", **settings).train(resume_from_checkpoint=foreign)
    ledger = tmp_path / "a" / "trajectory.ledger"
    whole = ledger.read_bytes()
    record = 8 + 8 + 4 + 4
    ledger.write_bytes(whole[: -4 * record])
    with pytest.raises(LedgerError, match="removed or rolled back"):
        build(tmp_path / "a", **settings).train(
            resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2")
        )
    ledger.unlink()
    with pytest.raises(LedgerError, match="removed or rolled back"):
        build(tmp_path / "a", **settings).train()


def test_two_runs_cannot_share_a_ledger(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2}
    first = build(tmp_path, trainer_settings=stopping(2), **settings)
    first.train()
    holder = Trajectory.open(tmp_path / "trajectory.ledger")
    with pytest.raises(LedgerError, match="another run"):
        build(tmp_path, **settings).train(resume_from_checkpoint=True)
    holder.close()
    build(tmp_path, **settings).train(resume_from_checkpoint=True)


def test_changed_buffers_are_not_saved(tmp_path):
    model = tiny_model()
    model.register_buffer("seen", torch.zeros(1))
    original = model.forward

    def forward(*args, **kwargs):
        model.seen += kwargs["input_ids"].sum()
        return original(*args, **kwargs)

    model.forward = forward
    trainer = build(
        tmp_path, model, performance={"reuse_frozen_prefix": False}, remove_unused_columns=False
    )
    with pytest.raises(ValueError, match="changed seen"):
        trainer.train()
    assert not (tmp_path / "model.safetensors").exists()


def test_an_objective_of_several_passes_does_not_reuse_a_prefix(tmp_path):
    def one_by_one(model, inputs):
        given = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        logits = [model(input_ids=i[None], attention_mask=mask[None]).logits for i, mask in given]
        losses = torch.nn.functional.cross_entropy
        return losses(torch.cat(logits), inputs["labels"], reduction="none")

    same_rows = Dataset.from_dict({k: v[:1] * 120 for k, v in tiny_data().to_dict().items()})
    own = {"compute_per_example_loss": one_by_one}
    trainer = build(tmp_path, data=same_rows, trainable="classifier", trainer_settings=own)
    trainer.train()
    assert trainer.step.differences.prefix is None


@pytest.mark.parametrize("make", [tiny_model, lambda trial: tiny_model()])
def test_a_model_is_made_once(tmp_path, make):
    trainer = DPZeroTrainer(args=config(tmp_path), model_init=make, train_dataset=tiny_data())
    made = trainer.model
    trainer.train()
    assert trainer.model is made and trainer.privacy_report().steps == trainer.args.max_steps


def test_searches_and_second_models_are_refused(tmp_path):
    both = {"model_init": tiny_model, "train_dataset": tiny_data()}
    with pytest.raises(ValueError, match="model_init beside a model"):
        DPZeroTrainer(tiny_model(), config(tmp_path), **both)
    with pytest.raises(ValueError, match="every trial"):
        build(tmp_path).hyperparameter_search()


# ---- adapters, language models, Laplace


def test_adapters_train_alone_ship_alone_and_replay(tmp_path):
    trainer = build(tmp_path, with_lora(tiny_model()), learning_rate=1e-1)
    before = weights(trainer.model)
    trainer.train()
    trainer.save_model()
    moved = {name for name, w in weights(trainer.model).items() if not torch.equal(w, before[name])}
    assert moved == {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "classifier" in name for name in moved)
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "model.safetensors").exists()
    rebuilt = with_lora(tiny_model())
    replay(rebuilt, Trajectory.load(tmp_path / "trajectory.safetensors"))
    assert same(weights(rebuilt), weights(trainer.model))


def test_a_causal_language_model_with_the_stock_collator(tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**sizes))
    data = tiny_data().remove_columns("labels")
    trainer = build(tmp_path, model, data=data.add_column("labels", data["input_ids"][:]))
    trainer.train()
    assert trainer.trajectory.next_step == 6
    tied = [name for name in trainer.space.names if "wte" in name or "lm_head" in name]
    assert len(tied) == 1  # the tied embedding is one tensor, moved once


def test_laplace_noise_gives_a_pure_epsilon(tmp_path):
    trainer = build(
        tmp_path, noise_distribution="laplace", target_delta=0.0, num_directions=3, **SECRET
    )
    trainer.train()
    report = trainer.privacy_report()
    pure = 6 * math.log1p(12 / 120 * math.expm1(1.0))  # T log(1 + q (e^(1/b) - 1)), b = 1
    assert report.private and report.delta == 0.0
    assert report.epsilon == pytest.approx(pure, rel=1e-6)
    assert "Laplace noise multiplier 1" in str(report)


# ---- what frozen parts may do


def test_a_frozen_parameter_that_a_later_batch_changes_stops_the_run(tmp_path):
    model = tiny_model()
    frozen = model.bert.embeddings.LayerNorm.weight.requires_grad_(False)
    forward, later = model.bert.forward, []

    def writing(*args, **kwargs):
        if later:
            with torch.no_grad():
                frozen.add_(1.0)
        return forward(*args, **kwargs)

    class AfterThreeSteps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            later.extend([1] * (state.global_step >= 3))

    model.bert.forward = writing
    trainer = build(tmp_path, model, max_steps=60, performance={"reuse_frozen_prefix": False})
    trainer.add_callback(AfterThreeSteps())
    with pytest.raises(ParameterChanged, match="LayerNorm.weight was written to"):
        trainer.train()
    with pytest.raises(ValueError, match="un-noised private data"):
        trainer.save_model()


def test_a_row_whose_loss_is_nan_changes_neither_strategy_nor_prefix(tmp_path, caplog):
    """What is set up may not tell data sets apart."""
    seen = []
    for bad in (False, True):
        model = tiny_model()
        model.bert.encoder.layer[0].requires_grad_(False)
        model.bert.embeddings.requires_grad_(False)

        def loss(m, inputs, bad=bad):
            out = torch.nn.functional.cross_entropy(
                m(input_ids=inputs["input_ids"]).logits, inputs["labels"], reduction="none"
            )
            return out.masked_fill(inputs["input_ids"][:, 0] < 15, math.nan) if bad else out

        given = {"compute_per_example_loss": loss}
        trainer = build(tmp_path / str(bad), model, trainer_settings=given, max_steps=1)
        trainer.train()
        differences = trainer.step.differences
        seen.append((differences.strategy, differences.prefix is None))
    assert seen[0] == seen[1] == ("whole_model", False)
    assert "reuse_frozen_prefix is off" not in caplog.text
