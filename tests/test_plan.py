"""`tpufeed plan`: what it says, beside what ingest then does."""

import hashlib
import json
import os
import shutil
import struct
import tempfile

import pytest
from helpers import draw, ingest

from pipeline import rehearsal
from pipeline.__main__ import main
from pipeline.config import IngestConfig, PlanConfig, UsageError
from pipeline.ingest import resolve_config
from pipeline.plan import (
    Costs,
    Prices,
    Sampled,
    choose_sample,
    count_classes,
    estimate_cost,
    estimate_seconds,
    parse_prices,
    warn_of_classes,
    warn_of_pictures,
    warn_of_rejects,
    warn_of_shards,
    warn_of_splits,
)
from pipeline.rehearsal import list_images
from transforms.image import PixelPolicy
from transforms.labels import Labelling
from transforms.manifest import load_manifest
from transforms.records import DataError, ImageRef, Input

FLAGS = ["--image-size", "32x24", "--split", "train=0.7,validation=0.3", "--shards", "6"]
COSTS = Costs(
    start=2.0,
    listing=1.0,
    graph=0.001,
    preparing=0.004,
    process=200,
    decoder=50,
    decoders=2,
    cores=4,
    memory=16_000_000_000,
    reference=100,
    reads=1,
)


@pytest.fixture(autouse=True)
def measured_roughly(monkeypatch):
    """No test looks at the seconds."""
    monkeypatch.setattr(rehearsal, "_TINY", 20)
    monkeypatch.setattr(rehearsal, "_SECONDS", 0.0001)


def plan(pattern, output, *flags: str) -> int:
    return main(["plan", "--input", str(pattern), "--output", str(output), *flags])


