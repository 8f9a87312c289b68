"""Whom the KL is measured against: the bare base, a saved adapter, a moving copy of the policy, another model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from tithe.lora import LoraSpec
from tithe.models import Decoder, Passes, TrainAdapter
from tithe.packing import MicroBatch
from tithe.trainer.ranks import Idle, is_idle


class Reference:
    """Scores micro-batches. Belongs to the lane. In a mixture it chooses its experts itself."""

    def __init__(
        self, passes: Passes, tensors: Mapping[str, Tensor] | None = None, spec: LoraSpec | None = None
    ) -> None:
        """`tensors` and `spec` are those of an adapter on the base of `passes`; None: the base alone."""
        self._passes, self._idle = passes, Idle(passes.decoder)
        self._tensors: dict[str, Tensor] = {}
        self._adapter: TrainAdapter | None = None
        if tensors is not None and spec is not None:
            self.take(tensors, spec)

    @classmethod
    def other(cls, decoder: Decoder) -> Reference:
        """Another model with the same vocabulary, on buffers of its own."""
        return cls(Passes(decoder, {}, checkpointing=False, dropout=0.0))

    def score(self, micro: MicroBatch) -> np.ndarray:
        """log-probs [N] of a micro-batch's targets at their temperatures. Without rows this rank's experts answer the
        others; another model is whole on every rank, and there is nothing to answer."""
        if is_idle(micro):
            self._idle.take().forward(*([] if self._adapter is None else [self._adapter.model]))
            return np.zeros(0, np.float32)
        return self._passes.score(micro, self._adapter, replaying=False)

    def take(self, tensors: Mapping[str, Tensor], spec: LoraSpec) -> None:
        """Become a copy of an adapter."""
        if self._adapter is not None:
            self._passes.forget(self._adapter)
        self._tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._adapter = TrainAdapter.for_scoring(self._passes.decoder, self._tensors, spec)

    def release(self) -> None:
        """Let the buffers of rounds without rows go."""
        self._idle.release()

    def tensors(self) -> dict[str, Tensor]:
        """The adapter's, by PEFT name; empty for a bare model."""
        return dict(self._tensors)

    def memory_bytes(self) -> int:
        """Of the adapter's copy."""
        return sum(t.numel() * t.element_size() for t in self._tensors.values())
