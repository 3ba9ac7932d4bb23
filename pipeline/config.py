"""Frozen, checked configurations, and the argument parser that makes them.

Imports nothing heavy, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NoReturn

from transforms.example import SCHEMAS
from transforms.exif import EXIF_NAMES, choose_names
from transforms.files import is_remote
from transforms.filters import SizeFilter
from transforms.image import ENCODINGS, LARGEST_SIDE, RESIZE_MODES, PixelPolicy
from transforms.labels import ONE_LABEL, Labelling
from transforms.records import IDX_PREFIX, Grouping, Input
from transforms.shards import MOST_SHARDS, SPLIT_NAME, Weights, check_weights

DUPLICATE_MODES = ("keep", "together", "drop")
MODES = ("eager", "graph", "xla")
OPTIMIZERS = ("sgd", "adam")
AUGMENTATIONS = ("flip", "saturation")
BACKENDS = ("local", "vertex")
RUN_LABEL = "tpufeed-run"
# What tests a model, the first that there is; and what a run leaves behind.
TEST_SPLITS = ("validation", "test")
HISTORY = "history.json"
MODELS = ("lenet5", "convnet", "squeezenet")
MODEL_FORMS = f"{', '.join(MODELS)}, keras:NAME, FILE.py:FUNCTION"
SCALINGS = ("auto", "unit", "standard", "none")
_OTHER_MODEL = re.compile(r"keras:\w+|.+\.py:\w+", re.DOTALL)
_SIZE = re.compile(r"(\d+)(?:x(\d+))?")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", re.IGNORECASE)
_RUN_NAME = re.compile(r"[a-z0-9](?:[-_a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"([a-z][-_a-z0-9]{0,62})=([-_a-z0-9]{0,63})")
_RATIO = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9}|/[1-9][0-9]{0,8})?")
_DURATION = re.compile(r"(\d+)([smhd]?)")
_GIVEN_SPLIT = re.compile(r"([A-Za-z0-9_]+)=(.*)", re.DOTALL)
# What IDX files hold is small, gray and spoilt by JPEG.
_IDX_DEFAULTS: dict[str, Any] = {"image_size": "28", "channels": 1, "encoding": "png"}
_DEFAULTS: dict[str, Any] = {"image_size": "224", "channels": 3, "encoding": "jpeg"}


class UsageError(ValueError):
    """The arguments alone are wrong: exit code 2."""


@dataclasses.dataclass(frozen=True)
class IngestConfig:
    """What `tpufeed ingest` is to do.

    Attributes:
      inputs: what is read; local patterns are absolute.
      output: the data set's folder.
      root: keys are paths relative to it; None for the longest common folder.
      pixels: what becomes of the pixels.
      schema: one of example.SCHEMAS.
      weights: shares of the splits; add up to 1.
      weights_given: whether --split was given, so that given splits are a contradiction.
      split_by: what the split is hashed by.
      seed: of every hash.
      shards: total over the splits, or None for shard_size.
      shard_size: bytes that a shard should have.
      class_names: file with one label a line, or a dataset.json; None for the sorted labels.
      known_labels: what class_names holds, once read.
      new_classes: "reject" or "append".
      label_offset: added to the class ids that are stored.
      label_separator: what stands between the labels of one input; None for one label each.
      unlabelled: whether inputs have no labels.
      max_reject_rate: share of the inputs that may be rejected, 0 to 1.
      duplicates: what becomes of copies, one of DUPLICATE_MODES.
      exclude: file of keys and sha256 that must not come in.
      min_size: pixels that the shorter side of a source must have; None for any.
      max_area: pixels, width x height, that a source may have; None for any.
      max_aspect_ratio: how many times its shorter side the longer may be; None for any.
      exif: which features are taken from EXIF, of exif.EXIF_NAMES.
      overwrite: whether a data set in `output` may be replaced.
      resume: whether to go on with the unfinished run in `output`.
      decoders: processes that prepare a shard's images; None for one a core.
    """

    inputs: tuple[Input, ...]
    output: str
    root: str | None = None
    pixels: PixelPolicy = PixelPolicy()
    schema: str = "flowers"
    weights: Weights = (("train", Fraction(1)),)
    weights_given: bool = False
    split_by: Grouping = Grouping()
    seed: int = 0
    shards: int | None = None
    shard_size: int = 128_000_000
    class_names: str | None = None
    known_labels: tuple[str, ...] | None = None
    new_classes: str = "reject"
    label_offset: int = 0
    label_separator: str | None = None
    unlabelled: bool = False
    max_reject_rate: float = 0.01
    duplicates: str = "keep"
    exclude: str | None = None
    min_size: int | None = None
    max_area: int | None = None
    max_aspect_ratio: Fraction | None = None
    exif: tuple[str, ...] = ()
    overwrite: bool = False
    resume: bool = False
    decoders: int | None = None

    def __post_init__(self) -> None:
        """Checks what the fields say about each other.

        Raises:
          UsageError: names the flag, the value, what is allowed and the remedy.
        """
        self._check_names()
        given = [source for source in self.inputs if source.split]
        if not self.inputs:
            raise UsageError("--input: give at least one glob, CSV or idx:DIR")
        if given and len(given) < len(self.inputs):
            raise UsageError("--input: give SPLIT= to every --input or to none")
        if self.weights_given and (given or any(s.kind == "idx" for s in self.inputs)):
            raise UsageError("--split: the inputs already have their splits; drop one of the two")
        if any(source.split and source.kind == "idx" for source in self.inputs):
            raise UsageError("--input SPLIT=idx:DIR: IDX files bring their splits; drop SPLIT=")
        if self.split_by.kind != "key" and (given or any(s.kind == "idx" for s in self.inputs)):
            raise UsageError(
                f"--split-by {self.split_by.kind}:{self.split_by.value}: the inputs already have "
                "their splits, so nothing is split by it; drop one of the two"
            )
        if self.split_by.kind == "column" and any(s.kind != "csv" for s in self.inputs):
            raise UsageError("--split-by column:NAME: only CSV inputs have columns")
        if self.pixels.encoding == "raw" and self.schema != "flowers":
            raise UsageError(f"--encoding raw: only with --schema flowers, not {self.schema}")
        if self.overwrite and self.resume:
            raise UsageError("--overwrite, --resume: one begins again, one goes on; drop one")
        self._check_labels()
        self._check_duplicates(given=any(s.split or s.kind == "idx" for s in self.inputs))
        self._check_ranges()
        self._check_filters()
        self._check_exif()

    def _check_labels(self) -> None:
        for flag, on in (
            ("--unlabelled", self.unlabelled),
            ("--label-separator", self.label_separator is not None),
        ):
            if on and any(source.kind == "idx" for source in self.inputs):
                raise UsageError(f"{flag}: IDX files have one label for each picture; drop it")
        for flag, given in (
            (f"--label-separator {self.label_separator}", self.label_separator is not None),
            (f"--class-names {self.class_names}", self.class_names is not None),
            (f"--label-offset {self.label_offset}", self.label_offset != 0),
        ):
            if self.unlabelled and given:
                raise UsageError(
                    f"--unlabelled, {flag}: without labels there are no classes; drop one"
                )
        separator = self.label_separator
        if separator is None:
            return
        if not separator or not separator.isprintable():
            raise UsageError(
                f"--label-separator {separator!r}: must be one or more printable characters, as "
                "in '|'"
            )
        if "/" in separator and all(source.kind == "glob" for source in self.inputs):
            raise UsageError(
                f"--label-separator {separator}: no folder's name holds a /, so no label would be "
                "divided; give another, or a CSV"
            )

    def _check_names(self) -> None:
        names = [("--input", source.pattern) for source in self.inputs]
        names.append(("--split-by", self.split_by.value))
        for flag in ("output", "root", "class_names", "exclude"):
            names.append((f"--{flag.replace('_', '-')}", getattr(self, flag) or ""))
        for flag, name in names:
            try:
                name.encode()
            except UnicodeEncodeError as error:
                raise UsageError(
                    f"{flag} {name}: is not UTF-8, which dataset.json and TensorFlow need: rename "
                    "what it names"
                ) from error

    def _check_duplicates(self, *, given: bool) -> None:
        _one_of("--duplicates", self.duplicates, DUPLICATE_MODES)
        if self.duplicates == "together" and given:
            raise UsageError(
                "--duplicates together: the inputs already have their splits; use drop, which "
                "keeps the first by key"
            )
        if self.duplicates == "together" and self.split_by.kind != "key":
            raise UsageError(
                f"--duplicates together: splits by content, so --split-by {self.split_by.kind}:"
                f"{self.split_by.value} cannot hold as well; use drop, or --split-by key"
            )

    def _check_ranges(self) -> None:
        for flag, value, low, high in (
            ("--shards", self.shards, 1, MOST_SHARDS),
            ("--shard-size", self.shard_size, 1, None),
            ("--seed", self.seed, 0, None),
            ("--label-offset", self.label_offset, 0, 2**31 - 1),
        ):
            if value is not None and value < low:
                raise UsageError(f"{flag} {value}: must be {low} or more")
            if value is not None and high is not None and value > high:
                raise UsageError(f"{flag} {value}: allowed are {low} to {high}")
        if not 0 <= self.max_reject_rate <= 1:
            raise UsageError(f"--max-reject-rate {self.max_reject_rate:g}: allowed are 0 to 1")

    def _check_filters(self) -> None:
        if self.max_aspect_ratio is not None:  # a float means what is written, not its last bit
            ratio = Fraction(str(self.max_aspect_ratio))
            object.__setattr__(self, "max_aspect_ratio", ratio)
        limit = self.pixels.max_pixels
        for flag, value, low in (
            ("--min-size", self.min_size, 1),
            ("--max-area", self.max_area, 1),
            ("--max-aspect-ratio", self.max_aspect_ratio, 1),
        ):
            if value is not None and value < low:
                raise UsageError(f"{flag} {float(value):g}: must be {low} or more")
        if self.max_area is not None and self.max_area > limit:
            raise UsageError(
                f"--max-area {self.max_area}: a source of more than the {limit} of --max-pixels is "
                "a fault; give less, or raise --max-pixels"
            )
        if self.min_size and self.max_area and self.min_size**2 > self.max_area:
            raise UsageError(
                f"--min-size {self.min_size}, --max-area {self.max_area}: no source can be so "
                f"large and so small; give --max-area {self.min_size**2} or more"
            )

    def _check_exif(self) -> None:
        try:
            chosen = choose_names(self.exif)
        except ValueError as error:
            raise UsageError(f"--exif {error}") from error
        # In one order, so that equal choices are equal configurations.
        object.__setattr__(self, "exif", chosen)
        if chosen and all(source.kind == "idx" for source in self.inputs):
            raise UsageError("--exif: pictures in IDX files have no EXIF; drop it")

    @property
    def filters(self) -> SizeFilter:
        """Which sources are left out."""
        return SizeFilter(self.min_size, self.max_area, self.max_aspect_ratio)

    @property
    def labelling(self) -> Labelling:
        """How labels name classes."""
        if self.unlabelled:
            return Labelling("none")
        separator = self.label_separator
        return ONE_LABEL if separator is None else Labelling("many", separator)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that are sure to be in the data set, be they empty."""
        if any(source.split or source.kind != "glob" for source in self.inputs):
            return tuple(sorted({source.split for source in self.inputs} - {""}))
        return tuple(name for name, _ in self.weights)

    def to_json(self) -> dict[str, Any]:
        """Returns the configuration as it stands in dataset.json."""
        record = dataclasses.asdict(self)
        record["weights"] = {name: str(weight) for name, weight in self.weights}
        for name in ("weights_given", "known_labels", "overwrite", "resume", "decoders"):
            del record[name]
        # What was not asked for leaves no trace: dataset.json is as it was before there was it.
        for name in (
            "min_size",
            "max_area",
            "max_aspect_ratio",
            "exif",
            "label_separator",
            "unlabelled",
        ):
            if not record[name]:
                del record[name]
        if self.max_aspect_ratio is not None:
            record["max_aspect_ratio"] = str(self.max_aspect_ratio)
        return record


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """What `tpufeed plan` is to do, beside what ingest is to.

    Attributes:
      workers: machines, each like this one.
      sample: pictures that are read and prepared, at most.
      prices: file to work out the cost from; None for no cost.
    """

    workers: int = 1
    sample: int = 200
    prices: str | None = None

    def __post_init__(self) -> None:
        """Checks each field.

        Raises:
          UsageError: names the flag, the value and what is allowed.
        """
        for flag, number in (("--workers", self.workers), ("--sample", self.sample)):
            if number < 1:
                raise UsageError(f"{flag} {number}: must be 1 or more")
        if self.prices == "":
            raise UsageError("--prices '': is empty; give a file or drop the flag")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A learning rate that rises, stays and falls, by epoch.

    Attributes:
      peak: the highest rate.
      start: the rate of epoch 0, where there is a ramp; None for peak / (ramp + 1), one of its
        steps above 0, at which an epoch would teach nothing.
      floor: what the rate falls towards.
      ramp: epochs from start to peak, in equal steps.
      hold: epochs at the peak.
      decay: of the distance to the floor, each epoch keeps this share of the one before.
    """

    peak: float
    start: float | None = None
    floor: float = 0.0
    ramp: int = 0
    hold: int = 0
    decay: float = 1.0

    def at(self, epoch: int) -> float:
        """Returns the rate of an epoch, counted from 0."""
        if epoch < self.ramp:
            start = self.peak / (self.ramp + 1) if self.start is None else self.start
            return start + (self.peak - start) * epoch / self.ramp
        after = max(0, epoch - self.ramp - self.hold)
        return self.floor + (self.peak - self.floor) * self.decay**after


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """What `tpufeed export` is to do.

    Attributes:
      run: folder of a run of `tpufeed train`.
      output: a new folder, for the SavedModel.
      data: folders of the run's data sets, where they have moved; () for where they were.
      layers: Python file with the layer classes of the run's model, which is run; None for none.
    """

    run: str
    output: str
    data: tuple[str, ...] = ()
    layers: str | None = None


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What `tpufeed train` is to do.

    Attributes:
      data: folders of data sets, read as one; local ones are absolute.
      model: lenet5, convnet, squeezenet, keras:NAME or FILE.py:FUNCTION.
      mode: one of MODES.
      epochs: in all, with those before a resume.
      batch_size: examples a step of each replica.
      learning_rate: the highest; None for the optimizer's usual one.
      optimizer: one of OPTIMIZERS.
      schedule: the rate by epoch; None for a constant one.
      seed: of the weights and of the order of the examples.
      tpu: "auto", "none", "local", or a name.
      zone: of a TPU with a name.
      project: of a TPU with a name.
      output: the run's folder; None to keep nothing.
      resume: whether to go on from the run in `output`.
      steps_per_execution: training steps in one call of the compiled program.
      mixed_bfloat16: whether layers compute in bfloat16.
      augment: of AUGMENTATIONS.
      scaling: of pixels, one of SCALINGS.
      weights: file to start from, or "imagenet" with keras:NAME.
      image_size: height and width that pictures are resized to; None for the size they have.
      cache: of decoded training pictures: "memory", "none", a folder, or None for memory where
        they are small.
      permute_labels: whether the training labels are shuffled, as a control.
      dump_hlo: folder for the training step as text in HLO; None for none.
      transform: folder of `tpufeed analyze`, whose moments replace those of dataset.json.
    """

    data: tuple[str, ...]
    model: str
    mode: str = "graph"
    epochs: int = 5
    batch_size: int = 128
    learning_rate: float | None = None
    optimizer: str = "sgd"
    schedule: Schedule | None = None
    seed: int = 0
    tpu: str = "auto"
    zone: str | None = None
    project: str | None = None
    output: str | None = None
    resume: bool = False
    steps_per_execution: int = 1
    mixed_bfloat16: bool = False
    augment: tuple[str, ...] = ()
    scaling: str = "auto"
    weights: str | None = None
    image_size: tuple[int, int] | None = None
    cache: str | None = None
    permute_labels: bool = False
    dump_hlo: str | None = None
    transform: str | None = None

    def __post_init__(self) -> None:
        """Checks each field, and what they say about each other.

        Raises:
          UsageError: names the flag, the value, what is allowed and the remedy.
        """
        if not self.data:
            raise UsageError("--data: give at least one folder that tpufeed ingest made")
        if self.model not in MODELS and not _OTHER_MODEL.fullmatch(self.model):
            raise UsageError(f"--model {self.model}: allowed are {MODEL_FORMS}")
        _one_of("--mode", self.mode, MODES)
        _one_of("--optimizer", self.optimizer, OPTIMIZERS)
        _one_of("--scaling", self.scaling, SCALINGS)
        for name in self.augment:
            _one_of("--augment", name, AUGMENTATIONS)
        for flag, number, low in (
            ("--epochs", self.epochs, 1),
            ("--batch-size", self.batch_size, 1),
            ("--steps-per-execution", self.steps_per_execution, 1),
            ("--seed", self.seed, 0),
        ):
            if number < low:
                raise UsageError(f"{flag} {number}: must be {low} or more")
        if self.seed >= 2**31:  # what TensorFlow's and NumPy's seeds have in common
            raise UsageError(f"--seed {self.seed}: must be less than {2**31}")
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise UsageError(f"--learning-rate {self.learning_rate:g}: must be more than 0")
        for side in self.image_size or ():
            if not 1 <= side <= LARGEST_SIDE:
                raise UsageError(f"--image-size {side}: allowed are 1 to {LARGEST_SIDE}")
        self._check_together()

    def _check_together(self) -> None:
        if self.resume and self.output is None:
            raise UsageError("--resume: needs --output, the run to go on with")
        if self.mode == "eager" and self.steps_per_execution > 1:
            raise UsageError(
                "--steps-per-execution: mode eager runs op by op; use --mode graph or xla"
            )
        if self.dump_hlo and self.mode != "xla":
            raise UsageError(f"--dump-hlo: mode {self.mode} is not compiled; use --mode xla")
        if self.weights == "imagenet" and not self.model.startswith("keras:"):
            raise UsageError(f"--weights imagenet: only with --model keras:NAME, not {self.model}")
        for flag, value in (("--zone", self.zone), ("--project", self.project)):
            if value and self.tpu in ("none", "local"):
                raise UsageError(f"{flag} {value}: belongs to a TPU with a name, not {self.tpu}")

    @property
    def rates(self) -> Schedule:
        """The learning rate by epoch."""
        usual = {"sgd": 0.1, "adam": 0.001}[self.optimizer]
        return self.schedule or Schedule(self.learning_rate or usual)

    def to_json(self) -> dict[str, Any]:
        """Returns the configuration as it stands in history.json."""
        return {**dataclasses.asdict(self), "schedule": dataclasses.asdict(self.rates)}


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """What `tpufeed launch` is to do.

    Attributes:
      backend: one of BACKENDS.
      train: what the job is to do; None with `job`.
      train_flags: the flags of `tpufeed train` as given, without --data and --output.
      run: the run's name, also the job's label RUN_LABEL; None for one made of data and flags.
      project: of Google Cloud.
      region: of Google Cloud.
      image: made of docker/trainer.Dockerfile.
      machine_type: of Vertex AI.
      tpu_topology: of Vertex AI; None for the one of a single host.
      hosts: machines; must be those of the topology.
      spot: whether the machines may be taken back at any time.
      timeout: seconds that the job may run.
      service_account: whom the job acts as; None for the service's own.
      labels: further labels of the job.
      detach: whether to return once the job is submitted.
      job: an existing job to follow; None to submit one.
      endpoint: another address of the service; None for the region's.
      poll: seconds between two looks at the job.
    """

    backend: str
    train: TrainConfig | None = None
    train_flags: tuple[str, ...] = ()
    run: str | None = None
    project: str | None = None
    region: str | None = None
    image: str | None = None
    machine_type: str = "ct5lp-hightpu-1t"
    tpu_topology: str | None = None
    hosts: int = 1
    spot: bool = False
    timeout: int = 86_400
    service_account: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    detach: bool = False
    job: str | None = None
    endpoint: str | None = None
    poll: float = 10.0

    def __post_init__(self) -> None:
        """Checks each field, and what they say about each other.

        Raises:
          UsageError: names the flag, the value, what is allowed and the remedy.
        """
        _one_of("--backend", self.backend, BACKENDS)
        if self.run is not None and not _RUN_NAME.fullmatch(self.run):
            raise UsageError(
                f"--run {self.run}: allowed are up to 63 lower-case letters, digits, - and _, as "
                "in flowers-2026-01-31"
            )
        if self.hosts < 1:
            raise UsageError(f"--hosts {self.hosts}: must be 1 or more")
        if not 1 <= self.timeout <= 30 * 86_400:
            raise UsageError(f"--timeout {self.timeout}s: allowed are 1s to 30d")
        if not 0 < self.poll < math.inf:
            raise UsageError(f"--poll {self.poll:g}: must be more than 0")
        for flag, on in (("--detach", self.detach), ("--job", self.job)):
            if on and self.backend == "local":
                raise UsageError(f"{flag}: a local run ends with this command; drop the flag")
        if self.job is None and (self.train is None or self.train.output is None):
            raise UsageError("--output: not given, so nothing of the run would be kept; give it")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows each default as the parser has it; what None stands for is in the flag's own text."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.default is None or action.nargs == 0:  # a switch is off
            return text
        return f"{text} (default: %(default)s)".lstrip()


