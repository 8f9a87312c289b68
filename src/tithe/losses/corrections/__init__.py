"""Off-policy corrections: what a sample counts that another policy, or other arithmetic, has drawn."""

from tithe.losses.corrections.correction import Correction, CorrectionFn
from tithe.losses.corrections.decoupled import decoupled
from tithe.losses.corrections.icepop import icepop
from tithe.losses.corrections.mis import mis
from tithe.losses.corrections.none import none
from tithe.losses.corrections.opsm import opsm
from tithe.losses.corrections.tis import tis

CORRECTIONS: dict[str, CorrectionFn] = {
    "decoupled": decoupled,
    "icepop": icepop,
    "mis": mis,
    "none": none,
    "opsm": opsm,
    "tis": tis,
}
"""The name in `rl.correction` → the correction."""

NEEDS_PROX = frozenset({"decoupled", "icepop", "mis", "tis"})
"""Those that take the ratio against the policy with which the batch began."""

__all__ = ["CORRECTIONS", "NEEDS_PROX", "Correction", "CorrectionFn"]
