"""Scores: numbers derived by hand, scikit-learn's macro-F1, alignment by brute force, refusals."""

from __future__ import annotations

import itertools
import socket
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import f1_score

from hf_dpzero.tasks.answers import (
    answer_score,
    answer_scores,
    drop_normalized,
    evaluate_metric,
    squad_normalized,
)
from hf_dpzero.tasks.classification import classification_scores


def test_accuracy_and_macro_f1_by_hand():
    """Nine of ten right is no feat where nine of ten are one class."""
    references = np.array([0] * 9 + [1])
    # Class 0: 2 * 9 / (10 + 9); class 1: 0.
    found = classification_scores(np.zeros(10, dtype=int), references, "macro_f1")
    assert found == {"accuracy": 0.9, "macro_f1": pytest.approx(9 / 19)}
    found = classification_scores(np.array([True, False]), np.array([1, 1]), "accuracy")
    assert found == {"accuracy": 0.5}


def drawn(classes: int) -> tuple[np.ndarray, np.ndarray]:
    predictions, references = np.random.default_rng(classes).integers(classes, size=(2, 50))
    return predictions, references


@pytest.mark.parametrize(
    ("predictions", "references"),
    [
        ([0, 1, 2], [0, 1, 2]),  # all right
        ([1, 2, 0], [0, 1, 2]),  # all wrong
        ([3, 3], [3, 3]),
        ([1], [0]),
        ([0, 5, 1], [0, 1, 1]),  # a class that is only predicted
        ([0, 0, 0], [0, 1, 2]),  # classes that are never predicted
        ([-1, 7, 7, 100], [7, 7, -1, 100]),
        *map(drawn, (2, 3, 6, 40)),
    ],
)
def test_macro_f1_is_that_of_scikit_learn(predictions, references):
    expected = f1_score(references, predictions, average="macro")
    found = classification_scores(predictions, references, "macro_f1")["macro_f1"]
    assert found == pytest.approx(expected, abs=1e-15)


def test_one_class_a_row():
    for predictions, references in (([0], [0, 1]), ([[0, 1]], [[0, 1]]), ([], [])):
        with pytest.raises(ValueError, match=r"predictions have shape .*at least one row"):
            classification_scores(predictions, references, "accuracy")


NORMALIZED = {
    squad_normalized: [
        ("The Eiffel  Tower!", "eiffel tower"),
        ("a cat, an owl; the end", "cat owl end"),
        ("theatre another banana", "theatre another banana"),  # articles are whole words
        ("a.n. other", "other"),  # punctuation goes first: "an other"
        ("the-cat", "thecat"),  # and joins what it stood between
        ("snake_case", "snakecase"),  # the underscore is punctuation
        ("1,000.5", "10005"),  # numbers are no exception
        ("tab\tand\nline\u00a0end", "tab and line end"),
        ("“Quoted” – naïve", "“quoted” – naïve"),  # only ASCII punctuation goes
        ("ÉCOLE ΑΘΗΝΑ 東京", "école αθηνα 東京"),
        ("The", ""),
        ("", ""),
    ],
    drop_normalized: [
        ("12", "12.0"),
        ("12.00", "12.0"),
        (" 1.2e1 ", "12.0"),
        ("-3", "3.0"),  # the hyphen splits, so there are no negative numbers
        ("3.", "3.0"),
        (".5", "0.5"),
        ("1,000", "1000.0"),  # no number as it stands, one without punctuation
        ("$3.5", "35.0"),  # likewise: the point is lost with the dollar
        ("45%", "45.0"),
        ("(1945)", "1945.0"),
        ("ten", "ten"),
        ("3rd", "3rd"),
        ("78-yard TD-pass", "78.0 yard td pass"),
        ("J.R. Smith's", "jr smiths"),
        ("the 2 of An apple", "2.0 of apple"),
        ("10\nyards", "10 yards"),  # only spaces and hyphens separate numbers from words
        ("10–12", "10–12"),  # an en dash is no hyphen
        ("The -  a", ""),
        ("", ""),
    ],
}


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [(rule, *case) for rule, cases in NORMALIZED.items() for case in cases],
)
def test_normalisation(rule, text, expected):
    assert rule(text) == expected


