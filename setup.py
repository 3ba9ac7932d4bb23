"""Packaging of tpufeed: `pip install .`, and the sdist that Dataflow workers install."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent

# Every Dataflow worker installs these as it boots, so TensorFlow must never be among them.
# Those that decide the bytes written are held to one minor or one major version.
INSTALL_REQUIRES = [
    "apache-beam[gcp]>=2.77,<2.78",  # brings pyarrow and numpy, in versions that suit it
    "cykooz-resizer>=4.0,<5",
    "google-crc32c>=1.5",
    "pillow>=12,<13",
    "pyarrow",
    "simplejpeg>=1.9,<1.10",
    "tqdm>=4.66,<5",  # the bar of whoever starts a run; workers do not load it, it is 0.2 MB
]

# Only who looks at a data set needs these; workers do not.
REPORT = ["jinja2>=3.1,<4", "matplotlib>=3.10,<4"]

EXTRAS_REQUIRE = {
    "report": REPORT,
    "train": [
        "tensorflow>=2.21,<2.22",
        # 1.21 is the one built for TensorFlow 2.21. On Python 3.10 it asks for protobuf <= 6.32,
        # and Beam 2.77's gcp extra for protobuf >= 6.33.5, so there the two never install together.
        'tensorflow-transform>=1.21,<1.22; python_version >= "3.11"',
    ],
    "test": [
        *REPORT,
        "gcp-storage-emulator",
        "ipykernel",
        "mypy",
        "nbclient",
        "nbformat",
        "psutil",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
    ],
}


def read_version() -> str:
    """Returns the version without importing the package, whose dependencies may be missing."""
    text = (HERE / "pipeline" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise ValueError('pipeline/__init__.py: no line __version__ = "X.Y.Z"; add one')
    return match.group(1)


def read_description() -> str:
    """Returns the README, or nothing where an image copies the packages without it."""
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


setup(
    name="tpufeed",
    version=read_version(),
    description="Turns a glob of images into sharded, verified TFRecords and feeds them to TPUs.",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["pipeline", "pipeline.*", "transforms", "transforms.*"]),
    python_requires=">=3.10",
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["tpufeed = pipeline.__main__:run"]},
)
