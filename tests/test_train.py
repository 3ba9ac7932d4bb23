"""Training on small drawn pictures: reports, modes, replicas, the run's folder, and errors."""

import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import INTERRUPTIBLE, ingest
from PIL import Image

from pipeline import figures, train
from pipeline.__main__ import main
from pipeline.compare import format_table
from pipeline.config import Schedule, TrainConfig, make_parser, make_train_config
from pipeline.dataset import open_dataset
from pipeline.devices import Placement, choose_strategy, import_tensorflow
from pipeline.history import Epoch, History, RunFolder
from pipeline.learner import Learner, Statistics
from pipeline.models import build_model
from transforms.example import encode_example, parse_example
from transforms.manifest import dump_manifest, load_manifest

tf = import_tensorflow()
import keras  # noqa: E402  (after TensorFlow, whose start-up noise is held back)

ROOT = Path(__file__).resolve().parents[1]
FIRST = Epoch(
    epoch=0,
    training=Statistics(0.5284, 50154, 59904),
    test=Statistics(0.168, 9468, 10000),
    seconds=11.94,
    learning_rate=0.1,
    images_per_second=5000.0,
    input_share=0.031,
    step_seconds=0.0061,
)


def config(*folders, **fields) -> TrainConfig:
    fields = {"model": "lenet5", "epochs": 1, "batch_size": 8, "tpu": "none", **fields}
    return TrainConfig(data=tuple(map(str, folders)), **fields)


# Reports


def test_report_line_is_the_tutorials():
    assert str(FIRST) == (
        "[Epoch 0] Training Loss: 0.528, Training Accuracy: 50154/59904 (83.7%), "
        "Test Loss: 0.168, Test Accuracy: 9468/10000 (94.7%) seconds per epoch: 11.9"
    )
    broken = dataclasses.replace(FIRST, training=Statistics(float("nan"), 1, 2))
    assert json.loads(broken.json)["training"] == {"loss": None, "correct": 1, "total": 2}
    assert json.loads(FIRST.json)["test"] == {"loss": 0.168, "correct": 9468, "total": 10000}


def test_verdict_on_the_input():
    text = "input: 3 % of a step of 6.1 ms spent waiting for it: not input-bound"
    assert train.judge_input(FIRST) == text
    slow = dataclasses.replace(FIRST, input_share=0.5)
    assert "50 % of a step of 6.1 ms spent waiting for it: input-bound" in train.judge_input(slow)


def test_comparison_has_the_published_figures_beside_ours():
    history = History({}, ("f",), ("a",), "test", "CPU", "Default", 1, 61706, (FIRST,), 2, 1.5)
    table = format_table({"graph": history}, published=True).splitlines()
    assert table[0].split() == [
        "epoch",
        "run",
        *"loss accuracy test loss test accuracy".split(),
    ] + ["seconds"]
    assert table[1].split() == "0 graph 0.528 50154 (83.7%) 0.168 94.7% 11.9".split()
    assert "X10 tutorial, eager  0.528   50154 (83.7%)   0.168      94.7%" in table[2]
    assert "X10 tutorial, X10    0.421   51888 (86.6%)   0.134      95.6%          18.6" in table[3]
    assert table[5].startswith("graph: 11.9 s, 5000 images/s in the last epoch, 2 traces, 1.5 s")
    assert table[6:] == ["X10 tutorial, eager: 59.0 s", "X10 tutorial, X10: 73.5 s"]
    assert "X10" not in format_table({"graph": history}, published=False)


def test_learning_rate_of_the_xception_notebook():
    schedule = Schedule(4e-4, start=1e-5, floor=1e-5, ramp=5, hold=0, decay=0.8)
    expected = [1e-5, 8.8e-5, 1.66e-4, 2.44e-4, 3.22e-4, 4e-4, 3.22e-4]
    expected += [2.596e-4, 2.0968e-4, 1.69744e-4, 1.377952e-4, 1.1223616e-4]
    assert [schedule.at(epoch) for epoch in range(12)] == pytest.approx(expected, rel=1e-12)


def test_learning_rate_holds_then_decays():
    schedule = Schedule(0.08, floor=0.001, hold=13, decay=0.95)
    assert [schedule.at(epoch) for epoch in (0, 12, 13)] == [0.08, 0.08, 0.08]
    assert schedule.at(14) == pytest.approx(0.079 * 0.95 + 0.001)
    assert Schedule(0.1).at(1000) == 0.1


def test_a_ramp_without_a_start_has_no_epoch_at_rate_0():
    rates = parse("--learning-rate", "0.6", "--schedule", "ramp=5").rates
    assert [rates.at(epoch) for epoch in range(7)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6]
    )
    assert Schedule(0.6, ramp=1).at(0) == 0.3
    assert Schedule(0.6, start=0.0, ramp=1).at(0) == 0  # as it was asked for


# Arguments


def parse(*words: str) -> TrainConfig:
    args = make_parser().parse_args(["train", "--data", "d", "--model", "lenet5", *words])
    return make_train_config(args)


