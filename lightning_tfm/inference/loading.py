"""Loading of a trained model from a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from lightning_tfm import inference, networks
from lightning_tfm.checkpoint import bounded_by, read
from lightning_tfm.config.trust import import_trusted
from lightning_tfm.errors import UserError
from lightning_tfm.inference import Predictor
from lightning_tfm.networks import GPT, Ensemble, Network, Seq2SeqNetwork
from lightning_tfm.runs.names import named_checkpoint
from lightning_tfm.tokenization import tokenizer_from_dict

Class = TypeVar("Class")


def load(path: str | Path, trust_packages: Sequence[str] = ()) -> Predictor:
    """Load the trained model of a checkpoint, in evaluation mode on the CPU.

    Args:
        path: a checkpoint, or a run, see `named_checkpoint`.
        trust_packages: further packages, installed or in the current folder, from which the classes of the network and
            of the predictor may be imported.

    Returns:
        The predictor of the task, see `TaskModule.predictor_class`.

    Raises:
        UserError: if there is no such run, if the file is damaged or not a checkpoint of lightning_tfm, or if a class
            of the model belongs neither to lightning_tfm nor to a trusted package.
    """
    path = named_checkpoint(path)
    return restore(read(path), path, trust_packages)


def restore(checkpoint: dict[str, Any], path: str | Path, trust_packages: Sequence[str] = ()) -> Predictor:
    """Return the trained model of a checkpoint whose content was read, see `load`.

    Args:
        checkpoint: the content, see `read`.
        path: the path of the checkpoint, for error messages.
        trust_packages: see `load`.

    Raises:
        UserError: see `load`.
    """
    saved = dict(checkpoint["hyper_parameters"])
    network_class = _import_class(saved["network"].get("class_path"), networks, Network, path, trust_packages)
    for member in saved["network"]["init_args"]["members"] if network_class is Ensemble else ():
        _import_class(member.get("class_path"), networks, Seq2SeqNetwork, path, trust_packages)
    module_name, predictor_name = saved.pop("class_path", None), saved.pop("predictor", None)
    predictor_class = _import_class(predictor_name, inference, Predictor, path, trust_packages)
    try:
        arguments = saved.pop("network")["init_args"]
        with bounded_by(checkpoint["state_dict"], arguments):
            network = network_class(**arguments)
        tokenizer = tokenizer_from_dict(saved.pop("tokenizer"))
        if tokenizer.vocab_size != network.hyper_parameters.get("vocab_size", tokenizer.vocab_size):
            raise ValueError("the vocabulary does not fit the network")
        del saved["optimizer"], saved["lr_schedule"]
        if predictor_name != module_name:
            # Checkpoints of earlier versions lack arguments that have a default.
            saved = {name: saved[name] for name in predictor_class.predictor_arguments if name in saved}
        labels = saved.get("labels", [])
        if not (isinstance(saved.get("max_target_length", 0), int) and all(isinstance(label, str) for label in labels)):
            raise ValueError("a length or a label is of another type")
        predictor = predictor_class(network, tokenizer, **saved)
        predictor.load_state_dict(checkpoint["state_dict"])
        for part in network.modules():
            if isinstance(part, GPT):  # or a member of an ensemble
                part.merge_lora()
        predictor.longest_source = checkpoint.get("longest_source")
        predictor.shortest_source = checkpoint.get("shortest_source")
        predictor.alignment_head = checkpoint.get("alignment_head")
        if predictor.alignment_head is not None:
            layer, head = predictor.alignment_head
            attention: Any = network.get_submodule(layer)
            is_selected = network.side(layer) in ("source", "sequence")  # by `source_attention`
            if not (is_selected and isinstance(head, int) and 0 <= head < attention.num_heads):
                raise ValueError("there is no such head")
    except Exception as error:  # the content may be anything
        raise UserError(
            f"the weights of {str(path)!r} must fit its own hyper-parameters, but do not; "
            "it is damaged, or from another version of lightning_tfm"
        ) from error
    return predictor.eval()


def _import_class(
    name: Any, package: ModuleType, base: type[Class], path: str | Path, trust_packages: Sequence[str]
) -> type[Class]:
    """Import the class that a checkpoint names, one that `package` exports or one of a trusted package.

    Raises:
        UserError: if the class is not trusted, abstract or not derived from `base`.
    """
    name = str(name)
    exported = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in vars(package).values() if inspect.isclass(cls)}
    cls = exported.get(name) or import_trusted(name, trust_packages, f"the checkpoint {str(path)!r}")
    if not (inspect.isclass(cls) and issubclass(cls, base)) or inspect.isabstract(cls):
        raise UserError(f"{str(path)!r} must name a class that derives from {base.__name__}, but names {name!r}")
    return cls
