"""Names of variables as the user knows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from keras_gradguard.records import VariableInfo

_AUTOMATIC = re.compile(r"^(sequential|functional|model)(_\d+)?/")


def _snake(name: str) -> str:
    words = re.sub(r"(.)([A-Z][a-z0-9]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()


def automatic_prefixes(models: Iterable[Any]) -> tuple[str, ...]:
    """Return the path prefixes that Keras made up for ``models``, e.g. ``"net_1/"``."""
    found = []
    for model in models:
        name = getattr(model, "name", "")
        made_up = re.escape(_snake(type(model).__name__)) + r"(_\d+)?"
        if name and re.fullmatch(made_up, name):
            found.append(f"{name}/")
    return tuple(found)


def path_of(variable: Any, prefixes: Sequence[str] = ()) -> str:
    """Return a variable's path without the prefix of a model that Keras named by itself.

    Args:
        variable: A Keras variable, a ``tf.Variable`` or anything with a ``name``.
        prefixes: More prefixes to strip, see :func:`automatic_prefixes`.

    Returns:
        For example ``"dense_1/kernel"``.
    """
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
    path = str(path).removesuffix(":0")
    short = _AUTOMATIC.sub("", path)
    for prefix in prefixes:
        if short.startswith(prefix) and len(short) > len(prefix):
            short = short[len(prefix) :]
    return short


def describe(
    variables: Sequence[Any], gradients: Sequence[Any], prefixes: Sequence[str] = ()
) -> tuple[VariableInfo, ...]:
    """Return the fixed facts about each variable; a path met before gets ``#1``, ``#2``.

    Args:
        variables: Keras variables or ``tf.Variable`` objects.
        gradients: Their gradients; only looked at to tell rows from tables.
        prefixes: Prefixes to strip from paths.
    """
    infos: list[VariableInfo] = []
    taken: set[str] = set()
    for variable, gradient in zip(variables, gradients, strict=True):
        plain = path = path_of(variable, prefixes)
        number = 0
        # Somebody may have called a variable "kernel#1" himself.
        while path in taken:
            number += 1
            path = f"{plain}#{number}"
        taken.add(path)
        shape = tuple(int(d) if d is not None else -1 for d in variable.shape)
        dtype = variable.dtype
        infos.append(
            VariableInfo(
                path=path,
                layer=path.rsplit("/", 1)[0] if "/" in path else path,
                shape=shape,
                dtype=str(getattr(dtype, "name", dtype)),
                size=int(np.prod(shape, dtype=np.int64)) if -1 not in shape else -1,
                trainable=bool(getattr(variable, "trainable", True)),
                sparse=type(gradient).__name__ == "IndexedSlices",
                constrained=getattr(variable, "constraint", None) is not None,
            )
        )
    return tuple(infos)
