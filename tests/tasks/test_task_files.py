"""Tasks in YAML files and in Python, and what a description refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from row_files import row_files

from hf_dpzero import tasks
from hf_dpzero.tasks import BENCHMARKS, TASKS, build_task, description_of, register_task
from hf_dpzero.tasks.description import (
    DataArguments,
    HubSource,
    Prompt,
    TaskDescription,
    described,
    read_task,
)
from hf_dpzero.tasks.templates import checked_template

TICKETS: dict[str, Any] = {
    "name": "tickets",
    "dataset": "me/tickets",
    "config": "english",
    "revision": "v1",
    "validation_split": "dev",
    "fields": {"subject": "title", "body": ["body", "text"]},
    "optional_fields": "subject",
    "labels": ["billing", "outage"],
    "label_column": ["kind", "label"],
    "drop_unlabelled": True,
    "metric": "macro_f1",
    "prompts": {
        "masked_lm": {
            "template": "{subject}\n{body} This is about {mask}.",
            "label_words": ["bad", "good"],
            "passage": "body",
            "source": "me",
        },
        "causal_lm": {"template": "{body}\n{answer}"},
    },
}

QUESTIONS: dict[str, Any] = {
    "fields": ["question"],
    "answers": ["answer", "answers"],
    "prompts": {"causal_lm": {"template": "{question}\n{answer}"}},
}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of this test's own."""
    monkeypatch.setattr(tasks, "_REGISTERED", {})


