"""DPZeroTrainer takes prompts, chats and texts as TRL's users have them, or says what it needs."""

from __future__ import annotations

import json
import logging
import math
import re
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, get_peft_model
from tiny_language_models import opt_tokenizer, save_causal_lm, seeded
from tiny_runs import config, tiny_data, tiny_model
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    OPTModel,
)

from hf_dpzero import DPZeroTrainer
from hf_dpzero.training.texts import Encoder

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}</s>{% endgeneration %}{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REMEMBERING = TEMPLATE.replace("<assistant>{% endif %}", "<assistant>(thinking){% endif %}")


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def prompts(rows: int, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": f"red {seed} {i}:", "completion": " great" * (1 + i % 3)} for i in range(rows)
    ]


def chats(rows: int, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {"messages": [turn("user", f"river {seed} {i}"), turn("assistant", "good " * (1 + i % 3))]}
        for i in range(rows)
    ]


def prompted_chats(rows: int, seed: int = 0) -> list[dict[str, Any]]:
    split = (row["messages"] for row in chats(rows, seed))
    return [{"prompt": turns[:1], "completion": turns[1:]} for turns in split]


def texts(rows: int, seed: int = 0) -> list[dict[str, Any]]:
    return [{"text": f"the film {seed} {i} was" + " bad" * (i % 4)} for i in range(rows)]


FORMS = {"prompt": prompts, "messages": chats, "prompted chats": prompted_chats, "text": texts}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_causal_lm(tmp_path_factory.mktemp("causal"))


def tokenizer(template: str | None = TEMPLATE) -> Any:
    made = opt_tokenizer()
    made.chat_template = template
    return made


def trainer_of(tmp_path, folder, train: Any, settings: Any = None, **arguments: Any) -> Any:
    given = {"model": AutoModelForCausalLM.from_pretrained(folder), "processing_class": tokenizer()}
    return DPZeroTrainer(
        **{**given, **arguments},
        args=config(tmp_path / "out", **{"max_steps": 2, **(settings or {})}),
        train_dataset=train,
    )


# ---------------------------------------------------------------- what becomes of a row


def labelled(encoded: dict[str, list[int]], made: Any) -> str:
    return made.decode([token for token in encoded["labels"] if token != -100])


def test_where_the_loss_is_and_where_a_row_ends():
    made, row = tokenizer(), {"prompt": "red 5:", "completion": " great"}
    encoded = Encoder(made, 64)(row, 0)
    assert made.decode(encoded["input_ids"], skip_special_tokens=True) == "red 5: great"
    assert labelled(encoded, made) == " great</s>"
    assert encoded["input_ids"][0] == made.bos_token_id and encoded["labels"][0] == -100
    assert Encoder(made, 64)({**row, "completion": " great</s>"}, 0) == encoded
    cut = Encoder(made, 3)(row, 0)  # the start is kept, perhaps without any loss
    assert cut["input_ids"] == encoded["input_ids"][:3] and set(cut["labels"]) == {-100}
    text = Encoder(made, 64)({"text": "the film"}, 0)
    assert text["labels"] == text["input_ids"] and text["input_ids"][-1] == made.eos_token_id
    prompt, completion = [turn("user", "a")], [turn("assistant", "one")]
    split = Encoder(made, 99)({"prompt": prompt, "completion": completion}, 0)
    assert split == Encoder(made, 99)({"messages": prompt + completion}, 0)


def test_where_a_token_spans_the_border_the_loss_starts_with_it():
    made = tokenizer()
    assert len(made(" great", add_special_tokens=False)["input_ids"]) == 1
    encoded = Encoder(made, 64)({"prompt": "red 5: gr", "completion": "eat"}, 0)
    assert labelled(encoded, made) == " great</s>"


@pytest.mark.parametrize(
    ("template", "expected"), [(TEMPLATE, "two</s>"), (MARKED, "one</s>two</s>")]
)
def test_a_chat_has_loss_on_the_assistant(template, expected):
    made = tokenizer(template)
    turns = [turn("system", "be"), turn("user", "a"), turn("assistant", "one"), turn("user", "b")]
    encoded = Encoder(made, 99)({"messages": [*turns, turn("assistant", "two")]}, 0)
    assert labelled(encoded, made) == expected
    assert made.decode(encoded["input_ids"]).endswith("<assistant>two</s>")
    one_more = Encoder(made, 99)(
        {"messages": [*turns, turn("assistant", "two"), turn("user", "c")]}, 0
    )
    assert labelled(one_more, made) == expected


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_a_chat_without_an_assistant_is_kept_without_loss(template):
    encoded = Encoder(tokenizer(template), 99)({"messages": [turn("user", "a")]}, 0)
    assert encoded["input_ids"] and set(encoded["labels"]) == {-100}


def test_the_tokenization_is_trls(tmp_path, folder):
    trl = pytest.importorskip("trl")
    args = trl.SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, max_length=30)
    for rows in (prompts(9), prompted_chats(9), texts(9)):
        theirs = trl.SFTTrainer(
            model=str(folder),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
        ).train_dataset
        encode = Encoder(tokenizer(), 30)
        for number, row in enumerate(rows):
            ours = encode(dict(row), number)
            assert ours["input_ids"] == theirs[number]["input_ids"]
            assert ours["labels"] == theirs[number]["labels"]


