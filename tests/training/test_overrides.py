"""What a trainer gets in place of Trainer's own functions is honoured, refused or named in a warning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_runs import build, config, same, tiny_data, tiny_model, weights
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import Trainer, TrainerCallback, default_data_collator
from transformers.optimization import Adafactor, AdafactorSchedule

from hf_dpzero import DPZeroTrainer
from hf_dpzero.checks.overrides import INSTEAD, overriding


def made(kind: type, tmp_path, settings=None, **fields) -> DPZeroTrainer:
    """A trainer of a subclass."""
    return kind(
        model=tiny_model(),
        args=config(tmp_path, **fields),
        train_dataset=tiny_data(),
        eval_dataset=tiny_data(40, seed=2),
        data_collator=default_data_collator,
        **(settings or {}),
    )


def schedule(rate: float = 0.5) -> LambdaLR:
    """learning rates 0.02, 0.02 `rate`, 0.02 `rate`^2, ..."""
    carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    return LambdaLR(carrier, lambda step: rate**step)


def rates(trainer: DPZeroTrainer) -> list[float]:
    return [release.learning_rate for release in trainer.trajectory.releases]


@pytest.mark.parametrize("name", INSTEAD)
def test_methods_that_carry_the_guarantee_are_not_overridden(tmp_path, name):
    kind = type("Mine", (DPZeroTrainer,), {name: getattr(DPZeroTrainer, name)})
    with pytest.raises(ValueError, match=f"Mine.{name} replaces .*: {INSTEAD[name][:20]}"):
        made(kind, tmp_path)


def test_methods_that_are_shadowed_are_named(tmp_path, caplog):
    """A trainer of somebody else's below ours: its step is not called."""

    class Theirs(Trainer):
        def training_step(self, *args, **kwargs):
            raise AssertionError

    kind = type("Joint", (DPZeroTrainer, Theirs), {"__module__": "hf_dpzero.tests"})
    assert overriding(kind, "training_step") == (Theirs, False)
    assert overriding(DPZeroTrainer, "training_step") == (None, False)
    made(kind, tmp_path, max_steps=1).train()
    assert "not used by Joint: Theirs.training_step (write the loss as" in caplog.text


def losses_of(model, inputs) -> torch.Tensor:
    logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
    return torch.nn.functional.cross_entropy(logits, inputs["labels"], reduction="none")


class Mine(DPZeroTrainer):
    """A script's own loss, a mean over the rows of a batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert num_items_in_batch is None or not self.is_in_train
        loss = self.accelerator.gather(losses_of(model, inputs)).mean()  # of one process: itself
        return self.of_row(loss, model, num_items_in_batch)

    def of_row(self, loss, model, items):
        return 2 * loss


Theirs = type("Theirs", (Trainer,), {"compute_loss": Mine.compute_loss, "of_row": Mine.of_row})


def doubled(outputs, labels, num_items_in_batch=None) -> torch.Tensor:
    assert num_items_in_batch is None
    return 2 * torch.nn.functional.cross_entropy(outputs.logits, labels)


@pytest.mark.parametrize("method", ["dpzero", "mezo", "dp-sgd"])
def test_a_scripts_own_loss_is_trained_on_one_row_at_a_time(tmp_path, caplog, method):
    """As twice each row's loss is, which no built-in objective gives."""
    settings = {"method": method, "max_steps": 2, "microbatch_size": 1}
    own = {"compute_per_example_loss": lambda model, inputs: 2 * losses_of(model, inputs)}
    expected = build(tmp_path / "expected", trainer_settings=own, **settings)
    expected.train()
    assert "one row at a time" not in caplog.text
    beneath = type("Joint", (DPZeroTrainer, Theirs), {})
    cases = [
        (Mine, {}, "Mine.compute_loss"),
        (beneath, {}, "Theirs.compute_loss"),
        (DPZeroTrainer, {"compute_loss_func": doubled}, "compute_loss_func"),
    ]
    for number, (kind, given, name) in enumerate(cases if method == "dpzero" else cases[:1]):
        caplog.clear()
        trainer = made(kind, tmp_path / str(number), given, **{**settings, "microbatch_size": 8})
        trainer.tables = [torch.eye(2).to_sparse(), np.array([None, {}], dtype=object)]
        trainer.train()
        words = f"{name} is evaluated on one row at a time, with num_items_in_batch=None"
        assert caplog.text.count(words) == 1
        for key, weight in weights(expected.model).items():
            torch.testing.assert_close(weights(trainer.model)[key], weight, rtol=1e-4, atol=1e-6)
        if method == "dpzero":  # the same passes, so the same bits
            assert same(weights(trainer.model), weights(expected.model))


SEEN: list[float] = []


