"""The fast BLAS goes in before MLX, or not at all. Each case is a process: a library can't be unloaded."""

import json
import os
import subprocess
import sys

import pytest

from mlx_spec import blas

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
has_fast = pytest.mark.skipif(not (sys.platform.startswith("linux") and blas._candidates()), reason="no fast BLAS here")


def run(code: str, **env: str):
    clean = {k: v for k, v in os.environ.items() if k not in ("MLX_SPEC_BLAS", "LD_PRELOAD")}
    # The file by itself, because the package swaps the library in when it is imported.
    head = ("import importlib.util as u, json; s = u.spec_from_file_location('blas', %r); "
            "blas = u.module_from_spec(s); s.loader.exec_module(blas); " % blas.__file__)
    out = subprocess.run([sys.executable, "-c", head + code], env=clean | env, capture_output=True, text=True, check=True)
    assert not out.stderr
    return json.loads(out.stdout)


USE = "print(json.dumps([blas.use_fast_blas(), blas.use_fast_blas(), blas.blas_in_use()]))"


@has_fast
def test_an_installed_fast_blas_is_used_and_timing_shows_it():
    first, second, in_use = run(USE)
    assert first == second == in_use["path"] and os.path.exists(first)
    assert in_use["blas"] in ("openblas", "mkl") and in_use["ms"] > 0


@linux_only
def test_off_means_off_and_timing_shows_it():
    path, _, in_use = run(USE, MLX_SPEC_BLAS="off")
    assert path is None and in_use["blas"] == "reference" and in_use["path"] is None


@has_fast
def test_after_mlx_it_is_too_late_and_none_is_said():
    path, _, in_use = run("import mlx.core; " + USE)
    assert path is None and in_use["blas"] == "reference"


@has_fast
def test_a_library_can_be_named():
    named = blas._candidates()[0]
    assert run("print(json.dumps(blas.use_fast_blas()))", MLX_SPEC_BLAS=named) == named


def test_where_there_is_none_nothing_is_said():
    code = "blas._candidates = lambda: ['/nowhere/libblas.so']; print(json.dumps(blas.use_fast_blas()))"
    assert run(code) is None


def test_a_mac_is_left_alone():
    assert run("blas.sys.platform = 'darwin'; print(json.dumps(blas.use_fast_blas()))") is None
