"""Pictures drawn in memory, and the command line called on them."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from pipeline.__main__ import main

# Runs a command that interrupts reach. Whoever runs the tests in the background has them ignore
# interrupts, and all they start; and what `preexec_fn` would do runs after a fork, where gRPC, if
# this process has used it, starts its threads anew, and now and then aborts the child.
INTERRUPTIBLE = [
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.argv[1], sys.argv[1:])",
]


def draw(path: Path, *, seed: int, size=(60, 40), format=None, **save) -> None:
    """A smooth random picture: noise of 6x4 cells scaled up, so that JPEG keeps it."""
    levels = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(levels).resize(size, Image.Resampling.BICUBIC).save(
        path, format, **({"quality": 95} if path.suffix in (".jpg", ".jpeg") else {}), **save
    )


def ingest(pattern, output, *flags: str) -> int:
    return main(["ingest", "--input", str(pattern), "--output", str(output), *flags])


COLLECTED: dict[str, list] = {}


def collect(item, name: str) -> None:
    """Keeps what comes out of a pipeline that runs in this process."""
    COLLECTED.setdefault(name, []).append(item)
