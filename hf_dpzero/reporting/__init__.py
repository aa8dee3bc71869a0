"""What a run says about its privacy: the report, its sentences, the model card, what a push ships.

Promise: every number is computed from the plan that ran and the ledger that it wrote, and an epsilon
in words is rounded up. What is shipped is on an allow list.
May import: ledger, privacy, values (see docs/architecture.md). No transformers.
Start at `privacy_report.PrivacyReport`, then `hub.build_hub_folder`.
"""
