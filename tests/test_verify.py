"""Every damage is found, and named: file, record, reason."""

import copy
import gzip
import io
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf
from helpers import draw, ingest

from pipeline.__main__ import main
from pipeline.verify import RecordError, read_records, verify_dataset
from transforms import manifest


@pytest.fixture
def copied(dataset, tmp_path):
    return shutil.copytree(dataset, tmp_path / "copy")


def first_shard(folder):
    document = json.loads((folder / "dataset.json").read_text())
    shards = document["splits"]["train"]["shards"]
    return folder / next(shard["name"] for shard in shards if shard["records"] >= 3)


def edit(folder, change, *, forge=True):
    """Changes dataset.json, and by default forges the fingerprint to fit."""
    path = folder / "dataset.json"
    document = json.loads(path.read_text())
    change(document)
    if forge:
        document["fingerprint"] = manifest.fingerprint(document)
    path.write_text(json.dumps(document))


def offsets_of(shard):
    lines = (shard.parent / "index" / (shard.stem + ".idx")).read_text().splitlines()
    return [tuple(map(int, line.split())) for line in lines]


def test_a_whole_set_has_no_findings(dataset, capsys):
    for depth in ("quick", "full", "deep"):
        assert verify_dataset(str(dataset), depth=depth) == []
    assert main(["verify", str(dataset)]) == 0
    assert capsys.readouterr().out == f"{dataset}: whole\n"


