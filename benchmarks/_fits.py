"""A ``fit`` that stops after each epoch until it is its turn again."""

from __future__ import annotations

import threading
from typing import Any

import keras
from _measure import Clock
from _workloads import Workload


class PausedFit:
    """One long ``fit`` in a thread of its own; a block is an epoch of it.

    What happens once a ``fit`` (tracing, the look at the model before the second step) is over
    after :meth:`warm_up`, as it is in a long training.

    Args:
        workload: Model and data, compiled.
        callbacks: What is measured.
    """

    def __init__(self, workload: Workload, callbacks: list[Any]) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._clock: Clock | None = None
        self._error: BaseException | None = None
        self._workload = workload
        self.steps = workload.steps
        self._callbacks = [*callbacks, _Turn(self)]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        w = self._workload
        try:
            w.model.fit(
                w.x, w.y, batch_size=w.batch, epochs=10**6, verbose=0, callbacks=self._callbacks
            )
        except BaseException as error:  # handed to whoever waits
            self._error = error
        self._done.release()

    def warm_up(self, steps: int) -> None:
        """Train at least so many steps, unmeasured."""
        for _ in range(-(-steps // self._workload.steps) + 1):
            self.block(Clock())

    def block(self, clock: Clock) -> None:
        """Train one epoch."""
        self._clock = clock
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the ``fit``."""
        self._clock = None
        self._go.release()
        self._thread.join()


class _Turn(keras.callbacks.Callback):
    """Stands last: the other callbacks' end of an epoch is part of it."""

    async_safe = True

    def __init__(self, fit: PausedFit) -> None:
        super().__init__()
        self._fit = fit

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._fit._go.acquire()
        if self._fit._clock is not None:
            self._fit._clock.start()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._fit._clock is None:
            self._model.stop_training = True
        else:
            self._fit._clock.stop()
            self._fit._done.release()
