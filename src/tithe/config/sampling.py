"""The sections that say what is sampled and how it is judged: `rollout`, `reward`, `task`, `engine`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tithe.config.base import RegexText, Section, TextTuple, absolute_path, as_tuple

LARGEST_OPERAND = 1_000_000
"""Most that `sums:N` and `products:N` may ask for."""

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_FILE_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"(sums|products)(:[0-9]{1,7})?")


REWARD_MODEL = "model:"
"""Begins the name of a reward model; its directory follows."""


def _user_function(value: str) -> str | None:
    """`module:function` as it is, `file.py:function` with the file's whole path; None for anything else."""
    match = _FILE_FUNCTION.fullmatch(value)
    if match:
        return f"{absolute_path(match['file'])}:{match['name']}"
    return value if _FUNCTION.fullmatch(value) else None


def _reward_function(value: str) -> str:
    if value == "tool_use":
        return "tithe.rewards.tool_use:score"
    if value == "code":
        return "tithe.rewards.code:score"
    if value.startswith(REWARD_MODEL) and value != REWARD_MODEL:
        return f"{REWARD_MODEL}{absolute_path(value.removeprefix(REWARD_MODEL))}"
    if value in ("math", "symbolic_math"):
        return value
    if (function := _user_function(value)) is not None:
        return function
    raise ValueError("is neither `math` nor a function")


def _tool(value: str) -> str:
    if value.startswith("search:"):
        return f"search:{absolute_path(value.removeprefix('search:'))}"
    if value in ("calculator", "python"):
        return value
    if (function := _user_function(value)) is not None:
        return function
    raise ValueError("is neither `calculator`, `python`, `search:FOLDER` nor a function")


def _task_source(value: str) -> str:
    if value.startswith("verifiers:"):
        raise ValueError(
            "names an environment that runs its own agents over HTTP, which is not read (write its rows to a .jsonl "
            "file, and name its reward function in reward.function)"
        )
    if _ARITHMETIC.fullmatch(value):
        if int(value.partition(":")[2] or 1) not in range(1, LARGEST_OPERAND + 1):
            raise ValueError(f"has a largest operand outside 1 to {LARGEST_OPERAND}")
        return value
    if (function := _user_function(value)) is not None:  # reasoning_gym:NAME, too
        return function
    if value.endswith((".jsonl", ".parquet")):
        return absolute_path(value)
    if value.endswith("/") or Path(value).is_dir():
        return f"{absolute_path(value).rstrip('/')}/"
    raise ValueError("names no task")


TaskSource = Annotated[
    str,
    Field(
        json_schema_extra={
            "allowed": "sums, products, sums:LARGEST, reasoning_gym:NAME, a .jsonl or .parquet file, a dataset's "
            "folder/, module:function, or path/file.py:function"
        }
    ),
    AfterValidator(_task_source),
]


class RolloutSettings(Section):
    """How completions are drawn while training. Log-probabilities are those of softmax(logits / temperature)."""

    temperature: float = Field(default=1.0, gt=0, le=100)
    """Divides the logits, in the sampler and in the trainer alike. 0 (greedy) is for evaluation only and refused
    here."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the most likely tokens that hold this share; 1 keeps all. Below 1 the sampler no longer draws from the
    trained policy."""

    top_k: int = Field(default=0, ge=0)
    """Keep this many most likely tokens; 0 keeps all."""

    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens less likely than this share of the most likely one; 0 drops none."""

    max_new_tokens: int = Field(default=48, ge=1)
    """Longest completion in tokens, the end token included; a longer one is cut and counted as truncated."""

    max_prompt_tokens: int = Field(default=512, ge=1)
    """Longest prompt in tokens, chat template included."""

    on_long_prompt: Literal["drop", "cut", "error"] = "drop"
    """What happens to a prompt over `max_prompt_tokens`: `drop` leaves the row out and counts it, `cut` keeps the last
    tokens, `error` stops at the start and names the row."""

    stop_strings: TextTuple = ()
    """Texts that end a completion when they appear in it, besides the checkpoint's own end tokens."""

    system_prompt: str | None = None
    """System message put before every chat. `null` leaves it to the chat template."""

    on_publish: Literal["finish", "recompute", "keep"] = "finish"
    """What running completions do when a new adapter is published: `finish` on the version they began with;
    `recompute` the KV cache and go on with the new one; `keep` the old cache and go on with the new one (not
    certified bit for bit)."""


