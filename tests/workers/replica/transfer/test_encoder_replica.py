"""An engine around an encoder alone: rows of pictures in its pages, and their way to another dock."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from torch import Tensor

from crossdock.workers.model.encoder_model import EncoderModel, drop_decoder, wrap_encoder
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.pictures.vision import PictureEncoder
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.engine_loader import load_engine
from crossdock.workers.replica.serving.machine import describe_machine
from crossdock.workers.report.advertise import observe
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.pictures.encoding import EncoderTotals
from crossdock.workers.schedule.pictures.encoding_leg import encoding_leg
from crossdock.workers.schedule.pictures.items import Item
from crossdock.workers.schedule.request import Request, Status, TokenDelta
from crossdock.workers.schedule.submission import InvalidField, SamplingParams, Submission
from tests.sweeps import rest_in_soak
from tests.workers.multimodal import FAMILIES, PicturePrompt, build_multimodal, picture
from tests.workers.replica.engines import engine_on

PAGE_SIZE = 4


def encoder_model(family: str, max_model_len: int | None = None) -> EncoderModel:
    """Return the encoder of a tiny model."""
    module = build_multimodal(family)
    drop_decoder(module)
    return wrap_encoder(module, max_model_len)


@pytest.fixture(scope="module", params=rest_in_soak(FAMILIES, "qwen3_vl", "smolvlm"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> EncoderModel:
    return encoder_model(family)


@pytest.fixture(scope="module")
def whole(family: str) -> PictureEncoder:
    module = build_multimodal(family)
    return PictureEncoder(module, module.config)


def rows_of(encoder: PictureEncoder, items: Sequence[Item]) -> Tensor:
    """Return the rows [R, (1 + L) * E] of items, each encoded alone."""
    return torch.cat([encoder.features([item]).transpose(0, 1).flatten(1) for item in items])


def leg_of(name: str, *parts: Any, **fields: Any) -> Submission:
    """Return the encoding leg of a prompt of these parts."""
    prompt = PicturePrompt.of(*parts)
    page_size: int = fields.pop("page_size", PAGE_SIZE)
    return encoding_leg(Submission(name, prompt.token_ids, items=prompt.items, **fields), page_size)


def totals_of(engine: Engine) -> EncoderTotals:
    return engine.scheduler.encoding.totals


def forget_embeddings(engine: Engine) -> None:
    """Empty the encoder's own cache, so that only pages remember pictures."""
    assert engine.model.encoder is not None
    engine.scheduler.encoding.clear()
    engine.model.encoder.clear()


def parts_of(rows: Tensor, items: Sequence[Item]) -> Tensor:
    """Return the rows of a leg that belong to an item."""
    return torch.cat([rows[item.start : item.end] for item in items])


def rows_in_pages(engine: Engine, request: Request) -> Tensor:
    """Return the rows of a request's items in its pages."""
    ((pages, _),) = engine.model.pool.pages
    return parts_of(pages[list(engine.pages.pages_of(request.owner)), 0].flatten(0, 1), request.items)


def held_rows(engine: Engine, work: Submission) -> Tensor:
    """Return the rows of a held request's items in its pages, and end it as a transfer does that has arrived."""
    request = engine.scheduler.table.get(work.id)
    assert request is not None
    assert request.status is Status.HELD
    assert request.token_ids[-1] == 0
    rows = rows_in_pages(engine, request)
    engine.ship(work.id)
    engine.pages.release(request.owner)
    return rows


def served(engine: Engine, works: Sequence[Submission]) -> list[Tensor]:
    """Return the rows of each leg, computed together."""
    for work in works:
        engine.add(work)
    while engine.has_work:
        engine.step()
    rows = [held_rows(engine, work) for work in works]
    assert engine.pages.counts().owned == 0
    return rows


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 512, "page_size": 16},
        {"max_num_batched_tokens": 5, "max_num_seqs": 1, "page_size": 4, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 512, "enable_chunked_prefill": False, "page_size": 8},
        {"max_num_batched_tokens": 12, "max_num_seqs": 4, "async_scheduling": True, "page_size": 8},
    ],
    ids=["whole", "small chunks", "no chunks", "ahead"],
)
def test_rows_in_pages_equal_those_of_the_whole_model(
    family: str, model: EncoderModel, whole: PictureEncoder, config: dict[str, Any]
) -> None:
    one, other, last = picture(family, 1, (2, 3)), picture(family, 2, (2, 3)), picture(family, 3, (1, 2))
    prompts: list[tuple[Any, ...]] = [(5, one, 9, last), (5, other), (one, 3, one, 2), (last,)]
    works = [leg_of(f"{number}", *parts, page_size=config["page_size"]) for number, parts in enumerate(prompts)]
    for rows, work in zip(served(engine_on(model, **config), works), works, strict=True):
        torch.testing.assert_close(rows, rows_of(whole, work.items), rtol=1e-4, atol=1e-5)


