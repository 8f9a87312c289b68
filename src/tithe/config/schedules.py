"""The section `schedule`: what changes over a run, and from prompt to prompt."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tithe.config.base import Section, as_tuple

EVERY_RATE = (0.0, 1.0)
"""`schedule.rest_outside` where none is given: only prompts that are always or never solved rest."""


class Phase(Section):
    """A stretch of a run. Keys that it leaves out keep the value they have elsewhere in the run file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")
    """Name in the pool, the metrics and the report."""

    share: float | None = Field(default=None, ge=0)
    """Length relative to the other phases' shares; together they fill `run.max_steps`."""

    until_step: int | None = Field(default=None, ge=1)
    """Last batch of the phase, counted from 1."""

    temperature: float | None = Field(default=None, gt=0, le=100)
    """Instead of `rollout.temperature`."""

    top_p: float | None = Field(default=None, gt=0, le=1)
    """Instead of `rollout.top_p`."""

    samples_per_prompt: int | None = Field(default=None, ge=2, le=65536)
    """Instead of `rl.samples_per_prompt`."""

    kl_coef: float | None = Field(default=None, ge=0, le=100)
    """Instead of `rl.kl_coef`."""

    lr: float | None = Field(default=None, gt=0, le=1)
    """Instead of `optimizer.lr`."""


class ScheduleSettings(Section):
    """What changes over the run (phases), and from prompt to prompt (number of samples, curriculum)."""

    phases: Annotated[tuple[Phase, ...], as_tuple] = ()
    """List of `{name, share or until_step, temperature, top_p, samples_per_prompt, kl_coef, lr}`, in order. A phase has
    a `share` of `run.max_steps` (without any share or `until_step`, all are equally long), or lasts `until_step`; the
    last one ends with the run. A group keeps the temperature, top-p and number of samples of the phase it was admitted
    in; `kl_coef` and `lr` (the peak of `optimizer.lr_scheduler`) are those of the batch that is trained. The rollouts
    of a batch stay the same, so fewer samples are more prompts."""

    change: Literal["step", "linear"] = "step"
    """`step`: a phase's values hold from its first batch to its last. `linear`: temperature, top-p, KL coefficient and
    learning rate move in a straight line to the next phase's, which they reach at its first batch; the number of
    samples steps. A last phase of `share: 0` makes that line as long as the run."""

    adaptive_samples: (
        Annotated[
            tuple[Annotated[int, Field(ge=2, le=65536)], Annotated[int, Field(ge=2, le=65536)]],
            as_tuple,
            Field(json_schema_extra={"allowed": "[fewest, most], whole numbers >= 2 and <= 65536"}),
        ]
        | None
    ) = None
    """`[fewest, most]` samples by prompt: most for one whose last group was right half of the time, falling to the
    fewest for one that was solved or hopeless; the phase's own number for one that was never measured. Batches keep
    their size. With fewer than 4 a group's mean says little of the prompt. `null`: every prompt gets the phase's
    number."""

    rest_batches: int = Field(default=0, ge=0, le=1_000_000)
    """Batches for which a prompt rests once its group was solved or hopeless (a pass rate that is not between those of
    `rest_outside`): equal rewards teach nothing. Then it comes back and is measured again. 0 lets no prompt rest. When
    all prompts rest, they are drawn all the same."""

    rest_outside: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(gt=0, le=1)]],
        as_tuple,
        Field(json_schema_extra={"allowed": "[low, high], 0 <= low < high <= 1"}),
    ] = EVERY_RATE
    """Share of right answers (of rewards, where right and wrong are not known) up to which a prompt is hopeless, and
    from which it is solved."""

    prompt_weights: Literal["uniform", "pass_rate"] = "uniform"
    """`uniform` draws every prompt once a pass. `pass_rate` draws a measured prompt in a share 4·p·(1 - p) of the
    passes, at least a tenth, p being its last group's pass rate: most often what is half solved."""