def test_arguments():
    made = parse(
        *("--optimizer", "adam", "--schedule", "ramp=5,decay=0.8,start=1e-5,min=1e-5"),
        *("--learning-rate", "4e-4", "--image-size", "32x24", "--augment", "flip,saturation"),
    )
    assert made.rates == Schedule(4e-4, 1e-5, 1e-5, 5, 0, 0.8)
    assert (made.image_size, made.augment) == ((24, 32), ("flip", "saturation"))
    assert made.data == (os.path.abspath("d"),)
    assert parse().rates == Schedule(0.1)
    assert parse("--optimizer", "adam").rates == Schedule(0.001)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "alexnet"], "--model alexnet: allowed are lenet5, convnet, squeezenet, keras"),
        (["--mode", "fast"], "--mode fast: allowed are eager, graph, xla"),
        (["--epochs", "0"], "--epochs 0: must be 1 or more"),
        (["--batch-size", "-1"], "--batch-size -1: must be 1 or more"),
        (["--seed", "2147483648"], "--seed 2147483648: must be less than 2147483648"),
        (["--learning-rate", "0"], "--learning-rate 0: must be more than 0"),
        (["--learning-rate", "nan"], "--learning-rate nan: must be more than 0"),
        (["--augment", "flop"], "--augment flop: allowed are flip, saturation"),
        (["--optimizer", "lion"], "--optimizer lion: allowed are sgd, adam"),
        (["--image-size", "0"], "--image-size 0: allowed are 1 to 16384"),
        (["--image-size", "8x0"], "--image-size 0: allowed are 1 to 16384"),
        (["--image-size", "99999"], "--image-size 99999: allowed are 1 to 16384"),
        (["--schedule", "ramp=x"], "--schedule ramp=x: ramp must be a whole number"),
        (["--schedule", "rise=1"], "--schedule rise=1: 'rise=1': give each of ramp, hold"),
        (["--schedule", "start=1"], "--schedule start=1: decay is at most 1, start and min at"),
        (["--resume"], "--resume: needs --output"),
        (["--mode", "eager", "--steps-per-execution", "2"], "--steps-per-execution: mode eager"),
        (["--weights", "imagenet"], "--weights imagenet: only with --model keras:NAME"),
        (["--tpu", "none", "--zone", "z"], "--zone z: belongs to a TPU with a name, not none"),
        (["--output", ""], "--output '': is empty"),
        (["--compare", "eager,eager"], "--compare eager,eager: a mode is there twice"),
        (["--compare", "fast"], "--compare fast: allowed are eager, graph, xla"),
        (["--compare", "xla", "--json"], "--compare: trains anew and prints a table"),
        (["--dump-hlo", "d"], "--dump-hlo: mode graph is not compiled; use --mode xla"),
        (["--dump-hlo", ""], "--dump-hlo '': is empty; give a value or drop the flag"),
        (["--frobnicate"], "--frobnicate: tpufeed train has no such argument"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(capsys, words, message):
    assert main(["train", "--data", "d", "--model", "lenet5", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tpufeed train: error: {message}")
    assert error.count("\n") == 1


# The plan


def with_counts(dataset, **counts):
    """The manifest of a data set with these splits and record counts."""
    manifest = load_manifest(str(dataset))
    split = manifest.splits["train"]
    splits = {name: dataclasses.replace(split, records=n) for name, n in counts.items()}
    return dataclasses.replace(manifest, splits=splits)


def test_plan_counts_whole_training_steps_and_every_test_example(dataset):
    manifests = [with_counts(dataset, train=60000, test=10000)]
    plan = train.make_plan(config("d", batch_size=128), manifests, replicas=1)
    assert (plan.test_split, plan.steps, plan.test_steps) == ("test", 468, 79)
    plan = train.make_plan(config("d", "e", batch_size=128), manifests * 2, replicas=8)
    assert (plan.steps, plan.test_steps) == (117, 20)
    manifests = [with_counts(dataset, train=8, test=1, validation=9)]
    plan = train.make_plan(config("d"), manifests, replicas=1)
    assert (plan.test_split, plan.steps, plan.test_steps) == ("validation", 1, 2)
    assert (plan.shape, plan.labels) == ((24, 32, 3), ("ash", "birch", "cedar"))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"train": 9}, r"^d: no split validation or test, only train: ingest with --split train="),
        ({"test": 9}, "^d: no split train, only test: ingest with"),
        ({"train": 9, "test": 0}, "^d: split test is empty"),
        ({"train": 0, "test": 9}, "^d: split train is empty"),
        (
            {"train": 31, "test": 9},
            "^d: split train has 31 examples, a step takes 32: --batch-size 7",
        ),
    ],
)
def test_refused_plans(dataset, counts, message):
    with pytest.raises(ValueError, match=message):
        train.make_plan(config("d"), [with_counts(dataset, **counts)], replicas=4)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"train": 9}, "^e: no split validation, only train: ingest with --split train=0.9,val"),
        ({"train": 9, "test": 9}, "^e: no split validation, only test, train: ingest with"),
        ({"validation": 9}, "^e: no split train, only validation: ingest with"),
    ],
)
def test_every_folder_has_the_splits_that_are_used(dataset, counts, message):
    first = with_counts(dataset, train=9, validation=9)
    with pytest.raises(ValueError, match=message):
        train.make_plan(config("d", "e"), [first, with_counts(dataset, **counts)], replicas=1)
    # One of them may have no record in it.
    second = with_counts(dataset, train=9, validation=0)
    assert train.make_plan(config("d", "e"), [first, second], replicas=1).test_steps == 2


def test_pictures_of_varying_size_need_a_size(dataset):
    manifest = dataclasses.replace(load_manifest(str(dataset)), image_size=None)
    with pytest.raises(ValueError, match="^d: pictures of varying size; give --image-size"):
        train.make_plan(config("d"), [manifest], replicas=1)
    plan = train.make_plan(config("d", image_size=(10, 20)), [manifest], replicas=1)
    assert plan.shape == (10, 20, 3)


def test_moments_of_several_sets_are_those_of_their_union(dataset):
    values = np.random.default_rng(0).random((40, 3)) ** np.array([1, 2, 3])
    parts = [values[:7], values[7:]]
    manifests = [
        dataclasses.replace(
            with_counts(dataset, train=len(part)),
            channel_mean=tuple(part.mean(axis=0)),
            channel_std=tuple(part.std(axis=0)),
        )
        for part in parts
    ]
    mean, std = train.pool_moments(manifests)
    np.testing.assert_allclose(mean, values.mean(axis=0))
    np.testing.assert_allclose(std, values.std(axis=0))
    # 7/40 and 33/40 of 0.8 squared round to less than 0.8 squared.
    gray = [dataclasses.replace(m, channel_mean=(0.8,), channel_std=(0.0,)) for m in manifests]
    assert train.pool_moments(gray)[1] == (0.0,)
    assert train.pool_moments(manifests[:1]) == (
        manifests[0].channel_mean,
        manifests[0].channel_std,
    )


