"""`hf-dpzero plan --recipe`: rows, shapes, memory and time, before a weight is downloaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from hf_dpzero.cli import main
from hf_dpzero.estimators.exactness_checks import make_exact
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.ghost_clipping import per_example_gradients
from hf_dpzero.experiments import plan as overview
from hf_dpzero.experiments import plan_tables as tables
from hf_dpzero.experiments.memory import configs
from hf_dpzero.experiments.memory import live_bytes as estimate
from hf_dpzero.experiments.memory import model_on_meta as blueprint
from hf_dpzero.experiments.memory import objective_passes as passes
from hf_dpzero.experiments.memory import peaks as memory
from hf_dpzero.experiments.memory import row_counts as rows
from hf_dpzero.experiments.memory.shapes import SHAPES
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.privacy.mechanisms import mechanism_from_dict
from hf_dpzero.privacy.noise import SecureNoise
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.recipe import Recipe, load_recipe
from hf_dpzero.tasks.arguments import DataArguments
from hf_dpzero.training.first_order_step import FirstOrderStep, PlainGradients

TINY = {
    "model_type": "roberta",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 42,
    "pad_token_id": 1,
}
TINY_OPT = {
    "model_type": "opt",
    "vocab_size": 64,
    "hidden_size": 16,
    "word_embed_proj_dim": 16,
    "ffn_dim": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
SETTINGS = {
    "task": "sst2",
    "num_examples_per_class": 8,
    "max_seq_length": 16,
    "method": "dpzero",
    "target_epsilon": 4.0,
    "target_delta": 1e-2,
    "expected_batch_size": 4,
    "microbatch_size": 4,
    "per_device_eval_batch_size": 4,
    "max_steps": 10,
}


@pytest.fixture
def recipe_of(tmp_path: Path) -> Any:
    """(config, **settings) -> a recipe of a checkpoint that is a configuration and nothing else."""

    def make(config: dict[str, Any] = TINY, **settings: Any) -> Recipe:
        folder = tmp_path / config["model_type"]
        AutoConfig.for_model(**config).save_pretrained(folder)
        values = {**SETTINGS, "model_name_or_path": str(folder), **settings}
        values.setdefault("output_dir", str(tmp_path / "out"))
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
        return load_recipe(path)

    return make


def plan_of(recipe: Recipe, labels: int = 2) -> passes.Pass:
    """The recipe's pass, as `overview` builds it."""
    config = configs.find_config(recipe.model).config
    made = blueprint.Blueprint.of(recipe, config, labels)
    return passes.pass_of(made, recipe.data.max_seq_length, recipe.data)


def published(name: str, head: str, **settings: Any) -> blueprint.Blueprint:
    """The blueprint of a well-known checkpoint that is not here."""
    arguments = ModelArguments(model_name_or_path=name, **settings)
    return blueprint.Blueprint(arguments, AutoConfig.for_model(**SHAPES[name]), head, 2, None)


# ---------------------------------------------------------------- parameters


def test_opt_has_the_parameters_of_its_architecture():
    """Tied output, positions from 2 on; a layer: 4 h^2 + 4 h, 8 h^2 + 5 h, two norms of 2 h."""
    h, layers, vocabulary, positions = 2048, 24, 50272, 2048 + 2
    layer = 4 * h**2 + 4 * h + 8 * h**2 + 5 * h + 2 * 2 * h
    expected = vocabulary * h + positions * h + layers * layer + 2 * h
    assert expected == 1_315_758_080
    found = overview.parameter_counts(published("opt-1.3b", "causal_lm").whole("bfloat16"))
    assert found["parameters"] == found["trained_parameters"] == expected
    assert found["parameter_bytes"] == 2 * expected


def roberta_large_body() -> int:
    """Words, 514 positions, one segment and a norm; per layer 4 h^2, 8 h^2, their biases, two norms."""
    h = 1024
    layer = 4 * (h * h + h) + (4 * h * h + 4 * h) + (4 * h * h + h) + 2 * 2 * h
    return (50265 + 514 + 1) * h + 2 * h + 24 * layer


