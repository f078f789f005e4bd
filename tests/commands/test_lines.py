"""Lines of text: n-best outputs, scores, alignments, and output files that are continued."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_tfm.callbacks import Predictions
from lightning_tfm.commands import generate, score
from lightning_tfm.commands.generate import BARS, _attention_table, _uncertain
from lightning_tfm.commands.lines import CHUNK_SIZE, LineOutput, json_line, read_chunks
from lightning_tfm.errors import UserError
from lightning_tfm.fit.console import print_results
from lightning_tfm.inference import BATCH_SIZE, Alternative, OutputStep, Predictor, Score
from lightning_tfm.inference.attention_maps import AttentionMap, visible
from lightning_tfm.inference.decoding import DecodingOptions
from lightning_tfm.inference.loading import load
from lightning_tfm.networks import GPT
from lightning_tfm.tasks import LanguageModel, Seq2SeqModule
from lightning_tfm.tokenization import BOS, EOS, SymbolTokenizer
from support.experiments import TASKS, trained_run

PAIRS = [name for name in TASKS if TASKS[name][0] == "Seq2SeqModule"]
SOURCES = {"translation": ["der Hund schläft", "ein Kind", "ein Mann"], "spelling": ["abc", "e", "cab"]}


@pytest.fixture(params=PAIRS)
def checkpoint(request, tmp_path_factory):
    return trained_run(request.param, tmp_path_factory) / "checkpoints/best.ckpt"


@pytest.fixture
def speller(tmp_path_factory):
    return trained_run("spelling_gpt", tmp_path_factory) / "checkpoints/best.ckpt"


@pytest.fixture
def classifier(tmp_path_factory):
    return trained_run("reviews_classifier", tmp_path_factory) / "checkpoints/best.ckpt"


@pytest.fixture
def sources(checkpoint):
    return SOURCES[checkpoint.parents[2].name.partition("_")[0]]


def log_probability(module, source, target):
    """Return the log probability of a target, computed step by step."""
    state = module.network.encode(torch.tensor([[*module.tokenizer.encode(source), EOS]]))
    token, total = BOS, 0.0
    for following in [*module.tokenizer.encode_target(target), EOS]:
        logits, state = module.network.decode_step(torch.tensor([token]), state)
        total += logits.log_softmax(-1)[0, following].item()
        token = following
    return total


def test_int8_scores_are_close(checkpoint, sources, command):
    def columns(*arguments):
        return zip(*(line.split("\t") for line in command(*arguments)[0].splitlines()), strict=True)

    lines = [f"{source}\t{source}" for source in sources]
    expected, found = (
        torch.tensor([float(score) for score in next(columns("score", checkpoint, *lines, *options))])
        for options in ([], ["--int8"])
    )
    assert not found.equal(expected)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
    generated = ("generate", checkpoint, *sources, "--scores")
    (texts, scores, _), (ours, our_scores, _) = columns(*generated), columns(*generated, "--int8")
    same = [index for index, (text, other) in enumerate(zip(texts, ours, strict=True)) if text == other]
    assert len(same) >= 2
    for index in same:
        assert float(our_scores[index]) == pytest.approx(float(scores[index]), rel=0.05, abs=0.05)


@pytest.mark.parametrize("task", ["text_gpt", "text_linear_transformer", "reviews_classifier"])
def test_int8_runs_every_task_on_cpu(task, tmp_path_factory, monkeypatch, command):
    checkpoint = trained_run(task, tmp_path_factory) / "checkpoints/best.ckpt"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command("generate", checkpoint, "good", "--int8")[0].strip()


def test_n_best_texts_are_unique(checkpoint, sources, monkeypatch):
    """Different tokens may have the same text."""
    module = load(checkpoint)
    options = DecodingOptions(beam_size=4, n_best=4, scores=True)
    before = module.predict(sources, options)
    decode = module.tokenizer.decode
    monkeypatch.setattr(module.tokenizer, "decode", lambda ids: str(len(decode(ids)) % 2))
    after = module.predict(sources, options)
    for all_outputs, (outputs, _) in zip(before, after, strict=True):
        best = {}
        for output in all_outputs.outputs:
            best.setdefault(str(len(output.text) % 2), pytest.approx(output.log_probability, abs=1e-4))
        assert {output.text: output.log_probability for output in outputs} == best
        assert len(outputs) == len(best)
    assert sum(len(prediction.outputs) for prediction in after) < sum(len(prediction.outputs) for prediction in before)


def test_score_of_given_targets(checkpoint, sources, tmp_path, command):
    module = load(checkpoint)
    targets = [module.predict([source])[0].text or "a" for source in sources]
    targets[0] = targets[-1]
    lines = [f"{source}\t{target}" for source, target in zip(sources, targets, strict=True)]
    (tmp_path / "pairs.tsv").write_text("\n".join([*lines, "no target", ""]))
    out, err = command("score", checkpoint, "--input", tmp_path / "pairs.tsv", status=1)
    *rows, missing = out.splitlines()
    assert missing == ""
    assert "line 4: it must have a source and a target, separated by a tab, but has no tab; add the target" in err
    for row, source, target in zip(rows, sources, targets, strict=True):
        value, perplexity = map(float, row.split("\t"))
        assert value == pytest.approx(log_probability(module, source, target), abs=1e-3)
        tokens = len(module.tokenizer.encode_target(target)) + 1
        assert perplexity == pytest.approx(math.exp(-value / tokens), rel=1e-3)


@pytest.mark.parametrize("length", [2, 9, 12, 13, 30])
def test_score_of_long_text_in_windows(length):
    """Each token is predicted from the whole text before it, or from at least half of the network's positions."""
    torch.manual_seed(0)
    tokenizer = SymbolTokenizer("abcdefgh")
    network = GPT(tokenizer.vocab_size, 16, 2, 1, max_length=12).eval()
    module = LanguageModel(network, tokenizer)
    text = "".join("abcdefgh"[n] for n in torch.randint(8, (length,)).tolist())
    ids = torch.tensor([tokenizer.encode(text)])
    expected, start, seen = 0.0, 0, 1
    while seen < length:
        for position in range(seen, min(length, start + 13)):
            logits = network(ids[:, :0], ids[:, start:position])
            expected += logits[0, -1].log_softmax(-1)[ids[0, position]].item()
        seen = min(length, start + 13)
        start = seen - 6
    (score,) = module.score([text])
    assert score.tokens == length - 1
    assert score.log_probability == pytest.approx(expected, abs=1e-4)


