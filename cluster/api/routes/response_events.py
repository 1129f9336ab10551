"""One answer of the Responses API: its output items as a whole, and as events that build them."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from crossdock.cluster.api.body.response_items import Item, item_id, new_id
from crossdock.cluster.api.errors import ApiError, to_json
from crossdock.cluster.api.http.answers import named_event
from crossdock.cluster.api.text.message_parser import CallText, ContentText, Piece, ReasoningText

Event: TypeAlias = dict[str, Any]
EVENTS_AT_ONCE = 256  # of a stream that is read again
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseAnswer:
    """A response while it is being made. Every event that it returns counts in the stream's `sequence_number`."""

    def __init__(self, head: dict[str, Any], namespaces: Mapping[str, str] | None = None) -> None:
        """`head`: the fields of the response that the request decides. `namespaces`: by the names of functions."""
        self._namespaces = namespaces or {}
        self.output: list[Item] = []
        self._head = {**head, "status": "in_progress", "error": None, "incomplete_details": None, "usage": None}
        self._num_events = 0
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[Any] = []  # of the open item
        self._call = -1  # the index of the newest call
        self._is_open = False

    @property
    def response(self) -> dict[str, Any]:
        """Return the response as it is now."""
        return {**self._head, "output": list(self.output)}

    def begin(self) -> list[Event]:
        return [self._event(kind, response=self.response) for kind in ("response.created", "response.in_progress")]

    def add(self, pieces: Sequence[Piece], logprobs: list[Any]) -> list[Event]:
        """Return the events that one step of the model causes. `logprobs`: of its tokens, those of text are shown."""
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case ContentText(text):
                    events += self._opened("message", {"role": "assistant", "content": []})
                    self._logprobs += logprobs
                    events.append(self._delta("response.output_text.delta", text, content_index=0, logprobs=logprobs))
                    logprobs = []
                case ReasoningText(text):
                    events += self._opened("reasoning", {"summary": [], "content": []})
                    events.append(self._delta("response.reasoning_text.delta", text, content_index=0))
                case CallText(index, text, name, call_id):
                    events += self._opened_call(index, name, call_id)
                    if text:
                        events.append(self._delta("response.function_call_arguments.delta", text))
        return events

    def end(self, fields: dict[str, Any], *, is_cut: bool) -> list[Event]:
        """Return the last events of an answer. `fields`: known at the end. `is_cut`: the limit of tokens ended it."""
        status = "incomplete" if is_cut else "completed"
        events = self._closed(status)
        self._head |= {"status": status, **fields}
        if is_cut:
            self._head["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._head["completed_at"] = int(time.time())
        return [*events, self._event(f"response.{status}", response=self.response)]

    def fail(self, error: ApiError) -> list[Event]:
        """Return the last events of an answer that an error ends."""
        events = self._closed("incomplete")
        code = {429: "rate_limit_exceeded"}.get(
            error.status, "server_error" if error.status >= 500 else "invalid_prompt"
        )
        self._head |= {"status": "failed", "error": {"code": code, "message": str(error)}}
        return [*events, self._event("response.failed", response=self.response)]

    def cancel(self) -> list[Event]:
        """End the answer because its client wants no more. Return the last events; OpenAI has none for the end."""
        events = self._closed("incomplete")
        self._head["status"] = "cancelled"
        return events

    def error_event(self, error: ApiError) -> bytes:
        return written(self.fail(error))

    def _opened(self, kind: str, fields: dict[str, Any]) -> list[Event]:
        """Open an item of a kind, unless the open one is of that kind."""
        if self._is_open and self.output[-1]["type"] == kind:
            return []
        events = self._begun({"type": kind, **fields})
        added = self._event("response.content_part.added", **self._place(), content_index=0, part=self._part(""))
        return [*events, added]

    def _opened_call(self, index: int, name: str | None, call_id: str | None) -> list[Event]:
        if index == self._call:
            return []
        self._call = index
        namespace = self._namespaces.get(name or "")
        space = {} if namespace is None else {"namespace": namespace}
        call_id = call_id or new_id("call")
        return self._begun({"type": "function_call", "call_id": call_id, "name": name, "arguments": "", **space})

    def _begun(self, fields: Item) -> list[Event]:
        events = self._closed("completed")
        name = item_id(_PREFIXES[fields["type"]], self._head["id"], len(self.output))
        item = {"id": name, **fields, "status": "in_progress"}
        self.output.append(item)
        self._texts = []
        self._logprobs = []
        self._is_open = True
        place = {"output_index": len(self.output) - 1}
        return [*events, self._event("response.output_item.added", item=dict(item), **place)]

    def _closed(self, status: str) -> list[Event]:
        """Return the events that end the open item, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.output[-1]
        text = "".join(self._texts)
        place = self._place()
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)]
        else:
            part = self._part(text)
            item["content"] = [part]
            if item["type"] == "message":
                more = {"logprobs": self._logprobs}
                kind = "response.output_text.done"
            else:
                more = {}
                kind = "response.reasoning_text.done"
            place["content_index"] = 0
            events = [
                self._event(kind, **place, text=text, **more),
                self._event("response.content_part.done", **place, part=part),
            ]
        item["status"] = status
        return [*events, self._event("response.output_item.done", item=item, output_index=len(self.output) - 1)]

    def _part(self, text: str) -> dict[str, Any]:
        if self.output[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _delta(self, kind: str, text: str, **fields: Any) -> Event:
        self._texts.append(text)
        return self._event(kind, **self._place(), delta=text, **fields)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event


def written(events: Sequence[Event]) -> bytes:
    return b"".join(named_event(event["type"], to_json(event)) for event in events)


class EventLog:
    """The events of a response in the background while it is made, for clients that come later or again.

    An event's place is its `sequence_number`. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self._is_whole = False
        self._news = asyncio.Event()

    def add(self, events: Sequence[Event], *, is_last: bool = False) -> int:
        """Add the events, and return their bytes."""
        added = [written([event]) for event in events]
        self.events += added
        self._is_whole = is_last
        news, self._news = self._news, asyncio.Event()
        news.set()
        return sum(map(len, added))

    async def after(self, number: int, seconds: float) -> tuple[Sequence[bytes], bool]:
        """Return some events after the one of a number, and whether more may come.

        Waits for at most so long until there is one.
        """
        if len(self.events) <= number + 1 and not self._is_whole:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), seconds)
        some = self.events[number + 1 : number + 1 + EVENTS_AT_ONCE]
        return some, not self._is_whole or number + 1 + len(some) < len(self.events)
