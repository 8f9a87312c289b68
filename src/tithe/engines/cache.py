"""Prompts in pages, keyed by (adapter name, tokens): a version never reads what another computed."""

from __future__ import annotations

from tithe.engines.sequences import LiveVersion, Prompt
from tithe.models import PAGE, KVPages, PageAllocator


class PromptCache:
    """Owns all pages. A prompt stays while requests use it, then until its pages are wanted (least recently used
    first).
    """

    def __init__(self, pages: KVPages, *, first_slot: int, slots: int) -> None:
        self.pages = pages
        self.allocator = PageAllocator(pages.pages)
        self._prompts: dict[tuple[str, tuple[int, ...]], Prompt] = {}
        self._slots = list(range(first_slot + slots - 1, first_slot - 1, -1))

    def __len__(self) -> int:
        return len(self._prompts)

    def acquire(self, version: LiveVersion, tokens: tuple[int, ...], own: int) -> tuple[Prompt, list[int]] | None:
        """The prompt's entry with one more user, and `own` fresh pages; None when pages or slots are wanting."""
        key = (version.name, tokens)
        found = self._prompts.pop(key, None)
        if found is not None:
            self._prompts[key] = found  # most recently used
        new = 0 if found is not None else -(-len(tokens) // PAGE)
        if not self._make_room(own + new, need_slot=found is None, keep=found):
            return None
        if found is None:
            found = Prompt(version, tokens, self.allocator.take(new), self._slots.pop())
            self._prompts[key] = found
        found.users += 1
        return found, self.allocator.take(own)

    def release(self, prompt: Prompt, own: list[int]) -> None:
        """One user fewer, and its own pages back."""
        prompt.users -= 1
        self.allocator.release(own)
        if prompt.users == 0 and (
            not prompt.ready or self._prompts.get((prompt.version.name, prompt.tokens)) is not prompt
        ):
            self._discard(prompt)

    def drop_version(self, version: LiveVersion) -> None:
        """Forget a version's prompts; those still in use go with their last user."""
        for key in [key for key, prompt in self._prompts.items() if prompt.version is version]:
            prompt = self._prompts.pop(key)
            if prompt.users == 0:
                self._free(prompt)

    def unready(self) -> list[Prompt]:
        """Prompts in use whose keys and values are still to be computed, oldest first."""
        return [p for p in self._prompts.values() if not p.ready and p.users > 0]

    def fork(self, prompt: Prompt, own: list[int]) -> list[int]:
        """The block table of a new sequence on a prompt; its partly filled page is copied into the first own page."""
        full, slots = divmod(len(prompt.tokens), PAGE)
        if slots:
            self.pages.fork([prompt.pages[full]], [own[0]], [slots])
        return prompt.pages[:full] + own

    def _make_room(self, pages: int, *, need_slot: bool, keep: Prompt | None) -> bool:
        for prompt in list(self._prompts.values()):
            if pages <= self.allocator.free and (self._slots or not need_slot):
                return True
            if prompt.users == 0 and prompt is not keep:
                self._discard(prompt)
        return pages <= self.allocator.free and (bool(self._slots) or not need_slot)

    def _discard(self, prompt: Prompt) -> None:
        key = (prompt.version.name, prompt.tokens)
        if self._prompts.get(key) is prompt:
            del self._prompts[key]
        self._free(prompt)

    def _free(self, prompt: Prompt) -> None:
        self.allocator.release(prompt.pages)
        self._slots.append(prompt.slot)
