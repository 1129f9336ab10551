"""Structured output: whatever the logits are, the text parses, and it may end exactly where the grammar may."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jsonschema
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from crossdock.workers.model.grammar.compiler import GrammarCompiler
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.sampling.sampler import sample
from crossdock.workers.schedule.request.submission import Grammar, SamplingParams

PADDING = 64  # the model's logits are this much wider than the tokenizer

SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "address": {
                "type": "object",
                "properties": {"street": {"type": "string", "maxLength": 12}, "zip": {"type": "integer"}},
                "required": ["street", "zip"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "address"],
        "additionalProperties": False,
    },
    "enum": {
        "type": "object",
        "properties": {
            "color": {"enum": ["rouge", "été", "日本", 'a "quoted" \\ one', 7, None]},
            "on": {"type": "boolean"},
        },
        "required": ["color"],
        "additionalProperties": False,
    },
    "array": {
        "type": "array",
        "minItems": 2,
        "maxItems": 4,
        "items": {
            "type": "object",
            "properties": {"x": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "numbers": {
        "type": "object",
        "properties": {
            "i": {"type": "integer", "minimum": 3, "maximum": 120},
            "f": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        },
        "required": ["i", "f"],
        "additionalProperties": False,
    },
    "reference": {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"const": 1}}}},
        "$ref": "#/$defs/node",
    },
    "either": {"anyOf": [{"type": "string", "pattern": "^[a-zé]{2,9}$"}, {"type": "array", "items": {"type": "null"}}]},
}


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def compiler(model_dir: Path, tokenizer: PreTrainedTokenizerBase) -> GrammarCompiler:
    return GrammarCompiler(model_dir, len(tokenizer) + PADDING)


@pytest.fixture(scope="module")
def closers(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return 1 for tokens that close strings and brackets and for the end token, else 0 [V].

    Without a bias to these, a random walk stays in its first string.
    """
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    ends = [bool(text) and set(text) <= set('"}])x') for text in texts]
    ends[tokenizer.eos_token_id] = True
    return torch.tensor(ends + [False] * PADDING).float()


RandomText: TypeAlias = Callable[[Grammar, int], str]


@pytest.fixture(scope="module")
def random_text(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, closers: torch.Tensor) -> RandomText:
    """Return a function of a grammar and a seed: it returns the text that random logits give under the grammar.

    Tokens past the vocabulary have the highest logits.
    """

    def text_of(grammar: Grammar, seed: int) -> str:
        logits = torch.randn(len(closers), generator=torch.Generator().manual_seed(seed)) * 2
        logits[len(tokenizer) :] = 100
        state, tokens = compiler.compile(grammar), list[int]()
        row = SampleRow(SamplingParams(seed=seed), tokens, 0)
        while not state.finished:
            assert len(tokens) < 300, tokenizer.decode(tokens)
            row.allowed = state.mask()
            (sampled,) = sample((logits + closers * len(tokens) / 5)[None], [row])
            tokens.append(sampled.token_id)
            state.accept(sampled.token_id)
            assert state.error is None
        texts = [token for token in tokens if token != tokenizer.eos_token_id]
        return str(tokenizer.decode(texts, clean_up_tokenization_spaces=False))

    return text_of


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_text_follows_the_schema(name: str, random_text: RandomText) -> None:
    schema = SCHEMAS[name]
    texts = set()
    for seed in range(4):
        text = random_text(Grammar("json_schema", json.dumps(schema)), seed)
        jsonschema.validate(json.loads(text), schema)
        texts.add(text)
    assert len(texts) > 1


@pytest.mark.parametrize("name", SCHEMAS)
def test_forced_tokens_are_those_that_each_mask_allows_alone(
    name: str, compiler: GrammarCompiler, closers: torch.Tensor
) -> None:
    num_forced, is_closer = 0, closers.bool()
    for seed in range(2):
        state, draw = compiler.compile(Grammar("json_schema", json.dumps(SCHEMAS[name]))), random.Random(seed)
        for _ in range(60):
            forced = state.forced()
            masks = state.masks(forced)[: len(forced)]
            assert [mask.nonzero().flatten().tolist() for mask in masks] == [[token_id] for token_id in forced]
            num_forced += len(forced)
            if state.finished:
                break
            allowed = state.mask()
            if draw.random() < 0.5 and (allowed & is_closer).any():
                allowed &= is_closer
            state.accept(draw.choice(allowed.nonzero().flatten().tolist()))
            assert state.error is None
    assert num_forced > 0 or name == "reference", "that one allows any other field"


def test_random_text_of_json_object_is_an_object(random_text: RandomText) -> None:
    for seed in range(4):
        assert isinstance(json.loads(random_text(Grammar("json_object"), seed)), dict)


@pytest.mark.parametrize("pattern", [r"\d{3}-\d{4}", r"(yes|no)(, (sir|madam))?", r"[à-ü]{3,5}!", r"^[a-f]+$"])
def test_random_text_matches_the_regex(pattern: str, random_text: RandomText) -> None:
    for seed in range(4):
        text = random_text(Grammar("regex", pattern), seed)
        assert re.fullmatch(pattern, text), text


