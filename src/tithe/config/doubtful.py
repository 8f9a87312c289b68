"""Settings of the learning itself that are legal and seldom wise, in every phase of the schedule."""

from __future__ import annotations

from collections.abc import Iterator

from tithe.config.phases import PhaseValues, schedule_of
from tithe.config.sections import RunSections

FEW_PROMPTS = 8
"""Fewest distinct prompts of a batch; with fewer, one odd question turns the whole step."""

MANY_EPOCHS = 4
"""Passes over one batch from which more deserve a warning."""

FAST_LR, WEAK_KL = 1e-4, 0.005
"""A learning rate above the one with a KL coefficient below the other leaves the base quickly."""


def learning_warnings(cfg: RunSections) -> Iterator[str]:
    """One sentence per doubtful setting, naming what to change."""
    phases = schedule_of(cfg).values
    most = max(phases, key=lambda values: values.samples)
    prompts = cfg.rl.batch_size_per_update // most.samples
    if prompts < FEW_PROMPTS:
        batch = f"rl.batch_size_per_update = {cfg.rl.batch_size_per_update}"
        yield (
            f"{batch} at {most.samples} samples for each prompt{_where(most)} is {prompts} distinct prompts a step; "
            f"fewer than {FEW_PROMPTS} make noisy steps: raise it to {FEW_PROMPTS * most.samples}, or lower "
            "rl.samples_per_prompt"
        )
    if cfg.rl.ppo_epochs > MANY_EPOCHS:
        yield (
            f"rl.ppo_epochs = {cfg.rl.ppo_epochs}: so many passes over one batch learn its noise and leave the policy "
            f"that sampled it; {MANY_EPOCHS} are the most that usually help"
        )
    for values in phases:
        if values.lr > FAST_LR and values.kl_coef < WEAK_KL:
            yield (
                f"optimizer.lr = {values.lr:g} with rl.kl_coef = {values.kl_coef:g}{_where(values)}: little holds the "
                f"policy near the reference; lower optimizer.lr to {FAST_LR:g}, or raise rl.kl_coef to {WEAK_KL:g}"
            )


def _where(values: PhaseValues) -> str:
    return f" in phase {values.name} of schedule.phases" if values.name else ""
