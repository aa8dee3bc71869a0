"""A packed file in tiny sizes for a dry run: random weights, rows whose first token tells the label."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from scripts.gpu.pack import EPSILONS

ROWS, BATCH, WIDTH = 40, 8, 6
_ENCODER = {
    "model_type": "bert", "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 64,
}  # fmt: skip


def pack_tiny(folder: Path) -> Path:
    """Writes `tiny.safetensors` and returns its path; the noise multipliers are made up."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModel

    from hf_dpzero.recipes.sentence_classifier import SentenceClassifier

    config = AutoConfig.for_model(**_ENCODER)
    model = SentenceClassifier.from_encoder(AutoModel.from_config(config), num_labels=2)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in model.state_dict().items():
        drawn = 0.3 * torch.randn(tensor.shape, generator=generator)
        around = 1.0 if name.endswith("LayerNorm.weight") else 0.0
        tensors[f"model.{name}"] = (around + drawn * (tensor.dim() > 1)).half()
    for split in ("train", "validation"):
        labels = torch.arange(ROWS) % 2
        ids = torch.randint(4, 24, (ROWS, WIDTH), generator=generator)
        ids[:, 0] = 2 + labels
        tensors[f"data.{split}.ids"] = ids.flatten().to(torch.uint16)
        tensors[f"data.{split}.lengths"] = torch.full((ROWS,), WIDTH, dtype=torch.uint8)
        tensors[f"data.{split}.labels"] = labels.to(torch.uint8)
    made_up = {str(epsilon): {"2": 1.0, "4": 1.5} for epsilon in EPSILONS}
    facts = {
        "model": {"encoder": _ENCODER, "logit_scale": 10.0}, "delta": 1e-5, "batch_size": BATCH,
        "noise": made_up,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path := folder / "tiny.safetensors", metadata={"facts": json.dumps(facts)})
    return path
