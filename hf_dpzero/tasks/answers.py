"""Question answering by generation: the answer's tokens are trained on, and decoded greedily.

The loss is the mean over an answer's own tokens; an answer ends with a new line (Malladi et al. 2023,
MeZO, arXiv:2305.17333, Appendix E).
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dpzero.tasks.classification import classification_scores
from hf_dpzero.tasks.description import DataArguments, TaskDescription
from hf_dpzero.tasks.prompted import (
    Columns,
    PromptCollator,
    PromptTask,
    Row,
    padding_id,
    prompt_of,
)
from hf_dpzero.tasks.rows import (
    column_of,
    load_splits,
    require_columns,
    subset,
    with_private_rows,
)
from hf_dpzero.tasks.templates import Encoded, PromptEncoder

if TYPE_CHECKING:
    import evaluate
    from transformers import EvalPrediction, PreTrainedTokenizerBase

    from hf_dpzero.objectives.prompted import PromptObjective
    from hf_dpzero.tasks.prompted import Metrics

END = "\n"
Golds = list[list[str]]
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)  # of ASCII; others, such as “ or –, stay

Answer = str | Sequence[str]
"""One answer to a question of DROP: its spans, or a string if it is one span."""


def prompted_generation(
    data: DataArguments, description: TaskDescription, private_file: str | None = None
) -> PromptedGeneration:
    """Loads a question answering task from the Hub or from local files.

    Raises:
      ValueError: no prompt, a masked one, settings of a classification, missing columns.
      OSError: the data cannot be found.
    """
    if data.prompt != "causal_lm":
        raise ValueError(
            f"task {description.name!r} generates its answers, which needs prompt: causal_lm, not "
            f"{data.prompt or 'a classification head'}."
        )
    if data.objective == "accuracy":
        raise ValueError("objective='accuracy' is for label words: use f1 or loss here.")
    unfit = {
        "has no labels; set max_train_samples for fewer rows": (
            "num_examples_per_class", "label_words", "class_names",
        ),
        "names its own columns: rename those of the rows, or describe it in a .yaml file": (
            "text_column", "text_pair_column", "label_column",
        ),
    }  # fmt: skip
    for why, name in ((why, name) for why, names in unfit.items() for name in names):
        if (value := getattr(data, name)) is not None:
            raise ValueError(f"{name}={value!r} is not for task {description.name!r}, which {why}.")
    prompt, template = prompt_of(data, description)
    splits = with_private_rows(load_splits(data, description.source), private_file)
    columns = {name: column_of(splits, known) for name, known in description.fields.items()}
    answers = column_of(splits, description.answer_columns)
    needed = [c for name, c in columns.items() if name not in description.optional_fields]
    require_columns(splits, [*needed, answers])
    return PromptedGeneration(
        name=description.name,
        head="causal_lm",
        prompt=prompt,
        template=template,
        columns=columns,
        answers=answers,
        splits=subset(splits, data),
        data=data,
        metric="f1",
        scored_as=description.metric,
    )


def gold_answers(value: Any) -> Golds:
    """Returns every accepted answer of a row, each as a list of spans.

    Args:
      value: a text or number, a list of them, a list of lists of spans, or a mapping that holds one of
        these as `text` (SQuAD) or `spans` (DROP).

    >>> gold_answers({"text": ["in May", "May", "May"], "answer_start": [1, 4, 4]})
    [['in May'], ['May']]
    >>> gold_answers([["red", "blue"]])
    [['red', 'blue']]
    >>> gold_answers("42")
    [['42']]
    """
    if isinstance(value, Mapping):
        value = value.get("text", value.get("spans"))

    def listed(value: Any) -> list[Any]:
        return [v for v in (value if isinstance(value, list) else [value]) if v is not None]

    golds = [[str(span) for span in listed(spans)] for spans in listed(value)]
    # Annotators mostly agree: the same answer three times would be scored three times.
    distinct = {tuple(spans): spans for spans in golds if any(span.strip() for span in spans)}
    return list(distinct.values())


@dataclass(frozen=True, kw_only=True)
class PromptedGeneration(PromptTask):
    """Trains on an answer's tokens and scores the decoded one; see `PromptTask`.

    Attributes:
      answers: the column with the gold answers; the first is trained on, all are scored against.
      scored_as: "squad" or "drop".
    """

    answers: str
    scored_as: str

    def _encode(
        self, rows: list[dict[str, Any]], encoder: PromptEncoder, places: list[int]
    ) -> tuple[Columns, list[Encoded]]:
        """Columns input_ids (prompt and answer), prompt_length, references."""
        texts = [self.texts(row) for row in rows]
        answers = encoder.answer_ids(texts, [self._answer(row) + END for row in rows])
        # The model may answer in more tokens than the gold answer has.
        room = [max(len(answer), self.data.max_new_tokens) for answer in answers]
        prompts = encoder.encode(texts, [self.data.max_seq_length - size for size in room])
        columns: Columns = {
            "input_ids": [p.input_ids + a for p, a in zip(prompts, answers, strict=True)],
            "prompt_length": [len(prompt.input_ids) for prompt in prompts],
            "references": places,
        }
        return columns, prompts

    def _answer(self, row: Row) -> str:
        """The first gold answer, in one line, for a new line ends an answer."""
        golds = gold_answers(row[self.answers])
        if not golds:
            raise ValueError(
                f"column {self.answers!r} has rows without an answer; drop them (task {self.name!r} "
                "trains on answers and scores against them)."
            )
        return ", ".join(" ".join(span.split()) for span in golds[0])

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> PromptCollator:
        """Returns prompt and answer in a row, labels on the answer alone."""
        columns = ("input_ids", "prompt_length", "references")
        return self._collator(tokenizer, columns)

    def objective(self, tokenizer: PreTrainedTokenizerBase) -> PromptObjective:
        """Returns the answer tokens' mean cross entropy, or with objective: f1 1 - F1 of the decoded."""
        from hf_dpzero.objectives.bounded import AnswerF1
        from hf_dpzero.objectives.prompted import Answers

        answers = Answers(
            max_new_tokens=self.data.max_new_tokens,
            stop_token_ids=stop_tokens(tokenizer),
            pad_token_id=padding_id(tokenizer),
        )
        if self.data.objective != "f1":
            return answers

        def f1(ids: Sequence[int], reference: int) -> float:
            answer, golds = self._scored(decoded_answer(tokenizer, ids), self._golds[reference])
            return answer_score(answer, golds, self.scored_as)[1]

        return AnswerF1(answers, f1)

    def _scored(self, text: str, golds: Golds) -> tuple[Answer, Sequence[Answer]]:
        """A text and its gold answers as the metric takes them: DROP's are lists of spans."""
        if self.scored_as == "squad":
            return text, [", ".join(spans) for spans in golds]
        # A comma separates spans only where the question has several: "Reno, Nevada" is one.
        return text.split(", ") if any(len(spans) > 1 for spans in golds) else [text], golds

    def metrics(self, tokenizer: PreTrainedTokenizerBase) -> Metrics:
        """Returns {"f1": ..., "exact_match": ...} by the official rules of SQuAD or DROP."""

        def compute(prediction: EvalPrediction) -> dict[str, float]:
            texts = [decoded_answer(tokenizer, ids) for ids in np.asarray(prediction.predictions)]
            golds = [self._golds[int(place)] for place in np.asarray(prediction.label_ids)]
            answers, references = zip(*map(self._scored, texts, golds), strict=True)
            return answer_scores(answers, references, self.scored_as)

        return compute

    @functools.cached_property
    def _golds(self) -> list[Golds]:
        """By place: those of the training rows, then those of the validation rows."""
        return [
            gold_answers(value) for rows in self.splits.values() for value in rows[self.answers][:]
        ]


