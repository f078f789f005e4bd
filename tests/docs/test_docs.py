"""The documentation: its code runs, its commands exist, its pages build."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import nbformat
import pytest
import wandb.cli.cli
import yaml
from nbclient import NotebookClient

from lightning_tfm.__main__ import COMMANDS
from lightning_tfm.config.experiments import list_experiments, read_experiment
from lightning_tfm.fit import LIGHTNING_COMMANDS
from support.corpora import TEXT, reviews, sentences, write_lines
from support.experiments import write_gpt2
from support.processes import EXPERIMENTS, run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *SITE]
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
BLOCK = re.compile(r"^( *)```(\S*)( \S+)?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

sys.path.insert(0, str(DOCS / "_ext"))

from generated import architecture, command_parser, commands, results  # noqa: E402

from layers import members  # noqa: E402


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blocks(path, *languages):
    """Return the code blocks of a page in some languages; in a notebook, those of its Markdown cells."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")
    found = [(f"{language}{argument}".strip(), code) for _, language, argument, code in BLOCK.findall(text)]
    return [code for language, code in found if language in languages]


SHELL = ("", "console", "{code-block} console")


def shell_lines(path, code=None):
    """Return the lines of a page, or of one of its blocks, that are typed into a shell."""
    prompts = any("$ " in block for block in blocks(path, *SHELL))  # on a page with prompts, other lines are output
    shown = re.sub(r"\\\n\s*", "", "\n".join(blocks(path, *SHELL) if code is None else [code]))
    lines = [line for line in shown.splitlines() if line.startswith("$ ") or not prompts]
    return [line.removeprefix("$ ").strip() for line in lines if line]


def steps(path):
    """Yield the Python blocks and the lines for a shell of a page, as (language, code), in the order of the page."""
    for _, language, argument, code in BLOCK.findall(path.read_text()):
        if (name := f"{language}{argument}".strip()) == "python":
            yield "python", code
        elif name in SHELL:
            yield from (("shell", line) for line in shell_lines(path, code))


def write_files(path, folder):
    """Write the files that a page shows, whose names are the captions of code blocks; return their paths."""
    written = []
    for code in blocks(path, "{code-block} python", "{code-block} yaml"):
        if code.startswith(":caption: "):
            name, _, content = code.removeprefix(":caption: ").partition("\n")
            written.append(folder / name)
            written[-1].write_text(content)
    return written


def listed_pages():
    """Return the pages in the order of the table of contents, without the suffix."""
    return re.findall(r"^[a-z_]+(?:/[a-z_]+)?$", (DOCS / "index.md").read_text(), re.MULTILINE)


CODE = [path for path in PAGES if blocks(path, "python")]
COMMANDED = [path for path in PAGES if shell_lines(path)]


def test_pages_show_every_command():
    assert {"README.md", "docs/getting_started.md", "docs/guides/own_data.md"} <= set(map(name_of, CODE))
    lines = [line.split() for path in COMMANDED for line in shell_lines(path)]
    shown = {words[1] for words in lines if words[0] == "lightning-tfm"}
    assert shown >= set(COMMANDS) - {"list", "completion"}


SMALL = {"d_model": 16, "num_heads": 2, "num_layers": 2, "d_ff": 32, "d_classifier": 8, "max_length": 32}
GPT2 = {"num_layers": 1, "max_length": 16}  # as `write_gpt2` makes it
TABLES = {"train": "inflections.tsv", "val": "new_inflections.tsv", "features": 3, "batch_size": 8}
SMALL_DATA = {
    "Copy": {"train_size": 300, "val_size": 30, "test_size": 30, "longer_size": 30},
    "Date": {"train_size": 300, "val_size": 30, "test_size": 30},
    "DateWorld": {"train_size": 300, "val_size": 30, "test_size": 30, "unseen_size": 30},
    "ToyTranslation": {"train_size": 300, "val_size": 30, "test_size": 30},
    "ParallelText": {split: [f"{split}.de", f"{split}.en"] for split in ("train", "val", "test")}
    | {"vocab_size": 300, "batch_tokens": 400},
    "Text": {"path": "book.txt", "max_length": 32},
    "Sentiment": {"train": ["reviews.tsv"]},
}


def make_small(config):
    """Reduce the network, the steps and the data of an experiment."""
    for setting in ("max_epochs", "check_val_every_n_epoch"):
        config["trainer"].pop(setting, None)
    config["trainer"] |= {"accelerator": "cpu", "max_steps": 4, "val_check_interval": 2, "accumulate_grad_batches": 1}
    model, data = config["model"]["init_args"], config["data"]
    network = model["network"]["init_args"]
    positions = {} if data["class_path"] == "Text" else {"max_length": network.get("max_length")}
    network |= {name: size for name, size in (SMALL | positions).items() if name in network}
    if data["class_path"] in ("Inflection", "Pronunciation"):  # which are downloaded
        data |= {"class_path": "Tsv", "init_args": TABLES}
    data["init_args"] |= SMALL_DATA.get(data["class_path"], {})
    if "pretrained" in model:
        network |= GPT2
        data["init_args"]["max_length"] = GPT2["max_length"]
    return config


