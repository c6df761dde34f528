"""Putting a tap in place and taking it away again, at little cost: once a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Wrapper:
    """Stands in for one optimizer's ``apply``, again and again: it is put on for every step.

    Args:
        seen: Called with ``(optimizer, original apply, gradients, variables)`` in its place.
        optimizer: A Keras optimizer.
    """

    def __init__(self, seen: Callable[[Any, Any, Any, Any], Any], optimizer: Any) -> None:
        self.alive = False
        self._optimizer = optimizer  # held, so that its id stays its own
        self._own = vars(optimizer)
        self._previous: Any = None
        self._original: Any = None

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            if not self.alive:
                return self._original(grads, trainable_variables)
            return seen(optimizer, self._original, grads, trainable_variables)

        self._apply = apply

    def put_on(self) -> None:
        """Take the place of ``apply`` on the instance."""
        self._previous = self._own.get("apply")
        self._original = self._optimizer.apply
        self.alive = True
        # Straight into the dictionary: the attribute machinery of Keras would track it.
        self._own["apply"] = self._apply

    def take_off(self) -> None:
        """Put back what stood there, unless somebody put their own in place meanwhile."""
        self.alive = False
        if self._own.get("apply") is self._apply:
            if self._previous is None:
                del self._own["apply"]
            else:
                self._own["apply"] = self._previous


class Installed:
    """A tap in place. Entered on every step of `fit`, so a class: a generator takes longer.

    Args:
        tap: Has ``wrapper(optimizer)``, ``tape``, ``probes``, ``activations`` and ``wrapping``.
        targets: Keras optimizers.
    """

    __slots__ = ("_tap", "_targets", "_undo")

    def __init__(self, tap: Any, targets: Sequence[Any]) -> None:
        self._tap = tap
        self._targets = targets
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        tap, undo = self._tap, self._undo
        try:
            for optimizer in self._targets:
                wrapper = tap.wrapper(optimizer)
                # Or it is: `train_on_batch` in a watched loop; a step counts once.
                if not wrapper.alive:
                    undo.append(wrapper.take_off)
                    wrapper.put_on()
            undo.append(tap.tape.install())
            if tap.probes is not None:
                undo.append(tap.probes.install())
            if tap.activations is not None:
                undo.append(tap.activations.install())
            tap.wrapping += len(self._targets)
            undo.append(self._unwrapped)
        except BaseException:
            self._put_back()
            raise

    def __exit__(self, *error: object) -> None:
        self._put_back()

    def _unwrapped(self) -> None:
        self._tap.wrapping -= len(self._targets)

    def _put_back(self) -> None:
        for put_back in reversed(self._undo):
            put_back()
