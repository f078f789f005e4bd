"""Contents of the files of a run, and runs that were never trained."""

import json

import yaml

from lightning_tfm.runs.record import FORMAT, Run, Summary

START = {
    "format": FORMAT,
    "time": "2026-01-02T03:04:05+00:00",
    "step": 0,
    "checkpoint": None,
    "command": "lightning-tfm fit --config copy_gpt",
    "changed_settings": {"trainer.max_steps": [10, 20]},
    "git": {"commit": "0123456789abcdef", "dirty": True, "untracked": ["notes"]},
    "framework": {"commit": "0123456789abcdef", "dirty": False},
    "versions": {"lightning_tfm": "0.1.0", "torch": "2.13.0"},
    "hardware": {"system": "Linux", "processor": "A", "cores": 2, "instruction_set": "AVX2", "threads": 1, "gpus": []},
    "processes": 1,
    "data_fingerprint": {"train": "x", "test": "y"},
    "data_sizes": {"train": 20, "test": 10},
    "tokenizer_fingerprint": "x",
    "scored_symbols": "characters",
    "wandb": None,
}

PREDICTION = {
    "split": "test",
    "source": "a",
    "target": "b",
    "prediction": "b",
    "correct": True,
    "nll": 1.0,
    "category": None,
    "alignment": None,
}

SUMMARY = {
    "test": {"loss": 0.5},
    "train_seconds": 2.0,
    "samples_per_second": 10.0,
    "steps": 100,
    "parameters": 9,
    "seed": 1,
}


def write_run(folder, config=None, summary=None, start=None, predictions=()):
    """Write the files of a run, with changes to SUMMARY, unless it has not finished, to START and to PREDICTION."""
    run = Run(folder)
    run.write_starts([START | (start or {})])
    (folder / Run.CONFIG).write_text(yaml.safe_dump(json.loads(json.dumps(config or {}))))
    if summary is not None:
        run.write_summary(Summary(**SUMMARY | summary))
    if predictions:
        run.write_predictions([PREDICTION | prediction for prediction in predictions])
    return run