SQUAD = [
    ("October 1973", ["October 1973"], 1, 1),
    ("the october, 1973.", ["October 1973", "1973"], 1, 1),
    # precision 1/3, recall 1; against "spring" nothing: the best counts
    ("in early 1973", ["spring", "1973"], 0, 1 / 2),
    # bags: {to: 2, be: 2, or, not} and {to: 1, be: 1} -> 2 * 2 / (6 + 2)
    ("to be or not to be", ["to be"], 0, 1 / 2),
    # multiplicity: {no: 3} and {no: 1} -> 2 * 1 / (3 + 1)
    ("no no no", ["no"], 0, 1 / 2),
    ("no no no", ["no no"], 0, 4 / 5),
    ("1973 October", ["October 1973"], 0, 1),  # order matters to the exact match only
    ("Café", ["cafe"], 0, 0),  # accents are kept
    ("Königsberg, Preußen", ["KÖNIGSBERG"], 0, 2 / 3),
    ("", ["Paris"], 0, 0),
    ("the ...", ["Paris", "An"], 1, 0),  # two empty bags share no word (v1.1)
    ("", [""], 1, 0),
]
DROP = [  # with one gold answer
    # one span
    ("61", "61.0", 1, 1),
    ("10", "ten", 0, 0),  # digits are not words
    ("ten", "10", 0, 0),
    ("The Bears.", "bears", 1, 1),
    ("61-yard", "61 YARD", 1, 1),
    ("61", "61-yard", 0, 0.67),  # precision 1, recall 1/2: 2/3
    ("field goal", "goal field", 0, 1),
    ("goal goal goal", "goal", 0, 1),  # words are sets, unlike SQuAD's bags
    ("Bay", "Green Bay Packers", 0, 0.5),  # precision 1, recall 1/3
    # numbers of the gold answer must be met
    ("yards", "36 yards", 0, 0),
    ("35 yards", "36 yards", 0, 0),
    ("36 yards", "yards", 0, 0.67),  # but more numbers than it has only cost precision
    ("36 meters", "36 yards", 0, 0.5),  # and a met number counts as one word
    ("7 of 9", "5 or 7", 0, 0.33),  # one number of several is enough: 1/3, 1/3
    # emptiness
    ("", "army", 0, 0),
    ("the", "a", 1, 1),  # unlike SQuAD's
    ([], "army", 0, 0),
    # several spans
    (["Bears", "Jets"], ["Jets", "Bears"], 1, 1),
    (["Jets"], ["Jets", "Bears"], 0, 0.5),
    (["Jets", "Bears"], ["Jets"], 0, 0.5),
    ("Jets", ["Jets", "Jets"], 0, 0.5),  # a span is matched once
    (["Jets", "Jets", "Bears"], ["Jets", "Bears", "Bears"], 1, 0.67),  # the script's own oddity
    # one span with the words of both: precision 1/2, recall 1 with either, halved
    ("Ann Lee Bob Ray", ["Ann Lee", "Bob Ray"], 0, 0.33),
    # swapped surnames: every pair shares one of two words
    (["Ann Ray", "Bob Lee"], ["Ann Lee", "Bob Ray"], 0, 0.5),
    # best: "x y"-"x y" 1 and "x"-"x z" 2/3; greedy in order gives "x"-"x y" first, then "x z"
    (["x", "x y"], ["x y", "x z"], 0, 0.83),
    # 5-5 yard 2/3 and 8 yard-9 yard 0, of 3 spans: 2/9
    (["5", "8 yard", "z"], ["5 yard", "9 yard"], 0, 0.22),
]
ANNOTATORS = [  # with several, of which the best counts
    # the best annotator counts
    ("4", [["4"], ["four", "five"], "5 yards"], 1, 1),
    ("five", [["4"], ["four", "five"], "5 yards"], 0, 0.5),
    ("5", [["4"], ["four", "five"], "5 yards"], 0, 0.67),
    ("6", [["4"], ["four", "five"], "5 yards"], 0, 0),
    # some annotators left nothing, which is never matched
    ("", ["  ", ["4"], []], 0, 0),
    ("4", ["  ", ["4"], []], 1, 1),
    ([], [[]], 0, 0),
    # a date is a span: its day, month and year joined
    ("August 17", [["17 August "], ["August"], ["17"]], 0, 1),
    ("17 August", [["17 August "], ["August"], ["17"]], 1, 1),
]


