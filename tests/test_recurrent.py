"""Models with recurrent and convolution state speculate exactly, as target and as draft.

A17, A52: mlx-lm refuses them or loses tokens. Here the state after the tokens that were kept is
made in the graph of the round, from one pass of the target.
"""

import os
from functools import lru_cache

import hybrids
import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from helpers import Counting, Scripted, decode, heads, mlp, plain
from mlx.utils import tree_map
from mlx_lm.models import qwen3_next
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from test_cache import Stream, random_stream
from test_round import rounds

from mlx_spec.cache import Cursor, Pass, adopt, flat, rung
from mlx_spec.compiled import Traces
from mlx_spec.engine import Decoder
from mlx_spec.memory import recall
from mlx_spec.pairs import Pair
from mlx_spec.probe import _recurrent, profile
from mlx_spec.recurrent.state import Recurrent
from mlx_spec.round import Plan, Round, State, advance
from mlx_spec.sampling import Sampling
from mlx_spec.types import Options

MASKED = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "mamba2", "granitemoehybrid", "lfm2", "lfm2_moe", "plamo2", "gear", "bailing_hybrid", "falcon_h1")
BY_ROWS = ("nemotron_h", "olmo_hybrid", "jamba", "mamba", "rwkv7", "bailing_moe_linear", "recurrent_gemma", "longcat_flash_ngram", "baichuan_m1")
NAMES = MASKED + BY_ROWS
# One of each kind: a loop over steps, matrices for all steps, a window alone, and one that knows no mask, with sliding windows.
FEW = ("qwen3_next", "mamba2", "lfm2", "recurrent_gemma")
# MLX_SPEC_FULL_TESTS=1: 300 tokens, and every k, for all of them.
FULL = bool(os.environ.get("MLX_SPEC_FULL_TESTS"))
N = 300 if FULL else 60
LONG = dict.fromkeys(FEW, 300)


@lru_cache(maxsize=None)
def pair(name, draft="noisy"):
    target = tiny.make(name) if name == "llama" else hybrids.make(name)
    drafts = {"noisy": lambda: tiny.noisy_copy(target), "same": lambda: target, "llama": lambda: tiny.make("llama", 7),
              "heads": lambda: heads(target, depths=(1, 2)), "mlp": lambda: mlp(target)}
    return Pair(target, drafts[draft]() if draft in drafts else hybrids.make(draft))


@lru_cache(maxsize=None)
def reference(name):
    return plain(pair(name).target, tiny.PROMPT, LONG.get(name, N))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_speculation_never_changes_the_tokens(name, monkeypatch):
    """A17: whatever is kept of a round, with k changing on the way."""
    monkeypatch.setattr(Traces, "after", 1 << 30)  # compiled in the tests below; here it would cost a minute
    p = pair(name)
    decoder, ids = decode(p, tiny.PROMPT, max_tokens=LONG.get(name, N), controller=Scripted(1, 4, 2, 8))
    assert ids == reference(name)
    assert decoder.stats.mode == "speculative" and 0.05 < decoder.stats.acceptance_rate < 0.95
    assert {x.masked for x in flat(p.target_profile.layers) if isinstance(x, Recurrent)} == {name in MASKED}


@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("name", NAMES if FULL else FEW)
def test_every_k_gives_the_same_tokens(name, k):
    tokens = N if FULL else 60
    decoder, ids = decode(pair(name), tiny.PROMPT, max_tokens=tokens, num_draft_tokens=k, run_ahead=k % 4 == 0)
    assert ids == reference(name)[:tokens]


@pytest.mark.parametrize("length", [1, 2, 3, 17, 700])
@pytest.mark.parametrize("name", FEW)
def test_prompts_of_any_length(name, length):
    """Of one token there is no state before the first round."""
    ids = (tiny.PROMPT * 40)[:length]
    assert decode(pair(name), ids, max_tokens=20, num_draft_tokens=3)[1] == plain(pair(name).target, ids, 20)


