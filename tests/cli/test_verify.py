"""`hf-dpzero verify`: an honest folder passes with its base alone; each kind of change is refused."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_runs import SECRET, build

from hf_dpzero.cli import main
from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.selection import TrialCount, selection_entry, with_noise
from hf_dpzero.reporting.caveats import base_caveats
from hf_dpzero.reporting.evidence import epsilon_holds
from hf_dpzero.reporting.hub import INITIAL_VALUES_FILE, build_hub_folder, write_model_card
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.private_evaluations import (
    EVALUATIONS_FILE,
    PrivateEvaluation,
    append_evaluation,
)
from hf_dpzero.reporting.registry import registry_entry
from hf_dpzero.reporting.verification import bound_to
from hf_dpzero.run_folder.base_model import started_from
from hf_dpzero.run_folder.initial_values import load_initial_model

CARD, LOG, REPORT = "README.md", "trajectory.safetensors", "privacy_report.json"
RECIPE = "recipe.yaml"


def loaded(base: Path) -> Any:
    """The saved encoder under a head of its own, which no file of the base has."""
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification.from_pretrained(base)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_runs import tiny_model

    folder = tmp_path_factory.mktemp("base")
    tiny_model(seed=4).bert.save_pretrained(folder)
    return folder


def pushed(base: Path, folder: Path, **settings: Any) -> Path:
    trainer = build(folder / "run", loaded(base), **{**SECRET, **settings})
    trainer.train()
    trainer.save_model()
    return build_hub_folder(folder / "run", folder / "hub")


@pytest.fixture(scope="module")
def published(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a private run of 6 steps of 4 directions. Read only."""
    return pushed(base, tmp_path_factory.mktemp("published"), num_directions=4)


