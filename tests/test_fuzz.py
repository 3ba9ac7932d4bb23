"""The fuzzer finds what is planted, and what it has found once stays found: see fuzz.py."""

import gzip
import struct
import zlib

import fuzz
import pytest

# Inputs of each run: with the seed, the same ones everywhere but for ../shared, where that is.
EXECUTIONS = {"decode": 2000, "example": 400, "manifest": 5000, "csv": 2000, "records": 5000}
# What is planted, in which target, and how the finding begins.
PLANTED = [
    ("exception", "decode", "decode: KeyError: \"'planted'\" at fuzz.py:fail:"),
    ("crash", "decode", "decode: crash: SIGSEGV;"),
    ("memory", "decode", "decode: memory: the limit is passed;"),
    ("hang", "decode", "decode: hang;"),
    ("example", "example", "example: AssertionError: "),
    ("manifest", "manifest", "manifest: IndexError: 'list index out of range' at "),
    ("csv", "csv", "csv: AssertionError: '' at fuzz.py:check_tables:"),
    ("records", "records", "records: KeyError: \"'planted'\" at fuzz.py:fail:"),
]


def hunt(findings, target: str, *flags: str) -> int:
    limits = ["--minutes", "5", "--seed", "1", "--executions", str(EXECUTIONS[target])]
    return fuzz.main(["--target", target, "--findings", str(findings), *limits, *flags])


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_nothing_is_found_in_a_short_run(tmp_path, capsys, target):
    assert hunt(tmp_path, target) == 0
    (line,) = capsys.readouterr().out.splitlines()
    executions = int(line.removeprefix(f"{target}: ").partition(" ")[0])
    assert executions >= EXECUTIONS[target]
    assert " in 1 process(es), 0 findings, " in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("fault", "target", "finding"), PLANTED)
def test_what_is_planted_is_found_and_found_again(tmp_path, capsys, fault, target, finding):
    assert hunt(tmp_path, target, "--plant", fault, "--longest", "2") == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines and all(line.startswith(finding) for line in lines)
    saved = lines[0].rpartition("; saved as ")[2]
    # The input that was saved shows it again, and nothing without the fault.
    again = ["--target", target, "--longest", "2", saved]
    assert fuzz.main([*again, "--findings", str(tmp_path / "again"), "--plant", fault]) == 1
    assert fuzz.main([*again, "--findings", str(tmp_path / "sound")]) == 0


def test_every_target_has_a_planted_fault():
    assert {target for _, target, _ in PLANTED} == set(fuzz.TARGETS) == set(EXECUTIONS)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(colour: int, packed: bytes, width=16) -> bytes:
    header = struct.pack(">IIBBBBB", width, 16, 8, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    return b"\0\x89PNG\r\n\x1a\n" + body


def tiff(*tags: tuple[int, int, int, int]) -> bytes:
    page = [(256, 4, 1, 16), (257, 4, 1, 16), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1)]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in sorted([*page, *tags]))
    directory = struct.pack("<H", len(page) + len(tags)) + entries + struct.pack("<I", 8)
    return b"\0II*\0" + struct.pack("<I", 8) + directory + bytes(20_000)


ROW = b"\0" + b"\x80" * 16
HUGE = struct.pack("<Q", 2**63)

# Each was once more than an outcome: pixels made up, an error past all handlers, or memory.
FOUND = {
    "decode": [
        (png(0, zlib.compress(ROW * 8)), "truncated PNG: fewer rows than its header says"),
        (png(3, zlib.compress(ROW * 16)), "corrupt PNG: "),  # a palette that is missing
        (png(0, zlib.compress(ROW), width=2_000_000), "too_large 0 pixels, "),
        (
            tiff((322, 4, 1, 40_000), (323, 4, 1, 40_000), (324, 4, 1, 200), (325, 4, 1, 9)),
            "too_large 0x0 pixels, ",
        ),
        (tiff(*((40_000 + n, 2, 20_000, 8) for n in range(900))), "corrupt TIFF: its tags "),
    ],
    "example": [
        (b"\1\x0a\x07\x0a\x05\x0a\x01a\x12\0", "ValueError 0"),  # a feature without values
        (b"\1\xff", "refused "),
    ],
    "manifest": [(b"\0" + b"[" * 5000, "dataset.json: no JSON object"), (b"\0" + b"9" * 9, "")],
    "csv": [
        (b"\0path,label\nhttp://a/b,c\n", ", line 0: the cell path is "),
        (b"\0path,label,path\na,b,c\n", ": two columns are named "),
        (b'\0path,label\n"a\x1b[2J",b\n', "Columns Reject"),
        (b"\1" + gzip.compress(struct.pack(">4I", 0x803, 1, 1, 1) + bytes(1 << 20)), ""),
    ],
    "records": [
        (b"\1" + HUGE + bytes(12), "record 0: cannot be read: "),
        (b"\0\x1f\x8b\x08\0", ""),
    ],
}


@pytest.mark.parametrize("target", FOUND)
def test_what_was_found_once_is_an_outcome(tmp_path, capfd, target):
    paths = []
    for number, (data, _) in enumerate(FOUND[target]):
        paths.append(str(tmp_path / str(number)))
        (tmp_path / str(number)).write_bytes(data)
    assert fuzz.main(["--target", target, "--findings", str(tmp_path / "found"), *paths]) == 0
    lines = capfd.readouterr().out.splitlines()
    for path, (_, outcome) in zip(paths, FOUND[target], strict=True):
        (line,) = [line for line in lines if line.startswith(f"{path}: ")]
        assert line.removeprefix(f"{path}: ").startswith(outcome), line
