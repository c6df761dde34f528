"""GradientGuard: the callback for ``fit`` and the watcher of custom loops. It only connects."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_gradguard.findings import Finding
from keras_gradguard.fitting import FitSession
from keras_gradguard.loop import LoopSession
from keras_gradguard.notices import Console
from keras_gradguard.plotting import flow_figure
from keras_gradguard.policy import Policy
from keras_gradguard.session import Writer
from keras_gradguard.settings import Settings
from keras_gradguard.taps.trainer import fit_is_running


class GradientGuard(keras.callbacks.Callback):
    """Watches the true gradients of a training run and raises when it cannot learn.

    In ``fit`` it is a callback. In a custom loop it is used with :meth:`watch` and
    :meth:`step`, or gradients are handed over with :meth:`check`. Training is bit for bit
    what it is without the guard in graph and eager mode.

    Args:
        log_dir: Directory for TensorBoard; the guard writes into its own run
            ``<log_dir>/gradguard``. None writes nothing. Defaults to ``"logs"``.
        policy: What to do about each symptom, see :class:`Policy`. Defaults to
            ``Policy()``.
        sample_every: Full statistics (histogram, largest entry, real update) every so many
            optimizer steps. Norms are recorded on every step. Defaults to 50.
        check_every: Steps between two looks at the recorded numbers; a fault raises at most
            so many steps late in graph mode, at once in eager mode. Defaults to 10.
        histograms: Write gradient histograms. Defaults to True.
        images: Also write a picture of the gradient flow for the Images tab with each sample.
            Defaults to False.
        activations: Also watch what each layer puts out, on sampled steps: histograms, shares of
            zeros, of saturated entries and of units that were dead for every example of the
            last samples go to TensorBoard and into the diagnosis. Not with several replicas.
            Defaults to False.
        max_log_bytes: Bytes that the event files of one run may take, at least 1 MiB; a longer
            run keeps fewer and fewer of its steps, every step is judged all the same. None for
            no limit. Defaults to 2 GiB.
        skip_non_finite: Leave weights and optimizer state as they were on a step whose
            gradients hold a NaN or Inf; the first is reported as a warning, all are counted
            in ``guard.steps_skipped``. Defaults to False.
        diagnose: Look for the cause of what is found. Defaults to True.
        on_finding: Called with each :class:`Finding` that is reported, before it raises or
            warns. Defaults to None.

    Raises:
        ValueError: An argument has a value that cannot work.

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> guard = GradientGuard(log_dir=None)
    >>> x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    >>> _ = model.fit(x, y, callbacks=[guard], verbose=0)
    >>> guard.findings
    ()
    """

    # Nothing here runs in `on_train_batch_end`, so Keras may keep its callbacks asynchronous.
    async_safe = True

    def __init__(
        self,
        log_dir: str | None = "logs",
        policy: Policy | None = None,
        sample_every: int = 50,
        check_every: int = 10,
        histograms: bool = True,
        images: bool = False,
        activations: bool = False,
        max_log_bytes: int | None = 1 << 31,
        skip_non_finite: bool = False,
        diagnose: bool = True,
        on_finding: Callable[[Finding], None] | None = None,
    ) -> None:
        super().__init__()
        self.settings = Settings(
            log_dir=log_dir,
            policy=Policy() if policy is None else policy,
            sample_every=sample_every,
            check_every=check_every,
            histograms=histograms,
            images=images,
            activations=activations,
            max_log_bytes=max_log_bytes,
            skip_non_finite=skip_non_finite,
            diagnose=diagnose,
            on_finding=on_finding,
        )
        self._findings: list[Finding] = []
        self._fits: list[FitSession] = []
        self._finished: list[FitSession] = []
        self._sessions: list[FitSession | LoopSession] = []
        self._loop: LoopSession | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything found in this run, warnings too; the next run starts anew."""
        return tuple(self._findings)

    @property
    def steps_seen(self) -> int:
        """Optimizer steps recorded in this run, over all optimizers."""
        return sum(s.observer.run.steps_seen for s in self._sessions)

    @property
    def steps_skipped(self) -> int:
        """Steps of this run that were left out for a NaN or Inf in a gradient."""
        return sum(s.observer.run.steps_skipped for s in self._sessions)

    def plot(self, figure: Any = None) -> Any:
        """Draw the gradient flow of this run with matplotlib.

        A row is a variable, a column a step (or several, in a long run: then their largest).
        Exact zeros are red, NaN and Inf black, gradients that are None grey; steps with a
        finding are marked. Beside it stands each variable's usual norm.

        Args:
            figure: A matplotlib figure to draw into, e.g. ``plt.figure()``. Defaults to a new
                one, which a notebook shows and ``.savefig("flow.png")`` writes.

        Returns:
            The ``matplotlib.figure.Figure``.

        Raises:
            ImportError: matplotlib is not installed (``pip install 'keras-gradguard[plot]'``).
            ValueError: No step was recorded yet.

        Example:

        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> guard = GradientGuard(log_dir=None)
        >>> x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
        >>> _ = model.fit(x, y, callbacks=[guard], verbose=0)
        >>> figure = guard.plot()
        """
        panels = [panel for s in self._sessions for panel in s.observer.run.panels()]
        if not panels:
            raise ValueError(
                "guard.plot() needs a run with at least one recorded optimizer step. Received: "
                f"{self.steps_seen} steps. Train with this guard first."
            )
        return flow_figure(panels, figure)

    def _writer(self) -> Writer | None:
        settings = self.settings
        if settings.log_dir is None:
            return None
        # TensorBoard is imported when something is to be written, not with the package.
        from keras_gradguard.tensorboard.events import EventWriter

        return EventWriter(
            settings.log_dir,
            histograms=settings.histograms,
            images=settings.images,
            max_bytes=settings.max_log_bytes,
        )

    # ------------------------------------------------------------------ fit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Install the tap; refuse a model that cannot train at all."""
        del logs
        model = self._model
        here = threading.get_ident()
        for other in list(self._fits):
            running = fit_is_running(other.model, other.thread)
            if running and other.thread == here and other.model is not model:
                continue  # this fit runs inside that one
            if running and other.thread != here:
                raise RuntimeError(
                    f"This GradientGuard is watching the training of '{other.model.name}' in "
                    "another thread. Give each training that runs at the same time a guard of "
                    f"its own. Received: a second fit, of '{model.name}'."
                )
            # An earlier fit was left by an exception that no hook told about.
            other.finish()
            if other in self._fits:
                self._fits.remove(other)
        if not self._fits:
            self._findings, self._sessions = [], []
        reuse = next((f for f in self._finished if f.model is model), None)
        # The same model goes on in the same run directory; another one gets its own.
        writer = self._writer() if reuse is None else reuse.observer.writer
        console = Console(
            (self.params or {}).get("verbose", 0),
            interactive=keras.config.is_interactive_logging_enabled(),
        )
        session = FitSession(
            model, self.settings, self._findings, writer, console=console, reuse=reuse
        )
        self._fits.append(session)
        self._sessions.append(session)
        session.on_close = self._closed
        session.begin()

    def _closed(self, session: FitSession) -> None:
        if session in self._fits:
            self._fits.remove(session)
        kept = [f for f in self._finished if f.model is not session.model]
        # A few guarded train functions are kept with their traces, so that `fit` called again
        # and again does not trace again and again.
        self._finished = [*kept, session][-4:]

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read what the steps so far recorded, and raise if there is reason to."""
        del batch, logs
        if self._fits:
            self._fits[-1].before_batch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Look at the rest of the epoch and flush."""
        del epoch, logs
        if self._fits:
            self._fits[-1].after_epoch()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Put everything back."""
        del logs
        if self._fits:
            self._fits[-1].end()

    # ------------------------------------------------------------------ custom loops

    @contextlib.contextmanager
    def watch(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        loss: Any = None,
    ) -> Iterator[GradientGuard]:
        """Watch a custom training loop for the time of a ``with`` block.

        A ``@tf.function`` step has to be traced (called for the first time) inside the block.

        Args:
            model: A Keras model, or a list of them.
            optimizer: A Keras optimizer, or a list of them. Defaults to the models' own.
            loss: The loss function ``loss(y_true, y_pred)``; makes explanations sharper.

        Yields:
            The guard itself.

        Raises:
            GradientGuardError: On a finding whose policy is ``"raise"``.
            ValueError: Nothing to watch.

        Example:

        >>> import keras, tensorflow as tf
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> optimizer, guard = keras.optimizers.SGD(0.1), GradientGuard(log_dir=None)
        >>> x = tf.ones((8, 4))
        >>> with guard.watch(model, optimizer):
        ...     for _ in range(3):
        ...         with tf.GradientTape() as tape:
        ...             loss = tf.reduce_mean(tf.square(model(x) - 1.0))
        ...         grads = tape.gradient(loss, model.trainable_variables)
        ...         _ = optimizer.apply_gradients(zip(grads, model.trainable_variables))
        ...         guard.step(loss)
        """
        models = _as_list(model)
        optimizers = _as_list(optimizer)
        if not models:
            raise ValueError(
                "`model` must be a Keras model, or a list of them. "
                f"Received: {model!r}. Without a model hand the gradients over with "
                "guard.check(grads, variables, loss=loss)."
            )
        if self._loop is not None and self._loop.watching:
            raise ValueError(
                "This guard is already watching a loop. Pass lists to one `watch(models, "
                "optimizers)`, or use a second GradientGuard."
            )
        self._findings = []
        before = self._loop
        same = before is not None and [id(m) for m in before.models] == [id(m) for m in models]
        writer = before.observer.writer if before is not None and same else self._writer()
        self._loop = LoopSession(models, optimizers, loss, self.settings, self._findings, writer)
        self._sessions = [self._loop]
        with self._loop.watched():
            yield self

    def step(self, loss: Any = None) -> None:
        """Say that a batch of a custom loop ends here.

        Args:
            loss: The loss of this batch, a scalar tensor or a number. Needed only where the
                guard cannot see ``tape.gradient``.

        Raises:
            GradientGuardError: On a finding whose policy is ``"raise"``.
            RuntimeError: Neither inside :meth:`watch` nor after :meth:`check`.
        """
        if self._loop is None:
            raise RuntimeError(
                "`guard.step()` ends a batch of a watched loop: call it inside "
                "`with guard.watch(model, optimizer):`, or after `guard.check(...)`."
            )
        self._loop.step(loss)

    def check(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        *,
        loss: Any = None,
        step: int | None = None,
    ) -> None:
        """Judge gradients that are handed over, with or without :meth:`watch`.

        Inside a ``@tf.function`` being traced the numbers are recorded in the graph, and the
        alarm comes from the next :meth:`step` or from leaving :meth:`watch`.

        Args:
            grads: What ``tape.gradient(loss, variables)`` returned: tensors,
                ``tf.IndexedSlices`` or None, one a variable.
            variables: The variables, in the same order.
            loss: The loss of this batch. Without it a zero gradient only warns.
            step: Your own step number, for the messages. Defaults to counting from 0.

        Raises:
            GradientGuardError: On a finding whose policy is ``"raise"``.
            ValueError: The lists differ in length or are empty.
        """
        grads, variables = list(grads), list(variables)
        if not variables or len(grads) != len(variables):
            raise ValueError(
                "`grads` and `variables` must be lists of the same length, at least 1, as "
                "`tape.gradient(loss, variables)` returns them. Received: "
                f"{len(grads)} gradients for {len(variables)} variables."
            )
        if self._loop is None:
            self._findings = []
            self._loop = LoopSession([], [], None, self.settings, self._findings, self._writer())
            self._sessions = [self._loop]
        self._loop.check(grads, variables, loss, step)


GradientGuardCallback = GradientGuard


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
