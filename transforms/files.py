"""Files by exact name, on a disk or in a bucket. Names are opaque: never a glob, never a URL.

Local files go through the operating system, which reports what is wrong in words; everything else
through Beam's FileSystems, imported only then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import posixpath
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

from transforms.credentials import find_credentials
from transforms.records import DataError

# Files under construction, inside the output folder: never matched by a glob of shards.
WORK_FOLDER = "_tmp"

# What a file system answers that has no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
# A worker process needs a moment to follow its killed launcher.
_LOCK_SECONDS = 3.0

_log = logging.getLogger(__name__)
_signing_in = threading.Lock()


def is_remote(path: str) -> bool:
    """Whether the path names a store, as in gs://bucket/name, rather than a local file."""
    return "://" in path


def store_problem(path: str) -> str:
    """Returns why nothing can read a path's store, "" for a local path or a store that is known."""
    scheme, separator, _ = path.partition("://")
    return _scheme_problem(scheme) if separator else ""


@functools.lru_cache(maxsize=64)
def _scheme_problem(scheme: str) -> str:
    try:
        _all_file_systems().get_filesystem(f"{scheme}://")
    except (ValueError, AssertionError, ImportError):
        return f"no store is called {scheme}://; give a local path or gs://"
    return ""


def join(folder: str, *names: str) -> str:
    """Returns the path of a file in a folder, local or remote."""
    return (posixpath if is_remote(folder) else os.path).join(folder, *names)


def file_systems(path: str) -> Any:
    """Returns Beam's FileSystems, ready for a path.

    Raises:
      DataError: there is no such store, or the credentials that the environment names cannot be
        used.
    """
    if not is_remote(path):
        from apache_beam.io.filesystems import FileSystems

        return FileSystems
    if problem := store_problem(path):
        raise DataError(f"{path}: {problem}")
    if path.startswith("gs://"):
        with _signing_in:  # else several threads would, and each would say so
            _sign_in()
    return _all_file_systems()


def _all_file_systems() -> Any:
    # It is imported with Beam, except where pipeline.lean left it out; it is known from then on.
    from apache_beam.io.filesystems import FileSystems
    from apache_beam.io.gcp import gcsfilesystem  # noqa: F401

    return FileSystems


@functools.cache
def _sign_in() -> None:
    """Goes on without credentials where there are none, as public buckets allow.

    Beam would too, after it had looked four times over, for 20 seconds and more.
    """
    from apache_beam.internal.gcp import auth
    from google.auth.exceptions import DefaultCredentialsError

    try:
        find_credentials("https://www.googleapis.com/auth/devstorage.read_write")
        return
    except DefaultCredentialsError as error:
        if named := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            reason = " ".join(str(error).split())
            raise DataError(
                f"GOOGLE_APPLICATION_CREDENTIALS={named}: cannot be used: {reason}; set it to a "
                "key file, or unset it"
            ) from error
    _log.warning(
        "no Google Cloud credentials: gs:// is asked without, which does for public buckets; for "
        "others: gcloud auth application-default login"
    )
    found: Any = getattr(auth, "_Credentials", None)
    if hasattr(found, "_credentials_init"):  # else Beam looks for itself: slow, but right
        found._credentials_init = True


@contextlib.contextmanager
def asking_store(path: str) -> Iterator[None]:
    """Turns what a store's client raises into what the operating system would.

    The client has retried by then what may pass (429, 5xx, broken connections), for two minutes,
    with a growing, random pause between.

    Raises:
      FileNotFoundError: no such object or bucket.
      PermissionError: not for these credentials.
      DataError: the store cannot be reached, or fails.
    """
    from apache_beam.io.filesystem import BeamIOError

    try:
        yield
    except _client_errors(path) as error:
        cause: Any = error
        while isinstance(cause, BeamIOError):  # one for many files, and that in one more
            details = (cause.exception_details or {}).values()
            inner = next((detail for detail in details if isinstance(detail, Exception)), None)
            if inner is None:
                break
            cause = inner
        raise _as_os_error(cause, path) from error


def _client_errors(path: str) -> tuple[type[Exception], ...]:
    # Imported only where a store raised something: that takes as long as many a file.
    from apache_beam.io.filesystem import BeamIOError

    if not is_remote(path):
        return (BeamIOError,)
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    return GoogleAPIError, GoogleAuthError, RequestException, BeamIOError


def _as_os_error(error: Exception, path: str) -> Exception:
    if not is_remote(path) and isinstance(error, OSError):
        # Beam wraps it in one more, without its number.
        inner = error.args[0] if error.args else None
        return inner if isinstance(inner, OSError) else error
    if isinstance(error, FileNotFoundError | PermissionError):
        return error
    code = getattr(error, "code", None)
    said = " ".join(str(error).split())[:200]
    if code == 404:
        return FileNotFoundError(errno.ENOENT, "no such object or bucket", path)
    if code in (401, 403):
        said = f"permission denied ({code}): sign in with gcloud auth application-default login"
        return PermissionError(errno.EACCES, said, path)
    return DataError(f"{path}: the store failed, after retries: {type(error).__name__}: {said}")


def open_file(path: str) -> BinaryIO:
    """Opens a file for reading, as it is: never decompressed by its name.

    Raises:
      OSError: the file cannot be opened, or is a pipe or a device.
    """
    if not is_remote(path):
        return open(path, "rb", opener=_open_regular)
    from apache_beam.io.filesystem import CompressionTypes

    with asking_store(path):
        return file_systems(path).open(path, compression_type=CompressionTypes.UNCOMPRESSED)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)  # a pipe would be waited for
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # what is said of folders, open says
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", path)
    return descriptor


