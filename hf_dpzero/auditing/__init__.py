"""Lower bounds on epsilon from what a run releases, beside the accountant's upper bound.

- `bounds`: error rates of a test that tells two neighbours apart -> an epsilon that is at least spent.
- `releases`: many runs on the worst pair of neighbours, through the mechanism, noise and sampler of a
  plan, and the test that tells them apart.
- `membership`: whether losses of a trained model tell its training rows from others.

An audit finds mistakes in noise, clip and sampling that make a run spend more than is claimed. It proves
nothing where it finds none. This room may import `privacy`; only `cli` imports it. Start at `releases`.
"""
