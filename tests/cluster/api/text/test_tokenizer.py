"""Streamed text equals decoded text, one token at a time; stop strings are found wherever tokens cut them."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.api.body.stop_strings import StopStrings, StopTable
from crossdock.cluster.api.text.tokenizer import ModelTokenizer, TextStream

ALL = ["byte_level", "llama2", "gemma", "metaspace", "wordpiece"]
BY_BYTES = ["byte_level", "llama2", "gemma"]
# The tokenizers are shared by all examples; nothing changes them.
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
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


@relaxed
@given(data=st.data(), skip=st.booleans())
def test_any_byte_level_ids_stream_exactly(tokenizers: Tokenizers, data: st.DataObject, skip: bool) -> None:
    backend = tokenizers["byte_level"]
    ids = data.draw(st.lists(st.integers(0, len(backend) + 3), max_size=60))  # past the end: a padded embedding
    tokenizer = ModelTokenizer(backend)
    parts = streamed(tokenizer, ids, skip=skip)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)


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


@pytest.mark.parametrize("kind", ["metaspace", "wordpiece"])
@relaxed
@given(data=st.data(), skip=st.booleans())
def test_any_ids_stream_exactly_through_window(
    tokenizers: Tokenizers, kind: str, data: st.DataObject, skip: bool
) -> None:
    backend = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, len(backend) - 1), max_size=40))
    tokenizer = ModelTokenizer(backend)
    assert "".join(streamed(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_decoders_of_language_models_have_token_bytes(tokenizers: Tokenizers) -> None:
    by_bytes = {kind for kind in ALL if ModelTokenizer(tokenizers[kind]).has_token_bytes}
    assert by_bytes == set(BY_BYTES)


@pytest.mark.parametrize("kind", BY_BYTES)
def test_half_character_is_held_back(tokenizers: Tokenizers, kind: str) -> None:
    tokenizer = ModelTokenizer(tokenizers[kind])
    family = "👩‍👩‍👧‍👦"
    ids = tokenizer.encode(family * 2, add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    shown = ""
    for token in ids:
        part = detokenizer.add(token)
        assert "\ufffd" not in part
        shown += part
        assert (family * 2).startswith(shown.lstrip())
    assert shown.lstrip() == family * 2


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


def test_special_tokens_are_shown_only_if_asked(tokenizers: Tokenizers) -> None:
    tokenizer = ModelTokenizer(tokenizers["byte_level"])
    ids = tokenizer.encode("<|im_start|>dog<tool><|im_end|>")
    assert "".join(streamed(tokenizer, ids)) == "dog<tool>"
    assert "".join(streamed(tokenizer, ids, skip=False)) == "<|im_start|>dog<tool><|im_end|>"


@pytest.mark.parametrize("kind", ["byte_level", "llama2"])
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


def first_hit(whole: str, stop: list[str]) -> tuple[int, str] | None:
    """Return, by brute force, the earliest end and the longest stop string that ends there."""
    for end in range(1, len(whole) + 1):
        hits = [s for s in stop if whole[:end].endswith(s)]
        if hits:
            return end, max(hits, key=len)
    return None


few = st.text("ab", min_size=1, max_size=4)


@given(st.lists(st.text("abc", max_size=5), max_size=12), st.lists(few, min_size=1, max_size=3), st.booleans())
def test_stop_string_is_found_wherever_tokens_cut_it(pieces: list[str], stop: list[str], include: bool) -> None:
    shown, stopped = run(pieces, stop, include_stop=include)
    whole = "".join(pieces)
    hit = first_hit(whole, stop)
    if hit is None:
        assert (shown, stopped) == (whole, None)
    else:
        end, which = hit
        assert stopped == which
        assert shown == whole[: end if include else end - len(which)]


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
    shown, stopped = run(list(whole), stop, min_tokens=min_tokens)
    expected = next(
        (
            (end, max((s for s in stop if whole[:end].endswith(s)), key=len))
            for end in range(min_tokens + 1, len(whole) + 1)
            if any(whole[:end].endswith(s) for s in stop)
        ),
        None,
    )
    if expected is None:
        assert (shown, stopped) == (whole, None)
    else:
        assert stopped == expected[1]
        assert shown == whole[: expected[0] - len(expected[1])]


def test_overlapping_stop_strings_end_at_first_complete() -> None:
    assert run(["xaab"], ["aab"]) == ("x", "aab")
    assert run(["aa", "aab"], ["aab"]) == ("aa", "aab")
    assert run(["abc"], ["abc", "b"]) == ("a", "b")  # the first to be complete
    assert run(["abc"], ["c", "bc"]) == ("a", "bc")  # of two that end together, the longer
    assert run(["tail\n\n", "Us"], ["\n\nUser:"]) == ("tail\n\nUs", None)  # released at the end


def test_long_stop_string_costs_no_more_per_character() -> None:
    stops = StopStrings(StopTable(["a" * 4000 + "b"]))
    start = time.thread_time()
    assert stops.find("a" * 50_000) is None
    assert stops.held == 4000
    assert time.thread_time() - start < 2.0


# -- encoding and templates --------------------------------------------------------------------------------------------


def test_encode_knows_special_tokens(tokenizers: Tokenizers) -> None:
    tokenizer = ModelTokenizer(tokenizers["byte_level"])
    assert tokenizer.decode(tokenizer.encode("<|im_start|>user")) == "<|im_start|>user"
    assert len(tokenizer.encode("<|im_start|>")) == 1
    assert tokenizer.longest_token >= len("<|endoftext|>")
    assert tokenizer.vocabulary_name(tokenizer.encode(" the")[0]).startswith("Ġ")


def test_encode_in_several_threads_is_consistent(tokenizers: Tokenizers) -> None:
    """Long texts are encoded in threads while short ones are encoded in the event loop."""
    tokenizer = ModelTokenizer(tokenizers["byte_level"])
    with ThreadPoolExecutor(4) as threads:
        long = threads.map(tokenizer.encode, ["The lazy dog. " * 5000] * 12)
        short = [tokenizer.encode("dog") for _ in range(2000)]
        assert len({len(ids) for ids in long}) == 1
    assert all(ids == short[0] for ids in short)


def test_chat_is_rendered_by_template_of_model(tokenizers: Tokenizers) -> None:
    tokenizer = ModelTokenizer(tokenizers["byte_level"])
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(chat) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(chat, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.render_chat(chat, variables={"mood": "glad"}).endswith("(glad)<|im_start|>assistant\n")
    assert tokenizer.render_chat(chat, chat_template="{{ messages[0].content }}!") == "Hi!"
    half = [*chat, {"role": "assistant", "content": "Well,"}]
    rendered = tokenizer.render_chat(half, add_generation_prompt=False, continue_final_message=True)
    assert rendered.endswith("<|im_start|>assistant\nWell,")
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert '"weather"' in tokenizer.render_chat(chat, tools=tools)


def test_template_error_is_value_error(tokenizers: Tokenizers) -> None:
    tokenizer = ModelTokenizer(tokenizers["byte_level"])
    with pytest.raises(ValueError, match="no such role"):
        tokenizer.render_chat([{"role": "forbidden", "content": ""}])
    with pytest.raises(ValueError, match="refuses"):
        tokenizer.render_chat([{"role": "user", "content": ""}], chat_template="{{ 1 / 0 }}")
    with pytest.raises(ValueError, match="refuses"):
        tokenizer.render_chat([{"role": "user", "content": ""}], chat_template="{% if %}")


def test_chat_without_template_is_value_error(tokenizers: Tokenizers) -> None:
    backend = PreTrainedTokenizerFast(tokenizer_object=tokenizers["byte_level"].backend_tokenizer)
    tokenizer = ModelTokenizer(backend)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


def test_load_reads_directory(tokenizers: Tokenizers, tmp_path: Path) -> None:
    tokenizers["byte_level"].save_pretrained(tmp_path)
    tokenizer = ModelTokenizer.load(tmp_path)
    assert tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.encode("Größe 🙂")) == "Größe 🙂"
