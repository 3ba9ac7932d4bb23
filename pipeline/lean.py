"""Imports for a local run: Beam without what it takes along only because it is there.

Beam imports other people's libraries at its best effort, for connectors and runners that a local
run does not have, and does without those that are not installed. With them a process of 0.4 s
comes up in 0.8.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
from collections.abc import Iterator, Sequence

# Of Beam 2.77: whatever imports one of them stands in a `try` with `except ImportError`. pyarrow
# looks for pandas in the same way, and Beam for IPython, each time a graph is built.
_CONNECTORS = (
    "IPython",
    "apache_beam.io.gcp.bigquery",
    "apache_beam.io.gcp.pubsub",
    "bson",
    "google.cloud.dataflow",
    "pandas",
    "pymongo",
)
_STORES = ("apache_beam.io.gcp.gcsfilesystem",)


def find_spare(arguments: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns what a run has no use for, by all the arguments of its command.

    Returns:
      Modules that it needs at no time; and modules that it need not import with Beam, since
      transforms.files does at the first path in a bucket, as in a CSV's cell.
    """
    if any("runner" in argument.lower() for argument in arguments):
        return (), ()
    return _CONNECTORS, () if any("://" in argument for argument in arguments) else _STORES


class _Absence(importlib.abc.MetaPathFinder):
    """Finds some modules missing, as where nobody installed them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Returns None, so that others are asked, or raises ModuleNotFoundError."""
        # None in sys.modules would say the same to Python, but not to what Cython compiled.
        if fullname in self._names:
            raise ModuleNotFoundError(f"{fullname} is left out of a local run", name=fullname)


@contextlib.contextmanager
def without_modules(names: Sequence[str]) -> Iterator[None]:
    """Imports inside find modules missing that were not imported before; later they are there."""
    absence = _Absence(names)
    sys.meta_path.insert(0, absence)
    try:
        yield
    finally:
        sys.meta_path.remove(absence)
