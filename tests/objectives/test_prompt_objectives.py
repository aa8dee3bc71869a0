"""Prompted losses: what they equal, that no example meets another, and every way to evaluate them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from tiny_language_models import drawn
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from hf_dpzero.estimators.choose_strategy import choose_strategy, inexactness
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.per_example_gradients import GhostGradients, PerExampleGradients
from hf_dpzero.objectives.bounded import AnswerF1, ZeroOne, alone
from hf_dpzero.objectives.generation import answer_losses
from hf_dpzero.objectives.heads import causal_lm_objective
from hf_dpzero.objectives.losses import (
    WrappedObjective,
    comparison_loss,
    differentiable,
    single_pass,
)
from hf_dpzero.objectives.prompted import (
    Answers,
    Candidates,
    LabelWords,
    PromptObjective,
    selected_logits,
)
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.training.first_order_step import PlainGradients

Batch = dict[str, Tensor]
CAUSAL, MASKED = ("opt", "gpt2", "llama", "qwen2"), ("bert", "roberta")
WORDS, PAD, NEW = (11, 23, 5), 0, 5
SMOOTHING = 1e-2


def tokens(*lengths: int, seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 64, (length,), generator=generator) for length in lengths]


@dataclass(frozen=True)
class Example:
    """Unpadded token rows (several for candidates) with what else the batch holds of the example."""

    rows: list[Tensor]
    others: dict[str, Any]
    labels: list[Tensor] | None = None


def padded(rows: Sequence[Tensor], side: str, width: int, fill: int) -> Tensor:
    gaps = [width - len(row) for row in rows]
    ends = [(gap, 0) if side == "left" else (0, gap) for gap in gaps]
    return torch.stack([F.pad(row, end, value=fill) for row, end in zip(rows, ends, strict=True)])


def collated(examples: Sequence[Example], side: str = "right", extra: int = 0) -> Batch:
    """One batch; a batch of candidates is [B, L, T]. `extra` columns hold padding only."""
    width = max(len(row) for example in examples for row in example.rows) + extra
    ids = [padded(e.rows, side, width, PAD) for e in examples]
    mask = [padded([torch.ones_like(r) for r in e.rows], side, width, 0) for e in examples]
    join: Callable[..., Tensor] = torch.stack if len(ids[0]) > 1 else torch.cat
    batch = {"input_ids": join(ids), "attention_mask": join(mask)}
    if examples[0].labels is not None:
        batch["labels"] = torch.cat([padded(e.labels or [], side, width, -100) for e in examples])
    for name in examples[0].others:
        batch[name] = torch.tensor([example.others[name] for example in examples])
    return batch


def label_word_examples() -> list[Example]:
    """The scored token is the last one, the first one, and one in between."""
    places, labels = (4, 0, 6, 2), (0, 2, 1, 1)
    return [
        Example([row], {"positions": place, "labels": label})
        for row, place, label in zip(tokens(5, 3, 9, 7), places, labels, strict=True)
    ]


def candidate_examples() -> list[Example]:
    """Words of one to four tokens after prompts of one to six."""
    found = []
    for prompt, lengths, label in ((3, (1, 2, 4), 2), (6, (2, 2, 1), 0), (1, (3, 1, 2), 1)):
        (shared,) = tokens(prompt, seed=prompt)
        rows = [torch.cat([shared, word]) for word in tokens(*lengths, seed=10 + prompt)]
        found.append(Example(rows, {"answer_lengths": list(lengths), "labels": label}))
    return found


def answer_examples() -> list[Example]:
    found = []
    for i, (row, prompt) in enumerate(zip(tokens(6, 9, 4, 8), (2, 5, 3, 1), strict=True)):
        labels = row.clone()
        labels[:prompt] = -100
        found.append(Example([row], {"references": i}, [labels]))
    return found


def token_match(found: list[int], reference: int) -> float:
    """A stand-in for F1: the share of answer tokens of the reference's parity."""
    return sum(token % 2 == reference % 2 for token in found) / max(1, len(found))


