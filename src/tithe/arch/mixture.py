"""Mixtures of experts: which layers, how many experts, and how tokens choose among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tithe.arch.architectures import Architecture
from tithe.arch.config_reader import ConfigReader
from tithe.arch.files import quote
from tithe.errors import ModelError

MAX_EXPERTS: Final = 65_536
"""Most experts a layer may claim; the largest models in use have 512."""

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]
"""`softmax`: over all experts, then the best are chosen (Qwen3, Mixtral). `sigmoid`: each expert by itself, chosen with
a correction bias that does not weigh (DeepSeek-V3, GLM-4.5, MiniMax-M2). `softmax_of_chosen`: over the chosen experts'
logits alone (gpt-oss)."""


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen and weighed."""

    scoring: Scoring = "softmax"
    n_groups: int = 1
    """Experts are divided into so many groups…"""
    n_groups_chosen: int = 1
    """…of which a token may use so many."""
    scale: float = 1.0
    """The weights are multiplied by it after normalisation."""
    norm_topk_prob: bool = False
    """True when the chosen experts' weights are made to sum to 1."""

    @property
    def has_correction_bias(self) -> bool:
        """True when every expert has a bias that counts in the choice and not in the weight, kept in float32."""
        return self.scoring == "sigmoid"


@dataclass(frozen=True)
class Mixture:
    """The mixture layers of a model; no layers and no experts in a dense one.

    Example: Kimi-K2 has ``Mixture(n_experts=384, n_experts_per_token=8, width=2048, layers=(1, …, 60), n_shared=1,
    routing=Routing("sigmoid", scale=2.827, norm_topk_prob=True))``.
    """

    n_experts: int = 0
    n_experts_per_token: int = 0
    width: int = 0
    """Width of one routed expert."""
    layers: tuple[int, ...] = ()
    """Layers whose MLP is a mixture, ascending."""
    n_shared: int = 0
    """Experts that every token passes, kept as one MLP of `n_shared` times the width."""
    routing: Routing = Routing()
    has_shared_gate: bool = False
    """True when the shared expert's output is weighed by a gate of its own (Qwen3.5)."""
    latent_size: int = 0
    """Width that routed experts read and write, when it is not the model's (Kimi-K3); 0: the model's."""


def read_mixture(read: ConfigReader, architecture: Architecture, n_layers: int) -> Mixture:
    """The mixture of a config. `ModelError` names what is missing, impossible or unsupported."""
    if architecture == "qwen3_moe":
        return _qwen3(read, n_layers)
    if architecture in ("deepseek_v3", "glm4_moe"):
        return _deepseek(read, n_layers)
    if architecture in ("mixtral", "gpt_oss", "minimax_m2"):
        return _every_layer(read, architecture, n_layers)
    return Mixture()


def _qwen3(read: ConfigReader, n_layers: int) -> Mixture:
    """Every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    step = read.size("decoder_sparse_step", 1)
    dense = read.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise ModelError(f"config: mlp_only_layers is {quote(str(dense))}; a list of layer numbers is needed")
    key = "num_experts" if "num_experts" in read.config else "num_local_experts"
    n_experts = read.size(key, limit=MAX_EXPERTS)
    return Mixture(
        n_experts=n_experts,
        n_experts_per_token=read.size("num_experts_per_tok", limit=n_experts),
        width=(width := read.size("moe_intermediate_size")),
        layers=tuple(n for n in range(n_layers) if n not in dense and (n + 1) % step == 0),
        n_shared=(n_shared := read.count("shared_expert_intermediate_size") // width),
        has_shared_gate=n_shared > 0,
        routing=Routing("softmax", norm_topk_prob=read.flag("norm_topk_prob")),
    )


def _deepseek(read: ConfigReader, n_layers: int) -> Mixture:
    """All layers but the first `first_k_dense_replace`, each with shared experts."""
    layers = _mixture_layers(read, n_layers)
    scoring = read.text("scoring_func", "sigmoid")
    if scoring != "sigmoid":
        raise ModelError(f"config: scoring_func is {quote(scoring)}; only sigmoid is supported")
    n_experts = read.size(_key(read, "n_routed_experts", "num_experts"), limit=MAX_EXPERTS)
    n_groups = read.size("n_group", 1)
    default_shared = 0 if read.config.get("model_type") == "mimo_v2_flash" else 1
    if n_experts % n_groups:
        raise ModelError(f"config: n_group {n_groups} does not divide n_routed_experts {n_experts}")
    return Mixture(
        n_experts=n_experts,
        n_experts_per_token=read.size(_key(read, "num_experts_per_tok", "num_experts_per_token"), limit=n_experts),
        width=read.size("moe_intermediate_size"),
        layers=layers,
        n_shared=read.count(_key(read, "n_shared_experts", "num_shared_experts"), default_shared, limit=MAX_EXPERTS),
        latent_size=read.count("routed_expert_hidden_size"),
        routing=Routing(
            "sigmoid",
            n_groups=n_groups,
            n_groups_chosen=read.size("topk_group", 1, limit=n_groups),
            scale=read.positive("routed_scaling_factor", 1.0),
            norm_topk_prob=read.flag("norm_topk_prob", default=True),
        ),
    )


def _key(read: ConfigReader, name: str, other: str) -> str:
    """Some releases call the same number otherwise."""
    return other if name not in read.config and other in read.config else name


def _mixture_layers(read: ConfigReader, n_layers: int) -> tuple[int, ...]:
    """From `moe_layer_freq` when it is a list of 0 and 1, else all after `first_k_dense_replace`."""
    every = read.get("moe_layer_freq", 1)
    if isinstance(every, list):
        if len(every) != n_layers or not {0, 1}.issuperset(every):
            raise ModelError(f"config: moe_layer_freq needs 0 or 1 for each of the {n_layers} layers")
        return tuple(layer for layer, is_mixture in enumerate(every) if is_mixture)
    if every != 1:
        raise ModelError("config: moe_layer_freq above 1 is not supported; every layer after the first is a mixture")
    return tuple(range(read.count("first_k_dense_replace", limit=n_layers), n_layers))


def _every_layer(read: ConfigReader, architecture: Architecture, n_layers: int) -> Mixture:
    """All layers; `intermediate_size` is the width of an expert, and the weights always sum to 1."""
    scoring: dict[str, Scoring] = {"mixtral": "softmax", "gpt_oss": "softmax_of_chosen", "minimax_m2": "sigmoid"}
    if read.count("shared_intermediate_size"):
        raise ModelError("config: shared_intermediate_size above 0 is not supported: no such model was released")
    n_experts = read.size("num_local_experts", limit=MAX_EXPERTS)
    return Mixture(
        n_experts=n_experts,
        n_experts_per_token=read.size("num_experts_per_tok", limit=n_experts),
        width=read.size("intermediate_size"),
        layers=tuple(range(n_layers)),
        routing=Routing(scoring[architecture], norm_topk_prob=True),
    )
