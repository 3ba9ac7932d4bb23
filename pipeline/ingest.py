"""The whole Beam graph, and running it.

tpufeed ingest --input 'photos/*/*.jpg' --output records --split train=0.9,validation=0.1
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import apache_beam as beam
from apache_beam import pvalue

from pipeline import __version__
from pipeline.config import IngestConfig, UsageError
from pipeline.dataflow import Submission
from pipeline.progress import choose_watch
from pipeline.runner import plan_run, run_pipeline
from transforms import files, resume
from transforms.decoders import end_decoders
from transforms.duplicates import TreatCopies
from transforms.example import feature_specs
from transforms.exif import exif_specs
from transforms.globs import check_matches, common_root, find_match
from transforms.labels import Labelling
from transforms.manifest import (
    DUPLICATES,
    INDEX_FOLDER,
    MANIFEST,
    REJECTS,
    Manifest,
    load_manifest,
    parse_manifest,
)
from transforms.prepare import RecordPolicy
from transforms.records import IDX_PREFIX, DataError, Input
from transforms.screen import ScreenImages
from transforms.shards import SHARD_NAME
from transforms.sources import ListImages, may_repeat
from transforms.stats import AssignSplits, CountImages, DecideLabels, PlanShards
from transforms.write import (
    KeepPlan,
    ManifestHeader,
    WriteDuplicates,
    WriteManifest,
    WriteRejects,
    WriteShards,
)

_OURS = re.compile(
    rf"(?:{re.escape(INDEX_FOLDER)}/)?{SHARD_NAME.pattern}(?:\.tfrecord|\.parquet|\.idx)"
    rf"|{MANIFEST}|{REJECTS}|{DUPLICATES}|report\.html"
)


_log = logging.getLogger(__name__)


def build(root: beam.Pipeline, config: IngestConfig) -> beam.PCollection[Manifest]:
    """Adds the whole graph to a pipeline; `config` is from `resolve_config`.

    Returns:
      One Manifest, of the data set that is whole once the pipeline is done.
    """
    assert config.root is not None
    policy, labelling = record_policy(config), config.labelling
    screen = config.known_labels is not None and config.new_classes == "reject"
    known = frozenset(config.known_labels or ()) if screen else None

    listed = (
        root
        | "Inputs" >> beam.Create(config.inputs)
        | "ListImages"
        >> ListImages(
            config.root,
            config.split_by,
            reserved_names(config),
            may_repeat(config.inputs),
            labelling=labelling,
        )
    )
    screened = listed | "ScreenImages" >> ScreenImages(config.exclude, known, labelling=labelling)
    chosen = screened["refs"]
    if config.duplicates != "keep":
        chosen |= "TreatCopies" >> TreatCopies(config.duplicates)
    refs = chosen | "AssignSplits" >> AssignSplits(
        config.weights, config.seed, config.weights_given
    )
    sizes = refs | "CountImages" >> CountImages(config.pixels, labelling=labelling)
    labels = pvalue.AsSingleton(sizes | "DecideLabels" >> DecideLabels(config.known_labels))
    plan = pvalue.AsSingleton(sizes | "PlanShards" >> PlanShards(config.shards, config.shard_size))
    header = ManifestHeader(
        __version__, config.to_json(), policy, config.splits, config.max_reject_rate
    )
    run = pvalue.AsSingleton(
        sizes | "KeepPlan" >> KeepPlan(config.output, header, plan, labels, screened["exclusions"])
    )
    written = refs | "WriteShards" >> WriteShards(
        config.output,
        policy=policy,
        seed=config.seed,
        decoders=config.decoders or 1,
        plan=plan,
        labels=labels,
        exclusions=screened["exclusions"],
        run=run,
    )
    rejects = (
        (screened["rejects"], written["rejects"])
        | "AllRejects" >> beam.Flatten()
        | "WriteRejects" >> WriteRejects(config.output)
    )
    duplicates = written["contents"] | "WriteDuplicates" >> WriteDuplicates(config.output)
    return written["summaries"] | "WriteManifest" >> WriteManifest(
        config.output,
        header,
        labels=labels,
        run=run,
        rejects=pvalue.AsSingleton(rejects),
        skipped=pvalue.AsIter(listed["skipped"]),
        columns=pvalue.AsIter(listed["columns"]),
        duplicates=pvalue.AsSingleton(duplicates),
    )


def record_policy(config: IngestConfig) -> RecordPolicy:
    """Returns what becomes of each image."""
    return RecordPolicy(
        config.pixels,
        config.schema,
        config.label_offset,
        filters=config.filters,
        exif=config.exif,
        labelling=config.labelling,
    )


def reserved_names(config: IngestConfig) -> tuple[str, ...]:
    """Returns the features that every record has, which no column of a CSV may be called."""
    specs = feature_specs(config.schema, classes=1, extra=exif_specs(config.exif))
    return tuple(spec.name for spec in specs)


def ingest_images(
    config: IngestConfig, beam_args: Sequence[str] = (), *, show_progress: bool = False
) -> Manifest | Submission:
    """Makes the data set in `config.output`.

    Args:
      config: what to do.
      beam_args: options for Beam, such as "--runner=DataflowRunner".
      show_progress: whether stderr is to have a bar, or lines where it is no terminal.

    Returns:
      The manifest, or a Submission where the options say not to wait for it.

    Raises:
      UsageError: an option that Beam does not know, or lacks.
      DataError: the inputs or the output are not as they must be; one line with the remedy.
    """
    inputs = [("--input", source.pattern) for source in config.inputs]
    plan = plan_run(beam_args, paths=[*inputs, ("--output", config.output)])
    config = resolve_config(config, decoders=plan.decoders, look=not plan.dry_run)
    if plan.dry_run:
        submission = run_pipeline(plan, lambda root: build(root, config))
        assert submission is not None
        return submission
    with hold_output(config) as share:
        if not prepare_output(config):
            return load_manifest(config.output)
        share()
        try:
            watch = choose_watch(local=plan.local) if show_progress else None
            submission = run_pipeline(plan, lambda root: build(root, config), watch=watch)
        finally:
            end_decoders()
        if submission is not None:
            return submission
        _remove_work_folder(config.output)
        return load_manifest(config.output)


def resolve_config(config: IngestConfig, *, decoders: int = 1, look: bool = True) -> IngestConfig:
    """Returns the configuration with all that must be looked up before the graph is built.

    Args:
      config: as it was given.
      decoders: for each shard, unless the configuration says.
      look: whether to see to it that inputs and exclusions are there.

    Raises:
      UsageError: a glob would take the run's own files for images.
      DataError: an input or a file that is named is not there, or not as it must be.
    """
    inputs = tuple(map(_fetch_input, config.inputs))
    _check_apart(config.output, inputs, splits=config.splits)
    for source in inputs if look else ():
        check_matches(source)  # before --overwrite removes anything
    roots = [source.pattern for source in inputs if source.kind == "glob"]
    root = config.root or (common_root(roots) if roots else "/")
    known = config.known_labels
    if config.class_names is not None and known is None:
        known = read_class_names(config.class_names)
        _check_class_names(config.class_names, known, labelling=config.labelling)
    if look and config.exclude is not None and not files.exists(config.exclude):
        raise DataError(f"--exclude {config.exclude}: no such file")
    return dataclasses.replace(
        config,
        inputs=inputs,
        root=root,
        known_labels=known,
        decoders=config.decoders or decoders,
    )


def _check_apart(output: str, inputs: Sequence[Input], *, splits: Sequence[str]) -> None:
    """Raises UsageError where a glob would take the run's own files for images."""
    names = [MANIFEST, REJECTS, DUPLICATES, resume.PLAN]
    for shard in [f"{split}-00000-of-00001" for split in splits]:
        index = f"{INDEX_FOLDER}/{shard}"
        names += [f"{shard}.tfrecord", f"{index}.parquet", f"{index}.idx", resume.done_name(shard)]
    for source in inputs:
        if source.kind == "glob" and (
            name := find_match(source.pattern, folder=output, names=names)
        ):
            raise UsageError(
                f"--output {output}: --input {source.pattern} would take {name} there for an "
                "image; give a folder elsewhere, or a narrower pattern, as in '**/*.jpg'"
            )


