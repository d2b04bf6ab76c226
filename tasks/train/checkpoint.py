"""What train writes: the policy as a Hugging Face directory, the optimizer as a distributed checkpoint.

policy/     safetensors in the names and dtypes of the model it came from, its config and tokenizer; `policy.json` last
optimizer/  float32 master weights and AdamW moments (torch.distributed.checkpoint); `optimizer.json` last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from tasks.policy import MANIFEST, PolicyError, file_sha256, publish, read_policy, seal_policy
from tasks.train.fsdp import PolicyModel

MAX_FILE_BYTES = 4 * 2**30
OPTIMIZER_MANIFEST = "optimizer.json"


class OptimizerError(ValueError):
    """A directory is not the optimizer that belongs to the policy; the message names the file and what to do."""


@dataclass(frozen=True)
class OptimizerRecord:
    """`policy`: fingerprint of the policy the moments belong to; `updates`: made since the run began."""

    policy: str
    updates: int
    files: dict[str, str]


def save_policy(model: PolicyModel, previous_directory: str, directory: str, version: int) -> str:
    """Write the model as the next policy: called by every rank, written by rank 0. Returns its fingerprint.

    Tensors are gathered one at a time, so that no rank ever holds the whole model.
    """
    dtypes = _weight_dtypes(previous_directory)
    unfinished = Path(f"{directory}.writing")
    writing = dist.get_rank() == 0
    if writing:
        shutil.rmtree(unfinished, ignore_errors=True)
        weights = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", MANIFEST)
        shutil.copytree(previous_directory, unfinished, ignore=weights)
    held: dict[str, torch.Tensor] = {}
    files: list[str] = []
    index: dict[str, str] = {}

    def write_held() -> None:
        files.append(f"model-{len(files) + 1:05d}.safetensors")
        save_file(held, unfinished / files[-1], metadata={"format": "pt"})
        index.update(dict.fromkeys(held, files[-1]))
        held.clear()

    for name, tensor in _full_tensors(model):
        if name not in dtypes:
            raise PolicyError(f"{previous_directory}: the model has a tensor {name}, which its weight files have not")
        if not writing:
            continue
        if held and sum(other.nbytes for other in held.values()) + tensor.nbytes > MAX_FILE_BYTES:
            write_held()
        held[name] = tensor.to(dtypes[name]).contiguous()
    if writing:
        write_held()
        (unfinished / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index}, indent=1)
        )
        seal_policy(str(unfinished), version)
        publish(str(unfinished), directory)
    dist.barrier()
    return read_policy(directory).fingerprint


def _weight_dtypes(directory: str) -> dict[str, torch.dtype]:
    dtypes = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                dtypes[name] = getattr(torch, _TORCH_NAMES.get(file.get_slice(name).get_dtype(), "float32"))
    return dtypes


_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def _full_tensors(model: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter once (tied ones under their first name), whole, on the CPU; a collective for all ranks."""
    for name, parameter in model.model.named_parameters():
        tensor = parameter.detach()
        yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def save_optimizer(
    model: PolicyModel, optimizer: torch.optim.Optimizer, directory: str, policy_fingerprint: str, updates: int
) -> None:
    """Write master weights, moments and the number of updates; called by every rank."""
    unfinished = f"{directory}.writing"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        Path(unfinished).mkdir(parents=True)
    dist.barrier()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        files = {path.name: file_sha256(path) for path in sorted(Path(unfinished).iterdir())}
        record = OptimizerRecord(policy_fingerprint, updates, files)
        Path(unfinished, OPTIMIZER_MANIFEST).write_text(json.dumps(asdict(record), indent=1))
        publish(unfinished, directory)
    dist.barrier()


def load_optimizer(
    model: PolicyModel, optimizer: torch.optim.Optimizer, directory: str, policy_fingerprint: str
) -> int:
    """Load what `save_optimizer` wrote, on any number of ranks; returns the number of updates made.

    Raises OptimizerError if it is incomplete or damaged, or belongs to another policy. Every file is checked against
    its sha256 before torch reads it.
    """
    manifest = Path(directory, OPTIMIZER_MANIFEST)
    try:
        record = OptimizerRecord(**json.loads(manifest.read_text()))
    except FileNotFoundError:
        raise OptimizerError(
            f"{manifest}: missing, so the optimizer was never completely written; use another"
        ) from None
    except (ValueError, TypeError) as error:
        raise OptimizerError(f"{manifest}: not an optimizer manifest: {error}") from error
    if record.policy != policy_fingerprint:
        raise OptimizerError(
            f"{directory}: belongs to the policy {record.policy[:12]}, but the policy loaded is "
            f"{policy_fingerprint[:12]}; use policy and optimizer of the same state"
        )
    for name, digest in record.files.items():
        path = Path(directory, name)
        if Path(name).name != name or not path.is_file() or file_sha256(path) != digest:
            raise OptimizerError(f"{path}: its content is not what {OPTIMIZER_MANIFEST} says; use another state")
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return record.updates
