"""Pictures in requests of all APIs: what is submitted, counted, refused and kept."""

import asyncio
import base64
import os
import signal
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.bench.run import BenchOptions, run_bench
from crossdock.workers.schedule.request.items import with_levels
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.api.media.conftest import TEXT, PictureServer
from tests.cluster.api.media.picture_models import data_url, encoded, image_part, picture
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import HI, LiveServer, ScriptedDispatcher, refused


def png(*args: Any, **options: Any) -> str:
    return data_url(encoded(picture(*args), **options))


def test_chat_with_pictures_is_submitted_with_its_items(picture_server: PictureServer) -> None:
    answer = picture_server.ask(image_part(png(40, 30, 1)), image_part(png(20, 60, 2)))
    submission = picture_server.submission(answer)
    first, second = submission.items
    pad = picture_server.media.placeholders["image"]
    for item, grid in ((first, (1, 8, 10)), (second, (1, 16, 4))):
        assert item.tensors["image_grid_thw"].tolist() == [list(grid)]
        assert item.tensors["pixel_values"].shape[0] == grid[1] * grid[2]
        assert item.length == item.num_embedding_tokens == grid[1] * grid[2] // 4
        assert set(submission.prompt_token_ids[item.start : item.end]) == {pad}
        assert item.kind == "image"
    assert first.content_hash != second.content_hash
    usage = answer.json()["usage"]
    assert (
        usage["prompt_tokens"]
        == len(submission.prompt_token_ids)
        > first.num_embedding_tokens + second.num_embedding_tokens
    )


def test_same_picture_is_processed_once(picture_server: PictureServer) -> None:
    before = [picture_server.metric(name) for name in ("picture_seconds_count", "picture_cache_hits_total")]
    url = png(40, 40, 11)
    items = [picture_server.submitted(image_part(url), image_part(url)).items for _ in range(2)]
    assert len({item.content_hash for pair in items for item in pair}) == 1
    after = [picture_server.metric(name) for name in ("picture_seconds_count", "picture_cache_hits_total")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 3]


def test_owners_share_no_processed_picture(picture_server: PictureServer) -> None:
    """The time of an answer must not show that another key has sent the same picture."""
    http = HttpConfig.model_validate({"api_keys": ["a", "b"]})
    engine = ScriptedDispatcher(picture_server.dispatcher.tokenizer, max_model_len=2000)
    app = one_model_api(engine, engine.tokenizer, http, media=picture_server.media)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": [image_part(png(44, 44, 12))]}]
    paths = {"/v1/chat/completions": {"max_tokens": 2}, "/tokenize": {}, "/v1/messages/count_tokens": {"model": "tiny"}}
    source = {"type": "base64", "media_type": "image/png", "data": png(44, 44, 12).partition(",")[2]}
    found = []
    with LiveServer(app) as url, httpx.Client(base_url=url, timeout=240) as client:
        for key in "aabb":
            before = picture_server.metric("picture_seconds_count")
            for path, fields in paths.items():
                image = {"type": "image", "source": source}
                given = [{"role": "user", "content": [image]}] if "count" in path else messages
                headers = {"authorization": f"Bearer {key}"}
                answer = client.post(path, json={"messages": given, **fields}, headers=headers)
                assert answer.status_code == 200, answer.text
            found.append(picture_server.metric("picture_seconds_count") - before)
    assert found == [1, 0, 1, 0]


def test_picture_is_shared_only_within_a_cache_salt(picture_server: PictureServer) -> None:
    """The time of an answer must not show that another owner has sent the same picture."""
    before = picture_server.metric("picture_seconds_count")
    url = png(40, 40, 12)
    for salt in ("a", "b", "a"):
        picture_server.submitted(image_part(url), cache_salt=salt)
    assert picture_server.metric("picture_seconds_count") - before == 2


def test_every_choice_has_the_items(picture_server: PictureServer) -> None:
    picture_server.submitted(image_part(png()), n=3)
    assert [len(each.items) for each in picture_server.dispatcher.submissions[-3:]] == [1, 1, 1]


def test_low_detail_shrinks_the_picture(picture_server: PictureServer) -> None:
    url = png(900, 600, 3)
    low, high = (picture_server.submitted(image_part(url, detail=each)) for each in ("low", "high"))
    assert low.items[0].content_hash != high.items[0].content_hash
    same = picture_server.submitted(image_part(url, detail="original"))
    assert same.items[0].content_hash == high.items[0].content_hash
    where = "messages[0].content[0]"
    refused(picture_server.ask(image_part(url, detail="huge")), 400, param=f"{where}.image_url.detail")
    flat = {"type": "image_url", "image_url": url, "detail": "huge"}
    refused(picture_server.ask(flat), 400, param=f"{where}.detail")


