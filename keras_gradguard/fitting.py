"""One guarded ``fit``: from ``on_train_begin`` to whatever way it is left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from keras_gradguard.explaining import Explainer
from keras_gradguard.findings import Finding
from keras_gradguard.layers import logits_mismatch
from keras_gradguard.notices import Console, summary
from keras_gradguard.observer import (
    Observer,
    StillWeights,
    apply_missing,
    nothing_trainable,
    unfit_loss,
)
from keras_gradguard.session import Writer
from keras_gradguard.settings import Settings
from keras_gradguard.taps import optimizers, replicas
from keras_gradguard.taps.base import Cadence
from keras_gradguard.taps.trainer import (
    Attachment,
    GuardedTrainFunction,
    class_weight_of_fit,
    guard_train_function,
    has_stock_step,
)


class FitSession:
    """Installs a tap on a model for one ``fit`` and judges what it brings.

    Args:
        model: The model being fitted.
        settings: The guard's settings.
        findings: The list that findings are appended to.
        writer: Where to write, or None.
        console: What Keras prints of this ``fit``, and what is said beside it.
        reuse: A finished session of the same model, whose traces may still fit.
    """

    def __init__(
        self,
        model: Any,
        settings: Settings,
        findings: list[Finding],
        writer: Writer | None,
        *,
        console: Console | None = None,
        reuse: FitSession | None = None,
    ) -> None:
        self.model = model
        self.thread = threading.get_ident()
        self.settings = settings
        self.console = Console() if console is None else console
        self.observer: Observer
        self.on_close: Callable[[FitSession], None] | None = None
        self.guarded: GuardedTrainFunction | None = None
        self._reuse = reuse.guarded if reuse is not None else None
        self._per_call = max(1, int(getattr(model, "steps_per_execution", 1) or 1))
        cadence = Cadence(
            sample_every=settings.sample_every,
            # A hand-written train_step may update several times.
            ring=8 * (settings.check_every + 2 * self._per_call),
            slots=4 * (settings.check_every + 2 * self._per_call),
            dense=2 * settings.policy.patience,
            skip_non_finite=settings.skip_non_finite,
            jit_compile=bool(getattr(model, "jit_compile", False)),
        )
        tap = None
        if (
            reuse is not None
            and reuse.guarded is not None
            and reuse.guarded.stands_in_for(model.train_function)
            and reuse.observer.tap.cadence == cadence
        ):
            tap = reuse.observer.tap
        else:
            self._reuse = None
        self.explainer = Explainer(
            settings, mode="fit", model=model, optimizer=getattr(model, "optimizer", None)
        )
        if not replicas.is_chief(model):
            # All workers see the same numbers; one of them writes.
            writer = None
        self.observer = Observer(
            [model],
            settings,
            findings,
            writer,
            cadence,
            self.explainer,
            tap=tap,
            make_room=self.console.make_room,
        )
        self.explainer.class_weight = class_weight_of_fit(model)
        self.explainer.tap = self.observer.tap
        self.explainer.activations = self.observer.activations
        self.attachment = Attachment(self.observer.tap, self._failed)
        self._unread = 0
        self._steps = 0
        self._in_epoch = 0
        self._still: StillWeights | None = None
        self._applies_before = self.observer.tap.seen
        self._open = True
        self._contract_seen = not settings.diagnose
        self._held: list[Finding] = []

    def begin(self) -> None:
        """Check what can be checked without data, then install the tap.

        Raises:
            GradientGuardError: The model cannot train.
        """
        model = self.model
        try:
            if (
                has_stock_step(model)
                and model.built
                and model.weights
                and not model.trainable_weights
            ):
                self.observer.run.report(nothing_trainable(model))
            mismatch = logits_mismatch(model, getattr(model, "loss", None))
            if mismatch is not None:
                self.observer.run.report(unfit_loss(mismatch))
            self.guarded = guard_train_function(model, self.attachment, self._reuse)
        except BaseException:
            self.finish()
            raise

    def before_batch(self) -> None:
        """Look at the steps so far when there are enough, then let the next one pass."""
        if self._in_epoch:
            self.console.bar_drawn()
        self._in_epoch += 1
        if self._unread >= self.settings.check_every or self._steps == self._per_call:
            self._judge(final=False)
        if self.guarded is not None:
            self.guarded.refresh()
        self.attachment.armed = True
        self._unread += self._per_call
        self._steps += self._per_call

    def after_epoch(self) -> None:
        """Look at the rest of the epoch and flush."""
        self.console.bar_drawn()
        self._judge()
        # Keras ends the line of its bar after the callbacks that were passed to `fit`.
        self.console.bar_closed()
        self._in_epoch = 0
        if self.observer.writer is not None:
            self.observer.writer.flush()

    def end(self) -> None:
        """Look a last time and put everything back."""
        self._judge()
        self._sum_up()
        self.finish()

    def _sum_up(self) -> None:
        run = self.observer.run
        self.console.say(summary(run.steps_seen, run.findings, run.steps_skipped))

    def _judge(self, *, final: bool = True) -> None:
        self._unread = 0
        try:
            self.observer.judge(final=final)
            self._look_for_apply()
            self._look_at_contract()
        except BaseException:
            self.finish()
            raise
        if self.observer.run.stop_requested:
            self.model.stop_training = True

    def _look_for_apply(self) -> None:
        tap = self.observer.tap
        if tap.seen != self._applies_before or tap.channels or not self.model.trainable_variables:
            return
        if self._still is None:
            self._still = StillWeights(self.model.trainable_variables)
        if self._still.look(self._steps, self.settings.policy.patience):
            known = optimizers.of_model(self.model)
            self.observer.run.report(
                apply_missing(self._steps, "train_step", known[0] if known else None)
            )

    def _look_at_contract(self) -> None:
        """Report what does not fit together by itself, unless a symptom tells it better.

        What makes training impossible is held back for as long as the symptom it leads to takes
        to be measured: that finding then names the same cause, with the damage in numbers.
        """
        if not self._contract_seen:
            self._contract_seen = True
            for finding in self.explainer.preflight():
                if finding.severity == "raise":
                    self._held.append(finding)
                else:
                    self.observer.run.report(finding.replace(step=0, first_step=0))
        if self._held and self._steps > self.settings.policy.layer_patience + self._per_call:
            held, self._held = self._held, []
            for finding in held:
                self.observer.run.report(finding.replace(step=self._steps, first_step=0))

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            # Ctrl-C is a way to end a training; whether it was healthy so far is worth a line.
            self.observer.drain()
            self._sum_up()
        self.finish()

    def finish(self) -> None:
        """Put back what was installed. Safe to call twice."""
        if not self._open:
            return
        self._open = False
        if self.guarded is not None:
            self.guarded.detach(self.attachment)
        self._still = None
        self.explainer.release()
        self.observer.close()
        if self.on_close is not None:
            self.on_close(self)