# Steps


def make_batches(count, size=8, shape=(16, 16, 3)):
    random = np.random.default_rng(0)
    for _ in range(count):
        image = random.integers(0, 256, (size, *shape), np.uint8)
        yield tf.constant(image), tf.constant(random.integers(0, 3, size))


def learn(mode, *, group=1, count=4, kind="CPU", **fields):
    keras.utils.set_random_seed(1)
    model = build_model("lenet5", input_shape=(16, 16, 3), classes=3, **fields)
    learner = Learner(
        model,
        keras.optimizers.SGD(0.1, momentum=0.9),
        strategy=tf.distribute.get_strategy(),
        mode=mode,
        kind=kind,
    )
    batches = list(make_batches(count))
    for start in range(0, count, group):
        learner.train_on(batches[start : start + group])
    return learner, learner.read_statistics()


def test_modes_learn_the_same_and_trace_once():
    eager, expected = learn("eager")
    assert (eager.traces, expected.total) == (0, 32)
    for mode, group, traces in (("graph", 1, 1), ("graph", 3, 2), ("xla", 1, 1), ("xla", 2, 1)):
        learner, statistics = learn(mode, group=group)
        assert learner.traces == traces, (mode, group)
        assert learner.compile_seconds > 0
        assert (statistics.correct, statistics.total) == (expected.correct, 32)
        assert statistics.loss == pytest.approx(expected.loss, abs=1e-5)
        for mine, other in zip(eager.model.weights, learner.model.weights, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-5)


def test_devices_that_run_behind_are_waited_for():
    learner, statistics = learn("graph", kind="GPU")
    assert statistics == learn("graph")[1]
    assert learner._last is None
    learner.train_on(list(make_batches(1)))
    assert learner._last is not None  # one call may still be running


def test_a_tpu_never_runs_op_by_op():
    with pytest.raises(ValueError, match="^--mode eager: a TPU runs compiled programs only; use"):
        learn("eager", kind="TPU")


def test_statistics_are_set_back_and_count_real_examples_only():
    learner, _ = learn("graph", count=1)
    assert learner.read_statistics() == Statistics(0.0, 0, 0)
    (image, label), *_ = make_batches(1)
    weights = tf.constant([1.0] * 5 + [0.0] * 3)
    learner.test_on((image, label, weights))
    logits = learner.model(image).numpy()[:5]
    right = (logits.argmax(axis=1) == label.numpy()[:5]).sum()
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(5), label.numpy()[:5]]
    statistics = learner.read_statistics()
    assert (statistics.correct, statistics.total) == (right, 5)
    assert statistics.loss == pytest.approx(losses.mean(), abs=1e-5)
    predicted, truth, weight = learner.predict_on((image, label, weights))
    assert predicted[:5].tolist() == logits.argmax(axis=1).tolist()
    assert truth.tolist() == label.numpy().tolist()
    assert weight.tolist() == weights.numpy().tolist()


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_a_step_of_sgd_is_the_gradients(mode):
    """A linear model, whose gradient is known: inputs times (softmax - truth), averaged."""
    model = keras.Sequential([keras.Input((2, 2, 1)), keras.layers.Flatten(), _zero_dense(3)])
    learner = Learner(
        model,
        keras.optimizers.SGD(0.5),
        strategy=tf.distribute.get_strategy(),
        mode=mode,
        kind="CPU",
    )
    random = np.random.default_rng(0)
    image, label = random.integers(0, 5, (6, 2, 2, 1), np.uint8), random.integers(0, 3, 6)
    learner.train_on([(tf.constant(image), tf.constant(label))])
    slope = image.reshape(6, 4).T @ (np.full((6, 3), 1 / 3) - np.eye(3)[label]) / 6
    np.testing.assert_allclose(model.weights[0].numpy(), -0.5 * slope, atol=1e-6)
    assert learner.read_statistics().loss == pytest.approx(np.log(3), abs=1e-6)


def _zero_dense(units):
    return keras.layers.Dense(units, kernel_initializer="zeros")


def test_layers_know_training_from_testing():
    """Batch normalization moves its averages in training and uses them, unmoved, in testing."""
    model = build_model("squeezenet", input_shape=(16, 16, 3), classes=3)
    learner = Learner(
        model,
        keras.optimizers.SGD(0.0),
        strategy=tf.distribute.get_strategy(),
        mode="graph",
        kind="CPU",
    )

    def averages():
        weights = (w.numpy() for w in model.non_trainable_weights if "moving" in w.path)
        return np.concatenate([weight.ravel() for weight in weights])

    (image, label), *_ = make_batches(1)
    start = averages()
    learner.test_on((image, label, tf.ones(8)))
    assert np.array_equal(averages(), start)
    tested = learner.read_statistics().loss
    learner.train_on([(image, label)])
    assert not np.array_equal(averages(), start)
    assert learner.read_statistics().loss != pytest.approx(tested, abs=1e-3)


def test_mixed_bfloat16_learns_nearly_the_same():
    _, expected = learn("graph", count=2)
    learner, statistics = learn("graph", count=2, mixed_bfloat16=True)
    assert statistics.loss == pytest.approx(expected.loss, abs=0.02)
    assert {weight.dtype for weight in learner.model.weights} == {"float32"}


