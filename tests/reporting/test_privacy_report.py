"""The privacy report says what was spent, in numbers and words, and never less."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import shutil
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import pytest
from finished_runs import report_of
from tiny_runs import build, tiny_model

from hf_dpzero.privacy.mechanisms import DPSGD, NonPrivateMean, ScalarMechanism
from hf_dpzero.privacy.noise import InsecureSeededNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FullBatchSampler, PoissonSampler
from hf_dpzero.reporting.caveats import weak_claims
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.model_card import model_card
from hf_dpzero.reporting.plan_facts import BudgetMeter
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.provenance import Origin, base_names, earlier_runs
from hf_dpzero.reporting.verification import bound_to
from hf_dpzero.reporting.wording import round_up

KEYS = """
    target_epsilon target_delta epsilon planned_epsilon delta accountant neighboring_relation
    privacy_unit sampling
    sampling_probability expected_batch_size num_examples steps planned_steps shipped_step average_last
    noise_multiplier noise_distribution clip schedules groups direction num_directions learning_rate
    noise_source private method log_private_diagnostics tuning
    earlier_runs set_aside budget base_weights forward_passes processes parts weights_digest
    other_terms deployment statement caveats caveat_grades versions
""".split()  # noqa: SIM905


def poisson_plan(steps: int = 40, sigma: float = 2.0) -> PrivacyPlan:
    return PrivacyPlan(
        sampler=PoissonSampler(num_examples=1024, expected_batch_size=64.0),
        mechanism=ScalarMechanism(
            clip=50.0, noise_multiplier=sigma, expected_batch_size=64.0, num_directions=4
        ),
        steps=steps,
    )


def full_batch_plan(steps: int = 25, sigma: float = 5.0) -> PrivacyPlan:
    return PrivacyPlan(
        sampler=FullBatchSampler(num_examples=100, expected_batch_size=100.0),
        mechanism=ScalarMechanism(clip=1.0, noise_multiplier=sigma, expected_batch_size=100.0),
        steps=steps,
    )


def mezo_plan() -> PrivacyPlan:
    return dataclasses.replace(poisson_plan(), mechanism=NonPrivateMean(expected_batch_size=64.0))


def report(plan: PrivacyPlan | None = None, **settings: Any) -> PrivacyReport:
    return report_of(plan or poisson_plan(), **settings)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """delta(epsilon) of a Gaussian with shift mu (Balle and Wang 2018, Theorem 5)."""
    phi = NormalDist().cdf
    first = phi(mu / 2 - epsilon / mu)
    return first - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


# ---- the numbers


def test_keys_are_those_of_the_file_format() -> None:
    assert list(report().to_dict()) == KEYS


def test_numbers_come_from_the_plan() -> None:
    found = report(direction="sphere").to_dict()
    expected = {
        "target_epsilon": 2.0,
        "target_delta": 1e-5,
        "accountant": "pld",
        "neighboring_relation": "add_or_remove_one",
        "privacy_unit": "example",
        "sampling": "poisson",
        "sampling_probability": 64 / 1024,
        "expected_batch_size": 64.0,
        "num_examples": 1024,
        "steps": 40,
        "planned_steps": 40,
        "noise_multiplier": 2.0,
        "noise_distribution": "gaussian",
        "clip": 50.0,
        "direction": "sphere",
        "num_directions": 4,
        "noise_source": "os_entropy_exact",
        "private": True,
        "method": "dpzero",
        "log_private_diagnostics": False,
    }
    assert {name: found[name] for name in expected} == expected


def test_epsilon_is_the_analytic_one_of_a_full_batch_gaussian() -> None:
    # 25 steps with sigma = 5: one Gaussian of shift mu = sqrt(25) / 5 = 1.
    found = report(full_batch_plan())
    assert gaussian_delta(1.0, found.epsilon) == pytest.approx(1e-5, rel=1e-3)


def test_stopping_early_reports_what_was_spent_and_names_the_whole_plan() -> None:
    # 4 of 25 steps: mu = sqrt(4) / 5 = 0.4.
    found = report(full_batch_plan(), steps=4)
    assert gaussian_delta(0.4, found.epsilon) == pytest.approx(1e-5, rel=1e-3)
    assert (found.steps, found.planned_steps) == (4, 25)
    planned = round_up(full_batch_plan().epsilon(1e-5))
    assert "4 of 25 steps that were taken" in found.statement
    assert found.statement.endswith(f"claim the epsilon of the whole plan, {planned}.")
    assert "whole plan" not in report(full_batch_plan(), steps=25).statement


@pytest.mark.parametrize("steps", [-1, 41])
def test_steps_outside_the_plan_are_refused(steps: int) -> None:
    assert report(steps=0).epsilon == 0.0
    with pytest.raises(ValueError, match=rf"steps={steps} is outside 0\.\.40"):
        report(steps=steps)


def test_versions_name_what_computed_the_claim() -> None:
    import numpy
    import torch

    found = report().versions
    assert torch.__version__.startswith(found["torch"])  # some builds add +cu132
    assert found["numpy"] == numpy.__version__
    assert set(found) <= {"hf_dpzero", "torch", "transformers", "dp_accounting", "opendp", "numpy"}


# ---- what is not private


def test_mezo_is_not_private() -> None:
    found = report(mezo_plan())
    assert not found.private
    assert math.isinf(found.epsilon)
    assert (found.target_epsilon, found.target_delta) == (None, None)
    assert (found.noise_source, found.noise_multiplier) == ("none", 0.0)
    assert found.statement.startswith("NOT PRIVATE: the method mezo")
    assert str(found).startswith("NOT PRIVATE")
    assert not report(poisson_plan(sigma=0.0)).private


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"noise_source": InsecureSeededNoise.name}, "seeded generator"),
        ({"log_private_diagnostics": True}, "log_private_diagnostics"),
        ({"sampler_key_is_secret": False}, "sampler_key was set by hand"),
    ],
)
def test_settings_that_break_the_guarantee_are_said_loudly(
    settings: dict[str, Any], reason: str
) -> None:
    found = report(**settings)
    assert not found.private
    assert found.statement.startswith("NOT PRIVATE")
    assert reason in found.statement
    assert str(found).startswith("NOT PRIVATE")
    assert "differentially private" not in str(found)


def test_full_batches_hide_nothing_so_their_key_may_be_known() -> None:
    assert report(full_batch_plan(), sampler_key_is_secret=False).private


# ---- the words


def test_statement_names_epsilon_delta_and_neighbours() -> None:
    found = report(full_batch_plan())
    shown = round_up(found.epsilon)
    assert float(shown) >= found.epsilon
    assert f"are ({shown}, 1e-05)-differentially private under adding or removing one training" in (
        found.statement
    )
    assert "every example in every step" in found.statement
    replaced = report(dataclasses.replace(full_batch_plan(), relation="replace_one"))
    assert "replacing one training example by another" in replaced.statement
    assert report().statement.endswith(
        "40 steps of dpzero with Poisson sampling with probability 0.0625, gaussian noise of "
        "multiplier 2, accountant pld."
    )


def test_terminal_form_is_a_few_lines_with_the_budget_first() -> None:
    found = report()
    lines = str(found).splitlines()
    assert lines[0] == (
        f"(epsilon = {round_up(found.epsilon)}, delta = 1e-05)-differentially private (target 2)"
    )
    assert 4 <= len(lines) <= 10
    assert max(map(len, lines)) < 120
    assert any("K = 4 rademacher, clip C = 50, noise multiplier 2" in line for line in lines)


def test_caveats_state_what_is_assumed() -> None:
    text = " ".join(report().caveats)
    for assumption in ("Evaluation data", "Hyper-parameter search", "number of training examples"):
        assert assumption in text
    assert "stopped after" not in text
    assert "1/n" not in text and "is above 20" not in text and "q T" not in text


def test_a_caveat_says_what_places_in_a_forward_pass_may_cost() -> None:
    def own(passes: str) -> str:
        (words,) = set(report(forward_passes=passes).caveats) - set(report().caveats)
        return words

    several, alone = own("fixed shapes"), own("one example")
    assert "at most 2^-8 of the clipping norm" in several and "invented rows" in several
    assert "at most 3 clipping norms in place of 1." in several  # without A2: three radii
    assert "by itself" in alone and "tried" not in alone


def test_own_caveats_of_a_method_and_of_a_large_delta() -> None:
    grouped = DPSGD(
        clip=1.0,
        noise_multiplier=5.0,
        expected_batch_size=100.0,
        clipping="averaged",
        clip_groups=2,
    )
    plan = dataclasses.replace(full_batch_plan(), mechanism=grouped)
    averaged = report(plan, forward_passes="fixed shapes")
    assert any("at most 4 clipping norms in place of 2." in caveat for caveat in averaged.caveats)
    assert any("half of the stated noise multiplier" in caveat for caveat in averaged.caveats)
    large = report(full_batch_plan(), delta=0.02)  # n = 100
    assert any("delta = 0.02 is not below 1/n = 0.01" in caveat for caveat in large.caveats)


@pytest.mark.parametrize(
    ("epsilon", "delta", "n", "steps", "words"),
    [
        (20.5, 1e-5, 1000, 100, "epsilon = 20.5 is above 20"),
        (20.0, 0.001, 1000, 100, "delta = 0.001 is not below 1/n = 0.001"),
        (20.0, 0.0011, 100, 0.01, "q T = 0.001 is below delta"),
        (20.0, 1e-5, 99, 100, "n = 99 is below 100"),
        (20.0, 1e-5, 100, 100, ""),
    ],
)
def test_a_claim_that_says_little_says_so(epsilon, delta, n, steps, words):
    """q = 10 / n."""
    sampler = PoissonSampler(num_examples=n, expected_batch_size=10)
    plan = SimpleNamespace(sampler=sampler, steps=steps, after=())
    found = weak_claims(plan, epsilon, delta)
    assert len(found) == bool(words) and all(words in text for text in found)


def test_a_weak_claim_stands_on_screen_and_among_the_caveats():
    found = report(full_batch_plan(), delta=0.02)
    assert "  says little delta = 0.02 is not below 1/n = 0.01: " in str(found)
    assert "says little" not in str(report())


@pytest.mark.parametrize("value", [0.0, 1.9981123, 2.0, 0.000123456, 12345.678])
def test_round_up_never_understates(value: float) -> None:
    shown = float(round_up(value))
    assert value <= shown <= value * 1.001


# ---- the file


@pytest.mark.parametrize("plan", [poisson_plan(), mezo_plan()], ids=["private", "mezo"])
def test_save_and_load_round_trip_through_strict_json(plan: PrivacyPlan, tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    original = report(plan)
    path = original.save(tmp_path)
    assert path == tmp_path / REPORT_FILE
    json.loads(path.read_text(), parse_constant=refuse)
    assert PrivacyReport.load(tmp_path) == PrivacyReport.load(path) == original
    assert [p.name for p in tmp_path.iterdir()] == [REPORT_FILE]


def test_a_failed_write_leaves_the_old_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = report()
    old.save(tmp_path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("hf_dpzero.reporting.privacy_report.os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        report(steps=3).save(tmp_path)
    assert PrivacyReport.load(tmp_path) == old
    assert [p.name for p in tmp_path.iterdir()] == [REPORT_FILE]


_RUN = {"folder": "leaky", "private": True, "statement": ""}
REFUSED = [
    ({"epsilon": "inf"}, "private=true, but .*no finite epsilon"),
    ({"method": "mezo"}, "private=true, but .*mezo"),
    ({"log_private_diagnostics": True}, "private=true, but .*un-noised"),
    ({"noise_source": InsecureSeededNoise.name}, "private=true, but .*seeded"),
    ({"epsilon": -1.0}, "epsilon=-1.0"),
    ({"epsilon": "two"}, "wrong type"),
    ({"steps": 41}, "steps=41 is outside 0..40"),
    ({"average_last": 0}, "average_last=0 is outside 1..40"),
    ({"unknown": 1}, "missing or unknown: unknown"),
    ({"earlier_runs": "leaky"}, "earlier_runs="),
    ({"earlier_runs": ["leaky"]}, "earlier_runs="),
    ({"earlier_runs": [{"folder": "leaky"}]}, "earlier_runs="),
    ({"earlier_runs": [{**_RUN, "private": "no"}]}, "earlier_runs="),
    ({"earlier_runs": [{**_RUN, "extra": 1}]}, "earlier_runs="),
    ("{", "is not JSON"),
    ("[]", "holds a list"),
    ('{"epsilon": 1}', "missing or unknown: accountant"),
]
"""What a file holds in place of a report's keys, and what is said of it."""


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_edited_and_damaged_reports_are_refused(
    change: dict[str, Any] | str, message: str, tmp_path: Path
) -> None:
    text = change if isinstance(change, str) else json.dumps({**report().to_dict(), **change})
    (tmp_path / REPORT_FILE).write_text(text)
    with pytest.raises(ValueError, match=message):
        PrivacyReport.load(tmp_path)


