"""`verify --sources` finds faults of the writer that no file by itself can show.

Each fault is planted into the writer, so that shards, index and manifest agree with each other. It
prepares records in this process then, where the fault is.
"""

import dataclasses

import pytest
from helpers import draw, ingest
from PIL import Image

import transforms.image
import transforms.prepare
import transforms.sources
import transforms.write
from pipeline.__main__ import main
from pipeline.verify import verify_dataset


@pytest.fixture
def turned(tmp_path):
    """24 pictures in three classes, of which some carry an EXIF orientation."""
    folder = tmp_path / "turned"
    for number in range(24):
        exif = Image.Exif()
        exif[0x0112] = number % 8 + 1
        label = ("ash", "birch", "cedar")[number % 3]
        draw(folder / label / f"{number:02d}.jpg", seed=number, size=(80, 48), exif=exif)
    return folder


def shift_labels(monkeypatch):
    real, names = transforms.prepare.prepare_record, ["ash", "birch", "cedar"]

    def prepare(ref, source=None, **kwargs):
        label = names[(names.index(ref.label) + 1) % 3]
        return real(dataclasses.replace(ref, label=label), source, **kwargs)

    monkeypatch.setattr(transforms.prepare, "prepare_record", prepare)


def exchange_two(monkeypatch):
    real = transforms.prepare.prepare_image
    first = {}

    def prepare(data, **kwargs):
        # The second picture that comes gets the first one's pixels.
        if len(first) < 2:
            first.setdefault(data, None)
        known = list(first)
        return real(known[0] if len(known) > 1 and data == known[1] else data, **kwargs)

    monkeypatch.setattr(transforms.prepare, "prepare_image", prepare)


def swap_sides(monkeypatch):
    real = transforms.image.fit_image

    def fit(width, height, *, policy, orientation=1):
        policy = dataclasses.replace(policy, width=policy.height, height=policy.width)
        return real(width, height, policy=policy, orientation=orientation)

    monkeypatch.setattr(transforms.image, "fit_image", fit)


def ignore_exif(monkeypatch):
    monkeypatch.setattr(transforms.image, "_orientation_of", lambda image: 1)


def drop_class(monkeypatch):
    real = transforms.sources.list_glob

    def list_glob(*args, **kwargs):
        for item in real(*args, **kwargs):
            if item.label != "cedar":
                yield item

    monkeypatch.setattr(transforms.sources, "list_glob", list_glob)


def swap_colours(monkeypatch):
    real = transforms.image.resize_image

    def resize(image, geometry, *, policy):
        red, green, blue = real(image, geometry, policy=policy).split()
        return Image.merge("RGB", (blue, green, red))

    monkeypatch.setattr(transforms.image, "resize_image", resize)


def mirror(monkeypatch):
    real = transforms.image.resize_image

    def resize(image, geometry, *, policy):
        picture = real(image, geometry, policy=policy)
        return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)

    monkeypatch.setattr(transforms.image, "resize_image", resize)


def brighten(monkeypatch):
    real = transforms.image.resize_image

    def resize(image, geometry, *, policy):
        return real(image, geometry, policy=policy).point(lambda level: min(255, level + 6))

    monkeypatch.setattr(transforms.image, "resize_image", resize)


def prepare_here(refs, *, task, processes, sources):
    for ref in refs:
        yield transforms.prepare.prepare_record(ref, **vars(task))


FAULTS = {
    "class ids + 1": (shift_labels, "its label is 'ash', index/ says 'birch'"),
    "two pictures exchanged": (exchange_two, "picture differs from"),
    "height and width swapped": (swap_sides, "gives 53x32"),
    "EXIF ignored": (ignore_exif, "upright"),
    "one class dropped": (drop_class, "neither a record nor a reject"),
    "colours swapped": (swap_colours, "picture differs from"),
    "mirrored": (mirror, "picture differs from"),
    "six levels brighter": (brighten, "picture differs from"),
}


def test_without_a_fault_nothing_is_found(turned, tmp_path):
    assert ingest(f"{turned}/*/*", tmp_path / "out", "--image-size", "64x32") == 0
    assert verify_dataset(str(tmp_path / "out"), sources=100) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, turned, tmp_path, monkeypatch, capsys):
    plant, message = FAULTS[name]
    output = str(tmp_path / "out")
    # The size of what is written comes from the geometry; without a fixed one nothing else checks.
    mode = ["--resize-mode", "contain"] if plant is swap_sides else []
    with monkeypatch.context() as planted:
        plant(planted)
        planted.setattr(transforms.write, "prepare_images", prepare_here)
        assert ingest(f"{turned}/*/*", output, "--image-size", "64x32", *mode) == 0
    # Every file agrees with every other: the fault shows only beside the sources.
    assert verify_dataset(output, depth="deep") == []
    findings = verify_dataset(output, sources=100)
    assert findings and any(message in finding for finding in findings), findings
    with capsys.disabled():
        print(f"\n  planted: {name:26} {len(findings):2} finding(s), as: {message}", end="")
    assert main(["verify", output, "--sources", "100"]) == 1


def test_sources_that_changed_or_came_later_are_named(turned, tmp_path):
    output = str(tmp_path / "out")
    assert ingest(f"{turned}/*/*", output) == 0
    draw(turned / "ash" / "00.jpg", seed=99)
    draw(turned / "birch" / "new.jpg", seed=98)
    findings = verify_dataset(output, sources=100)
    assert f"'{turned}/birch/new.jpg': neither a record nor a reject" in findings
    assert any(f.endswith(f"{turned}/ash/00.jpg has changed since ingest") for f in findings)
    (turned / "cedar" / "02.jpg").unlink()
    assert any("no input has this key" in f for f in verify_dataset(output, sources=100))


def test_csv_and_idx_sources_are_read_again(turned, tmp_path):
    rows = ["\ufeffpath,label,key"]
    for path in sorted(turned.glob("*/*.jpg")):
        rows.append(f'"{path.relative_to(tmp_path)}",{path.parent.name},k-{path.stem}')
    (tmp_path / "list.csv").write_text("\n".join(rows), encoding="utf-8")
    output = str(tmp_path / "out")
    assert ingest(tmp_path / "list.csv", output) == 0
    assert verify_dataset(output, sources=100) == []
    (tmp_path / "list.csv").write_text("\n".join(rows).replace(",ash,", ",oak,"))
    assert any("its label is 'oak'" in finding for finding in verify_dataset(output, sources=1))
