"""/v1/decisions over real engines: probabilities are those of transformers' own model, among labels of the options."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from pydantic import ByteSize
from transformers import AutoModelForCausalLM, AutoTokenizer

from crossdock.cluster.api.body.decision_body import DecisionRequest
from crossdock.cluster.api.bounds import QUESTION_CHOICES
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.service_tiers import ServiceTiers
from crossdock.cluster.api.text.labels import AnswerLabels
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.router.fleet import RouterConfig
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine.engine_loader import load_engine
from crossdock.workers.report.profile import Role
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.text.chat_templates import GPT_OSS, QWEN3
from tests.cluster.dispatch.in_process import InProcess, ready
from tests.waiting import until

INPUT = "My card was charged twice for one order, and nobody answers my mails since three days."
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "name": "charged", "instructions": "The customer was charged more than once."},
    {
        "type": "choice",
        "name": "queue",
        "instructions": "Which queue should have the ticket?",
        "choices": [
            {"value": "billing", "description": "money"},
            {"value": "login"},
            {"value": True},
            {"value": "true"},
        ],
    },
    {
        "type": "score",
        "instructions": [
            {"type": "input_text", "text": "How angry is the customer?"},
            {"type": "input_json", "data": {"scale": ["calm", "angry"]}},
        ],
        "levels": [{"label": "calm"}, {"label": "annoyed"}, {"label": "angry", "description": "shouts"}],
    },
]
WRITTEN = [
    "Question: Is this true? The customer was charged more than once.\nA: no\nB: yes\n"
    "Answer with one label alone, from A to B.",
    "Question: Which queue should have the ticket?\n"
    'A: "billing" (money)\nB: "login"\nC: true\nD: "true"\nAnswer with one label alone, from A to D.',
    'Question: How angry is the customer?\n{"scale":["calm","angry"]}\n'
    "A: calm\nB: annoyed\nC: angry (shouts)\nAnswer with one label alone, from A to C.",
]
NUMS = [2, 4, 3]


@asynccontextmanager
async def serving(
    folder: Path, *roles: Role, http: Any = None, max_model_len: int = 2048, **engine: Any
) -> AsyncIterator[Any]:
    """Serve a model's directory over HTTP, by a replica of each role, or a mixed one. The client has `dispatcher` and
    `replicas` as attributes."""
    defaults = {"kv_cache_memory": ByteSize(128 << 20), "admission": "queue", "max_num_batched_tokens": 256}
    config = EngineConfig.model_validate(defaults | engine)
    spec = ReplicaSpec(ModelSpec(str(folder), "float32", max_model_len), config, num_threads=1)
    replicas = [InProcess(config, role=role, engine=load_engine(spec)) for role in roles or ("mixed",)]
    dispatcher = Dispatcher("smol", RouterConfig())
    settings = HttpConfig.model_validate(http or {})
    tiers = ServiceTiers(config.slo_classes, config.default_slo_class)
    app = one_model_api(dispatcher, ModelTokenizer.load(folder), settings, tiers)
    for i, replica in enumerate(replicas):
        dispatcher.join(f"r{i}", replica, replica.profile)
    await ready(dispatcher, len(replicas))
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            client.dispatcher, client.replicas = dispatcher, replicas  # type: ignore[attr-defined]
            yield client
            for replica in replicas:
                assert replica.is_killed or await replica.owned_pages() == 0
    finally:
        await dispatcher.close()
        for replica in replicas:
            await replica.engine_thread.close()


async def decide(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/decisions", json={"model": "smol", "input": INPUT, "questions": QUESTIONS, **body})


@cache
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
@torch.inference_mode()
def wanted(folder: Path, before: str, num: int) -> tuple[list[float], float]:
    """Return transformers' probability of each of `num` letters among themselves, and the likeliest one's among all.

    `before`: the messages, as JSON.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(json.loads(before), tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    letters = []
    for letter in "ABCDEFGHIJ"[:num]:
        *same, token_id = tokenizer.encode(text + letter, add_special_tokens=False)
        assert same == ids
        letters.append(token_id)
    logprobs = reference(folder)(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[letters]
    return logprobs.softmax(-1).tolist(), float(logprobs.max().exp())


def check(
    folder: Path, answers: list[dict[str, Any]], *, before: list[dict[str, Any]] | None = None, text: str = INPUT
) -> None:
    """Compare the answers to QUESTIONS with transformers'. `before`, `text`: messages, and what the last user said."""
    assert [(each["type"], each["name"]) for each in answers] == [
        ("predicate", "charged"),
        ("choice", "queue"),
        ("score", None),
    ]
    for answer, written, num in zip(answers, WRITTEN, NUMS, strict=True):
        last = {"role": "user", "content": f"{text}\n{written}" if text else written}
        shares, confidence = wanted(folder, json.dumps([*(before or []), last]), num)
        if answer["type"] == "predicate":
            assert answer.keys() == {"type", "name", "probability"}
            assert answer["probability"] == pytest.approx(shares[1], abs=2e-3)
            continue
        np.testing.assert_allclose([each["probability"] for each in answer["probabilities"]], shares, atol=2e-3)
        assert answer["confidence"] == pytest.approx(confidence, abs=2e-3)
        if answer["type"] == "choice":
            values = ["billing", "login", True, "true"]
            assert [each["value"] for each in answer["probabilities"]] == values
            assert (
                answer["choice"] is values[int(np.argmax(shares))] or answer["choice"] == values[int(np.argmax(shares))]
            )
        else:
            assert [(each["value"], each["label"]) for each in answer["probabilities"]] == [
                (0, "calm"),
                (1, "annoyed"),
                (2, "angry"),
            ]
            assert answer["score"] == pytest.approx(shares[1] + 2 * shares[2], abs=5e-3)


async def test_answers_of_the_default_model_are_transformers_probabilities(model_dir: Path) -> None:
    async with serving(model_dir) as client:
        answer = (await decide(client)).json()
        assert answer.keys() == {"model", "answers", "usage"}
        check(model_dir, answer["answers"])
        usage = answer["usage"]
        assert usage["output_tokens"] == len(QUESTIONS)
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        items = [
            {"role": "developer", "content": "You read tickets."},
            {"role": "assistant", "content": [{"type": "output_text", "text": "How can I help?"}]},
            {"role": "user", "content": "Hello."},
            {"type": "message", "role": "user", "content": [{"type": "input_json", "data": [{"id": 7}]}]},
        ]
        before = [
            {"role": "system", "content": "You read tickets."},
            {"role": "assistant", "content": "How can I help?"},
        ]
        check(
            model_dir, (await decide(client, input=items)).json()["answers"], before=before, text='Hello.\n\n[{"id":7}]'
        )
        check(model_dir, (await decide(client, input="")).json()["answers"], text="")
        check_many_choices(await decide(client, questions=[MANY, QUESTIONS[0]]))


MANY = {"type": "choice", "instructions": "Which?", "choices": [{"value": f"v{i}"} for i in range(60)]}
"""Has labels of two letters."""


async def test_default_model_has_a_label_of_one_token_for_each_of_the_most_choices(model_dir: Path) -> None:
    tokenizer, before = ModelTokenizer.load(model_dir), f"{INPUT}\n"
    labels = await AnswerLabels(tokenizer).after(before, QUESTION_CHOICES)
    assert len({token_id for _, token_id in labels}) == QUESTION_CHOICES == len({label for label, _ in labels})
    ids = tokenizer.encode(before, add_special_tokens=False)
    for label, token_id in labels:
        assert tokenizer.encode(before + label, add_special_tokens=False) == [*ids, token_id]


def check_many_choices(found: httpx.Response) -> None:
    """Assert that the probabilities of 60 labels add up to 1, and that each is that of one token of its own."""
    assert found.status_code == 200, found.text
    answer = found.json()["answers"][0]
    shares = [each["probability"] for each in answer["probabilities"]]
    assert math.fsum(shares) == pytest.approx(1)
    assert len(set(shares)) > 50
    assert answer["choice"] == f"v{int(np.argmax(shares))}"


async def test_input_is_computed_once_for_all_questions(small_model_dir: Path) -> None:
    questions = [QUESTIONS[i % 3] | {"instructions": f"Is it {i}?"} for i in range(12)]
    text = "A ticket of a customer. " * 20
    async with serving(small_model_dir, enable_prefix_caching=True, max_num_seqs=8) as client:
        table = client.replicas[0].engine_thread.engine.scheduler.table
        before = table.prefilled.tokens
        answer = (await decide(client, input=text, questions=questions)).json()
        total, cached = answer["usage"]["input_tokens"], answer["usage"]["input_tokens_details"]["cached_tokens"]
        assert table.prefilled.tokens - before == total - cached
        shared = len(ModelTokenizer.load(small_model_dir).encode(text, add_special_tokens=False))
        page = client.replicas[0].profile.page_size
        assert cached >= 11 * (shared - page), "every question but the first finds the input's pages"


async def test_lost_replica_changes_no_answer(small_model_dir: Path) -> None:
    async with serving(small_model_dir, "mixed", "mixed", max_num_seqs=2, max_num_batched_tokens=64) as client:
        check(small_model_dir, (await decide(client)).json()["answers"])
        asked = asyncio.create_task(decide(client, questions=QUESTIONS * 20))
        table = client.replicas[0].engine_thread.engine.scheduler.table
        await until(lambda: bool(table.requests()))
        client.replicas[0].is_killed = True
        answer = await asked
        assert answer.status_code == 200, answer.text
        answers = answer.json()["answers"]
        for start in range(0, len(answers), 3):
            check(small_model_dir, answers[start : start + 3])
        assert "crossdock_ingress_placed_again_total 0.0" not in client.dispatcher.metrics.text()


async def test_pools_answer_on_prefill_replicas(small_model_dir: Path) -> None:
    async with serving(small_model_dir, "prefill", "decode") as client:
        check(small_model_dir, (await decide(client)).json()["answers"])


async def test_client_that_leaves_frees_the_pages(small_model_dir: Path) -> None:
    async with serving(small_model_dir, max_num_seqs=2, max_num_batched_tokens=64) as client:
        asked = asyncio.create_task(decide(client, questions=QUESTIONS * 20))
        table = client.replicas[0].engine_thread.engine.scheduler.table
        await until(lambda: bool(table.requests()))
        asked.cancel()
        await asyncio.wait([asked])
        await until(lambda: not table.requests())


async def test_class_key_and_limits_hold_as_for_completions(small_model_dir: Path) -> None:
    keys = [{"key": "few", "classes": ["batch"], "seconds_per_minute": 1e-6}]
    async with serving(small_model_dir, http={"api_keys": keys}) as client:
        assert (await decide(client)).status_code == 401
        client.headers["authorization"] = "Bearer few"
        answer = await decide(client, service_tier="batch")
        assert (answer.status_code, answer.headers["x-slo-class"]) == (200, "batch")
        assert (await decide(client, service_tier="interactive")).status_code in (400, 403)
        assert (await decide(client)).status_code == 429, "the seconds of the answers are spent"


PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": QUESTIONS[:1] * 401}, "questions"),
        ({"questions": [{"type": "noul", "instructions": "a"}]}, "questions[0].type"),
        ({"questions": [QUESTIONS[0], {"type": "predicate"}]}, "questions[1].instructions"),
        ({"questions": [{"type": "predicate", "instructions": 7}]}, "questions[0].instructions"),
        ({"questions": [{"type": "predicate", "instructions": [PICTURE]}]}, "questions[0].instructions[0]"),
        ({"questions": [{**QUESTIONS[0], "choices": []}]}, "questions[0].choices"),
        ({"questions": [{**QUESTIONS[1], "choices": [{"value": "a"}]}]}, "questions[0].choices"),
        ({"questions": [{**QUESTIONS[1], "choices": [{"value": "a"}] * 2}]}, "questions[0].choices"),
        ({"questions": [{**QUESTIONS[1], "choices": [{"value": "a"}, {"value": 1}]}]}, None),
        ({"questions": [{**QUESTIONS[2], "levels": [{"label": "a"}] * 11}]}, "questions[0].levels"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"role": "user", "content": [PICTURE]}]}, "input[0].content[0]"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "b", "input": "c"}]}, "input[0].type"),
        ({"input": "a " * 5000}, "input"),
        ({"temperature": 0.5}, "temperature"),
        ({"model": "other"}, "model"),
    ],
)
async def test_wrong_request_is_refused_with_its_field(small_model_dir: Path, body: Any, param: str | None) -> None:
    async with app_alone(small_model_dir) as client:
        answer = await decide(client, **{"model": "tiny", **body})
        assert answer.status_code in (400, 404), answer.text
        if param is not None:
            assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "This model has no chat template"),
        (f"{QWEN3}{{% if add_generation_prompt %}}<think>\n{{% endif %}}", "This model reasons"),
        (GPT_OSS, "This model reasons, or names a channel"),
    ],
    ids=["none", "thinks", "gpt-oss"],
)
async def test_model_whose_first_token_is_no_answer_is_refused(
    small_model_dir: Path, template: str | None, reason: str
) -> None:
    async with app_alone(small_model_dir, template) as client:
        answer = await decide(client, model="tiny")
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("model", "unsupported_value")
        assert reason in error["message"]


