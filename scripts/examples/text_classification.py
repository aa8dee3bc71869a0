"""Text classification: rows with `text` and `label`, as csv, json or from the Hub."""

from __future__ import annotations

from typing import Any

from reading import accuracy, finish, names_of, parsed, read
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_dpzero import DPZeroConfig, DPZeroTrainer  # private: for TrainingArguments and Trainer


def main(words: list[str] | None = None) -> dict[str, float]:
    """Runs the example with a command line, by default this process'."""
    arguments, args = parsed(DPZeroConfig, words)  # private: DPZeroConfig
    data = read(arguments)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    names = names_of(data["validation"]["label"])
    numbers = {name: number for number, name in enumerate(names)}
    model = AutoModelForSequenceClassification.from_pretrained(
        arguments.model_name_or_path, id2label=dict(enumerate(names)), label2id=numbers
    )

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer(row["text"], truncation=True, max_length=arguments.max_tokens)
        return {**encoded, "labels": numbers[str(row["label"])]}

    rows = data.map(encode, remove_columns=data["train"].column_names)

    trainer = DPZeroTrainer(  # private: DPZeroTrainer
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    return finish(trainer)


if __name__ == "__main__":
    main()
