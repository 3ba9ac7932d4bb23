"""What `tpufeed plan` measures: the listing, some pictures prepared, a run of next to nothing.

Lists by the functions that the graph maps, prepares by the decoders that shards are written with,
and writes into a temporary folder only, which is gone afterwards.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import os
import pickle
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence

from pipeline.config import IngestConfig, PlanConfig
from pipeline.ingest import ingest_images, record_policy, reserved_names, resolve_config
from pipeline.plan import (
    Costs,
    Listing,
    Plan,
    Prices,
    Sampled,
    choose_sample,
    make_plan,
    parse_prices,
)
from pipeline.runner import RunPlan, plan_run
from transforms import files
from transforms.decoders import Outcome, Task, end_decoders, peak_memory, start_decoders
from transforms.duplicates import drop_copies, group_by_content, know_content
from transforms.idx import list_idx
from transforms.image import PixelPolicy
from transforms.ordered import READERS, map_in_order
from transforms.prepare import PreparedRecord, RecordPolicy
from transforms.records import IDX_PREFIX, DataError, Exclusions, ImageRef, Input, Reject, Skipped
from transforms.screen import (
    add_contents,
    hash_excluded,
    read_exclusions,
    screen_image,
    screen_reject,
)
from transforms.sources import list_input, may_repeat, take_once
from transforms.stats import PlanShards, SumSizes, assign_split, decide_labels, size_image
from transforms.tables import Columns
from transforms.write import NO_IMAGE, index_row, merge_columns, prepare_refs

# Pictures of one pixel: enough that each costs more than the clock's grain.
_TINY = 8000
_SECONDS = 1.0  # that the sample is prepared for, at least
_FRAME = 16  # bytes: length, its checksum, that of the data


def plan_images(
    config: IngestConfig,
    beam_args: Sequence[str] = (),
    *,
    how: PlanConfig | None = None,
    importing: float = 0.0,
) -> Plan:
    """Says what `ingest_images` would do; writes nothing but a temporary folder.

    Args:
      config: of ingest.
      beam_args: options for Beam.
      how: of plan.
      importing: seconds until Beam was imported, for the start of a run.

    Raises:
      UsageError, DataError: as ingest_images, where the inputs are not as they must be.
    """
    how = how or PlanConfig()
    prices = _read_prices(how.prices) if how.prices else None
    inputs = [("--input", source.pattern) for source in config.inputs]
    run = plan_run(beam_args, paths=[*inputs, ("--output", config.output)], submit=False)
    config = resolve_config(config, decoders=run.decoders)
    assert config.decoders is not None
    bare, began = _peak(), time.perf_counter()
    listing, exclusions = list_images(config)
    listed, holding = time.perf_counter() - began, _peak()
    if not listing.refs and not listing.rejects:
        raise DataError(NO_IMAGE)
    start, graph, tiny = _run_nothing(run, beam_args)
    process = bare + _peak() - holding  # without the references, which are counted apart
    chosen = choose_sample(listing.refs, number=how.sample, seed=config.seed)
    sample, spent = prepare_sample(chosen, listing.labels, exclusions, config=config)
    costs = Costs(
        start=importing + start + spent.opening,
        listing=listed,
        graph=graph,
        preparing=max(0.0, spent.each - tiny),
        process=process,
        decoder=spent.memory,
        decoders=config.decoders,
        cores=os.cpu_count() or 1,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        reference=_mean(len(pickle.dumps(ref)) for ref, _ in chosen),
        reads=_reads(listing.refs, config),
    )
    blocked = _find_block(config)
    return make_plan(listing, sample, costs, config=config, how=how, prices=prices, blocked=blocked)


def _read_prices(path: str) -> Prices:
    try:
        return parse_prices(files.read_file(path), path=path)
    except OSError as error:
        raise DataError(f"--prices {path}: {error.strerror or error}") from error


def _mean(numbers: Iterable[int]) -> int:
    found = list(numbers)
    return sum(found) // len(found) if found else 0


def _reads(refs: Sequence[ImageRef], config: IngestConfig) -> int:
    if not any(files.is_remote(ref.path) for ref in refs):
        return 0
    return 1 if config.duplicates == "keep" else 2


def age_of_process() -> float:
    """Returns the seconds since this process was started; 0.0 where the system does not tell."""
    try:
        with open("/proc/uptime") as uptime, open("/proc/self/stat") as status:
            now = float(uptime.read().split()[0])
            # proc(5): field 22, 20 after the name, in ticks since the system was started.
            ticks = int(status.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, now - ticks / os.sysconf("SC_CLK_TCK"))


def _peak() -> int:
    """Returns the largest resident set of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _find_block(config: IngestConfig) -> str:
    """Says why ingest would refuse the output folder; "" where it would not."""
    if config.overwrite or config.resume or not (names := files.list_folder(config.output)):
        return ""
    return (
        f"--output {config.output}: not empty ({names[0]} and {len(names) - 1} more), so ingest "
        "will refuse it: give another folder, --overwrite or --resume"
    )


