"""Batches of prompts with known answers, beside the streams: uploaded, run, cancelled, read and deleted again."""

import collections
import json
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from streams import Case, Clients, Habits

STALLED_S = 150.0  # without a further line: the batch hangs; a refused line may wait for 30 s
_LINES = (5, 20, 40, 80)
_ENDED = ("completed", "failed", "expired", "cancelled")
_PATIENCE_S = 60.0  # of one call


class Stopped(Exception):
    """The benchmark ends, or a call has failed: the batch is left."""


@dataclass(slots=True)
class Batches:
    """Run batches on threads, one after the other until told to stop, and count the outcomes of their lines.

    A share of the batches is cancelled when some lines are done. Each line must have one record: the right tokens, an
    error that the faults excuse, or, after a cancellation, `batch_cancelled`.
    """

    url: str
    clients: Clients  # for their cases, their habits, and when an ingress was killed
    seed: int
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)
    cancelled: int = 0
    _threads: list[threading.Thread] = field(default_factory=list)
    _is_stopping: bool = False

    def start(self, threads: int) -> None:
        """Start so many threads. Each begins its next batch when its last one has ended."""
        for number in range(threads):
            run = threading.Thread(target=self._run, args=(random.Random(f"batches {self.seed} {number}"),))
            run.daemon = True
            self._threads.append(run)
            run.start()

    def stop(self) -> None:
        """Begin no further batch, and wait for those that run. Then end what a lost answer has left."""
        self._is_stopping = True
        for thread in self._threads:
            thread.join(4 * STALLED_S)
            if thread.is_alive():
                self._problem("a batch hung: its thread does not end")
        try:
            self._clean()
        except Stopped:
            return

    # -- one batch -----------------------------------------------------------------------------------------------------

    def _run(self, rng: random.Random) -> None:
        while not self._is_stopping:
            try:
                self._one(rng)
            except Stopped:
                continue
            except Exception as error:
                self._problem(f"the batch's client failed: {type(error).__name__}: {error}")

    def _one(self, rng: random.Random) -> None:
        asked = {f"{number}": rng.choice(self.clients.cases) for number in range(rng.choice(_LINES))}
        upload = ("in.jsonl", b"\n".join(line(name, case, rng) for name, case in asked.items()))
        file = self._call("POST", "/v1/files", data={"purpose": "batch"}, files={"file": upload})
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = self._call("POST", "/v1/batches", json=body)
        is_cancelled = rng.random() < 0.15
        cancels_at = rng.randrange(len(asked)) if is_cancelled else math.inf
        batch = self._wait(batch, cancels_at)
        records = [self._records(batch.get(name)) for name in ("output_file_id", "error_file_id")]
        judged = judge(asked, batch, records[0], records[1], self.clients.habits, is_cancelled=is_cancelled)
        self.outcomes.update(judged.outcomes)
        for problem in judged.problems:
            self._problem(f"{batch['id']}: {problem}")
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if batch.get(name):
                self._call("DELETE", f"/v1/files/{batch[name]}", may_be_gone=True)

    def _wait(self, batch: dict[str, Any], cancels_at: float) -> dict[str, Any]:
        """Return the batch once it has ended. `cancels_at`: lines after which the batch is cancelled."""
        done, progressed_at, path = -1, time.monotonic(), f"/v1/batches/{batch['id']}"
        while batch["status"] not in _ENDED:
            time.sleep(0.3)
            batch = self._call("GET", path)
            counts = batch["request_counts"]
            if counts["completed"] + counts["failed"] > done:
                done, progressed_at = counts["completed"] + counts["failed"], time.monotonic()
            if done >= cancels_at:
                cancels_at = math.inf
                self.cancelled += 1
                self._call("POST", f"{path}/cancel", may_be_gone=True)  # 409: it has just ended
            if time.monotonic() - progressed_at > STALLED_S:
                self._problem(f"a batch hung: no line in {STALLED_S:.0f} s; {batch}")
                self._call("POST", f"{path}/cancel", may_be_gone=True)
                raise Stopped
        return batch

    def _records(self, file_id: str | None) -> list[Any]:
        if not file_id:
            return []
        text = self._call("GET", f"/v1/files/{file_id}/content", read=lambda answer: answer.text)
        return [json.loads(each) for each in text.splitlines()]

    def _clean(self) -> None:
        """Cancel batches, and delete files, whose makers were cut from their ingress. Then no file may be left."""
        for batch in self._call("GET", "/v1/batches", params={"limit": 100})["data"]:
            if batch["status"] not in _ENDED:
                self._call("POST", f"/v1/batches/{batch['id']}/cancel", may_be_gone=True)
                self._wait(batch, math.inf)
        while files := self._call("GET", "/v1/files", params={"limit": 100})["data"]:
            for file in files:
                self._call("DELETE", f"/v1/files/{file['id']}", may_be_gone=True)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        path: str,
        *,
        may_be_gone: bool = False,
        read: Callable[[httpx.Response], Any] = httpx.Response.json,
        **given: Any,
    ) -> Any:
        """Return the content of an answer. Repeats a call that was cut with an ingress that was killed.

        Raises:
            Stopped: another error, which is a problem.
        """
        while True:
            began = time.monotonic()
            try:
                answer = httpx.request(method, self.url + path, timeout=_PATIENCE_S, **given)
            except httpx.TransportError as error:
                if began < self.clients.ingress_ended_at:
                    self.outcomes["call for a batch, cut with its killed ingress"] += 1
                    time.sleep(0.2)
                    continue
                is_hung = isinstance(error, httpx.TimeoutException)
                self._problem(f"{method} {path} {'hung' if is_hung else 'was cut'}: {type(error).__name__}: {error}")
                raise Stopped from None
            if answer.status_code == 200:
                return read(answer)
            if may_be_gone and answer.status_code in (404, 409):
                return None
            self._problem(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
            raise Stopped

    def _problem(self, text: str) -> None:
        self.problems.append(text)
        print("PROBLEM", text[:3000], flush=True)


def line(name: str, case: Case, rng: random.Random) -> bytes:
    """Return a line of an input file. Some lines have a cache of their own, as streams do."""
    body: dict[str, Any] = {"model": "tiny", **case.request}
    if rng.random() < 0.5:
        body["cache_salt"] = f"{rng.getrandbits(64):x}"
    return json.dumps({"custom_id": name, "method": "POST", "url": case.path, "body": body}).encode()


@dataclass(slots=True)
class Judged:
    """Count the outcomes of a batch's lines, and hold their problems."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)


def judge(
    asked: Mapping[str, Case],
    batch: Mapping[str, Any],
    output: Sequence[Mapping[str, Any]],
    errors: Sequence[Mapping[str, Any]],
    habits: Habits,
    *,
    is_cancelled: bool = False,
) -> Judged:
    """Compare the records of a batch that has ended with its lines, by the lines' names."""
    judged = Judged()
    expected = ("completed", "cancelled") if is_cancelled else ("completed",)
    if batch["status"] not in expected:
        judged.problems.append(f"ended as {batch['status']}: {batch.get('errors')}")
    judged.outcomes[f"batch {batch['status']}"] += 1
    seen = collections.Counter(record["custom_id"] for record in [*output, *errors])
    counts = batch["request_counts"]
    if counts["total"] != len(asked) or counts["completed"] != len(output):
        judged.problems.append(f"{len(asked)} lines, {len(output)} and {len(errors)} records, but it counts {counts}")
    for name, case in asked.items():
        if seen.pop(name, 0) != 1:
            judged.problems.append(f"line {name} has not one record; {case}")
    judged.problems += [f"a record for no line: {name}" for name in seen]
    for record in output:
        case = asked.get(record["custom_id"])
        found = record["response"]["body"]["choices"][0].get("token_ids")
        if case is not None and found != case.expected:
            judged.problems.append(f"wrong answer {found}, not {case.expected}; line {record['custom_id']}, {case}")
        else:
            judged.outcomes["line of a batch, complete"] += 1
    for record in errors:
        outcome = _honest(record, habits, is_cancelled=is_cancelled)
        if outcome is None:
            judged.problems.append(f"line {record['custom_id']} failed: {record}")
        else:
            judged.outcomes[outcome] += 1
    return judged


def _honest(record: Mapping[str, Any], habits: Habits, *, is_cancelled: bool) -> str | None:
    """Return the outcome where the error of a line is an honest one; None: a problem."""
    if (record.get("error") or {}).get("code") == "batch_cancelled" and is_cancelled:
        return "line of a batch, cancelled"
    response = record.get("response") or {}
    error = response.get("body", {}).get("error") or {}
    if error.get("code") == "suspect_request" and habits.may_suspect:
        return "line of a batch, told to be suspect: several of its replicas were killed"
    if response.get("status_code") == 404 and habits.may_unload:
        return "line of a batch, 404 of an adapter that is unloaded"
    return None


def left_in(folder: Path) -> list[str]:
    """Return the files of contents that are left in the folder of batches, whose files were all deleted."""
    return [f"{path}" for path in folder.glob("*/files/*")] + [f"{path}" for path in folder.glob("*/*/.*")]
