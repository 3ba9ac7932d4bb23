"""`tpufeed train --compare`: the same training op by op, as a graph and under XLA, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pipeline.config import TrainConfig
from pipeline.history import Epoch, History
from pipeline.learner import Statistics
from pipeline.train import Note, train
from transforms.files import join

# LeNet-5 on MNIST, 5 epochs, batch 128, SGD 0.1, on a CPU: training loss and correct of 59,904,
# test loss and accuracy of 10,000, seconds; from "Introducing X10".
PUBLISHED: Mapping[str, tuple[tuple[float, int, float, float, float], ...]] = {
    "X10 tutorial, eager": (
        (0.528, 50154, 0.168, 0.947, 11.9),
        (0.133, 57488, 0.107, 0.966, 11.7),
        (0.092, 58193, 0.069, 0.978, 11.8),
        (0.071, 58577, 0.066, 0.979, 11.8),
        (0.059, 58800, 0.064, 0.980, 11.8),
    ),
    "X10 tutorial, X10": (
        (0.421, 51888, 0.134, 0.956, 18.6),
        (0.117, 57733, 0.085, 0.973, 14.9),
        (0.080, 58400, 0.068, 0.979, 13.1),
        (0.064, 58684, 0.056, 0.980, 13.5),
        (0.053, 58909, 0.063, 0.978, 13.4),
    ),
}


def compare_modes(config: TrainConfig, modes: Sequence[str], *, note: Note | None = None) -> str:
    """Trains once in each mode, with equal settings and seed, and returns the table.

    Args:
      config: what to do; the run of each mode goes to a folder of its name in config.output.
      modes: of config.MODES.
      note: as for train; also called with every report line.

    Raises:
      ValueError, OSError, RuntimeError: as train does.
    """
    histories = {}
    for mode in modes:
        output = join(config.output, mode) if config.output else None
        run = dataclasses.replace(config, mode=mode, output=output, steps_per_execution=1)
        if mode != "eager":
            run = dataclasses.replace(run, steps_per_execution=config.steps_per_execution)
        report = (lambda epoch, mode=mode: note(f"{mode}: {epoch}")) if note else None
        histories[mode] = train(run, report=report, note=note)
    return format_table(histories, published=config.model == "lenet5")


def format_table(histories: Mapping[str, History], *, published: bool) -> str:
    """Returns the runs side by side, epoch by epoch, then their totals.

    Args:
      histories: by mode.
      published: whether the X10 tutorial's own figures stand beside them.
    """
    runs = {name: history.epochs for name, history in histories.items()}
    if published:
        runs |= {name: _as_epochs(rows) for name, rows in PUBLISHED.items()}
    head = ("epoch", "run", "loss", "accuracy", "test loss", "test accuracy", "seconds")
    lines = [_row(*head)]
    for number in range(max(map(len, (h.epochs for h in histories.values())))):
        for name, epochs in runs.items():
            if number < len(epochs):
                epoch = epochs[number]
                lines.append(
                    _row(
                        number,
                        name,
                        f"{epoch.training.loss:.3f}",
                        f"{epoch.training.correct} ({100 * epoch.training.accuracy:.1f}%)",
                        f"{epoch.test.loss:.3f}",
                        f"{100 * epoch.test.accuracy:.1f}%",
                        f"{epoch.seconds:.1f}",
                    )
                )
    lines.append("")
    for name, epochs in runs.items():
        seconds = sum(epoch.seconds for epoch in epochs)
        text = f"{name}: {seconds:.1f} s"
        if history := histories.get(name):
            last = epochs[-1]
            text += (
                f", {last.images_per_second:.0f} images/s in the last epoch, "
                f"{history.traces} traces, {history.compile_seconds:.1f} s in calls that compiled, "
                f"on {history.device}"
            )
        lines.append(text)
    return "\n".join(lines)


def _row(*cells: object) -> str:
    widths = (6, 21, 8, 16, 11, 15, 8)
    aligned = (f"{cell!s:<{w}}" for cell, w in zip(cells, widths, strict=True))
    return "".join(aligned).rstrip()


def _as_epochs(rows: Sequence[tuple[float, int, float, float, float]]) -> tuple[Epoch, ...]:
    return tuple(
        Epoch(
            epoch=number,
            training=Statistics(loss, correct, 59904),
            test=Statistics(test_loss, round(test_accuracy * 10000), 10000),
            seconds=seconds,
            learning_rate=0.1,
            images_per_second=0.0,
            input_share=0.0,
            step_seconds=0.0,
        )
        for number, (loss, correct, test_loss, test_accuracy, seconds) in enumerate(rows)
    )
