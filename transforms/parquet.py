"""Parquet files, read in the thread that asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow.parquet


def read_parquet(data: bytes, *, columns: Sequence[str] | None = None) -> Any:
    """Reads a whole Parquet file, and checks its pages' checksums where it has them.

    Not by pyarrow.parquet.read_table: that hands a Python file to threads of its own, which may let
    go of it after the interpreter's end: now and then a process then aborted as it ended, its work
    done (pyarrow 25; https://github.com/apache/arrow/issues/34314).

    Args:
      data: the file.
      columns: which to read, None for all.

    Returns:
      A pyarrow.Table.

    Raises:
      pyarrow.ArrowException or OSError: it is no Parquet file, damaged, has two columns of one
        name, or lacks one of those to read.
    """
    try:
        with pyarrow.parquet.ParquetFile(
            pyarrow.BufferReader(data), page_checksum_verification=True
        ) as file:
            table = file.read(None if columns is None else list(columns), use_threads=False)
    except UnicodeDecodeError as error:  # in a column's name
        raise pyarrow.ArrowInvalid(f"damaged: {error}") from error
    names = table.column_names
    if absent := set(columns or ()) - set(names):
        raise pyarrow.ArrowInvalid(f"no column {min(absent)!r}")
    if double := {name for name in names if names.count(name) > 1}:
        raise pyarrow.ArrowInvalid(f"two columns are named {min(double)!r}")
    return table
