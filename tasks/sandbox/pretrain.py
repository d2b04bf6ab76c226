"""The sandbox's initial policy: a small Qwen3 that knows the steps of a sum but often slips.

    python -m tasks.sandbox.pretrain     # writes tasks/sandbox/model: about five minutes on one core

Supervised training on solutions in which a share of the steps has a wrong digit as its sum, and goes on from there: the
model learns to copy and to add, and to be wrong as often as its teacher. Its most likely digit is right, its samples
often are not, so that members of a group differ and DAPO has something to lift. A run is reproducible from its
seed and number of steps; it uses one core, so that the number of cores has no part in it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks.sandbox.problems import MAX_TERMS, MIN_TERMS, ONE_MORE, heldout_problems

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
TOKENS = [PAD, EOS, UNKNOWN, *"0123456789", "+", "=", ";"]
ID = {token: number for number, token in enumerate(TOKENS)}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

STEPS = 2000
TOKENS_PER_STEP = 2048
CORRUPTED = 0.14  # share of the steps with a wrong digit as their sum
GROWTH = 0.6  # share of the training in which the longest sum grows from FIRST_MAX_TERMS to MAX_TERMS
FIRST_MAX_TERMS = 6
WARMUP_STEPS = 50
MATRIX_LEARNING_RATE = 3e-3  # Muon, for the layers' matrices
OTHER_LEARNING_RATE = 2e-3  # AdamW, for embeddings and norms


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character. Its chat template is the messages' contents and nothing else."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(ID, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.6M parameters with random weights, float32. Its 32 token ids are those of TOKENS and spare ones."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    ends = {"pad_token_id": ID[PAD], "eos_token_id": ID[EOS], "bos_token_id": None}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=1024,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            dtype="float32",
            **ends,
        )
    )
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ends)
    return model


def solved_sums(
    rng: np.random.Generator,
    rows: int,
    terms: int,
    corrupted: float,
    exclude: Collection[tuple[int, ...]] = (),
) -> torch.Tensor:
    """Token ids of prompts and solutions, [at most rows, terms·(terms+1)] int64.

    All sums have `terms` terms, so that no row needs padding. Sums in `exclude` are left out. Of the steps a share
    `corrupted` has one of the nine wrong digits as its sum, and later steps go on from it.
    """
    import torch

    numbers = rng.integers(0, 10, (rows, terms))
    numbers = numbers[[tuple(row) not in exclude for row in numbers.tolist()]]
    parts = [_written(numbers, end="=")]
    while numbers.shape[1] > 1:
        error = (rng.random(len(numbers)) < corrupted) * rng.integers(1, 10, len(numbers))
        digit = (numbers[:, 0] + numbers[:, 1] + error) % 10
        numbers = np.column_stack([digit, numbers[:, 2:]])
        parts.append(_written(numbers, end=";" if numbers.shape[1] > 1 else EOS))
    return torch.from_numpy(np.concatenate(parts, axis=1))


def _written(numbers: np.ndarray, end: str) -> np.ndarray:
    """Token ids of `a+b+…` and the token `end`: [rows, 2·terms]."""
    tokens = np.full((len(numbers), 2 * numbers.shape[1]), ID["+"])
    tokens[:, ::2] = numbers + ID["0"]
    tokens[:, -1] = ID[end]
    return tokens


def response_logprobs(model: Qwen3ForCausalLM, tokens: torch.Tensor, terms: int) -> torch.Tensor:
    """Log-probs of the response tokens: [rows, terms·(terms−1)]. The first 2·terms tokens are the prompt."""
    logits = model(tokens[:, :-1], use_cache=False).logits[:, 2 * terms - 1 :]
    return logits.log_softmax(-1).gather(-1, tokens[:, 2 * terms :, None]).squeeze(-1)


def chance_of_no_slip(model: Qwen3ForCausalLM, terms: int, rows: int = 32) -> float:
    """The probability that a sampled solution is right in every token, over `rows` sums."""
    import torch

    with torch.no_grad():
        tokens = solved_sums(np.random.default_rng(terms), rows, terms, corrupted=0.0)
        return response_logprobs(model, tokens, terms).sum(-1).exp().mean().item()


def pretrain(
    model: Qwen3ForCausalLM, steps: int, seed: int, on_step: Callable[[int, float], None] | None = None
) -> list[float]:
    """Train `model` in place and return the loss of each step, in nats per response token.

    A step is two batches, each of sums of one length; that length is drawn so that tokens are shared among lengths as
    in the data. Held-out problems are never seen.
    """
    import torch

    heldout = {_numbers(row["prompt"][0]["content"]) for row in heldout_problems()}
    rng = np.random.default_rng(seed)
    optimizers = _optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: _learning_rate(step, steps)) for o in optimizers]
    losses = []
    for step in range(steps):
        loss = 0.0
        for _ in range(2):
            terms = _draw_length(rng, step / steps)
            rows = TOKENS_PER_STEP // 2 // (terms * (terms + 1))
            tokens = solved_sums(rng, rows, terms, CORRUPTED, exclude=heldout)
            part = -response_logprobs(model, tokens, terms).mean() / 2
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(loss)
        if on_step:
            on_step(step + 1, loss)
    return losses


def _numbers(prompt: str) -> tuple[int, ...]:
    return tuple(map(int, prompt.removesuffix("=").split("+")))


def _optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices: it learns to copy and add in a tenth of the tokens AdamW needs."""
    import torch

    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _learning_rate(step: int, steps: int) -> float:
    """Share of the peak: linear warm-up, then half a cosine down to a fiftieth."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * max(0.02, (1 + math.cos(math.pi * step / steps)) / 2)


def _draw_length(rng: np.random.Generator, progress: float) -> int:
    """Number of terms for a batch: geometric as in the data, times the tokens of a row; short sums come first."""
    longest = FIRST_MAX_TERMS + (MAX_TERMS - FIRST_MAX_TERMS) * min(1.0, progress / GROWTH)
    terms = np.arange(MIN_TERMS, int(longest) + 1)
    weights = ONE_MORE**terms * terms * (terms + 1)
    return int(rng.choice(terms, p=weights / weights.sum()))


def main() -> None:
    """Build, train and save; a line of progress every hundred steps."""
    import torch
    from transformers import logging

    parser = argparse.ArgumentParser(description="Pre-train the sandbox's initial policy.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("model"), help="where the model goes")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    model = build_model(arguments.seed)
    started = time.monotonic()
    recent: list[float] = []

    def show(step: int, loss: float) -> None:
        recent.append(loss)
        if step % 100 == 0 or step == arguments.steps:
            chances = "  ".join(f"{terms}: {chance_of_no_slip(model, terms):.2f}" for terms in (3, 5, 8, 12, 16, 20))
            print(
                f"step {step}/{arguments.steps}  {time.monotonic() - started:.0f} s  loss {np.mean(recent):.3f}  "
                f"chance of no slip by number of terms  {chances}",
                flush=True,
            )
            recent.clear()

    pretrain(model, arguments.steps, arguments.seed, show)
    model.save_pretrained(arguments.out)
    build_tokenizer().save_pretrained(arguments.out)
    print(f"saved to {arguments.out}")


if __name__ == "__main__":
    main()
