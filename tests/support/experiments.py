"""Small experiments of all tasks, with their settings and data, and short runs of them."""

import inspect
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import torch
import yaml
from filelock import FileLock

from lightning_tfm import networks
from lightning_tfm.checkpoint import read
from lightning_tfm.tokenization import train_tokenizer
from support.corpora import TEXT, reviews, sentences, write_lines
from support.processes import EXPERIMENTS, SCRIPT, run

NETWORKS = {
    "transformer": {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32, "positions": "sinusoidal"},
    "gpt": {"d_model": 16, "num_heads": 2, "num_layers": 1, "positions": "learned"},
    "attention_lstm": {"d_model": 16, "attention": "additive"},
}
"""Small networks. `SETTINGS` has dropout, so that a resumed run must restore its random numbers."""

SETTINGS = {
    "data.init_args.train_size": 200,
    "data.init_args.val_size": 30,
    "data.init_args.test_size": 30,
    "data.init_args.longer_size": 30,
    "data.init_args.multiples": "[]",
    "data.init_args.eval_batch_size": 10,
    "data.init_args.batch_size": 15,
    "trainer.max_steps": 60,
    "trainer.val_check_interval": 12,
    "trainer.log_every_n_steps": 1,
    "checkpoint.every_n_train_steps": 5,
    "model.init_args.network.init_args.dropout": 0.2,
    "model.init_args.lr_schedule.warmup_steps": 10,
}

AVERAGED = {"trainer.callbacks": "[{class_path: lightning_tfm.callbacks.WeightAveraging}]"}
MUON = {"model.init_args.optimizer": "lightning_tfm.optimizers.Muon"}


def fit(model, *options, **settings):
    """Return the arguments of a short run."""
    network = {f"model.init_args.network.init_args.{name}": value for name, value in NETWORKS[model].items()}
    settings = SETTINGS | network | settings
    return (
        "fit",
        *("--config", EXPERIMENTS / f"copy_{model}.yaml"),
        *(f"--{name}={value}" for name, value in settings.items()),
        *options,
    )


def folder(cwd, model):
    """Return the folder of the run that has saved a checkpoint; a run killed before that leaves a folder, too."""
    name = model if model in TASKS else f"copy_{model}"
    (path,) = (path for path in (cwd / f"runs/{name}").iterdir() if (path / "checkpoints/last.ckpt").exists())
    return path


SMALL = {"d_model": 16, "num_heads": 2, "num_layers": 1}
TRANSLATION = SMALL | {"d_ff": 32, "tie_embeddings": True, "pointer_generator": True}
CLASSIFIER = SMALL | {"d_ff": 32, "word_dropout": 0.1, "num_bigram_buckets": 100, "naive_bayes_weight": 0.1}
TASKS = {
    "translation_transformer": ("Seq2SeqModule", "Transformer", TRANSLATION),
    "translation_attention_lstm": (
        "Seq2SeqModule",
        "AttentionLSTM",
        {"d_model": 16, "attention": "hard_monotonic", "cell": "gru"},
    ),
    "spelling_gpt": ("Seq2SeqModule", "GPT", SMALL),
    "text_gpt": ("LanguageModel", "GPT", SMALL | {"max_length": 16, "positions": "rotary"}),
    "text_linear_transformer": ("LanguageModel", "LinearTransformer", SMALL | {"max_length": 16}),
    "masked_encoder": ("MaskedLanguageModel", "MaskedEncoder", SMALL | {"max_length": 16}),
    "reviews_classifier": ("Classifier", "EncoderClassifier", CLASSIFIER),
}
"""The module, the network and the size of the network of each task."""


def network_names(base):
    """Return the names of all networks of a base class, as listed in error messages."""
    classes = {name: getattr(networks, name) for name in networks.__all__}
    return ", ".join(name for name, cls in classes.items() if issubclass(cls, base) and not inspect.isabstract(cls))


