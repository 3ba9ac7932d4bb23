"""A small set of pictures, the data set made of it, and the shared inputs where there are any."""

from pathlib import Path

import pytest
from helpers import draw, ingest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """60 pictures in three classes; JPEG, PNG and WebP, landscape and portrait."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(60):
        label = ("ash", "birch", "cedar")[number % 3]
        suffix = ("jpg", "jpg", "png", "webp")[number % 4]
        size = (60, 40) if number % 2 else (36, 54)
        draw(folder / label / f"{number:02d}.{suffix}", seed=number, size=size)
    return folder


@pytest.fixture(scope="session")
def dataset(pictures, tmp_path_factory) -> Path:
    """48 and some training records in 4 shards, validation in 2; read only."""
    output = tmp_path_factory.mktemp("dataset") / "records"
    flags = ["--image-size", "32x24", "--split", "train=0.7,validation=0.3", "--shards", "6"]
    assert ingest(f"{pictures}/*/*", output, *flags) == 0
    return output


@pytest.fixture
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("../shared is not there: real photographs are not part of the project")
    return SHARED