class FormatRule(Section):
    """One regular expression and what a match is worth."""

    pattern: RegexText
    """Python regular expression, searched in the completion's text."""

    weight: float = Field(ge=-1000, le=1000)
    """Added to the reward, once, when the pattern is found."""


RewardFunction = Annotated[
    str,
    Field(
        json_schema_extra={
            "allowed": "math, symbolic_math, model:DIR, code, tool_use, module:function, or path/file.py:function"
        }
    ),
    AfterValidator(_reward_function),
]


class RewardPart(Section):
    """One more reward function, and how it enters the reward."""

    name: str = Field(min_length=1, pattern=r"[A-Za-z_]\w*")
    """Under which the pool keeps it."""

    function: RewardFunction
    """As `reward.function`, but not `math` or `symbolic_math`; a Python function's named parts are summed."""

    kind: Literal["rule", "shaping", "model"] = "shaping"
    """`rule`: a hard constraint, met when it gives more than 0. `shaping`: paid always, but not under
    `rl.reward_shaping: none`. `model`: guidance, paid only where `reward.function` and every rule are met."""

    weight: float = Field(default=1.0, ge=-1000, le=1000)
    """Factor of what the function returns."""


Bounds = Annotated[tuple[float, float], Field(json_schema_extra={"allowed": "[low, high]"}), as_tuple]


class RewardSettings(Section):
    """How a completion is judged, in worker processes that can be killed."""

    function: RewardFunction = "math"
    """`math` reads a boxed, an "answer is", or the last number and compares it with the answer column exactly: numbers,
    fractions, lists. `symbolic_math` also compares formulas, sets, intervals, equations and matrices, by two graders
    that must agree (extra `math`). `code` runs the reply's program against the tests of the answer column in the
    sandbox (docs/sandbox.md). `tool_use` pays for the right tool, valid arguments and the result (docs/rewards.md).
    `model:DIR` asks a reward model: a directory that `tithe reward-model` wrote for this base, or a sequence
    classifier's (safetensors). Otherwise a Python function `f(item, text, **info)` that returns a number, named parts,
    or None to abstain; it runs with your rights and is not sandboxed."""

    weights: Annotated[dict[str, float], Field(json_schema_extra={"allowed": "{part: weight}"})] | None = None
    """Factors of the named parts that `function` returns; a part that is not named counts 1. `null` takes the
    function's own (`rewards.weighted`), if it states any."""

    parts: Annotated[tuple[RewardPart, ...], as_tuple] = ()
    """List of `{name, function, kind, weight}`: what is added to `function`'s reward, by its kind."""

    model_quantize: Literal["none", "int4"] = "none"
    """How the blocks of a classifier in `model:DIR` are packed, as `model.quantize`. A reward model on the run's own
    base reads that base as it is held."""

    normalise: Literal["none", "running"] | Annotated[tuple[float, float], as_tuple] = Field(
        default="none", json_schema_extra={"allowed": "none, running, or [low, high]"}
    )
    """`[low, high]` maps the sum of all parts from these bounds to [-1, 1], and cuts what lies outside; the pool keeps
    what that made. `running` divides rewards by the standard deviation of all rewards trained on so far, when
    advantages are taken."""

    clip: Bounds | None = None
    """Lowest and highest reward, applied last."""

    right: float = Field(default=1.0, ge=-1000, le=1000)
    """Reward of a right answer under the built-in functions. More than `wrong`."""

    wrong: float = Field(default=0.0, ge=-1000, le=1000)
    """Reward of a readable but wrong answer under the built-in functions."""

    unreadable: float = Field(default=-0.5, ge=-1000, le=1000)
    """Reward of a completion without readable answer under the built-in functions. Less than `right`."""

    format_rules: Annotated[tuple[FormatRule, ...], as_tuple] = ()
    """List of `{pattern, weight}`, added to the reward of any function."""

    diversity_penalty: float = Field(default=0.0, ge=0, le=1000)
    """Taken off each reward, times the mean likeness to the group's other completions (shared share of 3-grams, 0 to
    1); the reward part `group.diversity`. The metric `overlap` shows the likeness in any case. Pass rates and
    `rl.dynamic_sampling` look at rewards without it. 0 takes nothing."""

    timeout_s: float = Field(default=5.0, gt=0, le=86400)
    """Seconds one judgement may take, counted from its start and not from the queue; then its worker is killed and the
    rollout fails with the cause `timeout`."""

    workers: int = Field(default=1, ge=1, le=1024)
    """Worker processes. They compete with training for the same cores."""

    memory_mib: int = Field(default=1024, ge=64)
    """Address space of one worker in MiB; a judgement that needs more fails."""

    @property
    def uses_learned_model(self) -> bool:
        """Whether a learned model judges, alone or among others, ours or a user's function of that name or kind:
        `rl.kl_coef` has another default then."""
        named = self.function.rpartition(":")[2] == "model"
        return named or bool(self.model_directories) or any(part.kind == "model" for part in self.parts)

    @property
    def model_directories(self) -> tuple[str, ...]:
        """Those of all reward models, each once."""
        functions = (self.function, *(part.function for part in self.parts))
        return tuple(dict.fromkeys(f.removeprefix(REWARD_MODEL) for f in functions if f.startswith(REWARD_MODEL)))


