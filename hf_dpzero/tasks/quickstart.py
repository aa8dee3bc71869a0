"""The quickstart's data: messages to a clinic, urgent or routine, written by this project.

No network and no real person: every message is a situation, filled with a person and a time, between
an opening and a closing. Patients' messages are the sort of text that differential privacy is for,
and "urgent or routine" is a distinction that a sentence encoder only half sees before training,
because urgent messages may sound calm and routine ones may mention pain or a hospital.

A validation message shares no opening, closing, person or time with any training message, and its
situations are the training situations and a fifth more that training never shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import datasets

from hf_dpzero.recipe_arguments import DataArguments
from hf_dpzero.tasks.base import Task, subset

LABEL_NAMES = ("routine", "urgent")
LABEL_TEXTS = (
    "This is a routine request.|An administrative question that can wait.",
    "This is an urgent request.|A medical emergency that cannot wait.",
)
TRAIN_SIZE, VALIDATION_SIZE = 8192, 1024
GENERATOR_SEED = 20240503

_URGENT = (
    "{who} has had a tight feeling in the chest since {time} and it is getting worse",
    "{who} can hardly breathe since {time}, even when sitting still",
    "{who} cut a hand {time} and the bleeding does not stop",
    "{who} was stung {time} and now the tongue and lips are swelling",
    "the left side of the face of {who} has been drooping since {time}",
    "{who} took twice the dose of the heart tablets {time}",
    "{who} fell {time}, hit the head and has been sick three times",
    "{who} has a stiff neck, a fever of 40 and cannot look at the light since {time}",
    "{who} woke up {time} and could not see anything with one eye",
    "{who} is pregnant and has had strong cramps and bleeding since {time}",
    "{who} has not been able to keep any water down since {time} and is very drowsy",
    "{who} swallowed a button battery {time}",
    "{who} started shaking all over {time} and does not answer when spoken to",
    "the lips of {who} have looked blue since {time}",
    "{who} has been coughing up blood since {time}",
    "{who} touched a hot pan {time} and the whole palm is blistered and white",
    "{who} suddenly cannot move the right arm, it began {time}",
    "{who} has diabetes, the sugar has been over 400 since {time} and the breath smells strange",
    "{who} drank some cleaning liquid {time}",
    "{who} said {time} that life is not worth it and there is a bottle of pills on the table",
    "the calf of {who} has been red, hot and twice its size since {time}",
    "{who} had the operation last week and the wound has been opening since {time}",
    "{who} cannot pass any water since {time} and the belly is hard",
    "{who} got a fish bone stuck {time} and can no longer swallow",
    "{who} has been confused since {time} and does not know where we are",
    "the baby of {who} has been limp and would not feed since {time}",
    "{who} passed out twice since {time}, the pulse is very fast",
    "{who} was bitten by a dog {time}, the bone is showing",
    "{who} has had the worst headache ever, it came like a thunderclap {time}",
    "a rash that does not fade under a glass has been spreading on {who} since {time}",
)
_ROUTINE = (
    "{who} would like to move the check-up that was set for {time}",
    "{who} needs a new prescription for the blood pressure tablets by {time}",
    "could you send {who} the results of the blood test from {time}",
    "{who} would like to know whether the insurance covers the visit of {time}",
    "{who} had chest pain last year, all is well now, we only need the old report by {time}",
    "which parking space may {who} use for the visit {time}",
    "{who} has had a slightly runny nose since {time}, is there any tea that helps",
    "{who} needs a sick note for the employer, for the day of {time}",
    "please put the new phone number of {who} on file, the old one ended {time}",
    "{who} wants to book the flu shot, perhaps {time}",
    "is the clinic open {time}, {who} would like to pick up a form",
    "{who} was billed twice for the visit of {time}",
    "{who} needs the vaccination record for a school trip, we leave {time}",
    "the stitches of {who} can come out, would {time} suit you",
    "{who} finished the antibiotics {time} and feels fine, do we need to come again",
    "{who} is asking about a referral to a skin doctor for an old mole, any day after {time}",
    "{who} left an umbrella in the waiting room {time}",
    "{who} would like to change to another doctor of your team from {time} on",
    "how long before the blood test {time} should {who} stop eating",
    "{who} has had the same mild back ache for years and asks for a physiotherapy slot {time}",
    "the emergency contact of {who} has changed, it was entered wrongly {time}",
    "{who} would like a copy of the hospital letter from {time}",
    "could {who} get a reminder by text before the appointment {time}",
    "{who} is travelling {time} and asks which shots are advised",
    "{who} needs the doctor's signature on the gym form by {time}",
    "{who} would like to hear about your course on quitting smoking that starts {time}",
    "can {who} still join the study on migraine that you mentioned {time}",
    "{who} asks if the hearing test can be done on the same day as the eye test, {time}",
    "{who} wants to thank the nurse who dressed the burn so kindly {time}",
    "{who} asks whether the heart monitor from {time} has to be given back charged",
)


class Fillings(NamedTuple):
    """What goes around and into a situation; training and validation have their own."""

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    people: tuple[str, ...]
    times: tuple[str, ...]
    situations: int


_TRAIN = Fillings(
    openings=("", "Hello,", "Good morning,", "Dear team,", "Hi, it's me again:", "A question:"),
    closings=(
        "",
        "Thank you.",
        "What should we do?",
        "Please let me know.",
        "Sorry to bother you.",
        "You can call me back.",
    ),
    people=(
        "my mother",
        "my husband",
        "my son",
        "my daughter",
        "my grandfather",
        "our neighbour",
        "my wife",
        "a friend of mine",
        "my sister",
    ),
    times=("this morning", "yesterday", "last night", "Monday", "noon", "two hours ago", "Tuesday"),
    situations=24,
)
_VALIDATION = Fillings(
    openings=("Good evening,", "Hello doctor,", "To the front desk:"),
    closings=("Many thanks.", "Could somebody answer?", "I am not sure whom to ask."),
    people=("my father", "my aunt", "my partner", "my roommate", "my grandmother", "my brother"),
    times=("this afternoon", "Friday", "half an hour ago", "the day before yesterday"),
    situations=30,
)


def build(data: DataArguments) -> Task:
    """The quickstart task; `max_train_samples` and `max_eval_samples` draw subsets by subset_seed.

    Raises:
      ValueError: files or Hub names are set, which this task does not read.
    """
    for name in ("dataset_name", "train_file", "validation_file"):
        if getattr(data, name) is not None:
            raise ValueError(
                f"{name}={getattr(data, name)!r}: the quickstart task generates its own text; "
                "set task to text_classification to use your data."
            )
    return Task(
        name="quickstart",
        label_names=LABEL_NAMES,
        text_columns=("text",),
        label_texts=LABEL_TEXTS,
        max_seq_length=data.max_seq_length,
        splits=subset(generate(), data),
    )


def generate(seed: int = GENERATOR_SEED) -> datasets.DatasetDict:
    """All messages: 8192 distinct training and 1024 distinct validation rows, half of them urgent.

    Guarantee: a pure function of `seed`; no text occurs twice, in either split.
    """
    generator = random.Random(seed)
    sizes = {"train": (_TRAIN, TRAIN_SIZE), "validation": (_VALIDATION, VALIDATION_SIZE)}
    splits = {name: _rows(*size, generator) for name, size in sizes.items()}
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(LABEL_NAMES))}
    )
    return datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows, features=features) for name, rows in splits.items()}
    )


def _rows(fillings: Fillings, size: int, generator: random.Random) -> list[dict[str, object]]:
    """`size` distinct messages, half of each label, in random order."""
    rows: list[dict[str, object]] = []
    for label, situations in enumerate((_ROUTINE, _URGENT)):
        texts = list(_messages(situations[: fillings.situations], fillings))
        rows += [{"text": t, "label": label} for t in generator.sample(texts, size // 2)]
    generator.shuffle(rows)
    return rows


def _messages(situations: tuple[str, ...], fillings: Fillings) -> Iterator[str]:
    """Every message that the situations and fillings can make."""
    parts = (situations, fillings.openings, fillings.closings, fillings.people, fillings.times)
    for situation, opening, closing, person, time in itertools.product(*parts):
        core = situation.format(who=person, time=time)
        yield " ".join(part for part in (opening, _sentence(core, opening), closing) if part)


def _sentence(core: str, opening: str) -> str:
    """A full stop after the core, and a capital unless an opening leads into it."""
    return (core if opening else core[0].upper() + core[1:]) + "."