def test_roberta_large_as_a_masked_language_model():
    """A dense layer, a norm and a bias of the vocabulary; the matrix is the embeddings'."""
    h = 1024
    expected = roberta_large_body() + h * h + h + 2 * h + 50265
    found = overview.parameter_counts(published("roberta-large", "masked_lm").whole("float32"))
    assert found["parameters"] == expected == 355_412_057


@pytest.mark.parametrize("head", ["masked_lm", "sequence_classification"])
def test_lora_trains_two_thin_matrices_for_query_and_value(head: str):
    """r (h + h) for each of two matrices in 24 layers; a classifier's head is trained as a copy."""
    h, r = 1024, 8
    adapters = 2 * 24 * r * (h + h)
    classifier = h * h + h + 2 * h + 2 if head == "sequence_classification" else 0
    made = published("roberta-large", head, peft_method="lora", lora_r=r)
    found = overview.parameter_counts(made.whole("bfloat16"))
    assert found["trained_parameters"] == adapters + classifier
    base = roberta_large_body() + 2 * classifier
    if head == "masked_lm":
        base += h * h + h + 2 * h + 50265
    assert found["parameters"] == base + adapters


def test_bitfit_and_a_pattern_train_what_they_name(recipe_of: Any):
    bitfit = plan_of(recipe_of(peft_method="bitfit")).blueprint.whole("float32")
    trained = [n for n, p in bitfit.named_parameters() if p.requires_grad]
    assert trained and all(n.endswith("bias") or n.startswith("classifier") for n in trained)
    pattern = plan_of(recipe_of(trainable=r"layer\.3\.|^classifier")).blueprint
    trained = [n for n, p in pattern.whole("float32").named_parameters() if p.requires_grad]
    assert trained and all("layer.3." in n or n.startswith("classifier") for n in trained)


# ---------------------------------------------------------------- a few layers


@pytest.mark.parametrize(("layers", "trained"), [(1, {0}), (3, {1, 2})])
def test_a_shortened_model_has_the_last_layers_and_what_trains_in_them(
    layers: int, trained: set[int], recipe_of: Any
):
    """Layers 2 and 3 of 4 train: of the last three these are numbers 1 and 2."""
    before = torch.random.get_rng_state()
    made = plan_of(recipe_of(trainable=r"layer\.(2|3)\.")).blueprint
    model = made.shortened(layers, "float32", "cpu")
    assert torch.equal(torch.random.get_rng_state(), before)
    stack = blueprint.layer_stack(model, layers)
    found = {
        int(name.removeprefix(f"{stack}.").split(".")[0])
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert found == trained
    for name, p in model.named_parameters():
        assert bool(p.isfinite().all()) and float(p.detach().abs().sum()) > 0, name


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ({}, 0),
        ({"trainable": "^classifier"}, 4),
        ({"trainable": r"layer\.2\.|^classifier"}, 2),
        ({"trainable": "word_embeddings"}, 0),
        ({"peft_method": "lora"}, 0),
        ({"peft_method": "prefix"}, 0),
    ],
)
def test_frozen_layers_are_those_before_anything_that_trains(
    settings: dict[str, Any], frozen: int, recipe_of: Any
):
    made = plan_of(recipe_of(**settings)).blueprint
    assert blueprint.frozen_layers(made, made.whole("float32")) == frozen


def test_rows_are_no_longer_than_the_model_has_positions():
    assert blueprint.longest(AutoConfig.for_model(**TINY), 128) == 40  # RoBERTa counts from 2
    assert blueprint.longest(AutoConfig.for_model(**TINY_OPT), 128) == 64
    assert blueprint.longest(AutoConfig.for_model(**TINY_OPT), 32) == 32


# ---------------------------------------------------------------- passes


