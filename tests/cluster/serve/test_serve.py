"""A real deployment: Ray Serve, a replica process, HTTP, and the openai client."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from crossdock import LLM, SamplingParams
from tests.cluster.serve.pools.served_pools import behind_proxies, metric, scrape
from tests.waiting import SCRAPE_PAUSE_S, eventually


@pytest.fixture(scope="module")
def url(ray_cluster: None, small_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = {
        "http.batch_folder": str(tmp_path_factory.mktemp("batches")),
        "http.metrics_hold_s": 0,
        "engine.kv_cache_memory": "150MiB",
        "engine.max_num_batched_tokens": 256,
        "engine.max_num_seqs": 16,
    }
    with behind_proxies(small_model_dir, settings) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def wait_until_idle(url: str) -> None:
    """Wait until no request is active or owns a page."""
    eventually(
        lambda: not metric(url, 'crossdock_pages{state="owned"') and not metric(url, "crossdock_requests_active"),
        "pages are still owned",
        pause_s=SCRAPE_PAUSE_S,
    )


def test_poisonous_grammars_are_refused_while_a_stream_goes_on(url: str, client: openai.OpenAI) -> None:
    """Neither takes the replica down: 20,000 chained rules overflow a stack, 300 patterns need minutes and 10 GB."""
    chained = "start: r0\n" + "\n".join(f'r{i}: r{i + 1} "a"' for i in range(20_000)) + '\nr20000: "b"'
    short = "start: r0\n" + "\n".join(f"r{i}:r{i + 1}" for i in range(4_000)) + '\nr4000:"b"'
    patterns = {"allOf": [{"type": "string", "pattern": f"^.*{number}.*$"} for number in range(300)]}
    prompt = [5, 6, 7] * 5
    steady: dict[str, Any] = {"model": "smol", "prompt": prompt, "max_tokens": 600, "temperature": 0}
    steady["extra_body"] = {"ignore_eos": True}
    before = [replica["replica"] for replica in httpx.get(f"{url}/v1/replicas", timeout=240).json()["data"]]
    stream = client.completions.create(**steady, stream=True)
    first = next(stream).choices[0].text
    patient = client.with_options(max_retries=60)  # 429: on a busy machine the grammar before is still being compiled
    for body in ({"guided_grammar": chained}, {"guided_grammar": short}, {"guided_json": patterns}):
        with pytest.raises(openai.BadRequestError) as refused:
            patient.completions.create(model="smol", prompt="a", max_tokens=4, extra_body=body)
        assert refused.value.param == next(iter(body))
    text = first + "".join(chunk.choices[0].text for chunk in stream)
    assert [replica["replica"] for replica in httpx.get(f"{url}/v1/replicas", timeout=240).json()["data"]] == before
    assert text == client.completions.create(**steady).choices[0].text
    wait_until_idle(url)


def test_streamed_chat_has_the_text_of_a_whole_one(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smol", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    asked |= {"temperature": 0, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == client.chat.completions.create(**asked).choices[0].message.content
    assert len(chunks) > 5
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 20


def test_greedy_completion_equals_transformers_generate(client: openai.OpenAI, small_model_dir: Path) -> None:
    prompt = list(range(100, 160))
    module = AutoModelForCausalLM.from_pretrained(small_model_dir, dtype=torch.float32)
    ids = torch.tensor([prompt])
    tokens = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0
    )
    more = {"min_tokens": 24, "return_token_ids": True}
    answer = client.completions.create(model="smol", prompt=prompt, temperature=0, max_tokens=24, extra_body=more)
    extra = answer.choices[0].model_extra
    assert extra is not None
    assert extra["token_ids"] == tokens[0, 60:].tolist()


def test_seeded_request_with_n_and_batch_gives_the_same_distinct_texts_again(client: openai.OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(
            model="smol", prompt=["Once upon", "There was"], n=2, seed=3, temperature=1.0, max_tokens=12
        )
        return [choice.text for choice in answer.choices]

    first = ask()
    assert len(set(first)) == 4
    assert ask() == first


def test_batch_at_two_ingresses_gives_the_outputs_of_a_model_in_this_process(
    client: openai.OpenAI, small_model_dir: Path
) -> None:
    bodies = [{"prompt": [5, 6, number], "max_tokens": 6, "seed": number, "ignore_eos": True} for number in range(12)]
    url = "/v1/completions"
    lines = [{"custom_id": str(n), "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    name = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id
    eventually(lambda: client.batches.retrieve(name).status == "completed")
    output = client.batches.retrieve(name).output_file_id
    assert output is not None
    records = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    found = {int(each["custom_id"]): each["response"]["body"]["choices"][0]["text"] for each in records}
    assert len(records) == len(found) == 12
    with LLM(str(small_model_dir), dtype="float32", max_num_seqs=4, kv_cache_memory="64MiB", device="cpu") as llm:
        params = [SamplingParams(max_tokens=6, seed=body["seed"], ignore_eos=True) for body in bodies]
        wanted = llm.generate([body["prompt"] for body in bodies], params, use_tqdm=False)
    assert [found[number] for number in range(12)] == [one.outputs[0].text for one in wanted]


def test_json_schema_is_obeyed(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "maximum": 999}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": "Name a city as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
        max_tokens=400,  # of which a random model spends many on white space
        temperature=0,
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"city", "people"}


def test_forced_tool_call_has_arguments_of_its_schema(client: openai.OpenAI) -> None:
    def tool(name: str, argument: dict[str, Any]) -> Any:
        schema = {"type": "object", "properties": {"what": argument}, "required": ["what"]}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    tools = [tool("weather", {"enum": ["Paris", "Rome"]}), tool("clock", {"type": "integer", "maximum": 23})]
    asked: Any = {"model": "smol", "messages": [{"role": "user", "content": "Is it warm in Paris?"}], "tools": tools}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(**asked, tool_choice=choice, max_tokens=60, temperature=0)
        [call] = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert arguments["what"] in ("Paris", "Rome")
        else:
            assert choice == "required"
            assert arguments["what"] <= 23


def test_refused_request_raises_the_openai_clients_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="4096") as error:
        client.completions.create(model="smol", prompt=[5] * 5000, max_tokens=1)
    assert error.value.body["param"]  # type: ignore[index]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="hi")
    with pytest.raises(openai.BadRequestError, match="schema"):
        client.chat.completions.create(
            model="smol",
            messages=[{"role": "user", "content": "hi"}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
        )


def test_request_is_found_by_its_id_at_either_ingress(client: openai.OpenAI, url: str) -> None:
    answer = client.completions.create(
        model="smol",
        prompt=[*range(30, 630)],
        max_tokens=4,
        n=2,
        extra_body={"min_tokens": 4, "service_tier": "priority"},
        extra_headers={"X-Request-Id": "followed"},
    )
    assert answer.model_extra == {"service_tier": "priority"}
    for _ in range(4):
        found = httpx.get(f"{url}/v1/requests/followed", timeout=240).json()["requests"]
        assert [one["slo_class"] for one in found] == ["interactive"] * 2
        for one in found:
            assert one["num_prompt_tokens"] == 600 == one["chunks"][-1]["start"] + one["chunks"][-1]["num_tokens"]
            assert (one["state"], one["num_output_tokens"], one["num_decode_steps"]) == ("finished", 4, 3)
            assert one["replica"]
    assert httpx.get(f"{url}/v1/requests/unknown", timeout=240).status_code == 404
    assert httpx.get(f"{url}/v1/requests", timeout=240).json() == {"object": "list", "data": []}


def test_responses_and_messages_are_the_chat_and_are_found_at_either_ingress(client: openai.OpenAI, url: str) -> None:
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    chat = client.chat.completions.create(model="smol", messages=question, max_tokens=20, temperature=0)
    text = chat.choices[0].message.content
    fields = {"model": "smol", "temperature": 0}
    message = httpx.post(
        f"{url}/v1/messages", json={**fields, "messages": question, "max_tokens": 20}, timeout=240
    ).json()
    assert [block["text"] for block in message["content"]] == [text]
    first = client.responses.create(model="smol", input=question, max_output_tokens=20, temperature=0)
    assert first.output_text == text
    path = f"{url}/v1/responses/{first.id}"
    found = [
        httpx.get(path, timeout=240).json() for _ in range(8)
    ]  # each by a connection of its own, so at both ingresses
    assert all(one == found[0] for one in found)
    talk = [*question, {"role": "assistant", "content": text}, {"role": "user", "content": "And of Italy?"}]
    expected = client.chat.completions.create(model="smol", messages=talk, max_tokens=20, temperature=0)
    body = {**fields, "input": "And of Italy?", "max_output_tokens": 20, "previous_response_id": first.id}
    for _ in range(4):
        [item] = httpx.post(f"{url}/v1/responses", json=body, timeout=240).json()["output"]
        assert item["content"][0]["text"] == expected.choices[0].message.content
    assert httpx.delete(path, timeout=240).status_code == 200
    assert {httpx.get(path, timeout=240).status_code for _ in range(8)} == {404}


def test_requests_that_would_miss_their_first_token_target_get_429(url: str) -> None:
    """Prompts of 3,500 tokens arrive all at once; their class promises a first token within a second."""

    async def ask(http: httpx.AsyncClient, number: int) -> httpx.Response:
        prompt = [100 + number, *[200, 201, 202, 203, 204] * 700]
        body = {"model": "smol", "prompt": prompt, "max_tokens": 1, "service_tier": "interactive"}
        return await http.post(f"{url}/v1/completions", json=body)

    async def crowd() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=None) as http:
            return await asyncio.gather(*(ask(http, number) for number in range(48)))

    before = metric(url, "crossdock_ingress_requests_refused_total", may_be_absent=True)
    answers = asyncio.run(crowd())
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert "class 'interactive' promises" in answer.json()["error"]["message"]
    num_refused = sum(answer.status_code == 429 for answer in answers)
    assert metric(url, "crossdock_ingress_requests_refused_total") - before == num_refused
    wait_until_idle(url)


def test_body_of_100_megabytes_gets_413_while_a_stream_goes_on(client: openai.OpenAI, url: str) -> None:
    stream = client.completions.create(model="smol", prompt="Once", max_tokens=40, stream=True, temperature=0)
    next(iter(stream))
    too_large = b'{"model": "smol", "prompt": "' + b"a" * (100 << 20) + b'"}'
    answer = httpx.post(f"{url}/v1/completions", content=too_large, timeout=240)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"]
    assert len(list(stream)) > 10


def test_clients_that_disconnect_at_any_moment_leave_no_owned_page(url: str) -> None:
    """They leave before the first token, in the prompt, in mid-stream; streams and plain requests."""
    before = metric(url, "crossdock_requests_total{")

    async def one(http: httpx.AsyncClient, rng: random.Random) -> None:
        body = {
            "model": "smol",
            "prompt": [rng.randrange(10, 640) for _ in range(rng.choice([3, 30, 600]))],
            "max_tokens": rng.choice([2, 200]),
            "stream": rng.random() < 0.7,
            "n": rng.choice([1, 1, 2]),
        }
        try:
            async with asyncio.timeout(rng.choice([0.01, 0.05, 0.2, 1.0])):
                async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        if rng.random() < 0.1:
                            return
        except TimeoutError:
            pass

    async def crowd() -> None:
        rng = random.Random(0)
        gate = asyncio.Semaphore(32)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits) as http:

            async def guarded() -> None:
                async with gate:
                    await one(http, rng)

            await asyncio.gather(*(guarded() for _ in range(200)))

    asyncio.run(crowd())
    wait_until_idle(url)
    assert metric(url, 'crossdock_requests_total{finish_reason="abort"') > 0  # others left sooner, or were refused
    assert metric(url, "crossdock_requests_total{") > before
    assert metric(url, "crossdock_cancelled_kv_bytes_total") > 0


def test_scrape_covers_all_replicas_and_ingresses(url: str, client: openai.OpenAI) -> None:
    client.completions.create(model="smol", prompt="hello", max_tokens=3)
    # Both ingresses, whichever one answers.
    eventually(lambda: len(set(re.findall(r'ingress="(\w+)"', scrape(url)))) == 2, "one ingress is missing")
    text = scrape(url)
    assert 'replica="' in text
    assert "\ncrossdock_time_to_first_token_seconds_bucket" in text
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))


@pytest.mark.soak
def test_batch_whose_ingress_is_killed_is_completed_with_one_result_for_each_line(
    url: str, client: openai.OpenAI
) -> None:
    body = {"model": "smol", "prompt": "Once", "max_tokens": 60, "ignore_eos": True}
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(80)]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    name = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id
    runner, output = eventually(lambda: runner_of(name))
    eventually(lambda: output.exists() and output.read_bytes().count(b"\n") >= 5)
    runner.kill()
    assert output.read_bytes().count(b"\n") < 80, "the batch ended before its ingress was killed"
    patient = client.with_options(max_retries=9)
    eventually(lambda: patient.batches.retrieve(name).status == "completed", "the batch does not go on")
    records = patient.files.content(patient.batches.retrieve(name).output_file_id or "").text.splitlines()
    assert sorted(json.loads(record)["custom_id"] for record in records) == sorted(f"c{i}" for i in range(80))


def runner_of(batch: str) -> tuple[psutil.Process, Path] | None:
    """Return the process that holds the lock of a batch, and the file of the batch's results so far."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            for file in process.open_files():
                if file.path.endswith(f"{batch}/lock"):
                    return process, Path(file.path).with_name("output.jsonl")
    return None
