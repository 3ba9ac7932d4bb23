"""Pixels, by value: every resize mode, encoding, kind of source and reason to reject one."""

import concurrent.futures
import dataclasses
import io
import os
import random
import re
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from cykooz_resizer import CpuExtensions, Resizer
from PIL import Image, ImageFile, ImageOps

import transforms.image
from transforms.image import (
    ENCODINGS,
    RESIZE_MODES,
    PixelPolicy,
    decode_image,
    estimate_bytes,
    fit_image,
    prepare_image,
    resize_image,
    sniff_format,
)
from transforms.records import ImageError

# Pillow's remarks on damaged files; in a run they are silenced once for the process.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning"
)

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(__file__).resolve().parents[2] / "shared"

# Every mode with the sizes and the geometry that it must give; the source is 400x300.
# mode, target, (width, height), box in the source, content in the picture
GEOMETRY = [
    ("cover", (200, 200), (200, 200), (50, 0, 350, 300), (0, 0, 200, 200)),
    ("cover", (320, 100), (320, 100), (0, 87.5, 400, 212.5), (0, 0, 320, 100)),
    ("contain", (200, 200), (200, 150), (0, 0, 400, 300), (0, 0, 200, 150)),
    ("contain", (320, 100), (133, 100), (0, 0, 400, 300), (0, 0, 133, 100)),
    ("pad", (200, 200), (200, 200), (0, 0, 400, 300), (0, 25, 200, 175)),
    ("pad", (320, 100), (320, 100), (0, 0, 400, 300), (93, 0, 226, 100)),
    ("stretch", (200, 200), (200, 200), (0, 0, 400, 300), (0, 0, 200, 200)),
    ("stretch", (320, 100), (320, 100), (0, 0, 400, 300), (0, 0, 320, 100)),
    ("shortest", (200, 200), (267, 200), (0, 0, 400, 300), (0, 0, 267, 200)),
    ("shortest", (320, 100), (133, 100), (0, 0, 400, 300), (0, 0, 133, 100)),
    ("longest", (200, 200), (200, 150), (0, 0, 400, 300), (0, 0, 200, 150)),
    ("longest", (320, 100), (320, 240), (0, 0, 400, 300), (0, 0, 320, 240)),
    ("none", (200, 200), (400, 300), (0, 0, 400, 300), (0, 0, 400, 300)),
    ("none", (320, 100), (400, 300), (0, 0, 400, 300), (0, 0, 400, 300)),
]
ORIENTATION = 274
# What each EXIF orientation says of the stored rows, written out with numpy.
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return levels[..., 0] if channels == 1 else levels


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth shapes, edges and a little grain, as in a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(noise(12, 9, seed=seed)).resize((width, height), 3)
    levels = np.asarray(coarse, np.float32)
    across = np.arange(width)[None, :, None]
    levels = levels + 40 * ((across // (width // 23 + 1)) % 2) + rng.normal(0, 4, levels.shape)
    return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))


def encoded(image: Image.Image | np.ndarray, format_: str, **options) -> bytes:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()


def png(rows: list[bytes], width: int, *, depth: int, colour: int, trns: bytes = b"") -> bytes:
    """A PNG of any bit depth and colour type, which Pillow does not write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, len(rows), depth, colour, 0, 0, 0)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            chunk(b"tRNS", trns) if trns else b"",
            chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))),
            chunk(b"IEND", b""),
        ]
    )


def policy(**fields) -> PixelPolicy:
    return PixelPolicy(**{"mode": "none", "encoding": "raw", **fields})


def pixels(data: bytes, **fields) -> np.ndarray:
    """The picture's levels, height x width x channels."""
    picture = prepare_image(data, policy=policy(**fields))
    shape = (picture.geometry.height, picture.geometry.width, picture.channels)
    assert (picture.format, len(picture.data)) == ("RAW", np.prod(shape))
    return np.frombuffer(picture.data, np.uint8).reshape(shape)


def rejection(data: bytes, **fields) -> tuple[str, str]:
    with pytest.raises(ImageError) as caught:
        prepare_image(data, policy=policy(**fields))
    assert "\n" not in caught.value.detail
    return caught.value.reason, caught.value.detail


def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    assert one.shape == other.shape
    return np.abs(one.astype(np.float64) - other.astype(np.float64))


def farthest(one: np.ndarray, other: np.ndarray) -> float:
    return float(distance(one, other).max())


def mean_distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(distance(one, other).mean())


def triangle(side: int, low: float, high: float, size: int) -> np.ndarray:
    """Weights [size, side] of a bilinear resize with antialias, by its definition.

    What lies beside the window is seen by the pixels at its edge; outside the picture is nothing.
    """
    step = (high - low) / size
    reach = max(step, 1.0)
    centres = low + (np.arange(size) + 0.5) * step
    middles = np.arange(side) + 0.5
    weights = np.maximum(0, 1 - np.abs(middles[None] - centres[:, None]) / reach)
    return weights / weights.sum(1, keepdims=True)


def reference_resize(levels: np.ndarray, box, size: tuple[int, int]) -> np.ndarray:
    down = triangle(levels.shape[0], box[1], box[3], size[1])
    across = triangle(levels.shape[1], box[0], box[2], size[0])
    return np.einsum("xw,ywc->yxc", across, np.tensordot(down, levels.astype(np.float64), 1))


@pytest.fixture(scope="module")
def tf():
    return pytest.importorskip("tensorflow")


# Resize.


@pytest.mark.parametrize(("mode", "target", "size", "box", "content"), GEOMETRY)
def test_geometry_of_each_mode(mode, target, size, box, content):
    wanted = policy(mode=mode, width=target[0], height=target[1])
    found = fit_image(400, 300, policy=wanted, orientation=6)
    assert (found.width, found.height) == size
    assert found.box == box
    assert found.content == content
    assert (found.orientation, found.source_width, found.source_height) == (6, 400, 300)
    assert wanted.fixed_size == (mode in ("cover", "pad", "stretch"))
    # Swapping the axes of source and target swaps those of the outcome.
    turned = fit_image(300, 400, policy=policy(mode=mode, width=target[1], height=target[0]))
    assert (turned.height, turned.width) == size
    assert turned.box == (box[1], box[0], box[3], box[2])


@pytest.mark.parametrize(
    ("mode", "scale", "offset"),
    [
        ("cover", (0.8, 0.8), (0, -70)),
        ("contain", (0.3325, 1 / 3), (0, 0)),
        ("pad", (0.3325, 1 / 3), (93, 0)),
        ("stretch", (0.8, 1 / 3), (0, 0)),
        ("shortest", (0.3325, 1 / 3), (0, 0)),
        ("longest", (0.8, 0.8), (0, 0)),
        ("none", (1, 1), (0, 0)),
    ],
)
def test_scale_and_offset_carry_a_point_over(mode, scale, offset):
    found = fit_image(400, 300, policy=policy(mode=mode, width=320, height=100))
    assert found.scale == pytest.approx(scale)
    assert found.offset == pytest.approx(offset)


