"""Prompt templates, and the tokens that rows become with them, for tokenizers of several families."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import pytest
from tokenizer_families import CAUSAL, MASKED, Slow
from transformers import ByT5Tokenizer

from hf_dpzero.tasks.templates import Encoded, PromptEncoder, Template, checked_template

PRIVATE_USE = "\ue000"
FIELDS = ("passage", "question")
MASKED_TEXT = "{passage} Q: {question:upper_first}? {mask}."
CAUSAL_TEXT = "Passage: {passage}\nQ: {question}?\nA: {answer}"
FAMILIES = [("masked_lm", name) for name in MASKED] + [("causal_lm", name) for name in CAUSAL]
# Of these decode gives the text back.
LOSSLESS = ("opt", "llama", "llama_metaspace", "llama_with_end", "qwen")


@functools.cache
def tokenizer(kind: str, family: str) -> Any:
    return (MASKED if kind == "masked_lm" else CAUSAL)[family]()


def encoder(kind: str, family: str, text: str = "", **settings: Any) -> PromptEncoder:
    text = text or (MASKED_TEXT if kind == "masked_lm" else CAUSAL_TEXT)
    template = checked_template(text, kind, FIELDS)
    settings = {"passage": "passage", **settings}
    return PromptEncoder(tokenizer(kind, family), template, kind, **settings)


def written(kind: str, family: str, row: dict[str, str]) -> str:
    """What `encoder` should tokenise, written out by hand."""
    passage, question = row["passage"].strip(), row["question"].strip()
    if kind == "masked_lm":
        mask = tokenizer(kind, family).mask_token
        return f"{passage} Q: {question[:1].upper()}{question[1:]}? {mask}."
    return f"Passage: {passage}\nQ: {question}?\nA:"


def tokens_of(kind: str, family: str, text: str) -> list[int]:
    """The tokenizer's own tokens, less the end token of a text that is to go on."""
    ids: list[int] = tokenizer(kind, family)(text)["input_ids"]
    return ids[:-1] if (kind, family) == ("causal_lm", "llama_with_end") else ids


def one(kind: str, family: str, row: dict[str, str], limit: int = 10_000) -> Encoded:
    return encoder(kind, family).encode([row], [limit])[0]


WORDS = (
    *("the", "river", "film", "great", "1900", "12345", "straße", "x" * 30, "?", "...", "\n", "  "),
    *("🎉🎉", "日本語", "ﬁ", "a\u0301", "</s>", "<mask>", "[MASK]", "[SEP]", "{answer}", "{0}"),
)


def text_of(generator: random.Random, size: int) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(size))


