"""What an architecture consists of: its sizes and features. Plain Python, also for the planner.

Names and shapes of the tensors follow from these (`tithe.arch.tensors`), bytes from both (`tithe.arch.accounting`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tithe.arch.architectures import Architecture, architecture_of
from tithe.arch.attention import LatentAttention, Window, read_latent, read_window
from tithe.arch.config_reader import ConfigReader
from tithe.arch.described import OtherAttention, canonical, read_others
from tithe.arch.mixture import Mixture, Routing, read_mixture
from tithe.arch.rope import rope_parameters
from tithe.errors import ModelError

_MAX_LAYERS: Final = 4096

QkNorm = Literal["none", "head", "full"]
"""RMS norm of queries and keys: none, over each head (Qwen3, GLM-4.5), or over the whole projection (MiniMax-M2)."""


@dataclass(frozen=True)
class ClampedGate:
    """gpt-oss's gated unit: ``(up + 1) · gate · sigmoid(alpha · gate)`` with gate ≤ limit and |up| ≤ limit."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ArchSpec:
    """The sizes of one decoder. All counts are per model unless a name says otherwise.

    Example: SmolLM2-135M is ``ArchSpec("llama", n_layers=30, hidden_size=576, n_heads=9, n_kv_heads=3, head_dim=64,
    intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True, …)``.
    """

    architecture: Architecture
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    """Width of a query head; in latent attention its rotated part included."""
    intermediate_size: int
    """Width of a dense MLP; in a mixture that of the layers that are none."""
    vocab_size: int
    """Rows of the embedding."""
    rms_norm_eps: float
    max_position_embeddings: int
    """Context length in tokens."""
    rope_type: str
    rope_theta: float
    rotary_dim: int
    """Dimensions of each head that are rotated; the rest passes as it is."""
    tie_word_embeddings: bool
    qkv_bias: bool
    """In latent attention: bias of the two projections into the bottlenecks."""
    o_bias: bool
    mlp_bias: bool
    norms_qk: QkNorm
    activation: str
    has_sinks: bool
    """True when each head has one logit that takes part in the softmax and is thrown away (gpt-oss)."""
    clamped_gate: ClampedGate | None
    window: Window
    latent: LatentAttention | None
    mixture: Mixture
    n_mtp_layers: int
    """Layers for predicting further tokens that a checkpoint may hold after the last one; they are never loaded."""
    others: tuple[OtherAttention, ...] = ()
    """Attention that is planned for and not run."""

    @property
    def own_attention(self) -> tuple[int, ...]:
        """Layers whose attention is the architecture's own kind, ascending."""
        replaced = {layer for other in self.others if not other.is_extra for layer in other.layers}
        return tuple(layer for layer in range(self.n_layers) if layer not in replaced)

    @property
    def is_moe(self) -> bool:
        """True when at least one layer is a mixture of experts."""
        return bool(self.mixture.layers)

    @property
    def qk_norm(self) -> bool:
        """True when queries and keys are normalised."""
        return self.norms_qk != "none"

    @property
    def n_experts(self) -> int:
        """Routed experts of a mixture layer."""
        return self.mixture.n_experts

    @property
    def n_experts_per_token(self) -> int:
        """Routed experts that a token passes."""
        return self.mixture.n_experts_per_token

    @property
    def moe_intermediate_size(self) -> int:
        """Width of one routed expert."""
        return self.mixture.width

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers whose MLP is a mixture of experts, ascending."""
        return self.mixture.layers

    @property
    def norm_topk_prob(self) -> bool:
        """True when the chosen experts' weights are made to sum to 1."""
        return self.mixture.routing.norm_topk_prob

    @property
    def routing(self) -> Routing:
        """How a token's experts are chosen."""
        return self.mixture.routing

    @property
    def q_size(self) -> int:
        """Outputs of q_proj (latent attention: of q_b_proj)."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Outputs of k_proj, and of v_proj; without meaning in latent attention."""
        return self.n_kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ArchSpec:
        """Read a Hugging Face config. `ModelError` names the key that is missing, impossible or unsupported.

        What is described here may be more than `tithe.models` computes: see `check_buildable`.
        """
        config = canonical(config)
        read = ConfigReader(config)
        architecture = architecture_of(config)
        if (config.get("pretraining_tp") or 1) != 1:
            raise ModelError("config: pretraining_tp above 1 is not supported; set it to 1 (the result is the same)")
        heads = read.size("num_attention_heads")
        hidden = read.size("hidden_size")
        layers = read.size("num_hidden_layers", limit=_MAX_LAYERS)
        latent = read_latent(read) if architecture == "deepseek_v3" else None
        head_dim = (
            latent.qk_head_dim if latent else read.size("head_dim", _default_head_dim(architecture, hidden, heads))
        )
        rope = rope_parameters(config)
        rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        has_qkv_bias, has_o_bias = _biases(read, architecture)
        return cls(
            architecture=architecture,
            n_layers=layers,
            hidden_size=hidden,
            n_heads=heads,
            n_kv_heads=_kv_heads(read, architecture, heads),
            head_dim=head_dim,
            intermediate_size=read.size("intermediate_size", _default_width(read)),
            vocab_size=read.size("vocab_size"),
            rms_norm_eps=read.positive("rms_norm_eps", 1e-6),
            max_position_embeddings=read.size("max_position_embeddings"),
            rope_type=rope["rope_type"],
            rope_theta=rope["rope_theta"],
            rotary_dim=latent.qk_rope_head_dim if latent else rotary_dim,
            tie_word_embeddings=read.flag("tie_word_embeddings"),
            qkv_bias=has_qkv_bias,
            o_bias=has_o_bias,
            mlp_bias=architecture == "llama" and read.flag("mlp_bias"),
            norms_qk=_qk_norm(read, architecture),
            activation=read.text("hidden_act", "silu"),
            has_sinks=architecture == "gpt_oss",
            clamped_gate=_clamped_gate(read) if architecture == "gpt_oss" else None,
            window=read_window(read, architecture, layers),
            latent=latent,
            mixture=read_mixture(read, architecture, layers),
            n_mtp_layers=read.count("num_nextn_predict_layers", limit=_MAX_LAYERS),
            others=read_others(config, layers),
        )


