"""Every setting of a run, typed. Imports neither torch, vllm nor ray, so a laptop can check and submit a recipe.

A recipe is a YAML file (`configs/`); `RunConfig.from_yaml` reads one. Unknown keys and combinations that cannot work
are refused with the key and the choices. Defaults are DAPO's (arXiv:2503.14476, section 4.1) unless a line says
otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

Share = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class ConfigError(Exception):
    """A setting is unknown, out of range or contradicts another; the message names the key and what to do.

    Not a ValueError, which pydantic would wrap: the message reaches the user as it is, also through `pyflyte run`.
    """


class Settings(BaseModel):
    """Base of every section: immutable, and an unknown key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Settings):
    path: str
    """Initial policy: a Hugging Face directory (config, safetensors, tokenizer) at a local path or fsspec URL, or the
    id of one on the Hugging Face hub, `organisation/name`."""

    revision: str | None = None
    """Commit, tag or branch of a model on the hub; default: its main branch."""

    trust_remote_code: bool = False
    """Whether code inside the model directory may run."""


COLUMNS = ("prompt", "ground_truth", "data_source", "extra_info")


class PromptSource(Settings):
    """A set of prompts. In a recipe its path alone will do."""

    path: str
    """Parquet, JSONL, a folder of those, or a directory that Hugging Face `datasets` saved (with several splits, name
    one: `…/train`); at a local path or fsspec URL (`hf://datasets/…` too)."""

    weight: PositiveFloat = 1.0
    """How often an epoch draws each of its prompts: 2 means twice, 0.25 a quarter of them, each epoch the next one."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?$")] | None = None
    """What its metrics and prompts are called, where there are several sets; default: the last part of the path."""

    columns: dict[str, str] = {}
    """Where a set has other columns than verl's: `prompt`, `ground_truth`, `data_source`, `extra_info`, each with the
    set's own name for it, e.g. {prompt: question, ground_truth: answer}."""

    @property
    def label(self) -> str:
        return self.name or re.sub(r"[^A-Za-z0-9]+", "-", Path(self.path).stem).strip("-") or "prompts"


def _as_sources(value: Any) -> Any:
    if value is None:
        return ()
    items = value if isinstance(value, list | tuple) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


PromptSources = Annotated[tuple[PromptSource, ...], BeforeValidator(_as_sources)]


class DataConfig(Settings):
    train: Annotated[PromptSources, Field(min_length=1)]
    """Training prompts in verl's schema: a path, or a list of sets with their weights."""

    heldout: PromptSources = ()
    """Prompts that are never trained on, for `evaluate`: a path, or a list of sets."""

    system_prompt: str | None = None
    """System message put before prompts that have none."""

    template_options: dict[str, Any] = {}
    """What the model's chat template is told besides the messages, e.g. {enable_thinking: false} for Qwen3."""

    add_bos: bool | None = None
    """Whether to put the tokenizer's beginning-of-sequence token before prompts that the chat template leaves without
    one. Default: stop and ask, since some models babble without it."""

    duplicates: Literal["keep", "drop"] = "keep"
    """What to do with a prompt that an earlier row has asked already, word for word."""

    max_prompt_tokens: PositiveInt = 2048
    """Prompts longer than this, after the chat template, are dropped and counted."""

    shuffle: bool = True
    """Draw in a fresh order each epoch (from `seed` and the epoch number); otherwise in the order of the sets."""


class SamplingConfig(Settings):
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Softmax temperature; the trainer divides its logits by the same value. 0 (greedy) is for evaluation only."""

    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus mass. Training needs 1.0: see `RunConfig`."""

    top_k: NonNegativeInt = 0
    """Most likely tokens kept, 0 for all. Training needs 0."""

    max_response_tokens: PositiveInt = 20480
    """Response budget L, over all cuts and resumes of a trajectory."""

    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response besides those of the model's generation_config."""

    seed_requests: bool = True
    """Seed each request from (seed, group, member, attempt, position): a rerun samples the same tokens whatever else
    is in the batch. Costs the engine one small kernel per sequence and step."""


class RewardTerm(Settings):
    """A further reward, added to that of the accuracy."""

    function: str
    """A scorer like `reward.function`; its value may be any finite number."""

    weight: float = 1.0
    """What its value is multiplied by."""