MIRRORED = """
import json, sys
import numpy as np
from pipeline.devices import choose_strategy, import_tensorflow
tf = import_tensorflow()
import keras
from pipeline.config import TrainConfig
from pipeline.dataset import open_dataset
from pipeline.learner import Learner
from pipeline.models import build_model
from pipeline.train import train

cpu = tf.config.list_physical_devices("CPU")[0]
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
random = np.random.default_rng(0)
images = random.integers(0, 256, (16, 16, 16, 3), np.uint8)
labels = random.integers(0, 3, 16)

def learn(strategy, mode, batch):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build_model("lenet5", input_shape=(16, 16, 3), classes=3)
        optimizer = keras.optimizers.SGD(0.1)
        learner = Learner(model, optimizer, strategy=strategy, mode=mode, kind="CPU")
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch)
    learner.train_on([next(iter(strategy.distribute_datasets_from_function(lambda _: data)))])
    return [weight.numpy() for weight in model.weights], learner.read_statistics()

def averages(model):
    return [
        [part.numpy() for part in placement.strategy.experimental_local_results(w.value)]
        for w in model.non_trainable_variables if "moving" in w.path
    ]

placement = choose_strategy("none")
result = {"placement": [placement.name, placement.replicas, placement.kind]}
weights, statistics = learn(tf.distribute.get_strategy(), "graph", 16)
for mode in ("eager", "graph", "xla"):
    mine, counted = learn(placement.strategy, mode, 8)
    off = max(float(abs(a - b).max()) for a, b in zip(weights, mine))
    result[mode] = [off, counted.correct - statistics.correct, counted.total]
with placement.strategy.scope():
    model = build_model("squeezenet", input_shape=(16, 16, 3), classes=3)
    learner = Learner(
        model, keras.optimizers.SGD(0.1), strategy=placement.strategy, mode="graph", kind="CPU"
    )
data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(8)
both = placement.strategy.distribute_datasets_from_function(lambda _: data)
learner.train_on([next(iter(both))])
apart = averages(model)
learner.even_out()
result["apart"] = max(float(abs(a - b).max()) for a, b in apart)
result["off the mean"] = max(
    float(abs(now - (a + b) / 2).max())
    for (a, b), parts in zip(apart, averages(model)) for now in parts
)
config = TrainConfig(
    data=(sys.argv[1],), model="lenet5", optimizer="adam", epochs=1, batch_size=4, tpu="none",
    output=sys.argv[2],
)
history = train(config)
epoch = history.epochs[0]
result["run"] = [epoch.training.total, epoch.test.total, epoch.test.correct, history.replicas]
result["confusion"] = history.confusion
run = sys.argv[2] + "-squeezenet"
config = TrainConfig(
    data=(sys.argv[1],), model="squeezenet", epochs=1, batch_size=4, tpu="none", output=run
)
history = train(config)
saved = keras.models.load_model(run + "/model.keras")
tests = open_dataset(sys.argv[1], split="validation", batch_size=4, training=False)
losses = [
    tf.nn.sparse_softmax_cross_entropy_with_logits(label, saved(image)) * weight
    for image, label, weight in tests
]
result["saved"] = float(tf.reduce_sum(losses)) / history.epochs[0].test.total
result["tested"] = history.epochs[0].test.loss
print(json.dumps(result))
"""


def test_two_replicas_are_one_with_twice_the_batch(dataset, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MIRRORED, str(dataset), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["placement"] == ["MirroredStrategy", 2, "CPU"]
    for mode in ("eager", "graph", "xla"):
        off, correct, total = result[mode]
        assert off < 1e-5, mode
        assert (correct, total) == (0, 16)
    assert result["apart"] > 1e-3 and result["off the mean"] < 1e-6
    splits = load_manifest(str(dataset)).splits
    seen, tested, correct, replicas = result["run"]
    assert seen == splits["train"].records // 8 * 8
    assert tested == splits["validation"].records == np.sum(result["confusion"])
    assert correct == np.trace(result["confusion"])
    assert replicas == 2
    assert result["saved"] == pytest.approx(result["tested"], abs=1e-4)


# Feeding


def one_epoch(made: TrainConfig, *, seed=0):
    placement = choose_strategy("none")
    plan = train.make_plan(made, train.check_data(made.data), replicas=1)
    batches = train._training_batches(made, plan, placement, seed=seed)
    return [next(batches) for _ in range(plan.steps)]


def pairs(batches) -> dict[bytes, int]:
    return {
        image.tobytes(): int(label)
        for images, labels in batches
        for image, label in zip(images.numpy(), labels.numpy(), strict=True)
    }


def test_permuted_labels_are_the_same_labels_on_other_pictures(dataset):
    true = pairs(one_epoch(config(dataset, batch_size=1)))
    permuted = pairs(one_epoch(config(dataset, batch_size=16, permute_labels=True)))
    assert set(permuted) <= set(true)
    assert sum(true[image] != label for image, label in permuted.items()) > len(permuted) / 4


def test_a_tpu_is_fed_bfloat16_that_holds_every_level():
    levels = tf.range(256, dtype=tf.int32)
    fed = train._for_device(tf.cast(levels, tf.uint8), "TPU")
    assert fed.dtype == tf.bfloat16
    assert tf.cast(fed, tf.int32).numpy().tolist() == list(range(256))
    assert train._for_device(tf.cast(levels, tf.uint8), "GPU").dtype == tf.uint8


def at(kind: str) -> Placement:
    """This CPU, fed as a device of another kind is."""
    return Placement(tf.distribute.get_strategy(), kind, "")


@pytest.mark.parametrize("scaling", ["unit", "standard"])
def test_a_tpu_is_trained_on_the_same_levels(dataset, monkeypatch, scaling):
    """The whole training, on this CPU, fed as a TPU and as a CPU is."""

    def outcome(kind):
        monkeypatch.setattr(train, "choose_strategy", lambda *args, **kwargs: at(kind))
        # So slow that the order of the batches, which is not fixed, does not matter.
        made = config(dataset, learning_rate=1e-9, scaling=scaling, augment=("flip",))
        return train.train(made).epochs[0]

    tpu, cpu = outcome("TPU"), outcome("CPU")
    assert (tpu.training.total, tpu.test.total) == (cpu.training.total, cpu.test.total)
    assert tpu.test.correct == cpu.test.correct
    assert tpu.test.loss == pytest.approx(cpu.test.loss, abs=1e-5)


def test_what_a_tpu_is_fed(dataset):
    made = config(dataset, batch_size=1)
    plan = train.make_plan(made, train.check_data(made.data), replicas=1)
    batches = train._training_batches(made, plan, at("TPU"), seed=0)
    seen = [next(batches) for _ in range(plan.steps)]
    assert {image.dtype for image, _ in seen} == {tf.bfloat16}
    levels = [(tf.cast(image, tf.uint8), label) for image, label in seen]
    assert pairs(levels) == pairs(one_epoch(made))
    for tests in (train._test_batches(made, plan, at(kind)) for kind in ("TPU", "CPU")):
        assert hasattr(iter(tests), "_last_hold")  # ends on time


class Hosts:
    """What tf.distribute asks of several hosts, one replica each: a data set for every one."""

    num_replicas_in_sync = 3

    def distribute_datasets_from_function(self, function):
        contexts = (tf.distribute.InputContext(3, number, 3) for number in range(3))
        return [function(context) for context in contexts]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_three_hosts_test_every_example_once(dataset, batch_size):
    made = config(dataset, batch_size=batch_size)
    plan = train.make_plan(made, train.check_data(made.data), replicas=3)
    seen = []
    for host in train._test_batches(made, plan, Placement(Hosts(), "CPU", "")):
        batches = list(host)
        assert len(batches) == plan.test_steps
        for image, _, weight in batches:
            assert len(image) == batch_size
            seen += [one.tobytes() for one in image.numpy()[weight.numpy() > 0]]
    tests = open_dataset(dataset, split="validation", training=False, batch_size=1)
    assert sorted(seen) == sorted(image.numpy().tobytes() for image, *_ in tests)


def test_augmentation():
    assert train.make_augment(()) is None
    image = tf.constant(np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8))
    flip, vary = train.make_augment(("flip",)), train.make_augment(("saturation",))
    seen = {flip(image, tf.constant([7, n])).numpy().tobytes() for n in range(20)}
    assert seen == {image.numpy().tobytes(), image.numpy()[:, ::-1].tobytes()}
    varied = [vary(image, tf.constant([7, n])).numpy() for n in range(20)]
    spread = [int(np.ptp(picture.astype(int), axis=-1).sum()) for picture in varied]
    before = int(np.ptp(image.numpy().astype(int), axis=-1).sum())
    assert min(spread) < 0.5 * before and max(spread) > before
    assert np.array_equal(vary(image, tf.constant([7, 3])), varied[3])
    gray = image[..., :1]
    assert np.array_equal(vary(gray, tf.constant([7, 3])), gray)


