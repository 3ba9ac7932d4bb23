"""Globs, CSV files and IDX folders become references: tables first, then the transforms."""

import contextlib
import gzip
import hashlib
import io
import logging
import os
import shutil
import socket
import struct
import tempfile
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.io.filesystem import FileMetadata, FileSystem
from apache_beam.testing.util import assert_that, equal_to

from transforms.example import FeatureSpec
from transforms.globs import (
    common_root,
    find_match,
    is_system_file,
    key_of,
    list_glob,
    split_pattern,
)
from transforms.idx import list_idx, read_idx
from transforms.prepare import read_source
from transforms.records import (
    DataError,
    Exclusions,
    Grouping,
    ImageError,
    ImageRef,
    Input,
    Reject,
    Skipped,
)
from transforms.screen import (
    ScreenImages,
    parse_exclusions,
    read_exclusions,
    screen_image,
    screen_reject,
)
from transforms.sources import ListImages, may_repeat, take_once
from transforms.tables import Columns, list_csv

KEY = Grouping()


def make(folder: Path, *names: str, data: bytes = b"x") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def glob(folder: Path, rest: str, *, root=None, split="", grouping=KEY) -> list:
    return list(
        list_glob(Input(f"{folder}/{rest}", split), root=str(root or folder), grouping=grouping)
    )


def keys(items) -> list[str]:
    return [item.key for item in items if isinstance(item, ImageRef)]


def refused(function, *args, **kwargs) -> str:
    with pytest.raises(DataError) as caught:
        list(function(*args, **kwargs) or ())
    assert "\n" not in str(caught.value)
    return str(caught.value)


class MemoryFileSystem(FileSystem):
    """A store that is not a disk: mem://name -> bytes."""

    files: dict[str, bytes] = {}

    @classmethod
    def scheme(cls):
        return "mem"

    def has_dirs(self):
        return False

    def _list(self, prefix):
        if prefix.startswith("mem://closed"):
            raise PermissionError("no access")
        for path, data in sorted(self.files.items()):
            if path.startswith(prefix):
                yield FileMetadata(path, len(data))

    def match(self, patterns, limits=None):
        return super().match(patterns, limits)

    def open(self, path, mime_type="", compression_type=None):
        if path not in self.files:
            raise FileNotFoundError(2, "no such object", path)
        return io.BytesIO(self.files[path])

    def exists(self, path):
        return path in self.files

    def split(self, path):
        return tuple(path.rsplit("/", 1))

    def join(self, base, *paths):
        return "/".join([base, *paths])

    def _not_needed(self, *args, **kwargs):
        raise NotImplementedError

    mkdirs = create = copy = rename = size = last_updated = checksum = metadata = delete = (
        _not_needed
    )


@pytest.fixture
def store(monkeypatch):
    files: dict[str, bytes] = {}
    monkeypatch.setattr(MemoryFileSystem, "files", files)
    return files


# Patterns.


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("/a/b/*/*.jpg", ("/a/b", "*/*.jpg")),
        ("/a/b/c.jpg", ("/a/b", "c.jpg")),
        ("/*.jpg", ("/", "*.jpg")),
        ("/a/b?/c/*.jpg", ("/a", "b?/c/*.jpg")),
        ("/a/b[12]/*.jpg", ("/a", "b[12]/*.jpg")),
        ("/a/**", ("/a", "**")),
        ("gs://bucket/a/*.jpg", ("gs://bucket/a", "*.jpg")),
        ("gs://bucket/*/b/*.jpg", ("gs://bucket", "*/b/*.jpg")),
    ],
)
def test_split_pattern(pattern, expected):
    assert split_pattern(pattern) == expected


def test_a_folder_that_exists_is_no_pattern(tmp_path):
    make(tmp_path, "set[1]/cat/a.jpg", "st*r/cat/a.jpg")
    assert split_pattern(f"{tmp_path}/set[1]/*/*") == (f"{tmp_path}/set[1]", "*/*")
    assert split_pattern(f"{tmp_path}/set[2]/*/*") == (f"{tmp_path}", "set[2]/*/*")
    # This one matches itself among others.
    assert split_pattern(f"{tmp_path}/st*r/*/*") == (f"{tmp_path}", "st*r/*/*")


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["/a/b/*/*.jpg"], "/a/b"),
        (["/a/b/cats/*.jpg", "/a/b/dogs/*.jpg"], "/a/b"),
        (["/a/b/*", "/a/bc/*"], "/a"),
        (["/a/*", "/b/*"], "/"),
        (["/a/b/*", "/a/*"], "/a"),
        (["gs://b/x/*", "gs://b/y/*"], "gs://b"),
        (["gs://b/x/1/*", "gs://b/x/2/*"], "gs://b/x"),
    ],
)
def test_common_root(patterns, expected):
    assert common_root(patterns) == expected
    assert common_root(reversed(patterns)) == expected


@pytest.mark.parametrize("patterns", [["/a/*", "gs://b/a/*"], ["gs://a/x/*", "gs://b/x/*"]])
def test_no_common_root(patterns):
    folders = ", ".join(pattern[:-2] for pattern in patterns)
    with pytest.raises(ValueError) as caught:
        common_root(patterns)
    assert str(caught.value) == (
        f"--input {folders}: no common folder; give --root, or one ingest for each"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cat/a.jpg", False),
        ("cat/thumbs.jpg", False),
        ("cat/a.", False),
        ("cat/__MACOSX.jpg", False),
        ("cat/.DS_Store", True),
        ("cat/._a.jpg", True),
        ("._a.jpg", True),
        ("cat/.hidden.jpg", True),
        ("cat/Thumbs.db", True),
        ("cat/THUMBS.DB", True),
        ("cat/desktop.ini", True),
        ("cat/Icon\r", True),
        ("__MACOSX/cat/a.jpg", True),
        ("cat/@eaDir/a.jpg", True),
        (".git/cat/a.jpg", True),
        ("cat/.cache/a.jpg", True),
        ("cat/", True),
    ],
)
def test_is_system_file(name, expected):
    assert is_system_file(name) is expected


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/a/b/c.jpg", "/a", "b/c.jpg"),
        ("/a/b/c.jpg", "/a/", "b/c.jpg"),
        ("/a/b/c.jpg", "/", "a/b/c.jpg"),
        ("gs://b/x/c.jpg", "gs://b", "x/c.jpg"),
        ("gs://b/x//c.jpg", "gs://b/x", "/c.jpg"),
    ],
)
def test_key_of(path, root, expected):
    assert key_of(path, root=root) == expected


def test_a_path_outside_the_root():
    assert refused(key_of, "/ab/c.jpg", root="/a") == (
        "--root /a: /ab/c.jpg is not below it; keys are paths relative to it"
    )


# Globs.


def test_glob_golden(tmp_path):
    make(tmp_path, "dog/b.jpg", "cat/a.jpg", data=b"12345")
    make(tmp_path, "cat/a.png", "cat/deep/c.jpg", "top.jpg")
    assert glob(tmp_path, "*/*.jpg", split="test") == [
        ImageRef("cat/a.jpg", f"{tmp_path}/cat/a.jpg", "cat", "test", "", 5),
        ImageRef("dog/b.jpg", f"{tmp_path}/dog/b.jpg", "dog", "test", "", 5),
    ]


