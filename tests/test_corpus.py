"""The corpus of awkward files: each in isolation, then all of them in one ingest."""

import collections
import csv
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from transforms.image import PixelPolicy, prepare_image
from transforms.records import ImageError, PreparedImage

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(__file__).resolve().parents[2] / "shared"
CORPUS = SHARED / "corpus" / "files"
if not CORPUS.exists():
    pytest.skip("no corpus at ../shared/corpus", allow_module_level=True)

with open(SHARED / "corpus" / "INDEX.tsv", encoding="utf-8", newline="") as index:
    ROWS = list(csv.DictReader(index, delimiter="\t"))
IMAGES = [row for row in ROWS if not row["expected"].startswith("tfrecord")]
POLICY = PixelPolicy(mode="none", encoding="png")

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning"
)

# Cut or spoilt files are told apart by what the decoder says; and what is no accepted format is
# reported as such, whatever else is wrong with it.
ALIKE = [{"truncated", "corrupt"}, {"unidentified", "unsupported_format"}]
OTHER_FORMATS = (".tga", ".ico", ".jp2")

# The index has its means from Pillow, which compares the transparent level of a PNG of 2 or 4 bits
# with levels of 8 bits, and so finds no pixel transparent. These are TensorFlow's.
TRUE_MEANS = {
    "libpng/testpngs/gray-2-linear-tRNS.png": 170.0,
    "libpng/testpngs/gray-2-tRNS.png": 170.0,
    "libpng/testpngs/gray-4-linear-tRNS.png": 142.375,
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a file: a picture, or a reason."""

    image: PreparedImage | None
    reason: str = "accept"

    @property
    def size(self) -> str:
        return f"{self.image.geometry.width}x{self.image.geometry.height}" if self.image else ""


def prepare(path: str) -> Outcome:
    try:
        return Outcome(prepare_image((CORPUS / path).read_bytes(), policy=POLICY))
    except ImageError as error:
        assert "\n" not in error.detail and " at 0x" not in error.detail
        return Outcome(None, error.reason)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {row["path"]: prepare(row["path"]) for row in IMAGES}


def on_white(image: Image.Image) -> np.ndarray:
    """A reference's levels, composited and scaled without our code."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        levels = (np.asarray(image).astype(np.uint32) >> 8).astype(np.float64)
        return levels[..., None].repeat(3, 2)
    levels = np.asarray(image.convert("RGBA"), np.float64)
    share = levels[..., 3:] / 255
    return levels[..., :3] * share + 255 * (1 - share)


def test_the_index_is_the_one_known():
    assert (len(ROWS), len(IMAGES)) == (1018, 1009)


def test_accepted_files_have_their_upright_size(outcomes):
    accepted = [row for row in IMAGES if row["expected"] == "accept"]
    assert len(accepted) == 638
    found = {
        row["path"]: (outcomes[row["path"]].reason, outcomes[row["path"]].size) for row in accepted
    }
    assert found == {row["path"]: ("accept", row["oriented_size"]) for row in accepted}


def test_rejected_files_have_their_reason(outcomes):
    wrong = {}
    rejected = [row for row in IMAGES if row["expected"] == "reject"]
    assert len(rejected) == 222
    for row in rejected:
        found = outcomes[row["path"]].reason
        allowed = {row["reason"]}.union(*(group for group in ALIKE if row["reason"] in group))
        if row["path"].lower().endswith(OTHER_FORMATS):
            allowed |= {"unidentified", "unsupported_format"}
        if found not in allowed:
            wrong[row["path"]] = (found, row["reason"])
    assert wrong == {}


def test_disputed_files_have_the_outcome_that_the_manual_lists(outcomes):
    manual = (ROOT / "docs" / "pixels.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```outcomes\n(.*?)^```$", manual, re.DOTALL | re.MULTILINE)
    listed = [tuple(line.rsplit(" ", 1)) for line in block.splitlines()]
    disputed = [row for row in IMAGES if row["expected"] in ("either", "policy")]
    assert listed == sorted(listed)
    counted: collections.Counter[str] = collections.Counter()
    for number, reason in re.findall(r"^\| .* \| (\d+) \| (\w+) \|$", manual, re.MULTILINE):
        counted[reason] += int(number)
    assert counted == collections.Counter(reason for _, reason in listed)
    assert dict(listed) == {row["path"]: outcomes[row["path"]].reason for row in disputed}
    for row in disputed:
        found = outcomes[row["path"]]
        assert found.image is None or found.size == row["oriented_size"], row["path"]


def test_mean_colours_on_white(outcomes):
    wrong, seen = {}, 0
    for row in IMAGES:
        image = outcomes[row["path"]].image
        if image is None or not row["mean_rgb_on_white"]:
            continue
        wanted = [float(level) for level in row["mean_rgb_on_white"].split(",")]
        if row["path"] in TRUE_MEANS:
            wanted = [TRUE_MEANS[row["path"]]] * 3
        found = [total / image.pixels for total in image.channel_sum]
        seen += 1
        if max(abs(a - b) for a, b in zip(found, wanted, strict=True)) > 1:
            wrong[row["path"]] = (found, wanted)
    assert wrong == {}
    assert seen > 600


def test_pixels_match_the_references(outcomes):
    wrong, seen = {}, 0
    for row in IMAGES:
        image = outcomes[row["path"]].image
        if image is None or not row["ref"]:
            continue
        found = np.asarray(Image.open(io.BytesIO(image.data)), np.float64)
        wanted = on_white(Image.open(CORPUS / row["ref"]))
        limit = float(re.match(r"mean ([\d.]+) ", row["pillow_vs_ref"])[1]) + 1
        difference = np.abs(found - wanted).mean() if found.shape == wanted.shape else np.inf
        seen += 1
        if difference > limit:
            wrong[row["path"]] = (difference, limit)
    assert wrong == {}
    assert seen == 53


# All of them in one ingest.

# In a small process of its own, so that the peak is the ingest's and not that of the tests.
LAUNCHER = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], timeout=400)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """The data set, the peak memory of the run that made it in bytes, and what it said."""

    output: Path
    peak: int
    stderr: str


