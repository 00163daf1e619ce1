"""What the doctor says of machines that it is told about: each line of trouble says what to do."""

import re
import sys
import urllib.error
from pathlib import Path

import pytest

from mlx_spec import cli, doctor
from mlx_spec.names import find

DEMO = find("demo")
MISSING = find("qwen3-8b")
LOW_POWER = "Currently in use:\n lowpowermode         1\n"


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    def refuse(request, timeout):
        assert timeout <= 5
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(doctor.urllib.request, "urlopen", refuse)
    monkeypatch.setattr(doctor, "is_offline", lambda: False)
    monkeypatch.setattr(doctor.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))


def test_a_line_for_everything_and_below_trouble_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "blas_in_use", lambda: {"blas": "openblas", "ms": 12.0})
    code = cli.main(["doctor", "--pair", "qwen3-8b"])
    lines = capsys.readouterr().out.splitlines()
    names = [line[2:].split()[0] for line in lines if not line.startswith("  " * 6)]
    system = ["power"] if sys.platform == "darwin" else ["BLAS", "compiler"]
    assert names == ["device", "memory", "mlx", "mlx-lm", *system, "hub", "models", "cache"]
    at = next(i for i, line in enumerate(lines) if line.startswith("! hub"))
    assert code == 1 and lines[at + 1].strip().startswith("-> check the network")
    assert cli.main(["doctor", "--pair", "none"]) == 1 and "demo" in capsys.readouterr().err


def test_memory_is_held_against_what_the_pair_needs():
    assert doctor._memory(DEMO, 8 * 10**9).todo is None
    assert "smaller pair" in doctor._memory(MISSING, 4 * 10**9).todo


def test_low_power_mode_is_named_and_unknown_stays_unknown():
    assert "Low Power Mode" in doctor._power(LOW_POWER).todo
    assert doctor._power(LOW_POWER.replace("1", "0")) == ("power", "full", None)
    assert doctor._power("") == ("power", "unknown", None)


@pytest.mark.parametrize("path, said", [(None, "libopenblas0-pthread"), ("/usr/lib/libblas.so", "ask again")])
def test_a_slow_blas_is_told_by_timing_and_a_busy_machine_is_not_blamed_on_it(path, said, monkeypatch):
    monkeypatch.setattr(doctor, "use_fast_blas", lambda: path)
    assert said in doctor._blas({"blas": "reference", "ms": 230.0}).todo
    assert doctor._blas({"blas": "openblas", "ms": 30.0}).todo is None


def test_the_hub_is_asked_briefly_and_never_when_offline(monkeypatch):
    assert doctor._hub(MISSING).todo and "can't be reached" in doctor._hub(MISSING).found
    monkeypatch.setattr(doctor, "is_offline", lambda: True)
    monkeypatch.setattr(doctor.urllib.request, "urlopen", None)  # would fail
    assert "HF_HUB_OFFLINE" in doctor._hub(MISSING).found and "unset it" in doctor._hub(MISSING).todo


def test_a_full_or_closed_folder_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**9})())
    assert "MLX_SPEC_CACHE" in doctor._folder(("cache", tmp_path / "a/b")).todo
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert "HF_HOME" in doctor._folder(("models", tmp_path)).todo


def test_the_versions_that_were_tested_are_those_that_are_pinned(monkeypatch):
    pinned = dict(re.findall(r'"(mlx|mlx-lm)==([\d.]+)', (Path(__file__).parents[1] / "pyproject.toml").read_text()))
    assert pinned == doctor.TESTED
    monkeypatch.setattr(doctor, "version", lambda package: "0.20.0")
    assert "pip install mlx==" in doctor._version("mlx").todo