def write_task(name, folder):
    """Write the data and the YAML of a task, and return the path of the YAML."""
    module, network, size = TASKS[name]
    own = {}
    if name.startswith("translation"):
        files = {}
        for split, number in (("train", 200), ("val", 30), ("test", 31)):
            german, english = zip(*sentences(number, seed=number), strict=True)
            files[split] = [write_lines(folder / f"{split}.de", german), write_lines(folder / f"{split}.en", english)]
        data = "ParallelText", files | {"vocab_size": 300, "batch_tokens": 400}
        own = {"text_metrics": ["bleu", "chrf"], "beam_size": 2, "label_smoothing": 0.1}
    elif name.startswith("spelling"):
        words = ["".join(random.Random(number).choices("abcde", k=number % 6 + 1)) for number in range(120)]
        rows = [f"{word}\t{' '.join(word.upper())}" for word in words]
        splits = {"train": rows[:100], "val": rows[100:110], "test": rows[110:]}
        files = {split: write_lines(folder / f"{split}.tsv", lines) for split, lines in splits.items()}
        lengths = {"max_source_length": 16, "max_target_length": 16}
        data = "Tsv", files | lengths | {"target_separator": " ", "batch_size": 20}
    elif name.startswith(("text", "masked")):
        (folder / "text.txt").write_text(TEXT)
        data = "Text", {"path": str(folder / "text.txt"), "max_length": 16, "batch_size": 8, "test_fraction": 0.1}
        own = {"mask_fraction": 0.5} if name.startswith("masked") else {}
    else:
        table = write_lines(folder / "reviews.tsv", map("\t".join, reviews(200)))
        data = "Sentiment", {"train": [table], "num_ngrams": 50, "max_length": 16, "batch_size": 20}
    config = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 40,
            "val_check_interval": 10,
            "check_val_every_n_epoch": None,
            "log_every_n_steps": 1,
            "gradient_clip_val": 1.0,
        },
        "checkpoint": {"every_n_train_steps": 5},
        "model": {
            "class_path": f"lightning_tfm.tasks.{module}",
            "init_args": own
            | {
                "network": {"class_path": f"lightning_tfm.networks.{network}", "init_args": size | {"dropout": 0.1}},
                "optimizer": {"class_path": "lightning_tfm.optimizers.AdamW", "init_args": {"lr": 0.01}},
                "lr_schedule": {"warmup_steps": 5},
            },
        },
        "data": {"class_path": f"datamodules.{data[0]}", "init_args": data[1]},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def write_gpt2(folder, shift=-55.0):
    """Write a small GPT-2 of Hugging Face with a tokenizer, its logits shifted by a constant; return the folder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=287, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    with torch.no_grad():  # the softmax ignores a shift of all logits, which the real GPT-2 has, too
        model.transformer.ln_f.weight[0], model.transformer.ln_f.bias[0] = 0, 1
        model.transformer.wte.weight[:, 0] = shift
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(train_tokenizer([TEXT], "subword", 290).to_dict()["model"])
    return folder


def made_once(name, make, tmp_path_factory):
    """Return a folder that `make(folder)` fills once for all workers of pytest-xdist; tests must not change it."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder = root / f"shared_{name}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            try:
                make(folder)
            except BaseException:
                shutil.rmtree(folder)  # so that no other test takes it for complete
                raise
    return folder


def trained_run(name, tmp_path_factory):
    """Return the folder of an undisturbed run, trained once per session; only the classifier draws its pictures."""

    def train(cwd):
        run("fit", "--config", write_task(name, cwd), cwd=cwd, pictures=name == "reviews_classifier").finish()

    return made_once(name, train, tmp_path_factory) / f"runs/{name}/version_0"


def wait_for_step(step, process, cwd, model):
    """Wait until a run has saved a checkpoint of at least this step."""

    def saved(path):
        return path.exists() and read(path)["global_step"] >= step

    while not any(saved(path) for path in (cwd / f"runs/copy_{model}").glob("*/checkpoints/last.ckpt")):
        assert Path(f"/proc/{process.pid}").exists(), [path.read_text() for path in cwd.glob("stderr*")]
        time.sleep(0.02)


TINY = {
    "command": ["lightning-tfm", "fit", "--config", str(EXPERIMENTS / "copy_gpt.yaml"), "${args}"],
    "method": "random",
    "metric": {"name": "val/loss"},
    "run_cap": 12,
    "parameters": {
        "model.network.d_model": {"values": [8, 15, 16]},  # 15 is not divisible by the number of heads
        "model.optimizer.lr": {"distribution": "log_uniform_values", "min": 1e-3, "max": 0.03},
        **{
            name: {"value": value}
            for name, value in {
                "data.train_size": 60,
                "data.val_size": 10,
                "data.longer_size": 5,
                "data.test_size": 10,
                "data.batch_size": 15,
                "trainer.max_steps": 24,
                "trainer.val_check_interval": 6,
                "trainer.log_every_n_steps": 1,
                "checkpoint.every_n_train_steps": 2,
                "model.network.num_heads": 2,
                "model.network.num_layers": 1,
                "model.network.dropout": 0.2,
                "model.lr_schedule.warmup_steps": 5,
            }.items()
        },
    },
}


def tiny(folder, **changes):
    """Write a specification of short runs, and return its path."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | changes))
    return path


def new_folders(parent, *names):
    """Create folders, and return their paths."""
    folders = [parent / name for name in names]
    for folder in folders:
        folder.mkdir()
    return folders


DATE = EXPERIMENTS / "date_attention_lstm.yaml"
COPY = EXPERIMENTS / "copy_transformer.yaml"


def train_on_dates(folder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"HOME": str(folder), "NETRC": str(folder / "none")}
    settings = ["--trainer.max_steps=400", "--trainer.val_check_interval=200"]
    settings += ["--data.init_args.train_size=12000", "--data.init_args.val_size=500", "--data.init_args.test_size=500"]
    process = subprocess.run(
        [SCRIPT, "fit", "--config", DATE, *settings],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    (folder / "stdout").write_text(process.stdout)
    (folder / "stderr").write_text(process.stderr)


INPUTS = ["Thursday, May 3, 1979", "31/12/1999", "Feb 29, 2000", "7 October 2011"]
OUTPUTS = ["1979-05-03", "1999-12-31", "2000-02-29", "2011-10-07"]


STOPPING = (
    "[{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: %s, patience: 1, min_delta: 9}}]"
)
