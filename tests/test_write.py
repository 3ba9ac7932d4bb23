"""The writer: its pure parts, its PTransforms, and Beam's sink under it."""

import dataclasses
import importlib.metadata
import json
import threading

import apache_beam as beam
import apache_beam.io.tfrecordio
import pyarrow.parquet
import pytest
import tensorflow as tf
from apache_beam import pvalue
from apache_beam.testing.util import assert_that, equal_to
from helpers import COLLECTED, collect, draw

from transforms.image import PixelPolicy
from transforms.ordered import map_in_order
from transforms.records import DataError, ImageRef, Reject, ShardSummary
from transforms.resume import FORMAT, keep_plan
from transforms.screen import Exclusions
from transforms.shards import place_of, shard_name
from transforms.tables import Columns
from transforms.write import (
    RecordPolicy,
    WriteDuplicates,
    WriteRejects,
    WriteShards,
    check_reject_rate,
    library_versions,
    merge_columns,
    write_index,
)

POLICY = RecordPolicy(PixelPolicy(width=8, height=6, encoding="png"))
LABELS = ("ash", "birch")


def pipeline():
    return beam.Pipeline(runner="FnApiRunner")


def test_map_in_order_keeps_order_and_bounds_what_waits():
    waiting, most, lock = 0, 0, threading.Lock()

    def function(number):
        nonlocal waiting, most
        with lock:
            waiting += 1
            most = max(most, waiting)
        return number * number

    results = []
    for result in map_in_order(function, iter(range(500)), threads=3):
        with lock:
            waiting -= 1
        results.append(result)
    assert results == [number * number for number in range(500)]
    assert most <= 2 * 3 + 1


def test_map_in_order_passes_an_error_on():
    with pytest.raises(ZeroDivisionError):
        list(map_in_order(lambda number: 1 / number, [2, 1, 0, 1], threads=2))


@pytest.fixture
def refs(tmp_path):
    made = []
    for number in range(12):
        label = LABELS[number % 2]
        path = tmp_path / "in" / label / f"{number:02d}.png"
        draw(path, seed=number)
        made.append(ImageRef(f"{label}/{path.name}", str(path), label, split="train"))
    bad = tmp_path / "in" / "ash" / "bad.jpg"
    bad.write_bytes(b"")
    made.append(ImageRef("ash/bad.jpg", str(bad), "ash", split="train"))
    return made


def begin(output) -> str:
    """Writes plan.json, as KeepPlan does before any shard; returns its digest."""
    if output.is_file():
        return ""
    return keep_plan(str(output), {"format": FORMAT})


def write(refs, output, *, plan, exclusions=None):
    """Runs WriteShards and returns what it put out, by name."""
    COLLECTED.clear()
    with pipeline() as root:
        side = {
            name: pvalue.AsSingleton(root | name >> beam.Create([value]))
            for name, value in (
                ("plan", plan),
                ("labels", LABELS),
                ("exclusions", exclusions or Exclusions()),
                ("run", begin(output)),
            )
        }
        written = (
            root
            | beam.Create(refs)
            | WriteShards(str(output), policy=POLICY, seed=0, decoders=2, **side)
        )
        for name, collection in written.items():
            collection | f"Keep{name}" >> beam.Map(collect, name)
    return {name: list(COLLECTED.get(name, [])) for name in written}


def test_write_shards(refs, tmp_path):
    output = tmp_path / "out"
    found = write(refs, output, plan={"train": 2, "test": 1})
    assert [reject.reason for reject in found["rejects"]] == ["zero_byte"]
    assert len(found["contents"]) == 12
    names = ["test-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002"]
    assert sorted(summary.name for summary in found["summaries"]) == names
    assert sorted(path.name for path in output.iterdir()) == [
        "_tmp", "index", *(name + ".tfrecord" for name in names)
    ]  # fmt: skip
    assert sorted(path.name for path in (output / "_tmp").iterdir()) == sorted(
        ["plan.json", *(name + ".done.json" for name in names)]
    )
    keys = []
    for summary in sorted(found["summaries"], key=lambda s: s.name):
        path = output / (summary.name + ".tfrecord")
        assert summary.bytes == path.stat().st_size
        records = list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
        assert summary.records == len(records)
        examples = [tf.train.Example.FromString(record) for record in records]
        in_file = [e.features.feature["key"].bytes_list.value[0].decode() for e in examples]
        assert in_file == sorted(in_file, key=lambda key: place_of(key, seed=0))
        index = pyarrow.parquet.read_table(output / "index" / (summary.name + ".parquet"))
        assert index.column("key").to_pylist() == in_file
        keys += in_file
    assert sorted(keys) == sorted(ref.key for ref in refs if ref.path[-7:] != "bad.jpg")


