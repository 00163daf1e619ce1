"""Prompts to measure with: real text of seven kinds, or a .jsonl file. Imports no MLX.

Written for this project; no draft of it was trained on them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple, Sequence

CATEGORIES = ("chat", "code", "math", "translate", "summarise", "edit", "long")
# Of HumanEval and GSM8K, for those who have the files.
FIELDS = {"text": "{}", "question": "{}", "prompt": "Complete this program:\n\n{}"}


class Prompt(NamedTuple):
    id: str
    category: str
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


def folder() -> Path:
    """Inside an installed package, in benchmarks/ of a checkout."""
    installed = Path(__file__).parent / "prompts"
    return installed if installed.exists() else Path(__file__).parents[2] / "benchmarks/prompts"


def load(names: Sequence[str] = CATEGORIES, each: int | None = None) -> list[Prompt]:
    """The prompts of these categories, `each` of them at most; a name can be a .jsonl file too.

    A line of a file is an object with `text`, `question` (GSM8K) or `prompt` (HumanEval). Raises
    ValueError.
    """
    found = [prompt for name in names for prompt in _read(name)[:each]]
    if not found:
        raise ValueError(f"there are no prompts in {', '.join(names) or 'an empty list'}")
    return found


def _read(name: str) -> list[Prompt]:
    if not name.endswith(".jsonl") and name not in CATEGORIES:
        raise ValueError(f"prompts must be some of {', '.join(CATEGORIES)}, or a .jsonl file; got {name!r}")
    path = Path(name) if name.endswith(".jsonl") else folder() / f"{name}.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [_prompt(path.stem, n + 1, line) for n, line in enumerate(lines)]
    except (OSError, ValueError, AttributeError) as e:
        raise ValueError(f"{name} can't be read as prompts, a JSON object with `text` a line: {e}") from e


def _prompt(category: str, number: int, line: dict) -> Prompt:
    key = next((key for key in FIELDS if isinstance(line.get(key), str)), None)
    if key is None:
        raise ValueError(f"line {number} has no {', '.join(FIELDS)}")
    return Prompt(str(line.get("id", f"{category}-{number}")), category, FIELDS[key].format(line[key]))
