"""Ways of computing the same numbers: attention kernels, torch.compile, autocast."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_runs
import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
from tiny_texts import pad, texts
from torch import nn
from transformers import TrainerCallback

from hf_dpzero import DPZeroTrainer
from hf_dpzero.batches import placement
from hf_dpzero.checks.precision import check_mixed_precision
from hf_dpzero.estimators.arithmetic import uncached_autocast, unwrapped
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import is_compiled
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.settings import hf_arguments
from hf_dpzero.training.preparation import prepare

U = Direction(5, 0, 0)
INDUCTOR = pytest.param(
    "inductor",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler"),
    ],
)

DYNAMO = (
    "automatic_dynamic_shapes", "recompile_limit", "accumulated_recompile_limit",
    "fail_on_recompile_limit_hit",
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    before = {name: getattr(dynamo, name) for name in DYNAMO[:3]}
    yield
    for name, value in before.items():
        setattr(dynamo, name, value)


def graphs() -> int:
    """Graphs that dynamo has compiled in this test."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class CountGraphs(TrainerCallback):
    """Notes how many there are when a step begins and ends."""

    def __init__(self, found: list[int]) -> None:
        self.found = found

    def on_step_begin(self, *args: Any, **settings: Any) -> None:
        self.found.append(graphs())

    on_step_end = on_step_begin


def differences_of(model: Any, smoothing: float = 1e-2, **settings: Any) -> FiniteDifferences:
    space = ParameterSpace.from_model(model, smoothing=smoothing)
    space.snap_()
    return FiniteDifferences(model, space, select_objective(model), smoothing, **settings)


def per_example(model: Any, batch: Any, **settings: Any) -> torch.Tensor:
    """x [B, 2]; the model is settled again."""
    differences = differences_of(model, **settings)
    x = differences([batch], [U, Direction(6, 0, 0)])
    differences.space.settle_()
    return x


def tolerance(model: Any, batch: Any, smoothing: float = 1e-2) -> float:
    """Eight roundings of float32 in each of two losses, divided by 2 lambda."""
    with torch.no_grad():
        largest = float(select_objective(model)(model, batch).max())
    return 8 * 2**-23 * largest / smoothing


# ---- attention


