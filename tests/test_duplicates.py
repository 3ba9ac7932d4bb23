"""--duplicates and verify --leakage: copies by content, across classes and splits."""

import hashlib
import json
import shutil

import apache_beam as beam
import pyarrow.parquet
import pytest
from apache_beam.testing.util import assert_that, equal_to
from helpers import draw, ingest

from pipeline.__main__ import main
from pipeline.verify import verify_dataset
from transforms.duplicates import TreatCopies, drop_copies, group_by_content, know_content
from transforms.manifest import load_manifest
from transforms.records import Copy, DataError, Exclusions, ImageRef, Reject
from transforms.write import treat_copies

FLAGS = ["--image-size", "16", "--split", "train=0.5,test=0.5", "--shards", "4"]


@pytest.fixture
def copies(tmp_path):
    """40 pictures; 12 of them twice or more, some under another label."""
    folder = tmp_path / "in"
    for number in range(40):
        draw(folder / "ab"[number % 2] / f"{number:02d}.png", seed=number)
    for number in range(12):
        source = folder / "ab"[number % 2] / f"{number:02d}.png"
        shutil.copy(source, folder / "a" / f"copy-{number}.png")
        if number % 3 == 0:
            shutil.copy(source, folder / "b" / f"copy-{number}.png")
    return folder


def rows_of(output):
    return {
        row["key"]: (path.name.split("-")[0], row["source_sha256"], row["label"])
        for path in sorted(output.glob("index/*.parquet"))
        for row in pyarrow.parquet.read_table(path).to_pylist()
    }


def lines(output, name):
    return [json.loads(line) for line in (output / name).read_text().splitlines()]