ANSWERS = Answers(max_new_tokens=NEW, stop_token_ids=(2,), pad_token_id=PAD)
KINDS: dict[str, tuple[PromptObjective, Callable[[], list[Example]]]] = {
    "words": (LabelWords(WORDS), label_word_examples),
    "candidates": (Candidates(), candidate_examples),
    "answers": (ANSWERS, answer_examples),
    "zero-one words": (ZeroOne(LabelWords(WORDS)), label_word_examples),
    "zero-one candidates": (ZeroOne(Candidates()), candidate_examples),
    "answer f1": (AnswerF1(ANSWERS, token_match), answer_examples),
}
SMOOTH = ("words", "candidates", "answers")
BOUNDED = ("zero-one words", "zero-one candidates", "answer f1")
CASES = [
    *(("words", family) for family in MASKED),
    *((kind, family) for kind in SMOOTH for family in CAUSAL),
]


def reference_scores(model: nn.Module, example: Example) -> Tensor:
    """Label words or candidates by hand: full logits of every row alone, a Python loop over tokens."""
    found = []
    for n, row in enumerate(example.rows):
        logits = full_logits(model, row)
        if "positions" in example.others:
            return torch.stack([logits[example.others["positions"], word] for word in WORDS])
        log_p, length = logits.log_softmax(dim=1), example.others["answer_lengths"][n]
        places = range(len(row) - length, len(row))
        found.append(sum(log_p[t - 1, row[t]] for t in places) / length)
    return torch.stack(found)


def full_logits(model: nn.Module, row: Tensor) -> Tensor:
    """`[T, V]` float32 of one row alone, without any padding."""
    ids = row.unsqueeze(0)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    return logits[-len(row) :].float()


def reference_loss(model: nn.Module, kind: str, example: Example) -> Tensor:
    if kind == "answers":
        (row,), (labels,) = example.rows, example.labels or []
        log_p = full_logits(model, row).log_softmax(dim=1)
        own = [t for t in range(1, len(row)) if labels[t] != -100]
        return -sum(log_p[t - 1, row[t]] for t in own) / len(own)
    return -reference_scores(model, example).log_softmax(dim=0)[example.others["labels"]]


@pytest.mark.parametrize(("kind", "family"), CASES)
@torch.no_grad()
def test_losses_of_a_batch_are_those_of_each_examples_full_logits(kind, family, language_model):
    model, (objective, make) = language_model(family), KINDS[kind]
    expected = torch.stack([reference_loss(model, kind, example) for example in make()])
    assert expected.max() - expected.min() > 1e-2, "the examples must be told apart"
    for side in ("left", "right"):
        losses = objective(model, collated(make(), side, extra=2))
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "family"), [case for case in CASES if case[0] in SMOOTH[:2]])
@torch.no_grad()
def test_scores_and_labels(kind, family, language_model):
    """Over all labels, exp(-loss) is a distribution, and the largest score has the smallest loss."""
    model, (objective, make) = language_model(family), KINDS[kind]
    batch = collated(make())
    scores = objective.predict(model, batch)
    assert scores.shape == (len(make()), 3)
    assert scores.dtype == torch.float32
    expected = torch.stack([reference_scores(model, example) for example in make()])
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    labels = [torch.full_like(batch["labels"], label) for label in range(3)]
    losses = torch.stack([objective(model, {**batch, "labels": label}) for label in labels])
    torch.testing.assert_close(torch.exp(-losses).sum(dim=0), torch.ones(len(make())))
    assert torch.equal(losses.argmin(dim=0), scores.argmax(dim=1))


@torch.no_grad()
def test_rows_without_answer_tokens_have_loss_zero(language_model):
    model, batch = language_model("opt"), collated(answer_examples())
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert ANSWERS(model, batch).tolist() == [0.0] * 4
    batch["labels"][:, 0] = 7  # the first token has no predictor
    assert ANSWERS(model, batch).tolist() == [0.0] * 4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", CAUSAL)
