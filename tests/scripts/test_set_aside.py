"""Rows that are set aside by whole sentence."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.set_aside import main, parts_of

TEXTS = ["a fine film", "fine film", "film", "a dull film", "dull", "a long night out", "night out"]


def test_a_phrase_goes_with_its_sentence_and_one_of_several_parts_is_a_training_row():
    parts = dict(zip(TEXTS, parts_of(TEXTS, {"public": 2, "tune": 2}), strict=True))
    of_sentence = {
        "a fine film": ["fine film"],
        "a dull film": ["dull"],
        "a long night out": ["night out"],
    }
    for sentence, phrases in of_sentence.items():
        assert {parts[phrase] for phrase in phrases} == {parts[sentence]}
    assert {parts[sentence] for sentence in of_sentence} == {"public", "tune", "train"}
    assert parts["film"] == "train"


def test_public_rows_lose_their_labels(tmp_path: Path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"sentence": t, "label": 1}) + "\n" for t in TEXTS))
    main([str(rows), "--output_dir", str(tmp_path), "--public", "2", "--tune", "2"])
    read = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("public", "tune", "train")
    }
    assert [set(row) for row in read["public"]] == [{"sentence"}] * 2
    assert sum(map(len, read.values())) == len(TEXTS)
    assert all("label" in row for row in read["tune"] + read["train"])
