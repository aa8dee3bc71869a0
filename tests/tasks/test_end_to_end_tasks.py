"""The paper's tasks on real rows, from the command line to the metrics, with tiny models.

For each task and kind of prompt, 200 rows are trained on for a few private steps and 200 (99 of DROP)
evaluated; every figure is held against an independent computation: prompts written here by hand,
whole forward passes of single rows, and a decoder that knows the answer from the question. A table of
all runs is written to the file that END_TO_END_LOG names, or else beside the runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import random
import re
import shutil
import string
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_language_models import LABEL_WORDS, seeded

from hf_dpzero.cli import main
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.objectives.losses import IGNORE_INDEX, base_model

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="needs the real rows of ../shared/data"),
]

ROWS = 200
POSITIONS = 1024
NEW_TOKENS = 12
STEPS = 3
Row = dict[str, Any]


# ---------------------------------------------------------------- the tasks, written down by hand


@dataclass(frozen=True)
class Facts:
    """What the tests know of a task by themselves.

    Attributes:
      length: max_seq_length of the run; some prompts are longer.
      causal: row -> the prompt for a decoder, up to the answer.
      masked: row -> the prompt with <mask>.
      words: in label order; () where the answer is generated.
      answer: row -> the text that is trained on.
    """

    length: int
    causal: Callable[[Row], str]
    masked: Callable[[Row], str] | None = None
    words: tuple[str, ...] = ()
    answer: Callable[[Row], str] | None = None


def _sentiment(row: Row) -> str:
    return f"{row['sentence'].strip()} It was"


def _inference(words: str) -> dict[str, Callable[[Row], str]]:
    def masked(row: Row) -> str:
        premise, hypothesis = row["premise"].strip(), row["hypothesis"].strip()
        bare = premise.rstrip(string.punctuation + " ")
        return f"{bare}? <mask>, {hypothesis[:1].lower()}{hypothesis[1:]}"

    def causal(row: Row) -> str:
        premise, hypothesis = row["premise"].strip(), row["hypothesis"].strip()
        return f'{premise}\nDoes this mean that "{hypothesis}" is true? {words}\n'

    return {"masked": masked, "causal": causal}


def _boolq(row: Row) -> str:
    question = row["question"].strip().rstrip("? ")
    return f"{row['passage'].strip()} {question[:1].upper()}{question[1:]}?"


def _squad(row: Row) -> str:
    title = f"Title: {row['title'].strip()}\n" if row.get("title") else ""
    return f"{title}Context: {row['context'].strip()}\nQuestion: {row['question'].strip()}\nAnswer:"


def _drop(row: Row) -> str:
    return f"Passage: {row['passage'].strip()}\nQuestion: {row['question'].strip()}\nAnswer:"


def _first_drop_answer(row: Row) -> str:
    found = row["answers"][0]
    return found if isinstance(found, str) else ", ".join(found)


_TREC = ("Expression", "Entity", "Description", "Human", "Location", "Number")
_THREE = ("Yes", "Maybe", "No")

TASKS = {
    "sst2": Facts(32, _sentiment, lambda r: f"{_sentiment(r)} <mask>.", ("terrible", "great")),
    "sst5": Facts(
        48,
        _sentiment,
        lambda r: f"{_sentiment(r)} <mask>.",
        ("terrible", "bad", "okay", "good", "great"),
    ),
    "trec": Facts(
        24,
        lambda r: f"Question: {r['text'].strip()}\nKind of answer:",
        lambda r: f"<mask>: {r['text'].strip()}",
        _TREC,
    ),
    "rte": Facts(128, words=("Yes", "No"), **_inference("Yes or No?")),
    "snli": Facts(48, words=_THREE, **_inference("Yes, Maybe or No?")),
    "mnli": Facts(64, words=_THREE, **_inference("Yes, Maybe or No?")),
    "boolq": Facts(
        192, lambda r: f"{_boolq(r)}\n", lambda r: f"{_boolq(r)} <mask>.", ("No", "Yes")
    ),
    "squad": Facts(256, _squad, answer=lambda r: r["answers"]["text"][0]),
    "drop": Facts(320, _drop, answer=_first_drop_answer),
}


@dataclass(frozen=True)
class Case:
    """A task, the kind of prompt, and the tiny model that it is for."""

    task: str
    prompt: str
    model: str

    def __str__(self) -> str:
        return f"{self.task}-{self.model}"

    @property
    def facts(self) -> Facts:
        return TASKS[self.task]

    @property
    def generates(self) -> bool:
        return not self.facts.words

    def text(self, row: Row) -> str:
        """The whole prompt of a row."""
        if self.prompt == "masked_lm":
            assert self.facts.masked is not None
            return self.facts.masked(row)
        return self.facts.causal(row)

    def word_ids(self, tokenizer: Any) -> list[int]:
        """The token of each label word in its place."""
        last = self.text(next(iter(rows_of(self.task).values()))[0])[-1:]
        space = "" if self.prompt == "causal_lm" and last == "\n" else " "
        words = [f"{space}{word}" for word in self.facts.words]
        found = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
        assert {len(ids) for ids in found} <= {1}
        return [ids[0] for ids in found]


CLASSIFICATIONS = [name for name, facts in TASKS.items() if facts.words]
CASES = [
    *(Case(task, "masked_lm", "roberta") for task in CLASSIFICATIONS),
    *(Case(task, "causal_lm", "opt") for task in TASKS),
    Case("squad", "causal_lm", "llama"),
]
GENERATED = [case for case in CASES if case.generates]
SCORED = [case for case in CASES if not case.generates]


# ---------------------------------------------------------------- rows


def read_lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


_ROWS: dict[str, dict[str, list[Row]]] = {}


def rows_of(task: str) -> dict[str, list[Row]]:
    """ROWS rows to train on and ROWS others to evaluate on, or what a single file leaves of them."""
    if task not in _ROWS:
        draw = random.Random(task)
        found = {path.stem: read_lines(path) for path in sorted((DATA / task).glob("*.jsonl"))}
        kept = {name: [row for row in rows if _usable(task, row)] for name, rows in found.items()}
        parts = {name: draw.sample(rows, min(2 * ROWS, len(rows))) for name, rows in kept.items()}
        if len(parts) == 1:
            (rows,) = parts.values()
            parts = {"train": rows[:ROWS], "validation": rows[ROWS:]}
        _ROWS[task] = {name: rows[:ROWS] for name, rows in parts.items()}
    return _ROWS[task]


def _usable(task: str, row: Row) -> bool:
    """Prompts that fit into POSITIONS."""
    return len(TASKS[task].causal(row)) < 2200


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """A task -> train_file and validation_file."""
    folder = tmp_path_factory.mktemp("rows")
    found: dict[str, dict[str, str]] = {}
    for task in TASKS:
        (folder / task).mkdir()
        found[task] = {
            f"{name}_file": written(folder / task / f"{name}.jsonl", rows)
            for name, rows in rows_of(task).items()
        }
        assert set(found[task]) == {"train_file", "validation_file"}
    return found


def written(path: Path, rows: Sequence[Row]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# ---------------------------------------------------------------- models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """roberta, opt, llama: tiny ones with a tokenizer that has read part of the rows."""
    folder = tmp_path_factory.mktemp("models")
    vocabulary, merges = byte_level_bpe()
    made = {"roberta": roberta, "opt": opt, "llama": llama}
    return {name: make(folder / name, vocabulary, merges) for name, make in made.items()}


Vocabulary, Merges = dict[str, int], list[tuple[str, str]]


def byte_level_bpe(size: int = 3000) -> tuple[Vocabulary, Merges]:
    """Trained on the tasks' training prompts, with RoBERTa's special tokens in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    often = [text for word in LABEL_WORDS for text in (word, f" {word}")] * 300
    texts = [facts.causal(row) for task, facts in TASKS.items() for row in rows_of(task)["train"]]
    tokenizer.train_from_iterator([*texts, *often], trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    return dict(trained["vocab"]), [tuple(merge) for merge in trained["merges"]]


_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
_SPREAD = 0.1  # of fresh weights: predictions differ from row to row, losses stay near log L


def roberta(folder: Path, vocabulary: Vocabulary, merges: Merges) -> Path:
    from transformers import AddedToken, RobertaConfig, RobertaForMaskedLM, RobertaTokenizer

    tokenizer = RobertaTokenizer(
        vocab={**vocabulary, "<mask>": len(vocabulary)},
        merges=merges,
        mask_token=AddedToken("<mask>", lstrip=True, special=True),
        model_max_length=POSITIONS,
    )
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        intermediate_size=64,
        max_position_embeddings=POSITIONS + 2,
        type_vocab_size=1,
        initializer_range=_SPREAD,
        **_SIZES,
        **_IDS,
    )
    return saved(folder, seeded(lambda: RobertaForMaskedLM(config), 0), tokenizer)


