"""Adapters of every kind that PEFT has start as their base, or are refused with words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from peft.tuners.lora import config as lora
from tiny_language_models import seeded
from tiny_runs import SECRET, build
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_dpzero.checks.model import check_adapters, check_saving
from hf_dpzero.checks.precision import keep_layout_
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.objectives.losses import ordinary_tokens
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.weights import open_weights, saved_tensors
from hf_dpzero.run_folder.base_model import check_start, trained_adapters
from hf_dpzero.run_folder.initial_values import load_initial_model

NEW_PARTS = "equal_to_named_but_new_parts"
ON: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
BOTH: dict[str, Any] = {**ON, "target_modules": ["embed_tokens", "q_proj"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", ON),
    "dora": ("LoraConfig", {**ON, "use_dora": True}),
    "gaussian": ("LoraConfig", {**ON, "init_lora_weights": "gaussian"}),
    "olora": ("LoraConfig", {**ON, "init_lora_weights": "olora"}),
    "pissa": ("LoraConfig", {**ON, "init_lora_weights": "pissa"}),
    "orthogonal": ("LoraConfig", {**ON, "init_lora_weights": "orthogonal"}),
    "embeddings": ("LoraConfig", BOTH),
    "tokens beside": ("LoraConfig", {**ON, "trainable_token_indices": [3]}),
    "head beside": ("LoraConfig", {**ON, "modules_to_save": ["lm_head"]}),
    "adalora": ("AdaLoraConfig", {**ON, "init_r": 2, "target_r": 2, "total_step": 9}),
    "adaption prompt": (
        "AdaptionPromptConfig", {"task_type": "CAUSAL_LM", "adapter_len": 2, "adapter_layers": 1}
    ),
    "boft": ("BOFTConfig", {**ON, "boft_block_size": 4}),
    "fourierft": ("FourierFTConfig", {**ON, "n_frequency": 9}),
    "hra": ("HRAConfig", {**ON, "r": 2}),
    "ia3": ("IA3Config", {**ON, "feedforward_modules": []}),
    "layer norms": (
        "LNTuningConfig", {"task_type": "CAUSAL_LM", "target_modules": ["input_layernorm"]}
    ),
    "loha": ("LoHaConfig", ON),
    "lokr": ("LoKrConfig", ON),
    "oft": ("OFTConfig", {**ON, "oft_block_size": 4, "r": 0}),
    "prefix": ("PrefixTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}),
    "prompt": ("PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}),
    "p-tuning": ("PromptEncoderConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}),
    "tokens": ("TrainableTokensConfig", {"task_type": "CAUSAL_LM", "token_indices": [3]}),
    "vblora": ("VBLoRAConfig", {**ON, "num_vectors": 4, "vector_length": 4, "topk": 2}),
    "vera": ("VeraConfig", {**ON, "r": 2}),
}  # fmt: skip
"""Name -> configuration and its settings."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=50, num_attention_heads=2, num_key_value_heads=2, **shape)
    seeded(lambda: LlamaForCausalLM(config), 0).save_pretrained(folder)
    return folder


def loaded(base: Path, **settings: Any) -> Any:
    return LlamaForCausalLM.from_pretrained(base, **settings)


def adapted(base: Path, kind: str, **settings: Any) -> Any:
    name, given = KINDS[kind]
    if "Lora" in name and "init_r" not in given:
        given = {"r": 2, **given}
    return seeded(
        lambda: peft.get_peft_model(loaded(base, **settings), getattr(peft, name)(**given)), 1
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_adapter_is_recognised(base: Path, kind: str) -> None:
    model = adapted(base, kind)
    check_adapters(model)
    assert check_start(model, declared_public=False)[0] == NEW_PARTS
    assert max(ordinary_tokens(model)[0]) == 49


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["lora", "olora", "pissa", "adalora", "embeddings"])
def test_an_adapter_that_was_trained_a_little_is_noticed(base: Path, kind: str, dtype: str) -> None:
    """A step of Adam with a rate of 1e-5, and what bfloat16 rounds of the base hides none of it."""
    model = adapted(base, kind, dtype=dtype)
    assert check_start(model, declared_public=False)[0] == NEW_PARTS
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1e-5)
    with pytest.raises(ValueError, match="the model was changed after"):
        check_start(model, declared_public=False)


