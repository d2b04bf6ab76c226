"""The engine that samples: real vLLM behind the few calls the stage needs.

The engine is driven step by step in the stage's own process, so that tokens and log-probs arrive as they are sampled
and a cut loses nothing. It stays warm between iterations of a local run: weights are loaded into it anew, and the
version it reports is always that of the weights it really holds (`weights.py`).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from tasks.config import RunConfig, SamplingConfig
from tasks.generate.weights import load_into_worker
from tasks.memory import available_bytes, check_memory, device_bytes, sampling_needs
from tasks.policy import read_policy
from tasks.report.progress import say
from tasks.storage import local_log
from tasks.trajectory import FinishReason


class EngineError(RuntimeError):
    """The engine does not do what it was asked; sampling with it would be wrong."""


@dataclass(frozen=True)
class Request:
    """Sample at most `max_tokens` further tokens after `tokens` (prompt and what was kept of the response, as ids)."""

    request_id: str
    tokens: np.ndarray  # [P + T] int32
    max_tokens: int
    seed: int | None


@dataclass(frozen=True)
class Delta:
    """What one step sampled for one request: tokens, the log-prob of each under the distribution sampled from."""

    request_id: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None


class Engine(Protocol):
    version: int | None
    """Version of the weights the engine holds; None while it holds none that may be sampled from."""

    @property
    def in_flight(self) -> int:
        """Requests in the engine's own books."""

    def load(self, policy_directory: str) -> None:
        """Hold the weights of this policy, and nothing computed with others. Raises EngineError if it does not."""

    def admit(self, request: Request, sampling: SamplingConfig) -> None:
        """Start sampling a request."""

    def step(self) -> list[Delta]:
        """Run one engine step."""

    def abort_all(self) -> None:
        """Let go of every request. Raises EngineError if one is still in the engine's books."""


class VLLMEngine:
    """One vLLM engine in this process, for models of one architecture."""

    def __init__(self, config: RunConfig, model_directory: str) -> None:
        """Start with the weights of `model_directory`, a policy directory; `load` must follow before sampling."""
        settings = config.engine
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # step() runs the model here and now
        os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # which the stage keeps in a log
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if settings.enforce_eager:
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # else the sampler is compiled all the same, for 10 s
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        cache_bytes = None if settings.kv_cache_gib is None else int(settings.kv_cache_gib * 2**30)
        if current_platform.is_cpu() and cache_bytes is None:
            raise EngineError("engine.kv_cache_gib is not set: on a CPU the engine needs the size of its cache")
        if current_platform.is_cpu():
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(settings.kv_cache_gib)))
        arguments = EngineArgs(
            model=model_directory,
            trust_remote_code=config.model.trust_remote_code,
            skip_tokenizer_init=True,  # ids in, ids out
            dtype=settings.dtype,
            max_model_len=config.max_context_tokens,
            max_num_seqs=config.partial_rollout.max_in_flight,
            enforce_eager=settings.enforce_eager,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_cache_memory_bytes=cache_bytes,
            enable_prefix_caching=True,  # members of a group share their prompt
            logprobs_mode="processed_logprobs",  # after temperature: of the distribution really sampled from
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=config.seed,
        )
        if settings.max_batched_tokens is not None:
            arguments.max_num_batched_tokens = settings.max_batched_tokens
        if current_platform.is_cpu() and config.sampling.seed_requests:
            arguments.enable_chunked_prefill = False  # vLLM cannot rewind a CPU generator after part of a prompt
            arguments.max_num_batched_tokens = max(settings.max_batched_tokens or 4096, config.max_context_tokens)
        self._llm = LLMEngine.from_engine_args(arguments)
        self._stop_ids: list[int] = []
        self.version: int | None = None
        self._fingerprint: str | None = None

    @property
    def in_flight(self) -> int:
        return self._llm.get_num_unfinished_requests()

    def load(self, policy_directory: str) -> None:
        if self.in_flight:
            raise EngineError(f"{self.in_flight} requests are in the engine; abort them before loading weights")
        policy = read_policy(policy_directory)
        if self._fingerprint != policy.fingerprint:
            self.version = self._fingerprint = None
            for loaded in self._llm.collective_rpc(load_into_worker, args=(policy_directory,)):
                if loaded.files != policy.files:
                    wrong = sorted(name for name in policy.files if loaded.files.get(name) != policy.files[name])
                    raise EngineError(f"{policy_directory}: weight files {wrong} are not those that were published")
                if loaded.not_held:
                    raise EngineError(
                        f"{policy_directory}: after loading, the engine still computes with other weights in "
                        f"{', '.join(loaded.not_held[:5])} ({len(loaded.not_held)} modules)"
                    )
            if not self._llm.reset_prefix_cache():
                raise EngineError("the engine kept prefixes computed with the weights before")
        self._stop_ids = _end_of_sequence_ids(policy_directory)
        self.version, self._fingerprint = policy.version, policy.fingerprint

    def admit(self, request: Request, sampling: SamplingConfig) -> None:
        if self.version is None:
            raise EngineError("the engine holds no verified weights; load a policy first")
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=request.max_tokens,
            stop_token_ids=[*self._stop_ids, *sampling.stop_token_ids],
            seed=request.seed,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._llm.add_request(request.request_id, {"prompt_token_ids": request.tokens.tolist()}, parameters)

    def step(self) -> list[Delta]:
        deltas = []
        for output in self._llm.step():
            sampled = output.outputs[0]
            tokens = list(sampled.token_ids)
            logprobs = [entry[token].logprob for token, entry in zip(tokens, sampled.logprobs or [], strict=True)]
            reason = FinishReason(sampled.finish_reason) if output.finished else None
            deltas.append(Delta(output.request_id, tokens, logprobs, reason))
        return deltas

    def abort_all(self) -> None:
        open_requests = list(self._llm.output_processor.request_states)
        self._llm.abort_request(open_requests, internal=True)
        left = self.in_flight + self._llm.engine_core.engine_core.scheduler.get_num_unfinished_requests()
        if left:
            raise EngineError(f"{left} requests are still in the engine after aborting {len(open_requests)}")


def _end_of_sequence_ids(model_directory: str) -> list[int]:
    """End-of-sequence ids: generation_config.json's, which may list several, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        path = Path(model_directory, name)
        declared = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if declared is not None:
            return [declared] if isinstance(declared, int) else list(declared)
    raise EngineError(f"{model_directory}: neither generation_config.json nor config.json names an eos_token_id")


_warm: dict[str, VLLMEngine] = {}


def warm_engine(config: RunConfig, policy_directory: str) -> VLLMEngine:
    """The engine of this process for these settings and this architecture, holding the weights of the policy.

    Started on the first call; later calls only load weights.
    """
    architecture = json.loads(Path(policy_directory, "config.json").read_text())
    wanted = [config.engine.model_dump(), config.max_context_tokens, config.partial_rollout.max_in_flight, architecture]
    key = json.dumps(wanted, sort_keys=True)
    if key not in _warm:
        _warm.clear()  # one engine at a time: it owns the device's memory
        on_gpu = device_bytes()
        needs = sampling_needs(config, policy_directory, on_gpu is not None)
        check_memory("generate", needs, available_bytes() if on_gpu is None else on_gpu)
        say(f"starting the engine; what it has to say is in {local_log(config)}")
        _warm[key] = VLLMEngine(config, policy_directory)
    engine = _warm[key]
    engine.load(policy_directory)
    return engine