class _Parser(argparse.ArgumentParser):
    """Errors on one line, with the remedy; no abbreviated flags."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, formatter_class=_Help, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    parser = _Parser(prog="tpufeed", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="store_true", help="print the version and end")
    parser.add_argument("--debug", action="store_true", help="print a traceback with an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    _add_ingest(commands)
    _add_plan(commands)
    _add_looking(commands)
    _add_train(commands)
    _add_serving(commands)
    _add_launch(commands)
    for command in commands.choices.values():
        command.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="print a traceback with an error",
        )
    return parser


def _add_command(
    commands: Any, name: str, *, help: str, examples: Sequence[str], notes: str = "", **more: Any
) -> argparse.ArgumentParser:
    """Adds a command whose --help ends with notes and examples, these without `tpufeed NAME`."""
    shown = [f"  tpufeed {name} {example}".rstrip() for example in examples]
    title = "example:" if len(shown) == 1 else "examples:"
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}.",
        epilog="\n".join([*([notes, ""] if notes else []), title, *shown]),
        **more,
    )
    return parser


_DIFF_NOTES = """\
Exit codes: 0 equal (in shards, order and bytes, whatever the configuration and the libraries);
1 different; 2 wrong arguments, or a folder that is no complete data set."""
_DESCRIPTION = """\
Turn a glob of images into sharded TFRecords with Apache Beam, and prove that they are right."""
_EPILOG = """\
example:
  tpufeed ingest --input 'photos/*/*.jpg' --output records --split train=0.9,validation=0.1
  tpufeed verify records
  tpufeed inspect records

