"""Shared fixtures. Everything is built in-process and deterministic; the network is off."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel

for _variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[_variable] = "1"  # read when huggingface_hub is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

VOCABULARY = 64
"""Token ids run over range(VOCABULARY); 0 pads, 1 begins, 2 ends, 3 masks."""

ModelFactory = Callable[..., "PreTrainedModel"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _small_encoder() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 40,
        "pad_token_id": 0,
    }


def _seeded(build: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    """Builds with weights that depend only on `seed`, without touching the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval()


@pytest.fixture(scope="session")
def tiny_bert() -> ModelFactory:
    """(num_labels=2, seed=0) -> BertForSequenceClassification, a fresh one for each call."""

    def make(num_labels: int = 2, seed: int = 0) -> PreTrainedModel:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(**_small_encoder(), num_labels=num_labels)
        return _seeded(lambda: BertForSequenceClassification(config), seed)

    return make


@pytest.fixture(scope="session")
def tiny_roberta() -> ModelFactory:
    """(num_labels=2, seed=0) -> RobertaForSequenceClassification."""

    def make(num_labels: int = 2, seed: int = 0) -> PreTrainedModel:
        from transformers import RobertaConfig, RobertaForSequenceClassification

        config = RobertaConfig(**_small_encoder(), num_labels=num_labels)
        return _seeded(lambda: RobertaForSequenceClassification(config), seed)

    return make


@pytest.fixture(scope="session")
def tiny_masked_lm() -> ModelFactory:
    """(seed=0) -> BertForMaskedLM with tied input and output embeddings."""

    def make(seed: int = 0) -> PreTrainedModel:
        from transformers import BertConfig, BertForMaskedLM

        return _seeded(lambda: BertForMaskedLM(BertConfig(**_small_encoder())), seed)

    return make


@pytest.fixture(scope="session")
def tiny_masked_roberta() -> ModelFactory:
    """(seed=0) -> RobertaForMaskedLM; its output matrix and bias are tied."""

    def make(seed: int = 0) -> PreTrainedModel:
        from transformers import RobertaConfig, RobertaForMaskedLM

        return _seeded(lambda: RobertaForMaskedLM(RobertaConfig(**_small_encoder())), seed)

    return make


@pytest.fixture(scope="session")
def tiny_opt() -> ModelFactory:
    """(seed=0) -> OPTForCausalLM with tied embeddings."""

    def make(seed: int = 0) -> PreTrainedModel:
        from transformers import OPTConfig, OPTForCausalLM

        config = OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            word_embed_proj_dim=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=40,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        return _seeded(lambda: OPTForCausalLM(config), seed)

    return make


@pytest.fixture(scope="session")
def tiny_gpt2() -> ModelFactory:
    """(seed=0) -> GPT2LMHeadModel with tied embeddings and Conv1D layers."""

    def make(seed: int = 0) -> PreTrainedModel:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=40,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        return _seeded(lambda: GPT2LMHeadModel(config), seed)

    return make


def _small_decoder() -> dict[str, Any]:
    """Two attention heads that share one key and value head."""
    return {**_small_encoder(), "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="session")
def tiny_llama() -> ModelFactory:
    """(seed=0) -> LlamaForCausalLM, with an output matrix of its own."""

    def make(seed: int = 0) -> PreTrainedModel:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(**_small_decoder(), tie_word_embeddings=False)
        return _seeded(lambda: LlamaForCausalLM(config), seed)

    return make


@pytest.fixture(scope="session")
def tiny_qwen2() -> ModelFactory:
    """(seed=0) -> Qwen2ForCausalLM with tied embeddings, as its small checkpoints have."""

    def make(seed: int = 0) -> PreTrainedModel:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(**_small_decoder(), tie_word_embeddings=True)
        return _seeded(lambda: Qwen2ForCausalLM(config), seed)

    return make


@pytest.fixture(scope="session")
def tiny_t5() -> ModelFactory:
    """(seed=0) -> T5ForConditionalGeneration."""

    def make(seed: int = 0) -> PreTrainedModel:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            pad_token_id=0,
            eos_token_id=2,
            decoder_start_token_id=0,
        )
        return _seeded(lambda: T5ForConditionalGeneration(config), seed)

    return make


LANGUAGE_MODELS = {
    "bert": "tiny_masked_lm",
    "roberta": "tiny_masked_roberta",
    "opt": "tiny_opt",
    "gpt2": "tiny_gpt2",
    "llama": "tiny_llama",
    "qwen2": "tiny_qwen2",
}


@pytest.fixture(scope="session")
def language_model(request: pytest.FixtureRequest) -> Callable[[str], PreTrainedModel]:
    """(family of LANGUAGE_MODELS) -> a tiny one whose weights are large enough to tell rows apart."""

    def make(family: str) -> PreTrainedModel:
        model = request.getfixturevalue(LANGUAGE_MODELS[family])()
        generator = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.3, generator=generator)
        return model

    return make


def classification_rows(rows: int, num_labels: int, seed: int) -> dict[str, list[Any]]:
    """Token ids of 3 to 16 tokens; the label is what the second token says, so it is learnable."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    labels = draw(0, num_labels, rows)
    lengths = draw(1, 15, rows)
    ids = [
        [1, 4 + label, *draw(4 + num_labels, VOCABULARY, length - 1), 2]
        for label, length in zip(labels, lengths, strict=True)
    ]
    masks = [[1] * len(row) for row in ids]
    return {"input_ids": ids, "attention_mask": masks, "labels": labels}


@pytest.fixture(scope="session")
def tiny_dataset() -> Callable[..., datasets.Dataset]:
    """(rows=48, num_labels=2, seed=0) -> Dataset of input_ids, attention_mask, labels."""

    def make(rows: int = 48, num_labels: int = 2, seed: int = 0) -> datasets.Dataset:
        import datasets

        return datasets.Dataset.from_dict(classification_rows(rows, num_labels, seed))

    return make


@pytest.fixture(scope="session")
def pad_collator() -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
    """Rows of `tiny_dataset` -> padded tensors, without a tokenizer."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)

        def padded(name: str) -> torch.Tensor:
            return torch.tensor([row[name] + [0] * (width - len(row[name])) for row in rows])

        labels = torch.tensor([row["labels"] for row in rows])
        return {
            "input_ids": padded("input_ids"),
            "attention_mask": padded("attention_mask"),
            "labels": labels,
        }

    return collate


@pytest.fixture(scope="session")
def causal_batch() -> Callable[..., dict[str, torch.Tensor]]:
    """(rows=4, seed=0) -> a padded causal-LM batch of varied lengths; padding is labelled -100."""

    def make(rows: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
        ids = classification_rows(rows, 2, seed)["input_ids"]
        width = max(map(len, ids))
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        labels = tokens.masked_fill(mask == 0, -100)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    return make
