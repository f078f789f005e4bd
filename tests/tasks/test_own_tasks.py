"""The task of the guide to own tasks, which defines only the required members, and the class of a checkpoint."""

import re
import sys
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import lightning
import pytest

from lightning_tfm import Seq2SeqModule, load
from lightning_tfm.errors import UserError
from lightning_tfm.inference import Seq2SeqPredictor
from lightning_tfm.networks import MaskedEncoder
from lightning_tfm.optimizers import AdamW, LRSchedule
from lightning_tfm.tasks import TaskModule

GUIDE = (Path(__file__).parents[2] / "docs/guides/own_task.md").read_text()
MAX_MEMBERS = 7


@pytest.fixture
def tagging(tmp_path, monkeypatch):
    """Return the module that the guide shows as tagging.py, in the current folder."""
    code = re.search(r":caption: tagging.py\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "tagging.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("tagging")
    sys.modules.pop("tagging", None)


def most_frequent_tags(pairs):
    """Return the tag that occurs most often with each character."""
    counts = defaultdict(Counter)
    for pair in pairs:
        for character, tag in zip(pair.source, pair.target, strict=True):
            counts[character][tag] += 1
    return {character: tags.most_common(1)[0][0] for character, tags in counts.items()}


def test_the_tagger_of_the_guide_learns_from_context(tagging, command):
    members = [name for name in vars(tagging.Tagger) if not name.startswith("_")]
    assert len(members) <= MAX_MEMBERS
    lightning.seed_everything(1, verbose=False)
    data = tagging.DateTags(batch_size=32)
    network = MaskedEncoder.from_data(data, d_model=32, num_heads=2, num_layers=2)
    optimizer = partial(AdamW, lr=0.003)
    module = tagging.Tagger.from_data(data, network, optimizer=optimizer, lr_schedule=LRSchedule(warmup_steps=20))
    trainer = lightning.Trainer(
        max_steps=200, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, data)
    (metrics,) = trainer.test(module, data, verbose=False)

    best = most_frequent_tags(data.datasets["train"].pairs)
    tagged = [best[c] == tag for pair in data.pairs("test") for c, tag in zip(pair.source, pair.target, strict=True)]
    assert metrics["test/accuracy"] > (1 + sum(tagged) / len(tagged)) / 2  # at most half of the errors

    trainer.save_checkpoint("tagger.ckpt")
    with pytest.raises(UserError, match="--trust-package tagging"):
        load("tagger.ckpt")
    lines = [pair.source for pair in data.pairs("test")[:20]]
    predictor = load("tagger.ckpt", ["tagging"])
    assert predictor.predict(lines) == module.predict(lines)
    assert predictor.predict(["1" * 11])[0].text is None  # the line is too long, the others are not
    printed = command("generate", "tagger.ckpt", lines[0], "--trust-package", "tagging").out
    assert printed == f"{predictor.predict(lines)[0].text}\n"
    command("export", "tagger.ckpt", "--output", "exported", "--trust-package", "tagging")


def test_a_checkpoint_names_the_predictor_unless_the_task_overrides_it():
    class OtherLoss(Seq2SeqModule):
        step_arguments = (*Seq2SeqModule.step_arguments, "weight")

        def loss(self, batch):
            return super().loss(batch)

    class OtherOutput(Seq2SeqModule):
        def predict_ids(self, sources, options, generator):
            return super().predict_ids(sources, options, generator)

    class OwnTask(TaskModule):
        def encode_line(self, line):
            return [], ""

    assert Seq2SeqModule.predictor_class() is OtherLoss.predictor_class() is Seq2SeqPredictor
    assert OtherOutput.predictor_class() is OtherOutput
    assert OwnTask.predictor_class() is OwnTask