# ---- bases that were trained before


def folder_of(path: Path, found: PrivacyReport) -> Path:
    path.mkdir(parents=True)
    found.save(path)
    return path


def runs_in(*names: Any) -> list[dict[str, Any]]:
    """The earlier runs of a base that was loaded from these folders or Hub ids."""
    return earlier_runs([Origin.of(str(name), None) for name in names])


def test_a_base_without_a_report_adds_nothing(tmp_path: Path) -> None:
    assert runs_in(tmp_path, "roberta-large", "") == []
    assert report(earlier_runs=[]) == report()
    assert report().earlier_runs == []


def test_a_private_base_is_a_caveat_with_its_statement(tmp_path: Path) -> None:
    base = report(full_batch_plan())
    found = report(earlier_runs=runs_in(folder_of(tmp_path / "first", base)))
    assert found.earlier_runs == [{"folder": "first", "private": True, "statement": base.statement}]
    (caveat,) = set(found.caveats) - set(report().caveats)
    assert (
        "says that it is (4.378, 1e-05)-differentially private under adding or removing one"
        in caveat
    )
    assert "the budgets add up" in caveat
    assert "(first)" in caveat
    assert found.statement == report().statement
    assert found.caveats[0] == report().caveats[0]
    assert any(
        line.startswith("  base model") and "first" in line for line in str(found).split("\n")
    )
    assert "base model" not in dict(report().rows())


