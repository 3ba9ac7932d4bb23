"""--min-size, --max-area, --max-aspect-ratio: what is left out, and where it is told."""

import json
from fractions import Fraction

import pytest
import tensorflow as tf
from helpers import draw, ingest

from pipeline.__main__ import main
from transforms.filters import SizeFilter
from transforms.image import PixelPolicy, prepare_image
from transforms.manifest import load_manifest
from transforms.records import ImageError


@pytest.mark.parametrize(
    "fields, size, problem",
    [
        ({}, (1, 10_000), ""),
        ({"min_size": 40}, (60, 40), ""),
        ({"min_size": 40}, (40, 60), ""),
        ({"min_size": 41}, (60, 40), "60x40 pixels, --min-size is 41"),
        ({"min_size": 41}, (40, 60), "40x60 pixels, --min-size is 41"),
        ({"max_area": 2400}, (60, 40), ""),
        ({"max_area": 2399}, (60, 40), "60x40 pixels, --max-area is 2399"),
        ({"max_aspect_ratio": Fraction("1.15")}, (115, 100), ""),  # 1.15 * 100 < 115 in floats
        ({"max_aspect_ratio": Fraction("1.15")}, (100, 115), ""),
        (
            {"max_aspect_ratio": Fraction("1.15")},
            (100, 116),
            "100x116 pixels, 1.16 to 1, --max-aspect-ratio is 1.15",
        ),
        (
            {"max_aspect_ratio": Fraction(1)},
            (1000, 999),
            "1000x999 pixels, 1.001 to 1, --max-aspect-ratio is 1",
        ),
    ],
)
def test_which_sizes_are_left_out(fields, size, problem):
    assert SizeFilter(**fields).find_problem(*size) == problem


def test_the_size_is_that_of_the_upright_source_however_it_is_decoded(tmp_path):
    """Large JPEGs are decoded at a scale; the filter sees the file's own size."""
    draw(tmp_path / "1.jpg", seed=1, size=(1600, 800), exif=orientation(6))
    data = (tmp_path / "1.jpg").read_bytes()
    policy = PixelPolicy(width=32, height=32)
    assert prepare_image(data, policy=policy, filters=SizeFilter(min_size=800)).pixels == 1024
    with pytest.raises(ImageError) as caught:
        prepare_image(data, policy=policy, filters=SizeFilter(min_size=801))
    assert caught.value.args == ("filtered", "800x1600 pixels, --min-size is 801")


def orientation(value):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def test_a_filter_comes_before_the_resize(tmp_path):
    """A sliver that no resize could take is left out; it is no fault of the file."""
    draw(tmp_path / "1.png", seed=1, size=(4000, 1))
    data = (tmp_path / "1.png").read_bytes()
    policy = PixelPolicy(width=224, height=224, mode="shortest")
    with pytest.raises(ImageError, match="too_large"):
        prepare_image(data, policy=policy)
    with pytest.raises(ImageError, match="filtered"):
        prepare_image(data, policy=policy, filters=SizeFilter(max_aspect_ratio=Fraction(3)))


def test_gray_levels_of_idx_are_filtered_too():
    policy = PixelPolicy(width=28, height=28, channels=1, encoding="png")
    with pytest.raises(ImageError, match="28x28 pixels, --min-size is 29"):
        prepare_image(bytes(784), policy=policy, raw_size=(28, 28), filters=SizeFilter(min_size=29))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    for number in range(4):
        draw(folder / "good" / f"{number}.jpg", seed=number, size=(64, 48))
        draw(folder / "small" / f"{number}.png", seed=10 + number, size=(30, 48))
    draw(folder / "small" / "kept.jpg", seed=20, size=(64, 48))
    draw(folder / "good" / "long.webp", seed=21, size=(300, 64))
    draw(folder / "good" / "huge.jpg", seed=22, size=(400, 300))
    (folder / "small" / "copy.png").write_bytes((folder / "small" / "0.png").read_bytes())
    return folder


FLAGS = ["--min-size", "40", "--max-area", "100000", "--max-aspect-ratio", "2.5"]


def read_rejects(folder):
    return [json.loads(line) for line in (folder / "rejects.jsonl").read_text().splitlines()]