def file_problem(path: str, *, listed: bool) -> str:
    """Returns why no file can be read there, "" where there is one.

    Args:
      path: local, or in a store.
      listed: whether the folder's listing has it, which is all that is asked of a store.
    """
    if is_remote(path):
        return "" if listed else "missing"
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):  # also at the end of a link
        return "missing"
    except OSError as error:
        return error.strerror or str(error)
    return "" if stat.S_ISREG(mode) else "no regular file"


def read_file(path: str, *, size: int = -1) -> bytes:
    """Returns the whole file.

    Args:
      path: of the file.
      size: in bytes by the listing, where it is known: a store's answer that is cut off is then
        told from a file that is.

    Raises:
      OSError: the file cannot be read; FileNotFoundError where there is none.
      DataError: a store fails, or has other bytes than it listed.
    """
    if not is_remote(path):
        with open_file(path) as file:
            return file.read()
    with asking_store(path), open_file(path) as file:
        data = file.read()
    if size not in (-1, len(data)):
        raise DataError(
            f"{path}: {len(data)} bytes came, {size} were listed: it was changed, or cut off on "
            "the way; run again with --resume, with --overwrite if it was changed"
        )
    return data


def exists(path: str) -> bool:
    """Whether there is such a file."""
    if not is_remote(path):
        return os.path.lexists(path)
    with asking_store(path):
        return file_systems(path).exists(path)


def make_folder(path: str) -> None:
    """Makes a folder and its parents; a bucket needs none."""
    if not is_remote(path):
        os.makedirs(path, exist_ok=True)


def work_path(folder: str, name: str) -> str:
    """Returns a path for a file under construction, unlike any other attempt's."""
    return join(folder, WORK_FOLDER, f"{name}.{uuid.uuid4().hex}")


def rename(source: str, target: str) -> None:
    """Renames a finished file; a file of that name is replaced.

    Raises:
      OSError: the file system refused.
    """
    with asking_store(target):
        file_systems(target).rename([source], [target])


def write_file(folder: str, name: str, data: bytes) -> None:
    """Writes a file whole or not at all: under a temporary name, then renamed.

    Args:
      folder: the output folder.
      name: below the folder, with "/" between parts.
      data: the contents.
    """
    from apache_beam.io.filesystem import CompressionTypes

    temporary = work_path(folder, posixpath.basename(name))
    target = join(folder, *name.split("/"))
    create = file_systems(folder).create
    with (
        asking_store(target),
        create(temporary, compression_type=CompressionTypes.UNCOMPRESSED) as file,
    ):
        file.write(data)
    make_folder(posixpath.dirname(target))
    rename(temporary, target)


def list_folder(folder: str) -> list[str]:
    """Returns the names of all files below a folder, with "/" between parts, sorted.

    Links to folders are names of their own and are not entered. A missing folder has none.
    """
    if is_remote(folder):
        prefix = folder.rstrip("/") + "/"
        with asking_store(folder):
            found = file_systems(folder).match([prefix + "**"])[0].metadata_list
        return sorted(metadata.path.removeprefix(prefix) for metadata in found)
    names = []
    for parent, folders, files in os.walk(folder, onerror=_raise_unless_missing):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in [*files, *links]:
            names.append(os.path.relpath(os.path.join(parent, name), folder))
    return sorted(name.replace(os.sep, "/") for name in names)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def delete_files(folder: str, names: Iterable[str]) -> None:
    """Deletes files below a folder by exact name, then the sub-folders that this left empty.

    Raises:
      OSError: a file is there and cannot be deleted.
    """
    names = list(names)
    if is_remote(folder):
        # It takes patterns and has no way to quote one; our own names need none.
        with asking_store(folder):
            file_systems(folder).delete([join(folder, name) for name in names])
        return
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, *name.split("/")))
    for parent in {posixpath.dirname(name) for name in names} - {""}:
        with contextlib.suppress(OSError):  # not empty, or gone
            os.rmdir(os.path.join(folder, *parent.split("/")))


def check_writable(folder: str) -> None:
    """Raises OSError where no file can be made in a local folder, before any work is done."""
    if not is_remote(folder):
        probe = os.path.join(folder, f".tpufeed-{uuid.uuid4().hex}")
        with open(probe, "wb"):
            pass
        os.remove(probe)


def size_of(path: str) -> int:
    """Returns a file's size in bytes.

    Raises:
      OSError: there is no such file.
    """
    if not is_remote(path):
        return os.stat(path).st_size
    with asking_store(path):
        found = file_systems(path).match([path])[0].metadata_list
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no such object", path)
    return found[0].size_in_bytes


def hash_file(path: str) -> str:
    """Returns the sha256 of a file, in hex, read in pieces.

    Raises:
      OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with asking_store(path) if is_remote(path) else contextlib.nullcontext():
        with open_file(path) as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def hold_folder(folder: str, *, alone: bool = False) -> Iterator[Callable[[], None]]:
    """Holds a lock on a local folder, which ends with the process; a bucket has none.

    The lock is on the folder itself, so that there is no file to leave behind.

    Args:
      folder: exists, where it is local.
      alone: whether nobody else may hold it as well.

    Yields:
      A function that lets others hold the folder too.

    Raises:
      DataError: somebody holds it.
      OSError: there is no such folder.
    """
    if is_remote(folder):
        yield lambda: None
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, folder, alone=alone)
        yield functools.partial(_lock, descriptor, folder, alone=False)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: str, *, alone: bool) -> None:
    how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise DataError(
                    f"{folder}: another run is writing there: wait for its end, or give another "
                    "folder"
                ) from error
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning(
                "%s: cannot be locked (%s): see to it that no other run writes there",
                folder,
                error.strerror,
            )
            return None