def test_answers_predict_from_the_prompt_alone(family, side, language_model):
    model, examples = language_model(family), answer_examples()
    found = ANSWERS.predict(model, collated(examples, side))
    prompts = [e.rows[0][(e.labels or [])[0] == -100] for e in examples]
    without = {"input_ids": padded(prompts, "right", 9, PAD)}
    without["attention_mask"] = padded([torch.ones_like(p) for p in prompts], "right", 9, 0)
    assert found.shape == (4, NEW)
    assert torch.equal(found, ANSWERS.predict(model, without))
    assert len(found.unique(dim=0)) > 1


def evaluated_twice(
    model: nn.Module, batch: Batch
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], list[int]]:
    """Losses and predictions of two calls, of `evaluate`, and the widths of the latter's passes."""
    widths = list[int]()
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        expected = ANSWERS(model, batch), ANSWERS.predict(model, batch)
        handle = embeddings.register_forward_hook(lambda *a: widths.append(a[2].shape[1]))
        found = ANSWERS.evaluate(model, batch)
    handle.remove()
    return expected, found, widths


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("adapter", [None, "lora"])
@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.filterwarnings("ignore")
def test_an_evaluation_runs_a_prompt_once(family, adapter, side, language_model):
    examples = answer_examples()
    examples[1].labels[0][:] = -100  # type: ignore[index]  # a row without an answer is all prompt
    model = adapted(language_model(family), adapter)
    expected, found, widths = evaluated_twice(model, collated(examples, side))
    torch.testing.assert_close(found[0], expected[0])
    assert found[0][1] == 0.0 < found[0].max()
    assert torch.equal(found[1], expected[1])
    assert widths[0] > 1
    assert set(widths[1:]) == {1}


def forgetful(kind: str, language_model: Any) -> Any:
    """Models whose cache cannot be cut off behind the prompt, or that count positions themselves."""
    small = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"intermediate_size": 8, "num_key_value_heads": 2}
    if kind == "window":
        return drawn(MistralForCausalLM(MistralConfig(**small, **sizes, sliding_window=4)))
    if kind == "alibi":
        small["n_layer"], small["n_head"] = small.pop("num_hidden_layers"), 2
        return drawn(BloomForCausalLM(BloomConfig(**small)))
    if kind == "long rope":  # another rotation where prompt and answer together exceed 8 tokens
        rope = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [3.0] * 2}
        rope |= {"rope_theta": 1e4, "original_max_position_embeddings": 8}
        own = {
            "pad_token_id": PAD,
            "max_position_embeddings": 48,
            "original_max_position_embeddings": 8,
        }
        return drawn(Phi3ForCausalLM(Phi3Config(**small, **sizes, **own, rope_parameters=rope)))
    if kind == "context":  # of 10 tokens; the longest prompt has 5, and another row's answer 7
        layers = {"num_layers": 1, "attention_types": [[["local"], 1]], "window_size": 4}
        neo = {"vocab_size": 64, "hidden_size": 8, "num_heads": 2, "max_position_embeddings": 10}
        return drawn(GPTNeoForCausalLM(GPTNeoConfig(**neo, **layers)))
    if kind == "behind padding":
        own = {"is_decoder": True, "pad_token_id": PAD, "max_position_embeddings": 48}
        return drawn(RobertaForCausalLM(RobertaConfig(**small, intermediate_size=8, **own)))
    if kind == "compiled":
        return torch.compile(language_model("opt"), backend="eager")
    if kind == "its own cache":  # as generate asks
        model = language_model("opt")
        model._supports_default_dynamic_cache = lambda: False
        return model
    return adapted(language_model("opt"), kind)


FORGETFUL = [
    "window",
    "alibi",
    "long rope",
    "context",
    "behind padding",
    "compiled",
    "its own cache",
]


@pytest.mark.parametrize("kind", [*FORGETFUL, "prompt"])
@pytest.mark.filterwarnings("ignore")
def test_other_caches_run_a_prompt_twice(kind, language_model):
    model, batch = forgetful(kind, language_model).eval(), collated(answer_examples())
    expected, found, _ = evaluated_twice(model, batch)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    ids = torch.full((2, 6), 7)
    with torch.no_grad():
        assert answer_losses(model, (ids, torch.ones_like(ids)), ids) is None


