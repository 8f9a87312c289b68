"""Whether a request or a version can ever be served, and the pages that a request needs."""

from __future__ import annotations

from tithe.errors import AdapterError
from tithe.models import PAGE, Decoder
from tithe.types import GenerateRequest
from tithe.weight_sync import Manifest


def check_origin(manifest: Manifest, decoder: Decoder) -> None:
    """Raise `AdapterError` for a version that was trained on another base, or in other arithmetic."""
    if manifest.base_checksum != decoder.checksum:
        raise AdapterError(f"{manifest.name} was trained on another base than this one: set model.path to its base")
    mode = decoder.options.numeric_mode
    if manifest.numeric_mode != mode:
        raise AdapterError(
            f"{manifest.name} was trained under {manifest.numeric_mode} and this engine computes under {mode}, "
            f"which is another policy: set model.base_dtype and model.compute_dtype as in training"
        )


def own_pages(request: GenerateRequest) -> int:
    """KV pages behind the prompt's shared ones that a request may come to need."""
    n = len(request.prompt_ids)
    return -(-(n + request.params.max_new_tokens) // PAGE) - n // PAGE


def problem_of(request: GenerateRequest, decoder: Decoder, pages: int, *, can_decode: bool) -> str | None:
    """Why an engine with so many KV pages could never serve a request; None when it can."""
    p, n = request.params, len(request.prompt_ids)
    if n == 0 or p.max_new_tokens < 1:
        return "a request needs at least one prompt token and room for one new token"
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= decoder.embedding.rows:
        return f"a prompt token lies outside the vocabulary of {decoder.embedding.rows}"
    if n + p.max_new_tokens > decoder.max_context:
        return (
            f"prompt and completion may take {n + p.max_new_tokens} tokens, model.max_context is {decoder.max_context}"
        )
    if -(-n // PAGE) + own_pages(request) > pages:
        return f"the request may need more than all {pages} KV pages: raise engine.kv_memory_mib"
    if p.stop_strings and not can_decode:
        return "stop strings need an engine that was given a decoder of tokens"
    return None
