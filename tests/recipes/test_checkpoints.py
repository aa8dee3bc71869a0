"""Where weights and tokenizers come from: what is missing, and what is said about it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.utils.hub
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tiny_language_models import roberta_tokenizer
from transformers import AutoConfig, AutoTokenizer, BertConfig, PreTrainedModel

from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.models import check_folder, fetched, load_tokenizer, loading_settings

Factory = Callable[..., PreTrainedModel]


def recipe(path: str, **settings: Any) -> ModelArguments:
    return ModelArguments(model_name_or_path=path, **settings)


def config_of(path: str, **settings: Any) -> Any:
    return fetched(AutoConfig.from_pretrained, path, recipe(path, **settings))


def test_a_path_below_a_folder_that_is_here_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="out/run does not exist: out is a folder here"):
        config_of("out/run")


@pytest.mark.parametrize(
    "path", ["./no_such_folder", "/no/such/folder", "../no_such_folder", "a/b/c", "a\\b"]
)
def test_a_wrong_path_is_no_hub_id(path):
    with pytest.raises(FileNotFoundError, match="no such folder; relative paths") as error:
        config_of(path)
    assert "hf download" not in str(error.value)
    assert repr(path) in str(error.value)
    assert str(Path.cwd()) in str(error.value)
    with pytest.raises(FileNotFoundError, match="~ is not expanded"):
        check_folder("~/model")
    for name in ("gpt2", "facebook/opt-125m", "nobody/no.thing_1"):
        check_folder(name)


def test_a_file_or_a_folder_without_a_model(tmp_path):
    def refused(path: Path, kind: type[OSError], message: str) -> str:
        with pytest.raises(kind, match=message) as error:
            config_of(str(path))
        return str(error.value)

    refused(tmp_path, FileNotFoundError, r"has no config\.json.*save_pretrained")
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    refused(file, FileNotFoundError, "is a file; give the folder")
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    refused(tmp_path, FileNotFoundError, "holds an adapter and no model")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")  # damaged is not missing
    assert "hf download" not in refused(tmp_path, OSError, "valid JSON")


def answers(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Every download of transformers fails with `error`."""

    def download(*args: Any, **settings: Any) -> None:
        raise error

    for name in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(transformers.utils.hub, name, download)


def refused(kind: type[Exception]) -> Exception:
    return kind("said no", response=SimpleNamespace(headers={}, request=None))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            refused(GatedRepoError),
            r"is gated: accept its terms at https://huggingface.co/some/model, log in with `hf auth "
            r"login`, then fetch it with `hf download some/model --revision v1`",
        ),
        (refused(RepositoryNotFoundError), r"the Hub has no model of that name.*hf auth login"),
        (refused(RevisionNotFoundError), r"no revision 'v1'; check model_revision"),
        (
            LocalEntryNotFoundError("no network"),
            r"neither cached nor reachable.*`hf download some/model --revision v1`",
        ),
    ],
)
def test_what_the_hub_says(monkeypatch, error, message):
    answers(monkeypatch, error)
    with pytest.raises(OSError, match=message):
        config_of("some/model", model_revision="v1")
    monkeypatch.undo()
    with pytest.raises(OSError, match=r"neither cached nor reachable.*with HF_HUB_OFFLINE unset"):
        config_of("nobody/nothing")


@pytest.mark.parametrize("kind", ["tiny_bert", "tiny_roberta", "tiny_opt", "tiny_gpt2"])
def test_a_made_up_tokenizer_is_refused(request, tmp_path, kind):
    """Transformers answers with a tokenizer that knows no word; every text would be [UNK]."""
    arguments = recipe(str(tmp_path))
    request.getfixturevalue(kind)().save_pretrained(tmp_path)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) < 6
    with pytest.raises(ValueError, match=r"has no tokenizer: save the model's own"):
        load_tokenizer(str(tmp_path), arguments)
    if kind == "tiny_roberta":
        roberta_tokenizer().save_pretrained(tmp_path)
        tokenizer = load_tokenizer(str(tmp_path), arguments)
        assert tokenizer("great")["input_ids"] == roberta_tokenizer()("great")["input_ids"]
        (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
        with pytest.raises(ValueError, match=r"has no tokenizer that loads"):
            load_tokenizer(str(tmp_path), arguments)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_is_not_trained(bits):
    load = {f"load_in_{bits}bit": True}
    for peft_method in (None, "bitfit"):
        with pytest.raises(ValueError, match=rf"load_in_{bits}bit=True with.*peft_method: lora"):
            recipe("x", **load, peft_method=peft_method)
    assert (recipe("x").quantised, recipe("x", **load, peft_method="lora").quantised) == (0, bits)
    with pytest.raises(ValueError, match="are both set; set one"):
        recipe("x", load_in_4bit=True, load_in_8bit=True, peft_method="lora")


def test_no_other_dtypes():
    with pytest.raises(ValueError, match="torch_dtype='float64' is not one of"):
        recipe("x", torch_dtype="float64")


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_is_named_where_it_is_missing(monkeypatch, bits):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = recipe("x", peft_method="lora", **{f"load_in_{bits}bit": True})
    with pytest.raises(ImportError, match=rf"load_in_{bits}bit needs.*pip install bitsandbytes"):
        loading_settings(arguments, BertConfig())


@pytest.mark.parametrize("torch_dtype", ["float32", "bfloat16", "auto"])
def test_four_bits_are_computed_in_the_models_dtype(torch_dtype):
    pytest.importorskip("bitsandbytes", reason="needs the quantization extra")
    arguments = recipe("x", peft_method="lora", load_in_4bit=True, torch_dtype=torch_dtype)
    found = loading_settings(arguments, BertConfig(dtype="bfloat16"))["quantization_config"]
    expected = torch.float32 if torch_dtype == "float32" else torch.bfloat16
    assert (found.bnb_4bit_quant_type, found.bnb_4bit_compute_dtype) == ("nf4", expected)
