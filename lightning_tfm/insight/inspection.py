"""Inspection of a trained network: scores and ablations of its parts, and where its output is decided."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_tfm.errors import UserError
from lightning_tfm.insight.ablation import (
    MAX_PAIRS,
    METHODS,
    Ablation,
    Ablator,
    heads_of,
    parts_of,
)
from lightning_tfm.insight.attribution import direct_logit_attribution, logit_lens
from lightning_tfm.insight.interventions import Part
from lightning_tfm.insight.sample import Outcome, Sample
from lightning_tfm.insight.scores import READS, head_scores
from lightning_tfm.networks import Network
from lightning_tfm.runs.inspection import (
    AblationRecord,
    BackupRecord,
    EffectRecord,
    HeadRecord,
    NetworkRecord,
    OutcomeRecord,
)

ROLES = {
    "previous_token": "previous token",
    "duplicate_token": "same token",
    "induction": "induction",
    "first_token": "first token",
    "alignment": "follows the alignment",
    "alignment_later": "follows the alignment, one step later",
}
"""What a head does, in words, by score."""

ROLE_SCORE = 0.5
"""Score above which a head has a role."""


def number_of_steps(network: Network) -> int:
    """Return how often `inspect_network` calls `progress`."""
    heads = len(heads_of(network))
    pairs = heads * (heads - 1) // 2
    return len(parts_of(network)) + (pairs if pairs <= MAX_PAIRS else 0) + 3


def inspect_network(network: Network, sample: Sample, progress: Callable[[], object] = lambda: None) -> NetworkRecord:
    """Return what the parts of a network do for a sample, and what the network can no longer do without them.

    Args:
        network: the network, in evaluation mode.
        sample: the examples.
        progress: a function that is called after each step, see `number_of_steps`.
    """
    scores = head_scores(network, sample)
    progress()
    ablator = Ablator(network, sample)
    ablations: dict[Part, dict[str, Ablation]] = {}
    for part in parts_of(network):
        ablations[part] = {method: ablator.ablate(part, method) for method in METHODS}
        progress()
    heads = heads_of(network)
    backups, backed_up = list[BackupRecord](), set[Part]()
    for first, second, effect in ablator.backups({head: ablations[head]["zero"] for head in heads}):
        if effect is not None:
            backups.append({"heads": (str(first), str(second)), "loss": effect})
            backed_up |= {first, second}
        progress()
    remaining = ablator.smallest_set(sorted(heads, key=lambda head: ablations[head]["mean"].loss.mean))
    progress()
    lens, direct = _lens(network, sample), _direct(network, sample, ablator)
    progress()
    return {
        "examples": len(sample),
        "full": _outcome(ablator.full, sample),
        "heads": [_head(head, scores.get(head, {}), ablations[head], head in backed_up, sample) for head in heads],
        "components": [
            {"name": part.name, "without": _without(results, sample)}
            for part, results in ablations.items()
            if part.head is None
        ],
        "backups": sorted(backups, key=lambda pair: -pair["loss"][0]),
        "smallest_set": [str(head) for head in remaining],
        "lens": lens,
        "direct": direct,
    }


def _head(
    head: Part, scores: dict[str, float], ablations: Mapping[str, Ablation], is_backed_up: bool, sample: Sample
) -> HeadRecord:
    """Return the record of a head with its role.

    The role is "" unless a score is high and an ablation shows an effect: the loss increases without the head, or
    without it and a head that backs it up; or, if the head reads the source of a part of the target, the error rate of
    this part.
    """
    without = ablations["mean"]
    names = [name for name in scores if name in ROLES]
    parts = {READS + part: f"the {part}" for part in sample.parts if READS + part in scores}
    is_used = without.loss.is_material or is_backed_up
    high = [name for name in names if scores[name] > ROLE_SCORE and is_used]
    read = [
        name
        for name in parts
        if scores[name] > ROLE_SCORE and without.errors["part"][name.removeprefix(READS)].is_material
    ]
    main = max(high or read or [*names, *parts], key=lambda name: scores[name], default=None)
    role = ROLES[main] if main in high else f"looks at {' and '.join(parts[name] for name in read)}" if read else ""
    return {
        "name": str(head),
        "without": _without(ablations, sample),
        "scores": scores,
        "main_score": main,
        "role": role,
    }


def _outcome(result: Outcome, sample: Sample) -> OutcomeRecord:
    """Return the loss, the exact match, and the error rate of each group of targets."""
    return {
        "loss": result.loss.mean().item(),
        "exact_match": result.exact.double().mean().item(),
        "errors": {
            by: {name: (~result.is_right & mask).sum().item() / int(mask.sum()) for name, mask in masks.items()}
            for by, masks in sample.groups.items()
        },
    }


def _without(ablations: Mapping[str, Ablation], sample: Sample) -> dict[str, AblationRecord]:
    return {
        method: {
            **_outcome(ablation.outcome, sample),
            "loss_increase": ablation.loss,
            "exact_match_decrease": ablation.exact,
            "errors_increase": {by: {**effects} for by, effects in ablation.errors.items()},
        }
        for method, ablation in ablations.items()
    }


def _lens(network: Network, sample: Sample) -> dict[str, OutcomeRecord]:
    """Return the outcome if the network ended after each layer."""
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    for batch in map(sample.rows, sample.batches()):
        for layer, logits in logit_lens(network, batch.inputs).items():
            outcomes[layer].append(Outcome.of(logits, batch))
    return {layer: _outcome(Outcome.join(parts), sample) for layer, parts in outcomes.items()}


def _direct(network: Network, sample: Sample, ablator: Ablator) -> dict[str, EffectRecord]:
    """Return the mean contribution of each part to the logit of the targets, with its interval over examples."""
    contributions: dict[Part, list[Tensor]] = defaultdict(list)
    try:
        for batch in map(sample.rows, sample.batches()):
            number = batch.is_target.sum(1).clamp(min=1)
            for part, values in direct_logit_attribution(network, batch).items():
                contributions[part].append((values * batch.is_target).sum(1) / number)
    except UserError:
        return {}
    return {str(part): ablator.effect(torch.cat(values)) for part, values in contributions.items()}
