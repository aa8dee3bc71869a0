"""Whole runs with fixed keys and noise, whose numbers are the same on every machine.

    python tests/golden_runs.py            records `golden/runs.json` anew

Do that only with a change that is meant to alter numbers, and say why in the changelog.

Kernels round float32 sums in an order that depends on the type of CPU. The model here is a BERT
whose weights are float32 or bfloat16, as the package sees, perturbs and updates them, but whose
layers compute in float64, and whose losses are rounded to 2^-20. Another order of a float64 sum
moves a loss by 1e-15 or so, and the rounded loss only where it lies that near to the middle of two
multiples: 1e-9 of all losses. So releases and digests are compared bit for bit. Weights come from
integers: normal numbers of torch's generator have last bits that depend on the CPU as well.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from bytes_digest import bytes_digest
from tiny_runs import KEY
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

from hf_dpzero import DPZeroConfig, DPZeroTrainer
from hf_dpzero.recipes.recipe import merged

GOLDEN = Path(__file__).parent / "golden" / "runs.json"
STEPS, ROWS, WIDEST, GRID = 3, 24, 12, 2.0**-20
CLIP, BATCH, RATE = 0.5, 8, 2.0**-7

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ZEROTH = ("dpzero", "dpgd-0th", "mezo")
CASES: dict[str, dict[str, Any]] = {
    **{
        f"{method} {strategy} {dtype}": {
            "method": method,
            "performance.perturbation_strategy": strategy,
        }
        for method in ZEROTH
        for strategy in ("whole_model", "layerwise", "stacked")
        for dtype in DTYPES
        if (strategy, dtype) != ("stacked", "bfloat16")  # refused: copies are float32
    },
    "dp-sgd dense float32": {"method": "dp-sgd", "performance.per_example_gradients": "dense"},
    "dp-adamw dense float32": {"method": "dp-adamw", "performance.per_example_gradients": "dense"},
    "dpzero adaptive float32": {
        "method": "dpzero",
        "clipping": "adaptive",
        "clipping_config.count_noise": 2.0,
    },
    "dpzero averaged float32": {
        "method": "dpzero",
        "clipping": "averaged",
        "clipping_config.groups": 3,
    },
    "dpzero laplace float32": {"method": "dpzero", "noise_distribution": "laplace"},
    "dp-sgd adaptive float32": {
        "method": "dp-sgd",
        "clipping": "adaptive",
        "clipping_config.count_noise": 2.0,
        "performance.per_example_gradients": "dense",
    },
}
"""Name -> settings; the last word of a name is the dtype of the weights. Ghost clipping holds
what it sees in float32, so `tests/training/test_golden_runs.py` compares it with dense gradients."""


def _linear(self: nn.Linear, x: Tensor) -> Tensor:
    bias = None if self.bias is None else self.bias.double()
    return F.linear(x.double(), self.weight.double(), bias)


def _embedding(self: nn.Embedding, ids: Tensor) -> Tensor:
    return F.embedding(ids, self.weight, self.padding_idx).double()


def _layer_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    weight, bias = self.weight.double(), self.bias.double()
    return F.layer_norm(x.double(), self.normalized_shape, weight, bias, self.eps)


_FORWARD = {nn.Linear: _linear, nn.Embedding: _embedding, nn.LayerNorm: _layer_norm}


def tiny_bert(dtype: torch.dtype, exact: bool, frozen_embeddings: bool) -> nn.Module:
    """A BERT of one layer; weights are multiples of 2^-9, then `dtype`; `exact` is in float64."""
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=WIDEST, attn_implementation="eager",
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        drawn = torch.randint(-128, 129, parameter.shape, generator=generator) / 2.0**9
        parameter.data = (drawn + ("LayerNorm.weight" in name)).to(dtype)
        parameter.requires_grad_(not (frozen_embeddings and "embeddings" in name))
    for module in model.modules():
        if exact and type(module) in _FORWARD:
            module.forward = MethodType(_FORWARD[type(module)], module)
    return model.eval()


def rounded_losses(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy [B] in float64, rounded to a multiple of 2^-20, as float32."""
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    losses = F.cross_entropy(logits.double(), inputs["labels"], reduction="none")
    rounded = (losses.detach() / GRID).round() * GRID
    return (losses + (rounded - losses.detach())).float()  # gradients are those of `losses`


def rows() -> list[dict[str, Any]]:
    """Rows of 3 to 10 tokens."""
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(3, 11, (ROWS,), generator=generator).tolist()
    tokens = [torch.randint(1, 30, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": t, "labels": t[0] % 2} for t in tokens]


def padded(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Collates rows, padded with 0 on the right."""
    tokens = [torch.tensor(row["input_ids"]) for row in batch]
    ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    labels = torch.tensor([row["labels"] for row in batch])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


class Gradients(TrainerCallback):
    """Digests what a first-order step hands to the optimizer: its release."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        hashed = hashlib.sha256()  # of float32 numbers: multiples of the grid over B
        for parameter in model.parameters():
            if parameter.grad is not None:
                hashed.update(parameter.grad.float().numpy().tobytes())
        self.digests.append(hashed.hexdigest())


def outcome(case: str, folder: str, exact: bool = True, **changes: Any) -> dict[str, Any]:
    """Runs a case.

    Args:
      case: of `CASES`.
      folder: for the run's files.
      exact: compute in float64; False for layers as they are.
      **changes: settings in place of the case's.

    Returns:
      Released values of each step, or of a first-order method digests of the noised means; a digest
      of the final weights (none of first order: torch's optimizers round in another way on CPUs that
      do not multiply and add at once); their sum.
    """
    settings = {**CASES[case], **changes}
    first = settings["method"] not in ZEROTH
    dtype = DTYPES[case.split()[-1]]
    gradients = Gradients()
    private = {} if settings["method"] == "mezo" else {"noise_multiplier": 0.5}
    secret = {"testing.insecure_noise_seed": 3, "testing.sampler_key": KEY}
    zeroth = (
        {} if first else {"num_directions": 2, "testing.direction_key": 7, "smoothing": 2.0**-6}
    )
    trainer = DPZeroTrainer(
        model=tiny_bert(dtype, exact, frozen_embeddings=first),
        args=DPZeroConfig(
            output_dir=folder, target_delta=1e-3, expected_batch_size=BATCH, max_steps=STEPS,
            microbatch_size=4, learning_rate=RATE, weight_decay=0.01,
            report_to="none", save_strategy="no",
            disable_tqdm=True, use_cpu=True,
            **merged({}, {"clip": CLIP, **secret, **private, **zeroth, **settings}),
        ),
        train_dataset=rows(),
        data_collator=padded,
        compute_per_example_loss=rounded_losses,
        callbacks=[gradients],
    )  # fmt: skip
    trainer.train()
    return {
        "released": [list(release.values) for release in trainer.trajectory.releases],
        "gradients": gradients.digests if first else [],
        "weights": None if first else bytes_digest(trainer.model),
        "sum": sum(float(p.detach().double().sum()) for p in trainer.model.parameters()),
    }


def outcomes() -> dict[str, Any]:
    """Every case's outcome."""
    found = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[case] = outcome(case, folder)
    return found


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(outcomes(), indent=1) + "\n")
