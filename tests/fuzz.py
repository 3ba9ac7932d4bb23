"""Feeds what is damaged, forged or random to whatever reads what others made.

    python tests/fuzz.py --minutes 30 --seed 1 --target all --findings findings
    python tests/fuzz.py --target decode FILE...      runs inputs that were found before

Inputs are mutations of good ones. Each target runs in a process of its own, so that a crash, a hang
or a flood of memory is a finding like any exception that is not allowed. What gives an outcome that
was not seen before is mutated further; with `--engine atheris` (pip install atheris) coverage of
the Python code guides instead. Exit status: 0 nothing found, 1 something.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import mmap
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MOST_BYTES = 1 << 16  # of one input
MOST_GROWTH = 512 << 20  # bytes of memory that all inputs together may add
RUNAWAY = MOST_GROWTH + (1 << 30)  # above, the process is ended from outside
MOST_PIXELS = 1 << 20

_STATE = struct.Struct("<QQQdQ")  # executions, bytes at the start, at most, CPU, size of the input


# ------------------------------------------------------------------ targets


@dataclasses.dataclass(frozen=True)
class Target:
    """What is fuzzed.

    Attributes:
      seeds: makes the inputs to begin with.
      check: runs one input and tells its outcome; raises where something is wrong.
      words: what is inserted now and then.
    """

    seeds: Callable[[], list[bytes]]
    check: Callable[[bytes], str]
    words: tuple[bytes, ...] = ()


def pictures() -> list[bytes]:
    """Small pictures of every format and many kinds, and those of the shared corpus."""
    from PIL import Image, PngImagePlugin

    levels = random.Random(0).randbytes(24 * 16 * 4)
    rgba = Image.frombytes("RGBA", (24, 16), levels)
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "a" * 50, zip=True)
    text.add_itxt("Title", "b" * 50, "en", "c", zip=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds = [
        ("JPEG", "RGB L CMYK", {}),
        ("JPEG", "RGB L", {"progressive": True, "exif": exif}),
        ("PNG", "1 L LA P RGB RGBA I;16", {"pnginfo": text}),
        ("PNG", "L RGB", {"transparency": 0}),
        ("GIF", "P", {"save_all": True, "append_images": [rgba.convert("P").rotate(180)]}),
        ("BMP", "1 L P RGB RGBA", {}),
        ("WEBP", "RGB RGBA", {}),
        ("WEBP", "RGB", {"lossless": True, "exif": exif}),
        ("TIFF", "1 L P RGB RGBA CMYK I;16 LAB", {}),
        *(("TIFF", "RGB", {"compression": f"tiff_{c}"}) for c in ("lzw", "adobe_deflate", "jpeg")),
        ("TIFF", "L", {"compression": "packbits", "save_all": True, "append_images": [rgba]}),
        ("AVIF", "RGB RGBA", {}),
    ]
    found = []
    for format_, modes, options in kinds:
        for mode in modes.split():
            image = rgba.convert("RGB").convert(mode) if mode in ("LAB", "CMYK") else None
            if mode == "I;16":
                image = Image.frombytes(mode, (24, 16), levels[: 24 * 16 * 2])
            buffer = io.BytesIO()
            if options.get("transparency") == 0 and mode == "RGB":
                options = {**options, "transparency": (0, 0, 0)}
            (image or rgba.convert(mode)).save(buffer, format_, **options)
            found.append(buffer.getvalue())
    found += sorted(
        path.read_bytes()
        for path in (ROOT.parent / "shared" / "corpus" / "files").rglob("*")
        if path.is_file() and path.stat().st_size < 8192
    )
    return [
        bytes([selector]) + data for selector, data in enumerate(found, 1) for selector in (0, 1)
    ]


def check_decode(data: bytes) -> str:
    """Any bytes give a picture, as its facts say, or a reject with one of the reasons for it."""
    from PIL import Image

    from transforms import image
    from transforms.records import FAULTS, ImageError

    selector, data = data[:1].rjust(1, b"\0")[0], data[1:]
    if selector & 1:
        data = with_right_checksums(data)
    policy = image.PixelPolicy(
        width=20,
        height=12,
        mode=image.RESIZE_MODES[(selector >> 1) % len(image.RESIZE_MODES)],
        channels=1 if selector & 64 else 3,
        encoding=("jpeg", "png", "raw", "original")[(selector >> 4) % 4],
        max_pixels=MOST_PIXELS,
    )
    try:
        picture = image.prepare_image(data, policy=policy)
    except ImageError as error:
        assert error.reason in FAULTS, error.reason
        assert error.reason not in ("missing", "unreadable", "timeout", "unknown_label")
        assert "\n" not in error.detail and len(error.detail) < 400, error.detail
        return f"{error.reason} {re.sub('[0-9]+', '0', error.detail)}"
    width, height = picture.geometry.width, picture.geometry.height
    assert picture.pixels == width * height <= MOST_PIXELS
    assert len(picture.channel_sum) == picture.channels == policy.channels
    assert all(0 <= total <= 255 * picture.pixels for total in picture.channel_sum)
    if picture.format == "RAW":
        assert len(picture.data) == picture.pixels * picture.channels
    else:
        with Image.open(io.BytesIO(picture.data), formats=[picture.format]) as stored:
            stored.load()
            assert stored.size == (width, height) and len(stored.getbands()) == picture.channels
    return f"{image.sniff_format(data)} {picture.format} {picture.geometry.orientation}"


def with_right_checksums(data: bytes) -> bytes:
    """The PNG with the checksum of each chunk as it must be, or else nothing else is looked at."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    out, at = bytearray(data), 8
    while at + 12 <= len(out):
        end = at + 8 + int.from_bytes(out[at : at + 4], "big")
        if end + 4 > len(out):
            break
        out[end : end + 4] = zlib.crc32(out[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(out)


def examples() -> list[bytes]:
    """Bytes to make features of, and serialized Examples."""
    from transforms.example import encode_example

    rng = random.Random(0)
    features = {
        "image": [b"\xff\xd8\xff"],
        "class": [3, -1],
        "one_hot_class": [0.0, 1.0],
        "": [b""],
    }
    flowers = {"image": [b"x"], "class": [1], "label": [b"a"], "size": [2, 3], "key": [b"k"]}
    found = [b"\1" + encode_example(f) for f in (features, flowers, {})]
    return found + [b"\0" + rng.randbytes(size) for size in (0, 10, 100, 1000)]


def check_example(data: bytes) -> str:
    """What is encoded, TensorFlow's parsers read back; what is none, is refused in one line."""
    from google.protobuf.message import DecodeError
    from tensorflow.train import Example

    from transforms import example

    if data[:1] == b"\0":
        return _check_encoded(_Source(data[1:]))
    try:
        theirs: Example | None = Example.FromString(data[1:])
    except DecodeError:
        theirs = None
    try:
        ours = example.parse_example(data[1:])
    except ValueError as error:
        assert theirs is None, "TensorFlow takes it"
        return f"refused {type(error.__cause__).__name__}"
    assert theirs is not None, "TensorFlow refuses it"
    assert {name: len(values) for name, (_, values) in ours.items()} == {
        name: len(getattr(feature, feature.WhichOneof("kind")).value)
        for name, feature in theirs.features.feature.items()
        if feature.WhichOneof("kind")
    }
    specs = example.feature_specs("flowers", classes=300)
    try:
        example.check_features(ours, specs=specs)
        example.read_record(ours, schema="flowers")
    except ValueError as error:
        return f"{type(error).__name__} {len(ours)}"
    return "read"


class _Source:
    """Values out of bytes; zeros where they end."""

    def __init__(self, data: bytes):
        self._file = io.BytesIO(data)

    def take(self, size: int) -> bytes:
        return self._file.read(size).ljust(size, b"\0")

    def number(self, most: int) -> int:
        return int.from_bytes(self.take(2), "little") % (most + 1)


def _check_encoded(source: _Source) -> str:
    import tensorflow as tf
    from tensorflow.python.eager import context

    from transforms import example

    features: dict[str, list] = {}
    for _ in range(source.number(6)):
        name = source.take(source.number(20)).decode("utf-8", "ignore")
        kind, count = source.number(2), source.number(9)
        if kind == 0:
            features[name] = [source.take(source.number(300)) for _ in range(count)]
        elif kind == 1:
            features[name] = list(struct.unpack(f"<{count}q", source.take(8 * count)))
        else:
            features[name] = list(struct.unpack(f"<{count}f", source.take(4 * count)))
    data = example.encode_example(features)
    theirs = {
        name: getattr(feature, feature.WhichOneof("kind"))
        for name, feature in tf.train.Example.FromString(data).features.feature.items()
    }
    kinds = {bytes: "BytesList", int: "Int64List", float: "FloatList"}
    assert set(theirs) == set(features)
    for name, values in features.items():
        kind = kinds[type(values[0]) if values else bytes]
        assert type(theirs[name]).__name__ == kind
        assert _bits(theirs[name].value) == _bits(values), name
    dtypes = {bytes: tf.string, int: tf.int64, float: tf.float32}
    wanted = {
        name: tf.io.FixedLenFeature([len(values)], dtypes[type(values[0])])
        for name, values in features.items()
        if values
    }
    if wanted:
        if source.number(99) == 0:  # TensorFlow keeps something for every set of shapes
            context.context().clear_kernel_cache()
        for name, tensor in tf.io.parse_single_example(data, wanted).items():
            assert _bits(tensor.numpy().tolist()) == _bits(features[name]), name
    return f"{len(features)} {sorted(theirs[name].__class__.__name__ for name in theirs)}"


def _bits(values: list) -> list:
    """Floats by their bits, since NaN equals nothing."""
    return [struct.pack("<f", v) if isinstance(v, float) and v == v else str(v) for v in values]


def manifests() -> list[bytes]:
    """A dataset.json, as text to be mutated and as a base for odd values."""
    from transforms import manifest

    shard = manifest.Shard("train-00000-of-00001.tfrecord", 2, 300, "0" * 64)
    whole = manifest.Manifest(
        tpufeed="1",
        libraries={"beam": "2"},
        config={"seed": 0},
        schema="flowers",
        encoding="jpeg",
        channels=3,
        image_size=(4, 6),
        labels=("a", "b"),
        label_offset=0,
        features={"class": {"dtype": "int64", "shape": [], "default": None}},
        splits={"train": manifest.Split(2, {"a": 1, "b": 1}, (shard,))},
        channel_mean=(0.5, 0.5, 0.5),
        channel_std=(0.1, 0.1, 0.1),
        rejects={"corrupt": 1},
        skipped=0,
    )
    data = manifest.dump_manifest(whole)
    return [b"\0" + data, *(bytes([n]) + data for n in range(1, 9))]


_ODD = (
    None,
    True,
    -1,
    0,
    2**63,
    1.5,
    float("nan"),
    "",
    "../x",
    "\ud800",
    "\x1b[2J",
    [],
    [0],
    {},
    [[]],
)


def check_manifest(data: bytes) -> str:
    """A dataset.json is refused in one line, or nothing that is asked of it fails."""
    from pipeline.summary import describe_manifest
    from transforms import manifest

    selector, data = data[:1].rjust(1, b"\0")[0], data[1:]
    if selector:
        with contextlib.suppress(ValueError, RecursionError):
            document = json.loads(data)
            for number in range(selector % 4):
                _replace_one(document, random.Random(data + bytes([selector, number])))
            data = json.dumps(document).encode()
    try:
        found = manifest.parse_manifest(data, path="dataset.json", check_fingerprint=False)
    except ValueError as error:
        text = str(error)
        assert text.startswith("dataset.json: ") and "\n" not in text and len(text) < 400, text
        return re.sub("[0-9]+", "0", text)[:60]
    assert manifest.parse_manifest(manifest.dump_manifest(found), path="again") == found
    for split in found.splits.values():
        assert not any(set(shard.name) & set("/\\\0") for shard in split.shards)
    with contextlib.suppress(KeyError):  # a class that a split does not count: verify says so
        describe_manifest(found, directory="records")
    return f"read {found.records} {len(found.specs)} {found.image_size}"


def _replace_one(document: object, rng: random.Random) -> None:
    while isinstance(document, dict | list) and document:
        place = rng.choice(list(document) if isinstance(document, dict) else range(len(document)))
        below = document[place]
        if not (isinstance(below, dict | list) and below) or rng.random() < 0.2:
            document[place] = rng.choice(_ODD)
            return
        document = below


def tables() -> list[bytes]:
    """CSV files, IDX files, lists of exclusions and of classes."""
    rows = b'path,label,split,key,size:int,weight:float,note\r\na.jpg,"x,y",train,k,1,0.5,"n"\r\n'
    images = struct.pack(">4I", 0x803, 2, 3, 2) + bytes(range(12))
    labels = struct.pack(">2I", 0x801, 2) + b"\1\2"
    found = [b"\0" + rows, b"\0path,label\na.jpg,b\n../c.png,d\n", b"\1" + images, b"\2" + labels]
    found += [b"\0" + rows.replace(b"a.jpg", name) for name in (b"/a.jpg", b"gs://b/a.jpg")]
    found += [b"\1" + gzip.compress(images, mtime=0), b"\2" + gzip.compress(labels, mtime=0)]
    return [*found, b"\3a.jpg\n" + b"0" * 64, b"\4a\nb\r\nc\n"]


_FOLDER = tempfile.TemporaryDirectory(prefix="tpufeed-fuzz-") if __name__ == "__main__" else None


def check_tables(data: bytes) -> str:
    """A table is refused in one line that begins with its name, or read; names fit a record."""
    from pipeline.ingest import read_class_names
    from transforms import idx, records, screen
    from transforms.tables import list_csv

    assert _FOLDER
    kind = data[:1].rjust(1, b"\0")[0] % 5
    name = ("rows.csv", "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "out", "names")[kind]
    path = os.path.join(_FOLDER.name, name)
    Path(path).write_bytes(data[1:])
    try:
        if kind == 0:
            source = records.Input(path)
            items = list(list_csv(source, grouping=records.Grouping(), reserved=("image",)))
            for item in items:
                if isinstance(item, records.ImageRef):
                    for text in (item.key, item.path, item.label):
                        assert text and not re.search("[\0-\x1f\x7f-\x9f]", text.encode().decode())
            return " ".join(sorted({type(item).__name__ for item in items}))
        if kind in (1, 2):
            idx._read_idx.cache_clear()
            shape, values = idx.read_idx(path)
            return f"{len(shape)} {min(len(values), 3)}"
        if kind == 3:
            found = screen.read_exclusions(path)
            return f"{min(3, len(found.keys))} {min(3, len(found.contents))}"
        return f"{min(3, len(read_class_names(path)))}"
    except records.DataError as error:
        text = str(error)
        assert path in text and len(text) < 1000, text
        return re.sub("[0-9]+", "0", text.replace(path, ""))[:60]


def shards() -> list[bytes]:
    """Files of records, plain and gzipped."""
    framed = b"".join(map(frame, (b"", b"one", bytes(300))))
    return [b"\0" + framed, b"\1" + framed, b"\0" + gzip.compress(framed, mtime=0)]


def frame(payload: bytes) -> bytes:
    """One record of a TFRecord file."""
    length = struct.pack("<Q", len(payload))
    return length + _masked(length) + payload + _masked(payload)


def _masked(data: bytes) -> bytes:
    import google_crc32c

    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def check_records(data: bytes) -> str:
    """A damaged shard is refused with the number of the record; all else is what was there."""
    from pipeline.verify import RecordError, read_records

    selector, out = data[:1], bytearray(data[1:])
    at = 0
    while selector == b"\1" and at + 12 <= len(out):  # lengths that are forged, but agree
        out[at + 8 : at + 12] = _masked(bytes(out[at : at + 8]))
        at += 16 + int.from_bytes(out[at : at + 8], "little")
    number, faults, back = 0, 0, b""
    try:
        for record in read_records(io.BytesIO(bytes(out))):
            number += 1
            faults += bool(record.fault)
            back += frame(record.payload)
    except RecordError as error:
        assert str(error).startswith(f"record {number}: "), error
        return re.sub("[0-9]+", "0", str(error))[:60]
    if not faults and out[:2] != b"\x1f\x8b":
        assert back == bytes(out)
    return f"{min(number, 4)} {min(faults, 4)}"


TARGETS = {
    "decode": Target(
        pictures,
        check_decode,
        (b"IHDR", b"PLTE", b"tRNS", b"zTXt", b"iTXt", b"acTL", b"fdAT", b"eXIf", b"\xff\xda")
        + (
            b"\xff\xc2",
            b"\xff\xe1",
            b"Exif\0\0",
            b"\xff\xdb",
            b"II*\0",
            b"MM\0*",
            b"VP8L",
            b"ispe",
        ),
    ),
    "example": Target(examples, check_example, (b"\x0a", b"\x12", b"\x1a", b"\xff" * 9 + b"\1")),
    "manifest": Target(
        manifests,
        check_manifest,
        (
            b"null",
            b"1e999",
            b"NaN",
            b"[]",
            b"{}",
            b"[" * 2000,
            b'"\\ud800"',
            b"-1",
            b"../",
            b"9" * 5000,
        ),
    ),
    "csv": Target(
        tables,
        check_tables,
        (
            b'"',
            b",",
            b"\r\n",
            b"\0",
            b"\xef\xbb\xbf",
            b"../",
            b"\x1b",
            b"\x1b[2J",
            b"\xc2\x85",
            b":int",
            b":float",
            b"nan",
        )
        + (b"\xff\xff\xff\xff", b"\x1f\x8b\x08", b"key", b"1_0", b"9" * 400),
    ),
    "records": Target(shards, check_records, (b"\xff" * 8, b"\0\0\0\0\1\0\0\0", b"\x1f\x8b")),
}


# ------------------------------------------------------------------ faults to be found


def plant(name: str) -> None:
    """Breaks the code under test, so that it can be seen that the fuzzer finds what is broken."""
    from pipeline import verify
    from transforms import example, image, manifest, tables

    def break_at(
        module: object, function: str, condition: Callable[..., bool], deed: Callable
    ) -> None:
        sound = getattr(module, function)

        def broken(*args, **kwargs):
            return (deed if condition(*args) else sound)(*args, **kwargs)

        setattr(module, function, broken)

    def wide(data: bytes, format_: str, *_: object) -> bool:
        return format_ == "PNG" and data[16:18] != b"\0\0"  # none of our seeds is

    def fail(*_: object) -> None:
        raise KeyError("planted")

    hog: list[bytearray] = []

    def flood(*_: object) -> None:
        hog.append(bytearray(b"x") * (MOST_GROWTH + (1 << 26)))
        raise image.ImageError("corrupt", "planted")

    deeds = {
        "exception": fail,
        "crash": lambda *_: os.kill(os.getpid(), signal.SIGSEGV),
        "memory": flood,
        "hang": lambda *_: sum(iter(int, 1)),
    }
    if name in deeds:  # past the place where all is caught
        break_at(image, "_explain_error", lambda e, f, p: "planted" in str(e), fail)
        break_at(image, "_load", wide, deeds[name])
    elif name == "example":
        break_at(example, "_varint", lambda value: value > 2**40, lambda _: b"\0")
    elif name == "manifest":
        break_at(manifest, "_is_count", lambda value: value is True, lambda _: [][0])
    elif name == "csv":
        break_at(tables, "check_names", lambda *_: True, lambda ref, *_: ref)
    elif name == "records":
        break_at(verify, "_read", lambda _, size, __: size > 2**40, fail)
    else:
        allowed = ", ".join([*deeds, "example", "manifest", "csv", "records"])
        raise ValueError(f"--plant {name}: allowed are {allowed}")


# ------------------------------------------------------------------ one process, one target


def mutate(rng: random.Random, corpus: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """One to eight changes of one input: bits, bytes, numbers, pieces moved, cut or put in."""
    out = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5, 8))):
        at = (
            rng.randrange(len(out) + 1)
            if rng.random() < 0.7
            else rng.randrange(min(len(out), 64) + 1)
        )
        kind = rng.randrange(8)
        size = min(len(out) - at, 1 << rng.randrange(8))
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.choice((0, 1, 2, 4, 16, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            width = rng.choice((2, 4, 8))
            value = rng.choice((0, 1, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, rng.getrandbits(32)))
            number = (value % 2 ** (8 * width)).to_bytes(width, rng.choice(("big", "little")))
            out[at : at + width] = number
        elif kind == 3:
            del out[at : at + size]
        elif kind == 4:
            out[at:at] = out[at : at + size] * rng.choice((1, 2, 50))
        elif kind == 5 and words:
            word = rng.choice(words)
            out[at : at + (len(word) if rng.random() < 0.5 else 0)] = word
        elif kind == 6:
            other = rng.choice(corpus)
            start = rng.randrange(len(other) + 1)
            out[at : at + size] = other[start : start + size]
        elif kind == 7 and rng.random() < 0.3:
            del out[at:]
    return bytes(out[:MOST_BYTES])


class Runner:
    """Runs inputs, keeps account in a file that outlives the process, and saves what is wrong."""

    def __init__(self, name: str, state: Path, findings: Path, longest: float):
        self._name, self._target, self._findings = name, TARGETS[name], findings
        self._longest = longest
        self._map = mmap.mmap(os.open(state, os.O_RDWR), 0)
        self._executions, self._start, self._peak, self._slowest, _ = _STATE.unpack_from(self._map)
        self._start = self._start or peak_memory()

    def run(self, data: bytes) -> str:
        """Returns the outcome, "" for a finding."""
        self._note(data)
        began = time.thread_time()
        try:
            outcome = self._target.check(data)
        except Exception as error:
            save(self._findings, self._name, data, describe(error))
            outcome = ""
        spent = time.thread_time() - began
        self._executions += 1
        self._slowest = max(self._slowest, spent)
        if spent > self._longest:
            save(
                self._findings,
                self._name,
                data,
                "slow: more of the processor than one input may have",
            )
        if (peak := peak_memory()) - self._start > MOST_GROWTH:
            save(self._findings, self._name, data, "memory: the limit is passed")
            self._peak = max(self._peak, peak)
            self._note(data)
            os._exit(3)  # it does not shrink
        self._peak = max(self._peak, peak)
        return outcome

    @property
    def executions(self) -> int:
        """Inputs that were run, by the processes before this one as well."""
        return self._executions

    def _note(self, data: bytes) -> None:
        _STATE.pack_into(
            self._map, 0, self._executions, self._start, self._peak, self._slowest, len(data)
        )
        self._map[_STATE.size : _STATE.size + len(data)] = data

    def finish(self) -> None:
        """Leaves the last numbers."""
        self._note(b"")


def peak_memory() -> int:
    """The most memory that this process had, in bytes."""
    # Not ru_maxrss, which begins with what the process had that started this one.
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe(error: BaseException) -> str:
    """What was raised and where: the same for the same fault."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(f.filename).name}:{f.name}:{f.lineno}" for f in frames[-3:]]
    return f"{type(error).__name__}: {ascii(str(error))[:200]} at {' < '.join(places[::-1])}"


def save(folder: Path, target: str, data: bytes, what: str) -> None:
    """Keeps one input of each kind of finding, with a line on it."""
    kind = hashlib.sha256(re.sub(r": .* at ", "", what).encode()).hexdigest()[:12]
    path = folder / f"{target}-{kind}"
    if not path.exists():
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(f"{target}: {what}\n")


def work(name: str, *, seed: str, seconds: float, most: int, engine: str, runner: Runner) -> None:
    """Fuzzes one target in this process until the time is up, or `most` inputs were run."""
    target = TARGETS[name]
    corpus = [data for data in target.seeds() if len(data) <= MOST_BYTES]
    if engine == "atheris":
        _work_with_atheris(corpus, seed=seed, seconds=seconds, runner=runner)
        return
    rng = random.Random(seed)
    seen: set[str] = set()
    deadline = time.monotonic() + seconds
    for data in corpus:
        seen.add(runner.run(data))
    while time.monotonic() < deadline and runner.executions < most:
        data = mutate(rng, corpus, target.words)
        outcome = runner.run(data)
        if outcome not in seen and len(seen) < 5000:
            seen.add(outcome)
            corpus.append(data)


def _work_with_atheris(corpus: list[bytes], *, seed: str, seconds: float, runner: Runner) -> None:
    import atheris

    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(corpus):
            Path(folder, str(number)).write_bytes(data)
        number = zlib.crc32(seed.encode()) or 1
        flags = [f"-seed={number}", f"-max_total_time={max(1, round(seconds))}", "-timeout=0"]
        flags += [f"-max_len={MOST_BYTES}", "-rss_limit_mb=0", "-verbosity=0", "-handle_segv=0"]

        def one(data: bytes) -> None:
            runner.run(data)

        atheris.Setup([sys.argv[0], *flags, folder], one)
        atheris.Fuzz()  # ends the process


def _child(args: argparse.Namespace) -> int:
    guided = contextlib.nullcontext()
    if args.engine == "atheris":
        import atheris

        guided = atheris.instrument_imports(include=["transforms", "PIL"])
    with guided:
        import PIL.Image

        PIL.Image.init()
        import transforms.image  # noqa: F401
        import transforms.manifest
        import transforms.tables  # noqa: F401
    if args.plant:
        plant(args.plant)
    TARGETS[args.target].check(b"")  # imports what it needs, before memory is measured
    runner = Runner(args.target, args.state, args.findings, args.longest)
    if args.files:
        for path in args.files:
            print(f"{path}: {runner.run(Path(path).read_bytes()) or 'FOUND'}")
    else:
        work(
            args.target,
            seed=args.seed,
            seconds=args.seconds,
            most=args.executions,
            engine=args.engine,
            runner=runner,
        )
    runner.finish()
    return 0


# ------------------------------------------------------------------ the parent


@dataclasses.dataclass
class Tally:
    """What came of one target: inputs run, memory at the start and at most, the slowest in s."""

    executions: int = 0
    start: int = 0
    peak: int = 0
    slowest: float = 0.0
    processes: int = 0


def hunt(name: str, *, seconds: float, args: argparse.Namespace) -> Tally:
    """Fuzzes one target, in as many processes, one after the other, as crash."""
    tally = Tally()
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder, "state")
        while (
            (left := deadline - time.monotonic()) > 0 and tally.executions < args.executions
        ) or not tally.processes:
            state.write_bytes(
                _STATE.pack(tally.executions, 0, tally.peak, tally.slowest, 0) + bytes(MOST_BYTES)
            )
            what = _run_child(name, state, left, args, number=tally.processes)
            tally.processes += 1
            values = _STATE.unpack_from(state.read_bytes())
            tally.executions, tally.start, tally.peak, tally.slowest, size = values
            if what:
                data = state.read_bytes()[_STATE.size : _STATE.size + size]
                save(args.findings, name, data, what)
                if tally.processes > 100:
                    break
            if args.files:
                break
    return tally


def _run_child(
    name: str, state: Path, left: float, args: argparse.Namespace, *, number: int
) -> str:
    """Returns what was wrong with the process itself, "" for nothing."""
    command = [sys.executable, __file__, "--child", "--target", name, "--state", str(state)]
    command += ["--seed", f"{args.seed}/{number}", "--seconds", f"{left:.1f}"]
    command += ["--findings", str(args.findings), "--engine", args.engine]
    command += ["--longest", str(args.longest), "--executions", str(args.executions), *args.files]
    command += ["--plant", args.plant] if args.plant else []
    log = state.with_name("log")
    with log.open("wb") as stderr:
        out = None if args.files else subprocess.DEVNULL
        child = subprocess.Popen(command, stdout=out, stderr=stderr)
        try:
            what = _watch(child, state, longest=args.longest)
        finally:
            child.kill()
            status = child.wait()
    if what:
        return what
    if status < 0:
        return f"crash: {signal.Signals(-status).name}"
    if status not in (0, 3):
        lines = log.read_text(errors="replace").strip().splitlines() or [""]
        raise RuntimeError(f"{name}: the process ended with {status}: {lines[-1]}")
    return ""


def _watch(child: subprocess.Popen, state: Path, *, longest: float) -> str:
    executions, since = -1, 0.0
    while child.poll() is None:
        time.sleep(0.1)
        done, start, *_ = _STATE.unpack_from(state.read_bytes())
        try:
            spent, memory = _usage(child.pid)
        except (OSError, IndexError, ValueError):  # it has just ended
            continue
        if done != executions or not start:  # it is starting up, with no input yet
            executions, since = done, spent
        elif spent - since > 2 * longest:
            return "hang"
        if start and memory - start > RUNAWAY:
            return "memory: a flood"
    return ""


def _usage(pid: int) -> tuple[float, int]:
    """Seconds of the processor, which stand still while a process is stopped, and bytes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=1.0, help="for all targets together (1)")
    parser.add_argument(
        "--executions", type=int, default=2**60, help="of each target; with the seed, the same run"
    )
    parser.add_argument("--seed", default="0", help="another seed, other inputs (0)")
    parser.add_argument("--target", default="all", choices=[*TARGETS, "all"])
    parser.add_argument("--engine", default="mutation", choices=["mutation", "atheris"])
    parser.add_argument("--findings", type=Path, default=Path("findings"), help="folder (findings)")
    parser.add_argument("--longest", type=float, default=10.0, help="CPU seconds an input (10)")
    parser.add_argument("--plant", default="", help="a fault, to see that it is found")
    parser.add_argument("files", nargs="*", help="inputs to run, instead of looking for some")
    for name, kind in (("--state", Path), ("--seconds", float)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.files and args.target == "all":
        parser.error("--target: give the one that FILE is for")
    return args


def lines_of(findings: Path) -> Iterator[str]:
    """What was found, a line each."""
    for path in sorted(findings.glob("*.txt")):
        yield f"{path.read_text().strip()}; saved as {path.with_suffix('')}"


def main(argv: list[str] | None = None) -> int:
    """Runs the targets one after the other and prints a line on each."""
    args = parse_args(argv)
    if args.child:
        return _child(args)
    args.findings.mkdir(parents=True, exist_ok=True)
    names = list(TARGETS) if args.target == "all" else [args.target]
    before = set(lines_of(args.findings))
    for name in names:
        tally = hunt(name, seconds=args.minutes * 60 / len(names), args=args)
        found = [line for line in lines_of(args.findings) if line.startswith(f"{name}: ")]
        print(
            f"{name}: {tally.executions} executions in {tally.processes} process(es), "
            f"{len(found)} findings, memory {tally.start >> 20} MB, at most {tally.peak >> 20} MB, "
            f"slowest {tally.slowest:.2f} s",
            flush=True,
        )
    after = list(lines_of(args.findings))
    for line in after:
        print(line)
    return 1 if set(after) - before or args.files and after else 0


if __name__ == "__main__":
    sys.exit(main())