def test_picture_may_be_a_plain_url_without_a_type(picture_server: PictureServer) -> None:
    url = png(40, 30, 4)
    whole = picture_server.submitted(image_part(url, detail="low"))
    for part in ({"type": "image_url", "image_url": url}, {"image_url": url}, {"image_url": {"url": url}}):
        found = picture_server.submitted(part)
        assert found.items[0].content_hash == whole.items[0].content_hash
        assert found.prompt_token_ids == whole.prompt_token_ids
    refused(picture_server.ask({"picture": url}), 400, param="messages[0].content[0]")


def test_file_of_a_picture_is_refused_with_the_reason(picture_server: PictureServer) -> None:
    part = {"type": "input_image", "file_id": "file-abc"}
    answer = picture_server.http.post("/v1/responses", json={"input": [{"role": "user", "content": [part]}]})
    error = refused(answer, 400, param="input[0].content[0].file_id")
    assert "files are not stored here" in error["message"]


def test_clients_of_openai_and_anthropic_send_pictures(picture_server: PictureServer) -> None:
    url = png(40, 30, 1)
    theirs = openai.OpenAI(base_url=f"{picture_server.url}/v1", api_key="none", max_retries=0)
    with theirs as client:
        chat: Any = client.chat.completions
        chat.create(model="tiny", messages=[{"role": "user", "content": [image_part(url), TEXT]}], max_tokens=2)
        by_chat = picture_server.dispatcher.submissions[-1]
        content = [
            {"type": "input_image", "image_url": url, "detail": "auto"},
            {"type": "input_text", "text": TEXT["text"]},
        ]
        responses: Any = client.responses
        first = responses.create(model="tiny", input=[{"role": "user", "content": content}], max_output_tokens=2)
        by_response = picture_server.dispatcher.submissions[-1]
        responses.create(model="tiny", input="And?", previous_response_id=first.id, max_output_tokens=2)
        by_next = picture_server.dispatcher.submissions[-1]
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks = [{"type": "image", "source": source}, TEXT]
    with anthropic.Anthropic(base_url=picture_server.url, api_key="none", max_retries=0) as client:
        messages: Any = client.messages
        messages.create(model="tiny", messages=[{"role": "user", "content": blocks}], max_tokens=2)
        by_message = picture_server.dispatcher.submissions[-1]
        count = messages.count_tokens(model="tiny", messages=[{"role": "user", "content": blocks}])
    hashes = {each.items[0].content_hash for each in (by_chat, by_response, by_next, by_message)}
    assert len(hashes) == 1
    assert by_chat.prompt_token_ids == by_response.prompt_token_ids == by_message.prompt_token_ids
    assert count.input_tokens == len(by_message.prompt_token_ids)


def test_result_of_a_tool_may_be_a_picture(picture_server: PictureServer) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": png().partition(",")[2]}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    messages = [{"role": "user", "content": "Look"}, {"role": "assistant", "content": [call]}]
    messages += [{"role": "user", "content": [result]}]
    answer = picture_server.http.post("/v1/messages", json={"model": "tiny", "messages": messages, "max_tokens": 2})
    assert len(picture_server.submission(answer).items) == 1


def test_file_below_the_folder_is_read(picture_server: PictureServer) -> None:
    by_file = picture_server.submitted(image_part(f"file://{picture_server.folder}/dog.png"))
    by_data = picture_server.submitted(image_part(png()))
    assert by_file.items[0].content_hash == by_data.items[0].content_hash


def pixels_of(submission: Submission) -> NDArray[Any]:
    """Return the encoder's input for the first item."""
    return with_levels(submission.items[0].tensors)["pixel_values"]


def test_pictures_of_all_modes_become_rgb(picture_server: PictureServer) -> None:
    """A half transparent picture is on white, 16 bits keep their upper half, a GIF has its first frame."""
    grey = np.full((16, 16), 0x8000, np.uint16)
    from PIL import Image  # beside the only test that makes such files by hand

    files = {
        "palette": encoded(picture(mode="P")),
        "grey": encoded(picture(mode="L")),
        "one bit": encoded(picture(mode="1")),
        "transparent": encoded(Image.new("RGBA", (16, 16), (255, 0, 0, 0))),
        "16 bits": encoded(Image.fromarray(grey)),
        "CMYK": encoded(picture(mode="CMYK"), "JPEG"),
        "WebP": encoded(picture(), "WEBP"),
        "GIF": encoded(picture(), "GIF", save_all=True, append_images=[picture(seed=5)]),
    }
    pixels = {name: pixels_of(picture_server.submitted(image_part(data_url(data)))) for name, data in files.items()}
    white, half = (
        np.array([(level - 0.5) / 0.5, (level - 0.4) / 0.6, (level - 0.3) / 0.7]) for level in (1.0, 128 / 255)
    )
    for name, expected in (("transparent", white), ("16 bits", half)):
        channels = pixels[name].reshape(-1, 3, 2 * 4 * 4)
        assert np.allclose(channels, expected[None, :, None], atol=1e-5), name
    only = picture_server.submitted(image_part(data_url(encoded(picture(), "GIF"))))
    assert np.array_equal(pixels["GIF"], pixels_of(only))


