"""Inspection of trained networks: interventions, scores of heads, ablations and attributions."""

from lightning_tfm.insight.ablation import Ablation, Ablator, Effect, heads_of, parts_of
from lightning_tfm.insight.attribution import (
    direct_logit_attribution,
    integrated_gradients,
    logit_lens,
    occlusion,
    patching,
)
from lightning_tfm.insight.inspection import inspect_network
from lightning_tfm.insight.interventions import Component, Interventions, Part, components, interventions
from lightning_tfm.insight.sample import Outcome, Sample, outcome
from lightning_tfm.insight.scores import head_scores
from lightning_tfm.insight.texts import inspect_text

__all__ = [
    "Ablation",
    "Ablator",
    "Component",
    "Effect",
    "Interventions",
    "Outcome",
    "Part",
    "Sample",
    "components",
    "direct_logit_attribution",
    "head_scores",
    "heads_of",
    "inspect_network",
    "inspect_text",
    "integrated_gradients",
    "interventions",
    "logit_lens",
    "occlusion",
    "outcome",
    "parts_of",
    "patching",
]
