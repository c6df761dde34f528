"""What layers put out, observed while a step is traced or run and measured on sampled steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from keras_gradguard.records import ActivationSample
from keras_gradguard.taps.base import Cadence
from keras_gradguard.taps.channel import TensorFlowChannel
from keras_gradguard.taps.gauge import Gauge, Seen
from keras_gradguard.taps.installing import StandIn
from keras_gradguard.taps.keeper import all_reachable, examined
from keras_gradguard.taps.threads import alone


class ActivationTap:
    """Sees the outputs of a model's innermost layers while a training step runs.

    ``call`` of each layer is replaced on the instance while a step may run, and returns what it
    always did. The numbers are made where a sampled step makes the others; on other steps nothing
    is computed.

    Not seen: integer outputs, layers that return several tensors, layers inside a loop or a
    condition of the graph (a cell of an RNN), and any layer of a model that trains with several
    replicas.

    Args:
        models: Keras models.
        cadence: How much to hold between two reads.
    """

    def __init__(self, models: Sequence[Any], cadence: Cadence) -> None:
        self.paused = False  # a diagnosis runs the model for itself
        self._models = list(models)
        self._layers: list[Any] | None = None
        self._cadence = cadence
        self._seen: list[Seen] = []
        self._stand_ins: dict[int, StandIn] = {}
        self._gauges: dict[tuple[Any, ...], tuple[TensorFlowChannel, Gauge]] = {}

    @property
    def layers(self) -> list[Any]:
        """The layers that are observed."""
        if self._layers is not None:
            return self._layers
        found = innermost_layers(self._models)
        if all(getattr(m, "built", True) for m in self._models):
            self._layers = found  # what is made while a model is built is there now
        return found

    def install(self) -> Callable[[], None]:
        """Observe calls of the layers until the function that is returned is called."""
        mine = [s for s in map(self._stand_in, self.layers) if not s.alive]
        for stand_in in mine:
            stand_in.put_on()

        def put_back() -> None:
            self._seen = []
            for stand_in in mine:
                stand_in.take_off()

        return put_back

    def _stand_in(self, layer: Any) -> StandIn:
        found = self._stand_ins.get(id(layer))
        if found is None:

            def seen(original: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                self._see(layer, result)
                return result

            found = self._stand_ins[id(layer)] = StandIn(layer, "call", seen)
        return found

    def _see(self, layer: Any, result: Any) -> None:
        if self.paused or not isinstance(result, tf.Tensor) or examined():
            return
        if tf.executing_eagerly() and not record.could_possibly_record():
            return  # an evaluation between the steps of a loop
        if result.dtype.is_floating and (result.shape.rank or 0) >= 2 and result.shape[-1]:
            self._seen.append(Seen(layer, result))

    def forget(self) -> None:
        """Let go of the tensors of a step that is over."""
        self._seen = []

    def save(self, channel: TensorFlowChannel, step: Any) -> None:
        """Measure what was seen since the last call. Called on sampled steps, inside the branch.

        Args:
            channel: The optimizer's.
            step: The channel's count of this step: an int64 scalar tensor in a graph; in eager
                mode, where the channel counts on by itself, an int relative to its base.
        """
        seen, self._seen = self._seen, []
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            return
        seen = [s for s in seen if all_reachable([s.tensor])]
        if not seen:
            return
        calls = tuple((id(s.layer), s.tensor.shape[-1]) for s in seen)
        key = (id(channel), tf.executing_eagerly(), *calls)
        if key not in self._gauges:
            last = output_layers(self._models)
            # Not in the trace: a function that makes variables is traced twice.
            gauge = alone(functools.partial(Gauge, seen, self._cadence, last))
            self._gauges[key] = channel, gauge
        self._gauges[key][1].measure([s.tensor for s in seen], step)

    def read(self) -> list[ActivationSample]:
        """Fetch what is new since the last read, oldest first."""
        found = []
        for (_, eager, *_), (channel, gauge) in self._gauges.items():
            found += gauge.read(channel.base + (0 if eager else channel.eager_steps))
        return sorted(found, key=lambda s: s.step)


def innermost_layers(models: Sequence[Any]) -> list[Any]:
    """Return every layer of ``models`` that holds no other layer, each once.

    A recurrent layer counts as innermost: its cell runs inside a loop of the graph.
    """
    found: dict[int, Any] = {}

    def walk(layer: Any) -> None:
        inner = [] if hasattr(layer, "cell") else list(_children(layer))
        for child in inner:
            walk(child)
        if not inner and type(layer).__name__ != "InputLayer":
            found.setdefault(id(layer), layer)

    for model in models:
        for layer in _children(model):
            walk(layer)
    return list(found.values())


def _children(layer: Any) -> Sequence[Any]:
    if not hasattr(layer, "_flatten_layers"):
        return ()
    return list(layer._flatten_layers(include_self=False, recursive=False))


def output_layers(models: Sequence[Any]) -> frozenset[str]:
    """Return the names of the layers whose outputs are outputs of a functional model."""
    found = set()
    for model in models:
        for tensor in tf.nest.flatten(getattr(model, "outputs", None) or []):
            history = getattr(tensor, "_keras_history", None)
            if history is not None:
                found.add(str(history.operation.name))
    return frozenset(found)
