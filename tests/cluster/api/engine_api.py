"""The API in front of real engines: in this process (`EngineApi`), or also on a port, in a thread (`LiveApi`)."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Self

import httpx
from pydantic import ByteSize

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.listener import listen
from crossdock.cluster.api.http.service_tiers import ServiceTiers
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import MOST_QUEUED, Dispatcher
from crossdock.cluster.dispatch.rollouts import Rollouts
from crossdock.router.fleet import RouterConfig
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.slo import SloClass
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.api.one_model import one_model_api
from tests.cluster.dispatch.in_process import InProcess
from tests.cluster.ports import free_port
from tests.waiting import until
from tests.workers.replica.driven import hold, posted

CLASSES = (
    SloClass(name="urgent", ttft_s=1e-9, tpot_s=1.0),  # so its deadline is twice the time of a prompt alone
    SloClass(name="standard", ttft_s=1e3, tpot_s=1.0),
)


class EngineApi:
    """An asynchronous context, in which the replicas are up. `http`: fields of `HttpConfig`, `engine`: of
    `EngineConfig`."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        num_replicas: int = 1,
        keys: Any = (),
        router: RouterConfig | None = None,
        most_queued: int = MOST_QUEUED,
        tenant_header: str | None = None,
        http: Any = None,
        **engine: Any,
    ) -> None:
        defaults = {"kv_cache_memory": ByteSize(4 << 20), "slo_classes": CLASSES, "enable_prefix_caching": False}
        config = EngineConfig.model_validate(defaults | engine)
        self.replicas = [InProcess(config) for _ in range(num_replicas)]
        self.dispatcher = Dispatcher("tiny", router, most_queued=most_queued)
        fields = {"api_keys": keys, "tenant_header": tenant_header, **(http or {})}
        settings = HttpConfig.model_validate(fields)
        tiers = ServiceTiers(config.slo_classes, config.default_slo_class)
        rollouts = Rollouts(self.dispatcher) if settings.rollouts else None
        self.app = one_model_api(self.dispatcher, tokenizer, settings, tiers, rollouts=rollouts)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost")

    async def __aenter__(self) -> Self:
        for number, replica in enumerate(self.replicas):  # all advertise the same speed: the router takes turns
            self.dispatcher.join(f"r{number}", replica, self.replicas[0].profile)
        await all_up(self.dispatcher, len(self.replicas))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.aclose()
        await self.dispatcher.close()
        for replica in self.replicas:
            await replica.engine_thread.close()

    async def ask(self, tier: str | None = "urgent", tokens: int = 200, **fields: Any) -> httpx.Response:
        headers = {f"x-{name}": fields.pop(name) for name in ("request-id", "slo-class", "tenant") if name in fields}
        if "key" in fields:
            headers["authorization"] = f"Bearer {fields.pop('key')}"
        body = {"prompt": [5] * tokens, "max_tokens": 3, "ignore_eos": True, "service_tier": tier, **fields}
        return await self.http.post("/v1/completions", json=body, headers=headers)

    async def held(
        self, *asking: Coroutine[Any, Any, httpx.Response], num_submissions: int = 0
    ) -> tuple[list[Any], threading.Event]:
        """Begin requests to a single replica, which accepts them and computes nothing until the event is set."""
        loop, count = self.replicas[0].engine_thread, num_submissions or len(asking)
        gate = await hold(loop)
        tasks = [asyncio.create_task(one) for one in asking]
        await posted(loop, count)
        again = asyncio.create_task(hold(loop))
        await posted(loop, count + 1)
        gate.set()
        return tasks, await again

    async def beside(
        self, streams: Iterable[Coroutine[Any, Any, httpx.Response]], asking: Coroutine[Any, Any, httpx.Response]
    ) -> list[httpx.Response]:
        """Begin streams at a single replica and, between two of its steps, a request beside them. Return all answers.

        So steps are shared, however fast the engine and however busy the event loop is.
        """
        thread = self.replicas[0].engine_thread
        gate = await hold(thread)
        try:
            tasks = [asyncio.create_task(each) for each in streams]
            while sum(request.is_decoding for request in thread.engine.scheduler.table.running) < len(tasks):
                gate = await hold(thread, gate)
            num_posted = thread.num_posted
            tasks.append(asyncio.create_task(asking))
            await posted(thread, num_posted + 1)
        finally:
            gate.set()
        return list(await asyncio.gather(*tasks))

    async def get(self, path: str, key: str = "none") -> httpx.Response:
        return await self.http.get(f"/v1/requests{path}", headers={"authorization": f"Bearer {key}"})

    async def owned_pages(self) -> int:
        return sum([await replica.owned_pages() for replica in self.replicas])


class LiveApi:
    """An `EngineApi` with one small replica, its port and its thread."""

    def __init__(self, tokenizer: ModelTokenizer, keys: Any) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)  # a start that fails leaves it
        self._thread.start()
        self.api: EngineApi = self.call(self._start(tokenizer, keys, port))

    async def _start(self, tokenizer: ModelTokenizer, keys: Any, port: int) -> EngineApi:
        tiers = {"enable_prefix_caching": True, "kv_cache_host_memory": ByteSize(16 << 20)}
        api = EngineApi(tokenizer, keys=keys, max_num_batched_tokens=40, max_num_seqs=8, admission="queue", **tiers)
        await api.__aenter__()
        self._server = await listen(api.app, "127.0.0.1", port, write_timeout_s=60)
        return api

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the API's thread and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(240)  # the first engine may take a minute

    def stop(self) -> None:
        self.call(self._server.close(0))
        self.call(self.api.__aexit__())
        self.call(self._server.close(1))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(240)
        self.loop.close()

    def work(self, key: str = "mine") -> None:
        """Serve two streams and, while they have tokens to come, a prompt that is long for this engine."""

        streams = [self.api.ask("standard", 20, key=key, max_tokens=60) for _ in range(2)]
        asking = self.api.ask("standard", 230, key=key, **{"request-id": f"of-{key}"})
        assert [answer.status_code for answer in self.call(self.api.beside(streams, asking))] == [200] * 3


@contextmanager
def live_api(tokenizer: ModelTokenizer, keys: Any = ()) -> Iterator[LiveApi]:
    api = LiveApi(tokenizer, keys)
    try:
        yield api
    finally:
        api.stop()


def lose_after(api: EngineApi, num_tokens: int) -> None:
    """Kill the replica of the first choice once the choice has some tokens."""
    generate = api.dispatcher.generate
    seen: set[str] = set()

    async def generate_and_lose(submission: Submission, reader: Any = None) -> AsyncIterator[TokenDelta]:
        is_first, count = not seen, 0
        seen.add(submission.id)
        async with aclosing(generate(submission, reader)) as deltas:
            async for delta in deltas:
                count += len(delta.token_ids)
                if is_first and count >= num_tokens and not any(replica.is_killed for replica in api.replicas):
                    victim = next(i for i in range(2) if api.dispatcher.fleet.num_booked(f"r{i}"))
                    api.replicas[victim].is_killed = True
                yield delta

    api.dispatcher.generate = generate_and_lose  # type: ignore[method-assign]


async def all_up(dispatcher: Dispatcher, count: int) -> None:
    """Wait until `count` replicas can serve."""
    await until(lambda: len(dispatcher.fleet) >= count)
