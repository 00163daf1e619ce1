"""The training loop: batches, optimiser, checkpoints, judging. The same for a seed, interrupted or not."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..errors import SpecError, writing
from .batches import load, shuffled, split
from .loss import Score, loss, score
from .states import States, cores

AT_ONCE = 2  # batches of a step; side by side where there are two cores


@dataclass(frozen=True)
class Schedule:
    """matrix_rate: Muon's, of the matrices; learning_rate: AdamW's, of all else. unroll: drafts trained for a row;
    decay: the weight of each beside the one before it. batch_tokens: of one step. every: steps between checkpoints."""

    epochs: float = 3.0
    batch_tokens: int = 4096
    learning_rate: float = 1e-3
    matrix_rate: float = 0.02
    warmup: int = 50
    clip: float = 1.0
    unroll: int = 3
    decay: float = 0.8
    held_out: float = 0.05
    judged_texts: int = 48
    every: int = 100
    seed: int = 0


class Progress(NamedTuple):
    """acceptance: of the first draft on held-out text; None until it was judged once."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    left_s: float
    score: Score | None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C waits for the end of a step: half a step could not be resumed from."""
    pressed, hears = [], threading.current_thread() is threading.main_thread()
    kept = hears and signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        if hears:
            signal.signal(signal.SIGINT, kept)
    if pressed:
        raise KeyboardInterrupt


def _optimizer(schedule: Schedule, steps: int) -> optim.Optimizer:
    """Muon for what multiplies hidden states (Jordan et al. 2024), AdamW for the rest; a warm-up,
    then a cosine to nothing."""

    def rate(highest: float) -> Callable:
        after = optim.cosine_decay(highest, max(steps - schedule.warmup, 1))
        return optim.join_schedules([optim.linear_schedule(0, highest, schedule.warmup), after], [schedule.warmup])

    def hidden(path: str, weight: mx.array) -> bool:
        return weight.ndim == 2 and not {"emb", "embed_tokens", "head", "lm_head"} & set(path.split("."))

    adam = optim.AdamW(rate(schedule.learning_rate), betas=[0.9, 0.95], weight_decay=0.0, bias_correction=True)
    return optim.MultiOptimizer([optim.Muon(rate(schedule.matrix_rate), weight_decay=0.0), adam], [hidden])


class Trainer:
    """One run. folder: where checkpoints are kept. Resumes from the checkpoint there if asked."""

    def __init__(self, student: Any, store: States, schedule: Schedule, folder: Path, *, resume: bool = False):
        self.student, self.schedule, self.folder = student, schedule, folder
        self.data = store.open()
        self.rows, self.judged = split(store.rows, schedule.held_out)
        if not len(self.rows):
            raise SpecError("there is too little text to learn from: one text is left after holding some out; add --data")
        self.groups = lru_cache(maxsize=1)(self._groups)
        self.per_epoch = len(self.groups(0))
        self.steps = max(1, round(self.per_epoch * schedule.epochs))
        self.step, self.score = 0, None
        self.optimizer = _optimizer(schedule, self.steps)
        self.optimizer.init(student.trainable_parameters())
        self.weights = [schedule.decay**i for i in range(schedule.unroll)]
        self.gradient = nn.value_and_grad(student, lambda batch: loss(student, batch, self.weights))
        if resume:
            self._resume()

    def run(self, on_progress: Callable[[Progress], None] = lambda progress: None) -> Score:
        """To the last step. KeyboardInterrupt leaves a checkpoint behind."""
        started, first, seen, losses = time.perf_counter(), self.step, 0, []
        try:
            while self.step < self.steps:
                with _undisturbed():
                    value, tokens = self._step()
                seen += tokens
                losses = [*losses[-49:], value]
                if self.step % self.schedule.every == 0 or self.step == self.steps:
                    self.score = self.judge()
                    self.checkpoint()
                passed = time.perf_counter() - started
                left = passed / (self.step - first) * (self.steps - self.step)
                on_progress(Progress(self.step, self.steps, float(np.mean(losses)), seen / passed, left, self.score))
        except KeyboardInterrupt:
            self.checkpoint()
            raise
        return self.score or self.judge()

    def _groups(self, epoch: int) -> list[list[np.ndarray]]:
        """The batches of each step of an epoch."""
        s = self.schedule
        batches = shuffled(self.rows[:, 2], s.batch_tokens // AT_ONCE, s.seed, epoch)
        return [batches[i : i + AT_ONCE] for i in range(0, len(batches), AT_ONCE)]

    def _step(self) -> tuple[float, int]:
        epoch, at = divmod(self.step, self.per_epoch)
        groups = self.groups(epoch)
        batches = [load(*self.data, self.rows[texts]) for texts in groups[min(at, len(groups) - 1)]]
        found = []
        for i, batch in enumerate(batches):
            with mx.stream(cores()[i % len(cores())]):
                found.append(self.gradient(batch))
        value = sum(v for v, _ in found) / len(found)
        gradient = tree_map(lambda *g: sum(g) / len(g), *[g for _, g in found])
        gradient, _ = optim.clip_grad_norm(gradient, self.schedule.clip)
        self.optimizer.update(self.student, gradient)
        mx.eval(value, self.student.trainable_parameters(), self.optimizer.state)
        if not math.isfinite(value.item()):
            raise SpecError(f"the loss is not a number at step {self.step}: train again with a smaller --learning-rate")
        self.step += 1
        return value.item(), int(sum(batch.length.sum() for batch in batches))

    def judge(self, steps: int | None = None, texts: int | None = None) -> Score:
        """On held-out text that the target wrote greedily, or on any where there is none."""
        rows = self.judged[self.judged[:, 3] == 0]
        rows = (rows if len(rows) else self.judged)[: texts or self.schedule.judged_texts]
        parts = [score(self.student, load(*self.data, rows[i : i + 4]), steps or self.schedule.unroll)
                 for i in range(0, len(rows), 4)]
        return sum(parts[1:], parts[0])

    def checkpoint(self) -> None:
        arrays = {f"student.{k}": v for k, v in tree_flatten(self.student.trainable_parameters())}
        arrays |= {f"optimizer.{k}": v for k, v in tree_flatten(self.optimizer.state)}
        path = self.folder / "checkpoint.safetensors"
        half = path.with_name("half.safetensors")
        with writing(path, "make room and go on with --resume", (RuntimeError,)):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                mx.save_safetensors(str(half), arrays, {"step": str(self.step), "run": self._run()})
                os.replace(half, path)
            finally:
                half.unlink(missing_ok=True)

    def _run(self) -> str:
        """What a checkpoint must agree with to be resumed."""
        s = self.schedule
        return json.dumps([s.epochs, s.batch_tokens, s.learning_rate, s.matrix_rate, s.unroll, s.seed, self.steps, len(self.rows)])

    def _resume(self) -> None:
        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            return
        try:
            arrays, facts = mx.load(str(path), return_metadata=True)
        except RuntimeError as e:
            raise SpecError(f"{path} is damaged: remove it and train again") from e
        if facts.get("run") != self._run():
            raise SpecError(f"{path} is of a run with other settings or other text: "
                            "give the same ones again, or leave out --resume")
        part = lambda name: tree_unflatten([(k[len(name) :], v) for k, v in arrays.items() if k.startswith(name)])  # noqa: E731
        self.student.update(part("student."))
        self.optimizer.state = part("optimizer.")
        self.step = int(facts["step"])
