"""A policy on disk: a Hugging Face directory plus `policy.json`, written last.

`policy.json` names the version and the sha256 of every weight file; a directory without it is not a policy. The
fingerprint identifies the weights: whoever loads them compares it with what was really read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import fsspec

from tasks.faults import named_faults

MANIFEST = "policy.json"
OPTIMIZER_MANIFEST = "optimizer.json"


class PolicyError(ValueError):
    """A directory is not a policy, or not the one it says it is; the message names the file and what to do."""


@dataclass(frozen=True)
class Policy:
    """`files`: sha256 of each weight file; `fingerprint`: of all of them together."""

    version: int
    files: dict[str, str]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()


def read_policy(directory: str, *, verify: bool = False) -> Policy:
    """The policy in a directory; `verify` reads every weight file. Raises PolicyError naming the file at fault."""
    manifest = Path(directory, MANIFEST)
    try:
        content = json.loads(manifest.read_text())
        policy = Policy(version=int(content["version"]), files=dict(content["files"]))
    except FileNotFoundError:
        raise PolicyError(f"{manifest}: missing, so the policy was never completely written; use another") from None
    except (ValueError, KeyError, TypeError) as error:
        raise PolicyError(f"{manifest}: not a policy manifest: {error!r}") from error
    for name, digest in policy.files.items():
        path = Path(directory, name)
        if Path(name).name != name or not path.is_file():
            raise PolicyError(f"{path}: named by {MANIFEST} but not there; the policy is incomplete, use another")
        if verify and file_sha256(path) != digest:
            raise PolicyError(
                f"{path}: its content is not what {MANIFEST} says; the file is damaged; `resume: latest-good` finds "
                "the newest state that is not"
            )
    return policy


def seal_policy(directory: str, version: int) -> Policy:
    """Write `policy.json` for the weight files of a complete Hugging Face directory."""
    weights = sorted(Path(directory).glob("*.safetensors"))
    policy = Policy(version, {path.name: file_sha256(path) for path in weights})
    content = {"version": version, "fingerprint": policy.fingerprint, "files": policy.files}
    Path(directory, MANIFEST).write_text(json.dumps(content, indent=1))
    return policy


def publish(unfinished: str, directory: str) -> None:
    """Put a completely written directory in its place: everything on disk first, then one rename."""
    for path in [*Path(unfinished).rglob("*"), Path(unfinished)]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(unfinished, directory)


def publish_initial_policy(model_directory: str, directory: str) -> Policy:
    """Version 0 from a Hugging Face model directory. Raises PolicyError naming what the directory lacks."""
    source = Path(model_directory)
    if not source.is_dir():
        raise PolicyError(f"{model_directory}: no such directory; set model.path to a Hugging Face model directory")
    if not (source / "config.json").exists():
        raise PolicyError(f"{model_directory}: has no config.json; set model.path to a Hugging Face model directory")
    if not list(source.glob("*.safetensors")):
        raise PolicyError(f"{model_directory}: has no *.safetensors weights; convert the model to safetensors")
    if not any((source / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise PolicyError(f"{model_directory}: has no tokenizer; put the model's tokenizer files beside its weights")
    unfinished = f"{directory}.writing"
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished, ignore=shutil.ignore_patterns(MANIFEST, ".*"))
    policy = seal_policy(unfinished, version=0)
    publish(unfinished, directory)
    return policy


def first_damage(url: str, manifest: str) -> str | None:
    """What is wrong with a directory whose `manifest` names its files with their sha256; None if nothing is.

    Read through fsspec, so that a directory in an object store need not be copied.
    """
    filesystem, root = fsspec.core.url_to_fs(url)
    try:
        files = json.loads(filesystem.cat_file(f"{root}/{manifest}"))["files"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        return f"{url}/{manifest}: {type(error).__name__}"
    for name, digest in files.items():
        try:
            with named_faults(f"{url}/{name}"), filesystem.open(f"{root}/{Path(name).name}", "rb") as file:
                found = hashlib.sha256()
                while part := file.read(2**22):
                    found.update(part)
        except FileNotFoundError:
            return f"{url}/{name}: missing"
        if found.hexdigest() != digest:
            return f"{url}/{name}: its content is not what {manifest} says"
    return None


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
