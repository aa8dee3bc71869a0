"""What a run has released: on disk, and what it makes of the weights.

Promise: a release is on disk before the update that it pays for, and replaying the log on the base model
gives the trained weights bit for bit. Imports `privacy` and `perturbation`. Start at
`trajectory.Trajectory` and `replay.replay`.

| file | what it answers |
|---|---|
| `trajectory`, `log_file` | what a record holds; how its bytes reach the disk |
| `replay` | what releases make of the weights |
| `digests` | what names weights in public, and notices a changed byte |
"""
