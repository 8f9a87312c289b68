"""What is simulated: the run's settings, its machines, what its rollouts are like, and what fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tithe.errors import ConfigError
from tithe.pool import Curriculum, PromptRecord, adaptive_samples
from tithe.simulator.costs import WorkCosts
from tithe.simulator.draws import Distribution, Fixed
from tithe.staleness import Bounds

OnPublish = Literal["finish", "recompute", "keep"]

_EVERY_PROMPT = Curriculum()
_NONE, _ONE, _SHORT = Fixed(0.0), Fixed(1.0), Fixed(64.0)


@dataclass(frozen=True)
class Layout:
    """Where work is done.

    `shared`: one base, one lane; sampling, training and publishing take turns, and overlap fills waiting but adds no
    arithmetic. `separate`: `rollout_copies` engines with a lane each, and one trainer lane over `train_copies` copies
    that split each batch. `gpus` is what both take together where it is known (0: a copy is the unit), and `label` says
    how they are divided.

    >>> Layout("separate", rollout_copies=3, train_copies=1).name
    'separate 3 rollout + 1 train'
    """

    kind: Literal["shared", "separate"] = "shared"
    rollout_copies: int = 1
    train_copies: int = 1
    gpus: int = 0
    label: str = ""

    def __post_init__(self) -> None:
        if self.rollout_copies < 1 or self.train_copies < 1:
            raise ConfigError(
                f"a layout needs a copy on each side; given are {self.rollout_copies}:{self.train_copies}"
            )
        if self.kind == "shared" and (self.rollout_copies, self.train_copies) != (1, 1):
            raise ConfigError("a shared base is one copy: choose the layout `separate` to split GPUs")

    @property
    def name(self) -> str:
        """For tables."""
        if self.label:
            return self.label
        if self.kind == "shared":
            return "shared base"
        return f"separate {self.rollout_copies} rollout + {self.train_copies} train"

    @property
    def units(self) -> int:
        """GPUs, or copies of the base: what throughput is divided by to compare layouts."""
        return self.gpus or (1 if self.kind == "shared" else self.rollout_copies + self.train_copies)


@dataclass(frozen=True)
class Turn:
    """One request of a rollout: `new_tokens` drawn, then `tool_s` of waiting, whose answer adds `tool_tokens` to the
    next request's prompt."""

    new_tokens: int
    tool_s: float = 0.0
    tool_tokens: int = 0


@dataclass(frozen=True)
class Sample:
    """What happens in one rollout. `reward_s` is a worker's time; one that `crashes` is lost after its first turn, and
    one that `is_right` counts for its prompt's pass rate.

    >>> Sample((Turn(3), Turn(4)), reward_s=0.5).new_tokens
    7
    """

    turns: tuple[Turn, ...]
    reward_s: float = 0.0
    crashes: bool = False
    is_right: bool = False

    @property
    def new_tokens(self) -> int:
        """Drawn over all turns."""
        return sum(turn.new_tokens for turn in self.turns)

    @property
    def rows(self) -> int:
        """Tokens behind the prompt that a training pass computes."""
        return sum(turn.new_tokens for turn in self.turns) + sum(turn.tool_tokens for turn in self.turns[:-1])


@dataclass(frozen=True)
class Failures:
    """What goes wrong. `rollout_rate` of rollouts crash by themselves; the whole process dies every `crash_mean_s`
    seconds on average (None: never), is back after `restart_s`, and goes on from its last checkpoint.
    """

    rollout_rate: float = 0.0
    crash_mean_s: float | None = None
    restart_s: float = 60.0


@dataclass(frozen=True)
class Measured:
    """A group as a run left it: prompt tokens, each rollout's new tokens, and the seconds from its last token to its
    end (reward, tools, queues).

    >>> Measured(12, (8, 30), outside_s=0.5).new_tokens
    (8, 30)
    """

    prompt_tokens: int
    new_tokens: tuple[int, ...]
    outside_s: float = 0.0


