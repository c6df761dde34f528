"""Hands a finding to the diagnosis, with all that a session can see."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any, Literal

from keras_gradguard.findings import Finding
from keras_gradguard.recorder import Recorder
from keras_gradguard.records import ActivationStats
from keras_gradguard.session import context_of
from keras_gradguard.settings import Settings
from keras_gradguard.taps.keeper import BatchKeeper, as_numpy, examples
from keras_gradguard.taps.tensorflow import TensorFlowTap, executing_eagerly


class Explainer:
    """Adds causes to findings. The diagnosis is imported when there is something to explain.

    Args:
        settings: The guard's settings.
        mode: ``"fit"``, ``"loop"`` or ``"check"``.
        model: The model, or None when only gradients are handed over.
        optimizer: Its optimizer, or None.
        partners: Other models in the loop.
        loss: The loss function, or None.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        mode: Literal["fit", "loop", "check"],
        model: Any = None,
        optimizer: Any = None,
        partners: tuple[Any, ...] = (),
        loss: Any = None,
    ) -> None:
        self.settings = settings
        self.mode = mode
        self.model = model
        self.optimizer = optimizer
        self.partners = partners
        self.loss = loss
        self.tap: TensorFlowTap | None = None
        self.activations: Callable[[], tuple[ActivationStats, ...]] = tuple
        self.recording: Any = None
        self.loss_call: tuple[Any, Any] | None = None
        self.loss_input: Any = None  # what the model was called with in the step of that call
        self.class_weight: dict[int, float] | None = None

    def __call__(self, finding: Finding, recorder: Recorder | None) -> Finding:
        """Return the finding with its causes; unchanged when the diagnosis is switched off."""
        if not self.settings.diagnose or self.model is None:
            return finding
        from keras_gradguard.diagnosis import explain

        context = self.context(finding, recorder)
        with self._alone():
            if executing_eagerly():
                return explain(finding, context)
            # In the middle of a trace: a thread of its own has no graph and no paused tape.
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                return pool.submit(explain, finding, context).result()

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Keep the diagnosis' own calls of the model out of what the guard sees."""
        return contextlib.nullcontext() if self.tap is None else self.tap.looking_away()

    @property
    def keeper(self) -> BatchKeeper | None:
        """What keeps the batch of the last sampled step."""
        return None if self.tap is None else self.tap.keepers[0]

    def preflight(self) -> tuple[Finding, ...]:
        """Return what is wrong with model, loss and data by themselves, seen on one batch."""
        batch = self._batch()
        if not self.settings.diagnose or self.model is None or batch is None:
            return ()
        from keras_gradguard.diagnosis import preflight

        with self._alone():
            return preflight(self.model, self.optimizer, self.loss, batch)

    def context(self, finding: Finding, recorder: Recorder | None) -> Any:
        """Return what the diagnosis may look at."""
        from keras_gradguard.diagnosis.context import Context

        return Context(
            model=self.model,
            optimizer=self.optimizer,
            loss=self.loss,
            batch=self._batch(finding.symptom),
            mode=self.mode,
            partners=self.partners,
            step=finding.step,
            recording=self.recording,
            class_weight=self.class_weight,
            activations=self.activations(),
            **context_of(recorder),
        )

    def _batch(self, symptom: str = "") -> Any:
        from keras_gradguard.diagnosis.context import Batch

        if self.keeper is None:
            return None
        kept = self.keeper.batch()
        if kept is None:
            # While the first step is traced there are shapes, but no values yet.
            kept = self.keeper.current
        if kept is None:
            return None
        if self.mode != "fit":
            pair = self._heard()
            if pair is not None and symptom != "non_finite":
                return Batch(x=pair[0], y=pair[1])
            # What is wrong with the numbers of one step is to be seen in its own inputs only.
            return Batch(x=kept)
        if not isinstance(kept, tuple):
            return Batch(x=kept)
        x, y, weight = (*kept, None, None)[:3]
        return Batch(x=x, y=y, sample_weight=weight)

    def hear(self, call: tuple[Any, Any]) -> None:
        """Take note of what a loop handed to its loss, and to its model in the same step."""
        self.loss_call = call
        current = None if self.keeper is None else self.keeper.current
        self.loss_input = None if current is None else as_numpy(current)

    def _heard(self) -> tuple[Any, Any] | None:
        """Return inputs and targets of one and the same step of a loop, or None."""
        if self.loss_call is None or self.loss_input is None:
            return None
        target = as_numpy(self.loss_call[0])
        same = examples(target) == examples(self.loss_input) != 0
        return (self.loss_input, target) if same else None

    def preflight_loop(self) -> tuple[Finding, ...]:
        """Return what is wrong with model, loss and data of a loop, seen on its first step."""
        if not self.settings.diagnose or self.model is None or self.loss_call is None:
            return ()
        from keras_gradguard.diagnosis.losscall import swapped_arguments

        first, second = self.loss_call
        output = None if self.keeper is None else self.keeper.output
        swapped = swapped_arguments(self.loss, first, second, output)
        if swapped is not None:
            return (swapped,)
        if second is not output or self._batch() is None:
            return ()  # the loss is not of the form loss(y, model(x)): nothing to compare with
        return self.preflight()

    def release(self) -> None:
        """Let go of everything that belongs to the run."""
        self.recording = None
        self.loss_call = None
        self.loss_input = None
