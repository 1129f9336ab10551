"""Memory of an ingress for all requests: bodies, what they become, prompts, and answers that are not read yet."""

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.heap import LARGE, Heap
from crossdock.cluster.api.http.json_size import check_json_size
from crossdock.workers.schedule.shares import Shares

SMALL = 1 << 16  # bytes; a request that holds no more is served however much others hold
TOKEN_BYTES = 40  # a token id in a list
LOGPROB_BYTES = 200  # an alternative of a token: as a tuple, and as JSON
_PART_BYTES = 100  # a string, list or object beside its text
_CHAR_BYTES = 4  # of a text that is not ASCII alone
_heap = Heap()


class RequestMemory:
    """The bytes that one request holds, counted until `release`. Owners have shares of the whole."""

    def __init__(self, shares: Shares, owner: str) -> None:
        """`shares`: of all requests. `owner`: of the API key; empty where no keys are in use."""
        self._shares = shares
        self._owner = owner
        self._num_bytes = 0
        self._num_announced = 0  # a part of these bytes: what has not come yet

    def announce(self, num_bytes: int) -> None:
        """Count a body before it arrives, and the text that it becomes at least. Raises ApiError 429 as `hold` does.

        So of bodies that come together as many are read and parsed as fit, and the others are refused at once.
        """
        self.hold(2 * num_bytes)
        self._num_announced = 2 * num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Count bytes of which a later `hold` counts the whole. Raises ApiError 429 as `hold` does."""
        announced = self._num_announced
        self._num_announced = 0
        self.hold(num_bytes)
        self._num_announced = announced + num_bytes

    def hold(self, num_bytes: int) -> None:
        """Count bytes more, or take them from those announced.

        Raises ApiError 429 if the requests of the owner, or all together, hold too much.
        """
        arrived = min(num_bytes, self._num_announced)
        self._num_announced -= arrived
        num_bytes -= arrived
        total = self._num_bytes + num_bytes
        room = self._shares.room(self._owner, freed=self._num_bytes, freed_of_owner=self._num_bytes)
        if num_bytes > 0 and total > SMALL and total > room:
            reason = f"This request would hold {total} bytes, and {room} are free: other large requests run"
            hint = "Try again later, or send less (http.request_memory_bytes)"
            headers = {"Retry-After": "1", "Connection": "close"}
            raise ApiError(f"{reason}. {hint}.", status=429, code="request_memory", headers=headers)
        self._shares.take(self._owner, num_bytes)
        self._num_bytes = total

    async def admit(self, content: bytes) -> None:
        """Count what JSON from outside becomes, before it is parsed: a body, a line of a batch, arguments of calls.

        Every such text goes through here. Raises ApiError 400 for JSON with too many values, and 429 as `hold` does.
        """
        num_parts, num_values = await check_json_size(content)
        self.hold_parsed(content, num_parts, num_values)

    def keep(self, num_bytes: int) -> None:
        """Count bytes that are there already, such as an answer: to refuse them would free nothing."""
        self._shares.take(self._owner, num_bytes)
        self._num_bytes += num_bytes

    def hold_parsed(self, body: bytes, num_parts: int, num_values: int) -> None:
        """Count what a body becomes: its text, and the objects around it. Raises ApiError 429 as `hold` does."""
        is_narrow = body.isascii() and b"\\u" not in body
        text = len(body) * (1 if is_narrow else _CHAR_BYTES)
        self.hold(text)
        self.hold_values(num_parts, num_values)

    def hold_values(self, num_parts: int, num_values: int) -> None:
        """Count strings, lists and objects beside their text, and values. Raises ApiError 429 as `hold` does."""
        self.hold(_PART_BYTES * num_parts + TOKEN_BYTES * num_values)

    def release(self) -> None:
        """Count nothing any longer, and return the memory of a large request to the machine. May be called twice."""
        if self._num_bytes >= LARGE:
            _heap.trim_later()
        self._shares.release(self._owner, self._num_bytes)
        self._num_bytes = self._num_announced = 0

    def hand_over(self) -> "RequestMemory":
        """Count the bytes for work that goes on after the HTTP request: until the `release` of the object returned."""
        taken = RequestMemory(self._shares, self._owner)
        taken._num_bytes = self._num_bytes
        self._num_bytes = 0
        return taken
