"""The record of a bench, as it is written to JSON: version 1. Unknown is null, never 0.

Names end in their unit. Everything else that the bench prints or draws is made of this.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

VERSION = 1


class Model(TypedDict):
    """name and revision as asked for; bits: of most quantised weights; bytes: of all weights in memory."""

    name: str
    revision: str | None
    bits: int | None
    dtype: str
    bytes: int


class Card(TypedDict):
    """The machine and the versions. bandwidth: nominal by the chip's name, and as measured; git: of a checkout."""

    system: str
    chip: str | None
    gpu_cores: int | None
    memory_bytes: int | None
    power: str | None
    low_power: bool | None
    device: str
    blas: str | None
    bandwidth_nominal_gbs: float | None
    bandwidth_gbs: float | None
    python: str
    mlx: str
    mlx_lm: str
    mlx_spec: str
    git: str | None


class Round(TypedDict):
    """A round of k drafts: the draft's and the target's milliseconds as measured chains, the host's to build and
    submit one (partly beside the device), and the evaluations and host reads it took, counted."""

    k: int
    draft_ms: float
    target_ms: float
    host_ms: float
    evaluations: float
    reads: float


class Depth(TypedDict):
    """At so many tokens of context: the target's pass over 1, 2, ... rows, a draft step, what drafting adds to its
    steps; c: a draft step in target steps; v[m - 1]: a pass over m rows in target steps."""

    tokens: int
    rows_ms: list[float]
    step_ms: float | None
    start_ms: float
    c: float | None
    v: list[float]


class Costs(TypedDict):
    """ceiling: tokens a second if a token took only the time to read every weight of the target once; of a round with
    the largest k timed, rounds a second, the draft's weights read k times."""

    depths: list[Depth]
    rounds: list[Round]
    ceiling_plain_tps: float | None
    ceiling_rounds_per_s: float | None


class Identity(TypedDict):
    """kind: identical, tie, BUG; at: the first token that differs; gap: of the two best choices there."""

    kind: str
    at: int | None
    gap: float | None


class Run(TypedDict):
    """One reply. tokens: counted from ids. looked_up: of drafted, those out of the text itself. decode_s: from the end of the prompt to the last token. judged, kept: drafts
    by position whose predecessors stood, and those of them that did. identity: null where there is nothing to compare
    with. predicted: speed-up of these rounds by the costs. probe_ms: the machine's own clock, read before the prompt."""

    prompt: str
    category: str
    repetition: int
    engine: str
    k: int | str
    temperature: float
    prompt_tokens: int
    tokens: int
    prompt_s: float
    draft_prompt_s: float | None
    ttft_s: float | None
    decode_s: float
    rounds: int
    drafted: int
    accepted: int
    looked_up: int
    drafted_by_position: list[int]
    judged: list[int]
    kept: list[int]
    mode: str
    peak_memory_bytes: int | None
    identity: Identity | None
    predicted: float | None
    probe_ms: float
    load: float


class Record(TypedDict):
    """finished: false after Ctrl-C. arguments: as given on the command line."""

    version: int
    made: str
    finished: bool
    arguments: dict[str, Any]
    card: Card
    target: Model
    draft: Model | None
    costs: Costs
    runs: list[Run]
    notes: list[str]


def check(value: Any, kind: Any = Record, where: str = "record") -> None:
    """Raises ValueError, with the place, unless the value has exactly this type."""
    parts = get_args(kind)
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise ValueError(f"{where} must have exactly {', '.join(hints)}")
        for name, hint in hints.items():
            check(value[name], hint, f"{where}.{name}")
    elif get_origin(kind) is UnionType:
        if type(value) not in parts or isinstance(value, float):
            check(value, parts[0], where)
    elif get_origin(kind) is list:
        check(value, list, where)
        for i, item in enumerate(value):
            check(item, parts[0], f"{where}[{i}]")
    else:
        kind = get_origin(kind) or kind
        number = kind in (int, float) and not isinstance(value, bool) and isinstance(value, (int, kind))
        if not (math.isfinite(value) if number else kind not in (int, float) and isinstance(value, kind)):
            raise ValueError(f"{where} must be {kind.__name__}; got {value!r}")


def read(path: str) -> Record:
    """A record from a file. Raises ValueError where it is none of this version."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"it has no version {VERSION}")
        check(found)
    except OSError as e:
        raise ValueError(f"{path} can't be read: {e.strerror or e}") from e
    except ValueError as e:
        raise ValueError(f"{path} is no JSON record of `mlx_spec bench`: {e}") from e
    return found
