"""Answer /v1/responses: conversations in the form of OpenAI's Responses API. Answers are stored for a while."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Query, Request, Response
from pydantic_core import from_json

from crossdock.cluster.api import bounds
from crossdock.cluster.api.body.conversation_body import text_of
from crossdock.cluster.api.body.response_items import Item, call_texts, input_items, new_id, referred_response
from crossdock.cluster.api.body.responses_body import ResponsesChat, ResponsesRequest
from crossdock.cluster.api.errors import ApiError, to_json, wrong
from crossdock.cluster.api.http.answers import SILENCE_S
from crossdock.cluster.api.http.http_guard import as_api_error
from crossdock.cluster.api.http.http_json import Name, event_stream, json_answer
from crossdock.cluster.api.http.json_size import check_texts_size, count_marks
from crossdock.cluster.api.http.keys import owner_of
from crossdock.cluster.api.http.limits import Charge
from crossdock.cluster.api.http.request_memory import RequestMemory
from crossdock.cluster.api.routes.conversations import BegunChat, Conversations, Part
from crossdock.cluster.api.routes.response_events import EVENTS_AT_ONCE, Event, EventLog, ResponseAnswer, written
from crossdock.cluster.api.routes.response_store import ResponseStore, StoredResponse
from crossdock.cluster.api.slices import apart, slices
from crossdock.cluster.api.text.logprobs import LogprobWriter
from crossdock.workers.schedule.shares import Shares

logger = logging.getLogger("ray.serve")

Action: TypeAlias = Literal["get", "delete", "cancel", "follow"]
AskStores: TypeAlias = Callable[[Action, str, str, int], Awaitable[list[StoredResponse]]]
"""Does something to an owner's response at the other ingresses. Returns the records of those that have it.

