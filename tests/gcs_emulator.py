"""A local Google Cloud Storage: gcp-storage-emulator behind a server that can be made to fail."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any

from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

# A status to answer with, or how to fail: "reset" closes the connection, "cut" stops in the middle
# of the body, "short" leaves out the body's end and says nothing of it.
Fault = int | str | None


class Store:
    """A running service.

    Attributes:
      address: for STORAGE_EMULATOR_HOST.
      fault: called with the number of the request, its method and path; returns a Fault.
      requests: (method, path) of all requests.
      faults: how many were answered by a fault.
    """

    def __init__(self, address: str):
        self.address = address
        self.fault: Callable[[int, str, str], Fault] = lambda number, method, path: None
        self.requests: list[tuple[str, str]] = []
        self.faults = 0
        self.lock = threading.Lock()

    def client(self) -> Any:
        """The library's own client, for what a test puts in and takes out."""
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage

        options = {"api_endpoint": self.address}
        return storage.Client("test", credentials=AnonymousCredentials(), client_options=options)

    def put(self, name: str, data: bytes) -> None:
        bucket, _, name = name.removeprefix("gs://").partition("/")
        self.client().bucket(bucket).blob(name).upload_from_string(data)

    def names(self, prefix: str) -> list[str]:
        bucket, _, prefix = prefix.removeprefix("gs://").partition("/")
        return sorted(blob.name for blob in self.client().list_blobs(bucket, prefix=prefix))

    def get(self, name: str) -> bytes:
        bucket, _, name = name.removeprefix("gs://").partition("/")
        return self.client().bucket(bucket).blob(name).download_as_bytes()


class _Handler(RequestHandler):
    def __init__(self, service: Store, *args: Any):
        self.service = service
        super().__init__(*args)

    def handle_one_request(self) -> None:
        # Clients may go away in the middle of an answer: that is what faults are for.
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def _answer(self, method: str) -> None:
        service = self.service
        with service.lock:
            number = len(service.requests)
            service.requests.append((method, self.path))
            fault = service.fault(number, method, self.path)
            service.faults += fault is not None
        if fault is None:
            with service.lock:  # the emulator's storage knows one thread only
                getattr(RequestHandler, f"do_{method}")(self)
        elif isinstance(fault, int):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_error(fault)
        elif fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self._answer_in_part(method, honest=fault == "cut")

    def _answer_in_part(self, method: str, *, honest: bool) -> None:
        body, self.wfile = self.wfile, _Half(self.wfile, honest=honest)  # type: ignore[assignment]
        with self.service.lock:
            getattr(RequestHandler, f"do_{method}")(self)
        self.wfile = body
        self.close_connection = True


class _Half:
    """Passes on the headers, and half of the body."""

    def __init__(self, file: Any, *, honest: bool):
        self._file, self._honest, self._head = file, honest, True

    def write(self, data: bytes) -> int:
        if not self._head:
            self._file.write(data[: len(data) // 2])
            return len(data)
        self._head = False
        if self._honest:
            return self._file.write(data)
        lines = data.split(b"\r\n")
        for i, line in enumerate(lines):
            if line.startswith(b"Content-Length: "):
                lines[i] = b"Content-Length: %d" % (int(line.split()[1]) // 2)
        return self._file.write(b"\r\n".join(lines))

    def flush(self) -> None:
        self._file.flush()


@contextlib.contextmanager
def serve(*names: str) -> Iterator[Store]:
    """Runs a service with these buckets, on a free port."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    storage = Storage(use_memory_fs=True)
    for name in names:
        buckets.create_bucket(name, storage)
    server = ThreadingHTTPServer(("localhost", 0), None)  # type: ignore[arg-type]
    service = Store(f"http://localhost:{server.server_address[1]}")

    def handler(*args: Any) -> Any:
        return _Handler(service, storage, *args)

    server.RequestHandlerClass = handler  # type: ignore[assignment]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
