"""The drawn sample set: what is in it, and that a seed fixes its bytes."""

import hashlib
import random
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageOps, ImageStat

from pipeline import samples


def read_digests(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return samples.draw_samples(tmp_path_factory.mktemp("drawn") / "images", count=100, seed=3)


def test_counts(drawn):
    directory = drawn.pictures[0].parent.parent
    assert sorted(path.name for path in directory.iterdir()) == list(samples.CLASSES)
    per_class = {
        name: sum(p.parent.name == name for p in drawn.pictures) for name in samples.CLASSES
    }
    assert per_class == dict.fromkeys(samples.CLASSES, 20)
    assert sorted(path.parent.name for path in drawn.damaged) == list(samples.CLASSES)
    assert set(directory.glob("*/*")) == {*drawn.pictures, *drawn.damaged}
    assert {path.suffix for path in drawn.pictures} == {".jpg", ".png", ".webp"}


def test_uneven_count_goes_to_the_first_classes(tmp_path):
    drawn = samples.draw_samples(tmp_path / "images", count=7)
    assert [path.parent.name for path in drawn.pictures] == [
        "daisy",
        "daisy",
        "dandelion",
        "dandelion",
        "roses",
        "sunflowers",
        "tulips",
    ]


def test_pictures_decode_and_vary(drawn):
    formats = {".jpg": "JPEG", ".png": "PNG", ".webp": "WEBP"}
    sizes = set()
    for path in drawn.pictures:
        with Image.open(path) as picture:
            picture.load()
            assert (picture.format, picture.mode) == (formats[path.suffix], "RGB")
            assert 160 <= min(picture.size) and max(picture.size) <= 640
            sizes.add(picture.size)
    assert len(sizes) > 50
    assert any(width > height for width, height in sizes)
    assert any(width < height for width, height in sizes)


def test_some_jpegs_are_stored_turned(drawn):
    jpegs = [path for path in drawn.pictures if path.suffix == ".jpg"]
    tags = [Image.open(path).getexif().get(samples.ORIENTATION_TAG, 1) for path in jpegs]
    turned = [tag for tag in tags if tag != 1]
    assert set(turned) <= set(range(2, 9))
    assert 0.05 < len(turned) / len(jpegs) < 0.3


def test_every_orientation_comes_back_upright(tmp_path):
    upright = ImageOps.expand(Image.linear_gradient("L").resize((60, 40)), 10).convert("RGB")
    upright.paste((200, 30, 30), (0, 0, 25, 12))
    seen = set()
    for seed in range(200):
        path = tmp_path / "turned.jpg"
        path.write_bytes(samples.encode(upright, suffix=".jpg", rng=random.Random(seed)))
        with Image.open(path) as stored:
            seen.add(tag := stored.getexif().get(samples.ORIENTATION_TAG, 1))
            assert stored.size == ((60, 80) if tag >= 5 else (80, 60))
            shown = ImageOps.exif_transpose(stored)
        assert shown.size == (80, 60)
        assert max(ImageStat.Stat(ImageChops.difference(shown, upright)).mean) < 5
    assert seen == set(range(1, 9))


def test_damaged_files_do_not_decode(drawn):
    for path in drawn.damaged:
        with pytest.raises(OSError), Image.open(path) as picture:
            picture.load()


def test_same_seed_same_bytes(drawn, tmp_path):
    first = read_digests(drawn.pictures[0].parent.parent)
    samples.draw_samples(tmp_path / "again", count=100, seed=3)
    assert read_digests(tmp_path / "again") == first
    samples.draw_samples(tmp_path / "other", count=5, seed=4)
    assert not set(read_digests(tmp_path / "other").values()) & {
        digest for name, digest in first.items() if Path(name).stem[-4:].isdigit()
    }


def test_a_picture_does_not_depend_on_the_count(drawn, tmp_path):
    few = samples.draw_samples(tmp_path / "few", count=5, seed=3)
    digests = read_digests(drawn.pictures[0].parent.parent)
    assert read_digests(tmp_path / "few").items() <= digests.items()
    assert len(few.pictures) == 5


def test_classes_differ_in_colour(drawn):
    def middle(path: Path) -> list[float]:
        with Image.open(path) as stored:
            picture = ImageOps.exif_transpose(stored)
            width, height = picture.size
            box = (width // 4, height // 5, width * 3 // 4, height * 7 // 10)
            return ImageStat.Stat(picture.crop(box)).mean

    def mean(name: str) -> list[float]:
        means = [middle(path) for path in drawn.pictures if path.parent.name == name]
        return [sum(channel) / len(means) for channel in zip(*means, strict=True)]

    colours = [mean(name) for name in samples.CLASSES]
    for place, one in enumerate(colours):
        for other in colours[place + 1 :]:
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 12


def test_a_full_folder_is_refused(tmp_path):
    (tmp_path / "mine.jpg").write_bytes(b"x")
    with pytest.raises(ValueError) as caught:
        samples.draw_samples(tmp_path, count=5)
    assert str(caught.value) == (
        f"directory={tmp_path}: must be new or an empty folder; name another one"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jpg"]


def test_too_few_are_refused(tmp_path):
    with pytest.raises(ValueError, match="^count=4: must be 5 or more, one for each class$"):
        samples.draw_samples(tmp_path / "images", count=4)


def test_command_line(tmp_path, capsys):
    target = tmp_path / "images"
    target.mkdir()
    assert samples.main([str(target), "--count", "5", "--seed", "1"]) == 0
    assert capsys.readouterr().out == (
        f"drew 5 pictures of 5 classes and 5 damaged files into {target}\n"
    )
    assert samples.main([str(target)]) == 1
    assert capsys.readouterr().err == (
        f"python -m pipeline.samples: error: directory={target}:"
        " must be new or an empty folder; name another one\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["images"]
