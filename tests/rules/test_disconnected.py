"""None gradients, known from the table alone."""

import pytest

from keras_gradguard.policy import Policy
from keras_gradguard.rules.disconnected import none_gradient
from tests.histories import info, table


@pytest.mark.parametrize(
    ("none", "ignore", "expected"),
    [
        ((), (), None),
        ((0,), (), ("a/kernel",)),
        ((0, 2), (), ("a/kernel", "b/kernel")),
        ((0, 1, 2), (), ("a/kernel", "a/bias", "b/kernel")),
        ((0, 2), "a/*", ("b/kernel",)),
        ((0, 1), "a", None),
    ],
)
def test_where(none, ignore, expected):
    columns = table("a/kernel", "a/bias", "b/kernel", none=none)
    found = none_gradient(columns, Policy(ignore=ignore), step=7)
    if expected is None:
        assert found == ()
        return
    (finding,) = found
    assert finding.where == expected
    assert (finding.step, finding.severity) == (7, "raise")
    assert ("None of the 3" in finding.summary) == (len(none) == 3)


@pytest.mark.parametrize(
    ("dtype", "cause"),
    [("int32", "integer_variable"), ("uint8", "integer_variable"), ("float32", "unknown")],
)
def test_integers_explain_themselves(dtype, cause):
    import dataclasses

    first = dataclasses.replace(info("a/n"), dtype=dtype)
    (finding,) = none_gradient(table(first, "b/kernel", none=(0,)), Policy())
    assert finding.cause == cause
