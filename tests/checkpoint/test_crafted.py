"""Checkpoints with valid checksums and crafted contents."""

import hashlib
import io
import json
import sys
import zipfile
from contextlib import contextmanager
from pathlib import Path

import lightning
import pytest
import torch
import yaml

from lightning_tfm.checkpoint import FORMAT, read, write
from lightning_tfm.checkpoint.archive import _comment
from lightning_tfm.checkpoint.plugin import VerifiedCheckpointIO
from lightning_tfm.errors import UserError
from lightning_tfm.fit.arguments import SAVING, with_options
from lightning_tfm.inference.loading import load
from lightning_tfm.networks import GPT
from lightning_tfm.tokenization import SymbolTokenizer, train_tokenizer
from support.corpora import TEXT
from support.processes import EXPERIMENTS


@pytest.fixture(scope="module")
def crafted():
    """Return the content of a checkpoint, as `fit` writes it, except for the state of the training."""
    arguments = {"vocab_size": 10, "max_length": 42, "d_model": 16, "num_heads": 2, "num_layers": 1}
    network = {"class_path": "lightning_tfm.networks.gpt.GPT", "init_args": arguments}
    loggers = [{"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs", "name": "x"}}]
    return {
        "format_version": FORMAT,
        "global_step": 4,
        "state_dict": {f"network.{name}": weight for name, weight in GPT(**arguments).state_dict().items()},
        "hyper_parameters": {
            "class_path": "lightning_tfm.tasks.seq2seq.Seq2SeqModule",
            "predictor": "lightning_tfm.inference.seq2seq.Seq2SeqPredictor",
            "network": network,
            "tokenizer": SymbolTokenizer("0123456").to_dict(),
            "max_target_length": 15,
            "optimizer": {},
            "lr_schedule": {},
        },
        "experiment": {"name": "x", "config": json.dumps({"trainer": {"logger": loggers, "callbacks": None}})},
        "longest_source": 14,
        "shortest_source": 2,
        "alignment_head": ("layers.0.self_attention", 1),
    }


@contextmanager
def recursion_limit(limit):
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def nested(levels, width=1, value="x"):
    """Return a list of `width` references to the same list of references, and so on."""
    for _ in range(levels):
        value = [value] * width
    return value


REPLACE = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 10}


def repeated(number, part=REPLACE, kind="normalizer"):
    """Return a subword tokenizer with a sequence of equal parts; REPLACE makes a text 10 times as long."""
    model = json.loads(train_tokenizer([TEXT], "subword", 290).to_dict()["model"])
    return {
        "type": "subwords",
        "model": json.dumps(model | {kind: {"type": "Sequence", f"{kind.replace('_', '')}s": [part] * number}}),
    }


def placed(content, value, *keys):
    """Return a copy of nested dictionaries with another value, at a key of a key and so on."""
    key, *rest = keys
    return {**content, key: placed(content[key], value, *rest) if rest else value}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
ITSELF: dict[str, object] = {}
ITSELF["x"] = ITSELF
HEAD = ("state_dict", "network.head.weight")
TOKENIZER = ("hyper_parameters", "tokenizer")
NETWORK = ("hyper_parameters", "network", "init_args")


