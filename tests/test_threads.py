"""Threads, cancelling, and what is left in memory afterwards."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
import tiny
from helpers import decode, pair, plain, text_pair

import mlx_spec
from mlx_spec.compiled import Traces
from mlx_spec.pairs import Pair

OPTIONS = {"dense": {}, "quantised": dict(kv_bits=8, kv_group_size=32)}


def ids(p, **options):
    return mlx_spec.generate(p, tiny.PROMPT, max_tokens=30, **options).ids


@pytest.mark.parametrize("name, options", [
    ("llama", {}), (tiny.TINY_SW, {}), (tiny.TINY_HYB, {}), ("llama", dict(kv_bits=8, kv_group_size=32)),
    ("llama", dict(temperature=0.8, seed=1, top_p=0.9))])
def test_a_pair_made_in_one_thread_answers_in_every_other(name, options):
    """A82, A83: threads, a pool and asyncio, twice each; rotating, recurrent and quantised caches."""
    p = pair(name)
    here = ids(p, **options)
    found = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(ids(p, **options)))
        thread.start()
        thread.join(60)
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(ids, p, **options).result(60))
        found.append(asyncio.run(asyncio.to_thread(ids, p, **options)))
    assert found == [here] * 6


def test_a_pair_made_in_a_worker_answers_in_the_main_thread():
    """A82: lazily made arrays would fail here; making the pair evaluates them."""
    with ThreadPoolExecutor(1) as pool:
        p = pool.submit(lambda: Pair(tiny.make("gemma3_text"), tiny.make("gemma3_text", 1))).result(60)
    assert ids(p) == plain(p.target, tiny.PROMPT, 30)


def test_a_reply_may_move_between_threads():
    """A web server advances one generator from many threads."""
    p = pair()
    chunks = mlx_spec.stream_generate(p, tiny.PROMPT, max_tokens=30, num_draft_tokens=2)
    got = []
    while True:
        with ThreadPoolExecutor(1) as pool:
            chunk = pool.submit(next, chunks, None).result(60)
        if chunk is None:
            break
        got += [t.id for t in chunk.tokens]
    assert got == plain(p.target, tiny.PROMPT, 30)


def test_many_requests_at_once_take_turns_and_get_their_own_text():
    """A84, A80: no abort, no mixing."""
    p = pair()
    prompts = [tiny.PROMPT[i:] for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda prompt: mlx_spec.generate(p, prompt, max_tokens=20).ids, prompts))
    assert got == [plain(p.target, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_cancel_during_prefill_stops_before_the_next_chunk(after):
    """A77: not many tokens later; nothing is emitted, the engine is free."""
    asked, read = [], []

    def should_cancel():
        asked.append(1)
        return len(asked) > after

    result = mlx_spec.generate(pair(), tiny.PROMPT * 20, prefill_step_size=32, should_cancel=should_cancel,
                               on_progress=lambda done, total: read.append((done, total)))
    assert (result.finish_reason, result.tokens) == ("cancelled", ())
    assert read == [(32 * i, 380) for i in range(after + 1)]
    assert ids(pair()) == plain(pair().target, tiny.PROMPT, 30)


def test_a_cancel_between_rounds_keeps_what_was_made():
    """A77: within one round, with the round in flight drained."""
    made = []

    def should_cancel():
        return len(made) > 5

    decoder = None
    chunks = mlx_spec.stream_generate(text_pair(), tiny.PROMPT, max_tokens=200, should_cancel=should_cancel)
    last = None
    for last in chunks:
        made += last.tokens
    assert last.finish_reason == "cancelled"
    assert 5 < len(made) <= 5 + 2 * 5
    assert [t.id for t in made] == plain(text_pair().target, tiny.PROMPT, len(made))
    assert last.stats.generation_tokens == len(made) and decoder is None


def test_a_reply_that_is_closed_or_dropped_leaves_nothing_in_flight():
    """A76, A78: what a closed tab does to the generator; twenty times, then a normal request."""
    p = pair()
    ids(p)
    gc.collect()
    before = mx.get_active_memory()
    for i in range(20):
        chunks = mlx_spec.stream_generate(p, tiny.PROMPT, max_tokens=500)
        next(chunks), next(chunks)
        if i % 2:
            chunks.close()
        del chunks
    gc.collect()
    assert mx.get_active_memory() <= 1.05 * before
    assert ids(p) == plain(p.target, tiny.PROMPT, 30)


def test_a_reply_can_be_closed_from_another_thread():
    """A76, A80: it ends after the round it is in; no 'generator already executing'."""
    stream = mlx_spec.stream_generate(pair(), tiny.PROMPT, max_tokens=None)
    started, count = threading.Event(), []

    def read():
        for _ in stream:
            count.append(1)
            started.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert started.wait(60)
    stream.close()
    thread.join(30)
    assert not thread.is_alive()
    assert stream.result().finish_reason == "cancelled"


@pytest.mark.parametrize("chunks", [0, 2])
def test_a_closed_reply_still_has_a_result(chunks):
    stream = mlx_spec.stream_generate(pair(), tiny.PROMPT, max_tokens=100)
    seen = [t for _ in range(chunks) for t in next(stream).tokens]
    stream.close()
    result = stream.result()
    assert result.finish_reason == "cancelled" and list(result.tokens) == seen


@pytest.mark.parametrize("stop, finish", [(["x"], "stop_string"), ([], "length")])
def test_the_finish_reason_is_the_true_cause(stop, finish):
    """A79: never 'cancelled' when nobody cancelled, however often it is asked."""
    p = text_pair()
    text = mlx_spec.generate(p, tiny.PROMPT, max_tokens=12).text
    stop = [text[5]] if stop else []
    for _ in range(60):
        result = mlx_spec.generate(p, tiny.PROMPT, max_tokens=12, stop=stop, should_cancel=lambda: False)
        assert result.finish_reason == finish


def test_memory_is_flat_over_many_requests():
    """A81: sixty different short prompts; what is active and what is cached stay where they were."""
    p = pair()
    active, cached = [], []
    gc.collect()
    gc.freeze()  # what other tests left is not looked through sixty times
    for i in range(60):
        mlx_spec.generate(p, [*tiny.PROMPT[: 3 + i % 16], i], max_tokens=40)
        gc.collect()
        active.append(mx.get_active_memory())
        cached.append(mx.get_cache_memory())
    gc.unfreeze()
    assert max(active[10:]) <= 1.02 * max(active[:10])
    assert max(cached[1:]) < 1e5  # freed buffers are given back at the end of a reply


def test_a_pair_remembers_a_bounded_number_of_compiled_rounds(monkeypatch):
    """A81: each new temperature is a new trace."""
    monkeypatch.setattr(Traces, "most", 5)
    p = Pair(tiny.make("llama"), tiny.make("llama", 1))
    for i in range(12):
        mlx_spec.generate(p, tiny.PROMPT, max_tokens=6, temperature=0.5 + i / 100, seed=1)
    assert len(p.compiled) == 5


def test_a_long_prompt_is_read_in_chunks_with_bounded_memory():
    """A68: logits only where they are needed; a smaller step needs less; the peak is reported."""
    peaks = {}
    prompt = tiny.PROMPT * 300
    for step in (64, 4096):
        before = mx.get_active_memory()
        result = mlx_spec.generate(pair(), prompt, max_tokens=4, prefill_step_size=step)
        peaks[step] = result.stats.peak_memory_bytes - before
    caches = 2 * 2 * 2 * 32 * 4 * 7680
    everything = len(prompt) * tiny.VOCAB * 4  # the logits of the whole prompt, for one model
    assert peaks[64] < peaks[4096]
    assert peaks[64] < 3 * caches + everything / 2


def test_a_draft_that_decodes_plainly_leaves_the_target_plain_and_says_so():
    """Decided when the pair is made, with the reason named."""
    target = tiny.make("llama")
    p = Pair(target, tiny.make("internlm3"))
    assert any("draft can't speculate" in note and "rotary scaling" in note for note in p.notes)
    decoder, got = decode(p, tiny.PROMPT, max_tokens=20)
    assert got == plain(target, tiny.PROMPT, 20) and "rotary scaling" in decoder.stats.mode


@pytest.mark.parametrize("name", tiny.LENGTH_DEPENDENT)
def test_what_the_probe_finds_unsuited_decodes_plainly_with_mlx_lms_tokens(name):
    """No missing tokens; never silently wrong."""
    p = pair(name)
    decoder, got = decode(p, tiny.PROMPT * 2, max_tokens=60, num_draft_tokens=5)
    assert got == plain(p.target, tiny.PROMPT * 2, 60)
    assert decoder.stats.mode.startswith("plain (the target decodes plainly") and decoder.stats.drafted == 0
    assert any(note.startswith("plain decoding: the target can't speculate") for note in p.notes)
