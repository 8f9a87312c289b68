"""Two ways into one tokenizer: the template's markup, whose control strings become control tokens, and content, whose
never do.

Control strings inside content are hidden before the template runs: their first character is replaced by a private
character that occurs nowhere else. The template then works on the content as usual (trim, split, compare), the real
tokenizer finds only the template's own control tokens, and the stretches between them are encoded by a copy of the
tokenizer that has no added tokens, with the hidden characters put back. A conversation without control strings, which
is nearly every one, takes the short way and gets exactly what the checkpoint's own tokenizer would give.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer, models

from tithe.errors import DataError

_PRIVATE: Final = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))
"""Code points without meaning, from which the replacements are taken."""

TRUSTED_ROLES: Final = frozenset({"system", "developer", "assistant"})
"""Roles whose text may hold added tokens that are no control tokens (`<think>`): the operator's and the model's own. In
all other text, which may come from users or tools, no added token of any kind is made."""


class Hidden:
    """One conversation with its control strings hidden, and the way back.

    `texts` are the messages' values in order; `restore` undoes the replacement in anything made from them.
    """

    def __init__(self, texts: Sequence[str], patterns: Sequence[re.Pattern[str]]) -> None:
        found = {m[0][0] for text, pattern in zip(texts, patterns, strict=True) for m in pattern.finditer(text)}
        used = set().union(*texts) if found else set()
        free = (chr(code) for code in _PRIVATE if chr(code) not in used)
        mask: dict[str, str] = {}
        for first in sorted(found):
            replacement = next(free, None)
            if replacement is None:
                raise DataError(
                    "a prompt that uses every private character of Unicode and holds control tokens is refused"
                )
            mask[first] = replacement
        self.is_needed = bool(found)
        self._back: Mapping[int, str] = {ord(hidden): first for first, hidden in mask.items()}
        self.texts = [
            pattern.sub(lambda m: mask[m[0][0]] + m[0][1:], text) for text, pattern in zip(texts, patterns, strict=True)
        ]

    def restore(self, text: str) -> str:
        """`text` with every hidden character put back."""
        return text.translate(dict(self._back))


class SafeEncoder:
    """Encodes markup and content with one tokenizer. Thread-safe: the library's objects are only read.

    `special_ids` are control tokens beyond those the tokenizer itself flags (end tokens named elsewhere).
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(special_ids) | {i for i, token in added.items() if token.special}
        controls = [text for i in self.special_ids if (text := tokenizer.id_to_token(i))]
        # The unknown token is mostly an added token too, and yet what honest content with unknown letters becomes.
        self._unknown: str | None = getattr(tokenizer.model, "unk_token", None)
        unknown_id = tokenizer.token_to_id(self._unknown) if self._unknown else None
        self._whole_ids = (frozenset(added) | self.special_ids) - {unknown_id}
        self.control_pattern = _any_of(controls)
        self.added_pattern = _any_of([*controls, *(token.content for token in added.values())])
        self._plain_first = _without_added_tokens(tokenizer, continues=False)
        self._plain_rest = _without_added_tokens(tokenizer, continues=True)

    def markup(self, text: str) -> list[int]:
        """Ids of trusted text: control strings become control tokens. Nothing is put in front."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def mixed(self, text: str, restore: Callable[[str], str], *, at_start: bool = True) -> list[int]:
        """Ids of markup around content whose control strings are hidden; `restore` gives the content back its text.
        `at_start` is false when other tokens precede the text."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        done = 0
        for index, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if start >= done and (index in self._whole_ids or text[start:end] == self._unknown):
                ids += self.content(restore(text[done:start]), at_start=at_start and done == 0)
                ids.append(index)
                done = end
        return ids + self.content(restore(text[done:]), at_start=at_start and done == 0)

    def content(self, text: str, *, at_start: bool = True) -> list[int]:
        """Ids of untrusted text, none of which is an added token. `at_start` is false when other tokens precede it."""
        if not text:
            return []
        encoding = (self._plain_first if at_start else self._plain_rest).encode(text, add_special_tokens=False)
        for index, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if index in self._whole_ids:  # merges alone can make one in a few vocabularies: cut the text inside it
                cut = (start + end + 1) // 2
                if not start < cut < end:
                    raise DataError(f"the text {text[start:end]!r} cannot be encoded without a control token")
                return self.content(text[:cut], at_start=at_start) + self.content(text[cut:], at_start=False)
        return encoding.ids


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first; nothing when there are none."""
    longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _without_added_tokens(tokenizer: Tokenizer, *, continues: bool) -> Tokenizer:
    """The same model and text steps without added tokens. With `continues` it encodes what follows other tokens, so a
    space that belongs before the first word of a text alone is left out."""
    skeleton = Tokenizer(models.BPE())
    for step in ("normalizer", "pre_tokenizer"):
        if (value := getattr(tokenizer, step)) is not None:
            setattr(skeleton, step, value)
    if continues:
        state: dict[str, Any] = json.loads(skeleton.to_str())
        _replace(state.get("pre_tokenizer"), "prepend_scheme", "first", "never")
        skeleton = Tokenizer.from_str(json.dumps(state))
    skeleton.model = tokenizer.model
    return skeleton


def _replace(state: Any, key: str, old: str, new: str) -> None:
    """In nested JSON, change `key` from `old` to `new` wherever it stands."""
    if isinstance(state, dict):
        if state.get(key) == old:
            state[key] = new
        for value in state.values():
            _replace(value, key, old, new)
    elif isinstance(state, list):
        for value in state:
            _replace(value, key, old, new)
