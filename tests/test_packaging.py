"""What is in the wheel, and that an installed package finds it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hf_dpzero import shipped

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("hf_dpzero", "recipes", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=900)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
def test_the_wheel_has_every_recipe_and_config(installed):
    for kind in ("recipes", "configs"):
        ours = {p.relative_to(ROOT / kind) for p in (ROOT / kind).rglob("*") if p.is_file()}
        there = installed / "hf_dpzero" / f"_{kind}"
        assert ours == {p.relative_to(there) for p in there.rglob("*") if p.is_file()}
    assert not (installed / "recipes").exists() and not (installed / "setup.py").exists()


@pytest.mark.slow
def test_an_installed_package_finds_its_recipes_from_any_folder(installed, tmp_path):
    program = (
        "import hf_dpzero, sys; from hf_dpzero.cli.main import main; print(hf_dpzero.__file__);"
        "sys.exit(main(['recipes', '--task', 'trec']) or"
        " main('plan --recipe sst2/minilm-dpzero --num_examples 65349 --json'.split()))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed), "PATH": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr
    assert str(installed) in ran.stdout and "trec/minilm-dpzero" in ran.stdout
    assert '"num_examples": 65349' in ran.stdout


def test_shipped_names(tmp_path, monkeypatch):
    """With or without the folder and .yaml; a local file goes first."""
    monkeypatch.chdir(tmp_path)
    wanted = ROOT / "recipes" / "sst2" / "minilm-dpzero.yaml"
    for name in (
        "sst2/minilm-dpzero",
        "recipes/sst2/minilm-dpzero.yaml",
        "sst2/minilm-dpzero.yaml",
    ):
        assert shipped.find_recipe(name) == wanted
    assert shipped.find_recipe("boolq/opt-1.3b-dpzero").stem == "opt-1.3b-dpzero"
    assert shipped.find_config("configs/sweep/quickstart.yaml").is_file()
    for name in ("../setup.cfg", "sst2", "", ".", str(ROOT / "recipes" / "no.yaml")):
        assert shipped.shipped_file(name, "recipes") is None
    (tmp_path / "quickstart.yaml").write_text("task: sst2\n")
    for name in ("quickstart", "quickstart.yaml"):
        assert shipped.find_recipe(name) == Path("quickstart.yaml")
    assert "quickstart" in shipped.shipped_recipes()
    assert not any(name.split("/")[-1].startswith("_") for name in shipped.shipped_recipes())


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one():
    for name, near in (
        ("sst2/minlm-dpzero", "sst2/minilm-dpzero"),
        ("recipes/sst3/minilm-dpzero.yaml", "sst2/minilm-dpzero"),
        ("quickstar", "quickstart"),
    ):
        with pytest.raises(FileNotFoundError, match=near):
            shipped.find_recipe(name)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        shipped.find_recipe(ROOT)
