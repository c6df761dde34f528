"""The watch on ``GradientTape.gradient`` changes nothing and leaves nothing."""

import pytest
import tensorflow as tf

from keras_gradguard.taps.tape import TapeWatch, scalar_loss

V = [tf.Variable(2.0), tf.Variable(3.0)]


def differentiate(**kwargs):
    with tf.GradientTape(persistent=True) as tape:
        loss = V[0] * V[1]
    return loss, tape.gradient(loss, V, **kwargs)


def test_what_gradient_returns_is_untouched():
    plain = tf.GradientTape.gradient
    watch = TapeWatch()
    with watch.installed():
        loss, grads = differentiate()
        assert [float(g) for g in grads] == [3.0, 2.0]
        record = watch.find(list(grads))
        assert record.target is loss
        assert record.sources == V
        assert all(a is b for a, b in zip(record.gradients, grads, strict=True))
    assert tf.GradientTape.gradient is plain


def test_records_are_found_by_identity_else_the_latest():
    watch = TapeWatch()
    with watch.installed():
        first, grads = differentiate()
        second, _ = differentiate()
    assert watch.find(list(grads)).target is first
    assert watch.find([tf.constant(0.0)]).target is second
    assert watch.find([None]).target is second
    watch.forget()
    assert watch.find(list(grads)) is None


def test_only_the_latest_records_are_kept():
    watch = TapeWatch(keep=3)
    with watch.installed():
        for _ in range(9):
            differentiate()
    assert len(watch.records) == 3


def test_watches_nest_in_any_order():
    plain = tf.GradientTape.gradient
    one, two = TapeWatch(), TapeWatch()
    first, second = one.installed(), two.installed()
    first.__enter__()
    second.__enter__()
    differentiate()
    first.__exit__(None, None, None)
    differentiate()
    second.__exit__(None, None, None)
    assert (len(one.records), len(two.records)) == (1, 2)
    assert tf.GradientTape.gradient is plain


def test_an_exception_puts_gradient_back():
    plain = tf.GradientTape.gradient
    with pytest.raises(KeyError), TapeWatch().installed():
        raise KeyError
    assert tf.GradientTape.gradient is plain


def test_a_dictionary_of_sources():
    watch = TapeWatch()
    with watch.installed(), tf.GradientTape() as tape:
        loss = V[0] * V[1]
    with watch.installed():
        grads = tape.gradient(loss, {"a": V[0], "b": V[1]})
    assert set(grads) == {"a", "b"}
    assert watch.find(list(grads.values())).sources == V


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (tf.constant(2.0), 2.0),
        (tf.constant([1.0, 3.0]), 2.0),
        ([tf.constant(1.0), tf.constant(2.0)], 3.0),
        ({"a": tf.constant(1.0, tf.float64)}, 1.0),
        (tf.constant(4), 4.0),
        (tf.constant("x"), None),
        ([], None),
        (None, None),
        (3.0, None),
    ],
)
def test_the_loss_as_one_number(target, expected):
    found = scalar_loss(target)
    assert (None if found is None else float(found)) == expected
