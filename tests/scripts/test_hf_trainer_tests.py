"""The harness of Hugging Face's trainer tests: what it substitutes, and what counts as falling short."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.hf_trainer_tests import __main__ as harness
from scripts.hf_trainer_tests.cannot_hold import CANNOT_HOLD, CANNOT_HOLD_PRIVATELY


def _ended(**tests: str) -> dict[str, dict]:
    return {name: {"ended": how, "said": f"{name} said"} for name, how in tests.items()}


def test_only_what_passes_with_trainer_and_is_not_listed_falls_short(monkeypatch):
    monkeypatch.setattr(harness, "CANNOT_HOLD", {"a reason": ("listed", "holds_anyway")})
    plain = _ended(
        good="passed",
        bad="passed",
        gone="passed",
        listed="passed",
        holds_anyway="passed",
        no="failed",
    )
    ours = _ended(good="passed", bad="failed", listed="failed", holds_anyway="passed", no="failed")

    text, short = harness.report("mezo", plain, ours)

    assert short == 2
    assert "mezo, of 5 tests" in text
    assert "| passed | 2 |" in text
    assert "| cannot hold: a reason | 1 |" in text
    assert "bad\n    bad said" in text
    assert "gone\n    did not run" in text
    assert "listed, and passes: holds_anyway" in text


def test_privacy_alone_excuses_nothing_of_the_other_arm(monkeypatch):
    monkeypatch.setattr(harness, "CANNOT_HOLD", {})
    monkeypatch.setattr(harness, "CANNOT_HOLD_PRIVATELY", {"secret": ("one",)})
    plain, ours = _ended(one="passed"), _ended(one="failed")

    assert harness.report("private", plain, ours)[1] == 0
    assert harness.report("mezo", plain, ours)[1] == 1


def test_a_test_has_one_reason():
    listed = [
        test
        for reasons in (CANNOT_HOLD, CANNOT_HOLD_PRIVATELY)
        for tests in reasons.values()
        for test in tests
    ]

    assert listed
    assert len(listed) == len(set(listed))
    assert all(test.count("::") == 1 for test in listed)


TESTS = """
from transformers import GlueDatasetThatNeverWas, Seq2SeqTrainer, Trainer, TrainingArguments


class Tests:
    def test_classes(self):
        args = TrainingArguments(per_device_train_batch_size=3)
        assert (args.method, args.expected_batch_size) == ("mezo", 3.0)
        assert args.target_epsilon is None
        assert Trainer.__module__ == "scripts.hf_trainer_tests.substitute"
        assert Seq2SeqTrainer.__module__ == Trainer.__module__

    @GlueDatasetThatNeverWas
    def test_gone(self):
        assert False

    def test_fails(self):
        assert 1 == 2
"""


@pytest.mark.slow
def test_an_arm_imports_our_classes(tmp_path: Path):
    folder = tmp_path / "checkout" / "tests" / "trainer"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("")
    (folder / "test_trainer.py").write_text(TESTS)

    ended = harness.run(tmp_path / "checkout", "mezo", tmp_path, ["-o", "addopts="])

    assert {name: line["ended"] for name, line in ended.items()} == {
        "Tests::test_classes": "passed",
        "Tests::test_gone": "skipped",
        "Tests::test_fails": "failed",
    }, (tmp_path / "mezo.log").read_text()
    assert "1 == 2" in ended["Tests::test_fails"]["said"]
    assert "GlueDatasetThatNeverWas" in ended["Tests::test_gone"]["said"]
