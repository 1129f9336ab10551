"""A bucket of a local HTTP server that speaks as much S3 as a model's loader needs: lists, and reads of byte ranges."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

from tests.cluster.ports import server_of


@contextmanager
def bucket_of(folder: Path) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Serve a folder's files as the bucket `b`, without keys. Yields the endpoint, and a list of (key, bytes) sent."""
    sent: list[tuple[str, int]] = []

    class Bucket(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:  # http.server's name
            self.do_GET()

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            key = url.path.removeprefix("/b").strip("/")
            if not key:
                self._send(200, _listing(folder, parse_qs(url.query)))
            elif not (folder / key).is_file():
                self._send(404, b"")
            elif (span := self.headers.get("Range")) is None:
                self._send(200, (folder / key).read_bytes(), key)
            else:
                first, _, last = span.removeprefix("bytes=").partition("-")
                size, start = (folder / key).stat().st_size, int(first)
                stop = min(int(last), size - 1) if last else size - 1
                with (folder / key).open("rb") as file:
                    file.seek(start)
                    content = file.read(stop - start + 1)
                self._send(206, content, key, f"bytes {start}-{stop}/{size}")

        def _send(self, status: int, body: bytes, key: str = "", span: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"0"')
            if span:
                self.send_header("Content-Range", span)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
                sent.append((key, len(body)))

        def log_message(self, format: str, *args: object) -> None:
            pass

    with server_of(Bucket) as url:
        yield url, sent


def _listing(folder: Path, query: dict[str, list[str]]) -> bytes:
    prefix, delimiter = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
    keys = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    found = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{(folder / key).stat().st_size}</Size></Contents>"
        for key in keys
        if key.startswith(prefix) and not (delimiter and delimiter in key.removeprefix(prefix))
    )
    head = '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    return f"{head}<Name>b</Name><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()