# Runs


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """A run of two epochs, its history, and what it reported."""
    folder = tmp_path_factory.mktemp("run") / "run"
    notes, reports = [], []
    made = config(
        dataset, epochs=2, optimizer="adam", seed=3, output=str(folder), augment=("flip",)
    )
    history = train.train(made, report=reports.append, note=notes.append)
    return folder, history, reports, notes


def test_run_reports_each_epoch(run, dataset):
    _, history, reports, notes = run
    splits = load_manifest(str(dataset)).splits
    assert tuple(reports) == history.epochs
    for number, epoch in enumerate(history.epochs):
        assert epoch.epoch == number
        assert epoch.training.total == splits["train"].records // 8 * 8
        assert epoch.test.total == splits["validation"].records
        assert 0 <= epoch.input_share <= 1
        assert epoch.learning_rate == 0.001
    assert (history.traces, history.replicas, history.device) == (2, 1, "CPU")
    assert re.match(
        r"lenet5: [\d,]+ parameters; mode graph on CPU, 1 replica\(s\) of batch 8, ", notes[0]
    )
    assert re.search(r"input: \d+ % of a step of .*input-bound.*; 2 traces, ", notes[1])


def test_run_keeps_its_history(run):
    folder, history, *_ = run
    document = json.loads((folder / "history.json").read_text())
    assert document == json.loads(history.to_json())
    assert document["config"]["optimizer"] == "adam"
    assert document["epochs"][1]["test"]["total"] == history.epochs[1].test.total
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("history.json", "checkpoints", "logs"),
        *("model.keras", "confusion.png", "predictions.png"),
    }


def test_confusion_is_that_of_the_last_test(run):
    folder, history, *_ = run
    last = history.epochs[-1].test
    assert np.sum(history.confusion) == last.total
    assert np.trace(history.confusion) == last.correct
    assert history.macro_f1 == pytest.approx(figures.f1_scores(history.confusion).mean())
    for name in ("confusion.png", "predictions.png"):
        with Image.open(folder / name) as picture:
            picture.load()
            assert picture.format == "PNG"


def test_saved_model_predicts_the_same(run, dataset):
    folder, history, *_ = run
    model = keras.models.load_model(folder / "model.keras")
    made = config(dataset)
    plan = train.make_plan(made, train.check_data(made.data), replicas=1)
    tests = train._test_batches(made, plan, choose_strategy("none"))
    confusion = np.zeros((3, 3), int)
    for image, label, weight in tests.take(plan.test_steps):
        predicted = model(image).numpy().argmax(axis=1)
        np.add.at(confusion, (label[weight > 0].numpy(), predicted[weight > 0]), 1)
    assert confusion.tolist() == [list(row) for row in history.confusion]


