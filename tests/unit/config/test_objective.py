"""Defaults by algorithm and correction, and combinations of the objective that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tithe.config import build_config, dump_resolved, load_config
from tithe.config.algorithms import ALGORITHMS, CORRECTIONS
from tithe.config.yaml_text import parse_yaml
from tithe.errors import ConfigError
from tithe.losses import CORRECTIONS as LOSS_CORRECTIONS
from tithe.losses import LOSSES, NEEDS_PROX


def rl(*overrides: str):
    return load_config(None, list(overrides)).rl


@pytest.mark.parametrize(
    ("algorithm", "kl", "clips", "scale", "aggregation"),
    [
        ("gspo", (0.0, "loss", "k3"), (3e-4, 4e-4), "std", "seq_mean_token_mean"),
        ("cispo", (0.0, "loss", "k3"), (1.0, 4.0), "std", "token_mean"),
        ("rloo", (0.01, "reward", "k1"), (0.2, 0.2), "none", "seq_mean_token_sum"),
        ("reinforce_pp", (0.01, "reward", "k1"), (0.2, 0.2), "batch", "token_mean"),
        ("reinforce_pp_baseline", (0.01, "loss", "k2"), (0.2, 0.2), "batch", "token_mean"),
        ("ppo", (0.01, "reward", "k1"), (0.2, 0.2), "batch", "token_mean"),
    ],
)
def test_an_algorithm_names_its_papers_objective(algorithm, kl, clips, scale, aggregation):
    found = rl(f"rl.algorithm={algorithm}")
    assert (found.kl_coef, found.kl_placement, found.kl_estimator) == kl
    assert (found.clip_range, found.clip_range_high) == clips
    assert (found.advantage_scale, found.aggregation) == (scale, aggregation)


JUDGED = "reward.parts=[{name: liking, function: 'my.judge:like', kind: model}]"


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_a_learned_reward_holds_the_policy_less_and_what_is_given_wins(algorithm):
    verified, learned = rl(f"rl.algorithm={algorithm}").kl_coef, rl(f"rl.algorithm={algorithm}", JUDGED).kl_coef
    assert (verified, learned) in {(0.01, 0.001), (0.0, 0.0)}
    assert (verified > 0) == (algorithm in {"grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo"})
    assert rl(f"rl.algorithm={algorithm}", JUDGED, "rl.kl_coef=0.02").kl_coef == 0.02
    assert rl(f"rl.algorithm={algorithm}", JUDGED.replace("kind: model", "kind: rule")).kl_coef == verified


def test_the_resolved_coefficient_is_that_of_the_run():
    cfg = load_config(None, [JUDGED])
    assert build_config(parse_yaml(dump_resolved(cfg), "config.yaml")) == cfg
    assert load_config(None, ["reward.function=my.judge:model"]).rl.kl_coef == 0.001
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["reward.parts=[{name: liking, kind: model}]"])
    assert caught.value.key == "reward.parts"
    with pytest.raises(ConfigError) as caught:
        load_config(None, [JUDGED, "rl.kl_coef=-1"])
    assert caught.value.key == "rl.kl_coef"


def test_the_kl_estimator_follows_its_place():
    assert rl("rl.kl_placement=reward").kl_estimator == "k1"
    assert rl("rl.algorithm=rloo", "rl.kl_placement=loss", "rl.kl_estimator=k3").kl_estimator == "k3"


def test_only_dapo_replaces_groups_and_punishes_length_unasked():
    assert {name for name in ALGORITHMS if rl(f"rl.algorithm={name}").dynamic_sampling} == {"dapo"}
    assert {name for name in ALGORITHMS if rl(f"rl.algorithm={name}").overlong != "keep"} == {"dapo"}
    assert not rl("rl.algorithm=dapo", "rl.dynamic_sampling=false").dynamic_sampling


def test_names_are_those_of_the_losses():
    assert ALGORITHMS.keys() == LOSSES.keys()
    assert CORRECTIONS.keys() == LOSS_CORRECTIONS.keys()
    for name, defaults in CORRECTIONS.items():
        found = rl(f"rl.correction={name}")
        assert found.correction_bounds == (defaults.low, defaults.high)
        late = ["rl.clip_range=null", "rl.max_policy_update_lag=4", f"rl.correction={name}"]
        if name in NEEDS_PROX:
            assert rl(*late).clip_range is None, "a bounded weight may go without a clip"
        else:
            with pytest.raises(ConfigError, match="known to diverge"):
                rl(*late)


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (
            ["rl.correction=tis", "rl.correction_bounds=[0, null]", "rl.max_policy_update_lag=4"],
            "rl.correction_bounds",
            "diverge",
        ),
        (
            ["rl.correction=decoupled", "rl.correction_bounds=[0, null]", "rl.max_sample_age=2"],
            "rl.correction_bounds",
            "diverge",
        ),
        (["rl.correction=opsm", "rl.correction_bounds=[0, null]"], "rl.correction_bounds", "no bound"),
        (["rl.correction=mis_geometric", "rl.correction_bounds=[0.5, 0.4]"], "rl.correction_bounds", "not above"),
        (["rl.correction=tis", "rl.correction_bounds=[0.5, 2]"], "rl.correction_bounds", "begin with 0"),
        (["rl.correction=icepop_sequence"], "rl.correction", "icepop, decoupled"),
        (["rl.correction=tis", "rl.correction_veto=1e-4"], "rl.correction_veto", "only rl.correction = mis"),
        (["rl.correction_bounds=[0, 2.0]"], "rl.correction_bounds", "rl.correction = none"),
        (["rl.correction_veto=1e-4"], "rl.correction_veto", "rl.correction = none"),
        (["rl.kl_estimator=k1"], "rl.kl_estimator", "k1_unbiased"),
        (["rl.kl_placement=reward", "rl.kl_estimator=k3_unbiased"], "rl.kl_estimator", "rl.kl_placement"),
        (["rl.kl_coef=0", "rl.kl_target=0.1"], "rl.kl_target", "stays 0"),
        (["rl.kl_coef=0", "rl.kl_reference=moving"], "rl.kl_reference", "rl.kl_coef = 0"),
        (["rl.algorithm=ppo", "rl.advantage_scale=std"], "rl.advantage_scale", "take batch"),
        (["rl.algorithm=cispo", "rl.dual_clip=3"], "rl.dual_clip", "leave it out"),
        (["rl.mini_batches=3"], "rl.mini_batches", "8 groups"),
        (["rl.algorithm=dapo", "rollout.max_new_tokens=1"], "rl.overlong", "rollout.max_new_tokens"),
        (["model.train=full", "rl.algorithm=ppo"], "rl.algorithm", "model.train = full"),
        (["model.train=full", "rl.kl_reference=moving"], "rl.kl_reference", "model.train = full"),
        (["rl.kl_target=0.0"], "rl.kl_target", "> 0"),
        (["rl.kl_target=[0.1, 0]"], "rl.kl_target", "horizon >= 1"),
        (["rl.gamma=0.0"], "rl.gamma", "> 0"),
        (["rl.gamma=0.9"], "rl.gamma", "grpo gives every token"),
        (["rl.algorithm=reinforce_pp", "rl.gae_lambda=1.0"], "rl.gae_lambda", "rl.algorithm = ppo"),
        (["rl.critic_warmup_steps=5"], "rl.critic_warmup_steps", "grpo has no critic"),
    ],
)
def test_what_diverges_or_has_no_effect_is_refused_with_its_remedy(overrides, key, says):
    """F05 among them: ranges that break the maths later."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert caught.value.key == key
    assert says in str(caught.value)


