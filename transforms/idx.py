"""IDX files, the format of MNIST: http://yann.lecun.com/exdb/mnist/ describes it."""

from __future__ import annotations

import functools
import gzip
import math
import os
import posixpath
import threading
import zlib
from collections.abc import Iterator

from transforms import files
from transforms.records import IDX_PREFIX, DataError, ImageRef, Input

_IDX_FILES = {"train": "train", "test": "t10k"}


def list_idx(source: Input) -> Iterator[ImageRef]:
    """Lists an IDX folder: splits train and test, keys such as train/00000042, labels digits.

    Raises:
      DataError: a file is missing, or is no IDX file, or images and labels do not match.
    """
    folder = source.pattern.removeprefix(IDX_PREFIX)
    for split, stem in _IDX_FILES.items():
        images = _find_idx(folder, f"{stem}-images", "idx3-ubyte")
        labels = _find_idx(folder, f"{stem}-labels", "idx1-ubyte")
        (count, rows, columns), _ = read_idx(images)
        (label_count,), values = read_idx(labels)
        if count != label_count:
            raise DataError(f"{images}: {count} images, but {label_count} labels in {labels}")
        for item, label in enumerate(values):
            key = f"{split}/{item:08d}"
            yield ImageRef(key, images, str(label), split, "", rows * columns, item)


def _find_idx(folder: str, stem: str, suffix: str) -> str:
    names = [f"{stem}{dot}{suffix}{gz}" for dot in "-." for gz in ("", ".gz")]
    for name in names:
        if files.exists(path := files.join(folder, name)):
            return path
    raise DataError(f"--input idx:{folder}: found none of {', '.join(names)}")


_IDX_LOCK = threading.Lock()


def read_idx(path: str) -> tuple[tuple[int, ...], bytes]:
    """Reads an IDX file of unsigned bytes, gzipped or not; the last few are kept in memory.

    Returns:
      Its dimensions, and its values in row order.

    Raises:
      DataError: another magic number, or more or fewer bytes than the dimensions say.
    """
    try:
        status = None if files.is_remote(path) else os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    version = status and (status.st_ino, status.st_size, status.st_mtime_ns)
    with _IDX_LOCK:  # or every thread would read it
        return _read_idx(path, version)


@functools.lru_cache(maxsize=4)
def _read_idx(path: str, _: tuple[int, ...] | None) -> tuple[tuple[int, ...], bytes]:
    try:
        data = files.read_file(path)
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path}: no whole gzip file: {error}") from error
    wanted = 3 if "idx3" in posixpath.basename(path) else 1
    if data[:4] != bytes([0, 0, 8, wanted]):
        raise DataError(
            f"{path}: begins with {data[:4].hex()}, an IDX file of {wanted} dimension(s) of "
            f"unsigned bytes begins with 000008{wanted:02d}"
        )
    start = 4 + 4 * wanted
    shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4))
    if len(data) - start != math.prod(shape):
        raise DataError(
            f"{path}: {max(0, len(data) - start)} values, its header says "
            f"{' x '.join(map(str, shape))}: the file is cut or not IDX"
        )
    return shape, data[start:]
