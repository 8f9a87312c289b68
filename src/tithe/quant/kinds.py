"""Storage kinds of a packed matrix: an element code, a scale code and a group, with one W̃ each.

Rows are stored in panels of 48 (the last one zero-padded), k innermost in pairs, so that the product streams memory.
`data` holds the elements, `scale` and `zero` what turns them into weights; G is the group, groups run along K:

| kind | element | scale | zero | bytes, as published |
|---|---|---|---|---|
| int4 | U4 | half [panels, K/32, 48] | half [panels, K/32, 48] | 20 per 32 (GGUF Q4_1) |
| int8 | S8 | half [panels, K/32, 48] | – | 34 per 32 (GGUF Q8_0) |
| q4_0 | S4 | half [panels, K/G, 48] | – | 18 per 32 (GGUF Q4_0) |
| q4_k | U4 | Q4_K [panels, K/256, 16·48 bytes], G = 32 | – | 144 per 256 (GGUF Q4_K) |
| q6_k | S6 | Q6_K [panels, K/256, 18·48 bytes], G = 16 | – | 210 per 256 (GGUF Q6_K) |
| int4_sym | S4 | bf16 [panels, K/G, 48] | – | 18 per 32 (compressed-tensors) |
| int4_zp | U4 | half [panels, K/G, 48] | 4 bits [panels, K/G, 24 bytes] | 66.5 per 128 (GPTQ, AWQ) |
| fp8 | E4M3 | float32 [⌈N/128⌉, ⌈K/128⌉] | – | 16388 per 128·128 (DeepSeek-V3); 8 divides K |
| mxfp4 | E2M1 | E8M0 [panels, K/32, 48] | – | 17 per 32 (gpt-oss) |
| nvfp4 | E2M1 | E4M3 [panels, K/16, 48] | float32 [1]: global scale | 9 per 16, and 4 |
| bf16 | bf16 [panels, K/2, 48, 2] | – | – | 2 |
| fp32 | float32 [panels, K, 48] | – | – | 4 |

**W̃** of every kind, in float32: fma(q, d, m), rounded once; then rounded to bf16 (nearest, ties to even) when the base
dtype is bf16. q is the element's number; d and m belong to a group:

| element | q | scale | d | m |
|---|---|---|---|---|
| U4 | 0..15 | half | scale | the zero's half; −(d · zero) for 4-bit zeros; +0 without |
| S4 | nibble − 8 | bf16, float32 | scale | +0 |
| S8 | −128..127 | E8M0 | 2^(code − 127), and 0 for code 0 | +0 |
| S6 | six bits − 32 | E4M3 | scale · global, rounded to float32 | +0 |
| E2M1 | ±{0, ½, 1, 1½, 2, 3, 4, 6} | Q4_K | d · s | −(dmin · m) |
| E4M3 | ±448 and finer, to 2⁻⁹ | Q6_K | d · s | +0 |

All products are exact in float32 but E4M3 · global, q · E4M3 scales of nvfp4, and E4M3 · float32, which are rounded
once; so these are the values of any other reader of the format. A scale so small that its least weight would be
subnormal in float32 is stored as zero, because the bf16 instructions take subnormal numbers for zeros; one so large
that a weight would exceed bf16 is refused. Both are decided once, when a tensor is read (`tithe.quant.parts`).

Bit order in `data`. A k-pair of a panel is 48 rows at k even and k odd; number i = 2n + odd is row n's.

* Bytes: byte i.
* Nibbles: half register h = i//16 of six keeps its numbers in the low (h even) or high nibbles of bytes 16·(h//2)
  onwards, so that two registers of float32 weights narrow into one register of pairs without a shuffle.
* Six bits: for each two k-pairs the low nibbles of both (2 · 48 bytes), then 48 bytes of high bits: half register
  h of all twelve keeps two bits in bytes 16·(h//4) onwards, at bit 2·(h%4).

4-bit zeros: row n is in byte n%24, in the low nibble below row 24. Q4_K scales: d and dmin of the 48 rows (half), then
the twelve bytes of 6-bit numbers, 48 rows each. Q6_K: sixteen signed scales, 48 rows each, then d (half).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from tithe.quant.codes import (
    BF16,
    BF16_SCALE,
    E2M1,
    E4M3,
    E4M3_GLOBAL,
    E8M0,
    F16,
    F16_INT_ZERO,
    F16_ZERO,
    F32_BLOCK,
    FP32,
    NO_SCALE,
    Q4_K,
    Q6_K,
    S4,
    S6,
    S8,
    U4,
)

_ELEMENTS: Final = {
    U4: "int4", S4: "int4", S6: "int6", S8: "int8", E2M1: "fp4", E4M3: "fp8", BF16: "bf16", FP32: "fp32",
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """One storage kind; `group` is the number of weights along K that share d and m."""

    name: str
    element: int
    scales: int = NO_SCALE
    group: int = 0

    @property
    def word(self) -> int:
        """What kernels are told: element, scale code << 8, pairs in a group << 16; a first panel may follow << 40."""
        return self.element | self.scales << 8 | self.group // 2 << 16

    @property
    def elements(self) -> str:
        """What the elements are, whatever their scales."""
        return _ELEMENTS[self.element]

    @property
    def is_dense(self) -> bool:
        """True for BF16 and FP32."""
        return self.scales == NO_SCALE

    @property
    def panelled(self) -> tuple[str, ...]:
        """The parts whose first dimension counts panels."""
        if self.scales == F32_BLOCK:
            return ("data",)
        return ("data", "scale") if self.scales == E4M3_GLOBAL else ("data", "scale", "zero")

    def of_group(self, group: int) -> Kind:
        """The same kind at another group."""
        return replace(self, group=group)


INT4: Final = Kind("int4", U4, F16_ZERO, 32)
INT8: Final = Kind("int8", S8, F16, 32)
Q4_0: Final = Kind("q4_0", S4, F16, 32)
KQUANT4: Final = Kind("q4_k", U4, Q4_K, 32)
KQUANT6: Final = Kind("q6_k", S6, Q6_K, 16)
INT4_SYM: Final = Kind("int4_sym", S4, BF16_SCALE, 32)
INT4_ZP: Final = Kind("int4_zp", U4, F16_INT_ZERO, 128)
FP8: Final = Kind("fp8", E4M3, F32_BLOCK, 128)
MXFP4: Final = Kind("mxfp4", E2M1, E8M0, 32)
NVFP4: Final = Kind("nvfp4", E2M1, E4M3_GLOBAL, 16)
DENSE_BF16: Final = Kind("bf16", BF16)
DENSE_FP32: Final = Kind("fp32", FP32)
