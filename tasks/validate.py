"""What a recipe would train on and whether it fits, without any engine.

    python -m tasks.validate configs/gsm8k_qwen3_0_6b.yaml
    python -m tasks.validate configs/qwen3_0_6b.yaml --set model.path=models/Qwen3-0.6B --set data.train=mine.parquet

Checks every setting, the scorers, the model's directory and each row of the data; shows what is dropped and why, how
long the prompts are, whether the scorer knows the ground truths when they are stated, and the memory of each stage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tasks.config import ConfigError, PromptSource, RunConfig
from tasks.faults import RecoverableError, StorageError
from tasks.memory import GIB, sampling_needs, training_needs
from tasks.prompt_files import DataError
from tasks.prompts import PromptSet, warm_prompts
from tasks.report.progress import say
from tasks.rewards.scorers import Response, check_scorers, score
from tasks.storage import fetch_model

STATEMENTS = ("{}", "Answer: {}", r"\boxed{{{}}}", "#### {}")
SAMPLED_TRUTHS = 200
BARS = "▏▎▍▌▋▊▉█"


def check_data(config: RunConfig, model_directory: str, sources: Sequence[PromptSource]) -> None:
    """Read all prompts and say how many there are. Raises ConfigError or DataError naming what cannot work."""
    _check_positions(config, model_directory)
    for source in sources:
        _, (each,) = warm_prompts([source], model_directory, config)
        again = f", {each.duplicates} as asked before" if each.duplicates else ""
        say(f"{source.path}: {len(each.prompts)} prompts, {each.too_long} dropped as too long{again}")


def _check_positions(config: RunConfig, model_directory: str) -> None:
    architecture = json.loads(Path(model_directory, "config.json").read_text())
    positions = architecture.get("text_config", architecture).get("max_position_embeddings")
    if positions is not None and positions < config.max_context_tokens:
        raise ConfigError(
            f"{config.model.path}: the model takes {positions} tokens, but data.max_prompt_tokens + "
            f"sampling.max_response_tokens (or engine.max_context_tokens) is {config.max_context_tokens}; lower them"
        )


def validate(config: RunConfig) -> Iterator[str]:
    """Lines that say what the recipe would do. Raises ConfigError or DataError naming what cannot work."""
    check_scorers(config.reward)
    directory = fetch_model(config.model.path, config.model.revision)
    for kind, sources in (("train", config.data.train), ("held-out", config.data.heldout)):
        if sources:
            _check_positions(config, directory)
            _, sets = warm_prompts(sources, directory, config)
            for each in sets:
                yield from _set_lines(kind, each, config)
    batch = config.train.batch_groups
    epoch = sum(each.draws_per_epoch for each in warm_prompts(config.data.train, directory, config)[1])
    yield f"an epoch draws {epoch:,} prompts: at least {epoch / batch:,.1f} iterations of {batch} groups"
    yield from memory_lines(config, directory)


def _set_lines(kind: str, each: PromptSet, config: RunConfig) -> Iterator[str]:
    kept = len(each.prompts)
    yield f"{kind}: {each.source.path}, {kept + each.too_long + each.duplicates:,} rows, {kept:,} kept"
    limit = config.data.max_prompt_tokens
    yield f"  dropped: {each.too_long:,} longer than {limit} tokens, {each.duplicates:,} duplicates"
    if each.contradictions:
        yield f"  of the duplicates {each.contradictions:,} state another ground truth than the row that is kept"
    sources = Counter(prompt.data_source for prompt in each.prompts)
    yield "  data sources: " + ", ".join(f"{name} {count:,}" for name, count in sources.most_common(8))
    yield "  prompt tokens:"
    yield from _histogram([len(prompt.tokens) for prompt in each.prompts])
    unknown = list(_unknown_truths(each, config))
    asked = min(kept, SAMPLED_TRUTHS)
    yield f"  the scorer accepts {asked - len(unknown)} of {asked} ground truths when they are stated"
    yield from (f"    not {truth!r} ({prompt_id})" for prompt_id, truth in unknown[:5])


def _histogram(lengths: Sequence[int]) -> Iterator[str]:
    counts, edges = np.histogram(lengths, bins=min(10, max(1, max(lengths) - min(lengths))))
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        eighths = round(8 * 40 * count / max(counts))
        bar = BARS[-1] * (eighths // 8) + (BARS[eighths % 8 - 1] if eighths % 8 else "")
        yield f"    {low:7.0f} – {high:<7.0f} {count:8,} {bar}"


def _unknown_truths(each: PromptSet, config: RunConfig) -> Iterator[tuple[str, str]]:
    """Of a sample of the prompts, those whose own ground truth earns nothing, however it is stated."""
    for index in np.linspace(0, len(each.prompts) - 1, min(len(each.prompts), SAMPLED_TRUTHS)).astype(int):
        prompt = each.prompts[index]
        texts = [statement.format(prompt.ground_truth) for statement in STATEMENTS]
        responses = [Response(prompt.data_source, text, prompt.ground_truth, prompt.extra_info) for text in texts]
        if not any(result.accuracy > 0 for result in score(config.reward, responses)):
            yield prompt.prompt_id, prompt.ground_truth


def memory_lines(config: RunConfig, model_directory: str, on_gpu: bool = True) -> Iterator[str]:
    """What each stage needs on each GPU, part by part."""
    for stage, needs in (
        ("generate", sampling_needs(config, model_directory, on_gpu)),
        ("train", training_needs(config, model_directory, on_gpu)),
    ):
        parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in needs.items())
        yield f"memory of {stage} per GPU: {sum(needs.values()) / GIB:.1f} GiB ({parts})"


def with_settings(settings: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """A recipe's settings with `key=value` changes: dotted keys, values as YAML. Raises ConfigError for any other."""
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ConfigError(f"--set {change}: write it as key=value, e.g. train.learning_rate=1e-6")
        section = settings
        *sections, name = key.split(".")
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = yaml.safe_load(value)
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tasks.validate", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting, for this check"
    )
    options = parser.parse_args(arguments)
    try:
        settings = json.loads(RunConfig.from_yaml(options.recipe).model_dump_json())
        for line in validate(RunConfig.model_validate(with_settings(settings, options.set))):
            print(line)
    except (ConfigError, DataError, RecoverableError, StorageError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
