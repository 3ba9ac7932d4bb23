"""--exif: tags of real and of broken files, by table, and as features that TensorFlow reads."""

import io
import itertools
import json
import struct

import numpy as np
import pytest
import tensorflow as tf
from helpers import draw, ingest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from PIL.TiffImagePlugin import IFDRational

from pipeline.__main__ import main
from pipeline.dataset import open_dataset
from transforms.exif import EXIF_NAMES, choose_names, exif_features, exif_specs
from transforms.image import PixelPolicy
from transforms.manifest import load_manifest

POLICY = PixelPolicy()
DEFAULTS = {
    "datetime_original": b"",
    "make": b"",
    "model": b"",
    "orientation": 1,
    "focal_length": 0.0,
    "f_number": 0.0,
    "exposure_time": 0.0,
    "iso": 0,
    "gps_latitude": -999.0,
    "gps_longitude": -999.0,
}
FULL = {
    "datetime_original": b"2015:04:29 14:33:31",
    "make": b"Nokia",
    "model": b"N9",
    "orientation": 6,
    "focal_length": 28.0,
    "f_number": 2.25,
    "exposure_time": 0.0078125,
    "iso": 100,
    "gps_latitude": 56.15625,
    "gps_longitude": -10.25,
}
ARCS = (IFDRational(56), IFDRational(9), IFDRational(45, 2))


def make_exif(image=None, photo=None, gps=None) -> Image.Exif:
    """All tags of FULL; what is given replaces them, None takes one out."""
    exif = Image.Exif()
    parts = [
        (exif, {0x010F: "Nokia\0002", 0x0110: "N9  ", 0x0112: 6}, image),
        (
            exif.get_ifd(0x8769),
            {
                0x9003: "2015:04:29 14:33:31",
                0x920A: IFDRational(28),
                0x829D: IFDRational(9, 4),
                0x829A: IFDRational(1, 128),
                0x8827: 100,
            },
            photo,
        ),
        (
            exif.get_ifd(0x8825),
            {1: "N", 2: ARCS, 3: "W", 4: (IFDRational(10), IFDRational(15), IFDRational(0))},
            gps,
        ),
    ]
    for tags, usual, changed in parts:
        for tag, value in {**usual, **(changed or {})}.items():
            if value is not None:
                tags[tag] = value
    return exif


def encode(format: str, exif=None) -> bytes:
    levels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
    buffer = io.BytesIO()
    save = {} if exif is None else {"exif": exif.tobytes()}  # so TIFF takes all directories
    Image.fromarray(levels).save(buffer, format, **save)
    return buffer.getvalue()


def read(data: bytes | None, names=EXIF_NAMES, orientation=6) -> dict:
    found = exif_features(data, names, policy=POLICY, orientation=orientation)
    assert [name for name, _ in found] == [spec.name for spec in exif_specs(names)]
    return {name.removeprefix("exif/"): value for name, value in found}


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_every_tag_of_every_format(format):
    assert read(encode(format, make_exif())) == FULL


def test_png_has_exif_behind_its_pixels_or_as_text():
    """As the standard allows, and as ImageMagick writes it."""
    whole, exif = encode("PNG", make_exif()), make_exif().tobytes()
    at = whole.index(b"eXIf") - 4
    chunk = whole[at : at + 12 + int.from_bytes(whole[at : at + 4], "big")]
    rest = whole.replace(chunk, b"")
    assert read(rest[:-12] + chunk + rest[-12:]) == FULL
    text = PngInfo()
    text.add_text("Raw profile type exif", f"\nexif\n{len(exif):8}\n{exif.hex()}\n", zip=True)
    buffer = io.BytesIO()
    Image.new("RGB", (24, 16)).save(buffer, "PNG", pnginfo=text)
    assert read(buffer.getvalue()) == FULL


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "GIF", "BMP"])
def test_a_file_without_exif_has_the_defaults(format):
    assert read(encode(format), orientation=1) == DEFAULTS
    assert read(None, orientation=1) == DEFAULTS


def test_defaults_and_types_are_those_of_the_specs():
    specs = exif_specs(EXIF_NAMES)
    assert {spec.name.removeprefix("exif/"): spec.default for spec in specs} == DEFAULTS
    kinds = {"bytes": bytes, "int64": int, "float": float}
    for spec in specs:
        assert type(spec.default) is kinds[spec.dtype] is type(FULL[spec.name[5:]])


