"""`tpufeed plan`: from what was listed and sampled to files, bytes, time, memory, cost, warnings.

Pure functions: pipeline/rehearsal.py lists, samples and measures. docs/plan.md has the model.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence

from pipeline.config import IngestConfig, PlanConfig
from pipeline.messages import describe_seconds, printable
from pipeline.summary import describe_table
from transforms.labels import ONE_LABEL, Labelling
from transforms.records import CHOICES, DataError, ImageRef
from transforms.shards import SHARD_SUFFIX, place_of, shard_name

# What local runners hold for a reference where references are grouped: docs/scale.md.
REFERENCE_BYTES = 800
# Below, the seconds that opening a shard takes count for more than reading it.
TINY_SHARD = 1_000_000
# Decoded, such a picture takes 150 MB and more, several times over.
HUGE_PIXELS = 50_000_000
HUGE_BYTES = 100_000_000
# One class this many times as large as another: a model does well to forget the small one.
UNEQUAL = 10
_SPLIT_NAMES = ("train", "training", "val", "valid", "validation", "dev", "eval", "test")
_MOST_NAMES = 3

Classes = Mapping[str, Mapping[str, int]]  # images by split and label


@dataclasses.dataclass(frozen=True)
class Prices:
    """What things cost, as the user says; nothing is built in.

    Attributes:
      date: when the prices were looked up.
      source: where.
      currency: of all of them.
      worker_hour: of a machine.
      core_hour: of each of its cores.
      memory_gb_hour: of each 10^9 bytes of its memory.
      reads_10000: of 10,000 reads from a bucket.
      shuffled_gb: of 10^9 bytes that a service shuffles.
      storage_gb_month: of 10^9 bytes of output.
    """

    date: str
    source: str
    currency: str = "USD"
    worker_hour: float = 0.0
    core_hour: float = 0.0
    memory_gb_hour: float = 0.0
    reads_10000: float = 0.0
    shuffled_gb: float = 0.0
    storage_gb_month: float = 0.0


_TEXTS = ("date", "source", "currency")
_NUMBERS = tuple(f.name for f in dataclasses.fields(Prices) if f.name not in _TEXTS)


def parse_prices(data: bytes, *, path: str) -> Prices:
    """Reads the file of --prices: a JSON object with the fields of Prices.

    Raises:
      DataError: it is no such object; names the file and the field.
    """
    try:
        document = json.loads(data)
    except ValueError as error:
        raise DataError(f"--prices {path}: no JSON: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"--prices {path}: must be an object, as in docs/plan.md")
    for name, value in document.items():
        if name not in (*_TEXTS, *_NUMBERS):
            allowed = ", ".join((*_TEXTS, *_NUMBERS))
            raise DataError(f"--prices {path}: {name!r} is no price; allowed are {allowed}")
        if name in _TEXTS and not (isinstance(value, str) and value.strip()):
            raise DataError(f"--prices {path}: {name} must be a text that is not empty")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in _NUMBERS and not (number and 0 <= value < math.inf):
            raise DataError(f"--prices {path}: {name} is {value!r}, must be a number from 0")
    for name in ("date", "source"):
        if name not in document:
            raise DataError(f"--prices {path}: no {name}: say when and where the prices are from")
    if not set(document) & set(_NUMBERS):
        raise DataError(f"--prices {path}: no price; give one of {', '.join(_NUMBERS)}")
    return Prices(**document)


@dataclasses.dataclass(frozen=True)
class Listing:
    """All inputs, as ingest lists, screens and splits them.

    Attributes:
      refs: know their split.
      shards: number of them by split.
      labels: in the order of their ids.
      rejects: what is no candidate already, by reason.
      skipped: system files.
    """

    refs: Sequence[ImageRef]
    shards: Mapping[str, int]
    labels: tuple[str, ...]
    rejects: Mapping[str, int]
    skipped: int = 0


@dataclasses.dataclass(frozen=True)
class Sampled:
    """One picture that was prepared.

    Attributes:
      weight: how many pictures it stands for.
      reason: why it is no record, "" where it is one.
      bytes: of the record with its framing.
      source_bytes: of the source.
      source_pixels: of the source, width x height.
      enlarged: whether it was scaled up.
      copies: that were dropped for it; they share its reason.
    """

    weight: float
    reason: str = ""
    bytes: int = 0
    source_bytes: int = 0
    source_pixels: int = 0
    enlarged: bool = False
    copies: int = 0


@dataclasses.dataclass(frozen=True)
class Costs:
    """What was measured on this machine.

    Attributes:
      start: seconds, of a run however small.
      listing: seconds, until all inputs were listed, screened and split.
      graph: seconds an image, of references, files and index, whatever the picture.
      preparing: seconds an image, of reading, decoding and encoding beyond the smallest picture.
      process: bytes of memory of the process without its references.
      decoder: bytes of memory of the largest decoder.
      decoders: how many there are.
      cores: of this machine.
      memory: bytes of this machine's memory.
      reference: bytes of a reference where it is shuffled.
      reads: requests to a bucket, an image.
    """

    start: float
    listing: float
    graph: float
    preparing: float
    process: int
    decoder: int
    decoders: int
    cores: int = 1
    memory: int = 0
    reference: int = 0
    reads: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What ingest would do.

    Attributes:
      images: candidates: inputs that are neither rejected nor skipped by the listing.
      source_bytes: of the candidates; -1 where the listing does not tell all.
      labels: in the order of their ids.
      classes: candidates by split and class; an image of several counts in each.
      split_images: candidates by split.
      shards: number of them by split.
      split_bytes: of the shards, by split.
      rejects: by reason: those of the listing, and as many more as the sample stands for.
      skipped: system files.
      sampled: pictures that were prepared.
      workers: machines.
      costs: what was measured.
      seconds: of the run.
      memory: bytes of a worker.
      cost: by what is paid for; None without prices.
      prices: that the cost was worked out from.
      warnings: what will hurt.
    """

    images: int
    source_bytes: int
    labels: tuple[str, ...]
    classes: Classes
    split_images: Mapping[str, int]
    shards: Mapping[str, int]
    split_bytes: Mapping[str, int]
    rejects: Mapping[str, int]
    skipped: int
    sampled: int
    workers: int
    costs: Costs
    seconds: float
    memory: int
    cost: Mapping[str, float] | None
    prices: Prices | None
    warnings: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Of all shards."""
        return sum(self.split_bytes.values())

    @property
    def json(self) -> str:
        """The plan for programs."""
        splits = {
            split: {
                "images": self.split_images[split],
                "classes": self.classes[split],
                "shards": self.shards.get(split, 0),
                "bytes": self.split_bytes[split],
            }
            for split in self.classes
        }
        document = dataclasses.asdict(self) | {"splits": splits, "bytes": self.bytes}
        for name in ("classes", "split_images", "shards", "split_bytes"):
            del document[name]
        return json.dumps(document, indent=1)


def choose_sample(
    refs: Sequence[ImageRef], *, number: int, seed: int
) -> list[tuple[ImageRef, float]]:
    """Returns some images, each with the number of images that it stands for.

    The images are sorted by size and cut into as many equal parts as there are to be; of each part
    the first by hash is taken. So large files, which cost most, are there in their share.

    Args:
      refs: all images.
      number: how many, at most.
      seed: of the hash.
    """
    ordered = sorted(refs, key=lambda ref: (ref.size, ref.key))
    number = min(number, len(ordered))
    edges = [len(ordered) * part // number for part in range(number + 1)] if number else []
    chosen = []
    for low, high in zip(edges, edges[1:], strict=False):
        first = min(ordered[low:high], key=lambda ref: place_of(ref.key, seed=seed))
        chosen.append((first, float(high - low)))
    return chosen


def count_classes(
    refs: Sequence[ImageRef], *, splits: Iterable[str], labelling: Labelling = ONE_LABEL
) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Returns the images by split and class, and by split.

    The splits that are sure to be there are, be they empty. The order is that of dataset.json:
    the splits asked for, then others by name.
    """
    images = collections.Counter(ref.split for ref in refs)
    counts = collections.Counter(
        (ref.split, name) for ref in refs for name in labelling.split(ref.label)
    )
    names = [*splits]
    names += sorted(set(images) - set(names))
    classes = {
        name: {label: n for (split, label), n in sorted(counts.items()) if split == name}
        for name in names
    }
    return classes, {name: images[name] for name in names}


