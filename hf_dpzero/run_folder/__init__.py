"""What a run keeps on disk, and how it starts or goes on: ledger, checkpoints, keys, initial values."""