def test_picture_that_begins_two_prompts_is_encoded_once(
    family: str, model: EncoderModel, whole: PictureEncoder
) -> None:
    """By the embeddings in memory, and by pages alone where those have gone and the picture fills its pages."""
    engine = engine_on(model, page_size=PAGE_SIZE)
    shared = picture(family, 1, (2, 2))
    works = [leg_of(str(n), 3 + n, shared, 2, picture(family, 2 + n, (1, 2))) for n in range(3)]
    cached = []
    for number, work in enumerate(works):
        if number == 2:
            forget_embeddings(engine)
        engine.add(work)
        deltas = list[TokenDelta]()
        while engine.has_work:
            deltas += engine.step().deltas
        cached.append(deltas[0].num_cached_tokens)
        torch.testing.assert_close(held_rows(engine, work), rows_of(whole, work.items), rtol=1e-4, atol=1e-5)
    num_rows = shared[1].num_rows
    assert cached == [0, num_rows, num_rows], "the picture fills its pages"
    assert totals_of(engine).num_encoded == 2 + 1 + 1


def test_rows_are_found_under_their_own_salt_alone() -> None:
    engine = engine_on(encoder_model("llava"), page_size=PAGE_SIZE)
    cached = []
    for name, salt in (("a1", "a"), ("b1", "b"), ("a2", "a")):
        forget_embeddings(engine)
        engine.add(leg_of(name, 3, picture("llava", 1), picture("llava", 2), cache_salt=salt))
        deltas = list[TokenDelta]()
        while engine.has_work:
            deltas += engine.step().deltas
        cached.append(deltas[0].num_cached_tokens)
        engine.ship(name)
        engine.pages.release(Request.owner_name(name, 0))
    assert cached == [0, 0, 32], "all pages of both pictures"
    assert totals_of(engine).num_encoded == 4, "the last picture is not encoded again for the token after it"


def test_prompt_that_is_no_encoding_leg_is_refused() -> None:
    engine = engine_on(encoder_model("llava"))
    prompt = PicturePrompt.of(5, picture("llava", 1), 3)
    with pytest.raises(InvalidField, match="this model's are 0 to 0"):
        engine.add(Submission("a", prompt.token_ids, items=prompt.items))
    with pytest.raises(InvalidField, match="no hidden states"):
        engine.add(Submission("a", [0], SamplingParams(pooling="last")))
    work = leg_of("a", picture("llava", 1))
    with pytest.raises(InvalidField, match="need a prompt of 17 tokens, and this one has 18"):
        engine.add(replace(work, prompt_token_ids=[0] * 18))


def test_measured_replica_advertises_what_its_pictures_and_rows_cost(family: str, model: EncoderModel) -> None:
    engine = engine_on(model, page_size=PAGE_SIZE)
    before = engine.pages.counts()
    profile = warm_up(engine)
    assert engine.pages.counts() == before
    assert profile.encoder_cost is not None
    assert profile.encoder_cost.seconds([picture(family, 1)[1]]) > 0
    assert profile.page_bytes == PAGE_SIZE * model.layers[0].key_dim * 4
    assert (profile.vocab_size, profile.max_model_len) == (1, 512)
    live = observe(engine.scheduler, "me", 1)
    assert live.encoder_cost == profile.encoder_cost.coefficients
    engine.add(leg_of("a", picture(family, 1)))
    assert engine.step().predicted > 0
    engine.scheduler.encoding.cost = profile.encoder_cost.model_copy(update={"base": 5.0})
    assert observe(engine.scheduler, "me", 1).encoder_cost[:1] == (5.0,)
    assert describe_machine(model)["weights"] == model.weight_bytes


# -- replicas --------------------------------------------------------------------------------------------------------


def replica_spec(path: str | None, **fields: Any) -> ReplicaSpec:
    engine = EngineConfig(kv_cache_memory=ByteSize(4 << 20), **fields.pop("engine", {}))
    model = ModelSpec(path, "float32", **fields.pop("model", {}))
    return ReplicaSpec(model, engine, num_threads=1, device="cpu", role="encode", **fields)


def test_replica_with_the_role_encode_loads_the_encoder(tmp_path: Path) -> None:
    build_multimodal("qwen3_vl").save_pretrained(tmp_path)
    engine = load_engine(replica_spec(str(tmp_path), model={"max_model_len": 100}))
    assert isinstance(engine.model, EncoderModel)
    assert engine.model.max_model_len == 100
    assert engine.pool_spec("weights").model == "weights embeddings"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tensor_parallel_size": 2}, r"several ranks \(there are 2\)"),
        ({"pipeline_parallel_size": 3}, r"several ranks \(there are 3\)"),
        (
            {"engine": {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=2)}},
            "speculative_config: it makes no tokens",
        ),
        ({"model": {"quantization": "int8"}}, "quantization: this is of the decoder"),
    ],
)
def test_replica_without_a_decoder_refuses_settings_of_decoders(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replica_spec(None, **fields)
