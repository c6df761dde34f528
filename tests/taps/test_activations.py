"""Layer outputs seen while a step runs: against an oracle, over a window, in every mode."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_gradguard import GradientGuard, Policy
from keras_gradguard.taps.activations import innermost_layers, output_layers
from keras_gradguard.taps.gauge import WINDOW, Seen, kind_of
from tests.training import assert_same, train

BATCH, STEPS = 8, 5


class Keeps:
    """Stands in for the writer: keeps what it is handed."""

    def __init__(self):
        self.samples = []

    def write_activations(self, sample):
        self.samples.append(sample)

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def still_model():
    """A model that a learning rate of 0 keeps as it is, so that outputs can be computed apart."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            # The last two of six units are off whatever comes.
            layers.Dense(6, activation="relu", name="half_dead"),
            layers.Dense(4, name="linear"),
            layers.Activation("tanh", name="squash"),
            layers.Dense(3, activation="softmax", name="out"),
        ]
    )
    kernel, bias = model.get_layer("half_dead").get_weights()
    bias[4:] = -1000.0
    model.get_layer("half_dead").set_weights([kernel, bias])
    kernel, bias = model.get_layer("linear").get_weights()
    model.get_layer("linear").set_weights([kernel * 40.0, bias])
    model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
    return model


def watched(model, x, y, **compile_options):
    for name, value in compile_options.items():
        setattr(model, name, value)
    guard = GradientGuard(
        log_dir=None, sample_every=1, activations=True, policy=Policy(zero_update="ignore")
    )
    keeps = Keeps()
    guard._writer = lambda: keeps
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[guard])
    return keeps.samples


def data():
    rng = np.random.default_rng(3)
    return rng.normal(size=(BATCH * STEPS, 5)).astype("float32"), rng.integers(0, 3, BATCH * STEPS)


MODES = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "xla": {"jit_compile": True},
    "steps_per_execution": {"steps_per_execution": 2},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_figure_is_what_the_layers_put_out(mode):
    model, (x, y) = still_model(), data()
    names = [la.name for la in model.layers]
    outputs = keras.Model(model.inputs[0], [la.output for la in model.layers])
    samples = watched(model, x, y, **MODES[mode])
    assert [s.step for s in samples] == list(range(STEPS))
    for step, sample in enumerate(samples):
        assert [s.layer for s in sample.layers] == names
        here = outputs(x[step * BATCH : (step + 1) * BATCH])
        so_far = outputs(x[: (step + 1) * BATCH])
        for i, (s, now, ever) in enumerate(zip(sample.layers, here, so_far, strict=True)):
            now, ever = np.asarray(now), np.asarray(ever)
            assert s.examples == len(ever)
            assert s.units == now.shape[-1]
            assert s.zero_fraction == pytest.approx((now == 0).mean())
            assert s.dead_fraction == pytest.approx((ever == 0).all(axis=0).mean())
            assert s.constant_fraction == pytest.approx((ever == ever[0]).all(axis=0).mean())
            assert (s.min, s.max) == pytest.approx((now.min(), now.max()), rel=1e-5)
            assert s.nonfinite == 0
            assert s.output == (s.layer == "out")
            bins = (now.astype("f4").view(np.int32).ravel() >> 23) + 256
            counts = np.bincount(bins, minlength=512)
            # Another order of the sums in a layer may carry an entry over the edge of a bin.
            assert np.abs(sample.histogram[i] - counts).sum() <= 2
            if s.layer == "squash":
                assert s.saturated_fraction == pytest.approx(
                    (1 - np.abs(now) < 1e-7).mean(), abs=0.05
                )
                assert s.saturated_fraction > 0.1
    kinds = [s.kind for s in samples[0].layers]
    assert kinds == ["relu", "", "tanh", "softmax"]


