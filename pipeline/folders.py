"""What is read: folders of data sets, their splits and shards, and each host's share of them.

Arithmetic on dataset.json, and the checks that read no shard. Never imports Beam: files in a bucket
are looked at by TensorFlow's own file systems.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipeline import needs
from pipeline.slices import Slice, parse_slices
from transforms import files, manifest
from transforms.manifest import Manifest

_STAT_THREADS = 16


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """One file to read, or a part of one.

    Attributes:
      path: where it lies.
      records: how many records are read of it; of a whole file, as many as dataset.json says.
      bytes: size of the whole file by dataset.json.
      label_offset: what was added to its class ids.
      first: how many records lie before the first that is read.
      unread: how many records lie before and after those that are read.
    """

    path: str
    records: int
    bytes: int
    label_offset: int
    first: int = 0
    unread: int = 0

    @property
    def bytes_read(self) -> float:
        """The bytes of the records that are read, where all records are of one size."""
        return self.bytes * self.records / max(1, self.records + self.unread)

    @property
    def part(self) -> str:
        """Says which records are read, "" for all."""
        return f"[{self.first}:{self.first + self.records}]" if self.unread else ""


def load_sources(folders: str | os.PathLike | Sequence[str | os.PathLike]) -> dict[str, Manifest]:
    """Reads dataset.json of each folder.

    Args:
      folders: one folder or several, local or gs://.

    Returns:
      The manifests by folder, in the given order.

    Raises:
      ValueError: no folder, one given twice, one without dataset.json, or folders that differ in
        schema, classes, picture size, channels or encoding; names both.
    """
    if isinstance(folders, str | os.PathLike):
        folders = [folders]
    names = [os.fspath(folder) for folder in folders]
    if not names:
        raise ValueError("folders: none given; give the folder of a data set, or several")
    if double := needs.find_double(names):
        same = f" (as {double[0]})" if double[0] != double[1] else ""
        raise ValueError(
            f"folders: {double[1]} is given twice{same}; its records would count twice"
        )
    sources = {name: _load_manifest(name) for name in names}
    first, contents = next(iter(sources.items()))
    for name, other in sources.items():
        for field in manifest.ALIKE:
            mine, theirs = getattr(contents, field), getattr(other, field)
            if mine != theirs:
                raise ValueError(
                    f"folders: {field} is {_shown(mine)} in {first} and {_shown(theirs)} in "
                    f"{name}; only like data sets are read as one: ingest one of them again"
                )
    return sources


def _load_manifest(folder: str) -> Manifest:
    if not files.is_remote(folder):
        return manifest.load_manifest(folder)
    path = files.join(folder, manifest.MANIFEST)
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            data = file.read()
    except tf.errors.NotFoundError as error:
        raise ValueError(
            f"{folder}: no {manifest.MANIFEST}, so this is no complete data set: run tpufeed ingest"
        ) from error
    return manifest.parse_manifest(data, path=path)


def _shown(value: Any) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 200 else text[:197] + "..."


def list_shards(sources: Mapping[str, Manifest], *, split: str) -> list[ShardFile]:
    """Returns the files of a split: the folders in the given order, shards by number.

    Args:
      sources: the manifests by folder.
      split: a split's name; or a slice of one, by the position of its records in that order; or a
        sum of them, see `slices.parse_slices`. A slice has only the files that hold it.

    Raises:
      ValueError: it is none of these, a folder has no such split, none of them has a record in it,
        or a sum holds a record twice.
    """
    parts = parse_slices(split)
    shards = [shard for part in parts for shard in _list_part(sources, part, spec=split)]
    if not count_records(shards):
        raise ValueError(
            f"split {split!r}: no record in {', '.join(sources)}; choose another split, or ingest "
            "with a larger share for it"
        )
    if len(parts) > 1:
        _check_disjoint(shards, spec=split)
    return shards


def _list_part(sources: Mapping[str, Manifest], part: Slice, *, spec: str) -> list[ShardFile]:
    shards = []
    for folder, contents in sources.items():
        if part.split not in contents.splits:
            raise ValueError(
                f"split {spec!r}: {folder} has no such split; allowed are "
                f"{', '.join(contents.splits)}"
            )
        for shard in contents.splits[part.split].shards:
            path = files.join(folder, shard.name)
            shards.append(ShardFile(path, shard.records, shard.bytes, contents.label_offset))
    if part.whole:
        return shards
    start, stop = part.span(count_records(shards), spec=spec)
    return _cut_shards(shards, start, stop)


def _cut_shards(shards: Sequence[ShardFile], start: int, stop: int) -> list[ShardFile]:
    """Returns what holds the records from `start` to before `stop`, counted over whole files."""
    parts, before = [], 0
    for shard in shards:
        first = max(start - before, 0)
        records = min(stop - before, shard.records) - first
        if records > 0:
            unread = shard.records - records
            parts.append(dataclasses.replace(shard, records=records, first=first, unread=unread))
        before += shard.records
    return parts


def _check_disjoint(shards: Sequence[ShardFile], *, spec: str) -> None:
    ends: dict[str, int] = {}
    for shard in sorted(shards, key=lambda shard: (shard.path, shard.first)):
        if shard.first < ends.get(shard.path, 0):
            raise ValueError(
                f"split {spec!r}: two of its parts hold the same records, which would count "
                "twice; let the parts not overlap"
            )
        ends[shard.path] = shard.first + shard.records


def share_shards(shards: Sequence[ShardFile], *, count: int) -> list[list[ShardFile]]:
    """Shares the files out to hosts: the largest first, each to the host with the fewest records.

    Every host computes the same, whatever its own number.

    Args:
      shards: all files of a split.
      count: number of hosts.

    Returns:
      For each host its files, in the order of `shards`.

    Raises:
      ValueError: there are fewer files than hosts.
    """
    check_count("shard_count", count)
    if count > len(shards):
        raise ValueError(
            f"shard_count {count}: each host reads files of its own, and there are "
            f"{len(shards)}; allowed are 1 to {len(shards)}: ingest with --shards {count} "
            "or more for this split, or use fewer hosts"
        )
    hosts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(shards)), key=lambda number: -shards[number].records):
        # By files where records are equal, so that none goes without one.
        host = min(range(count), key=lambda host: (loads[host], len(hosts[host]), host))
        hosts[host].append(number)
        loads[host] += shards[number].records
    return [[shards[number] for number in sorted(mine)] for mine in hosts]


def steps_per_epoch(
    folders: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    split: str = "train",
    batch_size: int = 128,
    training: bool = True,
    shard_count: int = 1,
) -> int:
    """Returns how many batches make an epoch, the same on every host, from dataset.json alone.

    In training as many whole batches as the host with the fewest records has; in evaluation as
    many as the host with the most needs, since the others are padded.

    Args:
      folders: as for open_dataset, like everything else here.
      split: name of the split, a slice, or a sum.
      batch_size: of each host.
      training: whether an incomplete batch is dropped rather than padded.
      shard_count: number of hosts.

    Raises:
      ValueError: as open_dataset does.
    """
    check_count("batch_size", batch_size)
    hosts = share_shards(list_shards(load_sources(folders), split=split), count=shard_count)
    return count_steps(hosts, batch_size, drop_remainder=training, split=split)


def count_steps(
    hosts: Sequence[Sequence[ShardFile]], batch_size: int, *, drop_remainder: bool, split: str
) -> int:
    """Returns how many batches an epoch has on every host, as steps_per_epoch does.

    Args:
      hosts: the files of each host.
      batch_size: of each host.
      drop_remainder: whether an incomplete batch is dropped rather than padded.
      split: its name, for the error.

    Raises:
      ValueError: a host has no whole batch.
    """
    records = [count_records(mine) for mine in hosts]
    if not drop_remainder:
        return -(-max(records) // batch_size)
    if steps := min(records) // batch_size:
        return steps
    if not min(records):
        raise ValueError(
            f"shard_count {len(hosts)}: one of the hosts has only empty shards of split {split!r}; "
            "ingest with fewer, larger shards, or use fewer hosts"
        )
    where = "" if len(hosts) == 1 else f" that one of {len(hosts)} hosts reads"
    raise ValueError(
        f"batch_size {batch_size}: more than the {min(records)} records of split {split!r}{where}, "
        f"so training has no whole batch; allowed are 1 to {min(records)}"
    )


def count_records(shards: Sequence[ShardFile]) -> int:
    """Returns how many records are read of the files."""
    return sum(shard.records for shard in shards)


def check_count(name: str, value: int) -> None:
    """Raises ValueError, with the parameter's name, for what is no whole number of 1 or more."""
    check_whole(name, value)
    check_positive(name, value)