Exit codes: 0 done, 2 wrong from the arguments alone, 1 anything else."""
_INGEST_NOTES = """\
PATTERN is
  a glob, local or gs://; the label is the parent folder's name. Wildcards are * (stops at /),
    ** (does not), ? and [...]. Quote it, or the shell expands it.
  a glob ending in .csv; its header is path,label[,split][,key][,more], without label if
    --unlabelled; paths are relative to the file. Further columns become features: bytes, or
    NAME:int, NAME:float.
  idx:DIR, a folder with the four files of MNIST; idx:mnist gets them on first use.

Any option of Beam's can follow, such as --runner=DataflowRunner or --direct_num_workers=2
--direct_running_mode=multi_processing. The local runner is one process, with a decoder a core."""


_TRAIN_NOTES = """\
The split validated on is "validation", else "test". RUN gets history.json, checkpoints/, logs/
(TensorBoard), model.keras, confusion.png and predictions.png."""


def _add_ingest(commands: Any) -> None:
    parser = _add_command(
        commands,
        "ingest",
        help="images to sharded TFRecords",
        notes=_INGEST_NOTES,
        examples=(
            "--input 'photos/*/*.jpg' --output records --split train=0.9,validation=0.1",
            "--input train=a.csv --input test=b.csv --output records --schema imagenet",
            "--input idx:mnist --output mnist",
        ),
    )
    _add_ingest_flags(parser)


def _add_ingest_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", action="append", required=True, metavar="[SPLIT=]PATTERN", help="see below")
    add("--output", required=True, metavar="DIR", help="a new or empty folder, local or gs://")
    add("--root", metavar="DIR", help="keys are paths relative to it (default: common folder)")
    add("--image-size", metavar="N|WxH", help="pixels (default: 224; idx: 28)")
    add("--resize-mode", default="cover", metavar="MODE", help=", ".join(RESIZE_MODES))
    add("--channels", type=int, metavar="N", help="3 or 1 (default: 3; idx: 1)")
    add("--encoding", metavar="E", help=_ENCODING_HELP)
    add("--quality", type=int, default=90, metavar="Q", help="of JPEG, 1 to 100")
    add("--schema", default="flowers", metavar="S", help=", ".join(SCHEMAS))
    add("--split", metavar="NAME=SHARE,...", help="shares by hash; add up to 1 (default: train=1)")
    add("--split-by", default="key", metavar="BY", help="key, group:REGEX or column:NAME")
    add("--seed", type=int, default=0, metavar="N", help="of the hash")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--shards", type=int, metavar="N", help="total over the splits (default: by --shard-size)"
    )
    size.add_argument(
        "--shard-size", default="128MB", metavar="BYTES", help="what a shard should hold, about"
    )
    add("--class-names", metavar="FILE", help=_CLASS_NAMES_HELP)
    add("--new-classes", default="reject", metavar="M", help="reject or append")
    add("--label-offset", type=int, default=0, metavar="N", help="added to stored ids")
    add("--label-separator", metavar="SEP", help=_SEPARATOR_HELP)
    add("--unlabelled", action="store_true", help="inputs have no labels; records no class")
    add("--background", default="255,255,255", metavar="R,G,B", help="under alpha and padding")
    _add_limits(parser)
    add("--exif", metavar="NAME,...", help=_EXIF_HELP)
    add("--overwrite", action="store_true", help="replace the data set in --output")
    add("--resume", action="store_true", help="go on with an unfinished run in --output")
    add("--quiet", action="store_true", help="print nothing but warnings and errors")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds the flags on what does not come in."""
    add = parser.add_argument
    add("--max-pixels", type=int, default=178_956_970, metavar="N", help="larger: too_large")
    add("--max-reject-rate", type=float, default=0.01, metavar="R", help="0 to 1")
    add("--duplicates", default="keep", metavar="M", help=_DUPLICATES_HELP)
    add("--exclude", metavar="FILE", help="keys or source sha256, one a line (default: none)")
    add(
        "--min-size",
        type=int,
        metavar="N",
        help="leave out: a shorter side of fewer pixels (default: no limit)",
    )
    add(
        "--max-area",
        type=int,
        metavar="N",
        help="leave out: more pixels, width x height (default: no limit)",
    )
    add(
        "--max-aspect-ratio",
        metavar="X",
        help="leave out: a side longer than X times the other (default: no limit)",
    )