def decoded_answer(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Returns generated tokens as an answer: up to the first new line, without white space around it."""
    kept = [int(token) for token in ids if token >= 0]
    return str(tokenizer.decode(kept, skip_special_tokens=True)).split(END, 1)[0].strip()


def stop_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the tokens that end an answer: the end of text, and new lines without other text."""
    # In the middle of a text, where some tokenizers write a new line otherwise than by itself.
    after = tokenizer(f"x{END}", add_special_tokens=False)["input_ids"]
    before = tokenizer("x", add_special_tokens=False)["input_ids"]
    lines = after[len(before) :] if after[: len(before)] == before else []
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    blank = [token for token, text in enumerate(texts) if END in text and not text.strip()]
    return tuple(dict.fromkeys([*ends, *(lines if len(lines) == 1 else []), *blank]))


# ---- scores


def answer_scores(
    predictions: Sequence[Answer], references: Sequence[Sequence[Answer]], metric: str
) -> dict[str, float]:
    """Returns exact match and F1 of generated answers, means over N >= 1 rows.

    Args:
      predictions: N answers, perhaps empty; for "drop" strings or lists of spans.
      references: N lists of right answers, for "drop" strings or lists of spans. Spans of one annotator
        belong in one inner list, alternatives in several.
      metric: "squad" or "drop".

    Returns:
      {"exact_match": ..., "f1": ...}.

    Raises:
      ValueError: no rows, another number of references, or as `answer_score`.

    >>> answer_scores(["Paris", ""], [["paris", "Paris, France"], ["London"]], "squad")
    {'exact_match': 0.5, 'f1': 0.5}
    >>> answer_scores(["7", ["Jets", "Bears"]], [["7.0"], [["Bears", "Jets"], ["Jets"]]], "drop")
    {'exact_match': 1.0, 'f1': 1.0}
    """
    if len(predictions) != len(references) or not len(predictions):
        raise ValueError(
            f"{len(predictions)} predictions for {len(references)} references; give one each, for "
            "at least one row."
        )
    rows = zip(predictions, references, strict=True)
    exact, f1 = np.mean([answer_score(*row, metric) for row in rows], axis=0)
    return {"exact_match": float(exact), "f1": float(f1)}


def answer_score(prediction: Answer, golds: Sequence[Answer], metric: str) -> tuple[float, float]:
    """Returns exact match and F1 of one generated answer in [0, 1], each the best over its gold answers.

    Args:
      prediction: a string; for "drop" also a list of spans, perhaps empty.
      golds: at least one right answer. For "drop" one an annotator, each a string or a list of spans;
        an answer whose first span is blank, or that has none, cannot be matched.
      metric: "squad" or "drop".

    Raises:
      ValueError: golds is a string or empty; quotes no answer, which may be a private row's.
    """
    if isinstance(golds, str) or not len(golds):  # a string would be scored letter by letter
        raise ValueError(
            f"golds is a {type(golds).__name__} of length {len(golds)}, not a list of right answers; "
            "give at least one, as in ['Paris']."
        )
    rules: dict[str, Callable[..., tuple[float, float]]] = {"squad": _squad, "drop": _drop}
    return rules[metric](prediction, golds)


def evaluate_metric(name: str) -> evaluate.Metric:
    """Makes a task's scores a metric of `evaluate`, which collects batches, without a network.

    >>> metric = evaluate_metric("squad")
    >>> metric.add_batch(predictions=["the cat"], references=[["cat"]])
    >>> metric.add_batch(predictions=["dog"], references=[["cat", "hot dog"]])
    >>> metric.compute()
    {'exact_match': 0.5, 'f1': 0.8333333333333333}
    """
    import evaluate
    from datasets import Features, Sequence, Value

    text, label = Value("string"), Value("int64")
    answers = {"squad": (text, Sequence(text)), "drop": (Sequence(text), Sequence(Sequence(text)))}
    predictions, references = answers.get(name, (label, label))
    scores = answer_scores if name in answers else classification_scores

    class Scores(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            about = {"description": name, "citation": "", "inputs_description": ""}
            features = Features({"predictions": predictions, "references": references})
            return evaluate.MetricInfo(**about, features=features)

        def _compute(self, **columns: list[Answer]) -> dict[str, float]:
            return scores(**columns, metric=name)

    return Scores(keep_in_memory=True)


# SQuAD v1.1: Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1, and the data set's evaluation script.


def squad_normalized(text: str) -> str:
    """Returns lower case without ASCII punctuation, then without articles, with single spaces.

    >>> squad_normalized("The U.S.  Navy's a-b, an A!")
    'us navys ab'
    """
    return _without_articles(text.lower().translate(_PUNCTUATION))


def _squad(prediction: str, golds: Sequence[str]) -> tuple[float, float]:
    """Exact match, and F1: 2 |common| / (|prediction| + |gold|) of the bags of words; the best gold's.

    Words are what white space separates after normalisation, with multiplicity.

    >>> _squad("late October 1973", ["1973", "in October 1973"]) == (0, 2 / 3)
    True
    """
    text = squad_normalized(prediction)
    words, f1 = Counter(text.split()), [0.0]
    normalized = [squad_normalized(gold) for gold in golds]
    for gold in normalized:
        others = Counter(gold.split())
        # No word in common is 0, also where both bags are empty and match: so does the script of v1.1.
        if common := (words & others).total():
            f1.append(2 * common / (words.total() + others.total()))
    return float(text in normalized), max(f1)


# DROP: Dua et al. 2019, arXiv:1903.00161, section 5.1, and the script `drop_eval` of AllenNLP.


def drop_normalized(span: str) -> str:
    """Returns the lower-case words between spaces and hyphens; numbers as floats, no articles.

    A word keeps its punctuation only if it is a number as it stands: "3.5" is 3.5 but "$3.5" is 35.

    >>> drop_normalized("The 12-yard TD-pass, 1e1 of $3.5")
    '12.0 yard td pass 10.0 of 35.0'
    """
    words = []
    for word in re.split("[ -]", span.lower()):
        bare = word if _is_number(word) else word.translate(_PUNCTUATION)
        words.append(_without_articles(str(float(bare)) if _is_number(bare) else bare))
    return " ".join(filter(None, words))


def _drop(prediction: Answer, golds: Sequence[Answer]) -> tuple[float, float]:
    """Exact match, and the F1 of the two answers rounded to two decimals; each the best gold's.

    Answers match if they have as many spans and the same ones. Their F1: the spans' sets of words are
    aligned one to one such that the sum of the F1 of the pairs is largest; that sum is divided by the
    larger number of spans.

    >>> _drop("78", [["78-yard"]])  # precision 1, recall 1/2
    (0.0, 0.67)
    >>> _drop(["Bears"], [["Jets", "Bears"]])
    (0.0, 0.5)
    """
    from scipy.optimize import linear_sum_assignment  # which nothing but DROP needs

    def spans_of(answer: Answer) -> Sequence[str]:
        return [answer] if isinstance(answer, str) else answer

    said, exact, best = [drop_normalized(span) for span in spans_of(prediction)], False, 0.0
    predicted = [set(span.split()) for span in said]
    for gold in golds:
        spans = spans_of(gold)
        if not len(spans) or not spans[0].strip():  # an annotator who left nothing
            continue
        wanted = [drop_normalized(span) for span in spans]
        # Of repeated spans only the number counts, as in the script.
        exact = exact or (len(said) == len(wanted) and set(said) == set(wanted))
        pairs = np.array([[_set_f1(set(one.split()), o) for o in predicted] for one in wanted])
        scores = np.zeros(max(pairs.shape))  # a set that is left over counts with 0
        rows, columns = linear_sum_assignment(pairs, maximize=True)
        scores[rows] = pairs[rows, columns]
        best = max(best, float(np.round(np.mean(scores), 2)))
    return float(exact), best


def _is_number(word: str) -> bool:
    """Whether `float` reads it, so "1e3", "nan" and "infinity" are numbers, "ten" is not."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def _set_f1(gold: set[str], predicted: set[str]) -> float:
    """The harmonic mean of precision and recall; 0 if gold has numbers and none is predicted."""
    numbers = {word for word in gold if _is_number(word)}
    if numbers and not numbers & predicted:
        return 0.0
    precision = len(gold & predicted) / len(predicted) if predicted else 1.0
    recall = len(gold & predicted) / len(gold) if gold else 1.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _without_articles(text: str) -> str:
    """A lower-case text without the words a, an, the, and with single spaces between words."""
    return " ".join(_ARTICLES.sub(" ", text).split())
