"""Data carriers: plain frozen dataclasses over numpy arrays, no torch.

Shape legend: _T completion tokens of one rollout, _P prompt tokens of one group, _B rollouts of a batch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tithe.errors import Failure

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
ExpertArray = NDArray[np.uint16]


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """Identity of a policy. `serial` counts batches trained and never decreases or repeats within a run;
    a rollback starts a new `lineage`.

    >>> PolicyVersion(0, 4) < PolicyVersion(0, 5)
    True
    """

    lineage: int
    serial: int


class FinishReason(enum.StrEnum):
    """Why a completion ended. LENGTH is the only one that counts as truncated."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is drawn. `temperature` 0 is greedy and for evaluation only.

    `stop_token_ids` end a completion and are part of it (they are trained); `stop_strings` end it when the decoded
    text contains one. `seed`, `group` and `sample` address the counter-based random numbers: the same triple
    under the same policy gives the same tokens whatever else is in the batch.

    >>> SamplingParams(temperature=1.0, max_new_tokens=64, stop_token_ids=(2,), seed=7, group=3, sample=1).top_p
    1.0
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    group: int = 0
    sample: int = 0


@dataclass(frozen=True)
class GenerateRequest:
    """One completion to be drawn, as a message that can be serialised. `adapter` is the published name of the
    policy (`None`: the bare base). Requests of one group with equal `prompt_ids` share the prompt's prefill.
    `may_continue`: another request of the group may begin with this one's tokens, as a conversation's next turn does.
    What was computed is then kept in memory when the answer has stopped.

    >>> GenerateRequest(prompt_ids=(1, 5, 9), params=SamplingParams(), adapter="run-0-v3-1a2b3c4d").adapter
    'run-0-v3-1a2b3c4d'
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    adapter: str | None = None
    may_continue: bool = False


@dataclass(frozen=True, eq=False)
class Completion:
    """What the engine answers, token by token.

    `logp` is log-softmax(logits / T) over the whole vocabulary at T = params.temperature (1 when greedy);
    `logp_behaviour` is the same renormalised over the kept set of top-k / top-p / min-p; `serials` holds the policy
    serial that drew each token. All have shape [T].

    >>> c = Completion(np.array([5, 2], np.int32), np.array([-0.5, -0.1], np.float32),
    ...                np.array([-0.5, -0.1], np.float32), np.array([3, 3], np.int32), FinishReason.STOP)
    >>> len(c.token_ids)
    2
    """

    token_ids: IntArray
    logp: FloatArray
    logp_behaviour: FloatArray
    serials: IntArray
    finish: FinishReason
    kept_set: Any = None  # reserved: the token ids that top-k / top-p kept
    experts: ExpertArray | None = None
    """[P + T - 1, L, k]: the experts that each computed position took in the L mixture layers (the last token is only
    drawn, never computed); None where nothing was recorded."""


@dataclass(frozen=True)
class PromptItem:
    """One row of a task. `id` is stable across runs (it is what the pool and the cursor remember); `messages` is
    a chat (`role`, `content`), or `text` a raw prompt; `answer` is the gold answer as text, `extra` all other columns.

    >>> PromptItem("sum-3-4", messages=({"role": "user", "content": "3+4="},), answer="7").answer
    '7'
    """

    id: str
    messages: tuple[Mapping[str, str], ...] = ()
    text: str | None = None
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Rollout:
    """One finished completion with everything training needs. Arrays have shape [T].

    `loss_mask` is True on tokens the model wrote; `reward` is None while unscored or when the grader abstained;
    `failure` says why there is no usable result. `grader` names who judged, with a version, and `reward_reason` says
    in a few words why the reward is what it is.
    """

    sample: int
    token_ids: IntArray
    loss_mask: BoolArray
    logp: FloatArray
    logp_behaviour: FloatArray
    serials: IntArray
    temperature: float
    finish: FinishReason
    text: str = ""
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    experts: ExpertArray | None = None
    """As `Completion.experts`: what training replays."""
    reward_reason: str = ""
    grader: str = ""


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """All samples of one prompt. `group_id` is unique in a run and is what groups rewards (never the prompt's text).

    `admitted_serial` is the serial the group was admitted under; `min_serial` the oldest token's, which decides
    its age.

    >>> r = Rollout(0, np.array([5, 2], np.int32), np.ones(2, bool), np.zeros(2, np.float32), np.zeros(2, np.float32),
    ...             np.array([4, 3], np.int32), 1.0, FinishReason.STOP, reward=1.0)
    >>> RolloutGroup(0, "p1", np.array([1], np.int32), (r,), lineage=0, admitted_serial=4).min_serial
    3
    """

    group_id: int
    prompt_id: str
    prompt_ids: IntArray
    rollouts: tuple[Rollout, ...]
    lineage: int
    admitted_serial: int

    @property
    def min_serial(self) -> int:
        """The serial of the oldest token of any member (the admission's when nothing was generated)."""
        serials = [int(r.serials.min()) for r in self.rollouts if len(r.serials)]
        return min(serials, default=self.admitted_serial)


PerRollout = Sequence[Sequence[FloatArray | None]]
"""`x[i][j]` has shape [T] for rollout j of group i; None where nothing is known."""


@dataclass(frozen=True, eq=False)
class BatchScores:
    """What a batch was scored with before it is trained, each part in the order of its groups, or None.

    `prox_logp`: log-probs under the weights with which the batch begins; `ref_logp`: under the reference; `value`: the
    critic's before each token; `returns`: what the critic shall learn. `kl_coef` is the weight of the KL then, and
    `rejected` names rollouts (group index, rollout index) that a correction leaves out whole.

    >>> BatchScores(value=[[np.zeros(3, np.float32), None]]).rejected
    frozenset()
    """

    prox_logp: PerRollout | None = None
    ref_logp: PerRollout | None = None
    value: PerRollout | None = None
    returns: PerRollout | None = None
    kl_coef: float = 0.0
    rejected: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """What the trainer receives: whole groups plus one advantage array per rollout.

    `advantages[i][j]` has shape [T] for rollout j of group i, in the order of `groups[i].rollouts`; rollouts that
    are not trained have `None`. `serial` is the trainer's serial when the batch begins; `scores` is what is known of it
    beforehand, where an algorithm needs that.
    """

    groups: Sequence[RolloutGroup]
    advantages: PerRollout
    serial: int
    scores: BatchScores | None = None
