"""The layers of the package, that is, which module may import which, and the documentation of its methods."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = [
    {
        "lightning_tfm.errors",
        "lightning_tfm.files",
        "lightning_tfm.heartbeat",
        "lightning_tfm.memory",
        "lightning_tfm.progress",
        "lightning_tfm.sharding",
        "lightning_tfm.style",
    },
    {
        "lightning_tfm.child_runs",
        "lightning_tfm.parsing_errors",
        "lightning_tfm.run_lock",
        "lightning_tfm.terminal",
    },
    {
        "lightning_tfm.checkpoint",
        "lightning_tfm.configuration",
        "lightning_tfm.layers",
        "lightning_tfm.optimizers",
        "lightning_tfm.tokenization",
        "lightning_tfm.trust",
    },
    {
        "lightning_tfm.attention_maps",
        "lightning_tfm.catalog",
        "lightning_tfm.data",
        "lightning_tfm.losses",
        "lightning_tfm.networks",
    },
    {
        "lightning_tfm.ctranslate",
        "lightning_tfm.decoding",
        "lightning_tfm.metrics",
        "lightning_tfm.parallel",
        "lightning_tfm.pictures",
        "lightning_tfm.sweeps",
    },
    {"lightning_tfm.alignment", "lightning_tfm.comparison", "lightning_tfm.predictors", "lightning_tfm.strategies"},
    {"lightning_tfm.cluster"},
    {"lightning_tfm.modules", "lightning_tfm.loggers"},
    {"lightning_tfm.loading", "lightning_tfm.planning"},
    {"lightning_tfm.callbacks"},
    {"lightning_tfm.arguments", "lightning_tfm.console", "lightning_tfm.reporting", "lightning_tfm.run_folder"},
    {"lightning_tfm.resuming", "lightning_tfm.trainer_settings"},
    {"lightning_tfm.cli"},
    {"lightning_tfm.commands"},
    {"lightning_tfm.__main__"},
]
"""From the lowest up: a module imports from lower layers and from its own package only."""

FILES = sorted(path for folder in ("lightning_tfm", "datamodules") for path in (ROOT / folder).rglob("*.py"))


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(name):
    for height, names in enumerate(LAYERS):
        if any(name == own or name.startswith(own + ".") for own in names):
            return height
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_import_only_from_lower_layers(path):
    name = module_of(path)
    if name == "lightning_tfm":
        return  # it exports names of all layers
    for other in imported(path):
        if name.startswith("lightning_tfm"):
            assert not other.startswith("datamodules"), "only the YAML combines the two packages"
            own = ".".join(name.split(".")[:2])
            if layer_of(other) is not None and not other.startswith(own):
                assert layer_of(other) < layer_of(name), f"{name} imports {other}"
        elif other.startswith("lightning_tfm."):
            assert layer_of(other) <= 3, f"{name} imports {other}"
    if name.startswith(
        ("lightning_tfm.networks", "lightning_tfm.layers", "lightning_tfm.decoding", "lightning_tfm.predictors")
    ):
        assert not any(other.split(".")[0] in ("lightning", "torchmetrics") for other in imported(path))


COMMANDS = ("average", "compare", "export", "generate", "list", "report", "runs", "score")


@pytest.mark.parametrize(
    "statement", ["from lightning_tfm import load", *(f"import lightning_tfm.commands.{name}" for name in COMMANDS)]
)
def test_inference_imports_neither_lightning_nor_torchmetrics(statement):
    code = f"import sys; {statement}; print(*{{'lightning', 'torchmetrics'}} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=True)
    assert run.stdout.split() == []


def test_commands_import_scipy_signal_only_when_it_is_used():
    code = """if True:
        import sys
        from lightning_tfm.__main__ import importing
        with importing():
            import lightning_tfm.cli
        assert "torchmetrics" in sys.modules
        assert "scipy.signal" not in sys.modules
        from scipy.signal import hilbert
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_module_belongs_to_a_layer():
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts[:2]).removesuffix(".__init__") for path in FILES}
    assert all(layer_of(name) is not None for name in names if name.startswith("lightning_tfm."))


def test_every_public_method_is_documented_or_overrides_another():
    """Check what ruff cannot, since it does not know the base classes."""
    for path in FILES:
        module = import_module(module_of(path))
        classes = [cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == module.__name__]
        for cls in classes:
            methods = {name: method for name, method in vars(cls).items() if inspect.isfunction(method)}
            for name, method in methods.items():
                if not (cls.__name__.startswith("_") or name.startswith("_") or method.__doc__):
                    overridden = [vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)]
                    assert overridden, f"{module.__name__}.{cls.__qualname__}.{name}"