CRAFTED = {
    "a list": lambda content: [content],
    "a value that contains itself": (ITSELF, "x"),
    "a value nested in many levels": (nested(200), "x"),
    "a value of 10**12 references": (nested(12, width=10), "x"),
    "arguments of 10**12 references": (nested(12, width=10), *NETWORK, "bias"),
    "a weight of 10**12 elements": (torch.zeros(1).expand(10**6, 10**6), *HEAD),
    "a weight without data": (torch.empty(10, 16, device="meta"), *HEAD),
    "a sparse weight": (torch.eye(10, 16).to_sparse_coo(), *HEAD),
    "a weight of another shape": (torch.zeros(3), *HEAD),
    "a weight that is not a tensor": (3.0, *HEAD),
    "no weights": ({}, "state_dict"),
    "shards in another folder": ({"folder": "../..", "files": {}}, "shards"),
    "shards without files": ({"folder": "x"}, "shards"),
    "a tensor larger than its shards": lambda content: placed(
        content | {"shards": {"folder": "x", "files": {}, "fused": {}, "tensor_parallel_size": 1}},
        torch.empty(10**6, 10**6, device="meta"),
        *HEAD,
    ),
    "10**9 layers": (10**9, *NETWORK, "num_layers"),
    "a width of 10**5": (10**5, *NETWORK, "d_model"),
    "10**400 ids": (10**400, *NETWORK, "vocab_size"),
    "10**9 sinusoidal positions": lambda content: placed(
        content,
        {**content["hyper_parameters"]["network"]["init_args"], "max_length": 10**9, "positions": "sinusoidal"},
        *NETWORK,
    ),
    "10**9 heads with biases": lambda content: placed(
        content,
        {
            **content["hyper_parameters"]["network"]["init_args"],
            **{"num_heads": 10**9, "d_head": 1, "positions": "alibi"},
        },
        *NETWORK,
    ),
    "no heads": (0, *NETWORK, "num_heads"),
    "an unknown argument": (3, *NETWORK, "x"),
    "no network": (None, "hyper_parameters", "network"),
    "another predictor": ("lightning_tfm.inference.classifier.ClassifierPredictor", "hyper_parameters", "predictor"),
    "no tokenizer": (None, *TOKENIZER),
    "an unknown tokenizer": (["x"], *TOKENIZER, "type"),
    "symbols that are not strings": ([1, 2, 3], *TOKENIZER, "symbols"),
    "too few symbols": (["0"], *TOKENIZER, "symbols"),
    "a separator that is not a string": (5, *TOKENIZER, "separator"),
    "a damaged tokenizer": ({"type": "subwords", "model": "x"}, *TOKENIZER),
    "a normalizer of 10**12 characters": (repeated(12), *TOKENIZER),
    "normalizers that double a text 20 times": (repeated(20, BYTES), *TOKENIZER),
    "pre-tokenizers that double a text 20 times": (repeated(20, BYTES, "pre_tokenizer"), *TOKENIZER),
    "a length that is not a number": ("x", "hyper_parameters", "max_target_length"),
    "a longest source that is not a number": ("x", "longest_source"),
    "a shortest source that is not a number": ("x", "shortest_source"),
    "an unknown head": (("layers.0.self_attention", 2), "alignment_head"),
    "a head that is not an integer": (("layers.0.self_attention", 0.5), "alignment_head"),
    "an unknown layer": (("layers.7", 0), "alignment_head"),
    "a layer without attention": (("", 0), "alignment_head"),
    "a step that is not a number": ("x", "global_step"),
    "no step": lambda content: {name: value for name, value in content.items() if name != "global_step"},
    "callbacks that are not a mapping": ([1], "callbacks"),
    "an experiment that is not a mapping": ("x", "experiment"),
    "an empty experiment": ({}, "experiment"),
    "a name that is not a string": (3, "experiment", "name"),
    "a configuration that is not a string": (3, "experiment", "config"),
    "bytes": (bytearray(3), "x"),
    "a set": ({3}, "x"),
}
"""Changes of the content of a checkpoint, by description: a value and its place, or a function."""


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_checkpoint_is_refused(case, crafted, tmp_path):
    with recursion_limit(20_000):  # of the pickler
        change = CRAFTED[case]
        write(change(crafted) if callable(change) else placed(crafted, *change), tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=r"a\.ckpt' must be a checkpoint|the weights of '.*a\.ckpt' must fit"):
        load(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "path", [None, "os.system", "lightning_tfm.checkpoint.write", "lightning_tfm.inference.predictor.Predictor"]
)
def test_a_checkpoint_must_name_a_trusted_predictor(path, crafted, tmp_path):
    write(placed(crafted, path, "hyper_parameters", "predictor"), tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=rf"a\.ckpt'.* names '{path}'"):
        load(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    ("setting", "value"), [("num_layers", 10**9), ("d_model", 10**5), ("d_head", 10**9), ("max_length", 10**9)]
)
def test_a_network_much_larger_than_the_weights_is_refused(setting, value, crafted, tmp_path, command):
    config = yaml.safe_load((EXPERIMENTS / "copy_gpt.yaml").read_text())
    config["trainer"] |= {"logger": None, "callbacks": None}
    config["model"]["init_args"]["network"]["init_args"] |= {"num_heads": 1, setting: value}
    write(placed(crafted, yaml.safe_dump(config), "experiment", "config"), tmp_path / "a.ckpt")
    _, err = command("test", "a.ckpt", status=2)
    assert "the network must fit the weights of the checkpoint, but is larger" in err


def test_the_unmodified_checkpoint_is_valid(crafted, tmp_path):
    write(crafted, tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt").alignment_head == ("layers.0.self_attention", 1)


def rewritten(path, compression=zipfile.ZIP_STORED, old_format=False, hidden=False):
    """Write the content of a checkpoint in another format, with a valid checksum."""
    content = io.BytesIO()
    if old_format:
        torch.save(read(path), content, _use_new_zipfile_serialization=False)
        content.write(b"\0\0")
    else:
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(content, "w", compression) as target:
            for name in source.namelist():
                target.writestr(name, source.read(name))
    data = content.getvalue()[:-2]
    if hidden:  # ZipFile reads the directory before the end record, torch that at the offset in the end record
        rewritten(path)
        with zipfile.ZipFile(path) as source:
            end = path.read_bytes()[source.start_dir :]
        data = data[:-20] + end[: end.rindex(b"PK\5\6")] + data[-20:]
    path.write_bytes(data + _comment(hashlib.sha256(data).hexdigest()))


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": zipfile.ZIP_DEFLATED},
        {"compression": zipfile.ZIP_LZMA},
        {"old_format": True},
        {"compression": zipfile.ZIP_DEFLATED, "hidden": True},
    ],
)
def test_an_archive_of_another_format_is_refused(settings, crafted, tmp_path):
    """Compressed, a small file could take all memory."""
    path = tmp_path / "a.ckpt"
    write(crafted, path)
    rewritten(path)
    load(path)
    rewritten(path, **settings)
    with pytest.raises(UserError, match="cannot be read as one"):
        load(path)


