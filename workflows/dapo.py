"""DAPO with partial rollouts.

    pyflyte run workflows/dapo.py dapo                                   # the sandbox
    pyflyte run workflows/dapo.py dapo --config configs/sandbox.yaml     # any recipe

What runs where: `prepare`, `carry_over`, `record` and `conclude` need a CPU only; `generate` and `evaluate` run vLLM;
`train` runs FSDP ranks. Between the stages are directories: weights, and trajectories as Arrow shards.

Departures from the paper (DAPO, arXiv:2503.14476): sampling is cut as soon as enough groups are informative, instead of
waiting for the longest response of each batch, and unfinished responses are continued by newer weights (partial
rollout, arXiv:2501.12599 section 2.6.2); the off-policy tokens this brings are corrected (`tasks/train/objective.py`).
"""

from __future__ import annotations

from pathlib import Path

from flytekit import dynamic, workflow
from flytekit.types.directory import FlyteDirectory

from tasks.carry_over.task import carry_over
from tasks.config import RunConfig
from tasks.evaluate.task import evaluate
from tasks.generate.task import generate
from tasks.run import Result, conclude, prepare, record
from tasks.train.task import train

SANDBOX = RunConfig.from_yaml(Path(__file__).parent.parent / "configs" / "sandbox.yaml")


@dynamic
def iterate(
    config: RunConfig,
    first: int,
    policy: FlyteDirectory,
    optimizer: FlyteDirectory | None,
    carry: FlyteDirectory,
) -> Result:
    """The loop: generate until enough groups are ready, keep what is unfinished, train on what is ready."""
    recorded = []
    for i in range(first, config.iterations):
        measured = []
        if config.evaluate.every and i % config.evaluate.every == 0:
            measured.append(
                evaluate(config=config, iteration=i, policy=policy).with_overrides(node_name=f"evaluate-{i:04d}")
            )

        rollouts, generated = generate(config=config, iteration=i, policy=policy, carry=carry).with_overrides(
            node_name=f"generate-{i:04d}"
        )
        batch, carry, kept = carry_over(config=config, iteration=i, rollouts=rollouts).with_overrides(
            node_name=f"carry-over-{i:04d}"
        )
        policy, optimizer, version, trained = train(
            config=config, iteration=i, policy=policy, optimizer=optimizer, batch=batch
        ).with_overrides(node_name=f"train-{i:04d}")
        measured += [generated, kept, trained]

        recorded.append(
            record(config=config, iteration=i, version=version, optimizer=optimizer, metrics=measured).with_overrides(
                node_name=f"record-{i:04d}"
            )
        )
    final = []
    if config.evaluate.every:
        last = evaluate(config=config, iteration=config.iterations, policy=policy)
        final.append(last.with_overrides(node_name="evaluate-final"))
    return conclude(config=config, policy=policy, recorded=recorded, final=final)


@workflow
def dapo(config: RunConfig = SANDBOX) -> Result:
    """Train a policy as the recipe says. Returns the run's directory and the trained policy."""
    start = prepare(config=config)
    return iterate(
        config=start.config,
        first=start.iteration,
        policy=start.policy,
        optimizer=start.optimizer,
        carry=start.carry,
    )
