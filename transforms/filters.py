"""Which sources are left out for their size or their shape."""

from __future__ import annotations

import dataclasses
from fractions import Fraction


@dataclasses.dataclass(frozen=True)
class SizeFilter:
    """What a source must be like to become a record; None: anything.

    Attributes:
      min_size: pixels that the shorter side must have.
      max_area: pixels, width x height, that it may have.
      max_aspect_ratio: how many times the shorter side the longer one may be.
    """

    min_size: int | None = None
    max_area: int | None = None
    max_aspect_ratio: Fraction | None = None

    def find_problem(self, width: int, height: int) -> str:
        """Returns why a source of this size is left out, with the numbers; "" where it is not."""
        short, long = sorted((width, height))
        if self.min_size is not None and short < self.min_size:
            return f"{width}x{height} pixels, --min-size is {self.min_size}"
        if self.max_area is not None and short * long > self.max_area:
            return f"{width}x{height} pixels, --max-area is {self.max_area}"
        # Whole numbers and fractions: no rounding decides at the limit.
        if self.max_aspect_ratio is not None and long > self.max_aspect_ratio * short:
            limit = f"--max-aspect-ratio is {float(self.max_aspect_ratio):g}"
            return f"{width}x{height} pixels, {long / short:.4g} to 1, {limit}"
        return ""