def _add_plan(commands: Any) -> None:
    parser = _add_command(
        commands,
        "plan",
        help="show what ingest would do; writes nothing",
        notes=_INGEST_NOTES,
        examples=(
            "--input 'photos/*/*.jpg' --output records --split train=0.9,validation=0.1",
            "--input 'gs://my-bucket/*/*.jpg' --output gs://my-bucket/records --workers 20",
        ),
    )
    _add_ingest_flags(parser)
    add = parser.add_argument
    add("--workers", type=int, default=1, metavar="N", help="machines, each like this one")
    add("--sample", type=int, default=200, metavar="K", help="pictures read and prepared")
    add("--prices", metavar="FILE", help="JSON to work out the cost from (default: no cost)")
    add("--json", action="store_true", help="print JSON")


_ENCODING_HELP = f"{', '.join(ENCODINGS)} (default: jpeg; idx: png)"
_SEPARATOR_HELP = (
    "a label holds one class name or several, with SEP between: each counts once, without the "
    "white space around it; an empty one is a reject (default: a label is one name)"
)
_EXIF_HELP = f"features: all (but gps), or some of {', '.join(EXIF_NAMES)} (default: none)"
_CLASS_NAMES_HELP = "one a line, or another dataset.json; order = id (default: the labels, sorted)"
_DUPLICATES_HELP = (
    "of equal bytes: keep; together: in one split; drop: all but the first by key. "
    "together and drop read every source once more"
)


