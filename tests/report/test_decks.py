"""Pictures of single stages: what they show, that they are bounded, and that text in them stays text."""

import numpy as np
import pytest

from browser import assert_sound, needs_browser, open_page
from rows import group, row
from scripted_engine import ScriptedEngine
from tasks.config import RewardConfig, SamplingConfig
from tasks.generate.rollout import Sampler, roll_out
from tasks.generate.scheduler import Scheduler, StopRules
from tasks.report.decks import carry_over_deck, generate_deck, train_deck, trajectory_table
from tasks.report.page import page
from tasks.report.timeline import Stay, Timeline
from tasks.rewards.scoring import Scorer
from tasks.trajectory import Segment, segment_texts

METRICS = {"generate/tokens": 10.0, "generate/sampling_seconds": 1.0}


def always_right(data_source, solution_str, ground_truth, extra_info):
    return 1.0


class Ids:
    def decode(self, tokens, skip_special_tokens=False):
        return " ".join(map(str, tokens))


def timeline_of(rows, steps, slots=2):
    """What the real loop records of these trajectories; each step of the scripted engine takes one second."""
    engine = ScriptedEngine(length_of=lambda name: 3, prompt_tokens=2, version=1)
    scheduler = Scheduler(
        rows,
        lambda: [],
        rules=StopRules(ready_groups=99, max_engine_steps=steps),
        max_in_flight=slots,
        max_response_tokens=10,
        version=1,
        iteration=1,
    )
    timeline = Timeline()
    reward = RewardConfig(function="test_decks:always_right", workers=0, overlong_cache=0)
    with Scorer(reward, 10) as scorer:
        roll_out(
            engine,
            scheduler,
            scorer,
            Sampler(SamplingConfig(), 1, Ids(), {}),
            timeline=timeline,
            clock=lambda: float(scheduler.counted.engine_steps),
        )
    return timeline


def test_timeline_says_which_trajectory_was_in_which_slot_and_when_it_was_cut():
    rows = [row("a", 0, segments=[(2, 0)]), row("a", 1), row("b", 0)]
    stays = {(stay.group_id, stay.member): stay for stay in timeline_of(rows, steps=2).stays}
    resumed, fresh, later = stays["a", 0], stays["a", 1], stays["b", 0]
    assert (resumed.kept, resumed.sampled, resumed.end) == (2, 1, "stop")
    assert resumed.segments == (Segment(0, 2, 0), Segment(2, 1, 1))
    assert (fresh.kept, fresh.sampled, fresh.end) == (0, 2, "cut")
    assert later.slot == resumed.slot != fresh.slot
    assert resumed.left <= later.entered < later.left == fresh.left


def test_in_flight_curve_goes_up_and_down_with_the_stays():
    curve = timeline_of([row("a", 0), row("a", 1), row("b", 0)], steps=2).in_flight()
    assert max(level for _, level in curve) == 2
    assert curve[-1][1] == 0


@needs_browser
def test_decks_open_without_complaint_and_run_no_script_of_the_data(tmp_path):
    evil = "<script>window.hacked = true</script><img src=x onerror='window.hacked = true'>"
    rows = [row(f"{evil}", 0, segments=[(2, 0)]), *group("g", [0.0, 1.0], segments=[(3, 0), (2, 1)])]
    timeline = timeline_of([row(evil, 0, segments=[(2, 0)]), row("a", 1)], steps=1)
    deck = generate_deck(timeline, rows, 1, evil, lambda tokens: evil * bool(tokens), METRICS)
    path = tmp_path / "deck.html"
    path.write_text(page(evil, deck))
    seen = open_page(path)
    assert_sound(seen, figures=3)
    assert evil in seen.text


@needs_browser
def test_carry_over_and_train_decks_show_their_figures(tmp_path):
    accounts = ("carried_in", "entered", "trained", "masked", "filtered", "failed", "discarded", "carried_out")
    ledger = {f"ledger/{kind}_{name}": 5.0 for kind in ("groups", "tokens") for name in accounts}
    names = ("loss", "gradient_norm", "entropy", "kl", "clip_fraction", "importance_weight")
    updates = [dict.fromkeys(names, 0.1 * number) for number in range(16)]
    for name, deck, figures in (
        ("carry", carry_over_deck(ledger), 2),
        ("train", train_deck(updates, {"train/updates": 16.0}), 6),
        ("nothing", train_deck([], {}), 0),
    ):
        path = tmp_path / f"{name}.html"
        path.write_text(page(name, deck))
        if figures:
            assert_sound(open_page(path), figures)
        else:
            assert "<svg" not in deck


def test_a_deck_of_512_groups_of_16_stays_below_5_megabytes():
    long = row("g", 0, segments=[(2000, version) for version in range(10)])
    rows = [long] * (512 * 16)
    stays = [
        Stay(n % 2048, f"p{n:06d}.0", n % 16, n / 100, n / 100 + 20, 100, long.segments, "cut") for n in range(10_240)
    ]
    timeline = Timeline(stays=stays, slots=2048)
    text = "<&" * 20_000
    deck = generate_deck(timeline, rows, 9, "the batch is full", lambda tokens: text[: 4 * len(tokens)], METRICS)
    assert len(deck) < 5_000_000
    assert "of 2048 slots" in deck


def test_trajectory_table_shows_best_worst_longest_and_most_often_cut():
    scored = group("scored", [0.0, 1.0])
    partial = [row("long", 0, segments=[(50, 0)]), row("cut", 0, segments=[(3, 0), (3, 1)], resumes=1)]
    shown = trajectory_table([*scored, *partial], lambda tokens: "text")
    for name in ("scored member 1", "scored member 0", "long member 0", "cut member 0"):
        assert name in shown


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_cut_inside_a_character_gives_the_character_to_the_later_segment(cut):
    content = "aé€😀".encode()
    trajectory = row(segments=[(cut, 0), (len(content) - cut, 1)]) if cut < len(content) else row(segments=[(cut, 0)])
    trajectory = trajectory.__class__(
        **{**vars(trajectory), "response_tokens": np.frombuffer(content[: trajectory.tokens], np.uint8)}
    )
    parts = [text for _, text in segment_texts(trajectory, lambda ids: bytes(ids).decode(errors="replace"))]
    whole = content[: trajectory.tokens].decode(errors="replace")
    assert "".join(parts) == whole
