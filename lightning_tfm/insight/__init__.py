"""Inspection of trained networks: interventions, scores of heads, ablations and attributions."""

from __future__ import annotations

from importlib import import_module
from typing import Any

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


def __getattr__(name: str) -> Any:
    """Import `lightning_tfm.explore.explore` on first use, since the explorer is in a layer above this one."""
    if name == "explore":
        return import_module("lightning_tfm.explore").explore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
