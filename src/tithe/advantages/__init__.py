"""Rewards of a group → advantages: centred on the group's mean, scaled or not, spread over tokens.

`batch_advantages` makes what `TrainingBatch.advantages` holds from finished groups; `with_kl_penalty` puts a KL to the
reference into them. Numpy in FP64 inside, no torch.
"""

from tithe.advantages.batch import batch_advantages
from tithe.advantages.group import SCALES, group_advantages
from tithe.advantages.kl_penalty import with_kl_penalty

__all__ = ["SCALES", "batch_advantages", "group_advantages", "with_kl_penalty"]
