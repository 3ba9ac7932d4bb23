"""`tpufeed report`: what stands on the page, and what a real browser makes of it."""

import base64
import collections
import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf
from browser import find_chromium, open_browser
from gcs_emulator import serve
from helpers import draw, ingest
from PIL import Image

from pipeline import survey
from pipeline.__main__ import main
from pipeline.config import make_ingest_config, make_parser
from pipeline.messages import printable
from pipeline.repeat import FIELDS, command_of, quote
from pipeline.report import format_bytes, write_report
from pipeline.survey import MEAN_BINS, Pick, shares
from pipeline.thumbnails import read_thumbnails
from transforms import files
from transforms.manifest import load_manifest
from transforms.records import DataError
from transforms.write import INDEX_SCHEMA

pytest.importorskip("matplotlib", reason="the report's libraries are not installed: .[report]")


class Document(HTMLParser):
    """The elements of a page, each with its attributes, and the text within each <pre>."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.pre: dict[str, str] = {}
        self.text = ""
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        names = dict(attributes)
        assert len(names) == len(attributes), (tag, attributes)
        self.tags.append((tag, names))
        if tag == "pre":
            self._open = names["id"]

    def handle_endtag(self, tag):
        if tag == "pre":
            self._open = ""

    def handle_data(self, data):
        self.text += data
        if self._open:
            self.pre[self._open] = self.pre.get(self._open, "") + data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def report(folder) -> Document:
    assert main(["report", str(folder)]) == 0
    return Document((Path(folder) / "report.html").read_text())


@pytest.fixture
def copied(dataset, tmp_path):
    return Path(shutil.copytree(dataset, tmp_path / "copied"))


def test_one_file_is_written_and_the_same_each_time(copied, capsys):
    before = set(copied.rglob("*"))
    assert main(["report", str(copied)]) == 0
    page = copied / "report.html"
    assert capsys.readouterr() == (f"{page}\n", "")
    assert set(copied.rglob("*")) - before == {page}
    first = page.read_bytes()
    page.write_bytes(b"an older one")
    assert main(["report", str(copied)]) == 0
    assert page.read_bytes() == first
    assert main(["verify", str(copied)]) == 0


def test_it_says_what_is_there(copied):
    text = report(copied).text
    manifest = load_manifest(str(copied))
    for number, label in enumerate(manifest.labels):
        counts = [manifest.splits[split].classes[label] for split in ("train", "validation")]
        row = "".join(f"\\s*{value}" for value in (label, number, *counts, sum(counts)))
        assert re.search(row, text), row
    assert manifest.fingerprint in text
    assert "No input was rejected as faulty" in text
    assert "No content stands under several keys" in text


def test_the_pictures_are_those_of_the_records(copied):
    stored = {}
    for record in tf.data.TFRecordDataset(tf.io.gfile.glob(f"{copied}/*.tfrecord")):
        feature = tf.train.Example.FromString(record.numpy()).features.feature
        key = feature["key"].bytes_list.value[0].decode()
        stored[key] = Image.open(io.BytesIO(feature["image"].bytes_list.value[0])).convert("RGB")
    shown = report(copied).all("img")
    assert len({image["alt"] for image in shown}) == len(shown)
    per_class = collections.Counter(image["alt"].split("/")[0] for image in shown)
    assert set(per_class) == {"ash", "birch", "cedar"} and min(per_class.values()) > 12
    for image in shown:
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/png;base64"  # 32x24: small enough to be kept exactly
        picture = Image.open(io.BytesIO(base64.b64decode(data)))
        assert np.array_equal(np.asarray(picture), np.asarray(stored[image["alt"]]))
        assert (int(image["width"]), int(image["height"])) == picture.size == (32, 24)


SHAPES = [
    ["--image-size", "40"],
    ["--image-size", "40", "--encoding", "raw"],
    ["--image-size", "40", "--schema", "imagenet", "--label-offset", "1"],
    ["--image-size", "40", "--schema", "tfds", "--encoding", "png", "--channels", "1"],
    ["--resize-mode", "none", "--split", "a=0.5,b=0.5"],
]


@pytest.mark.parametrize("flags", SHAPES, ids=" ".join)
def test_the_programs_on_the_page_run(pictures, tmp_path, flags):
    output = tmp_path / 'it\'s "here" [1]'
    assert ingest(f"{pictures}/*/*", output, *flags) == 0
    document = report(output)
    assert len(document.all("img")) >= 3 * 10
    for name in ("reader", "plain-reader"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(document.pre[name], {})
        assert re.match(r"\((32, )?\d+, \d+, [13]\) ", printed.getvalue()), printed.getvalue()


FILTERS = ["--min-size", "32", "--max-area", "4000000", "--max-aspect-ratio", "2.5"]


def config_of(*flags):
    args, rest = make_parser().parse_known_args(["ingest", "--output", "out", *flags])
    assert not rest
    return make_ingest_config(args).to_json()


@pytest.mark.parametrize(
    "flags",
    [
        ["--input", "a/*/*.jpg"],
        ["--input", "train=a/*/*.jpg", "--input", "test=b/**", "--root", "/", "--seed", "7"],
        ["--input", "idx:digits", "--label-offset", "3"],
        ["--input", "l.csv", "--split-by", "column:who", "--split", "train=2/3,x=1/3"],
        ["--input", "a/*", "--split-by", "group:(.+)_[0-9]'$", "--shards", "9"],
        ["--input", "a/*", "--class-names", "names", "--new-classes", "append"],
        ["--input", "a/*", "--exclude", "who $HOME `id`", "--max-reject-rate", "0.3"],
        ["--input", "a/*", "--duplicates", "drop"],
        ["--input", "a/*", *FILTERS, "--exif", "all,gps_latitude"],
        ["--input", "a/*", "--image-size", "320x240", "--resize-mode", "pad", "--channels", "1"],
        ["--input", "a/*", "--encoding", "png", "--quality", "80", "--background", "0,9,255"],
        ["--input", "a/*", "--max-pixels", "1000", "--schema", "imagenet", "--shard-size", "1GiB"],
        ["--input", "a b'c\"d\n\t\x1b[31m\u202eé1/*"],
    ],
    ids=str,
)
def test_the_command_makes_the_same_configuration(flags):
    config = json.loads(json.dumps(config_of(*flags)))
    command = command_of(config)
    assert all(line.isprintable() for line in command.split("\n"))
    done = subprocess.run(
        ["bash", "-c", f"tpufeed() {{ printf '%s\\0' \"$@\"; }}\n{command}"],
        capture_output=True,
        check=True,
    )
    words = list(map(os.fsdecode, done.stdout.split(b"\0")[:-1]))
    assert words.pop(0) == "ingest"
    args, rest = make_parser().parse_known_args(["ingest", *words])
    assert not rest
    assert json.loads(json.dumps(make_ingest_config(args).to_json())) == config


def test_the_command_knows_every_field():
    assert set(FIELDS) == set(config_of("--input", "a/*", *FILTERS, "--exif", "all"))


@pytest.mark.parametrize(
    ("text", "quoted"),
    [("a", "a"), ("a b", "'a b'"), ("", "''"), ("\n'\\1", "$'\\x0a\\x27\\x5c1'")],
)
def test_words_are_quoted(text, quoted):
    assert quote(text) == quoted


def rows_of(*rows):
    """Index rows of (width, height, pixel levels, each given to all three channels)."""
    full = []
    for number, (width, height, levels) in enumerate(rows):
        full.append(
            dict.fromkeys(INDEX_SCHEMA.names, "")
            | {"key": f"k{number}", "class": 0, "source_bytes": 100 + number}
            | {"source_width": width, "source_height": height, "offset": 0, "size": 50}
            | {"pixels": len(levels), "channel_sum": [sum(levels)] * 3}
            | {"channel_sum_of_squares": [sum(v * v for v in levels)] * 3}
        )
    return pa.Table.from_pylist(full, schema=INDEX_SCHEMA)


def test_records_fall_into_their_bins():
    tally = survey._Tally(channels=3, image_size=(30, 40))
    tally.add(rows_of((40, 30, [4, 4]), (39, 30, [3, 4]), (400, 300, [255, 255])))
    tally.add(rows_of((1, 1, [1, 9]), (10**6, 29, [0, 0])))
    tally.add(rows_of())
    means = np.zeros(MEAN_BINS, int)
    for level in (4, 3.5, 255, 5, 0):
        means[int(level // 4)] += 1
    assert np.array_equal(tally.means, [means] * 3)
    assert (tally.flat, tally.smaller, tally.records) == (3, 3, 5)
    expected = np.zeros_like(tally.aspects)
    for ratio in (40 / 30, 39 / 30, 4 / 3, 1, 8):  # the widest is counted at the end
        expected[np.abs(np.log2(survey.ASPECT_EDGES[:-1] * 2**0.0625 / ratio)).argmin()] += 1
    assert np.array_equal(tally.aspects, expected)
    assert tally.sides.sum() == 5 and tally.sides[0, 0] == 1
    assert tally.ranges()["source_width"] == survey.Range(1, (40 + 39 + 400 + 1 + 10**6) / 5, 10**6)
    assert tally.ranges()["source_bytes"] == survey.Range(100, 100.8, 102)


def manifest_of(dataset, labels, counts):
    manifest = load_manifest(str(dataset))
    splits = {
        name: dataclasses.replace(
            manifest.splits["train"], classes=dict(zip(labels, n, strict=True))
        )
        for name, n in counts.items()
    }
    return dataclasses.replace(manifest, labels=tuple(labels), splits=splits)


def test_each_class_and_split_has_its_share_of_the_pictures(dataset):
    manifest = manifest_of(dataset, "ab", {"train": [9, 9], "test": [0, 9]})
    assert shares(manifest, most=7) == {("train", 0): 2, ("train", 1): 2, ("test", 1): 2}
    assert shares(manifest, most=2) == {("train", 0): 1, ("train", 1): 1}
    assert set(shares(manifest, most=1000).values()) == {12}


def test_too_many_bytes_cost_every_class_its_last_pictures(dataset):
    manifest = load_manifest(str(dataset))
    found = survey.survey_index(str(dataset), manifest, contents=(), most_picks=1000)
    picks = found.picks
    whole = read_thumbnails(str(dataset), manifest, picks, most_bytes=10**9)
    assert tuple(whole) == picks
    total = sum(len(thumbnail.uri) for thumbnail in whole.values())
    half = read_thumbnails(str(dataset), manifest, picks, most_bytes=total // 2)
    assert total / 3 < sum(len(thumbnail.uri) for thumbnail in half.values()) <= total // 2
    left = collections.Counter((pick.split, pick.class_id) for pick in half)
    first = {cell: [p for p in picks if (p.split, p.class_id) == cell] for cell in left}
    most = max(left.values())
    assert len(left) == 6 and 1 < most < 12
    assert all(n >= min(most - 1, len(first[cell])) for cell, n in left.items())
    assert {p for cell, n in left.items() for p in first[cell][:n]} == set(half)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (18130, "18.1 kB"), (999_700, "1000 kB")],
)
def test_sizes_are_for_people(number, text):
    assert format_bytes(number) == text


def test_what_does_not_show_is_spelt_out():
    assert printable("é <b>\u202ea\n\x1b\udcff") == "é <b>\\u202ea\\n\\x1b\\udcff"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A data set with everything that should be noticed."""
    folder = tmp_path_factory.mktemp("faulty")
    for number in range(44):
        draw(folder / "in" / "many" / f"{number}.png", seed=number, size=(50, 40))
    draw(folder / "in" / "few" / "small.png", seed=99, size=(10, 8))
    Image.new("RGB", (50, 40), (9, 9, 9)).save(folder / "in" / "few" / "flat.png")
    shutil.copy(folder / "in" / "many" / "0.png", folder / "in" / "few" / "copy.png")
    (folder / "in" / "many" / "empty.png").touch()
    (folder / "in" / "many" / "text.png").write_text("no image")
    flags = ["--image-size", "20", "--split", "train=0.5,test=0.5", "--max-reject-rate", "1"]
    assert ingest(f"{folder}/in/*/*", folder / "out", *flags) == 0
    return folder / "out"


