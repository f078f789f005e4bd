"""Commands beside those of LightningCLI, one per module."""

FUNCTIONS = {
    "generate": "generate",
    "score": "score",
    "average": "average",
    "export": "export",
    "report": "report",
    "reproduce": "reproduce",
    "runs": "runs",
    "list": "list_",  # a built-in name
    "completion": "completion",
}
"""The function of each command in the module of its name."""
