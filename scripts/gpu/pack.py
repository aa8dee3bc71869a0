"""A model and SST-2 as one file for a machine without network, data sets or privacy accounting.

The file holds float16 weights, token ids (uint16) and the noise multipliers of every run that may be
taken. Embeddings of tokens that no row has, and of positions that no row reaches, are left out: no loss
depends on them, so the other weights train as they would beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
EPSILONS = (2.0, 6.0)
STEPS = (10, 20, 40, 80, 160, 320, 640, 1280, 2560)
"""Numbers of steps whose noise is worked out; the run takes the largest that fits its time."""
LIMIT_MB = 45.0
TRAIN_TOKENS, EVAL_TOKENS = 31, 64
"""Rows are cut to so many tokens. One column more is always padding when training: see `sst2.py`."""


def pack(
    model_folder: str,
    data_folder: Path,
    file: Path,
    batch_size: int = 512,
    delta: float = 1e-5,
    rows: int | None = None,
    steps: Sequence[int] = STEPS,
    say: Callable[[str], None] = print,
) -> int:
    """Writes the file.

    Args:
      model_folder: of a BERT encoder with its tokenizer, or `package:...`.
      data_folder: with `train` and `validation` as .jsonl; fields sentence, label.
      file: to write, .safetensors.
      batch_size: expected rows of a Poisson batch.
      delta: of the guarantee.
      rows: of training, at most; None for all.
      steps: whose noise multipliers are worked out.
      say: gets a line for each part.

    Returns:
      Bytes of the file.

    Raises:
      ValueError: it is larger than `LIMIT_MB` million bytes.
    """
    from safetensors.torch import save_file

    from hf_dpzero.reporting.provenance import resolve_path

    folder = resolve_path(model_folder)
    train = list(read_rows(data_folder, "train"))[:rows]
    validation = list(read_rows(data_folder, "validation"))
    say(f"{len(train)} training and {len(validation)} validation rows")
    tensors, settings = model_tensors(folder)
    tokens = {
        "train": tokenized(folder, [s for s, _ in train], TRAIN_TOKENS),
        "validation": tokenized(folder, [s for s, _ in validation], EVAL_TOKENS),
    }
    kept = sorted({0, *(t for rows in tokens.values() for row in rows for t in row)})
    cut_embeddings_(tensors, settings["encoder"], kept)
    for name, data in (("train", train), ("validation", validation)):
        tensors |= {f"data.{name}.{k}": v for k, v in ragged(tokens[name], kept).items()}
        tensors[f"data.{name}.labels"] = torch.tensor([y for _, y in data], dtype=torch.uint8)
    say(f"{len(kept)} of the tokens have a row")
    noise = noise_multipliers(len(train), batch_size, delta, steps)
    facts = {"model": settings, "noise": noise, "delta": delta, "batch_size": batch_size}
    save_file(tensors, file, metadata={"facts": json.dumps(facts)})
    size = file.stat().st_size
    if size > LIMIT_MB * 1e6:
        raise ValueError(f"{file} has {size / 1e6:.1f} MB, more than {LIMIT_MB}; give fewer rows.")
    return size


def read_rows(folder: Path, split: str) -> Iterator[tuple[str, int]]:
    """(sentence, label) of each line of a split's .jsonl."""
    with (folder / f"{split}.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            yield str(row["sentence"]), int(row["label"])


def model_tensors(folder: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Float16 weights of the encoder and of a head from label texts, and what builds them again."""
    from transformers import AutoModel, AutoTokenizer

    from hf_dpzero.recipes.sentence_classifier import SentenceClassifier, label_text_weights

    recipe = yaml.safe_load((ROOT / "recipes/sst2/_minilm.yaml").read_text(encoding="utf-8"))
    encoder = AutoModel.from_pretrained(folder, local_files_only=True).float()
    model = SentenceClassifier.from_encoder(
        encoder, num_labels=2, logit_scale=float(recipe["logit_scale"])
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        head = label_text_weights(model, tokenizer, recipe["label_texts"])
        model.classifier.weight.copy_(head)
    weights = {f"model.{n}": t.half().contiguous() for n, t in model.state_dict().items()}
    return weights, {"encoder": encoder.config.to_dict(), "logit_scale": model.config.logit_scale}


def tokenized(folder: str, sentences: Sequence[str], most: int) -> list[list[int]]:
    """Token ids of each sentence, cut to `most`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer(list(sentences), truncation=True, max_length=most)["input_ids"]


def cut_embeddings_(
    tensors: dict[str, Tensor], config: dict[str, Any], kept: Sequence[int]
) -> None:
    """Leaves the rows of `kept` tokens and of the positions in use, in `tensors` and `config`."""
    words, positions = (
        f"model.encoder.embeddings.{kind}_embeddings.weight" for kind in ("word", "position")
    )
    tensors[words] = tensors[words][list(kept)].clone()
    longest = min(max(TRAIN_TOKENS + 1, EVAL_TOKENS), len(tensors[positions]))
    tensors[positions] = tensors[positions][:longest].clone()
    for name in [n for n in tensors if n.endswith("position_ids")]:
        del tensors[name]
    config |= {"vocab_size": len(kept), "max_position_embeddings": longest, "pad_token_id": 0}


def ragged(rows: Sequence[Sequence[int]], kept: Sequence[int]) -> dict[str, Tensor]:
    """Rows end to end, in numbers of `kept`, and their lengths."""
    flat = np.searchsorted(np.array(kept), np.concatenate([np.array(row) for row in rows]))
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.uint8)
    return {"ids": torch.from_numpy(flat.astype(np.uint16)), "lengths": lengths}


def noise_multipliers(
    rows: int, batch_size: int, delta: float, steps: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Epsilon -> steps -> noise multiplier, from the package's accountant.

    The number of directions changes nothing: they share one clip and one release.
    """
    from hf_dpzero.privacy.mechanisms import ScalarMechanism
    from hf_dpzero.privacy.plan import PrivacyPlan
    from hf_dpzero.privacy.sampling import PoissonSampler

    sampler = PoissonSampler(num_examples=rows, expected_batch_size=float(batch_size))
    mechanism = ScalarMechanism(expected_batch_size=batch_size, clip=1.0, noise_multiplier=1.0)

    def multiplier(epsilon: float, count: int) -> float:
        plan = PrivacyPlan(sampler=sampler, mechanism=mechanism, steps=count)
        return float(plan.calibrate(epsilon=epsilon, delta=delta).mechanism.noise_multiplier)

    return {str(e): {str(t): multiplier(e, t) for t in steps} for e in EPSILONS}