@pytest.mark.parametrize(
    "part, tag, value, name, expected",
    [
        ("image", 0x010F, "  ", "make", b""),
        ("image", 0x010F, b"Caf\xe9", "make", "Caf\xe9".encode()),
        ("image", 0x010F, "\u6771".encode(), "make", "\u6771".encode()),
        ("photo", 0x9003, "0000:00:00 00:00:00", "datetime_original", b""),
        ("photo", 0x9003, "    :  :     :  :  ", "datetime_original", b""),
        ("photo", 0x9003, "2015-04-29T14:33:31", "datetime_original", b""),
        ("photo", 0x9003, "2015:02:30 14:33:31", "datetime_original", b""),
        ("photo", 0x920A, IFDRational(0, 0), "focal_length", 0.0),
        ("photo", 0x920A, IFDRational(1, 0), "focal_length", 0.0),
        ("photo", 0x829A, IFDRational(0, 1), "exposure_time", 0.0),
        ("photo", 0x829A, IFDRational(2**32 - 1, 1), "exposure_time", 0.0),
        ("photo", 0x8827, (200, 0), "iso", 200),
        ("photo", 0x8827, None, "iso", 0),
        ("gps", 1, "S", "gps_latitude", -56.15625),
        ("gps", 1, "X", "gps_latitude", -999.0),
        ("gps", 1, None, "gps_latitude", -999.0),
        ("gps", 3, "E\0", "gps_longitude", 10.25),
        ("gps", 2, (IFDRational(91), IFDRational(0), IFDRational(0)), "gps_latitude", -999.0),
        ("gps", 2, (IFDRational(0, 0), IFDRational(0), IFDRational(0)), "gps_latitude", -999.0),
        ("gps", 2, (IFDRational(9), IFDRational(0)), "gps_latitude", -999.0),
    ],
)
def test_what_makes_no_sense_is_the_default(part, tag, value, name, expected):
    found = read(encode("JPEG", make_exif(**{part: {tag: value}})))
    assert found == {**FULL, name: expected}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, which the commands silence
def test_exif_that_is_cut_or_changed_anywhere_raises_nothing():
    whole = encode("JPEG", make_exif())
    at = whole.index(b"Exif\0\0") + 6
    length = int.from_bytes(whole[at - 8 : at - 6], "big") - 8
    for position in range(at, at + length):
        for value in (0, 255, whole[position] ^ 0x80):
            data = bytearray(whole)
            data[position] = value
            found = read(bytes(data))
            assert {type(v) for v in found.values()} == {bytes, int, float}
    for end in range(0, length, 7):
        block = whole[at - 6 : at + end]
        segment = b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block
        read(whole[:2] + segment + encode("JPEG")[2:])


def test_gps_is_given_only_where_it_is_asked_for_by_name():
    assert choose_names(["all"]) == EXIF_NAMES[:-2]
    assert choose_names(["gps_longitude", "all"]) == (*EXIF_NAMES[:-2], "gps_longitude")
    assert choose_names(["model", "make", "model"]) == ("make", "model")
    assert choose_names([]) == ()
    assert set(EXIF_NAMES[-2:]) == {"gps_latitude", "gps_longitude"}
    assert read(encode("JPEG", make_exif()), choose_names(["all"])) == dict(
        itertools.islice(FULL.items(), 8)
    )


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for number, suffix in enumerate(["jpg", "png", "webp", "tiff", "avif"]):
        save = {"exif": make_exif(photo={0x8827: 100 + number}).tobytes()}
        draw(folder / "with" / f"{number}.{suffix}", seed=number, **save)
    draw(folder / "without" / "plain.jpg", seed=9)
    broken = folder / "without" / "broken.jpg"
    draw(broken, seed=10, exif=make_exif(image={0x0112: 1}).tobytes())
    data = broken.read_bytes()
    at = data.index(b"Exif\0\0") + 6
    # The first directory's offset leads out of the file.
    broken.write_bytes(data[: at + 4] + b"\xff\xff\xff\xf0" + data[at + 8 :])
    return folder


@pytest.mark.parametrize("schema", ["flowers", "imagenet", "tfds"])
def test_the_features_are_in_the_records_beside_the_others(photos, tmp_path, schema):
    output, names = tmp_path / "out", ",".join(reversed(EXIF_NAMES))
    flags = ["--schema", schema, "--image-size", "16", "--exif", names]
    assert ingest(f"{photos}/*/*", output, *flags) == 0
    manifest = load_manifest(str(output))
    assert manifest.records == 7 and manifest.rejects == {}
    assert manifest.config["exif"] == list(EXIF_NAMES)
    key = {"flowers": "key", "imagenet": "image/filename", "tfds": "file_name"}[schema]
    spec = {key: tf.io.FixedLenFeature([], tf.string)}
    for name, feature in manifest.features.items():
        if name.startswith("exif/"):
            dtype = {"bytes": tf.string, "int64": tf.int64, "float": tf.float32}[feature["dtype"]]
            spec[name] = tf.io.FixedLenFeature(feature["shape"], dtype)
    assert len(spec) == 1 + len(EXIF_NAMES)
    seen = 0
    for record in tf.data.TFRecordDataset(sorted(map(str, output.glob("train-*")))):
        found = {k: v.numpy() for k, v in tf.io.parse_single_example(record, spec).items()}
        label, name = found.pop(key).decode().split("/")
        expected = {**FULL, "iso": 100 + int(name[0])} if label == "with" else DEFAULTS
        assert found == {f"exif/{name}": value for name, value in expected.items()}
        seen += 1
    assert seen == 7
    assert main(["verify", str(output), "--deep", "--sources", "10"]) == 0