def opt(folder: Path, vocabulary: Vocabulary, merges: Merges) -> Path:
    from transformers import GPT2Tokenizer, OPTConfig, OPTForCausalLM

    tokenizer = GPT2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        bos_token="</s>",
        eos_token="</s>",
        unk_token="</s>",
        pad_token="<pad>",
        add_bos_token=True,
    )
    config = OPTConfig(
        vocab_size=len(tokenizer),
        word_embed_proj_dim=_SIZES["hidden_size"],
        ffn_dim=64,
        max_position_embeddings=POSITIONS,
        init_std=_SPREAD,
        **_SIZES,
        **{**_IDS, "bos_token_id": 2},
    )
    return saved(folder, seeded(lambda: OPTForCausalLM(config), 0), tokenizer)


def llama(folder: Path, vocabulary: Vocabulary, merges: Merges) -> Path:
    """As Llama 3: a token before the text, none to pad with; one key-value head for two."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        intermediate_size=64,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        initializer_range=_SPREAD,
        tie_word_embeddings=False,
        **_SIZES,
        **{**_IDS, "pad_token_id": None},
    )
    return saved(folder, seeded(lambda: LlamaForCausalLM(config), 0), tokenizer)


def saved(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def model_of(folder: Path, prompt: str) -> Any:
    import transformers

    kind = {"masked_lm": "AutoModelForMaskedLM", "causal_lm": "AutoModelForCausalLM"}[prompt]
    return getattr(transformers, kind).from_pretrained(folder).eval()


# ---------------------------------------------------------------- running commands


def call(*words: Any) -> str:
    """What a command prints; it must succeed."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        status = main.main([str(word) for word in words])
    assert status == 0, error.getvalue()[-2000:]
    return out.getvalue()


