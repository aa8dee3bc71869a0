"""Prompted tasks: what rows become, which words stand for labels, what is scored, and what is kept."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from row_files import row_files
from tiny_language_models import LABEL_WORDS, opt_tokenizer, roberta_tokenizer
from tokenizer_families import CAUSAL, Slow, bert, llama
from transformers import EvalPrediction

from hf_dpzero.tasks import BENCHMARKS, build_task, description_of, prompted
from hf_dpzero.tasks.answers import (
    PromptedGeneration,
    decoded_answer,
    gold_answers,
    stop_tokens,
)
from hf_dpzero.tasks.description import DataArguments
from hf_dpzero.tasks.prompted import PromptCollator, PromptedClassification
from hf_dpzero.tasks.templates import mask_word_ids

KINDS = ("masked_lm", "causal_lm")

roberta, opt = functools.cache(roberta_tokenizer), functools.cache(opt_tokenizer)


def task_of(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Any:
    """The same rows for training and, in reverse order, for evaluation."""
    return build_task(DataArguments(**{**row_files(folder, rows), **settings}))


def tokenizer_for(kind: str) -> Any:
    return roberta() if kind == "masked_lm" else opt()


ROWS: dict[str, dict[str, Any]] = {
    "sst2": {"sentence": "a gripping film . ", "label": 1},
    "sst5": {"sentence": "it is long", "label": 2},
    "trec": {"text": "What is an atom ?", "label": 2},
    "rte": {"premise": "No arms were found.", "hypothesis": "Arms were found.", "label": 1},
    "snli": {"premise": "A man sleeps.", "hypothesis": "He dreams.", "label": 1},
    "mnli": {"premise": "It rained; all day!", "hypothesis": "It was dry.", "label": 2},
    "boolq": {"passage": "Rain is wet.", "question": "is rain wet", "label": True},
    "squad": {
        "title": "Rain",
        "context": "It rained in May.",
        "question": "When did it rain?",
        "answers": {"text": ["in May", "May"], "answer_start": [10, 13]},
    },
    "drop": {
        "passage": "Two red and three blue birds.",
        "question": "Which colours?",
        "answers": [["red", "blue"], ["blue"]],
    },
}

PROMPTS = {
    ("sst2", "masked_lm"): "a gripping film . It was great.",
    ("sst2", "causal_lm"): "a gripping film . It was great",
    ("sst5", "masked_lm"): "it is long It was okay.",
    ("sst5", "causal_lm"): "it is long It was okay",
    ("trec", "masked_lm"): "Description: What is an atom ?",
    ("trec", "causal_lm"): "Question: What is an atom ?\nKind of answer: Description",
    ("rte", "masked_lm"): "No arms were found? No, arms were found.",
    ("rte", "causal_lm"): (
        'No arms were found.\nDoes this mean that "Arms were found." is true? Yes or No?\nNo'
    ),
    ("snli", "masked_lm"): "A man sleeps? Maybe, he dreams.",
    ("snli", "causal_lm"): (
        'A man sleeps.\nDoes this mean that "He dreams." is true? Yes, Maybe or No?\nMaybe'
    ),
    ("mnli", "masked_lm"): "It rained; all day? No, it was dry.",
    ("mnli", "causal_lm"): (
        'It rained; all day!\nDoes this mean that "It was dry." is true? Yes, Maybe or No?\nNo'
    ),
    ("boolq", "masked_lm"): "Rain is wet. Is rain wet? Yes.",
    ("boolq", "causal_lm"): "Rain is wet. Is rain wet?\nYes",
    ("squad", "causal_lm"): (
        "Title: Rain\nContext: It rained in May.\nQuestion: When did it rain?\nAnswer: in May"
    ),
    ("drop", "causal_lm"): (
        "Passage: Two red and three blue birds.\nQuestion: Which colours?\nAnswer: red, blue"
    ),
}

WORDS = {
    "sst2": ("terrible", "great"),
    "sst5": ("terrible", "bad", "okay", "good", "great"),
    "trec": ("Expression", "Entity", "Description", "Human", "Location", "Number"),
    "rte": ("Yes", "No"),
    "snli": ("Yes", "Maybe", "No"),
    "mnli": ("Yes", "Maybe", "No"),
    "boolq": ("No", "Yes"),
}


def test_every_benchmark_has_its_prompts_written_down():
    offered = {(name, kind) for name in BENCHMARKS for kind in description_of(name).prompts}
    assert offered == set(PROMPTS)
    assert set(BENCHMARKS) == set(ROWS)


@pytest.mark.parametrize(("name", "kind"), PROMPTS)
def test_a_benchmark_row_as_a_prompt(name, kind, tmp_path):
    task = task_of(tmp_path, [ROWS[name]], task=name, prompt=kind)
    assert task.head == kind
    assert task.prompt.label_words == WORDS.get(name, ())
    assert task.example(task.splits["train"][0]) == PROMPTS[name, kind]


def test_numbers_are_text_and_lists_are_not(tmp_path):
    """A field may hold 0, which is not the same as nothing; the refusal quotes no row."""
    rows = [{"text": 0, "label": 0}, {"text": 12, "label": 1}]
    settings = {"template": "{text} It was {mask}.", "label_words": ["bad", "good"]}
    task = task_of(tmp_path, rows, prompt="masked_lm", **settings)
    found = [task.example(row) for row in task.splits["train"]]
    assert found == ["0 It was bad.", "12 It was good."]
    task = one_question(tmp_path, ["confidential", "b"], "d")
    with pytest.raises(ValueError, match=r"column 'context' holds a list of 2 entries") as refused:
        task.tokenize(opt())
    assert "confidential" not in str(refused.value)


def test_label_words_are_the_tokens_after_a_space():
    words = WORDS["sst5"]
    expected = [roberta().convert_tokens_to_ids(f"Ġ{word}") for word in words]
    assert mask_word_ids(roberta(), words) == tuple(expected)
    assert roberta().unk_token_id not in expected
    expected = bert().convert_tokens_to_ids(["terrible", "great"])
    assert mask_word_ids(bert(), ("Terrible", "great")) == tuple(expected)


@pytest.mark.parametrize(
    ("tokenizer", "word", "message"),
    [
        (roberta, "GREAT", "'GREAT' is . tokens.*for example, .*'great'.*prompt: causal_lm scores"),
        (roberta, "greats", "'greats' is . tokens.*for example, .*'great'"),
        (roberta, "maybe", "'maybe' is . tokens.*for example, .*'Maybe'"),
        (roberta, "xyzzy", "set label_words to words of the vocabulary"),
        (roberta, "ss", "set label_words to words of the vocabulary"),
        (bert, "日本", "'日本' is not in the vocabulary"),
        (opt, "bad", "needs a mask token, and .* has none.*causal_lm"),
    ],
)
def test_a_word_that_fills_no_mask_is_refused_with_one_that_does(tokenizer, word, message):
    with pytest.raises(ValueError, match=message) as refused:
        mask_word_ids(tokenizer(), (word, "bad"))
    named = str(refused.value).partition("for example")[2].partition(";")[0]
    for other in re.findall(r"'([^']*)'", named):
        assert len(tokenizer()(f" {other}", add_special_tokens=False)["input_ids"]) == 1


def sentiment(folder: Path, kind: str, **settings: Any) -> PromptedClassification:
    """SST-2 with rows of several lengths."""
    rows = [{"sentence": f"a {'very ' * size}good film", "label": size % 2} for size in range(4)]
    found: PromptedClassification = task_of(folder, rows, task="sst2", prompt=kind, **settings)
    return found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bad"], "1 words.*for the 2 labels negative, positive; give one each"),
        (["bad", "okay", "great"], "3 words.*for the 2 labels"),
        ([], "0 words.*for the 2 labels"),
        (["", "great"], "label word '' of negative is blank"),
        # After "It was " a word " great" would be another token than "great", and so a silent loss.
        (["bad", " great"], "label word ' great' of positive is blank or has white sp"),
    ],
)
def test_refused_label_words(words, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sentiment(tmp_path, "causal_lm", label_words=words)


@pytest.mark.parametrize(
    ("kind", "word", "tokenizer"), [("masked_lm", "Great", bert), ("causal_lm", "great", opt)]
)
def test_two_words_of_one_token_are_refused(kind, word, tokenizer, tmp_path):
    task = sentiment(tmp_path, kind, label_words=[word, "great"])
    for use in (task.words, task.objective):
        with pytest.raises(ValueError, match=f"'{word}' and 'great' are the same token.*choose ot"):
            use(tokenizer())


def test_single_words_need_one_pass_and_others_one_each(tmp_path):
    from hf_dpzero.objectives.prompted import Candidates, LabelWords

    one = sentiment(tmp_path, "causal_lm")
    ids = tuple(opt().convert_tokens_to_ids(["Ġterrible", "Ġgreat"]))
    assert one.objective(opt()) == LabelWords(ids)
    assert one.collator(opt()).columns == ("input_ids", "positions", "labels")
    several = sentiment(tmp_path, "causal_lm", label_words=["great", "terrible film"])
    assert several.objective(opt()) == Candidates()
    collator = several.collator(opt())
    assert collator.candidates[0] == (ids[1],)
    assert [opt().decode(list(ids)) for ids in collator.candidates] == [" great", " terrible film"]


def test_the_tokens_of_a_word_depend_on_what_is_before_it(tmp_path):
    """After a new line there is no space in front of it."""
    task = sentiment(
        tmp_path, "causal_lm", label_words=["No", "Yes"], template="{sentence}\n{answer}"
    )
    assert task.words(opt()) == tuple((i,) for i in opt().convert_tokens_to_ids(["No", "Yes"]))
    before = len(llama()("film\n")["input_ids"])
    expected = [tuple(llama()(f"film\n{word}")["input_ids"][before:]) for word in ("No", "Yes")]
    assert task.words(llama()) == tuple(expected)


@pytest.mark.parametrize("family", CAUSAL)
def test_every_family_says_the_same_words(family, tmp_path):
    tokenizer = CAUSAL[family]()
    task = sentiment(tmp_path, "causal_lm", label_words=["great", "in May 1900"])
    rows = task.tokenize(tokenizer)["train"]
    batch = task.collator(tokenizer)([rows[0], rows[3]])
    words = task.words(tokenizer)
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    for example, sentence in enumerate(("a good film", "a very very very good film")):
        for label, word in enumerate(("great", "in May 1900")):
            together = tokenizer(f"{sentence} It was {word}")["input_ids"]
            together = together[:-1] if family == "llama_with_end" else together
            found = ids[example] if ids.dim() == 2 else ids[example, label]
            attended = mask[example] if ids.dim() == 2 else mask[example, label]
            assert found[attended].tolist() == together
            assert tuple(together[-len(words[label]) :]) == words[label]


SHORT, LONG = [5, 6, 7], list(range(10, 19))


def word_batch(side: str) -> tuple[Any, ...]:
    rows = [
        {"input_ids": SHORT, "positions": 1, "labels": 1, "other": "x"},
        {"input_ids": LONG, "positions": 8, "labels": 0},
    ]
    columns = ("input_ids", "positions", "labels")
    one_each = {"positions": [1, 8], "labels": [1, 0]}
    return PromptCollator(9, columns, side)(rows), one_each, {"input_ids": (9, [SHORT, LONG])}


def candidate_batch(side: str) -> tuple[Any, ...]:
    rows = [{"input_ids": SHORT, "labels": 1}, {"input_ids": LONG, "labels": 0}]
    collator = PromptCollator(0, ("input_ids", "labels"), side, candidates=((7,), (8, 9)))
    plain = [[*SHORT, 7], [*SHORT, 8, 9], [*LONG, 7], [*LONG, 8, 9]]
    found = collator(rows)
    assert found["input_ids"].shape == (2, 2, 16)
    one_each = {"answer_lengths": [[1, 2], [1, 2]], "labels": [1, 0]}
    return found, one_each, {"input_ids": (0, plain)}


def answer_batch(side: str) -> tuple[Any, ...]:
    rows = [
        {"input_ids": SHORT, "prompt_length": 2, "references": 7},
        {"input_ids": LONG, "prompt_length": 1, "references": 0},
    ]
    labels = [[-100, -100, 7], [-100, *LONG[1:]]]
    padded = {"input_ids": (0, [SHORT, LONG]), "labels": (-100, labels)}
    columns = ("input_ids", "prompt_length", "references")
    return PromptCollator(0, columns, side)(rows), {"references": [7, 0]}, padded


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("batch", [word_batch, candidate_batch, answer_batch])
def test_padded_batches(batch, side):
    """Columns with a number a row, and rows of tokens: name -> (what fills them, the rows)."""
    found, one_each, padded = batch(side)
    padded["attention_mask"] = (0, [[1] * len(row) for row in padded["input_ids"][1]])
    for name, (fill, tokens) in padded.items():
        gaps = [[fill] * (16 - len(row)) for row in tokens]  # 9 to 11 tokens, to a multiple of 8
        full = [r + g if side == "right" else g + r for r, g in zip(tokens, gaps, strict=True)]
        assert found[name].flatten(0, -2).tolist() == full, name
    assert {name: found[name].tolist() for name in one_each} == one_each
    assert set(found) == {*one_each, *padded}
    assert {tensor.dtype for tensor in found.values()} == {torch.int64}
    assert all(tensor.is_contiguous() for tensor in found.values())


def test_padding_takes_the_tokenizers_token_and_side(tmp_path):
    tokenizer = opt_tokenizer()
    tokenizer.padding_side = "left"
    task = sentiment(tmp_path, "causal_lm")
    assert (task.collator(tokenizer).pad_token_id, task.collator(tokenizer).side) == (1, "left")
    assert llama().pad_token_id is None
    assert task.collator(llama()).pad_token_id == 2


def boolq(folder: Path, kind: str, rows: int = 6, **settings: Any) -> Any:
    """Passages of 1, 11, 21, ... sentences."""
    listed = [
        {"passage": "It rains. " * (10 * i + 1), "question": "does it rain", "label": bool(i % 2)}
        for i in range(rows)
    ]
    return task_of(folder, listed, task="boolq", prompt=kind, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_public_rows_that_are_cut_are_counted(kind, tmp_path, caplog):
    tokenizer = tokenizer_for(kind)
    whole = boolq(tmp_path, kind, max_seq_length=256, rows=4).tokenize(tokenizer)["train"]
    lengths = [len(ids) for ids in whole["input_ids"]]
    limit = lengths[2] + (kind == "causal_lm")  # a decoder's label word needs room too
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        found = boolq(tmp_path, kind, max_seq_length=limit).tokenize(tokenizer)
    assert [len(ids) for ids in found["train"]["input_ids"]][:3] == lengths[:3]
    assert all(limit - 4 < len(ids) <= limit for ids in found["train"]["input_ids"][3:])
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"3 of 6 validation prompts have more than max_seq_length={limit} tokens: they are cut at the "
        "end of their passage."
    ]
    if kind == "masked_lm":
        places = zip(found["train"]["input_ids"], found["train"]["positions"], strict=True)
        assert all(ids[place] == tokenizer.mask_token_id for ids, place in places)


def test_a_decoders_candidates_fit_with_the_prompt(tmp_path):
    words = ["No", "Yes, it was in May 1900"]
    task = boolq(tmp_path, "causal_lm", max_seq_length=48, label_words=words)
    batch = task.collator(opt())(list(task.tokenize(opt())["train"]))
    lengths = batch["attention_mask"].sum(dim=-1)
    assert lengths.max() == 48
    assert (lengths[:, 1] - lengths[:, 0] == len(task.words(opt())[1]) - 1).all()
    with pytest.raises(ValueError, match="max_seq_length=257 is beyond the 256 tokens"):
        boolq(tmp_path, "masked_lm", max_seq_length=257).tokenize(roberta())


def test_demonstrations_are_training_rows_drawn_by_the_seed(tmp_path):
    rows = [{"sentence": f"film {index}", "label": index % 2} for index in range(20)]

    def shown(**settings: Any) -> tuple[str, ...]:
        task = task_of(tmp_path, rows, task="sst2", prompt="causal_lm", **settings)
        found: tuple[str, ...] = task.encoder(opt()).demonstrations
        return found

    possible = {f"film {i} It was {WORDS['sst2'][i % 2]}" for i in range(20)}
    three = shown(num_demonstrations=3)
    assert len(set(three)) == 3
    assert set(three) <= possible
    assert shown(num_demonstrations=3) == three
    assert shown(num_demonstrations=3, subset_seed=1) != three
    assert shown() == ()
    kept = shown(num_demonstrations=2, max_train_samples=2, subset_seed=3)
    task = task_of(
        tmp_path, rows, task="sst2", prompt="causal_lm", max_train_samples=2, subset_seed=3
    )
    assert {text.split(" It")[0] for text in kept} == set(task.splits["train"]["sentence"])
    with pytest.raises(ValueError, match="num_demonstrations=21, but there are 20 training rows"):
        shown(num_demonstrations=21)


@pytest.mark.parametrize("kind", KINDS)
def test_demonstrations_stand_in_front_of_every_prompt(kind, tmp_path):
    task, tokenizer = sentiment(tmp_path, kind, num_demonstrations=2), tokenizer_for(kind)
    between = " " if kind == "masked_lm" else "\n\n"
    shown = task.encoder(tokenizer).demonstrations
    with pytest.raises(ValueError, match="no clip bounds them"):
        task.tokenize(tokenizer)
    rows = task.tokenize(tokenizer, only="validation")["validation"]
    for sentence, ids in zip(task.splits["validation"]["sentence"], rows["input_ids"], strict=True):
        own = f"{sentence} It was" + (" <mask>." if kind == "masked_lm" else "")
        assert ids == tokenizer(between.join((*shown, own)))["input_ids"]


def test_demonstrations_that_are_left_out_are_not_counted(tmp_path, caplog):
    """Room for one of two beside the longest prompt: each of the four rows leaves out one or none."""
    task = sentiment(tmp_path, "causal_lm", num_demonstrations=2)
    made = task.encoder(opt())
    sizes = [
        [len(opt()("\n\n".join((*made.demonstrations[skip:], f"{s} It was")))["input_ids"])
         for skip in range(3)]
        for s in task.splits["train"]["sentence"]
    ]  # fmt: skip
    limit = max(size[1] for size in sizes)
    assert any(size[0] > limit for size in sizes)
    task = sentiment(tmp_path, "causal_lm", num_demonstrations=2, max_seq_length=limit + 1)
    task.tokenize(opt(), only="validation")
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("some prompts have no room for all demonstrations")
    assert not any(character.isdigit() for character in said)


def questions(folder: Path, count: int = 5, **settings: Any) -> PromptedGeneration:
    """Question i asks for the year 1900 + i, or "in" that year."""
    rows = []
    for year in map(str, range(1900, 1900 + count)):
        answers = {"text": [year, f"in {year}"], "answer_start": [13, 10]}
        rows.append({"context": f"It rained in {year}.", "question": "When?", "answers": answers})
    return task_of(folder, rows, **{"task": "squad", "prompt": "causal_lm", **settings})


def one_question(folder: Path, context: str, answers: Any, **settings: Any) -> Any:
    rows = [{"context": context, "question": "When?", "answers": answers}]
    return task_of(folder, rows, **{"task": "squad", "prompt": "causal_lm", **settings})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("42", [["42"]]),
        (["42", "forty-two", "42"], [["42"], ["forty-two"]]),
        ([["red", "blue"], ["red"]], [["red", "blue"], ["red"]]),
        ({"text": ["a", "b", "a"], "answer_start": [0, 1, 2]}, [["a"], ["b"]]),
        ({"spans": ["a"], "types": ["span"]}, [["a"]]),
        ({"text": [], "answer_start": []}, []),
        ({"other": ["a"]}, []),
        ([["", " "], ["a"]], [["a"]]),
        ([], []),
        ([[]], []),
        ("  ", []),
        (None, []),
        (0, [["0"]]),
        ([3, 4.5], [["3"], ["4.5"]]),
        ([None, "a"], [["a"]]),
    ],
)
def test_gold_answers(value, expected):
    assert gold_answers(value) == expected


def test_prompt_and_answer_of_a_question(tmp_path):
    task = questions(tmp_path, 2)
    rows = task.tokenize(opt())
    assert rows["train"].column_names == ["input_ids", "prompt_length", "references"]
    for row, year in zip(rows["train"], (1900, 1901), strict=True):
        prompt = f"Context: It rained in {year}.\nQuestion: When?\nAnswer:"
        assert row["input_ids"] == opt()(f"{prompt} {year}\n")["input_ids"]
        assert row["prompt_length"] == len(opt()(prompt)["input_ids"])
    batch = task.collator(opt())(list(rows["train"]))
    labelled = batch["labels"][1][batch["labels"][1] != -100]
    assert opt().decode(labelled) == " 1901\n"


def test_references_where_both_splits_hold_the_same_rows(tmp_path):
    """Rows and prompts are the same, so only their place says which of the kept results is whose."""
    path = Path(questions(tmp_path).data.train_file)
    same = path.with_name("same.jsonl")
    same.write_text(path.read_text(encoding="utf-8") + "\n")
    rows = questions(tmp_path, validation_file=str(same)).tokenize(opt())
    assert rows["train"]["input_ids"][:] == rows["validation"]["input_ids"][:]
    assert rows["train"]["references"][:] == [0, 1, 2, 3, 4]
    assert rows["validation"]["references"][:] == [5, 6, 7, 8, 9]


def predictions(texts: list[str]) -> np.ndarray:
    """Generated tokens `[N, T]`, padded with -100, each text ended by a new line and then noise."""
    ids = [opt()(f" {text}\nnoise", add_special_tokens=False)["input_ids"] for text in texts]
    width = max(map(len, ids)) + 2
    return np.asarray([row + [-100] * (width - len(row)) for row in ids])


@pytest.mark.parametrize("split", ["train", "validation"])
def test_answers_are_scored_against_their_own_row(split, tmp_path):
    """Also of rows that were shuffled or selected after they were tokenised."""
    task, order = questions(tmp_path), [4, 1, 3]
    rows = task.tokenize(opt())[split].select(order)
    years = [task.splits[split]["context"][i][13:17] for i in order]
    assert len({*years} & {"1900", "1901", "1902", "1903", "1904"}) == 3
    references = task.collator(opt())(list(rows))["references"].numpy()
    said = predictions([f"in {years[0]}", years[1], "1850"])
    scores = task.metrics(opt())(EvalPrediction(said, references))
    assert scores == {"exact_match": pytest.approx(2 / 3), "f1": pytest.approx(2 / 3)}


def test_spans_of_drop(tmp_path):
    """An answer is taken apart at its commas only where a gold answer has several spans."""
    rows = [
        {"passage": "p", "question": "q", "answers": [["red", "blue"], ["blue"]]},
        {"passage": "p", "question": "q", "answers": [["Reno, Nevada"]]},
    ]
    task = task_of(tmp_path, rows, task="drop", prompt="causal_lm")
    said = EvalPrediction(predictions(["blue, red", "Reno, Nevada"]), np.asarray([0, 1]))
    assert task.metrics(opt())(said) == {"exact_match": 1.0, "f1": 1.0}
    said = EvalPrediction(predictions(["blue", "Nevada"]), np.asarray([0, 1]))
    # "blue" is all of the second annotator's answer; of two words "Nevada" is one: 2/3, rounded
    assert task.metrics(opt())(said) == {"exact_match": 0.5, "f1": pytest.approx((1 + 0.67) / 2)}


def test_f1_as_the_objective_scores_a_row_as_the_metric_does(tmp_path):
    from hf_dpzero.objectives.bounded import AnswerF1

    task = questions(tmp_path, objective="f1", max_new_tokens=7)
    objective = task.objective(opt())
    assert isinstance(objective, AnswerF1)
    assert objective.objective.max_new_tokens == 7
    for reference, text in ((0, "late in 1900"), (6, "1900"), (5, "in 1904")):
        row = predictions([text])
        expected = task.metrics(opt())(EvalPrediction(row, np.asarray([reference])))["f1"]
        assert objective.score(row[0].tolist(), reference) == pytest.approx(expected)


@pytest.mark.parametrize("family", CAUSAL)
def test_an_answer_ends_with_its_line(family):
    tokenizer = CAUSAL[family]()
    ids = tokenizer("x in May, 1900 \nand more", add_special_tokens=False)["input_ids"]
    own = [*ids, tokenizer.eos_token_id, -100, -100]
    assert decoded_answer(tokenizer, own) == "x in May, 1900"
    assert decoded_answer(tokenizer, [-100, -100]) == decoded_answer(tokenizer, []) == ""
    end, line, *blank = stop_tokens(tokenizer)
    assert end == tokenizer.eos_token_id
    assert tokenizer("in May\n", add_special_tokens=False)["input_ids"][-1] == line
    if not isinstance(tokenizer, Slow):
        assert tokenizer.decode([line]).endswith("\n")
    answers = tokenizer("in  May 1900", add_special_tokens=False)["input_ids"]
    assert not {end, line, *blank} & set(answers)
    assert [decoded_answer(tokenizer, [token]) for token in blank] == [""] * len(blank)
    if not isinstance(tokenizer, Slow):
        more = ["\n\n", " \n", "a\n", "  "]
        tokenizer.add_tokens(more)
        lines = tokenizer.convert_tokens_to_ids(more[:2])
        assert stop_tokens(tokenizer) == (end, line, *blank, *lines)


def test_an_answer_is_one_line_and_there_is_one(tmp_path):
    row = one_question(tmp_path, "a", ["one\ntwo \n", "x"]).tokenize(opt())["train"][0]
    assert opt().decode(row["input_ids"][row["prompt_length"] :]) == " one two\n"
    with pytest.raises(ValueError, match="column 'answers' has rows without an answer; drop them"):
        one_question(tmp_path, "a", [" "]).tokenize(opt())


def test_room_is_kept_for_the_answer(tmp_path, caplog):
    def tokens(length: int, room: int) -> tuple[list[int], int]:
        sizes = {"max_seq_length": length, "max_new_tokens": room}
        row = one_question(tmp_path, "It rained. " * 30, ["in May"], **sizes).tokenize(opt())
        return row["train"][0]["input_ids"], row["train"][0]["prompt_length"]

    ids, length = tokens(60, 20)
    assert 60 - 20 - 2 <= length <= 60 - 20
    assert opt().decode(ids[:length]).endswith("\nQuestion: When?\nAnswer:")
    assert "end of their context" in caplog.text
    assert 58 <= len(tokens(60, 1)[0]) <= 60  # its own answer has more than one token
    with pytest.raises(ValueError, match="lower max_new_tokens"):
        tokens(40, 50)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": None}, "task 'squad' generates its answers, which needs prompt: causal_lm"),
        ({"prompt": "masked_lm"}, "needs prompt: causal_lm, not masked_lm"),
        ({"objective": "accuracy"}, "objective='accuracy' is for label words: use f1 or loss"),
        ({"num_examples_per_class": 3}, "num_examples_per_class=3 .* no labels; set max_train"),
        ({"label_words": ["a", "b"]}, "label_words=.*task 'squad', which has no labels"),
        ({"text_column": "context"}, "text_column='context'.*names its own columns"),
        ({"text_pair_column": "question"}, "text_pair_column='question'.*names its own columns"),
        ({"label_column": "answers"}, "label_column='answers'.*names its own columns"),
        ({"template": "{context} {answer}."}, "put {answer} last"),
        ({"template": "{sentence} {answer}"}, "a field {sentence}; there are {title}, {context}"),
    ],
)
def test_refusals_of_generation(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        questions(tmp_path, **settings)


def fingerprint(task: Any, tokenizer: Any) -> str:
    """The name that `datasets` keeps encoded rows under; rows with a known name are not made again."""
    return task.tokenize(tokenizer, only="validation")["validation"]._fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_encoded_once(kind, tmp_path, monkeypatch):
    first = sentiment(tmp_path, kind).tokenize(tokenizer_for(kind))
    other = roberta_tokenizer() if kind == "masked_lm" else opt_tokenizer()
    other(["padded", "and cut"], padding=True, truncation=True, max_length=4)  # leaves a trace
    monkeypatch.setattr(PromptedClassification, "_encode", lambda *_: pytest.fail("made again"))
    again = sentiment(tmp_path, kind).tokenize(other)
    for split in first:
        assert again[split][:] == first[split][:]
        assert again[split]._fingerprint == first[split]._fingerprint


def test_other_settings_are_encoded_anew(tmp_path, monkeypatch):
    more = opt_tokenizer()
    more.add_tokens(["good film"])
    changes: list[dict[str, Any]] = [
        {},
        {"template": "{sentence} That was {answer}"},
        {"label_words": ["bad", "very good indeed"]},
        {"max_seq_length": 127},
        {"num_demonstrations": 1},
        {"max_train_samples": 3, "max_eval_samples": 3},
    ]
    found = [fingerprint(sentiment(tmp_path, "causal_lm", **change), opt()) for change in changes]
    plain = sentiment(tmp_path, "causal_lm")
    found += [fingerprint(plain, other) for other in (opt_tokenizer([*LABEL_WORDS, "film"]), more)]
    found += [fingerprint(questions(tmp_path, max_new_tokens=n), opt()) for n in (49, 50)]
    monkeypatch.setattr(prompted, "__version__", "another")
    found.append(fingerprint(plain, opt()))
    assert len(set(found)) == len(found) == 11


ANSWERS_TASK = """
name: years
fields: {{context: {column}, note: note}}
{optional}
answers: {answers}
prompts:
  causal_lm: {{template: "{{context}}\\nNote: {{note}}\\nYear: {{answer}}"}}
