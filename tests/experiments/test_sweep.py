"""What choosing settings costs is stated, and what must stay secret stays secret."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_dpzero.cli import main
from hf_dpzero.experiments import sweep_trials
from hf_dpzero.experiments.sweep import (
    Prepared,
    SweepSettings,
    parse_grid,
    refuse_different_events,
    trial_count_from,
)
from hf_dpzero.experiments.sweep_trials import Row, Workspace, best_row, draw_points, score_of
from hf_dpzero.privacy.mechanisms import NonPrivateMean, ScalarMechanism
from hf_dpzero.privacy.noise import SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.private_selection import (
    TrialCount,
    calibrate_composed,
    calibrate_selection,
    composed_epsilon,
    composition_entry,
    selection_entry,
    selection_epsilon,
    selection_event,
    total_epsilon,
    with_noise,
)
from hf_dpzero.privacy.sampling import (
    FixedSizeSampler,
    FullBatchSampler,
    PoissonSampler,
    TruncatedPoissonSampler,
)
from hf_dpzero.recipes.recipe import load_recipe, read_recipe
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.privacy_report import PrivacyReport, round_up

ROOT = Path(__file__).resolve().parents[2]
DELTA = 1e-5


def make_plan(steps: int = 200, sigma: float = 4.0, **settings: Any) -> PrivacyPlan:
    mechanism = ScalarMechanism(
        clip=1.0,
        noise_multiplier=sigma,
        expected_batch_size=64.0,
        num_directions=settings.pop("num_directions", 1),
        distribution=settings.pop("distribution", "gaussian"),
    )
    sampler = settings.pop("sampler", PoissonSampler(num_examples=1024, expected_batch_size=64.0))
    return PrivacyPlan(sampler=sampler, mechanism=mechanism, steps=steps, **settings)


def full_batch_plan(steps: int = 25, sigma: float = 50.0, **settings: Any) -> PrivacyPlan:
    return make_plan(
        steps,
        sigma,
        sampler=FullBatchSampler(num_examples=64, expected_batch_size=64.0),
        **settings,
    )


# ------------------------------------------------------------------ the number of trials


LAWS = [(4.0, 1.0), (10.0, 0.5), (3.0, 0.0), (7.0, math.inf), (2.5, 2.0), (1.0, 1.0)]


@pytest.mark.parametrize(("mean", "shape"), LAWS)
def test_the_law_sums_to_one_and_has_its_mean(mean: float, shape: float) -> None:
    trials = TrialCount(mean=mean, shape=shape)
    first = 0 if shape == math.inf else 1
    listed = [float(value) for _, value in itertools.islice(trials._probabilities(), 400)]
    probabilities = [0.0] * first + listed
    assert math.fsum(probabilities) == pytest.approx(1, abs=1e-6)
    found = math.fsum(k * p for k, p in enumerate(probabilities))
    assert found == pytest.approx(mean, rel=1e-4)
    assert [trials.probability(k) for k in range(3)] == probabilities[:3]


def test_known_laws() -> None:
    geometric = TrialCount(mean=5.0, shape=1.0)
    assert geometric.probability(3) == pytest.approx(0.2 * 0.8**2)
    poisson = TrialCount(mean=2.0, shape=math.inf)
    assert poisson.probability(3) == pytest.approx(math.exp(-2) * 8 / 6)
    assert TrialCount(mean=1.0, shape=0.5).probability(1) == 1.0


@pytest.mark.parametrize("shape", [0.0, 0.5, 2.0])
def test_gamma_gives_no_more_trials_than_the_mean(shape: float) -> None:
    """Definition 1: E K = eta (1 - gamma) / (gamma (1 - gamma^eta)); the rounding is downwards."""
    gamma = TrialCount(mean=6.0, shape=shape).gamma
    g = float(gamma)
    mean = (1 / g - 1) / (math.log(1 / g) if shape == 0 else (1 - g**shape) / shape)
    assert mean == pytest.approx(6.0, rel=1e-12)
    assert isinstance(gamma, Decimal)


@pytest.mark.statistical
@pytest.mark.parametrize(("mean", "shape"), [(4.0, 1.0), (3.0, 0.5), (3.0, math.inf)])
def test_draws_follow_the_law(mean: float, shape: float) -> None:
    """Chi-squared over k = 0..7 and the rest: 99.99 % of sound runs stay below 33.7 (8 degrees)."""
    trials, n = TrialCount(mean=mean, shape=shape), 4000
    counts = Counter(min(trials.draw(), 8) for _ in range(n))
    expected = [trials.probability(k) * n for k in range(8)]
    expected.append(n - sum(expected))
    cells = [(counts[k], e) for k, e in enumerate(expected) if e > 1]
    assert sum((o - e) ** 2 / e for o, e in cells) < 33.7
    assert sum(o for o, _ in cells) >= n - 4


def test_draws_differ_from_each_other() -> None:
    trials = TrialCount(mean=1000.0)
    assert len({trials.draw() for _ in range(20)}) > 10


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mean": 0.5}, "mean_trials=0.5"),
        ({"mean": 1e6}, "mean_trials=1000000"),
        ({"mean": 2.0, "shape": -1.0}, "shape=-1.0 must be at least 0"),
        ({"mean": 2.0, "shape": 500.0}, "use 'poisson'"),
    ],
)
def test_impossible_laws_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrialCount(**values)


# ------------------------------------------------------------------ the theorems, by hand


def gaussian_rdp(order: float, steps: int, sigma: float) -> float:
    """T full-batch Gaussian releases: order T / (2 sigma^2)."""
    return order * steps / (2 * sigma**2)


def orders_of_accountant() -> list[float]:
    from dp_accounting.rdp import RdpAccountant

    return [float(order) for order in RdpAccountant()._orders]


def rdp_of(plan: PrivacyPlan, trials: TrialCount) -> dict[float, float]:
    """order -> RDP of the selection as dp_accounting sees it."""
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(selection_event(plan, trials))
    return dict(zip(orders_of_accountant(), accountant._rdp, strict=True))


@pytest.mark.parametrize(("mean", "shape"), [(10.0, 1.0), (10.0, 0.5), (4.0, 0.0), (30.0, 2.0)])
def test_event_is_theorem_2(mean: float, shape: float) -> None:
    """eps(l) + (1+eta)(1 - 1/l') eps(l') + (1+eta) log(1/gamma)/l' + log(EK)/(l-1), best l'."""
    steps, sigma = 25, 50.0
    trials = TrialCount(mean=mean, shape=shape)
    found = rdp_of(full_batch_plan(steps, sigma), trials)
    log_gamma = float(trials.gamma.ln())
    constant = (1 + shape) * min(
        (1 - 1 / other) * gaussian_rdp(other, steps, sigma) - log_gamma / other
        for other in orders_of_accountant()
    )

    def theorem(order: float) -> float:
        return gaussian_rdp(order, steps, sigma) + constant + math.log(mean) / (order - 1)

    for order in (1.5, 4.0, 10.0, 32.0, 128.0):
        by_hand = min(theorem(other) for other in orders_of_accountant() if other >= order)
        assert found[order] == pytest.approx(by_hand, rel=1e-7)
        assert found[order] > gaussian_rdp(order, steps, sigma)


def test_event_is_theorem_6() -> None:
    """eps(l) + mu delta' + log(mu)/(l-1), delta' of one run at e^eps' = 1 + 1/(l-1)."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_delta

    steps, sigma, mean = 25, 50.0, 10.0
    found = rdp_of(full_batch_plan(steps, sigma), TrialCount(mean=mean, shape=math.inf))
    orders = orders_of_accountant()
    one_run = [gaussian_rdp(order, steps, sigma) for order in orders]
    for order in (4.0, 10.0, 32.0):
        delta = compute_delta(orders, one_run, math.log1p(1 / (order - 1)))[0]
        by_hand = gaussian_rdp(order, steps, sigma) + mean * delta + math.log(mean) / (order - 1)
        assert found[order] == pytest.approx(by_hand, rel=1e-7)


