"""Damage beside the shards: lists, indexes, links, pipes, what dataset.json says of the sources."""

import json
import os
import shutil
import signal

import pyarrow
import pyarrow.parquet
import pytest
from helpers import draw, ingest

from pipeline.__main__ import main
from pipeline.lists import parse_list
from pipeline.verify import verify_dataset
from transforms import files
from transforms.records import DataError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A set with two rejects, a content under two keys, and two splits of a shard each."""
    folder = tmp_path_factory.mktemp("made")
    for number in range(8):
        draw(folder / "in" / "ab"[number % 2] / f"{number}.png", seed=number, size=(12, 10))
    shutil.copy(folder / "in" / "a" / "0.png", folder / "in" / "a" / "copy.png")
    (folder / "in" / "a" / "empty.png").touch()
    (folder / "in" / "b" / "text.png").write_text("no image")
    flags = ["--image-size", "8", "--split", "train=0.5,test=0.5", "--encoding", "png"]
    assert ingest(f"{folder}/in/*/*", folder / "out", *flags, "--max-reject-rate", "1") == 0
    assert verify_dataset(str(folder / "out"), depth="deep", sources=20) == []
    return folder / "out"


@pytest.fixture
def copied(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copy")


@pytest.fixture
def in_time():
    """What waits for a pipe would wait for ever."""

    def give_up(*_):
        raise TimeoutError("still waiting")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def said_by(capsys, *words):
    """The one line that a command ends with."""
    assert main(list(map(str, words))) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    return err


NAMES = [
    "train-00000-of-00001.tfrecord",
    "index/train-00000-of-00001.parquet",
    "index/train-00000-of-00001.idx",
    "rejects.jsonl",
    "duplicates.jsonl",
]


def link(path):
    path.unlink()
    path.symlink_to("nowhere")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("spoil", "said"),
    [(link, "missing"), (pipe, "no regular file"), (folder, "no regular file")],
)
def test_what_is_no_file_is_named_at_every_depth(copied, in_time, name, spoil, said):
    spoil(copied / name)
    for leakage in (False, True):
        for depth in ("quick", "full", "deep"):
            findings = verify_dataset(str(copied), depth=depth, leakage=leakage)
            if leakage and len(findings) > 1:  # the copy stands in both splits
                assert findings.pop().startswith("index: content ")
            assert findings == [f"{name}: {said}"]


def test_a_link_to_a_file_is_as_good_as_the_file(copied, tmp_path):
    for name in (*NAMES, "dataset.json"):
        target = tmp_path / name.replace("/", "-")
        (copied / name).rename(target)
        (copied / name).symlink_to(target)
    assert verify_dataset(str(copied), depth="deep") == []


def test_a_shard_that_is_a_folder_hides_no_other_finding(copied):
    folder(copied / NAMES[0])
    other = copied / "test-00000-of-00001.tfrecord"
    data = bytearray(other.read_bytes())
    data[20] ^= 1
    other.write_bytes(data)
    assert verify_dataset(str(copied)) == [
        f"{NAMES[0]}: no regular file",
        f"{other.name}: record 0: the data's checksum does not match",
    ] or verify_dataset(str(copied)) == [
        f"{other.name}: record 0: the data's checksum does not match",
        f"{NAMES[0]}: no regular file",
    ]


@pytest.mark.parametrize(("spoil", "said"), [(link, "missing"), (pipe, "no regular file")])
def test_a_dataset_json_that_is_no_file(copied, in_time, capsys, spoil, said):
    spoil(copied / "dataset.json")
    finding = f"dataset.json: {said}, so {copied} is no complete data set"
    assert verify_dataset(str(copied), depth="quick") == [finding]
    shown = "no dataset.json" if said == "missing" else "dataset.json: no regular file"
    assert said_by(capsys, "inspect", copied) == (
        f"tpufeed inspect: error: {copied}: {shown}, so this is no complete data set: run tpufeed "
        "ingest\n"
    )


def test_only_files_are_opened(tmp_path, in_time):
    os.mkfifo(tmp_path / "pipe")
    for read in (files.read_file, files.open_file, files.hash_file):
        for path in (str(tmp_path / "pipe"), "/dev/zero"):
            with pytest.raises(OSError, match="no regular file"):
                read(path)
        with pytest.raises(IsADirectoryError):
            read(str(tmp_path))
        with pytest.raises(FileNotFoundError):
            read(str(tmp_path / "none"))


def test_report_and_inspect_do_not_wait_for_a_pipe(copied, in_time, capsys):
    pipe(copied / "duplicates.jsonl")
    for command in ("report", "inspect"):
        assert "no regular file" in said_by(capsys, command, copied)


REJECT = {"key": "k", "path": "p", "label": "l", "reason": "corrupt", "detail": ""}
CONTENT = {"sha256": "0" * 64, "keys": ["a", "b"], "labels": ["x", "x"]}
BAD_REJECTS = {
    "a list": ("[]", "[] is no object"),
    "a null": ("null", "None is no object"),
    "one field": ('{"reason": "duplicate"}', "'detail' missing"),
    "other kinds": (json.dumps({**REJECT, "reason": ["a"], "key": [1]}), "key is [1]"),
    "a reason that is a list": (json.dumps({**REJECT, "reason": ["a"]}), "reason is ['a']"),
    "a reason of nobody": (json.dumps({**REJECT, "reason": "dull"}), "reason is 'dull', which is"),
    "key renamed": (json.dumps(REJECT).replace('"key"', '"kee"'), "'key' missing"),
    "a field more": (json.dumps({**REJECT, "x": 1}), "unknown field 'x'"),
    "nothing": ("", "no JSON: "),
    "no JSON": ("{", "no JSON: "),
    "no UTF-8": ("\udcff", "no JSON: "),
    "nested": ("[" * 100_000 + "]" * 100_000, "no JSON: "),
    "a long number": ("1" * 5000, "no JSON: "),
}
BAD_CONTENTS = {
    "a list": ("[1]", "[1] is no object"),
    "a text": ('"sha256"', "'sha256' is no object"),
    "no labels": (json.dumps({"sha256": "0" * 64, "keys": ["a", "b"]}), "'labels' missing"),
    "a short digest": (json.dumps({**CONTENT, "sha256": "0"}), "sha256 is '0'"),
    "a number for a key": (json.dumps({**CONTENT, "keys": ["a", 1]}), "keys is ['a', 1]"),
    "a label less": (json.dumps({**CONTENT, "labels": ["x"]}), "2 keys and 1 labels"),
    "one key": (json.dumps({**CONTENT, "keys": ["a"], "labels": ["x"]}), "1 keys and 1 labels"),
    "nested": ("[" * 100_000 + "]" * 100_000, "no JSON: "),
}
BAD = [
    *(("rejects.jsonl", 3, *bad) for bad in BAD_REJECTS.values()),
    *(("duplicates.jsonl", 2, *bad) for bad in BAD_CONTENTS.values()),
]


@pytest.mark.parametrize(("name", "number", "line", "said"), BAD)
def test_a_line_that_is_no_such_line_is_named(copied, capsys, name, number, line, said):
    with open(copied / name, "ab") as file:
        file.write(os.fsencode(line) + b"\n")
    where = f"{name}: line {number}: {said}"
    (finding,) = verify_dataset(str(copied))
    assert finding.startswith(where)
    commands = ["report"]
    if name == "rejects.jsonl":
        (finding,) = verify_dataset(str(copied), depth="quick", sources=3)
        assert finding.startswith(where)
    else:
        commands.append("inspect")
    for command in commands:
        err = said_by(capsys, command, copied)
        assert err.startswith(f"tpufeed {command}: error: {copied}/{where}")


def test_a_list_that_is_cut_is_named(copied):
    for name, lines in (("rejects.jsonl", 2), ("duplicates.jsonl", 1)):
        whole = (copied / name).read_bytes()
        (copied / name).write_bytes(whole[:-1])
        assert verify_dataset(str(copied)) == [
            f"{name}: line {lines}: does not end: the file is cut"
        ]
        (copied / name).write_bytes(whole.replace(b"\n", b"\r\n"))
        assert verify_dataset(str(copied)) == [f"{name}: line 1: not written as JSON is by tpufeed"]
        (copied / name).write_bytes(whole)


def test_a_list_is_read_as_it_was_written():
    for name, item in (("rejects.jsonl", REJECT), ("duplicates.jsonl", CONTENT)):
        line = json.dumps(item).encode() + b"\n"
        assert parse_list(b"", name=name, path="p") == []
        assert parse_list(line * 2, name=name, path="p") == [item, item]
        with pytest.raises(DataError, match="^p: line 2: does not end: the file is cut$"):
            parse_list(line + line[:-1], name=name, path="p")


def change_rejects(folder, change):
    path = folder / "rejects.jsonl"
    rejects = [json.loads(line) for line in path.read_text().splitlines()]
    change(rejects)
    path.write_text("".join(json.dumps(reject) + "\n" for reject in rejects))


def a_record(folder):
    index = folder / "index" / "train-00000-of-00001.parquet"
    return pyarrow.parquet.read_table(index).to_pylist()[0]


def test_a_reject_that_is_also_a_record_is_named(copied):
    row = a_record(copied)
    change_rejects(copied, lambda rejects: rejects[1].update(key=row["key"]))
    change_rejects(copied, lambda rejects: rejects.sort(key=lambda reject: reject["key"]))
    (finding,) = verify_dataset(str(copied))
    assert finding.startswith("rejects.jsonl: line ")
    assert finding.endswith(f": key {row['key']!r} is that of a record")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rejects: rejects.reverse(), "line 2: not sorted by key"),
        (lambda rejects: rejects[0].update(key="zzz"), "line 2: not sorted by key"),
        (
            lambda rejects: rejects[0].update(reason="excluded"),
            "line 1: excluded, but not only by the hash of its key",
        ),
    ],
)
def test_rejects_that_were_not_written_so(copied, change, said):
    change_rejects(copied, change)
    document = json.loads((copied / "dataset.json").read_text())
    findings = verify_dataset(str(copied))
    assert f"rejects.jsonl: {said}" in findings, findings
    assert document["rejects"] == {"unidentified": 1, "zero_byte": 1}


def test_what_cannot_be_listed_may_have_the_key_of_a_record(tmp_path):
    """A CSV can give one key to two paths, of which the listing rejects one."""
    draw(tmp_path / "in" / "good.png", seed=1, size=(12, 10))
    draw(tmp_path / "in" / "other.png", seed=2, size=(12, 10))
    (tmp_path / "list.csv").write_text(
        "path,label,key\nin/good.png,a,one\nin/ba\x01d.png,a,one\nin/other.png,a,two\n"
    )
    flags = ["--image-size", "8", "--max-reject-rate", "1", "--encoding", "png"]
    assert ingest(tmp_path / "list.csv", tmp_path / "out", *flags) == 0
    (line,) = (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    assert (json.loads(line)["key"], json.loads(line)["reason"]) == ("one", "bad_name")
    assert verify_dataset(str(tmp_path / "out"), depth="deep", sources=3) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"label": "a"}, "key 'b/text.png': label is 'a', it is 'b'"),
        ({"path": "/elsewhere"}, "key 'b/text.png': path is '/elsewhere', it is '"),
    ],
)
def test_a_reject_is_compared_with_its_input(copied, change, said):
    change_rejects(copied, lambda rejects: rejects[1].update(change))
    assert verify_dataset(str(copied)) == []  # nothing else tells
    (finding,) = verify_dataset(str(copied), sources=1)
    assert finding.startswith(f"rejects.jsonl: {said}")


def test_a_reject_whose_input_was_removed_is_none_the_less_right(tmp_path):
    draw(tmp_path / "in" / "a" / "good.png", seed=1, size=(12, 10))
    (tmp_path / "in" / "a" / "empty.png").touch()
    flags = ["--image-size", "8", "--max-reject-rate", "1", "--encoding", "png"]
    assert ingest(f"{tmp_path}/in/*/*", tmp_path / "out", *flags) == 0
    (tmp_path / "in" / "a" / "empty.png").unlink()
    assert verify_dataset(str(tmp_path / "out"), sources=3) == []


def test_rejects_of_an_idx_file_are_compared_as_well(tmp_path):
    (tmp_path / "in").mkdir()
    for stem in ("train", "t10k"):
        pictures = bytes(range(64)) + bytes(range(64)) + bytes(64)
        header = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (3, 8, 8))
        (tmp_path / "in" / f"{stem}-images-idx3-ubyte").write_bytes(header + pictures)
        header = b"\0\0\x08\x01" + (3).to_bytes(4, "big")
        (tmp_path / "in" / f"{stem}-labels-idx1-ubyte").write_bytes(header + bytes([1, 1, 0]))
    flags = ["--image-size", "8", "--channels", "1", "--encoding", "png", "--duplicates", "drop"]
    assert ingest(f"idx:{tmp_path}/in", tmp_path / "out", *flags) == 0
    lines = (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    paths = [json.loads(line)["path"] for line in lines]
    assert [path[-2:] for path in paths] == ["#1", "#0", "#1", "#2"]
    assert verify_dataset(str(tmp_path / "out"), depth="deep", sources=9) == []


@pytest.mark.parametrize("change", ["newline", "crlf", "cut", "line more", "not ascii"])
def test_an_idx_of_other_bytes(copied, change):
    path = copied / NAMES[2]
    data = path.read_bytes()
    count = data.count(b"\n")
    changed, said = {
        "newline": (data.replace(b"\n", b"\x0b", 1), "line 1 is '0 "),
        "crlf": (data.replace(b"\n", b"\r\n"), "line 1 is '0 "),
        "cut": (data[:-1], "the last line does not end"),
        "line more": (data + b"\n", f"{count + 1} lines, the parquet has {count} rows"),
        "not ascii": (b"\xff" + data, "line 1 is 'ÿ0 "),
    }[change]
    path.write_bytes(changed)
    for depth in ("quick", "full"):
        (finding,) = verify_dataset(str(copied), depth=depth)
        assert finding.startswith(f"{NAMES[2]}: {said}"), finding


COLUMNS = [
    ("source_width", None, "no column 'source_width'"),
    ("source_height", None, "no column 'source_height'"),
    ("source_bytes", None, "no column 'source_bytes'"),
    ("source_bytes", 0, "column source_bytes has 0, less than 1"),
    ("source_width", -5, "column source_width has -5, less than 1"),
    ("source_height", "10", "column source_height is string, or has gaps"),
    ("pixels", 0, "column pixels has 0, less than 1"),
    ("offset", -1, "column offset has -1, less than 0"),
    ("size", 16, "column size has 16, less than 17"),
    ("class", -2, "column class has -2, less than -1"),
    ("source", "", "row 0: source is ''"),
    ("source_sha256", "0" * 64 + "\n", "row 0: source_sha256 is '0000"),
    ("pixels", 2**62, "row 0: 4611686018427387904 pixels cannot sum up to "),
    ("channel_sum", [2**62, 0, 0], "row 0: 64 pixels cannot sum up to 4611686018427387904, "),
    ("channel_sum", [1, 1, 0], "row "),
    ("channel_sum_of_squares", [2**62] * 3, "row 0: 64 pixels cannot sum up to "),
    ("source_sha256", "0", "row 0: source_sha256 is '0'"),
    ("channel_sum", [255 * 64 + 1, 0, 0], "row 0: 64 pixels cannot sum up to 16321, "),
    ("channel_sum_of_squares", [0, 0, 0], "row 0: 64 pixels cannot sum up to "),
    ("channel_sum_of_squares", [10**9, 0, 0], "row 0: 64 pixels cannot sum up to "),
]


@pytest.mark.parametrize(("name", "value", "said"), COLUMNS)
def test_every_column_of_an_index_is_looked_at(copied, name, value, said):
    path = copied / NAMES[1]
    table = pyarrow.parquet.read_table(path)
    place = table.column_names.index(name)
    table = table.remove_column(place)
    if value is not None:
        table = table.add_column(place, name, pyarrow.array([value] * table.num_rows))
    pyarrow.parquet.write_table(table, path)
    (finding,) = verify_dataset(str(copied), depth="quick")
    assert finding.startswith(f"{NAMES[1]}: {said}"), finding


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("inputs", None, "config.inputs is None"),
        ("inputs", "x", "config.inputs is 'x'"),
        ("inputs", [{"split": ""}], "config.inputs is [{'split': ''}]"),
        ("root", None, "config.root is None"),
        ("root", 7, "config.root is 7"),
        ("pixels", None, "config.pixels.mode is None"),
        ("pixels", [], "config.pixels.mode is None"),
        ("pixels", {"mode": []}, "config.pixels.mode is []"),
        ("pixels", {"mode": "cover", "width": "8"}, "config.pixels.width is '8'"),
    ],
)
def test_a_configuration_that_names_no_sources(copied, name, value, said):
    path = copied / "dataset.json"
    document = json.loads(path.read_text())
    document["config"][name] = value
    if value is None:
        del document["config"][name]
    path.write_text(json.dumps(document))
    for depth in ("quick", "full"):
        assert verify_dataset(str(copied), depth=depth) == []  # by design
        assert verify_dataset(str(copied), depth=depth, sources=3) == [
            f"dataset.json: {said}, so no source can be read again"
        ]


def edit_config(folder, **fields):
    path = folder / "dataset.json"
    document = json.loads(path.read_text())
    document["config"].update(fields)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "fields", [{"inputs": 3}, {"inputs": [{}]}, {"pixels": None}, {"split_by": []}, {"weights": 1}]
)
def test_report_says_that_a_configuration_is_not_ours(copied, capsys, fields):
    edit_config(copied, **fields)
    err = said_by(capsys, "report", copied)
    assert err.startswith(
        f"tpufeed report: error: {copied}/dataset.json: config is not as tpufeed ingest writes it: "
    )


def test_inspect_shows_a_set_whatever_its_configuration_says(copied, capsys):
    edit_config(copied, duplicates=[])
    assert main(["inspect", str(copied)]) == 0
    assert "contents under several keys: 1, " in capsys.readouterr().out


def test_a_seed_that_is_no_number(copied):
    edit_config(copied, seed="1")
    expected = ["dataset.json: config.seed is '1', no whole number"]
    assert verify_dataset(str(copied), depth="quick") == expected


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        (NAMES[0], lambda data: data[:20], ", record 0: 20 bytes, index/ says "),
        (NAMES[0], lambda data: data[:20] + bytes(len(data) - 20), ", record 0: "),
        (NAMES[1], lambda data: data[:40] + b"\xff" + data[41:], ": "),
        (NAMES[1], lambda data: b"", ": "),
    ],
)
def test_inspect_names_the_file_that_is_damaged(copied, capsys, name, spoil, said):
    (copied / name).write_bytes(spoil((copied / name).read_bytes()))
    err = said_by(capsys, "inspect", copied, "--split", "train", "--record", "0")
    where = name if name == NAMES[0] else f"{copied}/{name}"
    assert err.startswith(f"tpufeed inspect: error: {where}{said}")
    assert err.endswith(f": run tpufeed verify {copied}\n")


def test_inspect_takes_no_number_of_an_index_on_trust(copied, capsys):
    path = copied / NAMES[1]
    table = pyarrow.parquet.read_table(path)
    for name, value in (("offset", "0"), ("offset", -1), ("size", 2**62), ("size", None)):
        kept = table.remove_column(table.column_names.index(name))
        changed = kept.append_column(name, pyarrow.array([value] * table.num_rows))
        pyarrow.parquet.write_table(kept if value is None else changed, path)
        err = said_by(capsys, "inspect", copied, "--split", "train", "--record", "0")
        assert err.startswith(f"tpufeed inspect: error: {NAMES[0]}, record 0: "), err
