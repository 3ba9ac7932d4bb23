"""Pictures drawn in memory, and the command line called on them."""

from pathlib import Path

import numpy as np
from PIL import Image

from pipeline.__main__ import main


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