def test_the_reader_gives_them_as_features(photos, tmp_path):
    output = tmp_path / "out"
    assert ingest(f"{photos}/*/*", output, "--image-size", "16", "--exif", "all") == 0
    names = ["key", "exif/make", "exif/iso", "exif/f_number"]
    data = open_dataset(output, training=False, batch_size=7, features=names)
    ((first, _, _),) = data.as_numpy_iterator()
    for number, key in enumerate(first["key"]):
        known = key.startswith(b"with/")
        assert first["exif/make"][number] == (b"Nokia" if known else b"")
        assert first["exif/f_number"][number] == (2.25 if known else 0)
        assert first["exif/iso"].dtype == np.int64
    with pytest.raises(ValueError, match="features 'exif/gps_latitude': .* has no such feature"):
        open_dataset(output, features=["exif/gps_latitude"])


def test_no_place_is_in_the_files_unless_it_was_asked_for(photos, tmp_path):
    for flags in ([], ["--exif", "all"]):
        output = tmp_path / f"out{len(flags)}"
        assert ingest(f"{photos}/*/*", output, "--image-size", "16", *flags) == 0
        for path in output.rglob("*"):
            assert path.is_dir() or b"gps" not in path.read_bytes()


def test_beside_the_columns_of_a_csv(photos, tmp_path, capsys):
    table = photos / "rows.csv"
    rows = [f"with/{n}.{s},x,{n}" for n, s in enumerate(["jpg", "png", "webp"])]
    table.write_text("\n".join(["path,label,weight:float", *rows]) + "\n")
    assert ingest(table, tmp_path / "out", "--exif", "model,iso", "--image-size", "16") == 0
    names = list(load_manifest(str(tmp_path / "out")).features)
    assert names == sorted(names) and {"exif/iso", "exif/model", "weight"} <= set(names)
    capsys.readouterr()
    table.write_text("path,label,exif/iso:int\nwith/0.jpg,x,3\n")
    assert ingest(table, tmp_path / "clash", "--exif", "iso") == 1
    assert capsys.readouterr().err == (
        f"tpufeed ingest: error: {table}: the schema has a feature 'exif/iso': rename the column\n"
    )
    assert ingest(table, tmp_path / "free", "--exif", "make", "--image-size", "16") == 0
    table.unlink()


def test_what_was_asked_for_makes_another_data_set_and_another_run(photos, tmp_path, capsys):
    plain, more = tmp_path / "plain", tmp_path / "more"
    assert ingest(f"{photos}/*/*", plain, "--image-size", "16") == 0
    assert "exif" not in json.loads((plain / "dataset.json").read_text())["config"]
    assert ingest(f"{photos}/*/*", more, "--image-size", "16", "--exif", "make,model") == 0
    assert ingest(
        f"{photos}/*/*", more, "--image-size", "16", "--exif", "model,make", "--resume"
    ) == 0  # fmt: skip
    assert load_manifest(str(plain)).fingerprint != load_manifest(str(more)).fingerprint
    capsys.readouterr()
    assert ingest(f"{photos}/*/*", more, "--image-size", "16", "--resume") == 1
    assert '--exif ["make", "model"] then, null now' in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_corpus_loses_no_picture_to_its_exif(shared):
    """Whatever decodes has features, of real cameras and of files made to break parsers."""
    found = {"with": 0, "without": 0}
    for path in sorted((shared / "corpus" / "files").rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        if not any(
            data.startswith(head) for head in (b"\xff\xd8", b"\x89PNG", b"RIFF", b"II", b"MM")
        ):
            continue
        try:
            Image.open(io.BytesIO(data)).load()
        except Exception:
            continue
        tags = read(data, orientation=1)
        found["without" if tags == DEFAULTS else "with"] += 1
    assert found["with"] > 20 and found["without"] > 100


def test_a_real_camera(shared):
    path = shared / "data" / "photos" / "ColorfulCups_2560x1600.jpg"
    expected = {
        "datetime_original": b"2014:04:29 14:25:26",
        "make": b"SONY",
        "model": b"NEX-3N",
        "orientation": 1,
        "focal_length": 28.0,
        "f_number": 8.0,
        "exposure_time": 0.0015625,
        "iso": 400,
        "gps_latitude": 56 + 9.359705 / 60,
        "gps_longitude": 10 + 12.492287 / 60,
    }
    assert read(path.read_bytes(), orientation=1) == expected