class RewardConfig(Settings):
    """How responses are scored. In a recipe the scorer alone will do: `reward: tasks.rewards.math:compute_score`."""

    function: str
    """Scorer of the accuracy in [0, 1]: `package.module:function` or `path/to/file.py:function`, with verl's signature
    (see `tasks/rewards/scoring.py`). Shipped: `tasks.rewards.math:compute_score`, `tasks.rewards.gsm8k:compute_score`,
    `tasks.rewards.exact_match:compute_score`."""

    by_data_source: dict[str, str] = {}
    """Other scorers for prompts of some `data_source`, by its name."""

    terms: tuple[RewardTerm, ...] = ()
    """Rewards added to that of the accuracy, each with its weight, e.g. for the format (`tasks/rewards/formats.py`).
    They shape the reward; which groups are informative is decided by the accuracy alone."""

    correct: float = 1.0
    """Reward at accuracy 1 (DAPO eq. 7)."""

    wrong: float = -1.0
    """Reward at accuracy 0; between the two the reward is linear in accuracy."""

    overlong_cache: NonNegativeInt = 4096
    """Soft overlong punishment interval C (DAPO eq. 13), in tokens; 0 turns the punishment off."""

    score_truncated: bool = False
    """Whether a response cut off by its budget can still earn accuracy."""

    workers: NonNegativeInt = 4
    """Scorer processes; 0 scores in the stage's own process, one by one (deterministic, but without a time limit)."""

    timeout_seconds: PositiveFloat = 30.0
    """A score that takes longer is given up (`score_status: timeout`) and its worker replaced."""

    worker_memory_gib: PositiveFloat = 4.0
    """Memory of a scorer process; a score that needs more is given up (`score_status: error`)."""

    max_error_rate: Share = 0.05
    """The run stops when a larger share of an iteration's scores failed."""


class PartialRolloutConfig(Settings):
    enabled: bool = True
    """False waits for every launched trajectory, so that no batch ever mixes weight versions (strict mode)."""

    max_in_flight: PositiveInt = 2048
    """Trajectories kept decoding at any time; new work is admitted as room appears."""

    ready_groups: PositiveInt | None = None
    """Cut when this many informative groups are scored; default: `train.batch_groups`."""

    max_tokens: PositiveInt | None = None
    """Cut after this many sampled tokens in one iteration."""

    max_seconds: PositiveFloat | None = None
    """Cut after this many seconds of sampling in one iteration."""

    max_engine_steps: PositiveInt | None = None
    """Cut after this many engine steps in one iteration: the same cut on every machine (for tests)."""

    max_scored_batches: PositiveInt = 10
    """Cut when this many batches' worth of groups are scored in one iteration, however few of them are informative."""

    unfinished: Literal["carry", "discard"] = "carry"
    """What a cut leaves unfinished, or ready beyond the batch, is carried on; or discarded and counted, as systems that
    oversample do (a baseline: it trains on too few long responses)."""

    max_version_lag: NonNegativeInt = 8
    """Greatest age of a trained token, in weight versions before the version being trained."""

    on_stale: Literal["mask", "reroll"] = "mask"
    """Older tokens: leave them out of the loss, or restart that member alone."""

    flush_seconds: PositiveFloat = 20.0
    """Seconds of sampling between two flushes: the most that a killed stage samples again."""

    max_rounds_without_progress: PositiveInt = 10
    """Iterations in a row without a single informative group after which the run ends, saying what it saw."""


class EngineConfig(Settings):
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of the weights the engine samples with."""

    max_context_tokens: PositiveInt | None = None
    """Context limit; default: max_prompt_tokens + max_response_tokens."""

    kv_cache_gib: PositiveFloat | None = None
    """Key-value cache; default: what `gpu_memory_utilization` leaves. Needed on a CPU."""

    gpu_memory_utilization: Share = 0.9
    """Share of the device's memory for weights and cache."""

    enforce_eager: bool = False
    """Skip compilation and graph capture: starts sooner, decodes slower on a GPU; no slower on a CPU."""

    max_batched_tokens: PositiveInt | None = None
    """Most tokens (prefill and decode) in one engine step; default: the engine's own."""


