"""Tiny bases for the trainer's tests, one thread, exact float32 products."""

from support.bases import base_path, decoder, exact, one_exact_thread

__all__ = ["base_path", "decoder", "exact", "one_exact_thread"]
