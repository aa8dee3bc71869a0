"""Questions answered by a span: json rows as in SQuAD, one window of the context for each row."""

from __future__ import annotations

from typing import Any

from reading import finish, parsed, read
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, Trainer

from hf_dpzero import DPZeroConfig, DPZeroMixin  # private: for TrainingArguments


class QuestionAnsweringTrainer(Trainer):
    """Evaluates by the share of answers that are right to the letter."""

    def evaluate(self, *arguments: Any, **settings: Any) -> dict[str, float]:
        """Predicts spans of `eval_dataset`, whose rows also have context, offsets and answers."""
        rows: Any = self.eval_dataset
        firsts, lasts = (part.argmax(-1) for part in self.predict(rows).predictions[:2])
        right = [
            span(row, first, last) in row["answers"]["text"]
            for row, first, last in zip(rows, firsts, lasts, strict=True)
        ]
        return {"eval_exact_match": sum(right) / len(right)}


class PrivateTrainer(DPZeroMixin, QuestionAnsweringTrainer):  # private: this class
    """The same, with private steps."""


def span(row: dict[str, Any], first: int, last: int) -> str:
    """The piece of a row's context from one token to another; "" outside of the context."""
    pieces = row["pieces"]
    if not (first < len(pieces) and last < len(pieces) and pieces[first] and pieces[last]):
        return ""
    return row["context"][pieces[first][0] : pieces[last][1]]


def main(words: list[str] | None = None) -> dict[str, float]:
    """Runs the example with a command line, by default this process'."""
    arguments, args = parsed(DPZeroConfig, words)  # private: DPZeroConfig
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    model = AutoModelForQuestionAnswering.from_pretrained(arguments.model_name_or_path)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer(
            row["question"],
            row["context"],
            truncation="only_second",
            max_length=arguments.max_tokens,
            return_offsets_mapping=True,
        )
        of_context = (part == 1 for part in encoded.sequence_ids())
        offsets = encoded.pop("offset_mapping")
        pieces = [list(o) if own else [] for o, own in zip(offsets, of_context, strict=True)]
        start, text = row["answers"]["answer_start"][0], row["answers"]["text"][0]
        end, last = start + len(text), len(pieces)
        first_token = next((i for i, p in enumerate(pieces) if p and p[0] <= start < p[1]), last)
        last_token = next((i for i, p in enumerate(pieces) if p and p[0] < end <= p[1]), last)
        positions = {"start_positions": first_token, "end_positions": last_token}
        if last in positions.values():  # the answer was cut off: the first token stands for "none"
            positions = dict.fromkeys(positions, 0)
        return {**encoded, **positions, "pieces": pieces}

    rows = read(arguments).map(encode)
    trainer = PrivateTrainer(  # private: PrivateTrainer
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
    )
    return finish(trainer)


if __name__ == "__main__":
    main()
