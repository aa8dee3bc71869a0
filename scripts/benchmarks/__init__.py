"""What a DPZero step costs, in units of the forward passes that it needs.

    python -m scripts.benchmarks step --shape roberta-base --batch_size 16 --seq_length 64
    python -m scripts.benchmarks memory --dtype bfloat16 --device_memory 80
    python -m scripts.benchmarks fixed --rows 10000000

`step` measures time, memory and exactness of one step on random weights of a named architecture; bare
forward passes and whole steps take turns in one process, so that other load on the machine falls on
both. `memory` says what fits: for every shape the peak memory of inference, DPZero, the published loop
and first-order private training. `fixed` times whole `train()` steps of a linear head in turns with
Hugging Face's Trainer. Run it from the root of the checkout. Start reading at `command.py`.
"""
