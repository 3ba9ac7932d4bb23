"""Bytes to bytes, and the geometry applied: sniff, decode, orient, resize, encode.

Pixels are touched here and nowhere else. docs/pixels.md has the policy. Pillow is the decoder; the
plain kind of JPEG goes through simplejpeg to the very same pixels, in less time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import re
import struct
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import simplejpeg
from cykooz_resizer import CropBox, FilterType, ResizeAlg, ResizeOptions, Resizer
from PIL import Image, ImageColor

from transforms.filters import SizeFilter
from transforms.headers import (
    check_headers,
    check_size,
    check_tile,
    lacks_rows,
    scan_jpeg,
    shares_tags,
)
from transforms.records import Geometry, ImageError, PreparedImage

RESIZE_MODES = ("cover", "contain", "pad", "stretch", "shortest", "longest", "none")
ENCODINGS = ("jpeg", "png", "raw", "original")
# Modes after which every picture has the size that was asked for.
FIXED_SIZE_MODES = ("cover", "pad", "stretch")
LARGEST_SIDE = 16_384
_JPEG_LARGEST_SIDE = 65_500  # JPEG_MAX_DIMENSION in libjpeg's jmorecfg.h

# Above, simplejpeg's copy of the pixels would cost more memory than its speed is worth.
_PLAIN_JPEG_PIXELS = 2**24

# Between its two passes a resize holds no more pixels than the larger sides of both pictures make.
_KEPT_PIXELS = 2**20

# A scaled (DCT) decode leaves at least this many times the pixels that the resize needs. Measured
# on 32 photographs of 2 to 12 megapixels: benchmarks/pixel_agreement.py.
_DCT_MARGIN = 2

_ORIENTATION = 0x0112  # EXIF 2.3, tag 274
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
)
_FOREIGN_SIGNATURES = (
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"8BPS", "PSD"),
    (b"\0\0\1\0", "ICO"),
    (b"\0\0\2\0\0\0\0\0", "TGA"),  # TGA has no signature: true colour, as it is and run length
    (b"\0\0\x0a\0\0\0\0\0", "TGA"),
    (b"\0\0\2\0", "CUR"),
    (b"icns", "ICNS"),
    (b"qoif", "QOI"),
    (b"DDS ", "DDS"),
    (b"v/1\1", "OpenEXR"),
    (b"SIMPLE  =", "FITS"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
)
_AVIF_BRANDS = (b"avif", b"avis")


@dataclasses.dataclass(frozen=True)
class PixelPolicy:
    """What becomes of a picture's pixels.

    Attributes:
      width: target width in pixels.
      height: target height in pixels.
      mode: one of RESIZE_MODES.
      channels: 3 for RGB, 1 for gray.
      encoding: one of ENCODINGS.
      quality: of JPEG, 1 to 100.
      background: RGB that shows through alpha and fills the bars of "pad".
      max_pixels: a larger source or result is rejected as too_large.
    """

    width: int = 224
    height: int = 224
    mode: str = "cover"
    channels: int = 3
    encoding: str = "jpeg"
    quality: int = 90
    background: tuple[int, int, int] = (255, 255, 255)
    max_pixels: int = 178_956_970

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
          ValueError: a field is out of range; names the flag, the value and what is allowed.
        """
        _check_choice("--resize-mode", self.mode, RESIZE_MODES)
        _check_choice("--encoding", self.encoding, ENCODINGS)
        _check_choice("--channels", self.channels, (3, 1))
        for side in (self.width, self.height):
            _check_range("--image-size", side, 1, LARGEST_SIDE)
        _check_range("--quality", self.quality, 1, 100)
        _check_range("--max-pixels", self.max_pixels, 1, 2**40)
        for level in self.background:
            _check_range("--background", level, 0, 255)

    @property
    def fixed_size(self) -> bool:
        """Whether every picture comes out as height x width."""
        return self.mode in FIXED_SIZE_MODES


