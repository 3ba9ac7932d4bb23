"""A model, its optimizer and its statistics on the devices of a strategy; one step at a time.

The statistics stay on the devices and are read once a report: a reading is a wait for the device.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Over the examples since the last reading: the mean loss, the correct ones, and all."""

    loss: float
    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Share of the examples that were correct, 0 to 1."""
        return self.correct / self.total if self.total else 0.0


class Learner:
    """Trains and tests a model, op by op, as a graph, or compiled by XLA.

    Attributes:
      model: from pixels to logits.
      optimizer: Keras's.
      traces: how often a step was traced, and so compiled anew.
      compile_seconds: what the calls took in which that happened.
    """

    def __init__(self, model: Any, optimizer: Any, *, strategy: Any, mode: str, kind: str):
        """Makes the step functions; to be called in the strategy's scope.

        Args:
          model: from pixels, [batch, height, width, channels], to logits, [batch, classes].
          optimizer: Keras's, without state yet.
          strategy: under which the model was made.
          mode: "eager", "graph" or "xla".
          kind: of the strategy's devices.

        Raises:
          ValueError: mode eager on a TPU.
        """
        if (mode, kind) == ("eager", "TPU"):
            raise ValueError("--mode eager: a TPU runs compiled programs only; use --mode xla")
        self.model, self.optimizer = model, optimizer
        self.traces, self.compile_seconds = 0, 0.0
        self._strategy, self._kind = strategy, kind
        optimizer.build(model.trainable_variables)
        self._loss, self._correct, self._total = map(_make_sum, (tf.float32, tf.int64, tf.int64))
        self._last: Any = None
        # XLA compiles no exchange between devices, so with replicas the gradients are compiled and
        # the update is not. On a TPU all is compiled by XLA anyway.
        alone = not tf.distribute.has_strategy()
        xla = mode == "xla" and kind != "TPU"
        self._one_program = xla and alone
        self._differentiate: Callable[..., Any] = self._differentiate_plainly
        if xla and not alone:
            self._differentiate = tf.function(self._differentiate_plainly, jit_compile=True)
        jit = {"jit_compile": True} if self._one_program else {}
        wrap = (lambda function: function) if mode == "eager" else tf.function(**jit)
        self._train, self._test = wrap(self._train_plainly), wrap(self._test_plainly)
        self._predict = wrap(self._predict_plainly)

    def train_on(self, batches: Sequence[Any]) -> None:
        """Takes a step on each batch, all in one call.

        Args:
          batches: (image, label), one of each replica together where there are several.
        """
        token = self._timed(self._train, tuple(batches))
        if self._kind != "CPU":
            # Devices run behind. Were nobody to wait, all the time would seem to go into fetching
            # the next batch; one call is left running, so that the device never idles.
            self._wait_for_last()
            self._last = token

    def compile_to_hlo(self, batches: Sequence[Any]) -> dict[str, str]:
        """Returns the training step as text in HLO, XLA's own language, without taking it.

        Args:
          batches: as for train_on; only their shapes and types count.

        Returns:
          "hlo": as it goes into the compiler; "optimized_hlo": as it comes out.

        Raises:
          ValueError: the step is not one program of XLA's on one device.
        """
        if not self._one_program:
            raise ValueError(
                f"--dump-hlo: the step is not one program on {self._strategy.num_replicas_in_sync} "
                f"{self._kind} replica(s); use --mode xla on one CPU or GPU"
            )
        traces = self.traces
        program = tf.function(self._train_plainly, jit_compile=True)
        dump = program.experimental_get_compiler_ir(tuple(batches))
        texts = {stage: dump(stage=stage) for stage in ("hlo", "optimized_hlo")}
        self.traces = traces  # of the steps that are taken
        return texts

    def test_on(self, batch: Any) -> None:
        """Adds a batch to the statistics: (image, label, weights), weight 0 for padding."""
        self._timed(self._test, batch)

    def predict_on(self, batch: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the predicted class, the label and the weight of a batch, each [examples]."""
        predicted = self._timed(self._predict, batch)
        parts = [self._strategy.experimental_local_results(x) for x in (predicted, *batch[1:])]
        classes, labels, weights = (np.concatenate([x.numpy() for x in part]) for part in parts)
        return classes, labels, weights

    def read_statistics(self) -> Statistics:
        """Returns the statistics and sets them to zero; waits for the devices."""
        self._wait_for_last()
        total = int(self._total.numpy())
        loss, correct = float(self._loss.numpy()), int(self._correct.numpy())
        for variable in (self._loss, self._correct, self._total):
            variable.assign(tf.zeros([], variable.dtype))
        return Statistics(loss / total if total else 0.0, correct, total)

    def even_out(self) -> None:
        """Sets to their mean what each replica gathers for itself, as batch normalization does.

        Else each would be tested with averages of its own, and the first one's alone be saved.
        """
        if self._strategy.num_replicas_in_sync == 1:
            return
        for variable in self.model.non_trainable_variables:
            if "float" in variable.dtype:
                parts = self._strategy.experimental_local_results(variable.value)
                variable.assign(np.mean([part.numpy() for part in parts], axis=0))

    def _timed(self, function: Callable[..., Any], argument: Any) -> Any:
        before, start = self.traces, time.perf_counter()
        result = function(argument)
        if self.traces > before:
            self.compile_seconds += time.perf_counter() - start
        return result

    def _wait_for_last(self) -> None:
        if self._last is not None:
            for value in self._strategy.experimental_local_results(self._last):
                value.numpy()
            self._last = None

    def _count_trace(self) -> None:
        # Python runs only while TensorFlow traces; but in eager mode, with every step.
        if not tf.executing_eagerly():
            self.traces += 1

    def _train_plainly(self, batches: Any) -> Any:
        self._count_trace()
        for image, label in batches:  # unrolled: one program, as in X10 without a barrier
            token = self._strategy.run(self._learn, args=(image, label))
        return token

    def _learn(self, image: Any, label: Any) -> Any:
        gradients, loss, correct = self._differentiate(image, label)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        self._add(loss, correct, tf.size(label, out_type=tf.int64))
        return loss

    def _differentiate_plainly(self, image: Any, label: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = tf.cast(self.model(image, training=True), tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
            aim = tf.add_n([tf.reduce_mean(losses), *_regularization(self.model)])
            # The optimizer sums the gradients over the replicas.
            aim /= self._strategy.num_replicas_in_sync
        gradients = tape.gradient(aim, [v.value for v in self.model.trainable_variables])
        return gradients, tf.reduce_sum(losses), tf.reduce_sum(_hits(logits, label))

    def _test_plainly(self, batch: Any) -> Any:
        self._count_trace()
        self._strategy.run(self._judge, args=batch)

    def _judge(self, image: Any, label: Any, weights: Any) -> None:
        logits = tf.cast(self.model(image, training=False), tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
        real = tf.cast(weights > 0, tf.int64)
        self._add(
            tf.reduce_sum(losses * weights),
            tf.reduce_sum(_hits(logits, label) * real),
            tf.reduce_sum(real),
        )

    def _predict_plainly(self, batch: Any) -> Any:
        self._count_trace()
        return self._strategy.run(
            lambda image: tf.argmax(self.model(image, training=False), axis=-1), args=batch[:1]
        )

    def _add(self, loss: Any, correct: Any, total: Any) -> None:
        self._loss.assign_add(loss)
        self._correct.assign_add(correct)
        self._total.assign_add(total)


def _make_sum(dtype: Any) -> Any:
    return tf.Variable(
        tf.zeros([], dtype),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _hits(logits: Any, label: Any) -> Any:
    return tf.cast(tf.equal(tf.argmax(logits, axis=-1), tf.cast(label, tf.int64)), tf.int64)


def _regularization(model: Any) -> list[Any]:
    return [tf.cast(loss, tf.float32) for loss in model.losses]