def test_discrete_noise_adds_twelve_slacks_of_rdp() -> None:
    """(2a - 1)/(a - 1) = 12 at a = 1.1; seen at the coarsest noise that a plan accepts."""
    from dp_accounting.dp_event import ZCDpEvent

    plan = full_batch_plan(steps=1, sigma=2.0**-9, num_directions=8)
    noise, grid = selection_event(plan, TrialCount(mean=2.0)).event.events
    assert isinstance(grid, ZCDpEvent)
    assert grid.rho == 0
    h = 8 * (40.0**2 + 2) / (12 * (2.0**-9 * 2**30) ** 2)
    assert grid.xi == pytest.approx(12 * h, rel=1e-9)
    assert noise.count == 1


def test_selection_costs_more_than_a_run_and_less_than_composing() -> None:
    plan, trials = make_plan(accountant="rdp"), TrialCount(mean=10.0)
    total = selection_epsilon(plan, trials, DELTA)
    assert plan.epsilon(DELTA) < total < composed_epsilon([plan] * 100, DELTA)
    more = selection_epsilon(plan, TrialCount(mean=100.0), DELTA)
    assert total < more


def test_laplace_full_batch_doubles_under_replace_one_as_in_the_plan() -> None:
    """The Laplace event carries replace_one's factor 2 itself: sigma under one is 2 sigma under both."""
    trials = TrialCount(mean=3.0)
    one = full_batch_plan(distribution="laplace", relation="replace_one", sigma=100.0)
    other = full_batch_plan(distribution="laplace", sigma=50.0)
    assert selection_epsilon(one, trials, DELTA) == pytest.approx(
        selection_epsilon(other, trials, DELTA), rel=1e-6
    )


def test_full_batch_replace_one_is_twice_the_sensitivity() -> None:
    trials = TrialCount(mean=3.0)
    one = full_batch_plan(relation="replace_one", sigma=100.0)
    other = full_batch_plan(sigma=50.0)
    assert selection_epsilon(one, trials, DELTA) == pytest.approx(
        selection_epsilon(other, trials, DELTA), rel=1e-9
    )