@pytest.fixture
def nothing_written(tmp_path, monkeypatch):
    """A folder for temporary files, in which nothing is left, as in the output."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = sorted(tmp_path.rglob("*"))
    yield tmp_path
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plan_is_what_ingest_does(pictures, dataset, nothing_written, capsys):
    output = nothing_written / "out"
    assert plan(f"{pictures}/*/*", output, *FLAGS, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    manifest = load_manifest(str(dataset))
    assert document["images"] == manifest.records == document["sampled"]
    assert document["labels"] == list(manifest.labels)
    assert list(document["splits"]) == list(manifest.splits)
    for name, split in manifest.splits.items():
        planned = document["splits"][name]
        assert planned["shards"] == len(split.shards)
        assert planned["classes"] == split.classes
        assert planned["bytes"] == pytest.approx(sum(s.bytes for s in split.shards), rel=0.2)
    # Every picture was looked at, so the sum is off by rounding only.
    total = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    assert document["bytes"] == pytest.approx(total, abs=2)
    assert document["source_bytes"] == sum(p.stat().st_size for p in pictures.glob("*/*"))
    assert document["seconds"] > 0 and document["memory"] > 0
    assert document["cost"] is None and document["rejects"] == {}


def test_a_sample_stands_for_all(tmp_path, capsys):
    for number in range(120):
        side = 24 + 4 * (number % 20)
        draw(tmp_path / "in" / "ab"[number % 2] / f"{number}.png", seed=number, size=(side, 32))
    flags = ["--resize-mode", "none", "--encoding", "png"]
    assert plan(f"{tmp_path}/in/*/*", tmp_path / "out", *flags, "--sample", "30", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert ingest(f"{tmp_path}/in/*/*", tmp_path / "out", *flags) == 0
    shards = load_manifest(str(tmp_path / "out")).splits["train"].shards
    assert document["sampled"] == 30
    assert document["bytes"] == pytest.approx(sum(shard.bytes for shard in shards), rel=0.2)
    assert document["splits"]["train"]["shards"] == len(shards) == 2


def test_the_report_for_people(pictures, nothing_written, capsys):
    (pictures / "broken").mkdir()
    (pictures / "broken" / "1.jpg").write_bytes(b"no picture")
    try:
        assert plan(f"{pictures}/*/*", nothing_written / "out", "--workers", "9") == 0
    finally:
        shutil.rmtree(pictures / "broken")
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith(f"{nothing_written}/out: 61 images, 0.")
    assert "  total           61" in lines
    assert "  train-00000-of-00001.tfrecord" in lines
    assert any(line.startswith("  time: ") and "9 worker(s) of" in line for line in lines)
    assert any(line.startswith("  memory of a worker: ") for line in lines)
    assert "  cost: not worked out: give --prices FILE" in lines
    assert "  rejects expected: unidentified 1; system files skipped: 0" in lines
    assert "  estimated from 61 of 61 pictures" in lines
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert warnings == [
        "warning: unequal classes: 'ash' has 20 images, 'broken' 1: weigh them, or gather more of "
        "the small ones",
        "warning: 1 shard(s) for 9 workers: a shard is written by one, so 8 stand idle; --shards "
        "36 keeps all busy",
        "warning: scaled up: 60 of 60 pictures looked at are smaller than 224x224: a smaller "
        "--image-size loses nothing of them",
        "warning: rejects expected: some 1 (unidentified 1), more than --max-reject-rate 0.01: "
        "ingest would fail; rejects.jsonl will name them",
    ]


def test_an_output_that_ingest_would_refuse(pictures, tmp_path, capsys):
    (tmp_path / "mine.txt").touch()
    assert plan(f"{pictures}/*/*", tmp_path) == 0
    assert (
        f"warning: --output {tmp_path}: not empty (mine.txt and 0 more), so ingest will refuse it: "
        "give another folder, --overwrite or --resume\n"
    ) in capsys.readouterr().out
    assert plan(f"{pictures}/*/*", tmp_path, "--overwrite") == 0
    assert "not empty" not in capsys.readouterr().out
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_the_cost_comes_from_the_prices_given(pictures, tmp_path, capsys):
    prices = tmp_path / "prices.json"
    given = {"date": "2026-12-01", "source": "our contract", "currency": "EUR", "core_hour": 3600}
    prices.write_text(json.dumps(given))
    assert plan(f"{pictures}/*/*", tmp_path / "out", "--prices", str(prices), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    paid = document["seconds"] * document["costs"]["cores"]
    assert document["cost"] == {"cores": pytest.approx(paid), "run": pytest.approx(paid)}
    assert plan(f"{pictures}/*/*", tmp_path / "out", "--prices", str(prices)) == 0
    out = capsys.readouterr().out
    assert " EUR (cores " in out and " at the prices of 2026-12-01, our contract\n" in out


def test_on_dataflow_nobody_need_be_signed_in(pictures, tmp_path, capsys):
    flags = ["--runner=DataflowRunner", "--project=p", "--region=r", "--temp_location=gs://b/t"]
    flags += ["--dataflow_endpoint=http://localhost:1"]
    assert plan(f"{pictures}/*/*", tmp_path / "out", *flags) == 0
    assert ", 2 decoder(s) each" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--shardz", "4"], 2, "--shardz: neither tpufeed nor Beam has such an option"),
        (["--workers", "0"], 2, "--workers 0: must be 1 or more"),
        (["--sample", "0"], 2, "--sample 0: must be 1 or more"),
        (["--prices", ""], 2, "--prices '': is empty; give a file or drop the flag"),
        (["--quality", "0"], 2, "--quality 0: allowed are 1 to 100"),
        (["--prices", "/nowhere"], 1, "--prices /nowhere: No such file or directory"),
        (["--shards", "99"], 1, "--shards 99: more than the 60 images found; allowed: 1 to 60"),
        (["--class-names", "/nowhere"], 1, "--class-names /nowhere: No such file or directory"),
    ],
)
def test_errors(pictures, nothing_written, capsys, flags, code, message):
    assert plan(f"{pictures}/*/*", nothing_written / "out", *flags) == code
    assert capsys.readouterr() == ("", f"tpufeed plan: error: {message}\n")


def test_no_input_matches(nothing_written, capsys):
    assert plan(f"{nothing_written}/none/*", nothing_written / "out") == 1
    assert "/none/*: no file matches" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "candidates"),
    [
        (["--duplicates", "drop"], 3),
        (["--duplicates", "together", "--split", "a=0.5,b=0.5"], 4),
        # Its copy is found to be one only when it is read.
        (["--exclude", "{folder}/exclude", "--class-names", "{folder}/names"], 2),
    ],
    ids=["drop", "together", "exclude"],
)
def test_listed_as_ingest_lists(tmp_path, capsys, flags, candidates):
    """Copies, exclusions and unknown labels leave as many images, splits and shards."""
    for name in ("cat/1", "cat/2", "dog/3"):
        draw(tmp_path / "in" / f"{name}.png", seed=int(name[-1]))
    shutil.copy(tmp_path / "in" / "cat" / "1.png", tmp_path / "in" / "dog" / "4.png")
    (tmp_path / "in" / "dog" / ".DS_Store").touch()
    (tmp_path / "exclude").write_text("dog/4.png\n")
    (tmp_path / "names").write_text("cat\n")
    flags = [flag.format(folder=tmp_path) for flag in flags]
    flags += ["--max-reject-rate", "1"]
    assert plan(f"{tmp_path}/in/*/*", tmp_path / "out", *flags, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert ingest(f"{tmp_path}/in/*/*", tmp_path / "out", *flags) == 0
    manifest = load_manifest(str(tmp_path / "out"))
    assert document["skipped"] == manifest.skipped == 1
    assert document["rejects"] == manifest.rejects
    assert document["labels"] == list(manifest.labels)
    shards = {name: split["shards"] for name, split in document["splits"].items()}
    assert shards == {name: len(split.shards) for name, split in manifest.splits.items()}
    assert document["images"] == candidates


def test_copies_of_rejects_are_rejects(tmp_path, capsys):
    """What was dropped for an image that is none, excluded or filtered is no duplicate."""
    draw(tmp_path / "in" / "a" / "0.png", seed=0)
    draw(tmp_path / "in" / "a" / "1.png", seed=1)
    draw(tmp_path / "in" / "a" / "2.png", seed=2, size=(9, 9))
    (tmp_path / "in" / "a" / "3.png").touch()
    for number in range(4):
        for copy in range(1 + number):
            source = tmp_path / "in" / "a" / f"{number}.png"
            shutil.copy(source, source.with_name(f"{number}-{copy}.png"))
    (tmp_path / "exclude").write_text("1.png\n")
    flags = ["--duplicates", "drop", "--min-size", "10", "--max-reject-rate", "0.9"]
    flags += ["--exclude", f"{tmp_path}/exclude"]
    assert plan(f"{tmp_path}/in/a/*", tmp_path / "out", *flags, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert ingest(f"{tmp_path}/in/a/*", tmp_path / "out", *flags) == 0
    manifest = load_manifest(str(tmp_path / "out"))
    assert document["rejects"] == manifest.rejects
    assert manifest.rejects == {"duplicate": 1, "excluded": 3, "filtered": 4, "zero_byte": 5}


def test_an_unknown_label_whose_content_is_excluded(tmp_path, capsys):
    """Excluded, as by ingest, and so outside the reject rate: by the file, or by another's key."""
    for name, seed in (("cat/1", 1), ("cat/2", 2), ("dog/3", 3), ("dog/4", 2)):
        draw(tmp_path / "in" / f"{name}.png", seed=seed)
    digest = hashlib.sha256((tmp_path / "in" / "dog" / "3.png").read_bytes()).hexdigest()
    (tmp_path / "exclude").write_text(f"{digest}\ncat/2.png\n")
    (tmp_path / "names").write_text("cat\n")
    flags = ["--exclude", f"{tmp_path}/exclude", "--class-names", f"{tmp_path}/names"]
    assert plan(f"{tmp_path}/in/*/*", tmp_path / "out", *flags, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert ingest(f"{tmp_path}/in/*/*", tmp_path / "out", *flags) == 0
    assert document["rejects"] == load_manifest(str(tmp_path / "out")).rejects == {"excluded": 3}
    assert not [text for text in document["warnings"] if "ingest would fail" in text]


def test_csv_and_idx_are_listed_too(tmp_path):
    draw(tmp_path / "1.png", seed=1)
    (tmp_path / "a.csv").write_text("path,label,split,age:int\n1.png,x,test,3\n")
    config = resolve_config(IngestConfig((Input(f"{tmp_path}/a.csv"),), "out"))
    listing, _ = list_images(config)
    (ref,) = listing.refs
    assert (ref.key, ref.label, ref.split, ref.features) == ("1.png", "x", "test", (("age", 3),))
    assert listing.shards == {"test": 1}


REFS = [ImageRef(str(n), f"/{n}", "ab"[n % 2], "train", size=n) for n in range(100)]


def test_the_sample_is_spread_over_the_sizes():
    chosen = choose_sample(REFS, number=10, seed=0)
    assert [ref.size // 10 for ref, _ in chosen] == list(range(10))
    assert [weight for _, weight in chosen] == [10.0] * 10
    assert choose_sample(REFS[::-1], number=10, seed=0) == chosen
    assert choose_sample(REFS, number=10, seed=1) != chosen
    assert choose_sample(REFS, number=200, seed=0) == [(ref, 1.0) for ref in REFS]
    assert choose_sample([], number=10, seed=0) == []
    weights = [weight for _, weight in choose_sample(REFS, number=7, seed=0)]
    assert sum(weights) == 100 and set(weights) == {14.0, 15.0}


def test_splits_in_the_order_of_dataset_json():
    refs = [ImageRef("1", "/1", "x", "zebra"), ImageRef("2", "/2", "x", "apple")]
    classes, images = count_classes(refs, splits=("train",))
    assert list(classes.items()) == [("train", {}), ("apple", {"x": 1}), ("zebra", {"x": 1})]
    assert list(images.items()) == [("train", 0), ("apple", 1), ("zebra", 1)]


def test_an_image_of_several_classes_counts_in_each():
    refs = [ImageRef("1", "/1", "cat|dog", "train"), ImageRef("2", "/2", "dog", "train")]
    found = count_classes(refs, splits=("train",), labelling=Labelling("many", "|"))
    assert found == ({"train": {"cat": 1, "dog": 2}}, {"train": 2})
    found = count_classes(refs, splits=("train",), labelling=Labelling("none"))
    assert found == ({"train": {}}, {"train": 2})


@pytest.mark.parametrize(
    ("shards", "workers", "seconds"),
    [
        (16, 1, 3 + 5),
        (16, 4, 3 + 5 / 4),
        (16, 5, 3 + 5 / 4),  # four rounds, the last of one shard
        (2, 8, 3 + 5 / 2),
        (0, 1, 3),
    ],
)
def test_seconds(shards, workers, seconds):
    found = estimate_seconds(1000, shards=shards, workers=workers, costs=COSTS)
    assert found == pytest.approx(seconds)


def test_cost():
    prices = Prices("d", "s", "USD", 1.0, 0.5, 0.25, 0.4, 3.0, 0.02)
    cost = estimate_cost(prices, images=50_000, output=10**9, seconds=1800, workers=4, costs=COSTS)
    assert cost == {
        "machines": pytest.approx(2.0),
        "cores": pytest.approx(2 * 4 * 0.5),
        "memory": pytest.approx(2 * 16 * 0.25),
        "reads": pytest.approx(2.0),
        "shuffle": pytest.approx(50_000 * 100 / 1e9 * 3),
        "run": pytest.approx(2 + 4 + 8 + 2 + 0.015),
        "storage a month": pytest.approx(0.02),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--prices p: no JSON: Expecting property name"),
        ("[]", "--prices p: must be an object, as in docs/plan.md"),
        ('{"vcpu": 1}', "--prices p: 'vcpu' is no price; allowed are date, source, currency, work"),
        ('{"date": ""}', "--prices p: date must be a text that is not empty"),
        ('{"date": "d", "core_hour": 1}', "--prices p: no source: say when and where the prices"),
        ('{"date": "d", "source": "s"}', "--prices p: no price; give one of worker_hour, core_"),
        ('{"core_hour": -1}', "--prices p: core_hour is -1, must be a number from 0"),
        ('{"core_hour": NaN}', "--prices p: core_hour is nan, must be a number from 0"),
        ('{"core_hour": true}', "--prices p: core_hour is True, must be a number from 0"),
    ],
)
def test_prices_that_are_none(text, message):
    with pytest.raises(DataError) as raised:
        parse_prices(text.encode(), path="p")
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("classes", "labels", "warnings"),
    [
        ({"train": {"a": 9, "b": 5}}, "ab", []),
        ({"train": {}}, "", []),
        ({"train": {"a": 9}}, "a", ["one class, 'a': the label is the name of the parent folder"]),
        ({"train": {"a": 10, "b": 1}}, "ab", ["unequal classes: 'a' has 10 images, 'b' 1: weigh"]),
        (
            {"train": {"a": 9, "b": 5}},
            "abcdefg",
            ["no image of 'c', 'd', 'e' and 2 more, which --c"],
        ),
        (
            {"train": {"a": 9, "b": 5}, "test": {"a": 1}},
            "ab",
            ["split test has no image of 'b': give it a larger share"],
        ),
        (
            {"train": {"Train": 9, "test": 5}},
            ["Train", "test"],
            ["the label 'Train', 'test' looks like a split: give --input SPLIT=PATTERN"],
        ),
        ({"train": {"a": 1, "b": 1, "c": 1}}, "abc", ["3 classes for 3 images: is the parent fo"]),
        ({"train": {"a ": 9, "b": 5}}, ["a ", "b"], ["the label 'a ' begins or ends with a space"]),
    ],
)
def test_warnings_of_classes(classes, labels, warnings):
    found = warn_of_classes(classes, list(labels))
    assert len(found) == len(warnings)
    for text, start in zip(found, warnings, strict=True):
        assert text.startswith(start)


