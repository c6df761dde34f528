"""The pieces of the guard: a histogram, a sparse gradient, a row in the event file.

python benchmarks/pieces.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradguard.records import Row, Table, VariableInfo
from keras_gradguard.taps import numbers
from keras_gradguard.tensorboard.events import EventWriter


def medians(candidates: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each, taking turns."""
    for run in candidates.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(taken) for name, taken in times.items()}


def histogram(size: int, rounds: int) -> dict[str, Any]:
    """A norm, our histogram and ``tf.summary.histogram`` of one large gradient."""
    gradient = tf.random.stateless_normal([size], [1, 2]) * 1e-3
    norm = tf.function(numbers.half_square)
    counts = tf.function(numbers.exponent_counts)
    with tempfile.TemporaryDirectory() as log_dir:
        writer = tf.summary.create_file_writer(log_dir)

        def summary() -> None:
            with writer.as_default(step=0):
                tf.summary.histogram("gradient", gradient)

        taken = medians(
            {
                "norm": lambda: norm(gradient).numpy(),
                "histogram": lambda: counts(gradient).numpy(),
                "tf.summary.histogram": summary,
            },
            rounds,
        )
        writer.close()
    return {
        "benchmark": "histogram",
        "entries": size,
        "norm_ms": round(1e3 * taken["norm"], 2),
        "histogram_ms": round(1e3 * taken["histogram"], 2),
        "summary_ms": round(1e3 * taken["tf.summary.histogram"], 1),
        "against_norm": round(taken["histogram"] / taken["norm"], 2),
        "against_summary": round(taken["tf.summary.histogram"] / taken["histogram"], 1),
    }


def sparse(rows: int, vocabulary: int, rounds: int) -> dict[str, Any]:
    """All statistics of the gradient of an embedding of which some rows were looked up."""
    values = tf.random.stateless_normal([rows, 16], [1, 2])
    indices = tf.range(rows, dtype=tf.int64) * (vocabulary // rows)

    @tf.function
    def statistic(values: Any, indices: Any) -> Any:
        slices = tf.IndexedSlices(values, indices, tf.constant([vocabulary, 16]))
        dense = numbers.dense_values(slices)
        flat = numbers.magnitudes(dense, slices)
        return numbers.half_square(dense), numbers.exponent_counts(flat), numbers.largest(flat)

    taken = medians({"all": lambda: statistic(values, indices)[1].numpy()}, 4 * rounds)
    return {
        "benchmark": "sparse",
        "rows_touched": rows,
        "vocabulary": vocabulary,
        "microseconds": round(1e6 * taken["all"], 1),
    }


def event_file(variables: int, steps: int) -> dict[str, Any]:
    """Bytes that a step takes in the event file for each variable."""
    infos = tuple(
        VariableInfo(path=f"layer_{i}/kernel", layer=f"layer_{i}", shape=(8,), dtype="f", size=8)
        for i in range(variables)
    )
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as log_dir:
        writer = EventWriter(log_dir)
        sizes = []
        for _ in range(2):
            for start in range(len(sizes) * steps, (len(sizes) + 1) * steps, 10):
                norms = rng.random((10, variables), np.float32)
                rows = [Row(step=start + i, norm=n, loss=1.0) for i, n in enumerate(norms)]
                writer.write_rows(Table(optimizer="adam", variables=infos), rows)
            writer.flush()
            sizes.append(sum(p.stat().st_size for p in Path(log_dir).rglob("*") if p.is_file()))
        writer.close()
    return {
        "benchmark": "event_file",
        "variables": variables,
        "bytes_a_row_and_variable": round((sizes[1] - sizes[0]) / steps / variables, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rows = [histogram(10**7, rounds)]
    rows += [sparse(1024, vocabulary, rounds) for vocabulary in (10**4, 10**6, 10**8)]
    rows += [sparse(touched, 10**6, rounds) for touched in (64, 16384)]
    rows += [event_file(variables, 1000) for variables in (10, 100, 800)]
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
