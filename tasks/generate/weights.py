"""Load weights into a running vLLM worker, and prove that it computes with them.

A reload that is silently partial would label tokens with weights that did not sample them. Two independent checks: the
bytes handed to vLLM are hashed as they are read, and afterwards every matrix is asked for a product with known vectors,
which must be that of the published weights whatever layout the backend keeps them in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LoadedWeights:
    """`files`: sha256 of each weight file as it was read; `not_held`: modules that compute with other weights."""

    files: dict[str, str]
    not_held: list[str]


def load_into_worker(worker: Any, policy_directory: str) -> LoadedWeights:
    """Runs inside a vLLM worker: replace its weights by those of the directory's safetensors files."""
    import torch
    from safetensors.torch import load

    files: dict[str, str] = {}
    published: dict[str, torch.Tensor] = {}

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for path in sorted(Path(policy_directory).glob("*.safetensors")):
            content = path.read_bytes()
            files[path.name] = hashlib.sha256(content).hexdigest()
            tensors = load(content)
            published.update(tensors)
            yield from tensors.items()

    worker.reload_weights(weights_iterator=read())
    model = worker.model_runner.model
    _repack_tied_head(model)
    with torch.inference_mode():
        return LoadedWeights(files, _not_held(model, published))


def _repack_tied_head(model: Any) -> None:
    """vLLM's CPU backend keeps its own packed copy of a tied output matrix, which a reload leaves as it was."""
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear") and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)


def _not_held(model: Any, published: dict[str, Any]) -> list[str]:
    """Names of parameters that are not the published ones; those spread over several workers are passed over."""
    import torch

    different = []
    for name, held in model.named_parameters():
        wanted = _published(name, model, published)
        comparable = wanted is not None and held.dim() == 1 and held.shape == wanted.shape
        if comparable and not torch.equal(held.cpu(), wanted.to(held.dtype)):
            different.append(name)
    for name, module in model.named_modules():
        wanted = _published(f"{name}.weight", model, published)
        method = getattr(module, "quant_method", None)
        if wanted is None or wanted.dim() != 2 or not hasattr(method, "apply"):
            continue
        like = next(model.parameters())
        vectors = torch.arange(4 * wanted.shape[1]).view(4, -1).cos().to(like)
        product = method.apply(module, vectors).float()
        if product.shape[1] < wanted.shape[0]:
            continue
        expected = torch.nn.functional.linear(vectors, wanted.to(like)).float()
        tolerance = 1e-4 if like.dtype == torch.float32 else 2e-2
        difference = (product[:, : wanted.shape[0]] - expected).abs().max()
        if not difference <= tolerance * (1 + expected.abs().max()):
            different.append(name)
    return different


def _published(name: str, model: Any, published: dict[str, Any]) -> Any | None:
    """The published tensor that belongs at this place of vLLM's model, where it fuses some (q, k and v, for one)."""
    import torch

    if name == "lm_head.weight" and getattr(model.config, "tie_word_embeddings", False):
        name = "model.embed_tokens.weight"
    if name in published:
        return published[name]
    module, _, tensor = name.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    parts = [f"{parent}.{part}.{tensor}" for part in getattr(model, "packed_modules_mapping", {}).get(leaf, ())]
    return torch.cat([published[part] for part in parts]) if parts and all(p in published for p in parts) else None
