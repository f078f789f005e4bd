"""The history of attention depends on the validations only, is bounded, and leaves the training as it is."""

import base64
import random

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from datamodules import Copy
from lightning_tfm.callbacks import AttentionLogger
from lightning_tfm.callbacks.attention_logger import MAX_WEIGHTS, NUM_EXAMPLES, _recorded
from lightning_tfm.inference.attention_maps import AttentionMap
from lightning_tfm.loggers import run_folder
from lightning_tfm.networks import Transformer
from lightning_tfm.runs.attention_history import VALIDATIONS, extended
from lightning_tfm.runs.record import Run
from lightning_tfm.tasks import Seq2SeqModule


def recorded(step):
    """Return the attention at a step, whose weights name the step."""
    names = {"layer": "a", "heads": 1, "queries": ["x"], "keys": ["y"], "gold": [], "predicts": ""}
    return [{"title": "t", "layers": [{**names, "weights": [str(step)]}]}]


def run_through(steps, history=None):
    for step in steps:
        history = extended(history, step, recorded(step))
    return history


@pytest.mark.parametrize("seed", range(20))
def test_a_resumed_run_has_the_history_of_an_uninterrupted_one(seed):
    generator = random.Random(seed)
    steps = sorted(generator.sample(range(1, 5000), generator.randint(1, 300)))
    history = None
    place = 0
    while place < len(steps):  # killed after some validations, and resumed before some of them
        end = generator.randint(place + 1, len(steps))
        history = run_through(steps[place:end], history)
        place = end if end == len(steps) else generator.randint(0, end)
    assert history == run_through(steps)
    kept = history["steps"]
    assert kept == sorted(set(kept))
    assert set(kept) <= set(steps)
    assert (kept[0], kept[-1]) == (steps[0], steps[-1])
    assert len(kept) <= VALIDATIONS + 2
    assert len(kept) == len(steps) or len(kept) > 4
    (layer,) = history["examples"][0]["layers"]
    assert layer["weights"] == [str(step) for step in kept]


def test_even_validations_are_spread_over_the_training():
    kept = run_through(range(100, 100_001, 100))["steps"]
    assert len(kept) > VALIDATIONS // 2
    gaps = [later - earlier for earlier, later in zip(kept[:-2], kept[1:-1], strict=True)]
    assert max(gaps) <= min(gaps) + 200


@pytest.mark.parametrize(("heads", "layers", "size"), [(4, 1, 64), (12, 12, 15)])
def test_a_validation_is_bounded(heads, layers, size):
    maps = [AttentionMap("a", torch.ones(heads, 80, 90), ["x"] * 80, ["y"] * 90, []) for _ in range(layers)]
    lengths = [len(base64.b64decode(layer["weights"][0])) for layer in _recorded("t", maps)["layers"]]
    assert lengths == [heads * size**2] * layers
    assert NUM_EXAMPLES * sum(lengths) <= MAX_WEIGHTS


def test_training_is_the_same_with_the_history(tmp_path):
    weights = []
    for callbacks in ([], [AttentionLogger()]):
        torch.manual_seed(1)
        data = Copy(
            train_size=40, val_size=8, test_size=8, longer_size=8, multiples=[], batch_size=4, eval_batch_size=8
        )
        network = Transformer.from_data(data, d_model=16, num_heads=2, num_layers=1, d_ff=32, dropout=0.2)
        module = Seq2SeqModule.from_data(data, network)
        logger = CSVLogger(tmp_path, name=None)
        quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(logger=logger, callbacks=callbacks, max_steps=8, val_check_interval=3, **quiet)
        trainer.fit(module, data)
        weights.append(module.state_dict())
        history = Run(run_folder(trainer)).attention_history
    assert all(weight.equal(weights[1][name]) for name, weight in weights[0].items())
    assert history["steps"] == [3, 6]
    assert len(history["examples"]) == NUM_EXAMPLES
    pair = data.datasets["val"].pairs[0]
    assert history["examples"][0]["title"] == f"{pair.source} \N{RIGHTWARDS ARROW} {pair.target}"
    assert {layer["layer"] for layer in history["examples"][0]["layers"]} == {
        layer.layer for layer in module.attention(pair._asdict())
    }
