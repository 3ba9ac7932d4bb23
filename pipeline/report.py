"""`tpufeed report`: one page that shows a data set, from dataset.json, index/ and some records.

write_report("records")  # records/report.html
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import __version__
from pipeline.messages import printable
from pipeline.repeat import command_of, plain_reader_of, reader_of
from pipeline.report_page import PAGE, STYLE
from pipeline.survey import (
    NO_CLASS,
    Content,
    Rejects,
    Survey,
    read_contents,
    read_rejects,
    survey_index,
)
from pipeline.thumbnails import Thumbnail, read_thumbnails
from transforms import files
from transforms.manifest import MANIFEST, Manifest, load_manifest
from transforms.records import CHOICES, DataError

REPORT = "report.html"
MOST_BYTES = 8_000_000  # of all pictures, as they stand in the page
_MOST_PICTURES = 1200
_MOST_CLASSES = 500  # rows of the table
_MOST_CONTENTS = 25  # duplicates
_MOST_SHOWN = 300  # characters of a name
_IMBALANCE = 10


@dataclasses.dataclass(frozen=True)
class Note:
    """One thing to know before anything else: level "good" or "look"."""

    level: str
    text: str


def write_report(directory: str) -> str:
    """Writes DIR/report.html, whole or not at all.

    Equal data sets in equal folders give equal bytes.

    Args:
      directory: the data set, local or in a store.

    Returns:
      The file's path.

    Raises:
      ValueError: no complete data set, or it is damaged; the message says where.
      RuntimeError: Matplotlib or Jinja2 is not installed.
      OSError: the file cannot be written.
    """
    check_libraries()
    manifest = load_manifest(directory)
    page = render_report(directory, manifest)
    files.write_file(directory, REPORT, page.encode())
    if not files.is_remote(directory):
        with contextlib.suppress(OSError):  # another process's files are still in it
            os.rmdir(files.join(directory, files.WORK_FOLDER))
    return files.join(directory, REPORT)


def check_libraries() -> None:
    """Raises RuntimeError unless all is installed that only the report needs."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"{error.name} cannot be imported ({error}): pip install 'tpufeed[report]'"
        ) from error


def render_report(directory: str, manifest: Manifest) -> str:
    """Returns the page.

    Raises:
      ValueError: the data set is damaged; the message says where.
    """
    from markupsafe import Markup

    command, configuration = _describe_config(directory, manifest.config)
    order = sorted(manifest.splits, key=lambda name: (name != "train", name))
    manifest = dataclasses.replace(manifest, splits={s: manifest.splits[s] for s in order})
    rejects = read_rejects(directory, manifest)
    contents = read_contents(directory)
    survey = survey_index(directory, manifest, contents=contents, most_picks=_MOST_PICTURES)
    thumbnails = read_thumbnails(directory, manifest, survey.picks, most_bytes=MOST_BYTES)
    sheets, left_out = _arrange(manifest, thumbnails)
    plots = _draw(manifest, survey)
    split = next((name for name in order if manifest.splits[name].records), order[0])
    code = {
        "command": command,
        "reader": reader_of(manifest, directory=directory, split=split),
        "plain_reader": plain_reader_of(manifest, directory=directory, split=split),
    }
    return (
        _environment(survey)
        .from_string(PAGE)
        .render(
            name=os.path.basename(directory.rstrip("/")) or directory,
            directory=directory,
            version=__version__,
            style=Markup(STYLE),
            manifest=manifest,
            facts=_facts(manifest),
            notes=observe(manifest, survey, rejects, contents),
            plots={name: Markup(svg) for name, svg in plots.items()},
            splits=_splits(manifest),
            classes=_classes(manifest),
            most_bars=24,
            sheets=sheets,
            left_out=left_out,
            ranges=survey.ranges,
            moments=_moments(manifest),
            rejects=rejects,
            contents=contents,
            conflicts=sum(len(content.labels) > 1 for content in contents),
            leaks=sum(len(_splits_of(content, survey)) > 1 for content in contents),
            most_contents=_MOST_CONTENTS,
            configuration=configuration,
            **{name: _lines(text) for name, text in code.items()},
        )
    )


