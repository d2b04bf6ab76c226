"""What train writes: the policy as a Hugging Face directory, the optimizer as a distributed checkpoint.

policy/     safetensors in the names and dtypes of the model it came from, its config and tokenizer; `policy.json` last
optimizer/  float32 master weights and AdamW moments (torch.distributed.checkpoint, one safetensors file a rank);
            `optimizer.json` last

Nothing is pickled: torch.distributed.checkpoint's own format unpickles its `.metadata`, so safetensors are used.
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
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from tasks.config import RunConfig
from tasks.policy import MANIFEST, OPTIMIZER_MANIFEST, PolicyError, file_sha256, publish, read_policy, seal_policy
from tasks.train.fsdp import PolicyModel

MAX_FILE_BYTES = 4 * 2**30
MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerError(ValueError):
    """A directory is not the optimizer that belongs to the policy; the message names the file and what to do."""


@dataclass(frozen=True)
class OptimizerRecord:
    """`policy`: fingerprint of the policy the moments belong to; `updates`: made since the run began.

    `files`: sha256 of each file.
    """

    policy: str
    updates: int
    files: dict[str, str]


def save_policy(model: PolicyModel, previous_directory: str, directory: str, version: int) -> str:
    """Write the model as the next policy: called by every rank, written by rank 0. Returns its fingerprint.

    Tensors are gathered one at a time and written in files of 4 GiB, so that no rank ever holds the whole model.
    Raises PolicyError if a tensor of the model would get a name that the previous policy has not.
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

    for name, tensor in _published_tensors(model):
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
            names = file.keys()
            for name in names:
                dtypes[name] = getattr(torch, _TORCH_NAMES.get(file.get_slice(name).get_dtype(), "float32"))
    return dtypes


_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def _published_tensors(model: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter once (tied ones under their first name), whole, on the CPU; a collective for all ranks.

    Where transformers holds several tensors of a checkpoint as one (experts), they are taken apart again.
    """
    for name, parameter in model.model.named_parameters():
        tensor = parameter.detach()
        tensor = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
        yield from revert_weight_conversion(model.model, {name: tensor}).items()


def new_optimizer(model: PolicyModel, config: RunConfig) -> torch.optim.AdamW:
    """AdamW over the float32 master weights, its moments 0. The learning rate is set before each update."""
    settings = config.train
    optimizer = torch.optim.AdamW(model.parameters(), betas=settings.adam_betas, weight_decay=settings.weight_decay)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
        }
    return optimizer


def _optimizer_tensors(model: PolicyModel, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Master weights and moments by name, sharded as they are; they share memory with model and optimizer."""
    tensors = {}
    for name, parameter in model.model.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        tensors |= {f"{moment}.{name}": optimizer.state[parameter][moment] for moment in MOMENTS}
    return tensors


def save_optimizer(
    model: PolicyModel, optimizer: torch.optim.AdamW, directory: str, policy_fingerprint: str, updates: int
) -> None:
    """Write master weights, moments and the number of updates; called by every rank."""
    unfinished = f"{directory}.writing"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        Path(unfinished).mkdir(parents=True)
    dist.barrier()
    dcp.save(
        _optimizer_tensors(model, optimizer),
        storage_writer=HuggingFaceStorageWriter(unfinished, save_distributed=True),
    )
    digests: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(digests, _own_share_of_digests(sorted(Path(unfinished).iterdir())))
    if dist.get_rank() == 0:
        files = {name: digest for share in digests for name, digest in share.items()}
        record = OptimizerRecord(policy_fingerprint, updates, files)
        Path(unfinished, OPTIMIZER_MANIFEST).write_text(json.dumps(asdict(record), indent=1))
        publish(unfinished, directory)
    dist.barrier()


def _own_share_of_digests(paths: list[Path]) -> dict[str, str]:
    """sha256 of this rank's share of the files: together the ranks read each once."""
    return {path.name: file_sha256(path) for path in paths[dist.get_rank() :: dist.get_world_size()]}


def load_optimizer(model: PolicyModel, optimizer: torch.optim.AdamW, directory: str, policy_fingerprint: str) -> int:
    """Load what `save_optimizer` wrote, on any number of ranks; returns the number of updates made.

    Raises OptimizerError if it is incomplete or damaged, or belongs to another policy.
    """
    record = read_optimizer(directory)
    if record.policy != policy_fingerprint:
        raise OptimizerError(
            f"{directory}: belongs to the policy {record.policy[:12]}, but the policy loaded is "
            f"{policy_fingerprint[:12]}; use policy and optimizer of the same state"
        )
    paths = sorted(Path(directory).glob("*.safetensors"))
    if {path.name for path in paths} != record.files.keys():
        raise OptimizerError(
            f"{directory}: holds {[path.name for path in paths]}, but {OPTIMIZER_MANIFEST} names "
            f"{sorted(record.files)}; use another state"
        )
    shares: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    found = _own_share_of_digests(paths).items()
    dist.all_gather_object(shares, [name for name, digest in found if digest != record.files[name]])
    if damaged := [name for share in shares for name in share]:  # known to every rank, so that none waits for another
        raise OptimizerError(
            f"{Path(directory, damaged[0])}: its content is not what {OPTIMIZER_MANIFEST} says; use another state"
        )
    dcp.load(_optimizer_tensors(model, optimizer), storage_reader=HuggingFaceStorageReader(directory))
    for state in optimizer.state.values():
        state["step"].fill_(record.updates)
    return record.updates


def read_optimizer(directory: str) -> OptimizerRecord:
    """What an optimizer directory says of itself. Raises OptimizerError naming the file at fault."""
    manifest = Path(directory, OPTIMIZER_MANIFEST)
    try:
        return OptimizerRecord(**json.loads(manifest.read_text()))
    except FileNotFoundError:
        raise OptimizerError(
            f"{manifest}: missing, so the optimizer was never completely written; use another"
        ) from None
    except (ValueError, TypeError) as error:
        raise OptimizerError(f"{manifest}: not an optimizer manifest: {error}") from error
