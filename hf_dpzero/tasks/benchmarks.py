"""The paper's classification tasks (DPZero, Zhang et al. 2024, Table 2): one row of a table each.

SST-2, SST-5 (sentiment), TREC (kind of question), RTE, SNLI and MNLI (does a premise entail a
hypothesis?), from the Hub or from local files with the same columns.
"""

from __future__ import annotations

from hf_dpzero.recipe_arguments import DataArguments
from hf_dpzero.tasks import text_classification
from hf_dpzero.tasks.base import HubSource, Task
from hf_dpzero.tasks.text_classification import KnownLabels

_INFERENCE = ("entailment", "neutral", "contradiction")
_PAIR = (("premise", "hypothesis"), ("sentence1", "sentence2"))

BENCHMARKS = {
    "sst2": KnownLabels(
        source=HubSource("stanfordnlp/sst2"),
        label_names=("negative", "positive"),
        text_columns=(("sentence",), ("text",)),
    ),
    "sst5": KnownLabels(
        source=HubSource("SetFit/sst5"),
        label_names=("very negative", "negative", "neutral", "positive", "very positive"),
        text_columns=(("sentence",), ("text",)),
    ),
    "trec": KnownLabels(
        source=HubSource("CogComp/trec", revision="refs/convert/parquet"),  # main is a script
        label_names=("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
        text_columns=(("text",),),
        label_columns=("coarse_label", "label"),
    ),
    "rte": KnownLabels(
        source=HubSource("nyu-mll/glue", config="rte"),
        label_names=("entailment", "not_entailment"),
        text_columns=_PAIR,
    ),
    "snli": KnownLabels(
        source=HubSource("stanfordnlp/snli"),
        label_names=_INFERENCE,
        text_columns=_PAIR,
        drop_unlabelled=True,
    ),
    "mnli": KnownLabels(
        source=HubSource("nyu-mll/glue", config="mnli", validation="validation_matched"),
        label_names=_INFERENCE,
        text_columns=_PAIR,
    ),
}
"""Task name -> where its rows are, what the columns are called, and its labels in order."""


def build(data: DataArguments) -> Task:
    """The task `data.task` from the Hub, or from `train_file` and `validation_file`.

    Files have the columns of one of the task's namings (sentence or text; premise and hypothesis,
    or sentence1 and sentence2) and "label", unless `text_column`, `text_pair_column` or
    `label_column` say otherwise.

    Raises:
      ValueError, OSError: as `text_classification.build`.
    """
    return text_classification.classification_task(data, data.task, BENCHMARKS[data.task])
