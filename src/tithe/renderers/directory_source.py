"""The tokenizer of a Hugging Face directory, from its tokenizer*.json, chat_template.jinja and generation_config.json.

tokenizer.json is read by the `tokenizers` library alone. A directory without one (only a SentencePiece model, or
vocab.json with merges.txt) is converted by transformers, which costs seconds to import. No file is executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from tithe.arch.files import read_json
from tithe.errors import ModelError
from tithe.renderers.source import TokenizerSource

_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_directory_source(directory: Path) -> TokenizerSource:
    """Build the tokenizer of a directory. Raises `ModelError` that names the file."""
    config = _optional_json(directory / "tokenizer_config.json")
    tokenizer = _read_tokenizer(directory)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _add_missing(directory, tokenizer, config)
    names = {name: text for name in _NAMES if (text := _token_text(config.get(name)))}
    stops = frozenset(_stop_ids(directory, tokenizer, names.get("eos_token")))
    added = tokenizer.get_added_tokens_decoder()
    named = {i for text in names.values() if (i := tokenizer.token_to_id(text)) is not None}
    return TokenizerSource(
        tokenizer=tokenizer,
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        stop_token_ids=stops,
        special_ids=frozenset(i for i, token in added.items() if token.special) | named | stops,
        prefix_ids=_prefix_ids(tokenizer),
        chat_template=_chat_template(directory, config),
        names=names,
    )


def _optional_json(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.exists() else {}


def _read_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if path.exists():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} cannot be read: {error}; fetch the file again") from error
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415  seconds to import, needed for old directories alone

        converted = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        return Tokenizer.from_str(converted.backend_tokenizer.to_str())
    except Exception as error:  # conversion fails in as many ways as there are formats
        raise ModelError(
            f"{directory} has no tokenizer.json, and its tokenizer cannot be converted ({error}); "
            "save it once with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        ) from error


def _add_missing(directory: Path, tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """tokenizer_config.json may list added tokens that tokenizer.json lacks; they must get the ids it gives them."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    for key, entry in sorted(listed.items(), key=lambda pair: int(pair[0]) if pair[0].isdecimal() else -1):
        if not key.isdecimal() or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise ModelError(f"{directory / 'tokenizer_config.json'}: added_tokens_decoder has a broken entry {key!r}")
        text = entry["content"]
        if tokenizer.token_to_id(text) is None:
            flags = {name: bool(entry.get(name)) for name in _FLAGS}
            tokenizer.add_tokens([AddedToken(text, **flags)])
        if tokenizer.token_to_id(text) != int(key):
            raise ModelError(
                f"{directory}: tokenizer_config.json gives {text!r} the id {key}, tokenizer.json "
                f"{tokenizer.token_to_id(text)}; the two files are of different models"
            )


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _stop_ids(directory: Path, tokenizer: Tokenizer, eos_token: str | None) -> Iterable[int]:
    """Every end token that generation_config.json, config.json or tokenizer_config.json names."""
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(directory / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        for index in ids:
            if index is None:
                continue
            if not isinstance(index, int) or isinstance(index, bool) or index < 0:
                raise ModelError(f"{directory / name}: eos_token_id is {value!r}; one id or a list of ids is needed")
            yield index
    if eos_token is not None and (index := tokenizer.token_to_id(eos_token)) is not None:
        yield index


def _prefix_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer itself puts before a text: the special tokens in front of the first real one."""
    encoding = tokenizer.encode("a")
    prefix: list[int] = []
    for index, special in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
        if not special:
            break
        prefix.append(index)
    return tuple(prefix)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja before the entry of tokenizer_config.json; of several named ones the one called `default`."""
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
