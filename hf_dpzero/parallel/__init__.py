"""Several processes, and models in parts or elsewhere: collectives, meshes, FSDP2, offload.

Promise: releases and weights have the same bits whatever the number of processes, and wherever the
weights live; nobody holds a release that is not on the first process' disk. May import: settings,
batches and the rooms below them. Start at `collectives`, the one place of collective operations, and at
`mesh`.

| file | what it answers |
|---|---|
| `collectives` | what processes send each other; a release that all of them hear of |
| `mesh` | which rows and directions a process evaluates |
| `fsdp` | parameters in parts on several processes (FSDP2) |
| `offload` | where weights live that Accelerate offloads to memory or disk |
"""