def test_picture_is_turned_as_its_exif_says(picture_server: PictureServer) -> None:
    exif = picture().getexif()
    exif[0x0112] = 6  # turned by 90°
    item = picture_server.submitted(image_part(png(60, 20, 4, exif=exif))).items[0]
    _, height, width = item.tensors["image_grid_thw"][0]
    assert height > width


def test_process_that_is_killed_is_replaced(picture_server: PictureServer) -> None:
    for pid in picture_server.media.pids:
        os.kill(pid, signal.SIGKILL)
    for seed in (31, 32, 33):
        picture_server.submitted(image_part(png(40, 30, seed)))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a <|image_pad|> b"}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a <|image_pad|>"}]}, "messages"),
    ],
)
def test_placeholder_without_a_picture_is_refused(
    picture_server: PictureServer, path: str, body: dict[str, Any], param: str
) -> None:
    refused(picture_server.http.post(path, json=body), 400, param=param)
    token_id = picture_server.media.placeholders["image"]
    refused(picture_server.http.post("/v1/completions", json={"prompt": [1, token_id]}), 400, param="prompt")


def test_placeholder_in_text_beside_a_picture_is_refused(picture_server: PictureServer) -> None:
    parts = [{"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|>"}, image_part(png())]
    error = refused(picture_server.ask(*parts), 400, param="messages")
    assert "<|image_pad|>" in error["message"]


def test_truncation_never_cuts_a_picture(picture_server: PictureServer) -> None:
    refused(picture_server.ask(image_part(png()), truncate_prompt_tokens=5), 400, param="truncate_prompt_tokens")
    picture_server.submitted(image_part(png()), truncate_prompt_tokens=1900)


def test_pictures_that_exceed_the_context_are_refused(picture_server: PictureServer) -> None:
    """Each has 64 rows: eight are more than a context of 400 tokens, four are not."""
    picture_server.dispatcher.max_model_len = 400
    try:
        parts = [image_part(png(64, 64, 60 + i)) for i in range(8)]
        error = refused(picture_server.ask(*parts), 400, code="context_length_exceeded")
        assert error["param"].startswith("messages[0].content[")
        picture_server.submitted(*parts[:4])
    finally:
        picture_server.dispatcher.max_model_len = 2000


def test_model_of_text_refuses_pictures_of_every_api(tokenizer: ModelTokenizer) -> None:
    dispatcher = ScriptedDispatcher(tokenizer)
    app = one_model_api(dispatcher, tokenizer, HttpConfig())  # type: ignore[arg-type]
    url = png()
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"x").decode()}
    with LiveServer(app) as server, httpx.Client(base_url=server, timeout=240) as http:
        chat = {"messages": [{"role": "user", "content": [TEXT, image_part(url)]}]}
        error = refused(http.post("/v1/chat/completions", json=chat), 400, param="messages[0].content[1]")
        assert "takes text only" in error["message"]
        items = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
        error = refused(http.post("/v1/responses", json={"input": items}), 400, param="input[0].content[0]")
        assert "takes text only" in error["message"]
        message = {"role": "user", "content": [TEXT, {"type": "image", "source": source}]}
        answer = http.post("/v1/messages", json={"model": "tiny", "messages": [message], "max_tokens": 2})
        assert answer.status_code == 400
        assert "'messages[0].content[1]'" in answer.json()["error"]["message"]
        assert http.post("/v1/chat/completions", json={"messages": HI}).status_code == 200
    assert [len(submission.items) for submission in dispatcher.submissions] == [0]


def test_workload_of_the_benchmark_sends_pictures(picture_server: PictureServer) -> None:
    options = BenchOptions(
        picture_server.url,
        "images",
        num_requests=4,
        concurrency=2,
        pictures=3,
        picture_size=64,
        output_tokens=4,
        warmup=0,
    )
    result = asyncio.run(run_bench(options))
    assert result.summary["requests_ok"] == 4, [sample.error for sample in result.samples]
    assert {len(each.items) for each in picture_server.dispatcher.submissions[-4:]} == {3}
