"""`hf-dpzero plan --recipe`: rows, shapes and memory, before a weight is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from row_files import row_files
from torch import nn
from transformers import AutoConfig

from hf_dpzero.cli import main
from hf_dpzero.experiments import memory, plan
from hf_dpzero.experiments.memory import SHAPES, MetaModel
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.recipe import Recipe, load_recipe
from hf_dpzero.tasks.description import DataArguments

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


def meta_of(recipe: Recipe, labels: int = 2) -> MetaModel:
    """The recipe's, as `overview` makes it where the data is not here."""
    config, _ = memory.find_config(recipe.model)
    head = recipe.data.prompt or "sequence_classification"
    return MetaModel(recipe.model, config, head, labels, recipe.training.trainable)


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
    meta = meta_of(recipe_of(**settings))
    assert meta.trains_head_alone(meta.build("float32")) is alone


def test_rows_and_weights_are_the_models(recipe_of):
    """No row is longer than the model has positions; weights take their number times their size."""
    recipe = recipe_of(TINY_OPT, **CAUSAL)
    roberta, opt = meta_of(recipe_of(TINY)), meta_of(recipe)
    longest = roberta.longest_row(128), opt.longest_row(128), opt.longest_row(32)
    assert longest == (40, 64, 32)  # RoBERTa counts from 2
    h, layer = 16, 4 * (16 * 16 + 16) + 2 * 16 * 32 + 32 + 16 + 4 * 16
    weights = [p.weights for p in memory.all_peaks(opt, recipe)]
    assert weights == [size * (64 * h + 66 * h + 4 * layer + 2 * h) for size in (4, 2)]


def test_a_pass_holds_what_its_modules_return(recipe_of):
    """Three rows of 16 tokens through layers of 16 and 32 numbers: 4 x 3 x 16 x 32 bytes at most each.

    Where only one position is scored, the 64 logits of a row are fewer.
    """
    recipe = recipe_of(TINY_OPT, **CAUSAL)
    meta = meta_of(recipe)
    found = memory.measured_pass(meta, recipe.data, meta.build("float32"), 3)
    assert found.largest == 4 * 3 * 16 * 32 and found.total > 4 * found.largest
    half = memory.measured_pass(meta, recipe.data, meta.build("bfloat16"), 6)
    assert half.largest == found.largest  # half the bytes, twice the rows
    assert memory.forward_bytes(found) == 4 * found.largest


def test_words_of_several_tokens_run_a_row_for_each_label_and_features_no_pass(recipe_of):
    passes = []
    for words in (["good", "bad"], ["very good", "bad"]):
        recipe = recipe_of(TINY_OPT, **CAUSAL, label_words=words)
        meta = meta_of(recipe)
        passes.append(memory.measured_pass(meta, recipe.data, meta.build("float32"), 3))
    assert passes[1].largest == 2 * passes[0].largest
    recipe = recipe_of(TINY, architecture="sentence_classifier", trainable="^classifier")
    meta = meta_of(recipe)
    given = meta, recipe.data, meta.build("float32"), 4
    stored, whole = memory.measured_pass(*given, True), memory.measured_pass(*given)
    assert 0 < stored.total < whole.total / 100  # none through the encoder


def test_a_step_takes_weights_a_pass_and_what_the_method_keeps(recipe_of):
    """By hand, in float32 and bfloat16 of the same model, d numbers of it trained."""
    recipe = recipe_of(TINY, num_directions=1, microbatch_size=4)
    meta = meta_of(recipe)
    d = sum(p.numel() for p in meta.build("float32").parameters())
    full, half = (memory.peaks_in(meta, recipe, dtype) for dtype in ("float32", "bfloat16"))
    assert full.training == full.inference and full.how == "whole_model"
    own = 2 * (16 * 32 + 32)  # the widest layer; of the embedding the rows of 4 x 16 tokens, twice
    rows = 2 * 64 * 16 * 2
    assert half.how == "layerwise" and half.training - half.inference == max(own, rows)
    recipe.training.performance.perturbation_strategy = "whole_model"
    assert (copied := memory.peaks_in(meta, recipe, "bfloat16").training) is not None
    assert copied - half.inference == 2 * d

    for method, how, gradients in (
        ("dp-adamw", "dense", 2 * 4 * d + 8 * d + 5 * 4 * d),  # moments, sum, one of each example
        ("dp-sgd", "ghost", 4 * d + 2 * 4 * d),
    ):
        first = recipe_of(
            TINY, method=method, performance={"per_example_gradients": how}, num_directions=None
        )
        kept = memory.measured_pass(meta, recipe.data, meta.build("float32"), 4).total
        found = memory.peaks_in(meta_of(first), first, "float32")
        assert (found.how, found.training) == (how, full.weights + gradients + kept)


def test_ghost_clipping_is_not_for_half_precision_and_a_tenth_is_spared(recipe_of):
    pytest.importorskip("opacus")
    recipe = recipe_of(method="dp-adamw", performance={"per_example_gradients": "ghost"})
    half = memory.peaks_in(meta_of(recipe), recipe, "bfloat16")
    assert (half.training, half.peak, half.how) == (None, None, "ghost")
    assert not half.fits(1 << 60)
    sizes = {"weights": 1, "inference": 2, "evaluation": 90, "how": "whole_model"}
    for training, peak in ((70, 90), (91, 91)):
        run = memory.Peaks(precision="float32", **sizes, training=training)
        assert run.peak == peak and run.fits(100) == (peak == 90) and not run.fits(99)


