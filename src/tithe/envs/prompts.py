"""The ids of every prompt, made once: what is checked against the limit is what is sent to the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tithe.errors import DataError
from tithe.renderers import ChatRenderer
from tithe.types import PromptItem


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts that fit, and their ids (int32 [P] each). `dropped` are the ids of items that were too long, `cut` of
    those that were shortened."""

    items: tuple[PromptItem, ...]
    dropped: tuple[str, ...]
    cut: tuple[str, ...]
    _ids: Mapping[str, NDArray[np.int32]]

    def prompt_ids(self, item_id: str) -> tuple[int, ...]:
        """Ids of a prompt, as a request carries them. Raises `KeyError` for one that was dropped."""
        return tuple(self._ids[item_id].tolist())


def encode_prompts(
    items: Sequence[PromptItem],
    renderer: ChatRenderer,
    *,
    max_prompt_tokens: int,
    on_long_prompt: Literal["drop", "cut", "error"],
    system_prompt: str | None = None,
) -> EncodedPrompts:
    """Render every prompt and apply the rule for those over `max_prompt_tokens`.

    `cut` shortens the longest user or tool message from its beginning, so that the template around it stays whole.
    Raises `DataError` that names the prompt under `error`, when a cut cannot help, and when nothing is left.
    """
    kept: list[PromptItem] = []
    ids: dict[str, NDArray[np.int32]] = {}
    dropped: list[str] = []
    cut: list[str] = []

    def encode(item: PromptItem) -> tuple[int, ...]:
        return renderer.render(item.text if item.text is not None else item.messages, system_prompt)

    for item in items:
        shown = item
        prompt_ids = encode(item)
        if len(prompt_ids) > max_prompt_tokens:
            if on_long_prompt == "drop":
                dropped.append(item.id)
                continue
            if on_long_prompt == "error":
                raise DataError(_too_long(item, len(prompt_ids), max_prompt_tokens))
            shown = _shortened(item, lambda short: len(encode(short)) <= max_prompt_tokens)
            prompt_ids = encode(shown)
            if len(prompt_ids) > max_prompt_tokens:
                raise DataError(f"{_too_long(item, len(prompt_ids), max_prompt_tokens)}, even without its question")
            cut.append(item.id)
        kept.append(shown)
        ids[item.id] = np.asarray(prompt_ids, np.int32)
    if items and not kept:
        raise DataError(f"all {len(items)} prompts are longer than rollout.max_prompt_tokens = {max_prompt_tokens}")
    return EncodedPrompts(tuple(kept), tuple(dropped), tuple(cut), ids)


def _too_long(item: PromptItem, n_tokens: int, limit: int) -> str:
    text = item.text or item.messages[-1].get("content", "")
    return f"prompt {item.id} ({text[:40]!r}) has {n_tokens} tokens, more than rollout.max_prompt_tokens = {limit}"


def _shortened(item: PromptItem, fits: Callable[[PromptItem], bool]) -> PromptItem:
    """The item with as much of the end of its longest question as fits."""
    if item.text is not None:
        text = item.text
        return _longest_end(text, lambda end: replace(item, text=end), fits)
    asked = [i for i, message in enumerate(item.messages) if message["role"] in ("user", "tool")]
    index = max(asked, key=lambda i: len(item.messages[i]["content"]), default=len(item.messages) - 1)
    message = item.messages[index]

    def with_content(end: str) -> PromptItem:
        return replace(
            item, messages=(*item.messages[:index], {**message, "content": end}, *item.messages[index + 1 :])
        )

    return _longest_end(message["content"], with_content, fits)


def _longest_end(text: str, build: Callable[[str], PromptItem], fits: Callable[[PromptItem], bool]) -> PromptItem:
    """Bisection on the number of characters kept; what is returned was itself checked, unless nothing fits."""
    fitting, failing = 0, len(text)
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if fits(build(text[len(text) - middle :])):
            fitting = middle
        else:
            failing = middle
    return build(text[len(text) - fitting :])
