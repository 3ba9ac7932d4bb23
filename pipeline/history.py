"""What a training run did, and the folder that keeps it: history.json, checkpoints, logs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from pipeline.config import HISTORY
from pipeline.learner import Learner, Statistics
from pipeline.needs import check_epochs
from transforms.files import join

_ASSERTED = re.compile(r"assertion failed: \[([^\n]*)\]")
# What must be equal for a run to be gone on with.
_OF_A_RUN = (
    *("model", "optimizer", "image_size", "scaling", "transform"),
    *("mixed_bfloat16", "permute_labels"),
)


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch's report.

    Attributes:
      epoch: from 0.
      training: over the epoch's steps, while the weights moved.
      test: over every example of the test split, after the epoch.
      seconds: training and test together.
      learning_rate: of the epoch.
      images_per_second: in training, of all replicas together.
      input_share: of the step, spent waiting for input, 0 to 1.
      step_seconds: a step took, the first of the run left out.
    """

    epoch: int
    training: Statistics
    test: Statistics
    seconds: float
    learning_rate: float
    images_per_second: float
    input_share: float
    step_seconds: float

    def __str__(self) -> str:
        """Returns the report line of the X10 tutorial."""
        training, test = self.training, self.test
        return (
            f"[Epoch {self.epoch}] Training Loss: {training.loss:.3f}, "
            f"Training Accuracy: {_share(training)}, "
            f"Test Loss: {test.loss:.3f}, Test Accuracy: {_share(test)} "
            f"seconds per epoch: {self.seconds:.1f}"
        )

    @property
    def json(self) -> str:
        """The report as one line of JSON."""
        return json.dumps(_as_dict(self))


def _share(statistics: Statistics) -> str:
    return f"{statistics.correct}/{statistics.total} ({100 * statistics.accuracy:.1f}%)"


@dataclasses.dataclass(frozen=True)
class History:
    """What a run did; history.json holds it.

    Attributes:
      config: the run's configuration.
      data: fingerprint of each data set.
      labels: in id order.
      test_split: the split tested on.
      device: kind of the devices.
      strategy: name of the tf.distribute strategy.
      replicas: copies of the model.
      parameters: of the model.
      epochs: the reports, those before a resume included.
      traces: of the step functions, since the start or resume.
      compile_seconds: in calls that traced, since the start or resume.
      confusion: examples [true class][predicted class] of the test split, at the end.
      macro_f1: mean F1 score over the classes, at the end.
    """

    config: Mapping[str, Any]
    data: tuple[str, ...]
    labels: tuple[str, ...]
    test_split: str
    device: str
    strategy: str
    replicas: int
    parameters: int
    epochs: tuple[Epoch, ...] = ()
    traces: int = 0
    compile_seconds: float = 0.0
    confusion: tuple[tuple[int, ...], ...] | None = None
    macro_f1: float | None = None

    def to_json(self) -> str:
        """Returns the text of history.json."""
        return json.dumps(_as_dict(self), indent=1) + "\n"


def _as_dict(report: Epoch | History) -> dict[str, Any]:
    def make(items: list[tuple[str, Any]]) -> dict[str, Any]:
        # JSON has no NaN.
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in items}

    return dataclasses.asdict(report, dict_factory=make)


def first_line(error: BaseException) -> str:
    """Returns what an error of TensorFlow's says, without its traceback and graph."""
    text = str(getattr(error, "message", None) or error).strip()
    if found := _ASSERTED.search(text):
        return found[1].replace("\\'", "'")
    # "Graph execution error:" and a traceback come before what is wrong.
    lines = text.removeprefix("Graph execution error:").strip().splitlines() or [""]
    if lines[0].startswith("Detected at node"):
        lines = [line for line in lines[1:] if line and not line.startswith((" ", "<"))] or lines
    return " ".join(lines[0].split())[:300] or type(error).__name__