def _environment(survey: Survey) -> Any:
    """Jinja2 that escapes everything, after everything that does not show was spelt out."""
    import jinja2
    from markupsafe import Markup

    def spell_out(value: Any) -> Any:
        plain = isinstance(value, str) and not isinstance(value, Markup)
        return printable(value) if plain else value

    environment = jinja2.Environment(
        autoescape=True,
        finalize=spell_out,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        count=lambda number: f"{number:,}",
        bytes=format_bytes,
        cut=_cut,
        span=lambda r: f"{r.low:,} to {r.high:,} (mean {r.mean:,.0f})",
        splits_of=lambda content: _splits_of(content, survey),
    )
    return environment


def _lines(text: str) -> Any:
    """A program's text, escaped; its line ends are the only thing that stays as it is."""
    from markupsafe import Markup, escape

    return Markup("\n").join(escape(printable(line)) for line in text.splitlines())


def observe(
    manifest: Manifest,
    survey: Survey,
    rejects: Sequence[Rejects],
    contents: Sequence[Content],
) -> list[Note]:
    """Returns what should be seen first, what to look at before what is good."""
    looks = [*_observe_classes(manifest), *_observe_contents(survey, contents)]
    faults = sum(r.count for r in rejects if r.reason not in CHOICES)
    if faults:
        inputs = manifest.records + sum(manifest.rejects.values())
        looks.append(
            f"{faults:,} of {inputs:,} inputs ({faults / inputs:.2%}) rejected, most as "
            f"{next(r.reason for r in rejects if r.reason not in CHOICES)}"
        )
    if survey.flat:
        looks.append(f"{_some(survey.flat, 'record')} of a single colour")
    if survey.smaller and manifest.image_size:
        height, width = manifest.image_size
        share = survey.smaller / manifest.records
        looks.append(
            f"{_some(survey.smaller, 'source')} ({share:.1%}) narrower than {width} or lower than "
            f"{height} pixels, the size of the pictures"
        )
    goods = []
    if not faults:
        goods.append("No input was rejected as faulty")
    if not contents:
        goods.append("No content stands under several keys")
    goods.append(
        f"{_some(manifest.records, 'record')} in {_some(_count_shards(manifest), 'shard')}: index/ "
        "and dataset.json agree"
    )
    return [Note("look", text) for text in looks] + [Note("good", text) for text in goods]


def _observe_classes(manifest: Manifest) -> list[str]:
    looks = []
    if manifest.label_kind == "none":
        looks.append("The records have no labels")
    if len(manifest.labels) == 1:
        looks.append(f"There is one class only, {printable(manifest.labels[0])}")
    for name, split in manifest.splits.items():
        absent = [printable(label) for label in manifest.labels if not split.classes[label]]
        if not split.records:
            looks.append(f"Split {name} has no records")
        elif absent:
            more = f" and {len(absent) - 5:,} more" if len(absent) > 5 else ""
            looks.append(f"Absent from {name}: {', '.join(map(_cut, absent[:5]))}{more}")
    totals = {
        label: sum(split.classes[label] for split in manifest.splits.values())
        for label in manifest.labels
    }
    if not totals:
        return looks
    small = min(manifest.labels, key=lambda label: totals[label])
    large = max(manifest.labels, key=lambda label: totals[label])
    if totals[small] and totals[large] >= _IMBALANCE * totals[small]:
        looks.append(
            f"Class {_cut(large)} has {totals[large]:,} records, {_cut(small)} has "
            f"{totals[small]:,}: {totals[large] / totals[small]:.0f} to 1"
        )
    return looks


def _observe_contents(survey: Survey, contents: Sequence[Content]) -> list[str]:
    looks = []
    if conflicts := sum(len(content.labels) > 1 for content in contents):
        looks.append(f"{_some(conflicts, 'content')} under several labels: one at most is right")
    if leaks := sum(len(_splits_of(content, survey)) > 1 for content in contents):
        looks.append(f"{_some(leaks, 'content')} in several splits: what is tested was trained on")
    if contents and not conflicts and not leaks:
        where = "class and split" if contents[0].labels != ("",) else "split"
        looks.append(f"{_some(len(contents), 'content')} under several keys, in one {where}")
    return looks


def _splits_of(content: Content, survey: Survey) -> list[str]:
    return sorted({survey.splits_of[key] for key in content.keys if key in survey.splits_of})


