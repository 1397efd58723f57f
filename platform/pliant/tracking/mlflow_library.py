"""The one door to MLflow: importing it takes over a second, so it happens late, in a thread."""

import logging
import os
import threading
from importlib import import_module
from typing import Any

_IMPORT = threading.Lock()

_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the tracker retries by itself, and can be woken
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # a job talks to no server its user did not name
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}


def load(module: str = "mlflow") -> Any:
    """Import a module of MLflow with quiet, impatient defaults; the environment wins over them.

    One thread at a time: MLflow's modules import each other in circles.
    """
    with _IMPORT:
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        return import_module(module)
