"""The batch that is kept for a diagnosis: the one that a sampled step trained on."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_gradguard import GradientGuard

MODES = {"graph": {}, "eager": {"run_eagerly": True}, "xla": {"jit_compile": True}}


def kept(model, x, y, batch_size, sample_weight=None):
    guard = GradientGuard(log_dir=None, sample_every=1)
    model.fit(
        x, y, sample_weight=sample_weight, batch_size=batch_size, shuffle=False, verbose=0,
        callbacks=[guard],
    )  # fmt: skip
    return guard._sessions[-1].observer.tap.keepers[0].batch()


@pytest.mark.parametrize(("batch", "held"), [(20, 10), (100, 64)], ids=["small", "large"])
@pytest.mark.parametrize("mode", MODES)
def test_it_is_the_last_batch_cut_to_64_examples(mode, batch, held):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse", **MODES[mode])
    count = batch + held if held == 10 else 2 * batch
    x = np.arange(3 * count, dtype="float32").reshape(count, 3) / 1000
    y, weight = x[:, :1] * 2, x[:, 1]
    found = kept(model, x, y, batch, weight)
    last = slice(batch, batch + held)
    for got, expected in zip(found, (x[last], y[last], weight[last]), strict=True):
        np.testing.assert_array_equal(np.asarray(got), expected)


def test_under_xla_an_axis_of_unknown_length_is_not_kept():
    model = keras.Sequential([keras.Input((None, 3)), layers.GlobalMaxPooling1D(), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)

    def batches():
        for length in (4, 5):
            yield np.ones((8, length, 3), "float32"), np.ones((8, 1), "float32")

    data = tf.data.Dataset.from_generator(
        batches,
        output_signature=(tf.TensorSpec((8, None, 3)), tf.TensorSpec((8, 1))),
    )
    data = data.apply(tf.data.experimental.assert_cardinality(2))
    assert kept(model, data, None, None) is None