def test_any_byte_flipped_in_a_shard_is_found_and_its_record_named(copied):
    shard = first_shard(copied)
    whole = shard.read_bytes()
    offsets = offsets_of(shard)
    # Every byte of the first record's framing, and some of every record's data.
    places = [*range(12), *np.random.default_rng(0).integers(0, len(whole), 60).tolist()]
    places += [offset + size - 1 for offset, size in offsets]
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << (place % 8)
        shard.write_bytes(broken)
        findings = verify_dataset(str(copied))
        number = max(i for i, (offset, _) in enumerate(offsets) if offset <= place)
        assert findings, f"byte {place}"
        assert findings[0].startswith(f"{shard.name}: record {number}: the "), findings
        assert "checksum does not match" in findings[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """One shard of three records, small enough to try all that can happen to a byte of it."""
    folder = tmp_path_factory.mktemp("tiny")
    for number in range(3):
        draw(folder / "in" / "ash" / f"{number}.png", seed=number, size=(8, 8))
    flags = ["--image-size", "6", "--channels", "1", "--encoding", "raw", "--shards", "1"]
    assert ingest(f"{folder}/in/*/*", folder / "out", *flags) == 0
    return folder / "out"


def test_every_other_value_of_every_byte_is_found_in_its_record(tiny):
    shard = first_shard(tiny)
    whole = shard.read_bytes()
    offsets = offsets_of(shard)
    assert [record.fault for record in read_records(io.BytesIO(whole))] == ["", "", ""]
    for place, value in enumerate(whole):
        number = sum(offset <= place for offset, _ in offsets) - 1
        for other in set(range(256)) - {value}:
            broken = whole[:place] + bytes([other]) + whole[place + 1 :]
            try:
                faults = [record.fault for record in read_records(io.BytesIO(broken))]
            except RecordError as error:  # of the length: nothing after can be read
                faults = [str(error)]
            (fault,) = filter(None, faults)
            assert fault.startswith(f"record {number}: the "), (place, other)
            assert "checksum does not match" in fault, (place, other)


def test_every_byte_flipped_and_every_cut_is_found_by_verify(tiny, tmp_path):
    copied = shutil.copytree(tiny, tmp_path / "copy")
    shard = first_shard(copied)
    whole = shard.read_bytes()
    offsets = offsets_of(shard)
    assert verify_dataset(str(copied)) == [] and 500 < len(whole) < 1500
    for place in range(len(whole)):
        number = sum(offset <= place for offset, _ in offsets) - 1
        bit = 1 << place % 8
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        (finding,) = verify_dataset(str(copied))
        assert finding.startswith(f"{shard.name}: record {number}: the "), (place, finding)
        shard.write_bytes(whole[:place])
        size, *rest = verify_dataset(str(copied))
        assert size == f"{shard.name}: {place} bytes, dataset.json says {len(whole)}"
        ends = [offset for offset, _ in offsets]
        if place in ends:  # no record is damaged: some are not there
            expected = [f"{shard.name}: {ends.index(place)} records, dataset.json says 3"]
        else:
            part = "length" if place < offsets[number][0] + 12 else "data"
            expected = [f"{shard.name}: record {number}: the file ends within the {part}"]
        assert rest[: len(expected)] == expected, (place, rest)


def test_a_changed_record_with_right_checksums_is_found(copied):
    shard = first_shard(copied)
    records = list(tf.data.TFRecordDataset(str(shard)).as_numpy_iterator())
    example = tf.train.Example.FromString(records[1])
    example.features.feature["class"].int64_list.value[0] += (
        -1 if example.features.feature["class"].int64_list.value[0] else 1
    )
    records[1] = example.SerializeToString(deterministic=True)
    with tf.io.TFRecordWriter(str(shard)) as writer:
        for record in records:
            writer.write(record)
    (finding,) = verify_dataset(str(copied))
    assert finding.startswith(f"{shard.name}: record 1: class is ")


def test_two_exchanged_records_are_found(copied):
    shard = first_shard(copied)
    records = list(tf.data.TFRecordDataset(str(shard)).as_numpy_iterator())
    records[0], records[1] = records[1], records[0]
    with tf.io.TFRecordWriter(str(shard)) as writer:
        for record in records:
            writer.write(record)
    assert any(f.startswith(f"{shard.name}: record 0: ") for f in verify_dataset(str(copied)))


def test_a_shard_cut_at_a_record_boundary(copied):
    shard = first_shard(copied)
    size = shard.stat().st_size
    offset, _ = offsets_of(shard)[-1]
    shard.write_bytes(shard.read_bytes()[:offset])
    # TensorFlow itself reads it without a word.
    assert len(list(tf.data.TFRecordDataset(str(shard)))) == len(offsets_of(shard)) - 1
    expected = [f"{shard.name}: {offset} bytes, dataset.json says {size}"]
    assert verify_dataset(str(copied), depth="quick") == expected
    assert verify_dataset(str(copied))[0] == expected[0]


def test_a_shard_cut_within_a_record(copied):
    shard = first_shard(copied)
    last = len(offsets_of(shard)) - 1
    shard.write_bytes(shard.read_bytes()[:-5])
    assert f"{shard.name}: record {last}: the file ends within the data" in verify_dataset(
        str(copied)
    )


def test_missing_files(copied):
    shard = first_shard(copied)
    shard.unlink()
    (copied / "index" / (shard.stem + ".idx")).unlink()
    (copied / "rejects.jsonl").unlink()
    assert verify_dataset(str(copied), depth="quick") == [
        f"index/{shard.stem}.idx: missing",
        f"{shard.name}: missing",
        "rejects.jsonl: missing",
    ]


def test_a_stray_shard_of_another_count(copied):
    shutil.copy(first_shard(copied), copied / "train-00000-of-00099.tfrecord")
    (copied / "train-notes.txt").write_text("a glob of train-* matches this")
    (copied / "notes.txt").write_text("this is nobody's business")
    text = "not in dataset.json, but a glob of shards would match it"
    assert verify_dataset(str(copied), depth="quick") == [
        f"train-00000-of-00099.tfrecord: {text}",
        f"train-notes.txt: {text}",
    ]


def test_no_manifest_is_no_data_set(copied, capsys):
    (copied / "dataset.json").unlink()
    assert main(["verify", str(copied)]) == 1
    assert "dataset.json: missing" in capsys.readouterr().err


def swap_labels(document):
    document["labels"][0], document["labels"][1] = document["labels"][1], document["labels"][0]


def rename_label(document):
    document["labels"][0] = "elm"
    for split in document["splits"].values():
        split["classes"] = {
            ("elm" if label == "ash" else label): n for label, n in split["classes"].items()
        }


def move_count(document):
    classes = document["splits"]["train"]["classes"]
    classes["ash"] += 1
    classes["birch"] -= 1


CHANGES = {
    "labels swapped": swap_labels,
    "label renamed": rename_label,
    "label added": lambda d: d["labels"].append("dogwood"),
    "label dropped": lambda d: d["labels"].pop(),
    "offset": lambda d: d.update(label_offset=1),
    "split's records": lambda d: d["splits"]["train"].update(records=1),
    "class count": move_count,
    "shard's records": lambda d: d["splits"]["train"]["shards"][0].update(records=999),
    "shard's bytes": lambda d: d["splits"]["train"]["shards"][0].update(bytes=1),
    "shard's sha256": lambda d: d["splits"]["train"]["shards"][0].update(sha256="0" * 64),
    "shard dropped": lambda d: d["splits"]["train"]["shards"].pop(),
    "mean": lambda d: d["channel_mean"].__setitem__(0, d["channel_mean"][0] + 1e-9),
    "standard deviation": lambda d: d["channel_std"].__setitem__(2, 0.5),
    "image size": lambda d: d.update(image_size=[32, 24]),
    "schema": lambda d: d.update(schema="tfds"),
    "encoding": lambda d: d.update(encoding="png"),
    "channels": lambda d: d.update(channels=1),
    "feature": lambda d: d["features"]["class"].update(dtype="float"),
    "feature dropped": lambda d: d["features"].pop("key"),
    "rejects": lambda d: d["rejects"].update(corrupt=3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_change_of_dataset_json_is_found_even_with_a_forged_fingerprint(copied, name):
    edit(copied, CHANGES[name])
    findings = verify_dataset(str(copied))
    assert findings, name
    assert all(": " in finding for finding in findings)


def test_an_edited_number_is_found_by_the_fingerprint_and_readers_refuse(copied):
    edit(copied, lambda d: d.update(skipped=7), forge=False)
    (finding,) = verify_dataset(str(copied), depth="quick")
    assert finding.startswith("dataset.json: fingerprint is ")
    with pytest.raises(ValueError, match="the contents give .*: the file was edited"):
        manifest.load_manifest(str(copied))


def rewrite_index(shard, change):
    path = shard.parent / "index" / (shard.stem + ".parquet")
    table = pyarrow.parquet.read_table(path)
    rows = copy.deepcopy(table.to_pylist())
    change(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema), path)


INDEX_CHANGES = {
    "key": lambda rows: rows[0].update(key="another"),
    "label": lambda rows: rows[0].update(label="yew"),
    "class": lambda rows: rows[0].update({"class": 7}),
    "offset": lambda rows: rows[0].update(offset=1),
    "size": lambda rows: rows[-1].update(size=1),
    "pixels": lambda rows: rows[0].update(pixels=1),
    "channel_sum": lambda rows: rows[0]["channel_sum"].__setitem__(0, 1),
    "squares": lambda rows: rows[0]["channel_sum_of_squares"].__setitem__(0, 1),
    "source_sha256": lambda rows: rows[0].update(source_sha256=rows[1]["source_sha256"]),
    "row dropped": lambda rows: rows.pop(),
    "row doubled": lambda rows: rows.append(rows[0]),
}


@pytest.mark.parametrize("name", INDEX_CHANGES)
def test_an_index_that_does_not_match(copied, name):
    rewrite_index(first_shard(copied), INDEX_CHANGES[name])
    assert verify_dataset(str(copied)), name


def test_a_damaged_index_is_named(copied):
    path = copied / "index" / (first_shard(copied).stem + ".parquet")
    data = bytearray(path.read_bytes())
    data[40] ^= 0xFF
    path.write_bytes(data)
    assert verify_dataset(str(copied))[0].startswith(f"index/{path.name}: ")
    idx = path.with_suffix(".idx")
    path.write_bytes(bytes(data[:40]) + bytes([data[40] ^ 0xFF]) + bytes(data[41:]))
    idx.write_text(idx.read_text().replace("0 ", "1 ", 1))
    assert verify_dataset(str(copied), depth="quick")[0].startswith(f"index/{idx.name}: line 1 is ")


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("channel_sum", None, "no column 'channel_sum'"),
        ("key", None, "no column 'key'"),
        ("offset", ["0", "1", "2"], "column offset is string, or has gaps"),
        ("key", [b"a", b"b", b"c"], "column key is binary, or has gaps"),
        ("size", [1, None, 3], "column size is int64, or has gaps"),
        ("channel_sum", [1, 2, 3], "column channel_sum is int64, or has gaps"),
        ("channel_sum", [[1], None, [3]], "column channel_sum is list<"),
        ("channel_sum_of_squares", [[1], [2, 2], [3]], "column channel_sum_of_squares has not 1 "),
    ],
)
def test_an_index_of_another_form(tiny, tmp_path, name, values, said):
    copied = shutil.copytree(tiny, tmp_path / "copy")
    path = copied / "index" / (first_shard(copied).stem + ".parquet")
    table = pyarrow.parquet.read_table(path)
    table = table.drop_columns([name])
    pyarrow.parquet.write_table(
        table.append_column(name, pyarrow.array(values)) if values else table, path
    )
    assert main(["verify", str(copied)]) == 1
    (finding,) = verify_dataset(str(copied))
    assert finding.startswith(f"index/{path.name}: {said}")


