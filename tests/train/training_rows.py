"""Training rows, and a whole train stage on directories, as tests of this folder need them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from tasks.carry_over.shards import write_shards
from tasks.config import RunConfig
from tasks.policy import publish_initial_policy
from tasks.train.launch import train_on_ranks
from tasks.train.stage import Directories
from tasks.trajectory import BATCH_SCHEMA, TrainingRow


def row(
    prompt=(2, 3),
    response=(4, 5, 6),
    *,
    member=0,
    logprobs=None,
    segments=None,
    advantage=1.0,
    masked_tokens=0,
) -> TrainingRow:
    length = len(response)
    return TrainingRow(
        group_id="g",
        member=member,
        prompt_id="p",
        data_source="test",
        ground_truth="0",
        prompt_tokens=prompt,
        created_iteration=0,
        response_tokens=response,
        logprobs=[-1.0] * length if logprobs is None else logprobs,
        segments=[(0, length, 0)] if segments is None else segments,
        status="scored",
        finish_reason="stop",
        accuracy=1.0,
        reward=1.0,
        score_status="ok",
        finished_iteration=0,
        advantage=advantage,
        masked_tokens=masked_tokens,
    )


def random_rows(count: int, seed: int = 0, longest: int = 20) -> list[TrainingRow]:
    """Rows of random tokens and lengths; log-probs near those of a random policy over 42 tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [
        row(
            rng.integers(2, 42, rng.integers(1, 6)),
            rng.integers(2, 42, length),
            member=member,
            logprobs=-np.abs(rng.normal(3.0, 1.0, length)),
            advantage=float(rng.normal()),
        )
        for member, length in enumerate(lengths)
    ]


class Bench:
    """Directories of a run at train's border: `train` makes one iteration of it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.policy = str(folder / "policy")
        publish_initial_policy(str(model), self.policy)

    def train(self, config: RunConfig, rows, name="next", policy=None, optimizer=None) -> dict[str, float]:
        """Writes `<name>-policy` and `<name>-optimizer`; returns the metrics without their prefix."""
        write_shards(rows, str(self.folder / f"{name}-batch"), schema=BATCH_SCHEMA)
        result = train_on_ranks(
            config,
            Directories(
                policy=policy or self.policy,
                optimizer=optimizer,
                batch=str(self.folder / f"{name}-batch"),
                new_policy=self.path(name, "policy"),
                new_optimizer=self.path(name, "optimizer"),
                progress=self.path(name, "progress"),
            ),
        )
        return {key.removeprefix("train/"): value for key, value in result.metrics.items()}

    def path(self, name: str, kind: str) -> str:
        return str(self.folder / f"{name}-{kind}")

    def weights(self, name: str | None = None) -> dict[str, torch.Tensor]:
        """The tensors of a policy: of the initial one without a name."""
        directory = Path(self.policy if name is None else self.path(name, "policy"))
        return {key: value for path in directory.glob("*.safetensors") for key, value in load_file(path).items()}


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=atol, msg=lambda text, name=name: name + text)
