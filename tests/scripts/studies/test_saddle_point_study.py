"""The study of the saddle point paper: rows, resuming, tables, plots, the command."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from scripts.studies.harness import run
from scripts.studies.saddle_point import report, text_table
from scripts.studies.saddle_point.study import SMOOTH, Study, query_methods

SMALL = Study(
    seeds=(1, 2),
    sizes=(300, 600),
    dimension=4,
    dimensions=(3,),
    fixed_size=300,
    smooth_sizes=(300, 4000),
    regression_sizes=(300,),
    query_sizes=(50, 100),
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_table, "LETTERS", 3)  # a small table
        yield measured(tmp_path_factory)


def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saddle")
    (folder / "train.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{'word ' * i}.", "label": i % 2}) for i in range(40))
    )
    study = dataclasses.replace(SMALL, texts=str(folder))
    return study, run(study, folder / "out"), folder / "out"


def test_every_point_has_a_row_with_the_epsilon_that_it_really_has(rows):
    study, found, _ = rows
    assert (
        len(found)
        == len(study.points())
        == len({(r["part"], r["size"], r["method"]) for r in found})
    )
    parts = {part: [r for r in found if r["part"] == part] for part in report.PARTS}
    assert len(parts["n"]) == 6 and len(parts["dimension"]) == 2
    assert len(parts["smooth"]) == 2 * len(SMOOTH) and len(parts["regression"]) == 3
    assert len(parts["queries"]) == len(parts["table"]) == 2 * len(query_methods())
    measured = [r for r in found if "values" in r]
    assert all(len(r["values"]) == len(r["uniform"]) == 2 for r in measured)
    private = [r for r in measured if r["method"] != "uncapped"]
    assert all(0 <= r["true_epsilon"] <= 0.9 for r in private) and len(private) > 40
    papers = [r["true_epsilon"] for r in parts["n"] if r["method"] == "paper"]
    assert all(e < 0.3 for e in papers)
    refused = [r for r in found if "refused" in r]
    assert {r["method"] for r in refused} == {"bias-reduced", "bias-reduced, paper"}
    large = [r["dimensions"] for r in parts["table"] if r["size"] == 1]
    assert large[0][0] == 3 * parts["table"][0]["dimensions"][0]


def test_tables_and_plots_are_written(rows):
    study, found, folder = rows
    text = report.write(study, found, folder)
    assert all(title in text for title in report.PARTS.values())
    assert "| 300 | 4 x 4 | paper |" in text and "refused: U=" in text
    for name in ("gaps.png", "queries.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_the_exponent_is_that_of_a_power():
    made = [{"size": n, "values": [3 * n**-0.5, 3 * n**-0.5]} for n in (10, 100, 1000)]
    assert report.slope(made) == pytest.approx(-0.5)
    assert math.isnan(report.slope(made[:1]))