# ------------------------------------------------------------------ calibration


@pytest.mark.parametrize("shape", [1.0, 0.5, math.inf])
@pytest.mark.parametrize(
    "plan",
    [
        make_plan(),
        make_plan(
            sampler=FixedSizeSampler(num_examples=1024, expected_batch_size=64.0),
            relation="replace_one",
        ),
        full_batch_plan(relation="replace_special"),
    ],
    ids=["poisson", "fixed", "full"],
)
def test_calibration_meets_the_total(plan: PrivacyPlan, shape: float) -> None:
    trials = TrialCount(mean=8.0, shape=shape)
    found = calibrate_selection(plan, trials, epsilon=4.0, delta=DELTA)
    assert found.accountant == "rdp"
    assert 3.99 < selection_epsilon(found, trials, DELTA) <= 4.0
    assert found.epsilon(DELTA) < 3.5
    less = with_noise(found, 0.998 * found.spec.noise_multiplier)
    assert selection_epsilon(less, trials, DELTA) > 4.0


def test_composed_calibration_is_one_long_run() -> None:
    """Eight runs of T steps are one of 8 T: the same noise, by the plan's own calibration."""
    plan = make_plan(steps=50)
    found = calibrate_composed([plan] * 8, epsilon=2.0, delta=DELTA)
    long = dataclasses.replace(plan, steps=400).calibrate(epsilon=2.0, delta=DELTA)
    assert {p.spec.noise_multiplier for p in found} == {found[0].spec.noise_multiplier}
    assert found[0].spec.noise_multiplier == pytest.approx(long.spec.noise_multiplier, rel=1e-3)
    assert composed_epsilon(found, DELTA) <= 2.0


