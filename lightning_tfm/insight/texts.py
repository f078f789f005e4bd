"""Inspection of the output for a text: its alternatives, its attributions, and the layers that decide it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_tfm.errors import UserError
from lightning_tfm.inference import Alternative, Predictor, TeacherForced
from lightning_tfm.insight.attribution import integrated_gradients, logit_lens, occlusion, patching
from lightning_tfm.insight.sample import Sample, logits_of
from lightning_tfm.networks import Network
from lightning_tfm.runs.inspection import PatchingRecord, TextRecord

MOST_PROBABLE = 5
"""Number of the most probable symbols that a layer predicts at a step."""


def as_sample(forced: TeacherForced) -> Sample:
    """Return a text and its output as a sample of one example."""
    return Sample(forced.inputs, forced.targets, forced.is_target)


def inspect_text(predictor: Predictor, line: str, against: str | None = None) -> TextRecord:
    """Return the layers, the symbols and, against another text, the states that decide the output for a text.

    Args:
        predictor: the model, in evaluation mode.
        line: the text.
        against: another text with the same number of tokens, whose states are patched into those of the text.

    Raises:
        UserError: if a text has no output, or the texts have different numbers of tokens.
    """
    forced = predictor.teacher_forced(line)
    sample, network = as_sample(forced), predictor.network
    targets = sample.targets[0]  # (T)
    with torch.no_grad():
        steps = predictor.steps(logits_of(network, sample.inputs)[0], targets)
    lens = {layer: logits[0].log_softmax(-1) for layer, logits in logit_lens(network, sample.inputs).items()}
    gradients, errors = integrated_gradients(network, sample)
    result: TextRecord = {
        "input": line,
        "output": forced.output,
        "input_symbols": forced.input_symbols,
        "target_symbols": forced.target_symbols,
        "is_target": sample.is_target[0].tolist(),
        "probabilities": [step.probability for step in steps],
        "alternatives": [_with_probabilities(step.alternatives) for step in steps],
        "lens": {
            layer: [*map(_with_probabilities, predictor.most_probable(values, MOST_PROBABLE))]
            for layer, values in lens.items()
        },
        "decided_after": _decided_after({layer: values.argmax(-1) == targets for layer, values in lens.items()}),
        "integrated_gradients": gradients.tolist(),
        "integrated_gradients_errors": errors.tolist(),
        "occlusion": occlusion(network, sample).tolist(),
        "decoder_symbols": [*forced.decoder_symbols],
    }
    if against is not None:
        other = predictor.teacher_forced(against)
        try:
            result["against"], result["patching"] = against, patch_text(network, forced, other)
        except UserError as error:
            raise UserError(f"--against {against!r}: {error}") from None
    return result


def patch_text(network: Network, forced: TeacherForced, other: TeacherForced) -> list[PatchingRecord]:
    """Return the effects of patching the states of another text into those of a text, by layer.

    Raises:
        UserError: see `patching`.
    """
    # A pair keeps the target of the other, so that only the sources differ.
    inputs = (
        (forced.inputs[0], other.inputs[1]) if forced.inputs[0].numel() and len(other.inputs) > 1 else forced.inputs
    )
    return [
        {
            "layer": layer,
            "side": "decoder" if network.side(layer) == "target" else "input",
            "effects": effects.tolist(),
        }
        for layer, effects in patching(network, inputs, as_sample(other)).items()
    ]


def _with_probabilities(alternatives: Sequence[Alternative]) -> list[tuple[str, float]]:
    """Return the symbol of each alternative with its probability."""
    return [(each.symbol, each.probability) for each in alternatives]


def _decided_after(is_best: Mapping[str, Tensor]) -> list[str | None]:
    """Return, for each step, the first layer from which on the target is the most probable symbol (T)."""
    if not is_best:
        return []
    layers = [*is_best]
    stays = torch.stack([*is_best.values()]).flip(0).long().cumprod(0).sum(0)  # number of last layers, (T)
    return [layers[-number] if number else None for number in stays.tolist()]
