"""Streamed text equals decoded text, one token at a time; stop strings are found wherever tokens cut them."""

import time
from concurrent.futures import ThreadPoolExecutor
from inspect import signature

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from crossdock.cluster.api.body.stop_strings import StopStrings, StopTable
from crossdock.cluster.api.http.http_config import NOT_TEMPLATE_VARIABLES
from crossdock.cluster.api.text.tokenizer import ModelTokenizer, TextStream

ALL = ["byte_level", "llama2", "gemma", "metaspace", "wordpiece"]
BY_BYTES = ["byte_level", "llama2", "gemma"]
# The tokenizers are shared by all examples; nothing changes them.
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
words = st.text(
    st.one_of(
        st.characters(codec="utf-8", exclude_characters="▁"),
        st.sampled_from(" \n.e€日本🙂👩‍👩‍👧‍👦🇩🇪é\u0301"),
    ),
    max_size=40,
)

Tokenizers = dict[str, PreTrainedTokenizerFast]


def streamed(
    tokenizer: ModelTokenizer, ids: list[int], *, skip: bool = True, after: list[int] | None = None
) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip, after=after or [])
    return [*(detokenizer.add(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", ALL)
@relaxed
@given(words=words, skip=st.booleans())
def test_streamed_text_equals_decoded_text(tokenizers: Tokenizers, kind: str, words: str, skip: bool) -> None:
    tokenizer = ModelTokenizer(tokenizers[kind])
    ids = tokenizer.encode(words)
    parts = streamed(tokenizer, ids, skip=skip)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)
    if kind == "byte_level":
        assert "".join(parts) == words
    if "\ufffd" not in words and kind in BY_BYTES:
        assert not any("\ufffd" in part for part in parts)


ODD_TEXTS = {  # of characters that are not apart from those beside them
    "marks on one letter": "e" + "\u0301\u0323" * 16_000,
    "letters with many marks each": ("e" + "\u0301\u0302\u0303\u0489" * 10) * 800,
    "right to left and back": "\u202eabc\u202c\u2066def\u2069" * 3200,
    "a word right to left": "\u05d0" * 32_000,
    "emoji joined without end": "\U0001f468\u200d" * 16_000,
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("byte_level", name) for name in ODD_TEXTS), *((kind, "a word right to left") for kind in ALL[1:])],
)
def test_odd_text_takes_time_in_proportion_to_its_length(tokenizers: Tokenizers, kind: str, name: str) -> None:
    """A character takes 1 to 10 µs both ways. A loop over all characters for each character would take 32,000 times as
    long: even at 10 ns a turn that is 320 µs."""
    text, tokenizer, begin = ODD_TEXTS[name], ModelTokenizer(tokenizers[kind]), time.process_time()
    parts = streamed(tokenizer, tokenizer.encode(text))
    assert (time.process_time() - begin) / len(text) < 150e-6
    if kind in BY_BYTES:
        assert "".join(parts) == text