def make_small_sweep(specification):
    """Reduce the trials of a sweep, whose experiment is small."""
    parameters = {name: space for name, space in specification["parameters"].items() if "value" not in space}
    return specification | {"run_cap": 2, "early_terminate": None, "parameters": parameters}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with all experiments, made small, and the files that the pages assume."""
    (tmp_path / "experiments").mkdir()
    claims = {}
    for experiment in list_experiments(EXPERIMENTS):
        config = yaml.safe_load(experiment.path.read_text())
        (tmp_path / f"experiments/{experiment.path.name}").write_text(yaml.safe_dump(make_small(config)))
        if experiment.claims:  # any exact match is in the prediction interval of these two
            claim = {"test/exact_match": {11: 0.0, 12: 1.0}, "training": {"seconds": 1, "machine": "any"}}
            claims[experiment.name] = claim
    (tmp_path / "experiments/claims.yaml").write_text(yaml.safe_dump(claims))
    for split, number in (("train", 200), ("val", 30), ("test", 31)):
        german, english = zip(*sentences(number, seed=number), strict=True)
        write_lines(tmp_path / f"{split}.de", german)
        write_lines(tmp_path / f"{split}.en", english)
        write_lines(tmp_path / f"{split}.tsv", [f"{word}\t{' '.join(word.upper())}" for word in ("cat", *german)])
    for name, letters in (("inflections", "aeiou"), ("new_inflections", "y")):
        verbs = [f"{first}{vowel}{last}k" for first in "bdflmt" for vowel in letters for last in "lnr"]
        write_lines(tmp_path / f"{name}.tsv", [f"{verb}\t{verb}ed\tV;PST" for verb in verbs])
    (tmp_path / "book.txt").write_text(f"{TEXT}ROMEO: to be or not to be.{TEXT}")
    for name, column in (("corpus/a", "content"), ("code", "text")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / f"{name}.jsonl", [json.dumps({column: TEXT})] * 9)
    (tmp_path / "books").mkdir()
    shutil.copy(tmp_path / "book.txt", tmp_path / "books")
    write_lines(tmp_path / "reviews.tsv", map("\t".join, reviews(200)))
    write_gpt2(tmp_path / "gpt2")
    (tmp_path / "docs/images").mkdir(parents=True)
    shutil.copy(DOCS / "gallery.py", tmp_path / "docs")
    return tmp_path


SMALLER = {
    **{"20000": "8", "2000": "4", "1500": "4", "1000": "30", "500": "30", "200": "2"},
    **{
        "1..6": "1..2",
        "21..25": "21..22",
        "31..35": "31..32",
        "51..53": "51..52",
        "51..55": "51..52",
        "61..68": "61..62",
    },
}
"""Numbers of steps, pairs and seeds on the pages, and those of the tests."""

NOT_RUN = (
    "make ",
    ". .venv/bin/activate",
    "pip install ",
    "wandb ",
    "python experiments/dashboard.py ",
    "python docs/scaling.py",
    "sudo ",
    "lightning-tfm sweep experiments/",
    "lightning-tfm sweep date_sweep.yaml --storage ",
    "lightning-tfm diff ",
    "lightning-tfm fit --fork ",
)
"""Commands that install packages, run the tests themselves, need a W&B account, take minutes or have exit status 1.

`.ci/run` installs the project and runs the tests. test_wandb.py tests the sweeps and the dashboard, and
test_diff.py tests `diff`, and test_forks.py forks.
"""


SERVED = "lightning-tfm explore "
"""Beginning of commands that serve a page until a signal, unless they write it to a file."""


def run_line(line, folder):
    """Run a line of a page in a folder, with fewer steps."""
    line = re.sub(r"\b\d+(\.\.\d+)?\b", lambda number: SMALLER.get(number[0], number[0]), line)
    plain = re.sub(r"\$'(.*?)'", lambda quoted: shlex.quote(quoted[1].replace(r"\t", "\t")), line)  # tabs
    words = shlex.split(plain, comments=True)
    if words[0] != "lightning-tfm" or "--trainer.devices" in words:  # the launcher of Lightning starts a program
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "WANDB_MODE": "disabled"}
        done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)
        return
    patterns = ("*.ckpt", "/version_*")
    words = [found for word in words for found in (sorted(folder.glob(word)) if word.endswith(patterns) else [word])]
    run(*words[1:], cwd=folder, forks=True).finish()


def in_order():
    """Return the README and the pages, as the table of contents lists them."""
    pages = {path.relative_to(DOCS).with_suffix("").as_posix(): path for path in SITE}
    return [ROOT / "README.md", DOCS / "index.md", *(pages[name] for name in listed_pages() if name in pages)]


FIRST = ("README", "index", "getting_started")
"""Pages that `make test-all` runs; `make test-soak` runs all, which takes minutes."""


@pytest.mark.run
@pytest.mark.parametrize(
    "paths",
    [
        pytest.param([path for path in in_order() if path.stem in FIRST], id="first"),
        pytest.param(in_order(), id="all", marks=pytest.mark.soak),
    ],
)
def test_pages_run(paths, folder, monkeypatch, capsys):
    """Run the Python blocks of a page as one program, between its commands; pages use the runs of those before."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for path in paths:
        for shown in write_files(path, folder):
            if shown.suffix == ".yaml":
                config = yaml.safe_load(shown.read_text())
                small = make_small_sweep if "parameters" in config else make_small
                shown.write_text(yaml.safe_dump(small(config)))
        program = {"__name__": "__main__"}
        for language, code in steps(path):
            if language == "python":
                with warnings.catch_warnings(action="ignore"):  # as Lightning prints them
                    exec(compile(code, name_of(path), "exec"), program)
            elif not code.startswith(NOT_RUN) and (not code.startswith(SERVED) or "--output" in code):
                run_line(code, folder)
        if path.name == "README.md":
            assert capsys.readouterr().out.splitlines()[-1] == "1979-05-03"


