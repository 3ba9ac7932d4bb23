"""What a run leaves in the folder until dataset.json replaces it, so that another can go on.

`_tmp/plan.json`: what was asked and what was found, written before the first shard.
`_tmp/<shard>.done.json`: one for each finished shard, written after all its other files.

Both bear a sha256 of what they say: what a disk or a person changed in them is not believed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transforms import files
from transforms.manifest import INDEX_FOLDER, MANIFEST
from transforms.parquet import read_parquet
from transforms.records import DataError, Reject, ShardSummary
from transforms.shards import SHARD_NAME, SHARD_SUFFIX, SplitSize

PLAN = f"{files.WORK_FOLDER}/plan.json"
# There while --overwrite removes the old set, so that a run that goes on removes the rest of it.
OVERWRITING = f"{files.WORK_FOLDER}/overwriting"
FORMAT = 2
# Flags that may differ: the folder may have moved, and no shard depends on the rate.
_FREE = ("output", "max_reject_rate")
_MOST_DIFFERENCES = 4
_FLAGS = {"inputs": "--input", "pixels.mode": "--resize-mode", "weights": "--split"}

_DONE = re.compile(rf"{files.WORK_FOLDER}/(?P<shard>{SHARD_NAME.pattern})\.done\.json")
_TEMPORARY = re.compile(
    rf"{files.WORK_FOLDER}/"
    rf"(?:{SHARD_NAME.pattern.replace('?P<', '?P<t_')}(?:\.tfrecord|\.parquet|\.idx|\.done\.json)"
    r"|(?:dataset|plan)\.json|(?:rejects|duplicates)\.jsonl|report\.html|overwriting)"
    r"\.[0-9a-f]{32}"
    r"|\.tpufeed-[0-9a-f]{32}"
)

Content = tuple[bytes, tuple[str, str]]  # sha256, (key, label)


def is_state(name: str) -> bool:
    """Whether the name, relative to the folder, is of what this module writes."""
    return name in (PLAN, OVERWRITING) or done_shard(name) != ""


def is_temporary(name: str) -> bool:
    """Whether the name, relative to the folder, is of a file that was never finished."""
    return _TEMPORARY.fullmatch(name) is not None


def done_name(shard: str) -> str:
    """Returns the name of a shard's mark, relative to the folder."""
    return f"{files.WORK_FOLDER}/{shard}.done.json"


def done_shard(name: str) -> str:
    """Returns the shard that a mark belongs to, "" for any other file."""
    found = _DONE.fullmatch(name)
    return found["shard"] if found else ""


def describe_plan(
    *,
    tpufeed: str,
    libraries: Mapping[str, str],
    config: Mapping[str, Any],
    labels: Sequence[str],
    sizes: Mapping[tuple[str, str], SplitSize],
    exclusions: Iterable[str],
    shards: Mapping[str, int],
) -> dict[str, Any]:
    """Returns plan.json: all that the bytes of the shards depend on.

    Args:
      tpufeed: its version.
      libraries: versions, of the worker.
      config: as it stands in dataset.json.
      labels: in the order of their ids.
      sizes: by split and label, with the digest of the references.
      exclusions: sha256 of contents that must not come in.
      shards: number of them by split.
    """
    excluded = hashlib.sha256("\n".join(sorted(exclusions)).encode()).hexdigest()
    images = {
        json.dumps([split, label]): [size.records, f"{size.digest:032x}"]
        for (split, label), size in sorted(sizes.items())
    }
    return {
        "format": FORMAT,
        "tpufeed": tpufeed,
        "libraries": dict(libraries),
        "config": comparable_config(config),
        "exclusions": excluded,
        "labels": list(labels),
        "images": images,
        "shards": dict(shards),
    }


def comparable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration as JSON has it, without what may differ from run to run."""
    kept = {name: value for name, value in config.items() if name not in _FREE}
    return json.loads(json.dumps(kept))


def digest_plan(plan: Mapping[str, Any]) -> str:
    """Returns the sha256, in hex, of the plan's canonical JSON."""
    return _digest(plan)


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _seal(document: Mapping[str, Any]) -> bytes:
    return json.dumps({**document, "sha256": _digest(document)}, indent=1).encode() + b"\n"


