"""DeepSpeed is refused before its package is asked for, with what serves instead."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hf_dpzero import DPZeroConfig

FSDP2 = r"configs/accelerate/fsdp2\.yaml"


@pytest.mark.parametrize("settings", ["zero.json", {"zero_optimization": {"stage": 3}}])
def test_deepspeed_in_the_arguments_is_refused(settings: object):
    with pytest.raises(ValueError, match=rf"^deepspeed=.* wraps.*--multi_gpu.*{FSDP2}"):
        DPZeroConfig(deepspeed=settings, target_epsilon=1.0)


@pytest.mark.slow
def test_without_the_package_the_message_is_the_same():
    """transformers alone ends in a message about a missing package, which does not help."""
    code = (
        "from hf_dpzero import DPZeroConfig; DPZeroConfig(output_dir='unused', target_epsilon=1.0)"
    )
    environment = {**os.environ, "ACCELERATE_USE_DEEPSPEED": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode and "ValueError: distributed_type: DEEPSPEED wraps" in done.stderr
