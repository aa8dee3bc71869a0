"""Settings that are chosen where none are given: what is chosen, that it follows from public numbers, that it learns."""  # noqa: E501

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from tiny_language_models import seeded
from tiny_runs import build, config, tiny_data, tiny_model, with_lora
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
)

from hf_dpzero import DPZeroConfig
from hf_dpzero.estimators import landscape
from hf_dpzero.estimators.landscape import Landscape
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.settings.defaults import (
    CLASSIC,
    MOVED,
    NOISE_SHARE,
    OF_GRADIENTS,
    cost_of_direction,
    directions_for,
    learning_rate,
    rate_on,
    steps_that_follow,
)
from hf_dpzero.training import zeroth_order_method

GIVEN_NOTHING = {"learning_rate": None, "clip": None}


def test_what_is_given_stays_and_other_methods_keep_the_classic_values(tmp_path):
    given = {"learning_rate": 0.5, "clip": 3.0, "clipping": "fixed", "num_directions": 4}
    args = DPZeroConfig(output_dir=str(tmp_path), target_epsilon=1.0, use_cpu=True, **given)
    assert {name: getattr(args, name) for name in given} == given and not args.chosen
    for settings in (
        {"method": "mezo"},
        {"method": "dp-adamw", "target_epsilon": 1.0},
        {"method": "dpgd-0th", "target_epsilon": 1.0},
        {"noise_distribution": "laplace", "target_epsilon": 1.0},
        {"noise_multiplier": 0.0},
    ):
        args = DPZeroConfig(output_dir=str(tmp_path), use_cpu=True, **settings)
        values = CLASSIC | OF_GRADIENTS.get(args.method, {})
        known = {n: v for n, v in values.items() if n != "clipping" and n not in args.chosen}
        assert {name: getattr(args, name) for name in known} == known, settings
        assert args.chosen == ({"num_directions"} if args.noise_multiplier == 0 else set())


@pytest.fixture
def nothing_public(monkeypatch):
    """No public row tells the loss' landscape: the rate is the plan's."""
    monkeypatch.setattr(zeroth_order_method, "public_microbatches", lambda *_, **__: [])


def test_with_a_clip_only_the_rate_is_chosen(tmp_path, nothing_public):
    given = {"clip": 5.0, "noise_multiplier": 24.0, "lr_scheduler_type": "constant"}
    trainer = build(tmp_path, learning_rate=None, **given)
    assert (trainer.args.clipping, trainer.args.num_directions) == ("fixed", 1)
    trainer.train()
    sigma, batch, steps = 24.0, 12, 6
    expected = NOISE_SHARE * batch / (sigma * 25.0 * math.sqrt(steps))
    assert trainer.trajectory.get(0).learning_rate == pytest.approx(expected)
    assert learning_rate(trainer.plan, "linear") == pytest.approx(expected * math.sqrt(3))


def test_with_little_noise_curvature_bounds_the_rate(tmp_path):
    """alpha u'Hu <= 1/8 with u'Hu = C^2 / K; from the noise it would grow without end."""
    given = {"clip": 5.0, "num_directions": 8, "learning_rate": None}
    rates = [
        learning_rate(build(tmp_path, noise_multiplier=sigma, **given).plan, "constant")
        for sigma in (8.0, 2.0, 0.2, 0.1)
    ]
    assert rates[1] == pytest.approx(4 * rates[0])
    assert rates[2:] == [0.125 * 8 / 25.0] * 2 and rates[1] < rates[2]