def _kv_heads(read: ConfigReader, architecture: Architecture, heads: int) -> int:
    is_optional = architecture in ("llama", "mistral", "mixtral", "deepseek_v3")
    kv_heads = read.size("num_key_value_heads", heads if is_optional else None)
    if heads % kv_heads:
        raise ModelError(f"config: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return kv_heads


def _default_head_dim(architecture: Architecture, hidden: int, heads: int) -> int | None:
    """What transformers assumes when `head_dim` is absent; `None` when it must be given."""
    fixed = {"qwen3": 128, "gpt_oss": 64, "minimax_m2": 128}
    if architecture in fixed:
        return fixed[architecture]
    return hidden // heads if hidden % heads == 0 else None


def _default_width(read: ConfigReader) -> int | None:
    """Qwen3.5's mixtures have no dense layer and say no width of one; `None` when it must be given."""
    is_free = str(read.config.get("model_type")).startswith("qwen3_5_moe")
    return read.size("moe_intermediate_size") if is_free else None


def _biases(read: ConfigReader, architecture: Architecture) -> tuple[bool, bool]:
    """(q, k and v have biases, o has one), as the architecture's attention class builds them."""
    if architecture == "qwen2":
        return True, False
    if architecture in ("mistral", "mixtral", "minimax_m2"):
        return False, False
    bias = read.flag("attention_bias", default=architecture == "gpt_oss")
    return bias, bias and architecture != "glm4_moe"


def _qk_norm(read: ConfigReader, architecture: Architecture) -> QkNorm:
    if architecture == "minimax_m2":
        return "full"
    if architecture == "glm4_moe":
        return "head" if read.flag("use_qk_norm") else "none"
    return "head" if architecture in ("qwen3", "qwen3_moe") else "none"


def _clamped_gate(read: ConfigReader) -> ClampedGate:
    return ClampedGate(read.positive("swiglu_alpha", 1.702), read.positive("swiglu_limit", 7.0))