def test_perplexity_overflow():
    assert Score(-1e6, 2).perplexity == math.inf
    assert Score(-2.0, 2).perplexity == pytest.approx(math.e)


def test_classifier_refuses_scores_and_alignments(classifier):
    module = load(classifier)
    for message, call in (
        ("must score lines, but Classifier does not", lambda: module.score(["good"])),
        ("must align lines, but Classifier does not", lambda: module.align("good", "pos")),
        ("scores must not be set for a Classifier", lambda: module.predict(["good"], DecodingOptions(scores=True))),
    ):
        with pytest.raises(UserError, match=message):
            call()


# Alignments


def test_alignments_follow_attention(checkpoint, sources):
    """Without a gold alignment, of the mean over the heads of the middle layer."""
    module = load(checkpoint)
    for source, prediction in zip(sources, module.predict(sources, DecodingOptions(alignments=True)), strict=True):
        (output,) = prediction.outputs
        maps = module.attention({"source": source, "target": output.text, "alignment": None})
        maps = [each for each in maps if each.predicts and (each.keys[-1] == "EOS" or "BOS" in each.keys[1:])]
        middle = maps[len(maps) // 2]
        targets, symbols = module.tokenizer.split_target(output.text), module.tokenizer.split(source)
        rows = middle.weights.mean(0)[middle.first_target :][: len(targets), : len(symbols)]
        words = module.tokenizer.word_indices
        first, second = words(source) or range(len(symbols)), words(output.text) or range(len(targets))
        expected = {(first[i], second[j]) for j, i in enumerate(rows.argmax(1).tolist())}
        assert set(output.alignment) == expected
        units = [source.split(), output.text.split()] if words(source) else [symbols, targets]
        assert all(i < len(units[0]) and j < len(units[1]) for i, j in output.alignment)


def test_alignment_of_truncated_outputs(checkpoint, sources, monkeypatch):
    """The decoder cannot read the last token of an output of maximum length."""
    module = load(checkpoint)
    decode_step, steps = module.network.decode_step, []

    def endless(*arguments):
        steps.append(arguments)
        logits, state = decode_step(*arguments)
        return logits.index_fill(-1, torch.tensor(EOS), float("-inf")), state

    monkeypatch.setattr(module.network, "decode_step", endless)
    predictions = module.predict(sources, DecodingOptions(alignments=True))
    assert steps, "the network decodes"
    assert len(steps) % module.max_target_length == 0  # of all batches
    for source, prediction in zip(sources, predictions, strict=True):
        assert prediction.outputs[0].alignment
        for each in module.attention({"source": source, "target": prediction.text, "alignment": None}):
            assert each.weights.shape[1:] == (len(each.queries), len(each.keys))


def test_alignment_head(reference):
    module = load(reference("transformer") / "runs/copy_transformer/version_0/checkpoints/best.ckpt")
    layer, head = module.alignment_head
    (prediction,) = module.predict(["3 1 2"], DecodingOptions(alignments=True))
    attention = module.attention({"source": "3 1 2", "target": prediction.text, "alignment": None})
    (shown,) = [shown for shown in attention if shown.layer == layer]
    links = [(i, j) for j, i in enumerate(shown.weights[head, :-1, :3].argmax(-1).tolist())]
    assert prediction.outputs[0].alignment == tuple(sorted(links))


def test_show_attention(reference, command):
    checkpoint = reference("transformer") / "runs/copy_transformer/version_0/checkpoints/best.ckpt"
    output, header, *rows, scale = command("generate", checkpoint, "3 1 2", "--show-attention")[0].splitlines()
    assert header.split() == ["3", "1", "2", "EOS"]
    assert [row[0] for row in rows] == output.split()
    assert {cell for row in rows for cell in row[1:]} <= set(BARS)
    assert "█" in "".join(rows)
    assert re.fullmatch(r"\(█ is a weight of [01]\.\d\d, a blank is below 0\.0\d\d\)", scale)


def test_attention_table_scale():
    """Only weights below a fiftieth of the largest are blank, so that diffuse attention is visible."""
    weights = torch.tensor([[[0.10, 0.05, 0.0019], [0.049, 0.0021, 0.10]]])
    table = _attention_table(AttentionMap("layer", weights, ["x", "y"], ["a", "b", "EOS"], []))
    assert table.splitlines() == ["  a b EOS", "x █ ▄", "y ▄ ▁ ███", "(█ is a weight of 0.10, a blank is below 0.002)"]
    diffuse = _attention_table(AttentionMap("layer", torch.full((1, 1, 40), 1 / 40), ["x"], 40 * ["a"], []))
    assert diffuse.splitlines()[1] == "x" + 40 * " █"
    none = _attention_table(AttentionMap("layer", torch.zeros(1, 0, 3), [], ["a", "b", "c"], []))
    assert none.splitlines()[0] == " a b c"


# Formats


def test_columns_equal_json(checkpoint, sources, command):
    arguments = ["generate", checkpoint, *sources, "--n-best", "2", "--scores", "--alignments"]
    rows = [line.split("\t") for line in command(*arguments)[0].splitlines()]
    objects = [json.loads(line) for line in command(*arguments, "--json")[0].splitlines()]
    assert len(rows) == len(objects) >= len(sources)
    for (text, value, rank, alignment), row in zip(rows, objects, strict=True):
        assert (text, int(rank), alignment) == (row["output"], row["rank"], row["alignment"])
        assert float(value) == pytest.approx(row["log_probability"], abs=1e-4)
    numbers = [row["line"] for row in objects]
    assert numbers == sorted(numbers)
    assert set(numbers) == {1, 2, 3}


def test_json_of_a_line_without_an_output_or_a_score(speller, command):
    """A line that is not valid UTF-8 is escaped, and is still valid JSON."""
    stdin = "a\n\n\xe9\n".encode("latin-1")
    first, *others = map(json.loads, command("generate", speller, "--json", status=1, stdin=stdin)[0].splitlines())
    assert first.keys() == {"line", "text", "output", "log_probability", "steps"}
    assert others == [{"line": 2, "text": "", "output": None}, {"line": 3, "text": "\udce9", "output": None}]
    stdin = f"a\t{first['output']}\na\n".encode()
    scored, failed = map(json.loads, command("score", speller, "--json", status=1, stdin=stdin)[0].splitlines())
    assert scored["log_probability"] == pytest.approx(first["log_probability"], abs=1e-4)
    assert [step["symbol"] for step in scored["steps"]] == [step["symbol"] for step in first["steps"]]
    assert failed == {"line": 2, "text": "a", "log_probability": None, "perplexity": None}


def test_json_has_no_number_that_is_not_finite():
    steps = [OutputStep(3, "a", math.nan, [Alternative(4, "b", math.nan)])]
    values = json.loads(json_line({"line": 1, "text": "a", "perplexity": math.inf}, steps))
    step = {"symbol": "a", "probability": None, "alternatives": [{"symbol": "b", "probability": None}]}
    assert values == {"line": 1, "text": "a", "perplexity": None, "steps": [step]}


def test_uncertain_symbols_are_named_with_their_best_alternative():
    others = [Alternative(4, "b", 0.3), Alternative(5, "c", 0.1)]
    sure, unsure = (OutputStep(3, "a", math.log(value), others) for value in (0.5, 0.4))
    assert _uncertain([sure, unsure]) == ["(uncertain: 'a' 0.40 or 'b' 0.30)"]
    assert _uncertain([sure]) == []


def test_control_characters_do_not_split_lines(speller, monkeypatch, command):
    """A reader that splits at universal newlines, or by str.splitlines, reads as many lines as there are outputs."""
    text = "\r".join(["a", *" \n\v\f\x1c\x1d\x1e\x85\u2028\u2029\t", "b"])
    monkeypatch.setattr(SymbolTokenizer, "decode", lambda self, ids: text)
    assert command("generate", speller, "a", "b")[0].splitlines() == [f"a{' ' * 23}b"] * 2
    lines = command("generate", speller, "a", "b", "--json")[0].splitlines()
    assert [json.loads(line)["output"] for line in lines] == [text] * 2


def test_columns_are_not_a_source_of_symbols(speller, command):
    out, err = command("generate", speller, status=1, stdin=b"abc\tABC\nabc\t\n")
    assert re.match(r"lightning-tfm: line 1: .* has 2 columns, separated by tabs; select it, as with cut -f1\n", err)
    first, second = out.splitlines()
    assert first == ""
    assert second


@pytest.mark.parametrize("task", ["translation_transformer", "reviews_classifier"])
def test_tabs_in_text_are_noted(task, tmp_path_factory, command):
    """Texts may contain tabs, as those of Multi30k and IMDB do."""
    checkpoint = trained_run(task, tmp_path_factory) / "checkpoints/best.ckpt"
    out, err = command("generate", checkpoint, stdin=b"der\tHund\nder Hund\n")
    assert out.count("\n") == 2
    assert "line 1: it has 2 columns, separated by tabs, read as one text" in err
    assert "line 2: it has 2 columns" not in err


def test_tab_as_symbol():
    tokenizer = SymbolTokenizer("ab\t")
    module = Seq2SeqModule(GPT(tokenizer.vocab_size, 16, 2, 1, max_length=12), tokenizer, max_target_length=3)
    (prediction,) = module.predict(["a\tb"])
    assert prediction.outputs
    assert "read as one text" in prediction.note


def test_feature_column():
    tokenizer = SymbolTokenizer(["a", "[V]"], feature_separator=";")
    module = Seq2SeqModule(GPT(tokenizer.vocab_size, 16, 2, 1, max_length=12), tokenizer, max_target_length=3)
    whole, source = module.predict(["a\tV\ta", "a\tV"])
    assert "it must hold only the columns of the source and its features, but has 3 columns" in whole.note
    assert source.outputs
    whole, pair = module.score(["a\tV\ta\ta", "a\tV\ta"])
    assert "but has 3 columns" in whole.note
    assert pair.log_probability


def test_max_tokens_limit(speller, monkeypatch, command):
    longest = load(speller).max_target_length
    command("generate", speller, "a", "--max-tokens", longest)
    monkeypatch.setattr("sys.stdin", None)  # no input is read
    _, err = command("generate", speller, "--max-tokens", longest + 1, status=2)
    assert f"max_tokens must be at most the max_target_length of the model ({longest}), but is {longest + 1}" in err


@pytest.mark.parametrize("module", [generate, score])
def test_leading_dash_needs_separator(module):
    parser = module.make_parser()
    assert parser.parse_intermixed_args(["CKPT", "--int8", "--", "-able", "-ly"]).texts == ["-able", "-ly"]
    with pytest.raises(UserError, match="there is no option '-able'; write texts that begin with - after --"):
        parser.parse_intermixed_args(["CKPT", "-able"])
    with pytest.raises(UserError, match="--input: expected one argument, which follows = if it begins with -"):
        parser.parse_intermixed_args(["CKPT", "--input", "-able"])


def test_carriage_returns_end_lines_without_line_feeds(speller, tmp_path, command):
    (tmp_path / "input").write_bytes(b"a\rb\rc")
    assert len(command("generate", speller, "--input", tmp_path / "input").out.splitlines()) == 3


# Long inputs


def test_input_is_read_in_chunks():
    read = []
    endless = (read.append(number) or str(number) for number in range(10**9))
    chunks = read_chunks(Namespace(texts=endless, input=None), None, one_by_one=False)
    assert len(next(chunks)) == CHUNK_SIZE
    assert len(read) == CHUNK_SIZE


def interrupt(monkeypatch, number, method="predict"):
    """Let the call of a method with this number, from 1, end as by Ctrl-C; return the list of the calls so far."""
    original, calls = getattr(Predictor, method), []

    def interrupted(*arguments, **settings):
        calls.append(arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        return original(*arguments, **settings)

    monkeypatch.setattr(Predictor, method, interrupted)
    return calls


@pytest.mark.parametrize(
    ("name", "options"), [("generate", []), ("generate", ["--temperature", "1"]), ("score", [])], ids=str
)
def test_interrupted_output_is_continued(name, options, speller, tmp_path, monkeypatch, command):
    letters = [chr(97 + n) for n in torch.randint(5, (3 * CHUNK_SIZE - 100,)).tolist()]
    lines = letters if name == "generate" else [f"{letter}\t{letter.upper()}" for letter in letters]
    (tmp_path / "input").write_text("".join(f"{line}\n" for line in [*lines[:-2], "", lines[-1]]))
    options = ["--max-tokens", "3", *options] if name == "generate" else []
    arguments = [name, speller, "--input", tmp_path / "input", *options, "--output"]
    command(*arguments, tmp_path / "whole", status=1)  # because of the empty line
    calls = interrupt(monkeypatch, 3, "predict" if name == "generate" else "score")
    command(*arguments, tmp_path / "parts", status=130)
    assert not (tmp_path / "parts").exists()
    with (tmp_path / "parts.part").open("a") as file:  # written after the last complete chunk
        file.write("cut o")
    _, err = command(*arguments, tmp_path / "parts", status=1)
    assert f"after {2 * CHUNK_SIZE:,} lines" in err
    assert len(calls) == 4
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"input", "whole", "parts"}


def test_output_of_another_command_is_kept(speller, tmp_path, command):
    (tmp_path / "input").write_text("a\nb\n")
    (tmp_path / "output.part").write_text("x\n")
    state = {"command": "another", "lines": 1, "failures": 0, "bytes": 2}
    (tmp_path / "output.part.json").write_text(json.dumps(state))
    arguments = ["generate", speller, "--input", tmp_path / "input", "--output", tmp_path / "output"]
    assert "repeat that command, or delete this file" in command(*arguments, status=2)[1]
    assert (tmp_path / "output.part").read_text() == "x\n"
    (tmp_path / "output.part").unlink()
    command(*arguments)
    assert len((tmp_path / "output").read_text().splitlines()) == 2


def test_output_is_locked(speller, tmp_path, monkeypatch, command):
    arguments, original, errors = ["generate", speller, "a", "--output", tmp_path / "output"], Predictor.predict, []

    def predict(*inputs):
        monkeypatch.setattr(Predictor, "predict", original)
        errors.append(command(*arguments, status=2)[1])
        return original(*inputs)

    monkeypatch.setattr(Predictor, "predict", predict)
    command(*arguments)
    (error,) = errors
    assert "output' is locked by another process; stop that process first" in error
    assert len((tmp_path / "output").read_text().splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"output"}


@pytest.mark.parametrize("piped", [False, True])
def test_output_is_synced_before_rename(piped, speller, tmp_path, monkeypatch, command):
    calls, fsync, replace = [], os.fsync, Path.replace

    def record_fsync(descriptor):
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_replace(path, target):
        calls.append(("rename", str(path)))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    texts = [] if piped else ["a", "b"]
    command("generate", speller, *texts, "--output", tmp_path / "output", stdin=b"a\nb\n")
    part = str(tmp_path / "output.part")
    assert calls[-3:] == [("fsync", part), ("rename", part), ("fsync", str(tmp_path))]


def test_full_disk_names_output(speller, tmp_path, monkeypatch, command):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(full))
    _, err = command("generate", speller, "a", "--output", tmp_path / "output", status=1)
    assert err.endswith("/output.part: No space left on device\n")


