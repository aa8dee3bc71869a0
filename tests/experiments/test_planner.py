"""`hf-dpzero plan --recipe`: rows, shapes and memory, before a weight is downloaded."""

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
from hf_dpzero.experiments import plan
from hf_dpzero.experiments.memory import model_on_meta, objective_passes, peaks
from hf_dpzero.experiments.memory.live_bytes import LiveBytes
from hf_dpzero.experiments.memory.model_on_meta import SHAPES, MetaModel
from hf_dpzero.experiments.memory.objective_passes import ObjectivePass
from hf_dpzero.experiments.plan import gib
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.prompted import Answers, Candidates, LabelWords
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.privacy.mechanisms import mechanism_from_dict
from hf_dpzero.privacy.noise import SecureNoise
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.recipe import Recipe, load_recipe
from hf_dpzero.tasks.arguments import DataArguments
from hf_dpzero.training.first_order_step import FirstOrderStep, PlainGradients
from scripts.benchmarks.shapes import fill_

TINY = {
    "model_type": "roberta", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 42, "pad_token_id": 1,
}  # fmt: skip
TINY_OPT = {
    "model_type": "opt", "vocab_size": 64, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32,
    "num_hidden_layers": 4, "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CAUSAL = {"prompt": "causal_lm"}
SETTINGS = {
    "task": "sst2", "num_examples_per_class": 8, "max_seq_length": 16, "method": "dpzero",
    "target_epsilon": 4.0, "target_delta": 1e-2, "accountant": "rdp", "expected_batch_size": 4,
    "microbatch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 10,
}  # fmt: skip


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


def objective_of(recipe: Recipe, labels: int = 2) -> ObjectivePass:
    """The recipe's, as `overview` makes it where the data is not here."""
    config, _ = model_on_meta.find_config(recipe.model)
    head = recipe.data.prompt or "sequence_classification"
    meta = MetaModel(recipe.model, config, head, labels, recipe.training.trainable)
    return objective_passes.objective_pass(meta, recipe.data)


def published(name: str, head: str, **settings: Any) -> list[nn.Parameter]:
    """The parameters of a well-known checkpoint that is not here."""
    arguments = ModelArguments(model_name_or_path=name, **settings)
    meta = MetaModel(arguments, AutoConfig.for_model(**SHAPES[name]), head, 2, None)
    return list(meta.build("bfloat16").parameters())


def count(parameters: list[nn.Parameter]) -> tuple[int, int]:
    """How many numbers there are, and how many of them train."""
    trained = [p.numel() for p in parameters if p.requires_grad]
    return sum(p.numel() for p in parameters), sum(trained)


def test_opt_has_the_parameters_of_its_architecture():
    """Tied output, positions from 2 on; a layer: 4 h^2 + 4 h, 8 h^2 + 5 h, two norms of 2 h."""
    h, layers, vocabulary, positions = 2048, 24, 50272, 2048 + 2
    layer = 4 * h**2 + 4 * h + 8 * h**2 + 5 * h + 2 * 2 * h
    expected = vocabulary * h + positions * h + layers * layer + 2 * h
    assert expected == 1_315_758_080
    assert count(published("opt-1.3b", "causal_lm")) == (expected, expected)


@pytest.mark.parametrize("head", ["masked_lm", "sequence_classification"])
def test_lora_trains_two_thin_matrices_for_query_and_value(head):
    """r (h + h) for each of two matrices in 24 layers; a classifier's head is trained as a copy.

    The body of RoBERTa-large: words, 514 positions, one segment and a norm; per layer 4 h^2, 8 h^2,
    their biases, two norms. Its language model's head: a dense layer, a norm and a bias of the
    vocabulary; the matrix is the embeddings'.
    """
    h, r = 1024, 8
    layer = 4 * (h * h + h) + (4 * h * h + 4 * h) + (4 * h * h + h) + 2 * 2 * h
    body = (50265 + 514 + 1) * h + 2 * h + 24 * layer
    adapters = 2 * 24 * r * (h + h)
    parameters = published("roberta-large", head, peft_method="lora", lora_r=r)
    if head == "masked_lm":
        own = body + h * h + h + 2 * h + 50265
        assert own == 355_412_057 and count(parameters) == (own + adapters, adapters)
    else:
        classifier = h * h + h + 2 * h + 2
        assert count(parameters) == (body + 2 * classifier + adapters, adapters + classifier)


def test_bitfit_trains_biases_and_the_head(recipe_of):
    model = objective_of(recipe_of(peft_method="bitfit")).meta.build("float32")
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert any(n.endswith("bias") for n in trained)
    assert all(n.endswith("bias") or n.startswith("classifier") for n in trained)


@pytest.mark.parametrize(
    ("settings", "alone"),
    [
        ({"trainable": "^classifier"}, True),
        ({"trainable": r"layer\.3\.|^classifier"}, False),
        ({"trainable": "word_embeddings"}, False),
        ({"peft_method": "lora"}, False),
        ({"peft_method": "prefix"}, False),
    ],
)
def test_a_head_alone_is_what_comes_after_the_layers(settings, alone, recipe_of):
    meta = objective_of(recipe_of(**settings)).meta
    assert meta.trains_head_alone(meta.build("float32")) is alone


def test_rows_are_no_longer_than_the_model_has_positions(recipe_of):
    roberta, opt = (objective_of(recipe_of(config)).meta for config in (TINY, TINY_OPT))
    longest = roberta.longest_row(128), opt.longest_row(128), opt.longest_row(32)
    assert longest == (40, 64, 32)  # RoBERTa counts from 2


def own(objective: ObjectivePass, model: nn.Module) -> Any:
    """The objective that training evaluates."""
    if isinstance(objective, objective_passes.Classification):
        return select_objective(model)
    if isinstance(objective, objective_passes.SingleWords):
        return LabelWords(tuple(range(objective.meta.num_labels)))
    if isinstance(objective, objective_passes.SeveralWords):
        return Candidates()
    return Answers(objective.max_new_tokens, (), 0)


def real(objective: ObjectivePass, dtype: str, size: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model on the CPU with random weights, and a batch of random tokens without padding."""
    model = objective.meta.build(dtype, "cpu")
    fill_(model)
    generator = torch.Generator().manual_seed(0)
    batch = dict(objective.batch(size, "cpu"))
    ids = batch["input_ids"] = torch.randint(4, 64, batch["input_ids"].shape, generator=generator)
    batch["attention_mask"] = torch.ones_like(ids)
    if isinstance(objective, objective_passes.SeveralWords):
        batch["answer_lengths"] = torch.full(ids.shape[:2], objective_passes.WORD_TOKENS)
    if isinstance(objective, objective_passes.FreeText):
        batch["labels"] = ids.clone()
        batch["labels"][:, : -objective.max_new_tokens] = -100
    return model, batch


@pytest.mark.parametrize(
    ("config", "settings", "kind", "labels"),
    [
        (TINY, {}, "Classification", 2),
        (TINY, {"prompt": "masked_lm"}, "SingleWords", 2),
        (TINY_OPT, CAUSAL, "SingleWords", 2),
        (TINY_OPT, {**CAUSAL, "label_words": ["very good", "bad"]}, "SeveralWords", 2),
        (TINY_OPT, {**CAUSAL, "max_new_tokens": 5}, "FreeText", 0),
    ],
)
def test_the_losses_are_the_objectives_own(config, settings, kind, labels, recipe_of):
    """Of rows without padding, which is what the meta device is given."""
    objective = objective_of(recipe_of(config, **settings), labels)
    assert type(objective).__name__ == kind
    model, batch = real(objective, "float32", 3)
    expected = own(objective, model)(model, batch)
    assert expected.shape == (3,) and float(expected.detach().std()) > 0
    torch.testing.assert_close(objective.losses(model, batch), expected)


def test_words_of_several_tokens_run_a_row_for_each_label(recipe_of):
    recipe = recipe_of(TINY_OPT, **CAUSAL)
    one = objective_of(recipe)
    several = objective_passes.SeveralWords(one.meta, one.length)
    assert (one.rows_per_example, several.rows_per_example) == (1, 2)
    less, more = (peaks._peaks(o, recipe, "float32") for o in (one, several))
    assert more.inference - more.weights > 1.5 * (less.inference - less.weights)


def test_weights_take_their_number_times_their_size(recipe_of):
    recipe = recipe_of(TINY_OPT, **CAUSAL)
    h, layer = 16, 4 * (16 * 16 + 16) + 2 * 16 * 32 + 32 + 16 + 4 * 16
    weights = [p.weights for p in peaks.all_peaks(objective_of(recipe), recipe)]
    assert weights == [size * (64 * h + 66 * h + 4 * layer + 2 * h) for size in (4, 2)]


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (TINY, {}),
    (TINY, {"torch_dtype": "bfloat16"}),
    (TINY, {"trainable": r"layer\.3\.|^classifier"}),
    (TINY, {"trainable": "^classifier", "num_directions": 8}),
    (TINY_OPT, {**CAUSAL, "peft_method": "lora"}),
    (TINY, {"method": "dp-adamw", "per_example_gradients": "dense"}),
    (TINY, {"method": "dp-sgd", "per_example_gradients": "ghost"}),
    (TINY, {"method": "adamw", "target_epsilon": None}),
]


@pytest.mark.parametrize(("config", "settings"), CASES)
def test_estimates_are_what_real_steps_keep_alive(config, settings, recipe_of):
    """Counts the tensors of real steps on the CPU, where the same dispatch mode sees them.

    All examples at 32 tokens, so that activations are as large as the tiny model's weights; one of
    them is padded, so that the attention takes the path with a mask.
    """
    if settings.get("method", "").startswith("dp-"):
        pytest.importorskip("opacus")
    recipe = recipe_of(config, max_seq_length=32, **{"num_directions": 1, **settings})
    objective, dtype = objective_of(recipe), recipe.model.torch_dtype
    expected = peaks._peaks(objective, recipe, dtype)
    model, batch = real(objective, dtype, 4)
    batch["attention_mask"][-1, -1] = 0
    live = LiveBytes()
    live.hold([*model.parameters(), *model.buffers()])
    assert live.live == expected.weights
    step = first_order_step if recipe.training.first_order else zeroth_order_step
    take_step = step(model, own(objective, model), batch, recipe.training)
    with live:
        for number in range(2):
            take_step(number)
    assert expected.training is not None
    assert expected.training > 1.05 * expected.weights or "classifier" in str(settings)
    assert expected.training == pytest.approx(live.peak, rel=0.15)


def zeroth_order_step(
    model: nn.Module, objective: Any, batch: Any, args: Any
) -> Callable[[int], None]:
    """The evaluations of a step and the restore, as the trainer makes them."""
    space = ParameterSpace.from_model(model, distribution=args.direction, smoothing=args.smoothing)
    space.snap_()
    differences = FiniteDifferences(
        model, space, objective, args.smoothing, args.reuse_frozen_prefix
    )
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
    mechanism = mechanism_from_dict(values)
    header = {"direction_key": "0", "replayable": False, "num_values": mechanism.values_per_release}
    trajectory = Trajectory({**args.direction_settings(), **header})
    step = FirstOrderStep(mechanism, gradients, SecureNoise(), trajectory)
    kind = torch.optim.SGD if "sgd" in args.method else torch.optim.AdamW
    optimizer = kind(gradients.parameters, lr=1e-8)

    def take(number: int) -> None:
        step(number, [batch], 1e-8)
        optimizer.step()
        optimizer.zero_grad()

    return take


def test_ghost_clipping_is_not_for_half_precision(recipe_of):
    pytest.importorskip("opacus")
    recipe = recipe_of(method="dp-adamw", per_example_gradients="ghost")
    half = peaks._peaks(objective_of(recipe), recipe, "bfloat16")
    assert (half.training, half.peak, half.how) == (None, None, "ghost")
    assert not half.fits(1 << 60)


def test_a_device_fits_with_a_tenth_to_spare():
    sizes = {"weights": 1, "inference": 2, "evaluation": 90}
    run = peaks.Peaks(precision="float32", **sizes, training=70, how="whole_model")
    assert run.peak == 90 and run.fits(100) and not run.fits(99)
    longer = dataclasses.replace(run, training=91)
    assert longer.peak == 91 and not longer.fits(100)


def test_a_quantised_base_packs_the_frozen_linear_layers(recipe_of):
    """A layer of the tiny OPT has 4 (16 x 16) + 2 (16 x 32) = 2048 such weights; there are four.

    4 bits each and 32 bits for a block of 64; 8 bits each and 32 bits for a row of the
    4 x 16 + 32 + 16 = 112. The largest is written out once.
    """
    settings = {**CAUSAL, "peft_method": "lora"}
    numel, largest = 4 * 2048, 16 * 32 * 4
    for bits, packed_bytes in ((4, numel * (4 + 0.5) / 8), (8, numel + 4 * 4 * 112)):
        recipe = recipe_of(TINY_OPT, **settings, **{f"load_in_{bits}bit": True})
        full, _, packed = peaks.all_peaks(objective_of(recipe), recipe)
        assert packed.precision == f"{bits}-bit"
        less = 4 * numel - packed_bytes
        assert full.weights - packed.weights == less
        assert full.training is not None and packed.training is not None
        assert full.training - packed.training == less - largest


def test_evaluation_by_generation_keeps_keys_and_values(recipe_of):
    """4 layers and a copy of one, 3 examples of 16 tokens, 2 h numbers of 4 bytes.

    Grouped heads keep fewer: two of size 8 for a key and two for a value.
    """
    recipe = recipe_of(TINY_OPT, **CAUSAL, per_device_eval_batch_size=3, microbatch_size=3)
    one_token = dataclasses.replace(objective_of(recipe, labels=0), by_generation=True)
    run = peaks._peaks(one_token, recipe, "float32")
    assert run.evaluation - run.inference == 5 * 3 * 16 * 2 * 16 * 4
    llama = AutoConfig.for_model(
        "llama", hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=8
    )
    assert peaks.cache_width(llama) == 2 * 2 * 8


def test_rows_that_are_here_are_counted():
    rows = plan.count_rows(DataArguments(task="quickstart", max_train_samples=100))
    assert (rows.train, rows.labels) == (100, 2) and "which are here" in rows.source
    other = "num_examples=99, but the recipe's data is here and has 8192"
    with pytest.raises(ValueError, match=other):
        plan.count_rows(DataArguments(task="quickstart"), given=99)
    data = DataArguments(task="sst2", train_file="none.jsonl", validation_file="none.jsonl")
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl not found"):
        plan.count_rows(data)


@pytest.mark.parametrize(
    ("data", "given", "expected", "source"),
    [
        ({"num_examples_per_class": 512}, None, 1024, "512 x 2 classes, if each has so many"),
        ({"num_examples_per_class": 512}, 1000, 1000, "--num_examples"),
        ({"num_examples_per_class": 9, "max_train_samples": 10}, None, 10, "max_train_samples=10"),
        ({"max_train_samples": 77}, None, 77, "if the data has so many"),
        ({}, None, None, "give --num_examples N"),
    ],
)
def test_rows_that_are_not_here_are_derived_or_asked_for(
    data, given, expected, source, monkeypatch
):
    monkeypatch.setattr(plan, "_task_that_is_here", lambda data: None)
    rows = plan.count_rows(DataArguments(task="sst2", **data), given)
    assert rows.train == expected and source in rows.source and rows.labels == 2


def test_offline_is_only_inside(monkeypatch):
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    with model_on_meta.offline():
        assert hub.is_offline_mode()
    assert not hub.is_offline_mode()


def test_a_published_checkpoint_needs_no_file():
    arguments = ModelArguments(model_name_or_path="facebook/opt-13b")
    config, source = model_on_meta.find_config(arguments)
    assert (config.hidden_size, config.num_hidden_layers) == (5120, 40)
    assert "built in" in source
    with pytest.raises(OSError, match=r"`hf download someone/model config\.json`"):
        model_on_meta.find_config(ModelArguments(model_name_or_path="someone/model"))


def planned(capsys: Any, recipe: Path, *words: str) -> Any:
    """What `plan --recipe ... --json` prints."""
    assert main.main(["plan", "--recipe", str(recipe), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def written(recipe_of: Any, tmp_path: Path) -> Path:
    """The file of a tiny recipe."""
    recipe_of(output_dir=None)
    return tmp_path / "recipe.yaml"


def test_a_recipe_is_planned(written, capsys):
    facts = planned(capsys, written)
    assert (facts["num_examples"], facts["steps"], facts["method"]) == (16, 10, "dpzero")
    assert 3.5 < facts["epsilon"] <= 4 and facts["noise_multiplier"] > 0
    assert facts["epsilon_by_relation"]["add_or_remove_one"] == facts["epsilon"]
    assert facts["model"]["parameters"] == facts["model"]["trained_parameters"] > 0
    fits = facts["memory"]["by_precision"]["float32"]["fits"]
    assert fits["8 GiB"] and fits["24 GiB"] and fits["CPU"] and "time" not in facts
    assert not (written.parent / "trainer_output").exists()


def test_directions_are_those_that_training_would_choose(written, capsys):
    """K = 32 where little follows the first trained weight, 1 where all does; and what a recipe says."""
    assert planned(capsys, written, "--trainable", "^classifier")["num_directions"] == 32
    assert planned(capsys, written, "--num_directions", "4")["num_directions"] == 4
    wide = Recipe(**{**vars(load_recipe(written))})
    wide.training.num_directions = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_dpzero.training.defaults.CHEAP", 10)
        assert plan.choose_directions(wide, 2).training.num_directions == 1
    assert wide.training.num_directions is None


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["--torch_dtype", "bfloat16", "--microbatch_size=4", "--method", "dp-sgd"], True),
        (["--bf16", "--use_cpu", "--microbatch_size=4", "--method", "dp-adamw"], True),
        (["--torch_dtype", "bfloat16", "--microbatch_size=1", "--method", "dp-sgd"], False),
        (["--torch_dtype", "bfloat16", "--microbatch_size=4"], False),
        (["--microbatch_size=4"], False),
        (["--torch_dtype", "bfloat16", "--microbatch_size=4", "--method", "mezo"], False),
    ],
)
def test_a_microbatch_that_training_refuses_is_named(words, refused, written, capsys):
    notes = planned(capsys, written, *words)["memory"]["notes"]
    assert any("training will be refused: microbatch_size=4" in note for note in notes) == refused


def test_options_and_fields_override_the_recipe(written, capsys):
    words = ["--target_epsilon", "1", "--max_steps", "2e1", "--microbatch_size=2"]
    facts = planned(capsys, written, *words, "--trainable", "^classifier")
    assert (facts["target_epsilon"], facts["steps"]) == (1.0, 20)
    assert facts["memory"]["microbatch_size"] == 2
    assert facts["model"]["trained_parameters"] == 16 * 16 + 16 + 2 * 16 + 2
    facts = planned(capsys, written, "--method", "mezo")
    assert (facts["epsilon"], facts["private"]) == ("inf", False)
    assert "noise_multiplier" not in facts


def test_without_n_there_is_no_budget_and_the_rest_is_told(written, capsys):
    words = ["--num_examples_per_class", "null"]
    facts = planned(capsys, written, *words)
    assert facts["epsilon"] is None and "--num_examples" in facts["missing"]
    assert facts["memory"]["by_precision"]["float32"]["training"] > 0
    assert planned(capsys, written, *words, "--num_examples", "32")["num_examples"] == 32


def test_tables_for_people(written, capsys):
    assert main.main(["plan", "--recipe", str(written)]) == 0
    out = capsys.readouterr().out
    for word in ("noise_multiplier", "parameters", "smallest card", "8 GiB", "a training step"):
        assert word in out, word
    assert gib(None) == "-"


def test_unknown_and_missing_options_are_refused_with_and_without_a_recipe(written, capsys):
    for words, message in (
        (["--recipe", str(written), "--colour", "red"], "unknown key 'colour'"),
        (["--max_steps", "5"], "num_examples is missing"),
        (["--num_examples", "5"], "max_steps is missing"),
        (["--recipe", "none.yaml"], "recipe 'none.yaml' not found"),
    ):
        assert main.main(["plan", *words]) == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["plan", "--num_examples", "5", "--max_steps", "1", "--no_calibration"])
