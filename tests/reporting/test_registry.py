"""The entry has the registry's fields; what the report knows is the report's, the rest is marked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml
from finished_runs import report_of

from hf_dpzero.privacy.mechanisms import NonPrivateMean, ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import PoissonSampler
from hf_dpzero.reporting.registry import TO_FILL, registry_entry

PLAN = PrivacyPlan(
    sampler=PoissonSampler(num_examples=1024, expected_batch_size=64.0),
    mechanism=ScalarMechanism(clip=1.0, noise_multiplier=2.0, expected_batch_size=64.0),
    steps=40,
)
FIELDS = {
    "basic": """name data_curators intended_use data_product_type data_product_region description
        publication_date data_product_sector""",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details privacy_parameters privacy_parameters_details",
    "deployment_model": """model_name model_name_details actors release_type release_type_details
        data_source_type access_type""",
    "accounting": "post_processing composition",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms justification",
    "administrative": "sources notes registry_authors",
}
"""Of the registry's template (tests/good_deployments/template.yaml), without details of two choices."""
OURS = {
    ("basic", "data_product_type"): "Machine learning model",
    ("dp_variant", "variant_name"): "Approximate DP",
    ("deployment_model", "model_name"): "Central",
    ("deployment_model", "release_type"): "One release",
    ("deployment_model", "access_type"): "Non-interactive",
}
"""Where the registry has a list of words."""


def entry_of(**settings: Any) -> dict[str, Any]:
    return yaml.safe_load(registry_entry(report_of(PLAN, **settings)))


def test_fields_are_the_registrys():
    entry = entry_of()
    assert set(entry) == {"url_slug", "status", "tier", "deployment"}
    assert (entry["status"], entry["tier"]) == ("Draft", 3)
    found = {part: set(fields) for part, fields in entry["deployment"].items()}
    assert found == {part: set(names.split()) for part, names in FIELDS.items()}
    for (part, field), word in OURS.items():
        assert entry["deployment"][part][field] == word


def test_what_the_report_knows_is_the_reports():
    report, known = report_of(PLAN), entry_of()["deployment"]
    spent = known["privacy_loss"]["privacy_parameters"]
    assert spent["delta"] == 1e-5
    assert report.epsilon <= spent["epsilon"] < 1.001 * report.epsilon
    assert known["privacy_loss"]["privacy_parameters_details"] == report.statement
    assert known["privacy_loss"]["privacy_unit_details"] == dict(report.rows())["neighbours"]
    assert known["administrative"]["notes"].split("\n") == [f"- {text}" for text in report.caveats]
    assert "40 of 40 planned steps, composed by pld" in known["accounting"]["composition"]
    assert "noise multiplier 2;" in known["implementation"]["mechanisms"]


def test_what_only_the_publisher_knows_is_marked():
    known = entry_of()["deployment"]
    marked = [
        field for part in known.values() for field, v in part.items() if v in (TO_FILL, [TO_FILL])
    ]
    assert sorted(marked) == sorted(
        """name data_curators intended_use data_product_region description publication_date
        data_product_sector data_domain actors release_type_details data_source_type justification
        sources registry_authors""".split()  # noqa: SIM905
    )


def test_pure_privacy_persons_and_federated_runs_have_their_own_words():
    laplace = dataclasses.replace(PLAN.mechanism, distribution="laplace")
    pure = report_of(dataclasses.replace(PLAN, mechanism=laplace), delta=0.0)
    known = yaml.safe_load(registry_entry(pure))["deployment"]
    assert known["dp_variant"]["variant_name"] == "Pure DP"
    assert known["privacy_loss"]["privacy_parameters"]["delta"] == 0
    person = entry_of(privacy_unit="person with all its rows")["deployment"]
    assert person["privacy_loss"]["privacy_unit"] == "person with all its rows"
    federated = entry_of(federated={"clients": 3, "steps": 40})["deployment"]
    assert federated["deployment_model"]["model_name"] == "Federated"


def test_a_run_that_is_not_private_is_not_registered():
    mezo = dataclasses.replace(PLAN, mechanism=NonPrivateMean(expected_batch_size=64.0))
    with pytest.raises(ValueError, match="nothing to register: NOT PRIVATE: the method mezo"):
        registry_entry(report_of(mezo))
