"""DeepSpeed is refused before its package is asked for, with what serves instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dpzero import DPZeroConfig
from hf_dpzero.training.deepspeed import refuse_deepspeed

FSDP2 = r"configs/accelerate/fsdp2\.yaml"


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_one_and_two_divide_what_there_is_not(stage: int):
    said = rf"\(ZeRO-{stage}\) divides gradients and optimizer states.*--multi_gpu.*{FSDP2}"
    with pytest.raises(ValueError, match=said):
        DPZeroConfig(deepspeed={"zero_optimization": {"stage": stage}})


def test_stage_three_is_what_fsdp2_does(tmp_path: Path):
    file = tmp_path / "zero3.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {}}}))
    for settings in (str(file), json.loads(file.read_text())):
        with pytest.raises(ValueError, match=rf"\(ZeRO-3\) divides the parameters.*{FSDP2}"):
            DPZeroConfig(deepspeed=settings)


@pytest.mark.parametrize("settings", ["zero.json", {"zero_optimization": {"stage": "auto"}}])
def test_an_unknown_stage_is_told_of_both(settings: object):
    with pytest.raises(ValueError, match=rf"^deepspeed=.* wraps.*plain data parallelism.*{FSDP2}"):
        refuse_deepspeed(settings, {})


def test_launches_are_read_from_the_environment(tmp_path: Path):
    launched = {"ACCELERATE_USE_DEEPSPEED": "true"}
    stage = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none"}
    with pytest.raises(ValueError, match="^distributed_type: DEEPSPEED .ZeRO-2"):
        refuse_deepspeed(None, {**launched, **stage})
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    file = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json")}
    with pytest.raises(ValueError, match="^distributed_type: DEEPSPEED .ZeRO-3"):
        refuse_deepspeed(None, {**launched, **stage, **file})
    with pytest.raises(ValueError, match="^distributed_type: DEEPSPEED wraps"):
        refuse_deepspeed(None, launched)
    refuse_deepspeed(None, {"ACCELERATE_USE_DEEPSPEED": "false"})
    refuse_deepspeed(None, stage)  # left over, and not asked for


@pytest.mark.slow
def test_without_the_package_the_message_is_the_same():
    """transformers alone ends in a message about a missing package, which does not help."""
    code = "from hf_dpzero import DPZeroConfig; DPZeroConfig(output_dir='unused')"
    environment = {**os.environ, "ACCELERATE_USE_DEEPSPEED": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode and "ValueError: distributed_type: DEEPSPEED wraps" in done.stderr
