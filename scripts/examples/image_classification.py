"""Image classification: a folder `train/LABEL/*.png`, `validation/LABEL/*.png`, or a Hub data set."""

from __future__ import annotations

from typing import Any

from reading import accuracy, finish, parsed, read
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_dpzero import DPZeroConfig, DPZeroTrainer  # private: for TrainingArguments and Trainer


def main(words: list[str] | None = None) -> dict[str, float]:
    """Runs the example with a command line, by default this process'."""
    arguments, args = parsed(DPZeroConfig, words)  # private: DPZeroConfig
    data = read(arguments)
    processor = AutoImageProcessor.from_pretrained(arguments.model_name_or_path)
    names = data["validation"].features["label"].names
    model = AutoModelForImageClassification.from_pretrained(
        arguments.model_name_or_path,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
        ignore_mismatched_sizes=True,
    )

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        picture = processor(row["image"].convert("RGB"), return_tensors="np")
        return {"pixel_values": picture["pixel_values"][0], "labels": row["label"]}

    rows = data.map(encode, remove_columns=data["train"].column_names)

    trainer = DPZeroTrainer(  # private: DPZeroTrainer
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=processor,
        compute_metrics=accuracy,
    )
    return finish(trainer)


if __name__ == "__main__":
    main()
