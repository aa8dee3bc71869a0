"""The benchmark of fixed shapes: its tokens are counted by hand here. No timing is judged."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scripts.benchmarks.fixed_shapes import (
    PROMPT,
    build_parser,
    main,
    passes_of,
    placement_of,
)

COMMON = ["--shape", "tiny", "--max_seq_length", "24"]
FOURS = ["--microbatch_size", "4"]  # a model so small has passes as large as it may


@pytest.fixture
def given(tmp_path):
    """A file of sentences of 2 and of 12 words, and a tokenizer of one token a word."""
    sentences = [" ".join(["good"] * (12 if i % 4 == 0 else 2)) for i in range(80)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"sentence": s}) for s in sentences))
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "good": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return [str(file), "--tokenizer", str(tmp_path / "tokenizer"), *COMMON]


def printed(capsys, *words: str) -> list[dict]:
    assert main(list(words)) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_tokens_of_passes_are_those_of_a_trainer_and_small_ones_are_charged(given, capsys):
    about, line = printed(capsys, "tokens", *given, "--batch_sizes", "8", "--draws", "40", *FOURS)
    short = 2 + len(PROMPT.split()) - 1
    assert about == {"rows": 80, "mean_tokens": short + 10 / 4}  # a quarter has 10 words more
    # A batch of N rows has a long one with probability 1 - 0.75^N, mostly at 8 expected rows.
    assert 1.2 < line["padded_batch"] <= (short + 10) / about["mean_tokens"]
    for name in ("public_widths", "unknown_widths"):
        found = line[name]
        assert 1.0 <= found["uncharged"] < found["charged"] <= 2 * found["uncharged"]
        assert 1 <= found["passes"] < 12


def test_passes_follow_from_widths_and_places():
    settings = build_parser().parse_args(["tokens", "file", *COMMON, "--microbatch_size", "4"])
    placement = placement_of([5] * 100, settings, 8.0)
    assert placement.sizes == (1, 4) and set(placement.shares) in ({8, 16, 24}, {16, 24})
    width = 8 if placement.step == 8 else 16
    found = passes_of(placement, [5] * 6, cut=24)
    assert found[0] == (4, width) and sum(rows for rows, _ in found) >= 6
    (wide,) = passes_of(placement, [23], cut=24)
    assert wide[1] == 24 and placement.rows_of(24, 0) == wide[0]


def test_bits_are_compared_by_place_and_by_neighbours(capsys):
    (found,) = printed(capsys, "bits", "--shapes", "tiny", "--dtypes", "float32")
    assert found["free"]["tried"] == 16 and set(found["fixed"]) == {"4", "16"}
    for size, bits in found["fixed"].items():
        assert bits["places"] == int(size) and bits["neighbours"] == 2 * int(size)
        assert bits["neighbours_differ"] == 0
        assert (bits["largest_move"] > 0) == (bits["places_differ"] > 0)


def test_a_step_is_timed_beside_padded_and_sorted_passes(given, capsys):
    words = ["time", *given, "--batch_size", "6", "--repeats", "1"]
    (found,) = printed(capsys, *words)
    over = found["tokens_over_own"]
    assert over["sorted_sixteens"] <= over["padded_batch"]  # one pass holds all where N <= 16
    assert set(found["step_over_two_forwards"]) == {"padded_batch", "sorted_sixteens"}
    assert len(found["seconds"]) == 3 and min(found["seconds"]) > 0 and found["passes"] >= 1
