"""The probe of a run: what every version's manifest says of it, for adapters and for whole models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tithe.build.session import Session
from tithe.errors import NonFiniteError
from tithe.lora import LoraSpec
from tithe.weight_sync import Probe, manifest_fields

PROBE_TOKENS = 24


def probe_question(session: Session) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt and completion of a run's probe, of a size that the engine can hold."""
    ids = [session.prompts.prompt_ids(item.id) for item in session.prompts.items[:2]]
    longest = session.cfg.rollout.max_prompt_tokens + session.cfg.rollout.max_new_tokens
    target = ids[-1][-min(PROBE_TOKENS, longest - 1) :]
    return tuple(ids[0][len(target) - longest :]), tuple(target)


class ProbeRecord:
    """One question that every version of a session is asked, and the answer of the version before."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.prompt, self.target = probe_question(session)
        self._parent: tuple[str, tuple[float, ...]] | None = None

    def manifest(
        self, logp: Sequence[float], shaken: Sequence[float] | None = None, lora: LoraSpec | None = None
    ) -> dict[str, Any]:
        """Manifest fields of a version that answers `logp` [n] (and `shaken` [n] with its adapter changed by `NOISE`;
        without one the noise floor is 0). Raises `NonFiniteError` for answers that are no numbers."""
        trainer, base = self._session.trainer, self._session.base
        if not all(math.isfinite(x) for x in (*logp, *(shaken or ()))):
            raise NonFiniteError(
                f"after optimizer step {trainer.optimizer_step} the policy's log-probs are no finite numbers;"
                " lower optimizer.lr or optimizer.max_grad_norm"
            )
        name, parent_logp = (None, None) if self._parent is None else self._parent
        probe = Probe(
            token_ids=(*self.prompt, *self.target),
            prompt_len=len(self.prompt),
            logp=tuple(logp),
            noise_floor=0.0 if shaken is None else max(abs(a - b) for a, b in zip(logp, shaken, strict=True)),
            parent_logp=parent_logp,
        )
        return manifest_fields(
            lora=lora,
            parent=name,
            optimizer_step=trainer.optimizer_step,
            base_checksum=base.checksum,
            numeric_mode=base.numeric_mode,
            probe=probe,
        )

    def confirm(self, name: str, logp: Sequence[float]) -> None:
        """A version of this name and answer is served: it is the next one's parent."""
        self._parent = (name, tuple(logp))
