"""The layers of the package, that is, which subpackage may import which, and the documentation of its methods."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]

sys.path.insert(0, str(ROOT / "docs/_ext"))

from layers import imported, layers, member_of, module_of, modules  # noqa: E402

FILES = sorted(path for folder in ("lightning_tfm", "datamodules") for path in (ROOT / folder).rglob("*.py"))


def test_subpackages_import_from_lower_layers_only():
    assert layers()[-1] == ["__main__"]  # an exception names the members that import each other


def test_no_modules_import_each_other():
    assert "lightning_tfm.tasks.base" in modules()  # an exception names the modules that import each other


def names_imported_in(*folders):
    return {name for folder in folders for path in (ROOT / folder).rglob("*.py") for name in imported(path)}


def test_datamodules_import_from_the_layer_of_data_and_below():
    height = {member: number for number, members in enumerate(layers()) for member in members}
    members = {member_of(name) for name in names_imported_in("datamodules")} - {None}
    assert all(height[member] <= height["data"] for member in members)


def test_networks_and_inference_do_not_import_lightning():
    names = names_imported_in(*(f"lightning_tfm/{name}" for name in ("inference", "layers", "networks")))
    assert {name.split(".")[0] for name in names}.isdisjoint({"lightning", "torchmetrics"})


def test_inference_does_not_load_lightning():
    code = """if True:
        import sys
        from importlib import import_module
        from lightning_tfm import load
        names = "average compare diff ensemble export generate list methods report runs score"
        for name in names.split():
            import_module(f"lightning_tfm.commands.{name}")
            assert {"lightning", "torchmetrics"}.isdisjoint(sys.modules), name
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scipy_signal_is_imported_lazily():
    code = """if True:
        import sys
        from lightning_tfm.__main__ import importing
        with importing():
            import lightning_tfm.fit.cli
        assert "torchmetrics" in sys.modules
        assert "scipy.signal" not in sys.modules
        from scipy.signal import hilbert
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_methods_are_documented():
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
