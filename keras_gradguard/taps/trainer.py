"""The train function of a guarded ``fit``: traced with the taps in place, and gone afterwards."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_gradguard.taps import optimizers, replicas
from keras_gradguard.taps.keeper import watching_step
from keras_gradguard.taps.tensorflow import TensorFlowTap

_LOOK_AGAIN = 64  # calls of the train function
# How data running out looks: part of every epoch, no error.
_END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)


class Attachment:
    """One guard's tap on one guarded train function.

    Args:
        tap: What records.
        on_error: Called with the exception when a training step fails, so that everything is
            put back even though Keras never calls ``on_train_end`` then.
    """

    def __init__(self, tap: TensorFlowTap, on_error: Callable[[BaseException], None]) -> None:
        self.tap = tap
        self.on_error = on_error
        self.armed = False
        self.always = False


class GuardedTrainFunction:
    """Stands in for ``model.train_function`` while a guard is installed.

    Every call has to be announced (:meth:`arm`) by the guard's own hook. A call that was not
    announced comes from a later ``fit`` without the guard, after an exception that no hook
    told about: then the plain function is put back and does the work.

    Args:
        model: The model.
        plain: The train function that Keras made, with its traces.
    """

    def __init__(self, model: Any, plain: Any) -> None:
        self.model = model
        self.plain = plain
        self.attachments: list[Attachment] = []
        self.iterator: Any = None
        self._inner: Any = None
        self._step_installs = False
        self._traced_for: list[TensorFlowTap] = []
        self._seen = (0, 0)
        self._calls = 0
        self._found: list[Any] = []

    def stands_in_for(self, function: Any) -> bool:
        """Return True when ``function`` is the train function whose place it takes.

        It is not after ``compile``: there may be another optimizer then.
        """
        if isinstance(function, GuardedTrainFunction):
            function = function.plain
        return function is not None and function is self.plain

    def attach(self, attachment: Attachment) -> None:
        """Add a tap; the step is traced anew unless it was traced with the very same taps."""
        self.attachments.append(attachment)

    def detach(self, attachment: Attachment) -> None:
        """Remove a tap; the last one puts the plain train function back."""
        if attachment in self.attachments:
            self.attachments.remove(attachment)
        self.iterator = None
        if not self.attachments and self.model.train_function is self:
            self.model.train_function = self.plain

    def __call__(self, iterator: Any) -> Any:
        """Run one call of the train function with the taps in place."""
        awake = [a for a in self.attachments if a.armed or a.always]
        if not awake:
            stale, self.attachments = self.attachments, []
            if self.model.train_function is self:
                self.model.train_function = self.plain
            for attachment in stale:
                attachment.on_error(RuntimeError("training was left by an exception"))
            return self.plain(iterator)
        self.iterator = iterator
        inner = self._function()
        try:
            if self._step_installs:
                result = inner(iterator)
            else:
                with self._installed():
                    result = inner(iterator)
        except _END_OF_DATA:
            raise
        except BaseException as error:
            for attachment in list(self.attachments):
                attachment.on_error(error)
            raise
        finally:
            for attachment in awake:
                attachment.armed = False
        return result

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """Put the taps in place that are not there already."""
        with contextlib.ExitStack() as stack:
            for tap in [a.tap for a in self.attachments if not a.tap.wrapping]:
                stack.enter_context(tap.installed(self._targets()))
            yield

    @contextlib.contextmanager
    def _around_step(self, data: Any) -> Iterator[None]:
        """What happens around ``train_step``, when it is traced and when it runs eagerly.

        A step that passed here once puts the taps in place itself from then on: a call of the
        train function that traces nothing then costs nothing. Not with several replicas, which
        run their steps in threads at the same time, nor where a model makes its own train
        function, which may call the optimizer outside ``train_step``.
        """
        self._step_installs = makes_stock_function(self.model) and not replicas.inside()
        keepers = [k for a in self.attachments for k in a.tap.keepers]
        for keeper in keepers:
            keeper.see(data)
        try:
            with self._installed():
                yield
        finally:
            for keeper in keepers:
                keeper.forget()

    def _targets(self) -> list[Any]:
        """Return the model's optimizers, looked for anew now and then and when the model changed.

        A traced step calls no ``apply``, so looking into every attribute on every step would be
        for nothing.
        """
        model = self.model
        seen = (id(getattr(model, "optimizer", None)), len(vars(model)))
        self._calls += 1
        if seen != self._seen or self._calls >= _LOOK_AGAIN or getattr(model, "run_eagerly", True):
            self._found = optimizers.of_model(model)
            self._seen, self._calls = seen, 0
        return self._found

    def _build_optimizer(self) -> None:
        """Build the optimizer right before the first trace, as its first ``apply`` would.

        Inside the trace XLA could not lift the variables out of the conditions of the tap, and
        a loss-scale optimizer would be traced with its initial scale as a constant.
        """
        model = self.model
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None or optimizer.built or not model.built or not has_stock_step(model):
            return
        if optimizers.builds_from_weights(optimizer):
            return
        if model.trainable_variables:
            with model.distribute_strategy.scope():
                optimizer.build(model.trainable_variables)

    def refresh(self) -> None:
        """Take over a train function that somebody made anew in the middle of training."""
        if self.model.train_function is not self:
            self.plain = self.model.train_function
            self._inner = None
            self.model.train_function = self

    def _function(self) -> Any:
        wanted = [a.tap for a in self.attachments]
        same = len(wanted) == len(self._traced_for) and all(
            a is b for a, b in zip(wanted, self._traced_for, strict=True)
        )
        if self._inner is None or not same:
            self._step_installs = False
            with watching_step(self.model, self._around_step):
                self.model.make_train_function(force=True)
            self._inner = self.model.train_function
            self.model.train_function = self
            self._traced_for = wanted
            self._build_optimizer()
        return self._inner


def has_stock_step(model: Any) -> bool:
    """Return True when the model trains by Keras' own ``train_step``."""
    return str(type(model).train_step.__module__).startswith("keras.")