def unusual(kind: str) -> Batch:
    """Rows that are more than a prompt and its answer."""
    batch = collated(answer_examples())
    if kind == "a token between labels":
        batch["labels"][1, 6] = -100
    elif kind == "a token behind the answer":
        batch["labels"][1, 8] = -100
    elif kind == "a hole":
        batch["attention_mask"][1, 2] = 0
    else:
        batch["token_type_ids"] = torch.ones_like(batch["input_ids"])
    return batch


@pytest.mark.parametrize(
    "kind", ["a token between labels", "a token behind the answer", "a hole", "another input"]
)
def test_other_rows_run_a_prompt_twice(kind, language_model):
    expected, found, _ = evaluated_twice(language_model("gpt2"), unusual(kind))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_an_evaluation_has_the_losses_of_a_subclass(language_model):
    class Doubled(Answers):
        def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
            return 2 * super().__call__(model, inputs)

    model, batch = language_model("opt"), collated(answer_examples())
    with torch.no_grad():
        found = Doubled(NEW, (2,), PAD).evaluate(model, batch)
        torch.testing.assert_close(found[0], 2 * ANSWERS(model, batch))


def test_columns_are_what_no_model_takes(language_model):
    seen = []
    for kind, (objective, make) in KINDS.items():
        model = language_model("opt")
        batch = collated(make())
        taken: list[str] = []
        model.register_forward_pre_hook(
            lambda _m, _a, kwargs, taken=taken: taken.extend(kwargs), with_kwargs=True
        )
        objective(model, batch)
        assert taken, kind
        assert not set(taken) & {*objective.columns, "labels"}
        assert set(batch) - {"input_ids", "attention_mask", "labels"} == set(objective.columns)
        seen.append(kind)
    assert seen == list(KINDS)


def head_of(model: Any) -> nn.Module:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.get_output_embeddings()


def watched_head(model: nn.Module) -> list[list[int]]:
    """Shapes of the logits that the output embedding computes."""
    shapes: list[list[int]] = []
    head_of(model).register_forward_hook(lambda _m, _i, out: shapes.append(list(out.shape)))
    return shapes


def adapted(model: Any, name: str | None) -> Any:
    if name is None:
        return model
    configs = {
        "lora": lambda: peft.LoraConfig(r=2, target_modules="all-linear"),
        "head lora": lambda: peft.LoraConfig(r=2, target_modules=["lm_head"]),
        "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }
    found = peft.get_peft_model(model, configs[name]()).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.3, generator=generator)
    return found


def rounding(model: nn.Module, logits: Tensor) -> float:
    """Worst case of float32: eps for each term of all sums on the way to a logit, times the largest."""
    terms = sum(p.shape[-1] for p in model.parameters() if p.dim() == 2)
    return torch.finfo(torch.float32).eps * terms * float(logits.abs().max())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("family", "adapter"),
    [(family, None) for family in (*MASKED, *CAUSAL)]
    + [("roberta", "lora"), ("opt", "lora"), ("opt", "prefix"), ("gpt2", "prompt")]
    + [("llama", "head lora")],
)
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_selected_logits_are_those_of_full_passes(family, adapter, side, language_model):
    model, examples = adapted(language_model(family), adapter), label_word_examples()
    positions = torch.tensor([[0, 4, 2], [2, 2, 0], [8, 1, 3], [0, 6, 5]])
    batch = collated(examples, side, extra=1)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    shapes = watched_head(model)
    found = selected_logits(model, inputs, positions)
    assert shapes == [[4, 3, 64]], "no other logit is computed"
    full = [full_logits(model, example.rows[0]) for example in examples]
    rows = torch.stack([row[p] for row, p in zip(full, positions, strict=True)])
    tolerance = rounding(model, rows)
    torch.testing.assert_close(found, rows, atol=tolerance, rtol=0.0)
    wrong = [row[(p + 1) % len(row)] for row, p in zip(full, positions, strict=True)]
    apart = (torch.stack(wrong) - rows).abs().amax(dim=(1, 2)).min()
    assert apart > 100 * tolerance, "it has power"


