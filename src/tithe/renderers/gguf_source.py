"""The tokenizer in a GGUF file's metadata, built with the `tokenizers` library alone.

Two kinds of vocabulary cover the Llama and Qwen families: byte-level BPE ("gpt2") with a named way to split words, and
SentencePiece BPE ("llama"), whose merges follow from the scores. Where converters to other formats simplify the split
or leave out the normaliser, this reader follows the models' own published tokenizers: digits apart for SmolLM, NFC for
Qwen, whole words before merges for Llama 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tithe.arch.gguf_file import GgufArray, read_gguf
from tithe.errors import ModelError
from tithe.renderers.source import TokenizerSource

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Token types of the format (2 is the unknown token, 6 a byte)."""

_GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Split:
    """How text becomes words: the regular expression, each digit apart before it, whole words looked up before merges,
    NFC first."""

    words: str
    digits: bool = False
    whole_words: bool = False
    nfc: bool = False


_GPT2 = _Split(_GPT2_WORDS)
_DIGITS = _Split(_GPT2_WORDS, digits=True)
_LLAMA3 = _Split(_WORDS % "{1,3}", whole_words=True)
_QWEN2 = _Split(_WORDS % "", nfc=True)

_SPLITS: Final[Mapping[str, _Split]] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
"""`tokenizer.ggml.pre` → split."""

_BEGINS_WITH_BOS: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3"})
"""Splits whose models expect a begin-of-text token when the file does not say."""

_NAMED: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_STOPS: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def read_gguf_source(path: Path) -> TokenizerSource:
    """Build the tokenizer of a GGUF file. Raises `ModelError` that names the missing or unknown metadata."""
    metadata = read_gguf(path).metadata
    tokens = _texts(path, metadata, "tokenizer.ggml.tokens")
    types = _types(path, metadata, len(tokens))
    while types and types[-1] == _UNUSED:  # rows that only pad the embedding
        types.pop()
    tokens = tokens[: len(types)]
    tokenizer = _build(path, metadata, tokens, types)
    _add_whole_tokens(tokenizer, tokens, types)
    named = _token_ids(path, metadata, _NAMED, len(tokens))
    stops = frozenset(_token_ids(path, metadata, {key: key for key in _STOPS}, len(tokens)).values())
    bos = named.get("bos_token")
    return TokenizerSource(
        tokenizer=tokenizer,
        vocab_size=len(tokens),
        stop_token_ids=stops,
        special_ids=frozenset(i for i, kind in enumerate(types) if kind == _CONTROL) | stops,
        prefix_ids=(bos,) if bos is not None and _wants_bos(metadata) else (),
        chat_template=metadata.get("tokenizer.chat_template"),
        names={name: tokens[index] for name, index in named.items()},
    )


def _texts(path: Path, metadata: Mapping[str, Any], key: str) -> list[str]:
    array = metadata.get(key)
    values = array.values() if isinstance(array, GgufArray) else []
    if not values or not isinstance(values[0], str):
        raise ModelError(f"{path} has no {key}: it carries no tokenizer; use the model's safetensors directory")
    return values


def _types(path: Path, metadata: Mapping[str, Any], n_tokens: int) -> list[int]:
    array = metadata.get("tokenizer.ggml.token_type")
    types: list[int] = array.values() if isinstance(array, GgufArray) else [_NORMAL] * n_tokens
    if len(types) != n_tokens:
        raise ModelError(f"{path}: {len(types)} token types for {n_tokens} tokens; the file is damaged")
    return types


def _token_id(path: Path, metadata: Mapping[str, Any], key: str, n_tokens: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < n_tokens:
        raise ModelError(f"{path}: {key} is {value!r}, but the vocabulary has {n_tokens} tokens")
    return value


def _token_ids(path: Path, metadata: Mapping[str, Any], keys: Mapping[str, str], n_tokens: int) -> dict[str, int]:
    """name → id, for the names whose key the file has."""
    found = ((name, _token_id(path, metadata, key, n_tokens)) for name, key in keys.items())
    return {name: index for name, index in found if index is not None}


def _wants_bos(metadata: Mapping[str, Any]) -> bool:
    default = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _BEGINS_WITH_BOS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _build(path: Path, metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        name = metadata.get("tokenizer.ggml.pre")
        if name not in _SPLITS:
            raise ModelError(
                f"{path}: the pre-tokenizer {name!r} is not known (known: {', '.join(sorted(_SPLITS))}); "
                "use the model's safetensors directory, which carries its own tokenizer.json"
            )
        return _byte_level(tokens, _texts(path, metadata, "tokenizer.ggml.merges"), _SPLITS[name])
    if kind == "llama":
        scores = metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, GgufArray) or len(scores) < len(tokens):
            raise ModelError(f"{path} has no tokenizer.ggml.scores for its SentencePiece vocabulary")
        unknown = _token_id(path, metadata, "tokenizer.ggml.unknown_token_id", len(tokens))
        add_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        return _sentencepiece(tokens, types, scores.values(), unknown=unknown, add_space=add_space)
    raise ModelError(
        f"{path}: tokenizers of kind {kind!r} are not read (known: gpt2, llama); use the model's safetensors directory"
    )


def _byte_level(tokens: Sequence[str], merges: Sequence[str], split: _Split) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=split.whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    steps += [
        pre_tokenizers.Split(Regex(split.words), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], *, unknown: int | None, add_space: bool
) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab,
        merges=_merges_from_scores(vocab, scores, types),
        unk_token=tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    scheme = "first" if add_space else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if add_space else steps)
    return tokenizer


def _merges_from_scores(
    vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose whole has the best score; equal scores are settled by the longer left part,
    then the longer right part. Control and byte tokens are never the result of a merge."""
    merges: list[tuple[float, int, int, str, str]] = []
    for token, index in vocab.items():
        if types[index] not in (_NORMAL, _USER_DEFINED):
            continue
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = sorted((vocab[a], vocab[b], a, b) for a, b in halves if a in vocab and b in vocab)
        merges += [(-scores[index], -len(a), -len(b), a, b) for _, _, a, b in known]
    merges.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in merges]


def _add_whole_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens and user-defined tokens are matched as a whole; only the former are special."""
    controls = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    defined = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED and token]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])
