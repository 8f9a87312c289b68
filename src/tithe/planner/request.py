"""What is planned for: a model in a format, on some hardware, with an adapter, a context and live sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from tithe.arch import ArchSpec, Base, find_target, make_base
from tithe.errors import ConfigError
from tithe.planner.adapter import EXPERT_LAYOUTS, AdapterSize, ExpertLayout, adapter_size
from tithe.planner.hardware import CPU_NAME, Hardware, parse_hardware

Phase = Literal["rl", "rollout", "train"]
LayoutName = Literal["shared", "separate", "full"]
Attention = Literal["auto", "dp", "tp"]
OptimizerDevice = Literal["auto", "gpu", "host", "nvme"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
LAYOUTS: Final[tuple[LayoutName, ...]] = get_args(LayoutName)
ATTENTIONS: Final[tuple[Attention, ...]] = get_args(Attention)
OPTIMIZER_DEVICES: Final[tuple[OptimizerDevice, ...]] = get_args(OptimizerDevice)
CRITICS: Final = ("none", "head", "full")
KV_BYTES: Final = {"bf16": 2, "fp8": 1}

TRAIN_SHARE: Final = 0.25
"""Of the GPUs of separate sides, the trainer's part (AReaL, arXiv 2505.24298: 75 % inference, 25 % training)."""

MAX_TOKENS: Final = 2**31

_ON_PROCESSORS: Final[dict[str, tuple[object, ...]]] = {
    "phase": ("rl",), "attention": ("auto", "dp"), "tp": (0, 1), "reward_model": ("",), "critic": ("none",),
    "optimizer_device": ("auto", "gpu"), "kv_dtype": ("bf16",), "windowed_kv": (False,), "router_replay": (False,),
}  # fmt: skip
"""Option → the values that a plan for a processor counts."""


@dataclass(frozen=True)
class PlanRequest:
    """Everything a plan depends on; `tithe plan` has an option for each.

    Example: ``make_request("kimi-k2", "8xB200", base="int4", lora_targets=("attention",), context=16384,
    sequences=64)``.
    """

    model: str
    spec: ArchSpec
    base: Base
    hardware: Hardware
    phase: Phase = "rl"
    layout: LayoutName = "shared"
    attention: Attention = "auto"
    """`dp`: every rank holds attention whole and has sequences of its own, experts are divided. `tp`: each matrix is
    divided among `tp` ranks that share their sequences."""
    tp: int = 0
    """0: as many as fit on one node, a power of two."""
    lora_r: int = 32
    lora_targets: tuple[str, ...] = ("all-linear",)
    lora_experts: ExpertLayout = "per_expert"
    context: int = 4096
    """Longest sequence, prompt and completion."""
    prompt: int = 0
    """Tokens of a prompt; 0: an eighth of the context, at most 1024."""
    new: int = 0
    """Mean tokens of a completion; 0: half of what the context leaves."""
    sequences: int = 64
    """Live at once, over all GPUs."""
    batch: int = 256
    """Rollouts of one optimizer step."""
    steps: int = 100
    length_sigma: float = 0.99
    """Spread of completion lengths, the standard deviation of their logarithm. 0.99: a 99th percentile of ten times the
    median, as Laminar saw (arXiv 2510.12633)."""
    recompute: bool = True
    micro_batch_tokens: int = 0
    """Tokens of one micro-batch on one rank; 0: one sequence of the longest context."""
    logits_rows: int = 1024
    """Rows of logits held at once."""
    optimizer_device: OptimizerDevice = "auto"
    live_versions: int = 2
    kv_dtype: str = "bf16"
    windowed_kv: bool = False
    router_replay: bool = False
    reference: bool = True
    """Whether a reference policy is scored (KL)."""
    reward_model: str = ""
    critic: str = "none"
    reward_s: float = 0.0
    """Seconds of one reward on one worker."""
    reward_workers: int = 64
    gpu_bytes: int = 0
    """Budget of one card; 0: its memory."""
    host_bytes_per_node: int = 2_000_000_000_000
    """Memory of one machine."""
    config: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def gpu_budget_bytes(self) -> int:
        """What one card may hold."""
        return self.gpu_bytes or self.hardware.accelerator.mem_bytes

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt."""
        return self.prompt or max(1, min(1024, self.context // 8))

    @property
    def new_tokens(self) -> int:
        """Mean tokens of a completion."""
        return self.new or max(1, (self.context - self.prompt_tokens) // 2)

    @property
    def micro_tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch_tokens or self.context

    @property
    def adapter(self) -> AdapterSize:
        """The adapter's size."""
        return adapter_size(self.spec, self.lora_r, self.lora_targets, self.lora_experts)

    @property
    def uses_tp(self) -> bool:
        """Whether matrices are divided: asked for, or a dense model, which has no experts to divide."""
        if self.attention == "auto":
            return self.tp > 0 or not self.spec.is_moe
        return self.attention == "tp"


