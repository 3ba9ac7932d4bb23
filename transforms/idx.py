"""IDX files, the format of MNIST: http://yann.lecun.com/exdb/mnist/ describes it."""

from __future__ import annotations

import functools
import gzip
import io
import math
import os
import posixpath
import threading
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

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


_MOST_VALUES = 2**31  # held in memory; MNIST has 47 million
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
        packed = data[:2] == b"\x1f\x8b"
        with gzip.open(io.BytesIO(data)) if packed else io.BytesIO(data) as file:
            return _parse_idx(cast(BinaryIO, file), path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: no whole gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse_idx(file: BinaryIO, path: str) -> tuple[tuple[int, ...], bytes]:
    """Unpacks no more than the header says: a small file may hold a large one."""
    wanted = 3 if "idx3" in posixpath.basename(path) else 1
    header = file.read(4 + 4 * wanted)
    if header[:4] != bytes([0, 0, 8, wanted]):
        raise DataError(
            f"{path}: begins with {header[:4].hex()}, an IDX file of {wanted} dimension(s) of "
            f"unsigned bytes begins with 000008{wanted:02d}"
        )
    shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, 4 + 4 * wanted, 4))
    total, said = math.prod(shape), " x ".join(map(str, shape))
    if total > _MOST_VALUES:
        raise DataError(
            f"{path}: its header says {said} values, read are up to {_MOST_VALUES}: the file is no "
            "IDX, or to be split"
        )
    if len(header) == 4 + 4 * wanted and shape[0] and 0 in shape:
        raise DataError(f"{path}: its header says {said}: pictures without a pixel")
    values = file.read(total + 1)
    if len(header) < 4 + 4 * wanted or len(values) != total:
        found = f"more than {total}" if len(values) > total else len(values)
        raise DataError(
            f"{path}: {found} values, its header says {said}: the file is cut or not IDX"
        )
    return shape, values
