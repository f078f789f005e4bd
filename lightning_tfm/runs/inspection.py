"""Results of `inspect`, as its file holds them."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

EffectRecord = tuple[float, float, float]
"""Mean over examples, with the ends of its 95% interval."""


class OutcomeRecord(TypedDict):
    """Quality of the outputs of a network on the sample.

    Attributes:
        loss: the loss, in nats per target.
        exact_match: the share of examples whose most probable tokens are all right.
        errors: the error rate by position, part and category of the target.
    """

    loss: float
    exact_match: float
    errors: dict[str, dict[str, float]]


class AblationRecord(OutcomeRecord):
    """Outcome of an ablation, and its differences from that of the network.

    Attributes:
        loss_increase: the increase of the loss.
        exact_match_decrease: the decrease of the exact match.
        errors_increase: the increase of the error rate by position, part and category of the target.
    """

    loss_increase: EffectRecord
    exact_match_decrease: EffectRecord
    errors_increase: dict[str, dict[str, EffectRecord]]


class PartRecord(TypedDict):
    """Feed-forward network or layer.

    Attributes:
        name: its name in the network.
        without: its ablation by each method: "zero", "mean" and "resample"; empty for a head without a context.
    """

    name: str
    without: dict[str, AblationRecord]


class HeadRecord(PartRecord):
    """Attention head.

    Attributes:
        scores: its scores by name.
        main_score: the name of the score of its role or, without a role, of its largest score; null without scores.
        role: its role; "" unless a score and an ablation agree.
    """

    scores: dict[str, float]
    main_score: str | None
    role: str


class BackupRecord(TypedDict):
    """Two heads that back each other up.

    Attributes:
        heads: their names.
        errors_increase: the interaction, with a simultaneous interval: the increase of the error rate without both
            heads minus the sum of the increases without each.
    """

    heads: tuple[str, str]
    errors_increase: EffectRecord


class SetRecord(TypedDict):
    """Smallest set of heads that keeps 99% of the exact match.

    Attributes:
        heads: their names.
        exact_match: the exact match if all other heads are ablated by their mean.
    """

    heads: list[str]
    exact_match: EffectRecord


class PatchingRecord(TypedDict):
    """Effects of patching the states of a layer, with P positions.

    Attributes:
        layer: the name of the layer.
        side: "decoder" if its positions are the inputs of a decoder that attends to an encoder, otherwise "input".
        effects: the share of the log probability that each state restores (P).
    """

    layer: str
    side: Literal["input", "decoder"]
    effects: list[float]


class TextRecord(TypedDict):
    """Inspection of the output for a text, with T output and S input symbols.

    Attributes:
        input: the text.
        output: the output.
        input_symbols: the input symbols; for source and target in one sequence, those of both.
        target_symbols: the output symbols.
        is_target: whether each output symbol is predicted.
        probabilities: the probability of each output symbol.
        alternatives: the most probable other symbols at each step, with their probabilities.
        lens: the most probable symbols at each step if the network ended after each layer.
        decided_after: the first layer after which each output symbol stays the most probable one; null if none.
        integrated_gradients: the contributions (T, S) of the input symbols to the log probability of each output
            symbol, in nats.
        integrated_gradients_errors: the errors of the sums of the contributions (T), in nats.
        occlusion: the decrease of the log probability of each output symbol without each input symbol (T, S), in nats.
        decoder_symbols: the symbol of each input of a decoder that attends to an encoder; empty without one.
        against: the text whose states are patched.
        patching: the effects of patching its states, by layer.
    """

    input: str
    output: str
    input_symbols: list[str]
    target_symbols: list[str]
    is_target: list[bool]
    probabilities: list[float]
    alternatives: list[list[tuple[str, float]]]
    lens: dict[str, list[list[tuple[str, float]]]]
    decided_after: list[str | None]
    integrated_gradients: list[list[float]]
    integrated_gradients_errors: list[float]
    occlusion: list[list[float]]
    decoder_symbols: list[str]
    against: NotRequired[str]
    patching: NotRequired[list[PatchingRecord]]


class NetworkRecord(TypedDict):
    """Inspection of a network on a sample.

    Attributes:
        examples: the number of examples.
        group_sizes: the number of examples of each position, part and category of the target.
        full: the outcome of the network.
        heads: its heads.
        components: its feed-forward networks and layers.
        ablated_pairs: the number of pairs of heads that were ablated; 0 if there are too many.
        backups: the pairs of heads that back each other up.
        smallest_set: the smallest set of heads; null without heads, or if no output is right.
        lens: the outcome if the network ended after each layer.
        direct: the mean contribution of each part to the logit of the targets.
    """

    examples: int
    group_sizes: dict[str, dict[str, int]]
    full: OutcomeRecord
    heads: list[HeadRecord]
    components: list[PartRecord]
    ablated_pairs: int
    backups: list[BackupRecord]
    smallest_set: SetRecord | None
    lens: dict[str, OutcomeRecord]
    direct: dict[str, EffectRecord]


class Inspection(NetworkRecord):
    """Inspection of a checkpoint.

    Attributes:
        checkpoint: the checkpoint.
        data: the name of the test set.
        seed: the seed with which the examples were drawn.
        texts: the inspected texts.
    """

    checkpoint: str
    data: str
    seed: int
    texts: list[TextRecord]
