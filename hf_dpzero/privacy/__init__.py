"""Differential privacy of a run: noise, sampling, mechanisms, events, accounting, plan.

Promise: the sampler, mechanism and relation that run are the ones that are accounted, and a combination
without a sound account is refused. That is of the classes here: a subclass that clips or samples in
another way is accounted as its parent. Imports numpy, dp-accounting and OpenDP, torch for tensors in and
out, and nothing of this package. Start at `plan.PrivacyPlan`, which holds a part of each kind:

| file | what it answers |
|---|---|
| `sampling` | which examples a step sees |
| `mechanisms/`, `discretization` | how far an example moves a sum; noise on a grid |
| `noise`, `correlated/` | where noise comes from; noise that cancels in sums over steps |
| `group_losses/` | losses of groups, released for group-robust training |
| `schedules` | how noise and clip change over a run |
| `events`, `accounting`, `heterogeneous` | what a step is to an accountant; the epsilon of many |
| `calibration` | how much noise a target epsilon needs |
| `bracket` | what a second accountant, of other code, says to that |
| `described` | what the parts of a plan share: names, JSON, checks of counts |
| `counting` | how many rows are right: one count with noise, and its intervals |
| `selection` | what it costs to choose settings on private data |
| `words` | what a plan says of itself to people |

Proofs are in the docstrings of `events`, `discretization`, `mechanisms/*` and `group_losses/*`.
"""