def _check_choice(flag: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{flag} {value}: allowed are {', '.join(map(str, allowed))}")


def _check_range(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{flag} {value}: allowed are {low} to {high}")


def sniff_format(data: bytes) -> str:
    """Returns "JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF" or "AVIF", by content alone.

    Raises:
      ImageError: zero_byte, unsupported_format (a known format that is not accepted) or
        unidentified.
    """
    if not data:
        raise ImageError("zero_byte", "the file is empty")
    for signature, name in _SIGNATURES:
        if data.startswith(signature):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        # ISO 14496-12: major brand, minor version, then the compatible brands.
        length = min(int.from_bytes(data[:4], "big"), 256)
        brands = [data[8:12], *(data[i : i + 4] for i in range(16, length, 4))]
        if any(brand in _AVIF_BRANDS for brand in brands):
            return "AVIF"
        raise ImageError("unsupported_format", f"ISO media file, brand {brands[0]!r}")
    for signature, name in _FOREIGN_SIGNATURES:
        if data.startswith(signature):
            raise ImageError("unsupported_format", name)
    if data[:1] == b"P" and data[1:2] in b"1234567" and data[2:3].isspace():
        raise ImageError("unsupported_format", "PNM")
    raise ImageError("unidentified", f"no image format begins with {data[:8]!r}")


@dataclasses.dataclass(frozen=True)
class DecodedImage:
    """A source, upright and 8 bit.

    Attributes:
      image: RGB or L; smaller than width x height where a scaled decode was enough.
      width: of the upright source, in pixels.
      height: of the upright source, in pixels.
      orientation: the EXIF orientation that was undone.
      plain: the bytes are a JPEG that any reader decodes to these very pixels.
    """

    image: Image.Image
    width: int
    height: int
    orientation: int
    plain: bool


def decode_image(data: bytes, *, policy: PixelPolicy) -> DecodedImage:
    """Decodes a whole file, upright, 8 bit, RGB or gray by the policy.

    Large JPEGs may come out at a half, a quarter or an eighth of their size, but never with less
    than twice the pixels a side that the policy's resize needs.

    Raises:
      ImageError: the bytes are no whole image of an accepted kind.
    """
    format_ = sniff_format(data)
    check_headers(data, format_, max_pixels=policy.max_pixels)
    with _pillow_limit(policy):
        if format_ == "JPEG" and (decoded := _decode_plain_jpeg(data, policy)):
            return decoded
        try:
            source, size, turned = _load(data, format_, policy)
            orientation = _orientation_of(source)
            image = _to_eight_bit(source, policy)  # only now is a palette missed that is not there
        except ImageError:
            raise
        except Exception as error:
            # Decoders raise whatever their parsing trips over (struct.error, KeyError, SyntaxError,
            # ZeroDivisionError ...). This is the one place where any of it means "a bad file".
            raise _explain_error(error, format_, policy) from error
    plain = source.format == "JPEG" and orientation == 1 and source.mode == _mode(policy)
    plain = plain and scan_jpeg(data).common
    upright = _turn_upright(image, size, orientation=orientation, plain=plain)
    return dataclasses.replace(upright, orientation=turned) if turned else upright


def _decode_plain_jpeg(data: bytes, policy: PixelPolicy) -> DecodedImage | None:
    """Decodes a JPEG of the plain kind; None for any other, which is Pillow's to judge.

    That is YCbCr or gray, and nothing in it that libjpeg would warn of. The pixels are Pillow's:
    both hand the work to libjpeg-turbo, with the same settings.

    Raises:
      ImageError: its data end early. Pillow does not hear of that: libjpeg goes on in gray.
    """
    scan = scan_jpeg(data)
    if not scan.plain:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        orientation = _orientation_of(Image.open(io.BytesIO(data))) if scan.metadata else 1
    except Exception:
        return None
    if colours not in ("YCbCr", "Gray") or width * height > policy.max_pixels:
        return None
    shrink = _draft_scale((width, height), _dct_request((width, height), policy))
    if shrink > 1 and min(width, height) < 8:  # another of libjpeg's scales may give the same size
        return None
    large = width * height > _PLAIN_JPEG_PIXELS * shrink**2
    if large:  # at an eighth, and only to hear what libjpeg warns of
        shrink = 8
    least = {"min_height": -(-height // shrink), "min_width": -(-width // shrink)}
    mode = "GRAY" if colours == "Gray" else "RGBA"
    try:
        pixels = simplejpeg.decode_jpeg(data, mode, **(least if shrink > 1 else {}))
    except ValueError as error:
        if "premature end of data segment" in str(error):
            raise ImageError("truncated", "JPEG: its data end before the picture does") from error
        return None
    if large:
        return None
    image = _view_pixels(pixels)
    plain = orientation == 1 and image.mode == _mode(policy)
    if image.mode != _mode(policy):
        image = image.convert(_mode(policy))
    return _turn_upright(image, (width, height), orientation=orientation, plain=plain)


def _view_pixels(pixels: np.ndarray) -> Image.Image:
    """Returns a picture on the very memory of its pixels: gray, or RGB with 255 as a fourth.

    That is how Pillow keeps RGB; to copy it there from three bytes a pixel costs a tenth of the
    decoding, and its memory once more.
    """
    size = pixels.shape[1::-1]
    if pixels.shape[2] == 1:
        return Image.frombuffer("L", size, pixels, "raw", "L", 0, 1)
    image = Image.frombuffer("RGBA", size, pixels, "raw", "RGBA", 0, 1)
    image.im.setmode("RGB")  # as Pillow's own putalpha does
    image._mode = image.im.mode
    return image


def _turn_upright(
    image: Image.Image, size: tuple[int, int], *, orientation: int, plain: bool
) -> DecodedImage:
    if orientation != 1:
        image = image.transpose(_UPRIGHT[orientation])
        size = size[::-1] if orientation >= 5 else size
    return DecodedImage(image, *size, orientation=orientation, plain=plain)


def _draft_scale(size: tuple[int, int], request: tuple[int, int]) -> int:
    """Returns 8, 4, 2 or 1: by what a scaled decode divides, as Pillow's draft chooses it."""
    scale = min(size[0] // request[0], size[1] // request[1])
    return next((power for power in (8, 4, 2) if scale >= power), 1)


def _explain_error(error: Exception, format_: str, policy: PixelPolicy) -> ImageError:
    """Returns what a decoder's error says about the file."""
    if isinstance(error, Image.UnidentifiedImageError):
        reason = "unidentified"
    elif isinstance(error, Image.DecompressionBombError):
        pixels = re.search(r"\d+", str(error))
        count = pixels[0] if pixels else "too many"
        return ImageError("too_large", f"{count} pixels, --max-pixels is {policy.max_pixels}")
    elif isinstance(error, MemoryError) or "MAX_TEXT" in str(error):  # Pillow's, for PNG
        reason = "too_large"
    else:
        reason = "truncated" if "truncated" in str(error).lower() else "corrupt"
    return ImageError(reason, f"{format_}: {_one_line(error)}")


def _load(
    data: bytes, format_: str, policy: PixelPolicy
) -> tuple[Image.Image, tuple[int, int], int]:
    """Decodes the whole file.

    Returns:
      The decoded file, its size before any scaled decode, and, for TIFF, the orientation that
      Pillow undoes by itself while it loads (0 for none).
    """
    source = Image.open(io.BytesIO(data), formats=[format_])
    check_size(*source.size, max_pixels=policy.max_pixels)
    size = source.size
    turned = 0
    if format_ == "TIFF":
        check_tile(source, max_pixels=policy.max_pixels)
        turned = _orientation_of(source)
    if format_ == "JPEG" and scan_jpeg(data).common:
        # A lossless one has no DCT to scale by: libjpeg would overrun the rows that Pillow expects.
        source.draft(None, _dct_request(size, policy))
    # The whole file is decoded before its EXIF is asked for: for PNG, asking would decode as well
    # and hide an error.
    source.load()
    if format_ != "JPEG":
        size = source.size
        check_size(*size, max_pixels=policy.max_pixels)
    if format_ == "PNG":
        if lacks_rows(source, data):
            raise ImageError("truncated", "PNG: fewer rows than its header says")
        _scale_transparency(source, depth=data[24])  # IHDR comes first, its bit depth ninth
    return source, size, turned


def _scale_transparency(source: Image.Image, *, depth: int) -> None:
    """Brings the transparent level or colour of a PNG to the 8 bits of its pixels.

    Pillow leaves it as it stands in tRNS, in the file's own bits, so that no pixel would match.
    With one bit it knows better.
    """
    transparent = source.info.get("transparency")
    if source.mode == "L" and isinstance(transparent, int) and depth in (2, 4):
        source.info["transparency"] = transparent * 255 // (2**depth - 1)
    elif source.mode == "RGB" and isinstance(transparent, tuple) and depth == 16:
        source.info["transparency"] = tuple(level >> 8 for level in transparent)


_limit_lock = threading.Lock()
_limit_of_others: list[int | None] = []  # once for each decode under way


@contextlib.contextmanager
def _pillow_limit(policy: PixelPolicy) -> Iterator[None]:
    """Makes --max-pixels the one limit, while this decodes: Pillow has one for the process.

    It refuses above twice that, from the header or the first frame's, and warns above once.
    """
    _silence_pillow()
    with _limit_lock:
        before = _limit_of_others[0] if _limit_of_others else Image.MAX_IMAGE_PIXELS
        _limit_of_others.append(before)
        Image.MAX_IMAGE_PIXELS = policy.max_pixels / 2  # type: ignore[assignment]
    try:
        yield
    finally:
        with _limit_lock:
            _limit_of_others.pop()
            if not _limit_of_others:
                Image.MAX_IMAGE_PIXELS = before


@functools.cache
def _silence_pillow() -> None:
    # Its warnings name no file; here every picture is either welcome or a reject with a reason.
    for category in (Image.DecompressionBombWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category, module=r"PIL\.")


def _one_line(error: BaseException) -> str:
    # Without addresses: the same input must give the same rejects.jsonl.
    text = re.sub(r"<[^<>]* at 0x[0-9a-f]+>", "", " ".join(str(error).split())).strip()
    return f"{type(error).__name__}: {text}"[:300].removesuffix(": ")


def _mode(policy: PixelPolicy) -> str:
    return "RGB" if policy.channels == 3 else "L"


def _orientation_of(image: Image.Image) -> int:
    try:
        orientation = _exif_of(image).get(_ORIENTATION, 1)
    except Exception:
        # Malformed EXIF never costs the image: it means "upright".
        return 1
    # The tag may be stored as a fraction or a float.
    return int(orientation) if orientation in _UPRIGHT else 1


def read_exif(data: bytes, *, policy: PixelPolicy) -> Image.Exif:
    """Returns the EXIF of a file that was decoded before; empty where there is none to be read."""
    format_ = sniff_format(data)
    # Pillow would decode a whole PNG to look behind its pixels; these names stand in the clear.
    if format_ == "PNG" and b"eXIf" not in data and b"Raw profile type" not in data:
        return Image.Exif()
    with _pillow_limit(policy):
        try:
            image = Image.open(io.BytesIO(data), formats=[format_])
            if format_ == "PNG":
                image.load()  # what stands behind the pixels is known only then
            return _exif_of(image)
        except Exception:
            return Image.Exif()


def _exif_of(image: Image.Image) -> Image.Exif:
    exif = image.info.get("exif") or _raw_profile(image)
    if shares_tags(exif.removeprefix(b"Exif\0\0")):
        return Image.Exif()
    return image.getexif()


def _raw_profile(image: Image.Image) -> bytes:
    """Returns the EXIF that some tools put into a PNG's text: three lines, then hex."""
    text = image.info.get("Raw profile type exif", "")
    return bytes.fromhex("".join(text.split("\n")[3:]))


def _dct_request(size: tuple[int, int], policy: PixelPolicy) -> tuple[int, int]:
    """Returns the least size (width, height) that a scaled decode may leave.

    The orientation is not known yet, so both ways round are allowed for.
    """
    scales = []
    for width, height in (size, size[::-1]):
        geometry = fit_image(width, height, policy=policy)
        scales.append(max(geometry.scale))
    scale = min(1.0, _DCT_MARGIN * max(scales))
    return math.ceil(size[0] * scale), math.ceil(size[1] * scale)


def _to_eight_bit(image: Image.Image, policy: PixelPolicy) -> Image.Image:
    """Any of Pillow's modes to RGB or L, alpha composited over the background."""
    mask = None
    if image.mode.startswith("I;16"):
        levels = np.asarray(image)
        transparent = image.info.get("transparency")
        if isinstance(transparent, int):
            mask = Image.fromarray(np.where(levels == transparent, 0, 255).astype(np.uint8))
        # Scaled, not clipped: convert() would turn all above 255 white.
        image = Image.fromarray((levels >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ImageError(
            "bit_depth",
            f"{image.format} with signed, 32-bit or float samples: no defined range; save it with"
            " 8 or 16 bits",
        )
    elif image.mode in ("LAB", "HSV"):
        raise ImageError("unsupported_format", f"{image.format} in the colour space {image.mode}")
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        mask = image.getchannel("A")
    if mask is not None:
        canvas = Image.new("RGB", image.size, policy.background)
        canvas.paste(image.convert("RGB"), mask=mask)
        image = canvas
    upright = image if image.mode == _mode(policy) else image.convert(_mode(policy))
    upright.info = {}  # profiles, comments and transparency must not reach the encoder
    return upright


def fit_image(width: int, height: int, *, policy: PixelPolicy, orientation: int = 1) -> Geometry:
    """Returns how an upright source of width x height pixels maps onto the picture.

    cover: the largest centred window with the target's shape. contain: the largest picture of the
    source's shape inside the target. pad: contain, centred on the background. stretch: the shape
    is given up. shortest and longest: the source's shape, with its shorter side the target's
    shorter, its longer side the target's longer. none: as it is.

    Args:
      width: of the upright source, in pixels.
      height: of the upright source, in pixels.
      policy: target size and resize mode.
      orientation: recorded as it is.
    """
    content = _content_size(width, height, policy)
    size = (policy.width, policy.height) if policy.mode == "pad" else content
    box = (0.0, 0.0, float(width), float(height))
    if policy.mode == "cover":
        box = _centred_window(width, height, *size)
    left, upper = (size[0] - content[0]) // 2, (size[1] - content[1]) // 2
    return Geometry(
        orientation=orientation,
        source_width=width,
        source_height=height,
        width=size[0],
        height=size[1],
        box=box,
        content=(left, upper, left + content[0], upper + content[1]),
    )


def _content_size(width: int, height: int, policy: PixelPolicy) -> tuple[int, int]:
    target = (policy.width, policy.height)
    if policy.mode == "none":
        return width, height
    if policy.mode in ("contain", "pad"):
        by_width = policy.width * height <= policy.height * width
        ratio = (policy.width, width) if by_width else (policy.height, height)
    elif policy.mode == "shortest":
        ratio = (min(target), min(width, height))
    elif policy.mode == "longest":
        ratio = (max(target), max(width, height))
    else:
        return target
    return _scaled(width, *ratio), _scaled(height, *ratio)


def _centred_window(
    width: int, height: int, target_width: int, target_height: int
) -> tuple[float, float, float, float]:
    if width * target_height > height * target_width:
        window = height * target_width / target_height
        return (width - window) / 2, 0.0, (width + window) / 2, float(height)
    window = width * target_height / target_width
    return 0.0, (height - window) / 2, float(width), (height + window) / 2


def _scaled(side: int, numerator: int, denominator: int) -> int:
    """Returns side * numerator / denominator in whole numbers: rounded half up, at least 1."""
    return max(1, (2 * side * numerator + denominator) // (2 * denominator))


def resize_image(image: Image.Image, geometry: Geometry, *, policy: PixelPolicy) -> Image.Image:
    """Applies the geometry in one step: bilinear with antialias.

    A triangle filter as wide as the scale, as Pillow's BILINEAR has it and to 2 levels its values,
    with integer arithmetic that gives the same bytes on any processor.

    Args:
      image: upright picture; may be smaller than the geometry's source by a scaled decode.
      geometry: from `fit_image`.
      policy: its background fills what the content leaves free.
    """
    left, upper, right, lower = geometry.content
    size = (right - left, lower - upper)
    across = image.width / geometry.source_width
    down = image.height / geometry.source_height
    box = (
        geometry.box[0] * across,
        geometry.box[1] * down,
        min(geometry.box[2] * across, image.width),
        min(geometry.box[3] * down, image.height),
    )
    if size != image.size or box != (0, 0, *image.size):
        image = _resample(image, size, box)
    if size == (geometry.width, geometry.height):
        return image
    background = policy.background
    fill = background if image.mode == "RGB" else _gray(background)
    canvas = Image.new(image.mode, (geometry.width, geometry.height), fill)
    canvas.paste(image, (left, upper))
    return canvas


def _resample(
    image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float]
) -> Image.Image:
    left, upper, right, lower = box
    picture = Image.new(image.mode, size)
    options = ResizeOptions(
        resize_alg=ResizeAlg.convolution(FilterType.bilinear),
        crop_box=CropBox(left, upper, right - left, lower - upper),
    )
    small = max(image.width, size[0]) * max(image.height, size[1]) <= _KEPT_PIXELS
    (_own_resizer() if small else Resizer()).resize_pil(image, picture, options)
    return picture


_thread = threading.local()


def _own_resizer() -> Resizer:
    """Returns this thread's: its memory is made once, and kept."""
    if not hasattr(_thread, "resizer"):
        _thread.resizer = Resizer()
    return _thread.resizer


def _gray(background: tuple[int, int, int]) -> int:
    level = ImageColor.getcolor(f"rgb{background}", "L")
    assert isinstance(level, int)
    return level


def encode_image(image: Image.Image, *, policy: PixelPolicy) -> tuple[bytes, str]:
    """Returns the encoded bytes and their format: "JPEG", "PNG" or "RAW".

    JPEG is baseline, 4:4:4 (no chroma subsampling: small pictures show it). RAW is height x width
    x channels uint8 in row order.
    """
    if policy.encoding == "raw":
        return image.tobytes(), "RAW"
    buffer = io.BytesIO()
    if policy.encoding == "png":
        image.save(buffer, "PNG")
        return buffer.getvalue(), "PNG"
    if max(image.size) > _JPEG_LARGEST_SIDE:
        raise ImageError(
            "too_large",
            f"{image.width}x{image.height} pixels, a JPEG holds {_JPEG_LARGEST_SIDE} a side;"
            " --encoding png holds more",
        )
    image.save(buffer, "JPEG", quality=policy.quality, subsampling=0)
    return buffer.getvalue(), "JPEG"


def prepare_image(
    data: bytes,
    *,
    policy: PixelPolicy,
    raw_size: tuple[int, int] | None = None,
    filters: SizeFilter | None = None,
) -> PreparedImage:
    """Decodes, orients, resizes and encodes one image.

    Args:
      data: a file's bytes; or height x width uint8 gray levels, where `raw_size` is given.
      policy: the pixel policy.
      raw_size: (width, height) of bare gray levels, as in an IDX file.
      filters: which sources to leave out, once they are decoded: what is broken is never filtered.

    Raises:
      ImageError: the input cannot become a picture; its reason is one of records.FAULTS, or
        "filtered".
    """
    if raw_size is None:
        source = decode_image(data, policy=policy)
    else:
        gray = Image.frombytes("L", raw_size, data).convert(_mode(policy))
        source = DecodedImage(gray, *raw_size, orientation=1, plain=False)
    if filters and (problem := filters.find_problem(source.width, source.height)):
        raise ImageError("filtered", problem)
    geometry = fit_image(source.width, source.height, policy=policy, orientation=source.orientation)
    check_size(geometry.width, geometry.height, max_pixels=policy.max_pixels)
    picture = resize_image(source.image, geometry, policy=policy)
    if policy.encoding == "original" and source.plain and picture is source.image:
        encoded, format_ = data, "JPEG"
    else:
        encoded, format_ = encode_image(picture, policy=policy)
    sums, squares = _channel_sums(picture)
    return PreparedImage(
        data=encoded,
        format=format_,
        channels=policy.channels,
        geometry=geometry,
        pixels=picture.width * picture.height,
        channel_sum=sums,
        channel_sum_of_squares=squares,
    )


_POWERS = np.stack([np.arange(256, dtype=np.int64), np.arange(256, dtype=np.int64) ** 2], axis=1)


def _channel_sums(image: Image.Image) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Exact sums of the levels and of their squares, a channel, by way of the histogram."""
    levels = image.histogram()
    # A third of what np.array takes for a list.
    counts = np.frombuffer(struct.pack(f"{len(levels)}q", *levels), np.int64).reshape(-1, 256)
    sums, squares = (counts @ _POWERS).T.tolist()
    return tuple(sums), tuple(squares)


def estimate_bytes(source_bytes: int, *, policy: PixelPolicy) -> int:
    """Estimates the bytes of one record, for the number of shards; never read from a picture.

    A fixed size gives pixels x channels x a rate: 0.17 for JPEG at quality 90 (measured on
    photographs of flowers at 192x192: 0.15 to 0.2), 0.6 for PNG, 1 for raw. Otherwise the
    source's bytes stand for the record's, and 100,000 for a source of unknown size.
    """
    known = source_bytes if source_bytes >= 0 else 100_000
    if policy.encoding == "original":
        return known
    rate = {"jpeg": 0.17, "png": 0.6, "raw": 1.0}[policy.encoding]
    if policy.fixed_size:
        return round(policy.width * policy.height * policy.channels * rate) + 200
    return known