@pytest.mark.parametrize(
    ("config", "settings", "kind", "labels"),
    [
        (TINY, {}, passes.Classification, 2),
        (TINY, {"prompt": "masked_lm"}, passes.SingleWords, 2),
        (TINY_OPT, {"prompt": "causal_lm"}, passes.SingleWords, 2),
        (
            TINY_OPT,
            {"prompt": "causal_lm", "label_words": ["very good", "bad"]},
            passes.SeveralWords,
            2,
        ),
        (TINY_OPT, {"prompt": "causal_lm", "max_new_tokens": 5}, passes.FreeText, 0),
    ],
)
def test_traced_losses_are_the_objectives_own(
    config: dict[str, Any], settings: dict[str, Any], kind: type, labels: int, recipe_of: Any
):
    """Of rows without padding, which is what the meta device is given."""
    work = plan_of(recipe_of(config, **settings), labels)
    assert type(work) is kind
    model = work.blueprint.shortened(2, "float32", "cpu")
    batch = work.batch(3, "cpu")
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    own, traced = work.objective(model)(model, batch), work.traced(model)(model, batch)
    assert own.shape == (3,) and float(own.detach().std()) > 0
    torch.testing.assert_close(traced, own)


def test_padded_batches_suit_the_objectives(recipe_of: Any):
    """`batch` pads one row, so that the attention takes the path with a mask."""
    for config, prompt in ((TINY, None), (TINY, "masked_lm"), (TINY_OPT, "causal_lm")):
        work = plan_of(recipe_of(config, prompt=prompt))
        model, batch = work.blueprint.shortened(1, "float32", "cpu"), work.batch(3, "cpu")
        assert batch["attention_mask"].sum() == 3 * 16 - 1
        assert bool(work.objective(model)(model, batch).isfinite().all())


def test_words_of_several_tokens_run_a_row_for_each_label(recipe_of: Any):
    recipe = recipe_of(TINY_OPT, prompt="causal_lm")
    one, several = (
        dataclasses.replace(plan_of(recipe)),
        passes.pass_of(plan_of(recipe).blueprint, 16, recipe.data, several=True),
    )
    assert (one.sequences, several.sequences) == (1, 2)
    model = one.blueprint.whole("float32")
    assert memory.forward_bytes(several, model, 4) > 1.5 * memory.forward_bytes(one, model, 4)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_weights_take_their_number_times_their_size(dtype: str, size: int, recipe_of: Any):
    recipe = recipe_of(TINY_OPT, prompt="causal_lm")
    found = memory.peaks(plan_of(recipe), recipe, dtype)
    h, layer = 16, 4 * (16 * 16 + 16) + 2 * 16 * 32 + 32 + 16 + 4 * 16
    assert found.weights == size * (64 * h + 66 * h + 4 * layer + 2 * h)


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (TINY, {}),
    (TINY, {"torch_dtype": "bfloat16"}),
    (TINY, {"trainable": r"layer\.3\.|^classifier"}),
    (TINY, {"trainable": "^classifier", "num_directions": 8}),
    (TINY, {"prompt": "masked_lm"}),
    (TINY_OPT, {"prompt": "causal_lm", "peft_method": "lora"}),
    (TINY, {"method": "dp-adamw", "per_example_gradients": "dense"}),
    (TINY, {"method": "dp-sgd", "per_example_gradients": "ghost"}),
    (TINY, {"method": "adamw", "target_epsilon": None}),
]