def list_images(config: IngestConfig) -> tuple[Listing, Exclusions]:
    """Lists, screens, treats copies and splits, as the graph does, without a pipeline.

    Args:
      config: from `resolve_config`.

    Returns:
      The listing, and what must not come in.
    """
    assert config.root is not None
    labelling = config.labelling
    items = itertools.chain.from_iterable(
        list_input(
            source,
            root=config.root,
            grouping=config.split_by,
            reserved=reserved_names(config),
            labelling=labelling,
        )
        for source in config.inputs
    )
    refs, rejects, skipped, columns = _sort_out(items, repeated=may_repeat(config.inputs))
    merge_columns(columns)
    exclusions, refs, refused = _screen(refs, rejects, config)
    before = len(refs)
    if config.duplicates != "keep":
        refs = _treat_copies(refs, config.duplicates)
        if before > len(refs):
            refused["duplicate"] += before - len(refs)
    refs = [
        assign_split(ref, weights=config.weights, seed=config.seed, explicit=config.weights_given)
        for ref in refs
    ]
    sums = SumSizes()
    sizes = sums.create_accumulator()
    for ref in refs:
        for element in size_image(ref, pixels=config.pixels, labelling=labelling):
            sizes = sums.add_input(sizes, element)
    listing = Listing(
        refs=refs,
        shards=PlanShards(config.shards, config.shard_size).plan(sizes),
        labels=decide_labels((label for _, label in sizes if label), known=config.known_labels),
        rejects=dict(refused),
        skipped=skipped,
    )
    return listing, exclusions


def _sort_out(
    items: Iterable[object], *, repeated: bool
) -> tuple[list[ImageRef], list[Reject], int, list[Columns]]:
    columns: list[Columns] = []

    def without_columns() -> Iterator[ImageRef | Reject | Skipped]:
        for item in items:
            if isinstance(item, Columns):
                columns.append(item)
            else:
                assert isinstance(item, ImageRef | Reject | Skipped)
                yield item

    listed = list(take_once(without_columns()) if repeated else without_columns())
    refs = [item for item in listed if isinstance(item, ImageRef)]
    rejects = [item for item in listed if isinstance(item, Reject)]
    return refs, rejects, len(listed) - len(refs) - len(rejects), columns


def _screen(
    refs: Sequence[ImageRef], rejects: Sequence[Reject], config: IngestConfig
) -> tuple[Exclusions, list[ImageRef], collections.Counter[str]]:
    exclusions = Exclusions()
    if config.exclude is not None:
        exclusions = read_exclusions(config.exclude)
        contents = itertools.chain.from_iterable(hash_excluded(ref, exclusions) for ref in refs)
        exclusions = add_contents(exclusions, contents)
    screen = config.known_labels is not None and config.new_classes == "reject"
    known = frozenset(config.known_labels or ()) if screen else None
    refused: collections.Counter[str] = collections.Counter()
    for reject in rejects:
        ref = ImageRef(reject.key, reject.path, reject.label)
        refused[screen_reject(reject, exclusions, ref=ref).reason] += 1
    kept = []
    for ref in refs:
        item = screen_image(ref, exclusions, known=known, labelling=config.labelling)
        if isinstance(item, ImageRef):
            kept.append(item)
        else:
            refused[screen_reject(item, exclusions, ref=ref).reason] += 1
    return exclusions, kept, refused


def _treat_copies(refs: Sequence[ImageRef], mode: str) -> list[ImageRef]:
    known = map_in_order(know_content, refs, threads=READERS)
    return list(map(group_by_content, known) if mode == "together" else drop_copies(known))


@dataclasses.dataclass(frozen=True)
class Spent:
    """What preparing the sample took.

    Attributes:
      opening: seconds, once, until the decoders have read the IDX files.
      each: seconds an image, with all decoders at work.
      memory: bytes, of the largest decoder.
    """

    opening: float
    each: float
    memory: int


