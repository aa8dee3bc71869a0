"""Several processes, and models in parts: collectives, agreement, FSDP2, offload."""
