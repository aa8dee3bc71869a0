"""Metrics: numbers derived by hand, scikit-learn's macro-F1, alignment by brute force, refusals."""

from __future__ import annotations

import itertools
import json
import pkgutil
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from hf_dpzero.tasks import metrics
from hf_dpzero.tasks.metrics import (
    Accuracy,
    Drop,
    MacroF1,
    Squad,
    accuracy,
    drop_exact_match,
    drop_f1,
    drop_scores,
    macro_f1,
    squad_exact_match,
    squad_f1,
    squad_scores,
)
from hf_dpzero.tasks.metrics.drop import drop_normalized
from hf_dpzero.tasks.metrics.squad import squad_normalized

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

# ---------------------------------------------------------------- accuracy and macro-F1


def test_accuracy_is_the_share_of_equal_entries() -> None:
    assert accuracy(np.array([0, 2, 1, 1]), np.array([0, 1, 1, 1])) == {"accuracy": 0.75}
    assert accuracy(np.array([True, False]), np.array([1, 1])) == {"accuracy": 0.5}


def test_macro_f1_by_hand() -> None:
    # Class 0: TP 1, FP 1, FN 1 -> 1/2. Class 1: TP 1, FP 1, FN 0 -> 2/3. Class 2: FN 1 -> 0.
    found = macro_f1(np.array([0, 0, 1, 1]), np.array([0, 2, 1, 0]))
    assert found["macro_f1"] == pytest.approx((1 / 2 + 2 / 3 + 0) / 3)
    assert set(found) == {"macro_f1"}


def test_macro_f1_counts_every_class_the_same() -> None:
    """Nine of ten right is no feat where nine of ten are one class."""
    references = np.array([0] * 9 + [1])
    constant = np.zeros(10, dtype=int)
    assert accuracy(constant, references)["accuracy"] == 0.9
    # Class 0: 2 * 9 / (10 + 9); class 1: 0.
    assert macro_f1(constant, references)["macro_f1"] == pytest.approx(9 / 19)


EDGES = {
    "all right": ([0, 1, 2], [0, 1, 2]),
    "all wrong": ([1, 2, 0], [0, 1, 2]),
    "one class": ([3, 3], [3, 3]),
    "one row, wrong": ([1], [0]),
    "a class only predicted": ([0, 5, 1], [0, 1, 1]),
    "a class never predicted": ([0, 0, 0], [0, 1, 2]),
    "gaps and negative labels": ([-1, 7, 7, 100], [7, 7, -1, 100]),
}


@pytest.mark.parametrize("name", EDGES)
def test_macro_f1_is_that_of_scikit_learn_at_the_edges(name: str) -> None:
    predictions, references = (np.array(row) for row in EDGES[name])
    expected = f1_score(references, predictions, average="macro")
    assert macro_f1(predictions, references)["macro_f1"] == pytest.approx(expected, abs=1e-15)


def test_macro_f1_is_that_of_scikit_learn() -> None:
    generator, seen = np.random.default_rng(0), set()
    for classes in (2, 3, 6, 6, 40):
        predictions, references = generator.integers(classes, size=(2, 50))
        expected = f1_score(references, predictions, average="macro")
        assert macro_f1(predictions, references)["macro_f1"] == pytest.approx(expected, abs=1e-15)
        seen.add(round(expected, 6))
    assert len(seen) == 5


@pytest.mark.parametrize("metric", [accuracy, macro_f1])
def test_what_is_no_class_is_refused(metric: Callable[..., Any]) -> None:
    """`evaluate` itself would cut 0.9 to 0 and call it right."""
    with pytest.raises(ValueError, match="predictions of dtype float64 are no classes.*argmax"):
        metric(np.array([0.9, 1.0]), np.array([0, 1]))
    with pytest.raises(ValueError, match="references of dtype <U1 are no classes"):
        metric(np.array([0]), np.array(["0"]))
    with pytest.raises(ValueError, match=r"predictions have shape \(1,\), references \(2,\)"):
        metric(np.array([0]), np.array([0, 1]))
    with pytest.raises(ValueError, match=r"shape \(1, 2\).*one class a row"):
        metric(np.array([[0, 1]]), np.array([[0, 1]]))
    with pytest.raises(ValueError, match=r"shape \(0,\).*at least one row"):
        metric(np.array([]), np.array([]))


