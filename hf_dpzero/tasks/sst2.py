"""SST-2: is a snippet of a film review negative or positive?"""

from __future__ import annotations

import dataclasses

from hf_dpzero.recipe_arguments import DataArguments
from hf_dpzero.tasks import text_classification
from hf_dpzero.tasks.base import Task

HUB_NAME = "stanfordnlp/sst2"
LABEL_NAMES = ("negative", "positive")


def build(data: DataArguments) -> Task:
    """SST-2 from the Hub, or from `train_file` and `validation_file` with sentence and label.

    Raises:
      ValueError, OSError: as `text_classification.build`.
    """
    columns = dataclasses.replace(data, text_column=data.text_column or "sentence")
    return text_classification.classification_task(
        columns, "sst2", hub_name=HUB_NAME, label_names=LABEL_NAMES
    )
