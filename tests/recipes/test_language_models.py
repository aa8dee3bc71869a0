"""Language models of recipes: loading by head, adapters on them, quantised bases."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import safetensors.torch
import tiny_runs
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from tiny_language_models import opt_tokenizer, roberta_tokenizer, seeded
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dpzero import DPZeroTrainer
from hf_dpzero.ledger.digests import checksums, digest_model
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.recipes.adapters import trained_adapter, with_adapters
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.build import load_trained
from hf_dpzero.recipes.models import load_model

CAUSAL = ("opt", "gpt2", "llama")
PREFIX = 3

Loader = Callable[..., Any]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def body(**settings: Any) -> dict[str, Any]:
    return {
        **SIZES,
        "vocab_size": len(roberta_tokenizer()),
        "intermediate_size": 32,
        "max_position_embeddings": 40,
        "pad_token_id": 1,
        **settings,
    }


def configuration(family: str) -> Any:
    """Two layers of width 16; Llama has one key-value head and unties its head."""
    opt, size = transformers.OPTConfig, body()
    ends = {"bos_token_id": 2, "eos_token_id": 2}
    return {
        "opt": lambda: opt(**body(word_embed_proj_dim=16, ffn_dim=32, **ends)),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=size["vocab_size"], n_embd=16, n_layer=2, n_head=2, n_positions=40, **ends
        ),
        "llama": lambda: transformers.LlamaConfig(**body(num_key_value_heads=1, **ends)),
        "roberta": lambda: transformers.RobertaConfig(**body()),
        "bert": lambda: transformers.BertConfig(**body()),
        "distilbert": lambda: transformers.DistilBertConfig(
            vocab_size=size["vocab_size"], dim=16, n_layers=2, n_heads=2, hidden_dim=32
        ),
    }[family]()


def head_of(family: str) -> str:
    return "causal_lm" if family in CAUSAL else "masked_lm"


def prompted(family: str) -> Any:
    """As much of a prompted task as a model needs to know."""
    return SimpleNamespace(head=head_of(family), name="prompted")


def classified(labels: int = 2) -> Any:
    names = tuple(map(str, range(labels)))
    return SimpleNamespace(
        name="labels", head="sequence_classification", num_labels=labels, label_names=names
    )


def automatic(family: str) -> Any:
    name = "AutoModelForCausalLM" if family in CAUSAL else "AutoModelForMaskedLM"
    return getattr(transformers, name)


def written(folder: Path, family: str, model: PreTrainedModel) -> str:
    model.save_pretrained(folder)
    (opt_tokenizer() if family in CAUSAL else roberta_tokenizer()).save_pretrained(folder)
    return str(folder)


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Weights large enough for tokens to matter; fresh ones hardly attend to anything."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            std = 0.3 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A family -> the folder of its pretrained language model, with a tokenizer."""
    folders: dict[str, str] = {}

    def find(family: str) -> str:
        if family not in folders:
            made = seeded(lambda: automatic(family).from_config(configuration(family)), 0)
            folder = tmp_path_factory.mktemp(family)
            folders[family] = written(folder, family, spread(made))
        return folders[family]

    return find


@pytest.fixture
def load(saved: Callable[[str], str]) -> Loader:
    """(family, **settings of the recipe) -> the model."""

    def loaded(family: str, **settings: Any) -> Any:
        adapter = settings.pop("adapter", None)
        arguments = recipe(saved(family), **settings)
        return load_model(arguments, prompted(family), adapter=adapter)[0]

    return loaded


def recipe(folder: str, **settings: Any) -> ModelArguments:
    return ModelArguments(model_name_or_path=folder, **settings)


def texts(family: str, side: str = "right") -> dict[str, Tensor]:
    """Three rows of 9, 5 and 2 tokens; labels at every token (causal) or the second (masked)."""
    ids, masks, labels = [], [], []
    generator = torch.Generator().manual_seed(3)
    for length in (9, 5, 2):
        row = torch.randint(5, 200, (length,), generator=generator)
        label = row.clone() if family in CAUSAL else torch.full_like(row, -100)
        label[1] = row[1]
        pad = (0, 9 - length) if side == "right" else (9 - length, 0)
        ids.append(F.pad(row, pad, value=1))
        masks.append(F.pad(torch.ones_like(row), pad))
        labels.append(F.pad(label, pad, value=-100))
    parts = {"input_ids": ids, "attention_mask": masks, "labels": labels}
    return {name: torch.stack(rows) for name, rows in parts.items()}