def test_no_damage_to_an_index_is_more_than_a_finding(tiny, tmp_path):
    """What changes no value of it, as in parquet's statistics, is none."""
    copied = shutil.copytree(tiny, tmp_path / "copy")
    path = copied / "index" / (first_shard(copied).stem + ".parquet")
    whole = path.read_bytes()
    rows = pyarrow.parquet.read_table(path).to_pylist()
    found = 0
    for place in np.random.default_rng(0).integers(0, len(whole), 500).tolist():
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        findings = verify_dataset(str(copied))
        assert all(f.startswith(f"index/{path.name}: ") for f in findings), findings
        found += bool(findings)
        if not findings:
            names = ["key", "label", "class", "offset", "size", "source_sha256"]
            again = pyarrow.parquet.read_table(path).to_pylist()
            assert [[r[n] for n in names] for r in again] == [[r[n] for n in names] for r in rows]
    assert found > 50


def test_a_record_in_the_wrong_shard_is_found(copied):
    """Two shards exchanged with all their index and manifest entries: only the plan tells."""
    document = json.loads((copied / "dataset.json").read_text())
    shards = document["splits"]["train"]["shards"]
    one, other = shards[0], shards[1]
    for suffix, folder in (
        (".tfrecord", copied),
        (".parquet", copied / "index"),
        (".idx", copied / "index"),
    ):
        a = folder / one["name"].replace(".tfrecord", suffix)
        b = folder / other["name"].replace(".tfrecord", suffix)
        swap = folder / "swap"
        a.rename(swap), b.rename(a), swap.rename(b)
    one["name"], other["name"] = other["name"], one["name"]
    document["splits"]["train"]["shards"][:2] = [other, one]
    document["fingerprint"] = manifest.fingerprint(document)
    (copied / "dataset.json").write_text(json.dumps(document))
    findings = verify_dataset(str(copied))
    assert any("belongs to shard" in finding for finding in findings), findings