@pytest.mark.parametrize(("config", "settings"), CASES)
def test_estimates_are_what_real_steps_keep_alive(
    config: dict[str, Any], settings: dict[str, Any], recipe_of: Any
):
    """Counts the tensors of real steps on the CPU, where the same dispatch mode sees them.

    All examples at 32 tokens, so that activations are as large as the tiny model's weights.
    """
    if settings.get("method", "").startswith("dp-"):
        pytest.importorskip("opacus")
    recipe = recipe_of(config, max_seq_length=32, **settings)
    work = plan_of(recipe)
    dtype = recipe.model.torch_dtype
    expected = memory.peaks(work, recipe, dtype)
    model = work.blueprint.shortened(4, dtype, "cpu")
    live = estimate.LiveBytes()
    live.hold([*model.parameters(), *model.buffers()])
    assert live.live == expected.weights
    take_step = step_of(work, model, recipe)
    with live:
        for step in range(3):
            take_step(step)
    assert expected.training is not None
    assert expected.training > 1.05 * expected.weights or "classifier" in str(settings)
    assert expected.training == pytest.approx(live.peak, rel=0.15)


def step_of(work: passes.Pass, model: nn.Module, recipe: Recipe) -> Callable[[int], None]:
    """A training step of the recipe on one microbatch, as a function of its number."""
    args = recipe.training
    objective, batch = work.objective(model), work.batch(args.physical_batch_size, "cpu")
    if args.first_order:
        return first_order_step(model, objective, batch, args)
    space = ParameterSpace.from_model(model, distribution=args.direction, smoothing=args.smoothing)
    space.snap_()
    settings = (args.smoothing, args.reuse_frozen_prefix, args.perturbation_strategy)
    differences = FiniteDifferences(model, space, objective, *settings)
    make_exact(differences, batch, Direction(7, 1 << 40), args.num_directions)

    def take(step: int) -> None:
        differences([batch], [Direction(7, step, k) for k in range(args.num_directions)])
        space.settle_()

    return take


def first_order_step(
    model: nn.Module, objective: Any, batch: Any, args: Any
) -> Callable[[int], None]:
    """The gradients that the trainer takes, its mechanism and torch's AdamW (SGD for dp-sgd)."""
    if args.not_private:
        gradients: Any = PlainGradients(model, objective)
    else:
        how = (args.per_example_gradients, args.physical_batch_size)
        gradients = per_example_gradients(model, objective, *how)
    values = {"name": args.method, "expected_batch_size": 4.0}
    values |= {} if args.not_private else {"clip": 1.0, "noise_multiplier": 1.0}
    header = {**args.direction_settings(), "direction_key": "0", "replayable": False}
    step = FirstOrderStep(mechanism_from_dict(values), gradients, SecureNoise(), Trajectory(header))
    kind = torch.optim.SGD if "sgd" in args.method else torch.optim.AdamW
    optimizer = kind(gradients.parameters, lr=1e-8)

    def take(number: int) -> None:
        step(number, [batch], 1e-8)
        optimizer.step()
        optimizer.zero_grad()

    return take


def test_ghost_clipping_is_not_for_half_precision(recipe_of: Any):
    pytest.importorskip("opacus")
    recipe = recipe_of(method="dp-adamw", per_example_gradients="ghost")
    single, half = (memory.peaks(plan_of(recipe), recipe, d) for d in memory.DTYPES)
    assert single.training is not None and single.how == "ghost"
    assert (half.training, half.peak, half.how) == (None, None, "ghost")
    assert not half.fits(1 << 60)


def test_a_device_fits_with_a_tenth_to_spare():
    sizes = {"weights": 1, "inference": 2, "evaluation": 70}
    found = memory.Peaks(precision="float32", **sizes, training=90, how="whole_model")
    assert found.peak == 90
    assert found.fits(100) and not found.fits(99)
    larger = dataclasses.replace(found, evaluation=91)
    assert larger.peak == 91 and not larger.fits(100)


