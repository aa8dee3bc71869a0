"""All copies in one pass: whole_model's losses to rounding, theta untouched, misfits refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from estimator_bench import SMOOTHING, VOCABULARY, Batch, Bench, bits, same, token_batch, us
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dpzero.estimators import stacked
from hf_dpzero.estimators.choose_strategy import (
    STACKED_TOLERANCE,
    choose_strategy,
    inexactness,
    unmeasured,
)
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.forward_passes import ParameterChanged
from hf_dpzero.estimators.stacked import StackedCopies
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.perturbation.parameter_space import ParameterSpace

WIDTH = 24


class StackedBench(Bench):
    """Whose estimators stack, unless they are asked not to."""

    def estimator(
        self, strategy: str = "stacked", reuse: bool = True, kind: str = "central"
    ) -> FiniteDifferences:
        return super().estimator(strategy, reuse, kind)

    def losses(self, batches: list[Batch], count: int, strategy: str = "stacked") -> Tensor:
        return super().losses(batches, count, strategy)

    def assert_alike(self, batches: list[Batch], count: int = 5, least: float = 1e-4) -> None:
        """stacked agrees with whole_model to 1e-5, and moves nothing; the directions do matter."""
        expected = self.losses(batches, count, "whole_model")
        stacked_losses = self.losses(batches, count)
        assert stacked_losses.dtype == torch.float32
        torch.testing.assert_close(stacked_losses, expected, rtol=1e-5, atol=0.0)
        assert float(((expected[0] - expected[1]) / expected[0]).abs().mean()) > least


@pytest.fixture
def sentence_head() -> nn.Module:
    """A head on a tiny frozen encoder, logit_scale 10, as in recipes/sst2."""
    from transformers import BertConfig, BertModel

    from hf_dpzero.recipes.sentence_classifier import SentenceClassifier

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = BertModel(config)
    model = SentenceClassifier.from_encoder(encoder, num_labels=2, logit_scale=10.0)
    model.requires_grad_(False)
    model.classifier.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    model.classifier.weight.data.normal_(std=0.1, generator=generator)
    return model


def features(rows: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    embedded = F.normalize(torch.randn(rows, WIDTH, generator=generator), dim=1)
    labels = torch.randint(0, 2, (rows,), generator=generator)
    return {"sentence_embedding": embedded, "labels": labels}


def text(rows: int, seed: int = 0, left: bool = False) -> Batch:
    return token_batch(rows, seed=seed, left=left)


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "sphere"])
def test_a_head_on_stored_features(sentence_head, distribution):
    bench = StackedBench(sentence_head, distribution=distribution)
    bench.assert_alike([features(7), features(1, seed=1), features(4, seed=2)], count=6)


def test_a_head_behind_its_encoder(sentence_head):
    bench = StackedBench(sentence_head)
    assert bench.estimator().prefix is not None
    bench.assert_alike([text(3), text(4, seed=1, left=True)])


@pytest.mark.parametrize("trainable", ["", "classifier", "layer.1"])
def test_bert(tiny_bert, trainable):
    model = tiny_bert()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable in name)
    StackedBench(model).assert_alike([text(4), text(1, seed=1), text(3, seed=2, left=True)])


@pytest.mark.parametrize("factory", ["tiny_opt", "tiny_masked_lm", "tiny_t5"])
def test_language_models(factory, request):
    """Tied embeddings, causal masks, labels of some positions only."""
    StackedBench(request.getfixturevalue(factory)()).assert_alike(
        [token_batch(4, language=True), token_batch(2, seed=1, language=True)]
    )


@pytest.mark.filterwarnings("error:.*batching rule")
def test_attention_of_a_cpu_is_the_only_kernel_that_runs_copy_by_copy(
    tiny_bert, tiny_llama, tiny_t5
):
    """torch warns of each such kernel; this one takes no longer and is not warned of."""
    for model, language in ((tiny_bert(), False), (tiny_llama(), True), (tiny_t5(), True)):
        kind = model.config._attn_implementation
        assert kind == "sdpa" or model.config.model_type == "t5", (
            "older releases have no other for T5"
        )
        StackedBench(model).losses([token_batch(4, language=language)], 4)
    other = tiny_bert()
    objective = select_objective(other)

    def loops(model: nn.Module, batch: Batch) -> Tensor:
        losses = objective(model, batch)
        return torch.renorm(losses.unsqueeze(1), 2, 0, 1e6).squeeze(1)

    with pytest.raises(UserWarning, match="batching rule"):
        StackedBench(other, loops).losses([token_batch(4)], 4)


@pytest.mark.parametrize("directions_held", [1, 3])
def test_held_directions_do_not_matter(sentence_head, monkeypatch, directions_held):
    bench, batches = StackedBench(sentence_head), [features(7), features(2, seed=1)]
    whole = bench.losses(batches, 5)
    size = 2 * stacked.trained_bytes(bench.space)
    assert size == 2 * 4 * (2 * WIDTH + 2)
    monkeypatch.setattr(stacked, "STACK_BYTES", directions_held * size + 1)
    estimate = bench.estimator()
    assert estimate.stack is not None
    assert estimate.stack.directions_at_once == directions_held
    torch.testing.assert_close(bench.losses(batches, 5), whole, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("copies", [1, 2])
def test_copies_in_one_pass_do_not_matter(tiny_bert, monkeypatch, copies):
    bench, batches = StackedBench(tiny_bert()), [text(4), text(2, seed=1)]
    whole = bench.losses(batches, 3)
    estimate = bench.estimator()
    estimate.losses(batches[:1], us(1))  # learns how wide results are
    stack = estimate.stack
    assert stack is not None
    wide = stack.floats_per_example
    assert wide is not None
    assert wide >= 9 * 32  # an example's 9 tokens in the feed-forward layer
    monkeypatch.setattr(stacked, "WIDEST_FLOATS", int(copies * wide * 4) + 1)
    assert [stack.copies_at_once(batch) for batch in batches] == [copies, 2 * copies]
    sizes: list[int] = []
    run = stack._pass
    monkeypatch.setattr(
        stack,
        "_pass",
        lambda start, stop, *a: (sizes.append(min(stop, 6) - start), run(start, stop, *a))[1],
    )
    torch.testing.assert_close(
        torch.stack(estimate.losses(batches, us(3))), whole, rtol=1e-5, atol=0.0
    )
    assert max(sizes) == min(6, 2 * copies) and sum(sizes) == 2 * 6


@pytest.mark.parametrize("bias", [None, "shared", "own"])
def test_a_linear_layer_on_a_shared_input_is_exact_on_integers(bias):
    """One product for all copies has the sums of one a copy: to the bit where nothing is rounded."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"input": (2, 5, 7), "weight": (4, 3, 7), "shared": (3,), "own": (4, 3)}
    made = {n: torch.randint(-99, 99, s, generator=draw).float() for n, s in shapes.items()}
    given = None if bias is None else made[bias]
    at = None if bias != "own" else 0

    def one(weight: Tensor, own: Tensor | None) -> Tensor:
        return F.linear(made["input"], weight, own)

    kernels = stacked.StackedKernels()
    with kernels:
        found = torch.func.vmap(one, in_dims=(0, at))(made["weight"], given)
    expected = [
        F.linear(made["input"], weight, given[copy] if given is not None and at == 0 else given)
        for copy, weight in enumerate(made["weight"])
    ]
    assert torch.equal(found, torch.stack(expected))
    assert kernels.widest == 2 * 5 * 3


