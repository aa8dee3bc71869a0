"""`import hf_dpzero` loads nothing heavy, nor does the help of the command line."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from importlib import metadata

import pytest

import hf_dpzero

LAZY = (
    "accelerate",
    "datasets",
    "dp_accounting",
    "evaluate",
    "matplotlib",
    "numba",
    "opacus",
    "opendp",
    "peft",
    "triton",
    "sklearn",
    "transformers",
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def loaded_after(code: str) -> set[str]:
    """The lazy packages that `code` has loaded, in a fresh process."""
    names = json.loads(
        run(f"import json, sys\n{code}\nprint(json.dumps([m for m in {LAZY} if m in sys.modules]))")
    )
    return set(names)


def test_the_import_loads_nothing_heavy():
    assert loaded_after("import hf_dpzero") == set()
    assert loaded_after("import datasets") >= {"datasets"}  # the probe sees what is loaded


def test_the_mathematics_and_help_load_nothing_heavy_either():
    code = (
        "from hf_dpzero import Direction, ParameterSpace, PoissonSampler, PrivacyPlan, Release, "
        "ScalarMechanism, SecureNoise, Trajectory, replay\n"
        "import hf_dpzero.cli.main as c, contextlib\n"
        "with contextlib.suppress(SystemExit): c.main(['--help'])"
    )
    assert loaded_after(code) == set()


def test_help_does_without_torch():
    code = (
        "import hf_dpzero.cli.main as c, contextlib, sys\n"
        "with contextlib.suppress(SystemExit): c.main(['compare', '--help'])\n"
        "assert 'torch' not in sys.modules"
    )
    assert loaded_after(code) == set()


def test_every_exported_name_resolves():
    names = [name for name in hf_dpzero.__all__ if name != "__version__"]
    assert names
    for name in names:
        value = getattr(hf_dpzero, name)
        assert value is getattr(importlib.import_module(value.__module__), name)
        assert value.__module__.startswith("hf_dpzero.")


def test_the_names_are_the_public_interface():
    assert set(hf_dpzero.__all__) >= {
        "DPZeroConfig",
        "DPZeroTrainer",
        "PrivacyPlan",
        "Trajectory",
        "replay",
    }
    assert set(hf_dpzero.__all__) <= set(dir(hf_dpzero))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'DPZeroTrainr'"):
        hf_dpzero.DPZeroTrainr  # noqa: B018


def test_the_version_is_the_installed_one():
    from importlib.metadata import PackageNotFoundError, version

    try:
        assert hf_dpzero.__version__ == version("hf-dpzero")
    except PackageNotFoundError:
        pytest.skip("run from a checkout that is not installed")


def test_a_release_below_the_oldest_is_refused_in_words(monkeypatch):
    """Before anything of transformers is imported; the mathematics does without."""
    version = metadata.version
    for has, good in (("4.57.6", False), ("5.2.9", False), ("5.3.0", True), ("5.30.0.dev0", True)):
        monkeypatch.setattr(
            metadata,
            "version",
            lambda name, has=has: has if name == "transformers" else version(name),
        )
        monkeypatch.delitem(vars(hf_dpzero), "DPZeroConfig", raising=False)
        words = rf"transformers {has} is not what .* pip install -U 'transformers<6,>=5\.3'"
        with contextlib.nullcontext() if good else pytest.raises(ImportError, match=words):
            assert hf_dpzero.DPZeroConfig.__name__ == "DPZeroConfig"
        assert hf_dpzero.__getattr__("PrivacyPlan") is hf_dpzero.PrivacyPlan
