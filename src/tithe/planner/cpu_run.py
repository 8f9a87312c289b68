"""A run on a processor as the memory of one process sees it, and the sizes that its buffers are counted in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from tithe.arch import ArchSpec, Base, TensorFamily, TensorGroup
from tithe.errors import ConfigError
from tithe.planner.adapter import ExpertLayout, targeted

PANEL: Final = 48
"""Rows of a panel, to which stored matrices are padded (`tithe.quant.kinds`)."""
PAGE: Final = 16
"""Positions of a page (`tithe.models.kv`)."""
WINDOW: Final = 8192
"""Pairs of a row and an expert that are computed at once (`tithe.models.expert_workspace`)."""


@dataclass(frozen=True)
class CpuRun:
    """Everything that the memory of a run depends on.

    Example: the demo's model at its defaults is ``CpuRun(spec, base, prompt=40, new=48, rollouts=64)``.
    """

    spec: ArchSpec
    base: Base
    prompt: int
    """Tokens of a prompt."""
    new: int
    """Tokens of a completion."""
    rollouts: int = 64
    """Of one batch."""
    samples: int = 8
    """Rollouts that share a prompt."""
    lora_r: int = 32
    lora_targets: tuple[str, ...] = ("all-linear",)
    lora_experts: ExpertLayout = "per_expert"
    micro_batch_tokens: int = 640
    recompute: bool = False
    is_packed: bool = True
    base_bytes: int = 2
    """Of one number of a base that is held unpacked: 2 in bf16, 4 in fp32."""
    operand_bytes: int = 2
    """Of one operand of a product: 2 in bf16 (a processor with a bf16 dot product), 4 in fp32."""
    max_context: int = 2048
    max_running: int = 64
    prefill_tokens: int = 512
    live_versions: int = 1
    """Held by the engine while the trainer works."""
    threads: int = 2

    def __post_init__(self) -> None:
        spec = self.spec
        if spec.others or spec.mixture.latent_size or spec.mixture.has_shared_gate:
            raise ConfigError(
                "--hardware cpu: this model's kind of attention or mixture is planned for on GPUs only, and does not "
                "run on a processor; plan for a card",
                key="hardware",
            )

    @property
    def prompts(self) -> int:
        """Of one batch."""
        return -(-self.rollouts // self.samples)

    @property
    def running(self) -> int:
        """Sequences that are sampled at once."""
        return min(self.max_running, self.rollouts)

    @cached_property
    def sizes(self) -> Sizes:
        """Widths of the buffers."""
        return Sizes.of(self.spec)

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Every adapted linear, families of them together."""
        return tuple(Site.of(self, family) for family in targeted(self.spec, self.lora_targets))

    @property
    def rank(self) -> int:
        """Of an adapter as kernels take it: even."""
        return even(self.lora_r)

    @property
    def is_gated(self) -> bool:
        """Whether one launch makes gate, up and their product, so that the float32 pair is never written."""
        return self.operand_bytes == 2 and self.sizes.dense % PANEL == 0

    def ranks(self, *, experts: bool = False) -> dict[str, int]:
        """Σr by place, of linears or of experts."""
        found: dict[str, int] = {}
        for site in self.sites:
            if (site.experts > 0) == experts:
                found[site.place] = max(found.get(site.place, 0), self.rank * len(self._beside(site)))
        return found

    def _beside(self, site: Site) -> list[Site]:
        """The adapted linears that read the same input in the site's first layer, itself included."""
        return [s for s in self.sites if (s.place, s.bank) == (site.place, site.bank) and site.layers[0] in s.layers]

    @property
    def widest_rank(self) -> int:
        """Σr of the widest place of linears."""
        return max(self.ranks().values(), default=2)


@dataclass(frozen=True)
class Sizes:
    """Columns of the buffers of a forward. In latent attention `qkv` are the projections into both bottlenecks."""

    hidden: int
    dense: int
    """Width of dense MLPs; 0 where every layer is a mixture."""
    dense_layers: int
    qkv: int
    att: int
    """What o_proj reads."""
    q_a: int
    """The queries' bottleneck; 0 without one."""
    q_b: int
    """Queries that come out of it."""
    kv_b: int
    """Rows of the projection from latents to heads; 0 in grouped attention."""
    cached: int
    """Numbers of a token in the cache of one layer."""
    expert: int
    """Width of the widest bank of experts."""

    @staticmethod
    def of(spec: ArchSpec) -> Sizes:
        """As `tithe.models` lays an architecture out."""
        mixture, latent = spec.mixture, spec.latent
        dense_layers = spec.n_layers - len(spec.moe_layers)
        dense = spec.intermediate_size if dense_layers else 0
        expert = max(1, mixture.n_shared) * mixture.width
        if latent is None:
            qkv = spec.q_size + 2 * spec.kv_size
            return Sizes(spec.hidden_size, dense, dense_layers, qkv, spec.q_size, 0, 0, 0, 2 * spec.kv_size, expert)
        queries, bottleneck = spec.n_heads * latent.qk_head_dim, latent.q_lora_rank or 0
        return Sizes(
            hidden=spec.hidden_size,
            dense=dense,
            dense_layers=dense_layers,
            qkv=(bottleneck or queries) + latent.cached_per_token,
            att=spec.n_heads * latent.v_head_dim,
            q_a=bottleneck,
            q_b=queries if bottleneck else 0,
            kv_b=spec.n_heads * (latent.qk_nope_head_dim + latent.v_head_dim),
            cached=latent.cached_per_token,
            expert=expert,
        )


