"""Tithe: reinforcement-learning post-training of large models on one frozen low-bit base."""

import os

__version__ = "0.1.0"

# OpenMP's idle workers spin for milliseconds before they sleep. Beside another busy process each then burns the time
# that the one it waits for would need: a step that takes 23 s so did not end in 60. 4,000 turns (some 0.2 ms) outlast
# the gap between two kernels and no more. libgomp reads this when torch is imported, so it stands here; what is set
# already wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
