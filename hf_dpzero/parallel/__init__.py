"""Several processes, and models in parts: collectives, meshes, FSDP2, offload."""