@pytest.mark.parametrize("target, draft", [("qwen3_next", "llama"), ("llama", "qwen3_next"), ("llama", "mamba2"), ("mamba2", "lfm2")])
def test_target_and_draft_may_keep_different_kinds_of_state(target, draft):
    p = pair(target, draft)
    for k in (1, 4):
        decoder, ids = decode(p, tiny.PROMPT, max_tokens=60, num_draft_tokens=k)
        assert ids == plain(p.target, tiny.PROMPT, 60) and decoder.stats.drafted > 50


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("ks", [(4,), (0, 3, 0, 8), (2,) + (0,) * 20, (3, (4, "lookup"), 2, (8, "lookup"), (8, "lookup"), 0)])
@pytest.mark.parametrize("name", ["qwen3_next", "recurrent_gemma"])
def test_a_twin_draft_keeps_everything_through_every_switch(name, ks, run_ahead):
    """No token is read twice into a draft's state, and none is left out."""
    decoder = Decoder(pair(name, "same"), tiny.PROMPT, Options(max_tokens=60), controller=Scripted(*ks), run_ahead=run_ahead)
    plans, build = [], decoder._plan
    decoder._plan = lambda choice: (plans.append((choice, build(choice))), plans[-1][1])[1]
    rounds = [[t for t in chunk.tokens] for chunk in decoder.chunks()]
    assert [t.id for tokens in rounds for t in tokens] == reference(name)[:60]
    drafted = [tokens for (choice, _), tokens in zip(plans, rounds) if choice.k and choice.source == "draft"]
    assert drafted and not any(t.origin == "correction" for tokens in drafted for t in tokens)


def test_a_recurrent_draft_reads_no_more_than_it_may_have_missed():
    """Rounded up to a common shape it would read far past the newest token, where MLX checks no bounds."""
    decoder = Decoder(pair("qwen3_next", "same"), tiny.PROMPT * 3, Options(max_tokens=60))
    decoder.context.read(decoder.history, 0)
    decoder.missed = 8
    assert decoder._bucket() == 9


@pytest.mark.parametrize("name", FEW)
def test_under_match_a_seed_gives_one_text_with_and_without_a_draft(name):
    options = dict(max_tokens=60, temperature=1.0, seed=5, verify="match")
    assert len({tuple(decode(pair(name), tiny.PROMPT, num_draft_tokens=k, **options)[1]) for k in (0, 4)}) == 1


@pytest.mark.parametrize("draft", ["heads", "mlp"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "mamba2"])
def test_drafts_on_hidden_states_hear_a_target_with_recurrent_layers(name, draft):
    decoder, ids = decode(pair(name, draft), tiny.PROMPT, max_tokens=40, num_draft_tokens=3)
    assert ids == reference(name)[:40] and decoder.stats.drafted > 50


