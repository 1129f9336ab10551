"""Patterns of names give what Python's `re` gives, in a bounded number of steps, whatever their shape is."""

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.model.weights.patterns import NamePattern, Steps, TooManySteps

NAMES = [
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.31.mlp.down_proj",
    "model.layers.7.mlp.experts.12.gate_proj",
    "model.language_model.layers.3.self_attn.o_proj",
    "model.visual.blocks.3.attn.qkv",
    "language_model.model.layers.2.self_attn.v_proj",
    "vision_tower.encoder.layers.4.mlp.fc1",
]
PUBLISHED = [  # of adapters and checkpoints, as trainers and compressors write them
    r".*\.(q|k|v|o)_proj",
    r"model\.layers\.(1|2|31)\..*",
    r"^(?!.*visual).*(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)$",
    r"^(language_model|model)(?=\.).*\.(q_proj|v_proj)$",
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj|o_proj"
    r"|gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|"
    r"dense)\.(?:(?:k_proj|v_proj|q_proj|o_proj|gate_proj|up_proj|down_proj)))",
    ".*lm_head",
    r"^model\.layers\.\d+\.mlp\..*",
    ".*self_attn.(q|k|v)_proj$",
    r".*block_sparse_moe\.gate$",
    r"(?i).*LM_HEAD",
    r"(model\.)?(language_model\.)?layers\.[0-9]{1,2}\.(?!self_attn).*",
    r"[^.]+\.visual\..*|.*\.vision_.*",
    r".*(?<!mlp\.experts)\.\d+\.gate_proj",
]


@pytest.mark.parametrize("source", PUBLISHED)
def test_pattern_of_a_published_file_matches_what_re_matches(source: str) -> None:
    steps = Steps(250 * len(NAMES))
    pattern = NamePattern(source, steps)
    for name in NAMES:
        assert pattern.fits(name) is (re.fullmatch(source, name) is not None)
        assert NamePattern(source).begins(name) is (re.match(source, name) is not None)


ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\.", r"\d", r"\w", r"\W", r"\b", r"\B", "^", "$", r"\Z", ""])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{0,2}?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        st.tuples(st.sampled_from(["?=", "?!"]), inner).map(lambda pair: f"({pair[0]}{pair[1]})"),
    ),
    max_leaves=6,
)


# No name is empty, and Python 3.14 has changed what \\B says of an empty text.
@given(PATTERNS, st.text("ab.1\n", min_size=1, max_size=6))
def test_any_pattern_matches_what_re_matches(source: str, name: str) -> None:
    assert NamePattern(source).fits(name) is (re.fullmatch(source, name) is not None)
    assert NamePattern(source).begins(name) is (re.match(source, name) is not None)


@given(st.sampled_from(["(?<=a)", "(?<!a)", "(?<=a.)", "(?<!b|a)"]), PATTERNS, st.text("ab", min_size=1, max_size=5))
def test_pattern_that_looks_behind_matches_what_re_matches(behind: str, rest: str, name: str) -> None:
    source = f".*{behind}{rest}"
    assert NamePattern(source).fits(name) is (re.fullmatch(source, name) is not None)


@given(PATTERNS, st.text("abAB.", min_size=1, max_size=5))
def test_pattern_that_ignores_case_matches_what_re_matches(source: str, name: str) -> None:
    source = f"(?i){source}"
    assert NamePattern(source).fits(name) is (re.fullmatch(source, name) is not None)


HOSTILE = [
    "(a|.)" * 40 + "b",
    "(a|a|a)" * 60 + "b",
    "((a+)+)+b",
    "((((a*)*)*)*)*b",
    ".*" * 40 + "x",
    "(.*)*(.*)*(.*)*x",
    "(a?){300}a{300}b",
    "(a?a?a?)*b",
    "(a|aa)+b",
    "(.*a){20}d",
    "(?=(a+)+b)a*",
    "(?!(a|.)*b)a*d",
    "(a*)*" * 20 + "b",
    "((a|b)*|(c|a)*)*d",
    "a{0,65000}b",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_pattern_that_stops_re_takes_few_steps(source: str) -> None:
    steps = Steps(60_000)
    for name in ("a" * 500, "a" * 39 + "c", "ab" * 250):
        assert not NamePattern(source, steps).fits(name)


HARD = st.recursive(
    st.sampled_from(["a", ".", "(a|.)", "a?", "a*", ".*", "(a|aa)"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.tuples(inner, st.sampled_from(["*", "+", "{2,9}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        inner.map(lambda one: f"(?={one}b)"),
    ),
    max_leaves=12,
)


@given(HARD)
def test_any_pattern_ends_within_its_steps(source: str) -> None:
    """It is matched, or refused by name: no third way, such as hours."""
    steps = Steps(200_000)
    with suppress(TooManySteps):
        NamePattern(source + "b", steps).fits("a" * 200)
    assert 0 < steps.taken <= 200_001, "a name of one letter is looked at in one step"


def test_patterns_of_one_file_share_their_steps() -> None:
    steps = Steps(100)
    patterns = [NamePattern(".*" * 5 + "b", steps) for _ in range(30)]
    with pytest.raises(TooManySteps, match="takes too long: more than 100 steps"):
        [pattern.fits("a" * 20) for pattern in patterns]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("(a", "is none"),
        ("a{2,1}", "is none"),
        ("(" * 3000, "is none"),
        (r"(a)\1", "groupref"),
        ("(?>a)b", "atomic_group"),
        ("a*+b", "possessive_repeat"),
        ("(a)?(?(1)b|c)", "groupref_exists"),
        ("(?s)a.", "flags"),
        ("(?i:a)b", "flags of a group"),
        ("(?:" * 40 + "a" + ")?" * 40, "more than 32 groups"),
        ("a" * 5000, "5000 characters; at most 4096"),
    ],
)
def test_pattern_that_is_not_read_is_refused_with_the_reason(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        NamePattern(source)