def estimate_seconds(images: int, *, shards: int, workers: int, costs: Costs) -> float:
    """Returns the seconds of a run: start, listing, then shards, one at a time on each worker."""
    rounds = math.ceil(shards / workers) / shards if shards else 0.0
    each = costs.graph + costs.preparing
    return costs.start + costs.listing + images * each * rounds


def estimate_cost(
    prices: Prices,
    *,
    images: int,
    output: int,
    seconds: float,
    workers: int,
    costs: Costs,
) -> dict[str, float]:
    """Returns what is paid for once, by kind, and `storage a month`; only what has a price."""
    hours = seconds / 3600 * workers
    parts = {
        "machines": hours * prices.worker_hour,
        "cores": hours * costs.cores * prices.core_hour,
        "memory": hours * costs.memory / 1e9 * prices.memory_gb_hour,
        "reads": images * costs.reads / 10_000 * prices.reads_10000,
        "shuffle": images * costs.reference / 1e9 * prices.shuffled_gb,
    }
    parts = {name: cost for name, cost in parts.items() if cost}
    parts["run"] = sum(parts.values())
    if prices.storage_gb_month:
        parts["storage a month"] = output / 1e9 * prices.storage_gb_month
    return parts


def make_plan(
    listing: Listing,
    sample: Sequence[Sampled],
    costs: Costs,
    *,
    config: IngestConfig,
    how: PlanConfig,
    prices: Prices | None = None,
    blocked: str = "",
) -> Plan:
    """Returns the plan.

    Args:
      listing: all inputs.
      sample: what came of some of them.
      costs: what was measured.
      config: of ingest.
      how: of plan.
      prices: to work out the cost from.
      blocked: why ingest would refuse the output folder, "" where it would not.
    """
    images = len(listing.refs)
    classes, split_images = count_classes(
        listing.refs, splits=config.splits, labelling=config.labelling
    )
    weight = sum(item.weight for item in sample)
    each = sum(item.weight * item.bytes for item in sample) / weight if weight else 0.0
    split_bytes = {split: round(each * number) for split, number in split_images.items()}
    rejects = _add_rejects(listing.rejects, sample)
    shards = sum(listing.shards.values())
    seconds = estimate_seconds(images, shards=shards, workers=how.workers, costs=costs)
    output = sum(split_bytes.values())
    cost = None
    if prices is not None:
        cost = estimate_cost(
            prices, images=images, output=output, seconds=seconds, workers=how.workers, costs=costs
        )
    sizes = [ref.size for ref in listing.refs]
    plan = Plan(
        images=images,
        source_bytes=-1 if -1 in sizes else sum(sizes),
        labels=listing.labels,
        classes=classes,
        split_images=split_images,
        shards=listing.shards,
        split_bytes=split_bytes,
        rejects=dict(sorted(rejects.items())),
        skipped=listing.skipped,
        sampled=len(sample),
        workers=how.workers,
        costs=costs,
        seconds=seconds,
        memory=costs.process
        + costs.decoders * costs.decoder
        + math.ceil(images / how.workers) * REFERENCE_BYTES,
        cost=cost,
        prices=prices,
        warnings=(),
    )
    found = find_warnings(plan, sample, listing.refs, config=config, blocked=blocked)
    return dataclasses.replace(plan, warnings=tuple(found))


