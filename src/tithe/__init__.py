"""Tithe: reinforcement-learning post-training of large models on one frozen low-bit base."""

__version__ = "0.1.0"
