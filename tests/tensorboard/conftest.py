"""TensorBoard's own imports warn; only what our code does is held to be free of warnings."""

from __future__ import annotations

import importlib
import warnings

import pytest


@pytest.fixture(scope="session", autouse=True)
def _tensorboard_imported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (
            "tensorboard.plugin_util",
            "tensorboard.backend.event_processing.data_ingester",
            "tensorboard.backend.event_processing.event_file_loader",
        ):
            importlib.import_module(name)
