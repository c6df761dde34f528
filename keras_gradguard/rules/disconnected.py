"""Gradients that the tape returned as None."""

from __future__ import annotations

from keras_gradguard.findings import Cause, Evidence, Finding
from keras_gradguard.policy import Policy
from keras_gradguard.records import Table


def none_gradient(table: Table, policy: Policy, *, step: int = 0) -> tuple[Finding, ...]:
    """Report variables without any gradient.

    Args:
        table: The columns; ``table.none`` are those without a gradient.
        policy: What to leave alone.
        step: The step being traced or run.

    Returns:
        At most one finding. Its severity is ``"raise"``; the diagnosis lowers it when the
        variables only feed an output that is left out of the loss on purpose.
    """
    missing = [
        (i, table.variables[i])
        for i in sorted(table.none)
        if not policy.ignored(table.variables[i].path, table.variables[i].layer)
    ]
    if not missing:
        return ()
    total = len(table.variables)
    everything = len(table.none) == total
    causes: tuple[Cause, ...] = ()
    integer = [v.path for _, v in missing if "int" in v.dtype]
    if integer:
        causes = (
            Cause(
                name="integer_variable",
                score=0.9,
                where=tuple(integer),
                evidence=(
                    Evidence(
                        name="integer",
                        value=len(integer),
                        text=f"{', '.join(integer)} holds integers",
                    ),
                ),
                fix="Make the variable float, or set `trainable=False` on it.",
            ),
        )
    if everything:
        summary = (
            f"None of the {total} trainable variables has a gradient: the loss does not depend "
            "on them in any way the tape could follow. Nothing can be learned."
        )
    else:
        summary = (
            f"{len(missing)} of {total} trainable variables have no gradient (None): the loss "
            "does not depend on them, so they stay as they are for ever."
        )
    return (
        Finding(
            symptom="none_gradient",
            summary=summary,
            where=tuple(v.path for _, v in missing),
            step=step,
            first_step=step,
            severity="raise",
            causes=causes,
            evidence=(
                Evidence(
                    name="none_count",
                    value=len(missing),
                    text=f"{len(missing)} of {total} gradients are None",
                ),
            ),
            optimizer=table.optimizer,
        ),
    )