def test_directions_follow_from_what_each_of_them_runs(tmp_path):
    model = tiny_model()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    head = sum(size for name, size in sizes.items() if name.startswith("classifier"))
    tables = sum(size for name, size in sizes.items() if "_embeddings." in name)
    assert cost_of_direction(model, "classifier") == head
    assert cost_of_direction(model, None) == 128 * (sum(sizes.values()) - tables) < 1_000_000
    assert build(tmp_path, **GIVEN_NOTHING).run.args.num_directions == 32
    wide = tiny_model(intermediate_size=4096)
    assert build(tmp_path, wide, **GIVEN_NOTHING).run.args.num_directions == 1
    head_alone = build(tmp_path, wide, trainable="classifier", **GIVEN_NOTHING)
    assert head_alone.run.args.num_directions == 32
    prefix = PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    # PEFT lists a prefix behind the body, which runs again for each direction all the same.
    assert directions_for(config(tmp_path, **GIVEN_NOTHING), get_peft_model(wide, prefix)) == 1


@pytest.mark.parametrize(
    ("kind", "settings", "trainable", "expected"),
    [
        (RobertaForSequenceClassification, RobertaConfig(), "classifier", 32),  # 0.6 million
        (RobertaForTokenClassification, RobertaConfig(), "classifier", 32),  # 1,538 on all tokens
        (Wav2Vec2ForSequenceClassification, Wav2Vec2Config(), "projector|classifier", 1),
        (BertForSequenceClassification, BertConfig(), "pooler|classifier", 32),
        (BertForSequenceClassification, BertConfig(), "layer.11", 1),
        (BertForMaskedLM, BertConfig(), "cls.predictions.transform", 1),
    ],
)
def test_directions_follow_the_positions_that_a_head_sees(
    tmp_path, kind, settings, trainable, expected
):
    with torch.device("meta"):
        model = kind(settings)
    given = config(tmp_path, trainable=trainable, **GIVEN_NOTHING)
    assert directions_for(given, model) == expected


def test_public_rows_lower_the_rate_which_then_no_clip_moves(tmp_path, capsys, monkeypatch):
    """Losses that curve less than the plan's rate allows leave that rate, which follows the clip."""
    for curvature, bound in ((1e4, True), (50.0, False)):
        found = Landscape(4.0, 40.0, curvature, curvature / 10, 40)
        monkeypatch.setattr(landscape, "measure", lambda *_, found=found: found)
        settings = {**GIVEN_NOTHING, "lr_scheduler_type": "constant", "num_directions": 2}
        trainer = build(tmp_path / str(bound), max_steps=10, **settings)
        trainer.train()
        rates = [release.learning_rate for release in trainer.trajectory.releases]
        told = (
            rate_on(
                found, trainer.plan, "constant", zeroth_order_method.size_of_moved(trainer.run)
            ),
            learning_rate(trainer.plan, "constant"),
        )
        assert rates[0] == pytest.approx(min(told)) and bound == (told[0] < told[1])
        assert (len(set(rates)) == 1) == bound
        said = "rate        of 40 public rows: slope 2, scatter 6.3, curvature 1e+04"
        assert (said in capsys.readouterr().out) == bound