def makes_stock_function(model: Any) -> bool:
    """Return True when Keras makes the model's train function, around ``train_step``."""
    return str(type(model).make_train_function.__module__).startswith("keras.")


def class_weight_of_fit(model: Any) -> dict[int, float] | None:
    """Return the ``class_weight`` that the running ``fit`` of ``model`` was given.

    Keras folds it into the sample weights before the step sees it, and no callback is told; it
    is read from the frame of ``fit``, on whose stack the callback runs.
    """
    frame = _frame_of_fit(model, sys._getframe(1))
    found = None if frame is None else frame.f_locals.get("class_weight")
    return dict(found) if isinstance(found, dict) else None


def fit_is_running(model: Any, thread: int) -> bool:
    """Return True while ``fit`` of ``model`` runs in a thread.

    Args:
        model: A Keras model.
        thread: The thread's number, see ``threading.get_ident``.
    """
    return _frame_of_fit(model, sys._current_frames().get(thread)) is not None


def _frame_of_fit(model: Any, frame: Any) -> Any:
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            return frame
        frame = frame.f_back
    return None


def guard_train_function(
    model: Any, attachment: Attachment, reuse: GuardedTrainFunction | None = None
) -> GuardedTrainFunction:
    """Put a guarded train function in place of the model's, or join the one that is there.

    Args:
        model: A compiled Keras model.
        attachment: The tap to add.
        reuse: A guarded function of an earlier run; taken with its traces when the model's
            plain train function is still the one it stands in for.

    Returns:
        The guarded function, now ``model.train_function``.
    """
    if model.train_function is None:
        model.make_train_function()
    current = model.train_function
    if isinstance(current, GuardedTrainFunction):
        guarded = current
    elif reuse is not None and reuse.model is model and reuse.plain is current:
        guarded = reuse
    else:
        guarded = GuardedTrainFunction(model, current)
    guarded.attach(attachment)
    model.train_function = guarded
    return guarded