def evaluate(recipe: Path, *words: Any) -> dict[str, Any]:
    """The figures of `hf-dpzero evaluate`."""
    out = call("evaluate", recipe, "--json", *words)
    return json.loads(out[out.index("{") :])


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def said(*names: str) -> Iterator[list[str]]:
    """The messages of the package's loggers."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield found
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextlib.contextmanager
def clocked() -> Iterator[Counter[str]]:
    """Seconds in tokenisation, training and evaluation."""
    from hf_dpzero.tasks.prompted import PromptTask
    from hf_dpzero.training.prediction import PredictingTrainer
    from hf_dpzero.training.trainer import DPZeroTrainer

    seconds: Counter[str] = Counter()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **settings)
            finally:
                seconds[name] += time.perf_counter() - start  # type: ignore[assignment]

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, method, name in (
            (PromptTask, "tokenize", "tokenise"),
            (DPZeroTrainer, "train", "train"),
            (PredictingTrainer, "evaluate", "evaluate"),
        ):
            patch.setattr(owner, method, timed(name, getattr(owner, method)))
        start = time.perf_counter()
        yield seconds
        seconds["whole"] += time.perf_counter() - start  # type: ignore[assignment]


@dataclass
class Run:
    """A finished run.

    Attributes:
      recipe: its file.
      out: its folder.
      seconds: by phase.
      messages: what was said about cut prompts.
      report: what `train` printed.
    """

    case: Case
    recipe: Path
    out: Path
    seconds: Counter[str]
    messages: list[str]
    report: str

    @property
    def results(self) -> dict[str, Any]:
        return read(self.out / "all_results.json")

    def cut(self, split: str) -> int:
        """How many prompts were cut, as the log says."""
        found = [re.match(rf"(\d+) of \d+ {split} prompts have more", m) for m in self.messages]
        return sum(int(match[1]) for match in found if match)


def make_recipe(folder: Path, case: Case, models: Any, files: Any, **settings: Any) -> Path:
    """A recipe for a few private steps."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "model_name_or_path": str(models[case.model]),
        "task": case.task,
        "prompt": case.prompt,
        **files[case.task],
        "max_seq_length": case.facts.length,
        "max_new_tokens": NEW_TOKENS,
        "target_epsilon": 2.0,
        "target_delta": 1e-5,
        "expected_batch_size": 16,
        "max_steps": STEPS,
        "clip": 50.0,
        "learning_rate": 1e-4,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 32,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "output_dir": str(folder / "out"),
        **settings,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run_of(
    tmp_path_factory: pytest.TempPathFactory, models: Any, files: Any
) -> Iterator[Callable[[Case], Run]]:
    """A case -> its finished run, made once."""
    folder, runs = tmp_path_factory.mktemp("runs"), dict[Case, Run]()

    def find(case: Case) -> Run:
        if case not in runs:
            recipe = make_recipe(folder / str(case), case, models, files)
            with clocked() as seconds, said("hf_dpzero.tasks.prompted") as messages:
                report = call("train", recipe)
            runs[case] = Run(case, recipe, recipe.parent / "out", seconds, messages, report)
        return runs[case]

    yield find
    log = Path(os.environ.get("END_TO_END_LOG") or folder / "table.md")
    log.write_text(table(list(runs.values())), encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rows of the tests are not kept in the user's cache."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


def table(runs: Sequence[Run]) -> str:
    """Rows, cut prompts, seconds by phase, figures before and after."""
    names = ("tokenise", "train", "evaluate", "whole")
    head = ["task", "model", "rows", "cut", *(f"{name} s" for name in names)]
    lines = [[*head, "zero-shot", "loss", "trained", "loss"], ["---"] * (len(head) + 4)]
    for run in runs:
        results, metric = run.results, "f1" if run.case.generates else "accuracy"
        rows = rows_of(run.case.task)
        figures = [results[f"{p}_{m}"] for p in ("zero_shot", "eval") for m in (metric, "loss")]
        lines.append(
            [
                run.case.task,
                run.case.model,
                "/".join(str(len(rows[name])) for name in ("train", "validation")),
                "/".join(str(run.cut(name)) for name in ("train", "validation")),
                *(f"{run.seconds[name]:.2f}" for name in names),
                *(f"{figure:.4f}" for figure in figures),
            ]
        )
    total = sum(run.seconds["whole"] for run in runs)
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in lines)
        + f"\n\n{total:.0f} s of training runs\n"
    )


# ---------------------------------------------------------------- every task, every prompt


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_leaves_figures_and_a_report(case, run_of):
    run = run_of(case)
    report, results = read(run.out / "privacy_report.json"), run.results
    assert report["private"] is True
    assert 1.5 < report["epsilon"] <= 2.0
    assert report["steps"] == STEPS
    assert results["train_samples"] == ROWS
    names = ("f1", "exact_match") if case.generates else ("accuracy",)
    for name in (f"{part}_{n}" for part in ("zero_shot", "eval") for n in names):
        assert 0.0 <= results[name] <= 1.0
    assert "NOT PRIVATE" not in run.report
    assert len(Trajectory.load(run.out / "trajectory.safetensors").releases) == STEPS