def test_the_same_keys_are_taken_where_they_have_their_effect():
    found = rl("rl.kl_estimator=k1_unbiased", "rl.kl_target=0.1", "rl.kl_reference=moving")
    assert (found.kl_estimator, found.kl_steering, found.reference_every) == ("k1_unbiased", (0.1, 10_000), 50)
    found = rl("rl.kl_target=[6, 2000]", "rl.kl_reference=moving:8")
    assert (found.kl_steering, found.reference_every) == ((6.0, 2000), 8)
    assert (rl().kl_steering[0], rl().reference_every) == (None, None)
    other = rl("rl.kl_reference=other/model")
    assert (other.reference_every, Path(other.kl_reference).is_absolute()) == (None, True)
    over = (
        "run.ranks=2",
        "rl.algorithm=ppo",
        "rl.ppo_epochs=2",
        "rl.kl_reference=moving",
        "rl.correction=mis_geometric",
    )
    assert rl(*over).algorithm == "ppo", "over ranks as on one"
    found = rl("rl.algorithm=ppo", "rl.gamma=0.9", "rl.gae_lambda=1.0", "rl.critic_warmup_steps=5")
    assert (found.gamma, found.gae_lambda, found.critic_warmup_steps) == (0.9, 1.0, 5)
    assert rl("rl.algorithm=reinforce_pp", "rl.gamma=0.9").gamma == 0.9
    found = rl("rl.correction=mis_geometric", "rl.correction_veto=1e-4", "rl.mini_batches=4")
    assert (found.correction_of, found.correction_bounds) == (("mis", "geometric"), (0.5, 2.0))
    assert found.correction_veto == 1e-4