@torch.no_grad()
def test_explicit_position_ids_are_left_alone(language_model):
    """Such rows are not rolled, and positions still count from their first token."""
    model = language_model("gpt2")
    batch = collated(label_word_examples(), "left")
    positions = torch.tensor([[0], [2], [8], [6]])
    mask = batch["attention_mask"]
    inputs = {"input_ids": batch["input_ids"], "attention_mask": mask}
    inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    expected = selected_logits(model, {k: inputs[k] for k in list(inputs)[:2]}, positions)
    found = selected_logits(model, inputs, positions)
    torch.testing.assert_close(found, expected, atol=rounding(model, expected), rtol=0.0)


class _Odd(nn.Module):
    """A language model around another one, which calls its head in a way of its own."""

    def __init__(self, inner: Any, call: str) -> None:
        super().__init__()
        self.inner, self.call, self.config = inner, call, inner.config

    def get_output_embeddings(self) -> Any:
        return None if self.call == "none" else self.inner.lm_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.inner.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        if self.call == "flat":
            flat = self.inner.lm_head(hidden.flatten(0, 1))
            return {"logits": flat.unflatten(0, hidden.shape[:2])}
        if self.call == "keyword":
            return {"logits": self.inner.lm_head(input=hidden)}
        return {"logits": F.linear(hidden, self.inner.lm_head.weight)}


@pytest.mark.parametrize("call", ["none", "flat", "keyword", "compiled"])
@torch.no_grad()
def test_other_models_compute_all_logits(call, language_model):
    plain, batch = language_model("llama"), collated(label_word_examples(), "left")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    positions = torch.tensor([[0, 4], [2, 1], [8, 1], [6, 5]])
    expected = selected_logits(plain, inputs, positions)
    if call == "compiled":
        plain.compile(backend="eager")
        shapes = watched_head(plain)
        found = selected_logits(plain, inputs, positions)
        assert shapes == [[4, 9, 64]]
    else:
        found = selected_logits(_Odd(plain, call), inputs, positions)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_no_hook_is_left(language_model):
    model = language_model("opt")
    batch = collated(label_word_examples())
    LabelWords(WORDS)(model, batch)
    broken = {**batch, "input_ids": batch["input_ids"] + 60}
    with pytest.raises(IndexError):
        LabelWords(WORDS)(model, broken)
    assert not head_of(model)._forward_pre_hooks
    assert model(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits.shape[1] == 9


@pytest.mark.parametrize("kind", ["candidates", "answers"])
@torch.no_grad()
def test_float32_copies_are_of_one_row(kind, language_model, monkeypatch):
    model, (objective, make) = language_model("opt").to(torch.bfloat16), KINDS[kind]
    rows: list[int] = []
    original = F.cross_entropy

    def spy(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert logits.dtype == torch.float32
        rows.append(logits.shape[0])
        return original(logits, *args, **kwargs)

    monkeypatch.setattr(F, "cross_entropy", spy)
    objective(model, collated(make()))
    expected = [1, 2, 4, 2, 2, 1, 3, 1, 2, 3] if kind == "candidates" else [4, 4, 1, 7]
    assert rows == expected  # the last of the candidates' calls is over the classes of 3 examples


OUTSIDE, LENGTH = "lies outside of its row", "of the batch has answer_lengths out"
NOT_CANDIDATES = r"\[B, L, T\].*not \[4, 9\] and \[4, 3\]"
REFUSED: list[tuple[str, dict[str, Any], str]] = [  # kind, (place, value) or None of a column
    *(
        ("words", {"positions": c}, rf"positions\[{c[0]}\] {OUTSIDE}")
        for c in ((0, -1), (1, 3), (2, 9))
    ),
    ("candidates", {"answer_lengths": ((0, 0), 0)}, f"candidate 0 {LENGTH}"),
    ("candidates", {"answer_lengths": ((1, 2), 7)}, f"candidate 5 {LENGTH}"),
    ("candidates", {"answer_lengths": ((2, 1), -1)}, f"candidate 7 {LENGTH}"),
    ("words", {"positions": None}, "no 'positions'"),
    ("words", {"labels": None}, "no 'labels'"),
    ("candidates", {"answer_lengths": None}, "no 'answer_lengths'"),
    ("candidates", {"labels": None}, "no 'labels'"),
    ("answers", {"labels": None}, "no 'labels'"),
    ("zero-one words", {"labels": None}, "no 'labels'"),
    ("answer f1", {"references": None}, "no 'references'"),
]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("kind", "change", "message"), REFUSED)
def test_batches_that_do_not_fit_are_refused(kind, change, message, side, language_model):
    objective, make = KINDS[kind]
    batch = collated(make(), side, extra=2)
    for name, changed in change.items():
        if changed is None:
            del batch[name]
        else:
            batch[name][changed[0]] = changed[1]
    with pytest.raises(ValueError, match=message):
        objective(language_model("opt"), batch)


def test_objectives_that_make_no_sense_are_refused(language_model):
    model = language_model("opt")
    for words in ((), (5,), (5, 6, 5)):
        with pytest.raises(ValueError, match=r"token_ids=\(.*no two alike"):
            LabelWords(words)
    rows = {**collated(label_word_examples()), "answer_lengths": torch.ones(4, 3).long()}
    with pytest.raises(ValueError, match=NOT_CANDIDATES):
        Candidates()(model, rows)
    for score in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"score=.*must lie in \[0, 1\]"):
            AnswerF1(ANSWERS, lambda *_, s=score: s)(model, collated(answer_examples()))
    for gradients in (PerExampleGradients, GhostGradients, PlainGradients):
        for kind in BOUNDED:
            with pytest.raises(ValueError, match="counts right answers, which has no gradient"):
                gradients(model, KINDS[kind][0])


