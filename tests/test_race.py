"""The race: turns on one device, each reply by its own clock; the thread that owns MLX; identity."""

import threading
import time
from itertools import groupby

import mlx.core as mx
import pytest
import tiny
from helpers import pair, plain

from mlx_spec import identity
from mlx_spec.engine import Decoder
from mlx_spec.identity import compare
from mlx_spec.race import Lane, Stopwatch, race
from mlx_spec.types import Options
from mlx_spec.worker import Worker


class Ticks:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Paced:
    """A decoder whose chunks each take `step` seconds of the clock."""

    def __init__(self, ticks, watch, steps, step):
        self.ticks, self.watch, self.steps, self.step = ticks, watch, steps, step
        self.settled, self.closed = 0, False

    def chunks(self):
        try:
            for i in range(self.steps):
                self.ticks.now += self.step
                yield i
        finally:
            self.closed = True

    def settle(self):
        self.settled += 1
        self.ticks.now += 0.01  # waiting for what is in flight counts


def lanes(*paces):
    ticks, found = Ticks(), []
    for i, (steps, step) in enumerate(paces):
        watch = Stopwatch(ticks)
        found.append(Lane(f"lane {i}", Paced(ticks, watch, steps, step), watch))
    return found, ticks


def test_at_every_moment_both_have_had_the_same_time():
    (a, b), ticks = lanes((40, 0.1), (40, 0.03))
    seen = {a.name: 0, b.name: 0}
    for lane, _ in race([a, b]):
        seen[lane.name] += 1
        if seen[a.name] < 40 and seen[b.name] < 40:
            assert abs(a.watch() - b.watch()) <= 0.25 + 0.1 + 0.01
    assert seen == {a.name: 40, b.name: 40}
    assert a.watch() + b.watch() == pytest.approx(ticks.now)  # nobody's time is lost or counted twice
    assert a.decoder.settled and b.decoder.settled


def test_a_slice_is_a_quarter_second_and_ends_with_nothing_in_flight():
    (a, b), _ = lanes((60, 0.02), (60, 0.02))
    order = [lane.name for lane, _ in race([a, b])]
    turns = [len(list(group)) for _, group in groupby(order)]
    assert all(12 <= n <= 14 for n in turns[:-4]) and min(a.decoder.settled, b.decoder.settled) >= len(turns) // 2


def test_closing_a_race_closes_every_reply():
    (a, b), _ = lanes((100, 0.1), (100, 0.1))
    running = race([a, b])
    for _ in range(10):
        next(running)
    running.close()
    assert a.decoder.closed and b.decoder.closed


def test_replies_that_take_turns_are_those_of_runs_by_themselves():
    p, found = pair(), {}
    for name, k in (("plain", 0), ("speculative", 3)):
        watch = Stopwatch()
        found[name] = Lane(name, Decoder(p, tiny.PROMPT, Options(max_tokens=60, num_draft_tokens=k), clock=watch), watch)
    ids = {name: [] for name in found}
    began = time.perf_counter()
    for lane, chunk in race(list(found.values()), slice_s=0.01):
        ids[lane.name] += [t.id for t in chunk.tokens]
    took = time.perf_counter() - began
    expected = plain(p.target, tiny.PROMPT, 60)
    assert ids == {"plain": expected, "speculative": expected}
    stats = [lane.decoder.stats for lane in found.values()]
    assert sum(s.prompt_s + s.generation_s for s in stats) <= took
    assert all(0 < s.ttft_s <= s.prompt_s + s.generation_s for s in stats)


# the worker


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


def test_jobs_run_one_at_a_time_in_order_and_know_their_place(worker):
    """A90: a second visitor sees how many are before him."""
    go, order = threading.Event(), []

    def work(name):
        def run(job):
            order.append(name)
            go.wait(5)
            job.tell(name)
        return run

    jobs = [worker.ask(work(i)) for i in range(3)]
    while not order:
        time.sleep(0.01)
    assert [job.place for job in jobs] == [0, 1, 2] and order == [0]
    go.set()
    assert [job.result() for job in jobs] == [[0], [1], [2]] and order == [0, 1, 2]
    assert [job.place for job in jobs] == [0, 0, 0]


def test_a_job_that_waits_is_cancelled_without_a_start_and_no_other_is_touched(worker):
    go, ran = threading.Event(), []
    first = worker.ask(lambda job: go.wait(5))
    second = worker.ask(lambda job: ran.append("second"))
    third = worker.ask(lambda job: ran.append("third"))
    second.cancel()
    assert third.place == 1
    go.set()
    assert first.result() == second.result() == third.result() == [] and ran == ["third"]


