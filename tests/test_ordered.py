"""map_in_order: what hangs is given up, and nothing else changes by it."""

import itertools
import threading
import time

import pytest

from transforms import ordered
from transforms.ordered import map_in_order
from transforms.records import DataError


def hang_on(*numbers):
    """A function that waits for ever at some numbers, and the event that ends the waiting."""
    free = threading.Event()

    def function(number):
        if number in numbers:
            free.wait(60)
        return number

    return function, free


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_what_hangs_is_given_up_in_its_place(threads):
    function, free = hang_on(3, 4, 11)
    results = map_in_order(
        function, range(20), threads=threads, seconds=0.2, give_up=lambda n: f"late {n}"
    )
    began = time.monotonic()
    expected = [f"late {n}" if n in (3, 4, 11) else n for n in range(20)]
    assert list(results) == expected
    assert time.monotonic() - began < 10
    free.set()


def test_threads_that_were_left_behind_end_once_they_can():
    before = set(threading.enumerate())
    function, free = hang_on(1, 2)
    results = map_in_order(function, range(9), threads=2, seconds=0.1, give_up=lambda n: None)
    assert list(results).count(None) == 2
    assert len(set(threading.enumerate()) - before) >= 2
    free.set()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_too_many_that_hang_end_it():
    function, free = hang_on(*range(100))
    results = map_in_order(function, range(100), threads=3, seconds=0.02, give_up=lambda n: -n)
    found = list(itertools.islice(results, ordered.MOST_GIVEN_UP))
    assert found == [-n for n in range(ordered.MOST_GIVEN_UP)]
    with pytest.raises(DataError, match="17 sources were not read within 0.02 seconds each: see"):
        next(results)
    free.set()


def test_slow_is_not_late():
    """Waiting for a thread does not count, and each item has its own time."""

    def function(number):
        time.sleep(0.05)
        return number

    results = map_in_order(function, range(10), threads=1, seconds=0.4, give_up=lambda n: "late")
    assert list(results) == list(range(10))


def test_a_time_out_of_the_function_itself_is_its_own_error():
    def function(number):
        raise TimeoutError("the store's own")

    with pytest.raises(TimeoutError, match="the store's own"):
        list(map_in_order(function, [1], threads=1, seconds=5, give_up=lambda n: n))


def test_left_early_nothing_more_is_begun():
    begun = []

    def function(number):
        begun.append(number)
        time.sleep(0.01)
        return number

    results = map_in_order(function, range(1000), threads=2)
    assert next(results) == 0
    results.close()
    time.sleep(0.1)
    number = len(begun)
    time.sleep(0.1)
    assert len(begun) == number < 12