def _unseal(data: bytes) -> dict[str, Any]:
    """Returns what `_seal` was given; raises ValueError for anything that it did not write."""
    try:
        document = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError("no JSON object")
    if (found := document.get("format")) != FORMAT:
        raise ValueError(f"format is {found!r}, this version reads {FORMAT}")
    if document.pop("sha256", None) != _digest(document):
        raise ValueError("its sha256 is not that of what it says")
    return document


def find_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Says, for people, in what two plans differ; only what `now` has is compared."""
    found = []
    for name in [name for name in ("format", "tpufeed") if name in now]:
        if before.get(name) != now[name]:
            found.append(f"{name} {before.get(name)} then, {now[name]} now")
    for name, old, new in _differing(before, now, "libraries"):
        found.append(f"{name} {old} then, {new} now")
    for name, old, new in _differing(_flatten(before), _flatten(now), "config"):
        flag = _FLAGS.get(name) or "--" + name.removeprefix("pixels.").replace("_", "-")
        found.append(f"{flag} {_short(old)} then, {_short(new)} now")
    if "exclusions" in now and before.get("exclusions") != now["exclusions"]:
        found.append("--exclude: other contents")
    for name, old, new in _differing(before, now, "images"):
        counts = [size[0] if size else 0 for size in (old, new)]
        where = "/".join(filter(None, json.loads(name)))
        if not any(counts):  # one of several labels an image, of which the images are not counted
            found.append(f"{where}: no such label {'then' if old is None else 'now'}")
        elif counts[0] != counts[1]:
            found.append(f"{where}: {counts[0]} images then, {counts[1]} now")
        else:
            found.append(f"{where}: {counts[0]} images, of other names, sizes or contents")
    if not found:
        for name in ("labels", "shards"):
            if name in now and before.get(name) != now[name]:
                found.append(f"{name} {_short(before.get(name))} then, {_short(now[name])} now")
    return found


def _differing(
    before: Mapping[str, Any], now: Mapping[str, Any], part: str
) -> Iterator[tuple[str, Any, Any]]:
    if part in now:
        old, new = before.get(part) or {}, now[part]
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                yield name, old.get(name), new.get(name)


def _flatten(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan with a name for each value of the pixel policy, as each has its flag."""
    config = dict(plan.get("config") or {})
    pixels = config.pop("pixels", {})
    config.update({f"pixels.{name}": value for name, value in pixels.items()})
    return {"config": config}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."


def check_plan(before: Mapping[str, Any], now: Mapping[str, Any], *, output: str) -> None:
    """Raises DataError, naming the differences, where a folder was begun with another plan."""
    differences = find_differences(before, now)
    if differences:
        more = len(differences) - _MOST_DIFFERENCES
        text = "; ".join(differences[:_MOST_DIFFERENCES]) + (f"; {more} more" if more > 0 else "")
        raise DataError(
            f"{output}: the run there was begun otherwise: {text}; go on as it was begun, or begin "
            "again with --overwrite"
        )


def read_plan(output: str) -> dict[str, Any] | None:
    """Returns plan.json, None where there is none.

    Raises:
      DataError: it is no such file of this version's.
    """
    path = files.join(output, *PLAN.split("/"))
    try:
        # With its size: a store's answer that was cut off is no damaged plan.
        data = files.read_file(path, size=files.size_of(path))
    except FileNotFoundError:
        return None
    try:
        return _unseal(data)
    except ValueError as error:
        raise DataError(
            f"{path}: not as this version writes it: {error}; begin again with --overwrite"
        ) from error


def keep_plan(output: str, plan: Mapping[str, Any]) -> str:
    """Writes plan.json, or sees to it that the one which is there says the same.

    Returns:
      The plan's digest.

    Raises:
      DataError: the folder was begun with another plan.
    """
    before = read_plan(output)
    if before is None:
        files.write_file(output, PLAN, _seal(plan))
    else:
        check_plan(before, plan, output=output)
    return digest_plan(plan)


