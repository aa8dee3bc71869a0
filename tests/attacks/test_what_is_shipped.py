"""Attack: have a push ship what no allow list names, through links, recipes and older pushes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers
from attacked_runs import finished, not_shipped

from hf_dpzero.recipes.recipe import recipe_parser
from hf_dpzero.reporting import hub
from hf_dpzero.reporting.public import OWN_SETTINGS, public_recipe

ROWS = "Jane Roe"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    finished(tmp_path / "out", max_steps=1)
    return tmp_path / "out"


@pytest.mark.parametrize("name", ["recipe.yaml", "all_results.json", "privacy_report.json"])
def test_links_to_private_files_are_not_followed(run: Path, tmp_path: Path, name: str) -> None:
    path, private = run / name, tmp_path / "private.json"
    private.write_text(path.read_text() if path.exists() else json.dumps({"text_column": ROWS}))
    path.unlink(missing_ok=True)
    path.symlink_to(private)
    not_shipped(run, tmp_path / "hub", f"{name} is a link")


def test_a_recipe_is_shipped_as_known_fields(run: Path, tmp_path: Path) -> None:
    (run / "recipe.yaml").write_text(f"# {ROWS}\nrows: {ROWS}\nclip: 5.0\nlogging_steps: 2\n")
    shipped = hub.build_hub_folder(run, tmp_path / "hub")
    assert (shipped / "recipe.yaml").read_text() == "clip: 5.0\nlogging_steps: 2\n"
    for path in shipped.iterdir():
        assert ROWS.encode() not in path.read_bytes()
    assert public_recipe(f"{ROWS}: 1\n") == ""


def test_the_known_fields_are_those_of_a_recipe() -> None:
    inherited = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    known = {hint for hint in recipe_parser().hints if "." not in hint}
    assert set(OWN_SETTINGS) == {*known, "extends"} - inherited
    assert public_recipe("device_map: auto\noffload_folder: /home/me/weights\n") == ""


def test_a_push_leaves_no_older_file_beside_the_card(run: Path, monkeypatch: Any) -> None:
    """A repository of a run that is not private; what is uploaded anew is not deleted, says the Hub."""
    older = ["pytorch_model.bin", "tf_model.h5", "runs/events.out", "checkpoint-5/optimizer.pt",
             "onnx/model.onnx", "eval_results.json", "model.gguf", "rng_state.pth"]  # fmt: skip
    commits: list[Any] = []

    class Api(huggingface_hub.HfApi):
        def create_repo(self, repo_id: str, **settings: Any) -> Any:
            return type("Url", (str,), {"repo_id": repo_id})("https://hub.example/me/x")

        def repo_info(self, *args: Any, **settings: Any) -> Any:
            return type("Info", (), {"private": True})

        def list_repo_files(self, *args: Any, **settings: Any) -> list[str]:
            return [".gitattributes", "README.md", *older]

        def upload_folder(self, *, repo_id: str, delete_patterns: Any, **settings: Any) -> None:
            place: dict[str, Any] = {"repo_type": None, "revision": None, "path_in_repo": ""}
            chosen = self._prepare_folder_deletions(
                repo_id, delete_patterns=delete_patterns, **place
            )
            commits.append(chosen)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    hub.push(run, "me/x", token="hf_t")
    (deletions,) = commits
    assert {deletion.path_in_repo for deletion in deletions} == {"README.md", *older}