def test_stdin_is_not_continued(speller, tmp_path, monkeypatch, command):
    """The lines of an interrupted command may not come again."""
    arguments = ["generate", speller, "--output", tmp_path / "output"]
    interrupt(monkeypatch, 2)
    command(*arguments, status=130, stdin=b"a\n" * 2 * BATCH_SIZE)
    command(*arguments, stdin=b"b\n")
    assert len((tmp_path / "output").read_text().splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"output"}


def test_no_output_after_error(classifier, tmp_path, command):
    command("generate", classifier, "good", "--scores", "--output", tmp_path / "output", status=2)
    assert not list(tmp_path.iterdir())
    _, err = command("generate", classifier, "good", "--output", "/dev/null", status=2)
    assert "/dev/null' cannot be opened: Not a regular file" in err
    assert Path("/dev/null").is_char_device()


def test_binary_stdin_is_refused_once(speller, command):
    _, err = command("generate", speller, status=2, stdin=b"\x80\0\n" * 1000)
    assert re.search("error: standard input must be a text in UTF-8, but has zero bytes, .* UTF-8$", err)


def test_label_with_probability(classifier, command):
    (line,) = map(json.loads, command("generate", classifier, "good", "--json")[0].splitlines())
    assert line.keys() == {"line", "text", "output", "probability", "log_probability", "steps"}
    assert line["text"] == "good"
    assert line["output"] in load(classifier).labels
    assert 0 < line["probability"] <= 1
    assert math.exp(line["log_probability"]) == pytest.approx(line["probability"], abs=1e-4)
    (step,) = line["steps"]
    labels = {step["symbol"], *(each["symbol"] for each in step["alternatives"])}
    assert labels == {*load(classifier).labels}