def check_still(output: str, plan: str) -> None:
    """Raises DataError where the folder no longer has the plan with this digest.

    A worker that outlived its run must not write into the folder of the next one.
    """
    found = read_plan(output)
    if found is None or digest_plan(found) != plan:
        raise DataError(f"{output}: another run has taken the folder over: this one ends")


@dataclasses.dataclass(frozen=True)
class DoneShard:
    """All that is handed on of a finished shard.

    Attributes:
      summary: of its records.
      rejects: of its inputs.
      contents: of its records, and of copies that were dropped for them.
    """

    summary: ShardSummary
    rejects: tuple[Reject, ...]
    contents: tuple[Content, ...]


def write_done(output: str, done: DoneShard, *, plan: str) -> None:
    """Marks a shard, all of whose files are in their places, as finished."""
    name = done.summary.name
    dropped = {reject.key for reject in done.rejects}
    document = {
        "format": FORMAT,
        "plan": plan,
        "summary": dataclasses.asdict(done.summary),
        "index": {suffix: files.hash_file(_index_path(output, name, suffix)) for suffix in _INDEX},
        "rejects": [dataclasses.asdict(reject) for reject in done.rejects],
        # Those of records stand in the index.
        "copies": [
            [digest.hex(), key, label] for digest, (key, label) in done.contents if key in dropped
        ],
    }
    files.write_file(output, done_name(name), _seal(document))


_INDEX = ("parquet", "idx")


def _index_path(output: str, name: str, suffix: str) -> str:
    return files.join(output, INDEX_FOLDER, f"{name}.{suffix}")


def read_done(output: str, name: str, *, plan: str) -> DoneShard | None:
    """Returns a finished shard; None where it must be written, be it again.

    The mark is not believed: the shard and its index are read, and hashed, as it is itself.
    """
    try:
        document = _unseal(files.read_file(files.join(output, *done_name(name).split("/"))))
        if document["plan"] != plan:
            return None
        summary = _read_summary(document["summary"])
        path = files.join(output, name + SHARD_SUFFIX)
        if summary.name != name or files.size_of(path) != summary.bytes:
            return None
        if files.hash_file(path) != summary.sha256:
            return None
        for suffix in _INDEX:
            if files.hash_file(_index_path(output, name, suffix)) != document["index"][suffix]:
                return None
        rejects = tuple(Reject(**reject) for reject in document["rejects"])
        copies = [
            (bytes.fromhex(digest), (key, label)) for digest, key, label in document["copies"]
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, DataError):  # a store that fails says nothing about the shard
            raise
        return None
    return DoneShard(summary, rejects, (*_read_contents(output, name), *copies))


def _read_summary(fields: Mapping[str, Any]) -> ShardSummary:
    return ShardSummary(
        **{
            **fields,
            "classes": tuple((label, count) for label, count in fields["classes"]),
            "channel_sum": tuple(fields["channel_sum"]),
            "channel_sum_of_squares": tuple(fields["channel_sum_of_squares"]),
        }
    )


def _read_contents(output: str, name: str) -> list[Content]:
    data = files.read_file(_index_path(output, name, "parquet"))
    columns = ["source_sha256", "key", "label"]
    table = read_parquet(data, columns=columns)
    return [
        (bytes.fromhex(digest), (key, label))
        for digest, key, label in zip(*(table[c].to_pylist() for c in columns), strict=True)
    ]


def forget_run(output: str, shards: Iterable[str]) -> None:
    """Removes what only an unfinished run needs: dataset.json has taken its place.

    Args:
      output: the data set's folder.
      shards: names of all shards, without suffix.
    """
    files.delete_files(output, [*map(done_name, shards), PLAN])


def is_finished(output: str, data: bytes) -> bool:
    """Whether the folder holds exactly this dataset.json already."""
    try:
        return files.read_file(files.join(output, MANIFEST)) == data
    except FileNotFoundError:
        return False