def test_tensorboard_logs(run):
    folder, history, *_ = run
    found = {}
    for path in folder.glob("logs/*/events*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                found[path.parent.name, value.tag, event.step] = value.simple_value
    assert len(found) == 2 * 7
    loss = history.epochs[1].test.loss
    assert found["test", "loss", 1] == pytest.approx(loss)
    assert found["train", "learning_rate", 0] == pytest.approx(0.001)


def copy_run(run, tmp_path) -> str:
    shutil.copytree(run[0], tmp_path / "run")
    return str(tmp_path / "run")


def test_resume_goes_on_with_weights_optimizer_and_history(run, dataset, tmp_path, capsys):
    folder = copy_run(run, tmp_path)
    words = [
        "--data",
        str(dataset),
        "--model",
        "lenet5",
        "--optimizer",
        "adam",
        "--batch-size",
        "8",
    ]
    words += ["--epochs", "3", "--tpu", "none", "--output", folder, "--resume", "--json"]
    assert main(["train", *words]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    assert json.loads(line)["epoch"] == 2
    assert "; resumed after 2 of 3 epochs" in captured.err
    document = json.loads(Path(folder, "history.json").read_text())
    assert document["epochs"][:2] == json.loads(run[1].to_json())["epochs"]
    latest = tf.train.latest_checkpoint(f"{folder}/checkpoints")
    names = [name for name, _ in tf.train.list_variables(latest) if "optimizer" in name]
    steps = {int(v) for n in names if (v := tf.train.load_variable(latest, n)).dtype == np.int64}
    assert load_manifest(str(dataset)).splits["train"].records // 8 * 3 in steps


def test_a_resumed_run_sees_another_order(run, dataset, tmp_path, monkeypatch):
    seeds = []

    def spy(*args, **options):
        if options.get("training", True):
            seeds.append(options["seed"])
        return open_dataset(*args, **options)

    monkeypatch.setattr(train, "open_dataset", spy)
    for folder in (copy_run(run, tmp_path), None):
        fields = {"optimizer": "adam", "seed": 3, "output": folder, "resume": bool(folder)}
        train.train(config(dataset, epochs=3 if folder else 1, **fields))
    resumed, fresh = seeds
    assert fresh == 3 and resumed != fresh


def test_a_run_stopped_between_history_and_checkpoint(run, dataset, tmp_path):
    """Its last epoch is trained again, from the weights before it."""
    folder = Path(copy_run(run, tmp_path))
    state = folder / "checkpoints" / "checkpoint"
    state.write_text('model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "ckpt-1"\n')
    for path in folder.glob("checkpoints/ckpt-2.*"):
        path.unlink()
    made = config(dataset, epochs=2, optimizer="adam", output=str(folder), resume=True)
    reports = []
    history = train.train(made, report=reports.append)
    assert [epoch.epoch for epoch in reports] == [1]
    assert history.epochs[0] == run[1].epochs[0] and len(history.epochs) == 2


def test_a_checkpoint_beyond_the_history_is_refused(run, dataset, tmp_path):
    folder = copy_run(run, tmp_path)
    path = Path(folder, "history.json")
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "epochs": document["epochs"][:1]}))
    made = config(dataset, epochs=3, optimizer="adam", output=folder, resume=True)
    with pytest.raises(ValueError, match="history.json: has 1 epochs, .*ckpt-2 has 2: copy the ru"):
        train.train(made)


def test_history_is_there_before_its_checkpoint(run, dataset, tmp_path):
    """Stopped between the two, a run must not have trained an epoch that it does not know of."""
    folder = copy_run(run, tmp_path)
    made = config(dataset, epochs=3, optimizer="adam", output=folder, resume=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(OSError, match="checkpoints: cannot be written"):
            train.train(made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(json.loads(Path(folder, "history.json").read_text())["epochs"]) == 3
    assert tf.train.latest_checkpoint(f"{folder}/checkpoints").endswith("ckpt-2")


def stop_before_a_checkpoint(made, *, after: int) -> None:
    """Trains, and is interrupted before the first epoch's checkpoint, 0 or 1 epochs in history."""

    def interrupt(self, history):
        if after:
            self.save_text("history.json", history.to_json())
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "save_epoch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train.train(dataclasses.replace(made, resume=False))


@pytest.mark.parametrize("after", [0, 1])
def test_a_run_stopped_before_its_first_checkpoint_begins_anew(dataset, tmp_path, after):
    made = config(dataset, output=str(tmp_path / "run"), resume=True)
    stop_before_a_checkpoint(made, after=after)
    path = tmp_path / "run" / "history.json"
    assert [p.name for p in path.parent.iterdir()] == ["history.json"]
    assert len(json.loads(path.read_text())["epochs"]) == after
    for fields, message in (
        ({"resume": False}, "run: is not empty: give a new folder as --output, or --resume"),
        ({"model": "convnet"}, "history.json: model was lenet5, is now convnet: a run keeps its"),
    ):
        with pytest.raises(ValueError, match=message):
            train.train(dataclasses.replace(made, **fields))
    reports = []
    history = train.train(made, report=reports.append)
    assert [epoch.epoch for epoch in reports] == [0]
    assert history.epochs == tuple(reports)
    assert json.loads(path.read_text())["confusion"]


def test_a_history_that_was_never_whole_is_no_run(dataset, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".history.json.tmp").write_text("{")
    assert len(train.train(config(dataset, output=str(folder))).epochs) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "history.json: has 2 epochs, and there is no checkpoint: copy the run again, or tra"),
        ({"epochs": 1}, "history.json: has 1 epochs, and there is no checkpoint: copy the run a"),
    ],
)
def test_a_run_whose_checkpoints_were_lost_is_refused(run, dataset, tmp_path, change, message):
    folder = copy_run(run, tmp_path)
    shutil.rmtree(f"{folder}/checkpoints")
    path = Path(folder, "history.json")
    document = json.loads(path.read_text())
    text = json.dumps({**document, "epochs": document["epochs"][: change.get("epochs", 2)]})
    path.write_text(text)
    made = config(dataset, epochs=3, optimizer="adam", output=folder, resume=True)
    with pytest.raises(ValueError, match=message):
        train.train(made)
    assert path.read_text() == text


def test_fewer_epochs_than_are_done_are_refused(run, dataset, tmp_path):
    folder = copy_run(run, tmp_path)
    before = Path(folder, "history.json").read_text()
    made = config(dataset, epochs=1, optimizer="adam", output=folder, resume=True)
    with pytest.raises(ValueError, match="^--epochs 1: .*/run has 2 already: give --epochs 2 or"):
        train.train(made)
    assert Path(folder, "history.json").read_text() == before