def rows_of(seed: int, count: int) -> list[dict[str, str]]:
    """Passages of up to 30 odd words, questions of up to 6."""
    generator = random.Random(seed)
    sizes = {"passage": 30, "question": 6}
    return [
        {name: text_of(generator, generator.randint(0, most)) for name, most in sizes.items()}
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("text", "row", "expected"),
    [
        # fields without the white space around them
        ("{b}:{a} {b}", {"a": " one\n", "b": "\ttwo ", "c": "three"}, "two:one two"),
        ("A: {a}\nB", {"a": ""}, "A: \nB"),
        ("{{{a}}} {{b}}", {"a": "x"}, "{x} {b}"),
        # the text of a row is never read as a template
        ("{a}|{b}", {"a": "{b} {{ }} {", "b": "secret"}, "{b} {{ }} {|secret"),
        # lines with an empty optional field (o, p) are left out
        ("T: {o}\n\n{a}\nN: {p} {a}", {"o": "T", "a": "A", "p": "N"}, "T: T\n\nA\nN: N A"),
        ("T: {o}\n\n{a}\nN: {p} {a}", {"o": " \n", "a": "A", "p": "N"}, "\nA\nN: N A"),
        ("T: {o}\n\n{a}\nN: {p} {a}", {"o": "T", "a": "", "p": ""}, "T: T\n\n"),
        # filters
        ("<{a:no_stop}>", {"a": "It rains. "}, "<It rains>"),
        ("<{a:no_stop}>", {"a": 'He said "no!"'}, '<He said "no>'),
        ("<{a:no_stop}>", {"a": "3.5"}, "<3.5>"),
        ("<{a:no_stop}>", {"a": "..."}, "<>"),
        ("<{a:no_question_mark}>", {"a": "is it so ? ?"}, "<is it so>"),
        ("<{a:no_question_mark}>", {"a": "is it so."}, "<is it so.>"),
        ("<{a:upper_first}>", {"a": "is it"}, "<Is it>"),
        ("<{a:upper_first}>", {"a": ""}, "<>"),
        ("<{a:lower_first}>", {"a": "USA is"}, "<uSA is>"),
        ("<{a:lower_first}>", {"a": ""}, "<>"),
        ("<{a:no_question_mark:no_stop}>", {"a": "so?."}, "<so>"),
    ],
)
def test_a_row_in_a_template(text, row, expected):
    assert Template(text, tuple(row), tuple({"o", "p"} & set(row))).render(row) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a", "write {{ for a brace"),
        ("a}", "write {{ for a brace"),
        ("{}", "write {field} or {field:filter}"),
        ("{a!r}", "write {field} or {field:filter}"),
        ("{0} {a}", r"a field {0}; there are {a}, {b}, {mask}, {answer}"),
        ("{a.b}", r"a field {a.b}"),
        ("{a:shout}", "a filter 'shout'; there are no_stop, no_question_mark, upper_first"),
        ("{a} {mask:upper_first}", "filters are for fields"),
        (f"{{a}} {PRIVATE_USE}", "U+E000"),
        ("nothing {mask}", "shows nothing of the row; put in one of {a}, {b}"),
    ],
)
def test_a_template_is_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Template(text, ("a", "b"))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("masked_lm", "{a}", "0 {mask} and 0 {answer}: prompt=masked_lm needs exactly one {mask}"),
        ("masked_lm", "{a} {mask} {mask}", "2 {mask} and 0 {answer}"),
        ("masked_lm", "{a} {answer}", "0 {mask} and 1 {answer}"),
        ("masked_lm", "{a} {mask} {answer}", "1 {mask} and 1 {answer}"),
        ("causal_lm", "{a} {mask}", "prompt=causal_lm needs exactly one {answer}"),
        ("causal_lm", "{a} {answer}\n{answer}", "2 {answer} and 0 {mask}"),
        ("causal_lm", "{answer} {a}", "put {answer} last"),
        ("causal_lm", "{a} {answer}.", "put {answer} last"),
        ("causal_lm", "{a} {answer}\n", "put {answer} last"),
    ],
)
def test_the_label_has_one_place(kind, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        checked_template(text, kind, ("a", "b"))


@pytest.mark.parametrize("kind", ["masked_lm", "causal_lm"])
def test_the_label_is_not_on_a_line_that_may_be_left_out(kind):
    """The line would vanish with an empty field, and with it the place of the label."""
    place = "{mask}" if kind == "masked_lm" else "{answer}"
    with pytest.raises(ValueError, match="left out.*another line"):
        checked_template(f"{{a}}\n{{b}} {place}", kind, ("a", "b"), ("b",))
    assert checked_template(f"{{a}}\n{{b}}\n{place}", kind, ("a", "b"), ("b",))


@pytest.mark.parametrize(("kind", "family"), FAMILIES)
def test_a_batch_is_its_rows(kind, family):
    rows = rows_of(0, 12)
    limits = [28 + index for index in range(len(rows))]
    limits[0] = limits[-1] = 1000
    rows = [{**row, "question": "why"} for row in rows]  # so that every limit has room
    together = encoder(kind, family).encode(rows, limits)
    alone = [one(kind, family, row, limit) for row, limit in zip(rows, limits, strict=True)]
    assert together == alone
    assert 0 < sum(found.cut for found in alone) < len(rows)
    assert encoder(kind, family).encode([], []) == []


@pytest.mark.parametrize(("kind", "family"), FAMILIES)
def test_tokens_are_those_of_the_text(kind, family):
    """Also of odd rows: special tokens, braces, characters of several tokens, empty fields."""
    plain = {"passage": " The town had 200 houses. ", "question": "how many houses\n"}
    for row in (plain, *rows_of(1, 20)):
        found = one(kind, family, row)
        expected = tokens_of(kind, family, written(kind, family, row))
        assert found == Encoded(expected, found.position, cut=False, left_out=0)
        if kind == "causal_lm":
            assert found.position == len(expected) - 1
        else:  # a row may spell the mask too: ours is the last in this template
            mask = tokenizer(kind, family).mask_token_id
            assert [i for i, token in enumerate(expected) if token == mask][-1] == found.position


@pytest.mark.parametrize("family", MASKED)
@pytest.mark.parametrize("text", ["{mask}: {passage} {question}", MASKED_TEXT])
def test_the_place_of_the_mask_whatever_a_row_spells(family, text):
    """Found without the encoder: the one token that changes if another word stands in our place."""
    own = tokenizer("masked_lm", family)
    rows = [
        {"passage": f"{own.mask_token} a {own.mask_token}{own.mask_token} </s>", "question": "b"},
        {"passage": "a", "question": f"<s> {own.mask_token}"},
        {"passage": "", "question": own.mask_token},
    ]
    demonstrations = (f"a {own.mask_token} b great", own.mask_token)
    for shown in ((), demonstrations):
        made = encoder("masked_lm", family, text, demonstrations=shown)
        for row in rows:
            found = made.encode([row], [1000])[0]
            prompt = made.template.render({**row, "mask": "PLACE"})
            before = " ".join((*shown, prompt)).split("PLACE")[0]
            expected = before.count(own.mask_token)
            places = [i for i, t in enumerate(found.input_ids) if t == own.mask_token_id]
            assert found.position == places[expected]
            assert len(places) > 1 + expected or text == MASKED_TEXT


def test_the_private_use_character_is_left_out_of_texts():
    made = encoder("causal_lm", "opt")
    row = {"passage": f"in {PRIVATE_USE}May", "question": f"{PRIVATE_USE}{PRIVATE_USE}when"}
    clean = {"passage": "in May", "question": "when"}
    assert made.encode([row], [1000]) == made.encode([clean], [1000])


def test_a_prompt_without_a_token_is_refused():
    """Nothing would come before the answer; a tokenizer that starts every text has a token there."""
    text, row = "{passage} {answer}", {"passage": " ", "question": ""}
    with pytest.raises(ValueError, match="an empty prompt.*words before {answer}"):
        encoder("causal_lm", "qwen", text).encode([row], [100])
    with pytest.raises(ValueError, match="an empty prompt"):
        encoder("causal_lm", "qwen", text).encode([{**row, "passage": "rain"}], [0])
    assert encoder("causal_lm", "opt", text).encode([row], [100])[0].input_ids == [2]


def test_the_end_token_of_an_encoders_tokenizer_is_left_out_too():
    """BERT ends a text with [SEP], which a decoder with its vocabulary must not go on from."""
    template = checked_template(CAUSAL_TEXT, "causal_lm", FIELDS)
    made = PromptEncoder(tokenizer("masked_lm", "bert"), template, "causal_lm")
    row = {"passage": "it was", "question": "what"}
    whole = made.tokenizer("Passage: it was\nQ: what?\nA: great")["input_ids"][:-1]
    prompt = made.encode([row], [100])[0].input_ids
    assert prompt + made.answer_ids([row], ["great"])[0] == whole


ANSWERS = ("great", "Yes", "in May 1900", "terrible film", "No, it was not.\n")
CAUSAL_TEXTS = ("{passage} {question} It was {answer}", "{passage} True?\n{answer}", CAUSAL_TEXT)


@pytest.mark.parametrize("family", CAUSAL)
def test_prompt_and_answer_are_one_text(family):
    row = {"passage": "The town had 200 houses.", "question": "what was it"}
    for text in CAUSAL_TEXTS:
        made = encoder("causal_lm", family, text)
        prompt = made.encode([row], [1000])[0].input_ids
        found = made.answer_ids([row] * len(ANSWERS), ANSWERS)
        for answer, ids in zip(ANSWERS, found, strict=True):
            whole = made.template.render({**row, "answer": answer})
            assert prompt + ids == tokens_of("causal_lm", family, whole)
            if family in LOSSLESS:
                assert made.tokenizer.decode(prompt + ids, skip_special_tokens=True) == whole
            assert not set(ids) & set(made.tokenizer.all_special_ids)
            assert made.answer_ids([row], [answer]) == [ids]  # a batch is its rows


def test_an_answer_that_melts_into_the_prompt_is_tokenised_by_itself():
    """ "1" and "00" after it are other tokens than "100"; the prompt's tokens stay as they are."""
    made = encoder("causal_lm", "opt", "{passage}{question}{answer}")
    row = {"passage": "gre", "question": ""}
    own = made.tokenizer
    assert own("great")["input_ids"][:-1] != own("gre")["input_ids"]  # the premise of this test
    assert made.answer_ids([row], ["at"]) == [own("at", add_special_tokens=False)["input_ids"]]


def prefixes(kind: str, family: str, row: dict[str, str], field: str) -> list[list[int]]:
    """The prompt's tokens with every beginning of one field, the empty one first."""
    text = row[field].strip()
    texts = [written(kind, family, {**row, field: text[:end]}) for end in range(len(text) + 1)]
    return [tokens_of(kind, family, prompt) for prompt in texts]


def check_cut(kind: str, family: str, row: Any, ways: list[list[int]], limit: int) -> None:
    """At most `limit` tokens, one of the ways to cut a field's end, and within two of the longest."""
    found = one(kind, family, row, limit)
    fitting = [ids for ids in ways if len(ids) <= limit]
    assert found.cut
    assert found.input_ids in fitting
    assert len(found.input_ids) >= len(fitting[-1]) - 2
    if kind == "masked_lm":  # ours is the last mask in this template
        mask = tokenizer(kind, family).mask_token_id
        assert mask in found.input_ids
        assert mask not in found.input_ids[found.position + 1 :]
        assert found.input_ids[found.position] == mask
    else:
        assert found.position == len(found.input_ids) - 1


@pytest.mark.parametrize(("kind", "family"), FAMILIES)
def test_the_passage_is_cut_at_its_end_then_other_fields(kind, family):
    generator, checked = random.Random(3), {"passage": 0, "question": 0}
    for row in rows_of(4, 12):
        for field in checked:
            shorter = row if field == "passage" else {**row, "passage": ""}
            ways = prefixes(kind, family, shorter, field)
            if len(ways[-1]) > len(ways[0]) and row["passage"].strip():
                limit = generator.randint(len(ways[0]), len(ways[-1]) - 1)
                check_cut(kind, family, row, ways, limit)
                checked[field] += 1
    assert min(checked.values()) > 4


@pytest.mark.parametrize(("kind", "family"), FAMILIES)
def test_the_template_is_never_cut(kind, family):
    row = {"passage": "the river " * 9, "question": "what is it"}
    bare = len(tokens_of(kind, family, written(kind, family, {"passage": "", "question": ""})))
    assert len(one(kind, family, row, bare).input_ids) == bare
    with pytest.raises(
        ValueError, match=f"alone has {bare} tokens, and only {bare - 1} fit: raise"
    ):
        one(kind, family, row, bare - 1)


def test_without_a_passage_the_longest_field_is_cut():
    made = encoder("causal_lm", "opt", passage=None)
    long, short = "the river ends in a lake " * 3, "in 1900"
    for row in ({"passage": long, "question": short}, {"passage": short, "question": long}):
        limit = len(made.encode([row], [1000])[0].input_ids) - 5
        text = made.tokenizer.decode(made.encode([row], [limit])[0].input_ids)
        assert short in text
        assert long.strip() not in text


@pytest.mark.parametrize("family", ["slow", "byt5"])
def test_tokens_that_are_spread_unevenly_over_a_text(family):
    """Without offsets nothing says where in a text a token ends: here most are at one end of it."""
    own = Slow() if family == "slow" else ByT5Tokenizer()
    template = checked_template(CAUSAL_TEXT, "causal_lm", FIELDS)
    made = PromptEncoder(own, template, "causal_lm", "passage")
    dense = " ".join("1234567890" * 4) if family == "slow" else "🎉" * 30
    for passage in (dense + " abcdefghi" * 30, "abcdefghi " * 30 + dense):
        row = {"passage": passage, "question": "why"}
        whole = len(made.encode([row], [10_000])[0].input_ids)
        bare = len(made.encode([{**row, "passage": ""}], [10_000])[0].input_ids)
        for limit in range(bare + 5, whole, 23):
            found = made.encode([row], [limit])[0]
            assert limit - 4 < len(found.input_ids) <= limit


def test_an_optional_passage_that_is_cut_away_takes_its_line_with_it():
    text = "{question}\nTitle: {passage}\n{answer}"
    template = checked_template(text, "causal_lm", FIELDS, ("passage",))
    made = PromptEncoder(tokenizer("causal_lm", "opt"), template, "causal_lm", "passage")
    row = {"passage": "the river", "question": "why"}
    expected = tokens_of("causal_lm", "opt", "why\n")
    assert made.encode([row], [len(expected)])[0].input_ids == expected


SHOWN = ("one It was great", "two two It was bad", "three three three It was okay")


@pytest.mark.parametrize(("kind", "family"), FAMILIES)
def test_demonstrations_are_left_out_first(kind, family):
    """Those in front go first; the passage is cut only without any."""
    made = encoder(kind, family, demonstrations=SHOWN)
    between = " " if kind == "masked_lm" else "\n\n"
    row = {"passage": "the river ends in a lake", "question": "where"}
    own = written(kind, family, row)
    lengths = []
    for left_out in range(len(SHOWN) + 1):
        expected = tokens_of(kind, family, between.join((*SHOWN[left_out:], own)))
        lengths.append(len(expected))
        found = made.encode([row], [len(expected)])[0]
        assert (found.input_ids, found.cut, found.left_out) == (expected, False, left_out)
    assert lengths == sorted(set(lengths), reverse=True)
    found = made.encode([row], [lengths[-1] - 1])[0]
    assert (found.cut, found.left_out) == (True, len(SHOWN))
    assert found.input_ids == one(kind, family, row, lengths[-1] - 1).input_ids