def test_deep_finds_a_picture_that_does_not_decode(copied):
    shard = first_shard(copied)
    records = list(tf.data.TFRecordDataset(str(shard)).as_numpy_iterator())
    example = tf.train.Example.FromString(records[0])
    image = bytearray(example.features.feature["image"].bytes_list.value[0])
    image[2:] = bytes(len(image) - 2)
    image[2] = 0xFF
    example.features.feature["image"].bytes_list.value[0] = bytes(image)
    records[0] = example.SerializeToString(deterministic=True)
    with tf.io.TFRecordWriter(str(shard)) as writer:
        for record in records:
            writer.write(record)
    edit(copied, lambda d: forge_shard(d, shard))
    assert verify_dataset(str(copied)) == []  # every checksum is right
    (finding,) = verify_dataset(str(copied), depth="deep")
    assert finding.startswith(f"{shard.name}: record 0: picture does not decode: ")


def forge_shard(document, shard):
    import hashlib

    for entry in document["splits"]["train"]["shards"]:
        if entry["name"] == shard.name:
            entry["sha256"] = hashlib.sha256(shard.read_bytes()).hexdigest()


def frame(payload: bytes) -> bytes:
    def masked(data):
        crc = google_crc32c.value(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked(length)) + payload + struct.pack("<I", masked(payload))


