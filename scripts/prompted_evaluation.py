"""Evaluation of a recipe's rows by length, against the order of the data and losses of sorted rows.

Times all by turns in one process, in CPU seconds (medians), which other work on the machine hardly
moves; says how far apart the predictions are.

  python -m scripts.prompted_evaluation recipes/sst2/smollm2-dpzero.yaml --max_eval_samples 128
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from hf_dpzero.objectives.prompted import Answers
from hf_dpzero.recipes.build import build_trainer
from hf_dpzero.recipes.recipe import load_recipe, parse_overrides

ROUNDS = 3


def main() -> None:
    """Prints a line for each way."""
    recipe, *settings = sys.argv[1:]
    quiet = {"disable_tqdm": "true", "report_to": "none", "use_cpu": "true"}
    trainer = build_trainer(load_recipe(recipe, {**quiet, **parse_overrides(settings)}))
    rows, objective = trainer.eval_dataset, trainer.per_example_loss
    lengths, batch = list(map(len, rows["input_ids"][:])), trainer.args.eval_batch_size
    order = sorted(range(len(rows)), key=lambda row: -lengths[row])
    assert objective is not None

    def predicted(in_order: bool) -> np.ndarray:
        # Which groups see batches' losses keeps them in order.
        trainer.args.include_for_metrics = ["loss"] if in_order else []
        return np.asarray(trainer.predict(rows).predictions)

    def bare(*functions: Callable[..., object]) -> None:
        for start in range(0, len(rows), batch):
            made = trainer.data_collator([rows[i] for i in order[start : start + batch]])
            with torch.no_grad():
                for function in functions:
                    function(trainer.model, made)

    torch.testing.assert_close(predicted(True), predicted(False), rtol=1e-4, atol=1e-3)
    ways: dict[str, Callable[[], object]] = {
        "in the order of the data": lambda: predicted(True),
        "by length": lambda: predicted(False),
        "losses of sorted rows alone": lambda: bare(objective),
    }
    if isinstance(objective, Answers):  # which an evaluation has from one pass over the prompt
        ways["losses, then answers, of sorted rows"] = lambda: bare(objective, objective.predict)
    seconds = {name: list[float]() for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    print(f"{len(rows)} rows of {min(lengths)} to {max(lengths)} tokens, {batch} in a batch")
    for name, found in seconds.items():
        print(f"{statistics.median(found):8.2f} s {name}")


if __name__ == "__main__":
    main()
