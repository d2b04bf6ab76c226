"""Evaluate any checkpoint on the held-out prompts of a recipe: avg@n, pass@k and maj@k with their intervals.

    pyflyte run workflows/evaluate.py evaluate --checkpoint runs/sandbox/policy/0024
    pyflyte run workflows/evaluate.py evaluate --config configs/qwen3_0_6b.yaml --checkpoint Qwen/Qwen3-0.6B

A checkpoint is a policy of a run, or any Hugging Face model directory, hub id or URL of one; without it, the recipe's
`model.path` is evaluated. Sampling, samples per prompt and the k are those of the recipe's `evaluate` section.
"""

from __future__ import annotations

from flytekit import workflow

from tasks.config import RunConfig
from tasks.evaluate.task import Evaluated, conclude_evaluation, prepare_evaluation
from tasks.evaluate.task import evaluate as evaluate_checkpoint
from workflows.dapo import SANDBOX


@workflow
def evaluate(config: RunConfig = SANDBOX, checkpoint: str = "") -> Evaluated:
    """Answer every held-out prompt and measure. Returns the directory of the answers and the metrics."""
    subject = prepare_evaluation(config=config, checkpoint=checkpoint)
    metrics = evaluate_checkpoint(config=subject.config, iteration=0, policy=subject.policy)
    return conclude_evaluation(config=subject.config, checkpoint=checkpoint, metrics=metrics)