def test_label_is_the_parent_at_any_depth(tmp_path):
    make(tmp_path, "x/1/cat/a.jpg", "x/cat/b.jpg", "cat/c.jpg", "top.jpg")
    found = {ref.key: ref.label for ref in glob(tmp_path, "**")}
    assert found == {
        "x/1/cat/a.jpg": "cat",
        "x/cat/b.jpg": "cat",
        "cat/c.jpg": "cat",
        "top.jpg": tmp_path.name,
    }


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("*", ["top.jpg"]),
        ("*/*", ["a/1.jpg", "a/2.JPG", "ab/1.jpg"]),
        ("*/*.jpg", ["a/1.jpg", "ab/1.jpg"]),
        ("**/*.jpg", ["a/1.jpg", "a/x/1.jpg", "a/x/y/1.jpg", "ab/1.jpg"]),
        ("**.jpg", ["a/1.jpg", "a/x/1.jpg", "a/x/y/1.jpg", "ab/1.jpg", "top.jpg"]),
        ("a/**/1.jpg", ["a/x/1.jpg", "a/x/y/1.jpg"]),
        ("a/*/y/*", ["a/x/y/1.jpg"]),
        ("a?/*", ["ab/1.jpg"]),
        ("[a]/*.[jJ][pP][gG]", ["a/1.jpg", "a/2.JPG"]),
        ("a[!x]/1.jpg", ["ab/1.jpg"]),
        ("a/1.jpg", ["a/1.jpg"]),
    ],
)
def test_wildcards(tmp_path, rest, expected):
    make(tmp_path, "top.jpg", "a/1.jpg", "a/2.JPG", "a/x/1.jpg", "a/x/y/1.jpg", "ab/1.jpg")
    assert sorted(keys(glob(tmp_path, rest))) == expected


ODD = [
    "a[1].jpg",
    "b#1.jpg",
    "c d.jpg",
    "ü日本\U0001f600.jpg",
    "100%41.jpg",
    "what?.jpg",
    "star*.jpg",
    "back\\slash.jpg",
    "q'\"$;&.jpg",
    "{x,y}.jpg",
    "-dash.jpg",
    "n" * 250 + ".jpg",
    " ",
]


@pytest.mark.parametrize("folder", ["plain", "set[1]", "a#b", "s p", "50%"])
def test_odd_names_by_glob_and_by_name(tmp_path, folder):
    make(tmp_path, *(f"{folder}/cat/{name}" for name in ODD), data=b"12")
    make(tmp_path, "set1/cat/other.jpg")
    expected = sorted(f"cat/{name}" for name in ODD)
    found = glob(tmp_path / folder, "*/*")
    assert keys(found) == expected
    assert {ref.label for ref in found} == {"cat"}
    assert [read_source(ref) for ref in found] == [(b"12", None)] * len(ODD)
    for name in ODD:
        (one,) = glob(tmp_path / folder / "cat", name, root=tmp_path / folder)
        assert one == found[expected.index(f"cat/{name}")]


def test_a_name_with_a_bracket_wins_over_what_it_matches(tmp_path):
    make(tmp_path, "a[1].jpg", "a1.jpg")
    assert keys(glob(tmp_path, "a[1].jpg")) == ["a[1].jpg"]
    assert keys(glob(tmp_path, "a[[]1].jpg")) == ["a[1].jpg"]


def test_a_file_named_like_the_pattern_hides_no_other(tmp_path):
    make(tmp_path, "*/*.jpg", "*/a.jpg", "cat/a.jpg")
    assert keys(glob(tmp_path, "*/*.jpg")) == ["*/*.jpg", "*/a.jpg", "cat/a.jpg"]


@pytest.mark.parametrize("name", ["a\nb.jpg", "a\tb.jpg", "a\x1bb.jpg", "a\x7fb.jpg", "a\x85b.jpg"])
def test_control_characters_are_rejected(tmp_path, name):
    make(tmp_path, f"cat/{name}", "cat/good.jpg")
    (tmp_path / "d\x07g").mkdir()
    make(tmp_path, "d\x07g/a.jpg")
    detail = "the key holds control characters"
    found = glob(tmp_path, "*/*")
    assert keys(found) == ["cat/good.jpg"]
    assert sorted(
        (r.key, r.path, r.label, r.reason, r.detail) for r in found if isinstance(r, Reject)
    ) == [
        (f"cat/{name}", f"{tmp_path}/cat/{name}", "cat", "bad_name", detail),
        ("d\x07g/a.jpg", f"{tmp_path}/d\x07g/a.jpg", "d\x07g", "bad_name", detail),
    ]


def test_names_that_are_not_utf8_are_rejected(tmp_path):
    make(tmp_path, "cat/good.jpg")
    with open(os.fsencode(tmp_path) + b"/cat/latin\xe9.jpg", "wb") as file:
        file.write(b"x")
    name = os.fsdecode(b"latin\xe9.jpg")
    assert glob(tmp_path, "*/*") == [
        ImageRef("cat/good.jpg", f"{tmp_path}/cat/good.jpg", "cat", "", "", 1),
        Reject(f"cat/{name}", f"{tmp_path}/cat/{name}", "cat", "bad_name", "the key is not UTF-8"),
    ]


def test_a_path_with_control_characters_above_the_root(tmp_path):
    make(tmp_path, "a\nb/cat/1.jpg")
    (found,) = glob(tmp_path / "a\nb", "*/*")
    assert (found.reason, found.detail) == ("bad_name", "the path holds control characters")


def test_a_bad_name_needs_no_group(tmp_path):
    make(tmp_path, "p1\n/a.jpg", "p2/a.jpg")
    found = glob(tmp_path, "*/*", grouping=Grouping("group", r"^(p\d)/"))
    assert [(type(item).__name__, item.key) for item in found] == [
        ("Reject", "p1\n/a.jpg"),
        ("ImageRef", "p2/a.jpg"),
    ]
    assert found[1].group == "p2"


def test_group_by_expression(tmp_path):
    make(tmp_path, "cat/p1_a.jpg", "dog/p1_b.jpg", "dog/p22_c.jpg")
    found = glob(tmp_path, "*/*", grouping=Grouping("group", r"/p(\d+)_"))
    assert {ref.key: ref.group for ref in found} == {
        "cat/p1_a.jpg": "1",
        "dog/p1_b.jpg": "1",
        "dog/p22_c.jpg": "22",
    }
    assert refused(
        list_glob, Input(f"{tmp_path}/*/*"), root=str(tmp_path), grouping=Grouping("group", "/q")
    ) == (
        "--split-by group:/q does not match the key 'cat/p1_a.jpg': every key needs a group; "
        "widen the expression"
    )


def test_system_files_are_skipped_and_told(tmp_path):
    junk = [
        ".DS_Store",
        "cat/.DS_Store",
        "cat/._a.jpg",
        "cat/Thumbs.db",
        "cat/desktop.ini",
        "__MACOSX/cat/a.jpg",
        "__MACOSX/cat/._a.jpg",
        ".hidden/cat/a.jpg",
    ]
    make(tmp_path, *junk, "cat/a.jpg")
    (tmp_path / "cat" / ".gone").symlink_to("nowhere")  # no reject either
    found = glob(tmp_path, "**")
    assert keys(found) == ["cat/a.jpg"]
    skipped = sorted(item.path for item in found if isinstance(item, Skipped))
    assert skipped == sorted(f"{tmp_path}/{name}" for name in [*junk, "cat/.gone"])
    assert len(found) == len(junk) + 2