@pytest.mark.parametrize(("kind", "num_beyond"), [("byte_level", 4), ("metaspace", 0), ("wordpiece", 0)])
@relaxed
@given(data=st.data(), skip=st.booleans())
def test_any_ids_stream_exactly(
    tokenizers: Tokenizers, kind: str, num_beyond: int, data: st.DataObject, skip: bool
) -> None:
    """Ids past the end are those of a padded embedding."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizers[kind]) - 1 + num_beyond), max_size=60))
    tokenizer = ModelTokenizer(tokenizers[kind])
    assert "".join(streamed(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@relaxed
@given(data=st.data(), kind=st.sampled_from(["llama2", "gemma"]))
def test_any_sentencepiece_ids_stream_exactly_except_broken_runs(
    tokenizers: Tokenizers, data: st.DataObject, kind: str
) -> None:
    """A partly undecodable run of byte tokens shows the characters that it contains; the decoder shows none."""
    backend = tokenizers[kind]
    whole = st.integers(256, len(backend) - 1).map(lambda token: [token])
    good_run = st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=3).map(lambda t: list(t.encode()))
    bad_run = st.lists(st.integers(0x80, 0xBF), min_size=1, max_size=5)  # no lead byte: no character
    # A run of one kind must not touch a run of the other, or they are one run.
    units = data.draw(st.lists(st.tuples(st.one_of(good_run, bad_run), whole).map(lambda pair: pair[0] + pair[1])))
    ids = [token for unit in units for token in unit]
    tokenizer = ModelTokenizer(backend)
    assert "".join(streamed(tokenizer, ids, skip=False)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", BY_BYTES)
def test_output_continues_text_of_prompt(tokenizers: Tokenizers, kind: str) -> None:
    tokenizer = ModelTokenizer(tokenizers[kind])
    ids = tokenizer.encode("The quick brown fox € and 日本 🙂🙂 dog.", add_special_tokens=False)
    for cut in range(1, len(ids)):
        before = tokenizer.detokenizer()
        prompt = "".join(before.add(token) for token in ids[:cut])
        output = "".join(streamed(tokenizer, ids[cut:], after=ids[:cut]))
        # Half a character at the cut belongs to the output, whole.
        assert prompt + output == tokenizer.decode(ids)


def test_leading_space_is_lost_only_at_start_of_text(tokenizers: Tokenizers) -> None:
    tokenizer = ModelTokenizer(tokenizers["llama2"])
    the = tokenizers["llama2"].convert_tokens_to_ids("▁the")
    end = tokenizers["llama2"].convert_tokens_to_ids("<|im_end|>")
    assert "".join(streamed(tokenizer, [the, the])) == "the the"
    assert "".join(streamed(tokenizer, [end, the])) == "the"
    assert "".join(streamed(tokenizer, [the], after=[the])) == " the"
    assert tokenizer.token_bytes(the) == b" the"


@pytest.mark.parametrize("kind", BY_BYTES)
def test_token_costs_the_same_in_long_text(tokenizers: Tokenizers, kind: str) -> None:
    """Bytes that never become a character are the worst case for a decoder that looks back."""
    tokenizer = ModelTokenizer(tokenizers[kind])
    lead = next(i for i in range(700) if tokenizer.token_bytes(i) == b"\xf0")

    def seconds(count: int) -> float:
        detokenizer = tokenizer.detokenizer()
        start = time.thread_time()
        for _ in range(count):
            detokenizer.add(lead)
        return time.thread_time() - start

    seconds(100)
    short, long = min(seconds(2_000) for _ in range(3)), min(seconds(20_000) for _ in range(3))
    assert long < 40 * short  # 10 if linear, 100 if quadratic


# -- stop strings ------------------------------------------------------------------------------------------------------


class Letters:
    """A detokenizer whose tokens are characters."""

    def add(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


class Pieces:
    """A detokenizer whose tokens are given strings."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def add(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return ""


def run(pieces: list[str], stop: list[str], **options: object) -> tuple[str, str | None]:
    stream = TextStream(Pieces(pieces), StopTable(stop), **options)  # type: ignore[arg-type]
    shown = ""
    for token in range(len(pieces)):
        shown += stream.add(token)
        if stream.stopped is not None:
            return shown, stream.stopped
    return shown + stream.finish(), None


def first_hit(whole: str, stop: list[str], min_tokens: int = 0) -> tuple[int, str] | None:
    """Return, by brute force, the earliest end and the longest stop string that ends there."""
    for end in range(min_tokens + 1, len(whole) + 1):
        hits = [s for s in stop if whole[:end].endswith(s)]
        if hits:
            return end, max(hits, key=len)
    return None


few = st.text("ab", min_size=1, max_size=4)


@given(st.lists(st.text("abc", max_size=5), max_size=12), st.lists(few, min_size=1, max_size=3), st.booleans())
def test_stop_string_is_found_wherever_tokens_cut_it(pieces: list[str], stop: list[str], include: bool) -> None:
    check_hit(run(pieces, stop, include_stop=include), "".join(pieces), first_hit("".join(pieces), stop), include)


