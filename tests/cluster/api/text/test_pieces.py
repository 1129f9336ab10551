"""Kept pieces of texts have the ids that the tokenizer gives them within the whole text."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from crossdock.cluster.api.text.pieces import TextPieces
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.small_tokenizers import CORPUS, TOKENIZERS, byte_level

OVERLAPPING = ["<|a|>", "<|a|><|b|>", "|><|", "a"]
FRAGMENTS = st.sampled_from(
    [
        *("<|im_start|>", "<|im_end|>", "<|im_", "start|>", "<|endoftext|>", "<tool>", "<to", "ol>", *OVERLAPPING),
        *(" ", "  ", "\n", "\t", "\u00a0", "", "12", "9", "e", "\u0301", "é", "ﬁ", "Å", "\u200d", "\x00", "'s", "'"),
        *("system\n", "assistant\n", "the", " the", "🙂", "👩‍👩‍👧‍👦", "日本", "Größe", "▁", "Ġ", "<0x41>"),
    ]
)
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=4)), max_size=12).map("".join)


def backend(**parts: Any) -> Tokenizer:
    """Make a byte-level tokenizer in which some parts are others."""
    made: Tokenizer = byte_level().backend_tokenizer
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def qwen() -> Tokenizer:
    splits = pre_tokenizers.Split(Regex(r"\p{N}|\s*[\r\n]+|\s+(?!\S)| ?\p{L}+|[^\s\p{L}\p{N}]+"), "isolated")
    steps = [pre_tokenizers.Digits(True), splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return backend(normalizer=normalizers.NFC(), pre_tokenizer=pre_tokenizers.Sequence(steps))


def overlapping() -> Tokenizer:
    made = backend()
    made.add_special_tokens(OVERLAPPING)
    return made


def with_token(**ways: bool) -> Tokenizer:
    made = backend()
    made.add_tokens([AddedToken("<reaches>", normalized=False, **ways)])
    return made


MADE = {"gpt2": backend, "qwen": qwen, "overlapping": overlapping}


@pytest.mark.parametrize("kind", MADE)
def test_ids_of_pieces_are_those_of_the_whole_text(kind: str) -> None:
    made = MADE[kind]()
    pieces = TextPieces.of(made)
    assert pieces is not None

    @given(TEXTS)
    @settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
    def check(text: str) -> None:
        for _ in range(2):  # the second time from what is kept
            assert pieces.encode(text) == made.encode(text, add_special_tokens=False).ids

    check()


REFUSED: dict[str, Callable[[], Tokenizer]] = {
    **{kind: lambda kind=kind: TOKENIZERS[kind]().backend_tokenizer for kind in TOKENIZERS if kind != "byte_level"},
    "lstrip": lambda: with_token(lstrip=True),
    "rstrip": lambda: with_token(rstrip=True),
    "single word": lambda: with_token(single_word=True),
    "dropout": lambda: backend(model=models.BPE(dropout=0.1)),
    "prefix space": lambda: backend(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace": lambda: backend(pre_tokenizer=pre_tokenizers.Metaspace()),
    "no pre-tokenizer": lambda: backend(pre_tokenizer=None),
    "normalizer": lambda: backend(normalizer=normalizers.Prepend("x")),
    "special tokens as text": lambda: backend(encode_special_tokens=True),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_tokenizer_whose_pieces_may_differ_is_refused(kind: str) -> None:
    assert TextPieces.of(REFUSED[kind]()) is None


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("adds", [False, True])
def test_text_has_the_same_ids_whether_its_pieces_are_kept(kind: str, adds: bool) -> None:
    tokenizer = ModelTokenizer(TOKENIZERS[kind]())
    for text in (*CORPUS, "<|im_start|>user\nthe dog<|im_end|>\n<tool> <|im_start|>assistant\n", ""):
        whole = tokenizer.encode(text, add_special_tokens=adds)
        for _ in range(2):
            assert tokenizer.encode(text, add_special_tokens=adds, salt="") == whole


def test_kept_pieces_are_the_recent_ones_within_their_bytes() -> None:
    made = Counting(backend())
    pieces = TextPieces(made, {"<|im_end|>": 1}, most_bytes=20_000)
    for number in range(1000):
        pieces.encode(f"always<|im_end|>text {number}")
        assert pieces.num_bytes <= 20_000
    assert made.texts.count("always") == 1
    for number in (999, 0):
        pieces.encode(f"text {number}")
    assert [made.texts.count(f"text {number}") for number in (999, 0)] == [1, 2]
    pieces.encode("x" * 20_000)  # too long to be kept
    before = len(made.texts)
    pieces.encode("always")
    assert len(made.texts) == before


def test_texts_with_unlike_salts_share_no_pieces() -> None:
    made = Counting(backend())
    pieces = TextPieces(made, {"<|im_end|>": 1})
    found = [pieces.encode("same<|im_end|>same", salt) for salt in ("a", "b", "a", "")]
    assert found == [found[0]] * 4
    assert made.texts == ["same"] * 3


def test_threads_share_kept_pieces() -> None:
    made = backend()
    pieces = TextPieces(made, {"<|im_end|>": made.token_to_id("<|im_end|>")}, most_bytes=4_000)
    texts = [f"text {number % 50}<|im_end|>{CORPUS[number % len(CORPUS)]}" for number in range(400)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(pieces.encode, texts))
    assert found == [made.encode(text, add_special_tokens=False).ids for text in texts]
    assert 0 <= pieces.num_bytes <= 4_000


class Counting:
    """Keeps the texts that a tokenizer encodes."""

    def __init__(self, made: Tokenizer) -> None:
        self._made = made
        self.texts: list[str] = []

    def encode(self, text: str, **ways: bool) -> Any:
        self.texts.append(text)
        return self._made.encode(text, **ways)
