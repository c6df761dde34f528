"""Look at a training step and leave no trace: what Python state is put back afterwards."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.optimizers.base_optimizer import BaseOptimizer


def all_layers(model: Any) -> list[Any]:
    """Return ``model`` and every layer in it, each once (metrics are no layers)."""
    found = list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else [model]
    return list(dict.fromkeys(found))


def all_optimizers(model: Any) -> list[Any]:
    """Return the optimizers that hang on a model as attributes."""
    found = [v for v in vars(model).values() if isinstance(v, BaseOptimizer)]
    inner = [o.inner_optimizer for o in found if hasattr(o, "inner_optimizer")]
    return list(dict.fromkeys([*found, *inner]))


def _containers(value: Any) -> list[Any]:
    """Return the plain containers in which ``value`` keeps its items; none for other values."""
    # TensorFlow's tracking wraps an attribute's dictionary in a proxy and keeps the items
    # of a list beside the list itself.
    if type(value).__name__ == "_DictWrapper":
        value = value.__wrapped__
    found = [value] if isinstance(value, (list, dict, set)) else []
    if isinstance(value, list):
        storage = getattr(value, "_storage", None)
        if isinstance(storage, list):
            found.append(storage)
    return found


def _copy_of(value: Any) -> Any:
    kind: Any = next(k for k in (list, dict, set) if isinstance(value, k))
    return kind(value)


def _put_back(value: Any, saved: Any) -> None:
    # The plain methods of the base classes: Keras' tracked containers would take the
    # refilling for the user's own change and track (or refuse) it once more.
    if isinstance(value, list):
        list.clear(value)
        list.extend(value, saved)
    elif isinstance(value, dict):
        dict.clear(value)
        dict.update(value, saved)
    else:
        set.clear(value)
        set.update(value, saved)


class _Snapshot:
    """The attributes of some objects, with the contents of lists, dicts and sets."""

    def __init__(self, objects: list[Any]) -> None:
        self.saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.containers: list[tuple[Any, Any]] = []
        for item in objects:
            namespace = vars(item)
            self.saved.append((namespace, dict(namespace)))
            for value in namespace.values():
                self.containers += [(c, _copy_of(c)) for c in _containers(value)]
            tracker = namespace.get("_tracker")
            if tracker is not None:
                for ids in tracker.stored_ids.values():
                    self.containers.append((ids, set(ids)))

    def restore(self) -> None:
        for namespace, saved in self.saved:
            for name in [n for n in namespace if n not in saved]:
                del namespace[name]
            namespace.update(saved)
        for value, copy in self.containers:
            _put_back(value, copy)


@contextlib.contextmanager
def untouched(*models: Any, optimizers: tuple[Any, ...] = ()) -> Iterator[None]:
    """Put the Python state of models, optimizers and random generators back afterwards.

    Attributes of every layer and the contents of their lists, dictionaries and sets are
    restored (collected losses, anything a custom ``train_step`` stores on ``self``, layers
    made in ``call``), so are the automatic names and Python's and NumPy's global random
    state. Values of variables are not touched while a graph is traced; for running one, see
    :func:`keras_gradguard.diagnosis.execute.run`.
    """
    objects: dict[int, Any] = {}
    for model in models:
        for item in [*all_layers(model), *all_optimizers(model)]:
            objects[id(item)] = item
            own = [getattr(item, n, None) for n in ("_compile_loss", "_compile_metrics")]
            for part in [*own, *getattr(item, "_metrics", ())]:
                if part is not None:
                    objects[id(part)] = part
    for optimizer in optimizers:
        if optimizer is not None:
            objects[id(optimizer)] = optimizer
    snapshot = _Snapshot(list(objects.values()))
    uids = global_state.get_global_attribute("object_name_uids")
    names = None if uids is None else dict(uids)
    seeds = global_state.get_global_attribute("global_seed_generator")
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's
    try:
        yield
    finally:
        snapshot.restore()
        if uids is not None and names is not None:
            uids.clear()
            uids.update(names)
        global_state.set_global_attribute("global_seed_generator", seeds)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - the user's own generator


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a method of a class for this thread only.

    Args:
        owner: The class that defines the method itself.
        name: The method's name.
        make: Takes the original function and returns the one to call instead.

    Other threads keep getting the original while the block runs.
    """
    original = vars(owner)[name]
    instead = make(original)
    here: int | None = threading.get_ident()

    def method(*args: Any, **kwargs: Any) -> Any:
        chosen = instead if threading.get_ident() == here else original
        return chosen(*args, **kwargs)

    method.__name__ = getattr(original, "__name__", name)
    method.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(owner, name, method)
    try:
        yield
    finally:
        here = None
        # Somebody may have put their own wrapper on top of this one meanwhile: theirs stays,
        # and what it wraps passes every call on from now on.
        if vars(owner).get(name) is method:
            setattr(owner, name, original)


@contextlib.contextmanager
def nothing_applied(
    on_apply: Callable[[Any, Any, Any], None], optimizers: tuple[Any, ...] = ()
) -> Iterator[None]:
    """Make every Keras optimizer's ``apply`` of this thread do nothing but report.

    Args:
        on_apply: Called with the optimizer, the gradients and the variables (or None).
        optimizers: Instances whose ``apply`` may have been replaced (by a tap).
    """
    classes: list[Any] = [BaseOptimizer]
    for kind in classes:
        classes += [c for c in kind.__subclasses__() if c not in classes]

    def instead(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        on_apply(optimizer, grads, trainable_variables)

    with contextlib.ExitStack() as stack:
        for kind in classes:
            if "apply" in vars(kind):
                stack.enter_context(replaced(kind, "apply", lambda _: instead))
        tapped = [(vars(o), vars(o)["apply"]) for o in optimizers if "apply" in vars(o)]
        for namespace, _ in tapped:
            del namespace["apply"]
        try:
            yield
        finally:
            for namespace, tap in tapped:
                namespace["apply"] = tap


def is_stock_train_step(model: Any) -> bool:
    """Return True when the model trains with the ``train_step`` that Keras ships."""
    own = getattr(type(model), "train_step", None)
    stock = getattr(keras.Model, "train_step", None)
    return own is stock and "train_step" not in vars(model)
