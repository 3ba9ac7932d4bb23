"""A pandas DataFrame as an input: the same data set as a CSV with its cells.

The frame is written as such a CSV, which is what workers read, what --resume compares, and what
dataset.json names; it stays beside the data set. Never imports pandas: whoever has a frame did.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
import posixpath
from collections.abc import Sequence
from typing import Any

from pipeline.config import IngestConfig, UsageError
from transforms import files
from transforms.records import DataError, Input
from transforms.tables import resolve_cell

_TEXT, _WHOLE, _FLOAT = "OUST", "iu", "f"  # kinds of dtypes
_TYPES = {"i": ":int", "u": ":int", "f": ":float"}
# Columns that are names: never numbers with a fraction, which pandas makes of numbers with gaps.
_NAMES = ("path", "label", "split", "key")


def from_dataframe(
    frame: Any,
    *,
    output: str | os.PathLike,
    folder: str | os.PathLike | None = None,
    table: str | os.PathLike | None = None,
    **options: Any,
) -> IngestConfig:
    """Writes a frame as a CSV; returns what makes a data set of it, for `ingest.ingest_images`.

    Args:
      frame: a pandas.DataFrame with the columns path and label, and, as in a CSV, split, key and
        more, which become features: of whole numbers int64, of others float, of text bytes (a name
        such as "age:int" says it, too). What is missing is the default. Its index is not looked at.
      output: the data set's folder, local or gs://.
      folder: what relative paths are relative to; None for the current folder.
      table: the CSV to write, local or gs://, as Dataflow needs it; None for one beside the output
        that is called by its contents, `OUTPUT-<12 hex digits>.csv`. It is kept.
      options: fields of IngestConfig, such as pixels=PixelPolicy(width=192, height=192).

    Raises:
      UsageError: a column or an option is wrong.
      DataError: a cell is wrong, or there is another file in the place of the table.
    """
    where = _absolute(os.fspath(output))
    data = dump_frame(frame, folder=_absolute(os.fspath(folder or os.curdir)))
    if table is None:
        digest = hashlib.sha256(data).hexdigest()[:12]
        path = f"{where.rstrip('/')}-{digest}.csv"
    else:
        path = _absolute(os.fspath(table))
    given = "weights" in options
    config = IngestConfig(
        **{"inputs": (Input(path),), "output": where, "weights_given": given, **options}
    )
    _check_name(path)
    _keep_table(path, data)
    return config


def _absolute(path: str) -> str:
    return path if files.is_remote(path) else os.path.abspath(os.path.expanduser(path))


def _check_name(path: str) -> None:
    folder, name = posixpath.split(path)
    if not name.lower().endswith(".csv"):
        raise UsageError(f"table {path}: must end in .csv")
    if set(path) & set("*?") or set(folder if files.is_remote(path) else name) & set("["):
        raise UsageError(
            f"table {path}: * ? and [ would be taken for wildcards; give table= a name without"
        )


def _keep_table(path: str, data: bytes) -> None:
    """Writes the CSV, unless it is there already.

    Raises:
      DataError: something else is there, or nothing can be written.
    """
    folder, name = posixpath.split(path)
    try:
        if files.exists(path):
            if files.read_file(path) != data:
                raise DataError(
                    f"table {path}: is there already and holds other rows; give another name, or "
                    "move it away"
                )
            return
        files.make_folder(folder)
        files.write_file(folder, name, data)
        if not files.is_remote(folder):
            with contextlib.suppress(OSError):  # another's file is still in it
                os.rmdir(files.join(folder, files.WORK_FOLDER))
    except OSError as error:
        raise DataError(f"table {path}: {error.strerror or error}") from error


def dump_frame(frame: Any, *, folder: str) -> bytes:
    """Returns the CSV of a frame; see from_dataframe.

    Paths come out absolute; where there is no column key, they stand there as they were written,
    since that is what keys are in a CSV.

    Raises:
      UsageError: a column is of a type that no feature has, or missing.
      DataError: a cell is none of its column's.
    """
    names = [str(name) for name in frame.columns]
    if "path" not in names:
        raise UsageError(f"frame: no column 'path' among {', '.join(names) or 'none'}")
    headers, columns = [], []
    for position, name in enumerate(names):
        column = frame.iloc[:, position]
        headers.append(name + _type_of(name, column.dtype))
        columns.append(_cells(name, column))
    cells = columns[names.index("path")]
    if "key" not in names:
        headers.append("key")
        columns.append(list(cells))
    columns[names.index("path")] = [resolve_cell(cell, folder) if cell else "" for cell in cells]
    return _dump_rows([headers, *map(list, zip(*columns, strict=True))])


def _type_of(name: str, dtype: Any) -> str:
    kind = getattr(dtype, "kind", "O")
    if name in _NAMES:
        if kind not in _TEXT + _WHOLE:
            raise UsageError(
                f"frame: column {name!r} is {dtype}, must be text or whole numbers: "
                f"frame[{name!r}].astype('Int64').astype(str), for instance"
            )
        return ""
    if kind not in _TEXT + _WHOLE + _FLOAT:
        raise UsageError(
            f"frame: column {name!r} is {dtype}, must be text, whole numbers or floats: drop it, "
            f"or use frame[{name!r}].astype(int), for instance"
        )
    return "" if ":" in name else _TYPES.get(kind, "")


def _cells(name: str, column: Any) -> list[str]:
    text = getattr(column.dtype, "kind", "O") in _TEXT
    cells = []
    for row, (value, missing) in enumerate(
        zip(column.tolist(), column.isna().tolist(), strict=True)
    ):
        if missing:
            cells.append("")
        elif not text:
            cells.append(repr(value))
        elif isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str):
            cells.append(os.fspath(value))
        else:
            raise DataError(
                f"frame: column {name!r}, row {row}: is {value!r:.80}, the column must be text "
                f"throughout: frame[{name!r}].astype(str), for instance"
            )
    return cells


def _dump_rows(rows: Sequence[Sequence[str]]) -> bytes:
    buffer = io.StringIO()
    # Every cell in quotes: line breaks within, and cells that spreadsheets would change, stay.
    csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    try:
        return buffer.getvalue().encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"frame: {error.object[error.start]!r} in a cell is no character of UTF-8; such a name "
            "cannot stand in a CSV"
        ) from error