def _add_looking(commands: Any) -> None:
    verify = _add_command(
        commands,
        "verify",
        help="check a data set; 0 = whole, 1 = not",
        examples=("records", "records --deep --sources 100 --leakage"),
    )
    verify.add_argument("directory", metavar="DIR", help="from ingest")
    depth = verify.add_mutually_exclusive_group()
    depth.add_argument("--quick", action="store_true", help="names, sizes and index counts only")
    depth.add_argument("--deep", action="store_true", help="decode every picture as well")
    verify.add_argument("--sources", type=int, metavar="K", help=_SOURCES_HELP)
    verify.add_argument("--leakage", action="store_true", help="no content in two splits")
    inspect = _add_command(
        commands,
        "inspect",
        help="show a data set, or one record of it",
        examples=("records", "records --split train --record 7 --save seven.jpg"),
    )
    add = inspect.add_argument
    add("directory", metavar="DIR", help="from ingest")
    add("--split", metavar="S", help="only this split (default: all)")
    add("--record", type=int, metavar="K", help="one record, from 0 (default: a summary)")
    add("--save", metavar="FILE", help="for the record's picture (default: not saved)")
    add("--json", action="store_true", help="print JSON")
    report = _add_command(
        commands,
        "report",
        help="write DIR/report.html: the data set on one page",
        examples=("records",),
    )
    report.add_argument("directory", metavar="DIR", help="from ingest")
    _add_diff(commands)
    devices = _add_command(commands, "devices", help="list the accelerators", examples=("",))
    devices.add_argument("--json", action="store_true", help="print JSON")


_SOURCES_HELP = "re-read K sources by an independent path (default: none)"


def _add_diff(commands: Any) -> None:
    diff = _add_command(
        commands,
        "diff",
        help="compare two data sets; 0 = equal, 1 = not, 2 = trouble",
        notes=_DIFF_NOTES,
        examples=("records newer", "records newer --json"),
    )
    diff.add_argument("old", metavar="OLD", help="from ingest")
    diff.add_argument("new", metavar="NEW", help="from ingest")
    diff.add_argument("--json", action="store_true", help="print JSON, with every key")