def _fetch_input(source: Input) -> Input:
    if source.pattern != f"{IDX_PREFIX}mnist":
        return source
    from pipeline.mnist import fetch_mnist

    return dataclasses.replace(source, pattern=IDX_PREFIX + fetch_mnist())


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


def _check_class_names(path: str, names: Sequence[str], *, labelling: Labelling) -> None:
    """Raises DataError for a name that no part of a divided label can be."""
    for line, name in enumerate(names, start=1):
        if labelling.kind == "many" and (name != name.strip() or labelling.separator in name):
            raise DataError(
                f"--class-names {path}, line {line}: {name!r} holds --label-separator "
                f"{labelling.separator} or white space at an end, so no input can have it; rename "
                "it, or give another separator"
            )


@contextlib.contextmanager
def hold_output(config: IngestConfig) -> Iterator[Callable[[], None]]:
    """Makes the output folder and keeps every other run out of it; a bucket cannot be kept.

    Yields:
      A function that lets the workers in, beside this process.

    Raises:
      DataError: another run holds it, or there can be no such folder.
    """
    output = config.output
    if files.is_remote(output) and set(output) & set("*?["):
        raise DataError(
            f"--output {output}: a store takes * ? and [ for wildcards; give a name without"
        )
    with contextlib.ExitStack() as stack:
        try:
            files.make_folder(output)
            share = stack.enter_context(files.hold_folder(output, alone=True))
        except OSError as error:
            raise DataError(f"--output {output}: {error.strerror or error}") from error
        yield share


