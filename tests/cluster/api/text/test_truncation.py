"""Texts and pairs that are cut: the tokens are those of transformers' tokenizers with `truncation=True`."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.api.body.embedding_body import ClassifyRequest
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.request_memory import RequestMemory
from crossdock.cluster.api.text.pairs import PairPrompts
from crossdock.cluster.api.text.prompts import PromptEncoder
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ModelCard
from crossdock.workers.schedule.shares import Shares
from tests.cluster.api.scripted_api import ScriptedDispatcher, refused, serving

TEXT = "The quick brown fox jumps over the lazy dog, and does not mind it at all."
CARD = ModelCard("tiny", 1, 4096, 620, 0)
FRAMES: Mapping[str, tuple[str, str]] = {  # what stands around a text, and around and between two
    "nothing": ("$A", "$A $B"),
    "beginning": ("<|im_start|> $A", "<|im_start|> $A <|im_start|> $B"),
    "end": ("$A <|im_end|>", "$A <|im_end|> $B <|im_end|>"),
    "both": ("<|im_start|> $A <|im_end|>", "<|im_start|> $A <|endoftext|> <|endoftext|> $B <|im_end|>"),
}


@pytest.fixture(scope="module", params=FRAMES)
def framed(tokenizers: dict[str, PreTrainedTokenizerFast], request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """A tokenizer that puts tokens around texts."""
    return with_frame(tokenizers["byte_level"], request.param)


def with_frame(tokenizer: PreTrainedTokenizerFast, name: str) -> PreTrainedTokenizerFast:
    own = deepcopy(tokenizer)
    single, pair = FRAMES[name]
    special = {token: own.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, pair=pair, special_tokens=[*special.items()]
    )
    return own


def of_transformers(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], keep: int, side: str) -> list[int]:
    own = deepcopy(tokenizer)
    own.truncation_side = side
    ids: list[int] = own(*texts, truncation=True, max_length=keep).input_ids
    return ids


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_tokens_around_a_text_stay_where_it_is_cut(framed: PreTrainedTokenizerFast, side: str | None) -> None:
    tokenizer = ModelTokenizer(framed)
    engine = ScriptedDispatcher(tokenizer)
    around = sum(tokenizer.frame)
    with serving(engine, tokenizer, HttpConfig()) as http:
        for keep in (around + 1, 7, 12, 100):
            for path, field, default in (("/v1/completions", "prompt", "left"), ("/v1/embeddings", "input", "right")):
                engine.submissions.clear()
                body = {field: TEXT, "truncate_prompt_tokens": keep, "truncation_side": side}
                http.post(path, json=body)
                wanted = of_transformers(framed, [TEXT], keep, side or default)
                assert engine.submissions[0].prompt_token_ids == wanted
                body = {field: tokenizer.encode(TEXT), "truncate_prompt_tokens": 5, "truncation_side": "right"}
                http.post(path, json=body)
                assert engine.submissions[-1].prompt_token_ids == tokenizer.encode(TEXT)[:5]
        if around == 2:
            answer = http.post("/v1/completions", json={"prompt": TEXT, "truncate_prompt_tokens": 1})
            refused(answer, 400, param="truncate_prompt_tokens")


def test_chat_with_tokens_around_its_text_keeps_them(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    backend = with_frame(tokenizers["byte_level"], "both")
    tokenizer = ModelTokenizer(backend)
    engine = ScriptedDispatcher(tokenizer)
    chat = {"messages": [{"role": "user", "content": TEXT}], "add_special_tokens": True, "truncate_prompt_tokens": 9}
    with serving(engine, tokenizer, HttpConfig()) as http:
        http.post("/v1/chat/completions", json=chat)
    text = tokenizer.render_chat(chat["messages"])  # type: ignore[arg-type]
    assert engine.submissions[0].prompt_token_ids == of_transformers(backend, [text], 9, "left")


async def joined(tokenizer: ModelTokenizer, pairs: Sequence[tuple[str, str]], *keep: Any, **side: Any) -> Any:
    encoder = PromptEncoder(tokenizer, trusts_templates=False)
    body = ClassifyRequest.of({"input": ""}).pooled("last", "")
    makes = PairPrompts(encoder, tokenizer, body, CARD, RequestMemory(Shares(1 << 40), ""), "input", "")
    return [prompt.token_ids for prompt in await makes.joined(pairs, *keep, **side)]


async def test_pairs_are_joined_and_cut_as_transformers_does(framed: PreTrainedTokenizerFast) -> None:
    tokenizer = ModelTokenizer(framed)
    pairs = [(TEXT, "a dog"), ("a dog", TEXT), (TEXT, TEXT[::-1]), ("x", "y")]
    assert await joined(tokenizer, pairs) == [framed(*pair).input_ids for pair in pairs]
    around = sum(map(len, tokenizer.pair_frame))
    for keep in (around, around + 1, around + 2, 9, 14, 23, 400):
        for side in ("left", "right"):
            wanted = [of_transformers(framed, pair, keep, side) for pair in pairs]
            assert await joined(tokenizer, pairs, keep, keeps_end=side == "left") == wanted
    if around:
        with pytest.raises(ApiError, match="truncate_prompt_tokens"):
            await joined(tokenizer, pairs, around - 1)


async def test_pair_beyond_the_context_is_refused_or_cut_to_it(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    tokenizer = ModelTokenizer(with_frame(tokenizers["byte_level"], "both"))
    pair = ("long " * 4000, "short")
    with pytest.raises(ApiError) as error:
        await joined(tokenizer, [pair])
    assert (error.value.param, error.value.code) == ("input", "context_length_exceeded")
    [ids] = await joined(tokenizer, [pair], -1)
    assert len(ids) == CARD.max_model_len - 1
    assert ids[-1] == tokenizer.encode("<|im_end|>")[1]
