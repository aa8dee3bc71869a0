"""Plain releases and the table of sentences that Algorithm 5 is held against."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

from hf_dpzero.papers.synthetic_data import (
    histogram,
)
from hf_dpzero.privacy.noise import InsecureSeededNoise
from scripts.studies.saddle_point import releases
from scripts.studies.saddle_point.releases import (
    gaussian_answers,
    noised_histogram,
    on_simplex,
)
from scripts.studies.saddle_point.text_table import Table, text_table

DELTA = 1e-6


# --- plain releases


def test_plain_releases_have_the_noise_of_their_budgets(monkeypatch):
    shares, n = np.full(400, 1 / 400), 1000
    monkeypatch.setattr(releases, "on_simplex", lambda v: v)
    sources = [InsecureSeededNoise(seed) for seed in range(30)]
    laplace, gaussian = (
        np.std([noised_histogram(shares, n, source, 0.1, delta) - shares for source in sources]) * n
        for delta in (0.0, DELTA)
    )
    assert laplace == pytest.approx(math.sqrt(2) * 20, rel=0.05)
    # a replaced example moves two counts by one
    assert get_epsilon_gaussian(gaussian / math.sqrt(2), DELTA) == pytest.approx(0.1, rel=0.05)


def test_answers_are_noised_by_the_distance_of_two_cells():
    queries = np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 1.0]] * 100)
    shares = np.array([0.2, 0.3, 0.5])
    farthest = max(np.linalg.norm(a - b) for a, b in itertools.combinations(queries.T, 2))
    noise = [
        gaussian_answers(queries, shares, 50, 0.3, DELTA, InsecureSeededNoise(s)) - queries @ shares
        for s in range(20)
    ]
    sigma = np.std(noise) * 50 / farthest
    assert get_epsilon_gaussian(sigma, DELTA) == pytest.approx(0.3, rel=0.05)


def test_the_projection_is_the_nearest_point_of_the_simplex():
    draw = np.random.default_rng(0)
    for _ in range(20):
        v = draw.normal(size=6)
        p = on_simplex(v)
        assert p.min() >= 0 and p.sum() == pytest.approx(1)
        others = draw.dirichlet(np.full(6, 0.5), 300)
        assert np.all(((others - v) ** 2).sum(axis=1) >= ((p - v) ** 2).sum() - 1e-12)


# --- the table of sentences


def test_a_folder_of_sentences_becomes_a_table(tmp_path):
    lines = [
        {"sentence": "Not a bad film", "label": 1},
        {"text": "zounds , " + "word " * 20, "label": 0},
        {"sentence": "", "label": 2},
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    table = text_table(tmp_path)
    assert table.sizes == (3, 4, 3, 2, 2, 2, 27)
    assert table.rows.tolist() == [
        [1, 1, 0, 0, 1, 1, 13],
        [0, 3, 0, 1, 0, 0, 25],
        [2, 0, 0, 0, 0, 0, 26],
    ]
    small = table.without("letter", "word length")
    assert small.num_cells == 3 * 4 * 8 and small.names[-1] == "article"
    queries = small.marginals()
    assert len(queries) == 3 * 4 + 3 * 2 * 3 + 4 * 2 * 3 + 4 * 3
    shares = histogram(small.cells, small.num_cells)
    # each pair of attributes has answers that sum to 1
    assert (queries @ shares).sum() == pytest.approx(10)
    both = Table(("a", "b"), (2, 3), np.array([[1, 2], [0, 1], [1, 2]]))
    found = both.marginals() @ histogram(both.cells, 6)
    np.testing.assert_allclose(found, [0, 1 / 3, 0, 0, 0, 2 / 3])


def test_files_without_labels_or_texts_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"train\.jsonl"):
        text_table(tmp_path)
    for line in ({"label": 1}, {"sentence": "x", "label": "y"}, {"sentence": "x"}):
        (tmp_path / "train.jsonl").write_text(json.dumps(line))
        with pytest.raises(ValueError, match="line 1"):
            text_table(tmp_path)