@torch.no_grad()
def losses(model: nn.Module, family: str, side: str = "right") -> Tensor:
    return select_objective(model)(model, texts(family, side))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("family", ["opt", "roberta"])
@torch.no_grad()
def test_the_pretrained_head_answers(saved, load, family):
    model, plain = load(family), automatic(family).from_pretrained(saved(family))
    assert type(model) is type(plain)
    assert not model.training
    assert digest_model(model) == digest_model(plain)
    assert model.config.id2label == plain.config.id2label
    assert model.config._name_or_path == saved(family)
    ids = texts(family)["input_ids"]
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert len(trained(model)) == len(list(model.parameters())) > 20


def test_a_head_tied_to_the_embeddings_is_not_missing(saved, tmp_path):
    """A bare decoder's checkpoint has no output matrix, and its language model needs none."""
    bare = transformers.AutoModel.from_pretrained(saved("opt"))
    model, _ = load_model(recipe(written(tmp_path, "opt", bare)), prompted("opt"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert digest_model(model) == digest_model(automatic("opt").from_pretrained(saved("opt")))


@pytest.mark.parametrize(
    ("family", "kind", "absent"),
    [
        ("roberta", "AutoModelForSequenceClassification", "lm_head.bias and 5 more"),
        ("llama", "AutoModel", "lm_head.weight and 0 more"),
    ],
)
def test_a_missing_head_is_refused(saved, tmp_path, family, kind, absent):
    other = getattr(transformers, kind).from_pretrained(saved(family))
    folder = written(tmp_path, family, other)
    with pytest.raises(ValueError, match=rf"has no language-model head \({absent}") as error:
        load_model(recipe(folder), prompted(family))
    wanted = automatic(family).from_pretrained(saved(family))
    message = str(error.value)
    assert f"it was saved as {type(other).__name__}" in message
    assert f"load a checkpoint of {type(wanted).__name__}, or set prompt to null" in message


def test_other_missing_weights_depend_on_init_seed_alone(saved, tmp_path):
    name = "roberta.encoder.layer.1.output.dense.weight"
    written(tmp_path, "roberta", automatic("roberta").from_pretrained(saved("roberta")))
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del tensors[name]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    def drawn(seed: int) -> dict[str, Tensor]:
        model, _ = load_model(recipe(str(tmp_path), init_seed=seed), prompted("roberta"))
        return dict(model.named_parameters())

    first = drawn(1)
    torch.rand(3)  # the global generator moves on; nothing may change
    again, other = drawn(1), drawn(2)
    assert torch.equal(first[name], again[name])
    assert [n for n in first if not torch.equal(first[n], other[n])] == [name]
    assert 0.01 < first[name].std() < 0.03  # initializer_range is 0.02


@pytest.mark.parametrize(
    ("family", "head", "message"),
    [
        ("opt", "masked_lm", "opt, which does not serve as a masked_lm: set prompt: causal_lm"),
        ("roberta", "causal_lm", r"set prompt: masked_lm, or load a GPT-2, OPT, Llama or Qwen"),
        ("t5", "masked_lm", "type t5, which does not serve as a masked_lm: load a"),
        ("t5", "causal_lm", "type t5, which does not serve as a causal_lm: load a"),
    ],
)
def test_the_other_kind_of_model_and_an_encoder_decoder_are_refused(
    saved, tiny_t5, tmp_path, family, head, message
):
    folder = written(tmp_path, "t5", tiny_t5()) if family == "t5" else saved(family)
    with pytest.raises(ValueError, match=message):
        load_model(recipe(folder), SimpleNamespace(head=head))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architecture", "sentence_classifier"),
        ("head_init", "zero"),
        ("label_texts", ["bad", "good"]),
        ("precompute_features", True),
        ("normalize", False),
    ],
)
def test_settings_of_a_classification_head_are_refused(saved, name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}") + f".*leave {name} out"):
        load_model(recipe(saved("opt"), **{name: value}), prompted("opt"))


def test_a_masked_lm_needs_a_mask_token(saved, tmp_path):
    automatic("roberta").from_pretrained(saved("roberta")).save_pretrained(tmp_path)
    opt_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no mask token, which a masked_lm prompt asks at"):
        load_model(recipe(str(tmp_path)), prompted("roberta"))


