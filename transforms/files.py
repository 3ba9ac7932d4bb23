"""Files by exact name, on a disk or in a bucket. Names are opaque: never a glob, never a URL.

Local files go through the operating system, which reports what is wrong in words; everything else
through Beam's FileSystems, imported only then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import uuid
from collections.abc import Iterable
from typing import BinaryIO

# Files under construction, inside the output folder: never matched by a glob of shards.
WORK_FOLDER = "_tmp"


def is_remote(path: str) -> bool:
    """Whether the path names a store, as in gs://bucket/name, rather than a local file."""
    return "://" in path


def join(folder: str, *names: str) -> str:
    """Returns the path of a file in a folder, local or remote."""
    return (posixpath if is_remote(folder) else os.path).join(folder, *names)


def open_file(path: str) -> BinaryIO:
    """Opens a file for reading, as it is: never decompressed by its name.

    Raises:
      OSError: the file cannot be opened.
    """
    if not is_remote(path):
        return open(path, "rb")
    from apache_beam.io.filesystem import CompressionTypes
    from apache_beam.io.filesystems import FileSystems

    return FileSystems.open(path, compression_type=CompressionTypes.UNCOMPRESSED)


def read_file(path: str) -> bytes:
    """Returns the whole file.

    Raises:
      OSError: the file cannot be read; FileNotFoundError where there is none.
    """
    if not is_remote(path):
        with open_file(path) as file:
            return file.read()
    from google.api_core import exceptions

    try:
        with open_file(path) as file:
            return file.read()
    except exceptions.NotFound as error:
        raise FileNotFoundError(errno.ENOENT, "no such object", path) from error
    except exceptions.Forbidden as error:
        raise PermissionError(errno.EACCES, "permission denied", path) from error


def exists(path: str) -> bool:
    """Whether there is such a file."""
    if not is_remote(path):
        return os.path.lexists(path)
    from apache_beam.io.filesystems import FileSystems

    return FileSystems.exists(path)


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
    from apache_beam.io.filesystems import FileSystems

    FileSystems.rename([source], [target])


def write_file(folder: str, name: str, data: bytes) -> None:
    """Writes a file whole or not at all: under a temporary name, then renamed.

    Args:
      folder: the output folder.
      name: below the folder, with "/" between parts.
      data: the contents.
    """
    from apache_beam.io.filesystem import CompressionTypes
    from apache_beam.io.filesystems import FileSystems

    temporary = work_path(folder, posixpath.basename(name))
    target = join(folder, *name.split("/"))
    with FileSystems.create(temporary, compression_type=CompressionTypes.UNCOMPRESSED) as file:
        file.write(data)
    make_folder(posixpath.dirname(target))
    rename(temporary, target)


def list_folder(folder: str) -> list[str]:
    """Returns the names of all files below a folder, with "/" between parts, sorted.

    Links to folders are names of their own and are not entered. A missing folder has none.
    """
    if is_remote(folder):
        from apache_beam.io.filesystems import FileSystems

        prefix = folder.rstrip("/") + "/"
        found = FileSystems.match([prefix + "**"])[0].metadata_list
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
        from apache_beam.io.filesystems import FileSystems

        # FileSystems.delete() takes patterns and has no way to quote one; our own names need none.
        FileSystems.delete([join(folder, name) for name in names])
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
    from apache_beam.io.filesystems import FileSystems

    return FileSystems.match([path])[0].metadata_list[0].size_in_bytes