def test_choice_grammar_allows_exactly_its_choices(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, random_text: RandomText
) -> None:
    choices = ["north", "north-east", 'a "quoted" \\ one', "日本\n", "<|im_end|>"]
    grammar = Grammar("choice", json.dumps(choices))
    for choice in choices:
        state = compiler.compile(grammar)
        for token_id in tokenizer.encode(choice, split_special_tokens=True):
            assert state.mask()[token_id], (choice, token_id)
            state.accept(token_id)
        assert state.mask()[tokenizer.eos_token_id]
    assert {random_text(grammar, seed) for seed in range(20)} <= set(choices)


def test_random_text_follows_the_lark_grammar(random_text: RandomText) -> None:
    grammar = Grammar("lark", 'start: "(" start ")" | "x"')
    for seed in range(4):
        text = random_text(grammar, seed)
        depth = len(text) // 2
        assert text == "(" * depth + "x" + ")" * depth


def test_end_token_is_allowed_exactly_where_the_grammar_may_end(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    state = compiler.compile(Grammar("regex", "ab?c?"))
    eos = tokenizer.eos_token_id
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    assert not state.mask()[eos]
    assert not state.finished
    state.accept(a)
    assert state.mask()[[eos, b, c]].all()
    assert not state.finished
    state.accept(b)
    assert state.mask()[[eos, c]].all()
    assert not state.mask()[b]
    state.accept(c)
    assert state.mask().nonzero().flatten().tolist() == [eos]
    assert state.finished, "nothing may follow, whether the end token came or not"


def test_accepted_end_token_finishes_the_grammar(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    state = compiler.compile(Grammar("regex", "a+"))
    state.accept(tokenizer.encode("a")[0])
    assert not state.finished
    state.accept(tokenizer.eos_token_id)
    assert state.finished
    assert state.error is None


def test_every_end_token_of_the_model_is_allowed_at_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    eos = {0, tokenizer.eos_token_id}  # SmolLM2's <|endoftext|> and <|im_end|>
    state = GrammarCompiler(tokenizer, len(tokenizer), eos).compile(Grammar("regex", "a?"))
    allowed = set(state.mask().nonzero().flatten().tolist())
    assert allowed == {*eos, tokenizer.encode("a")[0]}


def test_mask_is_as_wide_as_logits(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    mask = compiler.compile(Grammar("regex", "(.|\n)*")).mask()
    assert mask.dtype == torch.bool
    assert mask.shape == (len(tokenizer) + PADDING,)
    assert mask[: len(tokenizer)].sum() > 0.9 * len(tokenizer)
    assert not mask[len(tokenizer) :].any()
    narrow = GrammarCompiler(tokenizer, len(tokenizer) - 100).compile(Grammar("regex", "(.|\n)*"))
    assert torch.equal(narrow.mask(), mask[: len(tokenizer) - 100])


def test_states_of_one_grammar_are_independent(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    grammar = Grammar("regex", "[ab]c")
    first, second = compiler.compile(grammar), compiler.compile(grammar)
    before = second.mask()
    first.accept(tokenizer.encode("a")[0])
    assert torch.equal(second.mask(), before)
    assert torch.equal(compiler.compile(grammar).mask(), before)
    assert not torch.equal(first.mask(), before)


def test_mask_is_not_changed_by_later_steps(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    state = compiler.compile(Grammar("regex", "[ab]c"))
    mask = state.mask()
    copy = mask.clone()
    state.accept(tokenizer.encode("a")[0])
    state.mask()
    assert torch.equal(mask, copy)


def test_json_whitespace_is_limited_to_20_characters(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    state = compiler.compile(Grammar("json_object"))
    state.accept(tokenizer.encode("{")[0])
    newline = tokenizer.encode("\n")[0]
    count = 0
    while count < 30 and state.mask()[newline]:
        state.accept(newline)
        count += 1
    assert count == 20


def test_token_outside_the_mask_sets_error_of_its_state(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    state = compiler.compile(Grammar("regex", "a+"))
    state.accept(tokenizer.encode("b")[0])
    assert state.error is not None
    assert "satisfy the grammar" in state.error
    assert state.finished
    assert state.mask().nonzero().flatten().tolist() == [tokenizer.eos_token_id], "the sampler always has a token"


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", r"[^\s\S]", "no text matches"),
        ("json_schema", "{", "EOF"),
        ("json_schema", "[1]", "object"),
        ("json_schema", '{"type": "objct"}', "objct"),
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
        ("choice", "north", "Expecting value"),
        ("choice", "[]", "one or more"),
        ("choice", '["a", 1]', "strings"),
        ("lark", "start: nowhere", "nowhere"),
        ("ebnf", "", "json_object, json_schema, regex, choice or lark"),
    ],
)
def test_malformed_grammar_is_refused_with_reason(
    kind: str, source: str, reason: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(ValueError, match=f"^grammar: {kind}: (.|\n)*{reason}"):
        compiler.compile(Grammar(kind, source))


def test_schema_true_allows_any_value(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    mask = compiler.compile(Grammar("json_schema", "true")).mask()
    assert all(mask[tokenizer.encode(start)[0]] for start in ('"', "{", "[", "1", "true", "null"))


def test_error_contains_no_text_of_the_request(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    state = compiler.compile(Grammar("regex", "secret.*"))
    for token_id in tokenizer.encode("secret"):
        state.accept(token_id)
    state.accept(tokenizer.encode("\n")[0])
    assert state.error is not None
    assert "secret" not in state.error
