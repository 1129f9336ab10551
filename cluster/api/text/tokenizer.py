"""Text and tokens: encoding, chat templates, and tokens back into text one at a time.

A token has no text of its own: characters and stop strings may span tokens. With the decoders that language models
use, a token does have *bytes* of its own. So detokenising is a table of bytes and an incremental UTF-8 decoder, exact
and O(1) per token; for other decoders a sliding window of tokens is decoded again and again.
"""

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

from jinja2 import TemplateSyntaxError

from crossdock.cluster.api.body.stop_strings import StopStrings, StopTable
from crossdock.cluster.api.text.pieces import TextPieces
from crossdock.cluster.api.text.tokenizer_fields import class_with_code, log_passed_over
from crossdock.workers.model.weights.untrusted import naming

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ONE_EACH = "crossdock.one_each"
# Like the ByteFallback decoder: one U+FFFD for every byte that belongs to no character.
codecs.register_error(_ONE_EACH, lambda error: ("\ufffd" * (error.end - error.start), error.end))  # type: ignore[attr-defined]
_NO_TEMPLATE = "this model has no chat template, so messages cannot be turned into a prompt; --chat-template gives one"
_PROBE = "crossdock-probe"  # a text that no chat template writes by itself
_MOST_WAITING = 16  # tokens that together have no text yet
_BORDER = 64  # characters of two texts that tell whether a word reaches from one into the other
_PRIMING = 4  # tokens; no UTF-8 character is longer than four bytes


