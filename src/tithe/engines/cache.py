"""Prompts in pages, keyed by (adapter name, tokens): a version never reads what another computed. Beside them lies what
requests that may be continued have left behind: a conversation's next turn is computed from there on.
"""

from __future__ import annotations

from tithe.engines.admission import own_pages
from tithe.engines.sequences import Kept, LiveVersion, Prompt, Running
from tithe.models import PAGE, KVPages, PageAllocator
from tithe.types import GenerateRequest


class PromptCache:
    """Owns all pages. A prompt stays while requests use it, then until its pages are wanted; what a request has left
    behind stays until a prompt of its group continues it, or its pages are wanted (least recently used first).
    """

    def __init__(self, pages: KVPages, *, first_slot: int, slots: int) -> None:
        self.pages = pages
        self.allocator = PageAllocator(pages.pages)
        self._prompts: dict[tuple[str, tuple[int, ...]], Prompt] = {}
        self._kept: dict[int, list[Kept]] = {}  # by group
        self._slots = list(range(first_slot + slots - 1, first_slot - 1, -1))
        self._clock = 0
        self.reused_tok = 0
        """Prompt tokens that were not computed again."""

    def __len__(self) -> int:
        return len(self._prompts)

    def acquire(self, version: LiveVersion, request: GenerateRequest) -> tuple[Prompt, list[int]] | None:
        """The entry of the request's prompt with one more user, and fresh pages of its own; None when pages or slots
        are wanting. A new entry begins with the longest of what its group has left behind, taken over as it is.
        """
        tokens, own = request.prompt_ids, own_pages(request)
        key = (version.name, tokens)
        found = self._prompts.pop(key, None)
        left: Kept | None = None
        new = 0
        if found is not None:
            self._prompts[key] = found  # most recently used
            found.used = self._now()
        else:
            left = self._longest(version, request)
            new = -(-len(tokens) // PAGE) - (0 if left is None else len(left.pages))
        if not self._make_room(own + new, need_slot=found is None, keep=found or left):
            return None
        if found is None:
            found = Prompt(version, tokens, self.allocator.take(new), self._slots.pop(), used=self._now())
            self._prompts[key] = found
            if left is not None:
                self._continue(found, left)
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

    def keep(self, seq: Running) -> None:
        """Release a request whose last token alone is not computed, and keep what is for a prompt that continues it."""
        tokens = (*seq.prompt.tokens, *seq.tokens[:-1])
        group, own = seq.request.params.group, seq.own
        others = self._kept.get(group, ())
        if not any(other.version is seq.version and other.tokens == tokens for other in others):
            whole = len(seq.prompt.tokens) // PAGE  # pages that the prompt shares
            behind = -(-len(tokens) // PAGE) - whole
            pages, own = [*seq.prompt.pages[:whole], *own[:behind]], own[behind:]
            self.allocator.share(pages[:whole])
            experts = [*seq.prompt.experts, *seq.experts]
            self._kept.setdefault(group, []).append(Kept(seq.version, group, tokens, pages, experts, self._now()))
        self.release(seq.prompt, own)

    def drop_group(self, group: int) -> None:
        """Forget what a group's requests have left behind: nobody will continue it."""
        for left in self._kept.pop(group, ()):
            self.allocator.release(left.pages)

    def drop_version(self, version: LiveVersion) -> None:
        """Forget a version's prompts and what was left behind under it; prompts still in use go with their last
        user."""
        for key in [key for key, prompt in self._prompts.items() if prompt.version is version]:
            prompt = self._prompts.pop(key)
            if prompt.users == 0:
                self._free(prompt)
        for left in [left for group in self._kept.values() for left in group if left.version is version]:
            self._forget(left)
            self.allocator.release(left.pages)

    def unready(self) -> list[Prompt]:
        """Prompts in use whose keys and values are still to be computed, oldest first."""
        return [p for p in self._prompts.values() if not p.ready and p.users > 0]

    def fork(self, prompt: Prompt, own: list[int]) -> list[int]:
        """The block table of a new sequence on a prompt; its partly filled page is copied into the first own page."""
        full, slots = divmod(len(prompt.tokens), PAGE)
        if slots:
            self.pages.fork([prompt.pages[full]], [own[0]], [slots])
        return prompt.pages[:full] + own

    def _longest(self, version: LiveVersion, request: GenerateRequest) -> Kept | None:
        """What begins a prompt; its last token is not in there, because what it predicts is to be drawn."""
        tokens = request.prompt_ids
        fitting = [
            left
            for left in self._kept.get(request.params.group, ())
            if left.version is version and len(left.tokens) < len(tokens) and tokens[: len(left.tokens)] == left.tokens
        ]
        return max(fitting, key=lambda left: len(left.tokens), default=None)

    def _continue(self, prompt: Prompt, left: Kept) -> None:
        """Hand a new prompt what was left behind: pages, and the experts that their rows took."""
        self._forget(left)
        prompt.pages = [*left.pages, *prompt.pages]
        prompt.computed = len(left.tokens)
        prompt.experts = list(left.experts)
        self.reused_tok += len(left.tokens)

    def _make_room(self, pages: int, *, need_slot: bool, keep: Prompt | Kept | None) -> bool:
        def has_slot() -> bool:
            return bool(self._slots) or not need_slot

        if pages <= self.allocator.free and has_slot():
            return True
        idle = [prompt for prompt in self._prompts.values() if prompt.users == 0]
        left = [one for group in self._kept.values() for one in group]
        for one in sorted([*idle, *left], key=lambda one: one.used):
            if pages <= self.allocator.free and has_slot():
                return True
            if one is keep:
                continue
            if isinstance(one, Prompt):
                self._discard(one)
            elif pages > self.allocator.free:  # it has no slot to give
                self._forget(one)
                self.allocator.release(one.pages)
        return pages <= self.allocator.free and has_slot()

    def _now(self) -> int:
        self._clock += 1
        return self._clock

    def _forget(self, left: Kept) -> None:
        others = self._kept[left.group]
        others.remove(left)
        if not others:
            del self._kept[left.group]

    def _discard(self, prompt: Prompt) -> None:
        key = (prompt.version.name, prompt.tokens)
        if self._prompts.get(key) is prompt:
            del self._prompts[key]
        self._free(prompt)

    def _free(self, prompt: Prompt) -> None:
        self.allocator.release(prompt.pages)
        self._slots.append(prompt.slot)