def test_a_finished_run_is_not_trained_on(run, dataset, tmp_path):
    folder = copy_run(run, tmp_path)
    made = config(dataset, epochs=2, optimizer="adam", output=folder, resume=True)
    reports = []
    history = train.train(made, report=reports.append)
    assert reports == []
    assert history.epochs == run[1].epochs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resume": False}, "run: is not empty: give a new folder as --output, or --resume"),
        ({"model": "convnet"}, "history.json: model was lenet5, is now convnet: a run keeps its"),
        ({"optimizer": "sgd"}, "history.json: optimizer was adam, is now sgd: a run keeps its"),
    ],
)
def test_refused_resumes(run, dataset, fields, message):
    fields = {"resume": True, "optimizer": "adam", "epochs": 3, "output": str(run[0]), **fields}
    with pytest.raises(ValueError, match=message):
        train.train(config(dataset, **fields))


def test_resume_of_nothing_or_of_a_broken_run(run, dataset, tmp_path):
    made = config(dataset, output=str(tmp_path / "none"), resume=True)
    with pytest.raises(ValueError, match="none: no checkpoint to resume from: drop --resume"):
        train.train(made)
    folder = copy_run(run, tmp_path)
    made = config(dataset, optimizer="adam", epochs=3, output=folder, resume=True)
    for data in Path(folder).glob("checkpoints/*.data*"):
        data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ValueError, match="checkpoints/ckpt-2: cannot be restored: "):
        train.train(made)
    Path(folder, "history.json").write_text("{}")
    with pytest.raises(ValueError, match="history.json: not as tpufeed train writes it"):
        train.train(made)