class Detokenizer(Protocol):
    """Turns tokens into text as they come. `add` returns whole characters only; `flush` returns what is incomplete."""

    def add(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class ModelTokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.takes_parts = False  # the chat template reads the content of messages as a list of parts
        self._special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._bytes = _TokenBytes.of(tokenizer)
        tokenizer.encode("", verbose=False)  # sets how the backend truncates, pads and splits: as for any later text
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self._pieces = TextPieces.of(self._backend) if tokenizer.is_fast else None
        self._adds_special_tokens = tokenizer.num_special_tokens_to_add(pair=False) > 0
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)  # characters; an upper bound

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer of a Hugging Face directory. The log names the fields of its files that are not followed.

        Raises:
            ValueError: there is no tokenizer that can be read, or only one whose code comes with the model.
        """
        from transformers import AutoTokenizer  # late: its process decides before whether transformers may import torch

        # Without `trust_remote_code` transformers would ask on the terminal whether the code may run.
        try:
            with naming(folder, kept=(OSError,)):
                found = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except ValueError as error:
            if (asked := class_with_code(folder)) is None:
                raise
            raise ValueError(
                f"{folder}: tokenizer_config.json asks for {asked}, a class whose code comes with the model and is not "
                f"run; name a directory that has a tokenizer.json with --tokenizer"
            ) from error
        log_passed_over(folder, found)
        return cls(found)

    @property
    def last_token_id(self) -> int:
        """The largest token id that a text can be encoded to."""
        return max(self._tokenizer.get_vocab().values(), default=0)

    def set_chat_template(self, template: str) -> None:
        """Use `template` for all chats. Raises ValueError if it is not a template."""
        self._tokenizer.chat_template = template
        try:
            self._tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno} is not Jinja: {error.message}") from None
        except Exception:  # a correct template may refuse this chat
            return

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def loses_strings(self) -> bool:
        """Return whether the chat template shows a content in parts, and loses one that is a string."""
        shown = []
        for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
            try:
                shown.append(_PROBE in self.render_chat([{"role": "user", "content": content}]))
            except ValueError:
                shown.append(False)
        return shown == [False, True]

    def encode(self, text: str, *, add_special_tokens: bool = True, salt: str | None = None) -> list[int]:
        """Return the tokens of a text. `salt`: keep those of its pieces for texts with the same one, as chats do."""
        if salt is not None and self._pieces is not None and not (add_special_tokens and self._adds_special_tokens):
            return self._pieces.encode(text, salt)
        if self._backend is not None:  # in half the time that transformers' own way takes
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    @cached_property
    def frame(self) -> tuple[int, int]:
        """How many tokens the tokenizer puts before a text, and how many after it, such as BOS and EOS."""
        plain = self.encode("a", add_special_tokens=False)
        framed = self.encode("a")
        before = _place(plain, framed, 0)
        return before, len(framed) - len(plain) - before

    @cached_property
    def pair_frame(self) -> tuple[list[int], list[int], list[int]]:
        """The tokens that the tokenizer puts before, between and after two texts that belong together."""
        left = self.encode("a", add_special_tokens=False)
        right = self.encode("b", add_special_tokens=False)
        both: list[int] = self._tokenizer.encode("a", "b", verbose=False)
        first = _place(left, both, 0)
        second = _place(right, both, first + len(left))
        return both[:first], both[first + len(left) : second], both[second + len(right) :]

    def divides(self, left: str, right: str) -> bool:
        """Return whether the tokens of two texts together are those of each.

        No word may reach across their border, and none may change for what stands beyond it: empty lines may.
        """
        if self._pieces is None or self._backend is None:
            return False
        end, start = left[-_BORDER:], right[:_BORDER]
        apart = [*self._word_ends(end), *(len(end) + place for place in self._word_ends(start))]
        return self._word_ends(end + start) == apart

    def _word_ends(self, text: str) -> list[int]:
        """Return where the words end in which the tokenizer divides a text before all else. The tokenizer has some."""
        assert self._backend is not None
        return [place for _, (_, place) in self._backend.pre_tokenizer.pre_tokenize_str(text)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if self._backend is not None:  # without transformers' checks of what kind of array the ids are
            text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        else:
            ways: dict[str, Any] = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
            text = self._tokenizer.decode(list(token_ids), **ways)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds in the middle of a text."""
        return self._bytes[token_id] if self._bytes is not None else self.decode([token_id]).encode()

    def vocabulary_name(self, token_id: int) -> str:
        """Return the token as the vocabulary writes it (`Ġthe`, `▁the`)."""
        name: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return name or ""

    def template_for(self, given: str | None, *, has_tools: bool, has_documents: bool) -> str:
        """Return the chat template of a request. `given`: its own, or the name of one of the model's templates.

        Of a model's named templates, those of tools and of documents are for requests that have them. Raises ValueError
        where the model has no template for the request.
        """
        own = self._tokenizer.chat_template
        if not isinstance(own, dict):
            if given is None and not own:
                raise ValueError(_NO_TEMPLATE)
            return str(own) if given is None else given
        if given is not None:
            return str(own.get(given, given))
        name = "tool_use" if has_tools and "tool_use" in own else "default"
        if has_documents and not template_reads(own.get(name, ""), "documents"):
            reading = [each for each, text in own.items() if template_reads(text, "documents")]
            fitting = [each for each in reading if not has_tools or template_reads(own[each], "tools")]
            name = next(iter(fitting), name)
        if name not in own:
            listed = ", ".join(map(repr, own))
            raise ValueError(f"none of this model's chat templates is the default one: 'chat_template' may be {listed}")
        return str(own[name])

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a chat. Raises ValueError without a template, or where the template raises anything."""
        if chat_template is None and not self.has_chat_template:
            raise ValueError(_NO_TEMPLATE)
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(variables or {}),
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return text

    @property
    def chat_template(self) -> str:
        """The chat template, or all named ones together; empty without any."""
        template = self._tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    def added_tokens(self) -> dict[str, int]:
        """Return the id of each token that was added to the vocabulary, by its text."""
        return {token.content: i for i, token in self._tokenizer.added_tokens_decoder.items()}

    def special_tokens(self) -> dict[str, int]:
        """Return the id of each special token, by its text."""
        return {token.content: i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}

    def detokenizer(
        self, *, after: Sequence[int] = (), skip_special_tokens: bool = True, shown: Mapping[int, str] | None = None
    ) -> Detokenizer:
        """Return a detokenizer for a text that follows the tokens of `after`; without them, for a text from its start.

        The text of the first output tokens depends on the prompt: some tokenizers drop a text's leading space, and a
        prompt may end in half a character. `shown`: the text of special tokens that are shown in any case.
        """
        skip = self._special if skip_special_tokens else frozenset()
        detokenizer: Detokenizer
        if self._bytes is None:
            detokenizer = _WindowDetokenizer(self.decode, skip, after[-_PRIMING:])
        else:
            detokenizer = _ByteDetokenizer(self._bytes, skip, after[-_PRIMING:])
        return _ShowingDetokenizer(detokenizer, shown) if shown else detokenizer


def _place(part: Sequence[int], whole: Sequence[int], start: int) -> int:
    """Return where tokens stand among others."""
    for place in range(start, len(whole) - len(part) + 1):
        if whole[place : place + len(part)] == part:
            return place
    raise ValueError(f"the tokenizer writes {list(part)} in another text as {list(whole)}")


def template_reads(template: str, variable: str) -> bool:
    """Return whether a chat template mentions a variable."""
    return re.search(rf"\b{variable}\b", template) is not None


class TextStream:
    """The text of one output that may be shown: whole characters, and no beginning of a stop string.

    Stop strings count after `min_tokens` tokens. When one is found, `stopped` holds its text and the stream is over.
    """

    __slots__ = ("_detokenizer", "_held", "_include", "_min_tokens", "_num_tokens", "_stops", "num_chars", "stopped")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopTable | None = None,
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = None if stops is None else StopStrings(stops)
        self._include = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self.num_chars = 0  # detokenised so far, shown or not
        self.stopped: str | None = None

    def add(self, token_id: int) -> str:
        text = self._detokenizer.add(token_id)
        self.num_chars += len(text)
        self._num_tokens += 1
        if self._stops is None or not text:
            return text
        hit = self._stops.find(text, ignore=self._num_tokens <= self._min_tokens)
        end = len(self._held)
        text = self._held + text
        if hit is None:
            end = len(text) - self._stops.held
            self._held = text[end:]
            return text[:end]
        position, self.stopped = hit
        end += position if self._include else position - len(self.stopped)
        self._held = ""
        return text[:end]

    def finish(self) -> str:
        """Return the text held back, at the end of the output. Half a character is not shown even now."""
        text = self._held
        self._held = ""
        return text


class _TokenBytes(dict[int, bytes]):
    """The bytes of every token, computed at first use."""

    def __init__(
        self, name: Callable[[int], str | None], rule: Callable[[str], bytes], errors: str, strip: tuple[str, int]
    ) -> None:
        super().__init__()
        self._name = name
        self._rule = rule
        self.errors = errors  # handler for undecodable bytes
        self.strip = strip  # a character, and how many of them a text loses at its start

    def __missing__(self, token_id: int) -> bytes:
        name = self._name(token_id)
        raw = self[token_id] = self._rule(name) if name is not None else b""
        return raw

    @classmethod
    def of(cls, tokenizer: Any) -> Self | None:
        """Return None for a decoder whose tokens have no bytes of their own."""
        if not tokenizer.is_fast:
            return None
        backend = tokenizer.backend_tokenizer
        if backend.decoder is None:
            return None  # its tokens are joined by spaces
        decoder: Any = json.loads(backend.decoder.__getstate__())
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(backend.id_to_token, _byte_level, "replace", ("", 0))
        # SentencePiece: spaces are written as another character, rare characters as byte tokens
        if "Fuse" not in kinds or not {"Replace", "ByteFallback", "Fuse", "Strip"}.issuperset(kinds):
            return None
        replace: dict[str, str] = {}
        strip: tuple[str, int] = ("", 0)
        for i, step in enumerate(steps):
            if step["type"] == "Replace":
                pattern = step["pattern"].get("String", "")
                if len(pattern) != 1:
                    return None  # might match across tokens
                replace[pattern] = step["content"]
            elif step["type"] == "Strip":
                if step["stop"] or strip[1] or "Fuse" not in kinds[:i]:
                    return None  # strips every token, or the end
                strip = (step["content"], step["start"])
        return cls(backend.id_to_token, _sentencepiece(replace, "ByteFallback" in kinds), _ONE_EACH, strip)


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's way to write any byte as a printable character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(name: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in name])
    except KeyError:  # an added token, written as it is
        return name.encode()


def _sentencepiece(replace: Mapping[str, str], has_byte_tokens: bool) -> Callable[[str], bytes]:
    def piece(name: str) -> bytes:
        if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes([int(match[1], 16)])
        for old, new in replace.items():
            name = name.replace(old, new)
        return name.encode()

    return piece


class _ByteDetokenizer:
    """Decodes the bytes of each token.

    Equals the tokenizer's own decoding except in one case: a partly undecodable run of byte tokens shows the characters
    that it contains, where the ByteFallback decoder, which sees the whole run first, shows none.
    """

    __slots__ = ("_bytes", "_decode", "_skip", "_strip")

    def __init__(self, token_bytes: _TokenBytes, skip: frozenset[int], after: Sequence[int]) -> None:
        self._bytes = token_bytes
        self._skip = skip
        self._strip = token_bytes.strip[1]
        self._decode = codecs.getincrementaldecoder("utf-8")(token_bytes.errors).decode
        for token_id in after:
            self.add(token_id)

    def add(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        text = self._decode(self._bytes[token_id])
        if self._strip and text:
            n = min(self._strip, len(text) - len(text.lstrip(self._bytes.strip[0])))
            self._strip = self._strip - n if n == len(text) else 0
            text = text[n:]
        return text

    def flush(self) -> str:
        return self._decode(b"", True)


class _ShowingDetokenizer:
    """Shows some tokens by texts of their own, and the others by another detokenizer."""

    __slots__ = ("_detokenizer", "_shown")

    def __init__(self, detokenizer: Detokenizer, shown: Mapping[int, str]) -> None:
        self._detokenizer = detokenizer
        self._shown = shown

    def add(self, token_id: int) -> str:
        text = self._shown.get(token_id)
        return self._detokenizer.add(token_id) if text is None else self._detokenizer.flush() + text

    def flush(self) -> str:
        return self._detokenizer.flush()


class _WindowDetokenizer:
    """Decodes the last few tokens together: the newest token adds the growth of their text.

    The window begins at the token before the last one that gave text, for decoders that look at their left neighbour.
    `tokenizers.DecodeStream` does the same, but has no flush, and waits without end for bytes that become no character.
    """

    __slots__ = ("_decode", "_ids", "_read", "_shown", "_skip")

    def __init__(self, decode: Callable[[Sequence[int]], str], skip: frozenset[int], after: Sequence[int]) -> None:
        self._decode = decode
        self._skip = skip
        self._ids = [token_id for token_id in after if token_id not in skip]
        self._read = len(self._ids)  # ids of `_ids` that are in `_shown`
        self._shown = self._decode(self._ids)

    def add(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        # The wait for the rest of a character ends: what four tokens do not complete is no character.
        # The window of tokens without a text is bounded: each new token decodes the whole window.
        num_waiting = len(self._ids) - self._read
        if (len(text) <= len(self._shown) and num_waiting < _MOST_WAITING) or (
            text.endswith("\ufffd") and num_waiting < _PRIMING
        ):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)
        return new
