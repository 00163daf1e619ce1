"""When a round's shape is compiled, and which ones are kept."""

import mlx.core as mx
import pytest
import tiny
from helpers import decode

from mlx_spec.bench.arms import compile_after
from mlx_spec.compiled import Traces
from mlx_spec.pairs import Pair

DRAWN = dict(temperature=0.9, seed=1)
REQUESTS = [{}, dict(logit_bias={t: -50.0 for t in range(0, 256, 2)}), dict(logit_bias={t: -50.0 for t in range(1, 256, 2)}),
            dict(repetition_penalty=1.5), dict(repetition_penalty=1.5, repetition_context_size=3), dict(presence_penalty=1.5),
            dict(frequency_penalty=1.5), DRAWN, DRAWN | dict(temperature=0.5), DRAWN | dict(top_p=0.3), DRAWN | dict(top_k=2),
            *(DRAWN | dict(verify=rule) for rule in ("token", "block")), dict(kv_bits=8, kv_group_size=32, quantized_kv_start=0),
            dict(max_kv_size=24), dict(repetition_penalty=1.5, presence_penalty=1.5),
            dict(repetition_penalty=1.5, presence_penalty=1.5, repetition_context_size=3)]


@pytest.fixture
def build():
    return lambda x: x + 1


def test_a_shape_is_compiled_once_it_has_been_run_often(monkeypatch, build):
    monkeypatch.setattr(Traces, "after", 3)
    traces = Traces()
    steps = [traces.step("a", build) for _ in range(5)]
    assert steps[0] is steps[1] is build and steps[2] is steps[3] is steps[4] is not build
    assert traces.step("b", build) is build and steps[2](mx.array(1)).item() == 2


def test_of_more_shapes_than_are_kept_the_one_longest_unused_is_forgotten(monkeypatch, build):
    monkeypatch.setattr(Traces, "after", 2)
    monkeypatch.setattr(Traces, "most", 2)
    traces = Traces()
    for key in "aabba":
        traces.step(key, build)
    traces.step("c", build)
    assert len(traces) == 2 and traces.step("a", build) is not build
    assert traces.step("b", build) is build  # it begins anew
    traces.clear()
    assert len(traces) == 0


@pytest.mark.parametrize("k", [0, 2])
def test_a_compiled_round_has_the_options_of_its_own_request_and_no_others(k, monkeypatch):
    """One after the other on one pair, twice, so that every trace there is could be taken for another's."""
    target = tiny.make("llama")
    p = Pair(target, tiny.noisy_copy(target))
    ask = lambda options: decode(p, tiny.PROMPT, max_tokens=24, num_draft_tokens=k, **options)[1]  # noqa: E731
    wanted = [(p.compiled.clear(), ask(options))[1] for options in REQUESTS]
    monkeypatch.setattr(Traces, "most", 1000)
    p.compiled.clear()
    assert [ask(options) for options in REQUESTS * 2] == wanted * 2


def test_a_warm_up_compiles_a_shape_that_was_run_before(build):
    """As the bench counts rounds first; it would be traced while it is timed."""
    traces = Traces()
    traces.step("a", build), traces.step("a", build)
    with compile_after(1):
        warm = traces.step("a", build)
        assert warm is not build and traces.step("a", build) is warm
    assert traces.step("a", build) is warm
