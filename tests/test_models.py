"""models/: what ships, and the page that says how a draft is trained.

`python tests/test_models.py` writes the estimates into models/README.md again.
"""

import re
import shlex
from pathlib import Path

import pytest
from estimate import Sizes, estimate

from mlx_spec import cli
from mlx_spec.hub import readable
from mlx_spec.names import catalogue, models_folder

PAGE = Path(__file__).parents[1] / "models/README.md"
TABLE = re.compile(r"(<!-- estimates -->\n).*?(<!-- end -->)", re.S)

QWEN3_8B = dict(hidden_size=4096, num_hidden_layers=36, vocab_size=151936, num_attention_heads=32, head_dim=128,
                num_key_value_heads=8, intermediate_size=12288)
QWEN3_8B_HEADS = 4 * 4096 * 4096 + 2 * 4096 * 4096 + 4096 * 128 * (2 * 64 + 2 * 21) + 3 * 4096 * 12288  # weights of a step
# chip: float32 TFLOPS of its GPU (press figures), GB/s
CHIPS = {"M4, 10 GPU cores": (4.3, 120), "M4 Pro, 20 cores": (8.6, 273), "M4 Max, 40 cores": (17.2, 546)}
TOKENS = (500_000, 2_000_000)


def estimates() -> str:
    lines = ["| chip | answer tokens | text | states | training | memory | disk |", "|---|---|---|---|---|---|---|"]
    target = Sizes.of(QWEN3_8B, bits=4.5)
    for chip, (tflops, bandwidth) in CHIPS.items():
        for tokens in TOKENS:
            e = estimate(target, QWEN3_8B_HEADS, tokens=tokens, epochs=3, unroll=3, vocab=8192, states=4,
                         batch_tokens=4096, tflops=tflops, bandwidth_gb_s=bandwidth)
            hours = [f"{s / 3600:.1f} h" for s in (e.text_s, e.states_s, e.train_s)]
            lines.append(f"| {chip} | {tokens:,} | {' | '.join(hours)} | {readable(e.memory_bytes)} | {readable(e.disk_bytes)} |")
    return "\n".join(lines) + "\n"


def with_estimates(page: str) -> str:
    return TABLE.sub(lambda m: m[1] + estimates() + m[2], page)


def test_the_estimates_on_the_page_are_those_of_the_code():
    page = PAGE.read_text()
    assert TABLE.search(page) and page == with_estimates(page), "run: python tests/test_models.py"


def test_an_estimate_grows_with_what_it_is_made_of():
    base = dict(tokens=10**6, epochs=3, unroll=3, vocab=8192, states=4, batch_tokens=4096, tflops=8, bandwidth_gb_s=200)
    target = Sizes.of(QWEN3_8B, bits=4.5)
    assert 6.9e9 < target.weights < 7.0e9 and 4.4e9 < target.bytes < 4.8e9
    one = estimate(target, 10**8, **base)
    twice = estimate(target, 10**8, **base | {"tokens": 2 * 10**6})
    assert twice.states_s == 2 * one.states_s and twice.disk_bytes == 2 * one.disk_bytes and twice.memory_bytes == one.memory_bytes
    assert estimate(target, 10**8, **base | {"tflops": 16}).train_s == one.train_s / 2
    assert estimate(target, 10**8, **base, own_text=False).text_s == 0
    assert estimate(target, 2 * 10**8, **base).train_s > one.train_s


@pytest.mark.parametrize("line", [m[1] for m in re.finditer(r"^    mlx_spec ((?:.+\\\n)*.+)$", PAGE.read_text(), re.M)])
def test_the_commands_on_the_page_are_ones_that_the_parser_takes(line):
    assert cli._parser().parse_args(shlex.split(line.replace("\\\n", " "))).run


def test_a_draft_that_ships_is_small_and_says_how_it_was_made():
    shipped = [e for e in catalogue() if e.ships_draft]
    for entry in shipped:
        folder = models_folder().parent / entry.draft
        files = list(folder.iterdir())
        assert {f.name for f in files} >= {"config.json", "model.safetensors"}
        assert sum(f.stat().st_size for f in files) == pytest.approx(entry.draft_bytes, rel=0.05) and entry.draft_bytes < 20e6
        assert folder.name in PAGE.read_text()


if __name__ == "__main__":
    PAGE.write_text(with_estimates(PAGE.read_text()))
