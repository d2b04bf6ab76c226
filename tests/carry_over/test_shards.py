"""Shards on disk and in an object store: all or nothing, and never a wrong row."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rows import group, row
from tasks.carry_over import shards as shards_module
from tasks.carry_over.filter import FilterRules, carry_over
from tasks.carry_over.shards import ShardError, read_shards, write_shards
from tasks.trajectory import BATCH_SCHEMA, SCHEMA, Status, to_record_batch

ROWS = [
    row("p1.0", 0, segments=[(3, 0), (2, 4)], accuracy=1.0),
    row("p1.0", 1, segments=[(4, 1)]),
    row("p2.0", 0),
    row("p2.0", 1, segments=[(2, 4)], status=Status.FAILED, ground_truth="π = 3,14… 数 \U0001f600 \x00 \n"),
]


@pytest.fixture
def directory(tmp_path):
    write_shards(ROWS, str(tmp_path / "d"), cursor=7, fingerprints={"model": "x"}, extra={"version": 4})
    return tmp_path / "d"


def shard_files(directory):
    return sorted(Path(directory).glob("*.arrow"))


def test_rows_and_facts_come_back_as_they_were(directory):
    shards = read_shards(str(directory))
    assert list(shards) == ROWS
    assert list(shards) == ROWS
    manifest = shards.manifest
    assert (manifest.rows, manifest.tokens, manifest.cursor) == (4, 11, 7)
    assert (manifest.fingerprints, manifest.extra) == ({"model": "x"}, {"version": 4})


def test_plain_arrow_readers_read_the_files(directory):
    with pa.ipc.open_file(shard_files(directory)[0]) as reader:
        assert reader.schema.equals(SCHEMA)
        assert reader.read_all().num_rows == 4


def test_training_rows_keep_advantage_and_mask(tmp_path):
    batch = carry_over(group("g", [0.0, 1.0]), FilterRules(2, 1, version=9, max_version_lag=2)).batch
    write_shards(batch, str(tmp_path), schema=BATCH_SCHEMA)
    assert list(read_shards(str(tmp_path))) == batch
    assert batch[0].masked_tokens == 4


def test_no_rows_and_very_long_rows(tmp_path):
    write_shards([], str(tmp_path / "none"))
    assert list(read_shards(str(tmp_path / "none"))) == []
    long = row(segments=[(200_000, 3)])
    write_shards([long, row("h")], str(tmp_path / "long"), max_shard_tokens=1000)
    assert list(read_shards(str(tmp_path / "long"))) == [long, row("h")]
    assert len(shard_files(tmp_path / "long")) == 2


def test_rows_as_plain_mappings_are_written(tmp_path):
    write_shards([{name: getattr(row, name) for name in SCHEMA.names} for row in ROWS], str(tmp_path / "a"))
    write_shards(to_record_batch(ROWS).to_pylist(), str(tmp_path / "b"))
    assert list(read_shards(str(tmp_path / "a"))) == list(read_shards(str(tmp_path / "b"))) == ROWS


def test_broken_rows_are_quarantined_on_writing_by_rule(tmp_path):
    broken = row("bad", 0, segments=[(3, 0)], logprobs=[-1.0])
    write_shards([ROWS[0], broken, ROWS[1]], str(tmp_path))
    shards = read_shards(str(tmp_path))
    assert list(shards) == ROWS[:2]
    (record,) = shards.quarantined
    assert (record.row, record.group_id, record.tokens) == (1, "bad", 3)
    assert "3 response tokens but 1 log-probs" in record.rule


def test_broken_and_repeated_rows_are_quarantined_on_reading_by_file_row_and_rule(tmp_path, monkeypatch):
    broken = row("bad", 0, segments=[(3, 0)], status=Status.PENDING)
    monkeypatch.setattr("tasks.carry_over.shards.violations", lambda _: [])
    write_shards([ROWS[0], broken, ROWS[0], ROWS[1]], str(tmp_path))
    monkeypatch.undo()
    shards = read_shards(str(tmp_path))
    assert list(shards) == ROWS[:2]
    assert [(record.file, record.row) for record in shards.quarantined] == [
        (shard_files(tmp_path)[0].name, i) for i in (1, 2)
    ]
    assert "a pending trajectory has tokens" in shards.quarantined[0].rule
    assert "stands twice" in shards.quarantined[1].rule


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _edit_manifest(directory, **changes):
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (lambda d: (d / "manifest.json").unlink(), "manifest.json", "never completely written"),
        (lambda d: (d / "manifest.json").write_text("{"), "manifest.json", "not JSON"),
        (lambda d: (d / "manifest.json").write_text("[]"), "manifest.json", "not a shard manifest"),
        (lambda d: _edit_manifest(d, schema_version=99), "manifest.json", "schema version 99, this code reads 1"),
        (lambda d: _edit_manifest(d, cursor=8), "manifest.json", "its content is not what it says"),
        (lambda d: _flip(shard_files(d)[0]), ".arrow", "is not what manifest.json says"),
        (lambda d: os.truncate(shard_files(d)[0], 100), ".arrow", "is not what manifest.json says"),
        (lambda d: shard_files(d)[0].unlink(), ".arrow", "named by manifest.json but missing"),
    ],
)
def test_damage_is_an_error_that_names_the_file(directory, damage, file, message):
    damage(directory)
    with pytest.raises(ShardError, match=message) as error:
        list(read_shards(str(directory)))
    assert file in str(error.value)


@pytest.mark.parametrize("name", ["../other.arrow", "/etc/passwd", "a/b.arrow", "..", ""])
def test_manifest_cannot_name_a_file_outside_its_directory(directory, name):
    content = json.loads((directory / "manifest.json").read_text())
    content["files"][0]["name"] = name
    del content["sha256"]
    (directory / "manifest.json").write_text(json.dumps(content | {"sha256": shards_module._digest(content)}))
    with pytest.raises(ShardError, match="not a file of this directory"):
        read_shards(str(directory))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255), cut=st.booleans(), manifest=st.booleans())
def test_no_damage_anywhere_gives_a_wrong_row(tmp_path_factory, where, value, cut, manifest):
    directory = tmp_path_factory.mktemp("fuzz")
    write_shards(ROWS, str(directory), cursor=7, max_shard_tokens=12)
    files = [directory / "manifest.json"] if manifest else shard_files(directory)
    path = files[int(where * len(files))]
    content = bytearray(path.read_bytes())
    position = int(where * len(content))
    original = bytes(content)
    if cut:
        del content[position:]
    else:
        content[position] = value
    path.write_bytes(content)
    if bytes(content) == original:
        assert list(read_shards(str(directory))) == ROWS
        return
    fault = None
    try:
        shards = read_shards(str(directory))
        read = (list(shards), shards.manifest.cursor)
    except ShardError as error:
        fault = str(error)
    # Either the damage is named, or it changed nothing, as one space of the manifest for another.
    assert path.name in fault if fault else read == (ROWS, 7)


def test_writing_again_replaces_all_and_a_crash_before_the_manifest_changes_nothing(directory, monkeypatch):
    put = shards_module._put

    def crash_at_manifest(filesystem, path, content):
        if path.endswith("manifest.json"):
            raise KeyboardInterrupt
        put(filesystem, path, content)

    monkeypatch.setattr(shards_module, "_put", crash_at_manifest)
    with pytest.raises(KeyboardInterrupt):
        write_shards(ROWS[:1], str(directory))
    monkeypatch.undo()
    assert list(read_shards(str(directory))) == ROWS
    write_shards(ROWS[2:], str(directory))
    assert list(read_shards(str(directory))) == ROWS[2:]
    assert len(shard_files(directory)) == 1


def test_concurrent_readers_see_the_same(directory):
    results = []
    threads = [threading.Thread(target=lambda: results.append(list(read_shards(str(directory))))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [ROWS] * 8


def test_object_store_over_the_real_s3_protocol(s3):
    write_shards(ROWS, f"{s3}/run/carry/0001", cursor=3, max_shard_tokens=12)
    shards = read_shards(f"{s3}/run/carry/0001")
    assert (list(shards), shards.manifest.cursor) == (ROWS, 3)
    write_shards(ROWS[:1], f"{s3}/run/carry/0001")
    assert list(read_shards(f"{s3}/run/carry/0001")) == ROWS[:1]
    with pytest.raises(ShardError, match="run/none/manifest.json: missing"):
        read_shards(f"{s3}/run/none")


MILLION_ROWS = """
import resource, sys
sys.path[:0] = ["tests/carry_over"]
from rows import row
from tasks.carry_over.shards import read_shards, write_shards
one = row("g", 0, segments=[(20, 0)])
def rows():
    import dataclasses
    for number in range(int(sys.argv[2])):
        object.__setattr__(one, "group_id", str(number))
        yield dataclasses.replace(one)
write_shards(rows(), sys.argv[1], max_shard_tokens=500_000)
count = sum(1 for _ in read_shards(sys.argv[1]))
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path):
    """Written and read as a stream: ten times the rows, the same memory but for the keys seen (for uniqueness)."""
    peaks = []
    for count in (20_000, 200_000):
        command = [sys.executable, "-c", MILLION_ROWS, str(tmp_path / str(count)), str(count)]
        output = subprocess.check_output(command, text=True, cwd=Path(__file__).parents[2])
        rows, peak = map(int, output.split())
        assert rows == count
        peaks.append(peak)
    keys_mib = 180_000 * 200 / 2**20
    assert peaks[1] - peaks[0] < keys_mib + 60


def test_arrow_columns_hold_what_the_schema_says():
    batch = to_record_batch(ROWS)
    assert batch.schema == SCHEMA
    assert batch.column("segments").to_pylist()[0] == [
        {"start": 0, "length": 3, "version": 0},
        {"start": 3, "length": 2, "version": 4},
    ]