def _add_train(commands: Any) -> None:
    parser = _add_command(
        commands,
        "train",
        help="train a model on a data set",
        notes=_TRAIN_NOTES,
        examples=(
            "--data records --model convnet --optimizer adam --epochs 20 --output run",
            "--data mnist --model lenet5 --compare eager,graph,xla",
        ),
    )
    add = parser.add_argument
    add("--data", action="append", required=True, metavar="DIR", help="from ingest; repeatable")
    add("--model", required=True, metavar="M", help=MODEL_FORMS)
    add("--mode", default="graph", metavar="MODE", help=", ".join(MODES))
    add("--compare", metavar="MODE,...", help="train once in each, print a table (default: no)")
    add("--epochs", type=int, default=5, metavar="N", help="in all, with those before")
    add("--batch-size", type=int, default=128, metavar="N", help="of each replica")
    add("--optimizer", default="sgd", metavar="O", help=", ".join(OPTIMIZERS))
    add(
        "--learning-rate",
        type=float,
        metavar="X",
        help="the highest (default: sgd 0.1, adam 0.001)",
    )
    add("--schedule", metavar="KEY=X,...", help=_SCHEDULE_HELP)
    add("--augment", metavar="A,...", help=f"{', '.join(AUGMENTATIONS)} (default: none)")
    add("--scaling", default="auto", metavar="S", help=", ".join(SCALINGS))
    add("--image-size", metavar="N|WxH", help="resize pictures to this (default: as they are)")
    add("--cache", metavar="DIR", help="or memory, none: of pictures (default: memory if small)")
    add("--weights", metavar="FILE", help=_WEIGHTS_HELP)
    add("--mixed-bfloat16", action="store_true", help="layers compute in bfloat16")
    add("--steps-per-execution", type=int, default=1, metavar="K", help="steps in one call")
    add("--seed", type=int, default=0, metavar="N", help="of weights and order")
    add("--tpu", default="auto", metavar="T", help="auto, none, local or a name")
    add("--zone", metavar="Z", help="of a TPU with a name (default: this machine's)")
    add("--project", metavar="P", help="of a TPU with a name (default: this machine's)")
    add("--output", metavar="RUN", help="a new folder for the run (default: keep nothing)")
    add("--resume", action="store_true", help="go on with the run in --output")
    add("--permute-labels", action="store_true", help="control: shuffle the training labels")
    add("--dump-hlo", metavar="DIR", help="the step that XLA compiles, as text (default: no)")
    add("--transform", metavar="DIR", help="moments of analyze (default: those of dataset.json)")
    add("--json", action="store_true", help="print a line of JSON an epoch")


_SCHEDULE_HELP = "ramp, hold: epochs; decay, start, min (default: constant)"
_WEIGHTS_HELP = "start from these; imagenet with keras:NAME (default: from the seed)"


def _add_serving(commands: Any) -> None:
    analyze = _add_command(
        commands,
        "analyze",
        help="vocabulary and channel moments by tensorflow-transform, over index/",
        examples=("--data records --output transform",),
    )
    analyze.add_argument(
        "--data", action="append", required=True, metavar="DIR", help="from ingest; repeatable"
    )
    analyze.add_argument("--output", required=True, metavar="TRANSFORM", help="a new folder")
    export = _add_command(
        commands,
        "export",
        help="write a run's model as a SavedModel",
        examples=("--run run --output serving",),
    )
    export.add_argument("--run", required=True, metavar="RUN", help="--output of train")
    export.add_argument("--output", required=True, metavar="EXPORT", help="a new folder")
    export.add_argument(
        "--data", action="append", metavar="DIR", help="the run's data (default: where it was)"
    )
    export.add_argument(
        "--layers",
        metavar="FILE.py",
        help="has the model's own layer classes; it is run (default: none)",
    )
    predict = _add_command(
        commands,
        "predict",
        help="label image files, prepared as by ingest",
        examples=("--model serving holiday/*.jpg",),
    )
    predict.add_argument("--model", required=True, metavar="EXPORT", help="--output of export")
    predict.add_argument("images", nargs="+", metavar="IMAGE", help="files")
    predict.add_argument("--json", action="store_true", help="print a line of JSON a file")


_LAUNCH_NOTES = """\
What comes after -- are flags of tpufeed train. The machine types and topologies are in docs/gcp.md.

Exit codes: 0 the job succeeded (with --detach: was submitted), 2 wrong from the arguments alone,
1 anything else. Ctrl-C leaves a job on Vertex AI running and ends a local one; both are exit 1."""


def _add_launch(commands: Any) -> None:
    parser = _add_command(
        commands,
        "launch",
        help="submit a training job and follow it",
        usage="tpufeed launch --data DIR --backend B --output RUN [flags] -- <train flags>",
        notes=_LAUNCH_NOTES,
        examples=(
            "--data records --backend local --output run -- --model lenet5 --epochs 1",
            "--data gs://bucket/records --backend vertex --output gs://bucket/run \\\n"
            "      --project P --region us-west1 --image IMAGE --machine-type ct5lp-hightpu-4t \\\n"
            "      -- --model convnet --epochs 20",
        ),
    )
    add = parser.add_argument
    add(
        "--data",
        action="append",
        metavar="DIR",
        help="from ingest; repeatable (default: that of --job)",
    )
    add("--backend", required=True, metavar="B", help=", ".join(BACKENDS))
    add("--output", metavar="RUN", help="a new folder; gs:// with vertex (default: that of --job)")
    add(
        "--run", metavar="NAME", help="a second launch of this name finds the job (default: a hash)"
    )
    add("--project", metavar="P", help="of Google Cloud (default: none; vertex needs it)")
    add("--region", metavar="R", help="as us-west1 (default: none; vertex needs it)")
    add("--image", metavar="IMAGE", help=_IMAGE_HELP)
    add("--machine-type", default="ct5lp-hightpu-1t", metavar="M", help="of Vertex AI")
    add("--tpu-topology", metavar="T", help="as 2x2 (default: that of one machine)")
    add("--hosts", type=int, default=1, metavar="N", help="machines of the topology")
    add("--spot", action="store_true", help="cheaper machines that may be taken back")
    add("--timeout", default="24h", metavar="TIME", help="ends the job, as 90m, 24h, 7d")
    add("--service-account", metavar="EMAIL", help="for the job (default: the service's own)")
    add("--labels", metavar="K=V,...", help="of the job, for bills (default: none)")
    add("--detach", action="store_true", help="return once the job is submitted")
    add("--job", metavar="NAME", help="follow this job (default: submit one)")
    add("--endpoint", metavar="URL", help="of the service (default: the region's)")
    add("--poll", type=float, default=10.0, metavar="S", help="seconds between two looks")


_IMAGE_HELP = "made of docker/trainer.Dockerfile (default: none; vertex needs it)"