@pytest.mark.parametrize(("mode", "target", "size", "box", "content"), GEOMETRY)
def test_pixels_of_each_mode_match_the_definition(mode, target, size, box, content):
    levels = noise(400, 300, seed=1)
    found = pixels(
        encoded(levels, "PNG"), mode=mode, width=target[0], height=target[1], background=(9, 8, 7)
    )
    wanted = np.full((size[1], size[0], 3), (9, 8, 7), np.float64)
    left, upper, right, lower = content
    wanted[upper:lower, left:right] = reference_resize(levels, box, (right - left, lower - upper))
    # It rounds twice, once an axis.
    assert farthest(found, wanted) <= 1.01


@pytest.mark.parametrize("mode", RESIZE_MODES)
def test_enlarged_pixels_match_the_definition(mode):
    levels = noise(7, 5, seed=2)
    wanted = policy(mode=mode, width=40, height=30)
    geometry = fit_image(7, 5, policy=wanted)
    found = np.asarray(resize_image(Image.fromarray(levels), geometry, policy=wanted))
    left, upper, right, lower = geometry.content
    content = reference_resize(levels, geometry.box, (right - left, lower - upper))
    assert farthest(found[upper:lower, left:right], content) <= 1.01


@pytest.mark.parametrize("target", [(64, 48), (50, 90), (300, 10)])
def test_resize_matches_tensorflow(tf, target):
    levels = noise(120, 90, seed=3)
    found = pixels(encoded(levels, "PNG"), mode="stretch", width=target[0], height=target[1])
    wanted = tf.image.resize(levels, target[::-1], method="bilinear", antialias=True).numpy()
    assert farthest(found, wanted) <= 1.01


def test_cover_matches_tensorflow_on_the_window(tf):
    levels = noise(120, 80, seed=4)
    found = pixels(encoded(levels, "PNG"), mode="cover", width=32, height=32)
    wanted = tf.image.resize(levels[:, 20:100], (32, 32), method="bilinear", antialias=True)
    # The window's edge pixels may see one neighbour outside it.
    assert farthest(found[:, 1:-1], wanted.numpy()[:, 1:-1]) <= 1.01


def test_four_by_two_by_hand():
    # Halving weighs each row 3 3 1 / 7 from its end, and both lines alike.
    row = np.array([0, 70, 140, 210], np.uint8)
    levels = np.stack([row, row + 20])
    found = pixels(encoded(levels, "PNG"), mode="stretch", width=2, height=1, channels=1)
    assert found.tolist() == [[[60], [170]]]


def test_cover_takes_the_middle():
    row = np.array([[0, 10, 20, 30, 40, 50]], np.uint8)
    found = pixels(encoded(row.repeat(2, 0), "PNG"), mode="cover", width=2, height=2, channels=1)
    assert found.tolist() == [[[20], [30]], [[20], [30]]]


def test_pad_centres_on_the_background():
    red = encoded(Image.new("RGB", (4, 2), (200, 0, 0)), "PNG")
    found = pixels(red, mode="pad", width=4, height=7, background=(1, 2, 3))
    rows = [set(map(tuple, row)) for row in found.tolist()]
    assert rows == [{(1, 2, 3)}] * 2 + [{(200, 0, 0)}] * 2 + [{(1, 2, 3)}] * 3
    gray = pixels(red, mode="pad", width=4, height=7, channels=1, background=(10, 200, 30))
    # ITU-R 601: 0.299 R + 0.587 G + 0.114 B
    assert gray[:, 0, 0].tolist() == [124, 124, 60, 60, 124, 124, 124]


@pytest.mark.parametrize(
    ("mode", "size"),
    [
        ("cover", (224, 100)),
        ("contain", (224, 1)),
        ("pad", (224, 100)),
        ("stretch", (224, 100)),
        ("longest", (224, 1)),
        ("none", (60_000, 1)),
    ],
)
def test_sixty_thousand_by_one(mode, size):
    line = encoded(Image.new("RGB", (60_000, 1), (90, 90, 90)), "JPEG")
    found = pixels(line, mode=mode, width=224, height=100, background=(90, 90, 90))
    assert found.shape == (size[1], size[0], 3)
    assert np.unique(found).tolist() == [90]


def test_sixty_thousand_by_one_enlarged_is_too_large():
    line = encoded(Image.new("RGB", (60_000, 1)), "JPEG")
    assert rejection(line, mode="shortest", width=224, height=100) == (
        "too_large",
        "6000000x100 pixels, --max-pixels is 178956970",
    )


@pytest.mark.parametrize(
    ("mode", "size"),
    [
        ("cover", (50, 50)),
        ("contain", (50, 1)),
        ("pad", (50, 50)),
        ("stretch", (50, 50)),
        ("shortest", (50_000, 50)),
        ("longest", (50, 1)),
        ("none", (2000, 2)),
    ],
)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_side_falls_to_zero(mode, size, encoding):
    line = encoded(Image.new("RGB", (2000, 2), (40, 90, 160)), "PNG")
    wanted = policy(mode=mode, width=50, height=50, encoding=encoding, quality=100)
    found = prepare_image(line, policy=wanted)
    assert (found.geometry.width, found.geometry.height) == size
    if encoding != "raw":
        assert Image.open(io.BytesIO(found.data)).size == size


# Encodings.


def jpeg_markers(data: bytes) -> list[tuple[int, bytes]]:
    """The segments of a JPEG up to its first scan."""
    found, at = [], 2
    while not found or found[-1][0] != 0xDA:
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        assert data[at] == 0xFF
        found.append((data[at + 1], data[at + 4 : at + 2 + length]))
        at += 2 + length
    return found