def prepare_sample(
    chosen: Sequence[tuple[ImageRef, float]],
    labels: Sequence[str],
    exclusions: Exclusions,
    *,
    config: IngestConfig,
) -> tuple[list[Sampled], Spent]:
    """Prepares pictures as a shard's are, without a file.

    Args:
      chosen: images, and how many each stands for.
      labels: in the order of their ids.
      exclusions: what must not come in.
      config: from `resolve_config`.

    Returns:
      What came of each, and what it took.
    """
    policy = record_policy(config)
    task = Task(policy, {label: number for number, label in enumerate(labels)}, exclusions)
    decoders = config.decoders or 1
    refs = [ref for ref, _ in chosen]
    outcomes: list[Sampled] = []
    start_decoders(decoders)
    try:
        list(prepare_refs([_NOWHERE] * 2 * decoders, task, decoders=decoders))  # all are up
        began = time.perf_counter()
        list(prepare_refs(_first_of_each(refs) * 2 * decoders, task, decoders=decoders))
        opening = time.perf_counter() - began if refs and refs[0].item >= 0 else 0.0
        began, passes, seconds = time.perf_counter(), 0, 0.0
        while refs and seconds < _SECONDS:  # small pictures, again: or the clock shows chance
            outcomes = [_measure(item) for item in prepare_refs(refs, task, decoders=decoders)]
            passes, seconds = passes + 1, time.perf_counter() - began
        memory = peak_memory()
    finally:
        end_decoders()
    sample = [
        dataclasses.replace(item, weight=weight, copies=len(ref.copies))
        for item, (ref, weight) in zip(outcomes, chosen, strict=True)
    ]
    each = seconds / (passes * len(refs)) if refs else 0.0
    return sample, Spent(opening, each, memory)


_NOWHERE = ImageRef("", os.path.join(os.devnull, "nowhere"), "")


def _first_of_each(refs: Iterable[ImageRef]) -> list[ImageRef]:
    """Returns an image of each IDX file, or the first; what comes first loads libraries, too."""
    first: dict[str, ImageRef] = {}
    for ref in refs:
        first.setdefault(ref.path if ref.item >= 0 else "", ref)
    return list(first.values())


def _measure(outcome: Outcome) -> Sampled:
    """Does with a record what writing does, but write it; keeps its sizes only."""
    if isinstance(outcome, Reject):
        return Sampled(1.0, outcome.reason)
    hashlib.sha256(outcome.example)
    index_row(outcome, offset=0, size=len(outcome.example))
    geometry = outcome.image.geometry
    return Sampled(
        1.0,
        bytes=len(outcome.example) + _FRAME,
        source_bytes=outcome.source_bytes,
        source_pixels=geometry.source_width * geometry.source_height,
        enlarged=max(geometry.scale) > 1,
    )


def _run_nothing(run: RunPlan, beam_args: Sequence[str]) -> tuple[float, float, float]:
    """Runs the whole graph on pictures of one pixel, in a temporary folder.

    Returns:
      Seconds of a run of two pictures; seconds an image of a larger run; and what of that is spent
      in handing pictures to decoders and back.
    """
    given = beam_args if run.local else ()
    with tempfile.TemporaryDirectory(prefix="tpufeed-plan-") as folder, _saying_where():
        few = _time_ingest(folder, 2, given)
        start_decoders(run.decoders)
        tiny = _time_tiny(folder, decoders=run.decoders)
        many = _time_ingest(folder, _TINY, given)
    return few, max(0.0, many - few) / _TINY, tiny


@contextlib.contextmanager
def _saying_where() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"no temporary folder to measure in: {error.strerror or error}; set TMPDIR to one"
        ) from error


_TINY_PIXELS = PixelPolicy(width=1, height=1, channels=1, encoding="raw")


def _time_ingest(folder: str, images: int, beam_args: Sequence[str]) -> float:
    source = _write_tiny(folder, images)
    config = IngestConfig((Input(source),), f"{folder}/out-{images}", pixels=_TINY_PIXELS)
    began = time.perf_counter()
    ingest_images(config, beam_args)
    return time.perf_counter() - began


def _time_tiny(folder: str, *, decoders: int) -> float:
    source = _write_tiny(folder, _TINY)
    refs = list(list_idx(Input(source)))
    task = Task(RecordPolicy(_TINY_PIXELS), {"0": 0}, Exclusions())
    list(prepare_refs(refs[: 2 * decoders], task, decoders=decoders))
    began = time.perf_counter()
    for outcome in prepare_refs(refs, task, decoders=decoders):
        assert isinstance(outcome, PreparedRecord)
        _measure(outcome)
    return (time.perf_counter() - began) / len(refs)


def _write_tiny(folder: str, images: int) -> str:
    """Writes IDX files of pictures of one pixel, half of them for training."""
    target = os.path.join(folder, f"in-{images}")
    os.makedirs(target, exist_ok=True)
    half = images // 2
    for stem in ("train", "t10k"):
        for name, header in (
            ("images-idx3", struct.pack(">4I", 0x803, half, 1, 1)),
            ("labels-idx1", struct.pack(">2I", 0x801, half)),
        ):
            with open(os.path.join(target, f"{stem}-{name}-ubyte"), "wb") as file:
                file.write(header + bytes(half))
    return IDX_PREFIX + target