def verified(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, dict[str, Any]]:
    """The exit status, and what was found of each claim: whether it holds, and why."""
    capsys.readouterr()
    status = main.main(["verify", *map(str, words), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["holds"] is (status == 0) and len(said["cannot_be_checked"]) == 5
    return status, {f["claim"]: (f["holds"], f["text"]) for f in said["findings"]}


def test_an_honest_folder_is_verified_with_its_base_alone(
    published, base, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(base.parent)  # the folder names its base as the run did, without a path
    status, found = verified(capsys, published)
    assert status == 0 and list(found) == ["log", "report", "epsilon", "noise", "card", "weights"]
    assert all(holds for holds, _ in found.values())
    assert "6 releases of 4 numbers" in found["log"][1] and "says between" in found["epsilon"][1]
    assert "24 released values" in found["noise"][1] and "bit for bit" in found["weights"][1]
    entry = tmp_path / "entry.yaml"
    assert main.main(["verify", str(published), "--registry_entry", str(entry)]) == 0
    assert entry.read_text() == registry_entry(PrivacyReport.load(published))
    page = capsys.readouterr().out
    assert "Whatever could be checked holds" in page and "verified     weights" in page


def report_of(folder: Path, **entries: Any) -> None:
    values = json.loads((folder / REPORT).read_text())
    assert values.keys() >= entries.keys()
    (folder / REPORT).write_text(json.dumps(values | entries))


def weights_of(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["classifier.weight"].view(torch.int32)[0, 0] ^= 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def weights_and_report(folder: Path) -> None:
    weights_of(folder)
    bound_to(PrivacyReport.load(folder), folder).save(folder)


def a_byte_of_the_log(folder: Path) -> None:
    raw = bytearray((folder / LOG).read_bytes())
    raw[-5] ^= 1
    (folder / LOG).write_bytes(raw)


def a_release(folder: Path) -> None:
    log = Trajectory.load(folder / LOG)
    first, *rest = log.releases
    changed = first._replace(values=(-first.values[0], *first.values[1:]))
    Trajectory(log.header, [changed, *rest]).to_safetensors(folder / LOG)


def more_noise_than_was(folder: Path) -> None:
    """A publisher's lie that agrees with itself: 100 times the noise in log, report and card."""
    log, digest = Trajectory.load(folder / LOG), PrivacyReport.load(folder).weights_digest
    log.header["plan"]["mechanism"]["noise_multiplier"] *= 100
    log.to_safetensors(folder / LOG)
    report = PrivacyReport.from_header(log.header, steps=6, delta=1e-3)
    replace(report, weights_digest=digest).save(folder)
    write_model_card(folder)


def said_not_replayable(folder: Path) -> None:
    """Other weights under their own digest, in a log which says that it cannot rebuild them."""
    log = Trajectory.load(folder / LOG)
    log.header["replayable"] = False
    log.to_safetensors(folder / LOG)
    weights_and_report(folder)


def an_index(folder: Path) -> None:
    """Loading by it takes tensors that no digest covers."""
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    index = {"metadata": {}, "weight_map": {"classifier.bias": "other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def line_of(folder: Path, old: str, new: str, name: str = CARD) -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))


def evaluated(folder: Path, rows: str) -> None:
    """A private evaluation of rows with such a name, written by hand."""
    made = {
        "num_rows": 9, "metric": "accuracy", "step": 6, "epsilon": 0.5, "sensitivity": 1,
        "noise_source": "os_entropy_exact", "trained_on": False, "released": 7,
    }  # fmt: skip
    (folder / EVALUATIONS_FILE).write_text(json.dumps({"rows": rows, **made}) + "\n")


def fewer_of_rows(folder: Path) -> None:
    """Epsilon of ten rows is said to be half a per cent less than it is."""
    terms = json.loads((folder / REPORT).read_text())["other_terms"]
    terms["epsilon_of_rows"]["10"] *= 0.995
    report_of(folder, other_terms=terms)


def in_one_row(folder: Path) -> None:
    """White space alone: cells beyond the header's are not shown."""
    text = (folder / CARD).read_text()
    start, end = text.index("| epsilon (spent)"), text.index("## How to use")
    joined = " ".join(text[start:end].split())
    (folder / CARD).write_text(f"{text[:start]}{joined}\n\n{text[end:]}")


def of_the_log(folder: Path, name: str, value: Any, steps: int = 6) -> None:
    """Log, report and card that agree with one another."""
    log, digest = Trajectory.load(folder / LOG), PrivacyReport.load(folder).weights_digest
    log.header[name] = value
    log.to_safetensors(folder / LOG)
    report = PrivacyReport.from_header(log.header, steps=steps, delta=1e-3, in_other_terms=True)
    replace(report, weights_digest=digest).save(folder)
    with contextlib.suppress(ValueError):
        write_model_card(folder)


NONE_OF_OURS = "no run of ours"


def said_by(folder: Path, **values: Any) -> None:
    for name, value in values.items():
        of_the_log(folder, name, value)


def hidden(folder: Path) -> None:
    """Metadata that a viewer shows, for it does not begin with the file, holds what hides the claims."""
    (folder / CARD).write_text("\n" + (folder / CARD).read_text())


def one_run(folder: Path) -> None:
    """A run of a search says that alone it costs less than it does."""
    log, old = Trajectory.load(folder / LOG), PrivacyReport.load(folder)
    plan = PrivacyPlan.from_dict(log.header["plan"])
    tuning = selection_entry(plan, TrialCount(mean=3.0), ["clip"], old.delta)
    tuning["repeat_and_select"]["epsilon_one_run"] *= 0.1
    replace(old.with_tuning(tuning, plan, log.header), weights_digest=old.weights_digest).save(
        folder
    )


def of_a_sweep(folder: Path, count: int) -> None:
    """The run's own plan is listed so many times beside a cheap one."""
    of_the_log(folder, "tuning", "not_accounted")
    log, old = Trajectory.load(folder / LOG), PrivacyReport.load(folder)
    plan = PrivacyPlan.from_dict(log.header["plan"])
    plans = [
        {"count": count, "plan": plan.to_dict()},
        {"count": 1, "plan": with_noise(plan, 1e3).to_dict()},
    ]
    report_of(
        folder,
        tuning={"composition": {"runs": 1, "swept": ["clip"], "plans": plans}},
        epsilon=1e-3 * old.epsilon,
        planned_epsilon=1e-3 * old.epsilon,
    )


def a_number_more(folder: Path) -> None:
    """The log has a number without noise in each release, which the plan does not count."""
    log = Trajectory.load(folder / LOG)
    releases = [release._replace(values=(*release.values, 0.6875)) for release in log.releases]
    Trajectory({**log.header, "num_values": 5}, releases).to_safetensors(folder / LOG)


def counted_few(folder: Path, **federated: Any) -> None:
    """A header that says how many of the log's releases were of the client."""
    of_the_log(folder, "federated", federated, federated["steps"])


def unit_of_rows(folder: Path, unit: str) -> None:
    evaluated(folder, "rows")
    line_of(folder, '"rows": "rows"', f'"rows": "a", "privacy_unit": "{unit}"', EVALUATIONS_FILE)
    write_model_card(folder)


PAID = {"epsilon": 0.01, "ceiling": 9.0, "delta": 1e-3, "entries": 2, "entry": "0"}
ASIDE = {
    "folder": "earlier-1",
    "method": "dpzero",
    "steps": 1,
    "planned_steps": 1,
    "epsilon": 0.001,
}
CUT = "x\n## Limitations\n\n## y"
CHANGES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "weights": (weights_of, "weights", "changed or replaced after the run saved them"),
    "weights and report": (weights_and_report, "weights", "not what the trajectory gives"),
    "not replayable": (said_not_replayable, "weights", "cannot rebuild the weights"),
    "index": (an_index, "weights", "names 'other.safetensors'"),
    "epsilon": (lambda f: report_of(f, epsilon=0.1), "report", "epsilon: 0.1 / "),
    "n": (lambda f: report_of(f, num_examples=9999), "report", "num_examples: 9999 / 120"),
    "statement": (lambda f: report_of(f, statement="Private."), "report", "in words"),
    "no report": (lambda f: (f / REPORT).unlink(), "report", "No such file"),
    "no report's type": (lambda f: report_of(f, epsilon=None), "report", "privacy_report.json"),
    "damaged log": (a_byte_of_the_log, "log", "checksum"),
    "a release": (a_release, "weights", "not what the trajectory gives"),
    "more noise": (more_noise_than_was, "noise", "it is not the plan that ran"),
    "card": (lambda f: line_of(f, "(spent) | ", "(spent) | 0."), "card", "(spent) | 0."),
    "card's row": (lambda f: line_of(f, "| delta |", "|delta|0|\n| delta |"), "card", "|delta|0|"),
    "card's limits": (lambda f: line_of(f, ": The loss, class", ": Class"), "card", "The loss, class"),
    "one row": (in_one_row, "card", "| epsilon (spent) |"),
    "rate": (lambda f: said_by(f, learning_rate="1, for 0.1"), "report", NONE_OF_OURS),
    "noise's name": (lambda f: said_by(f, noise_source="os_entropy and more"), "report", NONE_OF_OURS),
    "processes": (lambda f: said_by(f, processes="1, so that it is 0.1"), "report", NONE_OF_OURS),
    "direction": (lambda f: said_by(f, direction="any, at 0.1"), "report", NONE_OF_OURS),
    "budget": (lambda f: said_by(f, budget=PAID), "report", "one of them alone"),
    "entries": (lambda f: said_by(f, budget={**PAID, "entries": "1, so"}), "report", NONE_OF_OURS),
    "a note": (lambda f: said_by(f, budget={**PAID, "note": "0.001 in all"}), "report", "has 'note'"),
    "an entry": (lambda f: said_by(f, budget={**PAID, "entry": "0.001 in all"}), "report", NONE_OF_OURS),
    "a part": (lambda f: of_a_chain(f, weights_digest="0.001"), "report", NONE_OF_OURS),
    "an aim": (lambda f: said_by(f, target_epsilon="0.1 in all"), "report", "no number"),
    "a low aim": (lambda f: said_by(f, target_epsilon=0.1, target_delta=1e-3), "report", "plan costs"),
    "chained": (lambda f: said_by(f, base_weights="of_the_extended_run"), "report", "after 0 runs"),
    "aside's sum": (lambda f: said_by(f, set_aside={"runs": [{**ASIDE, "epsilon": 7.0}],
        "epsilon": 1.3}), "report", "one of them alone is 7"),
    "aside": (lambda f: said_by(f, set_aside={"runs": [ASIDE], "epsilon": 0.002}), "report", "alone"),
    "aside's steps": (lambda f: said_by(f, set_aside={"runs": [{**ASIDE, "steps": "1, so 1"}],
        "epsilon": 9.0}), "report", NONE_OF_OURS),
    "public texts": (lambda f: said_by(f, public_texts="none, at 0.1"), "report", NONE_OF_OURS),
    "no steps": (lambda f: counted_few(f, steps=0, clients=1), "report", "did not end"),
    "true steps": (lambda f: counted_few(f, steps=True, clients=1), "report", "did not end"),
    "ceiling": (lambda f: said_by(f, budget={**PAID, "epsilon": 9.5}), "report", "no budget file"),
    "line ends": (lambda f: of_a_chain(f, folder=CUT), "report", "with line ends"),
    "one run": (one_run, "report", "epsilon_one_run"),
    "no runs": (lambda f: of_a_sweep(f, 0), "report", "no numbers of runs"),
    "fewer than no runs": (lambda f: of_a_sweep(f, -1), "report", "no numbers of runs"),
    "a number more": (a_number_more, "report", "5 numbers a step of 4 directions"),
    "directions": (lambda f: of_the_log(f, "num_directions", 3), "report", "of 3 directions"),
    "paid at another delta": (lambda f: said_by(f, budget={**PAID, "delta": 1e-11}), "report", "alone"),
    "noise of ours": (lambda f: said_by(f, noise_source="exact-0.001-DP"), "report", NONE_OF_OURS),
    "version": (lambda f: report_of(f, versions={"torch": "2-epsilon-0.1"}), "report", "no package"),
    "card's comment": (lambda f: line_of(f, "## Limi", "<!--\n## Limi"), "card", "'<!--'"),
    "card's top": (lambda f: line_of(f, "## Priv", "So: 0.1\n\n## Priv"), "card", "So: 0.1"),
    "card's title": (lambda f: line_of(f, "# base", "#base"), "card", "no title"),
    "card's start": (hidden, "card", "does not begin with a line"),
    "card's ends": (lambda f: line_of(f, "tags:", "--- \n# No\n\n~~~\ntags:"), "card", "metadata"),
    "joined": (lambda f: line_of(f, "\n\n## How", "\x0c\x0c## No: 0.1\n\n## How"), "card", "says below"),
    "card's fence": (lambda f: line_of(f, "## Limi", "~~~\n## Limi"), "card", "~~~"),
    "no end": (lambda f: line_of(f, "## How", "So: 0.1\n\n## How"), "card", "So: 0.1"),
    "name": (lambda f: evaluated(f, "a)\n```\n\nepsilon = 0.1"), "card", "private evaluations"),
    "recipe": (lambda f: (f / RECIPE).write_text("neighboring_relation: 1"), "report", "says neigh"),
    "delta": (lambda f: (f / RECIPE).write_text("target_delta: 0.1"), "report", "says target_delta"),
    "its type": (lambda f: (f / RECIPE).write_text("target_delta: true"), "report", "says target"),
    "its unit": (lambda f: (f / RECIPE).write_text("unit_column: who"), "report", "says unit_column"),
    "package": (lambda f: report_of(f, versions={"x": "1 |\n| epsilon | 0.1"}), "report", "no package"),
    "fewer": (lambda f: fewer_of_rows(f), "report", "other_terms"),
    "twice": (lambda f: line_of(f, "{", '{"epsilon": 0.1,', REPORT), "report", "stands there twice"),
    "card's header": (lambda f: line_of(f, "tags:", "tags: :"), "card", ""),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_refused_in_words(change, published, base, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    alter, claim, words = CHANGES[change]
    alter(folder)
    status, found = verified(capsys, folder, "--base", base)
    assert status == 1 and found[claim][0] is False and words in found[claim][1]
    assert change != "more noise" or [c for c, (holds, _) in found.items() if not holds] == [
        "noise"
    ]


OWN = """

## Our use\r

![badge](https://example.org/a.svg) <b>us</b> <me@example.org> x <y: epsilon = 2 is what we chose.\r
Fran\u00e7ais : confidentialit\u00e9 diff\u00e9rentielle.\r

```bibtex
@article{a, title={Differential Privacy}, year={2026}}
```
"""


def test_words_of_ones_own_beside_the_claims_are_free(published, base, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    line_of(folder, "# base", "# Our model")
    line_of(folder, "## How to use", f"{OWN}\n## How to use")
    line_of(folder, "tags:", "license: mit\ntags:")
    status, found = verified(capsys, folder, "--base", base)
    assert status == 0 and "the title 'Our model" in found["card"][1]


def test_steps_that_no_log_shows_are_not_checked(published, base, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    common = {"neighboring_relation": "add_or_remove_one", "steps": 1, "clients": 2}
    of_the_log(folder, "federated", common, 1)
    _, found = verified(capsys, folder, "--base", base)
    assert found["report"][0] is None and "its 1 steps, said to be" in found["report"][1]
    assert found["epsilon"][0] is None and found["noise"][0] is None


def of_a_chain(folder: Path, /, **entry: Any) -> None:
    """A cheap run before this one, and what the header says of it."""
    log, old = Trajectory.load(folder / LOG), PrivacyReport.load(folder)
    plan = PrivacyPlan.from_dict(log.header["plan"])
    chain = replace(plan, after=((replace(plan, steps=1), 1),))
    known = {"folder": "first", "base_weights": "equal_to_named", "tuning": "none", **entry}
    log.header |= {"plan": chain.to_dict(), "extends": [known]}
    log.to_safetensors(folder / LOG)
    report = PrivacyReport.from_header(log.header, steps=6, delta=1e-3, in_other_terms=True)
    replace(report, weights_digest=old.weights_digest).save(folder)
    write_model_card(folder)


CLAIM = "The weights are (1, 1e-05)-differentially private under replacing one training example: x."
NAMES: dict[str, tuple[Callable[[Path], Any], bool | None]] = {
    "a base of the Hub": (lambda f: said_by(f, earlier_runs=[{"folder": "org/model-1.0",
        "private": True, "statement": CLAIM}]), True),
    "what it says": (lambda f: said_by(f, earlier_runs=[{"folder": "org/model-1.0",
        "private": True, "statement": "trained on public text alone"}]), None),
    "a claim": (lambda f: said_by(f, earlier_runs=[{"folder": "a, 0.1 in all", "private": True,
        "statement": "x"}]), None),
    "a unit": (lambda f: said_by(f, privacy_unit="who with all its rows"), True),
    "no unit": (lambda f: said_by(f, privacy_unit="man, with all he has"), None),
    "DP": (lambda f: of_a_chain(f, folder="0.1-DP for every man"), None),
    "a chain": (of_a_chain, True),
    "a number": (lambda f: of_a_chain(f, folder="<18, run (2)"), None),
    "its steps": (lambda f: of_a_chain(f, steps="9, so 0 in all", epsilon=0.0), True),
    "letters alike": (lambda f: of_a_chain(f, folder="\U0001d700 0001 in all"), None),
    "a fraction": (lambda f: of_a_chain(f, folder="0.001 for all together"), None),
    "a package": (lambda f: (report_of(f, versions={"hf_dpzero": "1.0", "torch": "2.13.0+cpu"}),
        write_model_card(f)), True),
    "a version": (lambda f: of_a_chain(f, folder="runs/v0.001"), True),
    "a tag": (lambda f: said_by(f, privacy_unit="<user> with all its rows"), None),
    "a space": (lambda f: said_by(f, privacy_unit="n\u00ba\u00a0client with all its rows"), None),
    "a joiner": (lambda f: said_by(f, privacy_unit="\u0645\u06cc\u200c\u0631 with all its rows"), None),
    "a token": (lambda f: said_by(f, earlier_runs=[{"folder": "<unk>-base", "private": True,
        "statement": "x"}]), None),
}  # fmt: skip


@pytest.mark.parametrize("names", NAMES)
def test_a_name_that_could_claim_is_not_checked(names, published, base, tmp_path, capsys):
    """It is its owner's choice, so it is no reason to refuse. What the plan says stays."""
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    alter, holds = NAMES[names]
    alter(folder)
    text = (folder / REPORT).read_text()
    assert "9, so 0" not in text
    _, found = verified(capsys, folder, "--base", base)
    assert found["report"][0] is holds, found["report"]
    assert holds or "a name that could be a claim" in found["report"][1]
    assert found["card"][0] is holds


@pytest.mark.parametrize(
    "alter",
    [
        lambda f: unit_of_rows(f, "row, at 0.01"),
        lambda f: unit_of_rows(f, "epsilon 0.001 in all with all its rows"),
        lambda f: (evaluated(f, "public: epsilon = 0"), write_model_card(f)),
        lambda f: (evaluated(f, "held out, all of it 0.001-DP"), write_model_card(f)),
        lambda f: line_of(f, "# base", "# a<b"),
        lambda f: line_of(f, "# base", "# my\u200cmodel"),
        lambda f: line_of(f, "# base", "# \u202eesab"),
        lambda f: line_of(f, "tags:", "x: ages <18\ntags:"),
    ],
)
def test_names_on_a_card_that_could_claim_or_hide_are_not_checked(
    alter, published, base, tmp_path, capsys
):
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    alter(folder)
    status, found = verified(capsys, folder, "--base", base)
    assert status == 0 and found["card"][0] is None
    assert "could be a claim" in found["card"][1] or "could hide" in found["card"][1]


def test_a_start_that_is_not_the_base_is_refused(published, base, tmp_path, capsys):
    """Initial values that write over the base, as if it had been trained on the rows before."""
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    log, old = Trajectory.load(folder / LOG), PrivacyReport.load(folder)
    values = folder / INITIAL_VALUES_FILE
    for stated in ("equal_to_named", "equal_to_named_but_new_parts"):
        model = load_initial_model(values, str(base))
        if stated != "equal_to_named":  # before, it is true but for the head
            for parameter in model.parameters():  # nothing is left that the base could be told by
                parameter.data = torch.randn_like(parameter)
        with safe_open(values, "pt") as file:
            metadata = file.metadata()
        log.header |= {"base_model_digest": digest_model(model), "base_weights": stated}
        log.to_safetensors(folder / LOG)
        metadata["base_model_digest"] = log.header["base_model_digest"]
        save_file(dict(model.named_parameters()), values, metadata=metadata)
        replay(model, log)
        model.save_pretrained(folder)
        report = PrivacyReport.from_header(
            log.header, steps=6, delta=old.delta, in_other_terms=True
        )
        bound_to(report, folder).save(folder)
        write_model_card(folder)
        status, found = verified(capsys, folder, "--base", base)
        assert status == 1 and "not the base that it names" in found["weights"][1]
        assert [claim for claim, (holds, _) in found.items() if not holds] == ["weights"]


def test_a_start_is_compared_with_the_given_base_alone(base, tmp_path):
    """Not with what the model's own configuration names, which a publisher wrote."""
    model = loaded(base)
    assert started_from(model, str(base)) == ("equal_to_named_but_new_parts", 2)
    model.get_input_embeddings().weight.data += 0.5
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert started_from(again, str(tmp_path)) == ("equal_to_named", 0)
    assert started_from(again, str(base)) == ("trained_before", 0)


def test_runs_that_the_base_came_out_of_are_in_the_report(published, base, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    (other / "trajectory.ledger").touch()
    status, found = verified(capsys, published, "--base", other)
    assert status == 1 and "came out of a run of this package" in found["weights"][1]
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    said_by(folder, earlier_runs=[{"folder": "first", "private": True, "statement": CLAIM}])
    assert "came out of a run" in verified(capsys, folder, "--base", other)[1]["weights"][1]
    status, found = verified(capsys, published, "--base", base)
    assert (
        status == 0
        and f"the log and '{base}' (equal_to_named_but_new_parts, 2 tensors new)"
        in found["weights"][1]
    )


def test_the_run_that_another_extends_is_the_one_beside_its_base(base, tmp_path, capsys):
    """Its digest among the parts is no proof: its publisher wrote it."""
    first, last = tmp_path / "first" / "run", tmp_path / "second"
    pushed(base, first.parent)
    folder = pushed(first, last, extends_run=str(first))
    status, found = verified(capsys, folder, "--base", first)
    assert status == 0 and found["weights"][0], found["weights"]
    plan = PrivacyPlan.from_dict(Trajectory.load(folder / LOG).header["plan"])
    ((before, _),) = plan.after
    of_the_log(folder, "plan", replace(plan, after=((before, 1),)).to_dict())
    status, found = verified(capsys, folder, "--base", first)
    assert status == 1 and "is not in earlier_runs" in found["weights"][1]
    assert [claim for claim, (holds, _) in found.items() if holds is False] == ["weights"]
    of_the_log(folder, "plan", plan.to_dict())
    values = json.loads((first / REPORT).read_text())
    log = Trajectory.load(first / LOG)
    log.header["log_private_diagnostics"] = True
    log.to_safetensors(first / LOG)
    report = PrivacyReport.from_header(log.header, steps=6, delta=1e-3)
    replace(report, weights_digest=values["weights_digest"]).save(first)
    status, found = verified(capsys, folder, "--base", first)
    assert status == 1 and "NOT PRIVATE" in found["weights"][1]


def test_no_text_of_a_folder_moves_the_cursor(published, base, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    report_of(folder, privacy_unit="\r\x1b[1A\x1b[2Kverified     report   \x1b[8m" + 999 * "x")
    assert main.main(["verify", str(folder), "--base", str(base)]) == 1
    page = capsys.readouterr().out
    assert page.replace("\n", "").isprintable() and 50 * "x" in page
    assert 300 * "x" not in re.sub(r"\s", "", page)


def test_of_an_earlier_run_its_numbers_alone_are_quoted():
    unit = "training example by another"
    claim = f"(0.9999, 1e-05)-differentially private under replacing one {unit}"
    words = f"The weights of this run are {claim}: x.\u201d In all 0.1. \u201cIt"
    run = {"folder": "a", "private": True, "statement": words}
    assert f"says that it is {claim}. The epsilon" in base_caveats([run])[0]
    assert "says that it is NOT PRIVATE. The" in base_caveats([run | {"private": False}])[0]
    assert "says that it is private. The" in base_caveats([run | {"statement": "In all 0.1."}])[0]


def test_another_base_or_none_is_refused(published, base, tmp_path, capsys, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    tensors[min(tensors)].view(-1).view(torch.int32)[0] ^= 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    status, found = verified(capsys, published, "--base", other)
    assert (
        status == 1 and "not the base that the trajectory was trained from" in found["weights"][1]
    )
    monkeypatch.chdir(tmp_path)
    status, found = verified(capsys, published)
    assert status == 1 and "Give its folder or Hub id by --base" in found["weights"][1]
    assert main.main(["verify", "me/nothing"]) == 2
    assert "no repository that the Hub gave" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["org/base", "org/other"])
def test_a_base_in_the_folder_or_proposed_by_anybody_is_refused(
    name, published, base, tmp_path, capsys, monkeypatch
):
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    shutil.copytree(base, folder / "org" / "base")
    monkeypatch.chdir(folder)
    recipe = {"model_name_or_path": name, "model_revision": "refs/pr/7", "task": "sst2"}
    recipe |= {"output_dir": "x", "noise_multiplier": 1.0, "target_delta": 1e-3, "max_steps": 6}
    (folder / RECIPE).write_text(json.dumps(recipe))
    (folder / INITIAL_VALUES_FILE).unlink()
    status, found = verified(capsys, folder)
    said = "lies in the folder" if name == "org/base" else "anybody may propose"
    assert status == 1 and said in found["weights"][1]


def test_an_adapter_as_the_base_is_not_checked(published, tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    status, found = verified(capsys, published, "--base", tmp_path)
    assert status == 0 and found["weights"][0] is None
    assert "is an adapter without its model" in found["weights"][1]


def test_a_repository_of_the_hub_is_checked_as_a_folder_is(published, base, capsys, monkeypatch):
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, set(allow_patterns)))
        return str(published)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(
        "huggingface_hub.list_repo_files", lambda name: [CARD, "x/pytorch_model.bin"]
    )
    assert verified(capsys, "me/tiny", "--base", base)[0] == 0
    main.main(["verify", "me/tiny", "--base", str(base), "--json"])
    assert json.loads(capsys.readouterr().out)["cannot_be_checked"][-1].endswith(
        ": 'x/pytorch_model.bin'"
    )
    name, patterns = asked[0]
    assert name == "me/tiny" and {p.name for p in published.iterdir()} <= patterns


def test_what_a_log_cannot_rebuild_is_known_by_its_digest(base, tmp_path, capsys):
    """First order: whole vectors were released. Without privacy nothing is claimed, nor tagged."""
    folder = pushed(base, tmp_path / "dp-sgd", method="dp-sgd", max_steps=2, trainable="classifier")
    status, found = verified(capsys, folder)
    assert status == 0 and found["noise"][0] is None and found["epsilon"][0]
    assert found["weights"] == (
        True, "their digest is the report's; the log of this method cannot rebuild them"
    )  # fmt: skip
    weights_of(folder)
    assert verified(capsys, folder)[0] == 1
    entry = tmp_path / "entry.yaml"
    assert main.main(["verify", str(folder), "--registry_entry", str(entry)]) == 1
    assert "was not written" in capsys.readouterr().err and not entry.exists()


def test_a_run_that_is_not_private_may_not_be_tagged(published, base, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    log, digest = Trajectory.load(folder / LOG), PrivacyReport.load(folder).weights_digest
    log.header["log_private_diagnostics"] = True
    log.to_safetensors(folder / LOG)
    report = PrivacyReport.from_header(log.header, steps=6, delta=1e-3)
    replace(report, weights_digest=digest).save(folder)
    write_model_card(folder)
    status, found = verified(capsys, folder, "--base", base)
    assert status == 0 and (found["epsilon"][0], found["card"][0]) == (None, True)
    line_of(folder, "tags:", "tags:\n- differential-privacy")
    assert "tagged" in verified(capsys, folder, "--base", base)[1]["card"][1]


def test_the_card_states_the_private_evaluations_on_record(published, base, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    made = PrivateEvaluation(
        rows="held out", num_rows=100, metric="accuracy", step=6, epsilon=0.5, sensitivity=1,
        noise_source="os_entropy_exact", trained_on=False, released=71,
    )  # fmt: skip
    append_evaluation(folder, made)
    status, found = verified(capsys, folder, "--base", base)
    assert status == 1 and "before the last of the 1 private evaluations" in found["card"][1]
    write_model_card(folder)
    status, found = verified(capsys, folder, "--base", base)
    assert status == 0 and "By the record of 1 private evaluations" in found["card"][1]
    (folder / EVALUATIONS_FILE).unlink()
    assert "says below its title" in verified(capsys, folder, "--base", base)[1]["card"][1]


def test_a_claim_below_the_second_accountants_is_refused(published):
    report, log = PrivacyReport.load(published), Trajectory.load(published / LOG)
    assert "says between" in epsilon_holds(report, log)
    assert "says at least" in epsilon_holds(replace(report, epsilon=2 * report.epsilon), log)
    with pytest.raises(ValueError, match="costs at least"):
        epsilon_holds(replace(report, epsilon=0.97 * report.epsilon), log)