def test_weights_have_a_size_where_most_of_their_movement_is_random(tmp_path):
    """More weights than directions in the run, and no fresh head."""
    few = build(tmp_path / "few", max_steps=10, num_directions=2, clip=1.0).run
    trained = torch.cat([p.flatten() for p in few.model.parameters() if p.requires_grad])
    assert zeroth_order_method.size_of_moved(few) == pytest.approx(
        float(trained.square().mean().sqrt())
    )
    many = build(tmp_path / "many", max_steps=len(trained) // 2, num_directions=2, clip=1.0).run
    assert zeroth_order_method.size_of_moved(many) == 0.0
    # A checkpoint that lacks a trained tensor: the head is fresh.
    folder = tmp_path / "base"
    few.model.save_pretrained(folder)
    few.model.name_or_path = few.model.config._name_or_path = str(folder)
    assert zeroth_order_method.size_of_moved(few) > 0
    head = next(n for n, p in few.model.named_parameters() if p.requires_grad)
    kept = {n: t for n, t in few.model.state_dict().items() if n != head}
    few.model.save_pretrained(folder, state_dict=kept)
    assert zeroth_order_method.size_of_moved(few) == 0.0


@pytest.mark.false_alarm(0)
def test_factors_that_walk_by_a_share_of_their_size_move_the_weight_by_it(tmp_path):
    """B A, of factors that start as PEFT's do and move at random, along slopes that grow with them."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    bert = seeded(lambda: BertForMaskedLM(BertConfig(intermediate_size=64, **sizes)), 0)
    model = seeded(
        lambda: get_peft_model(bert, LoraConfig(r=4, target_modules=["query", "value"])), 1
    )
    run = SimpleNamespace(model=model, plan=SimpleNamespace(steps=10), args=config(tmp_path))
    size, changes = zeroth_order_method.size_of_moved(run), []
    generator, steps = torch.Generator().manual_seed(5), 400
    for layer in (m for m in model.modules() if hasattr(m, "lora_A") and "default" in m.lora_A):
        weight = layer.get_base_layer().weight
        factors = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        with torch.no_grad():
            start = factors[0].square().mean()
            for _ in range(steps):
                slope = (sum(f.square().mean() for f in factors) / start).sqrt()
                for f in factors:
                    f += (
                        MOVED
                        * size
                        / steps**0.5
                        * slope
                        * torch.randn(f.shape, generator=generator)
                    )
            changes.append(layer.get_delta_weight("default").norm() / weight.norm())
    assert len(changes) == 4 and float(max(changes)) == pytest.approx(MOVED, rel=0.2)
    head = with_lora(tiny_model())  # whose fresh head is trained too
    assert zeroth_order_method.size_of_moved(build(tmp_path / "head", head).run) == 0.0


def test_a_rate_follows_the_clip_up_to_what_public_rows_allow(tmp_path, monkeypatch):
    """A bit above the plan's own: ten steps in which the clip falls end there, not at the clip's."""
    monkeypatch.setattr(zeroth_order_method, "size_of_moved", lambda run: 0.0)
    settings = {**GIVEN_NOTHING, "lr_scheduler_type": "constant", "num_directions": 2}
    rates, curvature, allowed = {}, 50.0, 0.0
    for name in ("free", "capped"):
        if allowed:  # it goes as 1 / curvature
            curvature *= allowed / (1.05 * rates["free"][0])
        found = Landscape(4.0, 40.0, curvature, curvature / 10, 40)
        monkeypatch.setattr(landscape, "measure", lambda *_, found=found: found)
        trainer = build(tmp_path / name, max_steps=10, **settings)
        trainer.train()
        rates[name] = [release.learning_rate for release in trainer.trajectory.releases]
        allowed = rate_on(found, trainer.plan, "constant")
    assert rates["capped"][0] == rates["free"][0]
    assert max(rates["free"]) > 1.05 * rates["free"][0]
    assert max(rates["capped"]) == pytest.approx(allowed)
    assert allowed == pytest.approx(1.05 * rates["capped"][0])


def test_a_rate_follows_the_clip_beyond_the_first_steps_down_to_norms_of_public_rows(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(zeroth_order_method, "size_of_moved", lambda run: 0.0)
    monkeypatch.setattr(landscape, "measure", lambda *_: Landscape(6.0, 2.0, 1.0, 1.0, 40))
    settings = {**GIVEN_NOTHING, "lr_scheduler_type": "constant", "num_directions": 2}
    settings |= {"max_steps": 40, "save_strategy": "steps", "save_steps": 30}
    trainer = build(tmp_path, **settings)
    trainer.train()
    releases = trainer.trajectory.releases
    schedule = type(trainer.step._schedule)(trainer.plan.mechanism)
    clips = [schedule.after(releases[:t]).clip for t in range(40)]
    assert clips[20] > 4.0 > clips[39]  # 4 = (2 (6 + 2))^(1/2)
    for release, clip in zip(releases, clips, strict=True):
        followed = clip if release.step <= 20 else min(clips[20], max(clip, 4.0))
        at_first = releases[0].learning_rate
        assert release.learning_rate == pytest.approx(at_first * (50.0 / followed) ** 2)

    again = build(tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-30"))
    assert again.trajectory.releases == releases


def test_public_rows_are_looked_at_in_float32_where_products_are_not(tmp_path, monkeypatch):
    seen = []

    def measured(*_):
        seen.append(torch.get_float32_matmul_precision())
        return Landscape(4.0, 40.0, 1e4, 1e3, 40)

    monkeypatch.setattr(landscape, "measure", measured)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        build(tmp_path / "high", max_steps=2, **GIVEN_NOTHING).train()
        after = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
    build(tmp_path / "half", max_steps=2, bf16=True, **GIVEN_NOTHING).train()
    assert (seen, after) == (["highest"], "high")


def test_a_loss_that_curves_more_lowers_the_rate_and_one_that_curves_less_does_not_raise_it(
    tmp_path, monkeypatch
):
    """Looked at after every second step; resumed at step 4, the rates are the same."""
    found = iter(Landscape(4.0, 40.0, h, h / 10, 40) for h in (1e4, 4e4, 5e3, 8e4, 5e3))
    monkeypatch.setattr(landscape, "measure", lambda *_: next(found))
    settings = {"lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 2}
    settings |= {"max_steps": 10, "save_strategy": "steps", "save_steps": 4, **GIVEN_NOTHING}
    trainer = build(tmp_path, **settings)
    trainer.train()
    rates = [release.learning_rate for release in trainer.trajectory.releases]
    shares = torch.tensor(rates) / rates[0]
    expected = torch.tensor([1, 1, 1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 8])
    torch.testing.assert_close(shares, expected, rtol=1e-3, atol=0)

    found = iter(Landscape(4.0, 40.0, h, h / 10, 40) for h in (8e4, 5e3))
    again = build(tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [release.learning_rate for release in again.trajectory.releases] == rates
    again.evaluate()  # looks at nothing


def test_the_rate_follows_the_clip_for_the_first_steps_and_then_stays(tmp_path, nothing_public):
    settings = {"max_steps": 20, "lr_scheduler_type": "constant", "num_directions": 2}
    trainer = build(tmp_path, **GIVEN_NOTHING, **settings)
    trainer.train()
    schedule = type(trainer.step._schedule)(trainer.plan.mechanism)
    releases = trainer.trajectory.releases
    clips = [schedule.after(releases[:t]).clip for t in range(20)]
    assert clips[0] == 50.0 and len(set(clips)) > 10
    first = releases[0].learning_rate
    for step, release in enumerate(releases):
        held = clips[min(step, 10)]
        assert release.learning_rate == pytest.approx(first * (50.0 / held) ** 2)


@pytest.mark.parametrize(
    ("steps", "follow"), [(1, 0), (10, 5), (40, 20), (100, 20), (200, 30), (1000, 150)]
)
def test_a_short_run_follows_the_clip_long_enough_for_it_to_fall(steps, follow):
    assert steps_that_follow({"learning_rate"}, "adaptive", steps) == follow
    assert steps_that_follow({"learning_rate"}, "fixed", steps) == 0
    assert steps_that_follow(set(), "adaptive", steps) == 0


def test_an_interrupted_run_goes_on_with_the_same_rates(tmp_path):
    settings = {"max_steps": 10, "num_directions": 2, "save_strategy": "steps", "save_steps": 4}
    whole = build(tmp_path / "whole", **GIVEN_NOTHING, **settings)
    whole.train()
    again = build(tmp_path / "whole", **GIVEN_NOTHING, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    rates = [r.learning_rate for r in again.trajectory.releases]
    assert rates == [r.learning_rate for r in whole.trajectory.releases]


def test_with_nothing_given_a_head_learns(tmp_path):
    """Rows whose first token tells the label; chance is one half."""
    torch.manual_seed(0)
    rows = tiny_data(2000, seed=3)
    model = tiny_model(initializer_range=0.3)
    args = config(tmp_path, **GIVEN_NOTHING).to_dict()
    trainer = build(
        tmp_path,
        model,
        data=rows,
        **GIVEN_NOTHING,
        noise_multiplier=None,
        target_epsilon=4.0,
        target_delta=1e-5,
        expected_batch_size=64,
        microbatch_size=64,
        max_steps=60,
        trainable="embeddings|classifier",
        trainer_settings={"eval_dataset": tiny_data(400, seed=5)},
    )
    assert args["clipping"] == "adaptive"
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * before


def test_a_rate_from_a_script_with_gradients_is_spoken_of(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        build(tmp_path / "copied", clip=None, learning_rate=5e-5).train()
    (said,) = [r.getMessage() for r in caplog.records if "do not carry over" in r.getMessage()]
    assert said.startswith("learning_rate=5e-05 was given") and "leave it out" in said
    assert "the weights move 0.049 of the way" in said
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        build(tmp_path / "chosen", **GIVEN_NOTHING).train()
        build(tmp_path / "both", clip=5.0, learning_rate=5e-5).train()
    assert "do not carry over" not in caplog.text


def fresh_head(folder):
    """A classifier whose body lies in a folder, and whose head does not."""
    tiny_model().bert.save_pretrained(folder)
    return BertForSequenceClassification.from_pretrained(folder)


HEAD = {"trainable": "classifier", "clip": None, "learning_rate": 1e-5}


def test_a_rate_that_would_not_move_a_fresh_head_is_replaced(tmp_path, caplog):
    model = fresh_head(tmp_path / "base")
    trainer = build(tmp_path / "run", model, save_steps=4, save_strategy="steps", **HEAD)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    ours = learning_rate(trainer.plan, "linear")
    assert trainer.trajectory.get(0).learning_rate == pytest.approx(ours)
    assert ours > 50 * 1e-5 and trainer.args.learning_rate == 1e-5
    (said,) = [r.getMessage() for r in caplog.records if "learning_rate=1e-05" in r.getMessage()]
    assert f"{ours:.2g} is taken" in said and "learning_rate_is_final=True" in said
    report = trainer.privacy_report()
    assert report.learning_rate == said and f"rate        {said}" in str(report)
    again = build(tmp_path / "run", fresh_head(tmp_path / "base"), save_strategy="no", **HEAD)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert [r.learning_rate for r in again.trajectory.releases] == [
        r.learning_rate for r in trainer.trajectory.releases
    ]
    kept = HEAD | {"learning_rate_is_final": True}
    with pytest.raises(LedgerError, match="learning_rate"):
        build(tmp_path / "run", fresh_head(tmp_path / "base"), **kept).train(
            resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4")
        )


def test_elsewhere_a_given_rate_is_kept(tmp_path):
    """Said to be final, of a recipe, where pretrained weights move, and where the head has a base."""
    model = fresh_head(tmp_path / "body")
    assert build(tmp_path, model, **HEAD).run.args.learning_rate > 1e-4
    recipe = build(tmp_path, model, **HEAD)
    recipe.rates_are_final = True
    tiny_model().save_pretrained(tmp_path / "whole")
    whole = BertForSequenceClassification.from_pretrained(tmp_path / "whole")
    for trainer in (
        build(tmp_path, model, **HEAD, learning_rate_is_final=True),
        recipe,
        build(tmp_path, model, **HEAD | {"trainable": "classifier|pooler"}),
        build(tmp_path, model, **HEAD | {"learning_rate": 1e-4}),
        build(tmp_path, whole, **HEAD),
        build(tmp_path, tiny_model(), **HEAD),  # nothing says what it came from
    ):
        assert trainer.run.args.learning_rate == trainer.args.learning_rate
        assert "learning_rate" not in trainer.run.chosen