@dataclass(frozen=True)
class Workload:
    """What rollouts are like; every field is a distribution over rollouts (`prompt_tokens`: over groups).

    `turns` requests make a rollout; `new_tokens` is per request. With `measured`, groups are those of a run
    in the order of their admission, over and over (beginning with number `seed`): the same run under other settings.
    With `measured_by` "prompt" a prompt that is put back meets what it met before, with "sample" what comes next.
    Every rollout of one then also waits its `outside_s` before it is judged, for which nobody queues.

    `prompts` is how many the task has (0: no prompt comes back), `pass_rate` the share of right answers, over prompts:
    what a prompt's number of samples and the curriculum follow. It stays as it is: learning is not simulated.
    """

    prompt_tokens: Distribution = _SHORT
    new_tokens: Distribution = _SHORT
    turns: Distribution = _ONE
    tool_s: Distribution = _NONE
    tool_tokens: Distribution = _NONE
    reward_s: Distribution = _NONE
    pass_rate: Distribution | None = None
    prompts: int = 0
    measured: tuple[Measured, ...] = ()
    measured_by: Literal["prompt", "sample"] = "prompt"


@dataclass(frozen=True)
class Scenario:
    """One simulation. Sizes as in the configuration: `max_running` (`engine.max_running`) counts sequences of all
    engines, `prefill_tokens` is per engine and tick, `buffer` and `bounds` count rollouts; `reward_workers` None judges
    without queueing. `group_sizes` are the phases of a schedule: (first batch, samples of a prompt) in order; without
    them `bounds` says how many. `samples_span` (`schedule.adaptive_samples`) and `curriculum` follow pass rates.

    `commit_s` is what the rollout loop does on the processor for each group (durable commit), `lease_s` the train loop
    for each batch before it is trained, `between_s` after its publication (metrics), `checkpoint_s` for a checkpoint.
    """

    bounds: Bounds
    costs: WorkCosts
    workload: Workload = field(default_factory=Workload)
    layout: Layout = field(default_factory=Layout)
    failures: Failures = field(default_factory=Failures)
    on_publish: OnPublish = "finish"
    buffer: int = 2**31
    max_running: int = 64
    prefill_tokens: int = 512
    micro_batch_tokens: int = 640
    max_live_versions: int = 4
    reward_workers: int | None = None
    reward_timeout_s: float | None = None
    failed_batches: int = 3
    checkpoint_every: int = 10
    checkpoint_s: float = 0.0
    lease_s: float = 0.0
    between_s: float = 0.0
    commit_s: float = 0.0
    steps: int = 50
    seed: int = 0
    group_sizes: tuple[tuple[int, int], ...] = ()
    samples_span: tuple[int, int] | None = None
    curriculum: Curriculum = _EVERY_PROMPT

    def __post_init__(self) -> None:
        bounds = self.bounds
        if self.buffer < bounds.batch_rollouts:
            raise ConfigError(
                f"rl.rollout_buffer_size = {self.buffer} never holds one batch of {bounds.batch_rollouts} rollouts",
                "rl.rollout_buffer_size",
            )
        if self.max_running < 1 or self.prefill_tokens < 1 or self.micro_batch_tokens < 1 or self.steps < 1:
            raise ConfigError("in-flight sequences, prefill tokens, micro-batch tokens and steps must be at least 1")
        if self.follows_pass_rates and not (self.workload.prompts and self.workload.pass_rate):
            raise ConfigError("adaptive_samples and the curriculum need the number of prompts and their pass rates")

    @property
    def follows_pass_rates(self) -> bool:
        """Whether a prompt's record changes how many samples it gets, or when it is drawn."""
        return self.samples_span is not None or self.curriculum.is_on

    @property
    def least_samples(self) -> int:
        """Fewest that a group may have."""
        return 1 if self.samples_span is None else self.samples_span[0]

    def most_samples(self, batch: int) -> int:
        """That a prompt is given for a batch."""
        return self.group_size(batch) if self.samples_span is None else self.samples_span[1]

    def samples(self, batch: int, record: PromptRecord | None) -> int:
        """That a prompt with this record is given for a batch."""
        usual = self.group_size(batch)
        if self.samples_span is None:
            return usual
        return adaptive_samples(record, usual=usual, least=self.samples_span[0], most=self.samples_span[1])

    def group_size(self, batch: int) -> int:
        """Samples of a prompt that is admitted for a batch, the first being 0."""
        sizes = [size for first, size in self.group_sizes if first <= batch]
        return sizes[-1] if sizes else self.bounds.group_size

    @property
    def mode(self) -> str:
        """`sync`, `one-step-off` or `async`, by the bounds; with `partial` when rollouts cross publications."""
        lag = max(self.bounds.max_lag, self.bounds.max_age)
        name = "sync" if lag == 0 else "one-step-off" if lag == 1 else "async"
        return name if self.on_publish == "finish" else f"{name}, partial rollouts ({self.on_publish})"