def test_the_index_gives_random_access_in_dalis_form(refs, tmp_path):
    write(refs, tmp_path / "out", plan={"train": 1})
    data = (tmp_path / "out" / "train-00000-of-00001.tfrecord").read_bytes()
    lines = (tmp_path / "out" / "index" / "train-00000-of-00001.idx").read_text().splitlines()
    records = tf.data.TFRecordDataset(str(tmp_path / "out" / "train-00000-of-00001.tfrecord"))
    for line, record in zip(lines, records.as_numpy_iterator(), strict=True):
        offset, size = map(int, line.split())
        assert data[offset + 12 : offset + size - 4] == record
    assert sum(int(line.split()[1]) for line in lines) == len(data)


def test_the_names_are_beams_and_ours_alike():
    sink = apache_beam.io.tfrecordio.WriteToTFRecord("x", file_name_suffix=".tfrecord")._sink
    for index, count in ((0, 1), (12, 345), (99_998, 99_999)):
        ours = shard_name(split="x", index=index, count=count) + ".tfrecord"
        assert sink._get_final_name(index, count) == ours


def test_records_are_framed_by_beam(refs, tmp_path, monkeypatch):
    """Beam's framing broken, every record must be broken: nothing else may write them."""
    monkeypatch.setattr(
        apache_beam.io.tfrecordio._TFRecordUtil,
        "_masked_crc32c",
        classmethod(lambda cls, value, crc32c_fn=None: 0),
    )
    write(refs, tmp_path / "out", plan={"train": 1})
    dataset = tf.data.TFRecordDataset(str(tmp_path / "out" / "train-00000-of-00001.tfrecord"))
    with pytest.raises(tf.errors.DataLossError):
        list(dataset)


def test_beams_sink_opens_encodes_and_closes(refs, tmp_path, monkeypatch):
    sink = apache_beam.io.filebasedsink.FileBasedSink
    called = []

    def counting(name):
        real = getattr(sink, name)
        return lambda self, *args: called.append(name) or real(self, *args)

    for name in ("open", "write_record", "close"):
        monkeypatch.setattr(sink, name, counting(name))
    write(refs, tmp_path / "out", plan={"train": 1})
    assert called == ["open", *["write_record"] * 12, "close"]


def test_excluded_content_leaves_only_the_hash_of_its_key(refs, tmp_path):
    import hashlib

    digest = hashlib.sha256(open(refs[0].path, "rb").read()).hexdigest()
    exclusions = Exclusions(contents=frozenset([digest]))
    found = write(refs, tmp_path / "out", plan={"train": 1}, exclusions=exclusions)
    name = hashlib.sha256(refs[0].key.encode()).hexdigest()
    assert Reject(f"sha256:{name}", "", "", "excluded", "by --exclude") in found["rejects"]
    assert len(found["contents"]) == 11


def test_a_folder_that_cannot_be_written_to_is_named(refs, tmp_path):
    (tmp_path / "out").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot write to .*/out: Not a directory; mend it, then"):
        write(refs, tmp_path / "out", plan={"train": 1})


def test_write_rejects(tmp_path):
    rejects = [
        Reject("b", "/b", "x", "corrupt", "how"),
        Reject("a\udce9", "/a\udce9", "", "bad_name", "not UTF-8"),
        Reject("c", "/c", "x", "corrupt", "\x1b[31m"),
    ]
    with pipeline() as root:
        counts = root | beam.Create(rejects) | WriteRejects(str(tmp_path))
        assert_that(counts, equal_to([{"bad_name": 1, "corrupt": 2}]))
    lines = (tmp_path / "rejects.jsonl").read_text(encoding="ascii").splitlines()
    ordered = [rejects[1], rejects[0], rejects[2]]
    assert [json.loads(line) for line in lines] == [dataclasses.asdict(r) for r in ordered]
    assert "\x1b" not in lines[2]