def test_what_nothing_can_see_is_the_first_caveat(tmp_path: Path) -> None:
    """A loss that closes over the training rows leaves no trace: a reviewer reads of it first."""
    leaky = runs_in(folder_of(tmp_path / "leaky", report(mezo_plan())))
    for found in (report(full_batch_plan()), report(mezo_plan()), report(earlier_runs=leaky)):
        assert "class weight counted on private labels" in found.caveats[0]
        assert "nothing here can see it" in found.caveats[0]
    page = (Path(__file__).parents[2] / "docs" / "privacy_reference.md").read_text(encoding="utf-8")
    first = page.split("## What is not covered")[1].strip().split("\n- ")[0]
    assert "class weights" in first and "the report stays clean" in first


def test_a_base_that_is_not_private_comes_before_the_usual_caveats(tmp_path: Path) -> None:
    base = report(mezo_plan())
    found = report(earlier_runs=runs_in(folder_of(tmp_path / "leaky", base)))
    assert found.private  # of its own steps; the base's rows may be others
    assert base.statement.startswith("NOT PRIVATE: the method mezo")
    assert "says that it is NOT PRIVATE." in found.caveats[1]
    assert [found.caveats[0], *found.caveats[2:]] == report().caveats
    assert found.statement.startswith(report().statement)
    assert "leaky, which is NOT PRIVATE" in found.statement
    assert "leaky (NOT PRIVATE)" in dict(found.rows())["base model"]