class ObjectiveConfig(Settings):
    correction: Literal["decoupled", "behaviour", "none"] = "decoupled"
    """Off-policy correction: ratio against the recomputed proximal policy times a capped importance weight; ratio
    against the behaviour policy itself; or ratio against the proximal policy alone."""

    clip_low: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    """ε_low of DAPO eq. 10."""

    clip_high: Annotated[float, Field(ge=0.0)] = 0.28
    """ε_high of DAPO eq. 10 (clip-higher)."""

    dual_clip: Annotated[float, Field(gt=1.0)] | None = 10.0
    """Upper bound on the loss of a token with negative advantage, in units of −A (arXiv:1912.09729); null for none."""

    tis_cap: PositiveFloat = 2.0
    """Cap of the importance weight exp(proximal − behaviour) (truncated importance sampling)."""

    ratio: Literal["token", "sequence"] = "token"
    """Probability ratio of each token; or of whole responses, their geometric mean (GSPO, arXiv:2507.18071), which
    needs `partial_rollout.enabled: false`: a response of several versions has no one policy to be compared with."""

    scale_advantages: bool = True
    """Divide a group's advantages by its standard deviation (DAPO eq. 9); false leaves them unscaled, as Dr. GRPO does
    (arXiv:2503.20783, section 3.2)."""

    kl_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the divergence from the reference model, `model.path` (GRPO, arXiv:2402.03300 eq. 3 and 4). DAPO: 0."""

    entropy_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of an entropy bonus. DAPO: 0."""

    overlong_filter: bool = False
    """Leave truncated responses out of the loss (DAPO section 3.4) instead of only punishing them."""

    max_logprob_difference: PositiveFloat | None = None
    """Stop when the mean |engine − trainer| log-prob of tokens sampled by the current weights exceeds this."""


class TrainConfig(Settings):
    batch_groups: PositiveInt = 512
    """Groups (prompts) trained on per iteration."""

    group_size: Annotated[int, Field(ge=2)] = 16
    """Responses per prompt, n."""

    mini_batch_responses: PositiveInt = 512
    """Responses per optimizer update."""

    micro_batch_tokens: PositiveInt = 32768
    """Tokens (prompt, response and padding) of one forward and backward on one rank; a longer row runs alone."""

    ranks: PositiveInt = 1
    """FSDP ranks on this machine."""

    learning_rate: PositiveFloat = 1e-6
    """AdamW peak learning rate."""

    warmup_updates: NonNegativeInt | None = None
    """Updates of linear warm-up; default: those of 20 iterations."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up, falling to `final_learning_rate` at the last update of the last iteration."""

    final_learning_rate: Annotated[float, Field(ge=0.0)] = 0.0
    """Where a linear or cosine schedule ends."""

    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled weight decay."""

    adam_betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's moment decay rates."""

    max_gradient_norm: PositiveFloat = 1.0
    """Clip of the global gradient norm."""

    param_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute precision of forward and backward."""

    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of master weights and moments. bfloat16 halves their memory, and loses updates smaller than 1/256 of a
    weight: at DAPO's learning rate, most of them."""

    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"
    """Attention kernel of the trainer; flash_attention_2 needs its package and a GPU."""

    save_seconds: Annotated[float, Field(ge=0.0)] = 600.0
    """Seconds between two saves of weights and moments within an iteration: the most that a killed stage repeats."""

    activation_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more compute."""

    compile: bool = False
    """Compile each decoder layer with torch.compile: slower to start, faster on a GPU."""

    fused_kernels: bool = False
    """Replace norms, rotary embeddings and MLPs by Liger's fused kernels; needs a GPU and the extra `liger`."""


class EvaluateConfig(Settings):
    every: NonNegativeInt = 0
    """Evaluate on `data.heldout` before every so many iterations, the first included, and after the last; 0: never."""

    samples_per_prompt: PositiveInt = 1
    """Responses per held-out prompt, n; accuracy is their mean (avg@n)."""

    at: tuple[PositiveInt, ...] | None = None
    """The k of pass@k and maj@k; default: 1, 2, 4, … up to n, and n."""

    sampling: SamplingConfig | None = None
    """Sampling for evaluation; default: that of training."""

    seed: NonNegativeInt | None = None
    """Seeds the answers; default: the run's `seed`."""

    @property
    def ks(self) -> tuple[int, ...]:
        n = self.samples_per_prompt
        return self.at or tuple(sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n}))


class CompareConfig(Settings):
    """What `workflows/compare.py` runs: every arm with every seed."""

    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (1, 2, 3)
    """Seeds of prompt order and sampling; each arm runs once with each."""

    warm_up: NonNegativeInt = 4
    """First iterations that are left out of throughput, times and lengths: the carry fills, engines start."""

    arms: dict[str, dict[str, Any]] = {
        "partial": {},
        "synchronous": {"partial_rollout": {"enabled": False}},
        "discard": {"partial_rollout": {"unfinished": "discard"}},
    }
    """Name of each arm and what it changes in the recipe. The first is compared with every other."""


class TrackersConfig(Settings):
    """Experiment trackers that get every iteration's metrics. A tracker that fails never stops a run."""

    use: tuple[Literal["wandb", "mlflow", "tensorboard"], ...] = ()
    """Which; each needs the extra of its name (`pip install carryover[wandb]`) where `record` runs."""

    project: str = "carryover"
    """Project (wandb) or experiment (mlflow). Servers and credentials come from the trackers' own variables."""

    timeout_seconds: PositiveFloat = 30.0
    """A tracker that takes longer for one iteration is given up for the rest of the run."""


