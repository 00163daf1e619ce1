"""The README says what the program says: help texts, options, commands and examples.

`python tests/test_readme.py` writes the help texts into the README again.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import tiny

from mlx_spec import cli
from mlx_spec.types import Options, Result, Stats

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEST_COMMAND = 'pip install -e ".[test]" && pytest'
HELP = re.compile(r"<!-- mlx_spec (.*)-->\n(?:```text\n(?P<text>(?:.*\n)*?)```\n)?<!-- end -->")


def help_text(arguments: str) -> str:
    env = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "mlx_spec", *arguments.split()]
    return subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def with_help(readme: str) -> str:
    return HELP.sub(lambda m: f"<!-- mlx_spec {m[1]}-->\n```text\n{help_text(m[1])}```\n<!-- end -->", readme)


def test_the_help_in_the_readme_is_the_help_of_the_program():
    readme = README.read_text()
    assert [m[1].strip() for m in HELP.finditer(readme)] == ["--help", "generate --help"]
    for shown in HELP.finditer(readme):
        assert shown["text"] == help_text(shown[1]), "run: python tests/test_readme.py"


def test_every_option_is_in_the_table_with_its_default():
    table = README.read_text().partition("| option |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.M)
    shown = {}
    for names, defaults in rows:
        names, defaults = re.findall(r"`(\w+)`", names), defaults.replace("`", "").split(", ")
        defaults = defaults * len(names) if len(defaults) == 1 else defaults
        shown |= {name: default.strip('"') for name, default in zip(names, defaults, strict=True)}
    sizes = ("repetition_context_size", "presence_context_size", "frequency_context_size")
    assert shown == {f.name: str(f.default) for f in fields(Options) if f.name not in sizes}


def test_every_field_named_as_part_of_a_result_is_one():
    paragraph = re.search(r"A `Result` holds(?:.+\n)+", README.read_text())[0]
    names = set(re.findall(r"`([a-z_]+)`", paragraph))
    known = {f.name for cls in (Result, Stats) for f in fields(cls)} | {"id", "logprob", "origin", "ids"}
    known |= {name for name, value in vars(Stats).items() if isinstance(value, property)}
    assert names <= known and {"text", "tokens", "stats", "acceptance_rate"} <= names


def test_the_python_example_runs(tmp_path, capsys):
    folder = tiny.write_folder(tmp_path / "model")
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    exec(example.replace('load("demo")', f"load({str(folder)!r}, draft={str(folder)!r})"), {})
    assert re.search(r"^(length|stop) (None|[0-9.]+) \d\.\d", capsys.readouterr().out, re.M)


def test_an_installed_package_has_every_folder_of_the_library():
    """A folder that is left out is missed in a wheel only, never in a checkout."""
    named = (ROOT / "pyproject.toml").read_text()
    folders = {p.parent.relative_to(ROOT) for p in (ROOT / "mlx_spec").rglob("*.py")}
    assert len(folders) > 5 and all(f'"{".".join(folder.parts)}"' in named for folder in folders)


def test_ci_and_the_readme_run_the_same_test_command():
    assert f"    {TEST_COMMAND}\n" in README.read_text()
    assert (ROOT / ".ci/run").read_text().endswith(f"\n{TEST_COMMAND}\n")
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.parametrize("line", [m[1] for m in re.finditer(r"^    mlx_spec (.*)$", README.read_text(), re.M)])
def test_the_commands_in_the_readme_are_ones_that_the_parser_takes(line):
    assert cli._parser().parse_args(shlex.split(line)).run


if __name__ == "__main__":
    README.write_text(with_help(README.read_text()))
