"""Principal components of a frozen encoder's states, fitted to public text: `z = W h + b`.

With mean m, standard deviations s and R = V diag(l) V' the correlation matrix of the public states h,

  z = c diag(l_k)^(-1/4) V_k' diag(s)^(-1) (h - m),

for the k largest eigenvalues l_k, and c such that the median length of the public z is 1. A language
model's states have few directions of large variance, which is all that a step along a random direction
moves; the fourth root halves their range of variance, on a logarithmic scale.

No privacy is spent, because no private row is looked at: that is what makes the text public. The map is
a frozen layer of the model, saved, digested and published with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_dpzero.recipes.sentence_classifier import SentenceClassifier, precompute_features
from hf_dpzero.reporting.weights import open_weights

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from hf_dpzero.tasks.classification import Task

_RANK = 1e-10  # of the largest eigenvalue: below, float32 states have no direction
_LONG = 8  # characters of a text that no two rows have by chance


@torch.no_grad()
def fit_public_features_(
    model: SentenceClassifier, tokenizer: PreTrainedTokenizerBase, task: Task, file: str
) -> None:
    """Sets `model.public_features` to the components of the states of a file's texts.

    `datasets` keeps the states, so that other runs and other numbers of components find them.

    Args:
      model: its encoder, which ends up frozen, and its configuration are used.
      tokenizer: the encoder's.
      task: its columns, template and lengths; its training rows are compared with the file.
      file: as `ModelArguments.public_file`.

    Raises:
      ValueError: see `public_rows` and `components_of`.
    """
    import datasets

    rows, config = public_rows(task, file), model.config
    check_enough(len(rows), len(rows), config.components or 0)  # before minutes of encoding
    public = dataclasses.replace(task, splits=datasets.DatasetDict(public=rows))
    bare = SentenceClassifier.from_encoder(
        model.encoder, pooling=config.pooling, features=config.features, normalize=False
    )
    states = precompute_features(
        bare,
        public.tokenize(tokenizer)["public"],
        task.collator(tokenizer),
        trainable="^classifier",
    )
    layer = model.public_features
    assert layer is not None
    weight, bias = components_of(states["sentence_embedding"][:], layer.out_features)
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
    config.public_texts = digest_of_texts(rows)


@torch.no_grad()
def take_public_features_(model: SentenceClassifier, folder: str | Path) -> None:
    """Sets `model.public_features` to those of a saved model, as a replay does.

    A fit on another machine differs in its last bits, and the texts may not be at hand.

    Raises:
      ValueError: the folder's model has none, or for another encoder or number of components.
    """
    layer = model.public_features
    assert layer is not None
    with open_weights(folder) as files:
        for name, own in layer.named_parameters():
            whole = f"public_features.{name}"
            saved = files[whole].get_tensor(whole) if whole in files else torch.empty(0)
            if saved.shape != own.shape:
                raise ValueError(
                    f"the model in {folder} has {whole} of shape {list(saved.shape)}, and the recipe's "
                    f"is {list(own.shape)}: it was made with another encoder, features or components."
                )
            own.copy_(saved)
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    model.config.public_texts = config.get("public_texts")


def public_rows(task: Task, file: str, private: datasets.Dataset | None = None) -> datasets.Dataset:
    """Reads the texts of a public file, and a label for each that means nothing.

    Args:
      task: its text columns are read.
      file: as `ModelArguments.public_file`.
      private: rows that none may be of; None: the task's training rows.

    Raises:
      ValueError: the text columns are not there, or a text is that of a private row.
      FileNotFoundError: no such file.
    """
    import datasets

    from hf_dpzero.tasks.rows import read_rows, require_columns

    if not Path(file).is_file():
        raise FileNotFoundError(f"public_file={file!r} not found; give a file of public texts.")
    rows, columns = read_rows(Path(file)), list(task.text_columns)
    require_columns(
        datasets.DatasetDict(public=rows), columns, dict.fromkeys(columns, "public_file"), columns
    )
    private = task.splits.get("train") if private is None else private
    if private is not None and not _texts(private, columns).isdisjoint(_texts(rows, columns)):
        raise ValueError(  # does not say how many or which
            f"public_file={file!r} holds the text of a training row, which the published model would be "
            "made of without noise: give texts that are none of them."
        )
    return rows.select_columns(columns).add_column("label", [0] * len(rows))


def _texts(rows: datasets.Dataset, columns: Sequence[str]) -> set[tuple[str, ...]]:
    """Rows, and each of their long texts by itself, whatever stands beside it."""
    texts = [
        [" ".join((t or "").split()) for t in rows[c][:]] for c in columns if c in rows.features
    ]
    long = {(text,) for column in texts for text in column if len(text) > _LONG}
    return {*zip(*texts, strict=True)} | long


def digest_of_texts(rows: datasets.Dataset) -> str:
    """SHA-256 (hex) of the texts of `public_rows`, as `config.public_texts` has it."""
    return hashlib.sha256(json.dumps(rows.to_dict()).encode()).hexdigest()


def check_enough(rows: int, span: int, components: int) -> None:
    """Refuses more components than the states of so many rows can have, or have."""
    span = min(span, rows - 1)
    if span < components:
        raise ValueError(
            f"components={components}, and the states of {rows} public rows span {span} directions: "
            f"give at least {components + 1} different rows, or set components to {span} at most."
        )


def components_of(states: Tensor, components: int) -> tuple[Tensor, Tensor]:
    """Returns the map of the module's docstring.

    Args:
      states: public, `[N, D]`.
      components: k.

    Returns:
      W `[k, D]` and b `[k]`, float32.

    Raises:
      ValueError: states that are not finite, or that do not span k directions: N public rows span at
        most N - 1.
    """
    h = states.double()
    if components > h.shape[1]:
        raise ValueError(
            f"components={components} of states of {h.shape[1]} numbers: lower it, or set features to "
            "more layers."
        )
    if not bool(h.isfinite().all()):
        raise ValueError(
            "the encoder's states of the public rows are not all finite: use torch_dtype: float32, or "
            "other features."
        )
    mean, deviation = h.mean(dim=0), h.std(dim=0, correction=0)
    # A coordinate that never moves, such as an embedding of the template's last token, says nothing.
    inverse = torch.where(deviation > 1e-6 * h.abs().amax(dim=0), 1 / deviation, 0.0)
    z = (h - mean) * inverse
    values, vectors = torch.linalg.eigh(z.T @ z / len(z))
    span = int((values > _RANK * values[-1]).sum())
    check_enough(len(h), span, components)
    kept, largest = values.flip(0)[:components], vectors.flip(1)[:, :components]
    weight = (inverse[:, None] * largest / kept**0.25).T
    weight /= ((h - mean) @ weight.T).norm(dim=1).median()
    return weight.float(), (-weight @ mean).float()
