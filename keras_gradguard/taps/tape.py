"""Watch ``tf.GradientTape.gradient`` for as long as a step runs, to know each gradient's loss."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from keras_gradguard.taps.untangle import own_copy


@dataclass(slots=True)
class TapeRecord:
    """One call of ``tape.gradient``: what was differentiated with respect to what."""

    target: Any
    sources: list[Any]
    gradients: list[Any]
    tape: Any

    def scalar(self) -> Any:
        """Return the target as one float32 scalar tensor of its own graph, or None."""
        return scalar_loss(self.target)


def scalar_loss(target: Any) -> Any:
    """Return ``target`` (a tensor or a structure of tensors) as a float32 scalar, or None."""
    parts = [t for t in tf.nest.flatten(target) if tf.is_tensor(t)]
    parts = [t for t in parts if t.dtype.is_floating or t.dtype.is_integer]
    if not parts:
        return None
    means = [tf.reduce_mean(tf.cast(own_copy(t), tf.float32)) for t in parts]
    return means[0] if len(means) == 1 else tf.add_n(means)


@dataclass(eq=False)
class TapeWatch:
    """Records the tapes that are used while it is installed. Changes nothing they return."""

    records: list[TapeRecord] = field(default_factory=list)
    keep: int = 32

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put the watch in place for the time of a ``with`` block, on this thread's behalf."""
        take_away = self.install()
        try:
            yield
        finally:
            take_away()

    def install(self) -> Callable[[], None]:
        """Put the watch in place; return what takes it away again."""
        _WATCHES.add(self)
        return self._take_away

    def _take_away(self) -> None:
        _WATCHES.remove(self)

    def add(self, record: TapeRecord) -> None:
        """Keep a record, dropping the oldest above ``keep``."""
        self.records.append(record)
        del self.records[: -self.keep]

    def find(self, gradients: list[Any]) -> TapeRecord | None:
        """Return the tape call that made ``gradients``: by identity, else the latest one."""
        wanted = {id(g) for g in gradients if g is not None}
        for record in reversed(self.records):
            if wanted and any(id(g) in wanted for g in record.gradients):
                return record
        return self.records[-1] if self.records else None

    def forget(self) -> None:
        """Drop all records, and with them the tensors they hold."""
        self.records.clear()


class _Watches:
    """The one replacement of ``GradientTape.gradient``, shared by every watch in place."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._active: list[TapeWatch] = []
        self._original: Any = None
        self._watching: Any = None

    def add(self, watch: TapeWatch) -> None:
        with self._lock:
            if not self._active:
                self._install()
            self._active.append(watch)

    def remove(self, watch: TapeWatch) -> None:
        with self._lock:
            self._active.remove(watch)
            if not self._active:
                tf.GradientTape.gradient = self._original

    def _install(self) -> None:
        original = tf.GradientTape.gradient
        if original is not self._original:
            self._original, self._watching = original, self._made(original)
        tf.GradientTape.gradient = self._watching

    def _made(self, original: Any) -> Any:
        active = self._active

        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(tape, target, sources, *args, **kwargs)
            record = TapeRecord(
                target=target,
                sources=_flat(sources),
                gradients=_flat(result),
                tape=tape,
            )
            for watch in list(active):
                watch.add(record)
            return result

        gradient.__doc__ = original.__doc__
        return gradient


def _flat(structure: Any) -> list[Any]:
    if isinstance(structure, (list, tuple)):
        return list(structure)
    return [structure] if not isinstance(structure, dict) else list(structure.values())


_WATCHES = _Watches()