def test_nan_rows_come_through_and_stay_alone(sentence_head):
    bench, batch = StackedBench(sentence_head), features(5)
    good = bench.losses([batch], 4)
    spoilt = {**batch, "sentence_embedding": batch["sentence_embedding"].clone()}
    spoilt["sentence_embedding"][2, 0] = torch.nan
    found = bench.losses([spoilt], 4)
    assert found[:, 2].isnan().all()
    others = [0, 1, 3, 4]
    torch.testing.assert_close(found[:, others], good[:, others], rtol=1e-6, atol=0.0)


def test_rows_are_coupled_by_rounding_only(tiny_bert):
    bench, batch = StackedBench(tiny_bert()), text(4)
    together = bench.losses([batch], 4)
    alone = bench.losses([{k: v[i : i + 1] for k, v in batch.items()} for i in range(4)], 4)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda losses: losses.mean(), r"shape \[\] where \[3\] is needed"),
        (lambda losses: losses[:, None], r"shape \[3, 1\] where \[3\] is needed"),
        (lambda losses: losses[:1], r"shape \[1\] where \[3\] is needed"),
        (lambda losses: losses.expand(8, -1), r"shape \[8, 3\] where \[3\] is needed"),
        (lambda losses: losses.long(), "dtype torch.int64"),
    ],
)
def test_each_copys_losses_are_checked(sentence_head, wrong, message):
    objective = select_objective(sentence_head)
    bench = StackedBench(sentence_head, lambda model, inputs: wrong(objective(model, inputs)))
    theta = bits(bench.space.tensors)
    with pytest.raises(ValueError, match=message):
        bench.estimator().losses([features(3)], us(4))
    assert same(bits(bench.space.tensors), theta)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_leaves_theta_and_no_stale_copies(sentence_head, error):
    objective, failing = select_objective(sentence_head), [False]

    def sometimes(model: nn.Module, inputs: Batch) -> Tensor:
        if failing[0]:
            raise error("boom")
        return objective(model, inputs)

    bench = StackedBench(sentence_head.train(), sometimes)
    estimate, theta = bench.estimator(), bits(bench.space.tensors)
    expected = estimate([features(3)], us(4))
    failing[0] = True
    with pytest.raises(error, match="boom"):
        estimate([features(3)], us(4))
    assert same(bits(bench.space.tensors), theta) and bench.space.settled
    assert sentence_head.training
    own = list(sentence_head.classifier.parameters())
    assert all(p is q for p, q in zip(bench.space.tensors, own, strict=True))
    failing[0] = False
    assert torch.equal(estimate([features(3)], us(4)), expected)


