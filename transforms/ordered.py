"""A function over many items at once: results in the items' order, none waited for in vain."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from transforms.records import DataError

T = TypeVar("T")
R = TypeVar("R")

# Sources that are read at once: a store takes 50 to 200 ms to answer.
READERS = 8
# A file server that restarts is back within minutes; what hangs for longer hangs for good.
READ_SECONDS = 300.0
# Each item that is given up costs a thread, which may never come back.
MOST_GIVEN_UP = 16


@dataclasses.dataclass
class _Task(Generic[T, R]):
    item: T
    future: concurrent.futures.Future[R]
    started: float = float("inf")
    given_up: bool = False


def map_in_order(
    function: Callable[[T], R],
    items: Iterable[T],
    *,
    threads: int,
    seconds: float = READ_SECONDS,
    give_up: Callable[[T], R] | None = None,
) -> Iterator[R]:
    """Applies a function in a pool of threads; results come in the order of the items.

    At most 2 x threads + 1 results wait, so memory is bounded whatever the number of items.

    Args:
      function: of an item.
      items: may be an iterator.
      threads: at work at once.
      seconds: that one call may take.
      give_up: gives the result where it takes longer; None to wait for ever. The call itself
        cannot be ended: its thread is left behind, and another takes its place.

    Raises:
      DataError: more than MOST_GIVEN_UP items were given up.
    """
    tasks: queue.SimpleQueue[_Task[T, R] | None] = queue.SimpleQueue()
    window: collections.deque[_Task[T, R]] = collections.deque()
    given_up = 0

    def take() -> R:
        nonlocal given_up
        task = window.popleft()
        if give_up is None or _wait(task, seconds):
            return task.future.result()
        task.given_up = True
        given_up += 1
        if given_up > MOST_GIVEN_UP:
            raise DataError(
                f"{given_up} sources were not read within {seconds:g} seconds each: see whether "
                "the file system of the inputs answers, then run again with --resume"
            )
        _start(function, tasks)
        return give_up(task.item)

    for _ in range(threads):
        _start(function, tasks)
    try:
        for item in items:
            window.append(_Task(item, concurrent.futures.Future()))
            tasks.put(window[-1])
            if len(window) > 2 * threads:
                yield take()
        while window:
            yield take()
    finally:
        for task in window:  # what nobody waits for any more is not begun
            task.future.cancel()
        for _ in range(threads):
            tasks.put(None)


def _wait(task: _Task[T, R], seconds: float) -> bool:
    """Whether the task ended in time; the time in which it had no thread does not count."""
    while True:
        left = task.started + seconds - time.monotonic()
        if left <= 0 and not task.future.done():
            return False
        try:
            task.future.exception(timeout=min(max(left, 0.01), seconds))
        except concurrent.futures.TimeoutError:
            continue
        return True


def _start(function: Callable[[T], R], tasks: queue.SimpleQueue[_Task[T, R] | None]) -> None:
    # A daemon: the end of the process must not wait for a read that hangs.
    threading.Thread(target=_work, args=(function, tasks), daemon=True).start()


def _work(function: Callable[[T], R], tasks: queue.SimpleQueue[_Task[T, R] | None]) -> None:
    while (task := tasks.get()) is not None:
        if not task.future.set_running_or_notify_cancel():
            continue  # cancelled
        task.started = time.monotonic()
        try:
            result = function(task.item)
        except BaseException as error:  # whoever takes the result raises it
            task.future.set_exception(error)
        else:
            task.future.set_result(result)
        if task.given_up:
            return
        del task  # nor its result: it is not kept while the next one is waited for
