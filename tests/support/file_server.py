"""A web server on the loopback interface that serves a few files from memory, for the tests of downloading."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(files: Mapping[str, bytes], *, cut: int = 0) -> Iterator[str]:
    """The address; `cut`: how many bytes of every answer are announced but never sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = files.get(self.path.lstrip("/"))
            if content is None:
                self.send_error(404, "no such file")
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) - cut])

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
