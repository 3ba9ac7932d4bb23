"""`tpufeed train`: a model trained and tested on data sets, epoch by epoch, on any accelerator.

    history = train(TrainConfig(data=("records",), model="lenet5", mode="xla"))

The run's folder gets history.json (rewritten after every epoch), checkpoints/, logs/ for
TensorBoard and, at the end, model.keras, confusion.png and predictions.png.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline import figures
from pipeline.config import HISTORY, TrainConfig
from pipeline.dataset import end_on_time, load_sources, open_dataset
from pipeline.devices import Placement, choose_strategy
from pipeline.history import Epoch, History, RunFolder, first_line
from pipeline.learner import Learner
from pipeline.models import build_model
from pipeline.needs import choose_test_split, picture_size
from pipeline.transform_fn import load_transform
from pipeline.verify import verify_dataset
from transforms.files import is_remote, join
from transforms.manifest import Manifest, check_trainable

# A tenth of a step is what better feeding could win back, and about what can be measured.
_INPUT_BOUND = 0.1
_SHOWN_PREDICTIONS = 25
# Decoded pictures that are kept in memory unless told otherwise.
_CACHED_BYTES = 256 * 2**20

Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the data sets hold, and the steps that an epoch takes.

    Attributes:
      shape: height, width, channels of the pictures.
      labels: in id order.
      test_split: the split to test on.
      steps: training steps an epoch; what is left over is dropped.
      test_steps: steps to test every example.
      cache: "memory" where the decoded training pictures are small, else None.
      mean: of each channel, scale 0 to 1, over all sets; None where unknown.
      std: standard deviation of each channel.
    """

    shape: tuple[int, int, int]
    labels: tuple[str, ...]
    test_split: str
    steps: int
    test_steps: int
    cache: str | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None


def make_plan(config: TrainConfig, manifests: Sequence[Manifest], *, replicas: int) -> Plan:
    """Returns the plan of a run.

    Args:
      config: the run's configuration.
      manifests: of config.data, in order; that they fit each other is the reader's to check.
      replicas: copies of the model.

    Raises:
      ValueError: a folder without a split to train or test on, an empty one, fewer examples than
        a step takes, or pictures of varying size.
    """
    sources = dict(zip(config.data, manifests, strict=True))
    size, test = picture_size(config, sources), choose_test_split(sources)
    counts = {name: sum(m.splits[name].records for m in manifests) for name in ("train", test)}
    batch = config.batch_size * replicas
    if counts["train"] < batch:
        raise ValueError(
            f"{', '.join(sources)}: split train has {counts['train']} examples, a step takes "
            f"{batch}: --batch-size {max(1, counts['train'] // replicas)} or less"
        )
    mean, std = pool_moments(manifests)
    if config.transform:
        transform = load_transform(config.transform, manifest=manifests[0])
        mean, std = transform.mean, transform.std
    shape = (*size, manifests[0].channels)
    return Plan(
        shape=shape,
        labels=manifests[0].labels,
        test_split=test,
        steps=counts["train"] // batch,
        test_steps=math.ceil(counts[test] / batch),
        cache="memory" if counts["train"] * math.prod(shape) <= _CACHED_BYTES else None,
        mean=mean,
        std=std,
    )


