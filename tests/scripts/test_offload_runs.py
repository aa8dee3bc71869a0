"""Offload from the outside: a recipe on `accelerate launch` with the shipped file, and the benchmark."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config import load_config_from_file
from safetensors.torch import load_file
from tiny_language_models import save_causal_lm

from hf_dpzero.cli import main
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.recipe import load_recipe, unused_settings
from scripts.benchmarks.offload import measured

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "configs" / "accelerate" / "offload.yaml"
SST2 = ROOT / "tests" / "data" / "sst2"


def recipe(folder: Path, **settings: Any) -> Path:
    lines = {
        "model_name_or_path": str(save_causal_lm(folder / "base")), "task": "sst2",
        "prompt": "causal_lm", "train_file": str(SST2 / "train.jsonl"), "max_seq_length": 64,
        "validation_file": str(SST2 / "validation.jsonl"), "output_dir": str(folder / "out"),
        "noise_multiplier": 1.0, "clip": 1.0, "max_steps": 2, "expected_batch_size": 4,
        "microbatch_size": 4, "use_cpu": True, "testing.direction_key": 3,
        "testing.sampler_key": "ab" * 32, "testing.insecure_noise_seed": 1, "report_to": "none",
        "max_train_samples": 20, "max_eval_samples": 4, **settings,
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(lines))
    return path


def test_settings_that_do_not_fit_are_refused(tmp_path: Path):
    def said(**settings: Any) -> str:
        with pytest.raises(ValueError, match="device_map|max_memory") as error:
            ModelArguments(model_name_or_path="x", **settings)
        return str(error.value)

    assert "none of auto, balanced" in said(device_map="cuda:0")
    assert "set offload_folder" in said(device_map={"": "disk"})
    assert "no mapping" in said(device_map="auto", max_memory="20GiB")
    assert "quantised" in said(device_map="auto", load_in_4bit=True, peft_method="lora")
    assert "architecture: auto" in said(device_map="auto", architecture="sentence_classifier")
    told = unused_settings(load_recipe(recipe(tmp_path, offload_folder="somewhere")))
    assert "offload_folder='somewhere' (it is for device_map)" in told


def test_the_accelerate_file_starts_one_process_on_all_gpus():
    loaded = load_config_from_file(str(FILE))
    assert loaded.num_processes == 1 and loaded.distributed_type == "NO"
    text = FILE.read_text(encoding="utf-8")
    assert "gpu_ids" not in yaml.safe_load(text)
    assert "accelerate launch --config_file configs/accelerate/offload.yaml" in text
    assert (ROOT / "recipes/sst2/opt-1.3b-dpzero.yaml").exists()


@pytest.mark.slow
def test_a_recipe_with_a_device_map_launches_and_gives_the_weights_of_one_without(tmp_path: Path):
    for name in ("plain", "away"):
        (tmp_path / name).mkdir()
    assert main.main(["train", str(recipe(tmp_path / "plain"))]) == 0
    words = ["--device_map", "{'': disk}", "--offload_folder", str(tmp_path / "folder")]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(FILE)]
    program = ["-m", "hf_dpzero.cli.main", "train", str(recipe(tmp_path / "away")), *words]
    threads = str(torch.get_num_threads())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads}
    done = subprocess.run(
        [sys.executable, *launcher, *program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    weights = [load_file(tmp_path / name / "out/model.safetensors") for name in ("plain", "away")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert list((tmp_path / "folder").iterdir()) == []


def test_the_benchmark_measures_what_the_formulas_say():
    settings = argparse.Namespace(
        shape="tiny-opt", dtype="float32", device="cpu", batch=2, length=8, directions=2, repeats=1
    )  # fmt: skip
    here, cpu, disk = measured(settings)
    assert here["peak_bytes"] > here["weights_bytes"] and here["bytes_in"] == 0
    for away in (cpu, disk):
        assert away["weights_bytes"] == here["weights_bytes"]
        assert 0 < away["peak_bytes"] <= 2 * away["largest_module_bytes"]
        assert away["bytes_in"] <= 2 * 2 * away["weights_bytes"]  # of embeddings only rows come
        assert away["seconds"] > 0
