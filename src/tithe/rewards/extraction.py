r"""Finds the answer a model's text gives. Pure, never raises, linear in the length of the text, evaluates nothing.

Rules, in order (policies that field reports leave open are marked P):

1. Only text after the last ``</think>`` counts; a ``<think>`` that is never closed hides all that follows (P).
2. The last complete, non-empty ``\boxed{…}``. A box that is opened and never closed makes the text unreadable, even
   after an earlier complete box: the answer was cut off (P). An empty box, or one that only holds a placeholder such as
   ``...`` or ``answer``, echoes an instruction: it and everything before it is ignored.
3. ``#### value``, when the value is a number or the line is the last one (else it is a heading).
4. The last "answer is", "Answer:" or "Final Answer" phrase: its first number (after the last ``=`` of its sentence), or
   its words when it holds no number, two of them to choose from (``5 or 6``), or a calculation that is not carried
   out (``3*4`` is neither 3 nor 34; of ``15 = 3*5`` the left side counts, where it is a number by itself). A phrase
   with nothing after it was cut off, and "the answer is not" gives none: unreadable (P).
5. The last number of the text, with its sign; a sign belongs to a number that nothing stands directly before (P).

Where answers may be formulas, 4 takes the formula between ``$`` or ``\\(`` signs in that sentence, or the whole of it;
and before 5 come the whole text, when it is one line without words, then the last formula between such signs. A line
that holds LaTeX outside such signs is never cut down to a number: what follows its last ``=`` is the answer. An
exclamation mark that ends a sentence outside such signs is no factorial (P).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from tithe.rewards.exact import same_answer, without_emphasis


class AnswerForm(enum.StrEnum):
    """Where an answer was found."""

    BOX = "box"
    MARKER = "marker"
    PHRASE = "phrase"
    NUMBER = "number"
    FORMULA = "formula"


@dataclass(frozen=True)
class Answer:
    r"""What was found, as written, and where.

    >>> find_answer(r"So 3 + 4 = \boxed{7}.")
    Answer(text='7', form=<AnswerForm.BOX: 'box'>)
    """

    text: str
    form: AnswerForm


_BOX_OR_BRACE: Final = re.compile(r"\\(?:boxed|fbox)\s*+\{|\\.|[{}]", re.DOTALL)
_MARKER: Final = re.compile(r"(?<!#)####(?!#)[ \t]*+([^\n]*+)(\s*+\Z)?")
_MARKUP: Final = r"[*_:\s]"
_PHRASE: Final = re.compile(
    rf"final\s{{1,3}}answer[*_]{{0,3}}\s{{0,3}}(?:is\b|[:=]|[*_]{{0,3}}\n){_MARKUP}{{0,8}}+"
    rf"|answer[*_]{{0,3}}\s{{0,3}}(?:is\b|[:=]){_MARKUP}{{0,8}}+",
    re.IGNORECASE,
)
_SENTENCE_END: Final = re.compile(r"[.!?](?=\s|\Z)|\n")
_NUMBER: Final = re.compile(
    r"\\[dtc]?frac\s{0,2}\{[-+]?\d++\}\s{0,2}\{[-+]?\d++\}"
    r"|(?:\d{1,3}(?:,\d{3}){1,140}+(?!\d)|\d++)(?:\.\d++)?(?:[eE][-+]?\d{1,4}+(?!\w))?(?:\s?/\s?\d++(?![\d/]))?(?!\d|(?:st|nd|rd|th)\b)"
    r"|\.\d++"
)
_SPAN: Final = re.compile(
    r"\$\$(?P<a>[^$]{1,1000}+)\$\$|(?<!\\)\$(?P<b>(?:[^$\n\\]|\\.){1,500}+)\$"
    r"|\\\[(?P<c>(?:[^\\]|\\(?!\])){1,1000}+)\\\]|\\\((?P<d>(?:[^\\]|\\(?!\))){1,500}+)\\\)"
)
_CALCULATION: Final = re.compile(r"\s*+(?:\*\*?|[-+/^×·⋅÷]|\\(?:times|cdot|div)(?![a-zA-Z]))\s*+[\d({\\]")
_OTHER: Final = re.compile(
    r"(?:\s{0,3}(?P<unit>[^\W\d_]{1,20}|[%°]))?,?\s{1,3}(?:or|(?:or|but)\s{1,3}(?:maybe|perhaps|possibly|even|else))\s{1,3}"
    r"(?P<other>[-+]?(?:\d|\.\d))",
    re.IGNORECASE,
)
_OTHER_NAMED: Final = re.compile(r"\d\S{0,3}\s{1,3}or\s{1,3}[a-zA-Z]\w?\s{0,3}\Z")
_OTHER_SPAN: Final = re.compile(r",?\s{0,3}or\s{1,3}(?:(?:maybe|perhaps|possibly|even|else)\s{1,3})?")
_DENIAL: Final = re.compile(r"(?:not|neither)\b", re.IGNORECASE)
_COMMAND: Final = re.compile(r"\\[a-zA-Z]++|sqrt|arc(?:sin|cos|tan)|(?:sin|cos|tan)h|infinity")
_WORD: Final = re.compile(
    r"[^\W\d_]{4}|[^\W\d_]{2} [^\W\d_]{2}"
    r"|(?<![^\W\d_])(?:is|so|we|it|of|to|be|in|at|as|the|get|are|for|has|not)(?![^\W\d_])",
    re.IGNORECASE,
)
_PROSE: Final = re.compile(r"(?<![\\{^\W\d_])[^\W\d_]{2,}+[,:]?\s++")
_LATEX: Final = re.compile(r"\\[a-zA-Z({\[]|[\^√_]")
_MINUS_SIGNS: Final = dict.fromkeys(map(ord, "\u2212\u2012\u2013\ufe63\uff0d"), "-")
_NO_DELIMITERS: Final = {ord("$"): " "}
_PLACEHOLDERS: Final = frozenset(
    {"", "...", "…", r"\ldots", r"\dots", "answer", "your answer", "final answer", r"\text{answer}"}
)
_MAX_PHRASE_CHARS: Final = 300
_MAX_TAIL_CHARS: Final = 3000


def extract_answer(text: str) -> str | None:
    r"""The answer as written, or None when the text gives none that can be read.

    >>> extract_answer("The answer is 1,250 dollars."), extract_answer("I do not know.")
    ('1,250', None)
    """
    answer = find_answer(text)
    return None if answer is None else answer.text


def find_answer(text: str, *, formulas: bool = False) -> Answer | None:
    """As `extract_answer`, with the form in which the answer was found; `formulas` by the rules for these."""
    visible = text.rpartition("</think>")[2].partition("<think>")[0]
    boxes, is_cut_off = _boxes(visible)
    if is_cut_off:
        return None
    for start, end in reversed(boxes):
        content = _unwrapped(visible[start:end])
        if content.lower() not in _PLACEHOLDERS:
            return Answer(content, AnswerForm.BOX)
    if boxes:
        visible = visible[boxes[-1][1] + 1 :]
    return (_unboxed_formula if formulas else _unboxed)(visible.translate(_MINUS_SIGNS))


def _boxes(text: str) -> tuple[list[tuple[int, int]], bool]:
    """Spans of the contents of the outermost complete boxes, and whether a box is still open at the end."""
    spans: list[tuple[int, int]] = []
    open_at: list[int | None] = []  # where a box's content begins; None for a plain brace
    n_open_boxes = 0
    for match in _BOX_OR_BRACE.finditer(text):
        mark = match[0]
        if mark == "{":
            open_at.append(None)
        elif mark == "}":
            start = open_at.pop() if open_at else None
            if start is not None:
                n_open_boxes -= 1
                if n_open_boxes == 0:
                    spans.append((start, match.start()))
        elif mark[-1] == "{" and len(mark) > 2:
            open_at.append(match.end())
            n_open_boxes += 1
    return spans, n_open_boxes > 0


def _unwrapped(content: str) -> str:
    """The content of a box that holds nothing but another box, however deep."""
    spans, _ = _boxes(content)
    while len(spans) == 1:
        start, end = spans[0]
        before, after = content[:start].strip(), content[end + 1 :].strip()
        if after or not re.fullmatch(r"\\(?:boxed|fbox)\s*+\{", before):
            break
        content = content[start:end]
        spans, _ = _boxes(content) if len(content) < _MAX_PHRASE_CHARS else ([], False)
    return content.strip()


def _marked(text: str) -> Answer | None:
    """What stands behind the last marker, if the text ends with it or it is a number."""
    marker = _last(_MARKER, text)
    if marker is None:
        return None
    value = marker[1].strip()
    if value and (marker[2] is not None or _NUMBER.fullmatch(value.lstrip("+-$ ").rstrip(". "))):
        return Answer(value, AnswerForm.MARKER)
    return None


def _unboxed(text: str) -> Answer | None:
    text = text.replace("{,}", ",").replace(r",\!", ",")
    if (marked := _marked(text)) is not None:
        return marked
    phrase = _last(_PHRASE, text)
    if phrase is not None:
        return _from_phrase(text[phrase.end() : phrase.end() + _MAX_PHRASE_CHARS])
    number = _last_number(text)
    return None if number is None else Answer(number, AnswerForm.NUMBER)


def _from_phrase(rest: str) -> Answer | None:
    """The answer in the sentence that follows "the answer is"."""
    end = _SENTENCE_END.search(rest)
    sentence = rest[: end.start()] if end else rest
    sentence = re.sub(r"[`$]|\\[()\[\]]", " ", without_emphasis(sentence.replace('"', ""))).strip(" \t,;:*")
    if not sentence or _DENIAL.match(sentence):
        return None
    return Answer(_stated_number(sentence) or sentence, AnswerForm.PHRASE)


def _unboxed_formula(text: str) -> Answer | None:
    if (marked := _marked(text)) is not None:
        return marked
    phrase = _last(_PHRASE, text)
    if phrase is not None:
        return _formula_from_phrase(text[phrase.end() : phrase.end() + _MAX_PHRASE_CHARS])
    line = text.strip()
    if "\n" not in line and len(line) <= _MAX_PHRASE_CHARS and not _WORD.search(_COMMAND.sub(" ", line)):
        return Answer(line, AnswerForm.FORMULA) if line else None
    spans = [match for match in _SPAN.finditer(text[-_MAX_TAIL_CHARS:]) if match.group(match.lastgroup or 0).strip()]
    if spans:
        return Answer(spans[-1].group(spans[-1].lastgroup or 0).strip(), AnswerForm.FORMULA)
    last_line = line.rpartition("\n")[2]
    if _LATEX.search(last_line):
        value = _PROSE.split(last_line[-_MAX_PHRASE_CHARS:].rpartition("=")[2])[-1].strip(" .,;")
        return Answer(value, AnswerForm.FORMULA) if value and r"\boxed" not in value else None
    number = _last_number(text)
    return None if number is None else Answer(number, AnswerForm.NUMBER)


def _formula_from_phrase(rest: str) -> Answer | None:
    """The formula, or else the words, of the sentence that follows "the answer is"."""
    rest = rest.lstrip(" *_:\n")
    first = _SPAN.match(rest)
    if first is not None and not (_is_one_of_two(rest, first) or _is_one_of_two_spans(rest, first)):
        return Answer(first.group(first.lastgroup or 0).strip(), AnswerForm.FORMULA)
    end = _SENTENCE_END.search(rest)
    sentence = rest[: end.start()] if end else rest
    spans = list(_SPAN.finditer(sentence))
    if len(spans) == 1:
        return Answer(spans[0].group(spans[0].lastgroup or 0).strip(), AnswerForm.FORMULA)
    sentence = re.sub(r"[`\"]", "", without_emphasis(sentence)).strip(" \t,;:*")
    return Answer(sentence, AnswerForm.PHRASE) if sentence and not _DENIAL.match(sentence) else None


def number_in(sentence: str) -> str | None:
    """The number that a sentence of words states after its last ``=``; None when there is none, or LaTeX round it."""
    left, _, value = sentence.rpartition("=")
    return _before_calculation(left, value) if _LATEX.search(value) else _stated_number(sentence)


def _stated_number(sentence: str) -> str | None:
    """The first number after the last ``=``, or the number before it where a calculation stands after it."""
    left, _, value = sentence.rpartition("=")
    if _OTHER_NAMED.search(left):  # x = 5 or x = 6
        return None
    return _first_number(value) or _before_calculation(left, value)


def _before_calculation(left: str, right: str) -> str | None:
    """The number on the left of ``15 = 3 * 5``, when nothing else is there: the right side only says how it came."""
    number = _NUMBER.search(right)
    if number is None or _CALCULATION.match(right, number.end()) is None:
        return None
    stated = left.rpartition("=")[2].strip(" \t(,")
    return (
        stated if _NUMBER.fullmatch(stated.lstrip("+-")) and not stated.startswith(("+-", "-+", "--", "++")) else None
    )


def _first_number(value: str) -> str | None:
    """The first number, unless it is part of a calculation that is not carried out (``3*4``), or one of two."""
    number = _NUMBER.search(value)
    if number is None or _CALCULATION.match(value, number.end()) is not None or _is_one_of_two(value, number):
        return None
    return _signed(value, number)


def _is_one_of_two(text: str, first: re.Match[str]) -> bool:
    """Whether a second answer stands beside the one found (``5 or 6``): two answers are none. One number in two forms
    (``1/2 or 0.5``) and in two units (``2 hours or 120 minutes``) is one answer."""
    rest = text.translate(_NO_DELIMITERS)
    other = _OTHER.match(rest, first.end())
    if other is None:
        return False
    second = _NUMBER.search(rest, other.start("other"))
    if second is None:
        return False
    if other["unit"] and not rest[second.end() :].lstrip().startswith(other["unit"]):
        return False
    number = _NUMBER.search(rest, first.start())
    return number is None or not same_answer(_signed(rest, number), _signed(rest, second))


def _is_one_of_two_spans(text: str, first: re.Match[str]) -> bool:
    """The same of formulas between signs: ``$x=1$ or $x=2$``."""
    joined = _OTHER_SPAN.match(text, first.end())
    other = None if joined is None else _SPAN.match(text, joined.end())
    if other is None:
        return False
    return not same_answer(first.group(first.lastgroup or 0).strip(), other.group(other.lastgroup or 0).strip())


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    match = None
    for match in pattern.finditer(text):  # noqa: B007  the last one is wanted
        pass
    return match


def _last_number(text: str) -> str | None:
    found = None
    for match in _NUMBER.finditer(text):
        before = text[match.start() - 1] if match.start() else " "
        if not (before.isalpha() or before in "_\\"):
            found = match
    return None if found is None else _signed(text, found)


def _signed(text: str, number: re.Match[str]) -> str:
    """The number with the sign directly before it, unless that joins it to something else (``11-2``, ``x-2``)."""
    start = number.start()
    if start and text[start - 1] in "+-":
        before = text[start - 2] if start > 1 else " "
        if not (before.isalnum() or before in ")]}.%_+-"):
            return text[start - 1] + number[0]
    return number[0]
