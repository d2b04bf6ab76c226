"""Faults of storage: transient ones are retried, lasting ones named with their remedy, and neither loses anything."""

import errno
import os
import subprocess
import traceback

import fsspec
import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from conftest import SECRET
from faulty_proxy import faulty_proxy
from rows import group
from tasks.carry_over.shards import read_shards, write_shards
from tasks.faults import RecoverableError, StorageError, named_faults, task_faults
from tasks.storage import read_metrics, write_json

ROWS = [row for number in range(20) for row in group(f"g{number}", [0.0, 1.0])]
TRANSIENT = ("reset", "reset-upload", "500", "503", "slow-down", "short-read")


@pytest.fixture
def proxied(s3, s3_server, monkeypatch):
    """A bucket behind a proxy, reached by connections of its own."""
    with faulty_proxy(s3_server["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
        fsspec.filesystem("s3").clear_instance_cache()
        yield proxy, f"{s3}/rows"
    fsspec.filesystem("s3").clear_instance_cache()


def first_of_each_kind(faults):
    """Each (method, path) meets these faults one after the other, then none."""
    left = {}

    def fault(method, path):
        waiting = left.setdefault((method, path), list(faults))
        return waiting.pop(0) if waiting else None

    return fault


@pytest.mark.parametrize("kind", TRANSIENT)
def test_a_fault_that_passes_changes_nothing(proxied, kind):
    proxy, directory = proxied
    proxy.fault = first_of_each_kind([kind])
    write_shards(ROWS, directory)
    assert list(read_shards(directory)) == ROWS
    write_json(f"{directory}/metrics/0000.json", {"iteration": 0.0})
    assert read_metrics(directory) == [{"iteration": 0.0}]
    assert proxy.injected.count(kind) >= 4


@pytest.mark.parametrize("kind", ["reset", "500", "slow-down"])
def test_a_fault_that_stays_is_one_that_flyte_retries_and_names_bucket_and_key(proxied, kind, monkeypatch):
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    proxy, directory = proxied
    write_shards(ROWS, directory)
    proxy.fault = lambda method, path: kind
    with (
        pytest.raises(FlyteRecoverableException, match=r"bucket-\d+/rows/manifest.json: storage failed"),
        task_faults("run"),
    ):
        read_shards(directory)


def test_a_store_that_refuses_connections_is_one_that_flyte_retries(proxied, monkeypatch):
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.filesystem("s3").clear_instance_cache()
    with (
        pytest.raises(FlyteRecoverableException, match="bucket/rows/manifest.json: storage failed"),
        task_faults("run"),
    ):
        read_shards("s3://bucket/rows")


def test_a_store_that_never_answers_is_one_that_flyte_retries(proxied, monkeypatch):
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 0.5)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.filesystem("s3").clear_instance_cache()
    proxy, directory = proxied
    proxy.fault = lambda method, path: "timeout"
    with pytest.raises(FlyteRecoverableException, match="storage failed"), task_faults("run"):
        read_shards(directory)


def test_an_upload_that_fails_leaves_the_rows_of_before(proxied, monkeypatch):
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    proxy, directory = proxied
    write_shards(ROWS, directory)
    proxy.fault = lambda method, path: "reset-upload" if method == "PUT" and path.endswith("manifest.json") else None
    with pytest.raises(RecoverableError):
        write_shards(ROWS[:4], directory)
    proxy.fault = lambda method, path: None
    assert list(read_shards(directory)) == ROWS


def test_denied_access_fails_at_once_with_bucket_key_and_remedy(proxied):
    proxy, directory = proxied
    write_shards(ROWS, directory)
    proxy.fault = lambda method, path: "denied"
    proxy.injected.clear()
    with pytest.raises(
        StorageError, match=r"bucket-\d+/rows/manifest.json: permission is denied: check .* credentials"
    ):
        read_shards(directory)
    assert len(proxy.injected) <= 2


@pytest.mark.parametrize("kind", ["denied", "500", "reset"])
def test_no_error_text_holds_a_secret(proxied, kind, monkeypatch):
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    proxy, directory = proxied
    proxy.fault = lambda method, path: kind
    with pytest.raises((StorageError, RecoverableError)) as caught:
        read_shards(directory)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_bucket_that_is_not_there_fails_at_once_with_the_remedy(proxied):
    with pytest.raises(
        StorageError, match="absent-bucket/rows/.*: there is no such bucket: create it, or correct the URL"
    ):
        write_shards(ROWS, "s3://absent-bucket/rows")


def test_a_listing_that_is_stale_shows_no_old_state(proxied):
    _, directory = proxied
    write_json(f"{directory}/metrics/0000.json", {"iteration": 0.0})
    assert len(read_metrics(directory)) == 1
    other = fsspec.filesystem("s3", skip_instance_cache=True)  # another process writes
    other.pipe_file(f"{directory}/metrics/0001.json", b'{"iteration": 1.0}')
    assert len(read_metrics(directory)) == 2


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_is_named_with_the_remedy_and_leaves_what_was_there(small_disk):
    directory = str(small_disk / "carry")
    write_shards(ROWS, directory)
    before = sorted(os.listdir(directory))
    many = [row for number in range(20_000) for row in group(f"h{number}", [0.0, 1.0])]
    with pytest.raises(StorageError, match=r"disk/carry/.*: the disk is full: free space, or move `output`"):
        write_shards(many, directory)
    assert sorted(os.listdir(directory)) == before
    assert list(read_shards(directory)) == ROWS


def test_a_directory_that_cannot_be_written_is_named_with_the_remedy(tmp_path):
    if os.geteuid() == 0:
        place = tmp_path / "sealed"
        place.mkdir()
        if subprocess.run(["chattr", "+i", place], stderr=subprocess.DEVNULL).returncode:
            pytest.skip("root may write everywhere here, and chattr is not allowed")
        try:
            with pytest.raises(StorageError, match="sealed.*: permission is denied: check the rights of this user"):
                write_shards(ROWS, str(place / "carry"))
        finally:
            subprocess.run(["chattr", "-i", place], check=True)
    else:
        tmp_path.chmod(0o500)
        with pytest.raises(StorageError, match="permission is denied: check the rights of this user"):
            write_shards(ROWS, str(tmp_path / "carry"))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.EROFS, "Read-only file system", "/run/x"), StorageError),
        (OSError(errno.EIO, "I/O error"), RecoverableError),
        (ConnectionResetError(errno.ECONNRESET, "reset"), RecoverableError),
        (RuntimeError("I/O error: No space left on device (os error 28)"), StorageError),
        (RuntimeError("rank 1 of 2 failed: OSError: [Errno 28] No space left on device"), StorageError),
        (FileNotFoundError(errno.ENOENT, "No such file"), FileNotFoundError),
        (ValueError("a fault of the program"), ValueError),
    ],
)
def test_faults_are_sorted_by_what_a_retry_can_do(error, raised):
    with pytest.raises(raised) as caught, named_faults("place"):
        raise error
    assert type(caught.value) is raised


def test_only_what_a_retry_can_mend_is_retried():
    for error, raised in ((RecoverableError("gone"), FlyteRecoverableException), (StorageError("full"), StorageError)):
        with pytest.raises(raised), task_faults("run"):
            raise error
