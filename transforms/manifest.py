"""dataset.json: what a data set holds, and, since it is written last, the mark that it is whole."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from transforms import example, files
from transforms.labels import Labelling
from transforms.records import ShardSummary
from transforms.shards import SHARD_NAME, SHARD_SUFFIX, SPLIT_NAME

MANIFEST = "dataset.json"
REJECTS = "rejects.jsonl"
DUPLICATES = "duplicates.jsonl"
# What several data sets must have in common to be read as one.
ALIKE = ("schema", "label_kind", "labels", "image_size", "channels", "encoding")
INDEX_FOLDER = "index"
FORMAT = 1
# In the configuration of a set with several labels a record.
_SEPARATOR = "label_separator"
# What may differ between two runs that made the same data.
_NOT_IN_FINGERPRINT = ("tpufeed", "libraries", "config", "fingerprint")


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of records: its name in the folder, records, bytes, and sha256 in hex."""

    name: str
    records: int
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Split:
    """One split: its records, its records per label (every label, in id order), its shards."""

    records: int
    classes: Mapping[str, int]
    shards: tuple[Shard, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of dataset.json; see docs/format.md for each field."""

    tpufeed: str
    libraries: Mapping[str, str]
    config: Mapping[str, Any]
    schema: str
    encoding: str
    channels: int
    image_size: tuple[int, int] | None
    labels: tuple[str, ...]
    label_offset: int
    features: Mapping[str, Mapping[str, Any]]
    splits: Mapping[str, Split]
    channel_mean: tuple[float, ...] | None
    channel_std: tuple[float, ...] | None
    rejects: Mapping[str, int]
    skipped: int
    format: int = FORMAT

    @property
    def records(self) -> int:
        """Records in all splits together."""
        return sum(split.records for split in self.splits.values())

    @property
    def fingerprint(self) -> str:
        """sha256, in hex, over the canonical JSON of the data: equal data, equal fingerprint."""
        return fingerprint(_to_json(self))

    @property
    def specs(self) -> tuple[example.FeatureSpec, ...]:
        """The features of every record, sorted by name."""
        return tuple(
            example.FeatureSpec(
                name, spec["dtype"], tuple(spec["shape"]), _default(spec["dtype"], spec["default"])
            )
            for name, spec in sorted(self.features.items())
        )

    @property
    def label_kind(self) -> str:
        """How many labels a record has, by `features`: one of labels.KINDS."""
        return _label_kind(self.schema, self.features)

    @property
    def labelling(self) -> Labelling:
        """How the labels in index/ are to be read."""
        kind = self.label_kind
        return Labelling(kind, self.config[_SEPARATOR] if kind == "many" else "")


def _label_kind(schema: str, features: Mapping[str, Mapping[str, Any]]) -> str:
    feature = features.get(example.CLASS_FEATURES[schema])
    if feature is None:
        return "none"
    return "many" if tuple(feature["shape"]) == example.ANY_LENGTH else "one"


def check_trainable(sources: Mapping[str, Manifest]) -> None:
    """Sees to it that every record has one label, which is what the models here learn.

    Args:
      sources: manifests by folder.

    Raises:
      ValueError: names the folder and what reads it instead.
    """
    for folder, contents in sources.items():
        if contents.label_kind != "one":
            have = {"many": "several labels each", "none": "no labels"}[contents.label_kind]
            raise ValueError(
                f"--data {folder}: the records have {have}, and tpufeed train learns one class "
                "for each; read the set with open_dataset instead, as docs/labels.md shows"
            )


def fingerprint(document: Mapping[str, Any]) -> str:
    """sha256, in hex, of the document's canonical JSON.

    Canonical: without the fields that may differ between equal data sets (tpufeed, libraries,
    config, fingerprint), keys sorted, no white space, all but ASCII escaped.
    """
    data = {name: value for name, value in document.items() if name not in _NOT_IN_FINGERPRINT}
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def describe_features(specs: Iterable[example.FeatureSpec]) -> dict[str, dict[str, Any]]:
    """Returns the features as they stand in dataset.json; a default of bytes as text."""
    return {
        spec.name: {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "default": spec.default.decode() if isinstance(spec.default, bytes) else spec.default,
        }
        for spec in specs
    }


def _default(dtype: str, value: Any) -> Any:
    return value.encode() if dtype == "bytes" and value is not None else value


def summarize_splits(
    summaries: Iterable[ShardSummary], *, splits: Iterable[str], labels: Sequence[str]
) -> dict[str, Split]:
    """Returns the splits with their shards in order; a split without records has no shards."""
    ordered = sorted(summaries, key=lambda summary: (summary.split, summary.index))
    result = {}
    for name in sorted({*splits, *(summary.split for summary in ordered)}):
        mine = [summary for summary in ordered if summary.split == name]
        classes = dict.fromkeys(labels, 0)
        for summary in mine:
            for label, count in summary.classes:
                classes[label] += count
        shards = tuple(Shard(s.name + SHARD_SUFFIX, s.records, s.bytes, s.sha256) for s in mine)
        result[name] = Split(sum(s.records for s in mine), classes, shards)
    return result


def channel_moments(
    *, pixels: int, sums: Sequence[int], squares: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation (of the population) a channel, scale 0 to 1.

    From exact whole numbers, so that no order of summation can change a digit.
    """
    means = tuple(s / (255 * pixels) for s in sums)
    variances = (
        Fraction(pixels * q - s * s, pixels * pixels * 255 * 255)
        for s, q in zip(sums, squares, strict=True)
    )
    return means, tuple(math.sqrt(variance) for variance in variances)


def moments_of_training(
    summaries: Iterable[ShardSummary],
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Mean and standard deviation over the split "train", over all where that has no record."""
    filled = [s for s in summaries if s.pixels]
    chosen = [s for s in filled if s.split == "train"] or filled
    if not chosen:
        return None, None
    return channel_moments(
        pixels=sum(s.pixels for s in chosen),
        sums=[sum(n) for n in zip(*(s.channel_sum for s in chosen), strict=True)],
        squares=[sum(n) for n in zip(*(s.channel_sum_of_squares for s in chosen), strict=True)],
    )


def dump_manifest(manifest: Manifest) -> bytes:
    """Returns the bytes of dataset.json."""
    document = {**_to_json(manifest), "fingerprint": manifest.fingerprint}
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


def _to_json(manifest: Manifest) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(manifest)]
    document = {name: getattr(manifest, name) for name in ["format", *fields[:-1]]}
    document["splits"] = {
        name: dataclasses.asdict(split) for name, split in manifest.splits.items()
    }
    return document


def parse_manifest(data: bytes, *, path: str, check_fingerprint: bool = True) -> Manifest:
    """Reads dataset.json.

    Args:
      data: the file's bytes.
      path: for messages.
      check_fingerprint: whether the fingerprint must fit the rest.

    Raises:
      ValueError: no JSON, another format, a field missing or unknown, or a fingerprint that does
        not fit the rest.
    """
    try:
        document = json.loads(data)
        found = document.get("format")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON object: {error}") from error
    if found != FORMAT:
        raise ValueError(f"{path}: format is {_short(found)}, this version reads {FORMAT}")
    known = {field.name for field in dataclasses.fields(Manifest)} | {"fingerprint"}
    if missing := sorted(known - set(document)):
        raise ValueError(f"{path}: {', '.join(missing)} missing: the file was edited or cut")
    if unknown := sorted(set(document) - known):
        raise ValueError(f"{path}: unknown field {_short(unknown[0])}: the file was edited")
    claimed = document.pop("fingerprint")
    if check_fingerprint and claimed != (actual := fingerprint(document)):
        raise ValueError(
            f"{path}: fingerprint is {_short(claimed)[1:-1]}, the contents give {actual}: the file "
            "was edited"
        )
    if problem := next(_problems(document), ""):
        raise ValueError(f"{path}: {problem}: not as tpufeed writes it")
    return _from_json(document)


def _problems(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is of the wrong kind, so that nothing after has to ask.

    The names of splits and shards are held to their form: they become parts of paths.
    """
    for where, value, test in _kinds(document):
        if not test(value):
            yield f"{where} is {_short(value)}"
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        yield "a text holds half a surrogate pair"


def _kinds(document: Mapping[str, Any]) -> Iterator[tuple[str, Any, Callable[[Any], bool]]]:
    tests: dict[str, Callable[[Any], bool]] = {
        "tpufeed": _is_text,
        "libraries": lambda value: _is_table(value, _is_text),
        "config": lambda value: isinstance(value, dict),
        "schema": lambda value: value in example.SCHEMAS,
        "encoding": _is_text,
        "channels": lambda value: _is_count(value) and value in (1, 3),
        "image_size": lambda value: (
            value is None or (_is_list(value, _is_count) and len(value) == 2)
        ),
        "labels": lambda value: _is_list(value, _is_text) and len(set(value)) == len(value),
        "label_offset": _is_count,
        "features": lambda value: isinstance(value, dict),
        "splits": lambda value: isinstance(value, dict),
        "channel_mean": _is_moments,
        "channel_std": _is_moments,
        "rejects": lambda value: _is_table(value, _is_count),
        "skipped": _is_count,
    }
    for name, test in tests.items():
        yield name, document[name], test
    for name, feature in document["features"].items():
        yield f"features.{_short(name)}", feature, _is_feature
    for name, split in document["splits"].items():
        yield "the name of a split", name, lambda value: bool(SPLIT_NAME.fullmatch(value))
        yield f"splits.{name}", split, _is_split
        for number, shard in enumerate(split["shards"]):
            yield f"splits.{name}.shards[{number}]", shard, functools.partial(_is_shard, name)
    if _label_kind(document["schema"], document["features"]) == "many":
        # Without it nothing in index/ could be told apart.
        separator = document["config"].get(_SEPARATOR)
        yield f"config.{_SEPARATOR}", separator, lambda value: _is_text(value) and value != ""


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_list(value: Any, test: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(test, value))


def _is_table(value: Any, test: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(test, value.values()))


def _is_moments(value: Any) -> bool:
    # A whole number may be too long for a float.
    return value is None or _is_list(
        value, lambda v: type(v) is float and math.isfinite(v) or _is_count(v)
    )


def _is_feature(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "default"}:
        return False
    kinds: dict[Any, Any] = {"bytes": str, "int64": int, "float": float}
    dtype, default = value["dtype"], value["default"]
    return (
        _is_text(dtype)
        and dtype in kinds
        and (_is_list(value["shape"], _is_count) or value["shape"] == list(example.ANY_LENGTH))
        and len(value["shape"]) <= 1
        and (default is None or type(default) is kinds[dtype])
    )


def _is_split(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"records", "classes", "shards"}
        and _is_count(value["records"])
        and _is_table(value["classes"], _is_count)
        and isinstance(value["shards"], list)
    )


def _is_shard(split: str, value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"name", "records", "bytes", "sha256"}:
        return False
    name = value["name"]
    found = SHARD_NAME.fullmatch(name.removesuffix(SHARD_SUFFIX)) if _is_text(name) else None
    return (
        found is not None
        and found["split"] == split
        and name.endswith(SHARD_SUFFIX)
        and _is_count(value["records"])
        and _is_count(value["bytes"])
        and _is_text(value["sha256"])
    )


def _from_json(document: dict[str, Any]) -> Manifest:
    splits = {
        name: Split(
            split["records"],
            dict(split["classes"]),
            tuple(Shard(**shard) for shard in split["shards"]),
        )
        for name, split in document["splits"].items()
    }

    def frozen(name: str) -> Any:
        value = document[name]
        return None if value is None else tuple(value)

    tuples = ("image_size", "labels", "channel_mean", "channel_std")
    return Manifest(**{**document, "splits": splits, **{name: frozen(name) for name in tuples}})


def load_manifest(folder: str) -> Manifest:
    """Reads a data set's dataset.json.

    Raises:
      ValueError: the folder has none, so the set is not whole, or the file was edited.
    """
    path = files.join(folder, MANIFEST)
    if problem := files.file_problem(path, listed=files.is_remote(path) and files.exists(path)):
        said = f"no {MANIFEST}" if problem == "missing" else f"{MANIFEST}: {problem}"
        raise ValueError(f"{folder}: {said}, so this is no complete data set: run tpufeed ingest")
    return parse_manifest(files.read_file(path), path=path)
