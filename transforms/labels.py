"""What an input's label is: the name of one class, of several joined by a separator, or nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

KINDS = ("one", "many", "none")

Names = str | tuple[str, ...] | None
ClassIds = int | tuple[int, ...] | None


def label_order(label: str) -> tuple[int, int, str, str]:
    """Sorts whole numbers by value, everything else by code point, whole numbers first."""
    if label.isdecimal() and label.isascii():
        digits = label.lstrip("0")  # not int(), which takes no more than some thousand digits
        return 0, len(digits), digits, label
    return 1, 0, "", label


@dataclasses.dataclass(frozen=True)
class Labelling:
    """How many classes an input has, and how its label names them.

    Attributes:
      kind: "one", "many" (one or several) or "none".
      separator: what stands between several; "" but for "many".
    """

    kind: str = "one"
    separator: str = ""

    def __post_init__(self) -> None:
        """A separator belongs to "many", and to nothing else."""
        assert self.kind in KINDS and (self.kind == "many") == bool(self.separator), self

    def read(self, text: str) -> str:
        """Returns the label that stands in index/, of a folder's name or a CSV's cell.

        Of several names each once, without the white space around it, sorted by `label_order`,
        so that equal sets give equal labels. "" for "none".

        Raises:
          ValueError: a name is empty, or the names joined would come apart as others.
        """
        if self.kind != "many":
            return text if self.kind == "one" else ""
        names = {name.strip() for name in text.split(self.separator)}
        if "" in names:
            raise ValueError(f"{text!r} has an empty part")
        ordered = sorted(names, key=label_order)
        label = self.separator.join(ordered)
        if label.split(self.separator) != ordered:  # "b||a|" by "||"
            raise ValueError(f"{text!r} has a part that cannot be told from {self.separator!r}")
        return label

    def split(self, label: str) -> tuple[str, ...]:
        """Returns the class names in a label that `read` returned."""
        if self.kind == "many":
            return tuple(label.split(self.separator))
        return (label,) if self.kind == "one" else ()

    def look_up(self, label: str, class_ids: Mapping[str, int]) -> tuple[Names, ClassIds]:
        """Returns the class names and ids of a record: several by id, each alone if one, or None.

        Args:
          label: as `read` returned it.
          class_ids: id by name, from 0.
        """
        names = sorted(self.split(label), key=class_ids.__getitem__)
        if self.kind == "many":
            return tuple(names), tuple(class_ids[name] for name in names)
        return (label, class_ids[label]) if names else (None, None)


ONE_LABEL = Labelling()
