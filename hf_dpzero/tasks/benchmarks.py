"""The paper's tasks (DPZero, Zhang et al. 2024, Tables 2, 4 and 5): a description each.

Classification: SST-2, SST-5 (sentiment), TREC (kind of question), RTE, SNLI and MNLI (does a premise
entail a hypothesis?), BoolQ (does a passage say yes?). Generated answers: SQuAD and DROP. Rows come
from the Hub or from local files with the same columns.

The prompts are those that the paper used: for masked language models LM-BFF's (Gao et al. 2021,
arXiv:2012.15723, Table 1 and Appendix), for decoders MeZO's (Malladi et al. 2023, arXiv:2305.17333,
Appendix E). The prompts for decoders on SST-5, TREC, SNLI and MNLI are ours.
"""

from __future__ import annotations

from hf_dpzero.tasks import text_classification
from hf_dpzero.tasks.arguments import DataArguments
from hf_dpzero.tasks.description import Prompt, TaskDescription
from hf_dpzero.tasks.prompted import PromptTask
from hf_dpzero.tasks.prompted_generation import prompted_generation
from hf_dpzero.tasks.rows import HubSource
from hf_dpzero.tasks.task import Task

LM_BFF = "Gao et al. 2021 (LM-BFF), arXiv:2012.15723"
MEZO = "Malladi et al. 2023 (MeZO), arXiv:2305.17333, Appendix E"
OURS = "this project"

_SENTENCE = {"sentence": ("sentence", "text")}
_PAIR = {"premise": ("premise", "sentence1"), "hypothesis": ("hypothesis", "sentence2")}

_INFERENCE = ("entailment", "neutral", "contradiction")
_FIVE_FOLD = ("very negative", "negative", "neutral", "positive", "very positive")


def _prompts(
    masked: str,
    causal: str,
    words: tuple[str, ...],
    sources: tuple[str, str],
    passage: str | None = None,
) -> dict[str, Prompt]:
    """A masked language model's prompt and a decoder's, with the same words."""
    return {
        kind: Prompt(template=template, label_words=words, passage=passage, source=source)
        for kind, template, source in zip(
            ("masked_lm", "causal_lm"), (masked, causal), sources, strict=True
        )
    }


def _inference_prompts(words: tuple[str, ...], answers: str, source: str) -> dict[str, Prompt]:
    """Does the premise entail the hypothesis? `answers` offers a decoder the words."""
    return _prompts(
        "{premise:no_stop}? {mask}, {hypothesis:lower_first}",
        f'{{premise}}\nDoes this mean that "{{hypothesis}}" is true? {answers}\n{{answer}}',
        words,
        (LM_BFF, source),
        "premise",
    )


def _sentiment_prompts(words: tuple[str, ...], source: str) -> dict[str, Prompt]:
    return _prompts(
        "{sentence} It was {mask}.", "{sentence} It was {answer}", words, (LM_BFF, source)
    )


BENCHMARKS = {
    task.name: task
    for task in (
        TaskDescription(
            name="sst2",
            source=HubSource("stanfordnlp/sst2"),
            fields=_SENTENCE,
            label_names=("negative", "positive"),
            prompts=_sentiment_prompts(("terrible", "great"), MEZO),
        ),
        TaskDescription(
            name="sst5",
            source=HubSource("SetFit/sst5"),
            fields=_SENTENCE,
            label_names=_FIVE_FOLD,
            prompts=_sentiment_prompts(("terrible", "bad", "okay", "good", "great"), OURS),
        ),
        TaskDescription(
            name="trec",
            source=HubSource("CogComp/trec", revision="refs/convert/parquet"),  # main is a script
            fields={"text": ("text",)},
            label_names=("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
            label_columns=("coarse_label", "label"),
            prompts=_prompts(
                "{mask}: {text}",
                "Question: {text}\nKind of answer: {answer}",
                ("Expression", "Entity", "Description", "Human", "Location", "Number"),
                (LM_BFF, OURS),
            ),
        ),
        TaskDescription(
            name="rte",
            source=HubSource("nyu-mll/glue", config="rte"),
            fields=_PAIR,
            label_names=("entailment", "not_entailment"),
            prompts=_inference_prompts(("Yes", "No"), "Yes or No?", MEZO),
        ),
        TaskDescription(
            name="snli",
            source=HubSource("stanfordnlp/snli"),
            fields=_PAIR,
            label_names=_INFERENCE,
            drop_unlabelled=True,
            prompts=_inference_prompts(("Yes", "Maybe", "No"), "Yes, Maybe or No?", OURS),
        ),
        TaskDescription(
            name="mnli",
            source=HubSource("nyu-mll/glue", config="mnli", validation="validation_matched"),
            fields=_PAIR,
            label_names=_INFERENCE,
            prompts=_inference_prompts(("Yes", "Maybe", "No"), "Yes, Maybe or No?", OURS),
        ),
        TaskDescription(
            name="boolq",
            source=HubSource("google/boolq"),
            fields={"passage": ("passage",), "question": ("question",)},
            label_names=("no", "yes"),
            label_columns=("answer", "label"),
            prompts=_prompts(
                "{passage} {question:no_question_mark:upper_first}? {mask}.",
                "{passage} {question:no_question_mark:upper_first}?\n{answer}",
                ("No", "Yes"),
                (OURS, MEZO),
                "passage",
            ),
        ),
        TaskDescription(
            name="squad",
            source=HubSource("rajpurkar/squad"),
            fields={"title": ("title",), "context": ("context",), "question": ("question",)},
            optional_fields=("title",),
            answer_columns=("answers",),
            metric="squad",
            prompts={
                "causal_lm": Prompt(
                    template="Title: {title}\nContext: {context}\n"
                    "Question: {question}\nAnswer: {answer}",
                    passage="context",
                    source=MEZO,
                ),
            },
        ),
        TaskDescription(
            name="drop",
            source=HubSource("ucinlp/drop"),
            fields={"passage": ("passage",), "question": ("question",)},
            answer_columns=("answers_spans", "answers"),
            metric="drop",
            prompts={
                "causal_lm": Prompt(
                    template="Passage: {passage}\nQuestion: {question}\nAnswer: {answer}",
                    passage="passage",
                    source=MEZO,
                ),
            },
        ),
    )
}
"""Task name -> its description."""


def build_described(data: DataArguments, description: TaskDescription) -> Task | PromptTask:
    """The rows of a description.

    Args:
      data: the recipe's settings.
      description: of the task.

    Returns:
      The task, for a classification head or as prompts.

    Raises:
      ValueError, OSError: as `text_classification.build` and `prompted_generation`.
    """
    if description.generates:
        return prompted_generation(data, description)
    return text_classification.classification_task(data, description.name, description)
