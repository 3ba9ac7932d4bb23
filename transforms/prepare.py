"""One source in, one record out: read, decode, resize, encode, and the facts for the index.

Imports no Beam: this is what the decoder processes run, see transforms/decoders.py.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import stat
from collections.abc import Mapping

from transforms import files
from transforms.example import encode_example, make_features
from transforms.exif import exif_features
from transforms.filters import SizeFilter
from transforms.globs import read_problem
from transforms.idx import read_idx
from transforms.image import PixelPolicy, prepare_image
from transforms.labels import ClassIds, Labelling
from transforms.records import DataError, Exclusions, ImageError, ImageRef, PreparedImage, Reject

# No picture may be lost to them.
_OUR_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

MOST_BYTES = 2**31  # of one source, which is held in memory

Source = tuple[bytes, tuple[int, int] | None]


@dataclasses.dataclass(frozen=True)
class RecordPolicy:
    """How an image becomes a record.

    Attributes:
      pixels: the pixel policy.
      schema: one of example.SCHEMAS.
      label_offset: added to the class id that is stored.
      filters: which sources are left out.
      exif: which features are taken from EXIF, of exif.EXIF_NAMES.
      labelling: how labels name classes.
    """

    pixels: PixelPolicy
    schema: str = "flowers"
    label_offset: int = 0
    filters: SizeFilter = SizeFilter()
    exif: tuple[str, ...] = ()
    labelling: Labelling = Labelling()


@dataclasses.dataclass(frozen=True)
class PreparedRecord:
    """One record, with what the index says about it.

    Attributes:
      ref: where it came from.
      example: the serialized tf.train.Example.
      image: the picture, without its bytes.
      class_id: from 0; several of them, or None, by the policy's labelling.
      source_sha256: of the source's bytes, in hex.
      source_bytes: length of the source.
    """

    ref: ImageRef
    example: bytes
    image: PreparedImage
    class_id: ClassIds
    source_sha256: str
    source_bytes: int


def read_source(ref: ImageRef) -> Source:
    """Returns a source's bytes and, for a picture in an IDX file, its (width, height).

    Raises:
      ImageError: missing, unreadable or too_large.
      DataError: no fault of the source: a limit of this process, a store that fails, an IDX file.
    """
    if ref.item >= 0:
        (_, rows, columns), values = read_idx(ref.path)
        size = rows * columns
        return values[ref.item * size : (ref.item + 1) * size], (columns, rows)
    try:
        size = ref.size
        if not files.is_remote(ref.path):
            status = os.stat(ref.path)
            # A CSV may name a pipe, which would be waited for, or a folder.
            if not stat.S_ISREG(status.st_mode):
                raise ImageError("unreadable", "no regular file")
            size = status.st_size
        if size > MOST_BYTES:
            raise ImageError("too_large", f"{size} bytes, read are up to {MOST_BYTES}")
        return files.read_file(ref.path, size=ref.size), None
    except OSError as error:
        if error.errno in _OUR_LIMITS:
            raise DataError(
                f"{ref.path}: {error.strerror}: a limit of this process, no fault of the file: "
                "raise it (ulimit), then run again with --resume"
            ) from error
        raise ImageError(*read_problem(error)) from error


def reject_image(ref: ImageRef, error: ImageError) -> Reject:
    """Returns the reject for a source that cannot become a record."""
    return Reject(ref.key, ref.source, ref.label, error.reason, error.detail)


def prepare_record(
    ref: ImageRef,
    source: Source | None = None,
    *,
    policy: RecordPolicy,
    labels: Mapping[str, int],
    exclusions: Exclusions,
) -> PreparedRecord | Reject:
    """Makes the record of one source.

    Args:
      ref: the source.
      source: what `read_source` returned; None to read it now.
      policy: what becomes of it.
      labels: class id by label.
      exclusions: contents that must not come in.

    Returns:
      The record, or why there is none.

    Raises:
      DataError: as read_source.
    """
    try:
        data, raw_size = source or read_source(ref)
        digest = hashlib.sha256(data).hexdigest()
        if digest in exclusions.contents:
            return exclusions.reject_key(ref.key)
        if ref.sha256 not in ("", digest):
            raise ImageError("unreadable", "its bytes changed since --duplicates looked at them")
        image = prepare_image(data, policy=policy.pixels, raw_size=raw_size, filters=policy.filters)
    except ImageError as error:
        return reject_image(ref, error)
    exif = exif_features(
        data if raw_size is None else None,
        policy.exif,
        policy=policy.pixels,
        orientation=image.geometry.orientation,
    )
    names, class_id = policy.labelling.look_up(ref.label, labels)
    features = make_features(
        image,
        key=ref.key,
        label=names,
        class_id=class_id,
        schema=policy.schema,
        classes=len(labels),
        label_offset=policy.label_offset,
        extra=(*ref.features, *exif),
    )
    bare = dataclasses.replace(image, data=b"")
    return PreparedRecord(ref, encode_example(features), bare, class_id, digest, len(data))
