"""Input made to do harm: bombs, programs posing as pictures, names that drive terminals."""

import csv
import hashlib
import io
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import tensorflow as tf
from helpers import draw, ingest
from PIL import Image

from pipeline import reference
from pipeline.__main__ import main
from pipeline.verify import verify_dataset
from transforms import headers, image
from transforms.example import Record
from transforms.manifest import fingerprint, load_manifest
from transforms.records import ImageError

ROOT = Path(__file__).resolve().parents[1]
POLICY = image.PixelPolicy(width=32, height=32)
MOST_MEMORY = 400 << 20  # bytes that all bombs together may take; each alone would take more


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width=16, height=16, rows=None, extra=b"", *, colour=0, interlace=0, packed=None) -> bytes:
    """An 8-bit PNG of `rows` of level 128, all by default."""
    if packed is None:
        row = b"\0" + b"\x80" * (width * {0: 1, 2: 3, 6: 4}[colour])
        packed = zlib.compress(row * (height if rows is None else rows))
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, interlace)
    body = chunk(b"IHDR", header) + extra + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def encoded(format_: str, size=(32, 24), mode="RGB", **options) -> bytes:
    levels = bytes((7 * i * i + i // 3) % 256 for i in range(size[0] * size[1] * 3))
    buffer = io.BytesIO()
    Image.frombytes("RGB", size, levels).convert(mode).save(buffer, format_, **options)
    return buffer.getvalue()


def tiff(tags, *, tail=b"", at=8) -> bytes:
    """A little-endian TIFF of one directory; a tag is (number, type, count, value)."""
    directory = b"".join(struct.pack("<HHII", *tag) for tag in sorted(tags))
    head = b"II*\0" + struct.pack("<IH", at, len(tags))
    return head + directory + struct.pack("<I", at) + tail  # the next page is this one


def page(width, height, *more) -> list[tuple[int, int, int, int]]:
    return [
        *((256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1)),
        *((262, 3, 1, 1), (273, 4, 1, 400), (277, 3, 1, 1), (278, 4, 1, height)),
        *((279, 4, 1, width * height), *more),
    ]


def shared_tags(number: int, size: int) -> list[tuple[int, int, int, int]]:
    """Tags that all have the same bytes."""
    return [(40_000 + n, 2, size, 8) for n in range(number)]


def with_segment(jpeg: bytes, marker: int, data: bytes, times=1) -> bytes:
    segment = b"\xff" + bytes([marker]) + struct.pack(">H", len(data) + 2) + data
    return jpeg[:2] + segment * times + jpeg[2:]


def with_scans(jpeg: bytes, number: int) -> bytes:
    last = jpeg[jpeg.rfind(b"\xff\xda") : -2]
    return jpeg[:-2] + last * number + b"\xff\xd9"


def webp_canvas(side: int) -> bytes:
    data = bytearray(encoded("WEBP", save_all=True, append_images=[Image.new("RGB", (32, 24))]))
    at = data.find(b"VP8X") + 12
    data[at : at + 6] = (side - 1).to_bytes(3, "little") * 2
    return bytes(data)


def packed_text(size: int) -> bytes:
    return b"a\0\0" + zlib.compress(bytes(size), 9)


MEGABYTE = 1 << 20
TOO_MANY = ", --max-pixels is 178956970"
SHARED = "its tags hold more bytes than "
BOMBS = {
    # by what the header says
    "png wide and high": (
        lambda: png(2**31 - 1, 2**31 - 1, packed=b""),
        ("too_large", "4611686014132420609 pixels" + TOO_MANY),
    ),
    "png one pixel wide": (
        lambda: png(1, 178_956_970, 16),
        ("too_large", "1x178956970 pixels, a side has at most 1000000"),
    ),
    "bmp one pixel wide": (
        lambda: encoded("BMP")[:18] + struct.pack("<ii", 1, 178_956_970) + encoded("BMP")[26:],
        ("too_large", "1x178956970 pixels, a side has at most 1000000"),
    ),
    "gif screen": (
        lambda: encoded("GIF")[:6] + b"\xff\xff\xff\xff" + encoded("GIF")[10:],
        ("too_large", "4294836225 pixels" + TOO_MANY),
    ),
    "webp animation's canvas": (
        lambda: webp_canvas(16_384),
        ("too_large", "16384x16384 pixels" + TOO_MANY),
    ),
    "tiff tile": (
        lambda: tiff(
            [tag for tag in page(16, 16, (322, 4, 1, 40_000), (323, 4, 1, 40_000))],
            tail=bytes(400),
        ),
        ("too_large", "40000x40000 pixels" + TOO_MANY),
    ),
    # by what it unpacks to
    "png text": (
        lambda: png(extra=chunk(b"zTXt", packed_text(64 * MEGABYTE))),
        ("too_large", "PNG: ValueError: Decompressed data too large for PngImagePlugin.MAX_TEXT"),
    ),
    "png texts": (
        lambda: png(extra=chunk(b"zTXt", packed_text(MEGABYTE - 100)) * 100),
        ("too_large", "PNG: ValueError: Too much memory used in text chunks: "),
    ),
    "png international text": (
        lambda: png(extra=chunk(b"iTXt", b"a\0\1\0\0" + packed_text(64 * MEGABYTE)[2:])),
        ("too_large", "PNG: ValueError: Decompressed data too large for PngImagePlugin.MAX_TEXT"),
    ),
    "png profile": (
        lambda: png(extra=chunk(b"iCCP", packed_text(64 * MEGABYTE))),
        ("too_large", "PNG: ValueError: Decompressed data too large for PngImagePlugin.MAX_TEXT"),
    ),
    "png unpacks to far more": (
        lambda: png(packed=zlib.compress(bytes(200 * MEGABYTE), 9)),
        (),  # the rest is not unpacked
    ),
    "png of a hundred thousand chunks": (lambda: png(extra=chunk(b"tEXt", b"k\0v") * 100_000), ()),
    # by what refers to the same bytes over and over, or to itself
    "tiff tags": (
        lambda: tiff([*page(16, 16), *shared_tags(1500, MEGABYTE)], tail=bytes(MEGABYTE + 40_000)),
        ("corrupt", f"TIFF: {SHARED}the file, by sharing them"),
    ),
    "tiff pages": (lambda: tiff(page(16, 16), tail=bytes(1000)), ()),
    "tiff exif is the page itself": (
        lambda: tiff(page(16, 16, (34_665, 4, 1, 8)), tail=bytes(1000)),
        (),
    ),
    "jpeg exif": (
        lambda: with_segment(
            encoded("JPEG"), 0xE1, b"Exif\0\0" + tiff(shared_tags(4500, 60_000)).ljust(65_000)
        ),
        ("corrupt", f"JPEG: {SHARED}its EXIF, by sharing them"),
    ),
    "jpeg pictures": (
        lambda: with_segment(
            encoded("JPEG"), 0xE2, b"MPF\0" + tiff(shared_tags(4500, 60_000)).ljust(65_000)
        ),
        ("corrupt", f"JPEG: {SHARED}its EXIF, by sharing them"),
    ),
    "png exif": (
        lambda: png(extra=chunk(b"eXIf", tiff(shared_tags(1500, MEGABYTE)).ljust(2 * MEGABYTE))),
        (),  # malformed EXIF means upright
    ),
    "png exif in a text": (
        lambda: png(
            extra=chunk(
                b"tEXt",
                b"Raw profile type exif\0\nexif\n9\n"
                + tiff(shared_tags(1500, MEGABYTE)).ljust(2 * MEGABYTE).hex().encode(),
            )
        ),
        (),
    ),
    "jpeg exif behind junk": (
        lambda: with_segment(
            encoded("JPEG"), 0xE1, b"Exif\0\0" + tiff(shared_tags(4500, 60_000)).ljust(65_000)
        ).replace(b"\xff\xe1", b"\xff\xfe\0\2\0\xff\0\xff\xd0junk\xff\xff\xe1", 1),
        ("corrupt", f"JPEG: {SHARED}its EXIF, by sharing them"),
    ),
    "jpeg exif in pieces": (
        lambda: with_segment(encoded("JPEG"), 0xE1, b"Exif\0\0" + bytes(60_000), 300),
        ("too_large", "JPEG: 18000000 bytes of EXIF, at most 16777216"),
    ),
    # by what is done over and over
    "jpeg scans": (
        lambda: with_scans(encoded("JPEG", progressive=True), 2000),
        ("too_large", "JPEG: more than 100 scans"),
    ),
    "jpeg scans behind junk": (
        lambda: with_scans(encoded("JPEG", progressive=True), 2000).replace(
            b"\xff\xc2", b"\0\xff\0\xff\xc2", 1
        ),
        ("too_large", "JPEG: more than 100 scans"),
    ),
    "jpeg scans behind odd segments": (
        lambda: with_segment(
            with_scans(encoded("JPEG", progressive=True), 2000), 0xFE, b"\xff\xd9" * 9
        ),
        ("too_large", "JPEG: more than 100 scans"),
    ),
    "jpeg comments": (lambda: with_segment(encoded("JPEG"), 0xFE, b"", 100_000), ()),
    "webp frames": (
        lambda: encoded("WEBP", save_all=True, append_images=[Image.new("RGB", (32, 24))] * 300),
        (),
    ),
}


def outcome(data: bytes) -> tuple[str, ...]:
    """Reason and detail of the reject, () for a picture."""
    try:
        image.prepare_image(data, policy=POLICY)
    except ImageError as error:
        return error.reason, error.detail
    return ()


def set_off_bombs() -> None:
    """Prints what became of each, and the memory that it took beside the file itself."""
    outcome(png())
    found = {}
    for name, (make, _) in BOMBS.items():
        data = make()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found[name] = outcome(data)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        found[name] = found[name], grown
    print(json.dumps(found))


@pytest.fixture(scope="module")
def bombs() -> dict:
    """What became of each bomb, in a process of its own."""
    command = [sys.executable, "-c", "import test_hostile; test_hostile.set_off_bombs()"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    run = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, timeout=600, text=True
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_a_reject_or_a_small_picture(bombs, name):
    _, wanted = BOMBS[name]
    found, _ = bombs[name]
    assert len(found) == len(wanted)
    if wanted:
        assert found[0] == wanted[0]
        assert found[1].startswith(wanted[1])


def test_bombs_take_little_memory(bombs):
    grown = {name: memory >> 20 for name, (_, memory) in bombs.items()}
    assert sum(grown.values()) < MOST_MEMORY >> 20, grown


def test_what_is_nearly_a_bomb_is_a_picture():
    # As many scans as are allowed: those there are, and more of the last one.
    progressive = encoded("JPEG", progressive=True)
    more = headers.MOST_JPEG_SCANS - progressive.count(b"\xff\xda")
    assert outcome(with_scans(progressive, more)) == ()
    assert outcome(with_scans(progressive, more + 1)) == ("too_large", "JPEG: more than 100 scans")
    # Markers in metadata, in a second picture, or after the end are none of the picture's.
    markers = b"\xff\xda" * 200
    assert outcome(with_segment(encoded("JPEG"), 0xFE, markers)) == ()
    assert outcome(encoded("JPEG") + markers) == ()
    assert outcome(png(1, 1_000_000)) == ()
    assert outcome(png(extra=chunk(b"zTXt", packed_text(MEGABYTE - 1)))) == ()
    wasteful = tiff([*page(16, 16), *shared_tags(20, 100_000)], tail=bytes(200_000))
    assert outcome(wasteful) == ()


# What is cut, and closed again so that it looks whole.


@pytest.mark.parametrize("colour", [0, 2, 6])
@pytest.mark.parametrize("interlace", [0, 1])
def test_a_png_with_fewer_rows_than_it_says(colour, interlace):
    assert outcome(png(9, 16, colour=colour)) == ()
    # Adam7's seven passes, as one stream of zeros: the size is what counts here.
    channels = {0: 1, 2: 3, 6: 4}[colour]
    rows = [(2, 2), (1, 2), (3, 2), (2, 4), (5, 4), (4, 8), (9, 8)] if interlace else [(9, 16)]
    whole = sum(high * (1 + wide * channels) for wide, high in rows)
    black = png(9, 16, colour=colour, interlace=interlace, packed=zlib.compress(bytes(whole)))
    assert outcome(black) == ()
    for size in (whole - 1, whole - 9 * channels - 1, whole // 2):
        short = zlib.compress(bytes(size))
        found = outcome(png(9, 16, colour=colour, interlace=interlace, packed=short))
        assert found[:1] == ("truncated",), size
    if not interlace:
        found = outcome(png(9, 16, 15, colour=colour))
        assert found == ("truncated", "PNG: fewer rows than its header says")


def test_a_png_in_many_pieces_has_all_its_rows():
    packed = zlib.compress(bytes(17 * 16))
    pieces = b"".join(chunk(b"IDAT", packed[i : i + 1]) for i in range(len(packed)))
    data = png(packed=packed).replace(chunk(b"IDAT", packed), pieces)
    assert outcome(data) == ()
    assert outcome(data.replace(pieces[:39], b"")) != ()


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_that_was_cut_and_closed_again(options, mode):
    data = encoded("JPEG", (64, 48), mode, **options)
    assert outcome(data) == ()
    cut = data[: data.rfind(b"\xff\xda") + 40] + b"\xff\xd9"
    assert outcome(cut) == ("truncated", "JPEG: its data end before the picture does")


def test_a_large_jpeg_that_was_cut_and_closed_again():
    buffer = io.BytesIO()
    Image.effect_noise((4200, 4200), 90).save(buffer, "JPEG", quality=20)
    data = buffer.getvalue()
    policy = image.PixelPolicy(mode="none", encoding="raw")
    assert image.decode_image(data, policy=policy).width == 4200
    with pytest.raises(ImageError, match="its data end before the picture does"):
        image.decode_image(data[: len(data) // 2] + b"\xff\xd9", policy=policy)


# Nothing is executed, nothing is fetched.


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """Programs that decoders are known to call leave a mark; returns the file that they leave."""
    mark, folder = tmp_path / "executed", tmp_path / "bin"
    folder.mkdir()
    for name in ("gs", "gswin64c", "convert", "magick", "rsvg-convert", "inkscape", "sh", "python"):
        (folder / name).write_text(f"#!/bin/bash\necho $0 >> '{mark}'\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return mark


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n%%EOF\n"


def test_the_trap_works(trap, tmp_path):
    """Pillow itself calls ghostscript for an EPS, if it is let."""
    with pytest.raises(OSError):
        Image.open(io.BytesIO(EPS)).load()
    assert "/gs" in trap.read_text()


def posing(url: str, mark: Path) -> dict[str, tuple[bytes, str]]:
    """Programs and documents by name, each with the reason for which it is no picture."""
    binary_eps = b"\xc5\xd0\xd3\xc6" + struct.pack("<7I", 32, len(EPS), 0, 0, 0, 0, 0xFFFF) + EPS
    svg = f'<svg xmlns="http://www.w3.org/2000/svg"><image href="{url}"/><script>1</script></svg>'
    return {
        "eps.jpg": (EPS, "unsupported_format"),
        "eps.eps": (b"%!PS\n" + EPS, "unsupported_format"),
        "binary.eps": (binary_eps, "unidentified"),
        "svg.png": (b"<?xml version='1.0'?>" + svg.encode(), "unidentified"),
        "svg.svg": (svg.encode(), "unidentified"),
        "html.jpg": (f"<!DOCTYPE html><img src='{url}'>".encode(), "unidentified"),
        "shell.jpg": (f"#!/bin/sh\ntouch '{mark}'\n".encode(), "unidentified"),
        "python.png": (f"open({str(mark)!r}, 'w')\n".encode(), "unidentified"),
        "pickle.jpg": (f"cos\nsystem\n(S'touch {mark}'\ntR.".encode(), "unidentified"),
        "numpy.bmp": (b"\x93NUMPY\1\0" + bytes(80), "unidentified"),
        "zip.webp": (b"PK\3\4" + bytes(60), "unidentified"),
        "wmf.jpg": (b"\xd7\xcd\xc6\x9a\0\0" + bytes(60), "unidentified"),
        "elf.gif": (b"\x7fELF" + bytes(60), "unidentified"),
        "mvg.jpg": (b"push graphic-context\nimage over 0,0 0,0 '|touch x'", "unidentified"),
        "pdf.jpg": (b"%PDF-1.7\n", "unsupported_format"),
        "xmp.jpg": (
            with_segment(encoded("JPEG"), 0xE1, b"http://ns.adobe.com/xap/1.0/\0" + svg.encode()),
            "",
        ),
    }


def test_nothing_is_executed_and_nothing_fetched(trap, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        files = posing(f"http://127.0.0.1:{server.getsockname()[1]}/x.png", trap)
        for name, (data, _) in files.items():
            (tmp_path / "in" / "a").mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / "a" / name).write_bytes(data)
            (tmp_path / "in" / "a" / name).chmod(0o755)
        assert ingest(f"{tmp_path}/in/*/*", tmp_path / "out", "--max-reject-rate", "1") == 0
        assert main(["verify", str(tmp_path / "out"), "--deep", "--sources", "9"]) == 0
        with pytest.raises(BlockingIOError):
            server.accept()
    lines = (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    found = {json.loads(line)["key"]: json.loads(line)["reason"] for line in lines}
    assert found == {f"a/{name}": reason for name, (_, reason) in files.items() if reason}
    assert not trap.exists()
    assert sorted(os.listdir(tmp_path)) == ["bin", "in", "out"]


def test_verify_calls_no_program_for_what_it_decodes(trap, dataset):
    """Neither for a record of a set that somebody made, nor for a source that was replaced."""
    contents = load_manifest(str(dataset))
    record = Record(EPS, 0, "key", "ash", None)
    with pytest.raises(ValueError, match="picture does not decode: cannot identify image file"):
        reference.decode_picture(record, contents)
    with pytest.raises(ValueError, match=r"/in/1.jpg does not decode: cannot identify image file"):
        reference.read_upright(EPS, "/in/1.jpg", contents)
    assert not trap.exists()


# Names.

ODD = "\x1b[2J\x1b]0;owned\x07"


def printed(capsys) -> str:
    out, err = capsys.readouterr()
    assert all(c.isprintable() or c == "\n" for c in out + err)
    return out + err


def test_names_drive_no_terminal_and_no_page(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for number in range(4):
        draw(tmp_path / "in" / f"{number}.jpg", seed=number)
    rows = [
        ("in/0.jpg", "<script>alert(1)</script>", "../../../etc/passwd"),
        ("in/1.jpg", "a/b", "gpj.\u202egnp"),
        ("in/2.jpg", "L" * 10_000, "k" * 10_000),
        ("in/3.jpg", "fine", "|touch x; $(touch x) `touch x` %s {0} \\n"),
        ("in/4.jpg", "fine", "is not there\u2028"),
        ("in/0.jpg", "two\nlines", "k5"),
        ("in/0.jpg", f"red{ODD}", "k6"),
        ("in/0.jpg", "fine", f"k7{ODD}"),
        (f"in/{ODD}.jpg", "fine", "k8"),
        ("../" * 40 + "etc/hostname", "fine", "k9"),
    ]
    with (tmp_path / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("path", "label", "key"), *rows])
    flags = ["--max-reject-rate", "1", "--image-size", "16"]
    assert ingest(tmp_path / "rows.csv", tmp_path / "out", *flags) == 0
    contents = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert sorted(contents["labels"]) == sorted({label for _, label, _ in rows[:5]})
    assert contents["rejects"] == {"bad_name": 4, "missing": 1, "unidentified": 1}
    assert main(["verify", str(tmp_path / "out"), "--deep", "--leakage"]) == 0
    assert main(["inspect", str(tmp_path / "out")]) == 0
    for number in range(4):
        assert main(["inspect", str(tmp_path / "out"), "--record", str(number)]) == 0
    assert main(["report", str(tmp_path / "out")]) == 0
    text = printed(capsys)
    assert "gpj.\\u202egnp" in text and "../../../etc/passwd" in text
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert all(c.isprintable() or c == "\n" for c in page)
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    assert sorted(os.listdir(tmp_path)) == ["in", "out", "rows.csv"]


def test_errors_and_findings_drive_no_terminal(tmp_path, capsys):
    draw(tmp_path / "in" / "a" / "1.jpg", seed=1)
    draw(tmp_path / "in" / "a" / f"{ODD}.jpg", seed=1)
    draw(tmp_path / "in" / f"b{ODD}\n" / "1.jpg", seed=1)
    (tmp_path / "in" / f"link{ODD}").symlink_to(tmp_path / "in" / "a")
    assert ingest(f"{tmp_path}/in/*/*.jpg", tmp_path / "out") == 1
    assert "3 of 3" not in printed(capsys)
    flags = ["--max-reject-rate", "1", "--overwrite"]
    assert ingest(f"{tmp_path}/in/*/*.jpg", tmp_path / "out", *flags) == 0
    (tmp_path / "out" / f"train-{ODD}").write_text("")
    os.unlink(tmp_path / "in" / "a" / "1.jpg")
    assert main(["verify", str(tmp_path / "out"), "--sources", "1"]) == 1
    for words in (
        ["verify", f"{tmp_path}/{ODD}"],
        ["inspect", f"{tmp_path}/{ODD}"],
        ["report", f"{tmp_path}/{ODD}"],
        ["inspect", str(tmp_path / "out"), "--split", ODD],
        ["ingest", "--input", f"{tmp_path}/{ODD}/*", "--output", f"{tmp_path}/new"],
        ["ingest", "--input", f"{tmp_path}/in/*/*", "--output", f"{tmp_path}/out", "--resume"],
    ):
        assert main(words) == 1
    assert "\\x1b[2J" in printed(capsys)


@pytest.mark.parametrize("flag", ["--output", "--input", "--root", "--class-names", "--exclude"])
def test_a_path_that_is_not_utf8_is_refused_before_any_work(tmp_path, capsys, flag):
    draw(tmp_path / "in" / "a" / "1.jpg", seed=1)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    odd.mkdir()
    (odd / "names").write_text("a\n")
    values = {"--input": f"{tmp_path}/in/*/*", "--output": f"{tmp_path}/out"}
    values[flag] = {"--input": f"{odd}/*/*", "--output": f"{odd}/out", "--root": str(odd)}.get(
        flag, f"{odd}/names"
    )
    assert main(["ingest", *(word for pair in values.items() for word in pair)]) == 2
    assert printed(capsys) == (
        f"tpufeed ingest: error: {flag} {values[flag]}: is not UTF-8, which dataset.json and "
        "TensorFlow need: rename what it names\n".replace("\udce9", "\\udce9")
    ).replace("\udce9", "\\udce9")
    assert not (tmp_path / "out").exists() and not (odd / "out").exists()


def test_names_that_look_like_flags(tmp_path, monkeypatch, capsys):
    names = ["-rf", "--help.jpg", "--output=x", "--", "@file", "-"]
    for number, name in enumerate(names):
        draw(tmp_path / "--debug" / name, seed=number, format="JPEG")
    monkeypatch.chdir(tmp_path)
    assert main(["ingest", "--input=--debug/*", "--output=--out", "--image-size", "16"]) == 0
    contents = json.loads((tmp_path / "--out" / "dataset.json").read_text())
    assert contents["labels"] == ["--debug"]
    assert contents["splits"]["train"]["records"] == len(names)
    assert main(["verify", "--deep", "--sources", "9", "--", "--out"]) == 0
    assert capsys.readouterr().out.endswith("--out: whole\n")
    assert sorted(os.listdir(tmp_path)) == ["--debug", "--out"]


@pytest.mark.parametrize("cell", ["http://127.0.0.1:9/x.jpg", "file:///etc/hostname", "zip://a"])
def test_a_store_that_nobody_knows_is_named_with_its_line(tmp_path, capsys, cell):
    draw(tmp_path / "1.jpg", seed=1)
    (tmp_path / "rows.csv").write_text(f"path,label\n1.jpg,a\n{cell},a\n")
    assert ingest(tmp_path / "rows.csv", tmp_path / "out") == 1
    scheme = cell.partition("://")[0]
    assert printed(capsys) == (
        f"tpufeed ingest: error: {tmp_path}/rows.csv, line 3: the cell path is {cell!r}: no store "
        f"is called {scheme}://; give a local path or gs://\n"
    )


@pytest.mark.parametrize("name", ["index", "_tmp"])
@pytest.mark.parametrize("flag", ["--overwrite", "--resume"])
@pytest.mark.parametrize("kind", ["link", "broken link", "file"])
def test_nothing_is_written_through_a_link_to_a_folder(tmp_path, name, flag, kind, capsys):
    draw(tmp_path / "in" / "a" / "1.png", seed=1)
    precious, output = tmp_path / "precious", tmp_path / "out"
    output.mkdir()
    if kind == "link":
        precious.mkdir()
        (precious / "train-00000-of-00001.idx").write_text("keep")
    if kind == "file":
        (output / name).write_text("keep")
    else:
        (output / name).symlink_to(precious)
    assert ingest(f"{tmp_path}/in/*/*", output, flag) == 1
    assert capsys.readouterr().err == (
        f"tpufeed ingest: error: --output {output}: {name} is a file or a link there, not a "
        "folder: move it away\n"
    )
    assert [path.name for path in output.rglob("*")] == [name]
    if kind == "link":
        assert [path.read_text() for path in precious.iterdir()] == ["keep"]


def test_links_in_the_output_are_not_followed_when_it_is_replaced(tmp_path):
    """What a link leads to stays; the link, where it has one of our names, is replaced."""
    draw(tmp_path / "in" / "a" / "1.jpg", seed=1)
    precious, output = tmp_path / "precious", tmp_path / "out"
    precious.mkdir()
    for name in ("file", "train-00000-of-00001.tfrecord", "dataset.json"):
        (precious / name).write_text("precious")
    output.mkdir()
    for name in ("train-00000-of-00001.tfrecord", "dataset.json", "report.html"):
        (output / name).symlink_to(precious / "file")
    (output / "linked").symlink_to(precious)
    assert ingest(f"{tmp_path}/in/*/*", output, "--overwrite", "--image-size", "16") == 0
    assert {path.read_text() for path in precious.iterdir()} == {"precious"}
    assert not (output / "dataset.json").is_symlink()
    assert (output / "linked").is_symlink()
    assert main(["verify", str(output)]) == 0


# What is damaged, or was never a picture.


def test_line_ends_that_a_transfer_changed():
    for data in (png().replace(b"\n", b"\r\n"), png().replace(b"\r\n", b"\n")):
        assert outcome(data)[0] == "unidentified"


def test_a_record_of_bare_pixels_is_found(dataset, tmp_path):
    """Every checksum is right: whoever wrote it put the pixels there."""
    folder = shutil.copytree(dataset, tmp_path / "records")
    document = json.loads((folder / "dataset.json").read_text())
    entry = next(s for s in document["splits"]["train"]["shards"] if s["records"])
    shard = folder / entry["name"]
    records = list(tf.data.TFRecordDataset(str(shard)).as_numpy_iterator())
    example = tf.train.Example.FromString(records[0])
    values = example.features.feature["image"].bytes_list.value
    values[0] = bytes([7] * len(values[0]))
    records[0] = example.SerializeToString(deterministic=True)
    with tf.io.TFRecordWriter(str(shard)) as writer:
        for record in records:
            writer.write(record)
    entry["sha256"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    document["fingerprint"] = fingerprint(document)
    (folder / "dataset.json").write_text(json.dumps(document))
    (finding,) = verify_dataset(str(folder))
    assert finding.startswith(f"{shard.name}: record 0: picture begins with b'\\x07\\x07")
    assert finding.endswith(", is no jpeg")
