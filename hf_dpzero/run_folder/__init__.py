"""What a run keeps on disk, and how it starts or goes on.

Promise: a run goes on only with all that was released in its folder, from weights that these releases
made, and starts only from weights that are public or declared so; a crash leaves the old file or the new
one. May import: run, parallel and the rooms below them. Start at `folder.start_or_resume`.

| file | what it answers |
|---|---|
| `folder` | how a run starts or resumes; whether its ledger holds every release |
| `earlier` | what becomes of a run that lies in the folder already |
| `checkpoints` | how a checkpoint is written whole, and read only as it was written |
| `left_on_disk` | what a run leaves, what of it is private or secret, and its removal |
| `keys` | which secrets a run on fixed batches must find again, and whether rows kept their order |
| `base_model` | whether weights are those of the named base |
| `initial_values` | what that base lacks, from which a replay starts |
"""
