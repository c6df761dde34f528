"""What layers put out, as the values of one TensorBoard event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from keras_gradguard import statistics
from keras_gradguard.records import ActivationSample
from keras_gradguard.tensorboard.summaries import EventBuilder

_BOUNDED: Final = frozenset({"sigmoid", "tanh", "softmax", "softsign"})


def add_activations(
    event: EventBuilder, sample: ActivationSample, names: Sequence[str], *, histograms: bool
) -> None:
    """Add the statistics of one step.

    Args:
        event: The event of that step.
        sample: The statistics.
        names: What to call each entry of ``sample.layers`` in tags.
        histograms: Add the histograms too.
    """
    tables = statistics.log10_tables(sample.histogram) if histograms else []
    for i, (name, layer) in enumerate(zip(names, sample.layers, strict=True)):
        if histograms:
            event.histogram(f"activation_log10/{name}", tables[i])
        event.scalar(f"activation_zero_fraction/{name}", layer.zero_fraction)
        event.scalar(f"activation_dead_fraction/{name}", layer.dead_fraction)
        if layer.kind in _BOUNDED:
            event.scalar(f"activation_saturated_fraction/{name}", layer.saturated_fraction)
        if layer.nonfinite:
            event.scalar(f"activation_nonfinite/{name}", float(layer.nonfinite))