def test_trained_embeddings_under_an_adapter_are_noticed_after_a_resize(base: Path) -> None:
    model = loaded(base)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] += 1.0
    model.resize_token_embeddings(51)
    with pytest.raises(ValueError, match="embed_tokens.*the model was changed after"):
        check_start(peft.get_peft_model(model, peft.LoraConfig(r=2, **BOTH)), declared_public=False)


def test_what_cannot_be_told_from_training_is_named(base: Path) -> None:
    config = peft.LoraConfig(r=2, **{**ON, "init_lora_weights": False})
    with pytest.raises(
        ValueError, match=r"or started so by init_lora_weights=False.*base_is_public"
    ):
        check_start(peft.get_peft_model(loaded(base), config), declared_public=False)


def test_an_adapter_made_of_rows_is_not_public_by_itself(base: Path) -> None:
    """EVA adds nothing at first, but what it starts from are directions of the rows it was shown."""
    rows = [{"input_ids": torch.randint(5, 50, (4, 8))}] * 2
    config = peft.LoraConfig(r=2, **ON, init_lora_weights="eva", eva_config=peft.EvaConfig())
    model = peft.get_peft_model(loaded(base), config, low_cpu_mem_usage=True)
    peft.initialize_lora_eva_weights(model, rows)
    with pytest.raises(ValueError, match=r"started so by init_lora_weights=eva.*base_is_public"):
        check_start(model, declared_public=False)
    assert check_start(model, declared_public=True)[0] == "declared_public"


def test_an_adapter_that_a_script_makes_of_gradients_is_not_public(base: Path) -> None:
    """As LoRA-GA by hand: the model computes what its base does, and the factors tell of rows."""
    model, rows = adapted(base, "lora"), torch.randint(5, 50, (4, 8))
    layers = [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")]
    weights = [layer.base_layer.weight.requires_grad_() for layer in layers]
    gradients = torch.autograd.grad(model(input_ids=rows, labels=rows).loss, weights)
    for layer, weight, gradient in zip(layers, weights, gradients, strict=True):
        left, _, right = torch.linalg.svd(gradient)
        weight.requires_grad_(False)
        layer.lora_A["default"].weight.data = right[:2].clone()
        layer.lora_B["default"].weight.data = left[:, 2:4].clone()
        weight.sub_(layer.get_delta_weight("default").detach())
    with pytest.raises(ValueError, match="the model was changed after"):
        check_start(model, declared_public=False)


@pytest.mark.parametrize("init", ["orthogonal", "pissa"])
def test_large_factors_are_no_excuse(base: Path, init: str) -> None:
    """What they add is small beside their product's worst rounding, and not beside the weight."""
    model = peft.get_peft_model(
        loaded(base), peft.LoraConfig(r=2, **{**ON, "init_lora_weights": init})
    )
    assert check_start(model, declared_public=False)[0] == NEW_PARTS
    layer = next(m for m in model.modules() if hasattr(m, "lora_A") and "default" in m.lora_A)
    down, up = (getattr(layer, f"lora_{part}")["default"].weight for part in "AB")
    with torch.no_grad():  # B A is of size 0.3; 64 eps |A| |B| is 1.4
        down[:] = 300 * torch.tensor([[1.0], [-1.0]])
        up.fill_(300.0)
        up[:, 1] += 1e-3 * torch.randn(len(up))
        if init == "pissa":
            weight = layer.get_base_layer().weight
            weight.copy_(0.3 * torch.randn_like(weight))
    with pytest.raises(ValueError, match="the model was changed after it was loaded"):
        check_start(model, declared_public=False)
    with torch.no_grad():
        layer.get_base_layer().weight[0, 0] = math.nan
    assert trained_adapters(model)  # nor beside one whose size nobody can say


@pytest.mark.parametrize("start", ["pissa_niter_4", "lora_ga"])
def test_an_adapter_that_would_not_fit_its_base_again_is_refused(base: Path, start: str) -> None:
    if start == "lora_ga" and not hasattr(lora, "LoraGAConfig"):
        pytest.skip("older releases of peft have no LoRA-GA")
    more = {"lora_ga_config": lora.LoraGAConfig()} if start == "lora_ga" else {}
    config = peft.LoraConfig(r=2, **ON, init_lora_weights=start, **more)
    with pytest.raises(ValueError, match=f"'{start}' changes base weights.*use 'pissa' or 'olora'"):
        check_adapters(peft.get_peft_model(loaded(base), config))


def test_an_adapter_of_another_name_is_refused_where_it_is_trained(base: Path) -> None:
    """PEFT saves it in a folder of its own: the report named weights that were not trained."""
    model = peft.get_peft_model(loaded(base), peft.LoraConfig(r=2, **ON))
    model.add_adapter("other", peft.LoraConfig(r=2, **ON))
    check_adapters(model)
    model.set_adapter("other")
    with pytest.raises(ValueError, match="the adapter 'other' .*call it 'default'"):
        check_adapters(model)


def test_an_adapter_that_transformers_adds_is_one(base: Path, tmp_path: Path) -> None:
    model = loaded(base)
    model.add_adapter(peft.LoraConfig(r=2, **ON))
    check_adapters(model)
    assert check_start(model, declared_public=False)[0] == NEW_PARTS
    model.save_pretrained(tmp_path)
    with open_weights(tmp_path) as files:
        assert files and files.keys() < saved_tensors(model).keys()


def test_a_model_made_from_a_configuration_that_names_a_base(base: Path) -> None:
    """Its weights were never those; one that was loaded and trained still has to do with them."""
    fresh = seeded(lambda: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)), 7)
    assert fresh.config._name_or_path == str(base)
    assert check_start(fresh, declared_public=False) == ("not_compared", None)
    trained = loaded(base)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=2 * float(parameter.std()))
    with pytest.raises(ValueError, match="the model was changed after"):
        check_start(trained, declared_public=False)


