"""Small GGUF vocabularies made on the spot, with the tokenizer each is made from."""

from __future__ import annotations

import gguf
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = [
    "What is 3 + 4? The answer is 7, isn't it?",
    "def add(a, b):\n    return a + b\n\n\tdone  12345 + 67",
    "Größe, naïve café, 東京 and Ελλάδα — we'll see...",
] * 4

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def splitter(pre):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    words = {"llama-bpe": LLAMA3_WORDS, "qwen2": QWEN2_WORDS}[pre]
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), behavior="isolated"), byte_level])


def byte_level_tokenizer(pre):
    """Trained on TEXT; control tokens first, one user-defined token last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in CONTROLS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return tokenizer


def write_byte_level(path, tokenizer, pre, *, chat_template=None, architecture="llama", n_unused=0, **ids):
    import json

    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [3 if t in CONTROLS else 4 if t == "<think>" else 1 for t in tokens]
    unused = [f"[PAD{i}]" for i in range(n_unused)]
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + unused)
    writer.add_token_types(types + [5] * n_unused)
    writer.add_token_merges(merges)
    finish(writer, chat_template, {"bos": 0, "eos": 2, **ids})


def write_sentencepiece(path, pieces, *, chat_template=None, **ids):
    """`pieces`: (text, score, type), in the order of their ids."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _, _ in pieces])
    writer.add_token_scores([score for _, score, _ in pieces])
    writer.add_token_types([kind for _, _, kind in pieces])
    finish(writer, chat_template, {"bos": 1, "eos": 2, "unknown": 0, **ids})


def finish(writer, chat_template, ids):
    for name, value in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
