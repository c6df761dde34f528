"""Runs with a story, written with the real writer from made-up gradients: fast, no training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from keras_gradguard.findings import Cause, Evidence, Finding
from keras_gradguard.records import Row
from keras_gradguard.tensorboard.events import EventWriter

from . import runs

LAYERS = ("conv", "conv_1", "dense", "dense_1", "dense_2", "head")
PATHS = tuple(f"{layer}/{part}" for layer in LAYERS for part in ("kernel", "bias"))

DEAD = Finding(
    symptom="zero_gradient",
    summary="Every gradient entry of 'dense_1' has been exactly 0 for 8 updates in a row.",
    where=("dense_1/kernel", "dense_1/bias"),
    step=327,
    first_step=320,
    causes=(
        Cause(
            name="dead_relu",
            score=0.95,
            where=("dense_1",),
            evidence=(
                Evidence(
                    name="dead_fraction",
                    value=1.0,
                    text="64 of 64 units of 'dense_1' are off for all 320 examples seen",
                ),
            ),
            fix="Lower the learning rate of 0.5, or use leaky_relu in 'dense_1'.",
        ),
        Cause(name="learning_rate_too_high", score=0.4),
    ),
    evidence=(Evidence(name="zero_steps", value=8, text="8 of the last 8 updates are all zero"),),
)
NAN = Finding(
    symptom="non_finite",
    summary="The gradient of 3 variables holds NaN; the loss is NaN.",
    where=("dense_2/kernel", "dense_2/bias", "head/kernel"),
    step=400,
    first_step=400,
    causes=(Cause(name="log_of_zero", score=0.8, fix="Use keras_gradguard.ops.safe_log."),),
)

Scale = Callable[[int, int], float]


def write(
    log_dir: Path,
    scale: Scale,
    *,
    steps: int = 600,
    paths: Sequence[str] = PATHS,
    findings: Sequence[Finding] = (),
    run: str = "gradguard",
    seed: int = 0,
) -> Path:
    """Write a run whose gradient of variable ``v`` at step ``s`` has size ``scale(s, v)``."""
    rng = np.random.default_rng(seed)
    table = runs.table(*paths, size=400)
    writer = EventWriter(log_dir, run=run)
    todo = sorted(findings, key=lambda f: f.step or 0)
    for start in range(0, steps, 10):
        batch = []
        for step in range(start, min(start + 10, steps)):
            norms = np.array([scale(step, v) for v in range(len(paths))])
            norms = norms * np.exp(0.25 * rng.standard_normal(len(paths)))
            loss = 0.1 + 2.2 * np.exp(-step / 150) + 0.04 * rng.standard_normal()
            batch.append(Row(step=step, norm=norms.astype(np.float32), loss=float(loss)))
        writer.write_rows(table, batch)
        if start % 50 == 0:
            sizes = [scale(start, v) for v in range(len(paths))]
            gradients = [s / 20 * rng.standard_normal(400) * (rng.random(400) > 0.3) for s in sizes]
            moved = np.nan_to_num(np.array([1e-3 * min(s, 1.0) for s in sizes])) * 20
            sample = runs.sample(start, gradients, update=moved.astype(np.float32))
            writer.write_sample(table, sample)
        while todo and (todo[0].step or 0) < start + 10:
            writer.write_finding(todo.pop(0))
    writer.close()
    if writer.directory is None:
        raise ValueError("`steps` must be positive")
    return writer.directory


def healthy(step: int, variable: int) -> float:
    return float(10.0 ** (-0.5 - 0.12 * (11 - variable) - 0.5 * step / 600))


def dead(step: int, variable: int) -> float:
    """From step 320 the ReLU of ``dense_1`` is off: nothing flows into it or before it."""
    return 0.0 if step >= 320 and variable < 8 else healthy(step, variable)


def diverging(step: int, variable: int) -> float:
    if step >= 400 and variable in (8, 9, 10):
        return float("nan")
    return healthy(step, variable) * 10 ** (max(0, step - 250) / 60)
