"""Commands in addition to those of LightningCLI, one per module."""

FUNCTIONS = {
    "generate": "generate",
    "score": "score",
    "average": "average",
    "export": "export",
    "report": "report",
    "compare": "compare",
    "reproduce": "reproduce",
    "sweep": "sweep",
    "runs": "runs",
    "plan": "plan",
    "list": "list_",  # a built-in name
    "completion": "completion",
}
"""Name of the function that runs each command, in the module of the same name."""
