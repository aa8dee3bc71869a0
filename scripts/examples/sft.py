"""Chats: json rows with `messages`, or with `prompt` and `completion`; a LoRA adapter; as in TRL."""

from __future__ import annotations

from peft import LoraConfig
from reading import finish, parsed, read

from hf_dpzero import DPZeroConfig, DPZeroTrainer  # private: for SFTConfig and SFTTrainer


def main(words: list[str] | None = None) -> dict[str, float]:
    """Runs the example with a command line, by default this process'."""
    arguments, args = parsed(DPZeroConfig, words)  # private: DPZeroConfig
    data = read(arguments)
    trainer = DPZeroTrainer(  # private: DPZeroTrainer
        model=arguments.model_name_or_path,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"),
    )
    return finish(trainer)


if __name__ == "__main__":
    main()
