"""Rewards of a group → advantages: what each token gets the credit for.

One estimator, one small file, one literal registry (`ESTIMATORS`); `estimate` applies one to a batch and scales its
outcome. `make_advantages` is what a run does with finished groups, `batch_advantages` its plainest form: centred on the
group's mean, spread over tokens. `with_kl_penalty` puts a KL to the reference into finished advantages. Numpy in FP64
inside, no torch.
"""

from tithe.advantages.batch import (
    ESTIMATOR_OF,
    ESTIMATORS,
    BatchAdvantages,
    batch_advantages,
    estimate,
    samples_of,
)
from tithe.advantages.gae import gae_of
from tithe.advantages.group import SCALES, group_advantages, has_spread
from tithe.advantages.kl_penalty import token_kl, with_kl_penalty
from tithe.advantages.making import AdvantagePlan, Overlong, make_advantages
from tithe.advantages.overlong import soft_punishment
from tithe.advantages.samples import AdvantageRule, Sample
from tithe.advantages.whitening import whiten

__all__ = [
    "ESTIMATORS",
    "ESTIMATOR_OF",
    "SCALES",
    "AdvantagePlan",
    "AdvantageRule",
    "BatchAdvantages",
    "Overlong",
    "Sample",
    "batch_advantages",
    "estimate",
    "gae_of",
    "group_advantages",
    "has_spread",
    "make_advantages",
    "samples_of",
    "soft_punishment",
    "token_kl",
    "whiten",
    "with_kl_penalty",
]