def test_warnings_of_splits():
    found = warn_of_splits({"train": 9, "test": 0})
    assert found == ["split test is empty: give it a larger share, or drop it"]
    assert warn_of_splits({"train": 0, "test": 0}) == []


@pytest.mark.parametrize(
    ("shards", "output", "workers", "warnings"),
    [
        ({"train": 4}, 40_000_000, 4, []),
        ({"train": 1}, 1_000, 1, []),
        ({}, 0, 4, []),
        (
            {"train": 6, "test": 2},
            4_000_000,
            1,
            [
                "tiny shards: 8 of 500 kB: opening them takes longer than reading them from a "
                "bucket; --shards 4 makes them larger"
            ],
        ),
        (
            {"train": 2},
            40_000_000,
            3,
            [
                "2 shard(s) for 3 workers: a shard is written by one, so 1 stand idle; --shards 12 "
                "keeps all busy"
            ],
        ),
    ],
)
def test_warnings_of_shards(shards, output, workers, warnings):
    assert warn_of_shards(shards, output, workers=workers) == warnings


def test_warnings_of_pictures():
    config = IngestConfig((Input("in/*/*"),), "out", pixels=PixelPolicy(width=64, height=32))
    small = Sampled(1.0, source_pixels=9, enlarged=True)
    large = Sampled(1.0, source_pixels=60_000_000)
    refs = [ImageRef("k", "/in/\x1bk", "x", size=200_000_000)]
    assert warn_of_pictures([Sampled(1.0)], [], config=config) == []
    assert warn_of_pictures([small, large, Sampled(1.0, "corrupt")], refs, config=config) == [
        "scaled up: 1 of 2 pictures looked at are smaller than 64x32: a smaller --image-size loses "
        "nothing of them",
        "huge sources: 1 of more than 100 MB, as /in/\\x1bk: each is held in memory",
        "huge sources: 1 of 2 pictures looked at have more than 50 megapixels: --max-pixels leaves "
        "them out",
    ]


