"""TRL's own losses on given numbers: a JSON object on standard input, one on standard output.

In: `rows` (name → [[…]], padded, float64) with logp, old_logp, ref_logp, prox_logp, advantage, mask; `norm_tokens`.
Out: case → [loss, gradient by logp, row by row].
"""

import json
import sys
from collections import defaultdict
from types import SimpleNamespace

import torch
from trl import GRPOTrainer

CASES = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "kl": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1},
    "kl unbiased": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1, "bias_correction": True},
    "opsm": {"loss_type": "dapo", "epsilon_high": 0.28, "threshold": 0.05},
    "tis": {"loss_type": "dapo", "epsilon_high": 0.28, "cap": 3.0},
}


def trainer(logp, norm_tokens, options):
    """What `_compute_loss` reads of a trainer; in evaluation, where nothing is accumulated."""
    args = SimpleNamespace(
        use_bias_correction_kl=options.get("bias_correction", False), delta=None, steps_per_generation=1
    )
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    return SimpleNamespace(
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=False),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=options.get("threshold"),
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        beta=options.get("beta", 0.0),
        loss_type=options["loss_type"],
        epsilon_low=options.get("epsilon_low", 0.2),
        epsilon_high=options.get("epsilon_high", 0.2),
        use_vllm="cap" in options,
        vllm_importance_sampling_correction=True,
        max_completion_length=norm_tokens,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )


def main():
    """Every case."""
    given = json.load(sys.stdin)
    rows = {name: torch.tensor(values, dtype=torch.float64) for name, values in given["rows"].items()}
    ids = torch.zeros_like(rows["mask"], dtype=torch.long)
    out = {}
    for case, options in CASES.items():
        logp = rows["logp"].clone().requires_grad_()
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": rows["mask"],
            "advantages": rows["advantage"][:, 0],
            "old_per_token_logps": rows["prox_logp" if "cap" in options else "old_logp"],
            "ref_per_token_logps": rows["ref_logp"],
            "num_items_in_batch": rows["mask"].sum(),
        }
        if "cap" in options:
            ratio = torch.exp((rows["prox_logp"] - rows["old_logp"]) * rows["mask"])
            inputs["importance_sampling_ratio"] = ratio.clamp(max=options["cap"])
        own = trainer(logp, given["norm_tokens"], options)
        loss = GRPOTrainer._compute_loss(own, own.model, inputs)  # noqa: SLF001  there is no other way to its loss
        loss.backward()
        out[case] = [loss.item(), (logp.grad * rows["mask"]).tolist()]
    print(json.dumps(out))


if __name__ == "__main__":
    main()