@pytest.mark.parametrize(
    ("metric", "prediction", "golds", "exact", "f1"),
    [
        *(("squad", *case) for case in SQUAD),
        *(("drop", said, [gold], *scores) for said, gold, *scores in DROP),
        *(("drop", *case) for case in ANNOTATORS),
    ],
)
def test_scores_by_hand(metric, prediction, golds, exact, f1):
    for order in (golds, golds[::-1]):
        assert answer_score(prediction, order, metric) == (exact, pytest.approx(f1))


def test_squad_means_over_rows_are_fractions():
    predictions = ["Paris", "in early 1973", "", "東京"]
    references = [["paris", "Paris, France"], ["1973"], ["Bonn"], ["東京", "京都", "大阪"]]
    # exact: 1, 0, 0, 1; F1: 1, 1/2, 0, 1
    for said in (predictions, tuple(predictions), np.array(predictions)):
        assert answer_scores(said, references, "squad") == {"exact_match": 0.5, "f1": 0.625}  # type: ignore[arg-type]


def best_alignment(said: list[str], gold: list[str]) -> float:
    """The definition by brute force: every way to pair the spans up, of words without numbers."""

    def f1(one: str, other: str) -> float:
        first, second = set(one.split()), set(other.split())
        return 2 * len(first & second) / (len(first) + len(second))

    size = max(len(said), len(gold))
    orders = itertools.permutations([*said, *[""] * (size - len(said))])
    return max(sum(map(f1, order, gold)) for order in orders) / size


def test_drop_f1_is_the_best_alignment():
    generator, found = np.random.default_rng(1), []

    def spans() -> list[str]:
        sizes = generator.integers(1, 4, size=generator.integers(1, 6))
        return [" ".join(generator.choice(list("xyzuv"), size, replace=False)) for size in sizes]

    for _ in range(60):
        said, gold = spans(), spans()
        found.append(answer_score(said, [gold], "drop")[1])
        assert found[-1] == pytest.approx(best_alignment(said, gold), abs=0.005 + 1e-9)
        for one, other in ((said[::-1], gold), (said, gold[::-1])):
            assert answer_score(one, [other], "drop")[1] == found[-1]
    assert len(set(found)) > 20  # the cases differ


def test_drop_means_over_ragged_rows():
    predictions = ["4", ["Jets", "Bears"], [], ["1945"], "五"]
    references = [
        [["5"], ["4.0"]], [["Bears", "Jets"], ["Jets"], []], ["army", ["navy"]], [["8 May 1945"]],
        ["五"],
    ]  # fmt: skip
    # exact: 1, 1, 0, 0, 1; F1: 1, 1, 0, 1/2 (precision 1, recall 1/3), 1
    found = answer_scores(predictions, references, "drop")
    assert found == {"exact_match": pytest.approx(0.6), "f1": pytest.approx(0.7)}


@pytest.mark.parametrize(
    ("references", "message"),
    [
        (["Paris"], "golds is a str of length 5, not a list of right answers"),  # of characters
        ([[]], r"golds is a list of length 0, not .* as in \['Paris'\]"),
        ([["a"], ["b"]], "1 predictions for 2 references.*at least one row"),
    ],
)
def test_what_are_no_right_answers_is_refused_and_not_quoted(references, message):
    for metric in ("squad", "drop"):
        with pytest.raises(ValueError, match=message) as refused:
            answer_scores(["said"], references, metric)
        assert "said" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "predictions", "references"),
    [
        ("accuracy", [0, 1, 1, 2], [0, 1, 2, 2]),
        ("macro_f1", [0, 1, 1, 2], [0, 1, 2, 2]),
        ("squad", ["x", "y z", ""], [["x"], ["y", "z z"], ["the", "u"]]),
        ("drop", [["x"], [], ["1"]], [[["y"], ["x", "z"]], [["z"], []], [["1.0"]]]),
    ],
)
def test_rows_in_any_batches_give_the_same_without_a_network(
    name, predictions, references, monkeypatch
):
    def refuse(*_: Any) -> None:
        raise AssertionError("a metric opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    scores = answer_scores if name in ("squad", "drop") else classification_scores
    expected = scores(predictions, references, name)
    assert all(0 < value < 1 for value in expected.values())
    collected = evaluate_metric(name)
    for start, end in ((0, 1), (1, len(predictions))):
        collected.add_batch(predictions=predictions[start:end], references=references[start:end])
    assert collected.compute() == expected