async def test_line_of_a_batch_has_the_answer_of_a_request(small_model_dir: Path, tmp_path: Path) -> None:
    async with app_alone(small_model_dir, http={"batch_folder": str(tmp_path)}) as client:
        wanted = (await decide(client, model="tiny")).json()
        assert len(wanted["answers"]) == len(QUESTIONS)
        body = {"model": "tiny", "input": INPUT, "questions": QUESTIONS}
        line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/decisions", "body": body})
        file = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", line)})
        asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/decisions", "completion_window": "24h"}
        name = (await client.post("/v1/batches", json=asked)).json()["id"]

        async def output() -> Any:
            return (await client.get(f"/v1/batches/{name}")).json()["output_file_id"]

        async def is_over() -> bool:
            return await output() is not None

        await until(is_over)
        record = json.loads((await client.get(f"/v1/files/{await output()}/content")).text)
        assert record["response"]["body"] == wanted


@asynccontextmanager
async def app_alone(
    folder: Path, template: str | None = "", http: dict[str, Any] | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an API before a script: what it refuses, it refuses before any replica is needed. `template`: None: there
    is no chat template; empty: the model's own."""
    from tests.cluster.api.scripted_api import ScriptedDispatcher

    tokenizer = ModelTokenizer.load(folder)
    if template is None:
        tokenizer._tokenizer.chat_template = None
    elif template:
        tokenizer.set_chat_template(template)
    engine = ScriptedDispatcher(tokenizer, 2048)
    app = one_model_api(engine, tokenizer, HttpConfig.model_validate(http or {}))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        if http is not None:
            app.state.batches.start()
        yield client
        if http is not None:
            await app.state.batches.close()


def test_fields_of_openais_client_that_change_nothing_are_accepted() -> None:
    more = {
        "prompt_cache_key": "a",
        "prompt_cache_options": {"mode": "implicit"},
        "safety_identifier": "b",
        "user": "c",
    }
    assert DecisionRequest.of({"input": "a", "questions": QUESTIONS, **more}).asked()