def padded(batch: dict[str, torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on `side`."""
    mask = batch["attention_mask"]
    assert len(mask.sum(1).unique()) > 1
    if side == "right":
        return batch
    moves = (mask.shape[1] - mask.sum(1)).tolist()

    def left(value: torch.Tensor) -> torch.Tensor:
        rolled = [row.roll(n) for row, n in zip(value, moves)]
        return torch.stack(rolled) if value.dim() == 2 else value

    return {name: left(value) for name, value in batch.items()}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("factory", ["tiny_bert", "tiny_opt"])
def test_sdpa_and_eager_attention_agree(factory: str, side: str, request: Any):
    make = request.getfixturevalue(factory)
    batch = padded(request.getfixturevalue("causal_batch")(), side)
    if factory == "tiny_bert":
        batch = {**batch, "labels": torch.tensor([0, 1, 1, 0])}
    found = {}
    for kind in ("sdpa", "eager"):
        model = make()
        model.set_attn_implementation(kind)
        found[kind] = per_example(model, batch)
        assert model.config._attn_implementation == kind
    assert (found["sdpa"] - found["eager"]).abs().max() <= tolerance(make(), batch)
    assert found["eager"].abs().min() > 10 * tolerance(make(), batch)  # or there is no power


# ---- torch.compile, the engine


def classification_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(4, 64, (4, 9), generator=generator)
    labels = torch.tensor([0, 1, 1, 0])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.mark.parametrize(
    ("backend", "way"),
    [
        ("eager", "in place"),
        ("eager", "wrapped"),
        ("eager", "unwrapped"),
        ("eager", "one layer"),
        ("aot_eager", "in place"),
    ],
)
def test_compiled_code_sees_the_perturbation(tiny_bert, backend: str, way: str):
    batch, plain = classification_batch(), tiny_bert()
    expected = per_example(plain, batch)
    model: Any = tiny_bert()
    if way in ("wrapped", "unwrapped"):
        inner, model = model, torch.compile(model, backend=backend)
        if way == "unwrapped":
            model = unwrapped(model)
            assert model is inner and is_compiled(model)
    else:
        (model if way == "in place" else model.bert.encoder.layer[0]).compile(backend=backend)
    found = per_example(model, batch)
    assert graphs() > 0
    assert (found - expected).abs().max() <= tolerance(plain, batch)
    assert expected.abs().min() > 10 * tolerance(plain, batch)


def test_one_graph_serves_every_perturbation(tiny_bert):
    """Values and version counters of weights are no guards: nothing is compiled again."""
    model, batch = tiny_bert(), classification_batch()
    model.compile(backend="aot_eager")
    differences = differences_of(model)
    differences([batch], [U])
    first = graphs()
    for step in range(1, 4):
        differences([batch], [Direction(5, step, 0)])
        differences.space.step_([Direction(5, step, 0)], [1e-3])
    assert graphs() == first > 0


def test_a_frozen_prefix_is_not_reused_in_compiled_models(tiny_bert):
    def frozen() -> Any:
        model = tiny_bert()
        model.bert.embeddings.requires_grad_(False)
        model.bert.encoder.layer[0].requires_grad_(False)
        return model

    batch, model = classification_batch(), frozen()
    model.compile(backend="eager")
    assert differences_of(frozen()).prefix is not None
    assert differences_of(model).prefix is None
    expected, found = per_example(frozen(), batch), per_example(model, batch)
    assert (found - expected).abs().max() <= tolerance(frozen(), batch)


# ---- in the trainer


def build(folder: Any, model: Any, **settings: Any) -> DPZeroTrainer:
    defaults = {
        "clip": 50.0,
        "expected_batch_size": 8,
        "microbatch_size": 4,
        "max_steps": 3,
        "smoothing": 4e-3,
        "learning_rate": 1e-3,
    }
    return tiny_runs.build(folder, model, **{**defaults, **settings})


def values(trainer: DPZeroTrainer) -> torch.Tensor:
    trainer.train()
    return torch.tensor([release.values[0] for release in trainer.trajectory.releases])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])  # graphs are dynamo's, before inductor
def test_every_fixed_shape_has_one_graph_of_its_own(tmp_path, tiny_bert, backend: str, monkeypatch):
    """Which graph evaluates a row must not follow from the shapes that came before.

    By default the second shape makes a graph for all further ones, and the ninth runs uncompiled.
    """
    lengths = [3, 8, 12, 20, 33]  # of which 8 fills its bucket
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(4, 64, (lengths[i % 5],), generator=generator).tolist() for i in range(90)]
    rows = [
        {"input_ids": one, "attention_mask": [1] * len(one), "labels": one[0] % 2} for one in ids
    ]

    monkeypatch.setattr(placement, "STEPS", (16,))  # all of a model this small would be one width
    settings = {"torch_compile": True, "torch_compile_backend": backend, "expected_batch_size": 16}
    given, rows = {"eval_dataset": rows[60:]}, rows[:60]
    model = tiny_bert(max_position_embeddings=64, num_hidden_layers=1)  # which takes seconds
    trainer = build(
        tmp_path, model, data=rows, trainer_settings=given, microbatch_size=2, **settings
    )
    trainer.data_collator = pad
    prepare(trainer.run)
    assert trainer.run.shapes.placement.largest == 2
    widths = {len(m["input_ids"][0]) for m in trainer.run.shapes.microbatches(range(60))}
    assert widths == {16, 32, 48}
    made_by: list[int] = []
    trainer.add_callback(CountGraphs(made_by))
    trainer.train()
    likely = trainer.run.shapes.placement.shapes_of(trainer.run.plan.steps)
    assert {width for width, _ in likely} >= widths  # all compiled before step 0, and none later
    assert made_by[0] >= len(likely) and set(made_by) == {made_by[0]}
    made = trainer.run.shapes.microbatches(range(60))
    evaluate = trainer.step.differences.evaluate
    with torch.no_grad():
        expected = [evaluate(m) for m in made]
        after_all = graphs()
        again = [evaluate(m) for m in reversed(made)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(expected, again))
    assert graphs() == after_all >= len(widths)


@pytest.mark.parametrize(
    ("backend", "frozen", "already"),
    [
        ("eager", None, False),
        pytest.param("aot_eager", r"attention|classifier", False, marks=pytest.mark.slow),
        pytest.param(*INDUCTOR.values, None, False, marks=INDUCTOR.marks),
        pytest.param("eager", None, True, marks=pytest.mark.slow),
    ],
)
def test_compiled_models_train_the_same_and_save(tmp_path, tiny_bert, backend, frozen, already):
    """By the settings, or compiled before. Values differ by float32 rounding over 2 lambda: 1e-5."""
    small = {"num_hidden_layers": 1}  # to compile a layer takes seconds
    plain = build(tmp_path / "plain", tiny_bert(**small), trainable=frozen)
    expected, model = values(plain), tiny_bert(**small)
    settings: dict[str, Any] = {"trainable": frozen}
    if already:
        model.compile(backend=backend)
    else:
        settings |= {"torch_compile": True, "torch_compile_backend": backend}
    compiled = build(tmp_path / "compiled", model, **settings)
    assert torch.allclose(values(compiled), expected, rtol=0, atol=1e-3)
    assert graphs() > 0 and expected.abs().min() > 1e-2  # the steps ran compiled code
    assert is_compiled(compiled.model)
    assert compiled.trajectory.header["trainable"] == plain.trajectory.header["trainable"]
    public_loss = plain.evaluate()["eval_loss"]
    assert compiled.evaluate()["eval_loss"] == pytest.approx(public_loss, abs=1e-4)
    compiled.save_model()
    again = type(model).from_pretrained(tmp_path / "compiled")
    for name, parameter in compiled.model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)


def test_the_attention_that_was_asked_for_stays(tmp_path, tiny_bert):
    model = tiny_bert()
    model.set_attn_implementation("eager")
    before = model.config.to_dict()
    trainer = build(tmp_path, model)
    trainer.train()
    assert trainer.model.config._attn_implementation == "eager"
    # Hugging Face's Trainer turns use_cache off; nothing else changes.
    assert {**trainer.model.config.to_dict(), "use_cache": None} == {**before, "use_cache": None}


class Writer(nn.Module):
    """A model with one float per row, whose forward changes its weight."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.weight, self.through_data = nn.Parameter(torch.ones(8)), through_data

    @torch.no_grad()
    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        weight = self.weight.data if self.through_data else self.weight
        weight.mul_(1.001)
        return input_ids.float() @ self.weight


@pytest.mark.parametrize("through_data", [False, True])
def test_a_model_that_writes_to_its_weights_is_refused_before_anything(tmp_path, through_data):
    def losses(model: nn.Module, inputs: Any) -> torch.Tensor:
        return model(**inputs)

    objective = {"compute_per_example_loss": losses}
    trainer = build(tmp_path, Writer(through_data), trainer_settings=objective)
    with pytest.raises(ValueError, match="weight was changed by a forward pass"):
        trainer.train()
    assert not list(tmp_path.rglob("*.jsonl")) and trainer.trajectory is None


# ---- autocast


def test_bf16_trains_and_is_near_float32(tmp_path, tiny_bert):
    """Same directions, rows and noise; bfloat16 has 8 bits, so values agree to a few percent."""
    exact = values(build(tmp_path / "fp32", tiny_bert(), microbatch_size=1))
    trainer = build(tmp_path / "bf16", tiny_bert(), bf16=True, microbatch_size=1)
    low = values(trainer)
    assert not torch.equal(low, exact)  # autocast was on
    assert torch.allclose(low, exact, rtol=0.1, atol=0.1)
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    several = build(tmp_path / "several", tiny_bert(), bf16=True, expected_batch_size=32)
    several.train()
    assert several.run.shapes.placement.largest == 4
    with pytest.raises(ValueError, match="bf16=True with microbatch_size=4"):
        build(tmp_path / "coupled", tiny_bert(), bf16=True, method="dp-sgd").train()


def test_what_is_checked_before_training_runs_in_its_arithmetic(tmp_path, tiny_bert):
    """Accelerate puts autocast around the model only after the trial and the set-up checks."""
    trainer = build(tmp_path, tiny_bert(), bf16=True, microbatch_size=1)
    seen: list[tuple[bool, bool]] = []

    def losses(model: Any, inputs: Any) -> torch.Tensor:
        state = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        seen.append(state)
        return select_objective(model)(model, inputs)

    trainer.per_example_loss = losses
    trainer.train()
    assert len(seen) > 10 and set(seen) == {(True, False)}


def test_no_copy_of_a_weight_outlives_a_forward_pass(tmp_path, tiny_bert):
    """With autocast's cache a second pass inside one block would not see a moved weight."""
    trainer = build(tmp_path, tiny_bert(), bf16=True, microbatch_size=1)
    model, batch = tiny_bert(), classification_batch()
    objective = select_objective(model)

    def moved_inside(context: Any) -> bool:
        with torch.no_grad(), context:
            before = objective(model, batch)
            model.bert.encoder.layer[0].attention.self.query.weight.add_(0.5)
            model.classifier.weight.add_(0.5)
            return not torch.equal(before, objective(model, batch))

    assert not moved_inside(torch.autocast("cpu", torch.bfloat16))  # the trap is there
    assert moved_inside(uncached_autocast(trainer.accelerator))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_mixed_precision_from_the_launcher_is_seen(tmp_path, tiny_bert, monkeypatch, name):
    """`accelerate launch --mixed_precision` sets a variable, not an argument."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", name)
    trainer = build(tmp_path, tiny_bert(), method="dp-sgd")
    assert not trainer.args.bf16
    with pytest.raises(ValueError, match="with microbatch_size=4"):
        trainer.train()
    with pytest.raises(ValueError, match="mixed_precision='fp8' .*too coarse"):
        check_mixed_precision(SimpleNamespace(mixed_precision="fp8"), "cpu")  # type: ignore[arg-type]


# ---- float16


@pytest.mark.parametrize("method", ["dpzero", "dp-sgd"])
def test_fp16_is_bfloat16_on_a_cpu(tmp_path, tiny_bert, method):
    settings = {"method": method, "microbatch_size": 1, "max_steps": 2}
    if method == "dp-sgd":  # else noise hides how gradients are rounded
        settings |= {"clip": 1e-2, "learning_rate": 1.0}
    found = []
    for name in ("fp16", "bf16", "tf32"):
        trainer = build(tmp_path / name, tiny_bert(), **settings, **{name: name != "tf32"})
        trainer.train()
        found.append(tiny_runs.weights(trainer.model))
    assert tiny_runs.same(*found[:2]) and not tiny_runs.same(*found[1:])
    assert hf_arguments.use_of("fp16", trainer.args).kind == hf_arguments.OTHER


def test_float16_is_cast_without_a_scaler_and_one_row_a_pass_where_layers_clamp(
    tmp_path, tiny_bert, monkeypatch, caplog
):
    """On a device that says it is a GPU; then the same on this CPU, whose autocast knows float16 too."""
    gpu = torch.device("cuda")
    for first_order, found in ((False, "fp16"), (True, "bf16")):
        args = SimpleNamespace(mixed_precision="fp16", first_order=first_order, device=gpu)
        hf_arguments.take_half(args)  # type: ignore[arg-type]
        assert args.mixed_precision == found
    with pytest.warns(UserWarning, match="CUDA is not available"):
        cast: Any = uncached_autocast(SimpleNamespace(device=gpu), half=True)  # type: ignore[arg-type]
    assert (cast.device, cast.fast_dtype, cast._cache_enabled) == ("cuda", torch.float16, False)

    class Clamping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            if x.dtype == torch.float16 and torch.isinf(x).any():
                x = x.clamp(-6e4, 6e4)
            seen.append(x.dtype)
            return x

    seen: list[torch.dtype] = []
    with_half = lambda args: setattr(args, "mixed_precision", "fp16")  # noqa: E731
    monkeypatch.setattr(hf_arguments, "take_half", with_half)
    model = tiny_bert()
    model.classifier = Clamping(model.classifier.in_features, 2)
    trainer = build(tmp_path / "run", model, fp16=True, max_steps=1, microbatch_size=4)
    assert trainer.accelerator.scaler is None and trainer.accelerator.mixed_precision == "no"
    trainer.train()
    assert set(seen) == {torch.float16}
    assert "classifier clamps all rows of a batch where one of them overflows" in caplog.text
    assert trainer.run.shapes.one_by_one
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_training_under_the_users_own_autocast_is_refused(tmp_path, tiny_bert):
    trainer = build(tmp_path, tiny_bert())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=r"called under torch.autocast.*bf16=True"),
    ):
        trainer.train()


@pytest.mark.parametrize("own", [False, True])
def test_weights_folded_into_constants_are_refused(tmp_path, tiny_bert, own: bool):
    """Inductor's freezing would leave every loss at theta: x = 0 for everyone, and only noise."""
    model = tiny_bert()
    if own:
        model.compile(backend="eager")
    settings = {} if own else {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer = build(tmp_path, model, **settings)
    words = "freezing is on.*TORCHINDUCTOR_FREEZING"
    with inductor.patch(freezing=True), pytest.raises(ValueError, match=words):
        trainer.train()


def test_dynamo_is_left_as_it_was_and_stops_at_its_limit(tmp_path, monkeypatch):
    """The settings hold inside train() alone; a graph too many raises, where torch would run eagerly."""
    before = {name: getattr(dynamo, name) for name in DYNAMO}
    inside = []

    class Look(TrainerCallback):
        def on_step_end(self, *args: Any, **settings: Any) -> None:
            inside.append({name: getattr(dynamo, name) for name in DYNAMO})

    def trainer_of(folder: Any) -> Any:
        own = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 1}
        trainer = tiny_runs.build(
            folder, tiny_runs.tiny_model().bfloat16(), data=texts(60),
            trainer_settings={"eval_dataset": texts(40, 9)}, microbatch_size=4,
            expected_batch_size=40, **own,
        )  # fmt: skip
        trainer.data_collator = pad
        return trainer

    trainer = trainer_of(tmp_path / "run")
    trainer.add_callback(Look())
    trainer.train()
    assert inside[0]["fail_on_recompile_limit_hit"] and inside[0]["recompile_limit"] == 4096
    assert {name: getattr(dynamo, name) for name in DYNAMO} == before
    monkeypatch.setattr("hf_dpzero.estimators.arithmetic.GRAPHS", 1)
    monkeypatch.setattr(dynamo, "recompile_limit", 1)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="recompile_limit"):  # rows of 8 and of 16 columns
        trainer_of(tmp_path / "more").train()
    assert {name: getattr(dynamo, name) for name in DYNAMO} == {**before, "recompile_limit": 1}
