"""The math verifier: formulas, sets, intervals, relations, matrices, bases and units, judged by two graders that must
agree (`compare`). Needs the packages of the extra `math`; what takes no algebra (`verify_plain`) needs none.

    text ──▶ extraction ──▶ clean ──▶ tokens ──▶ forms, expressions ──▶ compare ──▶ verdict and reason
                                                                        ├ numeric   at points, to 40 and 110 digits
                                                                        ├ algebra   sympy, built by constructors
                                                                        └ second    sums, integrals, limits
"""

from tithe.rewards.symbolic.packages import preload, require
from tithe.rewards.symbolic.verify import Judgement, verify, verify_plain

__all__ = ["Judgement", "preload", "require", "verify", "verify_plain"]
