"""Partial rollout on against off, under equal conditions: what it gains in speed, and whether it costs learning.

    pyflyte run workflows/compare.py compare                               # the sandbox: 9 runs, about 20 minutes
    pyflyte run workflows/compare.py compare --config configs/sandbox.yaml # any recipe

Every arm of the recipe's `compare` section runs with every seed, each as the whole workflow of `workflows/dapo.py` on
the same prompts, with the same number of updates. The arms of a recipe that names none:

- partial: cut when enough groups are ready, carry what is unfinished over
- synchronous: wait for every response that was started
- discard: cut as well, but throw away what is unfinished (what systems that oversample do)

On one machine the runs follow each other in one process, so that the engine is warm; on a cluster they run beside each
other, each on its own machines.
"""

from __future__ import annotations

from flytekit import dynamic, workflow

from tasks.compare import Comparison, arms_of, comparison_directory, conclude_comparison
from tasks.config import RunConfig
from tasks.run import prepare
from workflows.dapo import SANDBOX, iterate


@dynamic
def run_arms(config: RunConfig) -> Comparison:
    """All runs, then what they show together."""
    directory = comparison_directory(config)
    arms = arms_of(config, directory)
    runs = []
    for arm in arms:
        start = prepare(config=arm.config).with_overrides(node_name=f"prepare-{arm.config.name}")
        result = iterate(
            config=start.config,
            first=start.iteration,
            policy=start.policy,
            optimizer=start.optimizer,
            carry=start.carry,
        ).with_overrides(node_name=arm.config.name)
        runs.append(result.run_directory)
    names, seeds = [arm.name for arm in arms], [arm.seed for arm in arms]
    return conclude_comparison(config=config, directory=directory, arms=names, seeds=seeds, runs=runs)


@workflow
def compare(config: RunConfig = SANDBOX) -> Comparison:
    """Run every arm of the recipe with every seed, and compare them."""
    return run_arms(config=config)