def _expected_rejects(sample: Iterable[Sampled]) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for item in sample:
        if item.reason:
            found[item.reason] += item.weight  # type: ignore[assignment]
    return {reason: max(1, round(weight)) for reason, weight in found.items()}


def _add_rejects(listed: Mapping[str, int], sample: Sequence[Sampled]) -> dict[str, int]:
    """Returns the rejects of the listing with those that the sample stands for.

    Copies that were dropped for what is a reject itself are no duplicates: as ingest counts them.
    """
    rejects = collections.Counter(listed)
    for reason, expected in _expected_rejects(sample).items():
        dropped = sum(item.weight * item.copies for item in sample if item.reason == reason)
        copies = min(round(dropped), rejects["duplicate"])
        rejects[reason] += expected + copies
        rejects["duplicate"] -= copies
    return {reason: number for reason, number in rejects.items() if number}


def find_warnings(
    plan: Plan,
    sample: Sequence[Sampled],
    refs: Sequence[ImageRef],
    *,
    config: IngestConfig,
    blocked: str = "",
) -> list[str]:
    """Returns what will hurt, a line each, with the remedy."""
    found = [blocked] if blocked else []
    found += warn_of_splits(plan.split_images)
    found += warn_of_classes(plan.classes, plan.labels)
    found += warn_of_shards(plan.shards, plan.bytes, workers=plan.workers)
    found += warn_of_pictures(sample, refs, config=config)
    # `images` are candidates, of which the sample's rejects are no records.
    records = max(0, plan.images - sum(_expected_rejects(sample).values()))
    found += warn_of_rejects(plan.rejects, records, most=config.max_reject_rate)
    return found