class TaskSettings(Section):
    """The questions: what to train on and what to hold out."""

    source: TaskSource = "sums"
    """`sums` or `products` (built in, with operands from 0 to 12, or to N as `products:N`), `reasoning_gym:NAME` (needs
    that package), a JSONL or Parquet file, a folder that the library `datasets` wrote, or a function of yours that
    returns rows (`module:function` or `path/file.py:function`)."""

    prompt_column: str = Field(default="prompt", min_length=1)
    """Column with the prompt: text, or a list of chat messages with `role` and `content`. A row without it that has a
    column `messages` takes that; a last message of the assistant is then the answer."""

    answer_column: str = Field(default="answer", min_length=1)
    """Column with the right answer, text or number; a list or mapping (a program's tests) is kept as JSON. All other
    columns reach the reward function."""

    eval_source: TaskSource | None = None
    """Held-out questions, in the forms of `source`. `null` sets `eval_size` questions of `source` aside."""

    eval_size: int = Field(default=40, ge=1)
    """Held-out questions, disjoint from training with swapped twins (3 + 4 and 4 + 3). More narrows the confidence
    interval and lengthens each evaluation."""

    instruction: str = ""
    """Text added to the end of every question after a line break, for instance how to give the answer."""

    tools: Annotated[
        tuple[Annotated[str, AfterValidator(_tool)], ...],
        as_tuple,
        Field(
            json_schema_extra={
                "allowed": "a list of calculator, python, search:FOLDER, module:function, path/file.py:function"
            }
        ),
    ] = ()
    """What the policy may call: `calculator`, `python` (programs in the sandbox), `search:FOLDER` (text files), or a
    type-hinted function of yours, which runs in this process. With tools an episode is a conversation, and
    `rollout.max_new_tokens` bounds all of it after the prompt, tools' answers included."""

    max_turns: int = Field(default=4, ge=1, le=64)
    """Most replies of a conversation with tools; one that ends with a call is counted as truncated."""

    call_format: Literal["hermes", "llama3", "kimi_k2", "pythonic"] = "hermes"
    """How calls are written; the system message shows it. Take the one that the checkpoint was trained on."""

    turn_reward: float = Field(default=0.0, ge=-1000, le=1000)
    """Paid for each reply whose calls all worked, and taken for each with a malformed, unknown or refused call."""

    strict: bool = True
    """`true`: a broken row stops the start with its file and line. `false`: it is left out, counted and shown."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides the held-out split and the order of questions; separate from `run.seed`, so that runs of different
    seeds can be compared on the same questions."""


class EngineSettings(Section):
    """The rollout engine on the shared base."""

    max_running: int = Field(default=64, ge=1, le=65536)
    """Sequences decoded together. More is faster per token and needs more KV memory; results do not depend on it.
    Conversations that wait for a tool, and answers that wait for their reward, are none of them."""

    kv_memory_mib: int = Field(default=512, ge=1)
    """Bound of the KV cache in MiB; requests wait when it is full. It must hold at least one longest sequence."""

    max_live_versions: int = Field(default=4, ge=2, le=1024)
    """Adapter versions held at once. A publication waits while all of them still have running requests."""

    prefill_tokens_per_tick: int = Field(default=512, ge=1)
    """Prompt tokens computed between two decode steps. More starts new groups sooner, less keeps running ones
    steady."""
