"""Memory, open files and log size over a long guarded training of a tiny model.

python -m benchmarks.long_run           # 200 000 steps
python -m benchmarks.long_run --quick   # 20 000
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from keras_gradguard import GradientGuard

_PER_CALL = 1000


def resident() -> int:
    """Bytes of memory that this process holds (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def handles() -> int:
    """Open files of this process (Linux)."""
    return len(list(Path("/proc/self/fd").iterdir()))


def written(directory: str) -> int:
    """Bytes of all files below a directory."""
    return sum(p.stat().st_size for p in Path(directory).rglob("*") if p.is_file())


class Measures(keras.callbacks.Callback):
    """Notes the figures at the end of each epoch."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.directory = directory
        self.rows: list[dict[str, float]] = []

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Take one row."""
        gc.collect()
        self.rows.append(
            {
                "steps": int(self.model.optimizer.iterations.numpy()),
                "resident_mb": round(resident() / 1e6, 1),
                "handles": handles(),
                "written_mb": round(written(self.directory) / 1e6, 3),
            }
        )


def run(steps: int, max_log_bytes: int | None, epochs: int = 10) -> list[dict[str, float]]:
    """Train for so many steps and return the figures of each tenth."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(1e-4), "mse", steps_per_execution=_PER_CALL)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype("float32")
    # Noise that no model fits: the gradients stay alive for as long as it takes.
    data = tf.data.Dataset.from_tensors((x, rng.normal(size=(64, 1)).astype("float32")))
    with tempfile.TemporaryDirectory() as directory:
        measures = Measures(directory)
        guard = GradientGuard(log_dir=directory, max_log_bytes=max_log_bytes)
        model.fit(
            data.repeat(),
            epochs=epochs,
            steps_per_epoch=steps // epochs,
            callbacks=[guard, measures],
            verbose=0,
        )
        if guard.steps_seen != steps or guard.findings:
            raise RuntimeError(f"{guard.steps_seen} steps seen, found: {guard.findings}")
    return measures.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    steps = 20_000 if quick else 200_000
    for limit in (None, 1 << 22):
        for row in run(steps, limit):
            print(json.dumps({"max_log_bytes": limit, **row}))


if __name__ == "__main__":
    main()