def trained(model: Any, what: str) -> Any:
    """What of the model is trained: all of it, LoRA matrices, or the second half."""
    if what == "lora":
        return adapted(model, "lora")
    if what == "half":
        for name, parameter in model.named_parameters():
            late = any(part in name for part in ("layer.1.", "layers.1.", "h.1."))
            parameter.requires_grad_(late)
        assert any(p.requires_grad for p in model.parameters())
    return model


def differences(model: nn.Module, objective: Any, strategy: str, reuse: bool = False) -> Any:
    space = ParameterSpace.from_model(model, smoothing=SMOOTHING)
    space.snap_()
    return FiniteDifferences(model, space, objective, SMOOTHING, reuse, strategy)


def sweep(estimate: FiniteDifferences, batches: Sequence[Batch]) -> Tensor:
    """Losses [2, B, K] along three directions."""
    directions = [Direction(77, 4, k) for k in range(3)]
    try:
        return torch.stack(estimate.losses(batches, directions))
    finally:
        estimate.space.settle_()


@pytest.mark.parametrize(
    ("kind", "family", "what"),
    [("words", "roberta", "all"), ("candidates", "opt", "lora"), ("answers", "gpt2", "half")],
)
def test_every_strategy_gives_the_losses_of_whole_model(kind, family, what, language_model):
    model, (objective, make) = trained(language_model(family), what), KINDS[kind]
    batches = [collated(make()[:2], "left"), collated(make()[2:])]
    expected = sweep(differences(model, objective, "whole_model"), batches)
    assert (expected[0] - expected[1]).abs().min() > 1e-4, "the perturbation must be seen"
    for strategy, tolerance in (("layerwise", 0.0), ("stacked", 1e-5)):
        estimate = differences(model, objective, strategy)
        assert choose_strategy(estimate, batches[0], Direction(1, 1, 1)) == []
        found = sweep(estimate, batches)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("kind", "family", "strategy"),
    [("words", "roberta", "whole_model"), ("candidates", "opt", "layerwise")],
)
def test_the_frozen_prefix_is_reused(kind, family, strategy, language_model):
    model, (objective, make) = trained(language_model(family), "half"), KINDS[kind]
    batches = [collated(make()[:2], "left"), collated(make()[2:])]
    expected = sweep(differences(model, objective, strategy), batches)
    estimate = differences(model, objective, strategy, reuse=True)
    assert choose_strategy(estimate, batches[0], Direction(1, 1, 1)) == []
    assert estimate.prefix is not None
    assert torch.equal(sweep(estimate, batches), expected)


