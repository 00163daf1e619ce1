"""When a round's shape is compiled, and which ones are kept."""

import mlx.core as mx
import pytest

from mlx_spec.compiled import Traces


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
