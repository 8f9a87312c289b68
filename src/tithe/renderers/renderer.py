"""Text in, token ids out, and back: what the rest of the house knows of a checkpoint's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from tithe.errors import DataError, ModelError
from tithe.renderers.directory_source import read_directory_source
from tithe.renderers.encoding import TRUSTED_ROLES, Hidden, SafeEncoder
from tithe.renderers.gguf_source import read_gguf_source
from tithe.renderers.source import TokenizerSource
from tithe.renderers.template import ChatTemplate

Message = Mapping[str, str]

_PROBE: Final = "wqzxkjv"
"""A reply that no template writes by itself: what follows it in a rendering is how a turn ends."""


class ChatRenderer:
    """Renders conversations with a checkpoint's own template and tokenizer. Thread-safe; holds no conversation.

    `stop_token_ids` are all end tokens the checkpoint names, and the control token its template puts after a reply.
    Content never encodes to a control token, whatever it says. Ids that a model sampled are never made from text again:
    a next turn is `extend`ed from ids.
    """

    def __init__(self, source: TokenizerSource, today: datetime) -> None:
        self._tokenizer = source.tokenizer
        self._encoder = SafeEncoder(source.tokenizer, source.special_ids)
        self._prefix_ids = source.prefix_ids
        self._template = ChatTemplate(source.chat_template, source.names, today) if source.chat_template else None
        self.vocab_size = source.vocab_size
        self._tail = self._reply_tail()
        ends = frozenset(self._tail[:1]) & self._encoder.special_ids
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(source.stop_token_ids | ends))

    @property
    def has_template(self) -> bool:
        """Whether the checkpoint carries a chat template."""
        return self._template is not None

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: content never encodes to one of them."""
        return self._encoder.special_ids

    def render(self, prompt: Sequence[Message] | str, system_prompt: str | None = None) -> tuple[int, ...]:
        """Ids of a prompt, up to where the model continues.

        A chat is written by the checkpoint's template; a text is encoded as it stands, after the checkpoint's
        begin-of-text token if it has one. `system_prompt` is put before a chat that has no system message of its own;
        with `None` the template decides (many add a default). A checkpoint without template reads a chat of one user
        message as plain text, after the system prompt and a blank line.

        Raises `ModelError` when the template refuses the chat, `DataError` when a message is malformed.
        """
        if isinstance(prompt, str):
            return (*self._prefix_ids, *self._encoder.content(prompt, at_start=not self._prefix_ids))
        messages = _with_system(_checked(prompt), system_prompt)
        if self._template is None:
            return self.render(_as_text(messages))
        return tuple(self._encode(messages, generation_prompt=True))

    def extend(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        """Ids of the next turn: the old prompt and the sampled reply exactly as they are, then how the template ends a
        reply and writes `messages` (a user's or tool's answer), up to where the model continues.

        An end token that the reply already carries is not written twice. Raises `ModelError` without a template.
        """
        if self._template is None:
            raise ModelError("this checkpoint has no chat template, so a conversation cannot be continued")
        tail = self._after_reply([{"role": "user", "content": _PROBE[::-1]}], _checked(messages))
        ended = len(completion_ids) > 0 and len(tail) > 0 and completion_ids[-1] in self.stop_token_ids
        if ended and tail[0] in self.stop_token_ids:
            tail = tail[1:]
        return (*prompt_ids, *completion_ids, *tail)

    def finished_reply(self, text: str) -> tuple[int, ...]:
        """Ids of a reply given as text, and how the template ends it (without a template, the checkpoint's first end
        token): what follows `render`'s ids when somebody judges the whole conversation. Never empty where the
        checkpoint names an end token."""
        return (*self._encoder.content(text, at_start=False), *(self._tail or self.stop_token_ids[:1]))

    def tool_role(self) -> str:
        """The role under which a tool's answer continues a conversation: `tool`, or `user` where the template has no
        such role. Raises `ModelError` without a template."""
        marker = _PROBE.upper()
        try:
            shown = self.decode(self.extend((), (), [{"role": "tool", "content": marker}]))
        except ModelError:
            if self._template is None:
                raise
            return "user"
        return "tool" if marker in shown else "user"

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens written out; an incomplete character at the end becomes U+FFFD."""
        return self._tokenizer.decode([int(index) for index in ids], skip_special_tokens=False)

    def decode_reply(self, ids: Sequence[int]) -> str:
        """Text of a completion without the end token it may close with."""
        ended = len(ids) > 0 and int(ids[-1]) in self.stop_token_ids
        return self.decode(ids[:-1] if ended else ids)

    def _encode(self, messages: Sequence[Message], *, generation_prompt: bool) -> list[int]:
        assert self._template is not None
        hidden, chat = self._hide(messages)
        text = self._template.render(chat, generation_prompt=generation_prompt)
        return self._encoder.mixed(text, hidden.restore) if hidden.is_needed else self._encoder.markup(text)

    def _hide(self, messages: Sequence[Message]) -> tuple[Hidden, list[dict[str, str]]]:
        """The messages with control strings hidden in every value, the role included."""
        encoder = self._encoder
        keys = [(index, key) for index, message in enumerate(messages) for key in message]
        patterns = [
            encoder.control_pattern if messages[index]["role"] in TRUSTED_ROLES else encoder.added_pattern
            for index, _ in keys
        ]
        hidden = Hidden([messages[index][key] for index, key in keys], patterns)
        chat: list[dict[str, str]] = [{} for _ in messages]
        for (index, key), text in zip(keys, hidden.texts, strict=True):
            chat[index][key] = text
        return hidden, chat

    def _after_reply(self, before: Sequence[Message], after: Sequence[Message]) -> list[int]:
        """Ids that the template writes after the content of a reply, `after` and a generation prompt included."""
        assert self._template is not None
        hidden, chat = self._hide([*before, {"role": "assistant", "content": _PROBE}, *after])
        text = self._template.render(chat, generation_prompt=bool(after))
        _, found, tail = text.rpartition(_PROBE)
        if not found:
            raise ModelError("the checkpoint's chat template leaves out the content of a reply")
        return self._encoder.mixed(tail, hidden.restore, at_start=False)

    def _reply_tail(self) -> tuple[int, ...]:
        """What the template puts right after a reply: the control token among it is what the model was taught to end
        with. Empty without a template."""
        if self._template is None:
            return ()
        try:
            return tuple(self._after_reply([{"role": "user", "content": _PROBE[::-1]}], []))
        except ModelError:  # a template that refuses this chat says so again when it is used
            return ()


def load_renderer(checkpoint: Path, today: datetime | None = None) -> ChatRenderer:
    """The renderer of a Hugging Face directory or a GGUF file.

    `today` is the date that templates which print one will print (default: now), fixed for the life of the renderer.
    Raises `ModelError` that names the file and the remedy.
    """
    if checkpoint.is_dir():
        source = read_directory_source(checkpoint)
    elif checkpoint.exists():
        source = read_gguf_source(checkpoint)
    else:
        raise ModelError(f"{checkpoint} does not exist; set model.path to a Hugging Face directory or a .gguf file")
    return ChatRenderer(source, today or datetime.now().astimezone())


def _checked(messages: Sequence[Message]) -> list[Message]:
    if not messages:
        raise DataError("a chat prompt needs at least one message")
    for message in messages:
        if "role" not in message or any(type(value) is not str for value in message.values()):
            raise DataError(f"a chat message needs `role` and `content` as text, got {dict(message)!r:.200}")
    return list(messages)


def _with_system(messages: list[Message], system_prompt: str | None) -> list[Message]:
    if system_prompt is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def _as_text(messages: Sequence[Message]) -> str:
    roles = [message["role"] for message in messages]
    if roles not in (["user"], ["system", "user"]):
        raise ModelError(
            f"this checkpoint has no chat template and cannot read a chat of {', '.join(roles)}; "
            "use an instruction-tuned checkpoint, or one user message per prompt"
        )
    return "\n\n".join(message.get("content", "") for message in messages)
