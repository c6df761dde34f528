"""Makes the layers and losses known to Keras' loader, without importing Keras too early.

``keras.models.load_model`` finds a class only after the module that registers it was imported.
Importing the package must be enough for that; but the command line and the TensorBoard tab must
not import TensorFlow, so the registration waits until somebody imports Keras.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_REGISTERING = ("keras_gradguard.layers", "keras_gradguard.losses")


def register_with_keras() -> None:
    """Register layers and losses now when Keras is there, else right after its import."""
    if hasattr(sys.modules.get("keras"), "layers"):
        _register()
    elif not any(isinstance(finder, _AfterKeras) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterKeras())


def _register() -> None:
    for module in _REGISTERING:
        importlib.import_module(module)


class _AfterKeras(importlib.abc.MetaPathFinder):
    """Steps aside at the import of Keras, and adds the registration to the end of it."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the real spec of Keras with a loader that registers afterwards."""
        del path, target
        if fullname != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(importlib.abc.Loader):
    """Loads Keras by its own loader, then registers."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Let the real loader make the module."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Let the real loader fill the module, then register."""
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader  # what looks for the loader later finds the real one
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register()