def test_filtered_inputs_are_rejects_outside_the_rate(mixed, tmp_path, capsys):
    output = tmp_path / "out"
    assert ingest(f"{mixed}/*/*", output, "--image-size", "16", *FLAGS) == 0
    manifest = load_manifest(str(output))
    assert manifest.records == 5 and manifest.rejects == {"filtered": 7}
    assert [(r["key"], r["reason"], r["detail"]) for r in read_rejects(output)] == [
        ("good/huge.jpg", "filtered", "400x300 pixels, --max-area is 100000"),
        (
            "good/long.webp",
            "filtered",
            "300x64 pixels, 4.688 to 1, --max-aspect-ratio is 2.5",
        ),
        *(
            (f"small/{name}.png", "filtered", "30x48 pixels, --min-size is 40")
            for name in ("0", "1", "2", "3", "copy")
        ),
    ]
    assert read_rejects(output)[0]["path"] == str(mixed / "good" / "huge.jpg")
    assert manifest.config["min_size"] == 40 and manifest.config["max_area"] == 100_000
    assert manifest.config["max_aspect_ratio"] == "5/2"
    keys = set()
    for record in tf.data.TFRecordDataset(sorted(map(str, output.glob("train-*")))):
        example = tf.io.parse_single_example(record, {"key": tf.io.FixedLenFeature([], tf.string)})
        keys.add(example["key"].numpy().decode())
    assert keys == {*(f"good/{n}.jpg" for n in range(4)), "small/kept.jpg"}
    capsys.readouterr()
    assert main(["verify", str(output), "--deep", "--sources", "10"]) == 0
    for flags in ([], ["--json"]):
        capsys.readouterr()
        assert main(["inspect", str(output), *flags]) == 0
        assert ('"filtered": 7' if flags else "filtered 7") in capsys.readouterr().out
    assert main(["report", str(output)]) == 0
    page = (output / "report.html").read_text()
    assert "filtered" in page and "--min-size is 40" in page
    assert "No input was rejected as faulty" in page


def test_a_filter_makes_no_other_record(mixed, tmp_path, capsys):
    """Shards aside, records are as they are without; diff says what was asked for and left out."""
    for name, flags in (("all", []), ("some", FLAGS)):
        assert ingest(f"{mixed}/*/*", tmp_path / name, "--image-size", "16", *flags) == 0
    for name in ("min_size", "max_area", "max_aspect_ratio", "exif"):
        assert name not in load_manifest(str(tmp_path / "all")).config
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "all"), str(tmp_path / "some"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["removed"]) == 7
    assert not found["added"] and not found["content"] and not found["split"]
    assert found["config"]["min_size"] == [None, 40]
    assert found["facts"]["rejects.filtered"] == [None, 7]


def test_what_is_broken_is_a_fault_whatever_its_header_says(mixed, tmp_path, capsys):
    folder = tmp_path / "in" / "good"
    draw(folder / "a.jpg", seed=1, size=(64, 48))
    draw(folder / "b.png", seed=2, size=(30, 20))
    whole = (folder / "b.png").read_bytes()
    (folder / "b.png").write_bytes(whole[: len(whole) // 2])
    assert ingest(f"{folder.parent}/*/*", tmp_path / "out", "--min-size", "40") == 1
    assert "1 of 2 inputs were rejected (truncated 1)" in capsys.readouterr().err
    flags = ["--min-size", "40", "--max-reject-rate", "0.5", "--overwrite"]
    assert ingest(f"{folder.parent}/*/*", tmp_path / "out", *flags) == 0
    assert load_manifest(str(tmp_path / "out")).rejects == {"truncated": 1}


def test_where_all_are_left_out(mixed, tmp_path, capsys):
    output = tmp_path / "out"
    assert ingest(f"{mixed}/*/*", output, "--min-size", "5000") == 1
    assert capsys.readouterr().err == (
        "tpufeed ingest: error: no input became a record (filtered 12): see "
        f"{output}/rejects.jsonl\n"
    )


def test_copies_of_what_is_left_out_are_left_out(mixed, tmp_path):
    output = tmp_path / "out"
    flags = ["--duplicates", "drop", "--min-size", "40"]
    assert ingest(f"{mixed}/*/*", output, *flags) == 0
    manifest = load_manifest(str(output))
    assert manifest.rejects == {"filtered": 5}
    assert manifest.records + sum(manifest.rejects.values()) == 12


def test_a_run_is_not_gone_on_with_under_another_filter(mixed, tmp_path, capsys):
    output = tmp_path / "out"
    assert ingest(f"{mixed}/*/*", output, "--min-size", "40") == 0
    assert ingest(f"{mixed}/*/*", output, "--min-size", "40", "--resume") == 0
    capsys.readouterr()
    assert ingest(f"{mixed}/*/*", output, "--resume") == 1
    assert "--min-size 40 then, null now" in capsys.readouterr().err
