"""Small copies of records' pictures, read by random access, for a page that carries them itself."""

from __future__ import annotations

import base64
import collections
import dataclasses
import io
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from pipeline.survey import Pick
from transforms import files
from transforms.example import parse_example, read_record
from transforms.manifest import Manifest
from transforms.records import DataError

SIDE = 112  # pixels, the longer side; a picture that is smaller stays as it is
_LOSSLESS = 48  # as small as this, JPEG would spoil it and PNG costs little
_THREADS = 8  # a store's latency, not its rate, is what is waited for


@dataclasses.dataclass(frozen=True)
class Thumbnail:
    """A record's picture, made small.

    Attributes:
      pick: the record.
      uri: the picture, as data:image/...;base64,...
      width: in pixels.
      height: in pixels.
    """

    pick: Pick
    uri: str
    width: int
    height: int


def read_thumbnails(
    directory: str, manifest: Manifest, picks: Sequence[Pick], *, most_bytes: int
) -> dict[Pick, Thumbnail]:
    """Reads records by random access and makes their pictures small.

    Args:
      directory: the data set.
      manifest: its dataset.json.
      picks: the records.
      most_bytes: over all data: URIs. Where that is not enough, each class in each split loses
        its last pictures, as evenly as can be.

    Returns:
      The pictures, in the order of `picks`.

    Raises:
      DataError: a record is not where index/ says, or its picture cannot be decoded.
    """
    by_shard: dict[str, list[Pick]] = collections.defaultdict(list)
    for pick in picks:
        by_shard[pick.shard].append(pick)

    def read(shard: str) -> list[Thumbnail]:
        return list(_read_shard(directory, manifest, by_shard[shard]))

    with ThreadPoolExecutor(_THREADS) as pool:
        made = {t.pick: t for batch in pool.map(read, sorted(by_shard)) for t in batch}
    left, kept = most_bytes, set()
    for pick in _in_rounds(picks):
        left -= len(made[pick].uri)
        if left < 0:
            break
        kept.add(pick)
    return {pick: made[pick] for pick in picks if pick in kept}


def _in_rounds(picks: Iterable[Pick]) -> list[Pick]:
    """The first of every class and split, then the second of each, and so on."""
    rounds: collections.Counter[tuple[str, int]] = collections.Counter()
    numbered = []
    for pick in picks:
        numbered.append((rounds[pick.split, pick.class_id], pick))
        rounds[pick.split, pick.class_id] += 1
    return [pick for _, pick in sorted(numbered, key=lambda item: item[0])]


def _read_shard(directory: str, manifest: Manifest, picks: Iterable[Pick]) -> Iterator[Thumbnail]:
    shard = ""
    try:
        with files.open_file(files.join(directory, next(iter(picks)).shard)) as file:
            for pick in sorted(picks, key=lambda pick: pick.offset):
                shard = f"{pick.shard}, record {pick.key!r}"
                file.seek(pick.offset)
                # A TFRecord: length uint64 and its checksum, the data, their checksum.
                data = file.read(pick.size)[12:-4]
                kind = manifest.label_kind
                record = read_record(parse_example(data), schema=manifest.schema, kind=kind)
                if record.key != pick.key:
                    raise DataError(f"its key is {record.key!r}")
                yield _shrink(pick, _open_picture(record.image, record.size, manifest))
    except (DataError, ValueError, KeyError, IndexError, OSError) as error:
        if isinstance(error, FileNotFoundError) or not shard:
            raise
        said = " ".join(str(error).split())
        raise DataError(f"{shard}: {said}: run tpufeed verify {directory}") from error


def _open_picture(data: bytes, size: tuple[int, int] | None, manifest: Manifest) -> Image.Image:
    mode = "RGB" if manifest.channels == 3 else "L"
    if manifest.encoding == "raw":
        assert size is not None, "raw is written with schema flowers only, which has sizes"
        return Image.frombytes(mode, (size[1], size[0]), data)
    picture = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
    picture.draft(mode, (2 * SIDE, 2 * SIDE))
    return picture.convert(mode)


def _shrink(pick: Pick, picture: Image.Image) -> Thumbnail:
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    kind = "png" if max(picture.size) <= _LOSSLESS else "jpeg"
    if kind == "png":
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.save(buffer, "JPEG", quality=80, optimize=True)
    uri = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return Thumbnail(pick, uri, *picture.size)
