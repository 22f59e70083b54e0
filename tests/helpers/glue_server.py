"""A local web server with made-up archives, and the ways in which servers fail."""

import contextlib
import http.server
import io
import threading
import zipfile
from typing import Dict, Iterator, List, Optional, Tuple


def make_archive(entries: Dict[str, str]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries.items():
            archive.writestr(name, text.encode("utf-8"))
    return stream.getvalue()


class Server:
    """``files`` by path; ``failures``: what happens to the first requests (a status, or "cut": half of the answer).

    ``requests``: path and ``Range`` header of each request so far. Ranges are honoured unless ``ranges`` is false.
    """

    def __init__(self, files: Dict[str, bytes]) -> None:
        self.files = files
        self.failures: List[object] = []
        self.requests: List[Tuple[str, Optional[str]]] = []
        self.ranges = True
        self.url = ""

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range")
        self.requests.append((handler.path, wanted))
        failure = self.failures.pop(0) if self.failures else None
        content = self.files.get(handler.path)
        if isinstance(failure, int) or content is None:
            handler.send_error(failure if isinstance(failure, int) else 404)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if start and start >= len(content):
            handler.send_error(416)
            return
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        body = content[start:]
        handler.wfile.write(body[: len(body) // 2] if failure == "cut" else body)


@contextlib.contextmanager
def serve(files: Dict[str, bytes]) -> Iterator[Server]:
    server = Server(files)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server.url = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()
