"""A real training with Keras' own TensorBoard callback beside the guard, served by both loaders."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import numpy as np
import pytest

from . import server

KERAS_TAGS = {"epoch_loss"}
VARIABLES = {"hidden/kernel", "hidden/bias", "out/kernel", "out/bias"}


def get(address: str, route: str) -> Any:
    return json.loads(urllib.request.urlopen(f"{address}/data/{route}", timeout=60).read())


def wait_for(address: str, route: str, test: Any) -> Any:
    """The answer, once ``test`` holds: the server reads files in the background."""
    deadline = time.monotonic() + 60
    while True:
        answer = get(address, route)
        if test(answer) or time.monotonic() > deadline:
            return answer
        time.sleep(0.2)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    keras = pytest.importorskip("keras")
    from keras_gradguard import GradientGuard

    logs = tmp_path_factory.mktemp("keras") / "logs"
    x = np.random.default_rng(0).standard_normal((64, 5)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) > 0).astype("float32")
    for order in ("guard_first", "guard_last"):
        model = keras.Sequential(
            [
                keras.layers.Input((5,)),
                keras.layers.Dense(8, activation="relu", name="hidden"),
                keras.layers.Dense(1, activation="sigmoid", name="out"),
            ]
        )
        model.compile("adam", "binary_crossentropy")
        guard = GradientGuard(log_dir=logs / order, sample_every=4)
        board = keras.callbacks.TensorBoard(logs / order, update_freq=1, histogram_freq=1)
        callbacks = [guard, board] if order == "guard_first" else [board, guard]
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    return logs


@pytest.mark.parametrize("fast", [False, True], ids=["python loader", "rust loader"])
def test_both_callbacks_are_shown_whatever_their_order(logs, fast):
    with server.serving(logs, fast=fast, tensorflow=not fast) as address:
        for order in ("guard_first", "guard_last"):
            mine = f"{order}/gradguard"
            tags = wait_for(
                address,
                "plugin/scalars/tags",
                lambda t, r=f"{order}/train", m=mine: t.get(r) and t.get(m),
            )
            assert set(tags[f"{order}/train"]) >= KERAS_TAGS
            for metric in ("gradient_norm", "gradient_zero_fraction", "update_ratio"):
                got = {t for t in tags[mine] if t.startswith(f"{metric}/")}
                assert got == {f"{metric}/{v}" for v in VARIABLES}
            histograms = wait_for(address, "plugin/histograms/tags", lambda t, m=mine: t.get(m))
            assert set(histograms[mine]) == {f"gradient_log10/{v}" for v in VARIABLES}
            points = get(address, f"plugin/scalars/scalars?run={mine}&tag=gradient_norm/out/bias")
            assert [p[1] for p in points] == [0, 4, 8, 12]
        assert get(address, "plugin/gradguard/runs") == {
            "runs": ["guard_first/gradguard", "guard_last/gradguard"]
        }
        table = wait_for(
            address,
            "plugin/gradguard/table?run=guard_last/gradguard",
            lambda t: t["series"] and t["series"][0]["rows"] == 16,
        )
        assert table["series"][0]["rows"] == 16
        assert {v["name"] for v in table["series"][0]["variables"]} == VARIABLES
        listing = get(address, "plugins_listing")
        assert listing["gradguard"]["enabled"]
        assert not listing["hparams"]["enabled"]


def test_the_tab_is_not_active_without_data_of_ours(tmp_path):
    (tmp_path / "logs").mkdir()
    with server.serving(tmp_path / "logs") as address:
        assert get(address, "plugins_listing")["gradguard"]["enabled"] is False
        assert get(address, "plugin/gradguard/runs") == {"runs": []}
