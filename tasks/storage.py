"""Where a run's files are, and how a stage's directories get there.

    <output>/<name>/rollouts/0007/      every trajectory that iteration 7 held at its cut
    <output>/<name>/batch/0007/         what iteration 7 trained on
    <output>/<name>/metrics/0007.json   what iteration 7 measured
    <output>/<name>/responses/0007.parquet  what became of each response in iteration 7
    <output>/<name>/decks/0007/         pictures of the stages of iteration 7
    <output>/<name>/answers/0006/       every answer of the evaluation before iteration 6, a file for each held-out set
    <output>/<name>/flush/0007/         what iteration 7 had sampled at its last flush; gone when it is complete
    <output>/<name>/training/0007/      weights and moments between its updates; gone when it is complete
    <output>/<name>/carry/0008/         the trajectories that iteration 8 continues
    <output>/<name>/policy/0005/        the weights of version 5
    <output>/<name>/optimizer/0005/     the optimizer after the update that made version 5
    <output>/<name>/state/0008.json     what iteration 8 starts from; written when all the above is complete
    <output>/<name>/best.json           which of the policies was best so far
    <output>/<name>/recipe.json         every setting of the run

A path on this machine is written in place. A URL is written through a temporary directory that Flyte uploads.
"""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from flytekit.types.directory import FlyteDirectory

from tasks.config import ConfigError, RunConfig
from tasks.faults import RecoverableError, named_faults


@dataclass
class Output:
    """A directory being written: files go to `path`; `directory` is what the Flyte task returns."""

    path: str
    directory: FlyteDirectory = field(repr=False)


def is_local(url: str) -> bool:
    return "://" not in url or url.startswith("file://")


@contextmanager
def stage_output(config: RunConfig, stage: str, number: int) -> Iterator[Output]:
    """The directory of a stage's result, e.g. `runs/sandbox/carry/0008`. The writer makes it complete or not at all."""
    url = f"{config.run_directory}/{stage}/{number:04d}"
    if is_local(url):
        path = Path(url.removeprefix("file://")).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        yield Output(str(path), existing_directory(url))
        return
    path = tempfile.mkdtemp(prefix=f"{stage}-{number:04d}-") + "/out"
    yield Output(path, FlyteDirectory(path, remote_directory=url))


def local_log(config: RunConfig) -> Path:
    """Where libraries' own output goes: beside the run, or on this machine for a run at a URL."""
    base = config.run_directory if is_local(config.run_directory) else f"{tempfile.gettempdir()}/{config.name}"
    return Path(base.removeprefix("file://"), "libraries.log")


def existing_directory(url: str) -> FlyteDirectory:
    """A directory that is already where it belongs, as a Flyte value: nothing is copied."""
    if is_local(url):
        return FlyteDirectory(str(Path(url.removeprefix("file://")).absolute()), remote_directory=False)
    return FlyteDirectory(url)


def free_directory(base: str) -> str:
    """`base`, or the first of base-2, base-3, … that does not exist."""
    filesystem, root = fsspec.core.url_to_fs(base)
    number = 1
    while filesystem.exists(root if number == 1 else f"{root}-{number}"):
        number += 1
    return base if number == 1 else f"{base}-{number}"


def fetch_model(path: str, revision: str | None = None) -> str:
    """A model directory on this machine: the path itself, or a copy of what is at a URL or on the Hugging Face hub."""
    if is_local(path):
        local = path.removeprefix("file://")
        return _from_hub(path, revision) if _HUB_ID.fullmatch(path) and not Path(local).exists() else local
    with named_faults(path):
        filesystem, root = fsspec.core.url_to_fs(path)
        if not filesystem.exists(root):
            raise ConfigError(f"{path}: there is no model")
        copy = tempfile.mkdtemp(prefix="model-")
        filesystem.get(f"{root}/", f"{copy}/", recursive=True)
    return copy


_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")