CONFIGS = {
    "not a mapping": "[1]",
    "invalid YAML": "trainer: [",
    "nested aliases": "a: &a [x, x]\n" + "".join(f"b{level}: &a [*a, *a, *a, *a]\n" for level in range(9)),
    "many levels": "[" * 200_000,
    "no trainer": "a: 1",
    "a trainer that is not a mapping": "trainer: x",
    "loggers that are not classes": "trainer: {logger: [3], callbacks: null}",
    "a class that is not a string": "trainer: {logger: [{class_path: 3}], callbacks: null}",
    "arguments that are not a mapping": "trainer: {logger: [{class_path: CSVLogger, init_args: []}], callbacks: null}",
    "callbacks that are not classes": "trainer: {logger: null, callbacks: [3]}",
    "a name that is not a string": "{trainer: {logger: null, callbacks: null}, 3: 4}",
    "a logger that is not in a list": "trainer: {logger: {class_path: CSVLogger}, callbacks: null}",
    "a logger as text": 'trainer: {logger: \'{"class_path": "CSVLogger"}\', callbacks: null}',
    "callbacks as text": 'trainer: {logger: null, callbacks: \'[{"class_path": "ModelCheckpoint"}]\'}',
    "a nested name": "{trainer: {logger: null, callbacks: null}, trainer.default_root_dir: /there}",
    "a nested name of a logger": "{trainer: {logger: null, callbacks: null}, trainer.logger: CSVLogger}",
    "a name to append to": "trainer: {logger: null, callbacks: null, callbacks+: [{class_path: ModelCheckpoint}]}",
    "a name in a logger": "trainer: {logger: {class_path: CSVLogger, init_args.save_dir: /there}, callbacks: null}",
    "characters that UTF-8 cannot encode": "trainer: {logger: null, callbacks: null, x: \udcff}",
}


@pytest.mark.parametrize(
    ("key", "value"),
    [*(("config", config) for config in CONFIGS.values()), *(("name", name) for name in ("a\0b", "x" * 300, "\udcff"))],
    ids=[*CONFIGS, "a null character", "too long a name", "a name that UTF-8 cannot encode"],
)
def test_a_crafted_experiment_in_a_checkpoint_is_refused(key, value, crafted, tmp_path):
    write(placed(crafted, value, "experiment", key), tmp_path / "a.ckpt")
    with pytest.raises(UserError, match="must hold the configuration of its experiment, but it is damaged"):
        with_options(["test", str(tmp_path / "a.ckpt")], tmp_path)


def test_a_checkpoint_names_no_place_to_write_to(crafted, tmp_path):
    names = ("lightning.pytorch.loggers.CSVLogger", "lightning_tfm.loggers.TensorBoardLogger")
    places = {"save_dir": "/there", "name": "../../x", "version": "../../y"}
    loggers = [
        {"class_path": name, "init_args": dict(places)} for name in (*names, "lightning_tfm.loggers.WandbLogger")
    ]
    loggers[2]["init_args"] |= {"project": "mine", "entity": "theirs", "id": "there"}
    loggers[2]["dict_kwargs"] = {"entity": "there"}
    saving = [
        {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": {"dirpath": "/there"}} for name in SAVING
    ]
    profiler = {"class_path": "lightning.pytorch.profilers.AdvancedProfiler", "init_args": {"dirpath": "/there"}}
    trainer = {"logger": loggers, "callbacks": saving, "profiler": profiler, "default_root_dir": "/there"}
    config = json.dumps({"trainer": trainer})
    write(crafted | {"experiment": {"name": "../../x", "config": config}}, tmp_path / "a.ckpt")
    _, _, path, *_ = with_options(["test", str(tmp_path / "a.ckpt")], tmp_path)
    assert Path(path) == tmp_path / "x.yaml"
    text = Path(path).read_text()
    assert "there" not in text
    assert ".." not in text
    assert "project: mine" in text
    write(placed(crafted, "..", "experiment", "name"), tmp_path / "a.ckpt")
    assert with_options(["test", str(tmp_path / "a.ckpt")], tmp_path)[2] == str(tmp_path / "unnamed.yaml")


def test_lightning_migrates_no_checkpoint(crafted, tmp_path):
    """Its migrations fail if the content does not fit the version."""
    write(crafted | {"pytorch-lightning_version": "0.0.1"}, tmp_path / "a.ckpt")
    content = VerifiedCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert content["pytorch-lightning_version"] == lightning.__version__