class Refused:
    """What `of_row` makes of a loss, by what the refusal says of it."""

    @staticmethod
    def wrote_to_seen(self, loss, model, items):
        self.seen = [*getattr(self, "seen", []), float(loss)]
        return loss

    @staticmethod
    def wrote_to_SEEN(self, loss, model, items):
        SEEN.append(float(loss))
        return loss

    @staticmethod
    def wrote_to_mean(self, loss, model, items):
        self.mean = 0.9 * getattr(self, "mean", 0.0) + 0.1 * loss.detach()
        return loss - self.mean

    @staticmethod
    def before_and_after_another_example(self, loss, model, items):
        return loss + torch.rand((), generator=self.generator)  # a library's: not looked into

    @staticmethod
    def compute_loss_logs_what_it_computes_of_a_private_row(self, loss, model, items):
        self.log({"my_loss": float(loss)})
        return loss

    @staticmethod
    def wrote_to_log_history(self, loss, model, items):
        if self.is_in_train:  # as it is asked before training too
            self.state.log_history.append({"my_loss": float(loss)})
        return loss

    @staticmethod
    def exchanges_it_with_other_processes(self, loss, model, items):
        torch.distributed.all_reduce(loss)  # a mean of several processes' rows
        return loss

    @staticmethod
    def compute_loss_returned_NoneType_for_one_row(self, loss, model, items):
        return None

    @staticmethod
    def returned_torch_float32_2_for_one_row(self, loss, model, items):
        return torch.stack([loss, loss])

    @staticmethod
    def fails_for_one_row_with_num_items_in_batch_None(self, loss, model, items):
        return loss / items

    @staticmethod
    def is_NaN_or_infinite(self, loss, model, items):
        return loss / loss.view(1).std()  # a statistic over a batch of one


@pytest.mark.parametrize("words", [name for name in vars(Refused) if not name.startswith("__")])
def test_a_loss_of_more_than_its_row_is_refused(tmp_path, words):
    kept = {"of_row": vars(Refused)[words].__func__, "generator": torch.Generator()}
    trainer = made(type("Mine", (Mine,), kept), tmp_path)
    SEEN.clear()
    with pytest.raises(ValueError, match=words.replace("_", ".*")):
        trainer.train()
    assert trainer.trajectory is None


def test_a_per_example_loss_goes_before_ones_own(tmp_path, caplog):
    own = {"compute_per_example_loss": losses_of}
    made(Mine, tmp_path, own)
    build(tmp_path, trainer_settings={**own, "compute_loss_func": print})
    assert "not used" not in caplog.text and "one row" not in caplog.text
    build(tmp_path, trainer_settings=own, label_smoothing_factor=0.1)
    assert "label_smoothing_factor=0.1 (compute_per_example_loss is" in caplog.text


def test_what_is_set_after_the_trainer_was_made_is_refused_when_it_trains(tmp_path):
    """Each would have trained something else than it says, or paid for steps that were lost."""
    for number, (change, words) in enumerate(
        [
            (lambda t: setattr(t, "compute_loss", print), "compute_loss fails for one row"),
            (lambda t: setattr(t, "compute_loss_func", print), "compute_loss_func fails for one"),
            (lambda t: setattr(t.args, "gradient_accumulation_steps", 4), "gradient_accumulation"),
            (lambda t: setattr(t.args, "auto_find_batch_size", True), "would repeat steps"),
        ]
    ):
        trainer = build(tmp_path / str(number))
        change(trainer)
        with pytest.raises(ValueError, match=words):
            trainer.train()
        assert trainer.trajectory is None


def test_a_scheduler_that_is_set_after_the_trainer_was_made_is_followed(tmp_path):
    trainer = build(tmp_path)
    trainer.lr_scheduler = schedule()
    trainer.train()
    assert rates(trainer)[:3] == [0.02, 0.01, 0.005]


def test_a_given_per_example_loss_is_trained_on_and_ones_own_loss_evaluates(tmp_path):
    class Sevens(DPZeroTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **settings):
            outputs = model(**inputs)
            loss = outputs.loss * 0 + 7
            return (loss, outputs) if return_outputs else loss

    def loss(model, inputs):
        return model(**inputs).logits[:, 0]

    trainer = made(Sevens, tmp_path, {"compute_per_example_loss": loss}, max_steps=1)
    trainer.train()
    assert trainer.per_example_loss is loss and trainer.trajectory.next_step == 1
    assert trainer.evaluate()["eval_loss"] == pytest.approx(7)


# ---- optimizers and schedules


class SomeSGD(torch.optim.SGD):
    """By a name of its own, which is warned of once."""


def test_an_optimizer_has_no_effect_on_directions_and_its_schedule_gives_its_shape(
    tmp_path, caplog
):
    """0.01, the run's rate, times 0.02 x 0.5^t / 0.02, what the scheduler makes of the optimizer's."""
    model = tiny_model()
    optimizer = SomeSGD(model.parameters(), lr=0.02)
    shape = LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = build(tmp_path, model, trainer_settings={"optimizers": (optimizer, shape)})
    trainer.train()
    assert caplog.text.count("SomeSGD has no effect in a dpzero run") == 1
    assert rates(trainer) == pytest.approx([0.01 * 0.5**step for step in range(6)])
    assert not optimizer.state  # it has moved nothing