def test_a_quantised_base_packs_the_frozen_linear_layers(recipe_of):
    """A layer of the tiny OPT has 4 (16 x 16) + 2 (16 x 32) = 2048 such weights; there are four.

    4 bits each and 32 bits for a block of 64; 8 bits each and 32 bits for a row of the
    4 x 16 + 32 + 16 = 112. The largest is written out once.
    """
    settings = {**CAUSAL, "peft_method": "lora"}
    numel, largest = 4 * 2048, 16 * 32 * 4
    for bits, packed_bytes in ((4, numel * (4 + 0.5) / 8), (8, numel + 4 * 4 * 112)):
        recipe = recipe_of(TINY_OPT, **settings, **{f"load_in_{bits}bit": True})
        full, _, packed = memory.all_peaks(meta_of(recipe), recipe)
        assert packed.precision == f"{bits}-bit"
        less = 4 * numel - packed_bytes
        assert full.weights - packed.weights == less
        assert full.training is not None and packed.training is not None
        assert full.training - packed.training == less - largest


def test_evaluation_by_generation_keeps_keys_and_values(recipe_of):
    """4 layers and a copy of one, 3 examples of 16 tokens, 2 h numbers of 4 bytes.

    Grouped heads keep fewer: one of size 8 for a key and one for a value, in 32 layers.
    """
    recipe = recipe_of(TINY_OPT, **CAUSAL, per_device_eval_batch_size=3, microbatch_size=3)
    run = memory.peaks_in(meta_of(recipe, labels=0), recipe, "float32")
    assert run.evaluation - run.inference == 5 * 3 * 16 * 2 * 16 * 4
    llama = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    meta = MetaModel(recipe.model, AutoConfig.for_model("llama", **llama), "causal_lm", 0, None)
    assert meta.cache_bytes(16, torch.float32) == (32 + 1) * 16 * 2 * 8 * 4


def rows_of(unit_column: str | None = None, **data) -> SimpleNamespace:
    """A recipe of which only its rows are asked for."""
    training = SimpleNamespace(unit_column=unit_column, rows_per_unit=4)
    return SimpleNamespace(data=DataArguments(**data), training=training)


def test_rows_that_are_here_are_counted():
    rows = plan.count_rows(rows_of(task="quickstart", max_train_samples=100))
    assert (rows.train, rows.labels) == (100, 2) and "which are here" in rows.source
    with pytest.raises(
        ValueError, match="num_examples=99, but the recipe's data is here and has 8192"
    ):
        plan.count_rows(rows_of(task="quickstart"), given=99)
    with pytest.raises(FileNotFoundError, match=r"none\.csv not found"):
        plan.count_rows(rows_of(train_file="none.csv", validation_file="none.csv", task="sst2"))


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
    monkeypatch.setattr(plan, "_rows_that_are_here", lambda recipe, labels: None)
    rows = plan.count_rows(rows_of(task="sst2", **data), given)
    assert rows.train == expected and source in rows.source and rows.labels == 2
    by_unit = plan.count_rows(rows_of("who", task="sst2", **data), given)
    most = data.get("max_train_samples")  # counts units; rows of classes say nothing of them
    assert by_unit.train == (most if given is None else given)


@pytest.mark.parametrize("public", [True, False])
def test_of_units_those_are_counted(tmp_path, public):
    rows = [{"sentence": f"text {i}", "label": i % 2, "who": i // 3} for i in range(12)]
    files = row_files(tmp_path, rows, [{"sentence": "other", "label": 1}])
    if not public:
        (tmp_path / "validation.jsonl").unlink()
    files |= {"task": "sst2", "keep_column": "who", "whole_units": True}
    recipe = rows_of("who", **files)
    assert plan.count_rows(recipe).train == 4
    assert plan.count_rows(rows_of("who", max_train_samples=3, **files)).train == 3
    assert plan.count_rows(rows_of("who", max_train_samples=5, **files)).train == 4
    with pytest.raises(ValueError, match="num_examples=12, but .* has 4"):
        plan.count_rows(recipe, 12)


def test_a_published_checkpoint_needs_no_file(monkeypatch):
    arguments = ModelArguments(model_name_or_path="facebook/opt-13b")
    config, source = memory.find_config(arguments)
    assert (config.hidden_size, config.num_hidden_layers) == (5120, 40)
    assert "built in" in source
    with pytest.raises(OSError, match=r"`hf download someone/model config\.json`"):
        memory.find_config(ModelArguments(model_name_or_path="someone/model"))
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    with plan.offline():
        assert hub.is_offline_mode()
    assert not hub.is_offline_mode()


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
    assert main.main(["plan", "--recipe", str(written)]) == 0
    out = capsys.readouterr().out
    for word in ("noise_multiplier", "parameters", "smallest card", "8 GiB", "a training step"):
        assert word in out, word


def test_directions_are_those_that_training_would_choose(written, capsys):
    """K = 32 where little follows the first trained weight, 1 where all does; and what a recipe says."""
    assert planned(capsys, written, "--trainable", "^classifier")["num_directions"] == 32
    assert planned(capsys, written, "--num_directions", "4")["num_directions"] == 4
    wide = Recipe(**{**vars(load_recipe(written))})
    wide.training.num_directions = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_dpzero.settings.defaults.CHEAP", 10)
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