GZIPPED = gzip.compress(frame(b"one"), mtime=0)


def test_read_records_agrees_with_tensorflow(tmp_path):
    payloads = [b"", b"one", bytes(70_000)]
    for compression in ("", "GZIP"):
        path = str(tmp_path / f"records{compression}")
        with tf.io.TFRecordWriter(path, compression) as writer:
            for payload in payloads:
                writer.write(payload)
        with open(path, "rb") as file:
            assert [record.payload for record in read_records(file)] == payloads
    assert b"".join(map(frame, payloads)) == (tmp_path / "records").read_bytes()


@pytest.mark.parametrize(
    "data, message",
    [
        (b"short", "record 0: the file ends within the length"),
        (b"no TFRecord at all", "record 0: the length's checksum does not match: is this a"),
        (frame(b"one") + b"12345678901", "record 1: the file ends within the length"),
        (frame(b"one")[:-1], "record 0: the file ends within the data"),
        (frame(b"one") + frame(b"two")[:13], "record 1: the file ends within the data"),
        (b"\x1f\x8b" + b"not gzip after all", "record 0: cannot be read: "),
        (
            GZIPPED[:10] + bytes([0xFF]) + GZIPPED[11:],
            "record 0: cannot be read: Error -3 while decompressing",
        ),
    ],
)
def test_read_records_says_what_is_wrong(data, message):
    with pytest.raises(RecordError) as caught:
        list(read_records(io.BytesIO(data)))
    assert str(caught.value).startswith(message)


def test_the_corpus_of_record_files(shared):
    """Files that other tools wrote: read as TensorFlow reads them, or refused."""
    lines = (shared / "corpus/INDEX.tsv").read_text().splitlines()
    header, *rows = (line.split("\t") for line in lines)
    rows = [dict(zip(header, row, strict=True)) for row in rows]
    rows = [row for row in rows if row["expected"].startswith("tfrecord")]
    assert len(rows) == 9
    for row in rows:
        path = str(shared / "corpus/files" / row["path"])
        with open(path, "rb") as file:
            if row["expected"] == "tfrecord_bad":
                with pytest.raises(RecordError, match="record 0: "):
                    list(read_records(file))
                continue
            records = list(read_records(file))
        compression = "GZIP" if path.endswith(".gz") else ""
        assert not any(record.fault for record in records)
        assert [record.payload for record in records] == list(
            tf.data.TFRecordDataset(path, compression).as_numpy_iterator()
        )


def test_quick_reads_no_shard(copied):
    """train and launch do it first, on sets of terabytes."""
    shard = first_shard(copied)
    data = bytearray(shard.read_bytes())
    data[50] ^= 1
    shard.write_bytes(data)
    assert verify_dataset(str(copied), depth="quick") == []
    assert verify_dataset(str(copied))


def test_every_schema_and_encoding_verifies_deep(pictures, tmp_path):
    for schema, encoding, extra in (
        ("flowers", "raw", ["--channels", "1"]),
        ("imagenet", "png", ["--label-offset", "1"]),
        ("tfds", "original", ["--resize-mode", "none"]),
    ):
        output = tmp_path / schema
        flags = ["--schema", schema, "--encoding", encoding, "--image-size", "32x24", *extra]
        assert ingest(f"{pictures}/*/*", output, *flags) == 0
        assert main(["verify", str(output), "--deep"]) == 0
        assert main(["verify", str(output), "--sources", "60"]) == 0


def test_to_verify_takes_no_pandas(tiny):
    """Which pyarrow imports by itself for some of its functions: a fifth of a second."""
    code = (
        "import sys; from pipeline.verify import verify_dataset;"
        "print(verify_dataset(sys.argv[1], depth='deep'), 'pandas' in sys.modules)"
    )
    words = [sys.executable, "-c", code, str(tiny)]
    ended = subprocess.run(
        words, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[] False\n"
