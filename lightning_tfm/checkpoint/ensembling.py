"""Joining of several checkpoints in one, whose network is an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_tfm.checkpoint.averaging import KEPT, check_parts
from lightning_tfm.checkpoint.content import ENSEMBLE, read
from lightning_tfm.config.settings import parse_yaml
from lightning_tfm.errors import UserError

PARTS = ("class_path", "predictor", "tokenizer", "max_target_length")
"""Hyper-parameters that the members of an ensemble share."""


def join_checkpoints(paths: Sequence[str | Path], name: str) -> dict[str, Any]:
    """Return the content of a checkpoint whose network is an ensemble of those of several checkpoints.

    All entries except the network and the weights come from the first checkpoint.

    Args:
        paths: the checkpoints, at least two.
        name: the name of the ensemble, which `test` uses in place of that of an experiment.

    Raises:
        UserError: if `read` fails, if a checkpoint holds no sequence-to-sequence model or an ensemble, or if the
            checkpoints differ in task, tokenizer, maximum target length or test data.
    """
    contents = [read(path) for path in paths]
    first = contents[0]
    for path, content in zip(paths, contents, strict=True):
        parameters = content["hyper_parameters"]
        if "max_target_length" not in parameters:
            task = str(parameters.get("class_path")).rpartition(".")[2]
            raise UserError(
                f"the checkpoints of an ensemble must map a source to a target, but {str(path)!r} is of a {task}"
            )
        if parameters["network"]["class_path"] == ENSEMBLE:
            raise UserError(
                f"the checkpoints of an ensemble must not be ensembles, but {str(path)!r} is one; name its members"
            )
        check_parts(first, content, (paths[0], path), PARTS)
        if _test_data(content) != _test_data(first):
            raise UserError(
                f"all checkpoints must have the same test data, but {str(paths[0])!r} and {str(path)!r} differ; read "
                "the data from files, since generated data depend on the seed"
            )
    networks = [content["hyper_parameters"]["network"] for content in contents]
    arguments = {"vocab_size": networks[0]["init_args"]["vocab_size"], "members": networks}
    network = {"class_path": ENSEMBLE, "init_args": arguments}
    joined = {entry: first[entry] for entry in KEPT if entry in first} | {"callbacks": {}}
    joined["hyper_parameters"] = {**first["hyper_parameters"], "network": network}
    joined["state_dict"] = {
        f"network.members.{index}.{weight.removeprefix('network.')}": value
        for index, content in enumerate(contents)
        for weight, value in content["state_dict"].items()
    }
    if first.get("alignment_head") is not None:
        layer, head = first["alignment_head"]
        joined["alignment_head"] = f"members.0.{layer}", head
    joined["members"] = [*map(str, paths)]
    joined.pop("experiment", None)
    if all("experiment" in content for content in contents):
        joined["experiment"] = {"name": name, "config": _config(paths, contents)}
    return joined


def _test_data(content: dict[str, Any]) -> str | None:
    """Return the fingerprint of the data on which a checkpoint is tested; None if it is not known."""
    fingerprint = content.get("data_fingerprint", {})
    return fingerprint.get("test", fingerprint.get("val"))


def _config(paths: Sequence[str | Path], contents: Sequence[dict[str, Any]]) -> str:
    """Return the configuration of the first checkpoint with the networks of all, as YAML."""
    configs = [
        parse_yaml(content["experiment"]["config"], Path(path), "RUN")
        for path, content in zip(paths, contents, strict=True)
    ]
    networks = [config["model"]["init_args"]["network"] for config in configs]
    configs[0]["model"]["init_args"]["network"] = {"class_path": ENSEMBLE, "init_args": {"members": networks}}
    return str(yaml.safe_dump(configs[0], sort_keys=False))