def prepare_output(config: IngestConfig) -> bool:
    """Sees to it that the output folder can take the data set, and removes an old one if asked.

    Returns:
      Whether there is anything to do: not where --resume finds the set complete.

    Raises:
      DataError: the folder is not empty, holds names that a reader would take for shards, cannot
        be written to, or was begun otherwise.
    """
    output = config.output
    try:
        names = files.list_folder(output)
        ours = [name for name in names if _is_ours(name)]
        if names and not (config.overwrite or config.resume):
            begun = {resume.PLAN, resume.OVERWRITING} & set(names)
            raise DataError(
                f"--output {output}: not empty ({names[0]} and {len(names) - 1} more); give "
                "another folder, or --overwrite to replace the data set in it"
                + (", or --resume to go on with it" if begun else "")
            )
        _check_strangers(sorted(set(names) - set(ours)), output=output, splits=config.splits)
        if config.resume and resume.OVERWRITING not in names:
            if not _go_on(config, ours):
                return False
        elif ours:
            _remove_old(output, ours)
        files.check_writable(output)
    except OSError as error:
        raise DataError(f"--output {output}: {error.strerror or error}") from error
    return True


def _check_strangers(names: Iterable[str], *, output: str, splits: Sequence[str]) -> None:
    """Raises DataError for a name that is not ours and would stand in the way."""
    for name in names:
        if name in (INDEX_FOLDER, files.WORK_FOLDER):
            raise DataError(
                f"--output {output}: {name} is a file or a link there, not a folder: move it away"
            )
        if any(name.startswith(f"{split}-") for split in splits):
            raise DataError(
                f"--output {output}: {name} is not tpufeed's but a glob of its split would match "
                "it: move it away"
            )


def _is_ours(name: str) -> bool:
    known = _OURS.fullmatch(name) or resume.is_state(name) or resume.is_temporary(name)
    return bool(known)


def _remove_old(output: str, ours: Sequence[str]) -> None:
    """Removes an old set; where this is cut short, --resume knows that it may do the rest."""
    files.write_file(output, resume.OVERWRITING, b"")
    if MANIFEST in ours:  # first of all, so that a half-removed set is never taken for whole
        files.delete_files(output, [MANIFEST])
    files.delete_files(output, [n for n in ours if n not in (MANIFEST, resume.OVERWRITING)])
    files.delete_files(output, [resume.OVERWRITING])


def _go_on(config: IngestConfig, ours: Sequence[str]) -> bool:
    """Sees to it that the run in the folder is this one; returns whether anything is left of it."""
    output = config.output
    now = {"config": resume.comparable_config(config.to_json())}
    complete = MANIFEST in ours
    if complete:
        before = {"config": resume.comparable_config(load_manifest(output).config)}
        resume.check_plan(before, now, output=output)
        files.delete_files(output, [name for name in ours if resume.is_state(name)])
    elif (plan := resume.read_plan(output)) is not None:
        resume.check_plan(plan, {"tpufeed": __version__, **now}, output=output)
    elif any(SHARD_NAME.match(name) for name in ours):
        raise DataError(
            f"--resume: {output} has shards but no {resume.PLAN}, so nothing is known of the run "
            "that made them; begin again with --overwrite"
        )
    files.delete_files(output, [name for name in ours if resume.is_temporary(name)])
    if complete:
        _log.warning(
            "%s: complete already, nothing was done; whether the inputs are still the same was "
            "not looked at: --overwrite makes it anew",
            output,
        )
    elif done := sum(1 for name in ours if resume.done_shard(name)):
        _log.warning("%s: going on, %d shard(s) were finished before", output, done)
    return not complete


def _remove_work_folder(output: str) -> None:
    if not files.is_remote(output):
        with contextlib.suppress(OSError):  # another attempt's files are still in it
            os.rmdir(files.join(output, files.WORK_FOLDER))
