"""Training arguments are left as they were; what is chosen for a run stands in `trainer.run.args`."""

from __future__ import annotations

import copy

import pytest
from tiny_runs import build, config, tiny_data, tiny_model
from transformers import Trainer, TrainingArguments, default_data_collator

from hf_dpzero import DPZeroTrainer

CHOSEN = {"learning_rate": None, "clip": None, "max_steps": -1, "num_train_epochs": 1}


@pytest.mark.parametrize("settings", [{}, CHOSEN, {"method": "dp-sgd", "max_steps": -1}])
def test_training_arguments_are_left_untouched(tmp_path, settings):
    """As in Hugging Face's test of this name; also outside the fields."""
    trainer = build(tmp_path, **settings)
    before = copy.copy(vars(trainer.args))
    trainer.train()
    assert vars(trainer.args) == before
    assert trainer.args == (fresh := config(tmp_path, **settings))
    assert trainer.args.to_dict() == fresh.to_dict()


def test_one_configuration_serves_data_sets_of_several_sizes(tmp_path):
    """Each has its own steps, plan and epsilon; the steps are those of Trainer."""
    epochs = {"num_train_epochs": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True}
    plain = TrainingArguments(str(tmp_path), per_device_train_batch_size=8, **epochs)
    args = config(tmp_path, max_steps=-1, expected_batch_size=8, **epochs)
    epsilons = set()
    for number, (rows, steps) in enumerate(((64, 8), (128, 16), (32, 4))):
        args.output_dir = str(tmp_path / str(number))
        trainer = DPZeroTrainer(
            tiny_model(), args, default_data_collator, train_dataset=tiny_data(rows)
        )
        theirs = Trainer(tiny_model(), plain, train_dataset=tiny_data(rows))
        assert trainer.train().global_step == theirs.train().global_step == steps
        report = trainer.privacy_report()
        assert report.steps == trainer.plan.steps == trainer.run.args.max_steps == steps
        assert report.num_examples == rows
        assert report.epsilon == config(tmp_path, max_steps=steps, expected_batch_size=8).plan(
            rows
        ).epsilon(1e-3)
        epsilons.add(report.epsilon)
    assert len(epsilons) == 3 and args.max_steps == -1


def test_what_is_chosen_stands_beside_the_arguments(tmp_path):
    trainer = build(tmp_path, **CHOSEN)
    assert trainer.args.chosen == {"learning_rate", "num_directions"}
    trainer.train()
    found = trainer.run.args
    assert (found.max_steps, found.num_directions) == (10, 32)
    assert found.learning_rate == trainer.trajectory.get(0).learning_rate > 0
    assert trainer.trajectory.header["num_directions"] == 32
    assert (trainer.args.learning_rate, trainer.args.num_directions) == (None, None)


def test_arguments_that_are_set_after_the_trainer_was_made_are_heard(tmp_path):
    """Also where the plan was looked at before."""
    trainer = build(tmp_path, **CHOSEN)
    assert trainer.plan.steps == 10
    trainer.args.num_train_epochs = 2
    trainer.args.learning_rate = 0.25
    trainer.args.num_directions = 3
    trainer.args.target_delta = 1e-4
    trainer.train()
    assert trainer.state.global_step == trainer.plan.steps == 20
    assert trainer.trajectory.get(0).learning_rate == 0.25
    assert trainer.plan.mechanism.num_directions == len(trainer.trajectory.get(0).values) - 1 == 3
    assert trainer.run.delta == trainer.privacy_report().delta == 1e-4


def test_arguments_that_are_changed_behind_a_run_do_not_change_its_plan(tmp_path):
    trainer = build(tmp_path)
    trainer.train()
    spent = trainer.privacy_report()
    trainer.args.max_steps = 12
    with pytest.raises(ValueError, match="changed after this trainer's run began.*new trainer"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.privacy_report() == spent and trainer.plan.steps == 6


def test_a_nested_setting_that_is_changed_makes_another_plan(tmp_path):
    """It is one object in all shallow copies of the arguments, and would equal itself."""
    trainer = build(tmp_path, clipping="adaptive", max_steps=1)
    assert trainer.decide().plan.mechanism.clip_quantile == 0.5
    trainer.args.clipping_config.quantile = 0.75
    assert trainer.decide().plan.mechanism.clip_quantile == 0.75
    trainer.train()
    trainer.args.clipping_config.quantile = 0.5
    assert trainer.run.args.clipping_config.quantile == 0.75
    with pytest.raises(ValueError, match="changed after this trainer's run began"):
        trainer.train(resume_from_checkpoint=True)
