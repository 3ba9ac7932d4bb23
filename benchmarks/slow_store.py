"""A local folder as Google Cloud Storage that takes its time, for the real clients.

    with serve("records", delay=0.05) as environment: ...

TensorFlow has no setting for another endpoint. But it goes through HTTPS_PROXY and trusts the
certificate in CURL_CA_BUNDLE, as Beam's does by REQUESTS_CA_BUNDLE, so the server stands in for the
proxy and answers itself.
"""

import contextlib
import json
import os
import ssl
import tempfile
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HOSTS = ("storage.googleapis.com", "www.googleapis.com")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_CONNECT(self):
        self.send_response(200, "Connection established")
        self.end_headers()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb")
        self.close_connection = False
        with contextlib.suppress(OSError):
            while not self.close_connection:
                self.handle_one_request()
                self.wfile.flush()
        self.close_connection = True

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        parts = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] == "download":  # /download/storage/v1/b/BUCKET/o/OBJECT: the contents
            return self._send_contents(self.server.folder / "/".join(parts[6:]))
        if parts[:2] != ["storage", "v1"]:  # /BUCKET/OBJECT: the same
            return self._send_contents(self.server.folder / "/".join(parts[1:]))
        if len(parts) > 5:  # /storage/v1/b/BUCKET/o/OBJECT: its facts
            return self._send_facts(self.server.folder / "/".join(parts[5:]))
        if len(parts) == 4:
            return self._send_json({"name": parts[3]})
        query = urllib.parse.parse_qs(url.query)
        return self._send_names(query.get("prefix", [""])[0], query.get("maxResults", ["1000"])[0])

    def _send_contents(self, path):
        time.sleep(self.server.delay)
        if not path.is_file():
            return self.send_error(404)
        size = path.stat().st_size
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), min(size, int(last or size) + 1)
        if start >= size:
            return self.send_error(416)
        with path.open("rb") as file:
            file.seek(start)
            self._send(206, file.read(end - start), "application/octet-stream")

    def _send_facts(self, path):
        if not path.is_file():
            return self.send_error(404)
        name = path.relative_to(self.server.folder).as_posix()
        facts = {"name": name, "size": str(path.stat().st_size), "generation": "1"}
        return self._send_json({**facts, "updated": "2020-01-01T00:00:00.000Z"})

    def _send_names(self, prefix, most):
        names = (path.relative_to(self.server.folder) for path in self.server.folder.rglob("*"))
        names = sorted(name.as_posix() for name in names if (self.server.folder / name).is_file())
        found = [{"name": name} for name in names if name.startswith(prefix)]
        self._send_json({"items": found[: int(most)]})

    def _send_json(self, answer):
        self._send(200, json.dumps(answer).encode(), "application/json")

    def _send(self, status, body, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def _make_certificate(folder):
    """A key and a certificate for Google's host names that nobody else trusts."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "slow_store")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
    hosts = x509.SubjectAlternativeName([x509.DNSName(host) for host in HOSTS])
    signed = builder.add_extension(hosts, critical=False).sign(key, hashes.SHA256())
    encoding = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(signed.public_bytes(encoding))
    form, cipher = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(encoding, form, cipher))


@contextlib.contextmanager
def serve(folder, *, delay):
    """Serves gs://ANY-BUCKET/ from a folder; every request for contents waits `delay` seconds.

    Yields the variables that TensorFlow's process needs.
    """
    with tempfile.TemporaryDirectory() as keys:
        _make_certificate(Path(keys))
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        server.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.tls.load_cert_chain(f"{keys}/ca.pem", f"{keys}/key.pem")
        server.folder, server.delay = Path(folder), delay
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield {
                **os.environ,
                "HTTPS_PROXY": f"http://127.0.0.1:{server.server_address[1]}",
                "https_proxy": f"http://127.0.0.1:{server.server_address[1]}",
                "CURL_CA_BUNDLE": f"{keys}/ca.pem",
                "REQUESTS_CA_BUNDLE": f"{keys}/ca.pem",
                "NO_GCE_CHECK": "true",
            }
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