def warn_of_splits(images: Mapping[str, int]) -> list[str]:
    """Returns a warning of each split that gets nothing."""
    return [
        f"split {split} is empty: give it a larger share, or drop it"
        for split, number in images.items()
        if not number and any(images.values())
    ]


def warn_of_classes(classes: Classes, labels: Sequence[str]) -> list[str]:
    """Returns warnings of labels: one class, unequal ones, absent ones, what are no labels."""
    totals: collections.Counter[str] = collections.Counter(dict.fromkeys(labels, 0))
    for counts in classes.values():
        totals.update(counts)
    present = {label: number for label, number in totals.items() if number}
    if not present:
        return []
    found = []
    if len(present) == 1:
        found.append(
            f"one class, {_names(present)}: the label is the name of the parent folder, or a CSV's "
            "column; nothing can be learnt from one"
        )
    if missing := [label for label in labels if not totals[label]]:
        found.append(f"no image of {_names(missing)}, which --class-names lists")
    most, least = max(present, key=present.__getitem__), min(present, key=present.__getitem__)
    if present[most] >= UNEQUAL * present[least]:
        found.append(
            f"unequal classes: {_names([most])} has {present[most]} images, {_names([least])} "
            f"{present[least]}: weigh them, or gather more of the small ones"
        )
    for split, counts in classes.items():
        absent = [label for label in present if not counts.get(label)]
        if absent and counts:
            found.append(f"split {split} has no image of {_names(absent)}: give it a larger share")
    found += _warn_of_labels(present)
    return found


def _warn_of_labels(present: Mapping[str, int]) -> list[str]:
    found = []
    if named := [label for label in present if label.lower() in _SPLIT_NAMES]:
        found.append(
            f"the label {_names(named)} looks like a split: give --input "
            "SPLIT=PATTERN, with the folder of the class last but one in the pattern"
        )
    if len(present) > 2 and 2 * len(present) > sum(present.values()):
        found.append(
            f"{len(present)} classes for {sum(present.values())} images: is the parent folder "
            "really the label?"
        )
    if padded := [label for label in present if label != label.strip()]:
        found.append(f"the label {_names(padded)} begins or ends with a space")
    return found