def check_whole(name: str, value: int) -> None:
    """Raises ValueError, with the parameter's name, for what is no whole number."""
    try:
        operator.index(value)
    except TypeError:
        raise ValueError(f"{name} {value!r}: must be a whole number") from None


def check_positive(name: str, value: int) -> None:
    """Raises ValueError, with the parameter's name, for what is less than 1."""
    if value < 1:
        raise ValueError(f"{name} {value}: must be 1 or more")


def check_files(shards: Sequence[ShardFile]) -> None:
    """The files are there and whole in size: a cut file can read as a shorter one, without error.

    Raises:
      ValueError: names the file.
    """

    def check(shard: ShardFile) -> str:
        try:
            found = tf.io.gfile.stat(shard.path).length
        except tf.errors.NotFoundError:
            return f"{shard.path}: missing, but dataset.json names it: copy the data set again"
        if found == shard.bytes:
            return ""
        return (
            f"{shard.path}: {found} bytes, dataset.json says {shard.bytes}: copy the data set "
            "again, or run tpufeed verify"
        )

    with concurrent.futures.ThreadPoolExecutor(_STAT_THREADS) as pool:
        for problem in pool.map(check, shards):
            if problem:
                raise ValueError(problem)


def check_keys(sources: Mapping[str, Manifest]) -> None:
    """No key stands in two folders, in whatever splits: it would be trained or tested on twice.

    Raises:
      ValueError: names a key and its folders.
    """
    needs.check_keys(sources, read=_read_file)


def _read_file(path: str) -> bytes:
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            return file.read()
    except tf.errors.OpError as error:
        raise OSError(str(error)) from error
