"""Putting a tap in place and taking it away again, at little cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class StandIn:
    """Stands in for one method of one object, again and again.

    Args:
        owner: An optimizer or a layer. Its own dictionary is afterwards what it was before.
        name: The method.
        seen: Called with ``(original method, *arguments)`` in its place.
    """

    def __init__(self, owner: Any, name: str, seen: Callable[..., Any]) -> None:
        self.alive = False
        self._owner = owner  # held, so that its id stays its own
        self._name = name
        self._own = vars(owner)
        self._previous: Any = None
        self._original: Any = None

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.alive:
                return self._original(*args, **kwargs)
            return seen(self._original, *args, **kwargs)

        self._call = call

    def put_on(self) -> None:
        """Take the place of the method on the instance."""
        self._previous = self._own.get(self._name)
        self._original = getattr(self._owner, self._name)
        self.alive = True
        # Straight into the dictionary: the attribute machinery of Keras would track it.
        self._own[self._name] = self._call

    def take_off(self) -> None:
        """Put back what stood there, unless somebody put their own in place meanwhile."""
        self.alive = False
        if self._own.get(self._name) is self._call:
            if self._previous is None:
                del self._own[self._name]
            else:
                self._own[self._name] = self._previous


class Installed:
    """A tap in place. Entered on every eager step, so a class: a generator takes longer.

    Args:
        tap: Has ``stand_in(optimizer)``, ``tape``, ``probes``, ``activations`` and ``wrapping``.
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
                stand_in = tap.stand_in(optimizer)
                # Or it is: `train_on_batch` in a watched loop; a step counts once.
                if not stand_in.alive:
                    undo.append(stand_in.take_off)
                    stand_in.put_on()
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
