"""Memory, time and dollars before a GPU is rented. Free of torch.

Every byte of a base comes from `tithe.arch`, the account that the loader uses too. Figures carry their formula and
source; what is assumed is listed in the answer.
"""

from tithe.planner.costs import StepCosts

__all__ = ["StepCosts"]