def make_request(model: str, hardware: str, *, base: str = "published", **options: Any) -> PlanRequest:
    """A request with names resolved and numbers checked. `ModelError` or `ConfigError` names what is wrong."""
    cards = parse_hardware(hardware)
    found = find_target(model)
    spec = ArchSpec.from_config(found.config)
    request = PlanRequest(
        model=found.name,
        spec=spec,
        base=found.base(base) if base == "published" else make_base(base, found.config),
        hardware=cards,
        config=found.config,
        **options,
    )
    _check(request)
    return request


def _check(request: PlanRequest) -> None:
    _choices(request)
    for name in ("context", "sequences", "batch", "steps", "live_versions", "logits_rows", "reward_workers"):
        value = getattr(request, name)
        if not 1 <= value <= MAX_TOKENS:
            raise ConfigError(f"--{_flag(name)} {value}: a whole number from 1 to {MAX_TOKENS} is needed", key=name)
    for name in (
        "prompt", "new", "tp", "micro_batch_tokens", "gpu_bytes", "host_bytes_per_node", "reward_s", "length_sigma",
    ):  # fmt: skip
        if not 0 <= getattr(request, name) < math.inf:
            raise ConfigError(f"--{_flag(name)} {getattr(request, name)}: a number from 0 is needed", key=name)
    if request.prompt_tokens + request.new_tokens > request.context:
        asked = f"--prompt {request.prompt_tokens} and --new {request.new_tokens}"
        raise ConfigError(f"{asked} are more than --context {request.context}: raise --context", key="context")
    tp, gpus = request.tp, request.hardware.gpus
    if tp and (gpus % tp or request.attention == "dp"):
        reason = "needs --attention tp" if request.attention == "dp" else f"does not divide {gpus} GPUs"
        raise ConfigError(f"--tp {tp} {reason}; leave it out, or change it", key="tp")
    if request.hardware.accelerator.name == CPU_NAME:
        _check_processor(request)
    if request.layout == "separate" and gpus < 2:
        raise ConfigError("--layout separate needs two GPUs or more: one side trains, the other samples", key="layout")
    _ = request.adapter  # names a target that the model lacks


def _check_processor(request: PlanRequest) -> None:
    """What `tithe.planner.cpu` does not count is refused, never left out."""
    if request.hardware.gpus > 1 or request.layout != "shared":
        raise ConfigError("--hardware cpu: one processor in the shared layout is planned for", key="hardware")
    for name, counted in _ON_PROCESSORS.items():
        if getattr(request, name) not in counted:
            text = (
                f"--{_flag(name)} {getattr(request, name)} is not counted on a processor; leave it out, or name a card"
            )
            raise ConfigError(text.replace(" True", ""), key=name)


def _choices(request: PlanRequest) -> None:
    for name, allowed in (
        ("phase", PHASES),
        ("layout", LAYOUTS),
        ("attention", ATTENTIONS),
        ("optimizer_device", OPTIMIZER_DEVICES),
        ("critic", CRITICS),
        ("kv_dtype", tuple(KV_BYTES)),
        ("lora_experts", EXPERT_LAYOUTS),
    ):
        if getattr(request, name) not in allowed:
            given = getattr(request, name)
            raise ConfigError(f"--{_flag(name)} {given}: one of {', '.join(allowed)} is needed", key=name)


def _flag(name: str) -> str:
    return name.replace("_", "-")