def groups_of(folder):
    """By an independent path: the files themselves. {sha256: keys}, where there are several."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*/*")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found.setdefault(digest, []).append(path.relative_to(folder).as_posix())
    return {digest: keys for digest, keys in found.items() if len(keys) > 1}


def test_keep_leaks_and_verify_says_where(copies, tmp_path, capsys):
    output = tmp_path / "out"
    assert ingest(f"{copies}/*/*", output, *FLAGS) == 0
    assert "contents under several keys: 12, with several labels: 8: see" in capsys.readouterr().out
    rows = rows_of(output)
    leaks = {
        digest: {split: [k for k in keys if rows[k][0] == split] for split in ("test", "train")}
        for digest, keys in groups_of(copies).items()
    }
    leaks = {digest: by for digest, by in leaks.items() if all(by.values())}
    assert 3 < len(leaks) <= 10
    assert main(["verify", str(output)]) == 0
    capsys.readouterr()
    for depth in ([], ["--quick"]):
        assert main(["verify", str(output), "--leakage", *depth]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines() == [
            *(
                f"index: content {digest} stands in the splits "
                + " and ".join(
                    f"{split} ({', '.join(map(repr, keys))})" for split, keys in by.items()
                )
                for digest, by in sorted(leaks.items())
            ),
            f"tpufeed verify: {output}: {len(leaks)} finding(s)",
        ]


def test_together_puts_each_content_into_one_split(copies, tmp_path, capsys):
    output = tmp_path / "out"
    assert ingest(f"{copies}/*/*", output, *FLAGS, "--duplicates", "together") == 0
    assert "each is in one split (every source was read once more)" in capsys.readouterr().out
    rows = rows_of(output)
    assert len(rows) == 56
    splits = [{rows[key][0] for key in keys} for keys in groups_of(copies).values()]
    assert len(splits) == 12 and all(len(found) == 1 for found in splits)
    assert set.union(*splits) == {"train", "test"}
    assert len(lines(output, "duplicates.jsonl")) == 12
    assert main(["verify", str(output), "--leakage"]) == 0
    assert capsys.readouterr().out == f"{output}: whole, no content in two splits\n"


def test_together_more_files_move_none(copies, tmp_path):
    flags = [*FLAGS, "--duplicates", "together"]
    assert ingest(f"{copies}/*/*", tmp_path / "before", *flags) == 0
    for number in range(40):  # copies that sort before, after, and new pictures
        source = next(copies.glob(f"*/{number:02d}.png"))
        shutil.copy(source, copies / "a" / f"{'0' if number % 2 else 'z'}{number}.png")
        draw(copies / "b" / f"new{number}.png", seed=100 + number)
    assert ingest(f"{copies}/*/*", tmp_path / "after", *flags) == 0
    before, after = rows_of(tmp_path / "before"), rows_of(tmp_path / "after")
    assert len(after) == 136
    assert {key: after[key] for key in before} == before


def test_drop_keeps_the_first_by_key(copies, tmp_path, capsys):
    output = tmp_path / "out"
    assert ingest(f"{copies}/*/*", output, *FLAGS, "--duplicates", "drop") == 0
    assert "the first by key of each was kept" in capsys.readouterr().out
    names = {path.relative_to(copies).as_posix() for path in copies.glob("*/*")}
    dropped = {key for keys in groups_of(copies).values() for key in keys[1:]}
    assert set(rows_of(output)) == names - dropped
    expected = [
        {
            "key": key,
            "path": str(copies / key),
            "label": key[0],
            "reason": "duplicate",
            "detail": f"same bytes as {keys[0]}",
        }
        for keys in groups_of(copies).values()
        for key in keys[1:]
    ]
    assert lines(output, "rejects.jsonl") == sorted(expected, key=lambda r: r["key"])
    assert [(d["sha256"], d["keys"]) for d in lines(output, "duplicates.jsonl")] == sorted(
        groups_of(copies).items()
    )
    assert load_manifest(str(output)).rejects == {"duplicate": 16}  # 1 in 4, whatever the rate
    assert main(["verify", str(output), "--leakage", "--deep", "--sources", "10"]) == 0


def test_verify_reads_the_dropped_ones_in_the_list_of_duplicates(copies, tmp_path):
    output = tmp_path / "out"
    assert ingest(f"{copies}/*/*", output, *FLAGS, "--duplicates", "drop") == 0
    path = output / "duplicates.jsonl"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[1:]))
    assert verify_dataset(str(output)) == [
        "duplicates.jsonl: does not list the 12 contents that index/ has"
    ]
    path.write_text(whole)
    rejects = (output / "rejects.jsonl").read_text()
    first = lines(output, "rejects.jsonl")[0]
    (output / "rejects.jsonl").write_text(rejects.replace(first["detail"], "same bytes as x", 1))
    assert verify_dataset(str(output))[0] == f"rejects.jsonl: {first['key']!r}: no record 'x'"


def test_copies_of_a_broken_file_are_broken_files(copies, tmp_path, capsys):
    """A page that says "not found", fetched a thousand times, would hide outside the rate."""
    for number in range(5):
        (copies / "b" / f"page{number}.png").write_text("<html>not found</html>")
        (copies / "a" / f"empty{number}.png").write_bytes(b"")
    output = tmp_path / "out"
    flags = [*FLAGS, "--duplicates", "drop"]
    assert ingest(f"{copies}/*/*", output, *flags, "--max-reject-rate", "0.19") == 1
    assert "10 of 50 inputs were rejected (duplicate 16, unidentified 5, zero_byte 5)" in (
        capsys.readouterr().err
    )
    assert ingest(f"{copies}/*/*", output, *flags, "--max-reject-rate", "0.2", "--resume") == 0
    manifest = load_manifest(str(output))
    assert manifest.records + sum(manifest.rejects.values()) == 66


@pytest.mark.parametrize("mode", ["drop", "together"])
@pytest.mark.parametrize("by", ["key", "content"])
def test_excluded_copies_leave_nothing_behind(mode, by, copies, tmp_path):
    secret = copies / "a" / "00.png"  # has a copy under each label
    digest = hashlib.sha256(secret.read_bytes()).hexdigest()
    (tmp_path / "out.txt").write_text("a/00.png\n" if by == "key" else digest + "\n")
    output = tmp_path / "out"
    flags = [*FLAGS, "--duplicates", mode, "--exclude", str(tmp_path / "out.txt")]
    assert ingest(f"{copies}/*/*", output, *flags) == 0
    assert load_manifest(str(output)).rejects["excluded"] == 3
    for path in output.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"copy-0.png" not in data and b"a/00.png" not in data, path
            assert digest.encode() not in data, path


def test_a_source_that_changed_since_it_was_hashed_is_no_record():
    """Or a content could stand in two splits, and its copies be dropped for nothing."""
    from transforms.image import PixelPolicy
    from transforms.prepare import RecordPolicy, prepare_record

    ref = ImageRef("version", "/proc/version", "a", "train", sha256="0" * 64)
    policy = RecordPolicy(PixelPolicy(width=8, height=8))
    result = prepare_record(ref, policy=policy, labels={"a": 0}, exclusions=Exclusions())
    assert result == Reject(
        "version",
        "/proc/version",
        "a",
        "unreadable",
        "its bytes changed since --duplicates looked at them",
    )


def test_given_splits(copies, tmp_path, capsys):
    rows = "".join(
        f"in/{p.parent.name}/{p.name},{p.parent.name},train\n" for p in copies.glob("*/*")
    )
    (tmp_path / "rows.csv").write_text("path,label,split\n" + rows)
    flags = ["--image-size", "16", "--shards", "2"]
    words = [tmp_path / "rows.csv", tmp_path / "out", *flags]
    assert ingest(*words, "--duplicates", "together") == 1
    assert (
        "already has the split 'train' from its source, so copies cannot be brought into one"
        in (capsys.readouterr().err)
    )
    assert ingest(*words, "--duplicates", "drop", "--overwrite") == 0
    assert load_manifest(str(tmp_path / "out")).records == 40


def test_the_same_bytes_with_worker_processes(copies, tmp_path):
    flags = [*FLAGS, "--duplicates", "drop"]
    assert ingest(f"{copies}/*/*", tmp_path / "one", *flags) == 0
    more = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
    assert ingest(f"{copies}/*/*", tmp_path / "two", *flags, *more) == 0
    fingerprints = [load_manifest(str(tmp_path / n)).fingerprint for n in ("one", "two")]
    assert fingerprints[0] == fingerprints[1]


def test_without_copies_drop_changes_nothing(pictures, dataset, tmp_path):
    flags = ["--image-size", "32x24", "--split", "train=0.7,validation=0.3", "--shards", "6"]
    assert ingest(f"{pictures}/*/*", tmp_path / "out", *flags, "--duplicates", "drop") == 0
    assert load_manifest(str(tmp_path / "out")).fingerprint == (
        load_manifest(str(dataset)).fingerprint
    )


@pytest.mark.parametrize("mode, records", [("keep", 1000), ("together", 1000), ("drop", 999)])
def test_the_flowers(mode, records, shared, tmp_path, capsys):
    """One photograph stands under roses and under tulips."""
    output = tmp_path / "out"
    flags = ["--image-size", "16", "--split", "train=0.5,test=0.5", "--seed", "1"]
    pattern = f"{shared}/data/flowers/*/*.jpg"
    assert ingest(pattern, output, *flags, "--duplicates", mode) == 0
    assert "contents under several keys: 1, with several labels: 1" in capsys.readouterr().out
    assert load_manifest(str(output)).records == records
    assert [d["labels"] for d in lines(output, "duplicates.jsonl")] == [["roses", "tulips"]]
    assert main(["verify", str(output), "--leakage"]) == (1 if mode == "keep" else 0)
    if mode == "keep":
        assert "stands in the splits test ('roses/" in capsys.readouterr().err


# The parts.


def ref(key, sha256="", label="x", **fields):
    return ImageRef(key, f"/in/{key}", label, sha256=sha256, **fields)


def test_drop_copies():
    one, two, three = ref("b", "1" * 64), ref("a", "1" * 64, "y"), ref("c", "2" * 64)
    unread = [ref("u"), ref("v")]
    found = sorted(drop_copies([one, *unread, three, two]), key=lambda r: r.key)
    copy = Copy("b", "/in/b", "x")
    assert found == [ref("a", "1" * 64, "y", copies=(copy,)), three, *unread]


def test_group_by_content():
    assert group_by_content(ref("a", "1" * 64)).group == "1" * 64
    assert group_by_content(ref("a")).group == ""
    with pytest.raises(DataError, match="'a' already has the split 'test'"):
        group_by_content(ref("a", "1" * 64, split="test"))


def test_know_content(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    known = know_content(ImageRef("a", f"{tmp_path}/a", "x"))
    assert known.sha256 == hashlib.sha256(b"abc").hexdigest()
    gone = ImageRef("b", f"{tmp_path}/b", "x")
    assert know_content(gone) == gone


def test_treat_copies_of_a_reject():
    original = ref("a", copies=(Copy("b", "/in/b", "y"),))
    broken = Reject("a", "/in/a", "x", "corrupt", "how")
    assert list(treat_copies(original, broken, exclusions=Exclusions())) == [
        broken,
        Reject("b", "/in/b", "y", "corrupt", "how"),
    ]


@pytest.mark.parametrize("mode", ["together", "drop"])
def test_treat_copies_in_a_pipeline(mode, tmp_path):
    for name, data in {"a": b"1", "b": b"1", "c": b"2"}.items():
        (tmp_path / name).write_bytes(data)
    refs = [ImageRef(name, f"{tmp_path}/{name}", "x") for name in "dcba"]
    one, two = (hashlib.sha256(data).hexdigest() for data in (b"1", b"2"))
    known = {r.key: r for r in map(know_content, refs)}
    assert (known["a"].sha256, known["c"].sha256) == (one, two)
    if mode == "together":
        expected = [group_by_content(known[name]) for name in "abcd"]
    else:
        expected = list(drop_copies(known.values()))
        assert len(expected) == 3
    with beam.Pipeline(runner="FnApiRunner") as root:
        assert_that(root | beam.Create(refs) | TreatCopies(mode), equal_to(expected))
