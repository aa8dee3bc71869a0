"""Tiny Llamas as llama.cpp's converter writes them, weights and vocabulary in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tiny_language_models import byte_level_bpe, seeded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("negative", "positive", "Review", "Sentiment", "Yes", "No")
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
}  # fmt: skip


def vocabulary() -> tuple[list[str], list[str]]:
    """The words in the order of their numbers, and merges; two blanks are one word."""
    words, merges = byte_level_bpe(WORDS, SPECIAL)
    words["ĠĠ"] = len(words)
    ordered = sorted(words, key=lambda word: words[word])
    return ordered, [" ".join(pair) for pair in [*merges, ("Ġ", "Ġ")]]


def decoder() -> PreTrainedModel:
    """A Llama whose four heads share two of keys, and whose weights tell words and places apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(vocabulary()[0]), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    model, generator = seeded(lambda: LlamaForCausalLM(config), 0), torch.Generator().manual_seed(8)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.3, generator=generator)
    return model


def save_gguf(path: Path, model: PreTrainedModel, **strings: str) -> Path:
    """Writes a Llama with tied embeddings and `vocabulary`; `strings` replace its fields."""
    from gguf import GGUFWriter

    config, (words, merges) = model.config, vocabulary()
    writer = GGUFWriter(path, strings.pop("architecture", "llama"))
    kind = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for name, text in (kind | strings).items():
        writer.add_string(name, text)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list(words)
    writer.add_token_merges(merges)
    writer.add_token_types([3 if word in SPECIAL else 1 for word in words])
    for add, number in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{add}_token_id")(number)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(_name(name), _rows(name, weight, config).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _rows(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp turns neighbours by the rotary angles, transformers the two halves of a head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2], 0)
    if not count:
        return weight
    return weight.reshape(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
