"""Looking into a trained network."""

from lightning_tfm.insight.interventions import Component, Interventions, Part, components, interventions

__all__ = ["Component", "Interventions", "Part", "components", "interventions"]
