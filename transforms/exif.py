"""EXIF of the sources as features of the records: a fixed set, each of one type.

Tags and types: Exif 2.3 (CIPA DC-008). What is absent or makes no sense is the feature's default.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from PIL import ExifTags

from transforms.example import DEFAULTS, FeatureSpec, Value
from transforms.image import PixelPolicy, read_exif

PREFIX = "exif/"
# No such degree. 0 would be a place.
NOWHERE = -999.0

_DTYPES = {
    "datetime_original": "bytes",
    "make": "bytes",
    "model": "bytes",
    "orientation": "int64",
    "focal_length": "float",
    "f_number": "float",
    "exposure_time": "float",
    "iso": "int64",
    "gps_latitude": "float",
    "gps_longitude": "float",
}
_DEFAULTS: dict[str, Value] = {
    "orientation": 1,
    "gps_latitude": NOWHERE,
    "gps_longitude": NOWHERE,
}
EXIF_NAMES = tuple(_DTYPES)
# Where somebody was is only told where it is asked for by name.
PRIVATE = ("gps_latitude", "gps_longitude")
ALL = "all"

_DATE = re.compile(r"[0-9]{4}:[0-9]{2}:[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}")
_MOST = 1e9  # of any number here; far from what a float of 32 bits cannot hold

Tags = Mapping[int, Any]


def choose_names(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names in the order of EXIF_NAMES, each once; "all" stands for all but PRIVATE.

    Raises:
      ValueError: a name is unknown; says which there are.
    """
    chosen = set()
    for name in names:
        if name == ALL:
            chosen |= set(EXIF_NAMES) - set(PRIVATE)
        elif name in EXIF_NAMES:
            chosen.add(name)
        else:
            raise ValueError(
                f"{name!r}: allowed are {', '.join(EXIF_NAMES)}, and {ALL}, which is all but "
                f"{' and '.join(PRIVATE)}"
            )
    return tuple(name for name in EXIF_NAMES if name in chosen)


def exif_specs(names: Iterable[str]) -> tuple[FeatureSpec, ...]:
    """Returns the features that the names stand for."""
    return tuple(FeatureSpec(PREFIX + name, _DTYPES[name], (), _default(name)) for name in names)


def _default(name: str) -> Value:
    return _DEFAULTS.get(name, DEFAULTS[_DTYPES[name]])


def exif_features(
    data: bytes | None, names: Iterable[str], *, policy: PixelPolicy, orientation: int
) -> tuple[tuple[str, Value], ...]:
    """Returns the features of one source; never raises for what is in it.

    Args:
      data: the source's bytes, which were decoded before; None for what has no EXIF.
      names: of EXIF_NAMES.
      policy: whose limit on pixels holds.
      orientation: that was undone, from 1 to 8.
    """
    names = tuple(names)
    if not names:
        return ()
    found: dict[str, Value | None] = {"orientation": orientation}
    if data is not None and set(names) - {"orientation"}:
        image = read_exif(data, policy=policy)
        found |= _read_tags(*(_tags(part) for part in _parts(image)))
    return tuple((PREFIX + name, _known(found.get(name), name)) for name in names)


def _known(value: Value | None, name: str) -> Value:
    return _default(name) if value is None else value


def _parts(exif: Any) -> tuple[Callable[[], Tags], ...]:
    return (
        lambda: dict(exif),
        lambda: exif.get_ifd(ExifTags.IFD.Exif),
        lambda: exif.get_ifd(ExifTags.IFD.GPSInfo),
    )


def _tags(read: Callable[[], Tags]) -> Tags:
    try:
        return read()
    except Exception:
        # Parsers of EXIF trip over whatever is wrong with it (struct.error, KeyError, TypeError
        # ...). None of it costs the image.
        return {}


def _read_tags(image: Tags, photo: Tags, gps: Tags) -> dict[str, Value | None]:
    base, place = ExifTags.Base, ExifTags.GPS
    iso = _number(photo.get(base.ISOSpeedRatings))
    return {
        "datetime_original": _date(photo.get(base.DateTimeOriginal)),
        "make": _text(image.get(base.Make)),
        "model": _text(image.get(base.Model)),
        "focal_length": _number(photo.get(base.FocalLength)),
        "f_number": _number(photo.get(base.FNumber)),
        "exposure_time": _number(photo.get(base.ExposureTime)),
        "iso": None if iso is None else int(iso),
        "gps_latitude": _degrees(gps, place.GPSLatitude, place.GPSLatitudeRef, "NS"),
        "gps_longitude": _degrees(gps, place.GPSLongitude, place.GPSLongitudeRef, "EW"),
    }


def _text(value: Any) -> bytes | None:
    """Returns UTF-8 up to the first NUL, without spaces around it."""
    if isinstance(value, str):  # Pillow takes ASCII for Latin-1
        value = value.encode("latin-1", "ignore")
    if not isinstance(value, bytes):
        return None
    text = value.split(b"\0")[0]
    try:
        return text.decode().strip().encode()
    except UnicodeDecodeError:
        return text.decode("latin-1").strip().encode()


def _date(value: Any) -> bytes | None:
    """Returns a date as it is written; None for one that no calendar has, as of an unset clock."""
    text = (_text(value) or b"").decode()
    try:
        datetime.datetime.strptime(text, "%Y:%m:%d %H:%M:%S")
    except ValueError:
        return None
    return text.encode() if _DATE.fullmatch(text) else None


def _number(value: Any) -> float | None:
    """Returns the first value, where it is above 0: EXIF has 0 for "unknown"."""
    try:
        number = float(value[0] if isinstance(value, tuple) else value)
    except (TypeError, ValueError, IndexError, ArithmeticError):
        return None
    return number if 0 < number <= _MOST else None


def _degrees(gps: Tags, tag: int, reference: int, directions: str) -> float | None:
    """Returns degrees, in the second direction below 0."""
    side = (_text(gps.get(reference)) or b"").decode()
    values = gps.get(tag)
    if side not in tuple(directions) or not isinstance(values, tuple) or len(values) != 3:
        return None
    try:
        degrees, minutes, seconds = map(float, values)
    except (TypeError, ValueError, ArithmeticError):
        return None
    if not all(math.isfinite(v) and v >= 0 for v in (degrees, minutes, seconds)):
        return None
    angle = degrees + minutes / 60 + seconds / 3600
    if angle > (90 if directions == "NS" else 180):
        return None
    return -angle if side == directions[1] else angle
