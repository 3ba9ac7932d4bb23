"""The report's plots: drawn by Matplotlib, as SVG whose colours follow the page's style sheet."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from xml.sax.saxutils import quoteattr

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipeline.survey import ASPECT_EDGES, BYTES_EDGES, MEAN_BINS, SIDE_EDGES

# Drawn in these, which then become variables of the page: light and dark need one drawing.
_INK, _FAINT, _ACCENT = "#010a01", "#010a02", "#010a03"
_SERIES = tuple(f"#010b{number:02x}" for number in range(6))
_CHANNELS = ("#010c00", "#010c01", "#010c02")
_VARIABLES = {
    _INK: "--muted",
    _FAINT: "--line",
    _ACCENT: "--accent",
    **{color: f"--series-{number}" for number, color in enumerate(_SERIES)},
    **dict(zip(_CHANNELS, ("--red", "--green", "--blue"), strict=True)),
}
_WIDTH = 5.0  # inches; at 72 points an inch, as wide as a phone's column
_MOST_BARS = 24
_RATIOS = ((1 / 4, "1:4"), (9 / 16, "9:16"), (1, "1:1"), (16 / 9, "16:9"), (4, "4:1"))


def classes_by_split(
    labels: Sequence[str], counts: Mapping[str, Mapping[str, int]], *, shown: Mapping[str, str]
) -> str:
    """Bars of the records of each class, split upon split; the largest classes if there are many.

    Args:
      labels: in id order.
      counts: records by split and label.
      shown: how to print each label.
    """
    total = {label: sum(split[label] for split in counts.values()) for label in labels}
    chosen = list(labels)
    if len(labels) > _MOST_BARS:
        chosen = sorted(labels, key=lambda label: -total[label])[:_MOST_BARS]
    with _figure(height=0.85 + 0.3 * len(chosen)) as (figure, axes):
        left = np.zeros(len(chosen))
        places = np.arange(len(chosen))[::-1]
        for number, (split, classes) in enumerate(counts.items()):
            values = np.array([classes[label] for label in chosen])
            color = _SERIES[number % len(_SERIES)]
            axes.barh(places, values, 0.72, left=left, color=color, label=split)
            left += values
        axes.set_yticks(places, [_cut(shown[label]) for label in chosen])
        axes.set_ylim(-0.6, len(chosen) - 0.4)
        axes.set_xlabel("records")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.grid(True, axis="x")
        _legend(axes, len(counts))
        return _svg(figure, "classes", "records of each class by split")


def source_sides(counts: Any) -> str:
    """Widths against heights of the sources, a square for each bin; int [width, height]."""
    with _figure(height=3.6) as (figure, axes):
        columns, rows = np.nonzero(counts)
        share = np.log1p(counts[columns, rows]) / np.log1p(counts.max())
        x0, x1 = SIDE_EDGES[columns], SIDE_EDGES[columns + 1]
        y0, y1 = SIDE_EDGES[rows], SIDE_EDGES[rows + 1]
        corners = np.stack([x0, y0, x1, y0, x1, y1, x0, y1], axis=-1).reshape(-1, 4, 2)
        colors = [(_ACCENT, round(0.15 + 0.85 * s, 3)) for s in share]
        axes.add_collection(PolyCollection(corners, facecolors=colors, linewidths=0))
        low = min(x0.min(), y0.min()) / 1.2
        high = max(x1.max(), y1.max()) * 1.2
        axes.plot([low, high], [low, high], color=_FAINT, linewidth=1, zorder=0)
        for axis, name in ((axes.xaxis, "width"), (axes.yaxis, "height")):
            _log_axis(axes, axis, low, high, _powers(low, high), str)
            axis.set_label_text(f"{name}, pixels")
        axes.grid(True)
        return _svg(figure, "sides", "widths and heights of the sources")


def aspect_ratios(counts: Any) -> str:
    """Width / height of the sources; int [bin]."""
    with _figure() as (figure, axes):
        low, high = _shown_range(ASPECT_EDGES, counts, least=(0.5, 2.0))
        _bars(axes, ASPECT_EDGES, counts, _ACCENT)
        ticks = [ratio for ratio, _ in _RATIOS]
        _log_axis(axes, axes.xaxis, low, high, ticks, dict(_RATIOS).get)
        axes.set_xlabel("width : height")
        return _svg(figure, "aspects", "aspect ratios of the sources")


def byte_sizes(counts: Any, *, name: str, description: str) -> str:
    """Sizes in bytes; int [bin] of BYTES_EDGES."""
    with _figure() as (figure, axes):
        low, high = _shown_range(BYTES_EDGES, counts, least=None)
        _bars(axes, BYTES_EDGES, counts, _ACCENT)
        ticks = [t * 10.0**p for p in range(1, 11) for t in (1, 2, 5) if low <= t * 10.0**p <= high]
        step = max(1, -(-len(ticks) // 6))
        _log_axis(axes, axes.xaxis, low, high, ticks[::step], _format_bytes)
        axes.set_xlabel("bytes")
        return _svg(figure, name, description)


def channel_means(means: Any) -> str:
    """Means of each channel over each record; int [channel, MEAN_BINS]."""
    with _figure() as (figure, axes):
        edges = np.linspace(0, 256, MEAN_BINS + 1)
        names = ("red", "green", "blue") if len(means) == 3 else ("gray",)
        colors = _CHANNELS if len(means) == 3 else (_INK,)
        for counts, name, color in zip(means, names, colors, strict=True):
            axes.stairs(counts, edges, color=color, linewidth=1.6, label=name)
            axes.stairs(counts, edges, fill=True, facecolor=(color, 0.1))
        axes.set_xlim(0, 256)
        axes.set_ylim(bottom=0)
        axes.set_xticks([0, 64, 128, 192, 255])
        axes.set_xlabel("mean of the record's pixels, 0 to 255")
        _records_axis(axes)
        _legend(axes, len(names))
        return _svg(figure, "channels", "channel means of the records")


def shard_sizes(sizes: Mapping[str, Sequence[int]]) -> str:
    """Bytes of each shard, in order, by split."""
    with _figure() as (figure, axes):
        count = sum(map(len, sizes.values()))
        start = 0
        for number, (split, values) in enumerate(sizes.items()):
            if not values:
                continue
            edges = np.arange(start, start + len(values) + 1) - 0.5
            color = _SERIES[number % len(_SERIES)]
            if count <= 80:
                places = np.arange(start, start + len(values))
                axes.bar(places, values, 0.8, color=color, label=split)
            else:  # bars of less than a pixel; one outline a split
                axes.stairs(values, edges, fill=True, facecolor=color, label=split)
            start += len(values)
        axes.set_xlim(-0.75, max(1, start) - 0.25)
        axes.set_xticks([])
        axes.set_xlabel("shards, in order")
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _format_bytes(value)))
        axes.set_ylabel("bytes")
        axes.grid(True, axis="y")
        _legend(axes, len(sizes))
        return _svg(figure, "shards", "bytes of each shard")


@contextmanager
def _figure(*, height: float = 2.7) -> Iterator[tuple[Figure, Axes]]:
    """A figure under settings of our own, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that its fonts lack: the browser's have it
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": "tpufeed",
                "font.size": 12,
                "text.parse_math": False,
                "text.color": _INK,
                "axes.labelcolor": _INK,
                "axes.edgecolor": _FAINT,
                "axes.axisbelow": True,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.facecolor": "none",
                "xtick.color": _FAINT,
                "ytick.color": _FAINT,
                "xtick.labelcolor": _INK,
                "ytick.labelcolor": _INK,
                "grid.color": _FAINT,
                "grid.linewidth": 0.8,
                "legend.frameon": False,
            }
        )
        figure = Figure((_WIDTH, height), layout="constrained", facecolor="none")
        yield figure, figure.add_subplot()