To "follow" is to wait for events after one of a number; the records hold these alone.
"""

Written: TypeAlias = tuple[tuple[str, bytes], ...]  # items, as `StoredResponse` has them
_ITEMS_AT_ONCE = 64  # parsed or written
_COMMENT = b": \n\n"  # keeps a stream open; clients pass over it
_FOLLOWED_S = 1.0  # an ingress waits so long for events of a response; another that asks it waits for 2 s
_EVENTS_SHARE = 8  # the events of a response that has ended stay if they take at most this part of the store
_MOST_IN_BACKGROUND = 1024  # responses of one ingress that no client waits for


class Responses:
    def __init__(
        self,
        conversations: Conversations,
        writer: LogprobWriter,
        store: ResponseStore | None,
        ask_stores: AskStores | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """`store`: None where nothing may be kept. `timeout_s`: the longest that a response in the background takes."""
        self._conversations = conversations
        self._writer = writer
        self._store = store
        self._ask_stores = ask_stores
        self._timeout_s = timeout_s
        self._background: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._logs: dict[tuple[str, str], EventLog] = {}  # of those in the background that are streamed
        self._places = Shares(_MOST_IN_BACKGROUND)

    def of(self, conversations: Conversations, writer: LogprobWriter) -> "Responses":
        """Return the responses of another model, which share this one's store and work in the background."""
        other = copy(self)
        other._conversations = conversations
        other._writer = writer
        return other

    async def create(self, request: Request, body: ResponsesRequest) -> Response:
        given = await self._resolved(request, body.input)
        await check_texts_size(call_texts(given), "input")
        own = await apart(partial(input_items, given), given)
        items = [*await self._items_before(request, body), *own]
        chat = await apart(partial(body.chat, items, len(own)), items)
        written = await _written(items) if self._store_of(body) is not None else ()
        del given, own, items
        if body.background:
            return await self._create_in_background(request, body, written, chat)
        begun = await self._conversations.begin(request, chat)
        answer = self._answer(body, begun)
        if body.stream:
            request.state.error_event = answer.error_event
            return await event_stream(self._events(request, body, begun, answer, written))
        await self._finish(begun, answer)
        return _json(self._keep(request, body, answer, written))

    async def retrieve(
        self,
        request: Request,
        name: Name,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        """Return a stored response as it is now, or its events, from the first or after one of a number."""
        if stream:
            return await event_stream(self._followed(request, name, -1 if starting_after is None else starting_after))
        if starting_after is not None:
            raise wrong("starting_after", "it needs 'stream'")
        return _json((await self._record("get", request, name)).response)

    async def delete(self, request: Request, name: Name) -> Response:
        await self._record("delete", request, name)
        return json_answer({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request, name: Name) -> Response:
        """End a response in the background. One that has ended stays as it is."""
        record = await self._record("cancel", request, name)
        if not record.is_background:
            reason = (
                "Only a response that was created with 'background' can be cancelled: close the connection instead."
            )
            raise ApiError(reason, param="id", code="invalid_value")
        return _json(record.response)

    async def items(
        self,
        request: Request,
        name: Name,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List the items before a response, those of previous responses included."""
        items = (await self._record("get", request, name)).items
        items = items if order == "asc" else items[::-1]
        names = [item_name for item_name, _ in items]
        if after is not None and after not in names:
            raise wrong("after", "there is no such item")
        start = 0 if after is None else names.index(after) + 1
        page = items[start : start + limit]
        ends = {"first_id": page[0][0] if page else None, "last_id": page[-1][0] if page else None}
        head = to_json({"object": "list", **ends, "has_more": start + limit < len(items)})
        return _json(b'%b,"data":[%b]}' % (head[:-1], b",".join(item for _, item in page)))

    async def at_this_ingress(self, action: Action, owner: str, name: str, after: int = -1) -> StoredResponse | None:
        """Return the record of a response, after `action`; None if it is not here.

        Only to "follow" returns events, those after the one of number `after`, and nothing else.
        """
        if self._store is None:
            return None
        if action == "follow":
            return await self._followed_here(owner, name, after)
        running = self._background.get((owner, name))
        if action != "get" and running is not None:
            running.cancel()
            await asyncio.wait([running])
        found = self._store.delete(owner, name) if action == "delete" else self._store.get(owner, name)
        return found and replace(found, events=None)

    async def _followed_here(self, owner: str, name: str, after: int) -> StoredResponse | None:
        """Return some events of a response after one of a number, once there is one; none within a second."""
        if (log := self._logs.get((owner, name))) is not None:
            some, is_running = await log.after(after, _FOLLOWED_S)
            return StoredResponse(b"", (), is_background=True, events=tuple(some), is_running=is_running)
        assert self._store is not None
        found = self._store.get(owner, name)
        if found is None:
            return None
        events = found.events and found.events[after + 1 : after + 1 + EVENTS_AT_ONCE]
        is_running = found.events is not None and after + 1 + EVENTS_AT_ONCE < len(found.events)
        return StoredResponse(b"", (), found.is_background, events, is_running)

    async def _followed(self, request: Request, name: str, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events of a response after the one of number `after`, of a running one as they come.

        Raises:
            ApiError: it is not known, or has no events that could be read again.
        """
        request.state.error_event = lambda error: _cut(error, after)
        clock = asyncio.get_running_loop().time
        shown_at = clock()
        log = self._logs.get((_owner(request), name))  # has the last events, too, whatever is stored in the end
        is_running = True
        while is_running:
            if log is not None:
                events, is_running = await log.after(after, _FOLLOWED_S)
            else:
                record = await self._record("follow", request, name, after=after)
                if record.events is None:
                    reason = f"Response '{name[:100]}' has no events to read again: create it with 'background' and"
                    hint = f"'stream'. Those of a long one are forgotten at its end (more than 1/{_EVENTS_SHARE} of"
                    reason = f"{reason} {hint} http.response_store_bytes)."
                    raise ApiError(reason, param="stream", code="invalid_value")
                events, is_running = record.events, record.is_running
            after += len(events)
            if events or clock() - shown_at > SILENCE_S:
                shown_at = clock()
                yield b"".join(events) or _COMMENT

    async def _record(
        self, action: Action, request: Request, name: str, param: str = "id", *, after: int = -1
    ) -> StoredResponse:
        """Return the record of a response. Raises ApiError 404."""
        owner = _owner(request)
        found = await self.at_this_ingress(action, owner, name, after)
        if found is None and self._store is not None and self._ask_stores is not None:
            found = next(iter(await self._ask_stores(action, owner, name, after)), None)
        if found is None:
            reason = (
                f"Response '{name[:100]}' is not known here: it was not stored, was deleted, is too old, made way for"
            )
            hint = (
                "newer ones, belongs to another API key, or its ingress has ended. Send the whole conversation instead"
            )
            raise ApiError(f"{reason} {hint}.", status=404, param=param, code="response_not_found")
        return found

    async def _items_before(self, request: Request, body: ResponsesRequest) -> list[Item]:
        """Return the conversation up to the previous response's end. Raises ApiError where that is unknown or runs."""
        if body.previous_response_id is None:
            return []
        record = await self._record("get", request, body.previous_response_id, "previous_response_id")
        response = from_json(record.response)
        if response["status"] == "in_progress":
            reason = "The previous response has not ended yet."
            raise ApiError(reason, param="previous_response_id", code="invalid_value")
        items: list[Item] = []
        async for some in slices(record.items, _ITEMS_AT_ONCE):
            for _, item in some:
                request.state.memory.hold(len(item))  # written again with this response
                request.state.memory.hold_parsed(item, *count_marks(item))
                items.append(from_json(item))
        return [*items, *response["output"]]

    async def _resolved(self, request: Request, given: Any) -> Any:
        """Return the input with the items themselves where it has references to those of stored responses.

        Raises ApiError 404 for the first reference to an item that is not stored.
        """
        if not isinstance(given, list) or len(given) > bounds.MESSAGES:
            return given
        items = []
        found = dict[str, Any]()
        for i, item in enumerate(given):
            if isinstance(item, dict) and item.get("type") == "item_reference":
                name = text_of(item.get("id"), f"input[{i}].id")
                if name not in found:
                    record = await self._record("get", request, referred_response(name), f"input[{i}].id")
                    found |= {each["id"]: each for each in from_json(record.response)["output"]}
                if name not in found:
                    raise wrong(f"input[{i}].id", f"no stored response has an item {name[:100]!r}")
                item = found[name]
            items.append(item)
        return items

    async def _create_in_background(
        self, request: Request, body: ResponsesRequest, items: Written, chat: ResponsesChat
    ) -> Response:
        if self._store is None:
            reason = "'background' is not supported: this server stores no responses (http.response_store_bytes is 0)."
            raise ApiError(reason, param="background", code="unsupported_parameter")
        owner = _owner(request)
        if not self._places.room(owner):
            whose = "" if self._places.num_used >= self._places.most else ", of which this API key has its share,"
            reason = f"{self._places.num_used} responses{whose} are being made in the background. Try again later."
            raise ApiError(reason, status=429, code="rate_limit_exceeded")
        self._places.take(owner, 1)
        charge = request.state.account
        if charge is not None:
            charge = request.state.account = charge.hand_over()
        try:
            begun = await self._conversations.begin(request, chat)
        except BaseException:
            self._places.release(owner, 1)
            _end(charge)
            raise
        answer = self._answer(body, begun)
        self._keep(request, body, answer, items)
        key = (owner, answer.response["id"])
        memory = request.state.memory.hand_over()
        log = EventLog() if body.stream else None
        if log is not None:
            log.add(answer.begin())
            self._logs[key] = log

        async def work() -> None:
            last: list[Event] = []
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._finish(begun, answer, log, memory)
            except asyncio.CancelledError:
                last = answer.cancel()
            except TimeoutError:
                reason = f"The response took more than {self._timeout_s} s."
                last = answer.fail(ApiError(reason, status=504, code="request_timeout"))
            except Exception as error:
                api_error = as_api_error(error)
                if api_error.status == 500:
                    logger.error("response %s failed", key[1], exc_info=error)
                elif api_error.status > 500:
                    logger.warning("response %s failed: %s", key[1], error)
                last = answer.fail(api_error)
            finally:
                _end(charge)
                memory.release()
                if log is not None:
                    log.add(last, is_last=True)
                self._keep(request, body, answer, items, log)
                self._logs.pop(key, None)
                del self._background[key]
                self._places.release(owner, 1)

        self._background[key] = asyncio.create_task(work())
        await asyncio.sleep(0)  # a task that is cancelled before it has begun would not end its response
        if body.stream:
            return await event_stream(self._followed(request, key[1], -1))
        return json_answer(answer.response)

    async def _events(
        self,
        request: Request,
        body: ResponsesRequest,
        begun: BegunChat,
        answer: ResponseAnswer,
        items: Written,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; events of one step of the model come together."""
        has_begun = False
        clock = asyncio.get_running_loop().time
        shown_at = clock()

        def shown(events: list[Event]) -> bytes:
            nonlocal shown_at
            if not events and clock() - shown_at <= SILENCE_S:
                return b""
            shown_at = clock()
            return written(events) or _COMMENT

        direct = None if begun.chat.logprobs else lambda part: shown(answer.add(part.pieces, []))
        async with aclosing(self._conversations.parts(begun, direct)) as parts:
            async for part in parts:
                events = [] if has_begun else answer.begin()
                has_begun = True
                events += await self._step(begun, answer, part)
                if part.output.finish_reason is not None:
                    self._keep(request, body, answer, items)
                if event := shown(events):
                    yield event

    async def _finish(
        self,
        begun: BegunChat,
        answer: ResponseAnswer,
        log: EventLog | None = None,
        memory: RequestMemory | None = None,
    ) -> None:
        """Compute an answer that is not sent as it is made. `memory`: counts the events in the log."""
        async with aclosing(self._conversations.parts(begun)) as parts:
            async for part in parts:
                events = await self._step(begun, answer, part)
                if log is not None and memory is not None:
                    memory.hold(log.add(events))

    async def _step(self, begun: BegunChat, answer: ResponseAnswer, part: Part) -> list[Event]:
        output = part.output
        logprobs = []
        if begun.chat.logprobs:
            positions = [position for _, position in output.positions if position is not None]
            logprobs = (await self._writer.chat(positions, begun.chat.num_top()))["content"]
        events = answer.add(part.pieces, logprobs)
        if output.finish_reason is not None:
            fields = {"usage": _usage(begun), **output.weight_versions}
            events += answer.end(fields, is_cut=output.finish_reason == "length")
        return events

    def _store_of(self, body: ResponsesRequest) -> ResponseStore | None:
        """Return where the response is stored; None: its client or this server wants nothing stored."""
        return self._store if body.store else None

    def _answer(self, body: ResponsesRequest, begun: BegunChat) -> ResponseAnswer:
        """Return the answer to a request before its first token."""
        return ResponseAnswer(_head(body, begun, is_stored=self._store_of(body) is not None), body.namespaces())

    def _keep(
        self,
        request: Request,
        body: ResponsesRequest,
        answer: ResponseAnswer,
        items: Written,
        log: EventLog | None = None,
    ) -> bytes:
        """Return the response as it is now. Store it, with the events of `log` if these are small enough."""
        response = to_json(answer.response)
        if (store := self._store_of(body)) is not None:
            events = () if log is None else tuple(log.events)
            is_small = sum(map(len, events)) <= store.max_bytes // _EVENTS_SHARE
            record = StoredResponse(response, items, body.background, events if events and is_small else None)
            store.put(_owner(request), answer.response["id"], record)
        return response


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _head(body: ResponsesRequest, begun: BegunChat, *, is_stored: bool) -> dict[str, Any]:
    """Return the fields of the response that are known before its first token."""
    generation = begun.generation
    sampling = begun.choice.submission.sampling
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": body.model or generation.card.name,
        "service_tier": generation.tier.openai_name,
        "background": body.background,
        "completed_at": None,
        "frequency_penalty": sampling.frequency_penalty,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "safety_identifier": None,  # nothing is kept about end users
        "store": is_stored,
        "temperature": sampling.temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


async def _written(items: list[Item]) -> Written:
    """Return items as a record has them. Other requests are served meanwhile."""
    return tuple([(item["id"], to_json(item)) async for some in slices(items, _ITEMS_AT_ONCE) for item in some])


def _cut(error: ApiError, after: int) -> bytes:
    """Return the event that ends a stream because of an error, after the event of number `after`."""
    event = {
        "type": "error",
        "sequence_number": after + 1,
        "code": error.code,
        "message": str(error),
        "param": error.param,
    }
    return written([event])


def _owner(request: Request) -> str:
    return owner_of(request.state.api_key)


def _end(charge: Charge | None) -> None:
    if charge is not None:
        charge.end()


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that every function has in a response."""
    return {"description": None, "strict": None, **tool} if tool.get("type") == "function" else tool


def _usage(begun: BegunChat) -> dict[str, Any]:
    choice = begun.choice
    num_prompt_tokens = len(choice.prompt.token_ids)
    return {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": choice.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": choice.num_tokens,
        "output_tokens_details": {"reasoning_tokens": begun.message.reasoning_tokens},
        "total_tokens": num_prompt_tokens + choice.num_tokens,
    }