# ---------------------------------------------------------------- training on rows of text


@pytest.mark.parametrize("form", list(FORMS))
def test_rows_of_text_train_and_one_row_stays_one_example(tmp_path, folder, form):
    """Also a row that `max_length` leaves no label, under a tokenizer that has no token for padding."""
    made = tokenizer()
    made.pad_token = None
    rows, public = FORMS[form](40), FORMS[form](12, seed=1)
    if form == "prompt":
        rows[3]["prompt"] = "red " * 30
        made.chat_template = None  # which prompts do not need
    trainer = trainer_of(
        tmp_path, folder, Dataset.from_list(rows), {"max_length": 24}, eval_dataset=public,
        processing_class=made,
    )  # fmt: skip
    assert len(trainer.train_dataset) == trainer.plan.sampler.num_examples == 40
    assert set(trainer.train_dataset.column_names) == {"input_ids", "labels"}
    assert form != "prompt" or set(trainer.train_dataset[3]["labels"]) == {-100}
    trainer.train()
    assert trainer.privacy_report().steps == 2
    for other in (None, Dataset.from_list(FORMS[form](8, seed=2))):
        assert math.isfinite(trainer.evaluate(other)["eval_loss"])


def test_max_length_is_at_most_what_the_model_takes(tmp_path, folder):
    trainer = trainer_of(tmp_path, folder, [{"prompt": "red " * 500, "completion": "a"}] * 20)
    assert len(trainer.train_dataset[0]["input_ids"]) == 256
    assert trainer.run.examples_known  # they would look packed
    with pytest.raises(ValueError, match="max_length=0"):
        trainer_of(tmp_path, folder, prompts(9), settings={"max_length": 0})


def test_a_row_does_not_depend_on_the_others(tmp_path, folder):
    rows, other = chats(30), chats(30, seed=4)
    other[7] = rows[7]
    first, second = (
        trainer_of(tmp_path, folder, Dataset.from_list(given)).train_dataset
        for given in (rows, other)
    )
    assert first[7] == second[7] and first[8] != second[8]


