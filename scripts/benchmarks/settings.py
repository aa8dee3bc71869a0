"""What `python -m scripts.benchmarks step` measures, and the combinations that mean nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_dpzero.batches.placement import Placement, pass_cost, sizes_up_to
from hf_dpzero.estimators.finite_differences import DIFFERENCES
from hf_dpzero.perturbation.directions import DISTRIBUTIONS
from scripts.benchmarks.shapes import PUBLISHED, SHAPES, build_config, parameters_of

SMOOTHING, LEARNING_RATE, CLIP = 1e-3, 1e-6, 50.0
"""DPZero's settings for RoBERTa-large (Zhang et al. 2024); they do not change what a step costs."""
GRADIENT_CLIP = 1.0
"""L2 bound on an example's gradient for dp-adamw."""
MOST_ROWS = 64
"""Of a pass, where nothing is said: `microbatch_size` of a run with memory enough."""

CHOICES: dict[str, tuple[str, ...]] = {
    "method": ("dpzero", "mezo", "reference", "dp-adamw"),
    "direction": tuple(DISTRIBUTIONS),
    "differences": DIFFERENCES,
    "dtype": ("float32", "bfloat16", "float16"),
    "strategy": ("auto", "whole_model", "layerwise"),
    "per_example_gradients": ("dense", "ghost"),
}
"""Options that take one of a few words."""
PHASES = ("inference", "step", "reference", "dp-adamw")
"""What memory is measured of, each in a process of its own."""


@dataclass(frozen=True, kw_only=True)
class StepBench:
    """What `python -m scripts.benchmarks step` measures; every field is an option of the command.

    Attributes:
      shape: key of `SHAPES`, as a two-class sequence classifier.
      method: `dpzero`; `mezo` (no clip, no noise); `reference` (only the published loop);
        `dp-adamw` (per-example gradients, clipped, summed, noised, AdamW).
      direction: distribution of the directions.
      dtype: of the weights, which are created in it.
      batch_size: rows that a Poisson batch is expected to have; all of them with `one_batch`.
      seq_length: tokens of each row, without padding.
      num_directions: K; the yardstick is then 2K forward passes.
      differences: `forward` (K + 1 passes) is timed beside `central` (2K) in the same rounds.
      repeats: timed rounds, after one untimed.
      trainable: regular expression of the parameters that train; None for all.
      device: torch device.
      strategy: how the weights are perturbed (see `FiniteDifferences`).
      microbatch_size: rows of a forward pass, at most; None for the whole batch. The passes of a private
        step are those of the trainer (`batches.placement`), whose default is 64.
      lora_rank: train LoRA adapters (float32) of this rank, where PEFT puts them by default, with the
        head, in place of the model; 0 for none.
      load_in_4bit: the model's linear layers in bitsandbytes' NF4, which compute in `dtype`; needs
        `lora_rank`.
      one_batch: the step evaluates one microbatch of `batch_size` rows, drawn once, in place of what a
        private run evaluates: a Poisson batch for every round, in fixed shapes filled up with blanks.
        Always so for methods without privacy and for dp-adamw.
      per_example_gradients: how dp-adamw clips: dense or ghost.
      skip_reference: leave the published loop out.
      memory: measure peak memory as well, in a fresh process for each phase.
    """

    shape: str = "roberta-base"
    method: str = "dpzero"
    direction: str = "rademacher"
    dtype: str = "float32"
    batch_size: int = 16
    seq_length: int = 64
    num_directions: int = 1
    differences: str = "central"
    repeats: int = 9
    trainable: str | None = None
    device: str = "cpu"
    strategy: str = "auto"
    microbatch_size: int | None = None
    per_example_gradients: str = "dense"
    lora_rank: int = 0
    load_in_4bit: bool = False
    skip_reference: bool = False
    one_batch: bool = False
    memory: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_length", "num_directions", "repeats", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1.")
        _check_length(self.shape, self.seq_length)
        _check_together(self)

    @property
    def own_phase(self) -> str:
        """The memory phase, and the kind of work, that `method` stands for."""
        return {"reference": "reference", "dp-adamw": "dp-adamw"}.get(self.method, "step")

    @property
    def fixed_shapes(self) -> bool:
        """Whether each round evaluates a Poisson batch in fixed shapes, as a private run does."""
        return self.method == "dpzero" and not self.one_batch

    @property
    def placement(self) -> Placement:
        """The passes of a private step, all of whose rows have one width."""
        low = self.load_in_4bit or self.dtype != "float32"
        cost = pass_cost(torch.device(self.device).type, parameters_of(self.shape), low)
        sizes = sizes_up_to(self.microbatch_size or MOST_ROWS)
        return Placement(float(self.batch_size), sizes, {self.seq_length: 1.0}, cost)

    @property
    def passes(self) -> float:
        """Forward passes that a step is expected to have for each sign of a direction."""
        return self.placement.expected_passes() if self.fixed_shapes else 1.0

    @property
    def with_reference(self) -> bool:
        """Whether the published loop runs beside the method."""
        return self.method == "reference" or not self.skip_reference


def _check_length(shape: str, seq_length: int) -> None:
    if shape not in SHAPES:
        raise ValueError(f"shape={shape!r} is unknown; use one of {', '.join(PUBLISHED)}.")
    config = build_config(shape)
    padding = config.pad_token_id + 1 if config.model_type == "roberta" else 0  # spent on padding
    limit = config.max_position_embeddings - padding
    if seq_length > limit:
        raise ValueError(
            f"seq_length={seq_length} is more than {shape} has positions for: use at most {limit}."
        )


def _check_together(bench: StepBench) -> None:
    """Refuses options that contradict each other: a number would not mean what it says."""
    first_order = bench.method == "dp-adamw"
    refusals = [
        (bench.skip_reference and bench.method == "reference",
         "skip_reference with method=reference: nothing would be left to measure."),
        (first_order and bench.dtype == "float16",
         "dtype=float16 with method=dp-adamw: float16 gradients overflow without loss scaling, "
         "which clipping does not commute with; use float32 or bfloat16."),
        (first_order and bench.num_directions > 1,
         f"num_directions={bench.num_directions} with method=dp-adamw: it has no directions."),
        (bench.differences == "forward" and bench.num_directions == 1,
         "differences=forward with num_directions=1: K + 1 passes are 2 K."),
        (first_order and bench.strategy != "auto",
         f"strategy={bench.strategy} with method=dp-adamw: it perturbs nothing."),
        (bench.load_in_4bit and not bench.lora_rank,
         "load_in_4bit without lora_rank: packed weights cannot be trained; set lora_rank=8, say."),
        (bench.lora_rank < 0, f"lora_rank={bench.lora_rank}: it must be at least 0."),
        (not first_order and bench.per_example_gradients != "dense",
         f"per_example_gradients={bench.per_example_gradients} with method={bench.method}: it takes "
         "no gradients."),
        (not first_order and not bench.fixed_shapes and bench.microbatch_size is not None,
         f"microbatch_size={bench.microbatch_size} with method={bench.method}: only dp-adamw and a "
         "private dpzero step (without one_batch) split their batch."),
    ]  # fmt: skip
    for wrong, message in refusals:
        if wrong:
            raise ValueError(message)