def test_a_hidden_folder_that_was_asked_for_is_read(tmp_path):
    make(tmp_path, ".data/cat/a.jpg")
    assert keys(glob(tmp_path / ".data", "*/*")) == ["cat/a.jpg"]


def test_links_to_files_are_followed(tmp_path):
    make(tmp_path, "store/blob", data=b"1234567")
    (tmp_path / "in" / "cat").mkdir(parents=True)
    (tmp_path / "in" / "cat" / "a.jpg").symlink_to(tmp_path / "store" / "blob")
    (found,) = glob(tmp_path / "in", "*/*")
    assert found == ImageRef("cat/a.jpg", f"{tmp_path}/in/cat/a.jpg", "cat", "", "", 7)
    assert read_source(found) == (b"1234567", None)


def test_broken_links_and_loops_of_links_are_missing(tmp_path):
    make(tmp_path, "cat/a.jpg")
    (tmp_path / "cat" / "broken.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "cat" / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "cat" / "through.jpg").symlink_to("a.jpg/b.jpg")
    assert glob(tmp_path, "*/*")[1:] == [
        Reject(f"cat/{name}.jpg", f"{tmp_path}/cat/{name}.jpg", "cat", "missing", detail)
        for name, detail in [
            ("broken", "No such file or directory"),
            ("loop", "Too many levels of symbolic links"),
            ("through", "Not a directory"),
        ]
    ]


@pytest.mark.parametrize("rest", ["*/*.jpg", "**.jpg", "**/*.jpg"])
def test_links_to_folders_are_not_entered_but_told(tmp_path, caplog, rest):
    make(tmp_path, "in/dog/a.jpg", "in/dog/b.jpg", "elsewhere/cat/c.jpg")
    (tmp_path / "in" / "dog" / "loop").symlink_to(".")
    (tmp_path / "in" / "cat").symlink_to(tmp_path / "elsewhere" / "cat")
    with caplog.at_level(logging.WARNING):
        assert keys(glob(tmp_path / "in", rest)) == ["dog/a.jpg", "dog/b.jpg"]
    count = 1 if rest == "*/*.jpg" else 2  # dog/loop/x.jpg would be too deep for the first
    assert [record.getMessage() for record in caplog.records] == [
        f"--input {tmp_path}/in/{rest}: {count} link(s) to folders not followed, the first is "
        f"'{tmp_path}/in/cat'; give --input for what they lead to"
    ]


def test_a_link_that_the_pattern_cannot_enter_is_not_told(tmp_path, caplog):
    make(tmp_path, "dog/a.jpg", "dog/sub/b.jpg")
    (tmp_path / "dog" / "link").symlink_to("sub")
    (tmp_path / "cat").symlink_to("dog")
    with caplog.at_level(logging.WARNING):
        assert keys(glob(tmp_path, "d*/*.jpg")) == ["dog/a.jpg"]
    assert caplog.records == []


def test_a_link_in_the_fixed_part_is_followed(tmp_path):
    make(tmp_path, "real/cat/a.jpg")
    (tmp_path / "link").symlink_to("real")
    assert keys(glob(tmp_path / "link", "*/*")) == ["cat/a.jpg"]


def test_what_is_no_regular_file_is_unreadable(tmp_path, monkeypatch):
    make(tmp_path, "cat/a.jpg")
    os.mkfifo(tmp_path / "cat" / "fifo.jpg")
    (tmp_path / "cat" / "null.jpg").symlink_to("/dev/null")
    monkeypatch.chdir(tmp_path / "cat")  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("socket.jpg")
        found = glob(tmp_path, "*/*")
    assert found[1:] == [
        Reject(f"cat/{n}.jpg", f"{tmp_path}/cat/{n}.jpg", "cat", "unreadable", "no regular file")
        for n in ("fifo", "null", "socket")
    ]


@contextlib.contextmanager
def ordinary_user():
    """Root may read everything, so become nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder():
    """A folder below which nobody may look around."""
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o755)
    yield Path(folder)
    for parent, _, _ in os.walk(folder):
        os.chmod(parent, 0o755)
        for name in os.listdir(parent):
            if os.path.isdir(path := os.path.join(parent, name)):
                os.chmod(path, 0o755)
    shutil.rmtree(folder)


def test_a_file_without_permission_is_unreadable(open_folder):
    make(open_folder, "cat/a.jpg", "cat/b.jpg")
    (open_folder / "cat" / "b.jpg").chmod(0)
    good, closed = glob(open_folder, "*/*")  # it has a size, so only reading tells
    with ordinary_user():
        assert read_source(good) == (b"x", None)
        with pytest.raises(ImageError) as caught:
            read_source(closed)
    assert caught.value.args == ("unreadable", "Permission denied")


def test_a_folder_without_permission_ends_the_run(open_folder):
    make(open_folder, "cat/a.jpg", "dog/b.jpg")
    (open_folder / "cat").chmod(0)
    with ordinary_user():
        message = refused(
            list_glob, Input(f"{open_folder}/*/*"), root=str(open_folder), grouping=KEY
        )
        # One that the pattern does not enter is nobody's business.
        assert keys(glob(open_folder, "d*/*")) == ["dog/b.jpg"]
    assert message == f"--input: cannot list {open_folder}/cat: Permission denied"


def test_a_folder_that_cannot_be_searched_makes_its_files_unreadable(open_folder):
    make(open_folder, "cat/a.jpg")
    (open_folder / "cat").chmod(0o444)
    with ordinary_user():
        found = glob(open_folder, "*/*")
    assert found == [
        Reject("cat/a.jpg", f"{open_folder}/cat/a.jpg", "cat", "unreadable", "Permission denied")
    ]


HINT = "wildcards are *, **, ? and [...]; * stops at /, case counts"


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("*/*.JPG", f"no file matches ({HINT})"),
        ("*", f"no file matches ({HINT})"),
        ("nowhere/*/*.jpg", f"no file matches ({HINT})"),
        ("cat/b.jpg", f"no file matches ({HINT})"),
        (
            "*/*.{jpg,png}",
            f"no file matches ({HINT}; {{a,b}} is not expanded: give --input once for each)",
        ),
        ("[d]og/*", f"no file matches ({HINT}; for a [ in a name write [[])"),
        ("cat", "is a folder; to read below it: '{pattern}/*/*'"),
        ("set[1]", "is a folder; to read below it: '{pattern}/*/*'"),
        (
            "cat/[z-a].jpg",
            "a [...] is no range of characters: bad character range z-a at position 6",
        ),
    ],
)
def test_patterns_that_match_nothing(tmp_path, rest, message):
    make(tmp_path, "cat/a.jpg", "set[1]/a.jpg")
    pattern = f"{tmp_path}/{rest}"
    found = refused(list_glob, Input(pattern), root=str(tmp_path), grouping=KEY)
    assert found == f"--input {pattern}: {message.replace('{pattern}', pattern)}"


@pytest.mark.parametrize(
    ("pattern", "folder", "expected"),
    [
        ("gs://b/**", "gs://b/rec", "dataset.json"),
        ("gs://b/**", "gs://b/rec/", "dataset.json"),
        ("gs://b/*/*", "gs://b/rec", "dataset.json"),
        ("gs://b/*/*/*", "gs://b/rec", "index/a.idx"),
        ("gs://b/*/*", "gs://b/rec/1", ""),
        ("gs://b/**.jpg", "gs://b/rec", ""),
        ("gs://b/**", "gs://c/rec", ""),
        ("gs://b/**", "/b/rec", ""),
        ("/b/**", "gs://b/rec", ""),
        ("/b/**", "/b/rec", "dataset.json"),
        ("/b/**", "/b", "dataset.json"),
        ("/b/**", "/bc/rec", ""),
        ("/b/**", "/", ""),
    ],
)
def test_find_match(pattern, folder, expected):
    names = ["dataset.json", "index/a.idx"]
    assert find_match(pattern, folder=folder, names=names) == expected


def test_a_file_where_a_folder_is_meant(tmp_path):
    make(tmp_path, "cat")
    assert refused(list_glob, Input(f"{tmp_path}/cat/*"), root=str(tmp_path), grouping=KEY) == (
        f"--input: cannot list {tmp_path}/cat: Not a directory"
    )


def test_the_sources_are_not_touched(tmp_path):
    make(tmp_path, "cat/a.jpg", "cat/.x")
    os.utime(tmp_path / "cat" / "a.jpg", ns=(1, 2))

    def state():
        return [
            (path, path.lstat().st_mtime_ns, path.is_file() and path.read_bytes())
            for path in sorted(tmp_path.rglob("*"))
        ]

    before = state()
    for ref in glob(tmp_path, "**"):
        if isinstance(ref, ImageRef):
            read_source(ref)
    assert state() == before


def test_a_store(store):
    store.update(
        {
            "mem://b/in/cat/a#1?x=%41.jpg": b"123",
            "mem://b/in/cat/": b"",
            "mem://b/in/.x/b.jpg": b"",
            "mem://b/in/dog/n\n.jpg": b"",
            "mem://b/other/cat/b.jpg": b"",
        }
    )
    source = Input("mem://b/in/**", "test")
    found = list(list_glob(source, root="mem://b", grouping=KEY))
    assert found == [
        Skipped("mem://b/in/.x/b.jpg"),
        Skipped("mem://b/in/cat/"),
        ImageRef("in/cat/a#1?x=%41.jpg", "mem://b/in/cat/a#1?x=%41.jpg", "cat", "test", "", 3),
        Reject(
            "in/dog/n\n.jpg",
            "mem://b/in/dog/n\n.jpg",
            "dog",
            "bad_name",
            "the key holds control characters",
        ),
    ]
    assert read_source(found[2]) == (b"123", None)
    with pytest.raises(ImageError) as caught:
        read_source(ImageRef("k", "mem://b/nowhere.jpg", "l"))
    assert caught.value.args == ("missing", "no such object")


def test_a_store_that_cannot_be_listed(store):
    assert refused(list_glob, Input("mem://b/*.jpg"), root="mem://b", grouping=KEY) == (
        f"--input mem://b/*.jpg: no file matches ({HINT})"
    )
    found = refused(list_glob, Input("mem://closed/*.jpg"), root="mem://closed", grouping=KEY)
    assert found == "--input mem://closed/*.jpg: cannot be listed: no access"
    found = refused(list_glob, Input("nostore://b/*"), root="nostore://b", grouping=KEY)
    assert found == (
        "--input nostore://b/*: no store is called nostore://; give a local path or gs://"
    )


# CSV.


def rows(folder: Path, text, *, name="rows.csv", split="", grouping=KEY, reserved=()) -> list:
    data = text if isinstance(text, bytes) else text.encode()
    (folder / name).write_bytes(data)
    return list(list_csv(Input(f"{folder}/{name}", split), grouping=grouping, reserved=reserved))


def test_csv_golden(tmp_path):
    found = rows(
        tmp_path,
        "split,path,key,label,age:int,note,score:float,blob:bytes\n"
        'train,a.jpg,k1,cat,-3,"x, ""y""\nz",0.5,é\n'
        "test,/abs/b.jpg,k2,dog,,,,\n"
        "test,gs://b/c d.jpg,k3,dog,+7, sp ,1e-3,0\n",
    )
    path = f"{tmp_path}/rows.csv"
    specs = (
        FeatureSpec("age", "int64", (), 0),
        FeatureSpec("blob", "bytes", (), b""),
        FeatureSpec("note", "bytes", (), b""),
        FeatureSpec("score", "float", (), 0.0),
    )
    assert found == [
        Columns(path, specs),
        ImageRef(
            "k1",
            f"{tmp_path}/a.jpg",
            "cat",
            "train",
            features=(
                ("age", -3),
                ("blob", "é".encode()),
                ("note", b'x, "y"\nz'),
                ("score", 0.5),
            ),
        ),
        ImageRef(
            "k2",
            "/abs/b.jpg",
            "dog",
            "test",
            features=(("age", 0), ("blob", b""), ("note", b""), ("score", 0.0)),
        ),
        ImageRef(
            "k3",
            "gs://b/c d.jpg",
            "dog",
            "test",
            features=(("age", 7), ("blob", b"0"), ("note", b" sp "), ("score", 1e-3)),
        ),
    ]


@pytest.mark.parametrize(
    ("cell", "path"),
    [
        ("a.jpg", "{}/d/a.jpg"),
        ("./a.jpg", "{}/d/a.jpg"),
        ("../a.jpg", "{}/a.jpg"),
        ("x/a[1]#%41?.jpg", "{}/d/x/a[1]#%41?.jpg"),
        ("/x/a.jpg", "/x/a.jpg"),
        ("gs://b//a.jpg", "gs://b//a.jpg"),
    ],
)
def test_csv_paths(tmp_path, cell, path):
    (tmp_path / "d").mkdir()
    _, found = rows(tmp_path / "d", f"path,label\n{cell},cat\n")
    assert found == ImageRef(cell, path.format(tmp_path), "cat")


def test_csv_in_a_store(store):
    cells = ["a.jpg", "x//b.jpg", "../c.jpg", "/abs/d.jpg", "mem://o/e.jpg"]
    store["mem://b/in/rows.csv"] = "\n".join(["path,label", *(f"{c},l" for c in cells)]).encode()
    store["mem://b/in/._rows.csv"] = b"\0"
    found = list(list_csv(Input("mem://b/in/*.csv"), grouping=KEY, reserved=()))
    assert [item.path for item in found if isinstance(item, ImageRef)] == [
        "mem://b/in/a.jpg",
        "mem://b/in/x//b.jpg",
        "mem://b/c.jpg",
        "/abs/d.jpg",
        "mem://o/e.jpg",
    ]
    assert Skipped("mem://b/in/._rows.csv") in found


@pytest.mark.parametrize(
    "text",
    [
        b"path,label\na.jpg,cat\nb.jpg,dog\n",
        b"\xef\xbb\xbfpath,label\na.jpg,cat\nb.jpg,dog\n",
        b"path,label\r\na.jpg,cat\r\nb.jpg,dog\r\n",
        b"path,label\ra.jpg,cat\rb.jpg,dog",
        b'"path","label"\n"a.jpg","cat"\n"b.jpg",dog',
        b"path,label\n\na.jpg,cat\n\r\n\nb.jpg,dog\n\n\n",
        b" path , label \na.jpg,cat\nb.jpg,dog\n",
    ],
)
def test_csv_dialects(tmp_path, text):
    assert rows(tmp_path, text) == [
        Columns(f"{tmp_path}/rows.csv", ()),
        ImageRef("a.jpg", f"{tmp_path}/a.jpg", "cat"),
        ImageRef("b.jpg", f"{tmp_path}/b.jpg", "dog"),
    ]


def test_csv_split_and_groups(tmp_path):
    _, found = rows(tmp_path, "path,label\na.jpg,cat\n", split="holdout")
    assert found.split == "holdout"
    text = "path,label,patient\na.jpg,cat,7\nb.jpg,cat,8\n"
    _, one, two = rows(tmp_path, text, grouping=Grouping("column", "patient"))
    assert (one.group, two.group) == ("7", "8")
    assert one.features == (("patient", b"7"),)
    _, one, two = rows(tmp_path, text, grouping=Grouping("group", r"^(\w)\."))
    assert (one.group, two.group) == ("a", "b")


def test_csv_bad_names(tmp_path):
    text = 'path,label,key\n"a\nb.jpg",cat,k1\nb.jpg,"c\tt",k2\nc.jpg,cat,"k\x1b3"\nd.jpg,cat,k4\n'
    found = rows(tmp_path, text)
    assert [(i.key, i.reason, i.detail) for i in found if isinstance(i, Reject)] == [
        ("k1", "bad_name", "the path holds control characters"),
        ("k2", "bad_name", "the label holds control characters"),
        ("k\x1b3", "bad_name", "the key holds control characters"),
    ]
    assert keys(found) == ["k4"]


def test_several_csv_files(tmp_path):
    (tmp_path / "1.csv").write_text("path,label,x:int\na.jpg,cat,1\n")
    (tmp_path / ".~lock.csv").write_text("nothing")
    found = rows(tmp_path, "path,label,y:float\nb.jpg,cat,1\n", name="2.csv")
    assert len(found) == 2
    found = list(list_csv(Input(f"{tmp_path}/*.csv"), grouping=KEY, reserved=()))
    assert found == [
        Skipped(f"{tmp_path}/.~lock.csv"),
        Columns(f"{tmp_path}/1.csv", (FeatureSpec("x", "int64", (), 0),)),
        ImageRef("a.jpg", f"{tmp_path}/a.jpg", "cat", features=(("x", 1),)),
        Columns(f"{tmp_path}/2.csv", (FeatureSpec("y", "float", (), 0.0),)),
        ImageRef("b.jpg", f"{tmp_path}/b.jpg", "cat", features=(("y", 1.0),)),
    ]


NEEDED = "needed is path,label[,split][,key][,more]"
INT = "must be a whole number of 64 bits or empty"
FLOAT = "must be a finite number of 32 bits or empty"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"{{}}: no column 'path' in the header '', {NEEDED}".replace("'', ", "''; ")),
        ("file,label\n", f"{{}}: no column 'path' in the header 'file,label'; {NEEDED}"),
        ("path;label\n", f"{{}}: no column 'path' in the header 'path;label'; {NEEDED}"),
        ("path,class\n", f"{{}}: no column 'label' in the header 'path,class'; {NEEDED}"),
        ("path,label,a,a\n", "{}: two columns are named 'a': name each column once"),
        ("path,label,a,a:int\n", "{}: two columns are named 'a': name each column once"),
        ("path,label,path\n", "{}: two columns are named 'path': name each column once"),
        ("path,label,\n", "{}: a column has no name: name each column"),
        ("path,label,a:str\n", "{}: column a:str: allowed types are int, float, bytes"),
        ("path,label,a:\n", None),
        ("path,label,a:int:int\n", "{}: column a:int:int: allowed types are int, float, bytes"),
        ("path,label:int\n", "{}: column label:int: label takes no type; write label"),
        ("path,label,size\n", "{}: the schema has a feature 'size': rename the column"),
        (
            "path,label," + ",".join(f"c{i}" for i in range(999)),
            "{}: 1001 columns, allowed are up to 1000",
        ),
        ("path,label," + ",".join(f"c{i}" for i in range(998)), None),
        ("path,label\na.jpg\n", "{}, line 2: 1 cells, the header has 2"),
        ("path,label\n\na.jpg,b,c\n", "{}, line 3: 3 cells, the header has 2"),
        (
            'path,label,n:int\n"a\n.jpg",c,1\nb.jpg,c,x\n',
            f"{{}}, line 4: n is 'x', {INT}",
        ),
        ('path,label,n:int\na.jpg,"c\n\n",x\n', f"{{}}, line 2: n is 'x', {INT}"),
        ("path,label,n:int\na,b,1.0\n", f"{{}}, line 2: n is '1.0', {INT}"),
        ("path,label,n:int\na,b,1_0\n", f"{{}}, line 2: n is '1_0', {INT}"),
        ("path,label,n:int\na,b,٣\n", f"{{}}, line 2: n is '٣', {INT}"),
        (
            "path,label,n:int\na,b,9223372036854775808\n",
            f"{{}}, line 2: n is '9223372036854775808', {INT}",
        ),
        (
            f"path,label,n:int\na,b,{'9' * 5000}\n",
            f"{{}}, line 2: n is '{'9' * 37}...', {INT}",
        ),
        ("path,label,n:float\na,b,x\n", f"{{}}, line 2: n is 'x', {FLOAT}"),
        ("path,label,n:float\na,b,nan\n", f"{{}}, line 2: n is 'nan', {FLOAT}"),
        ("path,label,n:float\na,b,-inf\n", f"{{}}, line 2: n is '-inf', {FLOAT}"),
        ("path,label,n:float\na,b,1e39\n", f"{{}}, line 2: n is '1e39', {FLOAT}"),
        ('path,label,n:float\na,b,"1,5"\n', f"{{}}, line 2: n is '1,5', {FLOAT}"),
        ("path,label\n,cat\n", "{}, line 2: the cell path is empty, every row needs one"),
        ("path,label\na,\n", "{}, line 2: the cell label is empty, every row needs one"),
        ("path,label,key\na,b,\n", "{}, line 2: the cell key is empty, every row needs one"),
        (
            "path,label,split\na,b,\n",
            "{}, line 2: split '': allowed are 1 to 64 letters, digits and underscores",
        ),
        (
            "path,label,split\na,b,my-train\n",
            "{}, line 2: split 'my-train': allowed are 1 to 64 letters, digits and underscores",
        ),
        (
            'path,label\na,b\nc,"open\nd,e\n',
            "{}, line 3: no CSV: unexpected end of data; check the quotes",
        ),
        (
            'path,label\na,"b"c\n',
            "{}, line 2: no CSV: ',' expected after '\"'; check the quotes",
        ),
        (
            f"path,label\na,{'x' * 131073}\n",
            "{}, line 2: no CSV: field larger than field limit (131072); check the quotes",
        ),
        (
            b"path,label\n" + b"a.jpg,cat\n" * 5000 + b"b.jpg,caf\xe9\n",
            "{}, line 5002: byte 0xe9 is not UTF-8; save the file as UTF-8",
        ),
        (
            "path,label\n".encode("utf-16"),
            "{}, line 1: byte 0xff is not UTF-8; save the file as UTF-8",
        ),
        (
            "path,label\na.jpg,cat\n".encode("utf-16-le"),
            "{}, line 1: holds a NUL byte: the file is damaged or UTF-16; save it as UTF-8",
        ),
        (
            b"path,label,key\na.jpg,cat,k\nb.j\0pg,cat,l\n",
            "{}, line 3: holds a NUL byte: the file is damaged or UTF-16; save it as UTF-8",
        ),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_csv_faults(tmp_path, text, message):
    if message is None:
        rows(tmp_path, text, reserved=["size"])
        return
    found = refused(rows, tmp_path, text, reserved=["size"])
    assert found == message.format(tmp_path / "rows.csv")


@pytest.mark.parametrize(
    ("text", "grouping", "split", "message"),
    [
        (
            "path,label\na,b\n",
            Grouping("column", "patient"),
            "",
            "--split-by column:patient: no such column in {}",
        ),
        (
            "path,label,patient\na,b,\n",
            Grouping("column", "patient"),
            "",
            "{}, line 2: the cell patient is empty, every row needs one",
        ),
        (
            "path,label,split,patient\na,b,train,1\n",
            Grouping("column", "patient"),
            "",
            "--split-by column:patient: {} has a column split, so nothing is split by it: drop "
            "one of the two",
        ),
        (
            "path,label\na,b\n",
            Grouping("group", "x"),
            "",
            "--split-by group:x does not match the key 'a': every key needs a group; widen the "
            "expression",
        ),
        (
            "path,label,split\na,b,train\n",
            KEY,
            "test",
            "--input test={}: the file has a column split: drop one of the two",
        ),
    ],
)
def test_csv_contradictions(tmp_path, text, grouping, split, message):
    found = refused(rows, tmp_path, text, grouping=grouping, split=split)
    assert found == message.format(tmp_path / "rows.csv")


def test_csv_that_is_not_there_or_no_file(tmp_path):
    (tmp_path / "d.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "link.csv").symlink_to("nowhere")

    def found(name):
        source = Input(f"{tmp_path}/{name}")
        return refused(list_csv, source, grouping=KEY, reserved=()).replace(str(tmp_path), "T")

    assert found("x*.csv") == f"--input T/x*.csv: no file matches ({HINT})"
    assert found("d.csv") == "--input T/d.csv: is a folder; to read below it: 'T/d.csv/*/*'"
    assert found("pipe.csv") == "T/pipe.csv: no regular file"
    assert found("link.csv") == "T/link.csv: No such file or directory"


# IDX.


def idx(values: bytes, *shape: int) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values


def make_idx(folder: Path, *, train=3, test=2, packed=False, dot="-") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, count in (("train", train), ("t10k", test)):
        pixels = bytes(range(count * 6))
        for kind, data in (
            (f"images{dot}idx3", idx(pixels, count, 2, 3)),
            (f"labels{dot}idx1", idx(bytes([1, 10, 2, 7][:count]), count)),
        ):
            name = f"{stem}-{kind}-ubyte"
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
def test_idx_golden(tmp_path, packed, dot):
    make_idx(tmp_path, packed=packed, dot=dot)
    gz = ".gz" if packed else ""
    train, test = (f"{tmp_path}/{s}-images{dot}idx3-ubyte{gz}" for s in ("train", "t10k"))
    found = list(list_idx(Input(f"idx:{tmp_path}")))
    assert found == [
        ImageRef("train/00000000", train, "1", "train", "", 6, 0),
        ImageRef("train/00000001", train, "10", "train", "", 6, 1),
        ImageRef("train/00000002", train, "2", "train", "", 6, 2),
        ImageRef("test/00000000", test, "1", "test", "", 6, 0),
        ImageRef("test/00000001", test, "10", "test", "", 6, 1),
    ]
    assert [read_source(ref) for ref in found[1:4]] == [
        (bytes(range(6, 12)), (3, 2)),
        (bytes(range(12, 18)), (3, 2)),
        (bytes(range(6)), (3, 2)),
    ]


def test_an_idx_file_that_was_replaced_is_read_anew(tmp_path):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(idx(b"abc", 1, 1, 3))
    assert read_idx(str(path)) == ((1, 1, 3), b"abc")
    path.write_bytes(idx(b"defg", 1, 1, 4))
    assert read_idx(str(path)) == ((1, 1, 4), b"defg")


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            IMAGES,
            idx(bytes(3), 3),
            "{}: begins with 00000801, an IDX file of 3 dimension(s) of unsigned bytes begins "
            "with 00000803",
        ),
        (
            LABELS,
            idx(bytes(18), 3, 2, 3),
            "{}: begins with 00000803, an IDX file of 1 dimension(s) of unsigned bytes begins "
            "with 00000801",
        ),
        (
            IMAGES,
            b"\0\0\x0d\3" + idx(bytes(18), 3, 2, 3)[4:],
            "{}: begins with 00000d03, an IDX file of 3 dimension(s) of unsigned bytes begins "
            "with 00000803",
        ),
        (
            IMAGES,
            b"",
            "{}: begins with , an IDX file of 3 dimension(s) of unsigned bytes begins with "
            "00000803",
        ),
        (
            IMAGES,
            idx(bytes(17), 3, 2, 3),
            "{}: 17 values, its header says 3 x 2 x 3: the file is cut or not IDX",
        ),
        (
            IMAGES,
            idx(bytes(19), 3, 2, 3),
            "{}: more than 18 values, its header says 3 x 2 x 3: the file is cut or not IDX",
        ),
        (
            IMAGES,
            idx(b"", 3, 2, 3)[:10],
            "{}: 0 values, its header says 3 x 0 x 0: the file is cut or not IDX",
        ),
        (
            LABELS,
            idx(bytes(4), 4),
            "{}/train-images-idx3-ubyte: 3 images, but 4 labels in {}/train-labels-idx1-ubyte",
        ),
        (
            IMAGES,
            gzip.compress(idx(bytes(18), 3, 2, 3), mtime=0)[:-9],
            "{}: no whole gzip file: Compressed file ended before the end-of-stream marker was "
            "reached",
        ),
        (
            IMAGES,
            gzip.compress(b"x" * 1000, mtime=0)[:10] + b"\xff" * 20,
            "{}: no whole gzip file: Error -3 while decompressing data: ",
        ),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_idx_faults(tmp_path, name, data, message):
    make_idx(tmp_path)
    (tmp_path / name).write_bytes(data)
    found = refused(list_idx, Input(f"idx:{tmp_path}"))
    at = str(tmp_path) if "{}/" in message else str(tmp_path / name)
    expected = message.replace("{}", at)
    assert found.startswith(expected) if expected.endswith(": ") else found == expected


def test_idx_bad_checksum(tmp_path):
    make_idx(tmp_path)
    data = gzip.compress(idx(bytes(18), 3, 2, 3))
    (tmp_path / IMAGES).write_bytes(data[:-8] + b"\0\0\0\0" + data[-4:])
    found = refused(list_idx, Input(f"idx:{tmp_path}"))
    assert found.startswith(f"{tmp_path / IMAGES}: no whole gzip file: CRC check failed")


def test_idx_file_missing(tmp_path):
    make_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    assert refused(list_idx, Input(f"idx:{tmp_path}")) == (
        f"--input idx:{tmp_path}: found none of t10k-labels-idx1-ubyte, t10k-labels-idx1-ubyte.gz, "
        "t10k-labels.idx1-ubyte, t10k-labels.idx1-ubyte.gz"
    )


def test_idx_file_that_is_a_folder(tmp_path):
    make_idx(tmp_path)
    (tmp_path / IMAGES).unlink()
    (tmp_path / IMAGES).mkdir()
    assert refused(list_idx, Input(f"idx:{tmp_path}")) == (
        f"{tmp_path / IMAGES}: cannot be read: Is a directory"
    )


# Reading.


@pytest.mark.parametrize(
    ("name", "reason", "detail"),
    [
        ("gone.jpg", "missing", "No such file or directory"),
        ("a.jpg/b.jpg", "missing", "Not a directory"),
        ("loop.jpg", "missing", "Too many levels of symbolic links"),
        ("folder", "unreadable", "no regular file"),
        ("fifo", "unreadable", "no regular file"),
        ("n" * 300, "unreadable", "File name too long"),
    ],
)
def test_read_source_refuses(tmp_path, name, reason, detail):
    make(tmp_path, "a.jpg")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ImageError) as caught:
        read_source(ImageRef("k", f"{tmp_path}/{name}", "l"))
    assert caught.value.args == (reason, detail)


# Screening.

HEX = "AB" * 32


@pytest.mark.parametrize(
    ("data", "expected_keys", "contents"),
    [
        (b"", set(), set()),
        (b"a.jpg\nb c.jpg\n", {"a.jpg", "b c.jpg"}, set()),
        (b"\xef\xbb\xbfa.jpg\r\n\r\nb.jpg\r\n", {"a.jpg", "b.jpg"}, set()),
        (HEX.encode(), {HEX}, {HEX.lower()}),
        (b" a.jpg \n#b", {" a.jpg ", "#b"}, set()),
        (b"latin\xe9", {os.fsdecode(b"latin\xe9")}, set()),
        ((HEX + "0").encode(), {HEX + "0"}, set()),
        ("\u2028é\n".encode(), {"\u2028é"}, set()),
    ],
)
def test_parse_exclusions(data, expected_keys, contents):
    assert parse_exclusions(data) == Exclusions(frozenset(expected_keys), frozenset(contents))


def test_read_exclusions(tmp_path):
    (tmp_path / "x").write_bytes(b"a\n")
    assert read_exclusions(f"{tmp_path}/x") == Exclusions(frozenset({"a"}))
    with pytest.raises(DataError) as caught:
        read_exclusions(f"{tmp_path}/gone")
    assert str(caught.value) == f"--exclude {tmp_path}/gone: No such file or directory"
    with pytest.raises(DataError) as caught:
        read_exclusions(str(tmp_path))
    assert str(caught.value) == f"--exclude {tmp_path}: Is a directory"


def excluded(key: str) -> Reject:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return Reject(f"sha256:{digest}", "", "", "excluded", "by --exclude")


def test_screen_image():
    ref = ImageRef("a.jpg", "/in/a.jpg", "cat", item=3)
    none = Exclusions()
    assert screen_image(ref, none, known=None) == ref
    assert screen_image(ref, none, known=frozenset({"cat"})) == ref
    unknown = Reject("a.jpg", "/in/a.jpg#3", "cat", "unknown_label", "not in --class-names")
    assert screen_image(ref, none, known=frozenset()) == unknown
    keys = Exclusions(keys=frozenset({"a.jpg"}))
    assert screen_image(ref, keys, known=frozenset()) == excluded("a.jpg")


def test_screen_reject(tmp_path):
    make(tmp_path, "a.jpg", data=b"secret")
    ref = ImageRef("a.jpg", f"{tmp_path}/a.jpg", "cat")
    reject = Reject("a.jpg", ref.path, "cat", "unknown_label", "")
    content = frozenset({hashlib.sha256(b"secret").hexdigest()})
    other = frozenset({hashlib.sha256(b"other").hexdigest()})
    assert screen_reject(reject, Exclusions(), ref=ref) == reject
    assert screen_reject(reject, Exclusions(contents=other), ref=ref) == reject
    assert screen_reject(reject, Exclusions(contents=content), ref=ref) == excluded("a.jpg")
    assert screen_reject(reject, Exclusions(frozenset({"a.jpg"})), ref=ref) == excluded("a.jpg")


def test_take_once():
    one = ImageRef("a", "/in/a", "cat", size=-1)
    sized = ImageRef("a", "/in/a", "cat", size=5)
    other = ImageRef("b", "/in/b", "cat", size=5)
    reject = Reject("c", "/in/c", "cat", "missing", "")
    broken = ImageRef("c", "/in/c", "cat")  # from a CSV, which does not look
    skipped = Skipped("/in/.x")
    for items in (
        [one, sized, other, reject, skipped, broken, reject, skipped, one],
        [sized, broken, skipped, skipped, reject, reject, other, one],
    ):
        assert sorted(take_once(items), key=repr) == [sized, other, reject, skipped]
    elsewhere = Reject("b", "/elsewhere/b", "cat", "missing", "")
    assert list(take_once([other, elsewhere])) == [other, elsewhere]


RULE = "; keys must be unique: widen --root, or give a CSV with a column key"


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        (
            ImageRef("k", "/1/k", "cat"),
            ImageRef("k", "/2/k", "cat"),
            "two inputs have the key 'k': /1/k (label cat) and /2/k (label cat)",
        ),
        (
            ImageRef("k", "/1/k", "cat"),
            ImageRef("k", "/1/k", "dog"),
            "two inputs have the key 'k': /1/k (label cat) and /1/k (label dog)",
        ),
        (
            ImageRef("k", "/1/k", "cat", "train"),
            ImageRef("k", "/1/k", "cat", "test"),
            "two inputs have the key 'k': /1/k (label cat, split test) and "
            "/1/k (label cat, split train)",
        ),
        (
            ImageRef("k", "/1/k", "cat", group="1"),
            ImageRef("k", "/1/k", "cat", group="2"),
            "two inputs have the key 'k': /1/k (label cat, group 1) and /1/k (label cat, group 2)",
        ),
        (
            ImageRef("k", "/1/k", "cat", features=(("a", 1), ("b", 2))),
            ImageRef("k", "/1/k", "cat", features=(("a", 1), ("b", 3))),
            "two inputs have the key 'k': /1/k (label cat, b 2) and /1/k (label cat, b 3)",
        ),
        (
            ImageRef("train/0", "/1/k", "7", item=0),
            ImageRef("train/0", "/2/k", "7", item=0),
            "two inputs have the key 'train/0': /1/k#0 (label 7) and /2/k#0 (label 7)",
        ),
    ],
)
def test_two_inputs_with_one_key(one, two, message):
    for pair in ([one, two], [two, one]):
        assert refused(take_once, pair) == message + RULE


# The transforms.


def test_list_images(tmp_path):
    make(tmp_path, "in/cat/a.jpg", "in/dog/b.jpg", "in/dog/._c.jpg", "in/dog/n\n.jpg")
    (tmp_path / "in" / "dog" / "broken.jpg").symlink_to("nowhere")
    with open(os.fsencode(tmp_path) + b"/in/dog/\xe9.jpg", "wb"):
        pass
    (tmp_path / "rows.csv").write_text(
        "path,label,key,age:int\nin/cat/z.jpg,cat,cat/z.jpg,4\nin/dog/broken.jpg,dog,dog/broken.jpg,\n"
    )
    make_idx(tmp_path / "idx", train=1, test=1)
    folder = f"{tmp_path}/in"
    inputs = [
        Input(f"{folder}/*/*"),
        Input(f"{folder}/dog/*"),  # all of it twice
        Input(f"{tmp_path}/rows.csv"),
        Input(f"idx:{tmp_path}/idx"),
    ]
    bad = os.fsdecode(b"\xe9.jpg")
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        found = pipeline | beam.Create(inputs) | ListImages(folder, KEY)
        idx_path = f"{tmp_path}/idx/{{}}-images-idx3-ubyte"
        refs = [
            ImageRef("cat/a.jpg", f"{folder}/cat/a.jpg", "cat", size=1),
            ImageRef("dog/b.jpg", f"{folder}/dog/b.jpg", "dog", size=1),
            ImageRef("cat/z.jpg", f"{folder}/cat/z.jpg", "cat", features=(("age", 4),)),
            ImageRef("train/00000000", idx_path.format("train"), "1", "train", "", 6, 0),
            ImageRef("test/00000000", idx_path.format("t10k"), "1", "test", "", 6, 0),
        ]
        rejects = [
            Reject(f"dog/{name}", f"{folder}/dog/{name}", "dog", reason, detail)
            for name, reason, detail in [
                ("n\n.jpg", "bad_name", "the key holds control characters"),
                ("broken.jpg", "missing", "No such file or directory"),
                (bad, "bad_name", "the key is not UTF-8"),
            ]
        ]
        columns = [Columns(f"{tmp_path}/rows.csv", (FeatureSpec("age", "int64", (), 0),))]
        assert_that(found["refs"], equal_to(refs), label="refs")
        assert_that(found["rejects"], equal_to(rejects), label="rejects")
        assert_that(found["columns"], equal_to(columns), label="columns")
        assert_that(found["skipped"], equal_to([Skipped(f"{folder}/dog/._c.jpg")]), label="skipped")


@pytest.mark.parametrize("repeated", [True, False])
def test_one_folder_lists_the_same_with_and_without_grouping(tmp_path, repeated):
    make(tmp_path, "in/cat/a.jpg", "in/dog/b.jpg", "in/dog/._c.jpg", "in/dog/n\n.jpg")
    folder = f"{tmp_path}/in"
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        inputs = pipeline | beam.Create([Input(f"{folder}/**")])
        found = inputs | ListImages(folder, KEY, repeated=repeated)
        refs = [
            ImageRef("cat/a.jpg", f"{folder}/cat/a.jpg", "cat", size=1),
            ImageRef("dog/b.jpg", f"{folder}/dog/b.jpg", "dog", size=1),
        ]
        bad = Reject(
            "dog/n\n.jpg", f"{folder}/dog/n\n.jpg", "dog", "bad_name",
            "the key holds control characters",
        )  # fmt: skip
        assert_that(found["refs"], equal_to(refs), label="refs")
        assert_that(found["rejects"], equal_to([bad]), label="rejects")
        assert_that(found["columns"], equal_to([]), label="columns")
        assert_that(found["skipped"], equal_to([Skipped(f"{folder}/dog/._c.jpg")]), label="skipped")


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["/in/*/*"], False),
        (["idx:/in"], False),
        (["/in/rows.csv"], True),
        (["/in/*/*", "/in/cat/*"], True),
    ],
)
def test_may_repeat(patterns, expected):
    assert may_repeat([Input(pattern) for pattern in patterns]) == expected


def test_list_images_fails_with_what_is_wrong(tmp_path):
    make(tmp_path, "1/cat/a.jpg")
    (tmp_path / "rows.csv").write_text(f"path,label,key\n{tmp_path}/1/cat/a.jpg,dog,cat/a.jpg\n")
    inputs = [Input(f"{tmp_path}/1/*/*"), Input(f"{tmp_path}/rows.csv")]
    message = "^two inputs have the key 'cat/a.jpg': .*label cat.* and .*label dog"
    with pytest.raises(DataError, match=message):
        with beam.Pipeline(runner="FnApiRunner") as pipeline:
            pipeline | beam.Create(inputs) | ListImages(f"{tmp_path}/1", KEY)


def screen(pipeline, refs, rejects, exclude, known):
    listed = {
        "refs": pipeline | "Refs" >> beam.Create(refs),
        "rejects": pipeline | "Rejects" >> beam.Create(rejects),
    }
    return listed | ScreenImages(exclude, known)


def test_screen_images_with_nothing_to_screen():
    refs = [ImageRef("a", "/in/a", "cat")]
    rejects = [Reject("b", "/in/b", "cat", "missing", "")]
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        found = screen(pipeline, refs, rejects, None, None)
        assert_that(found["refs"], equal_to(refs), label="refs")
        assert_that(found["rejects"], equal_to(rejects), label="rejects")
        assert found["exclusions"] == Exclusions()


def test_screen_images(tmp_path):
    make(tmp_path, "keep", "unknown", "control", data=b"harmless")
    make(tmp_path, "secret", "copy", "unknown_copy", "control_copy", data=b"secret")

    def ref(key, label="cat"):
        return ImageRef(key, f"{tmp_path}/{key}", label)

    def reject(key, reason, detail=""):
        return Reject(
            key, f"{tmp_path}/{key}", "cat" if reason == "bad_name" else "fox", reason, detail
        )

    (tmp_path / "exclude").write_text("secret\ngone\nmissing\n")
    refs = [
        ref("keep"),
        ref("secret"),
        ref("copy"),
        ref("unknown", "fox"),
        ref("unknown_copy", "fox"),
    ]
    listed = [
        reject("missing", "bad_name"),
        reject("control", "bad_name"),
        reject("control_copy", "bad_name"),
    ]
    unknown = reject("unknown", "unknown_label", "not in --class-names")
    digest = hashlib.sha256(b"secret").hexdigest()
    keys = frozenset({"secret", "gone", "missing"})
    hidden = [excluded(key) for key in ("secret", "missing", "unknown_copy", "control_copy")]
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        found = screen(pipeline, refs, listed, f"{tmp_path}/exclude", frozenset({"cat"}))
        # The copy is told by its content when it is read.
        assert_that(found["refs"], equal_to([ref("keep"), ref("copy")]), label="refs")
        assert_that(found["rejects"], equal_to([*hidden, unknown, listed[1]]), label="rejects")
        complete = [Exclusions(keys, frozenset({digest}))]
        assert_that(found["exclusions"].pvalue, equal_to(complete), label="exclusions")


def test_files_left_out_for_their_case_are_not_left_out_silently(tmp_path, caplog):
    make(tmp_path, "cat/a.jpg", "cat/b.JPG", "cat/c.Jpg", "cat/d.png")
    pattern = f"{tmp_path}/*/*.jpg"
    items = list(list_glob(Input(pattern), root=str(tmp_path), grouping=Grouping()))
    assert [item.key for item in items] == ["cat/a.jpg"]
    assert [record.getMessage() for record in caplog.records] == [
        f"--input {pattern}: 2 file(s) not matched for upper or lower case, the first is "
        f"'{tmp_path}/cat/b.JPG'; give --input for them, unless you did"
    ]


def test_a_header_full_of_escapes_is_cut_where_it_is_shown(tmp_path):
    # Found by tests/fuzz.py: 200 characters that repr() makes 1,200 of.
    path = tmp_path / "rows.csv"
    path.write_text("a\x1b\ufeff" * 100 + ",label\n", encoding="utf-8")
    with pytest.raises(DataError, match="no column 'path' in the header 'a") as caught:
        list(list_csv(Input(str(path)), grouping=Grouping(), reserved=()))
    assert len(str(caught.value)) < 400 + len(str(path))
