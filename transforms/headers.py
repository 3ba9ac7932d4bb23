"""What a picture's headers say, and what of it is refused before a decoder sees it.

A file of some hundred bytes can ask a decoder for gigabytes, or for hours. docs/security.md lists
the limits.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import numpy as np
from PIL import Image

from transforms.records import ImageError

# Pillow keeps an address for each row, which is twice a pixel where rows have one. As in libpng.
LARGEST_SIDE = 1_000_000
# Each scan goes over the whole picture, in a few bytes if it likes. What libjpeg's cjpeg takes.
MOST_JPEG_SCANS = 100
# Pillow puts the segments together, and copies all for each.
MOST_JPEG_EXIF = 2**24  # bytes
# Pillow copies the value of each tag: some thousand that share theirs make gigabytes of little.
MOST_SHARED_TAGS = 2**24  # bytes, above those of the file


def check_size(width: int, height: int, *, max_pixels: int) -> None:
    """Raises ImageError too_large for more pixels than allowed, or too long a side."""
    if width * height > max_pixels:
        raise ImageError("too_large", f"{width}x{height} pixels, --max-pixels is {max_pixels}")
    if max(width, height) > LARGEST_SIDE:
        raise ImageError("too_large", f"{width}x{height} pixels, a side has at most {LARGEST_SIDE}")


def check_headers(data: bytes, format_: str, *, max_pixels: int) -> None:
    """Refuses what would cost the decoder far more than the file or its picture is worth.

    Args:
      data: the file.
      format_: from image.sniff_format.
      max_pixels: of a picture.

    Raises:
      ImageError: too_large or corrupt.
    """
    if format_ in ("AVIF", "WEBP"):
        size = _avif_size(data) if format_ == "AVIF" else _webp_size(data)
        check_size(*size, max_pixels=max_pixels)
    elif format_ == "JPEG":
        _check_jpeg(data)
    elif format_ == "TIFF" and shares_tags(data):
        raise ImageError("corrupt", "TIFF: its tags hold more bytes than the file, by sharing them")


def _avif_size(data: bytes) -> tuple[int, int]:
    """Returns width and height from the ispe box (ISO 23008-12), or 0x0 without one.

    The decoder will not say which header it refused for its size.
    """
    at = data.find(b"ispe", 0, 4096)
    if at < 0 or len(data) < at + 16:
        return 0, 0
    return int.from_bytes(data[at + 8 : at + 12], "big"), int.from_bytes(
        data[at + 12 : at + 16], "big"
    )


def _webp_size(data: bytes) -> tuple[int, int]:
    """Returns the canvas of an extended WebP (RFC 9649, 2.7), for which the decoder makes room.

    0x0 for a simple one, whose sides have 14 bits.
    """
    if data[12:16] != b"VP8X" or len(data) < 30:
        return 0, 0
    return (
        int.from_bytes(data[24:27], "little") + 1,
        int.from_bytes(data[27:30], "little") + 1,
    )


@dataclasses.dataclass(frozen=True)
class JpegScan:
    """What stands before a JPEG's first scan.

    Attributes:
      common: every decoder knows the coding: Huffman with DCT, sequential or progressive. Pillow
        also reads lossless and arithmetic JPEG; TensorFlow does not read the lossless ones.
      plain: common, whole up to the first scan, and one picture by itself (no MPF).
      progressive: or it cannot be told.
      metadata: there is EXIF or XMP, which may turn it.
      exif: what Pillow makes one EXIF of.
      others: the index of an MPO, as often as it is there.
    """

    common: bool = False
    plain: bool = False
    progressive: bool = True
    metadata: bool = False
    exif: tuple[bytes, ...] = ()
    others: tuple[bytes, ...] = ()


def scan_jpeg(data: bytes) -> JpegScan:
    """Reads the markers of ITU-T T.81, B.1.1.3, up to the first scan, over junk between them."""
    at, sound, common, progressive, metadata, ended = 2, True, False, True, False, False
    exif, others = [], []
    while 0 <= at < len(data) - 3:
        marker = data[at + 1]
        if data[at] != 0xFF:
            sound, at = False, data.find(b"\xff", at)
        elif marker == 0xFF:  # padding
            at += 1
        elif marker == 0 or 0xD0 <= marker <= 0xD9:  # no segment, and out of place
            sound, at = False, at + 2
        elif marker < 0xC0 or marker == 0xDA:  # nothing that is known, or the scan
            ended = marker == 0xDA
            break
        else:
            end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
            if marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # SOF, not DHT, JPG, DAC
                common, progressive = sound and marker <= 0xC2, marker & 3 == 2
            metadata |= marker == 0xE1
            if marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0":
                exif.append(data[at + 10 : end])
            elif marker == 0xE2 and data[at + 4 : at + 8] == b"MPF\0":
                others.append(data[at + 8 : end])
            at = end
    plain = ended and sound and common and not others
    metadata &= ended and sound
    return JpegScan(common, plain, progressive or not ended, metadata, tuple(exif), tuple(others))


def _check_jpeg(data: bytes) -> None:
    scan = scan_jpeg(data)
    if scan.progressive and _has_many_scans(data):
        raise ImageError("too_large", f"JPEG: more than {MOST_JPEG_SCANS} scans")
    if (size := sum(map(len, scan.exif))) > MOST_JPEG_EXIF:
        raise ImageError("too_large", f"JPEG: {size} bytes of EXIF, at most {MOST_JPEG_EXIF}")
    if any(map(shares_tags, [b"".join(scan.exif), *scan.others])):
        raise ImageError("corrupt", "JPEG: its tags hold more bytes than its EXIF, by sharing them")


def _has_many_scans(data: bytes) -> bool:
    """Whether there are more than MOST_JPEG_SCANS scans before the first end marker."""
    if data.count(b"\xff\xda") <= MOST_JPEG_SCANS:  # sure, since FF is stuffed in a scan
        return False
    at, scans = 2, 0
    while scans <= MOST_JPEG_SCANS and 0 <= (at := data.find(b"\xff", at)) < len(data) - 3:
        marker = data[at + 1]
        if marker == 0xD9:
            return False
        scans += marker == 0xDA
        if marker == 0xFF:  # padding
            at += 1
        elif marker < 0xC0 or 0xD0 <= marker <= 0xD8:  # a stuffed FF, a restart: no segment
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return scans > MOST_JPEG_SCANS


def check_tile(source: Image.Image, *, max_pixels: int) -> None:
    """Checks the tile of a TIFF as a picture: the decoder makes room for a whole one."""
    tags = getattr(source, "tag_v2", {})
    width, height = tags.get(322, 0), tags.get(323, 0)  # TileWidth, TileLength
    if isinstance(width, int) and isinstance(height, int):
        check_size(width, height, max_pixels=max_pixels)


# Bytes of a value of the types 1 to 18, of which 14 and 15 do not exist.
_TIFF_SIZES = np.array([0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 8, 8], np.uint64)


def shares_tags(data: bytes) -> bool:
    """Whether the tags of a TIFF's, or an EXIF's, first directory hold far more than it has."""
    order = "<" if data[:2] == b"II" else ">"
    large = data[2:4] in (b"+\0", b"\0+")  # BigTIFF
    number, offset = ("u8", "u8") if large else ("u2", "u4")  # TIFF 6.0, section 2
    places: list[Any] = [("tag", "u2"), ("type", "u2"), ("count", offset), ("at", offset)]
    entry, head = np.dtype(places).newbyteorder(order), np.dtype(number).newbyteorder(order)
    where = data[8:16] if large else data[4:8]
    at = int.from_bytes(where, "little" if order == "<" else "big")
    if at + head.itemsize > len(data):
        return False
    room = (len(data) - at - head.itemsize) // entry.itemsize
    count = min(int(np.frombuffer(data, head, 1, at)[0]), room)
    tags = np.frombuffer(data, entry, count, at + head.itemsize)
    sizes = _TIFF_SIZES[np.where(tags["type"] < len(_TIFF_SIZES), tags["type"], 0)]
    most = np.uint64(len(data) + 1)  # more lies outside, where nothing is read
    lengths = np.minimum(tags["count"].astype(np.uint64), most) * sizes
    inside = np.minimum(tags["at"].astype(np.uint64), most) + lengths <= len(data)
    elsewhere = lengths > (8 if large else 4)
    return int(lengths[inside & elsewhere].sum()) > len(data) + MOST_SHARED_TAGS


_ADAM7 = (  # PNG, 8.2: left, upper, step across, step down
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)


def lacks_rows(source: Image.Image, data: bytes) -> bool:
    """Whether the rows of a PNG end before the last; Pillow takes that for the picture's end.

    Args:
      source: the PNG, loaded. Rows that it lacks are zero: only then is the file unpacked once
        more, to count.
      data: the file.
    """
    interlaced = data[28] == 1  # IHDR comes first
    width, height = source.size
    if not interlaced and any(source.crop((0, height - 1, width, height)).tobytes()):
        return False
    pixel = data[24] * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[data[25]]  # bits: depth x channels
    needed = 0
    for left, upper, across, down in _ADAM7 if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - left) // across), -(-(height - upper) // down)
        needed += rows * (1 + (columns * pixel + 7) // 8) if columns > 0 else 0
    return _unpacked_bytes(data, most=needed) < needed


def _unpacked_bytes(data: bytes, *, most: int) -> int:
    """Counts the bytes that a PNG's IDAT chunks unpack to; `most` where they are no zlib stream."""
    unpacker, count, at = zlib.decompressobj(), 0, 8
    while at + 12 <= len(data) and count < most and not unpacker.eof:
        length = int.from_bytes(data[at : at + 4], "big")
        packed = data[at + 8 : at + 8 + length] if data[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
        while packed and count < most:
            try:
                count += len(unpacker.decompress(packed, 1 << 20))
            except zlib.error:
                return most  # the decoder has had its say
            packed = unpacker.unconsumed_tail
    return count