# ---------------------------------------------------------------- SQuAD v1.1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
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
)
def test_squad_normalisation(text: str, expected: str) -> None:
    assert squad_normalized(text) == expected


@pytest.mark.parametrize(
    ("prediction", "golds", "exact_match", "f1"),
    [
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
    ],
)
def test_squad_scores_by_hand(prediction: str, golds: list, exact_match: int, f1: float) -> None:
    assert squad_exact_match(prediction, golds) == exact_match
    assert squad_f1(prediction, golds) == pytest.approx(f1)
    assert squad_f1(prediction, golds[::-1]) == squad_f1(prediction, golds)


def test_squad_means_over_rows_are_fractions() -> None:
    predictions = ["Paris", "in early 1973", "", "東京"]
    references = [["paris", "Paris, France"], ["1973"], ["Bonn"], ["東京", "京都", "大阪"]]
    # exact: 1, 0, 0, 1; F1: 1, 1/2, 0, 1
    expected = {"exact_match": 0.5, "f1": 0.625}
    assert squad_scores(predictions, references) == expected
    assert squad_scores(np.array(predictions), references) == expected
    assert squad_scores(tuple(predictions), [tuple(golds) for golds in references]) == expected


# ---------------------------------------------------------------- DROP


@pytest.mark.parametrize(
    ("span", "expected"),
    [
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
)
def test_drop_normalisation(span: str, expected: str) -> None:
    assert drop_normalized(span) == expected


@pytest.mark.parametrize(
    ("prediction", "gold", "exact_match", "f1"),
    [
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
    ],
)
def test_drop_scores_by_hand(prediction: Any, gold: Any, exact_match: int, f1: float) -> None:
    assert drop_exact_match(prediction, [gold]) == exact_match
    assert drop_f1(prediction, [gold]) == f1


def test_drop_takes_the_best_annotator() -> None:
    golds = [["4"], ["four", "five"], "5 yards"]
    assert (drop_exact_match("4", golds), drop_f1("4", golds)) == (1, 1)
    assert (drop_exact_match("five", golds), drop_f1("five", golds)) == (0, 0.5)
    assert (drop_exact_match("5", golds), drop_f1("5", golds)) == (0, 0.67)
    assert (drop_exact_match("6", golds), drop_f1("6", golds)) == (0, 0)


def test_a_blank_annotation_is_never_matched() -> None:
    """Some annotators of DROP left nothing: day, month and year joined are blanks."""
    assert drop_exact_match("", ["  ", ["4"], []]) == drop_f1("", ["  ", ["4"], []]) == 0
    assert drop_f1("4", ["  ", ["4"], []]) == 1
    assert drop_exact_match("", [""]) == drop_f1("", [""]) == drop_f1([], [[]]) == 0


def test_a_date_is_a_span() -> None:
    golds = [["17 August "], ["August"], ["17"]]
    assert drop_exact_match("August 17", golds) == 0
    assert drop_f1("August 17", golds) == 1
    assert drop_exact_match("17 August", golds) == 1


def best_alignment(said: list[str], gold: list[str]) -> float:
    """The definition by brute force: every way to pair the spans up."""
    size = max(len(said), len(gold))
    padded = [*said, *[None] * (size - len(said))]
    sums = (
        sum(
            drop_pair(set(one.split()), set(other.split()))
            for one, other in zip(order, gold, strict=False)
            if one is not None
        )
        for order in itertools.permutations(padded)
    )
    return max(sums) / size


def drop_pair(said: set[str], gold: set[str]) -> float:
    """F1 of two sets of words without numbers, neither empty."""
    return 2 * len(said & gold) / (len(said) + len(gold))


def test_drop_f1_is_the_best_alignment() -> None:
    generator, found = np.random.default_rng(1), []

    def spans() -> list[str]:
        sizes = generator.integers(1, 4, size=generator.integers(1, 6))
        return [" ".join(generator.choice(list("xyzuv"), size, replace=False)) for size in sizes]

    for _ in range(60):
        said, gold = spans(), spans()
        found.append(drop_f1(said, [gold]))
        assert found[-1] == pytest.approx(best_alignment(said, gold), abs=0.005 + 1e-9)
        assert drop_f1(said[::-1], [gold]) == drop_f1(said, [gold[::-1]]) == found[-1]
    assert len(set(found)) > 20  # the cases differ


def test_drop_means_over_ragged_rows() -> None:
    predictions = ["4", ["Jets", "Bears"], [], ["1945"], "五"]
    references = [
        [["5"], ["4.0"]],
        [["Bears", "Jets"], ["Jets"], []],
        ["army", ["navy"]],
        [["8 May 1945"]],
        ["五"],
    ]
    # exact: 1, 1, 0, 0, 1; F1: 1, 1, 0, 1/2 (precision 1, recall 1/3), 1
    assert drop_scores(predictions, references) == {
        "exact_match": pytest.approx(0.6),
        "f1": pytest.approx(0.7),
    }


# ---------------------------------------------------------------- refusals of answers


@pytest.mark.parametrize("score", [squad_exact_match, squad_f1, drop_exact_match, drop_f1])
def test_golds_that_are_no_list_of_answers_are_refused(score: Callable[..., float]) -> None:
    """A string would be read as a list of its characters, and scored."""
    with pytest.raises(ValueError, match=r"golds='Paris' is no list of right answers.*\['Paris'\]"):
        score("Paris", "Paris")
    with pytest.raises(ValueError, match=r"golds=\[\] is no list"):
        score("Paris", [])


@pytest.mark.parametrize("scores", [squad_scores, drop_scores])
def test_rows_that_are_no_answers_are_refused(scores: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="2 predictions for 1 references"):
        scores(["a", "b"], [["a"]])
    with pytest.raises(ValueError, match=r"0 predictions for 0 references.*at least one row"):
        scores([], [])
    with pytest.raises(ValueError, match="row 1 has 'Bonn' where a list of right answers is due"):
        scores(["a", "b"], [["a"], "Bonn"])
    with pytest.raises(ValueError, match=r"row 1 has \[\] where a list .* or drop the row"):
        scores(["a", "b"], [["a"], []])
    with pytest.raises(ValueError, match="row 1 has None where a list"):
        scores(["a", "b"], [["a"], None])
    with pytest.raises(ValueError, match="row 1 has None where a string"):
        scores(["a", None], [["a"], ["b"]])
    with pytest.raises(ValueError, match="row 0 has 7 where a string"):
        scores(["7"], [[7]])


def test_spans_that_are_no_strings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"row 0 has 7 where a string is due; decode or str\(\)"):
        drop_scores([["6", 7]], [["6"]])
    with pytest.raises(ValueError, match=r"row 0 has \['a'\] where a string is due"):
        squad_scores([["a"]], [["a"]])


