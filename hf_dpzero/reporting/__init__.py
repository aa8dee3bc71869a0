"""What a run says about its privacy: the report, its sentences, the model card, what a push ships.

Promise: every number is computed from the plan that ran and the ledger that it wrote, and an epsilon
in words is rounded up. What is shipped is on an allow list.
May import: ledger, privacy, values (see docs/architecture.md). No transformers.
Start at `privacy_report.PrivacyReport`, then `hub.build_hub_folder`.

| file | what it answers |
|---|---|
| `privacy_report`, `plan_facts` | what a report holds; its numbers that follow from the plan alone |
| `wording`, `caveats` | what is guaranteed, and why not; what is not covered: in sentences |
| `verification`, `weights` | whether report, trajectory and weights belong together |
| `evidence` | what a stranger can check of a published folder, and what nobody can |
| `provenance` | what was spent before on the base model and on the choice of settings |
| `model_card`, `page` | what a card says, and `report.html` |
| `registry` | what a registry of deployments asks of a run |
| `public`, `hub` | what is public, what leaves the machine |
| `budget_file` | what all releases about a data set spend together, and whether one more may |
| `private_evaluations` | what private rows were evaluated with noise, and what that spent |
"""
