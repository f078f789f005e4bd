"""`lightning-tfm inspect`: what the parts of a trained network do."""

import pytest
import torch

from lightning_tfm.inference import LanguageModelPredictor, MaskedLanguageModelPredictor
from lightning_tfm.inference.loading import load
from lightning_tfm.insight import attribution, inspect_text
from lightning_tfm.insight.sample import logits_of
from lightning_tfm.runs.record import Run
from lightning_tfm.tokenization import SubwordTokenizer
from support.experiments import TASKS, trained_run
from support.pages import assert_fits_every_screen, page_data


@pytest.fixture(params=TASKS)
def trained(request, tmp_path_factory):
    return trained_run(request.param, tmp_path_factory)


def test_every_task_is_inspected(trained, tmp_path, command):
    """Also a network without heads; the numbers of the full network are those of the examples."""
    printed = command("inspect", trained / "checkpoints/best.ckpt", "--examples", 4, "--output", tmp_path).out
    inspection = Run(tmp_path).inspection
    assert inspection["examples"] == 4
    assert f"loss {inspection['full']['loss']:.4f}" in printed
    names = [head["name"] for head in inspection["heads"]]
    assert all(name in printed for name in names)
    for part in inspection["heads"] + inspection["components"]:
        for without in part["without"].values():
            mean, low, high = without["loss_increase"]
            assert low <= mean <= high
            assert without["loss"] == pytest.approx(inspection["full"]["loss"] + mean, rel=1e-4, abs=1e-5)
    assert inspection["checkpoint"] == str(trained / "checkpoints/best.ckpt")
    names = {path.name for path in Run(tmp_path).inspection_folder.iterdir()}
    assert {"inspect.json", "tables.tex"} <= names
    assert {name.removesuffix(".png") for name in names if name.endswith(".png")} == {
        name.removesuffix(".pdf") for name in names if name.endswith(".pdf")
    }


LINES = {LanguageModelPredictor: "some words", MaskedLanguageModelPredictor: "a [MASK] b"}


def test_the_output_for_a_text_is_inspected(trained):
    predictor = load(trained / "checkpoints/best.ckpt")
    line = LINES.get(type(predictor)) or Run(trained).predictions[0]["source"]
    result = inspect_text(predictor, line)
    forced = predictor.teacher_forced(line)
    T, S = len(result["target_symbols"]), len(result["input_symbols"])
    for name in ("integrated_gradients", "occlusion"):
        assert torch.tensor(result[name]).shape == (T, S)
    logits = logits_of(predictor.network, forced.inputs)
    assert logits.size(1) == T
    # Subwords may spell the output in another way than it was decoded.
    if forced.output != line and not isinstance(predictor.tokenizer, SubwordTokenizer):
        chosen = logits.argmax(-1)  # as in greedy decoding
        assert chosen[forced.is_target].equal(forced.targets[forced.is_target])
    for steps in result["lens"].values():
        assert len(steps) == T


def test_patching_between_texts(tmp_path_factory, tmp_path, command, monkeypatch):
    monkeypatch.setattr(attribution, "LEAST_DIFFERENCE", 0)
    trained = trained_run("spelling_gpt", tmp_path_factory)
    arguments = ("inspect", trained / "checkpoints/best.ckpt", "--examples", 4, "--output", tmp_path)
    command(*arguments, "--input", "abc", "--against", "acb")
    (text,) = Run(tmp_path).inspection["texts"]
    assert {len(each["effects"]) for each in text["patching"]} == {len(text["input_symbols"])}
    assert (Run(tmp_path).inspection_folder / "text_1_patching_input.png").exists()
    message = command(*arguments, "--input", "abc", "--against", "ab", status=2).err
    assert "--against 'ab': both inputs must have the same number of tokens" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--against", "abc"), "--against needs a text to compare with; add --input TEXT"),
        (("--examples", "1"), "--examples must be at least 2, but is 1"),
        (("--input", ""), "must have an output"),
    ],
)
def test_invalid_arguments(options, message, tmp_path_factory, command):
    trained = trained_run("spelling_gpt", tmp_path_factory)
    assert message in command("inspect", trained / "checkpoints/best.ckpt", *options, status=2).err


def test_a_checkpoint_outside_a_run_needs_a_folder(tmp_path_factory, tmp_path, command):
    copy = tmp_path / "folder/of/copy.ckpt"
    copy.parent.mkdir(parents=True)
    copy.write_bytes((trained_run("spelling_gpt", tmp_path_factory) / "checkpoints/best.ckpt").read_bytes())
    assert "is not in the folder of a run; add --output FOLDER" in command("inspect", copy, status=2).err
    assert "there is no checkpoint" in command("inspect", tmp_path / "nothing.ckpt", status=2).err


def test_the_report_shows_the_inspection(tmp_path_factory, tmp_path, command, browser):
    trained = trained_run("spelling_gpt", tmp_path_factory)
    run = tmp_path / "run"
    run.mkdir()
    for path in trained.iterdir():
        if path.is_file():
            (run / path.name).write_bytes(path.read_bytes())
    command("inspect", trained / "checkpoints/best.ckpt", "--examples", 4, "--input", "abc", "--output", run)
    command("report", run, "--output", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Inside the network" in page
    assert "layers.0.self_attention.0" in page
    assert {"ablations", "contributions"} <= {chart["id"] for chart in page_data(page)["charts"]}
    assert_fits_every_screen(tmp_path / "page.html", browser)
    (Run(run).inspection_folder / Run.INSPECTION).write_text("{}")
    message = command("report", run, "--output", tmp_path / "damaged.html", status=2).err
    assert "inspect.json' must be an intact file, but is damaged: " in message


def test_pictures_of_an_earlier_inspection_are_deleted(tmp_path_factory, tmp_path, command):
    trained = trained_run("spelling_gpt", tmp_path_factory)
    arguments = ("inspect", trained / "checkpoints/best.ckpt", "--examples", 4, "--output", tmp_path)
    command(*arguments, "--input", "abc")
    assert [*Run(tmp_path).inspection_folder.glob("text_1_*")]
    command(*arguments)
    assert not [*Run(tmp_path).inspection_folder.glob("text_1_*")]
