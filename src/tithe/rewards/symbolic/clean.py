"""From an answer as written to a string of few forms: one spelling per symbol, no dressing, no spacing commands."""

from __future__ import annotations

import re
from typing import Final

from tithe.rewards.exact import JOINT

_RAISED: Final = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
_SIGNS: Final = {
    **dict.fromkeys(map(ord, "\u2212\u2012\u2013\ufe63\uff0d"), "-"),
    **{0xFF10 + digit: str(digit) for digit in range(10)},
    **{ord(sign): f"^{{{digit}}}" for digit, sign in enumerate(_RAISED)},
    **{0x2080 + digit: f"_{{{digit}}}" for digit in range(10)},
    **dict.fromkeys(map(ord, "\u00a0\u2009\u202f\u2007\u2002\u2003"), " "),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), ""),
}  # fmt: skip
_UNICODE: Final = _SIGNS | {
    ord(sign): text
    for sign, text in {
        "\uff0b": "+", "\uff0c": ",", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/",
        "\u2215": "/", "\u2044": "/",
        "√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "\u222a": r"\cup ",
        "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ", "°": r"^{\circ}", "º": r"^{\circ}",
        "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
        "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "…": r"\ldots ", "\u211d": r"\mathbb{R}",
        "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "\u03b3": r"\gamma ", "λ": r"\lambda ", "φ": r"\phi ",
        "\u2032": "'", "\u2019": "'", "∀": r"\forall ", "∃": r"\exists ", "⟨": r"\langle ", "⟩": r"\rangle ",
    }.items()
}  # fmt: skip

_DAMAGED: Final = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\t(?:ext|frac|imes|heta|an(?![a-z])|au(?![a-z]))"
    r"|\n(?:eq(?![a-z])|abla)|\r(?:ight|ho(?![a-z]))"
)
_DELIMITERS: Final = re.compile(r"\$\$?|(?<!\\)\\[()\[\]]|^\s*\*\*|\*\*\s*$|`")
_SIZES: Final = re.compile(
    r"\\(?:left|right|middle|displaystyle|textstyle|limits|nolimits|[bB]igg?[lrm]?)(?![a-zA-Z])\.?"
)
_SPACES: Final = re.compile(
    r"(?<!\\)\\[,;:> ]|\\(?:q?quad|thinspace|enspace|hspace\{[^{}]*\}|phantom\{[^{}]*\})(?![a-z])|~|\s+"
)
_SPELLING: Final = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le",
    "leqslant": "le",
    "geq": "ge", "geqslant": "ge", "neq": "ne", "varnothing": "emptyset", "dots": "ldots", "cdots": "ldots",
    "textbf": "text", "textit": "text", "textrm": "text", "textnormal": "text", "mbox": "text", "hbox": "text",
    "mathrm": "text", "operatorname": "text", "mathit": "text", "mathbf": "text", "bf": "", "rm": "",
    "boldsymbol": "text",
    "land": "wedge", "lor": "vee", "lbrace": "{", "rbrace": "}", "lvert": "vert", "rvert": "vert", "mid": "vert",
    "lbrack": "[", "rbrack": "]", "degree": "circ", "backslash": "setminus", "smallsetminus": "setminus", "ast": "cdot",
    "bmatrix": "bmatrix", "mathbb": "mathbb", "div": "div", "colon": ":", "lt": "<", "gt": ">", "infin": "infty",
}  # fmt: skip
_COMMAND: Final = re.compile(r"\\([a-zA-Z]+)\*?")
_LEAD_IN: Final = re.compile(r"(?:the )?(?:final )?answer(?: is|:)? ?:? ?(?=\S)", re.IGNORECASE)
_TEXT_LEAD_IN: Final = re.compile(r"\\text ?\{ ?(?:the )?(?:final )?answer(?: is|:)? ?:? ?\}", re.IGNORECASE)
_THIN_GROUPS: Final = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\,|,\\!|\{,\}|\\!,|\\ )\d{3})+(?!\d)")


def is_damaged(text: str) -> bool:
    r"""Whether a text lost a backslash on its way: control characters, or a tab before ``ext{``.

    >>> is_damaged("\x0crac58"), is_damaged(r"\frac58")
    (True, False)
    """
    return _DAMAGED.search(text) is not None


def clean(text: str) -> str:
    r"""One spelling per symbol.

    >>> clean(r"$\dfrac{1}{2}\,\mathrm{cm}$"), clean("x ≥ 3\u00b2")
    ('\\frac{1}{2} \\text{cm}', 'x \\ge 3^{2}')
    """
    text = text.translate(_UNICODE)
    text = _THIN_GROUPS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = text.replace(r"\!", "").replace("{,}", ",").replace(r"\$", "")
    text = text.replace(r"\dotsc", r"\ldots").replace(r"\dotsb", r"\ldots")
    text = _SIZES.sub("", _DELIMITERS.sub("", JOINT.sub(" ", text)))
    text = _COMMAND.sub(_spelled, text)
    text = _SPACES.sub(" ", text).strip()
    text = _TEXT_LEAD_IN.sub("", text, count=1) if text.startswith("\\text") else text
    lead = _LEAD_IN.match(text)
    text = text[lead.end() :] if lead else text
    return re.sub(r" {2,}", " ", text).strip().rstrip(" .,;:!\\" if not text.endswith("!") else " .,;:\\").strip()


def _spelled(match: re.Match[str]) -> str:
    name = match[1]
    if name not in _SPELLING:
        return match[0]
    spelled = _SPELLING[name]
    if name in ("lbrace", "rbrace"):
        return "\\" + spelled
    return f"\\{spelled}" if spelled.isalpha() else spelled