class RunFolder:
    """The files of a run, in a folder on a disk or in a bucket."""

    def __init__(self, folder: str, learner: Learner):
        """Looks at nothing yet; `learner` is what checkpoints hold."""
        self.folder, self._model = folder, learner.model
        self._epoch = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._checkpoint = tf.train.Checkpoint(
            model=learner.model, optimizer=learner.optimizer, epoch=self._epoch
        )
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, join(folder, "checkpoints"), max_to_keep=2
        )
        self._writers: dict[str, Any] = {}

    def begin(self, history: History, *, resume: bool) -> History:
        """Makes the folder, or takes up the run in it.

        Args:
          history: of the run, without epochs.
          resume: whether a run is in the folder. One that ended before its first checkpoint begins
            anew, so that it can always be gone on with.

        Returns:
          The history, with the epochs that are done.

        Raises:
          ValueError: the folder is not empty, or the run in it is another, is not whole, or has
            more epochs than it is to have.
          OSError: the folder cannot be written.
        """
        with self._writing(HISTORY):
            there = tf.io.gfile.isdir(self.folder) and tf.io.gfile.listdir(self.folder)
        # A run that ended as it first wrote its history left no run.
        there = there and [name for name in there if name != _temporary(HISTORY)]
        if resume:
            history = self._restore(history, there=bool(there))
        elif there:
            raise ValueError(
                f"{self.folder}: is not empty: give a new folder as --output, or --resume"
            )
        self.save_text(HISTORY, history.to_json())  # now, not after an hour's epoch
        return history

    def _restore(self, history: History, *, there: bool) -> History:
        path = join(self.folder, HISTORY)
        if not there:
            raise ValueError(f"{self.folder}: no checkpoint to resume from: drop --resume")
        if not tf.io.gfile.exists(path):
            raise ValueError(
                f"{self.folder}: has no {HISTORY}, so no run to resume: give a new folder as "
                "--output, and drop --resume"
            )
        with tf.io.gfile.GFile(path) as file:
            before = _parse_history(file.read(), path=path)
        _check_same_run(before, history, path=path)
        check_epochs(history.config["epochs"], done=len(before["epochs"]), folder=self.folder)
        done = self._load_checkpoint(before, path=path)
        return dataclasses.replace(history, epochs=before["epochs"][:done])

    def _load_checkpoint(self, before: Mapping[str, Any], *, path: str) -> int:
        """Loads the latest; returns the epochs that are done, none where there is none yet."""
        latest, known = self._manager.latest_checkpoint, len(before["epochs"])
        if not latest:
            # The history is written before the checkpoint, so it may have the first epoch.
            if known > 1 or before["finished"]:
                raise ValueError(
                    f"{path}: has {known} epochs, and there is no checkpoint: copy the run again, "
                    "or train anew in another --output"
                )
            return 0
        try:
            self._checkpoint.restore(latest).assert_consumed()
        # Seen: OpError, IndexError for a cut file, AssertionError for another model's.
        except Exception as error:
            raise ValueError(f"{latest}: cannot be restored: {first_line(error)}") from error
        done = int(self._epoch.numpy())
        if known < done:
            raise ValueError(
                f"{path}: has {known} epochs, {latest} has {done}: copy the run again, or train "
                "anew in another --output"
            )
        return done

    def save_epoch(self, history: History) -> None:
        """Writes history.json, a checkpoint, and TensorBoard's logs."""
        epoch = history.epochs[-1]
        # Before the checkpoint: a run that is stopped between the two goes on from the checkpoint
        # and leaves out what history.json has beyond it. The other way round an epoch were missing.
        self.save_text(HISTORY, history.to_json())
        self._epoch.assign(len(history.epochs))
        with self._writing("checkpoints"):
            self._manager.save(checkpoint_number=len(history.epochs))
        with self._writing("logs"):
            for name, statistics in (("train", epoch.training), ("test", epoch.test)):
                self._log(name, epoch.epoch, loss=statistics.loss, accuracy=statistics.accuracy)
            self._log(
                "train",
                epoch.epoch,
                learning_rate=epoch.learning_rate,
                images_per_second=epoch.images_per_second,
                input_share=epoch.input_share,
            )

    def _log(self, name: str, step: int, **values: float) -> None:
        if name not in self._writers:
            self._writers[name] = tf.summary.create_file_writer(join(self.folder, "logs", name))
        # Not tf.summary.scalar, which needs TensorBoard's package to write what it can read.
        summary = tf.compat.v1.Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        with self._writers[name].as_default():
            tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=step)
        self._writers[name].flush()

    def save_text(self, name: str, text: str) -> None:
        """Writes a file whole or not at all."""
        self._save(name, text.encode())

    def save_picture(self, name: str, picture: Any) -> None:
        """Writes a picture as PNG."""
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        self._save(name, buffer.getvalue())

    def save_model(self) -> None:
        """Writes the model, from pixels to logits, with all its weights."""
        with self._writing("model.keras"):
            self._model.save(join(self.folder, "model.keras"))

    def _save(self, name: str, data: bytes) -> None:
        path = join(self.folder, name)
        temporary = join(self.folder, _temporary(name))
        with self._writing(name):
            tf.io.gfile.makedirs(self.folder)
            with tf.io.gfile.GFile(temporary, "wb") as file:
                file.write(data)
            tf.io.gfile.rename(temporary, path, overwrite=True)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except (tf.errors.OpError, OSError) as error:
            raise OSError(
                f"{join(self.folder, name)}: cannot be written: {first_line(error)}: make room "
                "or give another --output; --resume goes on after the last checkpoint"
            ) from error


def _temporary(name: str) -> str:
    return f".{name}.tmp"


def _check_same_run(before: Mapping[str, Any], history: History, *, path: str) -> None:
    for name in _OF_A_RUN:
        old, new = before["config"].get(name), history.config[name]
        if old != new:
            raise ValueError(f"{path}: {name} was {old}, is now {new}: a run keeps its {name}")
    if before["data"] != history.data or before["labels"] != history.labels:
        raise ValueError(
            f"{path}: the run was on other data: give the same --data, or a new folder as --output"
        )


def load_history(folder: str) -> dict[str, Any]:
    """Reads the history.json of a run.

    Returns:
      Its `config` (dict), `data` (fingerprints), `labels`, `epochs` (Epoch) and `finished`,
      whether the run came to its end.

    Raises:
      ValueError: the folder has none.
    """
    path = join(folder, HISTORY)
    try:
        with tf.io.gfile.GFile(path) as file:
            text = file.read()
    except (tf.errors.OpError, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{folder}: has no {HISTORY}: give the --output of tpufeed train"
        ) from error
    return _parse_history(text, path=path)


def _parse_history(text: str, *, path: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
        epochs = tuple(
            Epoch(
                **{
                    **epoch,
                    "training": Statistics(**epoch["training"]),
                    "test": Statistics(**epoch["test"]),
                }
            )
            for epoch in document["epochs"]
        )
        data, labels = tuple(document["data"]), tuple(document["labels"])
        return {
            "config": document["config"],
            "data": data,
            "labels": labels,
            "epochs": epochs,
            "finished": document.get("confusion") is not None,
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not as tpufeed train writes it: {error!r}") from error
