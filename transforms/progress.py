"""How far a run is, told by the workers: to Beam as counters, and to a launcher on this machine.

Beam's local runner tells its counters only at the end, so there a launcher names a file in the
environment, which its workers inherit, and reads what they add to it. No result depends on either.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time

NAMESPACE = "tpufeed"
VARIABLE = "TPUFEED_PROGRESS"  # names the file
# Of candidates: all, then what became of each. `kept` are those of shards that were there before.
IMAGES, RECORDS, REJECTS, KEPT = NAMES = ("images", "records", "rejects", "kept")
# What the listing and the screening refused, which is no candidate.
REFUSED = "refused"
_SECONDS = 0.1  # between two reports of a worker


class Meter:
    """Counts, and reports now and then: at most every tenth of a second."""

    def __init__(self) -> None:
        """Nothing counted yet."""
        self._counts: collections.Counter[str] = collections.Counter()
        self._reported = 0.0

    def count(self, name: str, number: int = 1) -> None:
        """Adds to a count."""
        self._counts[name] += number
        if time.monotonic() - self._reported > _SECONDS:
            self.report()

    def report(self) -> None:
        """Tells what was counted since the last time; to be called once more at the end."""
        from apache_beam.metrics import Metrics

        counts, self._counts = self._counts, collections.Counter()
        self._reported = time.monotonic()
        for name, number in counts.items():
            Metrics.counter(NAMESPACE, name).inc(number)
        _append("".join(f"{name} {number}\n" for name, number in counts.items()))


def report(name: str, number: int = 1) -> None:
    """Tells one number at once."""
    meter = Meter()
    meter.count(name, number)


def _append(lines: str) -> None:
    path = os.environ.get(VARIABLE)
    if not path or not lines:
        return
    # The launcher may be gone; and no run may end for want of a bar.
    with contextlib.suppress(OSError):
        # Not created: lines of one write are not mixed with those of other processes.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, lines.encode())
        finally:
            os.close(descriptor)
