"""Shared fixtures. Everything is built in-process and deterministic; the network is off."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_language_models import drawn, seeded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

for _variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[_variable] = "1"  # read when huggingface_hub is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

VOCABULARY = 64
"""Token ids run over range(VOCABULARY); 0 pads, 1 begins, 2 ends, 3 masks."""

ModelFactory = Callable[..., "PreTrainedModel"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests run first, so that none is left alone at the end; gpu ones are skipped without one.

    Processes that share the tests take whole modules in this order: those with slow tests, then those
    with many.
    """
    for item in items:
        if "attacks" in item.path.parts:
            item.add_marker(pytest.mark.attack)
    many = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, -many[item.path]))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Keeps libraries out of garbage collections: accelerate asks for one in every training run."""
    gc.collect()
    gc.freeze()


_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0}
_ENCODER = {
    **_SIZES,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {**_SIZES, **_ENDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40}
_OPT = {k: v for k, v in _ENCODER.items() if k != "intermediate_size"} | {
    "word_embed_proj_dim": 16,
    "ffn_dim": 32,
}
_T5 = {**_SIZES, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
_DECODER = {**_ENCODER, **_ENDS, "num_key_value_heads": 1}  # two heads share one key and value head


def _factory(family: str, head: str, **settings: Any) -> Any:
    """A session fixture: (seed=0, **settings of the configuration) -> a fresh model in eval mode."""

    @pytest.fixture(scope="session")
    def make_model() -> ModelFactory:
        import transformers

        def make(seed: int = 0, **changes: Any) -> PreTrainedModel:
            config = getattr(transformers, f"{family}Config")(**{**settings, **changes})
            return seeded(lambda: getattr(transformers, f"{family}{head}")(config), seed)

        return make

    return make_model


tiny_bert = _factory("Bert", "ForSequenceClassification", **_ENCODER)
tiny_roberta = _factory("Roberta", "ForSequenceClassification", **_ENCODER)
tiny_masked_lm = _factory("Bert", "ForMaskedLM", **_ENCODER)
tiny_masked_roberta = _factory("Roberta", "ForMaskedLM", **_ENCODER)
tiny_opt = _factory("OPT", "ForCausalLM", **_OPT, **_ENDS)
tiny_gpt2 = _factory("GPT2", "LMHeadModel", **_GPT2)
tiny_llama = _factory("Llama", "ForCausalLM", **_DECODER, tie_word_embeddings=False)
tiny_qwen2 = _factory("Qwen2", "ForCausalLM", **_DECODER, tie_word_embeddings=True)
tiny_t5 = _factory(
    "T5", "ForConditionalGeneration", **_T5, eos_token_id=2, decoder_start_token_id=0
)

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
        return drawn(request.getfixturevalue(LANGUAGE_MODELS[family])())

    return make


@pytest.fixture(scope="session")
def causal_batch() -> Callable[..., dict[str, torch.Tensor]]:
    """(rows=4, seed=0) -> a padded causal-LM batch of 3 to 16 tokens; padding is labelled -100."""

    def make(rows: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int, size: int) -> list[int]:
            return torch.randint(low, high, (size,), generator=generator).tolist()

        first, lengths = draw(4, 6, rows), draw(1, 15, rows)
        ids = [[1, f, *draw(6, VOCABULARY, n - 1), 2] for f, n in zip(first, lengths, strict=True)]
        width = max(map(len, ids))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
        labels = tokens.masked_fill(mask == 0, -100)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    return make


@pytest.fixture(scope="session")
def bert_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_bert: ModelFactory) -> Path:
    """The folder of a saved tiny BERT encoder with a word tokenizer; a recipe draws the head."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoint")
    words = (
        "[PAD] [UNK] [CLS] [SEP] good great bad awful film it was urgent blood please today my the"
    )
    vocabulary = {word: i for i, word in enumerate(words.split())}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": 32}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    tiny_bert().bert.save_pretrained(folder)
    return folder
