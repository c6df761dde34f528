"""One watched custom loop, or gradients handed over by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from keras_gradguard.explaining import Explainer
from keras_gradguard.findings import Finding
from keras_gradguard.layers import logits_mismatch
from keras_gradguard.observer import Observer, StillWeights, apply_missing, unfit_loss
from keras_gradguard.session import Writer
from keras_gradguard.settings import Settings
from keras_gradguard.taps import optimizers, replicas
from keras_gradguard.taps.base import Cadence
from keras_gradguard.taps.keeper import watching_calls
from keras_gradguard.taps.losscall import LossCalls
from keras_gradguard.taps.tensorflow import executing_eagerly as tf_executing_eagerly
from keras_gradguard.taps.trainer import Attachment, guard_train_function

_LISTENS = 3


class LoopSession:
    """Watches optimizers and models of a loop that the user wrote.

    Args:
        models: Keras models.
        optimizers_: Keras optimizers; empty takes the models' own.
        loss: The loss function, or None.
        settings: The guard's settings.
        findings: The list that findings are appended to.
        writer: Where to write, or None.
    """

    def __init__(
        self,
        models: Sequence[Any],
        optimizers_: Sequence[Any],
        loss: Any,
        settings: Settings,
        findings: list[Finding],
        writer: Writer | None,
    ) -> None:
        self.models = list(models)
        self.settings = settings
        self.watching = False
        self.optimizers = _checked(self.models, list(optimizers_))
        cadence = Cadence(
            sample_every=settings.sample_every,
            ring=8 * settings.check_every,
            slots=4 * settings.check_every,
            dense=2 * settings.policy.patience,
            skip_non_finite=settings.skip_non_finite,
        )
        self.explainer = Explainer(
            settings,
            mode="loop" if models else "check",
            model=self.models[0] if self.models else None,
            optimizer=self.optimizers[0] if self.optimizers else None,
            partners=tuple(self.models[1:]),
            loss=loss,
        )
        replicas.refuse_parameter_server(self.models)
        if not all(replicas.is_chief(model) for model in self.models):
            writer = None
        self.observer = Observer(self.models, settings, findings, writer, cadence, self.explainer)
        self.explainer.tap = self.observer.tap
        self.explainer.activations = self.observer.activations
        self._batches = 0
        self._checks = 0
        self._unread = 0
        self._still: StillWeights | None = None
        self._told = False
        self._ears: contextlib.ExitStack | None = None
        self._recorder: Any = None
        self._calls = LossCalls(None)
        self._steps = 0
        self._held: list[Finding] = []
        self._heard = 0
        self.observer.on_step = self._step_seen

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Install everything for the time of a ``with`` block."""
        self.watching = True
        attachments = []
        failed = True
        try:
            for model in self.models:
                mismatch = logits_mismatch(model, self.explainer.loss)
                if mismatch is not None:
                    self.observer.run.report(unfit_loss(mismatch))
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.observer.tap.installed(self.optimizers))
                keeper = self.observer.tap.keepers[0]
                for model in self.models[:1]:
                    stack.enter_context(watching_calls(model, keeper))
                stack.callback(self._hear)
                self._listen()
                for model in self.models:
                    if getattr(model, "compiled", False):
                        attachment = Attachment(self.observer.tap, _leave_to_caller)
                        attachment.always = True
                        attachments.append((guard_train_function(model, attachment), attachment))
                yield
                failed = False
                self.observer.judge()
        finally:
            for guarded, attachment in attachments:
                guarded.detach(attachment)
            if failed:
                # The loop's own exception is on its way: record, but raise nothing over it.
                self.observer.drain()
            self.watching = False
            self._still = None
            self.explainer.release()
            self.observer.close()

    # The ops of a step are noted while the loop runs it eagerly: the first step, and one after
    # a step whose gradients looked wrong. A loop is arbitrary Python; it cannot be run again.

    def _listen(self) -> None:
        if self._ears is not None or self._heard >= _LISTENS or not self.settings.diagnose:
            return
        if not tf_executing_eagerly():
            return
        from keras_gradguard.diagnosis.eager import EagerRecorder

        # The stack outlives this call: it is closed by `_hear`, in the middle of the step.
        ears = contextlib.ExitStack()
        self._recorder = ears.enter_context(EagerRecorder())
        self._calls = LossCalls(self.explainer.loss)
        ears.enter_context(self._calls.watched())
        self._ears = ears
        self._heard += 1

    def _hear(self) -> None:
        if self._ears is None:
            return
        if tf_executing_eagerly():
            ears, self._ears = self._ears, None
            ears.close()
        # In a trace they stay on: another optimizer's tape may come in the same step.
        recording = self._recorder.recording
        for model in self.models:
            recording.know(model.variables)
        self.explainer.recording = recording
        if self._calls.arguments is not None:
            self.explainer.hear(self._calls.arguments)

    def _step_seen(self, suspicious: bool) -> None:
        """Called twice a step: before it is judged, and after, when nothing was raised."""
        if suspicious:
            self._listen()
            return
        self._hear()
        self._steps += 1
        if self._steps == 1:
            self._held = list(self.explainer.preflight_loop())
        else:
            self._report_held()

    def _report_held(self) -> None:
        """Report what does not fit together: warnings once the first step is done without harm.

        What makes training impossible waits for the symptom it leads to, which names the same
        cause with the damage in numbers.
        """
        late = self._steps > self.settings.policy.layer_patience
        due = [f for f in self._held if late or f.severity != "raise"]
        self._held = [f for f in self._held if f not in due]
        for finding in due:
            self.observer.run.report(finding.replace(step=self._steps - 1, first_step=0))

    def step(self, loss: Any) -> None:
        """End a batch: look at the numbers when enough have gathered."""
        self._hear()  # before anything here reads a variable
        self._batches += 1
        self._unread += 1
        for channel in self.observer.tap.channels.values():
            channel.note_loss(loss)
        if self._unread >= self.settings.check_every:
            self._unread = 0
            self.observer.judge(final=False)
        self._look_for_apply()

    def check(
        self, grads: Sequence[Any], variables: Sequence[Any], loss: Any, step: int | None
    ) -> None:
        """Judge gradients that are handed over."""
        self.observer.tap.check(grads, variables, loss, step)
        if tf_executing_eagerly():
            self._checks += 1
            self._look_for_apply()

    def _look_for_apply(self) -> None:
        patience = self.settings.policy.patience
        tap = self.observer.tap
        # Gradients that were handed over make a channel, but they are no step of an optimizer.
        if tap.seen or (tap.channels and not self._checks) or self._told or not self.watching:
            return
        batches = max(self._batches, self._checks)
        variables = [v for m in self.models for v in m.trainable_variables]
        if not variables:
            return
        if self._still is None:
            self._still = StillWeights(variables)
        if batches < patience:
            if batches == 1:
                self._still.look(batches, patience)
            return
        if self._still.look(batches, patience - 1):
            self._told = True
            self.observer.run.report(apply_missing(batches, "train_step", self.optimizers[0]))
        elif not self._checks:
            self._told = True
            self.observer.run.say(
                f"GradientGuard saw {self._batches} batches but no optimizer step, although the "
                "weights change. A @tf.function has to be traced (called for the first time) "
                "inside `with guard.watch(...)`, and the optimizer that is applied has to be "
                "the one passed to `watch`. Nothing is being watched."
            )


def _checked(models: list[Any], given: list[Any]) -> list[Any]:
    """Return the optimizers to watch, or say what is wrong with the arguments."""
    for optimizer in given:
        if not optimizers.is_optimizer(optimizer):
            raise ValueError(
                "`optimizer` must be a keras.optimizers.Optimizer or a list of them. "
                f"Received: {optimizer!r}. For any other optimizer hand the gradients over with "
                "guard.check(grads, variables, loss=loss)."
            )
    for model in models:
        if not hasattr(model, "trainable_variables"):
            raise ValueError(
                f"`model` must be a Keras model (or layer), or a list of them. Received: {model!r}"
            )
    found = given or [o for m in models for o in optimizers.of_model(m)]
    if models and not found:
        raise ValueError(
            "`optimizer` is missing and the model holds none: call "
            "guard.watch(model, optimizer), or compile the model. "
            f"Received: {len(models)} model(s), no optimizer."
        )
    return found


def _leave_to_caller(error: BaseException) -> None:
    """Let `watched` clean up: it sees the same exception."""
    del error