def warn_of_shards(shards: Mapping[str, int], output: int, *, workers: int) -> list[str]:
    """Returns warnings of shards that are tiny, or fewer than the workers."""
    total = sum(shards.values())
    found = []
    if total > len(shards) and output < TINY_SHARD * total:
        fit = max(len(shards), output // TINY_SHARD)
        found.append(
            f"tiny shards: {total} of {output / total / 1e3:.0f} kB: opening them takes longer "
            f"than reading them from a bucket; --shards {fit} makes them larger"
        )
    if 0 < total < workers:
        found.append(
            f"{total} shard(s) for {workers} workers: a shard is written by one, so "
            f"{workers - total} stand idle; --shards {4 * workers} keeps all busy"
        )
    return found


def warn_of_pictures(
    sample: Sequence[Sampled], refs: Sequence[ImageRef], *, config: IngestConfig
) -> list[str]:
    """Returns warnings of pictures that are scaled up, and of huge ones."""
    made = [item for item in sample if not item.reason]
    found = []
    if enlarged := sum(item.enlarged for item in made):
        pixels = config.pixels
        found.append(
            f"scaled up: {enlarged} of {len(made)} pictures looked at are smaller than "
            f"{pixels.width}x{pixels.height}: a smaller --image-size loses nothing of them"
        )
    if huge := [ref for ref in refs if ref.size > HUGE_BYTES]:
        found.append(
            f"huge sources: {len(huge)} of more than {HUGE_BYTES // 10**6} MB, as "
            f"{printable(huge[0].path)}: each is held in memory"
        )
    if large := sum(item.source_pixels > HUGE_PIXELS for item in made):
        found.append(
            f"huge sources: {large} of {len(made)} pictures looked at have more than "
            f"{HUGE_PIXELS // 10**6} megapixels: --max-pixels leaves them out"
        )
    return found


def warn_of_rejects(rejects: Mapping[str, int], records: int, *, most: float) -> list[str]:
    """Returns warnings of inputs that will be no records; the rate is that of ingest."""
    faults = {reason: number for reason, number in rejects.items() if reason not in CHOICES}
    if rejects and not records and (not faults or most == 1):
        reasons = ", ".join(f"{reason} {number}" for reason, number in rejects.items())
        return [f"no input would become a record ({reasons}): ingest would fail"]
    if not faults:
        return []
    listed = ", ".join(f"{reason} {number}" for reason, number in faults.items())
    total = sum(faults.values())
    text = f"rejects expected: some {total} ({listed})"
    if total > most * (records + total):
        text += f", more than --max-reject-rate {most:g}: ingest would fail"
    return [text + "; rejects.jsonl will name them"]


def _names(labels: Iterable[str]) -> str:
    labels = list(labels)
    shown = ", ".join(printable(repr(label)) for label in labels[:_MOST_NAMES])
    more = len(labels) - _MOST_NAMES
    return shown + (f" and {more} more" if more > 0 else "")


def describe_plan(plan: Plan, *, output: str) -> str:
    """Returns the plan for a person."""
    splits = list(plan.classes)
    size = f", {plan.source_bytes / 1e6:.1f} MB" if plan.source_bytes >= 0 else ""
    what = f"{len(plan.labels)} classes" if plan.labels else "no labels"
    lines = [f"{output}: {plan.images} images{size}, {what}"]
    lines += describe_table(
        plan.labels,
        plan.classes,
        {
            "total": {split: f"{plan.split_images[split]:,}" for split in splits},
            "shards": {split: str(plan.shards.get(split, 0)) for split in splits},
            "MB": {split: f"{plan.split_bytes[split] / 1e6:.1f}" for split in splits},
        },
    )
    for split, count in plan.shards.items():
        first, last = (shard_name(split=split, index=i, count=count) for i in (0, count - 1))
        lines.append(f"  {first}{SHARD_SUFFIX}" + (f" ... {last}" if count > 1 else ""))
    shards = sum(plan.shards.values())
    each = plan.bytes / shards / 1e6 if shards else 0.0
    lines.append(f"  output: {plan.bytes / 1e6:.1f} MB in {shards} shard(s) of {each:.1f} MB")
    lines += [_describe_time(plan), _describe_memory(plan), _describe_cost(plan)]
    rejects = ", ".join(f"{reason} {n}" for reason, n in plan.rejects.items()) or "none"
    lines.append(f"  rejects expected: {rejects}; system files skipped: {plan.skipped}")
    lines.append(f"  estimated from {plan.sampled} of {plan.images} pictures")
    lines += [f"warning: {text}" for text in plan.warnings]
    return "\n".join(lines)


def _describe_time(plan: Plan) -> str:
    costs = plan.costs
    shape = f"{plan.workers} worker(s) of {costs.cores} core(s), {costs.decoders} decoder(s) each"
    each = costs.graph + costs.preparing
    return (
        f"  time: {describe_seconds(plan.seconds)} on {shape}: start {costs.start:.1f} s, listing "
        f"{costs.listing:.1f} s, {1000 * each:.2f} ms an image"
    )


def _describe_memory(plan: Plan) -> str:
    costs = plan.costs
    return (
        f"  memory of a worker: {plan.memory / 1e6:.0f} MB: {costs.process / 1e6:.0f} MB the "
        f"process, {costs.decoders} x {costs.decoder / 1e6:.0f} MB decoders, the rest references"
    )


def _describe_cost(plan: Plan) -> str:
    if plan.cost is None or plan.prices is None:
        return "  cost: not worked out: give --prices FILE"
    parts = ", ".join(f"{name} {cost:.4f}" for name, cost in plan.cost.items() if name != "run")
    return (
        f"  cost: {plan.cost['run']:.4f} {plan.prices.currency}"
        f"{f' ({parts})' if parts else ''} at the prices of {printable(plan.prices.date)}, "
        f"{printable(plan.prices.source)}"
    )
