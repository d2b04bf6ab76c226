"""Scorers: functions that say how good responses are. How one is found, called and understood.

A scorer has verl's signature and is called by these names:

    compute_score(data_source, solution_str, ground_truth, extra_info)        one response
    compute_score(data_sources, solution_strs, ground_truths, extra_infos)    several: a list of results is expected

It may be `async`, and is then called for several responses at once. A result is a number, or a dict with

    accuracy (or verl's acc, or score)    the number
    answer (or verl's pred)               what was read from the response; None: nothing could be read
    any other number                      a part, reported as the metric reward/<its name>

The accuracy of `reward.function` lies in [0, 1]; further `reward.terms` may be any finite number.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tasks.config import ConfigError, RewardConfig

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
MANY = tuple(f"{name}s" for name in ARGUMENTS)


class Response(NamedTuple):
    """What a scorer is told of one response, in the order of ARGUMENTS."""

    data_source: str
    text: str
    ground_truth: str
    extra_info: Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """`bonus`: weighted sum of the recipe's terms; `answer`: None where the scorer names none."""

    accuracy: float
    bonus: float = 0.0
    answer: str | None = None
    parsed: bool = True
    parts: Mapping[str, float] | None = None


class ScoreError(ValueError):
    """A scorer returned what is no score."""


def functions_of(reward: RewardConfig) -> dict[str, str]:
    """Every scorer of the recipe, by the setting that names it."""
    terms = {f"reward.terms[{index}].function": term.function for index, term in enumerate(reward.terms)}
    sources = {f"reward.by_data_source[{name!r}]": path for name, path in reward.by_data_source.items()}
    return {"reward.function": reward.function, **sources, **terms}


def check_scorers(reward: RewardConfig) -> None:
    """Raises ConfigError naming the setting whose scorer cannot be found or called."""
    for setting, path in functions_of(reward).items():
        function = load_scorer(path, setting)
        names = MANY if takes_many(function) else ARGUMENTS
        try:
            inspect.signature(function).bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ConfigError(
                f"{setting} = {path!r} cannot be called with {', '.join(names)} (verl's signature): {error}"
            ) from None


@functools.cache
def load_scorer(path: str, setting: str = "reward.function") -> Callable[..., Any]:
    """The function named `package.module:function` or `file.py:function`. Raises ConfigError naming the setting."""
    module_name, _, function_name = path.rpartition(":")
    try:
        module = _load_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
        function = getattr(module, function_name)
    except (ImportError, AttributeError, ValueError, OSError, SyntaxError) as error:
        raise ConfigError(
            f"{setting} = {path!r} cannot be imported as package.module:function or path/to/file.py:function: {error}"
        ) from None
    if not callable(function):
        raise ConfigError(f"{setting} = {path!r} is not a function")
    return function


def _load_file(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def takes_many(function: Callable[..., Any]) -> bool:
    """Whether a scorer takes lists, which it says by the names of its parameters."""
    return "solution_strs" in inspect.signature(function).parameters


def prefers_many(reward: RewardConfig, data_source: str) -> bool:
    """Whether responses of a data source are better scored several at once."""
    paths = [reward.by_data_source.get(data_source, reward.function), *(term.function for term in reward.terms)]
    functions = [load_scorer(path) for path in paths]
    return any(takes_many(function) or inspect.iscoroutinefunction(function) for function in functions)


def score(reward: RewardConfig, responses: Sequence[Response]) -> list[Score]:
    """Scores of responses of one data source. What a worker process runs; raises what the scorers raise."""
    main = reward.by_data_source.get(responses[0].data_source, reward.function)
    results = [_as_score(result) for result in _call(main, responses)]
    for term in reward.terms:
        name = term.function.rpartition(":")[2]
        for index, result in enumerate(_call(term.function, responses)):
            value, _, parts = _understand(result)
            if not math.isfinite(value):
                raise ScoreError(f"{term.function} returned {result!r}, not a finite number")
            before = results[index]
            results[index] = Score(
                before.accuracy,
                before.bonus + term.weight * value,
                before.answer,
                before.parsed,
                {**(before.parts or {}), **parts, name: value},
            )
    return results


def _call(path: str, responses: Sequence[Response]) -> Sequence[Any]:
    function = load_scorer(path)
    many = takes_many(function)
    if many:
        columns = [list(column) for column in zip(*responses, strict=True)]
        calls = [dict(zip(MANY, columns, strict=True))]
    else:
        calls = [dict(zip(ARGUMENTS, response, strict=True)) for response in responses]
    if inspect.iscoroutinefunction(function):
        results = asyncio.run(_all(function, calls))
    else:
        results = [function(**arguments) for arguments in calls]
    if not many:
        return results
    if not isinstance(results[0], Sequence) or len(results[0]) != len(responses):
        raise ScoreError(
            f"{path} returned {results[0]!r} for {len(responses)} responses, not a list of as many results"
        )
    return results[0]


async def _all(function: Callable[..., Any], calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    return await asyncio.gather(*(function(**arguments) for arguments in calls))


def _as_score(result: Any) -> Score:
    accuracy, answer, parts = _understand(result)
    if not 0.0 <= accuracy <= 1.0:
        raise ScoreError(f"the scorer returned {result!r}, not a number in [0, 1]")
    parsed = not (isinstance(result, Mapping) and answer is None and {"answer", "pred"} & result.keys())
    return Score(accuracy, answer=None if answer is None else str(answer), parsed=parsed, parts=parts)


def _understand(result: Any) -> tuple[float, Any, dict[str, float]]:
    """The number, the answer and the parts of a scorer's result; NaN for a number that is none."""
    if not isinstance(result, Mapping):
        return (_number(result), None, {})
    names = ("accuracy", "acc", "score")
    value = next((result[name] for name in names if name in result), None)
    answer = result.get("answer", result.get("pred"))
    parts = {
        name: float(part)
        for name, part in result.items()
        if name not in (*names, "answer", "pred") and isinstance(part, Real) and math.isfinite(part)
    }
    return _number(value), answer, parts


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
