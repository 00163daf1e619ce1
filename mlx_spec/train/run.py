"""`mlx_spec train` from end to end: text, the target's states, the loop, the finished draft.

    OUT/                 the draft: config.json and weights, what `load(target, draft=OUT)` wants
    OUT/work/            text, hidden states, checkpoint: to go on with --resume; may be deleted
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

from ..errors import SpecError
from ..costs import CONTEXT, Costs, best, costs_at
from ..drafters.saved import save
from ..hub import sha256
from ..hidden import embedding, output
from ..pairs import Pair, load
from . import text
from .batches import split
from .loop import Progress, Schedule, Trainer
from .loss import Score
from .states import Example, States, collect, make_card
from .students import KINDS, begun, frequent_ids, make, read_depths, scale_norms, width

JUDGED = 400  # held-out texts of the final report, at most
TIMED_ROWS = 8
BITS = (16, 8, 4)
Tell = Callable[["Stage"], None]


@dataclass(frozen=True)
class Recipe:
    """What to train. tokens: answer tokens to learn from; own: more that the target writes beside the data. layers: of
    a draft or heads; steps of an mlp. vocab: output ids. depths: layers after which heads read the target; None: low,
    middle, high. begin: an earlier draft of this kind to go on from. max_length: of a text, in tokens."""

    target: str
    kind: str
    out: Path
    tokens: int = 2_000_000
    data: Path | None = None
    own: int = 0
    begin: Path | None = None
    layers: int | None = None
    vocab: int = 8192
    depths: tuple[int, ...] | None = None
    bits: int = 8
    max_length: int = 512
    resume: bool = False
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        """Raises ValueError, one line."""
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {self.kind!r}")
        if self.bits not in BITS:
            raise ValueError(f"bits must be 16, 8 or 4; got {self.bits}")
        for name, least in (("tokens", 1000), ("vocab", 2), ("layers", 1), ("max_length", 16)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be {least} or more; got {value}")
        if not self.schedule.epochs > 0:
            raise ValueError(f"epochs must be above 0; got {self.schedule.epochs}")
        if self.data is not None and not self.data.exists():
            raise ValueError(f"data: {self.data} does not exist; give a .jsonl, .txt or .md file, or a folder of them")
        if self.own < 0 or self.own and not self.data:
            raise ValueError("own needs data to stand beside; without it all text is the target's own")

    @property
    def work(self) -> Path:
        return self.out / "work"


class Report(NamedTuple):
    """score: on held-out text. costs: of this machine. k, speedup: predicted from both, greedy."""

    score: Score
    costs: Costs
    k: int
    speedup: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        score, costs = self.score, self.costs
        return dict(
            acceptance_by_step=score.acceptance.round(4).tolist(), overlap_by_step=score.sampled.round(4).tolist(),
            judged_rows=int(score.rows[0]), c=round(costs.c, 4), v=[round(s / costs.rows_s[0], 3) for s in costs.rows_s],
            best_k=self.k, predicted_speedup=round(self.speedup, 3), training_s=round(self.seconds, 1))


class Stage(NamedTuple):
    """name: text, states or train; done of total, in its own unit; progress: the loop's, in train."""

    name: str
    done: int
    total: int
    progress: Progress | None = None


def train(recipe: Recipe, tell: Tell = lambda stage: None) -> Report:
    """Train a draft and save it in recipe.out. Raises SpecError; KeyboardInterrupt leaves a checkpoint."""
    started = time.perf_counter()
    pair = load(recipe.target, draft=False)
    _check(pair, recipe.kind)
    depths = read_depths(recipe.kind, pair.target, recipe.depths)
    store = _states(pair, recipe, depths, tell)
    student = _student(pair, recipe, depths, store)
    trainer = Trainer(student, store, _schedule(recipe, student), recipe.work, resume=recipe.resume)
    trainer.run(lambda p: tell(Stage("train", p.step, p.steps, p)))
    report = _report(pair, student, trainer, time.perf_counter() - started)
    about = {"target": recipe.target, "kind": recipe.kind, "texts": len(store), "tokens": store.size,
             "schedule": asdict(trainer.schedule)} | report.to_dict()
    tokenizer = pair.tokenizer if recipe.kind == "draft" else None
    save(recipe.out, getattr(student, "model", student), recipe.bits, about, tokenizer)
    return report