def make_ingest_config(args: argparse.Namespace) -> IngestConfig:
    """Returns the checked configuration.

    Raises:
      UsageError: the arguments are wrong.
    """
    for flag in ("output", "root", "class_names", "exclude"):
        if getattr(args, flag) == "":
            raise UsageError(f"--{flag.replace('_', '-')} '': is empty; give a path")
    _one_of("--new-classes", args.new_classes, ("reject", "append"))
    _one_of("--schema", args.schema, SCHEMAS)
    if args.new_classes == "append" and not args.class_names:
        raise UsageError("--new-classes append: needs --class-names, to append to")
    inputs = tuple(map(_parse_input, args.input))
    defaults = _IDX_DEFAULTS if all(s.kind == "idx" for s in inputs) else _DEFAULTS
    try:
        pixels = _parse_pixels(args, defaults)
        weights = _parse_weights(args.split or "train=1")
    except ValueError as error:
        raise UsageError(str(error)) from error
    same = (
        *("schema", "seed", "shards", "class_names", "new_classes", "label_offset"),
        *("label_separator", "unlabelled"),
        *("max_reject_rate", "duplicates", "min_size", "max_area", "overwrite", "resume"),
    )
    return IngestConfig(
        inputs=inputs,
        output=_absolute(args.output),
        root=_absolute(args.root) if args.root else None,
        pixels=pixels,
        weights=weights,
        weights_given=args.split is not None,
        split_by=_parse_grouping(args.split_by),
        shard_size=_parse_bytes(args.shard_size),
        exclude=_absolute(args.exclude) if args.exclude else None,
        max_aspect_ratio=_parse_ratio(args.max_aspect_ratio),
        exif=tuple(args.exif.split(",")) if args.exif is not None else (),
        **{name: getattr(args, name) for name in same},
    )


def _parse_pixels(args: argparse.Namespace, defaults: Mapping[str, Any]) -> PixelPolicy:
    width, height = _parse_image_size(args.image_size or defaults["image_size"])
    return PixelPolicy(
        width=width,
        height=height,
        mode=args.resize_mode,
        channels=defaults["channels"] if args.channels is None else args.channels,
        encoding=args.encoding or defaults["encoding"],
        quality=args.quality,
        background=_parse_background(args.background),
        max_pixels=args.max_pixels,
    )


def make_train_config(args: argparse.Namespace) -> TrainConfig:
    """Returns the checked configuration.

    Raises:
      UsageError: the arguments are wrong.
    """
    for flag in ("output", "weights", "tpu", "cache", "dump_hlo", "transform"):
        if getattr(args, flag) == "":
            name = flag.replace("_", "-")
            raise UsageError(f"--{name} '': is empty; give a value or drop the flag")
    size = _parse_image_size(args.image_size) if args.image_size else None
    rate = args.learning_rate
    config = TrainConfig(
        data=_folders(args.data),
        model=args.model,
        mode=args.mode,
        epochs=args.epochs,
        batch_size=args.batch_size,
        learning_rate=rate,
        optimizer=args.optimizer,
        seed=args.seed,
        tpu=args.tpu,
        zone=args.zone,
        project=args.project,
        output=_absolute(args.output) if args.output else None,
        resume=args.resume,
        steps_per_execution=args.steps_per_execution,
        mixed_bfloat16=args.mixed_bfloat16,
        augment=tuple(args.augment.split(",")) if args.augment else (),
        scaling=args.scaling,
        weights=args.weights,
        image_size=(size[1], size[0]) if size else None,
        cache=args.cache if args.cache in (None, "memory", "none") else _absolute(args.cache),
        permute_labels=args.permute_labels,
        dump_hlo=_absolute(args.dump_hlo) if args.dump_hlo else None,
        transform=_absolute(args.transform) if args.transform else None,
    )
    if args.schedule is None:
        return config
    return dataclasses.replace(config, schedule=_parse_schedule(args.schedule, config.rates.peak))


def split_train_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns what comes before the first -- of `tpufeed launch`, and what comes after it.

    argparse would take it for the end of its own options, in a way of each version's own.
    """
    words = list(argv)
    command = next((word for word in words if not word.startswith("-")), None)
    if command != "launch" or "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def make_launch_config(args: argparse.Namespace, train_flags: Sequence[str]) -> LaunchConfig:
    """Returns the checked configuration.

    Args:
      args: what comes before --.
      train_flags: what comes after it.

    Raises:
      UsageError: the arguments are wrong.
    """
    names = ("output", "run", "project", "region", "image", "tpu_topology", "service_account")
    for flag in (*names, "job", "endpoint"):
        if getattr(args, flag) == "":
            name = flag.replace("_", "-")
            raise UsageError(f"--{name} '': is empty; give a value or drop the flag")
    if args.job and (args.data or train_flags or args.output):
        raise UsageError(f"--job {args.job}: has its data and flags; drop --data, --output and --")
    train = None if args.job else _parse_train_flags(args, train_flags)
    same = (*names[1:], "backend", "machine_type", "hosts", "spot", "detach", "endpoint", "poll")
    return LaunchConfig(
        train=train,
        train_flags=_without_output(train_flags),
        timeout=_parse_duration(args.timeout),
        labels=_parse_labels(args.labels) if args.labels else (),
        job=args.job,
        **{name: getattr(args, name) for name in same},
    )


def _parse_train_flags(args: argparse.Namespace, flags: Sequence[str]) -> TrainConfig:
    if not args.data:
        raise UsageError("--data: give at least one folder that tpufeed ingest made")
    data = [f"--data={folder}" for folder in args.data]
    output = [f"--output={args.output}"] if args.output else []
    parser = make_parser()
    parsed, rest = parser.parse_known_args(["train", *data, *output, *flags])
    if rest:
        raise UsageError(f"{rest[0]}: tpufeed train has no such argument")
    if len(parsed.data) > len(args.data):
        raise UsageError("--data: give it before --")
    if args.output and parsed.output != args.output:
        raise UsageError(f"--output {parsed.output}: is given twice, before -- and after it")
    parse_compare(parsed)
    return make_train_config(parsed)


def _without_output(flags: Sequence[str]) -> tuple[str, ...]:
    kept, words = [], iter(flags)
    for word in words:
        if word == "--output":
            next(words, None)
        elif not word.startswith("--output="):
            kept.append(word)
    return tuple(kept)


def _parse_duration(text: str) -> int:
    found = _DURATION.fullmatch(text)
    if not found:
        raise UsageError(f"--timeout {text}: must be a time such as 3600, 90m, 24h or 7d")
    return int(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]


def _parse_labels(text: str) -> tuple[tuple[str, str], ...]:
    labels: dict[str, str] = {}
    for part in text.split(","):
        found = _LABEL.fullmatch(part)
        if not found or found[1] in labels or found[1] == RUN_LABEL:
            raise UsageError(
                f"--labels {text}: {part!r}: give each KEY=VALUE once, of lower-case letters, "
                f"digits, - and _; {RUN_LABEL} is --run"
            )
        labels[found[1]] = found[2]
    return tuple(sorted(labels.items()))


def make_export_config(args: argparse.Namespace) -> ExportConfig:
    """Returns the checked configuration.

    Raises:
      UsageError: a name is empty.
    """
    for flag in ("run", "output"):
        if not getattr(args, flag):
            raise UsageError(f"--{flag} '': is empty; give a folder")
    if args.layers == "":
        raise UsageError("--layers '': is empty; give a Python file")
    return ExportConfig(
        _absolute(args.run), _absolute(args.output), _folders(args.data or ()), args.layers
    )


def make_analyze_arguments(args: argparse.Namespace) -> tuple[tuple[str, ...], str]:
    """Returns the data sets' folders and the output of `tpufeed analyze`.

    Raises:
      UsageError: a folder's name is empty.
    """
    if not args.output:
        raise UsageError("--output '': is empty; give a new folder")
    return _folders(args.data), _absolute(args.output)


def check_predict_arguments(args: argparse.Namespace) -> None:
    """Checks the names that `tpufeed predict` was given.

    Raises:
      UsageError: one is empty.
    """
    if not args.model:
        raise UsageError("--model '': is empty; give the --output of tpufeed export")
    if "" in args.images:
        raise UsageError("IMAGE '': is empty; give a file")


def _folders(names: Sequence[str]) -> tuple[str, ...]:
    if "" in names:
        raise UsageError("--data '': is empty; give a folder")
    return tuple(map(_absolute, names))


def parse_compare(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the modes to compare; none where --compare was not given.

    Raises:
      UsageError: a mode is unknown or there twice, or --compare contradicts another flag.
    """
    if args.compare is None:
        return ()
    modes = tuple(args.compare.split(","))
    for mode in modes:
        _one_of("--compare", mode, MODES)
    if len(set(modes)) < len(modes):
        raise UsageError(f"--compare {args.compare}: a mode is there twice")
    if args.resume or args.json or args.dump_hlo:
        raise UsageError(
            "--compare: trains anew and prints a table; drop --resume, --json and --dump-hlo"
        )
    return modes


