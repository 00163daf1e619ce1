"""Text with the target's hidden states, on disk: computed once, read by every epoch.

Three flat files that only grow (tokens, states in float16, where each text lies) and a card that
says what they were made from. A run that was cut short goes on where the last whole text ends.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..blas import work_side_by_side
from ..errors import writing
from ..hidden import Inside

POOL = 64  # texts whose states are held in memory at once
KEPT = "make room and run it again with --resume (what was written is kept), or choose another folder"
PASS_TOKENS = 2048  # tokens, padding included, of one pass of the target


@lru_cache(maxsize=1)
def cores() -> list[mx.Stream]:
    """Streams that work side by side: one on a GPU; on a CPU, where each has a thread of its own, one a core."""
    if mx.default_device().type == mx.gpu:
        return [mx.default_stream(mx.gpu)]
    work_side_by_side()
    return [mx.new_stream(mx.cpu) for _ in range(os.cpu_count() or 1)]


class Example(NamedTuple):
    """A draft learns the answer; the prompt is only read. temperature: None where the target did not answer."""

    prompt: list[int]
    answer: list[int]
    temperature: float | None = None

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer


class States:
    """The stored texts. Row t of a text's states is what the target knows after token t; shallow states come first,
    each row scaled to unit mean square, the final ones are as they are. rows: (texts, 4) of start, prompt length,
    length, temperature in thousandths (-1: unknown)."""

    def __init__(self, folder: Path, card: dict):
        """card: everything that the states depend on. Raises SpecError where it can't write."""
        self.folder, self.width = folder, (card["states"], card["dim"])
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            made_from, card_text = folder / "card.json", json.dumps(card)
            if not made_from.exists() or made_from.read_text() != card_text:
                for name in ("tokens", "states", "rows"):
                    (folder / f"{name}.bin").write_bytes(b"")
                made_from.write_text(card_text)
            self._repair()

    def _repair(self) -> None:
        """Cut a text that was only partly written."""
        size = {name: (self.folder / f"{name}.bin").stat().st_size for name in ("rows", "tokens", "states")}
        rows = np.fromfile(self.folder / "rows.bin", np.int32, size["rows"] // 16 * 4).reshape(-1, 4)
        item = int(np.prod(self.width)) * 2
        held = min(size["tokens"] // 4, size["states"] // item)
        self.rows = rows[rows[:, 0].astype(np.int64) + rows[:, 2] <= held]
        for name, length in (("rows", len(self) * 16), ("tokens", self.size * 4), ("states", self.size * item)):
            os.truncate(self.folder / f"{name}.bin", length)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def size(self) -> int:
        """Tokens stored."""
        return int(self.rows[-1, 0] + self.rows[-1, 2]) if len(self.rows) else 0

    def append(self, texts: Sequence[Example], states: Sequence[np.ndarray]) -> None:
        """states: for each text (length, states, dim) in float16."""
        start, new = self.size, []
        with writing(self.folder, KEPT):
            with open(self.folder / "tokens.bin", "ab") as t, open(self.folder / "states.bin", "ab") as s:
                for text, array in zip(texts, states, strict=True):
                    ids = np.asarray(text.ids, np.int32)
                    heat = -1 if text.temperature is None else round(text.temperature * 1000)
                    new.append((start, len(text.prompt), len(ids), heat))
                    t.write(ids.tobytes())
                    s.write(np.ascontiguousarray(array, np.float16).tobytes())
                    start += len(ids)
            with open(self.folder / "rows.bin", "ab") as r:
                r.write(np.asarray(new, np.int32).tobytes())
        self.rows = np.concatenate([self.rows, np.asarray(new, np.int32)])

    def open(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, states), mapped from disk: memory stays bounded whatever their size."""
        n = self.size
        tokens = np.memmap(self.folder / "tokens.bin", np.int32, "r", shape=(n,))
        return tokens, np.memmap(self.folder / "states.bin", np.float16, "r", shape=(n, *self.width))


def make_card(target_name: str, depths: Sequence[int], dim: int, texts: str) -> dict:
    """texts: what the texts were made from, in words or as a digest."""
    return {"target": target_name, "depths": list(depths), "states": len(depths) + 1, "dim": dim, "texts": texts}


def collect(store: States, target: nn.Module, depths: Sequence[int], texts: Iterator[Example],
            on_progress: Callable[[int], None] = lambda tokens: None) -> None:
    """Run the target over the texts that the store does not hold yet."""
    inside = Inside(target, depths)
    texts = islice(texts, len(store), None)
    while pool := list(islice(texts, POOL)):
        store.append(pool, _pass(inside, pool))
        on_progress(store.size)


def _pass(inside: Inside, pool: list[Example]) -> list[np.ndarray]:
    found: list = [None] * len(pool)
    passes = _passes([len(text.ids) for text in pool])
    while at_once := passes[: len(cores())]:
        del passes[: len(cores())]
        outs = []
        for core, part in zip(cores(), at_once):
            with mx.stream(core):
                outs.append(_stack(inside, [pool[j].ids for j in part]))
        mx.eval(outs)
        for part, out in zip(at_once, outs):
            for row, j in enumerate(part):
                found[j] = np.array(out[row, : len(pool[j].ids)])
    return found


def _passes(lengths: list[int]) -> list[list[int]]:
    """Texts of like length together, so that little is padding."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    found = []
    while order:
        count = max(PASS_TOKENS // lengths[order[-1]], 1)
        found.append(order[-count:])
        del order[-count:]
    return found


def _stack(inside: Inside, texts: list[list[int]]) -> mx.array:
    """(texts, rows, states, dim) in float16, padded at the end."""
    longest = max(map(len, texts))
    ids = mx.array([text + [0] * (longest - len(text)) for text in texts])
    *shallow, final = [s.astype(mx.float32) for s in inside.states(ids)]
    scaled = [s * mx.rsqrt(mx.mean(s * s, axis=-1, keepdims=True) + 1e-6) for s in shallow]
    return mx.stack([*scaled, final], axis=2).astype(mx.float16)
