"""Puts this folder on the path, gives each process what is its own, and swaps in a fast BLAS before anything imports mlx."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kernels import precompile_header  # noqa: E402
from workers import part_company  # noqa: E402

part_company()

if importlib.util.find_spec("mlx_spec.blas"):
    from mlx_spec.blas import use_fast_blas

    use_fast_blas()

precompile_header()


@pytest.fixture(scope="session", autouse=True)
def costs_of_this_run(tmp_path_factory):
    """What tiny pairs cost is timed once a run, and not kept where a user's figures are."""
    from mlx_spec import costs

    folder = tmp_path_factory.mktemp("cache")
    costs.cache_folder = lambda: folder


@pytest.fixture(scope="session", autouse=True)
def compiled_rounds():
    """Within the short replies of tests too."""
    from mlx_spec.compiled import Traces

    Traces.after = 8


@pytest.fixture(autouse=True)
def shared_pairs_stay_as_they_were():
    """Whatever ran before, in whichever process: the order of tests must not matter."""
    yield
    shared = sys.modules["helpers"].SHARED if "helpers" in sys.modules else []
    changed = [pair for pair in shared if pair.end_ids]
    for pair in changed:
        pair.end_ids = frozenset()
    assert not changed, "a pair that other tests use was left with end tokens"


# Shapes in the signatures of these two are checked while the tests run.
from jaxtyping import install_import_hook  # noqa: E402

install_import_hook(["mlx_spec.verify", "mlx_spec.sampling"], "shapecheck.checker")