@pytest.mark.parametrize(
    ("rejects", "warnings"),
    [
        ({}, []),
        ({"duplicate": 50, "excluded": 3}, []),
        (
            {"corrupt": 1},
            ["rejects expected: some 1 (corrupt 1); rejects.jsonl will name them"],
        ),
        (
            {"corrupt": 1, "missing": 3, "duplicate": 9},
            [
                "rejects expected: some 4 (corrupt 1, missing 3), more than --max-reject-rate "
                "0.01: ingest would fail; rejects.jsonl will name them"
            ],
        ),
    ],
)
def test_warnings_of_rejects(rejects, warnings):
    assert warn_of_rejects(rejects, 100, most=0.01) == warnings


@pytest.mark.parametrize(
    ("rejects", "most", "warning"),
    [
        ({"excluded": 3}, 0.01, "no input would become a record (excluded 3): ingest would fail"),
        ({"corrupt": 2}, 1, "no input would become a record (corrupt 2): ingest would fail"),
        (
            {"corrupt": 2, "filtered": 1},
            0.9,
            "rejects expected: some 2 (corrupt 2), more than --max-reject-rate 0.9: ingest would "
            "fail; rejects.jsonl will name them",
        ),
    ],
)
def test_warnings_where_nothing_is_left(rejects, most, warning):
    assert warn_of_rejects(rejects, 0, most=most) == [warning]


