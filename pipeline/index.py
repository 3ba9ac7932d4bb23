"""index/: a row for each record, read column by column, a shard at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow

from transforms import files
from transforms.manifest import INDEX_FOLDER, Shard
from transforms.parquet import read_parquet
from transforms.records import DataError
from transforms.shards import SHARD_SUFFIX


def read_index(directory: str, shard: Shard, *, columns: Sequence[str] | None = None) -> Any:
    """Reads columns of one shard's index.

    Args:
      directory: the data set.
      shard: which.
      columns: of docs/format.md, None for all.

    Returns:
      A pyarrow.Table of `shard.records` rows, in the order of the shard.

    Raises:
      DataError: the file is missing, damaged, lacks a column, or has another number of rows.
    """
    name = f"{INDEX_FOLDER}/{shard.name.removesuffix(SHARD_SUFFIX)}.parquet"
    path = files.join(directory, *name.split("/"))
    try:
        data = files.read_file(path)
        table = read_parquet(data, columns=columns)
    except FileNotFoundError as error:
        raise DataError(f"{path}: missing: run tpufeed verify {directory}") from error
    except (pyarrow.ArrowException, OSError) as error:
        said = " ".join(str(error).split())
        raise DataError(f"{path}: {said}: run tpufeed verify {directory}") from error
    if table.num_rows != shard.records:
        raise DataError(
            f"{path}: {table.num_rows} rows, where dataset.json has {shard.records} records: run "
            f"tpufeed verify {directory}"
        )
    return table