@pytest.mark.parametrize("case", SCORED, ids=str)
def test_an_untrained_model_is_right_as_often_as_by_chance(case, run_of):
    """A guess that knows nothing of the label is right as often as a mixture of the labels' shares."""
    results, rows = run_of(case).results, rows_of(case.task)["validation"]
    shares = [count / len(rows) for count in Counter(int(row["label"]) for row in rows).values()]
    deviation = 4 * math.sqrt(0.25 / len(rows))
    assert min(shares) - deviation < results["zero_shot_accuracy"] < max(shares) + deviation
    assert results["zero_shot_loss"] == pytest.approx(math.log(len(case.facts.words)), abs=0.6)


@pytest.mark.parametrize("case", GENERATED, ids=str)
def test_an_untrained_model_answers_nothing(case, run_of, models):
    """Its loss is about that of a uniform guess over the vocabulary."""
    results = run_of(case).results
    assert results["zero_shot_f1"] < 0.1
    vocabulary = len(tokenizer_of(models[case.model]))
    assert results["zero_shot_loss"] == pytest.approx(math.log(vocabulary), abs=1.5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prompts_that_are_too_long_are_counted(case, run_of, models):
    run, tokenizer = run_of(case), tokenizer_of(models[case.model])
    for split, rows in rows_of(case.task).items():
        sizes = [len(tokenizer(case.text(row).rstrip(" "))["input_ids"]) for row in rows]
        expected = sum(
            size > case.facts.length - room(case, row, tokenizer) for size, row in zip(sizes, rows)
        )
        assert 0 < expected < len(rows), f"{expected} of {len(rows)}: choose another length"
        assert run.cut(split) == expected


def room(case: Case, row: Row, tokenizer: Any) -> int:
    """Tokens that are kept free behind a prompt."""
    if case.prompt == "masked_lm":
        return 0
    if not case.generates:
        return 1
    return max(NEW_TOKENS, len(answer_tokens(case, row, tokenizer)))


def answer_tokens(case: Case, row: Row, tokenizer: Any) -> list[int]:
    assert case.facts.answer is not None
    text = f" {case.facts.answer(row).strip()}\n"
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# ---------------------------------------------------------------- the same figures, by hand

WHOLE = ("--zero_shot", "--max_seq_length", POSITIONS)


@torch.no_grad()
def scores_by_hand(case: Case, folder: Path) -> torch.Tensor:
    """Logits `[N, L]` of the label words, by one whole forward pass a row, without padding."""
    tokenizer, model = tokenizer_of(folder), model_of(folder, case.prompt)
    words, found = case.word_ids(tokenizer), []
    for row in rows_of(case.task)["validation"]:
        ids = tokenizer(case.text(row).rstrip(" "))["input_ids"]
        place = ids.index(tokenizer.mask_token_id) if case.prompt == "masked_lm" else -1
        found.append(model(torch.tensor([ids])).logits[0, place][words])
    return torch.stack(found)


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What evaluation gives to the metrics, in the order of the rows."""
    from hf_dpzero.tasks.prompted_classification import PromptedClassification

    found, metrics = [], PromptedClassification.metrics

    def watched(task: Any, tokenizer: Any) -> Any:
        compute = metrics(task, tokenizer)

        def noted(prediction: Any) -> Any:
            found.append(prediction)
            return compute(prediction)

        return noted

    monkeypatch.setattr(PromptedClassification, "metrics", watched)
    return found


@pytest.mark.parametrize("case", SCORED, ids=str)
def test_label_words_are_scored_as_by_hand(case, run_of, models, predicted):
    """With room for all prompts: prompts, padding, positions, words, order, labels, averages."""
    run, scores = run_of(case), scores_by_hand(case, models[case.model])
    labels = torch.tensor([int(row["label"]) for row in rows_of(case.task)["validation"]])
    predicted.clear()
    with said("hf_dpzero.tasks.prompted") as messages:
        found = evaluate(run.recipe, *WHOLE)
    assert not any("validation" in message for message in messages)
    assert found["eval_samples"] == len(labels)
    assert found["privacy"].startswith("zero-shot")
    (prediction,) = predicted
    assert torch.equal(torch.as_tensor(prediction.label_ids), labels)
    torch.testing.assert_close(torch.as_tensor(prediction.predictions), scores, atol=1e-5, rtol=0)
    assert scores.std(dim=0).min() > 1e-3  # rows differ, so another order would show
    assert found["eval_accuracy"] == pytest.approx((scores.argmax(1) == labels).float().mean())
    loss = torch.nn.functional.cross_entropy(scores, labels).item()
    assert found["eval_loss"] == pytest.approx(loss, abs=2e-5)


@torch.no_grad()
def answer_loss_by_hand(case: Case, folder: Path) -> float:
    tokenizer, model = tokenizer_of(folder), model_of(folder, case.prompt)
    losses = []
    for row in rows_of(case.task)["validation"]:
        prompt = tokenizer(case.text(row))["input_ids"]
        answer = answer_tokens(case, row, tokenizer)
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(answer)).item())
    return sum(losses) / len(losses)


@pytest.fixture
def informed(monkeypatch: pytest.MonkeyPatch, models: Any) -> Callable[[Case], float]:
    """(case) -> puts a decoder in place that knows the gold answer to half of the questions.

    It reads question and passage from the prompt's tokens, and says nothing to the other half. The
    share of rows that it knows is returned.
    """

    def install(case: Case) -> float:
        from hf_dpzero.objectives import prompted

        tokenizer, rows = tokenizer_of(models[case.model]), rows_of(case.task)["validation"]
        half = random.Random(0).sample(rows, len(rows) // 2)
        known = {key(case.text(row)): answer_tokens(case, row, tokenizer)[:-1] for row in half}
        everyone = [key(case.text(row)) for row in rows]

        def greedy(model: Any, ids: Any, mask: Any, *, max_new_tokens: int, **_: Any) -> Any:
            found = torch.full((len(ids), max_new_tokens), IGNORE_INDEX)
            for target, row, kept in zip(found, ids, mask):
                text = tokenizer.decode(row[kept.bool()], skip_special_tokens=True)
                answer = known.get(key(text), [])
                target[: len(answer)] = torch.tensor(answer, dtype=torch.int64)
            return found

        monkeypatch.setattr(prompted, "greedy", greedy)
        return sum(name in known for name in everyone) / len(everyone)

    return install


def key(prompt: str) -> tuple[str, str]:
    """The start of a prompt's passage, which is never cut, and its question."""
    passage, question = prompt.rsplit("\nQuestion: ", 1)
    return passage.strip()[:90], question


@pytest.mark.parametrize("case", GENERATED, ids=str)
def test_answers_are_scored_as_by_hand(case, run_of, models, informed):
    """The loss; and a decoder is right exactly where it knows, so rows and gold answers match."""
    run, share = run_of(case), informed(case)
    found = evaluate(run.recipe, *WHOLE, "--max_new_tokens", 60)
    assert found["eval_loss"] == pytest.approx(
        answer_loss_by_hand(case, models[case.model]), abs=2e-4
    )
    assert 0.4 < share < 0.6
    assert found["eval_exact_match"] == pytest.approx(share)
    assert found["eval_f1"] == pytest.approx(share)


@pytest.mark.parametrize("case", GENERATED[:2], ids=str)
def test_cut_prompts_keep_their_question_and_their_answer(case, run_of, informed):
    run, share = run_of(case), informed(case)
    with said("hf_dpzero.tasks.prompted") as messages:
        found = evaluate(run.recipe, "--zero_shot", "--max_new_tokens", 60)
    assert any("validation prompts have more than" in message for message in messages)
    assert found["eval_exact_match"] == pytest.approx(share)


@torch.no_grad()
def test_answers_are_decoded_greedily(run_of, models, monkeypatch, tmp_path):
    """Decoded tokens are those of whole passes over single rows."""
    from hf_dpzero.objectives.prompted import Answers

    case, rows = Case("squad", "causal_lm", "opt"), rows_of("squad")["validation"][:16]
    decoded, predict = [], Answers.predict
    monkeypatch.setattr(Answers, "predict", lambda *a: decoded.append(predict(*a)) or decoded[-1])
    few = written(tmp_path / "few.jsonl", rows)
    recipe = run_of(case).recipe
    decoded.clear()
    evaluate(recipe, *WHOLE, "--validation_file", few)
    (found,) = decoded
    tokenizer, model = tokenizer_of(models["opt"]), model_of(models["opt"], "causal_lm")
    ends = {tokenizer.eos_token_id, *tokenizer("\n", add_special_tokens=False)["input_ids"]}
    for row, tokens in zip(rows, found.tolist(), strict=True):
        ids = tokenizer(case.text(row))["input_ids"]
        expected: list[int] = []
        while len(expected) < NEW_TOKENS:
            token = int(model(torch.tensor([ids + expected])).logits[0, -1].argmax())
            if token in ends:
                break
            expected.append(token)
        assert [token for token in tokens if token >= 0] == expected


# ---------------------------------------------------------------- after training


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_trained_folder_is_evaluated_to_the_same_figures(case, run_of):
    run = run_of(case)
    found, results = evaluate(run.recipe, "--model_name_or_path", run.out), run.results
    assert "differentially private" in found["privacy"]
    assert found["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-5)
    for name in ("accuracy", "f1", "exact_match"):
        assert found.get(f"eval_{name}") == results.get(f"eval_{name}")
    assert results["eval_loss"] != results["zero_shot_loss"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_is_replayed_bit_for_bit(case, run_of, tmp_path):
    """Where the private rows are gone."""
    run, rebuilt = run_of(case), tmp_path / "rebuilt"
    words = ["--trajectory", run.out / "trajectory.safetensors", "--output_dir", rebuilt]
    gone = ["--train_file", "gone.jsonl", "--validation_file", "gone.jsonl"]
    out = call("replay", "--base", run.recipe, *words, "--expect", run.out, *gone)
    assert f"replayed {STEPS} of {STEPS} steps" in out
    assert "bit for bit" in out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_demonstrations_are_shown_and_said_to_be_not_private(case, run_of, monkeypatch):
    """Two training rows with their answers stand in front of every prompt that has room for them."""
    from hf_dpzero.tasks.prompt_encoding import PromptEncoder

    run, shown, ids = run_of(case), list[str](), PromptEncoder.ids
    monkeypatch.setattr(
        PromptEncoder, "ids", lambda self, texts: shown.extend(texts) or ids(self, texts)
    )
    few = ("--max_eval_samples", 40)
    found = evaluate(run.recipe, "--num_demonstrations", 2, *WHOLE[1:], *few)
    assert found["privacy"].startswith("NOT PRIVATE: 2 training rows")
    plain = evaluate(run.recipe, *WHOLE, *few)
    assert found["eval_loss"] != plain["eval_loss"]
    assert found["eval_samples"] == plain["eval_samples"] == 40
    examples = {finished(case, row) for row in rows_of(case.task)["train"]}
    prompts = {case.text(row) for row in rows_of(case.task)["validation"]}
    separator = " " if case.prompt == "masked_lm" else "\n\n"
    demonstrated = [text for text in shown if sum(e in text for e in examples) >= 2]
    ours = [text for text in demonstrated if any(text.endswith(p.rstrip(" ")) for p in prompts)]
    assert len(ours) >= 40
    assert all(separator in text for text in ours)


def finished(case: Case, row: Row) -> str:
    """A prompt with its answer."""
    facts = case.facts
    if case.generates:
        assert facts.answer is not None
        return f"{case.text(row)} {facts.answer(row).strip()}"
    word, text = facts.words[int(row["label"])], case.text(row)
    if case.prompt == "masked_lm":
        return text.replace("<mask>", word)
    return text + (word if text.endswith("\n") else f" {word}")


# ---------------------------------------------------------------- what must not matter

TOGETHER = [
    Case("rte", "masked_lm", "roberta"),
    Case("trec", "causal_lm", "opt"),
    Case("squad", "causal_lm", "opt"),
    Case("squad", "causal_lm", "llama"),
]
"""The kinds of batches; `several_words` makes trec's candidates out of its label words."""


def several_words(case: Case) -> dict[str, Any]:
    """Settings: for trec, label words of one to three tokens."""
    if case.task != "trec":
        return {}
    words = ["a short form", "a thing", "an account", "a person or people", "a place", "a Number"]
    return {"label_words": words}


@pytest.mark.parametrize("case", TOGETHER, ids=str)
def test_the_padded_side_does_not_matter(case, models, files, tmp_path):
    losses = {}
    for side in ("left", "right"):
        sided = {case.model: with_padding(models[case.model], tmp_path / side, side)}
        recipe = make_recipe(tmp_path / f"{side}-run", case, sided, files, **several_words(case))
        with watched_padding() as sides:
            losses[side] = evaluate(recipe, "--zero_shot", "--max_eval_samples", 64)
        assert sides == {side}
    for name, value in losses["left"].items():
        if name.startswith("eval_") and not name.endswith(("time", "second")):
            assert value == pytest.approx(losses["right"][name], abs=2e-5), name


def with_padding(model: Path, folder: Path, side: str) -> Path:
    """A copy of a checkpoint whose tokenizer asks for one side."""
    shutil.copytree(model, folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**read(settings), "padding_side": side}), encoding="utf-8")
    return folder


@contextlib.contextmanager
def watched_padding() -> Iterator[set[str]]:
    """The sides on which batches of several rows are padded."""
    from hf_dpzero.tasks import collation

    sides, padded = set(), collation.padded

    def noted(rows: Any, value: int, side: str, most: int | None = None) -> Any:
        sides.add(side)
        return padded(rows, value, side, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collation, "padded", noted)
        yield sides


FIXED = {
    "direction_key": 7,
    "insecure_noise_seed": 3,
    "sampler_key": "ab" * 32,
    "target_epsilon": None,
    "noise_multiplier": 0.5,
}


def released(out: Path) -> torch.Tensor:
    """Released values of a run, in units of loss per smoothing."""
    return torch.tensor(
        [list(r.values) for r in Trajectory.load(out / "trajectory.ledger").releases]
    )


@pytest.mark.parametrize("case", TOGETHER, ids=str)
def test_the_microbatch_does_not_matter(case, models, files, tmp_path):
    """Up to float rounding; another choice of examples releases other values."""
    values = {}
    for name, settings in {
        "alone": {"microbatch_size": 1},
        "together": {"microbatch_size": 8},
        "others": {"microbatch_size": 8, "sampler_key": "cd" * 32},
    }.items():
        folder = tmp_path / name
        changes = {**FIXED, **several_words(case), "max_eval_samples": 8, **settings}
        call("train", make_recipe(folder, case, models, files, **changes))
        values[name] = released(folder / "out")
    assert len(values["alone"]) == STEPS
    largest = values["alone"].abs().max()
    assert (values["alone"] - values["together"]).abs().max() < 1e-3 * largest
    assert (values["alone"] - values["others"]).abs().max() > 1e-2 * largest


def test_two_processes_release_what_one_does(models, files, tmp_path):
    """Bit for bit, with one example in each forward pass: squad's answers and their references."""
    case = Case("squad", "causal_lm", "opt")
    changes = {**FIXED, "microbatch_size": 1, "max_eval_samples": 16, "max_new_tokens": 4}
    changes["per_device_eval_batch_size"] = 8  # no row is evaluated twice
    single = make_recipe(tmp_path / "one", case, models, files, **changes)
    call("train", single)
    double = make_recipe(tmp_path / "two", case, models, files, **changes, ddp_backend="gloo")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = tmp_path / "run.py"
    script.write_text(
        "import os, sys\nfrom hf_dpzero import cli\n"
        f"status = cli.main(['train', {str(double)!r}])\n"
        "sys.stdout.flush(), sys.stderr.flush()\n"
        "os._exit(status)  # some builds' gloo threads abort an ordinary interpreter exit\n"
    )
    done = subprocess.run(
        [*launcher, "--nproc_per_node=2", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = single.parent / "out", double.parent / "out"
    assert torch.equal(released(one), released(two))
    for name in ("zero_shot_loss", "eval_loss", "eval_f1", "eval_exact_match"):
        found = [read(out / "all_results.json")[name] for out in (one, two)]
        assert found[0] == pytest.approx(found[1], rel=1e-5), name


# ---------------------------------------------------------------- other ways to train

SMALL = {"max_eval_samples": 24, "max_train_samples": 64, "expected_batch_size": 8}
WAYS: dict[str, tuple[Case, dict[str, Any]]] = {
    "accuracy": (
        Case("trec", "causal_lm", "opt"),
        {"objective": "accuracy", "smoothing": 1e-2, "clip": 50.0},
    ),
    "accuracy of several words": (
        Case("trec", "causal_lm", "opt"),
        {"objective": "accuracy", "smoothing": 1e-2, **several_words(Case("trec", "", ""))},
    ),
    "accuracy at a mask": (
        Case("sst2", "masked_lm", "roberta"),
        {"objective": "accuracy", "smoothing": 1e-2, "clip": 50.0},
    ),
    "f1": (Case("squad", "causal_lm", "opt"), {"objective": "f1", "smoothing": 1e-2}),
    "f1 of drop": (Case("drop", "causal_lm", "opt"), {"objective": "f1", "smoothing": 1e-2}),
    "lora": (Case("sst2", "causal_lm", "opt"), {"peft_method": "lora"}),
    "bitfit": (Case("sst2", "causal_lm", "opt"), {"peft_method": "bitfit"}),
    "prefix": (Case("sst2", "causal_lm", "opt"), {"peft_method": "prefix"}),
    "lora, answers": (Case("squad", "causal_lm", "llama"), {"peft_method": "lora"}),
    "prefix, answers": (Case("squad", "causal_lm", "opt"), {"peft_method": "prefix"}),
    "lora at a mask": (Case("rte", "masked_lm", "roberta"), {"peft_method": "lora"}),
    "prefix at a mask": (Case("rte", "masked_lm", "roberta"), {"peft_method": "prefix"}),
    "dp-adamw, lora at a mask": (
        Case("rte", "masked_lm", "roberta"),
        {"peft_method": "lora", "method": "dp-adamw", "clip": 1.0},
    ),
    "dp-adamw, answers": (
        Case("squad", "causal_lm", "opt"),
        {"method": "dp-adamw", "clip": 1.0, "max_seq_length": 128},
    ),
    "dp-adamw, several words": (
        Case("trec", "causal_lm", "opt"),
        {"method": "dp-adamw", "clip": 1.0, **several_words(Case("trec", "", ""))},
    ),
    "several words": (Case("trec", "causal_lm", "opt"), several_words(Case("trec", "", ""))),
    "mezo": (Case("boolq", "causal_lm", "opt"), {"method": "mezo", "target_epsilon": None}),
    "many directions, the last bias": (
        Case("sst2", "masked_lm", "roberta"),
        {"num_directions": 16, "trainable": r"^lm_head\.(dense|layer_norm)\.bias"},
    ),
}


@pytest.fixture(scope="module")
def way_of(
    tmp_path_factory: pytest.TempPathFactory, models: Any, files: Any
) -> Callable[[str], Path]:
    """A name of WAYS -> the recipe of its finished run, made once."""
    folder, recipes = tmp_path_factory.mktemp("ways"), dict[str, Path]()

    def find(name: str) -> Path:
        if name not in recipes:
            case, changes = WAYS[name]
            where = folder / name.replace(" ", "-").replace(",", "")
            recipe = make_recipe(where, case, models, files, **{**SMALL, **changes})
            call("train", recipe)
            recipes[name] = recipe
        return recipes[name]

    return find


@pytest.mark.parametrize("name", WAYS)
def test_other_ways_train_evaluate_and_replay(name, way_of, tmp_path):
    case, changes = WAYS[name]
    recipe = way_of(name)
    out = recipe.parent / "out"
    results, private = read(out / "all_results.json"), changes.get("method") != "mezo"
    assert read(out / "privacy_report.json")["private"] is private
    metric = "f1" if case.generates else "accuracy"
    assert 0.0 <= results[f"eval_{metric}"] <= 1.0
    assert results["zero_shot_loss"] > 0.05  # cross entropy, whatever is trained on
    found = evaluate(recipe, "--model_name_or_path", out)
    assert found["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-5)
    assert found[f"eval_{metric}"] == results[f"eval_{metric}"]
    if changes.get("method") == "dp-adamw":
        return
    words = ["--trajectory", out / "trajectory.safetensors", "--output_dir", tmp_path / "rebuilt"]
    assert "bit for bit" in call("replay", "--base", out / "recipe.yaml", *words)


@pytest.mark.parametrize("name", [name for name in WAYS if WAYS[name][1].get("objective")])
def test_a_bounded_loss_releases_what_a_bounded_loss_can(name, models, files, tmp_path):
    """Without noise: sums of differences of 0, +-1 / (2 lambda) (or of F1s), over B."""
    case, changes = WAYS[name]
    changes = {
        **SMALL,
        **changes,
        **FIXED,
        "noise_multiplier": 0.0,
        "clip": 1e3,
        "smoothing": 0.1,
        "max_steps": 6,
    }
    call("train", make_recipe(tmp_path, case, models, files, **changes))
    values = released(tmp_path / "out")
    sums = values * changes["expected_batch_size"] * 2 * changes["smoothing"]
    if changes["objective"] == "accuracy":
        torch.testing.assert_close(sums, sums.round(), atol=1e-3, rtol=0)
        assert sums.abs().max() >= 0.5  # some answer changed
    assert sums.abs().max() < 40


@pytest.mark.parametrize("peft", [None, "lora"])
def test_a_bfloat16_checkpoint_is_trained_as_it_is(peft, models, files, tmp_path):
    """Private with one example in a forward pass, refused with more."""
    case = Case("boolq", "causal_lm", "opt")
    model = model_of(models["opt"], "causal_lm").to(torch.bfloat16)
    half = saved(tmp_path / "half", model, tokenizer_of(models["opt"]))
    changes = {**SMALL, "torch_dtype": "auto", "microbatch_size": 1, "peft_method": peft}
    recipe = make_recipe(tmp_path, case, {"opt": half}, files, **changes)
    call("train", recipe)
    out = tmp_path / "out"
    assert read(out / "privacy_report.json")["private"] is True
    found, results = evaluate(recipe, "--model_name_or_path", out), read(out / "all_results.json")
    assert found["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-3)
    if peft is None:
        from safetensors.torch import load_file

        assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    words = ["--trajectory", out / "trajectory.safetensors", "--output_dir", tmp_path / "rebuilt"]
    assert "bit for bit" in call("replay", "--base", out / "recipe.yaml", *words)
    error = io.StringIO()
    other = make_recipe(tmp_path / "more", case, {"opt": half}, files, **changes)
    with contextlib.redirect_stderr(error):
        assert main.main(["train", str(other), "--microbatch_size", "8"]) == 2
    assert "microbatch_size" in error.getvalue()


# ---------------------------------------------------------------- commands around it


def test_generated_answers_are_compared_by_f1(models, files, tmp_path):
    case = Case("squad", "causal_lm", "opt")
    changes = {**SMALL, "max_steps": 2, "max_seq_length": 128, "max_new_tokens": 4}
    recipe = make_recipe(tmp_path, case, models, files, **changes)
    words = ["--methods", "dpzero,mezo", "--epsilons", 2, "--seeds", 1]
    out = call("compare", recipe, *words, "--output_dir", tmp_path / "compared")
    assert "runs do not count" not in out
    assert "F1" in out or "f1" in out
    assert "accuracy" not in out.lower()


def test_a_prompted_recipe_is_swept(models, files, tmp_path):
    case = Case("squad", "causal_lm", "opt")
    recipe = make_recipe(tmp_path, case, models, files, **SMALL)
    words = ["--grid", "learning_rate=1e-4,1e-3", "--dry_run", "--tuning", "composed"]
    out = call("sweep", recipe, *words, "--output_dir", tmp_path / "swept")
    assert "grid: 2 settings of learning_rate" in out
    assert not (tmp_path / "swept").exists()


PUSHED = {
    "sst2-roberta": "fill-mask",
    "boolq-opt": "text-generation",
    "squad-llama": "text-generation",
}


@pytest.mark.parametrize("case", [c for c in CASES if str(c) in PUSHED], ids=str)
def test_a_prompted_run_is_described_as_what_it_is(case, run_of, tmp_path):
    """The card's pipeline, labels and privacy; its code runs on the folder that is shipped."""
    run, copy = run_of(case), tmp_path / "out"
    shutil.copytree(run.out, copy)
    call("push", copy, "--repo_id", "me/tiny", "--dry_run")
    hub = copy / "hub"
    card = (hub / "README.md").read_text(encoding="utf-8")
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["pipeline_tag"] == PUSHED[str(case)]
    assert "differential-privacy" in metadata["tags"]
    assert "text-classification" not in card
    assert read(run.out / "privacy_report.json")["statement"] in card
    assert "id2label" not in read(hub / "config.json")
    assert run_code(card, hub).get_output_embeddings() is not None
    for path in (p for p in hub.iterdir() if p.suffix in (".json", ".md", ".yaml")):
        text = path.read_text(encoding="utf-8")
        assert str(run.out.parent) not in text, path.name
        assert "prompts have more than" not in text, path.name


@pytest.mark.parametrize("name", ["lora", "prefix", "bitfit", "lora at a mask", "prefix at a mask"])
def test_an_adapters_card_runs(name, way_of, models, tmp_path, monkeypatch):
    copy = tmp_path / "out"
    shutil.copytree(way_of(name).parent / "out", copy)
    call("push", copy, "--repo_id", "me/tiny", "--dry_run")
    card = (copy / "hub" / "README.md").read_text(encoding="utf-8")
    case, _ = WAYS[name]
    tag = yaml.safe_load(card.split("---")[1]).get("pipeline_tag")
    assert tag == {"masked_lm": "fill-mask", "causal_lm": "text-generation"}[case.prompt]
    for path in (copy / "hub").glob("*.json"):
        assert str(models["roberta"].parent) not in path.read_text(encoding="utf-8"), path.name
    monkeypatch.chdir(models["roberta"].parent)  # of a local base, its folder's name is published
    model = run_code(card, copy / "hub")
    assert base_model(model).get_output_embeddings() is not None


def run_code(card: str, folder: Path) -> Any:
    """The model of the card's Python, with the local folder in place of the Hub's name."""
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert '"me/tiny"' in code
    names: dict[str, Any] = {}
    exec(code.replace('"me/tiny"', repr(str(folder))), names)
    return names["model"]
