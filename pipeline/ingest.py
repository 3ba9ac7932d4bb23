"""The whole Beam graph, and running it.

tpufeed ingest --input 'photos/*/*.jpg' --output records --split train=0.9,validation=0.1
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import queue
import re
import threading
from collections.abc import Iterator, Sequence

import apache_beam as beam
from apache_beam import pvalue
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, StandardOptions

from pipeline import __version__
from pipeline.config import IngestConfig, UsageError
from transforms import files
from transforms.example import feature_specs
from transforms.manifest import (
    DUPLICATES,
    INDEX_FOLDER,
    MANIFEST,
    REJECTS,
    Manifest,
    load_manifest,
    parse_manifest,
)
from transforms.records import IDX_PREFIX, DataError, Input
from transforms.shards import SHARD_NAME
from transforms.sources import ListImages, ScreenImages, common_root
from transforms.stats import AssignSplits, DecideLabels, PlanShards
from transforms.write import (
    ManifestHeader,
    RecordPolicy,
    WriteDuplicates,
    WriteManifest,
    WriteRejects,
    WriteShards,
)

_LOGGER = logging.getLogger(__name__)
# Beam's DirectRunner is a switch that first tries to download another runner.
_LOCAL_RUNNERS = ("", "directrunner", "switchingdirectrunner", "fnapirunner")
_LOCAL_RUNNER = "FnApiRunner"
_OURS = re.compile(
    rf"(?:{re.escape(INDEX_FOLDER)}/)?{SHARD_NAME.pattern}(?:\.tfrecord|\.parquet|\.idx)"
    rf"|{re.escape(files.WORK_FOLDER)}/.+\.[0-9a-f]{{32}}"
    rf"|{MANIFEST}|{REJECTS}|{DUPLICATES}|report\.html"
)


def build(root: beam.Pipeline, config: IngestConfig) -> beam.PCollection[Manifest]:
    """Adds the whole graph to a pipeline; `config` is from `resolve_config`.

    Returns:
      One Manifest, of the data set that is whole once the pipeline is done.
    """
    assert config.root is not None
    reserved = tuple(spec.name for spec in feature_specs(config.schema, classes=1))
    policy = RecordPolicy(config.pixels, config.schema, config.label_offset)
    screen = config.known_labels is not None and config.new_classes == "reject"
    known = frozenset(config.known_labels or ()) if screen else None

    listed = (
        root
        | "Inputs" >> beam.Create(config.inputs)
        | "ListImages" >> ListImages(config.root, config.split_by, reserved)
    )
    screened = listed | "ScreenImages" >> ScreenImages(config.exclude, known)
    labels = screened["refs"] | "DecideLabels" >> DecideLabels(config.known_labels)
    refs = screened["refs"] | "AssignSplits" >> AssignSplits(
        config.weights, config.seed, config.weights_given
    )
    plan = refs | "PlanShards" >> PlanShards(config.pixels, config.shards, config.shard_size)
    written = refs | "WriteShards" >> WriteShards(
        config.output,
        policy=policy,
        seed=config.seed,
        threads=config.threads or os.cpu_count() or 1,
        plan=pvalue.AsSingleton(plan),
        labels=pvalue.AsSingleton(labels),
        exclusions=pvalue.AsSingleton(screened["exclusions"]),
    )
    rejects = (
        (screened["rejects"], written["rejects"])
        | "AllRejects" >> beam.Flatten()
        | "WriteRejects" >> WriteRejects(config.output)
    )
    duplicates = written["contents"] | "WriteDuplicates" >> WriteDuplicates(config.output)
    skipped = listed["skipped"] | "CountSkipped" >> beam.combiners.Count.Globally()
    return written["summaries"] | "WriteManifest" >> WriteManifest(
        config.output,
        ManifestHeader(
            __version__, config.to_json(), policy, config.splits, config.max_reject_rate
        ),
        labels=pvalue.AsSingleton(labels),
        rejects=pvalue.AsSingleton(rejects),
        skipped=pvalue.AsSingleton(skipped),
        columns=pvalue.AsIter(listed["columns"]),
        duplicates=pvalue.AsSingleton(duplicates),
    )


def ingest_images(config: IngestConfig, beam_args: Sequence[str] = ()) -> Manifest:
    """Makes the data set in `config.output`.

    Args:
      config: what to do.
      beam_args: options for Beam, such as "--runner=DataflowRunner".

    Raises:
      UsageError: an option that Beam does not know.
      DataError: the inputs or the output are not as they must be; one line with the remedy.
    """
    options = make_options(beam_args)
    config = resolve_config(config, options)
    prepare_output(config)
    pipeline = beam.Pipeline(options=options)
    build(pipeline, config)
    _run(pipeline, options)
    _remove_work_folder(config.output)
    return load_manifest(config.output)


def make_options(beam_args: Sequence[str]) -> PipelineOptions:
    """Returns Beam's options, the runner settled.

    Raises:
      UsageError: Beam does not know an option; Beam itself would only warn.
    """
    parser = _BeamOptions(prog="tpufeed ingest", add_help=False, allow_abbrev=False)
    for options in PipelineOptions.__subclasses__():
        options._add_argparse_args(parser)
    _, unknown = parser.parse_known_args(list(beam_args))
    if unknown:
        if not unknown[0].startswith("-"):
            raise UsageError(
                f"{unknown[0]}: belongs to no option; quote the pattern of --input, or the shell "
                "expands it"
            )
        raise UsageError(f"{unknown[0]}: neither tpufeed nor Beam has such an option")
    result = PipelineOptions(list(beam_args))
    standard = result.view_as(StandardOptions)
    if (standard.runner or "").rpartition(".")[2].lower() in _LOCAL_RUNNERS:
        standard.runner = _LOCAL_RUNNER
    return result


class _BeamOptions(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def resolve_config(config: IngestConfig, options: PipelineOptions) -> IngestConfig:
    """Returns the configuration with all that must be looked up before the graph is built."""
    inputs = tuple(map(_fetch_input, config.inputs))
    roots = [source.pattern for source in inputs if source.kind == "glob"]
    root = config.root or (common_root(roots) if roots else "/")
    known = config.known_labels
    if config.class_names is not None and known is None:
        known = read_class_names(config.class_names)
    if config.exclude is not None and not files.exists(config.exclude):
        raise DataError(f"--exclude {config.exclude}: no such file")
    return dataclasses.replace(
        config,
        inputs=inputs,
        root=root,
        known_labels=known,
        threads=config.threads or _threads(options),
    )


def _fetch_input(source: Input) -> Input:
    if source.pattern != f"{IDX_PREFIX}mnist":
        return source
    from pipeline.mnist import fetch_mnist

    return dataclasses.replace(source, pattern=IDX_PREFIX + fetch_mnist())


def _threads(options: PipelineOptions) -> int:
    """Threads for each shard: the cores, shared between the workers of the local runner."""
    cores = os.cpu_count() or 1
    direct = options.view_as(DirectOptions)
    if options.view_as(StandardOptions).runner != _LOCAL_RUNNER:
        return cores
    workers = direct.direct_num_workers or cores
    if direct.direct_running_mode in ("multi_processing", "multi_threading"):
        return max(1, cores // workers)
    # In one process the workers are our threads; Beam would warn about more than one of its own.
    asked = "direct_num_workers" in options.get_all_options(drop_default=True)
    direct.direct_num_workers = 1
    return workers if asked else cores


def read_class_names(path: str) -> tuple[str, ...]:
    """Reads labels in the order of their ids: one a line, or those of another dataset.json.

    Raises:
      DataError: the file cannot be read, is empty, or names a class twice.
    """
    try:
        data = files.read_file(path)
        if path.endswith(".json"):
            names = list(parse_manifest(data, path=path).labels)
        else:
            text = data.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
            names = text.split("\n") if text else []
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"--class-names {path}: {reason}") from error
    if not names:
        raise DataError(f"--class-names {path}: names no class")
    seen: set[str] = set()
    for line, name in enumerate(names, start=1):
        if not name.strip():
            raise DataError(f"--class-names {path}, line {line}: empty; every line is a class")
        if name in seen:
            raise DataError(f"--class-names {path}, line {line}: {name!r} is named twice")
        seen.add(name)
    return tuple(names)


def prepare_output(config: IngestConfig) -> None:
    """Sees to it that the output folder can take the data set, and removes an old one if asked.

    Raises:
      DataError: the folder is not empty, holds names that a reader would take for shards, or
        cannot be written to.
    """
    output = config.output
    try:
        names = files.list_folder(output)
        ours = [name for name in names if _OURS.fullmatch(name)]
        if names and not config.overwrite:
            raise DataError(
                f"--output {output}: not empty ({names[0]} and {len(names) - 1} more); give "
                "another folder, or --overwrite to replace the data set in it"
            )
        foreign = set(names) - set(ours)
        for name in sorted(foreign):
            if any(name.startswith(f"{split}-") for split in config.splits):
                raise DataError(
                    f"--output {output}: {name} is not tpufeed's but a glob of its split would "
                    "match it: move it away"
                )
        if MANIFEST in ours:  # first of all, so that a half-removed set is never taken for whole
            files.delete_files(output, [MANIFEST])
        if ours:
            files.delete_files(output, [name for name in ours if name != MANIFEST])
        files.make_folder(output)
        files.check_writable(output)
    except OSError as error:
        raise DataError(f"--output {output}: {error.strerror or error}") from error


def _remove_work_folder(output: str) -> None:
    if not files.is_remote(output):
        with contextlib.suppress(OSError):  # another attempt's files are still in it
            os.rmdir(files.join(output, files.WORK_FOLDER))


def _run(pipeline: beam.Pipeline, options: PipelineOptions) -> None:
    """Runs to the end; what a worker raised comes out as one line.

    Raises:
      DataError: from a worker, as it was raised there.
      RuntimeError: any other failure, on one line; its cause has the rest.
    """
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            pipeline.run().wait_until_finish()
            outcome.put(None)
        except BaseException as error:
            outcome.put(error)

    with _watch_workers(outcome):
        if options.view_as(DirectOptions).direct_running_mode == "multi_processing":
            # The runner waits for ever for a dead worker, so it must not be this thread.
            threading.Thread(target=run, daemon=True).start()
        else:
            run()
        failure = outcome.get()
    if failure is None:
        return
    if not isinstance(failure, Exception):
        raise failure
    line = _last_line(str(failure))
    if found := re.search(r"\bDataError: (.*)", line):
        raise DataError(found[1]) from failure
    raise RuntimeError(line) from failure


@contextlib.contextmanager
def _watch_workers(outcome: queue.SimpleQueue[BaseException | None]) -> Iterator[None]:
    """Reports a dead worker process: Beam waits for each in a thread, which then raises."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.thread and args.thread.name == "run_worker":
            outcome.put(
                RuntimeError(
                    f"a worker process died ({args.exc_value}): nothing was completed; run again "
                    "with --overwrite, without worker processes if it was short of memory"
                )
            )
        else:
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def _last_line(text: str) -> str:
    """Returns what a worker's traceback ends with, without Beam's own remarks."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*: ", line)]
    line = (named or lines or ["failed without a message"])[-1]
    return re.sub(r" \[while running '.*'\]$", "", line)
