"""Weights and gradients that miss each other: what no table of gradients can show by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_gradguard.findings import Cause, Evidence, Finding
from keras_gradguard.taps import names
from keras_gradguard.taps.tape import TapeRecord
from keras_gradguard.taps.update import identity_of, raw

# Steps in a row whose layers must all be new before that is no accident.
_NEW_STEPS = 3


class StillWeights:
    """Tells whether weights moved, for a training that never calls ``optimizer.apply``."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = [raw(v) for v in variables]
        self._before: list[Any] | None = None
        self._since = 0

    def look(self, step: int, patience: int) -> bool:
        """Return True when no weight moved between two looks at least ``patience`` steps apart.

        Args:
            step: Training steps so far.
            patience: Steps that have to lie between.
        """
        now = [np.array(v) for v in self._variables]
        if self._before is None:
            self._before, self._since = now, step
            return False
        pairs = zip(now, self._before, strict=True)
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
        if not same:
            self._before, self._since = now, step
            return False
        return step - self._since >= patience


class MisdirectedGradients:
    """Finds gradients of one list of variables that are applied to another.

    ``optimizer.apply(gradients)`` without variables updates those that the optimizer was built
    on, whatever the gradients belong to. Handing the gradients of one model to another is a
    method too (first-order meta-learning), so the finding waits until the weights that the
    gradients belong to have stood still.
    """

    def __init__(self) -> None:
        self._sources: list[Any] = []
        self._applied: list[Any] = []
        self._still: StillWeights | None = None
        self._told = False

    def see(self, record: TapeRecord | None, gradients: list[Any], variables: list[Any]) -> None:
        """Compare the variables that are updated with those that the tape was asked about.

        Args:
            record: The call of ``tape.gradient`` behind the gradients, or None.
            gradients: What reaches the optimizer.
            variables: What the optimizer is about to update.
        """
        if record is None or self._told or self._still is not None:
            return
        source_of = {id(g): s for g, s in zip(record.gradients, record.sources, strict=False)
                     if g is not None}  # fmt: skip
        sources = [source_of.get(id(g)) for g in gradients]
        known = [(s, v) for s, v in zip(sources, variables, strict=True) if s is not None]
        updated = {identity_of(v) for v in variables}
        astray = [s for s, _ in known if identity_of(s) not in updated and hasattr(s, "assign")]
        if known and len(astray) == len(known):
            self._sources, self._applied = astray, [v for _, v in known]
            self._still = StillWeights(astray)

    def look(self, steps: int, patience: int, optimizer: Any) -> Finding | None:
        """Return the finding when the weights have not moved for ``patience`` steps.

        Args:
            steps: Optimizer steps so far.
            patience: Steps to wait.
            optimizer: Name of the optimizer.
        """
        if self._still is None or self._told or not self._still.look(steps, patience):
            return None
        self._told = True
        meant = tuple(names.path_of(v) for v in self._sources)
        got = tuple(names.path_of(v) for v in self._applied)
        return Finding(
            symptom="zero_update",
            summary=f"The gradients of {len(meant)} variables ({', '.join(meant[:3])}"
            f"{'…' if len(meant) > 3 else ''}) are applied to other variables: theirs never "
            "change.",
            where=("optimizer", *meant),
            step=steps,
            first_step=0,
            causes=(
                Cause(
                    name="optimizer_built_for_other_variables",
                    score=0.97,
                    where=("optimizer", *meant),
                    evidence=(
                        Evidence(
                            name="misdirected",
                            value=len(meant),
                            text=f"the tape gave the gradient of '{meant[0]}', the optimizer "
                            f"updates a variable named '{got[0]}' that is another object; no "
                            f"weight of the first moved in {patience} steps",
                        ),
                    ),
                    fix="Make a new optimizer for this model, or pass the variables along: "
                    "optimizer.apply(gradients, model.trainable_variables).",
                ),
            ),
            optimizer=optimizer,
        )


class FleetingLayers:
    """Finds weights of layers that are made anew in every call of a model.

    Args:
        models: The models that train.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = list(models)
        self._last: list[Any] = []
        self._count = 0

    def see(self, record: TapeRecord | None, variables: list[Any]) -> Finding | None:
        """Look at the variables that the tape of one eager step watched.

        Args:
            record: The call of ``tape.gradient`` of this step, or None.
            variables: What the optimizer is about to update.

        Returns:
            The finding, when several steps in a row used weights of the models' own layers
            that are in no list and were not there at the step before.
        """
        if record is None or record.tape is None or self._count >= _NEW_STEPS:
            return None
        known = {identity_of(v) for v in (*variables, *record.sources)}
        inside = set()
        for model in self._models:
            known |= {identity_of(v) for v in getattr(model, "variables", ())}
            inside |= {str(model.name), *(str(la.name) for la in getattr(model, "layers", ()))}
        # Keras names a weight after the layers inside whose call it was made.
        fresh = [
            v
            for v in record.tape.watched_variables()
            if identity_of(v) not in known and names.path_of(v).split("/")[0] in inside
        ]
        before = {id(v) for v in self._last}
        anew = bool(fresh) and not any(id(v) in before for v in fresh)
        self._count = self._count + 1 if anew else 0
        # Held until the next step, so that an identity is not given out twice.
        self._last = fresh
        if self._count < _NEW_STEPS:
            return None
        self._last = []
        paths = tuple(names.path_of(v) for v in fresh)
        owner = str(getattr(fresh[0], "name", "")).split("/")[0]
        layers = tuple(dict.fromkeys(p.rsplit("/", 1)[0].rsplit("/", 1)[-1] for p in paths))
        return Finding(
            symptom="zero_update",
            summary=f"The weights {', '.join(paths[:4])} are new at every step: a layer is made "
            "inside a call, used once and thrown away, so nothing it has could ever learn.",
            where=(owner, *layers, *paths),
            step=_NEW_STEPS - 1,
            first_step=0,
            causes=(
                Cause(
                    name="layer_created_in_call",
                    score=0.97,
                    where=(owner, *layers),
                    evidence=(
                        Evidence(
                            name="new_variables",
                            value=len(paths),
                            text=f"each of the first {_NEW_STEPS} steps read {len(paths)} weights "
                            f"made inside '{owner}' that did not exist a step before and are in "
                            "no list of trainable variables",
                        ),
                    ),
                    fix=f"Create the layer once, in __init__ of '{owner}', keep it in an attribute "
                    "and only call it in call().",
                ),
            ),
        )
