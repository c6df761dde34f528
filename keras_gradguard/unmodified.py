"""Runs a script that knows nothing of a guard, with every training in it guarded."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from keras_gradguard.findings import Finding


class Guards:
    """Hands a guard to every ``fit`` and every optimizer of a running program.

    Args:
        **settings: Arguments of :class:`keras_gradguard.GradientGuard`.
    """

    def __init__(self, **settings: Any) -> None:
        self.findings: list[Finding] = []
        self._settings = settings
        self._said: set[tuple[str, tuple[str, ...]]] = set()
        self._watches: list[_Watch] = []
        self._hooks: Any = None
        self._busy = False

    def install(self, stack: contextlib.ExitStack) -> None:
        """Hook Keras until ``stack`` is closed. Keras is imported by this."""
        from keras_gradguard.taps.hooks import Hooks

        stack.push(self._leave)
        self._hooks = Hooks(self)
        stack.enter_context(self._hooks.installed())

    def _leave(self, *error: Any) -> None:
        with contextlib.ExitStack() as stack:
            for watch in self._watches:
                stack.push(watch.entered.__exit__)
            self._watches = []
            if error[1] is not None:
                # The watches see the script's exception: then they raise nothing over it.
                raise error[1]

    def _make(self) -> Any:
        from keras_gradguard.guard import GradientGuard

        return GradientGuard(on_finding=self._heard, **self._settings)

    def _heard(self, finding: Finding) -> None:
        key = (finding.symptom, finding.where)
        if key not in self._said:
            self._said.add(key)
            self.findings.append(finding)

    def _watch(self, models: list[Any], optimizers: list[Any]) -> None:
        guard = self._make()
        watch = _Watch(guard, optimizers)
        watch.entered.enter_context(guard.watch(models, optimizers))
        self._watches.append(watch)

    def _watched(self, optimizer: Any) -> _Watch | None:
        return next((w for w in self._watches if w.has(optimizer)), None)

    def callbacks_for_fit(self, model: Any, given: list[Any]) -> list[Any]:
        """Add a guard, unless the script has one. It takes over from a watch of the loop."""
        from keras_gradguard.guard import GradientGuard

        watch = self._watched(getattr(model, "optimizer", None))
        if watch is not None:
            self._watches.remove(watch)
            watch.entered.close()
        return [] if any(isinstance(c, GradientGuard) for c in given) else [self._make()]

    def before_batch_training(self, model: Any) -> None:
        """Watch a model that is trained batch by batch."""
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and self._watched(optimizer) is None:
            self._watch([model], [optimizer])

    def before_new_function(self) -> None:
        """Watch every optimizer that is not yet watched: the function may train with it.

        It has to be done before the trace, and only the trace shows which optimizer it is.
        """
        from keras_gradguard.taps.hooks import live_models

        # Those that have an `apply` of their own are watched by a guard of the script's.
        free = [
            o
            for o in self._hooks.optimizers()
            if self._watched(o) is None and "apply" not in vars(o)
        ]
        models = live_models() if free else []
        if models:
            self._watch(models, free)

    def before_untapped_apply(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Watch the optimizer of an eager loop, and the models it trains."""
        from keras_gradguard.taps.hooks import eager, models_of

        # A trace that has begun is too late; plain variables without a model leave nothing
        # to explain with.
        models = models_of(variables) if eager() else []
        if models and self._watched(optimizer) is None:
            self._watch(models, [optimizer])

    def applied(self, optimizer: Any) -> None:
        """Note that an optimizer works: from now on there is something to look at."""
        watch = self._watched(optimizer)
        if watch is not None:
            watch.applied = True

    def after_function(self) -> None:
        """Look at the numbers now and then."""
        if self._busy:
            # The guard's own work may call a tf.function, too.
            return
        self._busy = True
        try:
            for watch in self._watches:
                if watch.applied:
                    watch.guard.step()
        finally:
            self._busy = False


class _Watch:
    """A guard, the optimizers it watches, and whether one of them was ever applied."""

    def __init__(self, guard: Any, optimizers: list[Any]) -> None:
        self.guard = guard
        self.applied = False
        self.entered = contextlib.ExitStack()
        self._optimizers = optimizers

    def has(self, optimizer: Any) -> bool:
        """Return True when the optimizer is one of those watched."""
        return any(known is optimizer for known in self._optimizers)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function right after a module was imported for the first time.

    Keras must not be imported before the script does it: a script may set KERAS_BACKEND or
    CUDA_VISIBLE_DEVICES in its first lines.
    """

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self._module = module
        self._then = then
        self._busy = False

    def withdraw(self) -> bool:
        """Stop waiting; return False when that had been done before."""
        if self not in sys.meta_path:
            return False
        sys.meta_path.remove(self)
        return True

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname != self._module or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module
        then, finder = self._then, self

        def exec_module(module: types.ModuleType) -> None:
            load(module)
            if finder.withdraw():
                then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[types.ModuleType]:
    """Make the interpreter look as if it had been started with this script."""
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    before = sys.argv, sys.path[:], sys.modules.get("__main__")
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    # Worker processes that are spawned look here for the file to import.
    sys.modules["__main__"] = main
    try:
        yield main
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        if before[2] is not None:
            sys.modules["__main__"] = before[2]


def run_script(script: Path, arguments: Sequence[str], guards: Guards) -> None:
    """Run a Python file as ``python script arguments…`` would, with every training guarded.

    Args:
        script: The file.
        arguments: Its command line.
        guards: Hands out the guards and collects the findings.

    Raises:
        GradientGuardError: A finding ended the script.
        SystemExit: The script called ``sys.exit``.
        BaseException: Whatever else the script raised.
    """
    with io.open_code(str(script)) as file:
        code = compile(file.read(), str(script), "exec", dont_inherit=True)
    ended: SystemExit | None = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(_as_main(script, arguments))
        if "keras" in sys.modules:
            guards.install(stack)
        else:
            finder = _AfterImport("keras", lambda: guards.install(stack))
            sys.meta_path.insert(0, finder)
            stack.callback(finder.withdraw)
        try:
            exec(code, sys.modules["__main__"].__dict__)
        except SystemExit as stop:
            # A way to end, not a failure: what was recorded last is still looked at.
            ended = stop
    if ended is not None:
        raise ended
