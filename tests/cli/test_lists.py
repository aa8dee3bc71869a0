"""A list is written the same way everywhere: `[a, b]`, `a,b`, and on a command line `a b`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_dpzero.cli import main, many_runs, options
from hf_dpzero.experiments.sweep import parse_grid
from hf_dpzero.recipes.recipe import coerce_fields, parse_overrides, recipe_parser
from hf_dpzero.tasks.description import read_task

LISTS = (
    "class_names", "label_words", "label_texts", "lora_target_modules", "report_to", "label_names",
    "include_for_metrics",
)  # fmt: skip


def test_every_list_of_the_package_is_in_the_table():
    ours = {n for n, h in recipe_parser().hints.items() if "list[str]" in str(h)}
    assert ours - {"optim_target_modules"} == set(LISTS)  # which may be a regular expression


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_a_recipe(name):
    for value in ("a,b", "a, b", "[a, b]", ["a", "b"]):
        assert coerce_fields({name: value}, "r.yaml")[name] == ["a", "b"]
    for words in (["a,b"], ["a", "b"], ["[a, b]"]):
        given = parse_overrides([f"--{name}", *words])
        assert coerce_fields(given, "command line")[name] == ["a", "b"]
    assert coerce_fields({name: ["a, b", "c"]}, "r.yaml")[name] == ["a, b", "c"]


@pytest.mark.parametrize(
    ("name", "kind", "items"),
    [("methods", str, ["dpzero", "mezo"]), ("epsilons", float, [2.0, 6.0]), ("seeds", int, [1, 2])],
)
def test_lists_of_compare(name, kind, items, monkeypatch):
    first, second = map(str, items)
    for words in ([f"{first},{second}"], [first, second], [f"[{first}, {second}]"]):
        seen: list[options.Compare] = []
        monkeypatch.setattr(many_runs, "run_compare", seen.append)
        assert main.main(["compare", "r.yaml", f"--{name}", *words, "--clip", "3"]) == 0
        assert seen[0].recipes == ["r.yaml"] and seen[0].overrides == ["--clip", "3"]
        assert many_runs.items_of(name, vars(seen[0])[name], kind) == items


def test_lists_of_a_sweep(tmp_path):
    grid = {"clip": [1.0, 2.0]}
    for word in ("clip=1,2", "clip=[1, 2]"):
        assert parse_grid([word]) == grid
    for text in ("clip: [1, 2]", "clip: 1, 2"):
        (tmp_path / "grid.yaml").write_text(text)
        assert parse_grid([], str(tmp_path / "grid.yaml")) == grid
    modules = parse_grid(["lora_target_modules=[[q, v], [q]]"])
    assert modules == {"lora_target_modules": [["q", "v"], ["q"]]}


def test_lists_of_a_task_file(tmp_path):
    def task(**lists: Any) -> Any:
        path = Path(tmp_path, "t.yaml")
        prompt = (
            "prompts:\n  masked_lm:\n    template: '{a} {mask}'\n    label_words: " + lists["words"]
        )
        path.write_text(f"fields: {lists['fields']}\nlabels: {lists['labels']}\n{prompt}")
        return read_task(str(path))

    assert task(words="[no, yes]", fields="[a, b]", labels="[x, y]") == task(
        words="no, yes", fields="a,b", labels="x, y"
    )