def test_a_quantised_base_packs_the_frozen_linear_layers(recipe_of: Any):
    """A layer of the tiny OPT has 4 (16 x 16) + 2 (16 x 32) = 2048 such weights; there are four.

    4 bits each and 32 bits for a block of 64; 8 bits each and 32 bits for a row of the
    4 x 16 + 32 + 16 = 112. The largest is written out once.
    """
    settings = {"prompt": "causal_lm", "peft_method": "lora"}
    recipe = recipe_of(TINY_OPT, **settings, load_in_4bit=True)
    full, _, packed = memory.all_peaks(plan_of(recipe), recipe)
    numel, largest = 4 * 2048, 16 * 32 * 4
    assert packed.precision == "4-bit"
    less = 4 * numel - numel * (4 + 0.5) / 8
    assert full.weights - packed.weights == less
    assert full.training is not None and packed.training is not None
    assert full.training - packed.training == less - largest
    recipe = recipe_of(TINY_OPT, **settings, load_in_8bit=True)
    *_, eight = memory.all_peaks(plan_of(recipe), recipe)
    assert full.weights - eight.weights == 4 * numel - numel - 4 * 4 * 112
    assert len(memory.all_peaks(plan_of(recipe_of()), recipe_of())) == 2


def test_the_cache_of_generation():
    """Grouped heads keep fewer: two of size 8 for a key and two for a value."""
    llama = AutoConfig.for_model(
        "llama", hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=8
    )
    assert memory.cache_width(llama) == 2 * 2 * 8
    assert memory.cache_width(AutoConfig.for_model(**TINY_OPT)) == 2 * 16


def test_evaluation_by_generation_keeps_keys_and_values(recipe_of: Any):
    """4 layers and a copy of one, 3 examples of 16 tokens, 2 h numbers of 4 bytes."""
    recipe = recipe_of(TINY_OPT, prompt="causal_lm", per_device_eval_batch_size=3)
    work = plan_of(recipe, labels=0)
    found = memory.peaks(work, recipe, "float32")
    one_position = dataclasses.replace(work, by_generation=True)
    bare = memory.forward_bytes(one_position, work.blueprint.whole("float32"), 3)
    assert found.evaluation - found.weights - bare == 5 * 3 * 16 * 2 * 16 * 4


# ---------------------------------------------------------------- rows


def test_rows_that_are_here_are_counted():
    found = rows.count_rows(DataArguments(task="quickstart", max_train_samples=100))
    assert (found.train, found.validation, found.labels) == (100, 1024, 2)
    assert "which are here" in found.source
    with pytest.raises(
        ValueError, match="num_examples=99, but the recipe's data is here and has 8192"
    ):
        rows.count_rows(DataArguments(task="quickstart"), given=99)


@pytest.mark.parametrize(
    ("data", "given", "expected", "source"),
    [
        ({"num_examples_per_class": 512}, None, 1024, "512 x 2 classes, if each has so many"),
        ({"num_examples_per_class": 512}, 1000, 1000, "--num_examples"),
        ({"num_examples_per_class": 9, "max_train_samples": 10}, None, 10, "max_train_samples=10"),
        ({"max_train_samples": 77}, None, 77, "if the data has so many"),
        ({}, 67349, 67349, "--num_examples"),
        ({}, None, None, "give --num_examples N"),
    ],
)
def test_rows_that_are_not_here_are_derived_or_asked_for(
    data: dict[str, Any], given: int | None, expected: int | None, source: str, monkeypatch: Any
):
    monkeypatch.setattr(rows, "_task_that_is_here", lambda data: None)
    found = rows.count_rows(DataArguments(task="sst2", **data), given)
    assert found.train == expected and source in found.source and found.labels == 2


def test_local_files_that_are_not_there_are_an_error():
    data = DataArguments(task="sst2", train_file="none.jsonl", validation_file="none.jsonl")
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl not found"):
        rows.count_rows(data)


def test_offline_is_only_inside():
    import huggingface_hub.constants as hub

    was = hub.HF_HUB_OFFLINE
    try:
        hub.HF_HUB_OFFLINE = False
        with rows.offline():
            assert hub.is_offline_mode()
        assert not hub.is_offline_mode()
    finally:
        hub.HF_HUB_OFFLINE = was


# ---------------------------------------------------------------- configurations


