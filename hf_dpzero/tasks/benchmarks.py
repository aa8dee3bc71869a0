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

_FIVE_FOLD = ("very negative", "negative", "neutral", "positive", "very positive")
_GLUE = HubSource("nyu-mll/glue", config="rte")


def _prompts(
    masked: str, causal: str, words: tuple[str, ...], sources: tuple[str, str], **cut: str
) -> dict[str, Prompt]:
    """A masked language model's prompt and a decoder's, with the same words and `passage`."""
    own = {"masked_lm": (masked, sources[0]), "causal_lm": (causal, sources[1])}
    return {
        kind: Prompt(template=template, label_words=words, source=source, **cut)
        for kind, (template, source) in own.items()
    }


def _inference(
    name: str,
    source: HubSource,
    labels: tuple[str, ...] = ("entailment", "neutral", "contradiction"),
    words: tuple[str, ...] = ("Yes", "Maybe", "No"),
    written_by: str = OURS,
    drop_unlabelled: bool = False,
) -> TaskDescription:
    """Does the premise entail the hypothesis?"""
    question = 'Does this mean that "{hypothesis}" is true?'
    answers = f"{', '.join(words[:-1])} or {words[-1]}?"
    prompts = _prompts(
        "{premise:no_stop}? {mask}, {hypothesis:lower_first}",
        f"{{premise}}\n{question} {answers}\n{{answer}}",
        words,
        (LM_BFF, written_by),
        passage="premise",
    )
    pair = {"premise": ("premise", "sentence1"), "hypothesis": ("hypothesis", "sentence2")}
    return TaskDescription(
        name=name,
        source=source,
        fields=pair,
        label_names=labels,
        drop_unlabelled=drop_unlabelled,
        prompts=prompts,
    )


def _sentiment(
    name: str, source: HubSource, written_by: str, labels: tuple[str, ...], words: tuple[str, ...]
) -> TaskDescription:
    sources, fields = (LM_BFF, written_by), {"sentence": ("sentence", "text")}
    prompts = _prompts("{sentence} It was {mask}.", "{sentence} It was {answer}", words, sources)
    return TaskDescription(
        name=name, source=source, fields=fields, label_names=labels, prompts=prompts
    )


def _question_prompt(template: str, passage: str) -> dict[str, Prompt]:
    return {"causal_lm": Prompt(template=template, passage=passage, source=MEZO)}


BENCHMARKS = {
    task.name: task
    for task in (
        _sentiment(
            *("sst2", HubSource("stanfordnlp/sst2"), MEZO, ("negative", "positive")),
            ("terrible", "great"),
        ),
        _sentiment(
            *("sst5", HubSource("SetFit/sst5"), OURS, _FIVE_FOLD),
            ("terrible", "bad", "okay", "good", "great"),
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
        _inference("rte", _GLUE, ("entailment", "not_entailment"), ("Yes", "No"), MEZO),
        _inference("snli", HubSource("stanfordnlp/snli"), drop_unlabelled=True),
        _inference("mnli", HubSource(_GLUE.name, "mnli", validation="validation_matched")),
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
                passage="passage",
            ),
        ),
        TaskDescription(
            name="squad",
            source=HubSource("rajpurkar/squad"),
            fields={"title": ("title",), "context": ("context",), "question": ("question",)},
            optional_fields=("title",),
            answer_columns=("answers",),
            metric="squad",
            prompts=_question_prompt(
                "Title: {title}\nContext: {context}\nQuestion: {question}\nAnswer: {answer}",
                "context",
            ),
        ),
        TaskDescription(
            name="drop",
            source=HubSource("ucinlp/drop"),
            fields={"passage": ("passage",), "question": ("question",)},
            answer_columns=("answers_spans", "answers"),
            metric="drop",
            prompts=_question_prompt(
                "Passage: {passage}\nQuestion: {question}\nAnswer: {answer}", "passage"
            ),
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