"""


def test_other_columns_of_the_same_rows_are_encoded_anew(tmp_path):
    """The same file, the same template: another column must not find the first one's tokens."""
    rows = [{"one": "1", "two": "2", "note": "", "first": "1900", "second": "2000"}] * 2
    for column, text in (("one", "1"), ("two", "2")):
        for answers, year in (("first", "1900"), ("second", "2000")):
            for optional, note in (("", "\nNote: "), ("optional_fields: [note]", "")):
                file = tmp_path / "years.yaml"
                written = {"column": column, "answers": answers, "optional": optional}
                file.write_text(ANSWERS_TASK.format(**written), "utf-8")
                task = task_of(tmp_path, rows, task=str(file), prompt="causal_lm")
                ids = task.tokenize(opt())["train"][0]["input_ids"]
                found = opt().decode(ids, skip_special_tokens=True)
                assert found == f"{text}{note}\nYear: {year}\n"


def test_a_users_own_rows_with_the_recipes_template(tmp_path):
    rows = [{"body": "no light", "to": "us", "kind": k} for k in ("outage", "billing")]
    settings: dict[str, Any] = {
        "prompt": "masked_lm",
        "text_column": "body",
        "text_pair_column": "to",
        "label_column": "kind",
        "template": "To {to}: {body}. It was {mask}.",
        "label_words": ["Number", "bad"],
    }
    task = task_of(tmp_path, rows, **settings)
    assert task.label_names == ("billing", "outage")
    texts = [task.example(row) for row in task.splits["train"]]
    assert texts == ["To us: no light. It was bad.", "To us: no light. It was Number."]
    rows = [{**row, "answer": row["body"]} for row in rows]
    for change, message in (
        ({"template": "{text} {mask}"}, "a field {text}; there are {body}, {to}"),
        ({"template": None}, r"no template for prompt=masked_lm \(it has: none\)"),
        ({"label_words": None}, "0 words .* for the 2 labels billing, outage"),
        ({"text_column": "answer"}, "'answer'.*stands for the place"),
    ):
        with pytest.raises(ValueError, match=message):
            task_of(tmp_path, rows, **{**settings, **change})