def test_different_gaussian_runs_compose() -> None:
    """Full batches of sigma 20 (4 steps) and 40 (9): one Gaussian, mu^2 = 4/400 + 9/1600."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    plans = [full_batch_plan(4, 20.0), full_batch_plan(9, 40.0)]
    exact = get_epsilon_gaussian(1 / math.sqrt(4 / 400 + 9 / 1600), DELTA)
    found = composed_epsilon(plans, DELTA)
    assert exact <= found < 1.15 * exact


def test_runs_of_two_samplers_compose_to_more_than_each() -> None:
    plans = [make_plan(), make_plan(steps=100), full_batch_plan(2, 40.0)]
    assert composed_epsilon(plans, DELTA) > max(plan.epsilon(DELTA) for plan in plans)


def test_num_directions_may_differ_within_one_event() -> None:
    plans = [make_plan(num_directions=1), make_plan(num_directions=16)]
    assert composed_epsilon(plans, DELTA) == pytest.approx(
        make_plan(steps=400).epsilon(DELTA), rel=1e-6
    )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (make_plan(relation="replace_one"), "does not support poisson sampling under relation"),
        (
            make_plan(
                sampler=TruncatedPoissonSampler(
                    num_examples=1024, expected_batch_size=64.0, max_batch_size=128
                )
            ),
            "does not support truncated_poisson",
        ),
        (make_plan(distribution="laplace"), "does not support poisson sampling of Laplace"),
    ],
)
def test_combinations_without_rdp_are_refused(plan: PrivacyPlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selection_epsilon(plan, TrialCount(mean=4.0), DELTA)


def test_compositions_that_no_accountant_knows_are_refused() -> None:
    laplace = make_plan(distribution="laplace")
    with pytest.raises(ValueError, match="no one accountant composes"):
        composed_epsilon([make_plan(), laplace], DELTA)
    with pytest.raises(ValueError, match="one guarantee has one relation"):
        composed_epsilon([make_plan(), make_plan(relation="replace_one")], DELTA)
    with pytest.raises(ValueError, match="grid is empty"):
        composed_epsilon([], DELTA)


def test_without_noise_nothing_is_bounded() -> None:
    mezo = dataclasses.replace(make_plan(), mechanism=NonPrivateMean(expected_batch_size=64.0))
    assert math.isinf(selection_epsilon(mezo, TrialCount(mean=2.0), DELTA))
    assert math.isinf(composed_epsilon([mezo], DELTA))


def test_a_pure_epsilon_is_refused() -> None:
    with pytest.raises(ValueError, match="private selection has no pure epsilon"):
        selection_epsilon(full_batch_plan(distribution="laplace"), TrialCount(mean=2.0), 0.0)


# ------------------------------------------------------------------ the grid


def test_grids_are_coerced_by_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text("clip: [1, 4]\nlearning_rate: [0.1]\n")
    found = parse_grid(["learning-rate=1e-3, 1e-2", "num_directions=1,16"], str(file))
    assert found == {
        "clip": [1.0, 4.0],
        "learning_rate": [1e-3, 1e-2],
        "num_directions": [1, 16],
    }
    assert [type(value) for value in found["num_directions"]] == [int, int]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the grid is empty"),
        (["clip"], "write it as field=value"),
        (["clip="], "write it as field=value"),
        (["clop=1"], "did you mean 'clip'"),
        (["clip=one"], "'one' is not a number"),
        (["clip=1,1.0"], "clip=1.0 appears more than once"),
    ],
)
def test_bad_grids_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_grid(words)


def test_bad_grid_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        parse_grid([], "none.yaml")
    (tmp_path / "flat.yaml").write_text("clip: 3\n")
    with pytest.raises(ValueError, match="a grid file is lines of"):
        parse_grid([], str(tmp_path / "flat.yaml"))


def test_trial_laws_have_names() -> None:
    assert trial_count_from("poisson", 3).shape == math.inf
    assert trial_count_from("0.5", 3).name == "truncated negative binomial (shape 0.5)"
    with pytest.raises(ValueError, match="'binomial' is not one of geometric, poisson"):
        trial_count_from("binomial", 3)


GRIDS = sorted((ROOT / "configs" / "sweep").glob("*.yaml"))


def test_there_are_grid_files() -> None:
    assert {path.stem for path in GRIDS} >= {"roberta-dpzero", "first-order", "opt-dpzero"}


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_grid_files_load_and_say_how_to_run_them(path: Path) -> None:
    found = parse_grid([], str(path))
    assert math.prod(len(values) for values in found.values()) > 1
    assert f"configs/sweep/{path.name}" in path.read_text(encoding="utf-8")


# ------------------------------------------------------------------ scores


def row(trial: int, score: float | None, status: str = "done") -> Row:
    return Row(trial=trial, settings={"clip": float(trial)}, status=status, score=score)


def test_the_best_row() -> None:
    rows = [row(0, 0.5), row(1, 0.7), row(2, 0.7), row(3, None), row(4, None, "failed")]
    assert best_row(rows, "eval_accuracy") is rows[1]  # the earlier of equals
    assert best_row(rows, "eval_loss") is rows[0]
    assert best_row([rows[3], rows[4]], "eval_loss") is rows[3]
    assert best_row([rows[4]], "eval_loss") is None
    assert best_row([], "eval_loss") is None


def test_scores() -> None:
    assert score_of({"eval_f1": 0.25}, "eval_f1") == 0.25
    assert score_of({"eval_f1": math.nan}, "eval_f1") is None
    with pytest.raises(ValueError, match=r"not among the results: eval_f1\. Give --metric"):
        score_of({"eval_f1": 0.25, "train_runtime": 1.0}, "eval_accuracy")


# ------------------------------------------------------------------ the report


def make_report(plan: PrivacyPlan, steps: int | None = None) -> PrivacyReport:
    return PrivacyReport.from_run(
        plan,
        delta=DELTA,
        target_epsilon=None,
        steps_completed=plan.steps if steps is None else steps,
        noise=SecureNoise(),
        direction="rademacher",
    )


def test_a_selected_run_reports_the_total(tmp_path: Path) -> None:
    plan, trials = make_plan(accountant="rdp"), TrialCount(mean=5.0)
    entry = selection_entry(plan, trials, ["clip"], DELTA)
    report = make_report(plan).with_tuning(entry, plan)
    total = selection_epsilon(plan, trials, DELTA)
    assert report.epsilon == total > plan.epsilon(DELTA)
    assert report.statement.startswith("The choice of settings, the weights and the trajectory")
    assert f"({round_up(total)}, 1e-05)-differentially private" in report.statement
    assert "the best of a secret random number of trials (geometric, mean 5)" in report.statement
    assert "Hyper-parameter tuning is included" in report.statement
    assert not any("is not accounted: epsilon covers" in caveat for caveat in report.caveats)
    report.save(tmp_path)
    assert PrivacyReport.load(tmp_path) == report


def test_poisson_entries_survive_json() -> None:
    plan, trials = make_plan(accountant="rdp"), TrialCount(mean=5.0, shape=math.inf)
    entry = selection_entry(plan, trials, ["clip"], DELTA)
    again = json.loads(json.dumps(entry, allow_nan=False))
    assert total_epsilon(plan, again, DELTA) == selection_epsilon(plan, trials, DELTA)


def test_other_tunings_change_words_alone() -> None:
    plan = make_plan()
    plain = make_report(plan)
    loud = plain.with_tuning("not_accounted", plan)
    assert loud.epsilon == plain.epsilon
    assert "NOT ACCOUNTED: this epsilon holds for one run" in loud.statement
    assert ("tuning", "NOT ACCOUNTED; epsilon is for one run alone") in loud.rows()
    public = plain.with_tuning("public", plan)
    assert public.statement == plain.statement
    assert any("The declaration is the user's" in caveat for caveat in public.caveats)
    assert public.with_tuning("none", plan) == plain


def test_tuning_is_for_whole_runs_and_known_entries() -> None:
    plan = make_plan(accountant="rdp")
    entry = selection_entry(plan, TrialCount(mean=5.0), ["clip"], DELTA)
    with pytest.raises(ValueError, match="tuning is accounted for whole runs"):
        make_report(plan, steps=3).with_tuning(entry, plan)
    for wrong in ("free", {"composition": {}}, {}, {"repeat_and_select": {"mean_trials": 2}}):
        with pytest.raises(ValueError, match="in a privacy report; it is one of"):
            make_report(plan).with_tuning(wrong, plan)


def test_a_run_without_privacy_stays_so() -> None:
    mezo = dataclasses.replace(make_plan(), mechanism=NonPrivateMean(expected_batch_size=64.0))
    report = make_report(mezo).with_tuning("not_accounted", mezo)
    assert not report.private
    assert report.statement.startswith("NOT PRIVATE")


def test_a_composition_lists_the_run_itself() -> None:
    plans = [make_plan(), make_plan(), make_plan(num_directions=4)]
    entry = composition_entry(plans, ["num_directions"])
    assert [item["count"] for item in entry["composition"]["plans"]] == [2, 1]
    assert total_epsilon(plans[0], entry, DELTA) == composed_epsilon(plans, DELTA)
    with pytest.raises(ValueError, match="does not list the plan of this very run"):
        total_epsilon(make_plan(steps=7), entry, DELTA)
    entry["composition"]["runs"] = 2
    with pytest.raises(ValueError, match="another number of runs"):
        total_epsilon(plans[0], entry, DELTA)


def write_run(folder: Path, plan: PrivacyPlan, report: PrivacyReport) -> Path:
    """What the Hub's checks look at: weights, configuration, trajectory, report."""
    import torch
    from safetensors.torch import save_file

    from hf_dpzero.ledger.release import Release
    from hf_dpzero.ledger.trajectory import Trajectory

    folder.mkdir()
    save_file({"w": torch.zeros(3)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "bert"}')
    header = {
        "base_model_digest": "ab" * 32,
        "direction_key": "0" * 32,
        "direction": "rademacher",
        "num_directions": 1,
        "num_values": 1,
        "smoothing": 1e-3,
        "weight_decay": 0.0,
        "trainable": ["w"],
        "decayed": [],
        "replayable": True,
        "plan": plan.to_dict(),
    }
    releases = [Release(step, (0.5,), 1e-6) for step in range(report.steps)]
    Trajectory(header, releases).to_safetensors(folder / "trajectory.safetensors")
    report.save(folder)
    return folder


@pytest.fixture
def selected() -> tuple[PrivacyPlan, PrivacyReport]:
    plan = make_plan(steps=3, accountant="rdp")
    entry = selection_entry(plan, TrialCount(mean=5.0), ["clip"], DELTA)
    return plan, make_report(plan).with_tuning(entry, plan)


def test_the_hub_ships_a_selected_run_with_its_total(
    selected: tuple[PrivacyPlan, PrivacyReport], tmp_path: Path
) -> None:
    plan, report = selected
    folder = build_hub_folder(write_run(tmp_path / "run", plan, report), tmp_path / "hub")
    card = (folder / "README.md").read_text()
    assert report.statement in card
    assert f"| epsilon (spent) | {round_up(report.epsilon)} |" in card
    assert "private selection of the best of a random number of trials" in card


def test_the_hub_accepts_a_larger_epsilon_and_refuses_a_smaller_one(
    selected: tuple[PrivacyPlan, PrivacyReport], tmp_path: Path
) -> None:
    plan, report = selected
    strict = dataclasses.replace(report, epsilon=1.01 * report.epsilon)
    build_hub_folder(write_run(tmp_path / "strict", plan, strict), tmp_path / "hub")
    for number, epsilon in enumerate([0.999 * report.epsilon, plan.epsilon(DELTA)]):
        lax = dataclasses.replace(report, epsilon=epsilon)
        folder = write_run(tmp_path / f"lax{number}", plan, lax)
        with pytest.raises(ValueError, match="are not of the same run .*epsilon"):
            build_hub_folder(folder, tmp_path / f"hub{number}")


def test_the_hub_refuses_a_larger_epsilon_without_a_tuning_entry(tmp_path: Path) -> None:
    plan = make_plan(steps=3)
    report = make_report(plan)
    odd = dataclasses.replace(report, epsilon=2 * report.epsilon)
    with pytest.raises(ValueError, match="are not of the same run"):
        build_hub_folder(write_run(tmp_path / "run", plan, odd), tmp_path / "hub")


# ------------------------------------------------------------------ refusals of the command


WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "great", "bad", "awful", "film", "it", "was")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Any) -> Path:
    """A recipe that trains a tiny BERT for three steps on the quickstart's messages."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("sweep")
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    )
    tokenizer.save_pretrained(folder / "model")
    tiny_bert().bert.save_pretrained(folder / "model")
    values = {
        "model_name_or_path": str(folder / "model"),
        "task": "quickstart",
        "max_train_samples": 96,
        "max_eval_samples": 24,
        "max_seq_length": 16,
        "target_epsilon": 4.0,
        "target_delta": 1e-3,
        "expected_batch_size": 8,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "trainable": "^classifier",
        "use_cpu": True,
        "save_strategy": "no",
        "output_dir": str(folder / "out"),
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    return folder / "tiny.yaml"


@pytest.fixture
def quick_trials(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Trials train in this process; returns the recipes that were trained, in order."""
    trained: list[Path] = []

    def train(path: Path, resume: bool, log: Path) -> int:
        trained.append(path)
        log.write_text("trained\n")
        return main.main(["train", str(path)])

    monkeypatch.setattr(sweep_trials, "train", train)
    return trained


