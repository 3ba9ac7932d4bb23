"""What training asks of its data sets and of its folder, known before a machine costs anything.

From dataset.json, index/ and history.json alone, and without TensorFlow: `tpufeed launch` refuses
by it what `tpufeed train` would refuse later. A file is read as the caller says: with Beam's file
systems there, TensorFlow's here.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
from collections.abc import Callable, Mapping, Sequence

import pyarrow
import pyarrow.compute

from pipeline.config import TEST_SPLITS, TrainConfig
from transforms import files, manifest
from transforms.manifest import Manifest
from transforms.parquet import read_parquet
from transforms.records import DataError
from transforms.shards import SHARD_SUFFIX

_READ_THREADS = 16


def find_double(folders: Sequence[str]) -> tuple[str, str] | None:
    """Returns the first two names of one folder, as "records" and "records/"; None where none."""
    seen: dict[str, str] = {}
    for name in folders:
        same = name.rstrip("/") if files.is_remote(name) else os.path.abspath(name)
        if same in seen:
            return seen[same], name
        seen[same] = name
    return None


def choose_test_split(sources: Mapping[str, Manifest]) -> str:
    """Returns the split to test on: the first of TEST_SPLITS that a folder has.

    Args:
      sources: the manifests by folder.

    Raises:
      DataError: a folder lacks it, or the split train, or one of the two has no record.
    """
    names = {name for contents in sources.values() for name in contents.splits}
    test = next((name for name in TEST_SPLITS if name in names), " or ".join(TEST_SPLITS))
    for folder, contents in sources.items():
        for name in ("train", test):
            if name not in contents.splits:
                raise DataError(
                    f"{folder}: no split {name}, only {', '.join(sorted(contents.splits))}: "
                    "ingest with --split train=0.9,validation=0.1"
                )
    for name in ("train", test):
        if not sum(contents.splits[name].records for contents in sources.values()):
            raise DataError(
                f"{', '.join(sources)}: split {name} is empty: ingest more, or with other shares"
            )
    return test


def picture_size(config: TrainConfig, sources: Mapping[str, Manifest]) -> tuple[int, int]:
    """Returns height and width of the pictures that are trained on.

    Raises:
      DataError: they vary in size, and the configuration gives none.
    """
    size = config.image_size or next(iter(sources.values())).image_size
    if size is None:
        raise DataError(
            f"{', '.join(sources)}: pictures of varying size; give --image-size N or WxH"
        )
    return size


def check_epochs(epochs: int, *, done: int, folder: str) -> None:
    """Raises DataError where a run that is resumed has more epochs than it is to have in all."""
    if done > epochs:
        raise DataError(
            f"--epochs {epochs}: {folder} has {done} already: give --epochs {done} or more"
        )


def count_epochs(data: bytes, *, path: str) -> int:
    """Returns how many epochs a history.json has.

    Raises:
      DataError: it is none.
    """
    try:
        return len(json.loads(data)["epochs"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not as tpufeed train writes it: {error!r}") from error


def check_keys(sources: Mapping[str, Manifest], *, read: Callable[[str], bytes]) -> None:
    """No key stands in two folders, in whatever splits: it would be trained or tested on twice.

    Args:
      sources: the manifests by folder.
      read: returns the bytes of a file, or raises OSError.

    Raises:
      DataError: names a key and its folders, or an index that cannot be read.
    """
    if len(sources) == 1:
        return
    keys = {folder: _read_keys(folder, contents, read) for folder, contents in sources.items()}
    counts = pyarrow.compute.value_counts(pyarrow.concat_arrays(keys.values()))
    values, numbers = counts.flatten()
    double = values.filter(pyarrow.compute.greater(numbers, 1))
    if len(double):
        key = double[0]
        holders = [
            f for f, column in keys.items() if pyarrow.compute.index(column, key).as_py() >= 0
        ]
        raise DataError(
            f"folders: key {key.as_py()!r} stands in {' and in '.join(holders[:2])} "
            f"({len(double)} such keys): its record would count twice; leave one out with "
            "tpufeed ingest --exclude, or, where they are different pictures, ingest with "
            "--root at a folder above both"
        )


def _read_keys(folder: str, contents: Manifest, read: Callable[[str], bytes]) -> pyarrow.Array:
    names = [shard.name for split in contents.splits.values() for shard in split.shards]

    def read_one(name: str) -> pyarrow.Array:
        stem = name.removesuffix(SHARD_SUFFIX)
        path = files.join(folder, manifest.INDEX_FOLDER, f"{stem}.parquet")
        try:
            table = read_parquet(read(path), columns=["key"])
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{path}: needed to compare the keys of several folders, cannot be read: "
                f"{str(error).splitlines()[0]}"
            ) from error
        # Large: the keys of a billion records are more than the 2 GB that a plain column can hold.
        return table["key"].combine_chunks().cast(pyarrow.large_string())

    with concurrent.futures.ThreadPoolExecutor(_READ_THREADS) as pool:
        return pyarrow.concat_arrays(
            [*pool.map(read_one, names), pyarrow.array([], pyarrow.large_string())]
        )
