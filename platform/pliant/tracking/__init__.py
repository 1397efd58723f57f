"""What a job leaves behind: its journal, its one MLflow run, its summary and its plots."""

from pliant.tracking.journal import Journal
from pliant.tracking.mlflow_tracker import MlflowTracker, sync
from pliant.tracking.parameters import flatten_params
from pliant.tracking.plots import loss_plot
from pliant.tracking.run_manifest import environment_manifest
from pliant.tracking.summary import Summary, read_summary, summarize, write_summary

__all__ = [
    "Journal",
    "MlflowTracker",
    "Summary",
    "environment_manifest",
    "flatten_params",
    "loss_plot",
    "read_summary",
    "summarize",
    "sync",
    "write_summary",
]