# ---------------------------------------------------------------- as metrics of `evaluate`

CASES = {
    Accuracy: (accuracy, [0, 1, 1, 2], [0, 1, 2, 2]),
    MacroF1: (macro_f1, [0, 1, 1, 2], [0, 1, 2, 2]),
    Squad: (squad_scores, ["x", "y z", ""], [["x"], ["y", "z z"], ["the", "u"]]),
    Drop: (drop_scores, [["x"], [], ["1"]], [[["y"], ["x", "z"]], [["z"], []], [["1.0"]]]),
}


@pytest.mark.parametrize("metric", CASES)
def test_rows_in_any_batches_give_the_same(metric: type) -> None:
    function, predictions, references = CASES[metric]
    expected = function(predictions, references)
    assert all(0 < value < 1 for value in expected.values())
    collected = metric(keep_in_memory=True)
    for start, end in ((0, 1), (1, len(predictions))):
        collected.add_batch(predictions=predictions[start:end], references=references[start:end])
    assert collected.compute() == expected
    one_by_one = metric(keep_in_memory=True)
    for prediction, reference in zip(predictions, references, strict=True):
        one_by_one.add(prediction=prediction, reference=reference)
    assert one_by_one.compute() == expected


@pytest.mark.parametrize("metric", CASES)
def test_metrics_ask_no_network_and_leave_the_generators_alone(
    metric: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, predictions, references = CASES[metric]

    def refuse(*_: Any) -> None:
        raise AssertionError("a metric opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    before = generators()
    function(predictions, references)
    assert generators() == before


def generators() -> tuple[Any, ...]:
    """The states of the process-wide generators."""
    name, keys, *rest = np.random.get_state()
    return (random.getstate(), torch.get_rng_state().tolist(), name, keys.tolist(), *rest)


# ---------------------------------------------------------------- the package


def loaded_after(code: str) -> set[str]:
    heavy = ("datasets", "evaluate", "scipy", "sklearn", "torch", "transformers")
    probe = f"{code}\nimport sys; print(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_scores_of_one_example_import_nothing_heavy() -> None:
    code = (
        "from hf_dpzero.tasks.metrics import drop_f1, squad_exact_match, squad_f1\n"
        "squad_exact_match('a', ['b']), squad_f1('a', ['b'])"
    )
    assert loaded_after(code) == set()
    scored = loaded_after("from hf_dpzero.tasks.metrics import drop_f1; drop_f1('a', ['b'])")
    assert not scored & {"datasets", "evaluate", "torch", "transformers"}
    assert loaded_after("from hf_dpzero.tasks.metrics import accuracy") >= {"datasets", "evaluate"}


def test_every_name_resolves_and_stays() -> None:
    """A module of the same name as a function would take its place once imported."""
    modules = {module.name for module in pkgutil.iter_modules(metrics.__path__)}
    assert modules >= {"class_accuracy", "class_f1", "squad", "drop", "answer_scores"}
    assert not modules & set(metrics.__all__)
    for name in metrics.__all__:
        value = getattr(metrics, name)
        assert callable(value), name
        assert value is getattr(metrics, name), name
    assert set(metrics.__all__) <= set(dir(metrics))
    with pytest.raises(AttributeError, match="'acuracy'"):
        metrics.acuracy  # noqa: B018


# ---------------------------------------------------------------- real answers


def answers(file: str) -> list[list[str]]:
    path = DATA / file
    if not path.is_file():
        pytest.skip(f"shared/data/{file} is not here")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row["answers"]["text"] if "squad" in file else row["answers"] for row in rows]


@pytest.mark.parametrize("file", ["squad/train.jsonl", "squad/validation.jsonl"])
def test_gold_answers_of_squad_predict_themselves_only(file: str) -> None:
    golds = answers(file)
    assert len(golds) > 1000
    right = [texts[-1] for texts in golds]
    assert squad_scores(right, golds) == {"exact_match": 1, "f1": 1}
    blank = np.mean([any(not squad_normalized(gold) for gold in texts) for texts in golds])
    assert squad_scores([""] * len(golds), golds) == {"exact_match": blank, "f1": 0}
    assert blank < 0.001  # one annotator of the Shah's interview answered "."
    half = len(golds) // 2  # rows of one article lie together, so neighbours share answers
    shuffled = squad_scores(right[half:] + right[:half], golds)
    assert 0 <= shuffled["exact_match"] <= shuffled["f1"] < 0.05


def test_gold_answers_of_drop_predict_themselves_only() -> None:
    golds = [[spans] for spans in answers("drop/train.jsonl")]
    assert len(golds) > 100
    right = [spans for (spans,) in golds]
    assert drop_scores(right, golds) == {"exact_match": 1, "f1": 1}
    assert drop_scores([[]] * len(golds), golds) == {"exact_match": 0, "f1": 0}
    half = len(golds) // 2
    shuffled = drop_scores(right[half:] + right[:half], golds)
    assert 0 <= shuffled["exact_match"] <= shuffled["f1"] < 0.1
