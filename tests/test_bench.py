"""The bench on tiny models: what is run, what is counted, what is said. Nothing here is judged by its speed."""

import json

import pytest

from mlx_spec.bench import texts


# --- prompts


def test_every_category_has_real_prompts_and_one_is_very_long():
    found = texts.load()
    sizes = [len([p for p in found if p.category == name]) for name in texts.CATEGORIES]
    assert min(sizes) >= 8 and len({p.id for p in found}) == len({p.text for p in found}) == len(found)
    assert [p.id for p in found if len(p.text) > texts.VERY_LONG] == ["long-8"]
    assert all("\n\n" in p.text for p in found if p.category in ("edit", "summarise", "long"))  # with its text


def test_humaneval_and_gsm8k_files_are_read_as_they_are(tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [{"task_id": "HumanEval/0", "prompt": "def f():"}, {"question": "1 + 1?", "answer": "2"}, {"text": "Hi {x}", "id": 7}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert [p.text for p in texts.load([str(path)])] == ["Complete this program:\n\ndef f():", "1 + 1?", "Hi {x}"]
    assert [p.id for p in texts.load([str(path)])] == ["mine-1", "mine-2", "7"]


def test_prompts_that_cannot_be_read_are_one_clear_line(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"words": 1}\n')
    for name, said in (("poetry", "chat, code"), ("../chat", "chat, code"), (str(tmp_path / "bad.jsonl"), "line 1"), ("none.jsonl", "none.jsonl")):
        with pytest.raises(ValueError, match=said) as error:
            texts.load([name])
        assert "\n" not in str(error.value)