PLACES: Final = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "q_a_proj": "qkv", "kv_a_proj_with_mqa": "qkv",
    "q_b_proj": "q_b", "kv_b_proj": "kv_b", "o_proj": "o", "gate_proj": "gate_up", "up_proj": "gate_up",
    "gate_up_proj": "gate_up", "w1": "gate_up", "w3": "gate_up", "down_proj": "down", "w2": "down",
}  # fmt: skip
"""Linears by the last part of their name → the place in the block where `tithe.models` joins them."""


def place_of(family: TensorFamily) -> str:
    """Where a linear lies; its own name where it is joined with none (the head)."""
    name = family.name.removesuffix(".weight").rpartition(".")[2]
    return PLACES.get(name, name)


@dataclass(frozen=True)
class Site:
    """One adapted linear of every layer that has it: A [r, columns] and B [out, r]."""

    place: str
    bank: str
    """Whose it is: `linear`, `routed` or `shared`."""
    out: int
    columns: int
    layers: tuple[int, ...]
    experts: int
    """Of a layer: each has a pair; 0 for a linear, 1 for the shared expert."""
    shares_a: bool = False
    shares_b: bool = False

    @staticmethod
    def of(run: CpuRun, family: TensorFamily) -> Site:
        """The site of a family; `ConfigError` for the head, which only GPUs' plans know."""
        place, (out, columns) = place_of(family), family.one_expert
        if not family.layers:
            raise ConfigError(
                "--lora-targets: an adapter on the head is not modelled on a processor; leave it out", key="hardware"
            )
        kinds = {TensorGroup.ROUTED_EXPERTS: "routed", TensorGroup.SHARED_EXPERT: "shared"}
        bank = kinds.get(family.group, "linear")
        experts = {"routed": run.spec.n_experts, "shared": 1, "linear": 0}[bank]
        outer = run.lora_experts == "shared_outer" and bank == "routed"
        return Site(
            place, bank, out, columns, family.layers, experts, outer and place == "gate_up", outer and place == "down"
        )

    @property
    def n_a(self) -> int:
        """Matrices A of a layer."""
        return 1 if self.shares_a else max(1, self.experts)

    @property
    def n_b(self) -> int:
        """Matrices B of a layer."""
        return 1 if self.shares_b else max(1, self.experts)

    def numbers(self, rank: int) -> int:
        """Of all layers."""
        return len(self.layers) * rank * (self.n_a * self.columns + self.n_b * self.out)


@dataclass(frozen=True)
class Micro:
    """The largest micro-batch: whole groups where they fit, else parts with their prompt repeated."""

    rows: int
    targets: int
    segments: int
    pages: int

    @staticmethod
    def of(run: CpuRun) -> Micro:
        """As `tithe.packing` divides a batch of equal lengths."""
        own = run.new - 1
        whole = run.prompt + run.samples * own
        if whole <= run.micro_batch_tokens:
            members = [run.samples] * _fullest(run.prompts, whole, run.micro_batch_tokens)
        else:
            room = max(1, run.micro_batch_tokens - run.prompt)
            each = _fullest(run.samples, own, room)
            members = [each] * max(1, min(run.prompts, run.micro_batch_tokens // (run.prompt + each * own)))
        full, end = run.prompt // PAGE, -(-(run.prompt + own) // PAGE)
        pages = sum(-(-run.prompt // PAGE) + n * (end - full) for n in members) + 1
        rows = sum(run.prompt + n * own for n in members)
        return Micro(rows, sum(members) * run.new, sum(n + 1 for n in members), pages)


def _fullest(count: int, cost: int, room: int) -> int:
    """Equal items in the fullest of as few balanced bins as hold them all."""
    fit = max(1, room // max(1, cost))
    bins = -(-count // fit)
    return -(-count // bins)


def panels(rows: int) -> int:
    """Rows in whole panels."""
    return -(-rows // PANEL) * PANEL


def even(count: int) -> int:
    """The next even number."""
    return count + count % 2


def turned(rows: int, columns: int) -> int:
    """Entries of a transposed array in panels (`tithe.quant.matrix.transposed_numel`)."""
    return panels(columns) * even(rows)