def changed(values: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Without the keys that are set to ...: they are left out."""
    return {k: v for k, v in {**values, **settings}.items() if v is not ...}


def file(folder: Path, values: Any) -> str:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return str(path)


def test_every_key(tmp_path):
    assert read_task(file(tmp_path, TICKETS)) == TaskDescription(
        name="tickets",
        source=HubSource("me/tickets", config="english", revision="v1", validation="dev"),
        fields={"subject": ("title",), "body": ("body", "text")},
        optional_fields=("subject",),
        label_columns=("kind", "label"),
        label_names=("billing", "outage"),
        drop_unlabelled=True,
        metric="macro_f1",
        prompts={
            "masked_lm": Prompt(
                **{**TICKETS["prompts"]["masked_lm"], "label_words": ("bad", "good")}
            ),
            "causal_lm": Prompt(template="{body}\n{answer}"),
        },
    )


def test_what_is_left_out_has_its_usual_value(tmp_path):
    short = {"fields": ["text"], "labels": ["a", "b"]}
    assert read_task(file(tmp_path, short)) == TaskDescription(
        name="own", fields={"text": ("text",)}, label_names=("a", "b"), metric="accuracy"
    )
    assert read_task(file(tmp_path, QUESTIONS)) == TaskDescription(
        name="own",
        fields={"question": ("question",)},
        answer_columns=("answer", "answers"),
        metric="squad",
        prompts={"causal_lm": Prompt(template="{question}\n{answer}")},
    )


def test_null_is_the_same_as_left_out():
    short: dict[str, Any] = {"fields": {"text": None}, "labels": ["a", "b"]}
    nulls = dict.fromkeys([key for key in TICKETS if key not in short])
    assert described({**short, **nulls, "answers": None}, "t") == described(short, "t")
    with pytest.raises(ValueError, match="the prompt masked_lm has no template"):
        described({**short, "prompts": {"masked_lm": {"template": None}}}, "t")


def test_words_and_blocks_of_yaml(tmp_path):
    path = tmp_path / "t.yaml"
    for word, expected in (("no", False), ("false", False), ("yes", True), ("True", True)):
        path.write_text(f"{{fields: [t], labels: [no, yes], drop_unlabelled: {word}}}", "utf-8")
        task = read_task(str(path))
        assert (task.drop_unlabelled, task.label_names) == (expected, ("no", "yes"))
    block = "template: |\n      Question: {a}\n      Answer: {answer}\n"
    path.write_text(f"fields: [a]\nanswers: b\nprompts:\n  causal_lm:\n    {block}", "utf-8")
    prompt = read_task(str(path)).prompts["causal_lm"]
    assert prompt.template == "Question: {a}\nAnswer: {answer}"


def masked(**settings: Any) -> dict[str, Any]:
    """TICKETS with another masked prompt."""
    prompt = changed(TICKETS["prompts"]["masked_lm"], **settings)
    return changed(TICKETS, prompts={"masked_lm": prompt})


REFUSED: list[tuple[Any, str]] = [
    (changed(TICKETS, label=["a"]), "unknown key 'label'; did you mean 'labels'?"),
    (changed(TICKETS, xyzzy=1), "unknown key 'xyzzy'; there are name, dataset, config"),
    (
        changed(TICKETS, prompts={"masked_lm": {"templat": "x"}}),
        "the prompt masked_lm has an unknown key 'templat'; did you mean 'template'?",
    ),
    (changed(TICKETS, prompts={"masked": {"template": "{body} {mask}"}}), "a prompt 'masked'"),
    (changed(TICKETS, prompts={"masked_lm": {}}), "the prompt masked_lm has no template"),
    (
        changed(TICKETS, prompts={"masked_lm": None}),
        "the prompt masked_lm is lines of `key: value`",
    ),
    (changed(TICKETS, prompts=["masked_lm"]), "is not a mapping of masked_lm or causal_lm"),
    (changed(TICKETS, prompts={"causal_lm": {"template": 3}}), "template: 3 is not text; put it"),
    (changed(TICKETS, fields=...), "fields is missing"),
    (changed(TICKETS, fields=[], optional_fields=[], prompts={}), "has no fields"),
    (changed(TICKETS, fields=3), "fields: 3 is not text or a list of texts"),
    (changed(TICKETS, fields={"body": []}), "field body: [] names no column"),
    (changed(TICKETS, labels=[0, 1]), "labels: [0, 1] is not text or a list of texts; put it into"),
    (changed(TICKETS, labels=...), "give label_names for a classification, or answer_columns"),
    (
        changed(TICKETS, answers="answer"),
        "give label_names for a classification, or answer_columns",
    ),
    (changed(TICKETS, name=5), "name: 5 is not text"),
    (
        changed(TICKETS, metric="f1"),
        "metric='f1'; a classification task has one of accuracy, macro_",
    ),
    (changed(QUESTIONS, metric="accuracy"), "a generation task has one of squad, drop"),
    (changed(TICKETS, drop_unlabelled="maybe"), "drop_unlabelled: 'maybe' is not true or false"),
    (
        changed(TICKETS, optional_fields=["sender"]),
        "optional_fields with 'sender', which is none of",
    ),
    (changed(TICKETS, fields=["mask"], optional_fields=[], prompts={}), "a field 'mask', which in"),
    (changed(QUESTIONS, fields=["answer"], prompts={}), "a field 'answer', which in a template"),
    (changed(QUESTIONS, prompts={"masked_lm": {"template": "{mask}"}}), "there are causal_lm."),
    (["a", "list"], "a task is lines of `key: value`, this is a list"),
    # prompts, before they are used
    (masked(template="{sender} {mask}"), "a field {sender}; there are {subject}, {body}"),
    (masked(template="{body:loud} {mask}"), "a filter 'loud'"),
    (masked(template="{body}"), "needs exactly one {mask}"),
    (masked(template="{body} {subject} {mask}"), "on a line with the optional {subject}"),
    (masked(passage="sender"), "passage='sender' in its prompt masked_lm, which is none of"),
    (masked(passage=3), "passage: 3 is not text"),
    (masked(label_words=["bad"]), "1 label_words in its prompt masked_lm and 2 labels"),
    (masked(label_words=[1, 2]), "label_words: [1, 2] is not text or a list of texts"),
    (
        changed(
            QUESTIONS,
            prompts={"causal_lm": {"template": "{question} {answer}", "label_words": ["a"]}},
        ),
        "1 label_words in its prompt causal_lm and 0 labels",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_a_file_is_refused(values, message, tmp_path):
    path = file(tmp_path, values)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_task(path)
    assert str(error.value).startswith(f"{path}: ")


def test_what_is_no_yaml_names_the_file(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("fields: [", encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken\.yaml: not valid YAML"):
        read_task(str(path))
    path.write_text("fields: [a]\nfields: [b]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken\.yaml: key 'fields' appears more than once"):
        read_task(str(path))
    path.write_bytes(b"name: \xff")
    with pytest.raises(ValueError, match=r"broken\.yaml: "):
        read_task(str(path))


def test_a_name_that_is_no_task_says_how_to_write_one():
    register_task(described(TICKETS, "task"))
    with pytest.raises(FileNotFoundError, match=r"task 'none.yml' not found, neither beside"):
        build_task(DataArguments(task="none.yml"))
    with pytest.raises(ValueError, match=r"'sst3' is not one of .*trec, tickets.*a \.yaml file"):
        build_task(DataArguments(task="sst3"))


MESSAGES = [
    {"title": "Bill", "text": "twice", "kind": "billing"},
    {"title": "Light", "text": "none", "kind": "outage"},
    {"title": "Light", "text": "unknown", "kind": "outage"},
]


def test_a_classification_from_a_file(tmp_path):
    given = {"task": file(tmp_path, TICKETS), **row_files(tmp_path, MESSAGES)}
    task: Any = build_task(DataArguments(**given, prompt="masked_lm"))
    assert (task.name, task.metric) == ("tickets", "macro_f1")
    assert task.columns == {"subject": "title", "body": "text"}
    texts = [task.example(row) for row in task.splits["train"]]
    assert texts[:2] == ["Bill\ntwice This is about bad.", "Light\nnone This is about good."]
    head: Any = build_task(DataArguments(**given))
    assert (head.head, head.text_columns) == ("sequence_classification", ("title", "text"))
    assert head.label_names == ("billing", "outage")


def test_the_recipe_overrides_the_files_prompt(tmp_path):
    given = {"task": file(tmp_path, TICKETS), **row_files(tmp_path, MESSAGES)}
    own = {"label_words": ["money", "light"], "template": "{subject:upper_first}: {body}\n{answer}"}
    task: Any = build_task(DataArguments(**given, prompt="causal_lm", **own))
    assert task.example(task.splits["train"][0]) == "Bill: twice\nmoney"
    with pytest.raises(ValueError, match="on a line with the optional"):
        build_task(DataArguments(**given, prompt="masked_lm", template="{subject} {mask}"))


@pytest.mark.parametrize("missing", [{}, {"title": None}, {"title": " "}])
def test_an_optional_column_may_be_missing_or_empty(missing, tmp_path):
    listed = [{"text": "twice", "kind": kind, **missing} for kind in ("billing", "outage")]
    data = DataArguments(
        task=file(tmp_path, TICKETS), prompt="masked_lm", **row_files(tmp_path, listed)
    )
    task: Any = build_task(data)
    assert task.example(task.splits["train"][0]) == "twice This is about bad."


def test_a_hub_data_set_that_cannot_be_reached(tmp_path):
    with pytest.raises(OSError, match="hf download me/tickets --repo-type dataset --revision v1"):
        build_task(DataArguments(task=file(tmp_path, TICKETS), prompt="masked_lm"))
    local = changed(TICKETS, dataset=..., config=..., revision=..., validation_split=...)
    with pytest.raises(ValueError, match="has no data of its own: set train_file"):
        build_task(DataArguments(task=file(tmp_path, local), prompt="masked_lm"))


def test_a_registered_task(tmp_path):
    register_task(described(QUESTIONS, "dates"))
    data = row_files(tmp_path, [{"question": "When?", "answer": "1900"}])
    task: Any = build_task(DataArguments(task="dates", prompt="causal_lm", **data))
    assert task.name == "dates"
    assert task.answers == "answer"


def test_the_packages_own_names_are_taken():
    for name in TASKS:
        with pytest.raises(ValueError, match=f"task '{name}' comes with this package"):
            register_task(described(QUESTIONS, name))


def test_the_shipped_prompts_fit_their_tasks():
    found = {name: description_of(name) for name in (*BENCHMARKS, "quickstart")}
    prompts = [(task, kind, p) for task in found.values() for kind, p in task.prompts.items()]
    assert len(prompts) == 16 + 2 and [task.name for task in found.values()] == [*found]
    for task, kind, prompt in prompts:
        template = checked_template(prompt.template, kind, tuple(task.fields), task.optional_fields)
        assert set(template.used_fields) == set(task.fields), f"{task.name} {kind} leaves one out"
        assert prompt.source and len(prompt.label_words) == len(task.label_names)