def test_an_error_reaches_who_asked_and_the_worker_lives_on(worker):
    def wrong(job):
        job.tell("half")
        raise ValueError("no")

    job, seen = worker.ask(wrong), []
    with pytest.raises(ValueError, match="no"):
        for event in job:
            seen.append(event)
    assert seen == ["half"] and worker.ask(lambda job: job.tell(1)).result() == [1]


def test_everything_mlx_runs_in_the_workers_thread(worker):
    """A82, A84: twenty visitors from threads of their own; loading, decoding and freeing in one."""
    made, threads = [], set()

    def load(job):
        made.append(pair())
        threads.add(threading.current_thread().name)

    worker.ask(load).result()
    results = {}

    def visit(i):
        def run(job):
            threads.add(threading.current_thread().name)
            decoder = Decoder(made[0], tiny.PROMPT, Options(max_tokens=10, should_cancel=job.cancelled))
            for chunk in decoder.chunks():
                job.tell([t.id for t in chunk.tokens])
        results[i] = sum(worker.ask(run).result(), [])

    visitors = [threading.Thread(target=visit, args=(i,)) for i in range(20)]
    [t.start() for t in visitors], [t.join() for t in visitors]
    assert threads == {"mlx"} and all(ids == plain(made[0].target, tiny.PROMPT, 10) for ids in results.values())


def test_a_cancelled_reply_ends_within_a_round_and_the_next_one_runs(worker):
    p = pair()

    def run(job):
        for chunk in Decoder(p, tiny.PROMPT, Options(max_tokens=None, should_cancel=job.cancelled)).chunks():
            job.tell(chunk)

    job, seen = worker.ask(run), []
    for chunk in job:
        seen.append(chunk)
        if len(seen) == 3:
            job.cancel()
    assert seen[-1].finish_reason == "cancelled"
    assert worker.ask(lambda job: job.tell("next")).result() == ["next"]


def test_a_closed_worker_takes_no_jobs_and_cancels_those_it_has():
    worker = Worker()
    job = worker.ask(lambda job: [time.sleep(0.01) for _ in iter(job.cancelled, True)])
    waiting = worker.ask(lambda job: job.tell("never"))
    worker.close()
    assert job.result() == waiting.result() == []
    with pytest.raises(RuntimeError, match="closed"):
        worker.ask(lambda job: None)


def test_events_may_be_waited_for_with_patience(worker):
    go = threading.Event()
    events = worker.ask(lambda job: go.wait(5)).events(timeout=0.01)
    assert next(events) is None
    go.set()
    assert [e for e in events if e is not None] == []


# identity


def test_the_same_tokens_are_identical_as_far_as_both_go():
    assert compare(pair(), [1], [2, 3, 4], [2, 3]).kind == "identical"
    assert str(compare(pair(), [1], [2, 3], [2, 3])) == "identical"


def test_a_wrong_token_is_a_bug_and_a_near_tie_is_not(monkeypatch):
    p = pair()
    ids = plain(p.target, tiny.PROMPT, 12)
    wrong = [*ids[:5], (ids[5] + 1) % 200, *ids[6:]]
    found = compare(p, tiny.PROMPT, ids, wrong)
    assert found.kind == "BUG" and found.at == 5 and found.gap > 1e-3 and "mismatch at token 5" in str(found)
    logits = p.target(mx.array([tiny.PROMPT + ids[:5]]))[0, -1]
    best = mx.sort(logits)[-2:].tolist()
    assert found.gap == pytest.approx(best[1] - best[0], rel=1e-3)
    monkeypatch.setitem(identity.TIES, mx.float32, 100.0)
    assert compare(p, tiny.PROMPT, ids, wrong).kind == "tie"


@pytest.mark.parametrize("options", [dict(temperature=0.8), dict(temperature=1.0, top_p=0.9, repetition_penalty=1.2)], ids=str)
def test_at_a_temperature_the_scores_are_those_that_match_draws_by(options):
    """The token drawn is the argmax of what `compare` looks at, at every position."""
    checked = Options(max_tokens=12, num_draft_tokens=0, verify="match", seed=5, **options)
    ids = [t.id for c in Decoder(pair(), tiny.PROMPT, checked).chunks() for t in c.tokens]
    for at, token in enumerate(ids):
        scores = identity._scores(pair(), tiny.PROMPT + ids[:at], checked, 5)
        assert mx.argmax(scores).item() == token
