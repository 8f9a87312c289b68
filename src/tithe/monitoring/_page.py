"""The page around the sections: safe text, tables, the document. No script, and a policy that forbids any."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from tithe.monitoring._style import STYLE

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

# Direction marks, embeddings, overrides and isolates can make text read differently from what it is.
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

_HEAD_CELL, _NUMBER_CELL = Markup('<th scope="row">{}</th>'), Markup('<td class="num">{}</td>')
_STYLE_MARKUP = Markup(STYLE)  # noqa: S704 - a constant of ours


def safe_text(text: str, limit: int) -> tuple[str, int]:
    r"""Text of a model, made visible: control characters and direction overrides become their names in brackets. At
    most `limit` characters; the second value is how many were cut. Escaping is left to `Markup`.

    >>> safe_text("a\x1b\u202eb", 10)
    ('a⟨U+001B⟩⟨U+202E⟩b', 0)
    """
    kept = text[:limit]
    shown = "".join(
        f"⟨U+{ord(c):04X}⟩" if c in _BIDI or (unicodedata.category(c) in {"Cc", "Cs"} and c not in "\n\t") else c
        for c in kept
    )
    return shown, max(0, len(text) - limit)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, css: str = "", caption: str = "") -> Markup:
    """A table; the first cell of a row is its header, the others are aligned right."""
    heads = Markup("").join(
        Markup('<th scope="col"{}>{}</th>').format(Markup(' class="num"') if i else "", name)
        for i, name in enumerate(head)
    )
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(
                (_NUMBER_CELL if i else _HEAD_CELL).format(str_or_markup(cell)) for i, cell in enumerate(row)
            )
        )
        for row in rows
    )
    below = Markup("<caption>{}</caption>").format(caption) if caption else Markup("")
    return Markup(
        '<div class="scroll"><table class="{}">{}<thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    ).format(css, below, heads, body)


def str_or_markup(value: object) -> str:
    """Markup stays markup; everything else becomes text and is escaped when it is put into a page."""
    return value if isinstance(value, Markup) else str(value)


def two_columns(left: Markup, right: Markup) -> Markup:
    """Side by side where the page is wide enough."""
    return Markup('<div class="split"><div>{}</div><div>{}</div></div>').format(left, right)


def paragraph(text: str) -> Markup:
    """One paragraph of plain text."""
    return Markup("<p>{}</p>").format(text)


def section(anchor: str, title: str, *content: Markup, about: str = "") -> Markup:
    """A section with its heading."""
    intro = Markup('<p class="about">{}</p>').format(about) if about else Markup("")
    return Markup('<section id="{0}" aria-labelledby="{0}-title"><h2 id="{0}-title">{1}</h2>{2}{3}</section>').format(
        anchor, title, intro, Markup("").join(content)
    )


def page(title: str, head: Markup, sections: Markup, foot: str) -> str:
    """The whole document."""
    return str(
        Markup(
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta http-equiv="Content-Security-Policy" content="{}">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            "<title>{}</title><style>{}</style></head><body>{}<main>{}</main>"
            '<footer class="foot">{}</footer></body></html>\n'
        ).format(POLICY, title, _STYLE_MARKUP, head, sections, foot)
    )
