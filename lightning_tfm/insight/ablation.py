"""Ablations: the effects of removing components of a network.

Shapes: batch B, tokens T, width D, groups of targets K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_tfm.insight.interventions import Edit, Part, components, interventions
from lightning_tfm.insight.sample import Outcome, Sample, logits_of, outcome, tokens_of
from lightning_tfm.networks import Network
from lightning_tfm.tokenization import PAD

Method = Literal["zero", "mean", "resample"]
"""Replacement of an ablated output: 0; the mean output over the tokens of all examples; or, with "resample", the output
for another example at the same position (Chan et al. 2022)."""

METHODS: tuple[Method, ...] = ("zero", "mean", "resample")

SHARE = 0.99
"""Share of the exact match that the smallest set of heads keeps."""

COVERAGE = 0.95
"""Coverage of an interval."""

RESAMPLES = 4_999
"""Number of bootstrap samples of an interval."""

MATERIAL = 0.01
"""Minimum increase of the loss, in nats per target, or of an error rate, for an effect to be material."""

MAX_PAIRS = 1_000
"""Maximum number of pairs of heads; pairs are not ablated if there are more."""


class Effect(NamedTuple):
    """Mean over examples, with its interval."""

    mean: float
    low: float
    high: float

    @property
    def is_material(self) -> bool:
        """Return whether the whole interval is above MATERIAL."""
        return self.low > MATERIAL


class Ablation(NamedTuple):
    """Effects of the ablation of a part of a network.

    Attributes:
        outcome: the outcome without the part.
        loss: the increase of the loss, in nats per target.
        exact: the decrease of the exact match.
        errors: the increase of the error rate in each group of targets, see `Sample.groups`.
    """

    outcome: Outcome
    loss: Effect
    exact: Effect
    errors: dict[str, dict[str, Effect]]


def heads_of(network: Network) -> list[Part]:
    """Return all heads of a network."""
    attentions = [component for component in components(network) if component.kind == "attention"]
    return [Part(component.name, head) for component in attentions for head in range(component.num_heads)]


def parts_of(network: Network) -> list[Part]:
    """Return the heads, the feed-forward networks and the layers of a network."""
    others = [Part(component.name) for component in components(network) if component.kind in ("feed_forward", "layer")]
    return heads_of(network) + others


class Ablator:
    """Ablates parts of a network, in evaluation mode, and measures the outcome for a sample.

    Args:
        network: the network.
        sample: the examples.
        seed: the seed of resampling and of the bootstrap samples.

    Note:
        A layer is ablated by ablating its sub-layers, so that the residual stream passes it.
    """

    def __init__(self, network: Network, sample: Sample, seed: int = 0) -> None:
        self.network, self.sample = network, sample
        self.kinds = {component.name: component.kind for component in components(network)}
        order = torch.randperm(len(sample), generator=torch.Generator().manual_seed(seed))
        self.others = torch.empty_like(order).scatter_(0, order, order.roll(1))  # another example for each (B)
        draws = np.random.default_rng(seed).multinomial(len(sample), [1 / len(sample)] * len(sample), size=RESAMPLES)
        self.draws = torch.from_numpy(draws).double()  # how often a bootstrap sample has each example (RESAMPLES, B)
        self.full = outcome(network, sample)
        self.means = self._mean_outputs()

    @torch.no_grad()
    def _outputs(self, parts: Iterable[Part], sample: Sample) -> dict[Part, Tensor]:
        """Return the outputs (B, T, D) of parts for a sample, with all calls along T."""
        with interventions(self.network) as touch:
            calls = {part: touch.record(*part) for part in parts}
            self.network(*sample.inputs)
        return {part: torch.cat(outputs, dim=1) for part, outputs in calls.items()}

    def _is_token(self, part: Part, sample: Sample) -> Tensor:
        """Return the mask (B, T) of the outputs of a part that are not at padding."""
        return tokens_of(self.network, part.name, sample.inputs) != PAD

    def _mean_outputs(self) -> dict[Part, Tensor]:
        """Return the mean output (D) of all heads and sub-layers over the tokens of all examples."""
        parts = heads_of(self.network)
        parts += [Part(name) for name, kind in self.kinds.items() if kind in ("attention", "feed_forward")]
        sums, numbers = dict[Part, Tensor](), dict[Part, int]()
        for batch in map(self.sample.rows, self.sample.batches()):
            for part, output in self._outputs(parts, batch).items():
                of_tokens = output[self._is_token(part, batch)]
                sums[part] = sums.get(part, 0) + of_tokens.sum(0)
                numbers[part] = numbers.get(part, 0) + len(of_tokens)
        return {part: total / max(1, numbers[part]) for part, total in sums.items()}

    @torch.no_grad()
    def without(self, parts: Iterable[Part], method: Method = "zero") -> Outcome:
        """Return the outcome without some parts."""
        ablated = [*self._sublayers(parts)]
        outcomes = []
        for rows in self.sample.batches():
            batch, others = self.sample.rows(rows), self.sample.rows(self.others[rows])
            outputs = self._outputs(ablated, others) if method == "resample" else {}
            with interventions(self.network) as touch:
                for part in ablated:
                    if method == "zero":
                        touch.scale(part.name, by=0.0, head=part.head)
                    elif method == "mean":
                        touch.replace(part.name, self.means[part], part.head)
                    else:
                        is_token = self._is_token(part, others)
                        touch.edit(part.name, _resampled(outputs[part], is_token), part.head)
                outcomes.append(Outcome.of(logits_of(self.network, batch.inputs), batch))
        return Outcome.join(outcomes)

    def _sublayers(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Yield the parts, with the sub-layers in place of each layer."""
        for part in parts:
            if self.kinds[part.name] == "layer":
                yield from (Part(name) for name in self.kinds if name.startswith(f"{part.name}."))
            else:
                yield part

    def ablate(self, part: Part, method: Method = "zero") -> Ablation:
        """Return the effects of the ablation of a part."""
        result = self.without([part], method)
        more_wrong = self.full.is_right.float() - result.is_right.float()  # (B, T)
        return Ablation(
            result,
            self.loss_increase(result),
            self.effect(self.full.exact.float() - result.exact.float()),
            {by: self._effects_by_group(more_wrong, masks) for by, masks in self.sample.groups.items()},
        )

    def effect(self, values: Tensor, numbers: Tensor | None = None, tests: int = 1) -> Effect:
        """Return the mean of values (B) of the examples, with a bootstrap interval over examples.

        Args:
            values: the values or, with `numbers`, sums of values.
            numbers: the number of values (B) in each sum.
            tests: the number of intervals that hold simultaneously with the probability COVERAGE. The limits of more
                than one are those of a normal distribution, since the bootstrap does not resolve such quantiles.
        """
        numbers = torch.ones_like(values) if numbers is None else numbers
        return self._effects(values.unsqueeze(1), numbers.unsqueeze(1), tests)[0]

    def loss_increase(self, result: Outcome, tests: int = 1) -> Effect:
        """Return the increase of the loss, in nats per target, see `effect`."""
        return self.effect((result.nll - self.full.nll).sum(1), self.sample.is_target.sum(1), tests)

    def _effects_by_group(self, values: Tensor, masks: Mapping[str, Tensor]) -> dict[str, Effect]:
        """Return the means of values (B, T) over the targets of each mask (B, T), by name."""
        sums = [(values * mask).sum(1) for mask in masks.values()]
        numbers = [mask.sum(1) for mask in masks.values()]
        effects = self._effects(torch.stack(sums, 1), torch.stack(numbers, 1)) if masks else []
        return dict(zip(masks, effects, strict=True))

    def _effects(self, sums: Tensor, numbers: Tensor, tests: int = 1) -> list[Effect]:
        """Return the means, over all targets, of values of which each example has some, by their sums (B, K)."""
        sums, numbers = sums.cpu().double(), numbers.cpu().double()
        tail = (1 - COVERAGE) / 2 / tests
        mean = sums.sum(0) / numbers.sum(0)
        means = (self.draws @ sums) / (self.draws @ numbers)  # (RESAMPLES, K); NaN without any target
        if tests == 1:
            low, high = means.nanquantile(torch.tensor([tail, 1 - tail], dtype=torch.double), dim=0)
        else:
            spread = means.std(0) * NormalDist().inv_cdf(1 - tail)
            low, high = mean - spread, mean + spread
        return [Effect(*each) for each in zip(mean.tolist(), low.tolist(), high.tolist(), strict=True)]

    def backups(self, ablations: Mapping[Part, Ablation]) -> Iterator[tuple[Part, Part, Effect | None]]:
        """Yield all pairs of heads, each with its interaction if they back each other up, otherwise with None.

        The interaction is the increase of the error rate without both heads minus the sum of the increases without
        each. It must be larger than each of these increases: one head does the work of the other (Wang et al. 2023).

        Args:
            ablations: the ablations of the heads by their mean.
        """
        pairs = [*combinations(ablations, 2)]
        numbers = self.sample.is_target.sum(1)
        for pair in pairs if len(pairs) <= MAX_PAIRS else ():
            increases = [ablations[part].outcome.errors - self.full.errors for part in pair]
            interaction = self.without(pair, "mean").errors - self.full.errors - sum(increases)
            effect = self.effect(interaction, numbers, len(pairs))
            beyond = [self.effect(interaction - increase, numbers, len(pairs)) for increase in increases]
            is_backup = effect.is_material and all(each.low > 0 for each in beyond)
            yield (*pair, effect if is_backup else None)

    def smallest_set(self, heads: Sequence[Part], progress: Callable[[], object] = lambda: None) -> list[Part]:
        """Return a small set of heads that keeps SHARE of the exact match if all others are ablated by their mean.

        A greedy search: the heads are removed in the order given, those with small effects first, each for good if the
        exact match stays; until no further head can be removed.

        Args:
            heads: all heads.
            progress: a function that is called for each head.
        """
        goal = SHARE * self.full.exact.float().mean()
        remaining, removed = [*heads], list[Part]()
        while True:
            before = len(remaining)
            for head in [*remaining]:
                progress()
                if self.without([*removed, head], "mean").exact.float().mean() >= goal:
                    remaining.remove(head)
                    removed.append(head)
            if len(remaining) == before:
                return remaining


def _resampled(outputs: Tensor, is_token: Tensor) -> Edit:
    """Return the function that replaces the output of each call by those (B, T, D) for other examples.

    At padding of another example, its last token before is taken.
    """
    steps = torch.arange(outputs.size(1), device=outputs.device).expand(len(outputs), -1)
    steps = steps.masked_fill(~is_token, 0).cummax(1).values
    values = outputs.gather(1, steps.unsqueeze(-1).expand_as(outputs))
    start = 0

    def replace(output: Tensor) -> Tensor:
        nonlocal start
        end = start + output.size(1)
        start, part = end, values[:, start:end]
        return part

    return replace
