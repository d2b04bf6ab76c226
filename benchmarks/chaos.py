"""Kill a run again and again with SIGKILL, at random moments, and compare it with one that was left alone.

    .venv/bin/python -m benchmarks.chaos --kills 50      # about 15 minutes on 2 cores

The run is the real workflow on the sandbox's model, made never to stop a response, so that every response has the
length of the budget and which prompts an iteration trains does not depend on chance: the killed run must train the same
prompts in the same iterations. Printed for every kill: the stage it hit, and the seconds and tokens of sampling that
were lost with it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from tasks.carry_over.shards import ShardError, read_shards
from tasks.storage import latest_state, read_metrics

ROOT = Path(__file__).parents[1]
FLUSH_SECONDS = 0.5


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    """Different for different texts, so that every group is informative."""
    return random.Random(solution_str).random()


@dataclass(frozen=True)
class Kill:
    """`lost_seconds`: of sampling since the last flush; None if the kill hit another stage."""

    iteration: int
    stage: str
    lost_seconds: float | None
    lost_tokens: float | None


@dataclass(frozen=True)
class Outcome:
    """`groups`: of each iteration's batch, in order; `tokens`: trained in each. The run checks its books itself."""

    groups: list[list[str]]
    tokens: list[float]


def write_recipe(folder: Path, name: str, iterations: int, resume: bool) -> Path:
    """The recipe of a run in `folder`, and beside it the model that never stops."""
    model = folder / "model"
    if not model.exists():
        shutil.copytree(ROOT / "tasks" / "sandbox" / "model", model)
        for file in ("config.json", "generation_config.json"):
            if (model / file).exists():
                content = json.loads((model / file).read_text()) | {"eos_token_id": []}
                (model / file).write_text(json.dumps(content))
    settings = yaml.safe_load((ROOT / "configs" / "sandbox.yaml").read_text())
    settings |= {
        "name": name,
        "output": str(folder / "runs"),
        "iterations": iterations,
        "keep_last": 1000,
        "model": {"path": str(model)},
        "evaluate": {"every": 0},
    }
    settings["reward"] |= {"function": "benchmarks.chaos:reward", "score_truncated": True}
    settings["sampling"] |= {"max_response_tokens": 400}
    settings["train"] |= {"batch_groups": 12, "mini_batch_responses": 24, "learning_rate": 1e-5, "save_seconds": 0.0}
    # 96 responses grow in step; 12 groups end together after 38,400 tokens, well away from any cut.
    settings["partial_rollout"] |= {"max_in_flight": 96, "max_tokens": 25_000, "flush_seconds": FLUSH_SECONDS}
    settings["objective"] |= {"max_logprob_difference": None}
    if resume:
        settings["resume"] = str(folder / "runs" / name)
    recipe = folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump(settings))
    return recipe


def start(recipe: Path) -> subprocess.Popen:
    log = recipe.with_suffix(".log").open("a")
    return subprocess.Popen(
        [Path(sys.executable).with_name("pyflyte"), "run", "workflows/dapo.py", "dapo", "--config", recipe],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(recipe.parent)},
        stdout=log,
        stderr=log,
    )


def outcome(run: Path) -> Outcome:
    batches = sorted((run / "batch").iterdir())
    groups = [list(dict.fromkeys(row.group_id for row in read_shards(str(batch)))) for batch in batches]
    return Outcome(groups, [row["ledger/tokens_trained"] for row in read_metrics(str(run)) if "carry/reward" in row])


def run_alone(folder: Path, iterations: int) -> Outcome:
    recipe = write_recipe(folder, "undisturbed", iterations, resume=False)
    if start(recipe).wait() != 0:
        raise RuntimeError(f"the undisturbed run failed: {recipe.with_suffix('.log').read_text()[-3000:]}")
    return outcome(folder / "runs" / "undisturbed")


def run_killed(folder: Path, iterations: int, kills: int, chance: random.Random) -> tuple[Outcome, list[Kill]]:
    """A run that is killed `kills` times, each time a random while after its first new sign of life, and resumed."""
    run = folder / "runs" / "killed"
    suffered: list[Kill] = []
    while True:
        begun = latest_state(str(run)) is not None
        seen = _newest_file(run)
        process = start(write_recipe(folder, "killed", iterations, resume=begun))
        while process.poll() is None and (len(suffered) == kills or _newest_file(run) <= seen):
            time.sleep(0.02)
        if process.poll() is None:
            time.sleep(chance.uniform(0.0, 4.0))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            now = time.time()
            process.wait()
            suffered.append(_describe(run, now))
            print(f"kill {len(suffered)}: {suffered[-1]}", flush=True)
        elif process.returncode == 0:
            return outcome(run), suffered
        else:
            raise RuntimeError(f"a resumed run failed: {(folder / 'killed.log').read_text()[-3000:]}")


def _newest_file(run: Path) -> float:
    """When anything of the stages' results was last written."""
    files = [path for stage in ("flush", "rollouts", "training") for path in run.glob(f"{stage}/*/*")]
    times = []
    for path in files:
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:  # removed meanwhile
            continue
    return max(times, default=0.0)


def _describe(run: Path, now: float) -> Kill:
    state = latest_state(str(run))
    iteration = state.iteration if state else 0
    if (run / "rollouts" / f"{iteration:04d}" / "manifest.json").exists():
        return Kill(iteration, "after generate", None, None)
    try:
        manifest = read_shards(str(run / "flush" / f"{iteration:04d}")).manifest
    except ShardError:
        return Kill(iteration, "before the first flush", None, None)
    counted = manifest.extra["counted"]
    rate = counted["sampled_tokens"] / max(counted["seconds"], 1e-9)
    lost = now - manifest.extra["at"]
    return Kill(iteration, "generate", round(lost, 3), round(lost * rate))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        expected = run_alone(folder, given.iterations)
        found, kills = run_killed(folder, given.iterations, given.kills, random.Random(given.seed))
        lost = [kill.lost_seconds for kill in kills if kill.lost_seconds is not None]
        tokens = [kill.lost_tokens for kill in kills if kill.lost_tokens is not None]
        print(f"{len(kills)} kills in {given.iterations} iterations, {len(lost)} of them while sampling")
        if lost:
            print(
                f"sampling lost per kill: median {statistics.median(lost):.2f} s, at most {max(lost):.2f} s "
                f"(flush_seconds = {FLUSH_SECONDS}); about {statistics.median(tokens):,.0f} tokens, at most "
                f"{max(tokens):,.0f}"
            )
        print(
            f"trained prompts equal to the undisturbed run's, iteration by iteration: {found.groups == expected.groups}"
        )
        print(
            f"trained tokens equal to the undisturbed run's, iteration by iteration: {found.tokens == expected.tokens}"
        )
        sys.exit(0 if found == expected else 1)


if __name__ == "__main__":
    main()
