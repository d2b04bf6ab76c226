"""What may change when a run is resumed: everything but what its unfinished trajectories and its books rest on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.config import RunConfig
from tasks.prompt_files import DataError
from tasks.prompts import PromptSet, fingerprint_of, tokenizer_sha256

# The settings that each fingerprint of a carry depends on, besides the files they name.
FINGERPRINTED = {
    "sampling": ("sampling.", "train.group_size"),
    "tokenizer": ("model.",),
    "model": ("model.",),
    "prompts": ("data.",),
    "prompt order": ("seed", "data.shuffle"),
}
FREE = ("name", "output", "resume", "iterations", "compare.", "trackers.")


def fingerprints(config: RunConfig, model_directory: str, sets: Sequence[PromptSet]) -> dict[str, str]:
    """What must stay as it is while trajectories are carried, each as a hash."""
    sampling = config.sampling.model_dump_json(exclude={"seed_requests"}) + f" n={config.train.group_size}"
    return {
        "sampling": hashlib.sha256(sampling.encode()).hexdigest(),
        "tokenizer": tokenizer_sha256(model_directory),
        "model": hashlib.sha256(Path(model_directory, "config.json").read_bytes()).hexdigest(),
        "prompts": fingerprint_of(sets),
        "prompt order": f"seed {config.seed}, shuffle {config.data.shuffle}",
    }


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Settings that differ between two recipes, as `old → new`, by dotted key, but for those that never matter."""
    old, new = dict(_flat(before)), dict(_flat(now))
    return {
        key: f"{old.get(key)!r} → {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(FREE)
    }


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def check_carry(
    carry: str, saved: Mapping[str, str], current: Mapping[str, str], changed: Mapping[str, str] | None = None
) -> None:
    """Raises DataError if trajectories carried with the fingerprints `saved` cannot go on with the `current` ones.

    `changed`: settings that differ from those the run had, which are named where they are to blame.
    """
    different = [name for name, value in saved.items() if current.get(name) != value]
    if not different:
        return
    blamed = {
        key: change
        for name in different
        for key, change in (changed or {}).items()
        if key.startswith(FINGERPRINTED.get(name, ()))
    }
    because = f" ({', '.join(f'{key}: {change}' for key, change in blamed.items())})" if blamed else ""
    raise DataError(
        f"{carry}: its trajectories were sampled with another {' and '.join(different)}{because}; continue with the "
        "recipe they were sampled with, or start a run without resume"
    )
