"""`tpufeed launch`: a training job is planned, checked against its data, submitted and followed.

What is to be trained on is looked at before anything is spent. The backend `local` runs the same
`tpufeed train`, with the same arguments, as a process on this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from pipeline import needs, vertex
from pipeline.config import HISTORY, LaunchConfig, TrainConfig
from pipeline.verify import verify_dataset
from transforms import files, manifest
from transforms.manifest import Manifest
from transforms.records import DataError

Note = Callable[[str], None]

_SECONDS_TO_END = 20
# This very code, not a folder `pipeline` of the one that this is called in, as -m would take.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_START = """
import sys
sys.path[:0] = [sys.argv.pop(1)]
from pipeline.__main__ import run
run()
"""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the job will do, from the manifests alone.

    Attributes:
      records: in the split train.
      shards: of the split train.
      replicas: copies of the model.
      batch: pictures a step, of all replicas together.
      steps: an epoch.
      epochs: in all.
      hosts: machines.
    """

    records: int
    shards: int
    replicas: int
    batch: int
    steps: int
    epochs: int
    hosts: int

    def __str__(self) -> str:
        """Returns the plan in one line."""
        return (
            f"{self.records} training records in {self.shards} shards; {self.hosts} host(s), "
            f"{self.replicas} replica(s) of batch {self.batch // self.replicas}, global batch "
            f"{self.batch}; {self.steps} steps an epoch, {self.steps * self.epochs} in "
            f"{self.epochs} epoch(s)"
        )


def launch(config: LaunchConfig, *, note: Note) -> None:
    """Submits a training job, or finds it, and follows it to its end.

    Args:
      config: what to do.
      note: called with what a person may want to know, a line each.

    Raises:
      UsageError: the arguments are wrong.
      DataError: the data are not whole or too few, or the service refuses.
      RuntimeError: the job did not succeed, or the following was interrupted.
    """
    if config.backend == "vertex":
        vertex.check_config(config)
    with _termination_interrupts():
        try:
            _launch(config, note)
        except KeyboardInterrupt:
            raise RuntimeError("interrupted before anything was submitted") from None


def _launch(config: LaunchConfig, note: Note) -> None:
    train = config.train
    if train is None:
        vertex.run_on_vertex(config, run="", args=(), before=lambda: None, note=note)
        return
    manifests = check_data(train.data)
    run = config.run or name_run(config, [contents.fingerprint for contents in manifests])
    args = train_args(config)
    local = config.backend == "local"
    shape = vertex.Shape(1, 1) if local else vertex.shape_of(config)[1]
    plan = make_plan(train, manifests, replicas=shape.chips, hosts=shape.hosts)
    needs.check_keys(dict(zip(train.data, manifests, strict=True)), read=files.read_file)
    note(f"run {run}: {plan}")
    if local:
        check_output(train)
        run_locally(args, run=run, output=train.output or "", note=note)
        return
    if config.hosts > 1:
        note(f"run {run}: tpufeed train was never tried on several hosts of a TPU")
    vertex.run_on_vertex(config, run=run, args=args, before=lambda: check_output(train), note=note)


def check_data(folders: Sequence[str]) -> list[Manifest]:
    """Returns the manifests of data sets that a quick look finds whole, and alike.

    Raises:
      DataError: a set is not whole, or two are not read as one; names folder and reason.
      ValueError: its records have not one label each.
    """
    if double := needs.find_double(folders):
        raise DataError(
            f"--data {double[1]}: a folder is given twice; its records would count twice"
        )
    manifests = []
    for folder in folders:
        if findings := verify_dataset(folder, depth="quick"):
            more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
            raise DataError(
                f"{folder}: not whole: {findings[0]}{more}: see tpufeed verify, then ingest again"
            )
        manifests.append(manifest.load_manifest(folder))
    sources = dict(zip(folders, manifests, strict=True))
    for folder, contents in sources.items():
        for field in manifest.ALIKE:
            if getattr(contents, field) != getattr(manifests[0], field):
                raise DataError(
                    f"--data {folder}: {field} is not that of {folders[0]}; only like data sets "
                    "are read as one: ingest one of them again"
                )
    manifest.check_trainable(sources)
    return manifests