class RunConfig(Settings):
    """One run. However it is made, raises ConfigError when a setting is wrong or some cannot work together."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=40)]
    """Name of the run; its files are at `output`/`name`."""

    output: str = "runs"
    """Where runs are kept: local path or fsspec URL."""

    seed: NonNegativeInt = 1
    """Seeds prompt order and sampling."""

    iterations: PositiveInt
    """Iterations in all, those before a resume included."""

    keep_last: PositiveInt = 2
    """Newest iterations whose weights, optimizer and trajectories are kept; those of older ones are removed."""

    keep_every: NonNegativeInt = 0
    """Besides those, keep every so many iterations; 0: none."""

    keep_best: str | None = "evaluate/accuracy"
    """Besides those, keep the policy for which this metric was greatest so far, and name it in `best.json`; null: no
    such policy."""

    stall_seconds: PositiveFloat = 1800.0
    """A stage that makes no progress for so long (no token, no score, no update) is ended with a named cause."""

    resume: str | None = None
    """Directory of a run to continue from its last complete iteration, e.g. `runs/sandbox`. `latest`: this run's own,
    `output`/`name`. `latest-good`: its own too, from the newest state of which every file is verified."""

    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    sampling: SamplingConfig = SamplingConfig()
    partial_rollout: PartialRolloutConfig = PartialRolloutConfig()
    engine: EngineConfig = EngineConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    compare: CompareConfig = CompareConfig()
    trackers: TrackersConfig = TrackersConfig()

    @model_validator(mode="before")
    @classmethod
    def _reward_by_its_function(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and isinstance(settings.get("reward"), str):
            return settings | {"reward": {"function": settings["reward"]}}
        return settings

    @property
    def run_directory(self) -> str:
        return f"{self.output.rstrip('/')}/{self.name}"

    @property
    def max_context_tokens(self) -> int:
        return self.engine.max_context_tokens or self.data.max_prompt_tokens + self.sampling.max_response_tokens

    @property
    def ready_groups(self) -> int:
        return self.partial_rollout.ready_groups or self.train.batch_groups

    @property
    def updates_per_iteration(self) -> int:
        return self.train.batch_groups * self.train.group_size // self.train.mini_batch_responses

    @property
    def warmup_updates(self) -> int:
        configured = self.train.warmup_updates
        return 20 * self.updates_per_iteration if configured is None else configured

    @classmethod
    def from_yaml(cls, path: str | Path) -> RunConfig:
        """Read a recipe. Raises ConfigError naming the file and each key at fault."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise ConfigError(f"{path}: cannot read the recipe: {error.strerror}") from error
        try:
            settings = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not YAML: {error}") from error
        if not isinstance(settings, dict):
            raise ConfigError(f"{path}: a recipe is a mapping of settings, found {type(settings).__name__}")
        try:
            return cls.model_validate(settings)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @model_validator(mode="wrap")
    @classmethod
    def _say_what_is_wrong(cls, settings: Any, build: Callable[[Any], RunConfig]) -> RunConfig:
        try:
            config = build(settings)
        except ValidationError as error:
            raise ConfigError(f"the recipe has errors:\n{_describe(error)}") from None
        if contradictions := config._contradictions():
            raise ConfigError("the recipe has errors:\n" + "\n".join(f"  {line}" for line in contradictions))
        return config

    def _contradictions(self) -> list[str]:
        """Combinations that cannot work, each with its keys and the choices."""
        train, sampling, partial = self.train, self.sampling, self.partial_rollout
        problems = []
        responses = train.batch_groups * train.group_size
        if responses % train.mini_batch_responses:
            problems.append(
                f"train.mini_batch_responses = {train.mini_batch_responses} does not divide the batch of "
                f"train.batch_groups × train.group_size = {responses} responses; choose a divisor of {responses}"
            )
        if partial.max_in_flight < train.group_size:
            problems.append(
                f"partial_rollout.max_in_flight = {partial.max_in_flight} is below train.group_size = "
                f"{train.group_size}; no group could decode together: raise it to {train.group_size} or more"
            )
        if self.ready_groups < train.batch_groups and partial.enabled:
            problems.append(
                f"partial_rollout.ready_groups = {partial.ready_groups} is below train.batch_groups = "
                f"{train.batch_groups}; no batch would ever fill: raise it, or lower train.batch_groups"
            )
        if sampling.temperature == 0:
            problems.append(
                "sampling.temperature = 0: greedy members of a group would all be the same; choose one above 0, and "
                "use 0 in evaluate.sampling only"
            )
        if sampling.top_p < 1.0 or sampling.top_k > 0:
            problems.append(
                f"sampling.top_p = {sampling.top_p}, sampling.top_k = {sampling.top_k}: training needs top_p 1.0 and "
                "top_k 0, since the trainer cannot renormalise over a truncated vocabulary; use them in "
                "evaluate.sampling only"
            )
        if self.reward.overlong_cache >= sampling.max_response_tokens:
            problems.append(
                f"reward.overlong_cache = {self.reward.overlong_cache} must be below sampling.max_response_tokens = "
                f"{sampling.max_response_tokens}; lower it, or set it to 0 for no overlong punishment"
            )
        needed = self.data.max_prompt_tokens + sampling.max_response_tokens
        if self.max_context_tokens < needed:
            problems.append(
                f"engine.max_context_tokens = {self.engine.max_context_tokens} is below data.max_prompt_tokens + "
                f"sampling.max_response_tokens = {needed}; raise it, or lower one of the two"
            )
        if self.reward.correct <= self.reward.wrong:
            problems.append(f"reward.correct = {self.reward.correct} must be above reward.wrong = {self.reward.wrong}")
        evaluated = (self.evaluate.sampling or sampling).max_response_tokens
        room = self.max_context_tokens - self.data.max_prompt_tokens
        if evaluated > max(room, sampling.max_response_tokens):
            problems.append(
                f"evaluate.sampling.max_response_tokens = {evaluated} does not fit the context: after a prompt {room} "
                "tokens are left; lower it, or raise engine.max_context_tokens"
            )
        if self.evaluate.every and not self.data.heldout:
            problems.append("evaluate.every is set but data.heldout is not; name a held-out file, or set it to 0")
        for name, sources in (("train", self.data.train), ("heldout", self.data.heldout)):
            labels = [source.label for source in sources]
            if repeated := sorted({label for label in labels if labels.count(label) > 1}):
                problems.append(
                    f"data.{name}: {len(labels)} sets, of which several are called {', '.join(repeated)}; give each a "
                    "name"
                )
            problems += [
                f"data.{name}: {source.path}: columns has unknown {', '.join(unknown)}; known: {', '.join(COLUMNS)}"
                for source in sources
                if (unknown := sorted(source.columns.keys() - set(COLUMNS)))
            ]
        if weighted := [source.label for source in self.data.heldout if source.weight != 1.0]:
            problems.append(
                f"data.heldout: weight of {', '.join(weighted)}: every held-out prompt is answered; remove the weight"
            )
        if too_many := [k for k in self.evaluate.ks if k > self.evaluate.samples_per_prompt]:
            problems.append(
                f"evaluate.at = {list(self.evaluate.ks)}: pass@{max(too_many)} needs evaluate.samples_per_prompt of at "
                f"least {max(too_many)}, now {self.evaluate.samples_per_prompt}"
            )
        if self.objective.ratio == "sequence" and partial.enabled:
            problems.append(
                "objective.ratio = 'sequence' needs partial_rollout.enabled: false: a response that several versions "
                "sampled has no one policy to be compared with"
            )
        if self.objective.ratio == "sequence" and self.objective.correction != "none":
            problems.append(
                f"objective.ratio = 'sequence' with objective.correction = {self.objective.correction!r}: set it to "
                "none; without partial rollout nothing is off-policy"
            )
        if self.train.schedule != "constant" and self.train.final_learning_rate > self.train.learning_rate:
            problems.append(
                f"train.final_learning_rate = {self.train.final_learning_rate} is above train.learning_rate = "
                f"{self.train.learning_rate}; a {self.train.schedule} schedule falls"
            )
        return problems


def _describe(error: ValidationError) -> str:
    """One line per fault of a pydantic error: the dotted key, what is wrong, and the known keys for an unknown one."""
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            known = ", ".join(_section(fault["loc"][:-1]).model_fields)
            lines.append(f"  {key}: unknown key; known here: {known}")
        else:
            lines.append(f"  {key}: {fault['msg']}")
    return "\n".join(lines)


def _section(location: tuple[int | str, ...]) -> type[Settings]:
    section: type[Settings] = RunConfig
    for part in location:
        if isinstance(part, str):
            section = next(_settings_in(section.model_fields[part].annotation))
    return section


def _settings_in(annotation: Any) -> Iterator[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for part in get_args(annotation):
        yield from _settings_in(part)
