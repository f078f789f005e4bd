"""Commands beside those of LightningCLI, one per module."""

FUNCTIONS = {name: name for name in ("generate", "score", "average", "export", "report", "reproduce", "runs")} | {
    "list": "list_",
    "completion": "completion",
}
"""The function of each command in the module of its name."""
