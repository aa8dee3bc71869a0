"""Federated fine-tuning with local privacy: clients send K noised numbers a round, and nothing else.

Promise: a client clips and noises on its own machine and writes a release down before it sends it; the
server sees noised numbers only, and its update is `ledger.replay.apply_release`, so that whoever has the
numbers has the weights. The mathematics of a round (`client.LocalClient`, `server.RoundServer`,
`run.Rounds`) knows nothing of a network; `flower` carries the bytes by Flower, on one machine or between
a SuperLink and SuperNodes, and no other file imports it. Start at `run.Rounds`.

| file | what it answers |
|---|---|
| `setup` | how a recipe becomes shards, clients and a server |
| `plan` | what a client agrees to |
| `client`, `server`, `run` | what each side does in a round, and in which order |
| `messages`, `flower` | which bytes are sent, and what carries them |
| `report` | what it cost each client |
| `certificates` | keys of a deployment, for Flower |
"""

import re

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A client's name: a plain word, because it becomes a folder, and a line of reports and logs."""