def test_a_published_checkpoint_needs_no_file():
    found = configs.find_config(ModelArguments(model_name_or_path="facebook/opt-13b"))
    assert (found.config.hidden_size, found.config.num_hidden_layers) == (5120, 40)
    assert "built in" in found.source
    for name, shape in configs.PUBLISHED.items():
        assert shape in SHAPES, name


def test_an_unknown_checkpoint_names_the_command_that_fetches_its_shape():
    with pytest.raises(OSError, match=r"`hf download someone/model config\.json`"):
        configs.find_config(ModelArguments(model_name_or_path="someone/model"))


# ---------------------------------------------------------------- the command


def planned(capsys: Any, recipe: Path, *words: str) -> Any:
    """What `plan --recipe ... --json` prints."""
    assert main.main(["plan", "--recipe", str(recipe), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def written(recipe_of: Any, tmp_path: Path) -> Path:
    """The file of a tiny recipe."""
    recipe_of(output_dir=None)
    return tmp_path / "recipe.yaml"


def test_a_recipe_is_planned(written: Path, capsys: Any):
    found = planned(capsys, written)
    assert (found["num_examples"], found["steps"], found["method"]) == (16, 10, "dpzero")
    assert 3.5 < found["epsilon"] <= 4 and found["noise_multiplier"] > 0
    assert found["epsilon_by_relation"]["add_or_remove_one"] == found["epsilon"]
    assert found["model"]["parameters"] == found["model"]["trained_parameters"] > 0
    fits = found["memory"]["by_precision"]["float32"]["fits"]
    assert fits["24 GiB"] and fits["CPU"]
    assert not (written.parent / "trainer_output").exists()


def test_options_and_fields_override_the_recipe(written: Path, capsys: Any):
    words = [
        "--target_epsilon",
        "1",
        "--max_steps",
        "2e1",
        "--microbatch_size=2",
    ]
    found = planned(capsys, written, *words, "--trainable", "^classifier")
    assert (found["target_epsilon"], found["steps"]) == (1.0, 20)
    assert found["memory"]["microbatch_size"] == 2
    assert found["model"]["trained_parameters"] == 16 * 16 + 16 + 2 * 16 + 2


def test_without_n_there_is_no_budget_and_the_rest_is_told(written: Path, capsys: Any):
    found = planned(capsys, written, "--num_examples_per_class", "null")
    assert found["epsilon"] is None and "--num_examples" in found["missing"]
    assert found["memory"]["by_precision"]["float32"]["training"] > 0
    words = ["--num_examples_per_class", "null", "--num_examples", "32"]
    assert planned(capsys, written, *words)["num_examples"] == 32


def test_a_method_without_privacy_says_so(written: Path, capsys: Any):
    words = ["--method", "mezo", "--target_epsilon", "null"]
    with pytest.raises(SystemExit):  # the option takes a number; the recipe's line is to be dropped
        main.main(["plan", "--recipe", str(written), *words])
    capsys.readouterr()
    found = planned(capsys, written, "--method", "mezo")
    assert found["epsilon"] == "inf" and found["private"] is False
    assert "noise_multiplier" not in found


def test_tables_for_people(written: Path, capsys: Any):
    assert main.main(["plan", "--recipe", str(written)]) == 0
    out = capsys.readouterr().out
    for word in ("noise_multiplier", "parameters", "smallest card", "24 GiB"):
        assert word in out, word


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max_steps", "5"], "num_examples is missing"),
        (["--num_examples", "5"], "max_steps is missing"),
        (["--recipe", "none.yaml"], "recipe 'none.yaml' not found"),
    ],
)
def test_the_command_refuses(words: list[str], message: str, capsys: Any):
    assert main.main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_unknown_fields_are_refused_with_and_without_a_recipe(written: Path, capsys: Any):
    assert main.main(["plan", "--recipe", str(written), "--colour", "red"]) == 2
    assert "unknown key 'colour'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["plan", "--num_examples", "5", "--max_steps", "1", "--colour", "red"])


def test_sizes():
    assert tables.gib(None) == "-"