def test_what_is_left_out_by_choice_is_outside_the_rate(tmp_path, capsys):
    """1 fault of 9 inputs that are neither filtered nor copies, and 2 of 10, as ingest counts."""
    for number in range(20):
        draw(tmp_path / "in" / "a" / f"{number}.png", seed=number, size=(9 + 9 * (number < 8), 20))
    (tmp_path / "in" / "a" / "x.png").write_bytes(b"text")
    flags = ["--min-size", "10", "--max-reject-rate", "0.1"]
    assert plan(f"{tmp_path}/in/*/*", tmp_path / "out", *flags, "--quiet") == 0
    assert "(unidentified 1), more than --max-reject-rate 0.1: ingest" in capsys.readouterr().out
    assert main(["ingest", "--input", f"{tmp_path}/in/*/*", "--output", f"{tmp_path}/out", *flags])
    assert "1 of 9 inputs were rejected (filtered 12, unid" in capsys.readouterr().err
    assert warn_of_rejects({"unknown_label": 2}, 98, most=0.02) == [
        "rejects expected: some 2 (unknown_label 2); rejects.jsonl will name them"
    ]


@pytest.mark.parametrize("inputs", ["table", "idx", "system"])
def test_inputs_without_an_image_are_refused_as_by_ingest(
    tmp_path, nothing_written, capsys, inputs
):
    folder = tempfile.mkdtemp(dir=tmp_path.parent)
    pattern = {"table": f"{folder}/a.csv", "idx": f"idx:{folder}", "system": f"{folder}/.D*"}
    with open(f"{folder}/a.csv", "w") as table:
        table.write("path,label\n")
    open(f"{folder}/.DS_Store", "w").close()
    for stem in ("train", "t10k"):
        for name, header in (
            ("images-idx3", struct.pack(">4I", 0x803, 0, 28, 28)),
            ("labels-idx1", struct.pack(">2I", 0x801, 0)),
        ):
            with open(f"{folder}/{stem}-{name}-ubyte", "wb") as file:
                file.write(header)
    assert plan(pattern[inputs], nothing_written / "out") == 1
    planned = capsys.readouterr()
    assert main(["ingest", "--input", pattern[inputs], "--output", f"{folder}/out"]) == 1
    assert planned.err == capsys.readouterr().err.replace("tpufeed ingest", "tpufeed plan")
    assert planned.err.startswith(
        "tpufeed plan: error: no image was found: the tables have no rows"
    )


def test_a_plan_needs_a_worker():
    with pytest.raises(UsageError, match="--workers 0: must be 1 or more"):
        PlanConfig(workers=0)
