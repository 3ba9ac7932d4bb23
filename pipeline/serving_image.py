"""Image file to picture inside a TensorFlow graph: the pixel policy as far as TensorFlow can.

What TensorFlow would get wrong without a word is refused: EXIF orientation, CMYK, transparency in
PNG, and formats other than JPEG, PNG, GIF and BMP.
"""

from __future__ import annotations

import tensorflow as tf

from pipeline.dataset import decode_image as decode_stored
from transforms.image import PixelPolicy

_REMEDY = "use tpufeed predict, which prepares any file as ingest does"
_ORIENTATION = 0x0112  # EXIF 2.3, tag 274
_STARTS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM")


def prepare_image(data: tf.Tensor, *, policy: PixelPolicy) -> tf.Tensor:
    """Decodes a file and resizes it by the policy.

    Args:
      data: string [], a whole file.
      policy: of ingest; its encoding and quality do not count here.

    Returns:
      uint8 [height, width, channels].

    Raises:
      tf.errors.InvalidArgumentError: no such file, or one that would come out otherwise than from
        transforms.image.
    """
    data = _check(data)
    starts_as_jpeg = tf.equal(tf.strings.substr(data, 0, 3), _STARTS[0])
    image = tf.cond(
        starts_as_jpeg,
        lambda: decode_stored(data, encoding="jpeg", channels=policy.channels),
        lambda: _decode_other(data, policy.channels),
    )
    return resize_image(image, policy=policy)


def _decode_other(data: tf.Tensor, channels: int) -> tf.Tensor:
    # decode_image turns no colours into gray for BMP and GIF, so all come as RGB.
    image = tf.io.decode_image(data, channels=3, expand_animations=False)
    image = tf.ensure_shape(image, [None, None, 3])
    if channels == 3:
        return image
    # ITU-R 601-2 luma, in the whole numbers of Pillow's convert("L").
    levels = tf.cast(image, tf.int32) * tf.constant([19595, 38470, 7471])
    gray = tf.bitwise.right_shift(tf.reduce_sum(levels, -1, True) + 0x8000, 16)
    return tf.cast(gray, tf.uint8)


def _check(data: tf.Tensor) -> tf.Tensor:
    """The file, once it is known to be one that TensorFlow gets right."""
    levels = tf.cast(tf.io.decode_raw(data, tf.uint8), tf.int32)
    known = tf.reduce_any([tf.equal(tf.strings.substr(data, 0, len(s)), s) for s in _STARTS])
    components, orientation = tf.cond(
        tf.equal(tf.strings.substr(data, 0, 3), _STARTS[0]),
        lambda: read_jpeg_header(levels),
        lambda: (tf.constant(3), tf.constant(1)),
    )
    clear = tf.cond(
        tf.equal(tf.strings.substr(data, 0, 4), _STARTS[1]),
        lambda: tf.logical_not(has_transparency(levels)),
        lambda: tf.constant(True),
    )
    checks = (
        (known, "an image is no JPEG, PNG, GIF or BMP"),
        (orientation == 1, "an image has an EXIF orientation, which TensorFlow does not undo"),
        (components != 4, "an image is a JPEG in CMYK, which TensorFlow turns into other colours"),
        (clear, "an image is a PNG with transparency, which TensorFlow leaves out"),
    )
    with tf.control_dependencies(
        [tf.debugging.Assert(good, [f"{problem}: {_REMEDY}"]) for good, problem in checks]
    ):
        return tf.identity(data)


def _number(levels: tf.Tensor, at: tf.Tensor, size: int, little: tf.Tensor) -> tf.Tensor:
    """A number of 2 or 4 bytes; 0 beyond the end of the file. `at` may be a vector."""
    where = tf.expand_dims(at, -1) + tf.range(size)
    inside = (where >= 0) & (where < tf.size(levels))
    digits = tf.gather(levels, tf.where(inside, where, 0)) * tf.cast(inside, tf.int32)
    digits = tf.where(little, digits, digits[..., ::-1])
    return tf.reduce_sum(digits * tf.constant([1 << 8 * i for i in range(size)]), -1)