def dressed(format_: str, orientation: int = 1) -> bytes:
    """A picture with all that must not reach the output."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    exif[0x010E] = "a description"
    extra = {"comment": b"a comment"} if format_ == "JPEG" else {"dpi": (72, 72)}
    return encoded(photo(64, 48), format_, exif=exif, icc_profile=b"a profile" * 30, **extra)


@pytest.mark.parametrize("format_", ["JPEG", "PNG"])
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_plain_444(format_, channels):
    wanted = policy(encoding="jpeg", mode="stretch", width=32, height=20, channels=channels)
    found = prepare_image(dressed(format_), policy=wanted)
    assert (found.format, found.channels) == ("JPEG", channels)
    segments = jpeg_markers(found.data)
    # JFIF, quantisation, baseline frame, Huffman tables, scan: no EXIF (e1), ICC (e2), comment.
    assert {marker for marker, _ in segments} == {0xE0, 0xDB, 0xC0, 0xC4, 0xDA}
    (frame,) = [body for marker, body in segments if marker == 0xC0]
    assert frame[:6] == bytes([8, 0, 20, 0, 32, channels])
    assert [frame[at] for at in range(7, len(frame), 3)] == [0x11] * channels
    opened = Image.open(io.BytesIO(found.data))
    assert set(opened.info) == {"jfif", "jfif_version", "jfif_unit", "jfif_density"}


def test_jpeg_decodes_in_tensorflow(tf):
    source = encoded(photo(64, 48), "PNG")
    wanted = pixels(source)
    for channels, quality, limit in ((3, 90, 4), (3, 100, 1), (1, 90, 4)):
        made = policy(encoding="jpeg", quality=quality, channels=channels)
        found = prepare_image(source, policy=made)
        read = tf.io.decode_jpeg(found.data, channels=0, dct_method="INTEGER_ACCURATE").numpy()
        assert read.shape == (48, 64, channels)
        expected = wanted if channels == 3 else pixels(source, channels=1)
        assert mean_distance(read, expected) < limit


def test_quality_changes_the_size():
    source = encoded(photo(64, 48), "PNG")
    sizes = [
        len(prepare_image(source, policy=policy(encoding="jpeg", quality=quality)).data)
        for quality in (1, 50, 90, 100)
    ]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("channels", [1, 3])
def test_png_is_exact(tf, channels):
    levels = noise(31, 17, channels=channels)
    found = prepare_image(encoded(levels, "PNG"), policy=policy(encoding="png", channels=channels))
    assert found.format == "PNG"
    read = tf.io.decode_png(found.data).numpy()
    assert farthest(read, levels.reshape(17, 31, channels)) == 0


@pytest.mark.parametrize("format_", ["JPEG", "PNG"])
def test_png_carries_nothing_else(format_):
    data = prepare_image(dressed(format_), policy=policy(encoding="png")).data
    names, at = [], 8
    while at < len(data):
        names.append(data[at + 4 : at + 8])
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    assert sorted(set(names)) == [b"IDAT", b"IEND", b"IHDR"]


@pytest.mark.parametrize("channels", [1, 3])
def test_raw_is_the_levels_in_row_order(channels):
    levels = noise(31, 17, channels=channels)
    found = prepare_image(encoded(levels, "PNG"), policy=policy(channels=channels))
    assert (found.format, found.data) == ("RAW", levels.tobytes())


@pytest.mark.parametrize("extra", [b"", b"\xff\xff", b"\xff\xfe\0\x04ab"])
def test_original_looks_for_the_frame_as_decoders_do(extra):
    wanted = policy(encoding="original", channels=1)
    plain = encoded(photo(16, 16).convert("L"), "JPEG")
    for source, kept in ((plain, True), (lossless_jpeg(), False)):
        padded = source[:2] + extra + source[2:]
        assert (prepare_image(padded, policy=wanted).data == padded) is kept


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 2}])
def test_original_keeps_a_plain_jpeg(options):
    source = encoded(photo(64, 48), "JPEG", comment=b"kept", **options)
    for fields in ({}, {"mode": "cover", "width": 64, "height": 48}):
        found = prepare_image(source, policy=policy(encoding="original", **fields))
        assert (found.format, found.data) == ("JPEG", source)
    gray = encoded(photo(64, 48).convert("L"), "JPEG", **options)
    assert prepare_image(gray, policy=policy(encoding="original", channels=1)).data == gray


def lossless_jpeg(width: int = 8, height: int = 1) -> bytes:
    """Pixels of level 128: each differs from its neighbour by nothing, a bit of 0."""
    table = bytes([1]) + bytes(15) + bytes([0])
    return b"".join(
        [
            b"\xff\xd8",
            b"\xff\xc3\0\x0b\x08" + struct.pack(">HH", height, width) + bytes([1, 1, 0x11, 0]),
            b"\xff\xc4\0\x14\0" + table,
            b"\xff\xda\0\x08" + bytes([1, 1, 0, 1, 0, 0]),
            bytes(width * height // 8) + b"\xff\xd9",
        ]
    )


def turned_jpeg(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(photo(64, 48), "JPEG", exif=exif)


def mpo() -> bytes:
    second = Image.new("RGB", (64, 48), "green")
    return encoded(photo(64, 48), "MPO", save_all=True, append_images=[second])


@pytest.mark.parametrize(
    ("make", "fields", "size"),
    [
        (lambda: turned_jpeg(6), {}, (48, 64)),
        (lambda: turned_jpeg(3), {}, (64, 48)),
        (lambda: encoded(photo(64, 48), "JPEG"), {"mode": "cover"}, (224, 224)),
        (lambda: encoded(photo(64, 48), "JPEG"), {"channels": 1}, (64, 48)),
        (lambda: encoded(photo(64, 48).convert("L"), "JPEG"), {}, (64, 48)),
        (lambda: encoded(photo(64, 48).convert("CMYK"), "JPEG"), {}, (64, 48)),
        (mpo, {}, (64, 48)),
        (lossless_jpeg, {"channels": 1}, (8, 1)),
        (lambda: encoded(photo(64, 48), "PNG"), {}, (64, 48)),
        (lambda: encoded(photo(64, 48), "WEBP"), {}, (64, 48)),
    ],
    ids="turn mirror size gray colour cmyk mpo lossless png webp".split(),
)
def test_original_encodes_what_is_not_plain(make, fields, size):
    source = make()
    wanted = policy(encoding="original", **fields)
    found = prepare_image(source, policy=wanted)
    assert found.format == "JPEG"
    assert (
        found.data
        == prepare_image(source, policy=dataclasses.replace(wanted, encoding="jpeg")).data
    )
    opened = Image.open(io.BytesIO(found.data))
    assert (opened.format, opened.size, opened.mode) == (
        "JPEG",
        size,
        "L" if wanted.channels == 1 else "RGB",
    )
    assert {marker for marker, _ in jpeg_markers(found.data)} <= {0xE0, 0xDB, 0xC0, 0xC4, 0xDA}


def test_bare_gray_levels():
    levels = noise(28, 20, channels=1)
    for channels in (1, 3):
        found = prepare_image(
            levels.tobytes(),
            policy=policy(encoding="png", channels=channels),
            raw_size=(28, 20),
        )
        read = np.asarray(Image.open(io.BytesIO(found.data))).reshape(20, 28, channels)
        assert farthest(read, levels[..., None].repeat(channels, 2)) == 0
        assert (found.geometry.source_width, found.geometry.source_height) == (28, 20)
    kept = prepare_image(levels.tobytes(), policy=policy(encoding="original"), raw_size=(28, 20))
    assert kept.format == "JPEG"


# Orientation.


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_orientation_is_undone(format_, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    levels = noise(24, 16, seed=5)
    # With the values that Pillow stores without loss, the stored rows are known.
    options = {
        "JPEG": {"exif": exif, "quality": 95},
        "PNG": {"exif": exif},
        "WEBP": {"exif": exif, "lossless": True},
        "TIFF": {"tiffinfo": {ORIENTATION: orientation}},
        "AVIF": {"exif": exif, "quality": 100, "subsampling": "4:4:4"},
    }[format_]
    data = encoded(levels, format_, **options)
    picture = prepare_image(data, policy=policy())
    found = pixels(data)
    assert picture.geometry.orientation == orientation
    assert found.shape == ((16, 24, 3) if orientation < 5 else (24, 16, 3))
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert farthest(found, wanted) == 0
    limit = {"JPEG": 60, "AVIF": 12}.get(format_, 0)
    assert mean_distance(found, UPRIGHT[orientation](levels)) <= limit
    if orientation != 1:
        assert mean_distance(found, np.resize(levels, found.shape)) > 60


def exif_orientation(kind: int, value: bytes, count: int = 1) -> bytes:
    """EXIF with nothing but the orientation, big-endian; a long value follows its entry."""
    inline = len(value) <= 4
    field = value.ljust(4, b"\0") if inline else struct.pack(">I", 26)
    entry = struct.pack(">HHI", ORIENTATION, kind, count) + field
    return b"Exif\0\0MM\0*\0\0\0\x08\0\1" + entry + bytes(4) + (b"" if inline else value)


@pytest.mark.parametrize(
    ("exif", "orientation"),
    [
        (exif_orientation(3, b"\0\6"), 6),
        (exif_orientation(4, b"\0\0\0\6"), 6),
        (exif_orientation(12, struct.pack(">d", 6)), 6),
        (exif_orientation(5, struct.pack(">II", 12, 2)), 6),
        (exif_orientation(3, b"\0\0"), 1),
        (exif_orientation(3, b"\0\x09"), 1),
        (exif_orientation(2, b"6\0\0\0", 2), 1),
        (exif_orientation(3, b"\0\6\0\3", 2), 6),
        (exif_orientation(3, b"\0\6")[:20], 1),
        (exif_orientation(99, b"\0\6"), 1),
        (b"Exif\0\0MM\0*\xff\xff\xff\xff", 1),
        (b"Exif\0\0" + b"garbage" * 9, 1),
        (b"Exif\0\0", 1),
    ],
    ids=(
        "short long double fraction zero nine text two cut unknown-type far-offset garbage empty"
    ).split(),
)
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
def test_exif_never_costs_the_picture(format_, exif, orientation):
    data = encoded(photo(24, 16), format_, exif=exif)
    geometry = prepare_image(data, policy=policy()).geometry
    assert type(geometry.orientation) is int
    assert geometry.orientation == orientation
    assert (geometry.width, geometry.height) == ((16, 24) if orientation == 6 else (24, 16))


@pytest.mark.parametrize("format_", ["JPEG", "WEBP"])
def test_orientation_of_the_xmp(format_):
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="8"/></x:xmpmeta>'
    geometry = prepare_image(encoded(photo(24, 16), format_, xmp=xmp), policy=policy()).geometry
    assert (geometry.orientation, geometry.width, geometry.height) == (8, 16, 24)


def test_sizes_are_those_after_the_turn():
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    data = encoded(photo(400, 300), "JPEG", exif=exif)
    geometry = prepare_image(data, policy=policy(mode="shortest", width=60, height=60)).geometry
    assert (geometry.source_width, geometry.source_height) == (300, 400)
    assert (geometry.width, geometry.height) == (60, 80)


# Modes, alpha and depth.

BACKGROUNDS = [(255, 255, 255), (0, 0, 0), (10, 200, 30)]


def composited(colour: np.ndarray, alpha: np.ndarray, background) -> np.ndarray:
    share = alpha[..., None].astype(np.float64) / 255
    return colour * share + np.array(background) * (1 - share)


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("format_", ["PNG", "WEBP", "TIFF"])
def test_rgba_shows_the_background(format_, background):
    levels = noise(24, 16, channels=4)
    options = {"lossless": True, "exact": True} if format_ == "WEBP" else {}
    found = pixels(encoded(levels, format_, **options), background=background)
    assert farthest(found, composited(levels[..., :3], levels[..., 3], background)) <= 1


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_gray_with_alpha_shows_the_background(background):
    levels = noise(24, 16, channels=2)
    data = encoded(Image.fromarray(levels, "LA"), "PNG")
    wanted = composited(levels[..., :1].repeat(3, 2), levels[..., 1], background)
    assert farthest(pixels(data, background=background), wanted) <= 1
    weights = np.array([0.299, 0.587, 0.114])
    gray = pixels(data, background=background, channels=1)
    assert farthest(gray[..., 0], wanted @ weights) <= 1.5


def test_palette():
    image = Image.fromarray(np.array([[0, 1, 2, 1]], np.uint8), "P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    colours = [[10, 20, 30], [40, 50, 60], [70, 80, 90], [40, 50, 60]]
    for format_ in ("PNG", "GIF", "BMP", "TIFF"):
        assert pixels(encoded(image, format_)).tolist() == [colours]
    bare = [[10, 20, 30], [1, 2, 3], [70, 80, 90], [1, 2, 3]]
    for format_ in ("PNG", "GIF"):
        data = encoded(image, format_, transparency=1)
        assert pixels(data, background=(1, 2, 3)).tolist() == [bare]
    shares = encoded(image, "PNG", transparency=bytes([255, 51, 0]))
    mixed = [[10, 20, 30], [8, 10, 12], [0, 0, 0], [8, 10, 12]]
    assert pixels(shares, background=(0, 0, 0)).tolist() == [mixed]


# A row of pixels, tRNS, and what must come out over the background 1, 2, 3.
TRNS = {
    "gray 1": (bytes([0b10000000]), 2, 1, 0, b"\0\1", [[1, 2, 3], [0, 0, 0]]),
    "gray 2": (bytes([0b10110000]), 2, 2, 0, b"\0\2", [[1, 2, 3], [255, 255, 255]]),
    "gray 4": (bytes([0x5A]), 2, 4, 0, b"\0\5", [[1, 2, 3], [170, 170, 170]]),
    "gray 8": (bytes([0x5A, 3]), 2, 8, 0, b"\0\3", [[90, 90, 90], [1, 2, 3]]),
    "gray 16": (bytes([90, 1, 3, 4, 3, 5]), 3, 16, 0, b"\3\4", [[90] * 3, [1, 2, 3], [3] * 3]),
    "rgb 8": (bytes([7, 8, 9, 4, 5, 6]), 2, 8, 2, b"\0\7\0\x08\0\x09", [[1, 2, 3], [4, 5, 6]]),
    "rgb 16": (
        bytes([7, 70, 8, 80, 9, 90, 4, 1, 5, 1, 6, 1]),
        2,
        16,
        2,
        bytes([7, 70, 8, 80, 9, 90]),
        [[1, 2, 3], [4, 5, 6]],
    ),
}


@pytest.mark.parametrize(
    ("row", "width", "depth", "colour", "trns", "wanted"), TRNS.values(), ids=TRNS
)
def test_transparent_level_or_colour(row, width, depth, colour, trns, wanted):
    data = png([row, row], width, depth=depth, colour=colour, trns=trns)
    assert pixels(data, background=(1, 2, 3)).tolist() == [wanted, wanted]


@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("colour", [0, 2, 4, 6])
def test_png_depths_and_colours_match_tensorflow(tf, depth, colour):
    samples = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    rng = np.random.default_rng(colour)
    rows = [rng.bytes(24 * samples * depth // 8) for _ in range(16)]
    data = png(rows, 24, depth=depth, colour=colour)
    read = tf.io.decode_png(data, channels=4).numpy()
    wanted = composited(read[..., :3], read[..., 3], (10, 200, 30))
    assert farthest(pixels(data, background=(10, 200, 30)), wanted) <= 1.01


def test_few_bits_span_the_whole_range():
    for depth, wanted in ((1, [0, 255]), (2, [0, 85, 170, 255]), (4, list(range(0, 256, 17)))):
        bits = "".join(f"{level:0{depth}b}" for level in range(2**depth)).ljust(8, "0")
        row = int(bits, 2).to_bytes(len(bits) // 8, "big")
        found = pixels(png([row], 2**depth, depth=depth, colour=0), channels=1)
        assert found.ravel().tolist() == wanted


@pytest.mark.parametrize("format_", ["PNG", "TIFF"])
def test_sixteen_bit_gray_is_scaled_not_clipped(format_):
    levels = np.random.default_rng(6).integers(0, 65_536, (16, 24), np.uint16)
    data = encoded(levels, format_)
    assert farthest(pixels(data, channels=1)[..., 0], levels >> 8) == 0
    assert farthest(pixels(data)[..., 2], levels >> 8) == 0


def test_big_endian_sixteen_bit_tiff():
    levels = np.random.default_rng(7).integers(0, 65_536, (16, 24), np.uint16)
    data = encoded(Image.frombytes("I;16B", (24, 16), levels.astype(">u2").tobytes()), "TIFF")
    assert farthest(pixels(data, channels=1)[..., 0], levels >> 8) == 0


@pytest.mark.parametrize("format_", ["PNG", "BMP", "TIFF", "GIF"])
def test_one_bit(format_):
    levels = noise(24, 16, channels=1) > 127
    data = encoded(Image.fromarray(levels), format_)
    wanted = levels.astype(np.uint8) * 255
    assert farthest(pixels(data), wanted[..., None].repeat(3, 2)) == 0


def ycck_jpeg(image: Image.Image) -> bytes:
    """Pillow writes CMYK without a transform; this makes the four planes YCC and K, and says so."""
    planes = [ImageOps.invert(p) for p in ImageOps.invert(image).convert("YCbCr").split()]
    data = encoded(
        Image.merge("CMYK", [*planes, Image.new("L", image.size, 0)]), "JPEG", quality=95
    )
    at = data.index(b"Adobe") + 11
    assert data[at] == 0
    return data[:at] + b"\2" + data[at + 1 :]


@pytest.mark.parametrize("kind", ["cmyk", "ycck"])
def test_four_colour_jpeg_is_no_negative(kind):
    image = photo(64, 48)
    if kind == "ycck":
        data = ycck_jpeg(image)
    else:
        data = encoded(image.convert("CMYK"), "JPEG", quality=95)
    assert Image.open(io.BytesIO(data)).mode == "CMYK"
    assert mean_distance(pixels(data), np.asarray(image)) < 4


@pytest.mark.parametrize("format_", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_first_frame_of_many(format_):
    frames = [Image.new("RGB", (24, 16), colour) for colour in ("red", "blue", "lime")]
    options = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100}}.get(format_, {})
    data = encoded(frames[0], format_, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    found = pixels(data)
    assert found.shape == (16, 24, 3)
    assert farthest(found, np.full((16, 24, 3), (255, 0, 0))) <= (format_ == "AVIF") * 3


def test_first_frame_smaller_than_the_canvas():
    # A 4x4 screen whose only frame is 1x1 at (2, 1): the rest is transparent or background.
    screen = b"GIF89a" + struct.pack("<HHBBB", 4, 4, 0x80, 0, 0) + bytes([0, 0, 0, 9, 8, 7])
    control = b"\x21\xf9\4\1\0\0\0\0"
    frame = b"\x2c" + struct.pack("<HHHHB", 2, 1, 1, 1, 0) + b"\2\2\x4c\1\0;"
    found = pixels(screen + control + frame, background=(50, 60, 70))
    wanted = np.full((4, 4, 3), (50, 60, 70))
    wanted[1, 2] = (9, 8, 7)
    assert found.tolist() == wanted.tolist()


def test_mpo_is_a_jpeg_of_its_first_picture():
    data = mpo()
    assert (sniff_format(data), Image.open(io.BytesIO(data)).format) == ("JPEG", "MPO")
    assert mean_distance(pixels(data), np.asarray(photo(64, 48))) < 10


@pytest.mark.parametrize(
    ("format_", "options", "limit"),
    [
        ("BMP", {}, 0),
        ("PNG", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("TIFF", {"compression": "jpeg", "quality": 95}, 4),
        ("AVIF", {"quality": 95}, 8),
        ("JPEG", {"quality": 95}, 8),
    ],
)
def test_format_is_told_by_content(format_, options, limit):
    data = encoded(photo(64, 48), format_, **options)
    assert sniff_format(data) == format_
    assert mean_distance(pixels(data), np.asarray(photo(64, 48))) <= limit


def test_icc_profile_is_ignored():
    profiled = encoded(photo(64, 48), "PNG", icc_profile=b"p" * 200)
    assert farthest(pixels(profiled), np.asarray(photo(64, 48))) == 0


# Sums and estimates.


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_channel_sums_are_exact(channels, encoding):
    source = encoded(noise(61, 47, seed=8), "JPEG")
    fields = {"channels": channels, "mode": "none"}
    handed_over = pixels(source, **fields).reshape(-1, channels).astype(np.int64)
    found = prepare_image(source, policy=policy(encoding=encoding, **fields))
    assert found.pixels == 61 * 47
    assert found.channel_sum == tuple(handed_over.sum(0).tolist())
    assert found.channel_sum_of_squares == tuple((handed_over**2).sum(0).tolist())
    assert {type(n) for n in found.channel_sum + found.channel_sum_of_squares} == {int}


def test_channel_sums_do_not_overflow():
    white = encoded(Image.new("L", (9000, 9000), 255), "PNG")
    found = prepare_image(white, policy=policy(channels=1))
    assert found.channel_sum == (81_000_000 * 255,)
    assert found.channel_sum_of_squares == (81_000_000 * 65_025,)


@pytest.mark.parametrize(
    ("fields", "known", "unknown"),
    [
        ({"mode": "cover", "encoding": "jpeg"}, 25_790, 25_790),
        ({"mode": "pad", "encoding": "png"}, 90_517, 90_517),
        ({"mode": "stretch", "encoding": "raw"}, 150_728, 150_728),
        ({"mode": "stretch", "encoding": "raw", "channels": 1}, 50_376, 50_376),
        ({"mode": "cover", "encoding": "original"}, 12_345, 100_000),
        ({"mode": "none", "encoding": "jpeg"}, 12_345, 100_000),
        ({"mode": "shortest", "encoding": "png"}, 12_345, 100_000),
    ],
)
def test_estimate_bytes(fields, known, unknown):
    assert estimate_bytes(12_345, policy=policy(**fields)) == known
    assert estimate_bytes(-1, policy=policy(**fields)) == unknown


# Rejects.

SEED = encoded(photo(64, 48), "JPEG", quality=90)
UNSUPPORTED = {
    "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n",
    "JPEG XL": b"\xff\x0a\0\0",
    "PSD": b"8BPS\0\1",
    "ICO": b"\0\0\1\0\1\0",
    "CUR": b"\0\0\2\0\1\0",
    "TGA": b"\0\0\2\0\0\0\0\0\0\0\0\0\4\0",
    "ICNS": b"icns\0\0",
    "QOI": b"qoif\0\0",
    "DDS": b"DDS |\0",
    "OpenEXR": b"v/1\1\2\0",
    "FITS": b"SIMPLE  =    T",
    "Radiance HDR": b"#?RADIANCE\n",
    "PDF": b"%PDF-1.7",
    "PostScript": b"%!PS-Adobe",
    "PNM": b"P6\n1 1\n255\n\0\0\0",
    "ISO media file, brand b'heic'": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "ISO media file, brand b'isom'": b"\0\0\0\x14ftypisom\0\0\0\0mp41",
}


@pytest.mark.parametrize("detail", UNSUPPORTED)
def test_known_formats_that_are_not_accepted(detail):
    assert rejection(UNSUPPORTED[detail]) == ("unsupported_format", detail)


def test_jpeg2000_and_other_files_by_pillow():
    for format_, detail in (
        ("JPEG2000", "JPEG 2000"),
        ("PPM", "PNM"),
        ("ICO", "ICO"),
        ("TGA", "TGA"),
    ):
        assert rejection(encoded(photo(32, 32), format_)) == ("unsupported_format", detail)


def test_an_avif_brand_among_the_compatible_ones():
    data = encoded(photo(32, 32), "AVIF")
    assert data[4:12] == b"ftypavif"
    renamed = data[:8] + b"mif1" + data[12:]
    assert sniff_format(renamed) == "AVIF"
    assert pixels(renamed).shape == (32, 32, 3)


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (b"<html>\n<body>", r"no image format begins with b'<html>\n<'"),
        (b"version https://git-lfs", "no image format begins with b'version '"),
        (b"\0", r"no image format begins with b'\x00'"),
        (b"P1x", "no image format begins with b'P1x'"),
        (SEED[:20], "JPEG: UnidentifiedImageError: cannot identify image file"),
        (b"\x89PNG\r\n\x1a\n", "PNG: UnidentifiedImageError: cannot identify image file"),
        (b"II*\0" + bytes(9), "TIFF: UnidentifiedImageError: cannot identify image file"),
    ],
)
def test_unidentified(data, detail):
    assert rejection(data) == ("unidentified", detail)


def test_zero_byte():
    assert rejection(b"") == ("zero_byte", "the file is empty")


def test_truncated():
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    assert rejection(SEED[: len(SEED) // 2]) == (
        "truncated",
        "JPEG: OSError: image file is truncated (51 bytes not processed)",
    )
    # Only the end marker is missing.
    assert rejection(SEED[:-2])[0] == "truncated"
    for format_ in ("PNG", "BMP", "GIF", "WEBP", "TIFF", "AVIF"):
        data = encoded(noise(64, 48), format_)
        reason, detail = rejection(data[: len(data) // 2])
        assert (reason in ("truncated", "corrupt", "unidentified"), detail[: len(format_)]) == (
            True,
            format_,
        )


def test_truncated_png_is_not_half_accepted():
    data = encoded(noise(64, 48), "PNG", exif=b"Exif\0\0" + b"MM\0*" + bytes(20))
    assert rejection(data[:6000]) == (
        "truncated",
        "PNG: OSError: image file is truncated",
    )


def test_corrupt():
    data = bytearray(encoded(noise(64, 48), "PNG"))
    at = data.index(b"IDAT") + 300
    data[at : at + 40] = bytes(40)
    assert rejection(bytes(data)) == (
        "corrupt",
        "PNG: OSError: broken data stream when reading image file",
    )


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "AVIF"])
def test_too_large_by_its_header(format_):
    data = encoded(photo(24, 32), format_)
    assert pixels(data, max_pixels=24 * 32).shape == (32, 24, 3)
    found = "24x32" if format_ == "AVIF" else "768"
    for limit in (767, 384, 383, 1):
        assert rejection(data, max_pixels=limit) == (
            "too_large",
            f"{found} pixels, --max-pixels is {limit}",
        )


def test_too_large_before_any_pixel_is_made():
    # 30,000 x 30,000 in 67 bytes.
    bomb = bytearray(png([b"\0"], 1, depth=8, colour=0))
    bomb[16:24] = struct.pack(">II", 30_000, 30_000)
    bomb[29:33] = struct.pack(">I", zlib.crc32(bytes(bomb[12:29])))
    assert rejection(bytes(bomb)) == (
        "too_large",
        "900000000 pixels, --max-pixels is 178956970",
    )


def test_too_large_by_the_result():
    small = encoded(photo(40, 30), "PNG")
    assert rejection(small, mode="stretch", width=16_384, height=16_384) == (
        "too_large",
        "16384x16384 pixels, --max-pixels is 178956970",
    )
    line = encoded(Image.new("RGB", (2000, 2)), "PNG")
    wide = {"mode": "shortest", "width": 70, "height": 70}
    assert rejection(line, encoding="jpeg", **wide) == (
        "too_large",
        "70000x70 pixels, a JPEG holds 65500 a side; --encoding png holds more",
    )
    assert pixels(line, **wide).shape == (70, 70_000, 3)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_bit_depth(dtype):
    data = encoded(np.arange(12, dtype=dtype).reshape(3, 4), "TIFF")
    assert rejection(data) == (
        "bit_depth",
        "TIFF with signed, 32-bit or float samples: no defined range; save it with 8 or 16 bits",
    )


def test_lab_has_no_agreed_conversion():
    data = encoded(Image.new("LAB", (4, 3)), "TIFF")
    assert rejection(data) == ("unsupported_format", "TIFF in the colour space LAB")


def mutants(count: int) -> list[bytes]:
    """Sound files of every format with some bytes changed, removed or added."""
    rng = random.Random(0)
    formats = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "AVIF")
    sound = [encoded(photo(20, 14), format_) for format_ in formats]
    found = []
    for number in range(count):
        data = bytearray(sound[number % len(sound)])
        for _ in range(rng.choice((1, 2, 6))):
            at = rng.randrange(min(len(data), 200))
            data[at : at + rng.choice((0, 1, 1, 1, 4))] = rng.randbytes(rng.choice((0, 1, 1, 3)))
        found.append(bytes(data))
    return found


def test_damage_gives_a_picture_or_a_reason_and_twice_the_same():
    def outcome(data: bytes) -> object:
        try:
            return prepare_image(data, policy=policy(max_pixels=1_000_000))
        except ImageError as error:
            return error.args

    damaged = mutants(700)
    first = [outcome(data) for data in damaged]
    rejected = [found for found in first if isinstance(found, tuple)]
    assert 100 < len(rejected) < 650
    assert len({reason for reason, _ in rejected}) >= 4
    # An address in a message would differ, and change rejects.jsonl on every run.
    assert [detail for _, detail in rejected if re.search(" at 0x|BytesIO|\n", detail)] == []
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(outcome, damaged)) == first
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


# The policy's own errors.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 0}, "--image-size 0: allowed are 1 to 16384"),
        ({"height": 0}, "--image-size 0: allowed are 1 to 16384"),
        ({"width": 100_000}, "--image-size 100000: allowed are 1 to 16384"),
        ({"height": -5}, "--image-size -5: allowed are 1 to 16384"),
        ({"quality": 0}, "--quality 0: allowed are 1 to 100"),
        ({"quality": 101}, "--quality 101: allowed are 1 to 100"),
        (
            {"mode": "crop"},
            "--resize-mode crop: allowed are cover, contain, pad, stretch, shortest, longest, none",
        ),
        ({"encoding": "webp"}, "--encoding webp: allowed are jpeg, png, raw, original"),
        ({"channels": 2}, "--channels 2: allowed are 3, 1"),
        ({"background": (0, 256, 0)}, "--background 256: allowed are 0 to 255"),
        ({"background": (-1, 0, 0)}, "--background -1: allowed are 0 to 255"),
        ({"max_pixels": 0}, "--max-pixels 0: allowed are 1 to 1099511627776"),
    ],
)
def test_policy_is_checked(fields, message):
    with pytest.raises(ValueError) as caught:
        PixelPolicy(**fields)
    assert str(caught.value) == message


# Scaled decode.


def full_decode(data: bytes, wanted: PixelPolicy) -> np.ndarray:
    """What the policy gives when the source is decoded at its full size."""
    whole = decode_image(data, policy=policy(channels=wanted.channels))
    geometry = fit_image(whole.width, whole.height, policy=wanted, orientation=whole.orientation)
    assert whole.image.size == (whole.width, whole.height)
    return np.asarray(resize_image(whole.image, geometry, policy=wanted))


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"mode": "cover", "width": 224, "height": 224}, (750, 500)),
        ({"mode": "cover", "width": 100, "height": 100}, (375, 250)),
        ({"mode": "cover", "width": 500, "height": 500}, (1500, 1000)),
        ({"mode": "cover", "width": 501, "height": 501}, (3000, 2000)),
        ({"mode": "cover", "width": 700, "height": 500}, (3000, 2000)),
        ({"mode": "longest", "width": 224, "height": 224}, (750, 500)),
        ({"mode": "stretch", "width": 10, "height": 501}, (3000, 2000)),
        ({"mode": "stretch", "width": 10, "height": 250}, (750, 500)),
        ({"mode": "none"}, (3000, 2000)),
    ],
)
def test_scaled_decode_leaves_twice_what_is_needed(large_jpeg, fields, size):
    decoded = decode_image(large_jpeg, policy=policy(**fields))
    assert decoded.image.size == size
    assert (decoded.width, decoded.height) == (3000, 2000)


@pytest.fixture(scope="module")
def large_jpeg():
    return encoded(photo(3000, 2000, seed=9), "JPEG", quality=90)


@pytest.mark.parametrize("size", [64, 192, 224, 331, 500])
@pytest.mark.parametrize("channels", [1, 3])
def test_scaled_decode_agrees_with_the_full_one(large_jpeg, size, channels):
    wanted = policy(mode="cover", width=size, height=size, channels=channels)
    found = np.frombuffer(prepare_image(large_jpeg, policy=wanted).data, np.uint8)
    whole = full_decode(large_jpeg, wanted)
    assert mean_distance(found.reshape(whole.shape), whole) < 2


def test_scaled_decode_of_a_turned_source_agrees():
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    data = encoded(photo(2400, 1600, seed=10), "JPEG", exif=exif)
    wanted = policy(mode="cover", width=300, height=100)
    assert decode_image(data, policy=wanted).image.size == (800, 1200)
    found = np.frombuffer(prepare_image(data, policy=wanted).data, np.uint8)
    assert mean_distance(found.reshape(100, 300, 3), full_decode(data, wanted)) < 2


@pytest.mark.parametrize(("side", "decoded"), [(447, 447), (448, 224), (895, 447), (896, 224)])
def test_small_jpegs_are_decoded_in_full(side, decoded):
    data = encoded(photo(side, side), "JPEG")
    wanted = policy(mode="cover", width=112, height=112)
    image = decode_image(data, policy=wanted).image
    assert image.size in ((decoded, decoded), (decoded + 1, decoded + 1))
    if decoded == side:
        found = pixels(data, mode="cover", width=112, height=112)
        assert farthest(found, full_decode(data, wanted)) == 0


def test_lossless_jpegs_are_decoded_in_full():
    data = lossless_jpeg(400, 300)
    wanted = policy(mode="cover", width=20, height=20)
    assert decode_image(data, policy=wanted).image.size == (400, 300)
    assert np.unique(pixels(data, mode="cover", width=20, height=20)).tolist() == [128]


def test_photographs_agree_within_two_levels():
    photographs = sorted((SHARED / "data" / "photos").glob("*"))
    if not photographs:
        pytest.skip("no photographs at ../shared/data/photos")
    wanted = policy(mode="cover", width=224, height=224)
    scaled = 0
    for path in photographs:
        data = path.read_bytes()
        found = np.frombuffer(prepare_image(data, policy=wanted).data, np.uint8)
        assert mean_distance(found.reshape(224, 224, 3), full_decode(data, wanted)) < 2, path
        decoded = decode_image(data, policy=wanted)
        scaled += decoded.image.size != (decoded.width, decoded.height)
    assert scaled == len(photographs)


def test_agreement_benchmark_prints_one_table(tmp_path):
    (tmp_path / "large.jpg").write_bytes(encoded(photo(3200, 2100, seed=11), "JPEG"))
    (tmp_path / "small.JPEG").write_bytes(encoded(photo(90, 60), "JPEG"))
    (tmp_path / "text.jpg").write_bytes(b"no picture")
    script = ROOT / "benchmarks" / "pixel_agreement.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["size", "JPEGs", "scaled", "mean", "worst", "mean", "p99", "max"]
    assert [row[:3] for row in rows[1:]] == [[s, "2", "1"] for s in "192 224 331 512".split()]
    for row in rows[1:]:
        assert 0 < float(row[3]) <= float(row[4]) < 2
    assert done.stderr == ""
    empty = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "none")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (empty.returncode, empty.stdout) == (1, "")
    assert empty.stderr == (
        f"pixel_agreement.py: error: {tmp_path / 'none'}: holds no JPEG; name a folder of them\n"
    )


# The plain kind of JPEG, which simplejpeg decodes: to Pillow's very pixels.


def by_pillow(monkeypatch, data, wanted):
    with monkeypatch.context() as patch:
        patch.setattr(transforms.image, "_decode_plain_jpeg", lambda data, policy: None)
        return decode_image(data, policy=wanted)


def same(found, other):
    facts = [(d.width, d.height, d.orientation, d.plain, d.image.mode) for d in (found, other)]
    return facts[0] == facts[1] and found.image.tobytes() == other.image.tobytes()


def turned(orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return {"exif": exif}


PLAIN_JPEGS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "quality 20": {"quality": 20},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_blocks": 3},
    "optimized": {"optimize": True},
    "ICC profile": {"icc_profile": b"profile"},
    "comment": {"comment": b"MPF\0"},
    **{f"orientation {value}": turned(value) for value in range(1, 9)},
}


@pytest.mark.parametrize("kind", PLAIN_JPEGS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_plain_jpegs_have_pillows_pixels(monkeypatch, kind, mode):
    buffer = io.BytesIO()
    photo(203, 151, seed=3).convert(mode).save(buffer, "JPEG", **PLAIN_JPEGS[kind])
    data = buffer.getvalue()
    for side in (200, 100, 40, 20, 10):  # in full, at a half, a quarter and an eighth
        for channels in (3, 1):
            wanted = policy(mode="cover", width=side, height=side, channels=channels)
            found = transforms.image._decode_plain_jpeg(data, wanted)
            assert found is not None
            assert same(found, by_pillow(monkeypatch, data, wanted))
            assert same(found, decode_image(data, policy=wanted))


@pytest.mark.parametrize("side", range(1, 20))
def test_tiny_jpegs_have_pillows_pixels(monkeypatch, side):
    data = encoded(photo(side, 21 - side), "JPEG")
    for size in (1, 2, 5):
        wanted = policy(mode="stretch", width=size, height=size)
        found = decode_image(data, policy=wanted)
        assert same(found, by_pillow(monkeypatch, data, wanted))


def test_photographs_have_pillows_pixels(monkeypatch):
    paths = sorted((SHARED / "data").glob("flowers/*/*.jpg"))[::9]
    paths += sorted((SHARED / "data" / "photos").glob("*"))[::4]
    if not paths:
        pytest.skip("no photographs at ../shared/data")
    for number, path in enumerate(paths):
        data = path.read_bytes()
        side = (192, 48)[number % 2]
        wanted = policy(mode="cover", width=side, height=side)
        found = transforms.image._decode_plain_jpeg(data, wanted)
        assert found is not None, path
        assert same(found, by_pillow(monkeypatch, data, wanted)), path


def other_jpegs():
    whole = encoded(photo(60, 40), "JPEG")
    image = photo(60, 40)
    turned = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    buffer = io.BytesIO()
    image.convert("CMYK").save(buffer, "JPEG")
    two = io.BytesIO()
    image.save(two, "MPO", save_all=True, append_images=[turned])
    stored = io.BytesIO()
    image.save(stored, "JPEG", keep_rgb=True)
    yield "CMYK", buffer.getvalue()
    yield "MPO", two.getvalue()
    yield "RGB as it is", stored.getvalue()
    yield "lossless", lossless_jpeg(60, 40)
    yield "without its end", whole[:-2]
    yield "cut", whole[: len(whole) // 2]
    yield "bytes after a marker", whole.replace(b"\xff\xda", b"\xff\xd9\xff\xda")
    yield "header only", whole[:30]


@pytest.mark.parametrize(("kind", "data"), other_jpegs(), ids=lambda value: str(value)[:20])
def test_other_jpegs_are_pillows_to_judge(monkeypatch, kind, data):
    wanted = policy(mode="cover", width=20, height=20)
    assert transforms.image._decode_plain_jpeg(data, wanted) is None
    outcomes = []
    for decode in (
        lambda: decode_image(data, policy=wanted),
        lambda: by_pillow(monkeypatch, data, wanted),
    ):
        try:
            found = decode()
            outcomes.append((found.image.tobytes(), found.plain))
        except ImageError as error:
            outcomes.append((error.reason, error.detail))
    assert outcomes[0] == outcomes[1]


def test_too_many_pixels_are_refused_before_they_are_decoded():
    data = encoded(photo(60, 40), "JPEG")
    with pytest.raises(ImageError) as caught:
        decode_image(data, policy=policy(max_pixels=2399))
    assert caught.value.args == ("too_large", "2400 pixels, --max-pixels is 2399")
    assert decode_image(data, policy=policy(max_pixels=2400)).width == 60


def test_pillows_own_limit_is_left_as_it_was(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12_345)
    png, jpeg = (encoded(photo(60, 40), kind) for kind in ("PNG", "JPEG"))
    small = policy(max_pixels=2399)
    for data in (png, jpeg):
        assert decode_image(data, policy=policy()).width == 60
        with pytest.raises(ImageError, match="too_large"):
            decode_image(data, policy=small)
        assert Image.MAX_IMAGE_PIXELS == 12_345
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        widths = pool.map(lambda data: decode_image(data, policy=policy()).width, [png, jpeg] * 40)
        assert set(widths) == {60}
    assert Image.MAX_IMAGE_PIXELS == 12_345
    assert Image.open(io.BytesIO(png)).size == (60, 40)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_resampling_is_the_same_without_the_processors_extensions(monkeypatch, mode):
    image = Image.fromarray(noise(317, 211, seed=5)).convert(mode)
    wanted = policy(mode="cover", width=90, height=80, channels=len(image.getbands()))
    geometry = fit_image(317, 211, policy=wanted)
    found = resize_image(image, geometry, policy=wanted)

    made = []

    def plain_resizer():
        resizer = Resizer()
        resizer.cpu_extensions = CpuExtensions.none
        made.append(resizer)
        return resizer

    monkeypatch.setattr(transforms.image, "Resizer", plain_resizer)
    monkeypatch.setattr(transforms.image, "_thread", threading.local())
    assert resize_image(image, geometry, policy=wanted).tobytes() == found.tobytes()
    assert len(made) == 1


def test_a_resize_depends_on_no_other_before_it(monkeypatch):
    """A thread keeps its resizer, but not the memory that a large picture takes."""
    made = []
    monkeypatch.setattr(transforms.image, "Resizer", lambda: made.append(1) or Resizer())
    sides = random.Random(8)
    sizes = [(sides.randint(1, 400), sides.randint(1, 400)) for _ in range(30)] + [(1500, 900)]

    def resized(size):
        mode = "RGB" if size[0] % 3 else "L"
        image = Image.fromarray(noise(*size, seed=6)).convert(mode)
        wanted = policy(mode="cover", width=size[1] % 97 + 1, height=70, channels=len(mode))
        return resize_image(image, fit_image(*size, policy=wanted), policy=wanted).tobytes()

    fresh = []
    for size in sizes:
        monkeypatch.setattr(transforms.image, "_thread", threading.local())
        fresh.append(resized(size))
    made.clear()
    monkeypatch.setattr(transforms.image, "_thread", threading.local())
    assert [resized(size) for size in sizes] == fresh
    assert [resized(size) for size in reversed(sizes)] == fresh[::-1]
    assert len(made) == 3  # one that is kept, and one for each large picture