def test_a_collator_for_labels_is_used_and_one_of_the_users_gets_the_rows(tmp_path, folder):
    made = tokenizer()
    trainer = trainer_of(tmp_path, folder, prompts(30), data_collator=DataCollatorForSeq2Seq(made))
    trainer.train()

    def collate(rows: list[Any]) -> Any:
        batch = made([row["text"] for row in rows], padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {**batch, "labels": labels}

    settings = {"remove_unused_columns": False}
    own = trainer_of(tmp_path / "own", folder, texts(30), settings, data_collator=collate)
    assert own.train_dataset[0] == texts(1)[0]
    own.train()


def test_lengths_of_private_rows_are_not_logged(tmp_path, folder, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    made = tokenizer()
    made.model_max_length = 8
    made("red " * 20)
    assert "longer than" in caplog.text  # what is looked for
    caplog.clear()
    made = tokenizer()
    made.model_max_length = 8
    trainer_of(tmp_path, folder, prompts(20), processing_class=made)
    trainer_of(tmp_path, folder, chats(20), processing_class=made)
    assert "longer than" not in caplog.text


# ---------------------------------------------------------------- no private row is evaluated


@pytest.mark.parametrize("form", list(FORMS))
def test_private_texts_are_not_evaluated(tmp_path, folder, form):
    rows = FORMS[form](40)
    with pytest.raises(ValueError, match="private"):
        trainer_of(tmp_path, folder, Dataset.from_list(rows), eval_dataset=rows[5:9])
    train = Dataset.from_list(rows)
    trainer = trainer_of(tmp_path, folder, train)
    for leaked in (train.select([3]), rows[:4], trainer.train_dataset, {"a": rows}):
        with pytest.raises(ValueError, match="private"):
            trainer.evaluate(leaked)
    with pytest.raises(ValueError, match="private"):
        trainer.predict(train)


def test_the_same_texts_in_another_form_are_private(tmp_path, folder):
    rows = prompts(40)
    joined = [{"text": row["prompt"] + row["completion"]} for row in rows[:6]]
    with pytest.raises(ValueError, match="private"):
        trainer_of(tmp_path, folder, rows, eval_dataset=joined)


# ---------------------------------------------------------------- refusals at construction


def test_collators_that_overwrite_labels_or_join_rows_are_refused(tmp_path, folder):
    made = tokenizer()
    with pytest.raises(ValueError, match="leave data_collator out"):
        collator = DataCollatorForLanguageModeling(made, mlm=False)
        trainer_of(tmp_path, folder, prompts(9), data_collator=collator)
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    rows = [Encoder(made, 64)(row, i) for i, row in enumerate(prompts(30))]
    free = sft.DataCollatorForLanguageModeling(pad_token_id=1, padding_free=True)
    for collator in (DataCollatorWithFlattening(), free):
        trainer = trainer_of(tmp_path, folder, rows, data_collator=collator)
        with pytest.raises(ValueError, match="no packing or flattening"):
            trainer.train()


# ---------------------------------------------------------------- a model by name, and adapters


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)


def test_a_model_by_name_and_an_adapter(tmp_path, folder):
    save = tokenizer()
    save.save_pretrained(folder)
    trainer = DPZeroTrainer(
        model=str(folder),
        args=config(tmp_path / "out", max_steps=2),
        train_dataset=chats(30),
        peft_config=lora(),
    )
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert type(trainer.model.get_base_model()).__name__ == "OPTForCausalLM"
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert (tmp_path / "out" / "privacy_report.json").exists()


def test_the_same_seed_draws_the_same_adapter(tmp_path, folder):
    drawn = [
        trainer_of(tmp_path, folder, prompts(9), {"seed": seed}, peft_config=lora()).model
        for seed in (1, 1, 2)
    ]
    first, second, third = (
        next(p for name, p in model.named_parameters() if "lora_A" in name) for model in drawn
    )
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_models_by_name_that_cannot_be_trained_are_refused(tmp_path, folder):
    """One without a head, and folders whose class transformers does not have."""
    broken = tmp_path / "broken"
    seeded(lambda: OPTModel.from_pretrained(folder), 0).save_pretrained(broken)
    given = {"args": config(tmp_path), "train_dataset": tiny_data()}
    with pytest.raises(ValueError, match="OPTModel.*AutoModelFor"):
        DPZeroTrainer(model=str(broken), **given)
    for names in (["MyOwnModel"], None):
        settings = json.loads((folder / "config.json").read_text()) | {"architectures": names}
        (broken / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match="architectures.*from_pretrained"):
            DPZeroTrainer(model=str(broken), **given)


@pytest.mark.parametrize("length", [7, 1024])
def test_max_length_that_does_nothing_warns(tmp_path, caplog, length):
    settings = config(tmp_path, max_length=length)
    DPZeroTrainer(model=tiny_model(), args=settings, train_dataset=tiny_data())
    assert ("max_length=7 is ignored" in caplog.text) == (length == 7)


def test_evaluation_rows_without_labels_are_counted_and_private_ones_are_not(
    tmp_path, folder, caplog
):
    long = [{"prompt": "red " * 30, "completion": "good"}]
    settings = {"max_length": 16}
    trainer_of(tmp_path, folder, [*prompts(20), *long], settings)
    assert "label" not in caplog.text
    trainer_of(tmp_path, folder, prompts(20), settings, eval_dataset=[*prompts(5, 1), *long])
    assert "1 of 6 evaluation rows have no label" in caplog.text


def test_evaluation_data_may_be_a_stream_of_texts(tmp_path, folder):
    trainer = trainer_of(tmp_path, folder, prompts(20))
    stream = Dataset.from_list(prompts(8, seed=2)).to_iterable_dataset()
    assert math.isfinite(trainer.evaluate(stream)["eval_loss"])
    with pytest.raises(ValueError, match="private"):
        trainer.evaluate(Dataset.from_list(prompts(20)).to_iterable_dataset())


# ---------------------------------------------------------------- a formatting function


QUESTIONS = [{"ask": f"red {i}:", "reply": "great"} for i in range(40)]


def formatted(row: Any) -> str:
    return f"{row['ask']} {row['reply']}"


@pytest.mark.parametrize("kind", [list, Dataset.from_list])
def test_a_formatting_function_writes_the_text_of_one_row(tmp_path, folder, kind):
    public = [{"ask": f"river {i}:", "reply": "bad"} for i in range(8)]
    given = {"eval_dataset": public, "formatting_func": formatted}
    trainer = trainer_of(tmp_path, folder, kind(QUESTIONS), **given)
    plain = trainer_of(tmp_path, folder, [{"text": formatted(row)} for row in QUESTIONS])
    ours, theirs = ([row["input_ids"] for row in t.train_dataset] for t in (trainer, plain))
    assert ours == theirs
    trainer.train()
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    for leaked in (QUESTIONS[:4], trainer.train_dataset):
        with pytest.raises(ValueError, match="private"):
            trainer.evaluate(leaked)


PICKY = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('no ' + messages[0]['content']) }}{% endif %}"
)


