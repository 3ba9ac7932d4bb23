"""A small set of pictures, the data set made of it, and the shared inputs where there are any."""

import os
import shutil
from pathlib import Path

import pytest
from dataflow_service import CleanInstall, build_sdist, install_sdist
from helpers import draw, ingest

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


@pytest.fixture(autouse=True)
def no_progress(monkeypatch):
    """On a slow machine a line of it would come between those that tests look for."""
    monkeypatch.setattr("pipeline.progress._LINE_SECONDS", 3600.0)


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


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Path:
    """A copy of what the package is built from, and of the tests, which must not get into it."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("pipeline", "transforms", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="session")
def clean_install(request, project, tmp_path_factory) -> CleanInstall:
    """The package, installed alone into an empty virtual environment."""
    sdist = build_sdist(project, tmp_path_factory.mktemp("sdist"))
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    return install_sdist(sdist, Path(request.config.cache.mkdir(f"clean-install-{worker}")))


@pytest.fixture
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("../shared is not there: real photographs are not part of the project")
    return SHARED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """A name that is not UTF-8, in what a failed test says, must not end the run."""
    report = yield
    text = str(report.longrepr or "")
    if report.failed and text != text.encode(errors="backslashreplace").decode():
        report.longrepr = text.encode(errors="backslashreplace").decode()
    report.sections = [
        (name, said.encode(errors="backslashreplace").decode()) for name, said in report.sections
    ]
    return report
