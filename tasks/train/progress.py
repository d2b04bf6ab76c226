"""What a train stage saves between updates, so that a retry repeats none of them: `<run>/training/0007/`.

    0003/           master weights and moments after three mini-batches (see checkpoint.py)
    progress.json   which of these is complete, written last, and what the updates before measured

Only a stage on the same batch and policy goes on from it; proximal log-probs are those of the policy it started from.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import fsspec
import torch
import torch.distributed as dist

from tasks.faults import named_faults
from tasks.report.progress import say
from tasks.storage import is_local, write_json
from tasks.train.checkpoint import OptimizerError, load_optimizer, save_optimizer
from tasks.train.fsdp import PolicyModel


@dataclass
class TrainProgress:
    """`done`: mini-batches that are behind us, skipped ones included; `measured`: by each update, in order."""

    batch: str  # sha256 of the batch's manifest
    policy: str  # fingerprint of the policy the stage started from
    done: int = 0
    updates: int = 0  # of the whole run
    skipped: int = 0
    measured: list[dict[str, float]] = field(default_factory=list)


def save_progress(model: PolicyModel, optimizer: torch.optim.AdamW, place: str, progress: TrainProgress) -> None:
    """Write the state after `progress.done` mini-batches to a local path or fsspec URL; called by every rank."""
    name = f"{progress.done:04d}"
    folder = place.removeprefix("file://") if is_local(place) else _shared_folder()
    save_optimizer(model, optimizer, f"{folder}/{name}", progress.policy, progress.updates)
    if dist.get_rank() == 0:
        with named_faults(place):
            filesystem, root = fsspec.core.url_to_fs(place)
            if not is_local(place):
                filesystem.put(f"{folder}/{name}/", f"{root}/{name}/", recursive=True)
                shutil.rmtree(folder)
            write_json(f"{place}/progress.json", asdict(progress))
            for path in filesystem.ls(root, detail=False, refresh=True):
                if path.rstrip("/").rsplit("/", 1)[-1] not in (name, "progress.json"):
                    filesystem.rm(path, recursive=True)
    dist.barrier()


def load_progress(
    model: PolicyModel, optimizer: torch.optim.AdamW, place: str, started: TrainProgress
) -> TrainProgress:
    """The progress saved for the batch and policy of `started`, loaded into model and optimizer; else `started`.

    Called by every rank. Progress that is damaged is said and not used.
    """
    saved = _read_progress(place)
    if saved is None or (saved.batch, saved.policy) != (started.batch, started.policy):
        return started
    folder = f"{place.removeprefix('file://')}/{saved.done:04d}"
    if not is_local(place):
        folder = f"{_shared_folder()}/{saved.done:04d}"
        if dist.get_rank() == 0:
            with named_faults(place):
                filesystem, root = fsspec.core.url_to_fs(place)
                filesystem.get(f"{root}/{saved.done:04d}/", f"{folder}/", recursive=True)
        dist.barrier()
    try:
        load_optimizer(model, optimizer, folder, saved.policy)
    except OptimizerError as error:
        if dist.get_rank() == 0:
            say(f"train: what an earlier attempt saved is not used: {error}")
        return started
    if dist.get_rank() == 0:
        say(f"train: going on from {place} after {saved.done} mini-batches")
    return saved


def _read_progress(place: str) -> TrainProgress | None:
    filesystem, root = fsspec.core.url_to_fs(place)
    try:
        with named_faults(place):
            return TrainProgress(**json.loads(filesystem.cat_file(f"{root}/progress.json")))
    except FileNotFoundError:
        return None


def _shared_folder() -> str:
    """One temporary folder for all ranks of this machine."""
    names = [tempfile.mkdtemp(prefix="training-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return str(Path(names[0]))