class Writing(nn.Module):
    """x -> x . weight, after `write(self)`."""

    def __init__(self, write: Callable[[Writing], None], frozen: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))
        self.steady = nn.Parameter(torch.ones(6), requires_grad=not frozen)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        return (x * self.weight * self.steady).sum(dim=1).square()


def vectors(rows: int = 3) -> Batch:
    return {"x": torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))}


def squared(model: nn.Module, inputs: Batch) -> Tensor:
    return model(inputs["x"])


def add_to_weight(module: Writing) -> None:
    module.weight.add_(1.0)


def add_to_steady(module: Writing) -> None:
    module.steady.mul_(1.0)


def replace_weight(module: Writing) -> None:
    module.weight = nn.Parameter(module.weight * 2.0, requires_grad=False)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    ("write", "name"),
    [
        (add_to_weight, "weight was written to during a forward pass"),
        (add_to_steady, "steady was written to during a forward pass"),
        (replace_weight, "weight was replaced during a forward pass"),
    ],
)
def test_a_module_that_writes_its_parameters_is_refused(write, name, frozen):
    bench = StackedBench(Writing(write, frozen), squared)
    theta = bits(bench.space.tensors)
    with pytest.raises(ParameterChanged, match=f"^{name}"):
        bench.estimator().losses([vectors()], us(4))
    assert same(bits(bench.space.tensors), theta)
    assert bench.model.weight is bench.space.tensors[0]


def test_writes_through_data_fail():
    bench = StackedBench(Writing(lambda module: module.weight.data.add_(1.0)), squared)
    with pytest.raises(RuntimeError, match="data"):
        bench.estimator().losses([vectors()], us(4))


