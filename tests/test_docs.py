"""The documentation: its code runs, its commands exist, its pages build."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from lightning_tfm.__main__ import COMMANDS
from lightning_tfm.catalog import read_experiment
from runs import run

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)]
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
BLOCK = re.compile(r"^( *)```(\S*)( \S+)?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

sys.path.insert(0, str(DOCS / "_ext"))

from generated import LIGHTNING_COMMANDS, command_parser, commands, results  # noqa: E402

MY_PACKAGE = """
from lightning_tfm.networks import GPT


class MyNetwork(GPT):
    pass
"""


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blocks(path, *languages):
    """Return the code blocks of a page in some languages; in a notebook, those of its Markdown cells."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")
    found = [(f"{language}{argument}".strip(), code) for _, language, argument, code in BLOCK.findall(text)]
    return [code for language, code in found if language in languages]


def shell_lines(path):
    """Yield the lines of a page that are typed into a shell."""
    shown = blocks(path, "", "console", "{code-block} console")
    for line in "\n".join(shown).replace("\\\n", " ").splitlines():
        yield line.removeprefix("$ ").strip()


def command_lines(path):
    """Yield the arguments of each `lightning-tfm` line of a page."""
    for line in shell_lines(path):
        if line.startswith("lightning-tfm "):
            yield shlex.split(line, comments=True)[1:]


CODE = [path for path in PAGES if blocks(path, "python")]
LINES = [
    pytest.param(arguments, id=f"{name_of(path)}-{number}")
    for path in [*PAGES, *NOTEBOOKS]
    for number, arguments in enumerate(command_lines(path))
]


def test_pages_show_code_and_commands():
    assert {"README.md", "docs/getting_started.md", "docs/guides/own_data.md"} <= set(map(name_of, CODE))
    assert len(LINES) > 30
    assert {line.values[0][0] for line in LINES} >= set(COMMANDS) - {"validate", "list", "export", "completion"}


@pytest.mark.parametrize("path", CODE, ids=name_of)
@pytest.mark.run
def test_the_code_of_a_page_runs(path, tmp_path):
    """Run the blocks as one program, in order. Code in a `{code-block}` is not run."""
    program = tmp_path / "page.py"
    program.write_text("\n\n".join(blocks(path, "python")))
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", LINES)
@pytest.mark.run
def test_a_command_of_a_page_is_accepted(arguments, tmp_path):
    command, *rest = arguments
    assert command in COMMANDS
    if command not in LIGHTNING_COMMANDS:
        parser = command_parser(command)
        parse = parser.parse_intermixed_args if command in ("generate", "score") else parser.parse_args
        parse(rest)  # raises UserError for an option that it does not know
        return
    if command in ("test", "validate") and not rest[0].startswith("-"):  # a checkpoint, which the folder lacks
        path = Path(rest[0])
        rest = ["--config", path.parts[1] if path.parts[0] == "runs" else "polarity_classifier", *rest[1:]]
    for name in ("mine.yaml", "config.yaml"):
        (tmp_path / name).write_text("seed_everything: 2\n")
    (tmp_path / "my_package.py").write_text(MY_PACKAGE)
    child = run(command, *rest, *(["--print_config"] if "--help" not in rest else []), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()


def small(arguments):
    """Return the arguments of a command, with few steps and pairs for `fit`."""
    if arguments[0] != "fit":
        return arguments
    steps = 4
    if "--trainer.max_steps" in arguments:  # a run that is extended
        place, steps = arguments.index("--trainer.max_steps"), 6
        arguments = [*arguments[:place], *arguments[place + 2 :]]
    sizes = [f"--data.{name}_size={size}" for name, size in (("train", 300), ("val", 30), ("test", 30))]
    return [*arguments, f"--trainer.max_steps={steps}", "--trainer.val_check_interval=2", *sizes]


@pytest.mark.parametrize("name", ["README.md", "docs/getting_started.md", "docs/guides/runs.md"])
@pytest.mark.run
def test_the_commands_of_a_page_run_one_after_another_in_one_folder(name, tmp_path):
    ran = []
    for line in shell_lines(ROOT / name):
        if line.startswith("lightning-tfm "):
            child = run(*small(shlex.split(line, comments=True)[1:]), cwd=tmp_path)
            assert child.wait() == 0, (line, child.err.read_text())
            ran.append(line)
        elif line.startswith(("echo ", "printf ")):  # others install the project
            subprocess.run(line, shell=True, cwd=tmp_path, check=True)
    assert len(ran) >= 3


def test_an_unknown_option_is_rejected(tmp_path):
    child = run("fit", "--config", "date_gpt", "--data.batchsize", "64", "--print_config", cwd=tmp_path)
    assert child.wait() == 2
    assert "batchsize" in child.err.read_text()


def test_every_page_is_in_the_table_of_contents():
    listed = re.findall(r"^[a-z_]+(?:/[a-z_]+)?$", (DOCS / "index.md").read_text(), re.MULTILINE)
    pages = [path.relative_to(DOCS).with_suffix("").as_posix() for path in [*PAGES[1:], *NOTEBOOKS]]
    assert sorted([*listed, "index"]) == sorted(pages)


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=name_of)
def test_relative_links_resolve(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target and not target.startswith("mailto:"):
            assert (path.parent / target).exists(), target


def test_the_command_reference_names_every_option():
    reference = commands()
    for command in COMMANDS:
        assert f"\n## {command}\n" in reference
        if command not in LIGHTNING_COMMANDS:
            options = [option for action in command_parser(command)._actions for option in action.option_strings]
            assert all(f"`{option}" in reference for option in options if option not in ("-h", "--help"))


def test_the_results_are_those_that_are_claimed():
    shown = results()
    for path in sorted((ROOT / "experiments").glob("*.yaml")):
        if path.stem != "claims":
            experiment = read_experiment(path)
            assert (f"| `{experiment.name}` |" in shown) is bool(experiment.claims)
            for claim in experiment.claims:
                digits = 4 if abs(claim.value) < 10 else 2
                assert ", ".join(f"{value:.{digits}f}" for value in claim.by_seed.values()) in shown


def test_the_architecture_page_names_every_module_of_the_package():
    text = (DOCS / "reference/architecture.md").read_text()
    for path in (ROOT / "lightning_tfm").iterdir():
        if path.name not in ("__init__.py", "__pycache__", "py.typed") and (path.suffix == ".py" or path.is_dir()):
            assert f"`{path.name}{'/' if path.is_dir() else ''}`" in text, path.name


def test_pictures_are_small():
    pictures = list((DOCS / "images").iterdir())
    assert pictures
    assert all(path.suffix == ".png" and path.stat().st_size <= 150_000 for path in pictures)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_is_small_and_clean(path):
    """Check that outputs contain no absolute paths, times or warnings."""
    assert path.stat().st_size <= 300_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "it has run from the top"
    assert all(not cell.metadata for cell in notebook.cells)
    outputs = [output for cell in code for output in cell.outputs]
    assert all(output.get("name") != "stderr" and output.output_type != "error" for output in outputs)
    text = json.dumps([output for output in outputs if "image/png" not in output.get("data", {})])
    assert not re.search(r"/(home|root|tmp|work|Users)/|Warning", text)


@pytest.mark.run
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()


@pytest.mark.run
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path / "html")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html/searchindex.js").exists()
    for page in (tmp_path / "html").rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)\b[^>]*\b(?:src|href)="(https?://[^"]+)', page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"
