"""Predictions of all tasks by the command `generate`."""

import math
import re
import unicodedata

import pytest
import torch

from lightning_tfm.errors import UserError
from lightning_tfm.inference.loading import load
from lightning_tfm.tokenization import normalize_text
from support.experiments import folder, trained_run


def test_generate_writes_an_output_for_every_line(task, trained, tmp_path, command):
    inputs = {
        "translation": ["der Hund schläft", "ein Kind"],
        "spelling": ["abc", "e"],
        "text": ["der", "ein Hu"],
        "masked": ["de[MASK] Hund", "[MASK]"],
        "reviews": ["GREAT! film", "the plot is Awful"],
    }[task.partition("_")[0]]
    checkpoint = trained / "checkpoints/best.ckpt"
    out = command("generate", checkpoint, *inputs).out
    if task.startswith("text"):
        texts = out.split("\n--------------------\n")
        assert [text[: len(prompt)] for text, prompt in zip(texts, inputs, strict=False)] == inputs
        assert [len(text.removesuffix("\n")) - len(inputs[i]) for i, text in enumerate(texts)] == [500, 500]
        return
    outputs = out.splitlines()
    assert len(outputs) == 2
    (tmp_path / "input").write_text("\n".join([*inputs, "", inputs[0]]) + "\n")
    files = ["--input", tmp_path / "input", "--output", tmp_path / "output"]
    command("generate", checkpoint, *files, status=1)
    assert (tmp_path / "output").read_text().splitlines() == [*outputs, "", outputs[0]]
    if task.startswith("reviews"):
        module = load(checkpoint)
        for line, text in zip(outputs, inputs, strict=True):
            label, probability = line.split("\t")
            with torch.no_grad():
                probabilities = module.network(torch.tensor([module.tokenizer.encode(text)])).softmax(-1)[0]
            assert label == module.labels[probabilities.argmax()]
            assert float(probability) == pytest.approx(probabilities.max().item(), abs=1e-4)


def encoded(checkpoint, text):
    try:
        return load(checkpoint).encode_line(normalize_text(text))
    except UserError as error:
        return str(error)


def test_nfc_and_nfd_inputs_have_the_same_outputs(task, trained, tmp_path, command):
    inputs = "schl\u00e4ft \ud55c" + task.startswith("masked") * "[MASK]"
    checkpoint, results = trained / "checkpoints/best.ckpt", []
    options = ["--max-tokens=5"] if task.startswith("text") else []
    for form in ("NFC", "NFD"):
        text = unicodedata.normalize(form, inputs)
        (tmp_path / form).write_text(f"{text}\n")
        for arguments in ([text], ["--input", tmp_path / form]):
            results.append((command("generate", checkpoint, *arguments, *options), encoded(checkpoint, text)))
    assert results[1:] == results[:1] * 3


def test_blank_lines_are_reported(task, trained, tmp_path, command):
    """A language model continues a line of blanks; for the other tasks, it is empty."""
    blanks = [b"", b"\r"] if task.startswith("text") else [b"", b"\r", b"  ", b"\t", " \t\u3000".encode()]
    valid = {"reviews": b"the film the film", "masked": b"e[MASK]"}.get(task.partition("_")[0], b"e")
    (tmp_path / "input").write_bytes(b"\n".join([valid, *blanks, valid]) + b"\n")
    files = ["--input", tmp_path / "input", "--output", tmp_path / "output", "--max-tokens=3"]
    files = files[:-1] if task.startswith(("reviews", "masked")) else files
    _, err = command("generate", trained / "checkpoints/best.ckpt", *files, status=1)
    notes = [f"lightning-tfm: line {number}: the text is empty" for number, _ in enumerate(blanks, start=2)]
    assert [line for line in err.splitlines() if "unknown" not in line] == notes
    if not task.startswith("text"):
        first, *empty, last = (tmp_path / "output").read_text().splitlines()
        assert first == last
        assert empty == [""] * len(blanks)


def test_prompts_are_continued_as_typed(tmp_path_factory, command):
    """Line feeds of an argument are kept, unknown symbols are reported, and an empty prompt has no continuation."""
    checkpoint = trained_run("text_gpt", tmp_path_factory) / "checkpoints/best.ckpt"
    out, err = command("generate", checkpoint, "der\n", "\n", "\u03a9der", "", "--max-tokens=5", status=1)
    texts = out.removesuffix("\n").split("\n--------------------\n")
    assert [text[:4] for text in texts] == ["der\n", texts[1][:4], "\ufffdder", ""]
    assert texts[1].startswith("\n")
    assert err.splitlines() == [
        "lightning-tfm: line 3: 1 of 4 tokens are not in the vocabulary: '\u03a9'",
        "lightning-tfm: line 4: the text is empty",
    ]


def test_a_line_longer_than_the_network_allows_is_reported(reference, command):
    checkpoint = folder(reference("gpt"), "gpt") / "checkpoints/best.ckpt"
    out, err = command("generate", checkpoint, "1 " * 400, "3 1 2", status=1)
    assert [bool(line) for line in out.splitlines()] == [False, True]
    assert re.match(r"lightning-tfm: line 1: .* tokens, .*max_length", err)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reviews_classifier", ["--temperature", "1"], "temperature must not be set for a Classifier, which has no "),
        ("reviews_classifier", ["--n-best", "2"], "n_best must not be set for a Classifier"),
        ("reviews_classifier", ["--show-attention"], "--show-attention must not be set for a Classifier"),
        ("text_gpt", ["--n-best", "2"], "n_best must not be set for a LanguageModel, which supports only temperature"),
        ("reviews_classifier", ["--max-tokens", "9"], "max_tokens must not be set for a Classifier"),
        ("text_gpt", ["--beam-size", "3"], "beam_size must not be set for a LanguageModel"),
        ("text_gpt", ["--max-tokens", "0"], "max_tokens must be at least 1, but is 0"),
        ("text_gpt", ["--temperature", "0", "--top-k", "3"], "top_k and top_p need a temperature above 0"),
    ],
)
def test_invalid_options_of_a_task_are_refused(name, options, message, tmp_path_factory, mistake):
    checkpoint = trained_run(name, tmp_path_factory) / "checkpoints/best.ckpt"
    assert message in mistake("generate", checkpoint, "abc", *options)


def test_continuations_are_determined_by_the_seed_or_greedy(tmp_path_factory, command):
    checkpoint = trained_run("text_gpt", tmp_path_factory) / "checkpoints/best.ckpt"

    def generate_text(*options):
        return command("generate", checkpoint, "der", "--max-tokens", "40", *options).out

    assert generate_text() == generate_text("--seed", "0") == generate_text("--temperature", "0.8")
    assert generate_text() != generate_text("--seed", "1")
    greedy = generate_text("--temperature", "0")
    module = load(checkpoint)
    network, tokenizer = module.network, module.tokenizer
    text = tokenizer.encode("der")
    while len(text) < 43:  # recompute each token from the whole text, while it fits
        if len(text) > network.max_length:
            break
        with torch.no_grad():
            logits = network(torch.empty(1, 0, dtype=torch.long), torch.tensor([text]))[0, -1]
        logits[:3] = -math.inf
        text.append(int(logits.argmax()))
    assert greedy.startswith(tokenizer.decode(text))
    assert len(greedy) == 43 + 1
