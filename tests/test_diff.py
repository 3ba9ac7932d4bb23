"""`tpufeed diff`: each kind of change, made for real, is told and nothing else is."""

import json
import shutil

import pyarrow.parquet
import pytest
from helpers import draw, ingest

from pipeline.__main__ import main
from pipeline.diff import Change, compare_datasets

FLAGS = ("--image-size", "16", "--split", "train=0.6,test=0.4", "--shards", "4")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diff")
    for number in range(24):
        draw(folder / "in" / "ab"[number % 2] / f"{number:02d}.png", seed=number, size=(20, 20))
    return folder / "in"


@pytest.fixture(scope="module")
def old(pictures):
    assert ingest(f"{pictures}/*/*", pictures.parent / "old", *FLAGS) == 0
    return pictures.parent / "old"


@pytest.fixture
def changed(pictures, tmp_path):
    """A copy of the pictures, to be changed, in a folder whose keys stay the same."""
    shutil.copytree(pictures, tmp_path / "in")
    return tmp_path / "in"


def ingested(pictures, *flags):
    output = pictures.parent / "new"
    assert ingest(f"{pictures}/*/*", output, *(flags or FLAGS)) == 0
    return output


def told(difference):
    kinds = ("added", "removed", "content", "label", "split", "shard")
    return {kind: value for kind in kinds if (value := getattr(difference, kind))}


def test_equal_sets(old, changed, capsys):
    new = ingested(changed)
    difference = compare_datasets(str(old), str(new))
    assert difference.equal and told(difference) == {} and difference.facts == {}
    assert set(difference.config) == {"inputs", "root"}  # another folder
    capsys.readouterr()
    assert main(["diff", str(old), str(new)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("records: 24 -> 24\n") and err == ""
    assert out.endswith("fingerprints: equal, byte for byte\n")


def test_every_change_of_a_record_is_told(old, changed, capsys):
    (changed / "a" / "00.png").unlink()
    draw(changed / "b" / "99.png", seed=99, size=(20, 20))
    draw(changed / "a" / "02.png", seed=77, size=(20, 20))
    new = ingested(changed)
    difference = compare_datasets(str(old), str(new))
    assert not difference.equal
    assert difference.added == ("b/99.png",) and difference.removed == ("a/00.png",)
    assert [change.key for change in difference.content] == ["a/02.png"]
    assert set(told(difference)) == {"added", "removed", "content"}
    assert difference.shards and set(difference.facts) >= {"channel_mean"}
    capsys.readouterr()
    assert main(["diff", str(old), str(new)]) == 1
    out = capsys.readouterr().out
    assert "added: 1\n  b/99.png\n" in out and "removed: 1\n  a/00.png\n" in out
    assert f"content changed: 1\n  a/02.png: {difference.content[0].old} -> " in out
    assert out.endswith("fingerprints: different\n")
    assert main(["diff", str(new), str(old), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["added"] == ["a/00.png"] and document["equal"] is False


def table(folder, rows):
    lines = "".join(f"{path},{label},{split}\n" for path, label, split in rows)
    path = folder / "list.csv"
    path.write_text("path,label,split\n" + lines)
    return path


def test_another_label_and_another_split(pictures, tmp_path):
    names = [f"{pictures}/{'ab'[n % 2]}/{n:02d}.png" for n in range(24)]
    sets = []
    for which in ("old", "new"):
        (tmp_path / which).mkdir()
        rows = [
            [name, name.split("/")[-2], "train" if n < 20 else "test"]
            for n, name in enumerate(names)
        ]
        if which == "new":
            rows[3][1], rows[5][2] = "a", "test"
        output = tmp_path / which / "out"
        assert ingest(table(tmp_path / which, rows), output, "--image-size", "16") == 0
        sets.append(str(output))
    difference = compare_datasets(*sets)
    assert difference.label == (Change(names[3], "b", "a"),)
    assert difference.split == (Change(names[5], "train", "test"),)
    assert not difference.content and not difference.added and not difference.removed


def test_other_shards(old, pictures, tmp_path):
    output = tmp_path / "new"
    flags = (*FLAGS[:4], "--shards", "7")
    assert ingest(f"{pictures}/*/*", output, *flags) == 0
    difference = compare_datasets(str(old), str(output))
    assert set(told(difference)) == {"shard"} and len(difference.shard) == 24
    assert difference.config == {"shards": (4, 7)}
    assert {name.split(".")[0] for name in difference.facts} == {"shards"}


def test_other_pixels(old, pictures, tmp_path, capsys):
    output = tmp_path / "new"
    assert ingest(f"{pictures}/*/*", output, *FLAGS, "--quality", "50") == 0
    difference = compare_datasets(str(old), str(output))
    assert not difference.equal and told(difference) == {} and len(difference.shards) == 4
    assert difference.config == {"pixels.quality": (90, 50)}
    capsys.readouterr()
    assert main(["diff", str(old), str(output)]) == 1
    assert "configuration: pixels.quality: 90 -> 50\n" in capsys.readouterr().out


def test_many_keys_are_told_in_short_and_names_are_harmless(old, tmp_path, capsys):
    for number in range(12):
        draw(tmp_path / "in" / "a" / f"\u202e{number:02d}.png", seed=number)
    new = ingested(tmp_path / "in")
    assert main(["diff", str(old), str(new)]) == 1
    out = capsys.readouterr().out
    assert "  a/\\u202e00.png\n" in out and "\u202e" not in out
    assert "added: 12\n" in out and "  and 2 more; --json has all\n" in out


@pytest.mark.parametrize("turned", [False, True])
def test_what_cannot_be_compared_is_trouble(old, tmp_path, capsys, turned):
    pair = [str(old), str(tmp_path)]
    assert main(["diff", *(pair[::-1] if turned else pair)]) == 2
    message = f"tpufeed diff: error: {tmp_path}: no dataset.json, so this is no complete data set"
    assert capsys.readouterr().err.startswith(message)


def test_a_damaged_index_is_trouble(old, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(old, broken)
    path = sorted(broken.glob("index/*.parquet"))[0]
    table = pyarrow.parquet.read_table(path)
    for change, said in (
        (table.slice(1), f"{len(table) - 1} rows, where dataset.json has {len(table)} records"),
        (table.drop_columns(["key"]), "no column 'key'"),
        (table.append_column("key", table["key"]), "two columns are named 'key'"),
    ):
        pyarrow.parquet.write_table(change, path)
        assert main(["diff", str(old), str(broken)]) == 2
        assert capsys.readouterr().err == (
            f"tpufeed diff: error: {path}: {said}: run tpufeed verify {broken}\n"
        )
