"""Hooks on Keras' classes, for a script that was not written for a guard."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function


class Listener(Protocol):
    """What a hooked program tells."""

    def callbacks_for_fit(self, model: Any, given: list[Any]) -> list[Any]:
        """A model is about to be fitted with these callbacks; return those to add."""

    def before_batch_training(self, model: Any) -> None:
        """``train_on_batch`` of a model is about to run."""

    def before_new_function(self) -> None:
        """A ``tf.function`` is about to be called by eager code for the first time."""

    def before_untapped_apply(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """An optimizer is about to update variables, and nobody watches it.

        A tap that is installed on the instance now sees this very call of ``apply``.
        """

    def applied(self, optimizer: Any) -> None:
        """An optimizer updated its variables, in a trace or eagerly."""

    def after_function(self) -> None:
        """A ``tf.function`` returned to eager code."""


class Hooks:
    """Hooks on ``fit``, ``train_on_batch``, ``apply`` and calls of ``tf.function``.

    Args:
        listener: Who is told.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._local = threading.local()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizers: list[weakref.ref[Any]] = []

    def optimizers(self) -> list[Any]:
        """Return the live optimizers made since the hooks are there, inner ones left out."""
        live = [o for o in (ref() for ref in self._optimizers) if o is not None]
        inner = {id(getattr(o, "inner_optimizer", None)) for o in live}
        return [o for o in live if id(o) not in inner]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Hook the classes for the time of a ``with`` block."""
        base = _owner(keras.optimizers.Optimizer, "apply")
        scaling = keras.optimizers.LossScaleOptimizer
        function = polymorphic_function.Function
        with contextlib.ExitStack() as stack:
            for owner, name, wrap in (
                (keras.Model, "fit", self._fit),
                (keras.Model, "train_on_batch", self._train_on_batch),
                (base, "__init__", self._init),
                (base, "apply", self._apply),
                (scaling, "apply", self._apply),
                (function, "__call__", self._call),
            ):
                stack.enter_context(_replaced(owner, name, wrap(getattr(owner, name))))
            yield

    def _fit(self, plain: Any) -> Any:
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(model, *args, **kwargs)
            given = bound.arguments.get("callbacks")
            if isinstance(given, keras.callbacks.CallbackList):
                for extra in self._listener.callbacks_for_fit(model, list(given.callbacks)):
                    extra.set_model(model)
                    given.append(extra)
            else:
                listed = keras.tree.flatten(given) if given else []
                extra = self._listener.callbacks_for_fit(model, listed)
                bound.arguments["callbacks"] = [*listed, *extra]
            with self._inside("keras"):
                return plain(*bound.args, **bound.kwargs)

        return fit

    def _train_on_batch(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def train_on_batch(model: Any, *args: Any, **kwargs: Any) -> Any:
            self._listener.before_batch_training(model)
            return plain(model, *args, **kwargs)

        return train_on_batch

    def _init(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            plain(optimizer, *args, **kwargs)
            self._optimizers.append(weakref.ref(optimizer))

        return init

    def _apply(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if self._depth("apply"):
                # A loss-scale optimizer calls its inner one: one step, not two.
                return plain(optimizer, grads, trainable_variables)
            if "apply" not in vars(optimizer):
                grads = list(grads)
                known = optimizer._trainable_variables
                variables = list(known if trainable_variables is None else trainable_variables)
                passed = None if trainable_variables is None else variables
                self._listener.before_untapped_apply(optimizer, variables)
                tapped = vars(optimizer).get("apply")
                if tapped is not None:
                    return tapped(grads, passed)
                trainable_variables = passed
            with self._inside("apply"):
                result = plain(optimizer, grads, trainable_variables)
            self._listener.applied(optimizer)
            return result

        return apply

    def _call(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth("keras") or not tf.executing_eagerly():
                return plain(function, *args, **kwargs)
            if function not in self._known:
                self._known.add(function)
                self._listener.before_new_function()
            result = plain(function, *args, **kwargs)
            self._listener.after_function()
            return result

        return call

    def _depth(self, name: str) -> int:
        return getattr(self._local, name, 0)

    @contextlib.contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        before = self._depth(name)
        setattr(self._local, name, before + 1)
        try:
            yield
        finally:
            setattr(self._local, name, before)


def eager() -> bool:
    """Return True outside a trace."""
    return bool(tf.executing_eagerly())


def live_models() -> list[Any]:
    """Return all models there are that have weights to train, parts of others left out."""
    # Not isinstance: it would touch `__class__` of other people's proxies.
    found = [m for m in gc.get_objects() if issubclass(type(m), keras.Model)]
    found = [m for m in found if m.trainable_variables]
    sets = [{id(v) for v in m.variables} for m in found]
    return [m for m, own in zip(found, sets, strict=True) if not any(own < other for other in sets)]


def models_of(variables: Sequence[Any]) -> list[Any]:
    """Return the model that trains these variables, found among all live objects.

    Args:
        variables: What an optimizer updates.

    Returns:
        The smallest models that together hold most of them; often one, possibly none.
    """
    wanted = {id(v) for v in variables}
    held: list[tuple[set[int], int, Any]] = []
    for thing in gc.get_objects():
        # Not isinstance: it would touch `__class__` of other people's proxies.
        if issubclass(type(thing), keras.Model):
            own = {id(v) for v in thing.trainable_variables}
            if own & wanted:
                held.append((own & wanted, len(own), thing))
    held.sort(key=lambda item: (-len(item[0]), item[1]))
    found: list[Any] = []
    for covers, _, model in held:
        if covers & wanted:
            found.append(model)
            wanted -= covers
    return found


def _owner(kind: type, name: str) -> type:
    return next(base for base in kind.__mro__ if name in vars(base))


@contextlib.contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
