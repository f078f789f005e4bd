"""Dashboards of W&B: a workspace with an overview of runs, and a report that compares the nine experiments.

    python experiments/dashboard.py --entity TEAM --project lightning_tfm

Saves both in W&B, which asks for an account, and prints their addresses. Requires
`pip install 'lightning_tfm[dashboard]'`, and runs with `--trainer.logger.log_examples true`, which upload the shown
predictions and pictures.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb.errors import CommError, UsageError
from wandb_workspaces import expr

TASKS = ("copy", "toy_translation", "date")
MODELS = ("transformer", "gpt", "attention_lstm")
STEP = "Step"


def workspace(entity: str, project: str) -> ws.Workspace:
    """Return a workspace with a section each for learning curves, attention and errors.

    Args:
        entity: user or team in W&B.
        project: the project in W&B.
    """
    learning = [
        wr.LinePlot(title="exact match", x=STEP, y=["val/exact_match"], range_y=(0, 1)),
        wr.LinePlot(title="loss", x=STEP, y=["train/loss", "val/loss"], log_y=True),
        wr.LinePlot(title="learning rate", x=STEP, y=["trainer/learning_rate"]),
        wr.LinePlot(title="gradient norm", x=STEP, y=["trainer/gradient_norm"], log_y=True),
        wr.LinePlot(title="tokens a second", x=STEP, y=["trainer/tokens_per_second"]),
    ]
    attention = [
        wr.LinePlot(title=score, x=STEP, metric_regex=rf"val/alignment/.*/{score}")
        for score in ("accuracy", "aer", "entropy")
    ]
    attention.append(wr.MediaBrowser(media_keys=["test/attention"]))
    wrong = [wr.WeavePanelSummaryTable(table_name="val/predictions"), wr.BarPlot(metrics=["test/exact_match"])]
    return ws.Workspace(
        entity=entity,
        project=project,
        name="lightning_tfm",
        sections=[
            ws.Section(name="Is it learning?", panels=learning, is_open=True),
            ws.Section(name="Where does it attend?", panels=attention, is_open=True),
            ws.Section(name="What does it get wrong?", panels=wrong, is_open=True),
        ],
    )


def report(entity: str, project: str) -> wr.Report:
    """Return a report on the nine experiments, by task, with the curve and the result of each model.

    Args:
        entity: user or team in W&B.
        project: the project in W&B.
    """
    introduction = "The runs of the nine experiments, three models for each of three tasks."
    blocks = [wr.P(introduction), wr.TableOfContents()]
    for task in TASKS:
        names = [f"{task}_{model}" for model in MODELS]
        runs = [wr.Runset(entity, project, name, filters=[expr.Metric("Group") == name]) for name in names]
        panels = [
            wr.LinePlot(title="exact match", x=STEP, y=["val/exact_match"], range_y=(0, 1)),
            wr.LinePlot(title="validation loss", x=STEP, y=["val/loss"], log_y=True),
            wr.BarPlot(title="test", metrics=["test/exact_match"]),
        ]
        blocks += [wr.H1(task.replace("_", " ")), wr.PanelGrid(runsets=runs, panels=panels)]
    return wr.Report(
        entity=entity, project=project, title="Nine experiments", description=Path(__file__).name, blocks=blocks
    )


def main() -> None:
    """Save the workspace and the report in W&B."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entity", required=True, help="user or team in W&B")
    parser.add_argument("--project", default="lightning_tfm")
    options = parser.parse_args()
    try:
        for view in (workspace(options.entity, options.project), report(options.entity, options.project)):
            view.save()
            print(view.url)
    except (UsageError, CommError) as error:  # not logged in, or the server does not respond
        parser.error(f"W&B cannot save it: {error}")


if __name__ == "__main__":
    main()