def test_full_disk_loses_no_checkpoint(run, dataset, tmp_path):
    folder = copy_run(run, tmp_path)
    made = config(dataset, optimizer="adam", epochs=3, output=folder, resume=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"run/checkpoints: cannot be written: .*make room or gi"):
            train.train(made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(train.train(made).epochs) == 3


def test_a_folder_that_cannot_be_made(dataset, tmp_path):
    (tmp_path / "file").touch()
    made = config(dataset, output=str(tmp_path / "file" / "run"))
    with pytest.raises(OSError, match="file/run/history.json: cannot be written: "):
        train.train(made)


# Errors


def command(*words, capsys) -> str:
    assert main(["train", "--model", "lenet5", "--tpu", "none", "--batch-size", "8", *words]) == 1
    error = capsys.readouterr().err
    return error.splitlines()[-1]


def test_a_data_set_that_is_not_whole_is_refused(dataset, tmp_path, capsys):
    copy = shutil.copytree(dataset, tmp_path / "records")
    shard = next(copy.glob("train-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    error = command("--data", str(copy), capsys=capsys)
    assert error.startswith(f"tpufeed train: error: {copy}: not whole: {shard.name}: ")
    (copy / "dataset.json").unlink()
    error = command("--data", str(copy), capsys=capsys)
    assert "not whole: dataset.json: missing" in error


def test_a_damaged_record_stops_the_training(dataset, tmp_path, capsys):
    copy = shutil.copytree(dataset, tmp_path / "records")
    shard = next(copy.glob("train-*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    error = command("--data", str(copy), capsys=capsys)
    assert "cannot be read" in error and "run tpufeed verify" in error
    assert shard.name in error


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda features: features.pop("class"), "no feature 'class' of type int64"),
        (lambda features: features.pop("image"), "no feature 'image' of type bytes"),
        (lambda features: features.update({"class": [1.0]}), "no feature 'class' of type int64"),
        (lambda features: features.update({"class": [3]}), "class is none of the 3 that"),
    ],
)
def test_a_wrong_record_names_field_and_file_in_training(
    dataset, tmp_path, capsys, change, problem
):
    copy = shutil.copytree(dataset, tmp_path / "records")
    shard = next(copy.glob("train-*"))
    records = []
    for data in tf.data.TFRecordDataset(str(shard)).as_numpy_iterator():
        features = {name: values for name, (_, values) in parse_example(data).items()}
        change(features)
        records.append(encode_example(features))
    with tf.io.TFRecordWriter(str(shard)) as writer:
        for data in records:
            writer.write(data)
    contents = load_manifest(str(copy))
    split = contents.splits["train"]
    shards = tuple(
        dataclasses.replace(s, bytes=shard.stat().st_size) if s.name == shard.name else s
        for s in split.shards
    )
    splits = {**contents.splits, "train": dataclasses.replace(split, shards=shards)}
    text = dump_manifest(dataclasses.replace(contents, splits=splits))
    (copy / "dataset.json").write_bytes(text)
    error = command("--data", str(copy), capsys=capsys)
    assert f"{shard}: a record" in error and problem in error
    assert error.endswith("run tpufeed verify on its folder")


def test_two_sets_that_differ_are_refused(dataset, pictures, tmp_path, capsys):
    other = tmp_path / "other"
    flags = ["--image-size", "32x32", "--split", "train=0.7,validation=0.3", "--shards", "2"]
    assert ingest(f"{pictures}/*/*", other, *flags) == 0
    capsys.readouterr()
    error = command("--data", str(dataset), "--data", str(other), capsys=capsys)
    assert "image_size" in error and str(other) in error


def test_what_cannot_be_read_leaves_no_folder(dataset, tmp_path, capsys):
    """Neither a folder without the split to test on, nor one with the keys of another."""
    output = tmp_path / "run"
    copy = shutil.copytree(dataset, tmp_path / "copy")
    error = command(
        *("--data", str(dataset), "--data", str(copy), "--output", str(output)), capsys=capsys
    )
    assert f"stands in {dataset} and in {copy} (60 such keys): its record would count" in error
    assert not output.exists()
    manifest = load_manifest(str(copy))
    splits = {"train": manifest.splits["train"]}
    (copy / "dataset.json").write_bytes(dump_manifest(dataclasses.replace(manifest, splits=splits)))
    for path in [*copy.glob("validation-*"), *copy.glob("index/validation-*")]:
        path.unlink()
    error = command(
        *("--data", str(dataset), "--data", str(copy), "--output", str(output)),
        *("--model", "keras:Absent"),
        capsys=capsys,
    )
    assert f"error: {copy}: no split validation, only train: ingest with --split" in error
    assert not output.exists()


def test_a_loss_that_is_no_number_ends_the_run(dataset, capsys):
    error = command("--data", str(dataset), "--learning-rate", "1e30", capsys=capsys)
    assert "epoch 0: the training loss is " in error
    assert "lower --learning-rate 1e+30" in error
    tested = dataclasses.replace(FIRST, test=Statistics(float("inf"), 1, 2))
    with pytest.raises(RuntimeError, match="^epoch 0: the test loss is inf; lower --learning-rate"):
        train._check_loss(tested)


@pytest.mark.parametrize(
    ("tpu", "message"),
    [
        ("local", "--tpu local: this TPU cannot be used: NotFoundError: "),
        ("nonsense", "records: a local path, which the TPU of --tpu nonsense cannot reach: put it"),
    ],
)
def test_a_tpu_that_was_asked_for_is_never_replaced(dataset, capsys, tpu, message):
    error = command("--data", str(dataset), "--tpu", tpu, capsys=capsys)
    assert message in error


def test_too_large_a_batch(dataset, capsys):
    error = command("--data", str(dataset), "--batch-size", "4096", capsys=capsys)
    assert "examples, a step takes 4096: --batch-size" in error


def test_what_xla_cannot_compile_is_one_line(dataset, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import keras\n"
        "import tensorflow as tf\n"
        "class Call(keras.layers.Layer):\n"
        "    def call(self, x):\n"
        "        return tf.ensure_shape(tf.py_function(lambda x: x, [x], x.dtype), x.shape)\n"
        "def make(shape, classes):\n"
        "    layers = [keras.Input(shape), Call(), keras.layers.Flatten()]\n"
        "    return keras.Sequential([*layers, keras.layers.Dense(classes)])\n"
    )
    model = ["--model", f"{tmp_path}/mine.py:make", "--mode", "xla"]
    error = command("--data", str(dataset), *model, capsys=capsys)
    assert "mine.py:make: cannot be run in mode xla: " in error
    assert "PyFunc" in error and error.endswith("use --mode graph")


def test_the_compiled_step_can_be_read(dataset, tmp_path, capsys):
    folder = tmp_path / "hlo"
    words = ["--data", str(dataset), "--model", "lenet5", "--batch-size", "8", "--epochs", "1"]
    words += ["--mode", "xla", "--tpu", "none", "--dump-hlo", str(folder)]
    assert main(["train", *words]) == 0
    assert "; 2 traces, " in capsys.readouterr().err  # as without the dump
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(texts) == {"train_step.hlo.txt", "train_step.optimized_hlo.txt"}
    for text in texts.values():
        assert text.startswith("HloModule ")
        assert "u8[8,24,32,3]" in text and "convolution" in text
    (tmp_path / "file").touch()
    error = command(*words[:2], *words[8:10], "--dump-hlo", f"{tmp_path}/file/d", capsys=capsys)
    assert "file/d/train_step.hlo.txt: cannot be written: " in error
    assert error.endswith("give another folder as --dump-hlo")


def test_a_step_that_is_no_single_program_has_no_hlo():
    with pytest.raises(ValueError, match="^--dump-hlo: the step is not one program on 1 CPU repli"):
        learn("graph", count=1)[0].compile_to_hlo(list(make_batches(1)))


def test_compare_runs_each_mode(dataset, tmp_path, capsys):
    words = ["--data", str(dataset), "--model", "lenet5", "--batch-size", "16", "--epochs", "1"]
    words += ["--compare", "eager,graph", "--tpu", "none", "--output", str(tmp_path / "runs")]
    assert main(["train", *words]) == 0
    table = capsys.readouterr().out
    assert re.search(r"^0     eager  .*\n0     graph  .*\n0     X10 tutorial, eager", table, re.M)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"eager", "graph"}


# Figures


def test_f1_scores():
    matrix = [[8, 2, 0], [1, 9, 0], [0, 0, 0]]
    assert figures.f1_scores(matrix).tolist() == pytest.approx([16 / 19, 18 / 21, 0.0])


@pytest.mark.parametrize("count", [2, 40])
def test_figures_of_few_and_many_classes(count):
    labels = [f"class number {n}, with a long name" for n in range(count)]
    picture = figures.draw_confusion(np.eye(count, dtype=int) * 7, labels=labels)
    assert picture.mode == "RGB" and picture.width > 200
    pixels = np.zeros((3, 10, 20, 1 if count == 2 else 3), np.uint8)
    grid = figures.draw_predictions(pixels, truth=[0, 1, 0], predicted=[0, 0, 1], labels=labels)
    assert grid.size == (312, 356)
    reds = (np.asarray(grid)[..., 0] > 150) & (np.asarray(grid)[..., 1] < 80)
    assert reds.any()


def test_an_interrupt_is_one_line_and_the_run_can_be_resumed(dataset, tmp_path):
    words = ["train", "--data", str(dataset), "--model", "lenet5", "--batch-size", "8"]
    words += ["--tpu", "none", "--output", str(tmp_path / "run")]
    process = subprocess.Popen(
        [*INTERRUPTIBLE, sys.executable, "-m", "pipeline", *words, "--epochs", "100000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        epochs = [
            process.stdout.readline() for _ in range(2)
        ]  # the first one's checkpoint is there
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert epochs[1].startswith("[Epoch 1] ")
    assert process.returncode == 1
    assert err.splitlines()[-1] == (
        "tpufeed train: interrupted: --resume goes on after the last checkpoint, if there is one"
    )
    assert "Traceback" not in err
    done = len(json.loads((tmp_path / "run" / "history.json").read_text())["epochs"])
    assert main([*words, "--epochs", str(done + 1), "--resume"]) == 0


def test_a_reader_that_stops_reading_ends_the_training_without_a_word(dataset):
    """As `| head` does, here before the first line, so that no timing decides."""
    read, write = os.pipe()
    os.close(read)
    words = ["train", "--data", str(dataset), "--model", "lenet5", "--batch-size", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *words, "--tpu", "none"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("lenet5: ")  # the line that training begins with
