"""Tithe beside its peers, measured in one run on one machine.

    python -m benchmarks.rollout --json      sampling: Tithe with an adapter, Hugging Face `generate` without
    python -m benchmarks.grpo_step --json    one GRPO step: Tithe and TRL

The peers live in an environment of their own under ``.bench/`` (made on first use) and read BF16 safetensors converted
there from the demo's GGUF. Every side is a process of its own that waits while another one is measured; rounds are
interleaved and medians are compared.
"""

import tithe  # noqa: F401  before torch: how long its idle threads wait
