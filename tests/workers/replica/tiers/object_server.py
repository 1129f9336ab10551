"""An object store that speaks S3's protocol on a port of this machine, and fails as a test says."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from re import findall
from typing import Literal, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import certifi
import pytest

BUCKET = "bucket"
Request: TypeAlias = Literal["PUT", "GET", "LIST", "DELETE"]
Fault: TypeAlias = Literal["error", "hang", "cut"]


class ObjectServer(ThreadingHTTPServer):
    """The objects by key, and the faults: one answer of a kind after the other."""

    daemon_threads = True

    def __init__(self, per_list: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.per_list = per_list
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.faults: dict[Request, Fault] = {}
        self.seen: Counter[Request] = Counter()
        self.most_at_once = 0
        self.at_once = 0
        self.delay_s = 0.0  # of each object that is read
        self.ends = threading.Event()
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    server: ObjectServer
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._fails("PUT"):
            self.server.objects[self._key] = content, time.time()
            self._answer(200)

    def do_GET(self) -> None:
        if "list-type=2" in self.path:
            if not self._fails("LIST", listed := self._listed().encode()):
                self._answer(200, listed)
            return
        with self.server.lock:
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        time.sleep(self.server.delay_s)
        with self.server.lock:
            self.server.at_once -= 1
        content, written = self.server.objects.get(self._key, (None, 0.0))
        if content is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif not self._fails("GET", content):
            self._answer(200, content, written)

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if not self._fails("DELETE"):
            keys = findall("<Key>(.*?)</Key>", asked)
            for key in keys:
                self.server.objects.pop(key, None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")

    def _listed(self) -> str:
        query = parse_qs(urlsplit(self.path).query)
        prefix, after = (query.get(name, [""])[0] for name in ("prefix", "continuation-token"))
        keys = sorted(key for key in self.server.objects if key.startswith(prefix) and key > after)
        page, more = keys[: self.server.per_list], keys[self.server.per_list :]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_stamp(self.server.objects[key][1])}</LastModified>"
            f"<Size>{len(self.server.objects[key][0])}</Size></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return f"<ListBucketResult>{token}{entries}</ListBucketResult>"

    def _fails(self, request: Request, content: bytes = b"") -> bool:
        """Fail a request as the test says, and return whether it was to fail."""
        self.server.seen[request] += 1
        fault = self.server.faults.get(request)
        if fault == "error":
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif fault == "hang":
            self.server.ends.wait(240)
            self.close_connection = True
        elif fault == "cut":
            if content:  # else there is no answer at all
                self._head(200, len(content))
                self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        return fault is not None

    def _answer(self, status: int, content: bytes = b"", written: float = 0.0) -> None:
        self._head(status, len(content), written)
        self.wfile.write(content)

    def _head(self, status: int, num_bytes: int, written: float = 0.0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(num_bytes))
        self.send_header("ETag", '"tag"')
        self.send_header("Last-Modified", datetime.fromtimestamp(written, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"))
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Stay silent."""


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@contextmanager
def object_server(monkeypatch: pytest.MonkeyPatch, per_list: int = 1000) -> Iterator[ObjectServer]:
    """Yield a store with a bucket, which the environment names. `per_list`: keys in one answer to a list."""
    server = ObjectServer(per_list)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    named = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1"}
    for name, value in (named | {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())  # obstore wants certificates, also where it speaks no TLS
    try:
        yield server
    finally:
        server.ends.set()
        server.shutdown()
        thread.join()
        server.server_close()