def test_printed_predictions_escape_control_characters(capsys):
    predictions = Predictions()
    for correct in (True, False):
        line = {"source": "a\x1b[2J", "prediction": "[b]\x1b]", "target": "c\x9b", "correct": correct, "nll": 1.0}
        predictions.lines.append(("test", 0, line))
    trainer = SimpleNamespace(
        callbacks=[predictions],
        callback_metrics={"test/loss": torch.tensor(0.5)},
        datamodule=SimpleNamespace(test_sets=("test",)),
        state=SimpleNamespace(fn=TrainerFn.TESTING),
    )
    print_results(trainer)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        r"correct  a\x1b[2J → [b]\x1b]",
        r"wrong    a\x1b[2J → [b]\x1b] (expected c\x9b)",
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_are_escaped_in_terminal_only(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    options = Namespace(texts=["a"], input=None, output=None)
    with LineOutput(options) as output:
        output.write(["a\x1b[2J\tb\x9b", "c\rd\x7f\ne é"], ["", "no \x1b]0;title\x07"], 0)
    printed = capsys.readouterr()
    exact, escaped = "a\x1b[2J\tb\x9b\nc\rd\x7f\ne é\n", "a\\x1b[2J\tb\\x9b\nc\\x0dd\\x7f\ne é\n"
    assert printed.out == (escaped if is_terminal else exact)
    assert printed.err == "lightning-tfm: line 2: no \\x1b]0;title\\x07\n"


def texts_of(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", Path(svg).read_text())


@pytest.mark.parametrize("layer", [False, True])
def test_the_figure_of_attention_has_the_rows_of_the_output_or_of_the_target(layer, checkpoint, tmp_path, command):
    """`generate` draws the output, and `score` the given target; each says which."""
    predictor = load(checkpoint)
    source = next(lines[0] for name, lines in SOURCES.items() if name in str(checkpoint))
    target = source[::-1]
    (prediction,) = predictor.predict([source])
    map_ = next(each for each in predictor.attention(predictor.example(source, target)) if each.predicts)
    options = ["--layer", map_.layer] if layer else []
    for name, text, symbols, rows in (
        ("generate", source, prediction.text, "output"),
        ("score", f"{source}\t{target}", target, "target"),
    ):
        command(name, checkpoint, text, "--figure", f"{name}.svg", "--style", "paper", *options)
        shown = texts_of(f"{name}.svg")
        assert f"{rows} symbol" in shown
        assert set(map(visible, predictor.tokenizer.split_target(symbols)[:1])) <= set(shown)
        assert 'width="234pt"' in Path(f"{name}.svg").read_text()
    command("generate", checkpoint, source, "--figure", "a.pdf", *options)
    assert b"/FontFile2" in Path("a.pdf").read_bytes()


def test_the_figure_of_attention_of_texts(tmp_path_factory, command):
    classifier = trained_run("reviews_classifier", tmp_path_factory) / "checkpoints/best.ckpt"
    command("generate", classifier, "ein guter Film", "--figure", "a.svg", "--style", "paper", "--columns", "2")
    assert {"attended symbol", "symbol"} <= {*texts_of("a.svg")}
    model = trained_run("text_gpt", tmp_path_factory) / "checkpoints/best.ckpt"
    command("score", model, "der Hund", "--figure", "b.svg")
    assert {"attended symbol", "symbol"} <= {*texts_of("b.svg")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["abc", "e", "--figure", "a.pdf"], "--figure must be set for one TEXT, but there are 2; name one"),
        (["--figure", "a.pdf"], "--figure must be set for one TEXT, but there are 0; name one"),
        (["abc", "--figure", "a.txt"], "--figure must end in .pdf or .png or .svg, but is 'a.txt'; try a.pdf"),
        (["abc", "--figure", "a.pdf", "--layer", "x"], "--layer must be one of layers.0.self_attention"),
        (["abc", "--layer", "x"], "--layer must be set for --figure only, but is 'x'; add --figure FILE"),
        (["abc", "--style", "paper"], "--style paper must be set for a figure only"),
    ],
)
def test_invalid_figures_of_attention(arguments, message, speller, command):
    assert message in command("generate", speller, *arguments, status=2).err
