"""What fit sessions and loop sessions share: a tap, a run, and what happens when a step is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_gradguard.findings import Cause, Evidence, Finding
from keras_gradguard.layers import find_probes
from keras_gradguard.recorder import Recorder
from keras_gradguard.records import ActivationStats, Row, Table
from keras_gradguard.rules import none_gradient
from keras_gradguard.session import Run, Writer
from keras_gradguard.settings import Settings
from keras_gradguard.strays import FleetingLayers, MisdirectedGradients, StillWeights
from keras_gradguard.taps import names, optimizers
from keras_gradguard.taps.activations import ActivationTap
from keras_gradguard.taps.base import Cadence, Channel
from keras_gradguard.taps.probes import ProbeTap
from keras_gradguard.taps.tape import TapeRecord
from keras_gradguard.taps.tensorflow import TensorFlowTap, executing_eagerly
from keras_gradguard.taps.untracked import untracked_variables

__all__ = ["Observer", "StillWeights", "apply_missing", "nothing_trainable"]


class Observer:
    """A tap and the run it feeds.

    Args:
        models: The models that train.
        settings: The guard's settings.
        findings: The list that findings are appended to.
        writer: Where to write, or None.
        cadence: How often to sample.
        explain: Adds causes to a finding.
        tap: A tap of an earlier run, to keep its traces.
        make_room: Called before an error or a warning.
    """

    def __init__(
        self,
        models: Sequence[Any],
        settings: Settings,
        findings: list[Finding],
        writer: Writer | None,
        cadence: Cadence,
        explain: Callable[[Finding, Recorder | None], Finding] | None,
        tap: TensorFlowTap | None = None,
        make_room: Callable[[], None] | None = None,
    ) -> None:
        self.models = list(models)
        self.settings = settings
        self.run = Run(
            settings.policy,
            writer=writer,
            sample_every=settings.sample_every,
            explain=explain,
            on_finding=settings.on_finding,
            opening=self._opening,
            make_room=make_room,
        )
        self.run.findings = findings
        self.writer = writer
        self.on_step: Callable[[bool], None] | None = None
        self._misdirected = MisdirectedGradients()
        self._fleeting = FleetingLayers(models)
        self.tap = (
            tap
            if tap is not None
            else TensorFlowTap(
                cadence,
                prefixes=names.automatic_prefixes(models),
                skip_non_finite=settings.skip_non_finite,
            )
        )
        self.tap.on_gradients = self._gradients
        self.tap.on_row = self._row
        if self.tap.probes is None:
            probes = [p for model in models for p in find_probes(model)]
            self.tap.probes = ProbeTap(probes, cadence) if probes else None
        if settings.activations and self.tap.activations is None:
            self.tap.activations = ActivationTap(models, cadence)
        if self.tap.activations is not None:
            self.tap.activations.read()  # what an earlier run left unread
        for channel in self.tap.streams():
            channel.rebase()

    def _opening(self) -> tuple[list[Table], int | None]:
        channels = self.tap.streams()
        tables = [c.table for c in channels]
        return tables, min((c.first_step for c in channels), default=None)

    def judge(self, *, final: bool = True) -> None:
        """Read every channel and act on what is found.

        Args:
            final: Read everything; otherwise what is ordinary at a glance may wait.

        Raises:
            GradientGuardError: A finding whose policy is ``"raise"``.
        """
        self.activations()
        for channel in self.tap.streams():
            self._take(channel, final)
        self._look_for_misdirected()

    def activations(self) -> tuple[ActivationStats, ...]:
        """Read what the layers put out, and return the latest."""
        tap = self.tap.activations
        if tap is not None and executing_eagerly():
            self.run.take_activations(tap.read())
        return self.run.activations

    def drain(self) -> None:
        """Record what is left on the device without judging it: training was left on the way."""
        for channel in self.tap.channels.values():
            self.run.drain(channel)

    def _look_for_misdirected(self) -> None:
        steps = max((r.seen for r in self.run.recorders.values()), default=0)
        known = next((c.table.optimizer for c in self.tap.channels.values()), None)
        found = self._misdirected.look(steps, self.settings.policy.patience, known)
        if found is not None:
            self.run.report(found)

    def _take(self, channel: Channel, final: bool = True) -> None:
        optimizer = channel.optimizer
        rises = None
        if optimizer is not None:

            def rises() -> bool:
                return optimizers.learning_rate_ahead(optimizer) > 0

        self.run.take(channel, rate_rises=rises, final=final)

    def _row(self, channel: Channel, row: Row) -> None:
        """Judge an eager step before the optimizer touches the weights."""
        self._take(channel)
        if self.on_step is not None and bool((row.norm == 0).any()):
            self.on_step(True)

    def _gradients(
        self,
        channel: Any,
        record: TapeRecord | None,
        gradients: list[Any],
        variables: list[Any],
    ) -> None:
        """Look at a step that is being traced, or an eager step, before the optimizer runs."""
        first = channel.eager_steps == 0
        if self.on_step is not None:
            self.on_step(False)
        table = channel.table
        if table.none:
            for finding in none_gradient(table, self.settings.policy, step=channel.next_step()):
                self.run.report(finding, self.run.recorder(channel))
        if first and record is not None and self.models:
            self._look_for_untracked(record, variables)
        self._misdirected.see(record, gradients, variables)
        if channel.eager_steps:
            self._look_for_misdirected()
        if self.models and executing_eagerly():
            found = self._fleeting.see(record, variables)
            if found is not None:
                self.run.report(found)

    def _look_for_untracked(self, record: TapeRecord, variables: list[Any]) -> None:
        known = [*variables, *record.sources]
        for model in self.models:
            known += list(getattr(model, "variables", ()))
        watched = record.tape.watched_variables() if record.tape is not None else ()
        for layer, variable in untracked_variables(self.models, watched, known):
            if self.settings.policy.ignored(layer, variable, f"{layer}/{variable}"):
                continue
            self.run.report(
                Finding(
                    symptom="zero_update",
                    summary=f"The weight '{variable}' of layer '{layer}' is used in the forward "
                    "pass but is in no list of trainable variables: the optimizer never gets it.",
                    where=(layer, variable),
                    step=0,
                    first_step=0,
                    causes=(
                        Cause(
                            name="untracked_variable",
                            score=0.97,
                            where=(layer, variable),
                            evidence=(
                                Evidence(
                                    name="watched",
                                    value=variable,
                                    text=f"the tape watched '{variable}', a tf.Variable in an "
                                    f"attribute of '{layer}', and nobody asked for its gradient",
                                ),
                            ),
                            fix="Create it with self.add_weight(...) in build(), or make it a "
                            "keras.Variable; or give it trainable=False if it is meant to stay.",
                        ),
                    ),
                )
            )

    def close(self) -> None:
        """Release the event file."""
        if self.writer is not None:
            self.writer.close()


def apply_missing(steps: int, where: str, optimizer: Any) -> Finding:
    """Return the finding for a loop whose optimizer is never applied.

    Args:
        steps: Training steps seen.
        where: ``"train_step"`` or ``"optimizer"``.
        optimizer: The optimizer that should have been applied, or None.
    """
    name = None if optimizer is None else str(optimizer.name)
    count = 0 if optimizer is None else optimizers.raw_iterations(optimizer)
    return Finding(
        symptom="zero_update",
        summary=f"{steps} batches went by, but the optimizer was never applied and no weight "
        "changed.",
        where=(where, "optimizer"),
        step=steps,
        first_step=0,
        causes=(
            Cause(
                name="apply_missing",
                score=0.95,
                where=(where,),
                evidence=(
                    Evidence(
                        name="iterations",
                        value=count,
                        text=f"optimizer.apply was called 0 times in {steps} batches, "
                        f"optimizer.iterations is {count}, no trainable weight moved",
                    ),
                ),
                fix="After tape.gradient call self.optimizer.apply(gradients, "
                "self.trainable_variables) in train_step (optimizer.apply_gradients(zip(...)) "
                "in a loop).",
            ),
        ),
        optimizer=name,
    )


def nothing_trainable(model: Any) -> Finding:
    """Return the finding for a model that has weights, none of which is trainable."""
    frozen = [layer.name for layer in model.layers if layer.weights and not layer.trainable]
    listed = ", ".join(map(repr, frozen[:5])) or f"'{model.name}'"
    return Finding(
        symptom="zero_update",
        summary=f"Model '{model.name}' has {len(model.weights)} weights and none of them is "
        "trainable: nothing can change.",
        where=(model.name, *frozen[:8]),
        step=0,
        first_step=0,
        causes=(
            Cause(
                name="trainable_flag",
                score=0.97,
                where=(model.name, *frozen[:8]),
                evidence=(
                    Evidence(
                        name="trainable_weights",
                        value=0,
                        text=f"trainable_weights is empty; trainable=False on {listed}",
                    ),
                ),
                fix=f"Set {model.name}.trainable = True before this fit: Keras reads `trainable` "
                "when the step is traced, not at compile(). In a GAN freeze the discriminator "
                "only while the generator trains.",
            ),
        ),
    )


def unfit_loss(cause: Cause) -> Finding:
    """Return the finding for a loss that does not fit the logits a model gives."""
    return Finding(
        symptom="bad_contract",
        summary="The model gives logits (LogitsOutput), but the loss expects probabilities.",
        where=cause.where,
        step=0,
        first_step=0,
        causes=(cause,),
        source=cause.source,
    )