@pytest.mark.parametrize("family", CAUSAL)
@torch.no_grad()
def test_zero_one_counts_errors(family, language_model):
    model = language_model(family)
    for inner, make in (KINDS["words"], KINDS["candidates"]):
        batch = collated(make())
        best = torch.stack([reference_scores(model, e).argmax() for e in make()])
        expected = (best != batch["labels"]).float()
        assert torch.equal(ZeroOne(inner)(model, batch), expected)
        right = {**batch, "labels": best}
        assert ZeroOne(inner)(model, right).tolist() == [0.0] * len(best)
        assert torch.equal(ZeroOne(inner).predict(model, batch), inner.predict(model, batch))


@torch.no_grad()
def test_scores_that_are_not_numbers_are_wrong(language_model):
    model, batch = language_model("roberta"), collated(label_word_examples())
    head_of(model).bias.fill_(float("nan"))
    for label in range(3):
        labelled = {**batch, "labels": torch.full_like(batch["labels"], label)}
        assert ZeroOne(LabelWords(WORDS))(model, labelled).tolist() == [1.0] * 4


def test_answer_f1_scores_what_is_decoded(language_model):
    model, batch = language_model("llama"), collated(answer_examples(), "left")
    decoded = [[t for t in row if t >= 0] for row in ANSWERS.predict(model, batch).tolist()]
    asked: list[tuple[list[int], int]] = []

    def score(found: list[int], reference: int) -> float:
        asked.append((found, reference))
        return 0.25 * reference

    assert AnswerF1(ANSWERS, score)(model, batch).tolist() == [1.0, 0.75, 0.5, 0.25]
    assert asked == [(row, i) for i, row in enumerate(decoded)]
    objective = AnswerF1(ANSWERS, score)
    assert torch.equal(objective.predict(model, batch), ANSWERS.predict(model, batch))


@pytest.mark.parametrize(
    ("kind", "family"),
    [("zero-one words", "llama"), ("zero-one candidates", "gpt2"), ("answer f1", "opt")],
)
def test_bounded_losses_know_nothing_of_the_batch(kind, family, language_model):
    """To the last bit, also of the comparison loss, whose numbers move with every logit."""
    model, (objective, make) = language_model(family), KINDS[kind]
    examples = make()
    for evaluate in (objective, objective.comparison_loss):
        single = torch.cat([evaluate(model, collated([example])) for example in examples])
        for side, extra in (("left", 0), ("right", 7)):
            assert torch.equal(evaluate(model, collated(examples, side, extra)), single)
        backwards = evaluate(model, collated(examples[::-1]))
        assert torch.equal(backwards.flip(0), single)
    assert len(single.unique()) == len(examples), "the comparison loss must tell them apart"


def test_alone_refuses_empty_rows_and_keeps_rows_without_a_mask():
    rows = torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match="no attended token"):
        list(alone({"input_ids": rows, "attention_mask": torch.zeros_like(rows)}))
    (kept,) = alone({"input_ids": rows})
    assert torch.equal(kept["input_ids"], rows)


