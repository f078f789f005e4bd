"""The commands fit, validate and test: the command line, defaults, resuming, the folder of the run, the console."""

LIGHTNING_COMMANDS = {
    "fit": "train the model of an experiment, then test the best checkpoint",
    "validate": "evaluate a run on the validation data of its experiment",
    "test": "evaluate a run on the test data of its experiment",
}
"""Summaries of the commands of LightningCLI, by name."""
