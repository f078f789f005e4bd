"""Commands beside those of LightningCLI, one per module."""