def test_a_causal_lm_pads_with_its_end_token(saved, tmp_path):
    automatic("gpt2").from_pretrained(saved("gpt2")).save_pretrained(tmp_path)
    tokenizer = opt_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    model, found = load_model(recipe(str(tmp_path)), prompted("gpt2"))
    assert found.pad_token == found.eos_token == "</s>"
    assert model.config.pad_token_id == found.eos_token_id == 2
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="neither a padding token nor an end token"):
        load_model(recipe(str(tmp_path)), prompted("gpt2"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_auto_takes_the_checkpoints_dtype(saved, tmp_path, dtype):
    whole = automatic("opt").from_pretrained(saved("opt"), dtype=getattr(torch, dtype))
    folder = written(tmp_path, "opt", whole)
    for asked, expected in (("auto", dtype), ("float32", "float32"), ("bfloat16", "bfloat16")):
        model, _ = load_model(recipe(folder, torch_dtype=asked), prompted("opt"))
        assert {p.dtype for p in model.parameters()} == {getattr(torch, expected)}


def test_a_half_precision_language_model_is_trained_whole(load, tmp_path):
    """What the field's documentation says, several examples a pass."""
    model = load("opt", torch_dtype="float16")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = step(model, tmp_path, microbatch_size=4, max_steps=2, smoothing=0.02)
    assert trainer.trajectory.next_step == 2
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert len(moved) == len(before)
    again = load("opt", torch_dtype="float16")
    replay(again, trainer.trajectory)
    assert digest_model(again) == digest_model(model)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_lora_trains_adapters_alone(load, family):
    model = load(family, peft_method="lora", lora_r=2)
    assert isinstance(model, peft.PeftModel)
    names = set(trained(model))
    assert names
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert not [name for name in names if "head" in name or "cls" in name]
    assert not [name for name, _ in model.named_parameters() if "modules_to_save" in name]
    assert torch.equal(losses(model, family), losses(load(family), family))  # B starts at zero


@pytest.mark.parametrize(("family", "peft_method"), [("opt", "prefix"), ("bert", "lora")])
def test_adapters_are_float32_on_any_base(load, family, peft_method):
    for torch_dtype in ("bfloat16", "float16"):
        model = load(family, peft_method=peft_method, torch_dtype=torch_dtype)
        assert {p.dtype for p in trained(model).values()} == {torch.float32}
        frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
        assert frozen == {getattr(torch, torch_dtype)}
        assert losses(model, family).isfinite().all()


def test_bitfit_trains_biases_alone_and_a_model_without_is_refused(load, saved):
    model = load("opt", peft_method="bitfit")
    biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    assert set(trained(model)) == biases and len(biases) >= 6
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has none.*peft_method: lora"):
        load("llama", peft_method="bitfit")
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification has none below its head"):
        load_model(recipe(saved("llama"), peft_method="bitfit"), classified())


def real_tokens(model: Any, seed: int = 0) -> Tensor:
    """The tokens whose keys and values a prefix starts as, `[1, PREFIX]`."""
    generator = torch.Generator().manual_seed(seed + 1)
    rows = model.get_input_embeddings().weight.shape[0]
    return torch.randint(rows, (1, PREFIX), generator=generator)


@pytest.mark.parametrize("family", ["opt", "llama"])
@torch.no_grad()
def test_a_causal_prefix_starts_as_tokens_in_front(load, family):
    model, plain = load(family, peft_method="prefix", num_virtual_tokens=PREFIX), load(family)
    batch = texts(family)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    front = real_tokens(plain).expand(len(ids), -1)
    longer = torch.cat([torch.ones_like(front), mask], dim=1)
    expected = plain(input_ids=torch.cat([front, ids], 1), attention_mask=longer).logits[:, PREFIX:]
    found = model(input_ids=ids, attention_mask=mask).logits
    attended = mask.bool()
    torch.testing.assert_close(found[attended], expected[attended], atol=1e-4, rtol=1e-4)
    assert (found - plain(input_ids=ids, attention_mask=mask).logits)[attended].abs().max() > 0.1


@torch.no_grad()
def test_a_masked_prefix_starts_as_tokens_that_see_no_text(load):
    """Text attends to the tokens in front, and these attend to themselves alone."""
    family = "roberta"
    model, plain = load(family, peft_method="prefix", num_virtual_tokens=PREFIX), load(family)
    ids = texts(family)["input_ids"][:1]
    front = real_tokens(plain)
    total = PREFIX + ids.shape[1]
    sees = torch.ones(1, 1, total, total, dtype=torch.bool)
    sees[..., :PREFIX, PREFIX:] = False
    whole = torch.cat([front, ids], 1)
    expected = plain(input_ids=whole, attention_mask=sees).logits[:, PREFIX:]
    found = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (found - plain(input_ids=ids).logits).abs().max() > 0.1


def test_a_model_that_takes_no_prefix_is_refused(load):
    with pytest.raises(ValueError, match=r"DistilBertForMaskedLM takes none.*lora or bitfit"):
        made = seeded(lambda: transformers.DistilBertForMaskedLM(configuration("distilbert")), 0)
        with_adapters(made, recipe("unused", peft_method="prefix"), "masked_lm")


def shifted(model: nn.Module) -> nn.Module:
    """The model after some training: every trained tensor has moved."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize(
    ("family", "peft_method"),
    [("gpt2", "lora"), ("roberta", "prefix"), ("gpt2", "bitfit"), ("roberta", None)],
)
def test_what_was_trained_is_loaded_again(load, saved, tmp_path, family, peft_method):
    model = shifted(load(family, peft_method=peft_method))
    folder = written(tmp_path, family, model)  # type: ignore[arg-type]
    assert (tmp_path / "adapter_config.json").exists() == (peft_method in ("lora", "prefix"))
    arguments = recipe(folder, peft_method=peft_method)
    again, _ = load_trained(arguments, prompted(family), base=saved(family))
    assert not again.training
    assert torch.equal(losses(again, family), losses(model, family))
    assert (losses(load(family), family) - losses(model, family)).abs().min() > 1e-4


@pytest.mark.parametrize("peft_method", ["lora", "prefix"])
def test_an_adapter_of_another_head_is_refused(load, saved, tmp_path, peft_method):
    load("opt", peft_method=peft_method).save_pretrained(tmp_path)
    message = r"holds an adapter of a causal_lm model, and the task needs a masked_lm model"
    with pytest.raises(ValueError, match=message):
        trained_adapter(load("roberta"), str(tmp_path), "masked_lm")
    arguments = recipe(saved("opt"), peft_method=peft_method)
    classifier, _ = load_model(arguments, classified())
    classifier.save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match="of a sequence_classification model"):
        load("opt", adapter=str(tmp_path / "classifier"))


def rows(count: int = 40) -> Dataset:
    ids = torch.randint(5, 200, (count, 9), generator=torch.Generator().manual_seed(1))
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return Dataset.from_dict({name: value.tolist() for name, value in whole.items()})


def step(model: nn.Module, folder: Path, **settings: Any) -> DPZeroTrainer:
    """The trainer after a private run of one step on all of the trainable parameters."""
    settings = {"max_steps": 1, "expected_batch_size": 6, "microbatch_size": 1, **settings}
    trainer = tiny_runs.build(folder, model, data=rows(), **settings)
    trainer.train()
    return trainer


@pytest.fixture
def bitsandbytes() -> None:
    """Skips a test where it is not installed."""
    pytest.importorskip("bitsandbytes", reason="needs the quantization extra")


def quantised_names(model: nn.Module) -> list[str]:
    kinds = ("Params4bit", "Int8Params")
    return [name for name, p in model.named_parameters() if type(p).__name__ in kinds]


@pytest.mark.parametrize(("bits", "peft_method"), [(4, "lora"), (8, "prefix")])
@pytest.mark.usefixtures("bitsandbytes")
def test_a_private_step_on_a_quantised_base(load, tmp_path, bits, peft_method):
    """Steps, leaves the base alone, replays, saves, and loads what it saved."""
    settings = {f"load_in_{bits}bit": True, "peft_method": peft_method}
    model = load("opt", **settings)
    assert model.get_output_embeddings().weight.dtype == torch.float32
    assert len(quantised_names(model)) == 2 * 6  # four of attention and two more in each layer
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    frozen = checksums((n, p) for n, p in model.named_parameters() if not p.requires_grad)
    base, before = digest_model(model), losses(model, "opt")
    assert digest_model(load("opt", **settings)) == base
    assert (before - losses(load("opt"), "opt")).abs().max() > 1e-4  # computes with rounded weights
    several = step(load("opt", **settings), tmp_path / "four", microbatch_size=4)
    if bits == 8:  # LLM.int8() takes columns with an outlier in any row out of the 8-bit product
        assert several.run.shapes.one_by_one
    assert several.trajectory.header["forward_passes"] in ("fixed shapes", "one example")
    trainer = step(model, tmp_path)
    trainer.save_model()
    assert checksums((n, p) for n, p in model.named_parameters() if n in frozen) == frozen
    assert digest_model(model) != base
    assert trainer.trajectory.header["base_model_digest"] == base
    again = load("opt", **settings)
    replay(again, Trajectory.load(tmp_path / "trajectory.safetensors"))
    assert digest_model(again) == digest_model(model)
    loaded = load("opt", **settings, adapter=str(tmp_path))
    assert torch.equal(losses(loaded, "opt"), losses(model, "opt"))
    assert not torch.equal(losses(loaded, "opt"), before)


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("used_before", [False, True])
def test_four_bit_weights_that_cpus_would_pack_stay_as_they_are(tmp_path, used_before):
    """Layers of 64 columns are packed by the first forward, where the CPU has bfloat16 products."""
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 64, "num_hidden_layers": 1}
    config = transformers.OPTConfig(**body(**sizes))
    seeded(lambda: transformers.OPTForCausalLM(config), 0).save_pretrained(tmp_path / "base")
    four = transformers.BitsAndBytesConfig(load_in_4bit=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=four
    )
    if used_before:
        with torch.no_grad():
            model(input_ids=torch.tensor([[5, 6, 7]]))
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    trainer = step(model, tmp_path / "run", microbatch_size=4)
    assert quantised_names(model) and trainer.trajectory.next_step == 1


@pytest.mark.usefixtures("bitsandbytes")
def test_eight_bits_do_not_fill_the_log(load, caplog):
    model = load("opt", load_in_8bit=True, peft_method="lora")
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    with caplog.at_level(logging.WARNING, logger=logger.name):
        losses(model, "opt")
        logger.warning("something else")
    assert [r.message for r in caplog.records if r.name == logger.name] == ["something else"]


@pytest.mark.usefixtures("bitsandbytes")
def test_a_fresh_classification_head_on_a_quantised_base(saved):
    """RoBERTa's head is two layers; neither is quantised, both depend on init_seed alone."""

    def head(seed: int) -> dict[str, Tensor]:
        settings = {"load_in_4bit": True, "peft_method": "lora", "init_seed": seed}
        model, _ = load_model(recipe(saved("roberta"), **settings), classified())
        assert quantised_names(model)
        return {n: p for n, p in trained(model).items() if "modules_to_save" in n}

    first, again, other = head(1), head(1), head(2)
    assert len(first) == 4
    assert {p.dtype for p in first.values()} == {torch.float32}
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.usefixtures("bitsandbytes")
def test_quantised_weights_are_not_drawn(saved):
    """BERT's classifier has a pooler, which a masked language model's checkpoint lacks."""
    settings = {"load_in_4bit": True, "peft_method": "lora"}
    with pytest.raises(ValueError, match=r"has no bert\.pooler\.dense\.bias, and weights of a"):
        load_model(recipe(saved("bert"), **settings), classified())
    settings |= {"architecture": "sentence_classifier"}
    with pytest.raises(ValueError, match=r"load_in_4bit=True needs architecture: auto"):
        load_model(recipe(saved("bert"), **settings), classified())


@pytest.mark.parametrize("bits", [4, 8])
def test_the_digest_of_a_quantised_base_sees_its_scales(bits, tmp_path):
    """Doubling a layer changes its quantisation scales and nothing else."""
    pytest.importorskip("bitsandbytes")
    model = automatic("opt").from_config(configuration("opt"))
    spread(model)
    found = []
    for folder in ("one", "two"):
        path = written(tmp_path / folder, "opt", model)
        settings = {"peft_method": "lora", f"load_in_{bits}bit": True}
        loaded, _ = load_model(recipe(path, **settings), prompted("opt"))
        found.append(digest_model(loaded))
        losses(loaded, "opt")
        assert digest_model(loaded) == found[-1]  # a forward pass leaves it alone
        with torch.no_grad():
            model.model.decoder.layers[0].fc1.weight.mul_(2)
    assert found[0] != found[1]
