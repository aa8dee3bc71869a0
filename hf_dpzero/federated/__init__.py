"""Federated fine-tuning with local privacy: clients send K noised numbers a round, and nothing else.

Promise: a client clips and noises on its own machine and writes a release down before it sends it; the
server sees noised numbers only, and its update is `ledger.replay.apply_release`, so that whoever has the
numbers has the weights. The mathematics of a round (`client.LocalClient`, `server.RoundServer`,
`run.Rounds`) knows nothing of a network; `flower` carries the bytes by Flower, on one machine or between
a SuperLink and SuperNodes (`node`), and no other file imports it. Start at `run.Rounds`.
"""
