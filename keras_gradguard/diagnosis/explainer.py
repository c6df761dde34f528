"""From cut ways to causes: the variables that one and the same spot explains, told together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_gradguard.diagnosis.cuts import Cut, Way, opens, starts_of, way
from keras_gradguard.diagnosis.loose_ends import comes_back, ends_at, loss_is_constant
from keras_gradguard.diagnosis.opgraph import ASSIGN_OPS, Op, Value
from keras_gradguard.diagnosis.oracle import Oracle
from keras_gradguard.diagnosis.reads import replacement, unread
from keras_gradguard.diagnosis.view import StepView, VariableSeen
from keras_gradguard.diagnosis.wording import cut_fix, listed, op_words, shape_words, unique
from keras_gradguard.findings import Cause, Evidence

_MOST_CAUSES = 6
_MOST_TRIED = 200


@dataclass(slots=True, eq=False)
class _Group:
    """The variables that one and the same thing explains."""

    cause: str
    score: float
    text: str
    fix: str
    variables: list[VariableSeen] = field(default_factory=list)
    places: tuple[str, ...] = ()
    source: str | None = None
    facts: tuple[Evidence, ...] = ()


class Explainer:
    """Walks from variables to the loss and gathers what cuts the ways, one cause a spot."""

    def __init__(self, view: StepView) -> None:
        """Explain one step."""
        self.view = view
        self.oracle = Oracle()
        self.groups: dict[Any, _Group] = {}
        self.opening: dict[tuple[Op, Value], bool] = {}

    def explain(self, none: Sequence[VariableSeen]) -> tuple[Cause, ...]:
        """Return the causes for variables that get no gradient, best first."""
        for variable in none:
            self._one(variable)
        total = len(none)
        causes = [_as_cause(g, total) for g in self.groups.values()]
        causes.sort(key=lambda c: -c.score)
        return tuple(causes[:_MOST_CAUSES])

    def _add(self, key: Any, variable: VariableSeen, group: _Group) -> None:
        kept = self.groups.setdefault((group.cause, key), group)
        kept.score = max(kept.score, group.score)
        if variable not in kept.variables:
            kept.variables.append(variable)

    # ---- one variable --------------------------------------------------------------

    def _one(self, variable: VariableSeen) -> None:
        if variable.dtype.startswith(("int", "uint", "bool")):
            self._add(
                variable.key,
                variable,
                _Group(
                    cause="integer_variable",
                    score=0.97,
                    text=f"{variable.name} has dtype {variable.dtype}",
                    fix="Create the variable with a float dtype, or with trainable=False.",
                    places=(variable.layer,),
                ),
            )
            return
        reads, starts = starts_of(self.view.ops, variable.key)
        if not reads:
            if self.view.complete:
                self._unread(variable)
            return
        found = way(self.view.ops, self.oracle, starts, self.view.loss)
        if not found.exists:
            self._not_in_loss(variable, reads)
            return
        untaped = self._untaped(variable, reads)
        if untaped and replacement(variable):
            self._unread(variable)
            return
        if untaped:
            self._outside_tape(variable, reads, found)
        for rank, (cut, alone) in enumerate(self._telling(found)):
            self._cut(variable, cut, rank + (1 if untaped else 0), alone=alone)
        if found.open and not untaped:
            self._open(variable, found)

    def _telling(self, found: Way) -> list[tuple[Cut, bool]]:
        """Return the cuts worth telling, and whether each alone would open a way.

        The nearest of those that alone close a way comes first: a normalisation layer, say,
        stops the gradient of its mean on a side way, which is none of the matter. When no
        single one does, the user's own come before those of library layers.
        """
        cuts: dict[Any, Cut] = {}
        for cut in found.cuts:
            cuts.setdefault(self._spot(cut.op), cut)
        own = [c for c in cuts.values() if self._is_users(c.op)]
        stock = [c for c in cuts.values() if c not in own][:_MOST_TRIED]
        alone = [c for c in own[:_MOST_TRIED] if self._opens(c)]
        alone = alone or [c for c in stock if self._opens(c)]
        rest = [c for c in own if c not in alone] or ([] if alone else stock)
        return [*((c, True) for c in alone), *((c, False) for c in rest)][:4]

    def _opens(self, cut: Cut) -> bool:
        key = (cut.op, cut.output)
        if key not in self.opening:
            self.opening[key] = opens(self.view.ops, self.oracle, cut, self.view.loss)
        return self.opening[key]

    def _is_users(self, op: Op) -> bool:
        """True when the user's code made the operation, and not a stock layer on its own."""
        if not self.view.eager:
            return bool(op.frames) or not op.layers
        # The frames of an eager operation begin at the top of the script.
        stock = self.view.stock_layers
        return not op.layers or op.layers[-1] not in stock

    def _spot(self, op: Op) -> Any:
        """Return what makes two operations one to the user: a function called on one line."""
        frame = op.frames[-1] if op.frames else None
        return (frame, op.api, op.layer) if frame and op.api else op

    def _untaped(self, variable: VariableSeen, reads: Sequence[Op]) -> bool:
        if self.view.eager:
            return not any(r.attrs.get("taped", r.inside != ()) for r in reads)
        return variable.watched is False

    # ---- what can be the matter ----------------------------------------------------

    def _unread(self, variable: VariableSeen) -> None:
        group_key, cause, text, fix, places, source = unread(self.view, variable)
        self._add(
            group_key,
            variable,
            _Group(cause=cause, score=0.95, text=text, fix=fix, places=places, source=source),
        )

    def _not_in_loss(self, variable: VariableSeen, reads: Sequence[Op]) -> None:
        derived = self.view.ops.descendants([o for r in reads for o in r.outputs])
        for left in self.view.left:
            if left.value in derived:
                line = left.frames[-1] if left.frames else None
                how = "numpy()" if left.how == "__array__" else f"{left.how.strip('_')}()"
                self._add(
                    str(line),
                    variable,
                    _Group(
                        cause="leaves_tensorflow",
                        score=0.95,
                        text=f"a value computed from it becomes a Python number or NumPy array "
                        f"by {how}" + (f" ({line})" if line else ""),
                        fix="Keep the value a tensor up to the loss: use keras.ops or tf "
                        "functions instead of NumPy, float() and int().",
                        places=("loss",),
                        source=line.short if line else None,
                    ),
                )
                return
        if loss_is_constant(self.view):
            line = self.view.tape_frames[-1] if self.view.tape_frames else None
            self._add(
                "constant",
                variable,
                _Group(
                    cause="leaves_tensorflow",
                    score=0.7,
                    text="the loss depends on no variable at all: the model's output reached it "
                    "as a plain number or array, if at all",
                    fix="Compute the loss with keras.ops or tf functions directly on what the "
                    "model returned; np.array(), numpy() and float() cut the tape.",
                    places=("loss",),
                    source=line.short if line else None,
                ),
            )
        elif self.view.eager and comes_back(self.view, derived):
            self._add(
                "back",
                variable,
                _Group(
                    cause="leaves_tensorflow",
                    score=0.75,
                    text="nothing uses its last value, and right after it a new tensor of the "
                    "same shape, made by no operation, goes on to the loss: the value took a "
                    "way through NumPy",
                    fix="Use keras.ops or tf functions all along; np.array(), NumPy functions "
                    "and numpy_function cut the tape.",
                    places=ends_at(self.view, derived),
                ),
            )
        count = sum(1 for v in derived if v.op is not None)
        self._add(
            variable.layer,
            variable,
            _Group(
                cause="output_not_in_loss",
                score=0.6
                if loss_is_constant(self.view) or comes_back(self.view, derived)
                else 0.95,
                text=f"{variable.layer!r} runs ({count} values are computed from it) but none "
                "of them reaches the loss",
                fix=f"Give the output of {variable.layer!r} a loss (in compile(), or add_loss), "
                "or freeze it with trainable=False.",
                places=(variable.layer,),
            ),
        )

    def _outside_tape(self, variable: VariableSeen, reads: Sequence[Op], found: Way) -> None:
        line = next((r.source for r in reads if r.source), None)
        self._add(
            "tape",
            variable,
            _Group(
                cause="outside_tape",
                score=0.97 if found.open else 0.85,
                text=f"{variable.name} is read and its value reaches the loss, but the tape "
                "recorded no read of it: the forward pass ran before the tape was opened, "
                "after it was closed, or under stop_recording",
                fix="Move the call of the model inside `with tf.GradientTape() as tape:`, "
                "together with the loss.",
                places=("loss",),
                source=line,
            ),
        )

    def _cut(self, variable: VariableSeen, cut: Cut, rank: int, *, alone: bool) -> None:
        op = cut.op
        score = (0.95 if alone else 0.9) * 0.8**rank
        if op.type in ASSIGN_OPS:
            self._assign(variable, op, score)
            return
        name = {
            "StopGradient": "stop_gradient",
            "PyFunc": "leaves_tensorflow",
            "PyFuncStateless": "leaves_tensorflow",
        }.get(op.type, "non_differentiable_op")
        where = self.view.place(op)
        what = op_words(op)
        made = f"{shape_words(cut.value)} -> {shape_words(cut.output)}"
        inside = f", inside a {op.inside[-1]}" if op.inside else ""
        line = op.frames[-1] if op.frames else None
        text = (
            f"{what} in {where!r} ({made}{inside}) hands no gradient back"
            if where not in ("loss", "train_step")
            else f"{what} in the {where} ({made}{inside}) hands no gradient back"
        )
        self._add(
            self._spot(op),
            variable,
            _Group(
                cause=name,
                score=score,
                text=text + (f" ({line})" if line else ""),
                fix=cut_fix(op),
                places=(where,),
                source=line.short if line else None,
                facts=(
                    Evidence(
                        name="distance",
                        value=cut.distance,
                        text=f"{cut.distance} operations after the variable",
                    ),
                ),
            ),
        )

    def _assign(self, variable: VariableSeen, assign: Op, score: float) -> None:
        place = self.view.place(assign)
        line = assign.frames[-1] if assign.frames else None
        target = self._assigned_name(assign)
        self._add(
            assign,
            variable,
            _Group(
                cause="variable_assign_breaks_path",
                score=score,
                text=f"the value is written into {target or 'a variable'} with assign and read "
                "back; an assign records nothing on the tape" + (f" ({line})" if line else ""),
                fix="Use the tensor itself instead of the variable: build it with "
                "keras.ops.slice_update, keras.ops.scatter or tf.tensor_scatter_nd_update, and "
                "assign only what is to be remembered.",
                places=unique((place,), (target,) if target else ()),
                source=line.short if line else None,
            ),
        )

    def _assigned_name(self, assign: Op) -> str | None:
        """Return the name of the variable that an assign writes, or None."""
        if "variable" in assign.attrs:
            return str(assign.attrs["variable"])
        handle = assign.inputs[0] if assign.inputs else None
        behind = self.view.ops.ancestors([handle]) if handle is not None else set()
        for key, handles in self.view.ops.variables.items():
            if any(h in behind for h in handles):
                return self.view.names.get(key)
        return None

    def _open(self, variable: VariableSeen, found: Way) -> None:
        if variable.none is False:
            self._add(
                "loop",
                variable,
                _Group(
                    cause="outside_tape",
                    score=0.6,
                    text="model and loss traced anew do give a gradient, so the training loop "
                    "itself loses it: the forward pass runs outside of the tape, or the loop "
                    "does more to the value than the loss",
                    fix="Call the model and the loss inside `with tf.GradientTape() as tape:`.",
                    places=("loss",),
                ),
            )
            return
        custom = [op for op in found.passed if "_gradient_op_type" in op.attrs]
        if custom:
            op = custom[0]
            line = op.frames[-1] if op.frames else None
            self._add(
                op,
                variable,
                _Group(
                    cause="non_differentiable_op",
                    score=0.7,
                    text="the way goes through a function with tf.custom_gradient, whose "
                    "gradient is None" + (f" ({line})" if line else ""),
                    fix="Return a gradient (not None) for every argument of the function under "
                    "tf.custom_gradient.",
                    places=(self.view.place(op),),
                    source=line.short if line else None,
                ),
            )


def _as_cause(group: _Group, total: int) -> Cause:
    names = [v.name for v in group.variables]
    layers = [v.layer for v in group.variables]
    share = len(names) / max(total, 1)
    said = Evidence(
        name="variables_without_gradient",
        value=len(names),
        text=f"{group.text}; no gradient for {listed(names)}",
    )
    return Cause(
        name=group.cause,
        score=round(min(1.0, group.score * (0.9 + 0.1 * share)), 4),
        where=unique(group.places, layers, names),
        evidence=(said, *group.facts),
        fix=group.fix,
        source=group.source,
    )
