"""The objective: DAPO's token-level clipped policy gradient, corrected for tokens sampled by older weights.

With r = exp(logp − logp_prox), w = min(exp(logp_prox − logp_behaviour), tis_cap) held constant, and N the unmasked
tokens of the whole mini-batch:

    loss = −(1/N) Σ w · min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A)      for A < 0 bounded by w · dual_clip·|A|

- token-level mean and decoupled clip range: DAPO, arXiv:2503.14476, eq. 8, 10 and 12; A is its eq. 9, the reward in it
  eq. 7 and 13
- dual clip: arXiv:1912.09729, eq. 5
- sequence-level ratio instead of the token's, on demand: GSPO, arXiv:2507.18071, eq. 5 to 7
- KL term and entropy bonus, on demand: GRPO, arXiv:2402.03300, eq. 3 and 4; arXiv:1602.01783, section 4
- proximal policy apart from the behaviour policy: decoupled PPO, arXiv:2110.00641, section 3, here with the weight
  truncated (as in V-trace, arXiv:1802.01561, section 4.1), since a token's behaviour policy may be several updates old

Departures from DAPO: the importance weight, without which tokens of older weights would be taken for on-policy ones;
and the dual clip, which DAPO's public code has and its paper has not.
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0  # clamp before exp, so that a mismatch cannot overflow


def dapo_loss(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    tis_cap: float | None = None,
    token_count: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and metrics of a (micro-)batch, padded [B, T] or packed [N].

    logprobs, proximal_logprobs, behaviour_logprobs: of the sampled tokens, nats. advantages: per token, or per row ([B]
    or [B, 1]). loss_mask: true where a token counts. token_count: N above, default the mask's own; with the
    mini-batch's count, losses, gradients and metrics of micro-batches add up to those of the mini-batch. tis_cap: None
    for no weight. Tokens with a non-finite log-prob are left out and counted in `nonfinite_tokens` (a plain count);
    every other metric is a mean over `token_count`.
    """
    if advantages.dim() < logprobs.dim():
        advantages = advantages.unsqueeze(-1)
    mask = loss_mask.bool()
    finite = torch.isfinite(logprobs) & torch.isfinite(proximal_logprobs) & torch.isfinite(behaviour_logprobs)
    used = mask & finite
    zero = torch.zeros_like(logprobs)
    logp = torch.where(used, logprobs, zero)  # before any arithmetic: a NaN times 0 is still a NaN in the gradient
    proximal = torch.where(used, proximal_logprobs, zero).detach()
    behaviour = torch.where(used, behaviour_logprobs, zero).detach()
    count = mask.sum().clamp(min=1) if token_count is None else token_count

    log_ratio = (logp - proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses = torch.maximum(plain, clipped)
    dual_clipped = torch.zeros_like(used)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (losses > bound)
        losses = torch.where(dual_clipped, bound, losses)
    weight = torch.ones_like(ratio)
    if tis_cap is not None:
        weight = (proximal - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=tis_cap)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.where(used, values.to(logp.dtype), zero).sum() / count

    with torch.no_grad():
        metrics = {
            "clip_fraction": mean(clipped > plain),
            "dual_clip_fraction": mean(dual_clipped),
            "ratio": mean(ratio),
            "kl": mean(ratio - 1 - log_ratio),  # k3 estimate of KL(proximal ‖ policy)
            "importance_weight": mean(weight),
            "squared_importance_weight": mean(weight**2),
            "nonfinite_tokens": (mask & ~finite).sum().to(logp.dtype),
        }
    return mean(weight * losses), metrics


def gspo_loss(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    rows: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    response_count: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and metrics with one ratio for each response, s = exp(mean over its tokens of logp − logp_prox).

        loss = −(1/G) Σ min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A)      (GSPO, arXiv:2507.18071, eq. 5 to 7)

    All packed, [T]; `rows` [T] int64 says which response a token belongs to. response_count: G, the responses of the
    mini-batch that have a token in `loss_mask`; default: those here. Metrics are means over responses.
    """
    used = loss_mask.bool() & torch.isfinite(logprobs) & torch.isfinite(proximal_logprobs)
    difference = torch.where(used, logprobs - proximal_logprobs.detach(), 0.0)
    size = int(rows.max()) + 1 if rows.numel() else 0

    def per_response(values: torch.Tensor) -> torch.Tensor:
        return logprobs.new_zeros(size).index_add(0, rows, values.to(logprobs.dtype))

    tokens = per_response(used)
    lengths = tokens.clamp(min=1)
    log_ratio = (per_response(difference) / lengths).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantage = per_response(torch.where(used, advantages, 0.0)) / lengths
    plain = -ratio * advantage
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    count = (tokens > 0).sum().clamp(min=1) if response_count is None else response_count

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.where(tokens > 0, values.to(logprobs.dtype), 0.0).sum() / count

    with torch.no_grad():
        metrics = {
            "clip_fraction": mean(clipped > plain),
            "dual_clip_fraction": mean(torch.zeros_like(plain)),
            "ratio": mean(ratio),
            "kl": mean(ratio - 1 - log_ratio),
            "importance_weight": mean(torch.ones_like(ratio)),
            "squared_importance_weight": mean(torch.ones_like(ratio)),
            "nonfinite_tokens": (loss_mask.bool() & ~used).sum().to(logprobs.dtype),
        }
    return mean(torch.maximum(plain, clipped)), metrics


def reference_kl(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, loss_mask: torch.Tensor, token_count: float | torch.Tensor
) -> torch.Tensor:
    """Estimate of KL(policy ‖ reference), nats per token: mean of q − 1 − log q with q = reference / policy.

    Never negative, with a gradient (GRPO, arXiv:2402.03300, eq. 4). All [T] or [B, T]; tokens that are not finite do
    not count.
    """
    used = loss_mask.bool() & torch.isfinite(logprobs) & torch.isfinite(reference_logprobs)
    log_ratio = torch.where(used, reference_logprobs.detach() - logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio.exp() - 1 - log_ratio).sum() / token_count