class Deciding(nn.Module):
    """Linear, with `decide` in between: something that vmap cannot follow."""

    def __init__(self, decide: Callable[[Deciding, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))
        self.decide = decide
        self.hidden = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.decide(self, x * self.weight).sum(dim=1).square()


def branching(module: Deciding, h: Tensor) -> Tensor:
    return h if float(h.sum()) > 0 else -h


def noisy(module: Deciding, h: Tensor) -> Tensor:
    return h + 0.0 * torch.randn_like(h)


def behind_the_back(module: Deciding, h: Tensor) -> Tensor:
    return h + 1e-9 * module.hidden[0]


def coarse(module: Deciding, h: Tensor) -> Tensor:
    """What no strategy sees in whole numbers: losses here depend on the batch's shape."""
    return h * (1.0 + 1e-3 * stacked.is_stacked(h))


CANNOT: list[tuple[Callable[[Deciding, Tensor], Tensor], str]] = [
    (branching, "fails on a trial batch .*Error.: torch.func.vmap takes no random numbers"),
    (noisy, "fails on a trial batch"),
    (behind_the_back, "gives other losses than full perturbation on a trial batch"),
    (coarse, "gives other losses than full perturbation on a trial batch"),
]


@pytest.mark.parametrize(("decide", "message"), CANNOT)
def test_what_cannot_be_stacked_is_refused_or_left(decide, message):
    bench = StackedBench(Deciding(decide), squared)
    theta = bits(bench.space.tensors)
    with pytest.raises(ValueError, match=f"strategy='stacked' {message}.*; use 'whole_model'"):
        choose_strategy(bench.estimator(), vectors(), us(1)[0], 64)
    automatic = bench.estimator("auto")
    assert choose_strategy(automatic, vectors(), us(1)[0], 64) == []
    assert (automatic.strategy, automatic.stack) == ("whole_model", None)
    assert same(bits(bench.space.tensors), theta)


def test_a_trial_says_nothing_of_its_rows():
    def telling(module: Deciding, h: Tensor) -> Tensor:
        if stacked.is_stacked(h):
            raise RuntimeError("the secret of row 1")
        return h

    bench = StackedBench(Deciding(telling), squared)
    with pytest.raises(ValueError, match="RuntimeError") as caught:
        choose_strategy(bench.estimator(), vectors(), us(1)[0])
    assert "secret" not in str(caught.value)


def test_half_precision_is_refused():
    model = nn.Linear(3, 3).to(torch.bfloat16)
    space = ParameterSpace.from_model(model, smoothing=SMOOTHING)
    with pytest.raises(
        ValueError, match=r"strategy='stacked' with weight in torch.bfloat16.*train in"
    ):
        FiniteDifferences(model, space, squared, SMOOTHING, strategy="stacked")


def test_a_space_of_another_model_is_refused(sentence_head):
    space = ParameterSpace.from_model(nn.Linear(3, 3), smoothing=SMOOTHING)
    with pytest.raises(ValueError, match="not the model's parameters"):
        StackedCopies(sentence_head, space, squared)


def chosen(bench: StackedBench, batch: Batch, count: int, kind: str = "central") -> str:
    estimate = bench.estimator("auto", kind=kind)
    assert choose_strategy(estimate, batch, us(1)[0], count) == []
    return estimate.strategy


@pytest.mark.parametrize(
    ("count", "expected"), [(1, "whole_model"), (3, "whole_model"), (4, "stacked"), (64, "stacked")]
)
def test_auto_stacks_from_four_directions_on(sentence_head, count, expected):
    assert chosen(StackedBench(sentence_head), features(2), count) == expected


@pytest.mark.parametrize(("kind", "copies"), [("central", 16), ("forward", 9)])
def test_auto_stacks_what_fits(sentence_head, monkeypatch, kind, copies):
    bench = StackedBench(sentence_head)
    size = copies * stacked.trained_bytes(bench.space)
    for limit, expected in ((size, "stacked"), (size - 1, "whole_model")):
        monkeypatch.setattr(stacked, "STACK_BYTES", limit)
        assert chosen(bench, features(2), 8, kind) == expected


def test_auto_leaves_wide_models_alone():
    """4096 outputs an example are the last that stack: two rows of features on a wide head."""

    def wide(width: int) -> str:
        model = nn.Linear(6, width)
        return chosen(
            StackedBench(model, lambda m, i: m(i["x"]).square().mean(dim=1)), vectors(2), 4
        )

    assert wide(stacked.AUTO_FLOATS) == "stacked"
    assert wide(stacked.AUTO_FLOATS + 1) == "whole_model"


def test_auto_without_a_trial_or_by_name_does_not_stack(sentence_head):
    bench = StackedBench(sentence_head)
    assert bench.estimator("auto").strategy == "whole_model"
    by_name = bench.estimator("whole_model")
    assert choose_strategy(by_name, features(2), us(1)[0], 64) == []
    assert by_name.strategy == "whole_model"


def test_the_trial_accepts_rounding_and_nothing_more(sentence_head):
    """A loss that is off by less than the tolerance passes, by three times as much does not."""
    objective = select_objective(sentence_head)

    def off_by(relative: float) -> bool:
        def shifted(model: nn.Module, inputs: Batch) -> Tensor:
            losses = objective(model, inputs) + 1.0
            return losses * (1.0 + relative * stacked.is_stacked(losses))

        estimate = StackedBench(sentence_head, shifted).estimator()
        return inexactness(estimate, features(2), us(1)[0]) is None

    assert off_by(0.0)
    assert off_by(STACKED_TOLERANCE / 3)
    assert not off_by(STACKED_TOLERANCE * 3)


def test_nan_rows_do_not_decide(sentence_head):
    batch = {k: v.clone() for k, v in features(2).items()}
    batch["sentence_embedding"][1] = torch.nan
    assert chosen(StackedBench(sentence_head), batch, 8) == "stacked"


@pytest.mark.parametrize(
    ("strategy", "dtype", "named"),
    [
        ("auto", torch.float32, ["strategy whole_model", "float32 pass"]),
        ("whole_model", torch.float32, ["float32 pass"]),
        ("auto", torch.bfloat16, []),
    ],
)
def test_what_was_never_measured_on_a_gpu_is_said_there_in_one_line(strategy, dtype, named):
    bench = Bench(nn.Linear(4, 2).to(dtype), lambda model, batch: model(batch["x"]).sum(1))
    found = bench.estimator(strategy)
    assert unmeasured(found, "cpu", 4) == []
    lines = unmeasured(found, "cuda", 4)
    assert len(lines) == bool(named) and all(words in lines[0] for words in named)
    assert sum(line.count(",") + 1 for line in lines) == len(named)
