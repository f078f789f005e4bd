"""Inspection of a trained network: scores and ablations of its parts, and attributions of its output."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

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
    SetRecord,
)

ROLES = {
    "previous_token": "previous token",
    "duplicate_token": "same token",
    "induction": "induction",
    "first_token": "first token",
    "alignment": "follows the alignment",
    "alignment_later": "follows the alignment, one step later",
}
"""Roles of heads, by the name of the score."""

ROLE_SCORE = 0.5
"""Minimum score of a head with a role, exclusive."""


def number_of_steps(network: Network) -> int:
    """Return the minimum number of calls of `progress` by `inspect_network`."""
    return len(parts_of(network)) + number_of_pairs(network) + len(heads_of(network)) + 2


def number_of_pairs(network: Network) -> int:
    """Return the number of pairs of heads that are ablated."""
    pairs = math.comb(len(heads_of(network)), 2)
    return pairs if pairs <= MAX_PAIRS else 0


def inspect_network(network: Network, sample: Sample, progress: Callable[[], object] = lambda: None) -> NetworkRecord:
    """Return the scores and roles of the parts of a network, and the effects of their ablation.

    Args:
        network: the network, in evaluation mode.
        sample: the examples, at least two.
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
    for first, second, effect in ablator.backups({head: ablations[head]["mean"] for head in heads}):
        if effect is not None:
            backups.append({"heads": (str(first), str(second)), "errors_increase": effect})
            backed_up |= {first, second}
        progress()
    by_effect = sorted(heads, key=lambda head: ablations[head]["mean"].loss.mean)
    smallest_set = _smallest_set(ablator, by_effect, progress)
    lens, direct = _lens(network, sample), _direct(network, sample, ablator)
    progress()
    tests = max(1, len(heads))
    records: list[HeadRecord] = []
    for head in dict.fromkeys([*heads, *scores]):  # a head without a context has scores only
        known = scores.get(head, {})
        record: HeadRecord = {"name": str(head), "without": {}, "scores": known, "main_score": None, "role": ""}
        mean, is_used = None, False
        if head in ablations:
            mean = ablations[head]["mean"]
            is_used = ablator.loss_increase(mean.outcome, tests).is_material
            record["without"] = _without(ablations[head], sample)
        record["main_score"], record["role"] = role(known, mean, is_used, head in backed_up)
        records.append(record)
    return {
        "examples": len(sample),
        "group_sizes": {
            by: {name: int(mask.any(1).sum()) for name, mask in masks.items()} for by, masks in sample.groups.items()
        },
        "full": _outcome(ablator.full, sample),
        "heads": records,
        "components": [
            {"name": part.name, "without": _without(results, sample)}
            for part, results in ablations.items()
            if part.head is None
        ],
        "ablated_pairs": number_of_pairs(network),
        "backups": sorted(backups, key=lambda pair: -pair["errors_increase"][0]),
        "smallest_set": smallest_set,
        "lens": lens,
        "direct": direct,
    }


def role(
    scores: Mapping[str, float], without: Ablation | None, is_used: bool, is_backed_up: bool
) -> tuple[str | None, str]:
    """Return the main score of a head, by name, and its role.

    The role is "" unless a score is high and an ablation shows an effect. The main score is that of the role or,
    without a role, the largest score that can give one; None without any.

    Args:
        scores: the scores of the head.
        without: the ablation of the head; None for a head without a context. If the head reads the source of a part of
            the target, the error rate of this part must increase.
        is_used: whether the loss increases without the head.
        is_backed_up: whether another head backs it up, so that errors increase without both.
    """

    def largest(names: Sequence[str]) -> str | None:
        return max(names, key=lambda name: scores[name], default=None)

    of_parts = [name for name in scores if name.startswith(READS)]
    named = [name for name in ROLES if name in scores]
    high = largest([name for name in named if scores[name] > ROLE_SCORE])
    if high is not None and (is_used or is_backed_up):
        return high, ROLES[high] if is_used else f"{ROLES[high]}, backed up"
    errors = {} if without is None else without.errors["part"]
    read = {
        name: name.removeprefix(READS)
        for name in of_parts
        if scores[name] > ROLE_SCORE and errors and errors[name.removeprefix(READS)].is_material
    }
    if read:
        return largest(of_parts), f"looks at {' and '.join(f'the {part}' for part in read.values())}"
    return largest([*of_parts, *named]), ""


def _smallest_set(ablator: Ablator, heads: Sequence[Part], progress: Callable[[], object]) -> SetRecord | None:
    """Return the record of the smallest set of heads; None without heads, or if no output is right."""
    if not heads or not ablator.full.exact.any():
        return None
    remaining = ablator.smallest_set(heads, progress)
    outcome = ablator.without([head for head in heads if head not in remaining], "mean")
    return {"heads": [*map(str, remaining)], "exact_match": ablator.effect(outcome.exact.float())}


def _outcome(result: Outcome, sample: Sample) -> OutcomeRecord:
    """Return the loss, the exact match, and the error rate of each group of targets."""
    return {
        "loss": result.nll.sum().item() / int(sample.is_target.sum()),
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
