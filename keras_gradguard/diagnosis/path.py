"""Why a gradient is None: which operation cuts the way from the variable to the loss, and where.

The walk goes forward from every read of the variable and asks TensorFlow, operation by
operation, whether a gradient comes back through it. The first operation that gives none is
the one nearest the variable, and its own stack names the user's line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_gradguard.diagnosis.eager import Recording
from keras_gradguard.diagnosis.explainer import Explainer
from keras_gradguard.diagnosis.trace import Trace, TraceError, backend_variable
from keras_gradguard.diagnosis.view import StepView, view_of_recording, view_of_trace
from keras_gradguard.findings import Cause, Evidence

_LEAVING_WORDS = (
    "'SymbolicTensor'",
    "has no attribute 'numpy'",
    "numpy() is only available",
    "Cannot convert a symbolic",
    "to a numpy array",
    "symbolic `tf.Tensor` as a Python `bool`",
    "converted to a NumPy array",
)


def none_gradient(
    seen: Trace | Recording | StepView,
    *,
    model: Any = None,
    variables: Sequence[Any] | None = None,
    loss: Any = None,
) -> tuple[Cause, ...]:
    """Explain every None gradient of one step.

    Args:
        seen: A traced step, or a recording of an eager one.
        model: The model, for a recording; a trace knows its own.
        variables: The variables whose gradient is None (Keras or backend variables).
            Defaults to those for which the tape of ``seen`` gave None.
        loss: For a recording: the loss tensor, to tell several tapes apart.

    Returns:
        Causes, best first: for each, which variables it concerns, the operation that cuts
        the way and the user's line. Empty when no gradient is None.
    """
    view = as_view(seen, model=model, loss=loss)
    if view is None:
        return ()
    wanted = None if variables is None else _keys(variables)
    none = [v for v in view.variables if (v.none if wanted is None else v.key in wanted)]
    if not none:
        return ()
    return Explainer(view).explain(none)


def untraceable(error: TraceError) -> tuple[Cause, ...]:
    """Explain a step that runs eagerly but not in a graph: mostly a value leaves TensorFlow.

    Args:
        error: What :func:`~keras_gradguard.diagnosis.trace.trace_step` raised.

    Returns:
        ``leaves_tensorflow`` when the error is that of a symbolic tensor being turned into
        a Python or NumPy value; else nothing.
    """
    text = str(error)
    if not any(word in text for word in _LEAVING_WORDS):
        return ()
    line = error.frames[-1] if error.frames else None
    return (
        Cause(
            name="leaves_tensorflow",
            score=0.85,
            where=("model",),
            evidence=(
                Evidence(
                    name="error",
                    value=text[:300],
                    text="the step turns a tensor into a Python or NumPy value"
                    + (f" ({line})" if line else ""),
                ),
            ),
            fix="Keep the value a tensor: use keras.ops or tf functions instead of numpy(), "
            "NumPy functions, float(), int() and Python conditions on tensors.",
            source=line.short if line else None,
        ),
    )


def as_view(
    seen: Trace | Recording | StepView, *, model: Any = None, loss: Any = None
) -> StepView | None:
    """Return the view of a trace or a recording (None for a recording without any tape)."""
    if isinstance(seen, StepView):
        return seen
    if isinstance(seen, Trace):
        return view_of_trace(seen)
    return view_of_recording(seen, model, loss=loss)


def _keys(variables: Sequence[Any]) -> set[int]:
    return {id(backend_variable(v)) for v in variables}
