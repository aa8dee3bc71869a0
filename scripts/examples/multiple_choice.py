"""Multiple choice: rows with `question`, `choice0`, `choice1`, ... and `label`, a number."""

from __future__ import annotations

from typing import Any

from reading import accuracy, finish, parsed, read
from transformers import AutoModelForMultipleChoice, AutoTokenizer, DataCollatorForMultipleChoice

from hf_dpzero import DPZeroConfig, DPZeroTrainer  # private: for TrainingArguments and Trainer


def main(words: list[str] | None = None) -> dict[str, float]:
    """Runs the example with a command line, by default this process'."""
    arguments, args = parsed(DPZeroConfig, words)  # private: DPZeroConfig
    data = read(arguments)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    model = AutoModelForMultipleChoice.from_pretrained(arguments.model_name_or_path)
    choices = [name for name in data["train"].column_names if name.startswith("choice")]

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer(
            [row["question"]] * len(choices),
            [row[name] for name in choices],
            truncation=True,
            max_length=arguments.max_tokens,
        )
        return {**encoded, "labels": row["label"]}

    rows = data.map(encode, remove_columns=data["train"].column_names)

    trainer = DPZeroTrainer(  # private: DPZeroTrainer
        model=model,
        args=args,
        data_collator=DataCollatorForMultipleChoice(tokenizer),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    return finish(trainer)


if __name__ == "__main__":
    main()