def _parse_schedule(text: str, peak: float) -> Schedule:
    fields = {"ramp": int, "hold": int, "decay": float, "start": float, "min": float}
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in fields or name in values:
            raise UsageError(f"--schedule {text}: {part!r}: give each of {', '.join(fields)} once")
        try:
            values[name] = fields[name](value)
        except ValueError as error:
            kind = "a whole number" if fields[name] is int else "a number"
            raise UsageError(f"--schedule {text}: {name} must be {kind}") from error
        if not 0 <= values[name] < math.inf:
            raise UsageError(f"--schedule {text}: {name} must be 0 or more")
    schedule = Schedule(peak, floor=values.pop("min", 0.0), **values)
    if schedule.decay > 1 or max(schedule.start or 0.0, schedule.floor) > peak:
        raise UsageError(
            f"--schedule {text}: decay is at most 1, start and min at most the rate, {peak:g}"
        )
    return schedule


def _one_of(flag: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{flag} {value}: allowed are {', '.join(allowed)}")


def _absolute(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(os.path.expanduser(path))


def _parse_input(text: str) -> Input:
    """[SPLIT=]PATTERN; a pattern that begins like a split can be written ./a=b/*.jpg."""
    split, pattern = "", text
    if found := _GIVEN_SPLIT.fullmatch(text):
        split, pattern = found.groups()
        if not SPLIT_NAME.fullmatch(split):
            raise UsageError(f"--input {text}: {split!r} is no name for a split")
    if not pattern:
        raise UsageError(f"--input {text!r}: the pattern is empty")
    if pattern.startswith(IDX_PREFIX):
        folder = pattern.removeprefix(IDX_PREFIX)
        if not folder:
            raise UsageError("--input idx: names no folder; give idx:DIR or idx:mnist")
        pattern = pattern if folder == "mnist" else IDX_PREFIX + _absolute(folder)
        return Input(pattern, split)
    return Input(_absolute(pattern), split)


def _parse_image_size(text: str) -> tuple[int, int]:
    found = _SIZE.fullmatch(text)
    if not found:
        raise UsageError(f"--image-size {text}: must be N or WIDTHxHEIGHT, as in 224 or 320x240")
    return int(found[1]), int(found[2] or found[1])


def _parse_background(text: str) -> tuple[int, int, int]:
    levels = text.split(",")
    if len(levels) != 3 or not all(level.isdecimal() for level in levels):
        raise UsageError(f"--background {text}: must be R,G,B, each 0 to 255, as in 255,255,255")
    return int(levels[0]), int(levels[1]), int(levels[2])


def _parse_weights(text: str) -> Weights:
    weights = []
    for part in text.split(","):
        name, _, share = part.partition("=")
        try:
            weights.append((name.strip(), Fraction(share)))
        except (ValueError, ZeroDivisionError) as error:
            raise UsageError(
                f"--split {text}: {part!r} is no NAME=SHARE, as in train=0.8,validation=0.2"
            ) from error
    try:
        return check_weights(weights)
    except ValueError as error:
        raise UsageError(f"--split {text}: {error}") from error


def _parse_grouping(text: str) -> Grouping:
    kind, _, value = text.partition(":")
    if text != "key" and (kind not in ("group", "column") or not value):
        raise UsageError(f"--split-by {text}: allowed are key, group:REGEX, column:NAME")
    if kind == "group":
        try:
            re.compile(value)
        except re.error as error:
            raise UsageError(f"--split-by {text}: no regular expression: {error}") from error
    return Grouping(kind, value)


def _parse_ratio(text: str | None) -> Fraction | None:
    if text is None:
        return None
    if not _RATIO.fullmatch(text):
        raise UsageError(f"--max-aspect-ratio {text}: must be a number, 1 or more, as in 2.5")
    return Fraction(text)


def _parse_bytes(text: str) -> int:
    found = _BYTES.fullmatch(text.strip())
    if not found:
        raise UsageError(f"--shard-size {text}: must be a size such as 128MB, 64MiB or 1GB")
    number, prefix, binary = found.groups()
    power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    return int(Fraction(number) * (1024 if binary else 1000) ** power)