def test_other_commands_exist():
    lines = {line for path in COMMANDED for line in shell_lines(path) if line.startswith(NOT_RUN)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for words in map(shlex.split, lines):
        if words[0] == "wandb":
            assert words[1] in wandb.cli.cli.cli.commands
        elif words[0] == "pip" and words[2].startswith("lightning_tfm"):
            assert re.fullmatch(r"lightning_tfm\[(\w+)\]", words[2])[1] in project["optional-dependencies"]
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file()


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in PAGES:
        named = re.findall(r"(?:`|^\$? ?)make ([a-z-]+)", path.read_text(), re.MULTILINE)
        assert set(named) <= targets, path


def test_relative_links():
    """Sphinx checks those of the documentation."""
    for path in PAGES[:2]:
        targets = re.findall(r"\]\(([^)#\s]+)", path.read_text())
        missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
        assert missing == []


def test_command_reference_names_every_option():
    reference = commands()
    for command in COMMANDS:
        assert f"\n## {command}\n" in reference
        if command not in LIGHTNING_COMMANDS:
            options = [option for action in command_parser(command)._actions for option in action.option_strings]
            assert all(f"`{option}" in reference for option in options if option not in ("-h", "--help"))


def test_command_reference_shows_options_as_code():
    prose = re.sub(r"```.*?```|`[^`\n]*`|^[| -]+$", "", commands(), flags=re.MULTILINE | re.DOTALL)
    assert "--" not in prose
    assert "`" not in prose


def test_lines_of_code_fit_the_width_of_a_page():
    """A page shows 88 columns on a screen of 1280 pixels."""
    for path in PAGES:
        for _, language, _, code in BLOCK.findall(path.read_text()):
            if language not in ("{figure}", "{toctree}"):
                assert [line for line in code.splitlines() if len(line) > 88] == [], path


def test_results_page_shows_claims():
    shown = results()
    for path in sorted((ROOT / "experiments").glob("*.yaml")):
        if path.stem != "claims":
            experiment = read_experiment(path)
            assert (f"| `{experiment.name}` |" in shown) is bool(experiment.claims)
            for claim in experiment.claims:
                digits = 4 if abs(claim.value) < 10 else 2
                assert ", ".join(f"{value:.{digits}f}" for value in claim.by_seed.values()) in shown


def test_architecture_page_describes_every_subpackage():
    assert "<!-- layers -->" in (DOCS / "reference/architecture.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in architecture().splitlines()[2:]]
    assert {name.strip("`").removesuffix("/").removesuffix(".py") for _, name, _ in rows} == set(members())
    assert all(purpose.endswith(".") for *_, purpose in rows)


def test_pictures_are_small():
    pictures = list((DOCS / "images").iterdir())
    assert pictures
    assert all(path.suffix == ".png" and path.stat().st_size <= 150_000 for path in pictures)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_clean(path):
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
    printed = "".join(output.get("text", "") for output in outputs)
    assert [line for line in printed.splitlines() if len(line) > 88] == [], "the width of a page"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_prose_of_notebooks(path, tmp_path):
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    (tmp_path / "prose.md").write_text("\n\n".join(cells))
    script = Path(sys.executable).with_name("proselint")
    done = subprocess.run([script, "check", tmp_path / "prose.md"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.run
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.soak] * (path.stem != "your_own_data")) for path in NOTEBOOKS],
)
def test_notebooks_run(path, folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=3_600, resources={"metadata": {"path": str(folder)}}).execute()
    for line in shell_lines(path):
        run_line(line, folder)


@pytest.mark.run
def test_site_is_built_without_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path / "html")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html/searchindex.js").exists()
    for page in (tmp_path / "html").rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r'<(?:script|link|img)\b[^>]*\b(?:src|href)="(https?://[^"]+)', text)
        assert not loaded, f"{page.name} loads {loaded}"
        pictures = re.findall(r'(<a [^>]*>)?<img\b[^>]*\bsrc="(?:\.\./)*_images/', text)
        assert all(pictures), f"{page.name} has a picture without a link to its full size"
