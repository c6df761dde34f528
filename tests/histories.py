"""Synthetic histories for the rules: a few arrays in, what the recorder would hand over out."""

from __future__ import annotations

import numpy as np

from keras_gradguard.recorder import History, Recorder
from keras_gradguard.records import Row, Sample, Table, VariableInfo


def info(path, shape=(3, 3), **kwargs):
    size = int(np.prod(shape))
    layer = path.rsplit("/", 1)[0] if "/" in path else path
    return VariableInfo(path=path, layer=layer, shape=shape, dtype="float32", size=size, **kwargs)


def table(*paths, none=(), **kwargs):
    infos = tuple(p if isinstance(p, VariableInfo) else info(p, **kwargs) for p in paths)
    return Table(optimizer="adam", variables=infos, none=frozenset(none))


LAYERS = table("a/kernel", "a/bias", "b/kernel", "b/bias", "c/kernel", "c/bias")


def sample(step, update, *, weight=1.0, rate=0.01, histogram=None, size=None):
    update = np.asarray(update, np.float32)
    counts = np.zeros((len(update), 512), np.int32) if histogram is None else histogram
    return Sample(
        step=step,
        histogram=counts,
        max_abs=np.ones(len(update), np.float32),
        update=update,
        weight=np.broadcast_to(np.float32(weight), update.shape).copy(),
        learning_rate=rate,
    )


def history(
    norms,
    *,
    columns=None,
    loss=1.0,
    due=True,
    skipped=False,
    scale=1.0,
    new=None,
    samples=(),
    first=0,
    rate_rises=None,
    keep=128,
) -> History:
    """Run rows through a real recorder; ``norms`` is ``[T, V]``, the rest scalars or ``[T]``."""
    norms = np.asarray(norms, np.float32)
    steps = len(norms)
    columns = table(*[f"v{i}" for i in range(norms.shape[1])]) if columns is None else columns

    def spread(value):
        return list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value] * steps

    rows = [
        Row(step=first + t, norm=norms[t], loss=lo, scale=sc, skipped=sk, update_due=du and not sk)
        for t, (lo, sc, sk, du) in enumerate(
            zip(spread(loss), spread(scale), spread(skipped), spread(due), strict=True)
        )
    ]
    recorder = Recorder(table=columns, keep_rows=keep)
    old = 0 if new is None else steps - new
    recorder.add(rows[:old])
    if old:
        recorder.history()
    recorder.add(rows[old:], samples)
    return recorder.history(rate_rises=rate_rises)