def _svg(figure: Figure, name: str, description: str) -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    return embed_svg(buffer.getvalue(), name=name, description=description)


def embed_svg(text: str, *, name: str, description: str) -> str:
    """Makes Matplotlib's SVG a part of a page.

    Colours become the page's variables and fonts the page's; the size is left to the page; ids
    begin with the name, so that plots do not meet.

    Args:
      text: a whole SVG file.
      name: of the plot, unique on the page.
      description: for who cannot see it.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    # Only within tags: what is between them may be anybody's class name, and holds no "<".
    text = re.sub(r"<[^<>]+>", lambda tag: _adapt_tag(tag[0], name), text)
    opening, _, rest = text.partition(">")
    box = re.search(r'viewBox="[^"]*"', opening)
    assert box is not None, opening
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{box[0]} role="img" aria-label={quoteattr(description)}>{rest.strip()}'
    )


def _adapt_tag(tag: str, name: str) -> str:
    for color, variable in _VARIABLES.items():
        tag = tag.replace(color, f"var({variable})")
    tag = re.sub(r'font-family: [^;"]*', "font-family: var(--font)", tag)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", tag)


def _bars(axes: Axes, edges: Any, counts: Any, color: str) -> None:
    axes.stairs(counts, edges, fill=True, facecolor=color, edgecolor="none")
    _records_axis(axes)


def _records_axis(axes: Axes) -> None:
    axes.set_ylabel("records")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.grid(True, axis="y")


def _log_axis(axes: Axes, axis: Any, low: float, high: float, ticks: Any, text: Any) -> None:
    inside = [tick for tick in ticks if low <= tick <= high]
    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log", base=2)
    (axes.set_xlim if axis is axes.xaxis else axes.set_ylim)(low, high)
    axis.set_ticks(inside, [text(tick) for tick in inside])
    axis.set_ticks([], minor=True)


def _powers(low: float, high: float) -> list[int]:
    powers = [2**power for power in range(18) if low <= 2**power <= high]
    return powers[:: max(1, -(-len(powers) // 6))]


def _shown_range(edges: Any, counts: Any, *, least: tuple[float, float] | None) -> tuple[Any, Any]:
    (filled,) = np.nonzero(counts)
    low, high = edges[filled[0]] / 1.1, edges[filled[-1] + 1] * 1.1
    return (min(low, least[0]), max(high, least[1])) if least else (low, high)


def _format_bytes(value: float) -> str:
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if value >= 10**power:
            return f"{value / 10**power:g} {unit}"
    return f"{value:g} B"


def _legend(axes: Axes, count: int) -> None:
    if count > 1:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=min(count, 4),
            borderaxespad=0.2,
            handlelength=1,
            handleheight=1,
            columnspacing=1.2,
            borderpad=0,
        )


def _cut(text: str, most: int = 20) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
