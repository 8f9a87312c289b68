"""From text to token ids and back, as the checkpoint says: its tokenizer, its chat template (run in a sandbox), its end
tokens. Reads Hugging Face directories and GGUF files without importing transformers. Content never encodes to control
tokens, and sampled ids are never encoded again."""

from tithe.renderers.renderer import ChatRenderer, load_renderer

__all__ = ["ChatRenderer", "load_renderer"]
