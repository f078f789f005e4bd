"""What watches a run."""

from lightning_tfm.callbacks.summary import Summary

__all__ = ["Summary"]
