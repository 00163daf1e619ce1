"""`mlx_spec pairs --architectures`: how each architecture of the installed mlx-lm is handled, by running it."""

import json
import os
import re
import sys

import pytest

from mlx_spec import architectures, cli
from mlx_spec.architectures import NOT_TRIED, ONE_PASS, PLAIN, Verdict, verdict

# Those that mlx-lm's own caches can't speculate with, or that looked at lengths from Python.
EXACT = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "mamba2", "nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2", "lfm2_moe",
    "jamba", "mamba", "rwkv7", "bailing_moe_linear", "recurrent_gemma", "baichuan_m1", "plamo2", "longcat_flash_ngram",
    "deepseek_v32", "glm_moe_dsa", "longcat_flash", "minimax_m3_vl", "afm7", "llama4", "llama4_text", "gpt_bigcode",
)


@pytest.mark.parametrize("name", EXACT)
def test_no_architecture_that_can_be_rewound_decodes_plainly(name):
    assert verdict(name) == Verdict(name, ONE_PASS, None)


@pytest.mark.parametrize("name, why", [
    ("internlm2", "dynamic rotary scaling"), ("internlm3", "dynamic rotary scaling"), ("phi3small", r"other logits .*by 0\.")])
def test_what_stays_plain_says_why(name, why):
    """mlx-lm's phi3small adds a mask that is true and false to its scores, so its rows see those after them."""
    found = verdict(name)
    assert found.handled == PLAIN and re.search(why, found.reason)


def test_every_module_of_mlx_lm_has_a_config_or_is_no_architecture():
    """A size that the table misses would make a large model, or none; these need what is not here."""
    missing = {name for name in architectures.names() if not made(name)}
    assert missing <= {"olmo", "prism_hadamard_qwen35"}


def made(name):
    try:
        module = architectures._module(name)
        return not hasattr(module, "ModelArgs") or bool(module.ModelArgs.from_dict(architectures.config(name)))
    except (Exception, SystemExit):
        return False


def test_the_command_prints_what_was_found_and_its_progress_apart(monkeypatch, capsys):
    monkeypatch.setattr(architectures, "names", lambda: ["activations", "internlm3", "llama", "olmo"])
    assert cli.main(["pairs", "--architectures"]) == 0
    assert capsys.readouterr().err == ""  # a file that stderr goes to gets no progress
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["pairs", "--architectures", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [(v["name"], v["handled"]) for v in json.loads(out)] == [
        ("internlm3", PLAIN), ("llama", ONE_PASS), ("olmo", NOT_TRIED)]
    assert "2: llama" in err


def ends_at_llama(name):
    if name == "llama":
        os._exit(1)
    return Verdict(name, ONE_PASS)


def test_an_architecture_that_ends_the_process_is_not_tried_and_the_rest_goes_on(monkeypatch):
    monkeypatch.setattr(architectures, "names", lambda: ["gemma", "llama", "phi"])
    monkeypatch.setattr(architectures, "verdict", ends_at_llama)
    assert [(v.name, v.handled) for v in architectures.verdicts()] == [
        ("gemma", ONE_PASS), ("llama", NOT_TRIED), ("phi", ONE_PASS)]