def pool_moments(
    manifests: Sequence[Manifest],
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Returns mean and deviation a channel over several sets, weighted by training records."""
    known = [
        (m.splits["train"].records, m.channel_mean, m.channel_std)
        for m in manifests
        if m.channel_mean and m.channel_std and "train" in m.splits
    ]
    total = sum(count for count, _, _ in known)
    if not total:
        return None, None
    if len(known) == 1:
        return known[0][1], known[0][2]
    shares = np.array([count / total for count, _, _ in known])[:, None]
    means, stds = (np.array([entry[i] for entry in known], np.float64) for i in (1, 2))
    mean = (shares * means).sum(axis=0)
    # Of one colour throughout, rounding can make this a little less than nothing.
    variance = (shares * (stds**2 + means**2)).sum(axis=0) - mean**2
    std = np.sqrt(np.maximum(variance, 0))
    return tuple(mean.tolist()), tuple(std.tolist())


def train(
    config: TrainConfig,
    *,
    report: Callable[[Epoch], None] | None = None,
    note: Note | None = None,
) -> History:
    """Trains and tests a model.

    Args:
      config: what to do.
      report: called with every epoch's report.
      note: called with what a person may want to know.

    Returns:
      The run's history, epochs before a resume included.

    Raises:
      ValueError: the data, the model, the accelerator, or the run's folder is not as it must be.
      OSError: a file of the run cannot be written.
      RuntimeError: the loss is no number any more.
    """
    manifests = check_data(config.data)
    placement = choose_strategy(
        config.tpu, zone=config.zone, project=config.project, paths=_paths(config)
    )
    plan = make_plan(config, manifests, replicas=placement.replicas)
    learner = _make_learner(config, plan, placement)
    history = History(
        config=json.loads(json.dumps(config.to_json())),
        data=tuple(manifest.fingerprint for manifest in manifests),
        labels=plan.labels,
        test_split=plan.test_split,
        device=placement.kind,
        strategy=placement.name,
        replicas=placement.replicas,
        parameters=learner.model.count_params(),
    )
    # What cannot be read is found before the folder is made.
    tests = _test_batches(config, plan, placement)
    run = RunFolder(config.output, learner) if config.output else None
    if run:
        history = run.begin(history, resume=config.resume)
    note = note or (lambda text: None)
    note(_describe_start(history, plan, placement))
    for epoch in _epochs(config, plan, placement, learner, tests, start=len(history.epochs)):
        history = dataclasses.replace(
            history,
            epochs=(*history.epochs, epoch),
            traces=learner.traces,
            compile_seconds=learner.compile_seconds,
        )
        if report:
            report(epoch)
        _check_loss(epoch)
        if run:
            run.save_epoch(history)
    if run:
        history = _finish(
            run, history, learner, tests, config=config, plan=plan, placement=placement
        )
    note(_describe_end(history))
    return history


def _paths(config: TrainConfig) -> list[str]:
    """What is read and written, by hosts wherever they are."""
    cache = None if config.cache in ("memory", "none") else config.cache
    return [*config.data, *filter(None, (config.output, cache, config.dump_hlo, config.transform))]


def _describe_start(history: History, plan: Plan, placement: Placement) -> str:
    config = history.config
    text = (
        f"{config['model']}: {history.parameters:,} parameters; mode {config['mode']} on "
        f"{placement.kind}, {placement.replicas} replica(s) of batch {config['batch_size']}, "
        f"{plan.steps} steps an epoch ({placement.reason})"
    )
    if history.epochs:
        text += f"; resumed after {len(history.epochs)} of {config['epochs']} epochs"
    return text


def _describe_end(history: History) -> str:
    return (
        f"{judge_input(history.epochs[-1])}; {history.traces} traces, "
        f"{history.compile_seconds:.1f} s in calls that compiled"
    )


def check_data(folders: Sequence[str]) -> list[Manifest]:
    """Returns the manifests of data sets that are whole, as far as a quick look can tell.

    Raises:
      ValueError: a set has no dataset.json, its files are not those that it names, or its records
        have not one label each.
    """
    for folder in folders:
        if is_remote(folder):
            continue
        if findings := verify_dataset(folder, depth="quick"):
            more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
            raise ValueError(
                f"{folder}: not whole: {findings[0]}{more}: see tpufeed verify, then ingest again"
            )
    sources = load_sources(folders)
    check_trainable(sources)
    return list(sources.values())


def judge_input(epoch: Epoch) -> str:
    """Returns whether the devices waited for their input, in words."""
    bound = epoch.input_share > _INPUT_BOUND
    verdict = "input-bound: the reader is too slow" if bound else "not input-bound"
    return (
        f"input: {100 * epoch.input_share:.0f} % of a step of "
        f"{1000 * epoch.step_seconds:.1f} ms spent waiting for it: {verdict}"
    )


def _check_loss(epoch: Epoch) -> None:
    for name, loss in (("training", epoch.training.loss), ("test", epoch.test.loss)):
        if not math.isfinite(loss):
            raise RuntimeError(
                f"epoch {epoch.epoch}: the {name} loss is {loss}; lower --learning-rate "
                f"{epoch.learning_rate:g}, or raise it slowly with --schedule ramp=..."
            )


def _make_learner(config: TrainConfig, plan: Plan, placement: Placement) -> Learner:
    import keras

    keras.utils.set_random_seed(config.seed)
    with placement.strategy.scope():
        model = build_model(
            config.model,
            input_shape=plan.shape,
            classes=len(plan.labels),
            mean=plan.mean,
            std=plan.std,
            scaling=config.scaling,
            weights=config.weights,
            mixed_bfloat16=config.mixed_bfloat16,
        )
        make = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}[config.optimizer]
        return Learner(
            model,
            make(config.rates.at(0)),
            strategy=placement.strategy,
            mode=config.mode,
            kind=placement.kind,
        )


# Feeding


def _training_batches(
    config: TrainConfig, plan: Plan, placement: Placement, *, seed: int
) -> Iterator[Any]:
    """Endless batches, (image, label), one of each replica together."""

    def open_on_host(context: Any) -> Any:
        dataset = open_dataset(
            config.data,
            split="train",
            batch_size=config.batch_size,
            resize=config.image_size,
            augment=make_augment(config.augment),
            cache=None if config.cache == "none" else config.cache or plan.cache,
            seed=seed,
            shard_index=context.input_pipeline_id,
            shard_count=context.num_input_pipelines,
        )
        if not config.permute_labels and placement.kind != "TPU":
            return dataset
        changed = dataset.map(change, num_parallel_calls=tf.data.AUTOTUNE)
        return end_on_time(changed.prefetch(tf.data.AUTOTUNE))

    def change(image: Any, label: Any) -> Any:
        if config.permute_labels:
            label = tf.random.shuffle(label, seed=seed)
        return _for_device(image, placement.kind), label

    return iter(placement.strategy.distribute_datasets_from_function(open_on_host))


def make_augment(names: Sequence[str]) -> Callable[[Any, Any], Any] | None:
    """Returns what varies a picture, uint8 [height, width, channels], by a seed, int32 [2].

    Args:
      names: of config.AUGMENTATIONS; none for None.
    """
    if not names:
        return None

    def augment(image: Any, seed: Any) -> Any:
        if "flip" in names:
            image = tf.image.stateless_random_flip_left_right(image, seed)
        if "saturation" in names and image.shape[-1] == 3:
            # From gray (0) to twice as colourful (2).
            factor = tf.random.stateless_uniform([], seed + 1, 0.0, 2.0)
            gray = tf.image.rgb_to_grayscale(tf.cast(image, tf.float32))
            varied = gray + factor * (tf.cast(image, tf.float32) - gray)
            image = tf.saturate_cast(tf.round(varied), tf.uint8)
        return image

    return augment


def _for_device(image: Any, kind: str) -> Any:
    # A TPU is not fed uint8. bfloat16 holds 0 to 255 exactly, in half the bytes of float32.
    return tf.cast(image, tf.bfloat16) if kind == "TPU" else image


def _test_batches(config: TrainConfig, plan: Plan, placement: Placement) -> Any:
    """What an iterator over gives plan.test_steps batches, (image, label, weights)."""

    def open_on_host(context: Any) -> Any:
        dataset = open_dataset(
            config.data,
            split=plan.test_split,
            batch_size=config.batch_size,
            training=False,
            resize=config.image_size,
        )
        # Every replica of every host takes as many batches as the others: the last are padding.
        spare = dataset.take(1).map(lambda image, label, weights: (image, label, weights * 0))
        whole = dataset.concatenate(spare.repeat(placement.replicas))
        mine = whole.take(plan.test_steps * placement.replicas)
        mine = mine.shard(context.num_input_pipelines, context.input_pipeline_id)
        fed = mine.map(lambda image, *rest: (_for_device(image, placement.kind), *rest))
        return end_on_time(fed.prefetch(tf.data.AUTOTUNE))

    return placement.strategy.distribute_datasets_from_function(open_on_host)


@contextlib.contextmanager
def _reading(config: TrainConfig) -> Iterator[None]:
    """Puts TensorFlow's errors of reading into one line."""
    try:
        yield
    except tf.errors.OpError as error:
        raise ValueError(
            f"{', '.join(config.data)}: cannot be read: {first_line(error)}"
        ) from error


@contextlib.contextmanager
def _computing(config: TrainConfig) -> Iterator[None]:
    """Puts TensorFlow's errors of computing into one line."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise RuntimeError(
            f"--batch-size {config.batch_size}: out of memory on the device; lower it, or train "
            f"in --mixed-bfloat16 ({first_line(error)})"
        ) from error
    except tf.errors.OpError as error:
        remedy = "; use --mode graph" if config.mode == "xla" else ""
        raise RuntimeError(
            f"--model {config.model}: cannot be run in mode {config.mode}: "
            f"{first_line(error)}{remedy}"
        ) from error


# Epochs


def _epochs(
    config: TrainConfig,
    plan: Plan,
    placement: Placement,
    learner: Learner,
    tests: Any,
    *,
    start: int,
) -> Iterator[Epoch]:
    with _reading(config):
        # Another order after a resume than at the start, or it would see the same epochs again.
        batches = _training_batches(config, plan, placement, seed=config.seed + start)
    for number in range(start, config.epochs):
        began = time.perf_counter()
        learner.optimizer.learning_rate = config.rates.at(number)
        clock = _Clock(number, plan.steps, config.batch_size * placement.replicas)
        for done in range(0, plan.steps, config.steps_per_execution):
            count = min(config.steps_per_execution, plan.steps - done)
            with clock.waiting(), _reading(config):
                group = [next(batches) for _ in range(count)]
            with _computing(config):
                if config.dump_hlo and (number, done) == (start, 0):
                    _write_hlo(config.dump_hlo, learner.compile_to_hlo(group))
                learner.train_on(group)
            clock.step(count)
        training = learner.read_statistics()
        learner.even_out()
        clock.stop()
        for batch in _take(tests, plan.test_steps, config):
            with _computing(config):
                learner.test_on(batch)
        yield Epoch(
            epoch=number,
            training=training,
            test=learner.read_statistics(),
            seconds=time.perf_counter() - began,
            learning_rate=config.rates.at(number),
            images_per_second=training.total / clock.seconds,
            input_share=clock.input_share,
            step_seconds=clock.step_seconds,
        )


def _write_hlo(folder: str, texts: Mapping[str, str]) -> None:
    for stage, text in texts.items():
        path = join(folder, f"train_step.{stage}.txt")
        try:
            tf.io.gfile.makedirs(folder)
            with tf.io.gfile.GFile(path, "w") as file:
                file.write(text)
        except (tf.errors.OpError, OSError) as error:
            raise OSError(
                f"{path}: cannot be written: {first_line(error)}: give another folder as --dump-hlo"
            ) from error


def _take(dataset: Any, count: int, config: TrainConfig) -> Iterator[Any]:
    # Never asks for the end: with AUTOTUNE that was seen to come seconds after the last batch.
    with _reading(config):
        batches = iter(dataset)
    for _ in range(count):
        with _reading(config):
            batch = next(batches)
        yield batch


class _Clock:
    """How long an epoch's training took, and how much of it was waiting for input."""

    def __init__(self, epoch: int, steps: int, batch: int):
        self._epoch, self._steps, self._batch = epoch, steps, batch
        self._began = self._steady = self._shown = time.perf_counter()
        self._waited, self._done, self._warm = 0.0, 0, 0
        self._ended = self._began
        self._terminal = sys.stderr.isatty()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def step(self, count: int) -> None:
        self._done += count
        now = time.perf_counter()
        if not self._warm:
            # The first call compiles, and the first batch waits for the shuffle buffer to fill.
            self._warm, self._steady, self._waited = self._done, now, 0.0
        if self._terminal and now - self._shown > 0.25:
            self._shown = now
            speed = self._batch * self._done / (now - self._began)
            text = f"epoch {self._epoch}: {self._done}/{self._steps} steps, {speed:.0f} images/s"
            print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)

    def stop(self) -> None:
        self._ended = time.perf_counter()
        if self._terminal:
            print(f"\r{'':<60}\r", end="", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        return self._ended - self._began

    @property
    def step_seconds(self) -> float:
        return (self._ended - self._steady) / max(1, self._done - self._warm)

    @property
    def input_share(self) -> float:
        steady = self._ended - self._steady
        return self._waited / steady if self._done > self._warm and steady else 0.0


def _finish(
    run: RunFolder,
    history: History,
    learner: Learner,
    tests: Any,
    *,
    config: TrainConfig,
    plan: Plan,
    placement: Placement,
) -> History:
    """Saves the model, the confusion matrix and some predictions."""
    run.save_model()
    count = len(plan.labels)
    confusion = np.zeros((count, count), np.int64)
    shown: list[tuple[Any, int, int]] = []
    for batch in _take(tests, plan.test_steps, config):
        predicted, truth, weights = learner.predict_on(batch)
        real = weights > 0
        np.add.at(confusion, (truth[real], predicted[real]), 1)
        if len(shown) < _SHOWN_PREDICTIONS:
            parts = placement.strategy.experimental_local_results(batch[0])
            pixels = np.concatenate([tf.cast(part, tf.uint8).numpy() for part in parts])
            shown += zip(pixels[real], truth[real], predicted[real], strict=True)
    pictures, truths, guesses = zip(*shown[:_SHOWN_PREDICTIONS], strict=True)
    run.save_picture("confusion.png", figures.draw_confusion(confusion, labels=plan.labels))
    run.save_picture(
        "predictions.png",
        figures.draw_predictions(pictures, truth=truths, predicted=guesses, labels=plan.labels),
    )
    history = dataclasses.replace(
        history,
        confusion=tuple(map(tuple, confusion.tolist())),
        macro_f1=float(figures.f1_scores(confusion).mean()),
    )
    run.save_text(HISTORY, history.to_json())
    return history
