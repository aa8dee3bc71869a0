"""Summaries by an encoder-decoder: rows with `document` and `summary`; evaluation generates."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from reading import finish, parsed, read
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

# private: for Seq2SeqTrainingArguments and Seq2SeqTrainer
from hf_dpzero import DPZeroSeq2SeqConfig, DPZeroSeq2SeqTrainer


def main(words: list[str] | None = None) -> dict[str, float]:
    """Runs the example with a command line, by default this process'."""
    arguments, args = parsed(DPZeroSeq2SeqConfig, words)  # private: DPZeroSeq2SeqConfig
    args.predict_with_generate = True
    data = read(arguments)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(arguments.model_name_or_path)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        cut = {"truncation": True, "max_length": arguments.max_tokens}
        labels = tokenizer(text_target=row["summary"], **cut)["input_ids"]
        return {**tokenizer(row["document"], **cut), "labels": labels}

    def words_in_common(prediction: Any) -> dict[str, float]:
        """F1 over the words of a generated and a given summary (ROUGE-1 without stemming)."""
        both = (
            tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), True)
            for ids in (prediction.predictions, prediction.label_ids)
        )
        pairs = [
            (Counter(made.split()), Counter(given.split()))
            for made, given in zip(*both, strict=True)
        ]
        scores = [2 * (a & b).total() / max(1, a.total() + b.total()) for a, b in pairs]
        return {"f1": float(np.mean(scores))}

    rows = data.map(encode, remove_columns=data["train"].column_names)
    trainer = DPZeroSeq2SeqTrainer(  # private: DPZeroSeq2SeqTrainer
        model=model,
        args=args,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
        compute_metrics=words_in_common,
    )
    return finish(trainer)


if __name__ == "__main__":
    main()