def test_no_rejects_is_an_empty_file(tmp_path):
    with pipeline() as root:
        counts = root | beam.Create([], reshuffle=False) | WriteRejects(str(tmp_path))
        assert_that(counts, equal_to([{}]))
    assert (tmp_path / "rejects.jsonl").read_bytes() == b""


def test_write_duplicates(tmp_path):
    contents = [(b"f" * 32, ("b", "x")), (b"0" * 32, ("d", "x")), (b"f" * 32, ("a", "y"))]
    with pipeline() as root:
        lines = root | beam.Create(contents) | WriteDuplicates(str(tmp_path))
        assert_that(lines, equal_to([1]))
    assert json.loads((tmp_path / "duplicates.jsonl").read_text()) == {
        "sha256": "66" * 32,
        "keys": ["a", "b"],
        "labels": ["y", "x"],
    }


@pytest.mark.parametrize(
    "records, rejects, rate, passes",
    [
        (99, {"corrupt": 1}, 0.01, True),
        (98, {"corrupt": 2}, 0.01, False),
        (98, {"excluded": 200}, 0.01, True),
        (1, {"corrupt": 99}, 1, True),
        (0, {"corrupt": 3}, 1, False),
    ],
)
def test_check_reject_rate(records, rejects, rate, passes):
    def check():
        check_reject_rate(records, rejects, max_reject_rate=rate, output="/out")

    if passes:
        check()
        return
    with pytest.raises(DataError) as caught:
        check()
    assert "/out/rejects.jsonl" in str(caught.value)


def test_no_image_at_all():
    with pytest.raises(DataError, match="^no image was found: the tables have no rows, or all "):
        check_reject_rate(0, {}, max_reject_rate=1, output="/out")


def test_check_reject_rate_says_what_to_do():
    with pytest.raises(DataError) as caught:
        check_reject_rate(7, {"corrupt": 2, "missing": 1}, max_reject_rate=0.1, output="/out")
    assert str(caught.value) == (
        "3 of 10 inputs were rejected (corrupt 2, missing 1), more than --max-reject-rate 0.1: "
        "see /out/rejects.jsonl; mend the inputs, or raise the rate and go on with --resume"
    )


def test_merge_columns():
    assert merge_columns([]) == ()
    same = [Columns("a.csv", ()), Columns("b.csv", ())]
    assert merge_columns(same) == ()
    from transforms.example import FeatureSpec

    other = [Columns("b.csv", (FeatureSpec("age", "int64", (), 0),)), Columns("a.csv", ())]
    with pytest.raises(DataError) as caught:
        merge_columns(other)
    assert str(caught.value) == (
        "a.csv and b.csv differ in their extra columns: give every file the same header"
    )


def test_an_empty_shard_has_an_empty_index(tmp_path):
    write_index(str(tmp_path), "train-00000-of-00001", [])
    table = pyarrow.parquet.read_table(tmp_path / "index" / "train-00000-of-00001.parquet")
    assert table.num_rows == 0
    assert (tmp_path / "index" / "train-00000-of-00001.idx").read_bytes() == b""


def test_summaries_pickle_by_value():
    import pickle

    ref = ImageRef("k", "/p", "l", "s", "g", 1, 2, (("age", 3),))
    summary = ShardSummary("s", 0, "n", 1, 2, "x", (("l", 1),), 4, (1,), (1,))
    for value in (ref, summary):
        assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize(
    "ref",
    [
        ImageRef("cat/1.jpg", "/in/cat/1.jpg", "cat"),
        ImageRef("cat/1.jpg", "cat/1.jpg", "cat", "train", "g", 7),
        ImageRef("own name", "gs://b/x.jpg", "cat", size=9, features=(("age", 4), ("of", b"x"))),
        ImageRef("test/00000003", "/in/t10k-images", "7", "test", "", 784, 3),
        ImageRef("1.jpg", "/in/\udcff1.jpg", "cat"),
    ],
)
def test_refs_pickle_by_value(ref):
    import pickle

    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(ref, protocol)) == ref


def test_the_versions_of_all_that_decides_the_bytes_are_kept():
    versions = library_versions()
    for name in ("apache-beam", "pillow", "simplejpeg", "cykooz-resizer", "pyarrow"):
        assert versions[name] == importlib.metadata.version(name)
    assert set(versions) >= {"python", "machine", "libjpeg-turbo"}