def _some(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _count_shards(manifest: Manifest) -> int:
    return sum(len(split.shards) for split in manifest.splits.values())


def _facts(manifest: Manifest) -> list[tuple[str, str]]:
    size = manifest.image_size
    total = sum(shard.bytes for split in manifest.splits.values() for shard in split.shards)
    colors = "gray" if manifest.channels == 1 else "RGB"
    return [
        ("records", f"{manifest.records:,}"),
        ("classes", f"{len(manifest.labels):,}" if manifest.label_kind != "none" else "no labels"),
        ("splits", f"{len(manifest.splits):,}"),
        ("shards", f"{_count_shards(manifest):,}"),
        ("size", format_bytes(total)),
        ("rejects", f"{sum(manifest.rejects.values()):,}"),
        (f"pictures, {colors}", f"{size[1]} × {size[0]}" if size else "any size"),
        ("encoding", manifest.encoding),
    ]


def format_bytes(number: float) -> str:
    """Returns a size to three digits, in powers of 1000."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6), ("kB", 3)):
        if number >= 10**power:
            return (
                f"{number / 10**power:.3g} {unit}"
                if number < 999.5 * 10**power
                else (f"{number / 10**power:.0f} {unit}")
            )
    return f"{number:.0f} B"


def _cut(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


def _splits(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {"name": name, "records": split.records, "shards": [shard.bytes for shard in split.shards]}
        for name, split in manifest.splits.items()
    ]


def _classes(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {
            "label": label,
            "id": number,
            "counts": [split.classes[label] for split in manifest.splits.values()],
        }
        for number, label in enumerate(manifest.labels[:_MOST_CLASSES])
    ]


def _arrange(
    manifest: Manifest, thumbnails: Mapping[Any, Thumbnail]
) -> tuple[list[dict[str, Any]], int]:
    """Returns the pictures by class, then split; and how many classes in a split have none."""
    sheets = []
    left_out = 0
    cells: dict[tuple[int, str], list[Thumbnail]] = {}
    for pick, thumbnail in thumbnails.items():
        cells.setdefault((pick.class_id, pick.split), []).append(thumbnail)
    unlabelled = manifest.label_kind == "none"
    for class_id, label in [(NO_CLASS, "All")] if unlabelled else enumerate(manifest.labels):
        parts = []
        for series, (name, split) in enumerate(manifest.splits.items()):
            shown = cells.get((class_id, name), [])
            records = split.records if unlabelled else split.classes[label]
            left_out += bool(records) and not shown
            if shown:
                parts.append(
                    {"split": name, "series": series % 6, "records": records, "thumbnails": shown}
                )
        if parts:
            sheets.append({"label": label, "parts": parts})
    return sheets, left_out


def _draw(manifest: Manifest, survey: Survey) -> dict[str, str]:
    from pipeline import plots

    counts = {name: split.classes for name, split in manifest.splits.items()}
    shards = {name: [s.bytes for s in split.shards] for name, split in manifest.splits.items()}
    shown = {label: printable(label) for label in manifest.labels}
    return {
        "classes": plots.classes_by_split(manifest.labels, counts, shown=shown) if shown else "",
        "sides": plots.source_sides(survey.sides),
        "aspects": plots.aspect_ratios(survey.aspects),
        "source_bytes": plots.byte_sizes(
            survey.source_bytes, name="source-bytes", description="file sizes of the sources"
        ),
        "record_bytes": plots.byte_sizes(
            survey.record_bytes, name="record-bytes", description="sizes of the records"
        ),
        "channels": plots.channel_means(survey.means),
        "shards": plots.shard_sizes(shards),
    }


def _moments(manifest: Manifest) -> str:
    if not manifest.channel_mean or not manifest.channel_std:
        return ""
    mean = " ".join(f"{value:.4f}" for value in manifest.channel_mean)
    std = " ".join(f"{value:.4f}" for value in manifest.channel_std)
    return f"mean {mean}, standard deviation {std}"


def _describe_config(
    directory: str, config: Mapping[str, Any]
) -> tuple[str, list[tuple[str, str]]]:
    try:
        return command_of(config), _configuration(config)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{files.join(directory, MANIFEST)}: config is not as tpufeed ingest writes it: "
            f"{error!r}"
        ) from error


def _configuration(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in config.items():
        if isinstance(value, dict):
            rows += [(f"{name}.{part}", _shown(inner)) for part, inner in value.items()]
        elif name == "inputs":
            rows += [
                ("input", f"{s['split']}={s['pattern']}" if s["split"] else s["pattern"])
                for s in value
            ]
        else:
            rows.append((name, _shown(value)))
    return rows


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
