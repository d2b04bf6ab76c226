"""Every metric of a run: its unit and meaning. The one place where they are documented; reports read them from here.

A run keeps them as `metrics/<iteration>.json` and, as one table, `metrics.parquet`; trackers get the same names. The
prefix says which stage measured it.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Metric(NamedTuple):
    unit: str
    meaning: str


_ACCOUNTS = {
    "carried_in": "left over by the iteration before",
    "entered": "drawn from the prompts (groups), sampled by the engine (tokens)",
    "trained": "in the batch",
    "masked": "in the batch but left out of the loss, as too old or truncated",
    "filtered": "of groups whose members all had the same accuracy",
    "failed": "of groups with a member that could not be scored or read",
    "discarded": "of attempts that were restarted, or of what `unfinished: discard` threw away",
    "carried_out": "left over for the next iteration",
}

METRICS: dict[str, Metric] = {
    "iteration": Metric("count from 0", "iteration; evaluations are of the policy it starts with"),
    "generate/seconds": Metric("s", "the whole stage, loading weights and reading the carry included"),
    "generate/engine_seconds": Metric("s", "until the engine held the policy: start (once) and loading of weights"),
    "generate/sampling_seconds": Metric("s", "from the first request to the cut, scoring included"),
    "generate/tokens": Metric("tokens", "sampled by the engine"),
    "generate/tokens_per_second": Metric("tokens/s", "sampled tokens over sampling seconds"),
    "generate/reprefilled_tokens": Metric(
        "tokens", "prompt and kept tokens of resumed trajectories, computed once more under the new weights"
    ),
    "generate/engine_steps": Metric("steps", "forward passes of the engine"),
    "generate/drawn_groups": Metric("groups", "new groups started"),
    "generate/dropped_prompts": Metric("prompts", "of the data, too long or asked before (data.duplicates)"),
    "generate/cut_trajectories": Metric("trajectories", "unfinished at the cut, with tokens"),
    "generate/resumed_trajectories": Metric("trajectories", "unfinished ones that came in with the carry"),
    "generate/unscored_trajectories": Metric("trajectories", "ended, but not scored when the stage was cut"),
    "generate/failed_scores": Metric("scores", "that raised, timed out or were no number in [0, 1]"),
    "generate/unparsed_scores": Metric("trajectories", "scored 0 because no answer could be read from them"),
    "carry/seconds": Metric("s", "the whole stage"),
    "carry/reward": Metric("reward", "mean of the responses of ready groups, before the filter, shaping included"),
    "carry/accuracy": Metric("share", "mean accuracy of the responses of ready groups, before the filter"),
    "carry/response_tokens": Metric("tokens", "mean length of the responses of ready groups, before the filter"),
    "carry/truncated_share": Metric("share", "of those responses, ended by their budget"),
    "carry/trained_accuracy": Metric("share", "mean accuracy of the batch"),
    "carry/trained_response_tokens": Metric("tokens", "mean length of the responses in the batch"),
    "carry/ready_groups": Metric("groups", "scored and informative: the batch and the surplus"),
    "carry/scored_groups": Metric("groups", "with every member scored, informative or not"),
    "carry/all_right_groups": Metric("groups", "filtered with every member right"),
    "carry/all_wrong_groups": Metric("groups", "filtered with every member wrong"),
    "carry/surplus_groups": Metric("groups", "ready and informative, but more than the batch holds"),
    "carry/restarted_trajectories": Metric("trajectories", "too old to go on, sampled anew (`on_stale: reroll`)"),
    "carry/off_policy_share": Metric("share", "of the batch's tokens, sampled by older weights"),
    "carry/resumed_share": Metric("share", "of the batch's tokens, in responses that were cut and resumed"),
    "carry/mean_version_lag": Metric("versions", "mean age of the batch's tokens, in weight versions"),
    "carry/max_version_lag": Metric("versions", "greatest age of a token in the batch, masked ones included"),
    "carry/quarantined_rows": Metric("rows", "that broke an invariant and were put aside, named in the manifest"),
    **{f"ledger/groups_{name}": Metric("groups", meaning) for name, meaning in _ACCOUNTS.items()},
    **{f"ledger/tokens_{name}": Metric("tokens", meaning) for name, meaning in _ACCOUNTS.items()},
    "train/seconds": Metric("s", "the whole stage, reading and writing weights included"),
    "train/updates": Metric("updates", "of the weights"),
    "train/skipped_updates": Metric("updates", "left out because their gradient was not finite"),
    "train/loss": Metric("1", "the objective, mean over updates"),
    "train/entropy": Metric("nats per token", "of the policy's distribution, mean over trained tokens"),
    "train/kl": Metric("nats per token", "estimate of the divergence from the policy before the update (k3)"),
    "train/ratio": Metric("1", "mean probability ratio of the policy to the one before the update"),
    "train/clip_fraction": Metric("share", "of trained tokens whose ratio was clipped"),
    "train/dual_clip_fraction": Metric("share", "of trained tokens whose loss was bounded by the dual clip"),
    "train/importance_weight": Metric("1", "mean truncated importance weight, proximal against behaviour policy"),
    "train/effective_sample_share": Metric(
        "share", "effective sample size of the importance weights over their number"
    ),
    "train/gradient_norm": Metric("1", "before clipping, mean over updates"),
    "train/learning_rate": Metric("1", "mean over updates"),
    "train/trained_tokens": Metric("tokens", "in the loss"),
    "train/masked_tokens": Metric("tokens", "of the batch, left out of the loss"),
    "train/nonfinite_tokens": Metric("tokens", "left out because a log-prob was not finite"),
    "train/off_policy_share": Metric("share", "of the tokens in the loss, sampled by older weights"),
    "train/mean_version_lag": Metric("versions", "mean age of the tokens in the loss"),
    "train/logprob_difference_fresh": Metric(
        "nats", "mean |engine − trainer| log-prob of tokens sampled by the weights being trained"
    ),
    "train/logprob_difference_stale": Metric(
        "nats", "mean |engine − trainer| log-prob of tokens sampled by older weights: how far the policy has moved"
    ),
    "evaluate/seconds": Metric("s", "the whole stage"),
    "evaluate/accuracy": Metric("share", "mean over held-out prompts of the mean accuracy of their answers (avg@k)"),
    "evaluate/accuracy_low": Metric("share", "lower end of its 95 % interval over prompts"),
    "evaluate/accuracy_high": Metric("share", "upper end of its 95 % interval over prompts"),
    "evaluate/accuracy_standard_error": Metric("share", "of that mean, over prompts"),
    "evaluate/response_tokens": Metric("tokens", "mean length of the answers"),
    "evaluate/truncated_share": Metric("share", "of the answers, ended by their budget"),
    "evaluate/failed_scores": Metric("answers", "that could not be scored"),
}

# Metrics whose names depend on the recipe.
NAMED: dict[str, Metric] = {
    r"train/reference_kl": Metric("nats per token", "estimate of the divergence from the reference model (k3)"),
    r"evaluate/pass@\d+": Metric(
        "share", "of held-out prompts, probability that k answers hold a right one (unbiased)"
    ),
    r"evaluate/maj@\d+": Metric("share", "of held-out prompts, probability that the commonest of k answers is right"),
    r"evaluate/(pass|maj)@\d+_low": Metric("share", "lower end of its 95 % interval over prompts"),
    r"evaluate/(pass|maj)@\d+_high": Metric("share", "upper end of its 95 % interval over prompts"),
    r"reward/.+": Metric("reward", "mean of this part of the reward, as the scorer or `reward.terms` call it"),
}


def describe(name: str) -> Metric | None:
    """Unit and meaning of a metric; those of one held-out set are those of all. None if there is no such metric."""
    name = re.sub(r"^evaluate/[^/]+/", "evaluate/", name)
    return METRICS.get(name) or next((metric for form, metric in NAMED.items() if re.fullmatch(form, name)), None)
