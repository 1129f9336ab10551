"""Small tokenizers of every kind that language models come with, trained here in milliseconds."""

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind it at all.",
    "A cross-dock is the terminal where inbound freight goes straight to outbound trucks without being stored.",
    "Der schnelle braune Fuchs springt über den faulen Hund. Größe, Maß und Übel.",
    "素早い茶色の狐がのろまな犬を飛び越える。日本語のテキスト。",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "emoji 🙂🙃👩‍👩‍👧‍👦🇩🇪 and symbols € ∑ ≠ ✓",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x}\n\n\n        # eight spaces\t\ttabs",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'forbidden' %}{{ raise_exception('no such role: forbidden') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}:{{ call.function.arguments.x }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if mood %}({{ mood }}){% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHATML)


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2, Llama 3, Qwen, SmolLM2."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return wrapped(backend)


def _bytes() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece(*, strips: bool) -> PreTrainedTokenizerFast:
    """Llama 2 and Mistral (which strip a text's leading space), Gemma (which does not)."""
    backend = Tokenizer(models.BPE())
    steps: list[Any] = [normalizers.Prepend("▁")] if strips else []
    normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training only: SentencePiece has none
    trainer = trainers.BpeTrainer(vocab_size=300, limit_alphabet=70, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    learnt = json.loads(backend.to_str())["model"]
    vocab = {token: i for i, token in enumerate([*_bytes(), *learnt["vocab"]])}
    merges = [tuple(merge) for merge in learnt["merges"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizer
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if strips else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return wrapped(backend)


def metaspace() -> PreTrainedTokenizerFast:
    """A Unigram model whose decoder looks at a token's place in the text."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return wrapped(backend)


def wordpiece() -> PreTrainedTokenizerFast:
    """A decoder that puts spaces between words."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return wrapped(backend)


TOKENIZERS = {
    "byte_level": byte_level,
    "llama2": lambda: sentencepiece(strips=True),
    "gemma": lambda: sentencepiece(strips=False),
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}