def test_a_second_text_that_no_prompt_shows_is_refused(tmp_path):
    rows = [{"sentence": "fine", "more": "x", "label": label} for label in range(2)]
    with pytest.raises(ValueError, match="text_pair_column='more'.*one text.*sentence"):
        task_of(tmp_path, rows, task="sst2", prompt="causal_lm", text_pair_column="more")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "both"}, "prompt='both' is not one of null, masked_lm, causal_lm"),
        ({"prompt": "causal_lm", "objective": "recall"}, "objective='recall' is not one of loss"),
        ({"template": "{text} {mask}"}, "template=.*needs a prompt"),
        ({"label_words": ["a", "b"]}, "label_words=.*needs a prompt"),
        ({"num_demonstrations": 2}, "num_demonstrations=2 needs a prompt"),
        ({"objective": "accuracy"}, "objective='accuracy' needs a prompt.*or objective to loss"),
        ({"prompt": "causal_lm", "num_demonstrations": -1}, "num_demonstrations=-1 must be 0 or"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be positive"),
        (
            {"task": "sst2", "prompt": "causal_lm", "objective": "f1"},
            "objective='f1'.*'sst2' is a classification: use accuracy",
        ),
    ],
)
def test_refused_settings(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        task_of(tmp_path, [ROWS["sst2"], {**ROWS["sst2"], "label": 0}], **settings)