def read_jpeg_header(levels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the number of components and the EXIF orientation (1 where there is none).

    Segments as in ITU-T T.81, annex B; the first APP1 segment with EXIF counts.

    Args:
      levels: int32 [bytes], a JPEG file.
    """
    big = tf.constant(False)

    def more(at: tf.Tensor, components: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return (
            (components == 0) & (at + 4 <= tf.size(levels)) & (_number(levels, at, 1, big) == 255)
        )

    def step(
        at: tf.Tensor, components: tf.Tensor, orientation: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        marker = _number(levels, at + 1, 1, big)
        # 255 again is padding; SOI, RST and TEM have no length.
        bare = (marker == 1) | ((marker >= 0xD0) & (marker <= 0xD8))
        length = tf.where(bare, 0, _number(levels, at + 2, 2, big))
        frame = (marker >= 0xC0) & (marker <= 0xCF)
        frame &= (marker != 0xC4) & (marker != 0xC8) & (marker != 0xCC)
        scan = (marker == 0xDA) | (marker == 0xD9)  # no frame before it: not ours to judge
        components = tf.where(frame, _number(levels, at + 9, 1, big), tf.where(scan, 3, 0))
        found = tf.where(marker == 0xE1, _read_orientation(levels, at + 4), 0)
        orientation = tf.where(orientation == 0, found, orientation)
        return at + tf.where(marker == 255, 1, 2 + length), components, orientation

    start = (tf.constant(2), tf.constant(0), tf.constant(0))
    _, components, orientation = tf.while_loop(more, step, start)
    # Other values than 1 to 8 mean nothing, so upright.
    turned = (orientation >= 2) & (orientation <= 8)
    return components, tf.where(turned, orientation, 1)


def _read_orientation(levels: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
    """The orientation in a segment whose contents begin at `at`; 0 where it has no EXIF."""
    head = tf.gather(levels, tf.minimum(at + tf.range(6), tf.size(levels) - 1))
    is_exif = tf.reduce_all(head == tf.constant(list(b"Exif\0\0")))
    base = at + 6
    little = _number(levels, base, 1, tf.constant(False)) == ord("I")
    directory = base + _number(levels, base + 4, 4, little)
    # A corrupt count must not make a huge tensor.
    count = tf.minimum(_number(levels, directory, 2, little), 512)
    entries = directory + 2 + 12 * tf.range(count)
    tags = _number(levels, entries, 2, little)
    values = _number(levels, entries + 8, 2, little)
    value = tf.reduce_max(tf.concat([tf.where(tags == _ORIENTATION, values, 0), [0]], 0))
    return tf.where(is_exif, tf.maximum(value, 1), 0)


def has_transparency(levels: tf.Tensor) -> tf.Tensor:
    """Whether a PNG has an alpha channel or a tRNS chunk (PNG 3rd edition, 11.2.1 and 11.3.1.1).

    Args:
      levels: int32 [bytes], a PNG file.
    """
    big = tf.constant(False)
    trns, idat = (int.from_bytes(name, "big") for name in (b"tRNS", b"IDAT"))

    def more(at: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
        name = _number(levels, at + 4, 4, big)
        return (at + 8 <= tf.size(levels)) & (name != idat) & tf.logical_not(found)

    def step(at: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        length = tf.maximum(_number(levels, at, 4, big), 0)
        ahead = tf.minimum(at, tf.size(levels)) + 12 + tf.minimum(length, tf.size(levels))
        return ahead, _number(levels, at + 4, 4, big) == trns

    color = _number(levels, tf.constant(25), 1, big)
    _, found = tf.while_loop(more, step, (tf.constant(8), tf.constant(False)))
    return found | (color == 4) | (color == 6)


def resize_image(image: tf.Tensor, *, policy: PixelPolicy) -> tf.Tensor:
    """Resizes by the policy's mode, with TensorFlow's antialiased bilinear filter.

    Windows begin and end at whole pixels here, at fractions in transforms.image.

    Args:
      image: uint8 [height, width, channels].
      policy: target size and mode.
    """
    height, width = tf.shape(image)[0], tf.shape(image)[1]
    if policy.mode == "none":
        return image
    target = (tf.constant(policy.height), tf.constant(policy.width))
    if policy.mode == "cover":
        image = _crop(image, height, width, policy)
    elif policy.mode != "stretch":
        target = _content_size(height, width, policy)
    resized = tf.image.resize(image, target, antialias=True)
    picture = tf.saturate_cast(tf.round(resized), tf.uint8)
    return _pad(picture, policy) if policy.mode == "pad" else picture


def _crop(image: tf.Tensor, height: tf.Tensor, width: tf.Tensor, policy: PixelPolicy) -> tf.Tensor:
    """The largest centred window with the target's shape."""
    wide = width * policy.height > height * policy.width
    inner_width = tf.where(wide, _scaled(height, policy.width, policy.height), width)
    inner_height = tf.where(wide, height, _scaled(width, policy.height, policy.width))
    inner_width, inner_height = tf.minimum(inner_width, width), tf.minimum(inner_height, height)
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    return image[top : top + inner_height, left : left + inner_width]


def _content_size(
    height: tf.Tensor, width: tf.Tensor, policy: PixelPolicy
) -> tuple[tf.Tensor, tf.Tensor]:
    """The size that keeps the source's shape, as transforms.image.fit_image computes it."""
    if policy.mode in ("contain", "pad"):
        by_width = policy.width * height <= policy.height * width
        numerator = tf.where(by_width, policy.width, policy.height)
        denominator = tf.where(by_width, width, height)
    elif policy.mode == "shortest":
        numerator = tf.constant(min(policy.width, policy.height))
        denominator = tf.minimum(width, height)
    else:
        numerator = tf.constant(max(policy.width, policy.height))
        denominator = tf.maximum(width, height)
    return _scaled(height, numerator, denominator), _scaled(width, numerator, denominator)


def _scaled(side: tf.Tensor, numerator: tf.Tensor, denominator: tf.Tensor) -> tf.Tensor:
    return tf.maximum(1, (2 * side * numerator + denominator) // (2 * denominator))


def _pad(image: tf.Tensor, policy: PixelPolicy) -> tf.Tensor:
    red, green, blue = policy.background
    # Pillow's gray of a colour.
    gray = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    fill = tf.constant([red, green, blue] if policy.channels == 3 else [gray], tf.uint8)
    top = (policy.height - tf.shape(image)[0]) // 2
    left = (policy.width - tf.shape(image)[1]) // 2
    places = (top, left, policy.height, policy.width)
    inside = tf.image.pad_to_bounding_box(tf.ones_like(image), *places)
    padded = tf.image.pad_to_bounding_box(image, *places)
    return tf.where(inside > 0, padded, fill)