@pytest.mark.parametrize(
    ("kind", "what"),
    [("zero-one words", "half"), ("zero-one candidates", "all")],
)
def test_bounded_losses_under_the_strategies(kind, what, language_model):
    """No prefix and no stack, asked for or not; layerwise gives the bits of whole_model."""
    model, (objective, make) = trained(language_model("opt"), what), KINDS[kind]
    batches = [collated(make()[:2], "left"), collated(make()[2:])]
    whole = differences(model, objective, "auto", reuse=True)
    assert whole.prefix is None
    assert choose_strategy(whole, batches[0], Direction(1, 1, 1), num_directions=8) == []
    assert whole.strategy == "whole_model"
    layerwise = differences(model, objective, "layerwise", reuse=True)
    assert choose_strategy(layerwise, batches[0], Direction(1, 1, 1)) == []
    expected = sweep(whole, batches)
    assert torch.equal(sweep(layerwise, batches), expected)
    assert ((expected >= 0) & (expected <= 1)).all()
    whole.objective = layerwise.objective = comparison_loss(objective)
    moved = sweep(whole, batches)
    assert (moved[0] - moved[1]).abs().min() > 1e-4, "what is behind the steps must have moved"
    assert torch.equal(sweep(layerwise, batches), moved)


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_strategy_that_joins_passes_is_refused(kind, language_model):
    with pytest.raises(ValueError, match="strategy='stacked'.*every example by itself"):
        differences(language_model("opt"), KINDS[kind][0], "stacked")


class _ReadsOutside(nn.Module):
    """Reads its head's weight outside of the head's forward, where `layerwise` does not perturb it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.inner.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        return {"logits": F.linear(hidden, self.inner.lm_head.weight)}


def test_a_wrong_strategy_shows_behind_equal_steps(language_model):
    """The 0/1 losses agree, NaN weights included; the comparison losses do not."""
    model, batch = _ReadsOutside(language_model("llama")), collated(label_word_examples()[:2])
    objective = ZeroOne(LabelWords(WORDS))
    layerwise = differences(model, objective, "layerwise")
    whole = differences(model, objective, "whole_model")
    assert torch.equal(sweep(layerwise, [batch]), sweep(whole, [batch])), "or this shows nothing"
    assert inexactness(layerwise, batch, Direction(1, 1, 1)) is not None
    with pytest.raises(ValueError, match=r"strategy='layerwise' .*lm_head\.weight"):
        choose_strategy(layerwise, batch, Direction(1, 1, 1))


def test_traits_also_of_an_objective_that_is_wrapped(language_model):
    model = language_model("opt")
    for kind, (objective, make) in KINDS.items():
        outer = WrappedObjective(objective, lambda inner, *batch: 2 * inner(*batch))
        for one in (objective, outer):
            assert (single_pass(one), differentiable(one)) == (kind in SMOOTH,) * 2, kind
        assert (comparison_loss(objective) is objective) is (kind in SMOOTH), kind
        batch = collated(make())
        for found, inner in ((outer, objective), *[map(comparison_loss, (outer, objective))]):
            assert torch.equal(found(model, batch), 2 * inner(model, batch)), kind
    assert single_pass(causal_lm_objective) and differentiable(causal_lm_objective)
    assert comparison_loss(causal_lm_objective) is causal_lm_objective


@pytest.mark.parametrize("kind_of_gradients", [PerExampleGradients, GhostGradients])
@pytest.mark.parametrize(
    ("kind", "family", "what"),
    [("words", "roberta", "all"), ("answers", "gpt2", "lora"), ("candidates", "opt", "all")],
)
@pytest.mark.filterwarnings("ignore")
def test_per_example_gradients_are_those_of_examples_alone(
    kind, family, what, kind_of_gradients, language_model
):
    """Also of the tied output matrix, which both looks up and multiplies, and of L rows an example."""
    model, (objective, make) = trained(language_model(family), what), KINDS[kind]
    gradients, batch = kind_of_gradients(model, objective), collated(make())
    gradients.check_attribution(batch)
    weights = torch.arange(1.0, 1.0 + len(make()))
    found, norms = gradients.weighted_sum([batch], lambda n: weights.double())
    singles = []
    for example in make():
        loss = objective(model, collated([example])).sum()
        own = torch.autograd.grad(loss, gradients.parameters, materialize_grads=True)
        singles.append(torch.cat([g.flatten() for g in own]))
    expected = torch.stack(singles)
    scale = float(expected.norm(dim=1).max())
    torch.testing.assert_close(norms, expected.norm(dim=1), atol=1e-5 * scale, rtol=1e-4)
    total = torch.cat([g.flatten() for g in found])
    torch.testing.assert_close(total.float(), weights @ expected, atol=1e-5 * scale, rtol=1e-4)