def test_a_layer_that_shares_the_heads_weights_is_refused_before_it_cannot_be_saved(
    base: Path, tmp_path: Path
) -> None:
    model = LlamaForCausalLM(AutoConfig.from_pretrained(base, tie_word_embeddings=True))
    check_saving(model)
    model.second = torch.nn.Linear(16, 50, bias=False)
    model.second.weight = model.lm_head.weight
    with pytest.raises(RuntimeError, match="shared tensors"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"save_model\(\) could not write.*second.weight.*clone"):
        check_saving(model)
    check_saving(peft.get_peft_model(model, peft.LoraConfig(r=2, **ON)))  # saves no base
    layers = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    check_saving(layers)
    layers["b"].weight = layers["a"].weight
    with pytest.raises(ValueError, match=r"could not write.*a.weight"):
        check_saving(layers)


def test_biases_of_4_bit_layers_are_cast_before_the_run() -> None:
    """bitsandbytes casts them in its first forward, which was taken for a trace of private rows."""
    layers = pytest.importorskip("bitsandbytes").nn
    layer = (
        layers.Linear4bit(64, 64, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu").eval()
    )
    assert layer.bias.dtype == torch.float32
    if not hasattr(layer, "support_avx512bf16_for_cpu"):
        pytest.skip("older releases of bitsandbytes cast biases to the dtype of what comes in")
    keep_layout_(layer)
    before = layer.bias.data.clone()
    layer(torch.ones(1, 64))
    assert before.dtype == torch.bfloat16 and torch.equal(layer.bias.data, before)


@pytest.mark.parametrize(
    "kind",
    ["pissa", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("olora", "adalora"))],
)
def test_a_run_is_saved_loaded_replayed_and_extended(base: Path, tmp_path: Path, kind: str) -> None:
    ids = torch.arange(5, 45).repeat(8).view(40, 8)
    ones = torch.ones_like(ids).tolist()
    columns = {"input_ids": ids.tolist(), "attention_mask": ones, "labels": ids.tolist()}
    rows = Dataset.from_dict(columns)
    model, out = adapted(base, kind), tmp_path / "out"
    more = {"data": rows, "trainer_settings": {"eval_dataset": None}, "max_steps": 1, **SECRET}
    trainer = build(out, model, num_directions=1, **more)
    trainer.train()
    trainer.save_model()
    assert trainer.privacy_report().base_weights == NEW_PARTS
    assert "hf-dpzero replay" in (build_hub_folder(out, tmp_path / "hub") / "README.md").read_text()
    again = load_initial_model(out / "initial_values.safetensors", str(base))
    replay(again, Trajectory.load(out / "trajectory.safetensors"))
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    found = peft.PeftModel.from_pretrained(loaded(base), str(out), is_trainable=True)
    with torch.no_grad():
        assert torch.equal(found(ids[:2]).logits, model(ids[:2]).logits)
        assert not torch.equal(found(ids[:2]).logits, loaded(base)(ids[:2]).logits)
    further = build(tmp_path / "more", found, extends_run=str(out), num_directions=1, **more)
    further.train()
    new = kind == "adalora"  # PEFT does not save its ranknum
    assert further.privacy_report().base_weights == (NEW_PARTS if new else "of_the_extended_run")
