"""What the Flex Template starts: `tpufeed ingest`, with the template's parameters as its flags.

Dataflow's launcher calls it with --name=value for each parameter of flex_template.json, and with
Beam's own options. Names of parameters have no hyphens, and a parameter always has a value.
"""

import sys

SWITCHES = ("overwrite", "resume", "unlabelled")
FLAGS = (
    "background",
    "channels",
    "class_names",
    "duplicates",
    "encoding",
    "exclude",
    "exif",
    "image_size",
    "input",
    "label_offset",
    "max_area",
    "max_aspect_ratio",
    "label_separator",
    "max_pixels",
    "max_reject_rate",
    "min_size",
    "new_classes",
    "output",
    "quality",
    "resize_mode",
    "root",
    "schema",
    "seed",
    "shard_size",
    "shards",
    "split",
    "split_by",
)


def make_argv(parameters: list[str]) -> list[str]:
    """Returns tpufeed's arguments; what is no parameter of the template stays as it is, for Beam.

    Raises:
      ValueError: a switch is neither true nor false.
    """
    argv = ["ingest", "--runner=DataflowRunner"]
    for parameter in parameters:
        name, _, value = parameter.removeprefix("--").partition("=")
        if name in FLAGS:
            argv.append(f"--{name.replace('_', '-')}={value}")
        elif name not in SWITCHES:
            argv.append(parameter)
        elif value.lower() == "true":
            argv.append(f"--{name}")
        elif value.lower() != "false":
            raise ValueError(f"{name}={value}: must be true or false")
    return argv


if __name__ == "__main__":
    from pipeline.__main__ import main

    sys.exit(main(make_argv(sys.argv[1:])))
