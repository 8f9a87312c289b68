"""What a checkpoint says about text, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True)
class TokenizerSource:
    """The tokenizer and the facts that go with it.

    `vocab_size` counts the ids that mean something (a checkpoint's embedding may have more rows: those are never
    sampled). `stop_token_ids` are all end tokens the checkpoint names. `special_ids` are control tokens: content never
    encodes to one. `prefix_ids` begin a raw text that no template wraps (mostly a begin-of-text token, or nothing).
    `names` are the special tokens a template may write, by their usual variable names.
    """

    tokenizer: Tokenizer
    vocab_size: int
    stop_token_ids: frozenset[int]
    special_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    chat_template: str | None
    names: Mapping[str, str]
