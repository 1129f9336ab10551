"""The benchmark of speculation without servers: its settings, its prompts and its table."""

import argparse
import json
from itertools import islice
from pathlib import Path
from types import ModuleType

from transformers import AutoTokenizer

from crossdock.workers.model.grammar.compiler import GrammarCompiler
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.request.submission import Grammar
from tests.benchmarks.scripts import script

ROOT = Path(__file__).parents[2]


speculation = script("speculation")


def test_configs_of_our_settings_are_accepted(speculation: ModuleType) -> None:
    configs = [
        SpeculativeConfig.model_validate(json.loads(speculation.SETTINGS[name][1]))
        for name in speculation.OURS
        if speculation.SETTINGS[name]
    ]
    assert [config.num_speculative_tokens for config in configs] == [2, 4, 8, 8, 8]
    assert [config.adaptive for config in configs] == [False, False, False, True, True]


def test_head_is_served_from_its_directory_and_is_no_length_to_compare_with(speculation: ModuleType) -> None:
    args = argparse.Namespace(model=None, port=1, crossdock_option=[], head=Path("a head"))
    *_, flag, config = speculation.command(args, "head", Path())
    assert flag == "--speculative-config"
    found = SpeculativeConfig.model_validate(json.loads(config))
    assert (found.method, found.model, found.num_speculative_tokens) == ("eagle3", "a head", 3)
    rows = {"none": {"tok/s": 100.0}, "adaptive": {"tok/s": 110.0}, "head": {"tok/s": 200.0}}
    assert "1.10 times the best of the others (none)" in speculation.verdict(rows)


def test_prompts_of_all_workloads_take_turns_and_begin_again(speculation: ModuleType) -> None:
    workloads = speculation.WORKLOADS
    assert {len(prompts) for prompts in workloads.values()} == {6}
    found = list(islice(speculation.questions("all"), 25))
    assert found[:4] == [(prompts[0], name in speculation.CHATS, "") for name, prompts in workloads.items()]
    assert found[24] == found[0]
    assert len(set(found[:24])) == 24


def test_forms_are_schemas_that_a_grammar_takes_and_that_dictate_tokens(
    speculation: ModuleType, model_dir: Path
) -> None:
    compiler = GrammarCompiler(model_dir, 49_152)
    forms = list(islice(speculation.questions("forms"), 6))
    states = [compiler.compile(Grammar("json_schema", form.schema)) for form in forms]
    compiler.close()
    brace_and_quote = AutoTokenizer.from_pretrained(model_dir).encode('{"')
    for state in states:
        for token_id in brace_and_quote:
            state.accept(token_id)
        assert state.forced(), "the name of the first field"


def test_text_of_completions_and_of_chats_is_joined(speculation: ModuleType) -> None:
    events = [
        {"choices": [{"text": "a b"}]},
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": " c"}}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    ]
    stream = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    assert speculation.text_of(stream) == "a b c"


def test_table_compares_each_server_with_itself_without_drafts(speculation: ModuleType) -> None:
    rows = {
        "none": {"tok/s": 100.0, "gap p99": 12.0, "same %": 100.0},
        "fixed-4": {"tok/s": 150.0, "drafted": 400.0, "accepted %": 40.0},
        "adaptive": {"tok/s": 180.0, "drafted": 300.0, "accepted %": 75.0},
        "vllm": {"tok/s": 60.0},
        "vllm-ngram": {"tok/s": 90.0},
    }
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in speculation.table(rows).splitlines()]
    assert [line[:3] for line in lines[2:]] == [
        ["none", "100", "1"],
        ["fixed-4", "150", "1.5"],
        ["adaptive", "180", "1.8"],
        ["vllm", "60", "1"],
        ["vllm-ngram", "90", "1.5"],
    ]
    assert "1.20 times the best of the others (fixed-4)" in speculation.verdict(rows)
    assert speculation.verdict({"vllm": {"tok/s": 1.0}}) == ""
