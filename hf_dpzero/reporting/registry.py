"""A run's entry for github.com/opendp/deployments-registry-data, by its schema of July 2026.

What only the publisher knows says `TO_FILL`, which the registry's check refuses as a date.
"""

from __future__ import annotations

import yaml

from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.wording import delta_words, relation_words, round_up, tuning_words

TO_FILL = "FILL IN"
_ASKED = {
    "basic": "name description intended_use data_product_region data_product_sector publication_date",
    "dp_variant": "data_domain",
    "deployment_model": "actors release_type_details data_source_type",
    "implementation": "justification",
    "administrative": "sources",
}


def registry_entry(report: PrivacyReport) -> str:
    """Returns the entry as YAML; raises ValueError for a report that is not private."""
    if not report.private:
        raise ValueError(f"there is nothing to register: {report.statement}")
    row, variant = dict(report.rows()), "Approximate DP" if report.delta else "Pure DP"
    spent = {"epsilon": round_up(report.epsilon), "delta": delta_words(report.delta)}
    notes = "\n".join(f"- {text}" for text in report.caveats)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    known: dict[str, dict[str, object]] = {
        "basic": {"data_curators": [TO_FILL], "data_product_type": "Machine learning model"},
        "dp_variant": {
            "variant_name": variant,
            "unprotected_quantities": "n, settings, metrics",
        },
        "privacy_loss": {
            "privacy_unit": relation_words("{unit}", report.privacy_unit),
            "privacy_unit_details": row["neighbours"],
            "privacy_parameters": {name: float(text) for name, text in spent.items()},
            "privacy_parameters_details": report.statement,
        },
        "deployment_model": {
            "model_name": report.deployment.partition(":")[0].capitalize(),
            "model_name_details": report.deployment,
            **{"release_type": "One release", "access_type": "Non-interactive"},
        },
        "accounting": {
            "post_processing": "the weights follow from the base model and the noised releases",
            "composition": f"{row['steps']} steps, composed by {report.accountant}",
        },
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": tuning_words(report.tuning),
            "mechanisms": "; ".join((row["mechanism"], row["sampling"], row["noise"], versions)),
        },
        "administrative": {"notes": notes, "registry_authors": [TO_FILL]},
    }
    for part, names in _ASKED.items():
        known[part] |= dict.fromkeys(names.split(), TO_FILL)
    entry = {"url_slug": TO_FILL, "status": "Draft", "tier": 3, "deployment": known}
    return yaml.safe_dump(entry, sort_keys=False, width=100)
