"""How one published run is predicted: the planner's request for it, and what its software did otherwise.

Rows are those of published_runs.json; `benchmarks.planner_accuracy` fits and scores.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from tithe.arch import tensor_families
from tithe.planner.activations import training_bytes_per_token
from tithe.planner.factors import Factors
from tithe.planner.full import gathered_parameters
from tithe.planner.parallel import whole_bytes
from tithe.planner.request import PlanRequest, make_request
from tithe.planner.roofline import sampling_parallel, step_costs, train_s_per_token

Row = dict[str, Any]

MODELS = {
    "Kimi-K2.5": "kimi-k2", "Kimi-K2": "kimi-k2", "Kimi-K2-Thinking": "kimi-k2", "GLM-5": "glm-5",
    "MiniMax-M2.5": "minimax-m2", "Qwen3.5-397B-A17B": "qwen3.5-397b-a17b", "Qwen3.5-397B": "qwen3.5-397b-a17b",
    "DeepSeek-R1": "deepseek-v3", "DeepSeek-V3": "deepseek-v3", "DeepSeek-V3.1": "deepseek-v3",
    "Llama-3.1-70B": "llama-3.1-70b", "gpt-oss-120b": "gpt-oss-120b", "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b", "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen3-235B": "qwen3-235b-a22b", "Llama-3.1-8B": "llama-3.1-8b", "Qwen3-32B": "qwen3-32b",
    "Qwen3-235B-A22B-Instruct-2507": "qwen3-235b-a22b",
}  # fmt: skip
CARDS = {
    "b200_sxm": "B200", "b300_sxm": "B300", "h200_sxm": "H200", "h100_sxm": "H100", "gb200": "GB200",
    "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "NVIDIA B200": "B200",
}  # fmt: skip
FORMATS = {"fp4": "nvfp4", "fp8": "fp8", "int4": "int4", "bf16": "bf16"}


@lru_cache(maxsize=512)
def _request(model: str, hardware: str, options: tuple[tuple[str, Any], ...]) -> PlanRequest:
    return make_request(model, hardware, **dict(options))


def request(model: str, hardware: str, **options: Any) -> PlanRequest:
    """A cached request."""
    return _request(model, hardware, tuple(options.items()))


# ------------------------------------------------------------------ sampling


def sampled_rate(row: Row) -> float | None:
    """Tokens per second of all clients."""
    return row["conc"] * row["osl"] / (row["ttft_ms"] + row["tpot_ms"] * (row["osl"] - 1)) * 1e3


def generation(row: Row, factors: Factors) -> float:
    """Tokens per second of `conc` clients that each ask again when answered."""
    name = row["model"].rsplit("/", 1)[-1]
    base = "mxfp4" if name == "gpt-oss-120b" else FORMATS[row["precision"]]
    gpus, is_dp = row["gpus"], row["dp"] > 1 or (row["tp"] == 1 and row["gpus"] > 1)
    tp = 0 if is_dp or gpus % row["tp"] else row["tp"]
    made = request(
        MODELS[name], f"{gpus}x{CARDS[row['system']]}", base=base, phase="rollout", attention="dp" if is_dp else "tp",
        tp=tp, context=row["isl"] + row["osl"], prompt=row["isl"], new=row["osl"], sequences=row["conc"],
    )  # fmt: skip
    costs = step_costs(made, factors, made.hardware, made.hardware.gpus)
    live = -(-row["conc"] // sampling_parallel(made, made.hardware).replicas)
    tick = costs.decode_tick_s(live, row["isl"] + row["osl"] / 2)
    return row["conc"] * row["osl"] / (costs.prefill_s(row["isl"] * live) + row["osl"] * tick)


# ------------------------------------------------------------------ training

_LLAMA_LIKE = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936,
               "max_position_embeddings": 40960, "tie_word_embeddings": True}  # fmt: skip
CONFIGS = {
    # Sizes of the releases' config.json; totals 0.60B and 4.02B are the cards' own.
    "Qwen3-0.6B": _LLAMA_LIKE
    | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
    "Qwen3-4B-Instruct-2507": _LLAMA_LIKE
    | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728},
    "INTELLECT-3": {
        "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "first_k_dense_replace": 1,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "vocab_size": 151552, "tie_word_embeddings": False, "attention_bias": True, "max_position_embeddings": 131072,
    },
}  # fmt: skip
CONFIGS["GLM-4.5-Air"] = CONFIGS["INTELLECT-3"]


@lru_cache(maxsize=8)
def model_file(name: str) -> str:
    """A known name, or a config.json that is written for it."""
    if name in MODELS:
        return MODELS[name]
    folder = Path(_folder().name) / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return str(folder)


@lru_cache(maxsize=1)
def _folder() -> Any:
    import tempfile

    return tempfile.TemporaryDirectory()


def trained_rate(row: Row) -> float | None:
    """Tokens per second of an update; None where model, card or kernels are others."""
    is_known = short_name(row) in MODELS or short_name(row) in CONFIGS
    has_card = row.get("hw") in {*CARDS, "8 x H200 (1 node)"}
    return _update_rate(row) if is_known and has_card and not _is_foreign(row) else None


def _update_rate(row: Row) -> float:
    """Of the step's own time where it is stated: prime-rl's tokens per second are a sliding window between steps, with
    the writing of whole weights for the sampler in it (trainer/perf.py), which the planner counts as publishing."""
    if row.get("micro_batches") and row.get("step_s_total"):
        return row["gpus"] * row["micro_batches"] * row["seq_len"] / row["step_s_total"]
    return row["train_tok_s"]


def _is_foreign(row: Row) -> bool:
    """FlashAttention 2 has no kernels of its own for Blackwell: those rows are scored apart."""
    return row.get("attn") == "flash_attention_2" and row.get("hw") == "NVIDIA B200"


def foreign_rate(row: Row) -> float | None:
    """The same of FlashAttention 2 on Blackwell."""
    return _update_rate(row) if _is_foreign(row) else None


OLD_ATTENTION_FLOPS = 4 / (2 / 345e12 + 2.5 / 330e12)
"""FlashAttention 2 on B200: 331 and 362 TFLOP/s forward at 16,384 and 8,192 positions (meta-pytorch/tritonbench#171),
330 backward (Dao-AILab/flash-attention#1589), a backward being 2.5 forwards; in the planner's FLOPs, which are four
forwards for a recomputed step."""
EXPERT_LOOP_S = 1.7e-3
"""One expert of one layer and micro-batch, computed by itself: until 2026-01 prime-rl took grouped products on Hopper
alone (PrimeIntellect-ai/prime-rl#1535) and looped over a layer's experts on other cards, waiting for their numbers of
tokens. Fitted on the rows for fitting (`fit_expert_loop_s`)."""


def foreign(row: Row, factors: Factors, expert_loop_s: float = EXPERT_LOOP_S) -> float:
    """As `training` with what those runs had instead of Blackwell's own kernels."""
    made = trained(row)
    own = factors.updated({"train_flops_attention": OLD_ATTENTION_FLOPS / made.hardware.accelerator.bf16_flop_per_s})
    loops = len(made.spec.moe_layers) * made.spec.n_experts * expert_loop_s / (row["seq_len"] * row["gpus"])
    return 1.0 / (train_s_per_token(made, own, made.hardware) + loops)


def training(row: Row, factors: Factors) -> float:
    """Tokens per second of all GPUs."""
    made = trained(row)
    return 1.0 / train_s_per_token(made, factors, made.hardware)


def trained(row: Row) -> PlanRequest:
    """prime-rl recomputes, its `rl full` trains every parameter, its adapters are on every linear, experts included."""
    card, length = CARDS.get(row["hw"], "H200"), row.get("seq_len", 4096)
    rank = re.search(r"r(\d+)$", row["method"])
    return request(
        model_file(short_name(row)), f"{row['gpus']}x{card}", base="bf16", phase="train", context=length, prompt=1,
        new=length - 1, layout="full" if "full" in row["method"] else "shared", reference=False, recompute=True,
        lora_r=int(rank[1]) if rank else 16,
    )  # fmt: skip


def short_name(row: Row) -> str:
    """The model's without its owner."""
    return str(row["model"]).rsplit("/", 1)[-1].split(" ")[0]


def peak_bytes(row: Row) -> float | None:
    """Rows with activations moved to the host are left out: the planner recomputes them."""
    is_known = short_name(row) in {*MODELS, *CONFIGS} and row.get("ac") == "Recompute"
    return row["peak_mem_GiB"] * 2**30 if is_known and row.get("peak_mem_GiB") else None


def memory(row: Row, _factors: Factors) -> float:
    """What torch's allocator, which does not count CUDA's context, holds at the peak of a trainer over FSDP2.

    As prime-rl sets it up (trainer/model.py, trainer/models/layers/moe.py), every GPU has a sequence of its own and a
    share of float32 parameters (`optimization_dtype`), gradients and moments. Whole in BF16 are the layer that is
    computed, the next one, and embedding and head; of a trained layer the gradients too, in BF16 and in float32 for
    their reduction. The stream is BF16; where scores are multiplied, a mixture's chosen rows and their gradient are
    float32. Supervised training holds the logits of a whole sequence, and torch's loss keeps them as it goes: in BF16
    with a gradient (4 bytes), and in float32 with log-softmax and gradient (12); the planner's chunked head has 8.
    """
    made, length, gpus = trained(row), row["seq_len"], row["gpus"]
    spec, is_full = made.spec, made.layout == "full"
    parameters = sum(family.n_parameters for family in tensor_families(spec))
    state = parameters * (16 if is_full else 4) + (0 if is_full else made.adapter.total * 16)
    root = sum(family.n_parameters for family in tensor_families(spec) if not family.layers)
    layer = gathered_parameters(spec, 1)
    whole = 2 * (root + 2 * layer) + (6 * layer if is_full else 0)
    rank = 0 if is_full else made.lora_r
    per_token = training_bytes_per_token(spec, rank, recompute=True, stream_bytes=2)
    scores = 8 * spec.n_experts_per_token * spec.hidden_size if spec.is_moe else 0
    logits = length * 16 if "sft" in row["method"] else min(length, made.logits_rows) * 8
    return state / gpus + whole + length * (per_token + scores) + logits * spec.vocab_size


# ------------------------------------------------------------------ publishing every weight

SCALEOUT = {"H100": "H100", "8xH800": "H800"}
"""H20's network is in no source."""


def sync_seconds(row: Row) -> float | None:
    """Of a publication of whole weights whose hardware and payload are stated."""
    if row.get("hw", "").split(" ")[0] not in SCALEOUT or "4-layer" in row["model"]:
        return None
    if "nccl_ms" in row:
        return row["nccl_ms"] / 1e3
    return row["plain_s"] if "plain_s" in row else row["gather_s"] + row["broadcast_s"]


def sync(row: Row, factors: Factors) -> float:
    """Fixed cost and every weight over one card's network, or over its links where all cards are one machine's."""
    hw = row["hw"].split(" ")[0]
    name = short_name(row)
    if name in MODELS or name in CONFIGS:
        made = request(model_file(name), f"8x{SCALEOUT[hw]}", base="fp8" if "FP8" in row["model"] else "bf16")
        n_bytes = whole_bytes(made.spec, made.base)
    else:
        made, n_bytes = request("llama-3.1-8b", f"8x{SCALEOUT[hw]}"), {"GLM-4.7-9B-Flash": 60e9}[name]
    card = made.hardware.accelerator
    bandwidth = card.link_bytes_per_s if hw.startswith("8x") else card.scaleout_bytes_per_s
    return factors.publish_fixed_s + n_bytes / (bandwidth * factors.publish_bandwidth)
