"""Compatibility of a module with the data."""

from __future__ import annotations

from typing import get_type_hints

from lightning_tfm import modules
from lightning_tfm.data import TaskDataModule
from lightning_tfm.errors import UserError
from lightning_tfm.modules.task import TaskModule
from lightning_tfm.parsing_errors import concrete


def check_pair(module_class: type[TaskModule], data_class: type[TaskDataModule]) -> None:
    """Check that a module can be trained on the data.

    Raises:
        UserError: if it cannot; the message names the modules that can.
    """
    if issubclass(data_class, module_class.datamodule_class):
        return
    fitting = []
    for name in modules.__all__:
        other = getattr(modules, name)
        if issubclass(data_class, getattr(other, "datamodule_class", ())):
            networks = concrete(get_type_hints(other.__init__)["network"])
            fitting.append(f"lightning_tfm.modules.{name}, whose network is {' or '.join(networks)}")
    raise UserError(
        f"model.class_path must be a module that learns from {data_class.holds}, the data of {data_class.__name__}, "
        f"but {module_class.__name__} learns from {module_class.datamodule_class.holds}; try {'; or '.join(fitting)}"
    )
