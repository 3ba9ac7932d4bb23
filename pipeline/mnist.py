"""MNIST's four files, fetched on first use: `--input idx:mnist`."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import io
import os
import sys
import urllib.error
import urllib.request
import uuid
import zlib
from collections.abc import Mapping

from transforms.records import DataError

# A public bucket of the CVDF: https://github.com/cvdfoundation/mnist.
BASE_URL = "https://storage.googleapis.com/cvdf-datasets/mnist/"
URL_VARIABLE = "TPUFEED_MNIST_URL"
# Bytes and sha256 of the contents, uncompressed: how a mirror packed them is its own affair.
CONTENTS = {
    "train-images-idx3-ubyte": (
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    "train-labels-idx1-ubyte": (
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    "t10k-images-idx3-ubyte": (
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    "t10k-labels-idx1-ubyte": (
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
}


def fetch_mnist(
    cache: str | None = None,
    *,
    base_url: str | None = None,
    contents: Mapping[str, tuple[int, str]] = CONTENTS,
    timeout: float = 30.0,
) -> str:
    """Returns a folder with the four files; fetches those that are not there or are damaged.

    Args:
      cache: the folder; by default tpufeed/mnist in XDG_CACHE_HOME or ~/.cache.
      base_url: where the files lie; by default TPUFEED_MNIST_URL, else the public bucket.
      contents: bytes and sha256 of each file's contents, uncompressed.
      timeout: seconds to wait for the server, each time it is waited for.

    Raises:
      DataError: a file cannot be fetched or kept, or is not what it must be.
    """
    folder = cache or _default_folder()
    base = base_url or os.environ.get(URL_VARIABLE) or BASE_URL
    for name, (size, digest) in contents.items():
        path = os.path.join(folder, f"{name}.gz")
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if _problem(file.read(), size, digest) is None:
                continue
        url = f"{base.rstrip('/')}/{name}.gz"
        data = _download(url, limit=size, timeout=timeout, folder=folder)
        if problem := _problem(data, size, digest):
            raise DataError(f"idx:mnist: {url}: {problem}; {_remedy(folder)}")
        _keep(data, path)
        print(f"tpufeed: fetched {name}.gz, {len(data)} bytes, into {folder}", file=sys.stderr)
    return folder


def _default_folder() -> str:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # as the specification has it
        cache = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "tpufeed", "mnist")


def _remedy(folder: str) -> str:
    return (
        f"try again, name a mirror in {URL_VARIABLE}, or put the four files into {folder} yourself"
    )


def _problem(data: bytes, size: int, digest: str) -> str | None:
    """Returns what is wrong with a file, None where it unpacks to what it must be."""
    try:
        if data[:2] == b"\x1f\x8b":  # some servers unpack on the way
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        return f"no whole gzip file: {error}"
    if len(data) != size:
        shown = f"more than {size}" if len(data) > size else str(len(data))
        return f"holds {shown} bytes, must be {size}"
    found = hashlib.sha256(data).hexdigest()
    return None if found == digest else f"sha256 of the contents is {found}, must be {digest}"


def _download(url: str, *, limit: int, timeout: float, folder: str) -> bytes:
    """Returns what the server sends, up to a little more than it can rightly be."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            data = response.read(limit + 1024)
            announced = response.headers.get("Content-Length")
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", "") or error or type(error).__name__)
        code = f"HTTP {error.code} " if isinstance(error, urllib.error.HTTPError) else ""
        raise DataError(
            f"idx:mnist: cannot fetch {url}: {code}{reason}; {_remedy(folder)}"
        ) from error
    if announced and len(data) < min(int(announced), limit):
        raise DataError(
            f"idx:mnist: {url}: {len(data)} of {announced} bytes came; {_remedy(folder)}"
        )
    return data


def _keep(data: bytes, path: str) -> None:
    """Writes a file whole or not at all."""
    temporary = f"{path}.{uuid.uuid4().hex}"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(data)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(temporary)
    except OSError as error:
        raise DataError(
            f"idx:mnist: cannot write {path}: {error.strerror or error}; set XDG_CACHE_HOME to a "
            "folder that can be written to"
        ) from error
