"""Reading Parquet: the values, the faults, and no thread that outlives it."""

import io
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from transforms.parquet import read_parquet

ROOT = Path(__file__).resolve().parents[1]
TABLE = pyarrow.table({"key": ["a", "b"], "sums": [[1, 2], [3]], "size": [7, 8]})

READ = """
import os, sys
import pyarrow.parquet
from transforms.parquet import read_parquet
data = open(sys.argv[1], "rb").read()
before = os.listdir("/proc/self/task")
for _ in range(5):
    assert read_parquet(data, columns=["key"]).num_rows == 2
print(os.listdir("/proc/self/task") == before)
"""


def write(table, **options):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer, write_page_checksum=True, **options)
    return buffer.getvalue()


def test_values_come_back():
    assert read_parquet(write(TABLE)) == TABLE
    assert read_parquet(write(TABLE), columns=["sums", "key"]) == TABLE.select(["sums", "key"])


@pytest.mark.parametrize("data", [b"", b"PAR1", write(TABLE)[:-9], bytes(100)])
def test_what_is_none_is_refused(data):
    with pytest.raises((pyarrow.ArrowException, OSError)):
        read_parquet(data)


def test_a_damaged_page_is_refused():
    data = bytearray(write(TABLE, compression="none", use_dictionary=False))
    data[data.index(b"\x01\x00\x00\x00a") + 4] ^= 1
    with pytest.raises(OSError, match="CRC checksum verification failed"):
        read_parquet(bytes(data))


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(pyarrow.ArrowInvalid, match="^no column 'label'$"):
        read_parquet(write(TABLE), columns=["size", "shard", "label"])


def test_two_columns_of_one_name_are_refused():
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, names=["key", "label", "key"])
    for columns in (None, ["key"]):
        with pytest.raises(pyarrow.ArrowInvalid, match="^two columns are named 'key'$"):
            read_parquet(write(table), columns=columns)
    assert read_parquet(write(table), columns=["label"]).column_names == ["label"]


def test_a_name_that_is_not_utf8_is_damage():
    data = write(TABLE).replace(b"size", b"si\xffe")
    for columns in (None, ["key"]):
        with pytest.raises((pyarrow.ArrowException, OSError)):
            read_parquet(data, columns=columns)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list threads")
def test_no_thread_is_started(tmp_path):
    # One that still held the file at the interpreter's end aborted the process.
    (tmp_path / "a.parquet").write_bytes(write(TABLE))
    command = [sys.executable, "-c", READ, tmp_path / "a.parquet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
