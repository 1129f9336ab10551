"""A collector of traces on a port of this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.cluster.ports import server_of


@contextmanager
def collector(
    status: int = 200, answers: threading.Event | None = None
) -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Yield the collector's URL, and the list of the requests that it receives. It waits until it `answers`."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers["content-type"] == "application/x-protobuf"
            received.append(ExportTraceServiceRequest.FromString(body))
            if answers is not None:
                answers.wait(240)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with server_of(Handler) as url:
        yield f"{url}/v1/traces", received