def test_an_optimizer_without_a_rate_gives_no_schedule(tmp_path):
    """Adafactor's makes its own rates; the run's fall linearly from 0.01."""
    model = tiny_model()
    optimizer = Adafactor(model.parameters(), lr=None, relative_step=True, warmup_init=True)
    given = {"optimizers": (optimizer, AdafactorSchedule(optimizer))}
    trainer = build(tmp_path, model, max_steps=2, trainer_settings=given)
    trainer.train()
    assert rates(trainer) == pytest.approx([0.01, 0.005])


def test_trainers_checkpoint_on_a_signal_is_not_put_in(tmp_path):
    """It saves in the middle of a step; transformers puts it in where the field is set."""
    trainer = build(tmp_path, enable_jit_checkpoint=True)
    kinds = {type(callback).__name__ for callback in trainer.callback_handler.callbacks}
    assert trainer.args.enable_jit_checkpoint
    assert "TerminationCallback" in kinds and "JITCheckpointCallback" not in kinds


def test_without_rows_the_optimizer_is_trainers(tmp_path):
    args = config(tmp_path, weight_decay=0.1)
    trainer = DPZeroTrainer(torch.nn.Sequential(torch.nn.Linear(2, 2)), args)
    trainer.create_optimizer()
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]


def test_an_optimizer_that_the_method_is_of_takes_the_noised_gradients(tmp_path):
    """The same weights as of the arguments that say the same; a schedule beside it is followed."""
    expected = build(tmp_path / "expected", method="dp-adamw", lr_scheduler_type="constant")
    expected.train()
    settings = {"lr": 1e-2, "weight_decay": 0.0}
    for number in range(2):
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        constant = LambdaLR(optimizer, lambda step: 1.0)
        given = {"optimizers": (optimizer, constant)}
        if number:
            given = {"optimizer_cls_and_kwargs": (torch.optim.AdamW, settings)}
        else:
            used = optimizer
        fields = {"method": "dp-adamw", "lr_scheduler_type": "constant", "learning_rate": 1e-2}
        trainer = build(tmp_path / str(number), model, trainer_settings=given, **fields)
        trainer.train()
        for name, weight in weights(expected.model).items():
            torch.testing.assert_close(weights(trainer.model)[name], weight, rtol=1e-5, atol=1e-7)
    assert rates(trainer) == [1e-2] * 6
    with pytest.raises(ValueError, match="AdamW has taken steps, whose gradients"):
        build(tmp_path, method="dp-adamw", trainer_settings={"optimizers": (used, None)})


def test_optimizers_that_would_not_train_what_is_said_are_refused(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(1))
    for settings in (
        {"optimizers": (torch.optim.SGD([parameter]), None)},
        {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})},
    ):
        with pytest.raises(ValueError, match="SGD with method='dp-adamw' .* torch.optim.AdamW"):
            build(tmp_path, method="dp-adamw", trainer_settings=settings)
    other = {"optimizers": (torch.optim.AdamW([parameter]), None)}
    with pytest.raises(ValueError, match="is trained, and the optimizer .* does not hold it"):
        build(tmp_path, method="dp-adamw", trainer_settings=other).train()


def test_schedulers_that_would_not_be_followed_are_refused(tmp_path):
    given = {"trainer_settings": {"optimizers": (None, schedule())}}
    with pytest.raises(ValueError, match="method='dp-sgd' sets the rates of an optimizer"):
        build(tmp_path, method="dp-sgd", **given)
    carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    given = {"trainer_settings": {"optimizers": (None, ReduceLROnPlateau(carrier))}}
    with pytest.raises(ValueError, match="lr_scheduler_type='reduce_lr_on_plateau'"):
        build(tmp_path, **given)


# ---- Trainer's methods outside of train()


class Reader(TrainerCallback):
    """Notes what a callback sees of the batches, and what it gets when it iterates over them."""

    trainer: DPZeroTrainer

    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        self.length = len(train_dataloader)
        for loader in (train_dataloader, self.trainer.get_train_dataloader()):
            with pytest.raises(ValueError, match="only the training loop iterates"):
                next(iter(loader))


@pytest.mark.parametrize("method", ["dpzero", "dp-adamw"])
def test_what_a_script_asks_before_training_does_not_change_it(tmp_path, method):
    plain = build(tmp_path / "plain", method=method)
    plain.train()
    reader = Reader()
    trainer = build(tmp_path / "asked", method=method, trainer_settings={"callbacks": [reader]})
    reader.trainer = trainer
    loader = trainer.get_train_dataloader()
    assert (len(loader), trainer.num_examples(loader)) == (10, 120)  # n / B of n rows
    trainer.create_optimizer_and_scheduler(num_training_steps=6)
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-2
    assert trainer.get_learning_rates()[0] == 1e-2
    trainer.train()
    assert reader.length == 10
    assert same(weights(trainer.model), weights(plain.model)) and rates(trainer) == rates(plain)


# ---- schedules


@pytest.mark.parametrize("method", ["dpzero", "dp-sgd"])
def test_an_overridden_create_scheduler_is_used(tmp_path, method):
    class Mine(DPZeroTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = LambdaLR(self.optimizer, lambda step: 0.1**step)
            return self.lr_scheduler

    trainer = made(Mine, tmp_path, method=method, max_steps=2)
    trainer.train()
    assert rates(trainer) == pytest.approx([1e-2, 1e-3])
