"""lightning_tfm: a PyTorch Lightning research framework for sequence models."""