@pytest.mark.parametrize("name", NAMES)
def test_after_a_round_the_state_is_that_of_the_kept_tokens_alone(name):
    """For every number of accepted drafts, against a fresh run over the same tokens one by one."""
    model, found, k = pair(name).target, pair(name).target_profile, 4
    stream, prompt = random_stream(40), 6
    caches = make_prompt_cache(model)
    model(stream[None, : prompt - 1], cache=caches)
    layers = found.for_request(2 * (k + 1))
    drafter = Stream(mx.pad(stream, (0, k + 1)))
    round = Round(found.model, layers, drafter, Sampling(), "match", tiny.VOCAB)
    history = mx.zeros((1, rung(1)), mx.uint32)
    history[0, :40] = stream
    state = State(history, mx.array([prompt]), mx.zeros((3, 2), mx.uint32), adopt(layers, caches, rung(1)), ())
    single = make_prompt_cache(model)
    model(stream[None, : prompt - 1], cache=single)
    length = prompt
    for right in [*range(k + 1), 2, 0, k]:
        drafter.right = right
        _, _, target = round.score(state, Plan(k, 1, 256))
        emitted = stream[None, length : length + k + 1]
        state = advance(state, emitted, mx.array([right]), target, ())
        for i in range(length - 1, length + right):
            model(stream[None, i : i + 1], cache=single)
        length += right + 1
        for ours, theirs in zip(_recurrent(layers, state.target), _recurrent(layers, single), strict=True):
            assert all(mx.linalg.norm(a - b) <= 1e-4 * mx.linalg.norm(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("draft", ["noisy", "heads"])
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("run_ahead", [True, False])
def test_a_round_costs_one_submission_and_one_read(draft, k, run_ahead, monkeypatch):
    events, _ = rounds(pair("qwen3_next", draft), 10, monkeypatch, num_draft_tokens=k, run_ahead=run_ahead)
    assert events == ["async_eval", "tolist"] * 10


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("mamba", "rwkv7", "longcat_flash_ngram")])
def test_the_weights_are_read_once(name, monkeypatch):
    """To rewind, the mixers run without their linear layers. Two have small ones elsewhere that run again;
    LongCat's are built again and never evaluated, for its state is tokens."""
    found, calls, original = pair(name).target_profile, [], nn.Linear.__call__
    monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: (calls.append(self), original(self, x))[1])
    run = Pass(found.model, found.layers, [x.buffers(512) for x in found.layers], Cursor(mx.array(0), 256))
    run(mx.array([[1, 2, 3, 4]]))
    once = len(calls)
    run.kept(mx.array(2))
    assert once == len(calls) > 0


def test_an_adapter_s_weights_are_read_once_as_well(monkeypatch):
    model = tiny.make("qwen3_next", 2)
    linear_to_lora_layers(model, 4, dict(rank=4, scale=20.0, dropout=0.0))
    model.update(tree_map(lambda w: mx.random.normal(w.shape) / 9, model.trainable_parameters()))
    found, calls, original = profile(model.eval()), [], LoRALinear.__call__
    monkeypatch.setattr(LoRALinear, "__call__", lambda self, x: (calls.append(self), original(self, x))[1])
    run = Pass(found.model, found.layers, [x.buffers(512) for x in found.layers], Cursor(mx.array(0), 256))
    run(mx.array([[1, 2, 3, 4]]))
    once = len(calls)
    run.kept(mx.array(2))
    assert found.reason is None and once == len(calls) > 0


def test_memory_over_plain_stays_below_a_copy_of_the_state_for_each_row():
    """k + 2 copies: the state is much larger than a round's other arrays here."""
    target = tiny.make("qwen3_next", linear_num_value_heads=64, linear_num_key_heads=64, num_hidden_layers=8)
    p, k, peaks = Pair(target, tiny.make("llama")), 4, {}
    for drafts in (0, k):
        decoder = Decoder(p, tiny.PROMPT, Options(max_tokens=None, num_draft_tokens=drafts), run_ahead=False)
        decoder.context.read(decoder.history, 0)
        for n in range(16):
            if n == 12:
                mx.clear_cache()
                before = mx.get_active_memory()
                mx.reset_peak_memory()
            decoder._fill(), decoder._emit()
        peaks[drafts] = mx.get_peak_memory() - before
        copy = sum(a.nbytes for x, arrays in zip(decoder.context.round.layers, decoder.context.state.target)
                   if isinstance(x, Recurrent) for a in arrays)
    assert copy > 1e6 and peaks[k] - peaks[0] < (k + 2) * copy


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("target, draft", [("qwen3_next", "noisy"), ("llama", "qwen3_next"), ("qwen3_next", "heads"), ("qwen3_next", "same")])
def test_a_later_turn_builds_on_what_a_reply_left(target, draft, run_ahead):
    """Wherever in a round the reply ended: only a state from before that round is of use then."""
    p = pair(target, draft)
    for n in (9, 10, 11, 12):
        decoder, _ = decode(p, tiny.PROMPT, max_tokens=n, num_draft_tokens=3, run_ahead=run_ahead)
        ids = decoder.history + list(b" and then?")
        memory = recall(decoder.leave(), p, ids)
        assert len(tiny.PROMPT) <= len(memory.ids) < len(decoder.history)
        again, got = decode(p, ids, max_tokens=20, num_draft_tokens=3, memory=memory)
        assert got == plain(p.target, ids, 20)
        if draft == "same":
            assert again.stats.acceptance_rate == 1


