"""The progress of an ingest on stderr: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from pipeline.messages import describe_seconds
from transforms.progress import IMAGES, KEPT, NAMES, NAMESPACE, RECORDS, REFUSED, REJECTS, VARIABLE

_BAR_SECONDS = 0.2
_LINE_SECONDS = 10.0
# A service is asked over the network, and counts in steps of some seconds anyway.
_ASKING_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Counts:
    """How far a run is.

    Attributes:
      images: candidates, 0 until all are listed.
      done: of them, with those of shards that were finished before.
      kept: those of shards that were finished before.
      rejects: inputs that became no record, so far.
    """

    images: int = 0
    done: int = 0
    kept: int = 0
    rejects: int = 0


Read = Callable[[], Counts]
# A run is watched for as long as the context lasts; it is told how to read the counts.
Watch = Callable[[Read], contextlib.AbstractContextManager[None]]


def make_counts(numbers: Mapping[str, int]) -> Counts:
    """Returns the counts from numbers by the names of transforms/progress.py."""
    found = {name: numbers.get(name, 0) for name in (*NAMES, REFUSED)}
    done = found[RECORDS] + found[REJECTS] + found[KEPT]
    # A bundle that is done again counts twice.
    done = min(done, found[IMAGES]) if found[IMAGES] else done
    return Counts(found[IMAGES], done, found[KEPT], found[REJECTS] + found[REFUSED])


def read_metrics(result: Any) -> Counts:
    """Returns the counts from the metrics of a run elsewhere; none where it cannot tell."""
    from apache_beam.metrics import MetricsFilter

    numbers: collections.Counter[str] = collections.Counter()
    # An engine that has no metrics, or does not answer now, is no reason to end.
    with contextlib.suppress(Exception):
        found = result.metrics().query(MetricsFilter().with_namespace(NAMESPACE))
        for counter in found["counters"]:
            numbers[counter.key.metric.name] += counter.result or 0
    return make_counts(numbers)


@contextlib.contextmanager
def count_in_file() -> Iterator[Read]:
    """Has workers on this machine report into a file.

    Yields:
      A function that reads it.
    """
    numbers: collections.Counter[str] = collections.Counter()
    before = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory(prefix="tpufeed-") as folder:
        path = os.path.join(folder, "progress")
        with open(path, "wb"), open(path, encoding="ascii") as file:

            def read() -> Counts:
                for line in file:
                    name, _, number = line.partition(" ")
                    numbers[name] += int(number)
                return make_counts(numbers)

            os.environ[VARIABLE] = path
            try:
                yield read
            finally:
                del os.environ[VARIABLE]
                if before is not None:
                    os.environ[VARIABLE] = before


def choose_watch(stream: TextIO | None = None, *, local: bool = True) -> Watch:
    """Returns the bar where the stream is a terminal, else the lines.

    Args:
      stream: stderr where it is None.
      local: whether the counts are at hand; else a service is asked for them.
    """
    file = sys.stderr if stream is None else stream
    slow = 0.0 if local else _ASKING_SECONDS
    if _can_draw(file):
        return lambda read: _show_bar(read, file, every=max(slow, _BAR_SECONDS))
    return lambda read: show_lines(read, file, every=_LINE_SECONDS)


def _can_draw(file: TextIO) -> bool:
    if not file.isatty() or os.environ.get("TERM") == "dumb":
        return False
    # Some terminals, as those that containers are given, have no width: a bar would be invisible.
    return os.get_terminal_size(file.fileno()).columns > 0


@contextlib.contextmanager
def show_lines(read: Read, stream: TextIO, *, every: float = _LINE_SECONDS) -> Iterator[None]:
    """Prints a line now and then, and none of a run that is shorter.

    Args:
      read: tells how far the run is.
      stream: that is printed to.
      every: seconds between two lines.
    """
    began = first = None

    def show() -> None:
        nonlocal began, first
        counts, now = read(), time.monotonic()
        if counts.images and began is None:
            began, first = now, counts.done
        seconds = now - began if began is not None else 0.0
        print(describe_counts(counts, first=first or 0, seconds=seconds), file=stream, flush=True)

    with _repeating(show, every=every):
        yield


def describe_counts(counts: Counts, *, first: int = 0, seconds: float = 0.0) -> str:
    """Returns a line for people.

    Args:
      counts: how far the run is.
      first: images that were done when it was first looked at.
      seconds: since then.
    """
    if not counts.images:
        return "tpufeed ingest: listing"
    share = 100 * counts.done // counts.images
    text = f"tpufeed ingest: {counts.done:,} of {counts.images:,} images ({share} %)"
    made = counts.done - max(first, counts.kept)
    if seconds > 0 and made > 0:
        rate = made / seconds
        left = describe_seconds((counts.images - counts.done) / rate)
        text += f", {rate:,.0f} images/s, {left} left"
    return f"{text}, {counts.rejects:,} rejects"


@contextlib.contextmanager
def _show_bar(read: Read, stream: TextIO, *, every: float = _BAR_SECONDS) -> Iterator[None]:
    """Shows a bar, above which log records are printed, and removes it in the end."""
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    bar = tqdm(
        bar_format="listing [{elapsed}]",
        unit=" images",
        file=stream,
        leave=False,
        dynamic_ncols=True,
        mininterval=0,
    )
    kept = 0

    def show() -> None:
        nonlocal kept
        counts = read()
        if counts.images and bar.total != counts.images:
            bar.bar_format = None  # the usual one
            bar.set_description("images", refresh=False)
            bar.reset(total=counts.images)
        if counts.kept > kept:  # done by an earlier run, so no measure of this one's pace
            bar.initial = kept = counts.kept
            bar.n = max(bar.n, kept)
        bar.set_postfix_str(f"{counts.rejects:,} rejects", refresh=False)
        bar.update(max(0, counts.done - bar.n))
        bar.refresh()

    with contextlib.closing(bar), logging_redirect_tqdm():
        with _repeating(show, every=every):
            yield
        show()


@contextlib.contextmanager
def _repeating(show: Callable[[], None], *, every: float) -> Iterator[None]:
    """Calls a function again and again in another thread, which has ended afterwards."""
    ended = threading.Event()

    def repeat() -> None:
        # Nobody reads stderr any more: that is no reason to end.
        with contextlib.suppress(OSError, ValueError):
            while not ended.wait(every):
                show()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