def test_what_lies_under_the_base_is_not_forgotten(tmp_path: Path) -> None:
    """mezo, then dpzero, then dpzero: the last one's base is private, and its base was not."""
    leaky = folder_of(tmp_path / "leaky", report(mezo_plan()))
    middle = report(full_batch_plan(), earlier_runs=runs_in(leaky))
    found = report(earlier_runs=runs_in(folder_of(tmp_path / "middle", middle)))
    assert [(run["folder"], run["private"]) for run in found.earlier_runs] == [
        ("middle", True),
        ("leaky", False),
    ]
    assert "says that it is NOT PRIVATE." in found.caveats[1]
    assert sum("says that it is (4.378" in caveat for caveat in found.caveats) == 1
    assert "leaky, which is NOT PRIVATE" in found.statement


def test_a_folder_that_several_parts_came_from_counts_once(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "first", report())
    assert len(runs_in(base, base / "." / ".." / "first")) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"epsilon": 1}', "\udcff"])
def test_a_base_with_a_damaged_report_is_taken_as_not_private(tmp_path: Path, text: str) -> None:
    (tmp_path / REPORT_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    (entry,) = runs_in(tmp_path)
    assert not entry["private"]
    assert entry["statement"].startswith("NOT PRIVATE")
    assert str(tmp_path) not in json.dumps(entry)


def test_earlier_runs_survive_the_file_and_tuning(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "leaky", report(mezo_plan()))
    plan = poisson_plan()
    found = report(plan, earlier_runs=runs_in(base))
    found.save(tmp_path)
    assert PrivacyReport.load(tmp_path) == found
    tuned = PrivacyReport.load(tmp_path).with_tuning("not_accounted", plan, {})
    assert tuned.caveats[:2] == found.caveats[:2]
    assert "leaky, which is NOT PRIVATE" in tuned.statement
    assert tuned.with_tuning("none", plan, {}) == found
    assert str(tmp_path) not in json.dumps(found.to_dict())


def train(folder: Path, base: Path | None = None, **settings: Any) -> Any:
    """A trainer, after one step on `base` and saving."""
    model = None if base is None else type(tiny_model()).from_pretrained(base)
    secret = {"testing.sampler_key": None, "testing.insecure_noise_seed": None}
    trainer = build(folder, model, max_steps=1, **secret, **settings)
    trainer.train()
    trainer.save_model()
    return trainer


@pytest.fixture(scope="module")
def leaky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder "leaky" of a run that is not private."""
    folder = tmp_path_factory.mktemp("runs") / "leaky"
    train(folder, method="mezo", noise_multiplier=None)
    return folder


def test_training_on_top_of_a_leaky_run_says_so(leaky: Path, tmp_path: Path, caplog: Any) -> None:
    trainer = train(tmp_path / "second", leaky)
    warned = [r for r in caplog.records if r.levelno == logging.WARNING and "leaky" in r.message]
    assert len(warned) == 1
    found = PrivacyReport.load(tmp_path / "second")
    assert found == bound_to(trainer.privacy_report(), tmp_path / "second")
    assert found.private
    assert "says that it is NOT PRIVATE." in found.caveats[1]
    assert warned[0].getMessage() == found.caveats[1]
    folder = build_hub_folder(tmp_path / "second", tmp_path / "hub")
    assert PrivacyReport.load(folder) == found
    card = (folder / "README.md").read_text()
    for text in (card, (folder / REPORT_FILE).read_text()):
        assert str(tmp_path) not in text and str(leaky.parent) not in text
    assert "leaky, which is NOT PRIVATE" in card.split("## Privacy")[0]
    limitations = card.split("## Limitations")[1].strip()
    assert limitations.startswith("".join(f"- *check first*: {c}\n" for c in found.caveats[:2]))


def test_the_base_is_looked_at_before_the_run_writes_over_it(leaky: Path, tmp_path: Path) -> None:
    """A base in the run's own output_dir: its report is replaced by the run's."""
    base = tmp_path / "both"
    base.mkdir()
    for name in (REPORT_FILE, "config.json", "model.safetensors"):
        shutil.copy(leaky / name, base)
    trainer = train(base, base)
    assert PrivacyReport.load(base).private
    for found in (PrivacyReport.load(base), trainer.privacy_report()):
        assert [run["private"] for run in found.earlier_runs] == [False]


def test_an_adapter_names_its_base(leaky: Path) -> None:
    from peft import LoraConfig, TaskType, get_peft_model

    base = type(tiny_model()).from_pretrained(leaky)
    model = get_peft_model(base, LoraConfig(task_type=TaskType.SEQ_CLS, r=2))
    assert base_names(model) == [str(leaky)]
    base.config._name_or_path = ""
    assert base_names(model) == [str(leaky)]
    base.bert.config = copy.copy(base.config)  # an encoder that was trained elsewhere
    base.bert.config._name_or_path = "encoder"
    assert base_names(model) == [str(leaky), "encoder"]


# ---- the meter and the plot


class CountingPlan:
    """epsilon = sqrt(step), and a count of evaluations."""

    def __init__(self, steps: int) -> None:
        self.steps, self.asked = steps, []

    def epsilon(self, delta: float, at: int) -> float:
        self.asked.append(at)
        return math.sqrt(at)


def test_meter_never_understates_and_is_exact_at_the_end() -> None:
    plan = poisson_plan(steps=11)
    meter = BudgetMeter(plan, 1e-5, points=4)
    shown = [meter.at(step) for step in range(plan.steps + 1)]
    exact = [plan.epsilon(1e-5, at=step) for step in range(plan.steps + 1)]
    assert all(s >= e for s, e in zip(shown, exact, strict=True))
    assert (shown[0], shown[-1]) == (0.0, exact[-1])
    assert shown == sorted(shown)


@pytest.mark.parametrize("steps", [1, 3, 20, 21, 1000, 1003])
def test_meter_is_lazy_and_evaluates_a_short_grid_once(steps: int) -> None:
    plan = CountingPlan(steps)
    meter = BudgetMeter(plan, 1e-5)  # type: ignore[arg-type]
    assert plan.asked == []
    for _ in range(2):
        for step in range(steps + 1):
            assert math.sqrt(step) <= meter.at(step) <= math.sqrt(step + math.ceil(steps / 20))
    assert len(plan.asked) == len(set(plan.asked)) == min(20, steps)
    assert plan.asked[-1] == steps


def test_meter_is_infinite_without_privacy_and_refuses_steps_outside_the_plan() -> None:
    assert math.isinf(BudgetMeter(mezo_plan(), 1e-5).at(1))
    for step in (-1, 41):
        with pytest.raises(ValueError, match=rf"step={step} is outside 0\.\.40"):
            BudgetMeter(poisson_plan(), 1e-5).at(step)


def test_a_notebook_shows_what_print_shows():
    shown = []
    report()._repr_pretty_(SimpleNamespace(text=shown.append), cycle=False)
    assert shown == [str(report())]


# ---- the processes of a run, and the links between them

FOUR = "4 (2 shares of the rows x 2 shares of the directions)"


def links(found: PrivacyReport) -> list[str]:
    return [caveat for caveat in found.caveats if "torch.distributed" in caveat]


def row(found: PrivacyReport) -> str | None:
    return dict(found.rows()).get("processes")


def test_one_process_adds_no_caveat() -> None:
    one, unknown = report(processes="1"), report()
    assert row(one) == "1 at the start" and one.caveats == unknown.caveats and links(one) == []
    assert row(unknown) is None and unknown.processes == ""


def test_several_are_told_with_what_is_assumed() -> None:
    found = report(processes=FOUR)
    assert row(found) == f"{FOUR} at the start"
    (caveat,) = links(found)
    assert f"in several processes, {FOUR}; resumed, it may have gone on" in caveat
    assert "secret key" in caveat and "neither encrypted nor authenticated" in caveat


def test_a_report_without_the_entry_is_read_as_one_that_does_not_know(tmp_path: Path) -> None:
    old = report().to_dict()
    assert old.pop("processes") == ""
    (tmp_path / REPORT_FILE).write_text(json.dumps(old))
    found = PrivacyReport.load(tmp_path)
    assert found == report() and row(found) is None


def test_the_card_shows_the_row_and_the_caveat() -> None:
    found = report(processes=FOUR)
    card = model_card(found).content
    assert f"| processes | {row(found)} |" in card and f": {links(found)[0]}" in card
    assert "| processes |" not in model_card(report()).content


@pytest.mark.parametrize("page", ["README.md", "docs/how_to/my_csv.md"])
def test_reports_in_documents_have_the_lines_of_a_report(page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    block = text.partition("-differentially private (target ")[2].partition("```")[0]
    labels = [line[2:].split("  ")[0] for line in block.splitlines()[1:]]
    lines = [label[:11].strip() for label, _ in report(processes="1").rows()]
    assert [label[:11].strip() for label in labels] == lines
