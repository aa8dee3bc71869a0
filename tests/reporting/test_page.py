"""`report.html` says what the report says, over steps, and is one file that loads and runs nothing."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from finished_runs import report_of, trajectory_of, write_run
from tiny_runs import build

from hf_dpzero.ledger.trajectory import Release, Trajectory
from hf_dpzero.privacy.mechanisms import NonPrivateMean, ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import PoissonSampler
from hf_dpzero.reporting.hub import build_hub_folder, write_model_card
from hf_dpzero.reporting.page import PAGE_FILE, report_page
from hf_dpzero.reporting.private_evaluations import (
    PrivateEvaluation,
    append_evaluation,
    together,
)
from hf_dpzero.reporting.wording import round_up

STEPS = 20
EVIL = "<script>alert(1)</script>"
VOID = {"meta", "rect", "circle", "polyline", "br"}
LOADS = {"script", "link", "img", "iframe", "object", "embed", "base", "form", "use", "image"}


def plan_of(private: bool = True) -> PrivacyPlan:
    scale = ScalarMechanism(clip=50.0, noise_multiplier=4.0, expected_batch_size=8.0)
    mechanism = scale if private else NonPrivateMean(expected_batch_size=8.0)
    sampler = PoissonSampler(num_examples=64, expected_batch_size=8.0)
    return PrivacyPlan(sampler=sampler, mechanism=mechanism, steps=STEPS)


class Page(HTMLParser):
    """Reads a page strictly: every tag is closed in its order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.curves: list[list[tuple[float, float]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "polyline":
            pairs = (dict(attrs)["points"] or "").split()
            self.curves.append([tuple(map(float, pair.split(","))) for pair in pairs])  # type: ignore[misc]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(folder: Path) -> Page:
    return Page((folder / PAGE_FILE).read_text(encoding="utf-8"))


def leave_run(folder: Path, plan: PrivacyPlan) -> Path:
    write_run(folder, plan, report_of(plan))
    results = {"zero_shot_accuracy": 0.5, "eval_accuracy": 0.75, "eval_runtime": 9.0}
    results |= {"train_loss": 0.123456, "eval_mem_cpu_peaked_delta": 31337.0, "eval_odd": math.nan}
    (folder / "all_results.json").write_text(json.dumps(results))
    recipe = f"task: '{EVIL}'\nclass_names: ['{EVIL}']\nhub_token: hf_x\n"
    (folder / "recipe.yaml").write_text(recipe)
    log = [{"step": step, "eval_accuracy": 0.5 + step / 80, "loss": 7.25} for step in (10, 20)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    write_model_card(folder)
    return folder


def test_the_page_says_what_the_report_says(tmp_path: Path) -> None:
    plan = plan_of()
    page, report = page_of(leave_run(tmp_path / "run", plan)), report_of(plan)
    assert report.statement in page.text and round_up(report.epsilon) in page.text
    assert report.caveats and all(caveat in page.text for caveat in report.caveats)
    trajectory = Trajectory.load(tmp_path / "run" / "trajectory.safetensors")
    assert trajectory.digest() in page.text and "ab" * 32 in page.text
    assert "hf_x" not in page.text and "7.25" not in page.text
    assert "0.123456" not in page.text and "31337" not in page.text and "odd" not in page.text


def test_nothing_that_is_inserted_is_markup_and_nothing_is_loaded(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", plan_of())
    page = page_of(folder)
    assert EVIL in page.text  # twice: as text alone
    assert not LOADS & set(page.tags)
    loading = {"src", "href", "xlink:href", "srcset", "action", "data"}
    assert not [item for item in page.attributes if item[0] in loading or item[0].startswith("on")]
    raw = (folder / PAGE_FILE).read_text()
    assert (
        "url(" not in raw and "@import" not in raw and "http" not in raw.replace("http-equiv", "")
    )


def test_curves_hold_the_accountants_epsilons_and_the_start(tmp_path: Path) -> None:
    """Heights in the frame, which ends at y = 10 at the top and 170 at the bottom, over x = 70..650."""
    plan = plan_of()
    epsilon, released, accuracy = page_of(leave_run(tmp_path / "run", plan)).curves
    total = plan.epsilon(1e-5)
    for step, (x, y) in zip((0, 1, 2, 5, 10, 15, 20), epsilon, strict=True):
        spent = plan.epsilon(1e-5, at=step)
        assert x == pytest.approx(70 + 580 * step / STEPS, abs=0.06)
        assert y == pytest.approx(170 - 160 * spent / total, abs=0.06)
    assert len(released) == STEPS
    # 0.5 at the start, 0.625 and 0.75 after 10 and 20 steps
    assert accuracy == [(70.0, 170.0), (360.0, 90.0), (650.0, 10.0)]


def test_evaluations_of_private_rows_are_on_the_page(tmp_path: Path) -> None:
    plan = plan_of()
    folder = leave_run(tmp_path / "run", plan)
    assert "Evaluation on private rows" not in page_of(folder).text
    facts: dict[str, Any] = {
        "num_rows": 100, "metric": "accuracy", "step": STEPS, "epsilon": 0.5, "sensitivity": 1,
        "noise_source": "os_entropy_exact", "trained_on": False, "released": 61,
    }  # fmt: skip
    for name in (EVIL, "a`b", "two\nlines", "x" * 201):
        with pytest.raises(ValueError, match="printed on cards"):
            PrivateEvaluation(rows=name, **facts)
    made = PrivateEvaluation(rows="wards & wings", **facts)
    append_evaluation(folder, made)
    shipped = build_hub_folder(folder, tmp_path / "hub")
    write_model_card(folder)
    for page in (page_of(folder), page_of(shipped)):
        assert str(made) in page.text and together(report_of(plan), [made]) in page.text


def test_the_unit_is_the_reports() -> None:
    plan = plan_of()
    for unit, words in (("example", "one training example"), ("person <b>", "one person <b>")):
        report = report_of(plan, privacy_unit=unit)
        page = Page(report_page(report, trajectory_of(plan, STEPS, privacy_unit=unit)))
        assert f"privacy unit{words}" in page.text


def test_one_step_is_a_point() -> None:
    plan = PrivacyPlan(sampler=plan_of().sampler, mechanism=plan_of().mechanism, steps=1)
    page = Page(report_page(report_of(plan), trajectory_of(plan, 1)))
    assert page.curves == [[(70.0, 170.0), (650.0, 10.0)], [(650.0, 90.0)]]


def test_a_run_that_stopped_early_shows_what_its_steps_spent() -> None:
    plan = plan_of()
    report = report_of(plan, 5)
    page = Page(report_page(report, trajectory_of(plan, 5)))
    assert len(page.curves[0]) == 4  # 0, 1, 2 and the last, 5
    assert f"{report.epsilon:.4g}" in page.text


def test_long_runs_are_drawn_by_means() -> None:
    """700 steps of (3, 4): 233 means of three, and the last step alone; sqrt((9 + 16) / 2) = 3.536."""
    plan = PrivacyPlan(sampler=plan_of().sampler, mechanism=plan_of().mechanism, steps=700)
    header = {**trajectory_of(plan, 0).header, "num_values": 2, "num_directions": 2}
    trajectory = Trajectory(header, [Release(t, (3.0, 4.0), 1e-6) for t in range(700)])
    page = Page(report_page(report_of(plan, 0), trajectory))
    assert len(page.curves[-1]) == 234
    assert "3.536" in page.text and "mean of 3 steps" in page.text


def test_a_run_that_is_not_private_says_so_first(tmp_path: Path) -> None:
    page = page_of(leave_run(tmp_path / "run", plan_of(private=False)))
    assert (
        page.text.index("NOT PRIVATE") < page.text.index("epsilon") and "not claimed" in page.text
    )
    assert len(page.curves) == 2  # no epsilon over steps


def test_a_trained_run_leaves_the_page_with_its_model(tmp_path: Path) -> None:
    trainer = build(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    assert not (tmp_path / PAGE_FILE).exists()
    trainer.save_model()
    assert trainer.privacy_report().statement in page_of(tmp_path).text
    assert not list(tmp_path.glob(f"checkpoint-*/{PAGE_FILE}"))


BROWSER = """
import sys
from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage
from PyQt6.QtWidgets import QApplication

class Page(QWebEnginePage):
    def javaScriptConsoleMessage(self, level, message, line, source):
        print("console:", message)

def shown(found):
    print(found)
    app.quit()

app = QApplication(sys.argv)
page = Page()
ask = "[document.title, document.querySelectorAll('svg').length, document.scripts.length]+''"
page.loadFinished.connect(lambda whole: page.runJavaScript(ask, shown) if whole else app.exit(1))
page.load(QUrl.fromLocalFile(sys.argv[1]))
QTimer.singleShot(60_000, lambda: app.exit(2))
sys.exit(app.exec())
"""


@pytest.mark.slow
def test_a_browser_opens_the_page(tmp_path: Path) -> None:
    """Chromium without a screen, where `pip install PyQt6-WebEngine` has brought one."""
    if importlib.util.find_spec("PyQt6") is None:
        pytest.skip("no browser: pip install PyQt6-WebEngine")
    page = leave_run(tmp_path / "run", plan_of()) / PAGE_FILE
    flags = {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": "--disable-gpu"}
    flags["QTWEBENGINE_DISABLE_SANDBOX"] = "1"  # Chromium refuses to run as root with one
    ran = subprocess.run(
        [sys.executable, "-c", BROWSER, str(page)],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert ran.stdout.split("\n")[0] == "Privacy report,3,0"  # and nothing on the console before it