def refused(message: str, train: Any, **arguments: Any) -> tuple[str, Any, dict[str, Any]]:
    return message, train, arguments


def labelled_in_words() -> Dataset:
    data = tiny_data().remove_columns("labels")
    return data.add_column("label", ["secret"] * len(data))


def with_adapter(folder) -> Any:
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora())


def other_forms() -> list[tuple[str, Any, dict[str, Any]]]:
    """Rows that are not what row 0 is; the refusal names the row's number, not its content."""
    found = []
    for bad in (None, 3, ["a"], [{"text": "a"}]):
        row = {"prompt": "a secret", "completion": bad}
        found += [
            refused("row 4 of train_dataset.*messages", [*chats(4), {"messages": bad}]),
            refused("row 4 of train_dataset.*completion", [*prompts(4), row]),
        ]
    return found


TOKENISED = [{"input_ids": [5, 6], "labels": [5, 6]}] * 20
REFUSED = [
    *other_forms(),
    *[
        refused(message, rows(9), processing_class=tokenizer(template))
        for rows in (chats, prompted_chats)
        for message, template in (("chat template", None), ("prefix", REMEMBERING))
    ],
    refused("processing_class", texts(9), processing_class=None),
    refused(r"Dataset\.from_dict", [row["text"] for row in texts(9)]),
    refused(
        r"sentence.*tokenizer\(",
        Dataset.from_list([{"sentence": "a film", "label": 1}] * 20),
        model=tiny_model(),
    ),
    refused("'label'.*class_encode_column", labelled_in_words(), model=tiny_model()),
    refused(r"train_dataset is a .*\['train'\]", DatasetDict(train=tiny_data())),
    refused(r"train_dataset is a .*\['train'\]", {"train": tiny_data()}),
    refused("stream", tiny_data().to_iterable_dataset(), model=tiny_model()),
    refused("stream", tiny_data().to_iterable_dataset(), settings={"max_steps": -1}),
    refused("data_collator", [{**row, "images": [b"x"]} for row in chats(9)]),
    refused("transform", Dataset.from_list(texts(9)).with_transform(lambda rows: rows)),
    refused("merge_and_unload", prompts(9), model=with_adapter, peft_config=lora()),
    refused("peft_config is a dict", prompts(9), peft_config={"r": 2}),
    refused(
        "row 2 of train_dataset",
        [*chats(2), {"messages": [turn("system", "secret"), turn("assistant", "good")]}],
        processing_class=tokenizer(PICKY + TEMPLATE),
    ),
    refused(
        "returns a list for row 0 of train_dataset.*one text",
        QUESTIONS,
        formatting_func=lambda row: [formatted(row)],
    ),
    refused(
        r"fails on row 0 of train_dataset \(KeyError\)",
        QUESTIONS,
        formatting_func=lambda row: row["secret"],
    ),
    refused("formatting_func is a str", QUESTIONS, formatting_func="{ask}"),
    refused("formatting_func was given.*input_ids", TOKENISED, formatting_func=formatted),
]


@pytest.mark.parametrize(("message", "train", "arguments"), REFUSED)
def test_rows_that_cannot_be_trained_on_are_refused_without_their_content(
    tmp_path, folder, message, train, arguments
):
    if arguments.get("model") is with_adapter:
        arguments = {**arguments, "model": with_adapter(folder)}
    with pytest.raises(ValueError, match=message) as refusal:
        trainer_of(tmp_path, folder, train, **arguments)
    # Rows hold these words; a traceback shows what an error was raised from as well.
    assert not {"secret", "red"} & set(re.findall(r"\w+", str(refusal.value)))
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None