def check_hit(found: tuple[str, str | None], whole: str, hit: tuple[int, str] | None, include: bool = False) -> None:
    """Check the shown text and the stop string. `hit`: where the text is to end, and by which string."""
    end, which = hit or (len(whole), None)
    assert found == (whole[: end if include else end - len(which or "")], which)


@given(st.text("abc", max_size=30), st.lists(few, min_size=1, max_size=3))
def test_only_beginning_of_stop_string_is_held_back(whole: str, stop: list[str]) -> None:
    stream = TextStream(Letters(), StopTable(stop))
    shown = ""
    for i, char in enumerate(whole, 1):
        shown += stream.add(ord(char))
        if stream.stopped is not None:
            return
        held = max((n for s in stop for n in range(len(s)) if whole[:i].endswith(s[:n])), default=0)
        assert shown == whole[: i - held]


@given(st.text("ab", max_size=20), st.lists(few, min_size=1, max_size=3), st.integers(0, 20))
def test_stop_string_before_min_tokens_is_ignored(whole: str, stop: list[str], min_tokens: int) -> None:
    check_hit(run(list(whole), stop, min_tokens=min_tokens), whole, first_hit(whole, stop, min_tokens))


def test_long_stop_string_costs_no_more_per_character() -> None:
    def seconds(length: int) -> float:
        stops = StopStrings(StopTable(["a" * length + "b"]))
        start = time.thread_time()
        assert stops.find("a" * 50_000) is None
        assert stops.held == length
        return time.thread_time() - start

    short, long = min(seconds(40) for _ in range(3)), min(seconds(4000) for _ in range(3))
    assert long < 10 * short  # 100 if each character cost the length


# -- encoding and templates --------------------------------------------------------------------------------------------


def test_encode_knows_special_tokens(tokenizers: Tokenizers) -> None:
    tokenizer = ModelTokenizer(tokenizers["byte_level"])
    assert tokenizer.decode(tokenizer.encode("<|im_start|>user")) == "<|im_start|>user"
    assert len(tokenizer.encode("<|im_start|>")) == 1
    assert tokenizer.longest_token >= len("<|endoftext|>")
    assert tokenizer.vocabulary_name(tokenizer.encode(" the")[0]).startswith("Ġ")


def test_text_is_divided_only_where_its_tokens_are_those_of_both_parts(tokenizers: Tokenizers) -> None:
    """Before a word, GPT-2's rule makes one word of all line breaks but the last one; at the end of a text, of all."""
    tokenizer = ModelTokenizer(tokenizers["byte_level"])
    for left, right, divides in (
        ("dogs", " and", True),
        ("dogs.\n", "Question: a", True),
        ("do", "gs", False),
        ("dogs.\n\n", "Question: a", False),
    ):
        assert tokenizer.divides(left, right) == divides
        both = tokenizer.encode(left + right)
        assert (both == tokenizer.encode(left) + tokenizer.encode(right)) or not divides


def test_encode_in_several_threads_is_consistent(tokenizers: Tokenizers) -> None:
    """Long texts are encoded in threads while short ones are encoded in the event loop."""
    tokenizer = ModelTokenizer(tokenizers["byte_level"])
    with ThreadPoolExecutor(4) as threads:
        long = threads.map(tokenizer.encode, ["The lazy dog. " * 5000] * 12)
        short = [tokenizer.encode("dog") for _ in range(2000)]
        assert len({len(ids) for ids in long}) == 1
    assert all(ids == short[0] for ids in short)


def test_chat_without_template_is_value_error(tokenizers: Tokenizers) -> None:
    backend = PreTrainedTokenizerFast(tokenizer_object=tokenizers["byte_level"].backend_tokenizer)
    tokenizer = ModelTokenizer(backend)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


def test_what_transformers_takes_beside_variables_of_a_template_is_no_variable() -> None:
    """A request that could set one of these would get another prompt than its fields say, or an error of Python's."""
    taken = {
        *signature(PreTrainedTokenizerFast.apply_chat_template).parameters,
        *signature(render_jinja_template).parameters,
    }
    assert taken - {"kwargs"} | {"messages"} == NOT_TEMPLATE_VARIABLES
