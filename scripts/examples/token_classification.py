"""Named entities: json rows with `tokens` and `ner_tags`, one tag (a word) for each token."""

from __future__ import annotations

from typing import Any

from reading import accuracy, finish, names_of, parsed, read
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
)

from hf_dpzero import DPZeroConfig, DPZeroTrainer  # private: for TrainingArguments and Trainer


def main(words: list[str] | None = None) -> dict[str, float]:
    """Runs the example with a command line, by default this process'."""
    arguments, args = parsed(DPZeroConfig, words)  # private: DPZeroConfig
    data = read(arguments)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    names = names_of(tag for row in data["validation"] for tag in row["ner_tags"])
    numbers = {name: number for number, name in enumerate(names)}
    model = AutoModelForTokenClassification.from_pretrained(
        arguments.model_name_or_path, id2label=dict(enumerate(names)), label2id=numbers
    )

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer(
            row["tokens"],
            is_split_into_words=True,
            truncation=True,
            max_length=arguments.max_tokens,
        )
        words = encoded.word_ids()
        # the first token of a word has its tag, the others none
        tags = [
            -100 if word is None or word in words[:place] else numbers[row["ner_tags"][word]]
            for place, word in enumerate(words)
        ]
        return {**encoded, "labels": tags}

    rows = data.map(encode, remove_columns=data["train"].column_names)

    trainer = DPZeroTrainer(  # private: DPZeroTrainer
        model=model,
        args=args,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    return finish(trainer)


if __name__ == "__main__":
    main()