def _from_hub(name: str, revision: str | None) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    here = f"{name}: there is no such directory here"
    try:
        return snapshot_download(name, revision=revision, allow_patterns=list(_MODEL_FILES), ignore_patterns=["*/*"])
    except GatedRepoError as error:
        raise ConfigError(f"{here}, and on the hub its terms must be accepted; do so, and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{here}, and the model on the hub has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"{here}, and no such model on the hub; correct the name, or set HF_TOKEN") from error
    except Exception as error:
        raise RecoverableError(
            f"{here}, and the hub cannot be reached for it ({type(error).__name__}: {str(error).splitlines()[0]}); "
            "download the model and give its directory, or try again"
        ) from error


@dataclass(frozen=True)
class RunState:
    """What iteration `iteration` starts from: directories, named relative to the run's own."""

    iteration: int
    policy: str
    carry: str
    optimizer: str | None = None


def write_state(run_directory: str, state: RunState) -> None:
    """Make it possible to resume before `state.iteration`."""
    write_json(f"{run_directory}/state/{state.iteration:04d}.json", vars(state))


def latest_state(run_directory: str) -> RunState | None:
    """The last complete state of a run; None if there is no run in that directory."""
    found = states(run_directory)
    return found[-1] if found else None


def states(run_directory: str) -> list[RunState]:
    """Every complete state of a run that is kept, the newest last."""
    return [RunState(**content) for content in _numbered_json(run_directory, "state")]


def has_samples(run_directory: str) -> bool:
    """Whether anything was ever sampled in a run of that directory."""
    with named_faults(run_directory):
        filesystem, root = fsspec.core.url_to_fs(run_directory)
        filesystem.invalidate_cache()
        return any(filesystem.glob(f"{root}/{stage}/[0-9]*/*") for stage in ("flush", "rollouts"))


def set_aside(run_directory: str, state: RunState) -> None:
    """Never start from this state again; it is kept under another name."""
    with named_faults(run_directory):
        filesystem, root = fsspec.core.url_to_fs(f"{run_directory}/state")
        filesystem.mv(f"{root}/{state.iteration:04d}.json", f"{root}/damaged-{state.iteration:04d}.json")


def remove_superseded(run_directory: str, keep_last: int, keep_every: int, best: int | None = None) -> None:
    """Remove what no kept state needs: states older than the newest `keep_last` that are no multiple of `keep_every`,
    nor that of iteration `best`.

    States go first, so that none that is left ever names a directory that is gone. Metrics stay.
    """
    known = states(run_directory)
    kept = [
        state
        for state in known[:-keep_last]
        if (keep_every and state.iteration % keep_every == 0) or state.iteration == best
    ]
    kept += known[-keep_last:]
    filesystem, root = fsspec.core.url_to_fs(run_directory)
    needed = {name for state in kept for name in (state.policy, state.carry, state.optimizer)}
    needed |= {f"{stage}/{state.iteration - 1:04d}" for state in kept for stage in ("rollouts", "batch", "decks")}
    for state in known:
        if state not in kept:
            filesystem.rm_file(f"{root}/state/{state.iteration:04d}.json")
    newest = known[-1]
    for path in [*filesystem.glob(f"{root}/flush/[0-9]*"), *filesystem.glob(f"{root}/training/[0-9]*")]:
        if int(path.rsplit("/", 1)[-1]) < newest.iteration:
            filesystem.rm(path, recursive=True)
    for stage in ("policy", "optimizer", "carry", "rollouts", "batch", "decks"):
        for path in filesystem.glob(f"{root}/{stage}/[0-9]*"):
            directory = f"{stage}/{path.rsplit('/', 1)[-1]}"
            if directory not in needed and directory <= f"{stage}/{newest.iteration:04d}":
                filesystem.rm(path, recursive=True)


def read_metrics(run_directory: str) -> list[dict[str, float]]:
    """The metrics of every iteration so far, in order."""
    return _numbered_json(run_directory, "metrics")


def _numbered_json(run_directory: str, kind: str) -> list[dict]:
    with named_faults(f"{run_directory}/{kind}"):
        filesystem, root = fsspec.core.url_to_fs(f"{run_directory}/{kind}")
        filesystem.invalidate_cache()
        paths = sorted(filesystem.glob(f"{root}/[0-9]*.json"), key=lambda path: int(Path(path).stem))
        contents = filesystem.cat(paths) if paths else {}  # an object store is asked for all of them at once
    return [json.loads(contents[path]) for path in paths]


def write_json(url: str, content: dict) -> None:
    """Write a small JSON file; a reader sees all of it or none."""
    write_file(url, json.dumps(content, indent=1).encode())


def read_json(url: str) -> dict | None:
    """What `write_json` wrote; None if there is no such file."""
    with named_faults(url):
        filesystem, root = fsspec.core.url_to_fs(url)
        try:
            return json.loads(filesystem.cat_file(root))
        except FileNotFoundError:
            return None


def write_arrow(url: str, table: pa.Table) -> None:
    """Write an Arrow IPC file; a reader sees all of it or none."""
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    write_file(url, sink.getvalue())


def write_table(url: str, table: pa.Table) -> None:
    """Write a parquet file; a reader sees all of it or none."""
    sink = io.BytesIO()
    pq.write_table(table, sink)
    write_file(url, sink.getvalue())


def write_file(url: str, content: bytes) -> None:
    """Write a small file at a local path or fsspec URL; a reader sees all of it or none."""
    with named_faults(url):
        _write_file(url, content)


def _write_file(url: str, content: bytes) -> None:
    if not is_local(url):
        with fsspec.open(url, "wb") as file:
            file.write(content)
        return
    path = Path(url.removeprefix("file://"))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
