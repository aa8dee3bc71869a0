"""The learning rate of every round, chosen from the clients' noise where the recipe gives none.

One machine chooses it from the noise that its run adds up to (`settings.defaults`). Here the noise of a
round's mean is that of all clients, C sqrt(sum_i sigma_i^2) / sum_i B_i, and R rounds add it up.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hf_dpzero.federated.local_plan import LocalPlan
from hf_dpzero.federated.server import RoundServer
from hf_dpzero.settings.defaults import CLASSIC, rate_of_noise


def learning_rates(config: Any, first: float | None = None) -> list[float]:
    """alpha_r of every round, by the recipe's scheduler.

    Args:
      config: the recipe's `DPZeroConfig`.
      first: takes the place of its learning_rate.
    """
    import torch
    from transformers import get_scheduler

    weight = torch.zeros(1, requires_grad=True)
    given = config.learning_rate if first is None else first
    given = CLASSIC["learning_rate"] if given is None else given
    optimizer = torch.optim.SGD([weight], lr=given)
    rounds, config = int(config.max_steps), copy.copy(config)
    config.trains_privately = True  # a copy, of which only the warm-up is asked
    scheduler = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.get_warmup_steps(rounds),
        num_training_steps=rounds,
        scheduler_specific_kwargs=config.lr_scheduler_kwargs or {},
    )
    rates = []
    for _ in range(rounds):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates


def chosen_rate(plans: Iterable[LocalPlan], schedule: Any) -> float | None:
    """The rate of `settings.defaults` for the mean of clients with these plans.

    Args:
      plans: of the clients that take part in a round, one clip for all.
      schedule: `lr_scheduler_type`.

    Returns:
      alpha > 0; None if no client adds noise.
    """
    clients = list(plans)
    mechanisms = [local.mechanism for local in clients]
    noise = math.sqrt(math.fsum(m.noise_multiplier**2 for m in mechanisms))
    if not noise:
        return None
    clip, expected = mechanisms[0].clip, math.fsum(m.expected_batch_size for m in mechanisms)
    summed = clip * noise / expected * math.sqrt(clients[0].rounds)
    return rate_of_noise(summed, clip, schedule)


class Rates(Sequence[float]):
    """The rates of a server's run; a chosen one is fixed when the first round closes.

    It follows from the clients that joined before then, which the run's folder remembers: a server that
    is killed goes on with the same rates.

    Args:
      config: the recipe's `DPZeroConfig`.
      server: of the run.
    """

    def __init__(self, config: Any, server: RoundServer) -> None:
        self.config, self.server = config, server
        self._rates: list[float] | None = None

    def __len__(self) -> int:
        return int(self.config.max_steps)

    def __iter__(self) -> Iterator[float]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: Any) -> Any:
        if self._rates is None:
            self._rates = learning_rates(self.config, self._first())
        return self._rates[number]

    def _first(self) -> float | None:
        if "learning_rate" not in self.config.chosen:
            return None
        members = [m.local for m in self.server.members.values() if m.joined == 0]
        return chosen_rate(members, self.config.lr_scheduler_type)