def _check(pair: Pair, kind: str) -> None:
    profile = pair.target_profile
    reason = profile.reason or profile.hidden_reason
    if reason is None and kind == "draft" and profile.recurrent:
        reason = "layers with recurrent state can't be left out; take --kind heads or mlp"
    if reason is None and (output(pair.target) is None or embedding(pair.target) is None):
        reason = "its embedding and head are not where a draft could share them"
    if reason:
        raise SpecError(f"no draft can be trained for this target: {reason}; choose another target")


def _states(pair: Pair, recipe: Recipe, depths: Sequence[int], tell: Tell) -> States:
    source = recipe.data or _write(pair, recipe, recipe.tokens, tell)
    # Nothing of `own` without it, so that the states of runs from before there was such a thing are still theirs.
    made_from = [sha256(source) if source.is_file() else source.resolve(), recipe.tokens, recipe.own, recipe.max_length]
    made_from = ", ".join(str(fact) for fact in made_from if fact)
    store = States(recipe.work / "states", make_card(recipe.target, depths, width(pair.target), made_from))
    texts = chain(_limited(_with_answers(pair, recipe, source, tell), recipe.tokens), _own(pair, recipe, tell))
    collect(store, pair.target, depths, texts, lambda done: tell(Stage("states", done, 0)))
    if len(store) < 2:
        raise SpecError("there is too little text to learn from: two texts are the least; raise --tokens or add --data")
    return store


def _write(pair: Pair, recipe: Recipe, tokens: int, tell: Tell, prompts: Iterator[list[int]] | None = None,
           folder: str = "") -> Path:
    """What the target writes now, from prompts of its own or these."""
    return text.write(pair, recipe.work / folder, tokens, recipe.schedule.seed, prompts,
                      lambda done: tell(Stage("text", done, tokens)))


def _read(pair: Pair, recipe: Recipe, path: Path) -> Iterator[Example]:
    return text.read(path, pair.tokenizer, recipe.max_length, pair.vocab_size)


def _own(pair: Pair, recipe: Recipe, tell: Tell) -> Iterator[Example]:
    if recipe.own:
        yield from _read(pair, recipe, _write(pair, recipe, recipe.own, tell, folder="own"))


def _with_answers(pair: Pair, recipe: Recipe, source: Path, tell: Tell) -> Iterator[Example]:
    """Texts as they are; the prompts among them are answered by the target first."""
    yield from (t for t in _read(pair, recipe, source) if t.answer)
    asked = (t.prompt for t in _read(pair, recipe, source) if not t.answer)
    if (first := next(asked, None)) is not None:
        yield from _read(pair, recipe, _write(pair, recipe, recipe.tokens, tell, chain([first], asked)))


def _limited(texts: Iterator[Example], tokens: int) -> Iterator[Example]:
    for example in texts:
        if tokens <= 0:
            return
        tokens -= len(example.answer)
        yield example


def _student(pair: Pair, recipe: Recipe, depths: Sequence[int], store: States) -> Any:
    if recipe.begin is not None:
        return begun(recipe.kind, pair.target, recipe.begin, depths)
    tokens, states = store.open()
    rows, _ = split(store.rows, recipe.schedule.held_out)
    ids = frequent_ids(tokens, rows, recipe.vocab, pair.vocab_size)
    student = make(recipe.kind, pair.target, ids, layers=recipe.layers, depths=depths, seed=recipe.schedule.seed)
    if recipe.kind == "heads":
        scale_norms(student, states)
    return student


def _schedule(recipe: Recipe, student: Any) -> Schedule:
    """Unrolled as far as the kind can be: a language model's steps are all the same."""
    if recipe.kind == "mlp":
        return replace(recipe.schedule, unroll=student.largest, decay=1.0)
    return replace(recipe.schedule, unroll=1) if recipe.kind == "draft" else recipe.schedule


def _report(pair: Pair, student: Any, trainer: Trainer, seconds: float) -> Report:
    steps = getattr(student, "largest", TIMED_ROWS - 1)
    found = trainer.judge(min(steps, TIMED_ROWS - 1), JUDGED)
    with_draft = Pair(pair.target, getattr(student, "model", student), pair.tokenizer)
    costs = costs_at(with_draft, CONTEXT, range(1, TIMED_ROWS + 1))
    k, gain = best(costs, found.acceptance)
    return Report(found, costs, k, gain, seconds)
