"""Packs of runs: what they hold, who can read them, and how damaged and forged ones are found."""

import json
import os
import random
import re
import shutil
import stat
import zipfile
from pathlib import Path

import pytest
import yaml

from lightning_tfm.commands.crate import CRATE, CROISSANT, card_results, sha256
from lightning_tfm.commands.pack import without_places
from lightning_tfm.runs.record import Run
from lightning_tfm.system.stored_zip import write_archive
from support.experiments import made_once, trained_run
from support.processes import in_process

TASKS = ("spelling_gpt", "text_gpt")
USER, SECRET = "marie-curie", "rz81-pq4-lt93"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return copies of the runs of two tasks in the home folder of a user, one with uncommitted changes."""

    def make(folder):
        for task in TASKS:
            shutil.copytree(trained_run(task, tmp_path_factory), folder / USER / task / "version_0")
        run = Run(folder / USER / TASKS[0] / "version_0")
        run.write_diff(0, "diff --git a/model.py b/model.py\n-width = 1\n+width = 2\n")
        starts = run.starts
        starts[0]["command"] = f"/home/{USER}/bin/lightning-tfm fit --config {folder}/{USER}/own.yaml"
        starts[0]["git"] = {"commit": "0" * 40, "dirty": True, "untracked": ["diary.txt"]}
        starts[0]["wandb"] = "a1b2c3"
        run.write_starts(starts)

    folder = made_once("packed_runs", make, tmp_path_factory) / USER
    return [folder / task / "version_0" for task in TASKS]


@pytest.fixture(scope="module")
def packed(runs, tmp_path_factory):
    """Return a pack of the runs with their data."""

    def make(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setenv("HOME", str(runs[0].parents[1]))
            patch.setenv("LOGNAME", USER)
            patch.setenv("SOME_API_KEY", SECRET)
            for name in ("first", "second"):
                assert in_process(patch, "pack", *runs, "--output", f"{name}.zip", "--include-data", "CC0-1.0") == 0

    return made_once("pack", make, tmp_path_factory) / "first.zip"


@pytest.fixture
def unpacked(packed, tmp_path):
    """Return the folder of an extracted pack."""
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(tmp_path / "unpacked")
    return tmp_path / "unpacked"


def repacked(folder):
    """Write the archive of a changed pack with the checksums of its files, as someone who forges it does."""
    content = json.loads((folder / CRATE).read_text())
    for entity in content["@graph"]:
        if "sha256" in entity:
            entity["sha256"] = sha256(folder / entity["@id"])
    (folder / CRATE).write_text(json.dumps(content))
    write_archive(folder, folder.with_suffix(".zip"))
    return folder.with_suffix(".zip")


def test_same_runs_give_same_bytes(packed):
    assert packed.read_bytes() == packed.with_name("second.zip").read_bytes()


def test_pack_is_verified_in_another_folder(packed, command):
    content = json.loads(command("verify", packed, "--json").out)
    verdicts = {(claim["run"], claim["name"]): claim["verdict"] for claim in content["claims"]}
    assert content["verified"]
    assert content["sha256"] == sha256(packed)
    for number, task in enumerate(TASKS, start=1):
        run = f"run_{number}"
        claims = {name for place, name in verdicts if place == run}
        assert claims >= {"weights", "model card", "train data", "val data", "test data", "predictions", "test/loss"}
        unchecked = {name for place, name in verdicts if place == run and verdicts[place, name] == "not checked"}
        assert unchecked == {"training"}, task


@pytest.mark.run
def test_training_is_repeated_to_the_bit(packed, unpacked, command):
    claims = json.loads(command("verify", packed, "--json", "--retrain").out)["claims"]
    assert [claim["found"] for claim in claims if claim["name"] == "training"] == ["same bits"] * 2
    path = unpacked / "run_1" / Run.CONFIG
    path.write_text(path.read_text().replace("lr: 0.01", "lr: 0.02"))
    out, _ = command("verify", repacked(unpacked), "--retrain", status=1)
    assert re.search(r"run_1 +training .* at step \d+: .* failed", out)


@pytest.mark.filterwarnings("ignore:ConjunctiveGraph is deprecated")  # of rdflib
def test_pack_is_read_by_other_libraries(unpacked, monkeypatch):
    mlcroissant = pytest.importorskip("mlcroissant")
    huggingface_hub = pytest.importorskip("huggingface_hub")
    from rocrate.rocrate import ROCrate

    crate = ROCrate(unpacked)
    assert {entity.id for entity in crate.get_entities() if entity.type == "File"} == {
        path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()
    } - {CRATE}
    actions = crate.root_dataset["mentions"]
    assert [action.type for action in actions] == ["CreateAction"] * 2
    assert all(
        Path(unpacked, file.id).is_file() for action in actions for file in (*action["object"], *action["result"])
    )
    monkeypatch.chdir(unpacked / "run_1")
    dataset = mlcroissant.Dataset("croissant.json")
    assert not dataset.metadata.issues.errors
    assert {Path(file.content_url).name for file in dataset.metadata.distribution} == {
        "train.tsv",
        "val.tsv",
        "test.tsv",
    }
    assert all(sha256(Path(file.content_url)) == file.sha256 for file in dataset.metadata.distribution)
    card = huggingface_hub.ModelCard.load(unpacked / "README.md")
    results = {result.metric_name: result.metric_value for result in card.data.eval_results}
    metrics = Run(unpacked / "run_2").summary.metrics
    assert results["test/loss"] in (metrics["test/loss"], Run(unpacked / "run_1").summary.metrics["test/loss"])
    assert card_results(unpacked / "README.md")["run_2"] == metrics


def test_pack_holds_nothing_private(packed, unpacked, runs):
    private = [USER, SECRET, "diary.txt", "a1b2c3", str(runs[0].parents[2]), os.path.expanduser("~") + "/"]
    for path in unpacked.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [text for text in private if text.encode() in content], path
    command = Run(unpacked / "run_1").starts[0]["command"]
    assert command == "lightning-tfm fit --config own.yaml"
    assert (unpacked / "run_1/uncommitted_0.diff").read_text().endswith("+width = 2\n")


@pytest.mark.parametrize(
    "line", ["key = 'hf_abcdefghijklmnopqrstuvwxyz012345'", f"value = {SECRET}", "DATA = '/home/me/data'"]
)
def test_secret_in_patch_is_refused(line, runs, tmp_path, command, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    monkeypatch.setenv("HOME", "/home/me")
    shutil.copytree(runs[1], run := tmp_path / "runs/own/version_0")
    Run(run).write_diff(0, f"diff --git a/x b/x\n+{line}\n")
    shutil.rmtree(run / "attention", ignore_errors=True)
    _, err = command("pack", run, "--output", "pack.zip", status=2)
    assert "line 2 of run_1/uncommitted_0.diff holds" in err
    assert "--no-patch leaves it out" in err
    assert not Path("pack.zip").exists()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/usr/local/x.yaml", "x.yaml"),
        (
            "fit --config /a/b/x.yaml --data.train=[/c/d.tsv,~/e/f.tsv]",
            "fit --config x.yaml --data.train=[d.tsv,f.tsv]",
        ),
        ("experiments/copy.yaml", "experiments/copy.yaml"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        (r"C:\Users\me\x.yaml", "x.yaml"),
        ({"/": "/", "a": ["/a/b", 1]}, {"/": "/", "a": ["b", 1]}),
    ],
)
def test_paths_are_replaced_by_names(value, expected):
    assert without_places(value) == expected


@pytest.mark.parametrize("seed", range(12))
def test_changed_byte_is_found(seed, packed, tmp_path, command):
    content = bytearray(packed.read_bytes())
    place = random.Random(seed).randrange(len(content))
    content[place] ^= 1 << random.Random(seed).randrange(8)
    assert_refused(content, tmp_path, command)


@pytest.mark.run
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_damaged_part_is_found(seed, packed, tmp_path, command):
    content, draw = packed.read_bytes(), random.Random(seed)
    begin, middle, end = sorted(draw.sample(range(len(content) + 1), 3))
    head, first, second, tail = content[:begin], content[begin:middle], content[middle:end], content[end:]
    damages = [
        head + bytes(byte ^ 0xFF for byte in first) + second + tail,
        head + second + tail,
        head + first + draw.randbytes(len(first)) + second + tail,
        head + second + first + tail,
        head + bytes(len(first)) + second + tail,
    ]
    assert_refused(damages[seed % 5], tmp_path, command)


@pytest.mark.parametrize("place", [4, 6, 8, 10, 12, -22, -20, -12, -2, -1])
def test_changed_header_is_found(place, packed, tmp_path, command):
    content = bytearray(packed.read_bytes())
    content[place] ^= 1
    assert_refused(content, tmp_path, command)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content + b"\n",
        lambda content: b"#!/bin/sh\n" + content,
        lambda content: b"",
        lambda content: b"not an archive",
        lambda content: b"PK\5\6" + bytes(18),
    ],
)
def test_other_bytes_are_refused(change, packed, tmp_path, command):
    assert_refused(change(packed.read_bytes()), tmp_path, command)


def assert_refused(content, folder, command):
    (folder / "changed.zip").write_bytes(content)
    out, err = command("verify", folder / "changed.zip", status=2)
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("lightning-tfm: error: PACK must be an archive as `pack` writes it, but ")


ENTRIES = {
    "traversal": ("../evil.txt", b"", {}),
    "inner traversal": ("run_1/../../evil.txt", b"", {}),
    "absolute": ("/tmp/evil.txt", b"", {}),
    "backslash": ("..\\evil.txt", b"", {}),
    "drive": ("C:evil.txt", b"", {}),
    "control": ("evil\x1b[2J.txt", b"", {}),
    "link": ("run_1/link", b"/etc/passwd", {"external_attr": (stat.S_IFLNK | 0o777) << 16}),
    "folder": ("run_1/empty/", b"", {"external_attr": (stat.S_IFDIR | 0o755) << 16}),
    "program": ("run_1/evil", b"", {"external_attr": (stat.S_IFREG | 0o755) << 16}),
    "bomb": ("bomb.txt", bytes(10_000_000), {"compress_type": zipfile.ZIP_DEFLATED}),
    "duplicate": ("README.md", b"", {}),
    "other case": ("readme.MD", b"", {}),
    "file as folder": ("README.md/evil.txt", b"", {}),
}
"""Entries that are added to a pack: the name, the content and the changed attributes."""


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("entry", ENTRIES)
def test_hostile_entry_is_refused(entry, packed, tmp_path, command):
    (tmp_path / "work").mkdir()
    shutil.copyfile(packed, path := tmp_path / "work/changed.zip")
    name, content, attributes = ENTRIES[entry]
    with zipfile.ZipFile(path, "a") as archive:
        info = zipfile.ZipInfo(name)
        info.create_system, info.external_attr = 3, 0o100644 << 16
        for attribute, value in attributes.items():
            setattr(info, attribute, value)
        archive.writestr(info, content, attributes.get("compress_type"))
    out, err = command("verify", path, status=2)
    assert out == ""
    (line,) = err.splitlines()
    assert "PACK must be an archive as `pack` writes it" in line
    assert not Path("/tmp/evil.txt").exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["work"]


def without_second_run(folder):
    """Write the archive of a changed pack as `repacked` does, without the second run, whose test takes seconds."""
    shutil.rmtree(folder / "run_2")
    content = json.loads((folder / CRATE).read_text())
    content["@graph"] = [each for each in content["@graph"] if not each["@id"].startswith("run_2/")]
    (folder / CRATE).write_text(json.dumps(content))
    return repacked(folder)


def changed_json(folder, name, change):
    path = folder / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def changed_config(folder, change):
    path = folder / "run_1" / Run.CONFIG
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content))


def changed_card(folder):
    path = folder / "README.md"
    path.write_text(re.sub(r"(name: test/loss\n +value: ).*", r"\g<1>0.5", path.read_text(), count=1))


def changed_weights(folder):
    path = folder / "run_1/model.safetensors"
    content = bytearray(path.read_bytes())
    for place in range(-1, -len(content) // 2, -4):  # the signs
        content[place] ^= 0x80
    path.write_bytes(content)


def truncated_weights(folder):
    path = folder / "run_1/model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


FORGERIES = {
    "metric": (
        lambda folder: changed_json(folder, "run_1/summary.json", lambda each: each["test"].update(exact_match=0.987)),
        "test/exact_match",
    ),
    "added metric": (
        lambda folder: changed_json(folder, "run_1/summary.json", lambda each: each["test"].update(bleu=41.0)),
        "test/bleu",
    ),
    "fingerprint": (
        lambda folder: changed_json(
            folder, "run_1/provenance.json", lambda each: each[-1]["data_fingerprint"].update(val="0" * 16)
        ),
        "val data",
    ),
    "prediction": (
        lambda folder: (folder / "run_1/predictions.jsonl").write_text(
            (folder / "run_1/predictions.jsonl").read_text().replace('"correct": false', '"correct": true', 1)
        ),
        "predictions",
    ),
    "card": (changed_card, "model card"),
    "weights": (changed_weights, "test/loss"),
    "truncated weights": (truncated_weights, "weights"),
    "class path of the data": (
        lambda folder: changed_config(folder, lambda each: each["data"].update(class_path="os.path.Evil")),
        "test",
    ),
    "class path of the network": (
        lambda folder: changed_json(
            folder,
            "run_1/model.json",
            lambda each: each["checkpoint"]["hyper_parameters"]["network"].update(class_path="subprocess.Popen"),
        ),
        "test",
    ),
    "class path in an argument": (
        lambda folder: changed_json(
            folder,
            "run_1/model.json",
            lambda each: each["checkpoint"]["hyper_parameters"].update(other={"class_path": "os.system"}),
        ),
        "weights",
    ),
    "path": (
        lambda folder: changed_config(folder, lambda each: each["data"]["init_args"].update(train="/etc/some/passwd")),
        "settings",
    ),
    "parent": (
        lambda folder: changed_config(folder, lambda each: each["data"]["init_args"].update(train="../../passwd")),
        "settings",
    ),
    "file of the data": (
        lambda folder: changed_json(
            folder, f"run_1/{CROISSANT}", lambda each: each["distribution"][0].update(contentUrl="../../passwd")
        ),
        "data files",
    ),
    "nested YAML": (
        lambda folder: (folder / "run_1" / Run.CONFIG).write_text("[" * 5000),
        "settings",
    ),
    "nested JSON": (lambda folder: (folder / "run_1/model.json").write_text("[" * 100_000), "weights"),
}
"""Changes of a pack whose checksums are corrected, and the claim of the first run that fails."""


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_claim_is_named(forgery, unpacked, command):
    change, name = FORGERIES[forgery]
    change(unpacked)
    out, err = command("verify", without_second_run(unpacked), "--json", status=1)
    failed = [claim["name"] for claim in json.loads(out)["claims"] if claim["verdict"] == "failed"]
    assert name in failed
    assert "Traceback" not in err
    if forgery in ("metric", "added metric", "fingerprint", "prediction", "card"):
        assert failed == [name] or failed == ["model card", name]


@pytest.mark.parametrize(("factor", "verdict"), [(1.0005, "verified"), (1.002, "failed")])
def test_results_of_another_processor_have_a_tolerance(factor, verdict, unpacked, command):
    def change(starts):
        starts[-1]["hardware"]["processor"] = "another"

    changed_json(unpacked, "run_1/provenance.json", change)
    changed_json(unpacked, "run_1/summary.json", lambda each: each["test"].update(loss=factor * each["test"]["loss"]))
    (unpacked / "README.md").write_text("---\nmodel-index: [{name: run_1, results: []}]\n---\n")
    out, _ = command("verify", without_second_run(unpacked), "--json", status=None)
    verdicts = {claim["name"]: claim["verdict"] for claim in json.loads(out)["claims"]}
    assert verdicts["test/loss"] == verdict
    assert verdicts["predictions"] == "verified"


@pytest.mark.parametrize("change", ["changed", "missing", "added", "not JSON"])
def test_files_must_be_those_of_the_metadata(change, unpacked, command):
    path = unpacked / "run_1/metrics.csv"
    if change == "changed":
        path.write_text(path.read_text().replace("1", "2", 1))
    elif change == "missing":
        path.unlink()
    elif change == "added":
        (unpacked / "run_1/metrics.csv.py").write_text("")
    else:
        (unpacked / CRATE).write_text("{")
    write_archive(unpacked, unpacked.with_suffix(".zip"))
    out, _ = command("verify", unpacked.with_suffix(".zip"), status=1)
    (line,) = [line for line in out.splitlines() if line.endswith("failed")]
    assert ("run_1/metrics.csv" if change != "not JSON" else CRATE) in line


def test_data_files_that_are_not_included(runs, tmp_path, command):
    out, _ = command("pack", runs[0], "--output", "pack.zip")
    assert "--include-data includes them" in out
    out, _ = command("verify", "pack.zip", status=1)
    assert re.search(r"data/train.tsv +\w+ +missing; run verify in the folder that holds it +failed", out)
    for split, path in Run(runs[0]).config["data"]["init_args"].items():
        if split in ("train", "val", "test"):
            shutil.copy(path, tmp_path)
    out, _ = command("verify", "pack.zip")
    assert "failed" not in out
    (tmp_path / "train.tsv").write_text("a\tA\n")
    out, _ = command("verify", "pack.zip", status=1)
    assert re.search(r"data/train.tsv .* failed", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "missing.zip"], "PACK must be an archive, but there is no file 'missing.zip'"),
        (["pack", "nothing", "--output", "a.zip"], "RUN must name a run"),
        (["pack", "{run}", "{run}", "--output", "a.zip"], "RUN must name each run once"),
        (["pack", "{run}", "--output", "missing/a.zip"], "--output must lie in a folder that exists"),
        (["pack", "{run}"], "the following arguments are required: --output"),
    ],
)
def test_mistakes(arguments, message, runs, mistake):
    assert message in mistake(*(argument.format(run=runs[0]) for argument in arguments))
