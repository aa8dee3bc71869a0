"""Settings of a recipe that have no effect beside its others, named in a warning."""

from __future__ import annotations

from pathlib import Path

from hf_dpzero.recipes.recipe import Recipe


def unused_settings(recipe: Recipe) -> str:
    """One message about all of them; "" if there are none.

    Those of `DPZeroConfig` have a warning of their own (`settings.hf_arguments`).

    Args:
      recipe: as loaded; only what was written down is looked at.
    """
    model, data, written = recipe.model, recipe.data, recipe.values
    lora = "it is for peft_method: lora"
    needs = {
        "lora_r": (model.peft_method == "lora", lora),
        "lora_alpha": (model.peft_method == "lora", lora),
        "lora_target_modules": (model.peft_method == "lora", lora),
        "num_virtual_tokens": (model.peft_method == "prefix", "it is for peft_method: prefix"),
        "offload_folder": (model.device_map is not None, "it is for device_map"),
        "max_memory": (model.device_map is not None, "it is for device_map"),
        "pooling": (model.architecture != "auto", "it is for architecture: sentence_classifier"),
        "normalize": (model.architecture != "auto", "it is for architecture: sentence_classifier"),
        "label_texts": (model.head_init == "label_text", "it is for head_init: label_text"),
        "model_revision": (
            not Path(model.model_name_or_path).is_dir(),
            "the model is a local folder",
        ),
        "dataset_name": (data.train_file is None, "train_file goes first"),
        "dataset_config_name": (data.train_file is None, "train_file goes first"),
        "max_new_tokens": (data.prompt is not None, "it is for a prompt"),
        "do_train": (False, "the command says what is done"),
        "do_eval": (False, "the command says what is done"),
        "do_predict": (False, "the command says what is done"),
    }
    told = [
        f"{name}={written[name]!r} ({why})"
        for name, (used, why) in needs.items()
        if not used and written.get(name) is not None and not _means_nothing(name, written[name])
    ]
    return f"no effect in this recipe: {', '.join(told)}" if told else ""


def _means_nothing(name: str, value: object) -> bool:
    """Whether a value says what happens anyhow."""
    return name.startswith("do_") and value is (name != "do_predict")