def test_a_prompt_that_parts_from_the_last_turn_is_read_anew():
    """A recurrent state can't be cut back to where they part."""
    p = pair("qwen3_next")
    decoder, _ = decode(p, tiny.PROMPT, max_tokens=20, num_draft_tokens=3)
    assert recall(decoder.leave(), p, decoder.history[:-8] + [5, 6, 7]) is None


def test_kv_bits_quantises_the_full_layers_as_mlx_lm_does():
    p, options = pair("qwen3_next"), dict(kv_bits=8, kv_group_size=32, quantized_kv_start=24)
    assert decode(p, tiny.PROMPT, max_tokens=60, num_draft_tokens=3, **options)[1] == plain(p.target, tiny.PROMPT, 60, **options)
    with pytest.raises(ValueError, match="max_kv_size can't be honoured: the target makes caches of its own kind"):
        decode(p, tiny.PROMPT, max_kv_size=64)


def test_a_processor_that_keeps_state_is_judged_position_by_position():
    p = pair("qwen3_next")
    decoder, ids = decode(p, tiny.PROMPT, max_tokens=30, num_draft_tokens=3, logits_processors=(Counting(),))
    assert "position by position" in decoder.stats.mode
    assert ids == plain(p.target, tiny.PROMPT, 30, logits_processors=[Counting()])


def test_weights_may_be_quantised():
    target = tiny.make("qwen3_next", 3)
    nn.quantize(target, group_size=32, bits=8)
    p = Pair(target, hybrids.make("qwen3_next"))
    assert decode(p, tiny.PROMPT, max_tokens=60, num_draft_tokens=3)[1] == plain(target, tiny.PROMPT, 60)


def test_half_precision_is_not_refused():
    for name in ("qwen3_5", "mamba2", "lfm2", "recurrent_gemma"):  # MLX multiplies experts in float32 only on a CPU
        model = hybrids.make(name, 1)
        model.set_dtype(mx.bfloat16)
        assert profile(model).reason is None


# What a later mlx-lm might change


def test_a_mixer_whose_rows_depend_on_each_other_is_refused_and_decodes_plainly(monkeypatch):
    own = qwen3_next.Qwen3NextGatedDeltaNet.__call__
    monkeypatch.setattr(qwen3_next.Qwen3NextGatedDeltaNet, "__call__",
                        lambda self, inputs, mask=None, cache=None: own(self, inputs - mx.mean(inputs, 1, keepdims=True) / 2, mask, cache))
    p = Pair(tiny.make("qwen3_next"), tiny.make("llama"))
    assert "can't be made for fewer rows" in p.target_profile.reason
    decoder, ids = decode(p, tiny.PROMPT, max_tokens=20, num_draft_tokens=3)
    assert ids == plain(p.target, tiny.PROMPT, 20) and decoder.stats.drafted == 0


def test_a_state_that_some_other_code_reads_is_refused():
    class Reading(qwen3_next.Model):
        def __call__(self, inputs, cache=None):
            return super().__call__(inputs, cache) + (0 if cache is None else sum(peek(c) for c in cache if isinstance(c, ArraysCache)))

    def peek(cache):
        return 0 * cache[1].sum()

    model = tiny.make("qwen3_next")
    model.__class__ = Reading
    assert "read by code that is not a layer's own" in profile(model).reason


def test_a_mask_that_is_ignored_is_noticed(monkeypatch):
    """Then the states are made row by row."""
    own = qwen3_next.gated_delta_update
    monkeypatch.setattr(qwen3_next, "gated_delta_update", lambda *args, **kwargs: own(*args[:8], **kwargs))
    found = profile(tiny.make("qwen3_next"))
    assert found.reason is None and not any(x.masked for x in found.layers if isinstance(x, Recurrent))