def test_what_should_be_noticed_is_said(faulty):
    text = report(faulty).text
    for note in (
        "1 content under several labels: one at most is right",
        "2 of 49 inputs (4.08%) rejected, most as unidentified",
        "1 record of a single colour",
        "1 source (2.1%) narrower than 20 or lower than 20 pixels",
        "Class many has 44 records, few has 3: 15 to 1",
        "47 records in ",
    ):
        assert note in text, note
    assert "in/many/empty.png" in text and "in/many/text.png" in text
    assert re.search(r"few\s*,\s*many", text)
    assert "few/copy.png" in text and "many/0.png" in text


def test_lists_that_do_not_fit_are_refused(copied, capsys):
    with open(copied / "rejects.jsonl", "a") as file:
        file.write('{"key": "k", "path": "p", "label": "l", "reason": "corrupt", "detail": ""}\n')
    assert main(["report", str(copied)]) == 1
    assert "rejects.jsonl: does not have the rejects of dataset.json" in capsys.readouterr().err


def swap_offsets(folder):
    path = next(folder.glob("index/train-00000*.parquet"))
    table = pyarrow.parquet.read_table(path)
    offset = table["offset"].take(list(range(table.num_rows))[::-1])
    size = table["size"].take(list(range(table.num_rows))[::-1])
    for name, column in (("offset", offset), ("size", size)):
        table = table.set_column(table.column_names.index(name), name, column)
    pyarrow.parquet.write_table(table, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "dataset.json").unlink(), "no dataset.json, so this is no complete"),
        (lambda f: next(f.glob("index/*.parquet")).unlink(), ".parquet: missing: run tpufeed"),
        (lambda f: next(f.glob("index/*.parquet")).write_bytes(b"x"), ".parquet: "),
        (lambda f: (f / "duplicates.jsonl").unlink(), "duplicates.jsonl: missing: run tpufeed"),
        (swap_offsets, "its key is"),
        (lambda f: next(f.glob("train-*")).write_bytes(b""), "run tpufeed verify"),
        (lambda f: next(f.glob("train-*")).unlink(), "No such file"),
    ],
)
def test_a_damaged_set_is_refused_and_leaves_no_page(copied, capsys, spoil, message):
    spoil(copied)
    assert main(["report", str(copied)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tpufeed report: error: ") and err.count("\n") == 1
    assert message in err
    assert not (copied / "report.html").exists()


@pytest.mark.parametrize("module", ["matplotlib", "jinja2"])
def test_without_its_libraries_it_says_how_to_get_them(dataset, module):
    code = (
        f"import sys; sys.modules[{module!r}] = None; from pipeline.__main__ import main; "
        f"sys.exit(main(['report', {str(dataset)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tpufeed report: error: {module} cannot be imported (")
    assert done.stderr.endswith("): pip install 'tpufeed[report]'\n")


def test_a_bucket_has_the_same_page(dataset, tmp_path, monkeypatch):
    with serve() as store:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.address)
        bucket = store.client().create_bucket("flowers")
        for path in filter(Path.is_file, dataset.rglob("*")):
            bucket.blob(f"a/{path.relative_to(dataset)}").upload_from_filename(str(path))
        assert main(["report", "gs://flowers/a"]) == 0
        names = {blob.name for blob in store.client().list_blobs("flowers")}
        assert {n for n in names if n.startswith("a/_tmp") or n == "a/report.html"} == {
            "a/report.html"
        }
        remote = files.read_file("gs://flowers/a/report.html").decode()
    local = Path(shutil.copytree(dataset, tmp_path / "a"))
    report(local)
    here = (local / "report.html").read_text()
    assert remote == here.replace(str(local), "gs://flowers/a")


HOSTILE = (
    "<script>document.title='run'</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(2)",
    "</style><script>alert(3)</script>",
    "$\\frac{broken$ {{ 7 * 7 }} {% raw %}",
    "javascript:alert(4)",
    "]]>--><!-- &amp; &#60;b&#62;",
    "\u05d0\u05d1\u05d2 שלום",
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Labels, keys, columns, reject paths and folders that try to be more than text."""
    folder = tmp_path_factory.mktemp("hostile")
    pictures = folder / "<b onclick=alert(5)>&quot;'in'"
    for number, label in enumerate(HOSTILE):
        name = label.replace("/", "\u2215")
        draw(pictures / name / f"{name}.png", seed=number, size=(60, 50))
        (pictures / name / "empty<svg onload=alert(6)>.png").touch()
    fine = os.fsencode(pictures) + b"/\x1b[31mred\xff\xe2\x80\xae"
    os.makedirs(fine)
    with open(fine + b"/a\nb.png", "wb") as file:
        file.write(b"")
    output = folder / "<i>out&lt;'\"</i>\u202e"
    assert ingest(f"{pictures}/*/*", output, "--max-reject-rate", "1", "--image-size", "50") == 0
    return output


def test_names_are_only_text(hostile):
    document = report(hostile)
    tags = {tag for tag, _ in document.tags}
    assert not tags & {"script", "iframe", "object", "embed", "form", "base", "i", "a", "link"}
    for tag, attributes in document.tags:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        if tag == "img":
            assert attributes["src"].startswith("data:image/")
    text = (hostile / "report.html").read_text()
    assert all(c.isprintable() or c == "\n" for c in text)
    for label in HOSTILE:
        assert printable(label.replace("/", "\u2215")) in document.text, label
    assert "\\x1b[31mred\\udcff\\u202e" in document.text


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if find_chromium() is None:
        pytest.skip("no chromium on PATH: apt-get install chromium")
    with open_browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


LOOKS = [(400, False), (400, True), (1280, False), (1280, True)]


@pytest.mark.parametrize(("width", "dark"), LOOKS)
@pytest.mark.parametrize("which", ["faulty", "hostile"])
def test_a_browser_shows_it_all_and_asks_for_nothing(
    browser, request, tmp_path, which, width, dark
):
    folder = request.getfixturevalue(which)
    report(folder)
    browser.open(folder / "report.html", width=width, dark=dark)
    assert browser.complaints == []
    assert browser.requests == [(folder / "report.html").as_uri()]
    assert browser.value("document.documentElement.scrollWidth") <= width
    naturals = browser.value("[...document.images].map(image => image.naturalWidth)")
    assert len(naturals) == len(Document((folder / "report.html").read_text()).all("img"))
    assert naturals and all(naturals)
    assert browser.value("document.scripts.length") == 0
    assert browser.value("document.title").endswith(": data set report")
    plots = browser.value(
        "[...document.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect().width)"
    )
    assert len(plots) == 7 and min(plots) > 200
    paper = browser.value("getComputedStyle(document.body).backgroundColor")
    ink = browser.value("getComputedStyle(document.querySelector('svg text')).fill")
    light = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in (paper, ink)]
    assert (light[0] < light[1]) == dark
    shot = tmp_path / "shot.png"
    browser.screenshot(shot)
    with Image.open(shot) as picture:
        assert picture.height > 2000 and len(picture.getcolors(1 << 24)) > 500


def test_a_browser_tells_of_a_page_that_runs_or_asks(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        "<div style='width: 900px'>wide</div><img src='http://127.0.0.1:9/x.png'>"
        "<script>console.error('said'); throw Error('thrown')</script>"
    )
    browser.open(page, width=400)
    assert "http://127.0.0.1:9/x.png" in browser.requests
    assert any("said" in text for text in browser.complaints)
    assert any("thrown" in text for text in browser.complaints)
    assert browser.value("document.documentElement.scrollWidth") > 400
    assert browser.value("document.images[0].naturalWidth") == 0


def test_the_policy_stops_what_would_slip_through(browser, faulty, tmp_path):
    report(faulty)
    page = tmp_path / "page.html"
    slipped = "<img src='http://127.0.0.1:9/x.png'><script>document.title = 'run'</script>"
    page.write_text((faulty / "report.html").read_text().replace("<main>", slipped + "<main>"))
    browser.open(page, width=400)
    assert browser.value("document.title") != "run"
    assert sum("Content Security Policy" in text for text in browser.complaints) == 2


@pytest.mark.parametrize("offset", [-1, 10**9])
def test_a_record_that_is_elsewhere_is_named(dataset, offset):
    manifest = load_manifest(str(dataset))
    name = manifest.splits["train"].shards[0].name
    pick = Pick("train", 0, "ash/00.jpg", name, offset, 100)
    with pytest.raises(DataError, match=f"{name}, record 'ash/00.jpg': .*run tpufeed verify"):
        read_thumbnails(str(dataset), manifest, [pick], most_bytes=1000)


def test_it_is_written_whole_or_not_at_all(copied, monkeypatch):
    (copied / "report.html").mkdir()
    with pytest.raises((OSError, DataError)):
        write_report(str(copied))
    assert (copied / "report.html").is_dir()
