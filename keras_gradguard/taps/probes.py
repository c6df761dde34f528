"""Upstream gradients at the places a user marked with ``GradientProbe``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_gradguard.records import Sample, VariableInfo
from keras_gradguard.taps import numbers
from keras_gradguard.taps.base import Cadence
from keras_gradguard.taps.branch import when
from keras_gradguard.taps.channel import TensorFlowChannel


class ProbeTap:
    """Gathers what probes see during a backward pass, and makes one row of it a step.

    A probe that is used several times in a step (a shared layer) shows the sum over its uses of
    the sums of squares.

    Args:
        probes: Layers with an attribute ``_gradguard_sink``.
        cadence: How often to sample.
    """

    def __init__(self, probes: Sequence[Any], cadence: Cadence) -> None:
        self.probes = list(probes)
        self._every = cadence.sample_every
        infos = [
            VariableInfo(
                path=f"probe/{probe.name}",
                layer=str(probe.name),
                shape=(),
                dtype="float32",
                size=-1,
                trainable=False,
            )
            for probe in self.probes
        ]
        self._sinks = [self._sink(index) for index in range(len(self.probes))]
        self.channel = TensorFlowChannel(None, "probes", infos, cadence, judged=False)
        count = len(self.probes)
        with tf.init_scope():
            self._halves = tf.Variable(tf.zeros([count]), trainable=False)
            self._largest = tf.Variable(tf.zeros([count]), trainable=False)
            self._counts = tf.Variable(tf.zeros([count, numbers.BINS], tf.int32), trainable=False)

    def install(self) -> Callable[[], None]:
        """Give every probe its sink; return what takes the sinks away again."""
        for probe, sink in zip(self.probes, self._sinks, strict=True):
            vars(probe)["_gradguard_sink"] = sink
        return self._uninstall

    def _uninstall(self) -> None:
        for probe in self.probes:
            vars(probe)["_gradguard_sink"] = None

    def _sink(self, index: int) -> Callable[[Any], Any]:
        def sink(upstream: Any) -> Any:
            values = numbers.dense_values(upstream)
            flat = numbers.magnitudes(values, upstream)
            at = [[index]]
            with tf.control_dependencies(
                [
                    self._counts.scatter_nd_add(at, [numbers.exponent_counts(flat)]),
                    self._largest.assign(
                        tf.tensor_scatter_nd_max(self._largest, at, [numbers.largest(flat)])
                    ),
                ]
            ):
                # The gradient waits for what is returned here, and so for all three.
                return self._halves.scatter_nd_add(at, [numbers.half_square(values)])

        return sink

    def push(self, loss: Any) -> None:
        """End a step: make a row, now and then a sample, of what was seen, and start anew.

        Args:
            loss: The loss as a scalar tensor of the graph being traced, a number, or None.
        """
        if tf.executing_eagerly():
            self._push_eagerly(loss)
        else:
            self._push_in_graph(loss)
        self._halves.assign(tf.zeros_like(self._halves))
        self._largest.assign(tf.zeros_like(self._largest))
        self._counts.assign(tf.zeros_like(self._counts))

    def _push_eagerly(self, loss: float | None) -> None:
        channel = self.channel
        wanted = channel.wants_sample()
        row = channel.push(self._halves.numpy(), loss, 1.0)
        if wanted:
            unknown = np.full(len(self.probes), np.nan, np.float32)
            channel.push_sample(
                Sample(
                    step=row.step,
                    histogram=self._counts.numpy(),
                    max_abs=self._largest.numpy(),
                    update=unknown,
                    weight=unknown,
                )
            )
            channel.complete_sample([], np.zeros((0, 2), np.float32), float("nan"))

    def _push_in_graph(self, loss: Any) -> None:
        buffers = self.channel.buffers()
        buffers.has_loss = buffers.has_loss or loss is not None
        count = buffers.count.read_value()
        halves = self._halves.read_value()
        lead = [tf.constant(float("nan")) if loss is None else loss, tf.constant(1.0)]
        row = tf.concat([tf.stack(lead), halves], axis=0)
        nothing = tf.fill([len(self.probes), 2], float("nan"))

        def take() -> Any:
            at = [[buffers.taken % buffers.slots]]
            top = self._largest.read_value()[:, tf.newaxis]
            buffers.histogram.scatter_nd_update(at, [self._counts.read_value()])
            buffers.stats.scatter_nd_update(at, [tf.concat([top, nothing], axis=1)])
            buffers.sample_step.scatter_nd_update(at, [count])
            buffers.sample_rate.scatter_nd_update(at, [tf.constant(float("nan"))])
            buffers.taken.assign_add(1)
            return tf.zeros([])

        wanted = tf.equal(count % self._every, 0) | (count < buffers.dense_until)
        when(wanted, take, lambda: tf.zeros([]))
        buffers.ring.scatter_nd_update([[count % buffers.ring_size]], [row])
        buffers.count.assign_add(1)