def sweep(recipe: Path, folder: Path, *words: Any) -> int:
    return main.main(["sweep", str(recipe), "--output_dir", str(folder), *map(str, words)])


def refusal(capsys: pytest.CaptureFixture[str], recipe: Path, folder: Path, *words: Any) -> str:
    assert sweep(recipe, folder, *words) == 2
    assert not folder.exists()
    return capsys.readouterr().err.strip().splitlines()[-1]


COMPOSED = ("--tuning", "composed")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tuning", "free", "--grid", "clip=1,2"), "tuning='free' is not one of composed"),
        ((*COMPOSED, "--grid", "max_steps=3,4"), "max_steps may not be in a composed grid"),
        ((*COMPOSED, "--grid", "max_steps=3,4"), "Allowed: learning_rate, clip, smoothing"),
        ((*COMPOSED, "--grid", "expected_batch_size=4,8"), "changes the privacy event"),
        ((*COMPOSED, "--grid", "sampling=poisson,full_batch"), "changes the privacy event"),
        ((*COMPOSED, "--grid", "method=dpzero,mezo"), "changes the privacy event"),
        ((*COMPOSED, "--grid", "target_epsilon=1,2"), "the sweep sets the noise"),
        ((*COMPOSED, "--grid", "subset_seed=1,2"), "one fixed set of training rows"),
        ((*COMPOSED, "--grid", "output_dir=a,b"), "is no hyper-parameter"),
        (
            ("--tuning", "public", "--grid", "sampler_key=a,b"),
            "sampler_key may not be in a public grid",
        ),
        ((*COMPOSED, "--grid", "clip=1,2", "--clip", "3"), "both swept and overridden"),
        ((*COMPOSED, "--grid", "clip=1,2", "--selection", "some"), "selection='some'"),
        ((*COMPOSED, "--grid", "clip=1,2", "--mean_trials", "0"), "mean_trials=0.0"),
        ((*COMPOSED, "--grid", "clip=1,2", "--insecure_noise_seed", "1"), "NOT PRIVATE"),
        ((*COMPOSED, "--grid", "clip=1,-2"), "clip=-2.0"),
        (
            (*COMPOSED, "--grid", "clip=1,2", "--neighboring_relation", "replace_one"),
            "does not support poisson sampling under relation='replace_one'",
        ),
        (
            (*COMPOSED, "--grid", "clip=1,2", "--method", "mezo", "--target_epsilon", "null"),
            "nothing to account",
        ),
    ],
)
def test_what_may_not_be_swept(
    words: tuple[str, ...],
    message: str,
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in refusal(capsys, recipe, tmp_path / "D", *words)


def test_events_are_compared_whatever_the_field_is_called() -> None:
    """The list of names is for early messages; what protects is the comparison of events."""
    points = [{"clip": 1.0, "odd": 1}, {"clip": 2.0, "odd": 1}, {"clip": 1.0, "odd": 2}]
    plans = [make_plan(), make_plan(num_directions=4), make_plan(steps=7)]
    with pytest.raises(ValueError, match="^odd changes the privacy event"):
        refuse_different_events(points, plans)
    refuse_different_events(points[:2], plans[:2])


def test_dry_run_prints_the_cost_and_writes_nothing(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*COMPOSED, "--grid", "clip=1,4", "--grid", "num_directions=1,2", "--dry_run"]
    assert sweep(recipe, tmp_path / "D", *words) == 0
    out = capsys.readouterr().out
    assert "grid: 4 settings of clip, num_directions" in out
    assert "mean 4" in out
    assert "epsilon in total" in out
    assert not (tmp_path / "D").exists()


# ------------------------------------------------------------------ secrecy


def settings_of(recipe: Path, folder: Path, **changes: Any) -> SweepSettings:
    values: dict[str, Any] = {
        "recipe": str(recipe),
        "overrides": {},
        "grid": {"clip": [1.0, 4.0], "learning_rate": [1e-3, 1e-2]},
        "tuning": "composed",
        "selection": "random",
        "trials": TrialCount(mean=4.0),
        "metric": None,
        "output_dir": folder,
        **changes,
    }
    return SweepSettings(**values)


PREPARED = Prepared(extra={}, num_examples=96, metric="eval_accuracy", tuning="none")


def test_points_are_drawn_uniformly_and_their_number_varies(recipe: Path, tmp_path: Path) -> None:
    drawn = [draw_points(settings_of(recipe, tmp_path)) for _ in range(300)]
    assert len({len(points) for points in drawn}) > 5
    counts = Counter(tuple(point.values()) for points in drawn for point in points)
    total = sum(counts.values())
    assert len(counts) == 4
    assert all(abs(count / total - 0.25) < 0.08 for count in counts.values())


def test_a_continued_sweep_keeps_its_draw(recipe: Path, tmp_path: Path) -> None:
    settings = settings_of(recipe, tmp_path / "D", trials=TrialCount(mean=50.0))
    first = Workspace(settings, PREPARED).trials
    assert Workspace(settings, PREPARED).trials == first
    assert (tmp_path / "D" / "_private").stat().st_mode & 0o777 == 0o700
    other = dataclasses.replace(settings, grid={"clip": [1.0, 5.0]})
    with pytest.raises(ValueError, match="holds a sweep with other settings"):
        Workspace(other, PREPARED)


def test_a_folder_in_use_is_refused(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match="holds other files"):
        Workspace(settings_of(recipe, tmp_path), PREPARED)


def test_an_unfinished_run_is_set_aside_in_private(recipe: Path, tmp_path: Path) -> None:
    workspace = Workspace(settings_of(recipe, tmp_path / "D"), PREPARED)
    folder = workspace.folder(0)
    folder.mkdir(parents=True)
    (folder / "trajectory.ledger").write_text("x")
    assert sweep_trials._resume(workspace, folder) is False
    assert not folder.exists()
    assert (tmp_path / "D/_private/abandoned/000-0/trajectory.ledger").is_file()
    (folder / "checkpoint-2").mkdir(parents=True)
    assert sweep_trials._resume(workspace, folder) is True


def public_files(folder: Path) -> dict[str, bytes]:
    """Every file outside D/_private and its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "_private" not in path.relative_to(folder).parts
    }


@pytest.mark.slow
def test_a_private_selection_end_to_end(
    recipe: Path,
    tmp_path: Path,
    quick_trials: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(TrialCount, "draw", lambda self: 3)
    folder = tmp_path / "D"
    words = [*COMPOSED, "--grid", "learning_rate=1e-3,1e-2", "--grid", "clip=1,4"]
    assert sweep(recipe, folder, *words) == 0
    said = capsys.readouterr().out
    assert len(quick_trials) == 3
    rows = [json.loads(line) for line in (folder / "_private/trials.jsonl").open()]
    assert [found["trial"] for found in rows] == [0, 1, 2]

    found = json.loads((folder / "sweep.json").read_text())
    best = max(rows, key=lambda one: one["score"])
    assert found["best"]["settings"] == best["settings"]
    assert found["trial_count"] == {"law": "geometric", "mean": 4.0}
    assert 3.98 < found["epsilon"] <= 4.0
    assert "trials" not in found

    report = PrivacyReport.load(folder / "best")
    assert report.epsilon == pytest.approx(found["epsilon"])
    assert report.target_epsilon == 4.0
    assert report.private
    assert "repeat_and_select" in report.tuning
    assert report.noise_multiplier == found["noise_multiplier"]
    for trial in range(3):
        values = read_recipe(folder / f"_private/trials/{trial:03d}.yaml")
        assert values["noise_multiplier"] == found["noise_multiplier"]
        assert values["report_to"] == ["none"]

    files = public_files(folder)
    assert set(files) >= {"sweep.json", "sweep.md", "best/privacy_report.json", "best/README.md"}
    assert "sweep.png" not in files
    for name, content in files.items():
        assert b"/_private" not in content, name
        assert b"trials/0" not in content, name
    assert "trial 1" not in said
    build_hub_folder(folder / "best", tmp_path / "hub")

    before = public_files(folder)
    assert sweep(recipe, folder, *words) == 0  # repeated: nothing runs again
    assert len(quick_trials) == 3
    assert public_files(folder) == before


@pytest.mark.slow
def test_nothing_public_depends_on_the_losers(
    recipe: Path, tmp_path: Path, quick_trials: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same winner among other and more losers: the public files are the same, byte for byte."""
    monkeypatch.setattr(TrialCount, "draw", lambda self: 1)
    words = [*COMPOSED, "--grid", "learning_rate=1e-3,1e-2", "--mean_trials", 2]
    one = tmp_path / "one"
    assert sweep(recipe, one, *words) == 0
    before = public_files(one)

    state = one / "_private/trials.json"
    values = json.loads(state.read_text())
    values["trials"] += [{"learning_rate": 1e-2}, {"learning_rate": 1e-3}]
    state.write_text(json.dumps(values))
    scores = iter([-1.0, -2.0])
    monkeypatch.setattr(sweep_trials, "score_of", lambda metrics, metric: next(scores))
    assert sweep(recipe, one, *words) == 0
    assert len(quick_trials) == 3
    assert public_files(one) == before


@pytest.mark.slow
def test_no_trial_releases_nothing(
    recipe: Path, tmp_path: Path, quick_trials: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrialCount, "draw", lambda self: 0)
    words = [*COMPOSED, "--grid", "clip=1,4", "--trial_count", "poisson"]
    assert sweep(recipe, tmp_path / "D", *words) == 0
    assert quick_trials == []
    assert set(public_files(tmp_path / "D")) == {"sweep.json", "sweep.md"}
    assert "No trial ran" in (tmp_path / "D/sweep.md").read_text()


@pytest.mark.slow
def test_a_failed_secret_trial_stops_the_sweep(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrialCount, "draw", lambda self: 2)
    monkeypatch.setattr(sweep_trials, "train", lambda path, resume, log: log.write_text("x") and 1)
    assert sweep(recipe, tmp_path / "D", *COMPOSED, "--grid", "clip=1,4") == 2
    assert public_files(tmp_path / "D") == {}


@pytest.mark.slow
def test_all_runs_may_be_released(
    recipe: Path, tmp_path: Path, quick_trials: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "D"
    words = [*COMPOSED, "--selection", "all", "--grid", "clip=1,4", "--grid", "max_steps=2,3"]
    assert sweep(recipe, folder, *words) == 0
    assert "trial 4 of 4" in capsys.readouterr().out
    found = json.loads((folder / "sweep.json").read_text())
    assert [one["settings"]["max_steps"] for one in found["trials"]] == [2, 3, 2, 3]
    assert 3.98 < found["epsilon"] <= 4.0
    for trial in range(4):
        run = folder / f"trials/{trial:03d}"
        report = PrivacyReport.load(run)
        assert report.epsilon == pytest.approx(found["epsilon"])
        assert report.tuning["composition"]["runs"] == 4
        build_hub_folder(run, tmp_path / f"hub{trial}")
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_sweep_that_is_not_accounted_says_so_everywhere(
    recipe: Path, tmp_path: Path, quick_trials: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "D"
    words = ["--tuning", "not_accounted", "--grid", "clip=1,4", "--metric", "eval_loss"]
    assert sweep(recipe, folder, *words) == 0
    assert "NOT ACCOUNTED" in capsys.readouterr().out
    found = json.loads((folder / "sweep.json").read_text())
    assert found["epsilon"] is None
    assert found["epsilon_if_composed"] > 4.0
    scores = [one["score"] for one in found["trials"]]
    assert found["best"]["score"] == min(scores)
    for trial in range(2):
        report = PrivacyReport.load(folder / f"trials/{trial:03d}")
        assert report.tuning == "not_accounted"
        assert "NOT ACCOUNTED" in report.statement
    for name in ("sweep.md", "best.yaml"):
        assert "NOT ACCOUNTED" in (folder / name).read_text()
    assert load_recipe(folder / "best.yaml").training.clip == found["best"]["settings"]["clip"]


@pytest.mark.slow
def test_a_public_sweep_writes_a_recipe_for_the_private_data(
    recipe: Path, tmp_path: Path, quick_trials: list[Path]
) -> None:
    """Data overrides name the public stand-in and stay out of best.yaml; other overrides stay in."""
    folder = tmp_path / "D"
    words = ["--tuning", "public", "--grid", "clip=1,4", "--subset_seed", 5, "--smoothing", 0.01]
    assert sweep(recipe, folder, *words) == 0
    assert read_recipe(folder / "trials/000.yaml")["subset_seed"] == 5
    best = read_recipe(folder / "best.yaml")
    assert "subset_seed" not in best
    assert best["smoothing"] == 0.01
    assert best["target_epsilon"] == 4.0
    header = (folder / "best.yaml").read_text().split("\n\n")[0]
    assert "declaration is the user's" in header
    assert "declaration is the user's" in (folder / "sweep.md").read_text()
    assert PrivacyReport.load(folder / "trials/001").tuning == "public"


@pytest.mark.slow
def test_failures_are_rows_of_the_table(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(path: Path, resume: bool, log: Path) -> int:
        log.write_text("error: it broke\n")
        return main.main(["train", str(path)]) if read_recipe(path)["clip"] == 1.0 else 2

    monkeypatch.setattr(sweep_trials, "train", train)
    assert sweep(recipe, tmp_path / "D", "--tuning", "not_accounted", "--grid", "clip=1,4") == 0
    table = (tmp_path / "D/sweep.md").read_text()
    assert "| 4.0 | failed |" in table
    found = json.loads((tmp_path / "D/sweep.json").read_text())
    assert found["trials"][1]["message"] == "error: it broke"


@pytest.mark.slow
def test_an_interrupted_sweep_continues_in_a_child_process(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the second trial; repeated, the first is not run again. Trials are real children."""
    folder, real, trained = tmp_path / "D", sweep_trials.train, []

    def interrupted(path: Path, resume: bool, log: Path) -> int:
        if trained:
            raise KeyboardInterrupt
        trained.append(path)
        return real(path, resume, log)

    words = ["--tuning", "not_accounted", "--grid", "clip=1,4"]
    monkeypatch.setattr(sweep_trials, "train", interrupted)
    assert sweep(recipe, folder, *words) == 130
    assert not (folder / "sweep.json").exists()
    monkeypatch.setattr(sweep_trials, "train", real)
    first = (folder / "trials/000/trajectory.ledger").read_bytes()
    assert sweep(recipe, folder, *words) == 0
    assert (folder / "trials/000/trajectory.ledger").read_bytes() == first
    assert [one["status"] for one in json.loads((folder / "sweep.json").read_text())["trials"]] == [
        "done",
        "done",
    ]
