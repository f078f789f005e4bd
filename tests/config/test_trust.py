"""Classes that a configuration may name: listed ones, and those of packages named by `--trust-package`."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import typing
from itertools import product
from pathlib import Path

import fsspec
import lightning
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

import datamodules
import lightning_tfm
from lightning_tfm.config.trust import CLASSES, import_policy, search_current_folder, trusted
from lightning_tfm.fit.cli import TfmCLI
from support.experiments import fit
from support.processes import EXPERIMENTS, TWO_PROCESSES

PLANTED = """import pathlib
pathlib.Path("canary").touch()
class Evil:
    def __call__(self): pass
"""


@pytest.fixture(autouse=True)
def fresh_policy(monkeypatch, tmp_path):
    """Restore what commands in this process change: the trusted names, `sys.path` and the current folder."""
    common = sys.modules["jsonargparse._common"]
    verdicts = dict.fromkeys(common.default_import_path_denylist, False)
    settings = common.parsing_settings | {"import_path_verdicts": verdicts, "import_paths_enforced": False}
    monkeypatch.setattr(common, "parsing_settings", settings)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("planted", "mine.part", "mine"):
        sys.modules.pop(name, None)


# The import policy of the parser


def defined_in(folder, package=""):
    """Yield the top-level functions and classes of all modules in a folder, which are parsed, not imported."""
    for path in folder.rglob("*.py"):
        parts = [*filter(None, [package]), *path.relative_to(folder).with_suffix("").parts]
        names = re.findall(r"^(?:async +)?(?:def|class) +(\w+)", path.read_text(errors="replace"), re.MULTILINE)
        yield from (".".join([*(part for part in parts if part != "__init__"), name]) for name in names)


def found_in(modules):
    """Yield the callables in the namespaces of modules, which may be defined in other modules."""
    for module in modules:
        yield from (f"{module.__name__}.{name}" for name, value in list(vars(module).items()) if callable(value))


def modules_of(*roots):
    return [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in roots and inspect.ismodule(module) and module.__name__ == name
    ]


def public_callables():
    """Return all public functions and classes of the standard library, torch, Lightning and the framework."""
    names = set(defined_in(Path(sysconfig.get_path("stdlib"))))
    for package in (torch, lightning, lightning_tfm, datamodules):
        names.update(defined_in(Path(package.__file__).parent, package.__name__))
    roots = {"torch", "lightning", "lightning_tfm", "datamodules", *sys.stdlib_module_names}
    names.update(found_in(modules_of(*roots)))
    other = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    return sorted(
        name
        for name in names
        if other.isdisjoint(parts := name.split("."))
        and all(part.isidentifier() and not part.startswith("_") for part in parts)
    )


def attribute_paths():
    """Yield names that lead through attributes: from our modules to their imports, from a class to its members."""
    for module in modules_of("lightning_tfm", "datamodules"):
        for name, value in list(vars(module).items()):
            yield f"{module.__name__}.{name}"
            if inspect.ismodule(value) and value.__name__.split(".")[0] in sys.stdlib_module_names:
                yield from (f"{module.__name__}.{name}.{inner}" for inner in vars(value))
    for path, cls in trusted().items():
        yield from (f"{path}.{name}" for name in {*dir(cls), *dir(type(cls))})


def import_gate(allowed=()):
    """Return a function that tests whether the parser refuses a name for each of the given settings."""
    set_parsing_settings(**import_policy(allowed))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--function", type=typing.Callable)
    parser.add_argument("--callback", type=lightning.Callback)

    def refuses(name, *settings):
        for setting in settings:
            try:
                parser.parse_object({setting: name})
            except Exception as error:
                if f"Importing '{name}' is not allowed" in str(error):
                    continue
            return False
        return True

    return refuses


DANGEROUS = """
builtins.exec builtins.open functools.partial io.FileIO logging.FileHandler os.mkdir os.system posix.system
runpy.run_path shutil.copyfile shutil.rmtree subprocess.Popen subprocess.run threading.Timer
torch.distributed.launcher.api.elastic_launch torch.hub.load torch.load torch.save torch.utils.cpp_extension.load
lightning.fabric.utilities.cloud_io.get_filesystem lightning.pytorch.callbacks.LambdaCallback
lightning_tfm.checkpoint.write lightning_tfm.system.files.write_text
"""


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.run)])
def test_public_callables_are_refused(every):
    names = [name for name in public_callables() if name not in trusted()]
    assert len(names) > 10_000
    assert {*names} > {*DANGEROUS.split()}
    names = [*DANGEROUS.split(), *names[::every]]
    refuses, imported = import_gate(), set(sys.modules)
    assert [name for name in names if not refuses(name, "function")] == []
    assert [name for name in names[::10] if not refuses(name, "callback")] == []
    assert set(sys.modules) == imported, "naming a module must not import it"


DANGEROUS_ATTRIBUTES = """
lightning_tfm.system.files.os.system lightning_tfm.fit.console.shutil.rmtree lightning_tfm.checkpoint.write
lightning_tfm.fit.console.shutil.copyfile datamodules.sentiment.tarfile.open lightning_tfm.networks.GPT.forward
lightning_tfm.networks.GPT.mro
"""


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.run)])
def test_attributes_are_refused(every):
    names = sorted({name for name in attribute_paths() if name not in trusted() and "<" not in name})
    assert {*names} > {*DANGEROUS_ATTRIBUTES.split()}
    names = [*DANGEROUS_ATTRIBUTES.split(), *names[::every]]
    names += [f"{module.__name__}.os.system" for module in modules_of("lightning") if hasattr(module, "os")]
    refuses = import_gate()
    assert [name for name in names if not refuses(name, "function")] == []


def test_trusted_packages_are_accepted():
    refuses = import_gate(["os", "torch.hub", "lightning.pytorch.callbacks"])
    for name in ("torch.hub.load", "lightning.pytorch.callbacks.LambdaCallback"):
        assert not refuses(name, "function")
    assert refuses("torch.load", "function", "callback")
    assert refuses("torch.hubs.load", "function", "callback")


def test_listed_classes_are_accepted():
    """Only two strategies, which training needs, have callable settings, whose values the command refuses."""
    refuses, taking = import_gate(), set()
    for path, cls in trusted().items():
        assert inspect.isclass(cls)
        assert not refuses(path, "callback")
        parser = ArgumentParser()
        parser.add_class_arguments(cls, "it", fail_untyped=False)
        if re.search(r"Callable(?!\[\[Iterable\],)", parser.format_help()):  # optimizers are listed classes
            taking.add(cls.__name__)
    assert taking == {"DDPStrategy", "FSDPStrategy"}
    assert {f"datamodules.{name}" for name in datamodules.__all__} <= set(trusted())


# The complete command


def strategy(name, **init_args):
    path = f"lightning.pytorch.strategies.{name}Strategy"
    return {"trainer": {"strategy": {"class_path": path, "init_args": init_args}}}


PLACES = {
    "callback": lambda it: {"trainer": {"callbacks": [it]}},
    "logger": lambda it: {"trainer": {"logger": [it]}},
    "plugin": lambda it: {"trainer": {"plugins": [it]}},
    "profiler": lambda it: {"trainer": {"profiler": it}},
    "strategy": lambda it: {"trainer": {"strategy": it}},
    "accelerator": lambda it: {"trainer": {"accelerator": it}},
    "model": lambda it: {"model": it},
    "network": lambda it: {"model": {"init_args": {"network": it}}},
    "data": lambda it: {"data": it},
    "class of a class": lambda it: strategy("DDP", cluster_environment=it),
    "function": lambda it: strategy("DDP", ddp_comm_hook=it),
    "function or classes": lambda it: strategy("FSDP", auto_wrap_policy=it),
    "type": lambda it: strategy("FSDP", activation_checkpointing=[it["class_path"]]),
    "anything": lambda it: strategy("DDP", ddp_comm_state=it),
    "anything, nested": lambda it: strategy("DDP", ddp_comm_state={"a": [{"b": it}]}),
    "no type": lambda it: strategy("DDP", output_device=it),
    "keyword of no signature": lambda it: {
        "trainer": {"profiler": {"class_path": "PyTorchProfiler", "dict_kwargs": {"schedule": it}}}
    },
}
"""Settings that accept a class with arguments, or a function."""


@pytest.fixture
def fit_with(command):
    """Return a function that runs `fit` on an experiment with additional settings, and returns what it prints."""

    def fit_with(settings, *options, status=0):
        Path("more.yaml").write_text(yaml.safe_dump(settings))
        config = EXPERIMENTS / "copy_gpt.yaml"
        return command("fit", "--config", config, "--config", "more.yaml", *options, status=status)[1]

    return fit_with


@pytest.fixture
def parse_only(monkeypatch):
    """End each command with status 0 before it instantiates its configuration."""

    def end(cli):
        raise SystemExit(0)

    monkeypatch.setattr(TfmCLI, "before_instantiate_classes", end)


@pytest.mark.parametrize("place", PLACES)
def test_untrusted_class_in_every_setting(place, parse_only, fit_with, monkeypatch, tmp_path):
    Path("planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    settings = PLACES[place]({"class_path": "planted.Evil"})
    error = fit_with(settings, status=2)
    assert "'planted.Evil', which is not imported; if you trust its code: --trust-package planted" in error
    assert not Path("canary").exists()
    fit_with(settings, "--trust-package=planted", status=None)
    assert Path("canary").exists() or place == "keyword of no signature", "the parser imports trusted packages"


VALUES = {
    **{place: lambda it, place=place: PLACES[place]({"class_path": it}) for place in PLACES},
    **{place: lambda it, place=place: {place: it} for place in ("data", "model", "trainer", "checkpoint", "heartbeat")},
    "item": lambda it: {"trainer": {"callbacks": [it]}},
    "folder": lambda it: {"trainer": {"default_root_dir": it}},
    "folder of a logger": lambda it: {
        "trainer": {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": it}}}
    },
}


ADDRESS, FILE = "http://127.0.0.1:9/x.yaml", "planted.yaml"
OTHER_ADDRESSES = ("ftp://127.0.0.1:9/x", "memory::x")


@pytest.mark.parametrize(
    ("place", "value"),
    [*product(VALUES, (ADDRESS, FILE)), *product(("data", "callback", "anything, nested", "folder"), OTHER_ADDRESSES)],
)
def test_settings_are_not_read_from_files_or_addresses(place, value, parse_only, fit_with, monkeypatch):
    def opened(*arguments, **settings):
        raise AssertionError(arguments)

    Path(FILE).write_text("accelerator: cpu\n")
    monkeypatch.setattr(sys.modules["jsonargparse._paths"].Path, "read_text", opened)
    monkeypatch.setattr(fsspec, "open", opened)
    error = fit_with(VALUES[place](value), status=None if value == FILE else 2)
    assert error.count("\n") in ((0, 1) if value == FILE else (1,))


def test_notes_may_begin_with_address(parse_only, fit_with):
    logger = {"class_path": "lightning_tfm.loggers.WandbLogger", "init_args": {"notes": "https://a.b/c is the paper"}}
    fit_with({"trainer": {"logger": logger}})


def test_current_folder_imports_trusted_package_only(monkeypatch):
    for name in ("stranger", "stranger_optional", "yaml"):
        Path(f"{name}.py").write_text(PLANTED)
    Path("mine").mkdir()
    Path("mine/part.py").write_text("value = 7")
    search_current_folder(["mine.part", "other"])
    assert importlib.import_module("mine.part").value == 7
    for name in ("stranger", "stranger_optional"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    assert not Path("canary").exists()


@pytest.mark.run
def test_seeds_import_nothing_from_current_folder(tmp_path):
    """Lightning starts the second process of each seed."""
    for name in ("yaml", "pandas", "argcomplete", "argparse"):
        Path(f"{name}.py").write_text(PLANTED)
    command = [Path(sys.executable).with_name("lightning-tfm"), *fit("gpt", "--seeds=1", *TWO_PROCESSES)]
    command += ["--trainer.max_steps=1", "--trust-package=lightning.pytorch.callbacks"]
    child = subprocess.run(list(map(str, command)), env=os.environ | {"WANDB_MODE": "disabled"}, capture_output=True)
    assert child.returncode == 0, child.stdout
    assert not Path("canary").exists()


SAMPLE = [
    ("torch.distributed.launcher.api.elastic_launch", {"config": {"min_nodes": 1}, "entrypoint": "canary.sh"}),
    ("lightning.pytorch.callbacks.LambdaCallback", {"on_fit_start": "os.getcwd"}),
    ("lightning.pytorch.callbacks.lambda_function.Callback", {}),
    ("lightning.pytorch.callbacks.ModelPruning", {"pruning_fn": "os.system"}),
    ("lightning.pytorch.callbacks.StochasticWeightAveraging", {"swa_lrs": 0.1, "avg_fn": "os.system"}),
    ("lightning.pytorch.cli.instantiate_class", {"args": [], "init": {"class_path": "os.system"}}),
    ("lightning.pytorch.plugins.TorchCheckpointIO", {}),
    ("os.system", {"command": "touch canary"}),
    ("subprocess.Popen", {"args": ["touch", "canary"]}),
    ("builtins.open", {"file": "canary", "mode": "w"}),
    ("builtins.exec", {"source": "open('canary', 'w')"}),
    ("pathlib.Path.touch", {"self": "canary"}),
    ("functools.partial", {"func": "os.system"}),
    ("torch.load", {"f": "canary"}),
    ("torch.hub.load", {"repo_or_dir": "canary", "model": "x"}),
    ("torch.optim.Optimizer", {"defaults": {}}),
    ("lightning_tfm.system.files.os.system", {"command": "touch canary"}),
    ("lightning_tfm.checkpoint.write", {"content": {}, "path": "canary"}),
    ("lightning_tfm.networks.GPT.forward", {}),
    ("datamodules.sentiment.tarfile.open", {"name": "canary", "mode": "w"}),
]
"""Classes and functions with side effects, and arguments that would cause them."""


@pytest.mark.parametrize(("path", "arguments"), SAMPLE, ids=[path for path, _ in SAMPLE])
def test_unlisted_class_or_function(path, arguments, fit_with):
    it = {"class_path": path, "init_args": arguments}
    for settings in (PLACES["callback"](it), PLACES["function"](it)):
        imported = set(sys.modules)
        refused = r"names '[\w.]+', which is not imported; if you trust its code: --trust-package"
        with_another = r"must not name '[\w.]+'; try lightning_tfm\."
        assert re.search(f"{refused}|{with_another}", fit_with(settings, status=2))
        assert {path.name for path in Path().iterdir()} == {"more.yaml"}
        assert {name for name in set(sys.modules) - imported if path.startswith(name)} == set()


def test_program_needs_trusted_launcher(fit_with):
    """A callback of Lightning can call the launcher of torch, which starts a program."""
    Path("program").write_text(f"#!/bin/sh\n{shutil.which('touch')} {Path('canary').absolute()}\n")
    Path("program").chmod(0o755)
    config = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, "rdzv_backend": "c10d", "monitor_interval": 0.1}
    config |= {"rdzv_endpoint": "localhost:0", "run_id": "planted"}
    launcher = {
        "class_path": "torch.distributed.launcher.api.elastic_launch",
        "init_args": {"config": config, "entrypoint": str(Path("program").absolute())},
    }
    callback = {"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": {"on_fit_start": launcher}}
    sizes = dict.fromkeys(("train_size", "val_size", "test_size", "longer_size", "batch_size"), 20)
    settings = {"data": {"init_args": sizes}, "trainer": {"callbacks": [callback], "max_steps": 1, "logger": False}}
    settings["trainer"] |= {"accelerator": "cpu", "val_check_interval": 1}
    for allowed in ("", "lightning.pytorch.callbacks", "torch.distributed"):
        error = fit_with(settings, f"--trust-package={allowed}", status=2)
        assert "if you trust its code: --trust-package" in error
        assert not Path("canary").exists()
    fit_with(settings, "--trust-package=lightning.pytorch.callbacks,torch.distributed")
    assert Path("canary").exists()


def test_network_is_not_a_function(parse_only, fit_with):
    gpt = {"class_path": "lightning_tfm.networks.GPT", "init_args": {"vocab_size": 9}}
    error = fit_with(PLACES["function"](gpt), status=2)
    assert "trainer.strategy.init_args.ddp_comm_hook must not be a callable class" in error
    Path("planted.py").write_text("def hook(state, bucket): pass\n")
    fit_with(PLACES["function"]("planted.hook"), status=2)
    fit_with(PLACES["function"]("planted.hook"), "--trust-package=planted")


COMMON_OPTIONS = [
    ["--trainer.callbacks+=lightning_tfm.callbacks.Compile"],
    ["--trainer.callbacks+=Compile"],
    ["--trainer.logger+=lightning_tfm.loggers.TensorBoardLogger"],
    ["--trainer.logger+={class_path: lightning_tfm.loggers.TensorBoardLogger, init_args: {save_dir: some/where}}"],
    ["--trainer.logger={class_path: CSVLogger, init_args: {save_dir: some/where, name: mine}}"],
    ["--trainer.callbacks+={class_path: EarlyStopping, init_args: {monitor: val/loss}}"],
    ["--trainer.callbacks+=lightning.pytorch.callbacks.LearningRateMonitor"],
    ["--trainer.callbacks+=lightning.pytorch.callbacks.lr_monitor.LearningRateMonitor"],
    ["--trainer.callbacks+={class_path: ModelCheckpoint, init_args: {dirpath: some/where}}"],
    ["--trainer.profiler=simple"],
    ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=some/where"],
    ["--trainer.profiler={class_path: AdvancedProfiler, init_args: {dirpath: some/where, filename: profile}}"],
    ["--trainer.strategy=ddp", "--trainer.devices=2", "--trainer.accelerator=cpu"],
    ["--trainer.plugins={class_path: lightning.pytorch.plugins.environments.SLURMEnvironment}"],
    ["--trainer.precision=bf16-mixed", "--trainer.default_root_dir=some/where", "--ckpt_path=some/where/best.ckpt"],
    ["--data=Copy"],
    ["--data.batch_size=20", "--model.network.d_model=32"],
]


@pytest.mark.parametrize("options", COMMON_OPTIONS, ids=[options[0] for options in COMMON_OPTIONS])
def test_common_options(options, parse_only, fit_with):
    """A file that is named like a value is not read."""
    for value in ("CSVLogger", "Compile", "bf16-mixed", "cpu", "ddp", "simple"):
        Path(value).write_text("{]")
    fit_with({}, *options)


REQUIRED = {
    "CSVLogger": {"save_dir": "some/where"},
    "EarlyStopping": {"monitor": "val/loss"},
    "FSDPPrecision": {"precision": "bf16-mixed"},
    "GradientAccumulationScheduler": {"scheduling": {0: 1}},
    "MixedPrecision": {"precision": "bf16-mixed", "device": "cpu"},
    "OnExceptionCheckpoint": {"dirpath": "some/where"},
}
"""Settings without a default, by class."""


def test_listed_classes_of_lightning(parse_only, fit_with):
    """Callbacks, loggers and plugins are lists; a configuration names one each of the others."""
    places = {"callbacks": [], "loggers": [], "plugins": [], "profilers": [], "strategies": [], "accelerators": []}
    for package, names in CLASSES.items():
        if package.startswith(("torch", "lightning_tfm.optimizers", "lightning_tfm.networks")):
            continue
        kind = re.sub(r"lightning_tfm\.(distributed\.)?|lightning\.pytorch\.", "", package).partition(".")[0]
        for name in names.split():
            places[kind].append({"class_path": f"{package}.{name}", "init_args": REQUIRED.get(name, {})})
    for index in range(3):
        trainer = {"callbacks": places["callbacks"], "logger": places["loggers"], "plugins": places["plugins"]}
        for name, kind in (("profiler", "profilers"), ("strategy", "strategies"), ("accelerator", "accelerators")):
            trainer[name] = places[kind][index]
        fit_with({"trainer": trainer})
