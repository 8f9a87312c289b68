"""Hugging Face directory (config.json, safetensors, tokenizer.json) → `Checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tithe.arch.checkpoint import Checkpoint, GenerationInfo
from tithe.arch.compound import make_entries
from tithe.arch.files import MAX_JSON_BYTES, quote, read_json
from tithe.arch.quantization import read_quantization
from tithe.arch.rope import rope_parameters
from tithe.arch.safetensors_file import SafetensorsTensor, read_safetensors
from tithe.arch.spec import ArchSpec
from tithe.errors import ModelError

PICKLE_SUFFIXES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
PICKLE_MESSAGE: Final = (
    "it is a pickle, which can run any code when it is loaded, and is refused; use the model's safetensors files "
    "(many repositories offer both, or convert it in a sandbox with safetensors' convert.py)"
)
ConfigCheck = Callable[[Mapping[str, Any]], None]
"""Raises `ModelError` for a config that the caller cannot use; asked before tensors are looked at."""

SCORE: Final = "score.weight"
"""The head of a sequence classifier, as transformers names it."""

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_BUFFERS: Final = (".rotary_emb.inv_freq",)
"""Constants that old checkpoints saved beside the weights; they are computed from the config."""


def has_weights(directory: Path) -> bool:
    """True when a directory has weights, of whatever kind, beside its config."""
    kinds = {".safetensors", *PICKLE_SUFFIXES}
    return (directory / _INDEX).is_file() or any(entry.suffix in kinds for entry in directory.iterdir())


def read_hf_checkpoint(directory: Path, check: ConfigCheck) -> Checkpoint:
    """Read a directory whose config passes `check`. Raises `ModelError`; touches no tensor byte."""
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json; give the directory of a Hugging Face checkpoint")
    config = read_json(directory / "config.json")
    files = {name: tensor for name, tensor in _find_tensors(directory).items() if not name.endswith(_BUFFERS)}
    resolved = _resolve(config, files, check)
    entries = make_entries(files, ArchSpec.from_config(resolved), read_quantization(resolved))
    return Checkpoint(directory, resolved, entries, _generation(directory, config))


def read_hf_classifier(directory: Path, check: ConfigCheck) -> tuple[Checkpoint, SafetensorsTensor]:
    """Read a sequence classifier's directory: the decoder below its head, which gives no tokens (it counts as tied),
    and the head's weight [labels, hidden]. Raises `ModelError`; touches no tensor byte."""
    config = {**read_json(directory / "config.json"), "tie_word_embeddings": True}
    files = {name: tensor for name, tensor in _find_tensors(directory).items() if not name.endswith(_BUFFERS)}
    head = files.pop(SCORE, None)
    if head is None:
        raise ModelError(f"{directory} has no tensor {SCORE}: it is no sequence classifier with such a head")
    resolved = _resolve(config, files, check)
    entries = make_entries(files, ArchSpec.from_config(resolved), read_quantization(resolved))
    return Checkpoint(directory, resolved, entries, _generation(directory, config)), head


def _resolve(config: Mapping[str, Any], files: Mapping[str, SafetensorsTensor], check: ConfigCheck) -> dict[str, Any]:
    """The config with every value that has a default written out, so that all readers agree."""
    embedding = files.get("model.embed_tokens.weight")
    config = {**config, **({"vocab_size": embedding.shape[0]} if embedding and embedding.shape else {})}
    check(config)
    spec = ArchSpec.from_config(config)
    resolved = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    heads = {} if spec.latent else {"num_key_value_heads": spec.n_kv_heads, "head_dim": spec.head_dim}
    return (
        resolved
        | heads
        | {
            "rms_norm_eps": spec.rms_norm_eps,
            "tie_word_embeddings": spec.tie_word_embeddings,
            "rope_parameters": rope_parameters(config),
        }
    )


def _find_tensors(directory: Path) -> dict[str, SafetensorsTensor]:
    """All tensors of the directory by name, from the index when there is one."""
    if (directory / _INDEX).is_file():
        return _read_shards(directory, read_json(directory / _INDEX).get("weight_map"))
    if (directory / _SINGLE).is_file():
        return read_safetensors(directory / _SINGLE)
    pickles = sorted(entry.name for entry in directory.iterdir() if entry.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelError(f"{directory} holds its weights only as {quote(pickles[0])}: {PICKLE_MESSAGE}")
    raise ModelError(f"{directory} has neither {_SINGLE} nor {_INDEX}; fetch the complete checkpoint")


def _read_shards(directory: Path, weight_map: object) -> dict[str, SafetensorsTensor]:
    """The tensors an index names, each from its shard. Shard names may not leave the directory."""
    where = directory / _INDEX
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{where} has no weight_map from tensor names to file names")
    shards: dict[str, dict[str, SafetensorsTensor]] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or Path(name).suffix != ".safetensors":
            reason = PICKLE_MESSAGE if Path(name).suffix in PICKLE_SUFFIXES else "only safetensors beside it are read"
            raise ModelError(f"{where} names the file {quote(name)}: {reason}")
        shards[name] = read_safetensors(directory / name)
    absent = [tensor for tensor, shard in weight_map.items() if tensor not in shards[shard]]
    if absent:
        raise ModelError(f"{where}: {quote(absent[0])} is not in {weight_map[absent[0]]}; fetch the checkpoint again")
    return {tensor: shards[shard][tensor] for tensor, shard in weight_map.items()}


def _generation(directory: Path, config: Mapping[str, Any]) -> GenerationInfo:
    """End ids from generation_config.json (else config.json) and the tokenizer's own; the chat template as text."""
    generation = _optional_json(directory / "generation_config.json")
    settings = _optional_json(directory / "tokenizer_config.json")
    tokenizer = _optional_json(directory / "tokenizer.json")
    tokens = _token_table(tokenizer)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = {token for token in (eos if isinstance(eos, list) else [eos]) if type(token) is int}
    bos = generation.get("bos_token_id", config.get("bos_token_id"))
    own = settings.get("eos_token")
    own = own.get("content") if isinstance(own, dict) else own
    if isinstance(own, str) and own in tokens:
        ids.add(tokens[own])
    return GenerationInfo(
        eos_token_ids=frozenset(ids),
        bos_token_id=bos if type(bos) is int else None,
        chat_template=_chat_template(directory, settings),
        tokenizer_path=directory,
        tokenizer_size=max(tokens.values(), default=-1) + 1 if tokenizer else None,
    )


def _optional_json(path: Path) -> dict[str, Any]:
    """The file's object, or an empty one when there is no such file."""
    return read_json(path) if path.is_file() else {}


def _token_table(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token text → id of a tokenizer.json: its vocabulary (a map, or Unigram's list) and its added tokens."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    tokens: dict[str, int] = {}
    if isinstance(vocab, dict):
        tokens = {text: number for text, number in vocab.items() if type(number) is int}
    elif isinstance(vocab, list):
        tokens = {str(item[0]): number for number, item in enumerate(vocab) if isinstance(item, list) and item}
    extra = tokenizer.get("added_tokens")
    for added in extra if isinstance(extra, list) else []:
        if isinstance(added, dict) and type(added.get("id")) is int:
            tokens[str(added.get("content"))] = added["id"]
    return tokens


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's; of several named templates the one called ``default``."""
    file = directory / "chat_template.jinja"
    if file.is_file() and file.stat().st_size <= MAX_JSON_BYTES:
        return file.read_text(encoding="utf-8", errors="replace")
    template = settings.get("chat_template")
    if isinstance(template, list):
        defaults = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = defaults[0].get("template") if defaults else None
    return template if isinstance(template, str) else None
