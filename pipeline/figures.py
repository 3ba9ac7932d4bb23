"""Pictures of how well a model does: the confusion matrix, and some predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_INK, _WRONG, _PAPER = (30, 30, 30), (190, 20, 20), (255, 255, 255)
_BLUE = np.array((8, 69, 148), np.float64)
_MOST_NUMBERED = 30  # classes; beyond, cells are too small for numbers and names


def f1_scores(matrix: Any) -> np.ndarray:
    """Returns the F1 score of each class; 0 for one that is neither there nor predicted.

    Args:
      matrix: examples, int [true class, predicted class].
    """
    matrix = np.asarray(matrix, np.float64)
    both = matrix.sum(axis=0) + matrix.sum(axis=1)
    return np.divide(2 * matrix.diagonal(), both, out=np.zeros(len(matrix)), where=both > 0)


def draw_confusion(matrix: Any, *, labels: Sequence[str]) -> Image.Image:
    """Returns a picture of a confusion matrix: a row a true class, shaded by its share.

    Args:
      matrix: examples, int [true class, predicted class].
      labels: names in id order.
    """
    matrix = np.asarray(matrix)
    count = len(labels)
    numbered = count <= _MOST_NUMBERED
    cell = 48 if numbered else max(1, 1440 // count)
    font = ImageFont.load_default(13)
    names = [_cut(label) for label in labels]
    margin = 16 + max(int(font.getlength(name)) for name in names) if numbered else 16
    side = margin + cell * count + 16
    picture = Image.new("RGB", (max(side, 360), side + 24), _PAPER)
    draw = ImageDraw.Draw(picture)
    right = int(matrix.diagonal().sum())
    title = f"{right} of {matrix.sum()} right; mean F1 {f1_scores(matrix).mean():.3f}"
    draw.text((8, 4), title + "; rows: true", _INK, font)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    for row, column in np.ndindex(count, count):
        share = shares[row, column]
        x, y = margin + cell * column, margin + 24 + cell * row
        shade = tuple(int(level) for level in 255 - share * (255 - _BLUE))
        draw.rectangle((x, y, x + cell - 1, y + cell - 1), shade)
        if numbered and matrix[row, column]:
            ink = _PAPER if share > 0.5 else _INK
            middle = (x + cell // 2, y + cell // 2)
            draw.text(middle, str(matrix[row, column]), ink, font, anchor="mm")
    for number, name in enumerate(names if numbered else ()):
        along = margin + cell * number + cell // 2
        draw.text((margin - 6, along + 24), name, _INK, font, anchor="rm")
        _write_upwards(picture, name, (along, margin + 20), font)
    return picture


def _write_upwards(picture: Image.Image, text: str, foot: tuple[int, int], font: Any) -> None:
    strip = Image.new("RGB", (int(font.getlength(text)) + 2, 18), _PAPER)
    ImageDraw.Draw(strip).text((0, 0), text, _INK, font)
    turned = strip.rotate(90, expand=True)
    picture.paste(turned, (foot[0] - 9, foot[1] - turned.height))


def draw_predictions(
    pictures: Any, *, truth: Sequence[int], predicted: Sequence[int], labels: Sequence[str]
) -> Image.Image:
    """Returns a grid of pictures, each under its label; wrong predictions in red.

    Args:
      pictures: uint8 [examples, height, width, channels], 1 or 3 channels.
      truth: the class of each.
      predicted: the class that the model saw in each.
      labels: names in id order.
    """
    columns = max(1, int(np.ceil(np.sqrt(len(pictures)))))
    rows = -(-len(pictures) // columns)
    side, foot = 144, 22
    sheet = Image.new("RGB", (columns * (side + 8) + 8, rows * (side + foot + 8) + 8), _PAPER)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(12)
    for number, (pixels, true, seen) in enumerate(zip(pictures, truth, predicted, strict=True)):
        x = 8 + number % columns * (side + 8)
        y = 8 + number // columns * (side + foot + 8)
        pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
        picture = Image.fromarray(np.ascontiguousarray(pixels, np.uint8)).convert("RGB")
        scale = side / max(picture.size)
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        sheet.paste(picture.resize(size, Image.Resampling.NEAREST), (x, y))
        name = _cut(labels[true], 20)
        text = name if true == seen else f"{_cut(labels[seen], 11)} ({_cut(name, 10)})"
        draw.text((x, y + side + 4), text, _INK if true == seen else _WRONG, font)
    return sheet


def _cut(text: str, most: int = 16) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