def test_dead_is_said_of_a_whole_window_and_of_the_one_before():
    model = still_model()
    # Unit 4 lives in the very first batch only.
    kernel, bias = model.get_layer("half_dead").get_weights()
    kernel[:, 4], bias[4] = [1, 0, 0, 0, 0], -5.0
    model.get_layer("half_dead").set_weights([kernel, bias])
    steps = 2 * WINDOW + 1
    x = np.random.default_rng(0).uniform(-1, 1, size=(BATCH * steps, 5)).astype("float32")
    x[0, 0] = 9.0
    samples = watched(model, x, np.zeros(len(x), "int32"))
    dead = [round(6 * s.layers[0].dead_fraction) for s in samples]
    # It counts as alive for its window and the next one.
    assert dead[: 2 * WINDOW] == [dead[0]] * (2 * WINDOW)
    assert dead[2 * WINDOW] == dead[0] + 1
    assert samples[-1].layers[0].examples == BATCH * (WINDOW + 1)


SAME = {
    **{kind: (kind, {}) for kind in ("mlp", "conv", "recurrent", "transformer")},
    "mlp, eager": ("mlp", {"run_eagerly": True}),
}


@pytest.mark.parametrize(("kind", "options"), SAME.values(), ids=SAME)
def test_training_is_the_same(kind, options):
    def make():
        return keras.optimizers.Adam(0.01)

    guard = GradientGuard(log_dir=None, sample_every=3, check_every=2, activations=True)
    assert_same(train(kind, make, **options), train(kind, make, [guard], **options))
    assert guard.findings == ()


def test_nothing_is_left_on_a_layer():
    model, (x, y) = still_model(), data()
    before = [set(vars(la)) for la in model.layers]
    watched(model, x, y)
    assert [set(vars(la)) for la in model.layers] == before


def test_an_error_in_a_step_leaves_nothing_on_a_layer():
    class Fails(layers.Layer):
        def call(self, inputs):
            raise RuntimeError("the user's own")

    model = keras.Sequential([layers.Dense(3), Fails()])
    model.compile("sgd", "mse")
    guard = GradientGuard(log_dir=None, activations=True)
    with pytest.raises(RuntimeError, match="the user's own"):
        model.fit(np.ones((4, 2)), np.ones((4, 3)), callbacks=[guard], verbose=0)
    assert all("call" not in vars(la) for la in model.layers)


def test_an_eager_loop_is_watched_and_its_evaluation_is_not():
    model = still_model()
    optimizer = keras.optimizers.SGD(0.01)
    x, y = data()
    guard = GradientGuard(log_dir=None, sample_every=1, activations=True)
    keeps = Keeps()
    guard._writer = lambda: keeps
    with guard.watch(model, optimizer):
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
                )
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            guard.step(loss)
            model(x[:2])  # an evaluation
    assert [s.layers[0].examples for s in keeps.samples] == [len(x), 2 * len(x), 3 * len(x)]


def test_a_layer_called_twice_is_two_entries():
    shared = layers.Dense(4, activation="relu", name="shared")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1, name="out")(shared(shared(inputs))))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    samples = watched(model, np.ones((16, 4), "f4"), np.zeros((16, 1), "f4"))
    assert [s.layer for s in samples[0].layers] == ["shared", "shared (2)", "out"]


def test_innermost_layers_stop_at_recurrent_ones():
    inner = keras.Sequential([keras.Input((3, 2)), layers.GRU(2, name="gru")], name="inner")
    model = keras.Sequential([keras.Input((3, 2)), inner, layers.Dense(1, name="last")])
    assert [la.name for la in innermost_layers([model])] == ["gru", "last"]
    assert output_layers([model]) == {"last"}


KINDS = {
    "dense relu": (layers.Dense(3, activation="relu"), "relu"),
    "no activation": (layers.Dense(3), ""),
    "an activation layer": (layers.Activation("sigmoid"), "sigmoid"),
    "a class of its own": (layers.Softmax(), "softmax"),
    "a function of the user's": (layers.Dense(3, activation=lambda v: v), ""),
}


@pytest.mark.parametrize(("layer", "kind"), KINDS.values(), ids=KINDS)
def test_the_kind_of_an_output_in_eager_mode(layer, kind):
    assert kind_of(Seen(layer, layer(tf.ones((2, 3))))) == kind