def make_plan(
    config: TrainConfig, manifests: Sequence[Manifest], *, replicas: int, hosts: int
) -> Plan:
    """Returns what the job will do.

    Args:
      config: of the training.
      manifests: of config.data.
      replicas: copies of the model.
      hosts: machines, each of which reads shards of its own.

    Raises:
      DataError: a folder without a split to train or test on, an empty one, pictures of varying
        size, fewer records than a step takes, or fewer shards than hosts.
    """
    where, sources = ", ".join(config.data), dict(zip(config.data, manifests, strict=True))
    needs.picture_size(config, sources)
    needs.choose_test_split(sources)
    splits = [contents.splits["train"] for contents in manifests]
    records, shards = sum(s.records for s in splits), sum(len(s.shards) for s in splits)
    if shards < hosts:
        raise DataError(
            f"{where}: split train has {shards} shard(s), and each of {hosts} hosts reads shards "
            f"of its own: ingest with --shards {hosts} or more for this split, or use fewer hosts"
        )
    batch = config.batch_size * replicas
    if records < batch:
        raise DataError(
            f"{where}: split train has {records} records, a step of {replicas} replica(s) takes "
            f"{batch}: --batch-size {max(1, records // replicas)} or less"
        )
    return Plan(records, shards, replicas, batch, records // batch, config.epochs, hosts)


def name_run(config: LaunchConfig, fingerprints: Sequence[str]) -> str:
    """Returns a name for the run: equal for equal data, flags and output, else another.

    A run that is gone on with keeps its name.
    """
    assert config.train is not None
    flags = [flag for flag in config.train_flags if flag != "--resume"]
    text = json.dumps([list(fingerprints), flags, config.train.output])
    return f"tpufeed-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def train_args(config: LaunchConfig) -> list[str]:
    """Returns the arguments of `tpufeed train`, the same for every backend but for the TPU."""
    assert config.train is not None
    data = [f"--data={folder}" for folder in config.train.data]
    # On a TPU machine that finds no TPU, training must fail rather than crawl on the CPU.
    tpu = ["--tpu=local"] if config.backend == "vertex" else []
    return [*data, *config.train_flags, f"--output={config.train.output}", *tpu]


def check_output(config: TrainConfig) -> None:
    """Refuses what `tpufeed train` would refuse later, on machines that cost.

    Raises:
      DataError: a run is in the output folder, or none that could be resumed, or one with more
        epochs than it is to have.
    """
    assert config.output is not None
    path = files.join(config.output, HISTORY)
    there = files.exists(path)
    if there and not config.resume:
        raise DataError(
            f"{config.output}: there is a run in it: give a new folder as --output, or --resume "
            "after --"
        )
    if not config.resume:
        return
    if not there:
        raise DataError(f"{config.output}: no run to go on with: drop --resume")
    done = needs.count_epochs(files.read_file(path), path=path)
    needs.check_epochs(config.epochs, done=done, folder=config.output)


def run_locally(args: Sequence[str], *, run: str, output: str, note: Note) -> None:
    """Runs `tpufeed train` as a process of its own, which writes where this one writes.

    Args:
      args: of `tpufeed train`.
      run: the run's name.
      output: the run's folder.
      note: called with each change of state.

    Raises:
      RuntimeError: it ended with another status than 0, or was interrupted.
    """
    began = time.monotonic()

    def say(state: str) -> None:
        note(f"run {run}: {state} after {time.monotonic() - began:.0f} s")

    say("RUNNING")
    process = None
    try:
        with _interrupts_later():
            # A group of its own, so that an interrupt comes to it once, and from here.
            process = subprocess.Popen(
                [sys.executable, "-c", _START, _HERE, "train", *args],
                env={**os.environ, **environment(output)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        status = process.wait()
    except KeyboardInterrupt:
        if process is not None:
            end_process(process)
        say("CANCELLED")
        raise RuntimeError(
            f"run {run}: interrupted, and ended: launch again with --resume after --, if it left "
            f"a {HISTORY}, to go on"
        ) from None
    if status:
        say("FAILED")
        raise RuntimeError(
            f"run {run}: FAILED: {describe_status(status)}; what it said stands above"
        )
    say("SUCCEEDED")


def environment(output: str) -> dict[str, str]:
    """Returns what the service adds to a job's environment, for its output folder."""
    names = {"MODEL": "model", "CHECKPOINT": "checkpoints", "TENSORBOARD_LOG": "logs"}
    return {f"AIP_{key}_DIR": f"{files.join(output, name)}/" for key, name in names.items()}


def describe_status(status: int) -> str:
    """Returns how a process ended, in words."""
    if status < 0:
        return f"ended by signal {-status} ({signal.Signals(-status).name})"
    return f"exit status {status}"


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a process and waits for its end; a second interrupt, or time, kills it."""
    process.terminate()
    try:
        process.wait(_SECONDS_TO_END)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Lets interrupts wait, so that none falls between a process and the name for it."""
    came: list[int] = []
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is threading.main_thread()
        and signal.getsignal(number) is signal.default_int_handler
    ]
    for number in numbers:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """Lets SIGTERM do what ctrl-C does, so that a scheduler that ends this leaves no orphan."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