@pytest.fixture(scope="module")
def ingested(tmp_path_factory) -> Run:
    output = tmp_path_factory.mktemp("corpus") / "set"
    words = ["ingest", "--input", f"{CORPUS}/**", "--root", CORPUS, "--output", output]
    words += ["--resize-mode", "none", "--encoding", "png", "--max-reject-rate", "1"]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, sys.executable, "-m", "pipeline", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=420,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(output, int(done.stdout.splitlines()[-1]) * unit, done.stderr)


@pytest.fixture(scope="module")
def records(ingested) -> list[tuple[str, str, bytes, list[int]]]:
    """Key, label, encoded picture, [height, width] of every record."""
    tf = pytest.importorskip("tensorflow")
    spec = {
        "key": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.string),
        "image": tf.io.FixedLenFeature([], tf.string),
        "size": tf.io.FixedLenFeature([2], tf.int64),
    }
    shards = [str(path) for path in sorted(ingested.output.glob("train-*.tfrecord"))]
    found = []
    for record in tf.data.TFRecordDataset(shards):
        parsed = {
            name: value.numpy() for name, value in tf.io.parse_single_example(record, spec).items()
        }
        found.append(
            (
                parsed["key"].decode(),
                parsed["label"].decode(),
                parsed["image"],
                parsed["size"].tolist(),
            )
        )
    return found


def read_rejects(folder: Path) -> list[dict[str, str]]:
    lines = (folder / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_every_file_is_a_record_or_a_reject_once(ingested, records):
    rejects = read_rejects(ingested.output)
    found = [record[0] for record in records] + [reject["key"] for reject in rejects]
    assert sorted(found) == sorted(row["path"] for row in ROWS)
    manifest = json.loads((ingested.output / "dataset.json").read_text(encoding="utf-8"))
    assert manifest["skipped"] == 0  # the corpus holds no system files
    assert manifest["splits"]["train"]["records"] == len(records)
    assert sum(manifest["rejects"].values()) == len(rejects)


def test_records_are_what_isolation_gave(outcomes, records):
    found = {key: (label, image, size) for key, label, image, size in records}
    wanted = {}
    for path, outcome in outcomes.items():
        if outcome.image:
            geometry = outcome.image.geometry
            label = Path(path).parent.name
            wanted[path] = (label, outcome.image.data, [geometry.height, geometry.width])
    assert found.keys() == wanted.keys()
    assert [key for key in found if found[key] != wanted[key]] == []


def test_rejects_are_what_isolation_gave(ingested, outcomes):
    rejects = read_rejects(ingested.output)
    wanted = {path: outcome.reason for path, outcome in outcomes.items() if not outcome.image}
    wanted |= {row["path"]: "unidentified" for row in ROWS if row not in IMAGES}
    assert {reject["key"]: reject["reason"] for reject in rejects} == wanted
    assert [reject["key"] for reject in rejects] == sorted(reject["key"] for reject in rejects)
    assert {reject["path"] for reject in rejects} == {f"{CORPUS}/{path}" for path in wanted}


def test_ingest_stays_small(ingested):
    assert ingested.peak < 1_000_000_000


def test_ingest_stays_quiet(ingested):
    # What libtiff writes by itself stays; Python's warnings would name neither file nor remedy.
    assert "Warning" not in ingested.stderr
    assert "Traceback" not in ingested.stderr


def test_verify_finds_it_whole(ingested, capsys):
    from pipeline.__main__ import main

    assert main(["verify", str(ingested.output), "--deep"]) == 0, capsys.readouterr()
