"""The quickstart's data: messages to a clinic, urgent or routine, written by this project.

No network and no real person: every message is a situation, filled with a person and a time,
between an opening and a closing. Patients' messages are the sort of text that differential privacy
is for, and "urgent or routine" is a distinction that a sentence encoder only half sees before
training, because urgent messages may sound calm and routine ones may mention pain or a hospital.

A validation message shares no opening, closing, person or time with any training message, and its
situations are the training situations and a fifth more that training never shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import datasets

from hf_dpzero.tasks.description import DataArguments

LABEL_NAMES = ("routine", "urgent")
TRAIN_SIZE, VALIDATION_SIZE = 8192, 1024
GENERATOR_SEED = 20240503

_URGENT = (
    "{who} has had a tight feeling in the chest since {past} and it is getting worse",
    "{who} can hardly breathe since {past}, even when sitting still",
    "{who} cut a hand {past} and the bleeding does not stop",
    "{who} was stung {past} and now the tongue and lips are swelling",
    "the left side of the face of {who} has been drooping since {past}",
    "{who} took twice the dose of the heart tablets {past}",
    "{who} fell {past}, hit the head and has been sick three times",
    "{who} has a stiff neck, a fever of 40 and cannot look at the light since {past}",
    "{who} woke up {past} and could not see anything with one eye",
    "{who} is pregnant and has had strong cramps and bleeding since {past}",
    "{who} has not been able to keep any water down since {past} and is very drowsy",
    "{who} swallowed a button battery {past}",
    "{who} started shaking all over {past} and does not answer when spoken to",
    "the lips of {who} have looked blue since {past}",
    "{who} has been coughing up blood since {past}",
    "{who} touched a hot pan {past} and the whole palm is blistered and white",
    "{who} suddenly cannot move the right arm, it began {past}",
    "{who} has diabetes, the sugar has been over 400 since {past} and the breath smells strange",
    "{who} drank some cleaning liquid {past}",
    "{who} said {past} that life is not worth it and there is a bottle of pills on the table",
    "the calf of {who} has been red, hot and twice its size since {past}",
    "{who} had the operation last week and the wound has been opening since {past}",
    "{who} cannot pass any water since {past} and the belly is hard",
    "{who} got a fish bone stuck {past} and can no longer swallow",
    "{who} has been confused since {past} and does not know where we are",
    "the baby of {who} has been limp and would not feed since {past}",
    "{who} passed out twice since {past}, the pulse is very fast",
    "{who} was bitten by a dog {past}, the bone is showing",
    "{who} has had the worst headache ever, it came like a thunderclap {past}",
    "a rash that does not fade under a glass has been spreading on {who} since {past}",
)
_ROUTINE = (
    "{who} would like to move the check-up that was set for {future}",
    "{who} needs a new prescription for the blood pressure tablets by {future}",
    "could you send {who} the results of the blood test that was taken {past}",
    "{who} would like to know whether the insurance covers the visit planned for {future}",
    "{who} had chest pain last year, all is well now, we only need the old report by {future}",
    "which parking space may {who} use for the visit {future}",
    "{who} has had a slightly runny nose since {past}, is there any tea that helps",
    "{who} needs a sick note for the employer, the first day off was {past}",
    "please put the new phone number of {who} on file, the old one stopped working {past}",
    "{who} wants to book the flu shot, perhaps {future}",
    "is the clinic open {future}, {who} would like to pick up a form",
    "{who} was billed twice for the same visit, both letters came {past}",
    "{who} needs the vaccination record for a school trip that starts {future}",
    "the stitches of {who} can come out, would {future} suit you",
    "{who} finished the antibiotics {past} and feels fine, do we need to come again",
    "{who} is asking about a referral to a skin doctor for an old mole, any day after {future}",
    "{who} left an umbrella in the waiting room {past}",
    "{who} would like to change to another doctor of your team from {future} on",
    "how long before the blood test {future} should {who} stop eating",
    "{who} has had the same mild back ache for years and hopes for physiotherapy {future}",
    "the emergency contact of {who} was entered wrongly {past}",
    "{who} would like a copy of the hospital letter that arrived {past}",
    "could {who} get a reminder by text before the appointment {future}",
    "{who} is travelling {future} and asks which shots are advised",
    "{who} needs the doctor's signature on the gym form by {future}",
    "{who} would like to hear about your course on quitting smoking that starts {future}",
    "can {who} still join the study on migraine that you mentioned {past}",
    "{who} asks if the hearing test can be done together with the eye test {future}",
    "{who} wants to thank the nurse who dressed the burn so kindly {past}",
    "{who} asks whether the heart monitor fitted {past} has to be given back charged",
)


class Fillings(NamedTuple):
    """What goes around and into a situation; training and validation have their own."""

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    people: tuple[str, ...]
    past: tuple[str, ...]
    future: tuple[str, ...]
    situations: int


_TRAIN = Fillings(
    openings=("", "Hello,", "Good morning,", "Dear team,", "Hi, it's me again:", "A question:"),
    closings=(
        "", "Thank you.", "What should we do?", "Please let me know.", "Sorry to bother you.",
        "You can call me back.",
    ),
    people=(
        "my mother", "my husband", "my son", "my daughter", "my grandfather", "our neighbour",
        "my wife", "a friend of mine", "my sister",
    ),
    past=("this morning", "yesterday", "last night", "Monday", "Tuesday evening", "Saturday"),
    future=("tomorrow", "next week", "Wednesday", "next Monday", "Tuesday week", "next month"),
    situations=24,
)  # fmt: skip
_VALIDATION = Fillings(
    openings=("Good evening,", "Hello doctor,", "To the front desk:"),
    closings=("Many thanks.", "Could somebody answer?", "I am not sure whom to ask."),
    people=("my father", "my aunt", "my partner", "my roommate", "my grandmother", "my brother"),
    past=("this afternoon", "Friday", "the day before yesterday", "Sunday night"),
    future=("Thursday", "the day after tomorrow", "next Friday", "next weekend"),
    situations=30,
)


def load_generated(data: DataArguments) -> datasets.DatasetDict:
    """Returns all messages; refuses a recipe that names rows of its own."""
    for name in ("dataset_name", "train_file", "validation_file"):
        if getattr(data, name) is not None:
            raise ValueError(
                f"{name}={getattr(data, name)!r}: the quickstart task generates its own text; "
                "set task to text_classification to use your data."
            )
    return generate()


def generate(seed: int = GENERATOR_SEED) -> datasets.DatasetDict:
    """Generates 8192 distinct training and 1024 distinct validation rows, half of them urgent.

    Guarantee: a pure function of `seed`; no text occurs twice, in either split.
    """
    generator, splits = random.Random(seed), datasets.DatasetDict()
    label = datasets.ClassLabel(names=list(LABEL_NAMES))
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    sizes = {"train": (_TRAIN, TRAIN_SIZE), "validation": (_VALIDATION, VALIDATION_SIZE)}
    for split, (fillings, size) in sizes.items():
        rows: list[dict[str, object]] = []
        for label, situations in enumerate((_ROUTINE, _URGENT)):
            texts = list(_messages(situations[: fillings.situations], fillings))
            rows += [{"text": t, "label": label} for t in generator.sample(texts, size // 2)]
        generator.shuffle(rows)
        splits[split] = datasets.Dataset.from_list(rows, features=features)
    return splits


def _messages(situations: tuple[str, ...], fillings: Fillings) -> Iterator[str]:
    """Every message that the situations and fillings can make."""
    times = zip(fillings.past, fillings.future, strict=True)
    parts = (situations, fillings.openings, fillings.closings, fillings.people, times)
    for situation, opening, closing, person, (past, future) in itertools.product(*parts):
        core = situation.format(who=person, past=past, future=future)
        # A message without an opening begins with the situation, as a sentence does.
        first = core if opening else core[0].upper() + core[1:]
        yield " ".join(part for part in (opening, f"{first}.", closing) if part)
