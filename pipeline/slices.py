"""Parts of splits by position: train[:80%], train[100:200], train[-10%:], and sums of them.

Arithmetic on numbers of records only. A percentage is a position, rounded to the nearest record,
halves up; so slices that meet at a percentage share no record and lose none.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

from transforms.shards import SPLIT_NAME

_PART = re.compile(r"(?P<split>[^\[\]]*?)(?:\[(?P<start>[^:\[\]]*):(?P<stop>[^:\[\]]*)\])?")
_BOUND = re.compile(r"(-?)([0-9]{1,18}(?:\.[0-9]{1,18})?)(%?)")
_FORMS = (
    "allowed are a split's name, NAME[FROM:TO] with whole numbers or percentages, as in "
    "train[:80%], train[100:200] or train[-10%:], and sums of them with +"
)


@dataclasses.dataclass(frozen=True)
class Bound:
    """One end of a slice.

    Attributes:
      number: of records, or percent; from the split's end where it is below 0.
      percent: which of the two.
      from_end: whether it counts from the end; -0 does as well.
    """

    number: Fraction
    percent: bool = False
    from_end: bool = False

    def position(self, records: int) -> int:
        """Returns the number of records before it, of a split of so many; may be out of range."""
        number = self.number * records / 100 if self.percent else self.number
        # Rounded from the front either way: -20% is where 80% is.
        return _round(records - number if self.from_end else number)

    def __str__(self) -> str:
        """As it is written."""
        number = self.number
        text = str(number) if number.denominator == 1 else f"{float(number):g}"
        return f"{'-' if self.from_end else ''}{text}{'%' if self.percent else ''}"


def _round(number: Fraction) -> int:
    """Returns the nearest whole number, halves up."""
    return int((2 * number + 1) // 2)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A split, or a part of it; None stands for the split's own beginning or end."""

    split: str
    start: Bound | None = None
    stop: Bound | None = None

    @property
    def whole(self) -> bool:
        """Whether it is the split, all of it."""
        return self.start is None and self.stop is None

    def span(self, records: int, *, spec: str) -> tuple[int, int]:
        """Returns the positions of the first record and of the one after the last.

        Args:
          records: how many the split has.
          spec: all that was asked for, for the error.

        Raises:
          ValueError: a bound is out of range, or the slice is empty.
        """
        start = self.start.position(records) if self.start else 0
        stop = self.stop.position(records) if self.stop else records
        for bound, position in ((self.start, start), (self.stop, stop)):
            if not 0 <= position <= records:
                raise ValueError(
                    f"split {spec!r}: {bound} is out of range, {self.split!r} has {records} "
                    f"records; allowed are -{records} to {records}, or -100% to 100%"
                )
        if start >= stop:
            raise ValueError(
                f"split {spec!r}: none of the {records} records of {self.split!r} lies from "
                f"{start} to {stop}; let FROM be less than TO"
            )
        return start, stop


def parse_slices(spec: str) -> tuple[Slice, ...]:
    """Reads a split, a slice of one, or a sum of them.

    Args:
      spec: as "train", "train[:80%]", "train[100:200]", "train[-10%:]", "train[50%:]+test".

    Raises:
      ValueError: it is none of these; says what is allowed.
    """
    return tuple(_parse_part(part.strip(), spec) for part in spec.split("+"))


def _parse_part(text: str, spec: str) -> Slice:
    found = _PART.fullmatch(text)
    if not found or not SPLIT_NAME.fullmatch(found["split"]):
        raise ValueError(f"split {spec!r}: {_FORMS}")
    return Slice(found["split"], *(_parse_bound(found[end], spec) for end in ("start", "stop")))


def _parse_bound(text: str | None, spec: str) -> Bound | None:
    if not (text or "").strip():
        return None
    found = _BOUND.fullmatch((text or "").strip())
    bound = found and Bound(Fraction(found[2]), bool(found[3]), bool(found[1]))
    if not bound or not (bound.percent or bound.number.denominator == 1):
        raise ValueError(f"split {spec!r}: {(text or '').strip()!r}: {_FORMS}")
    if bound.percent and bound.number > 100:
        raise ValueError(f"split {spec!r}: {bound}: allowed are -100% to 100%")
    return bound
