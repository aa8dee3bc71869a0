"""A causal language model on texts: rows with `text`, one example each, and a LoRA adapter."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, get_peft_model
from reading import finish, parsed, read
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

from hf_dpzero import DPZeroConfig, DPZeroTrainer  # private: for TrainingArguments and Trainer


def main(words: list[str] | None = None) -> dict[str, float]:
    """Runs the example with a command line, by default this process'."""
    arguments, args = parsed(DPZeroConfig, words)  # private: DPZeroConfig
    data = read(arguments)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    model = get_peft_model(model, LoraConfig(r=8, task_type="CAUSAL_LM"))

    def encode(row: dict[str, Any]) -> Any:
        text = row["text"] + tokenizer.eos_token
        return tokenizer(text, truncation=True, max_length=arguments.max_tokens)

    # private: texts are not joined and cut into blocks (group_texts), so a row is one example
    rows = data.map(encode, remove_columns=data["train"].column_names)
    trainer = DPZeroTrainer(  # private: DPZeroTrainer
        model=model,
        args=args,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
    )
    return finish(trainer)


if __name__ == "__main__":
    main()
