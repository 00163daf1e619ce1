"""Prompt lookup on the device and what the host knows of it; every switch of k and source in the engine."""

import random

import mlx.core as mx
import pytest
import tiny
from helpers import Scripted, decode, pair, plain

from mlx_spec.control import LOOKUP, Fixed
from mlx_spec.drafters import lookup
from mlx_spec.drafters.lookup import Seen

SWITCHES = [(0, (3, LOOKUP), 0, (8, LOOKUP)), (0, 3, 0, 8), (3, (4, LOOKUP), 3), ((2, LOOKUP),) * 5 + (4, 0), ((8, LOOKUP), (8, LOOKUP), 1)]


def searched(ids, k):
    """The definition: the longest of 4 to 2 newest tokens, its most recent earlier end, what followed, round and round."""
    for n in range(min(4, len(ids) - 1), 1, -1):
        for end in range(len(ids) - 2, n - 2, -1):
            if ids[end - n + 1 : end + 1] == ids[-n:]:
                return [ids[end + 1 + i % (len(ids) - 1 - end)] for i in range(k)]
    return None


@pytest.mark.parametrize("alphabet", [2, 5, 40])
def test_device_and_host_find_what_the_definition_says(alphabet):
    draw = random.Random(alphabet)
    for _ in range(60):
        ids = [draw.randrange(alphabet) for _ in range(draw.randrange(1, 60))]
        history = mx.array([ids + [0] * (64 - len(ids))], dtype=mx.uint32)
        found, wanted = lookup.propose(history, mx.array([len(ids)]), 5).tolist()[0], searched(ids, 5)
        assert wanted is None or found == wanted
        matched = Seen(ids).matched()
        assert (matched >= 2) == (wanted is not None) and matched != 1


def test_the_host_counts_how_far_back_a_match_goes():
    phrase = list(range(30))
    assert Seen(phrase + [99] + phrase[:7]).matched() == 7
    assert Seen(phrase + [99] + phrase).matched() == 16
    seen = Seen(phrase)
    assert seen.matched() == 0
    seen.add([99, *phrase[:3]])
    assert seen.matched() == 3


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("ks", SWITCHES)
@pytest.mark.parametrize("draft", ["same", "noisy", "deep heads", "reduced mlp"])
def test_every_switch_of_source_changes_no_token_and_a_twin_keeps_everything(draft, ks, run_ahead):
    """A30: lookup to draft and back; the draft catches up on what it missed."""
    p = pair(draft=draft)
    decoder, ids = decode(p, tiny.PROMPT * 2, controller=Scripted(*ks), max_tokens=120, run_ahead=run_ahead)
    assert ids == plain(p.target, tiny.PROMPT * 2, 120)
    stats = decoder.stats
    assert stats.looked_up_accepted <= stats.looked_up < stats.drafted or stats.looked_up in (0, stats.drafted)
    if draft == "same":
        assert stats.accepted - stats.looked_up_accepted == stats.drafted - stats.looked_up


@pytest.mark.parametrize("ks", SWITCHES)
def test_a_seed_gives_one_text_by_match_through_every_switch(ks):
    options = dict(max_tokens=80, temperature=0.8, seed=3, verify="match")
    wanted = decode(pair(), tiny.PROMPT * 2, num_draft_tokens=0, **options)[1]
    assert decode(pair(), tiny.PROMPT * 2, controller=Scripted(*ks), **options)[1] == wanted


def test_a_reply_that_repeats_is_looked_up():
    """A13: the same phrase again and again costs a fraction of the rounds."""
    p = pair(draft=None)
    text = plain(p.target, tiny.PROMPT, 60)
    prompt = tiny.PROMPT + text + tiny.PROMPT[-1:] + tiny.PROMPT  # what the reply to the second asking repeats in part
    decoder, ids = decode(p, prompt, controller=Fixed(4, LOOKUP), max_tokens=60)
    assert ids == plain(p.target, prompt, 60)
    assert decoder.stats.looked_up == decoder.stats.drafted > 0 and decoder.stats.mode.startswith("speculative by prompt lookup")


@pytest.mark.parametrize("options", [{}, dict(temperature=1.0, seed=4)])
def test_a_banned_id_that_is_looked_up_never_comes_out(options):
    """A43: the prompt is rich in it."""
    _, ids = decode(pair(draft=None), [7, 42, 9, 42] * 12, controller=Fixed(3, LOOKUP), max_tokens=80,
                    logit_bias={42: float("-inf")}, **options)
    assert 42 not in ids


@pytest.mark.parametrize("shortest, longest", [(1, 2), (2, 4), (8, 8)])
def test_the_length_of_a_match_changes_no_token(shortest, longest, monkeypatch):
    """A46: very short n-grams corrupted tool calls elsewhere; here a lookup is checked like any draft."""
    monkeypatch.setattr(lookup, "SHORTEST", shortest)
    monkeypatch.setattr(lookup, "LONGEST", longest)
    prompt = list(b'[{"name":"weather","arguments":{"city":"Paris"}}]' * 3)
    p = pair("qwen2", None)
    assert decode(p, prompt, controller=Fixed(4, LOOKUP), max_tokens=60)[1] == plain(p.target, prompt, 60)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("draft", ["same", "deep heads", None])
def test_a_prompt_too_short_to_look_up_decodes_all_the_same(n, draft):
    p = pair(draft=draft)
    _, ids = decode(p, [10, 7, 10][:n], controller=Scripted((4, LOOKUP), (2, LOOKUP), 3 if draft else 0), max_tokens=30)
    assert ids == plain(p.target, [10, 7, 10][:n], 30)


@pytest.mark.parametrize("name", [tiny.TINY_SW, "gemma3_text", tiny.TINY_HYB])
def test_windows_and_recurrent_states_hold_through_long_lookups(name):
    p = pair(name, "same")
    decoder, ids = decode(p, tiny.PROMPT * 3, controller=Scripted(3, *[(8, LOOKUP)] * 6, 8, 0), max_tokens=120)
    assert ids == plain(p.target, tiny.PROMPT * 3, 120)
    assert decoder.stats.accepted - decoder.stats.looked_up_accepted == decoder.stats.drafted - decoder.stats.looked_up


def test_a_later_turn_builds_on_rounds_that_were_looked_up():
    p = pair(draft="same")
    first, ids = decode(p, tiny.PROMPT, controller=Scripted((4, LOOKUP), 3, (8, LOOKUP), (8, LOOKUP)), max_tokens=41)
    prompt = [*tiny.PROMPT, *ids, 65, 66]
    decoder, later = decode(p, prompt, memory=first.leave(), num_draft_tokens=4, max_tokens=40)
    assert later == plain(p.target, prompt, 40) and decoder.stats.acceptance_rate == 1


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("ks", [(0, 0, 3), (0, 0, 0, 0, 3), ((8, LOOKUP), 3), (2, (8, LOOKUP), 2)])
def test_a_draft_with_windows_reads_nothing_of_the_prompt_again(ks, run_ahead):
    """The prefill keeps of a window only what the next token sees; a prompt's token read again would
    see less, and a full layer would remember that for ever."""
    p = pair(tiny.TINY_SW, "same")
    stats = decode(p, tiny.PROMPT * 3, controller=Scripted(*ks), max_tokens=60, run_ahead=run_ahead)[0].stats
    assert stats.accepted - stats.looked_up_accepted == stats.drafted - stats.looked_up > 0
