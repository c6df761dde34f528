"""None gradients: the op that cuts the way, nearest the variable, with the user's line."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_gradguard.diagnosis.eager import EagerRecorder
from keras_gradguard.diagnosis.path import none_gradient, untraceable
from keras_gradguard.diagnosis.trace import TraceError, trace_step
from keras_gradguard.diagnosis.zero import zero_gradient

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype("float32")
Y = RNG.normal(size=(16, 1)).astype("float32")


def line_of(function, text):
    """Return ``"file.py:32"`` of the line of ``function`` that holds ``text``."""
    source, first = inspect.getsourcelines(function)
    offset = next(i for i, line in enumerate(source) if text in line)
    return f"test_path.py:{first + offset}"


def net(*middle, units=3):
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(units, name="low"), *middle, layers.Dense(1, name="top")]
    )


def best(model, loss="mse", y=Y, x=X, **options):
    causes = none_gradient(trace_step(model, x, y, loss=loss, **options))
    assert causes, "no cause found"
    return causes[0]


# ---- operations ------------------------------------------------------------------------


def lam(function):
    return layers.Lambda(function, name="middle")


def to_rows(n):
    return tf.cast(tf.range(tf.cast(tf.reduce_sum(n), tf.int32)), tf.float32)


CUTS = {
    "round": (lambda h: ops.round(h), "non_differentiable_op", "round"),
    "tf round": (lambda h: tf.round(h), "non_differentiable_op", "round"),
    "floor": (lambda h: ops.floor(h), "non_differentiable_op", "floor"),
    "ceil": (lambda h: tf.math.ceil(h), "non_differentiable_op", "ceil"),
    "floor division": (lambda h: h // 0.5, "non_differentiable_op", "floor"),
    "int cast": (
        lambda h: tf.cast(tf.cast(h, tf.int32), tf.float32),
        "non_differentiable_op",
        "cast to int32",
    ),
    "comparison": (
        lambda h: ops.cast(h > 0.1, "float32"),
        "non_differentiable_op",
        "greater",
    ),
    "argmax": (
        lambda h: ops.one_hot(ops.argmax(h, -1), 3),
        "non_differentiable_op",
        "argmax",
    ),
    "argsort": (
        lambda h: tf.cast(tf.argsort(h), tf.float32),
        "non_differentiable_op",
        "top_k",
    ),
    "shape of a range": (
        lambda h: tf.fill(tf.shape(h), tf.reduce_mean(to_rows(h))),
        "non_differentiable_op",
        "cast to int32",
    ),
    "stop_gradient": (lambda h: ops.stop_gradient(h), "stop_gradient", "stop_gradient"),
    "stop, then round": (
        lambda h: tf.round(tf.stop_gradient(h)),
        "stop_gradient",
        "stop_gradient",
    ),
    "round, then stop": (
        lambda h: tf.stop_gradient(tf.round(h)),
        "non_differentiable_op",
        "round",
    ),
    "numpy_function": (
        lambda h: tf.reshape(tf.numpy_function(np.tanh, [h], tf.float32), tf.shape(h)),
        "leaves_tensorflow",
        "numpy_function",
    ),
    "random.categorical": (
        lambda h: tf.cast(tf.random.categorical(h, 3), tf.float32),
        "non_differentiable_op",
        "random.categorical",
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_operation_in_a_lambda(name):
    function, cause, word = CUTS[name]
    if name in ("numpy_function", "random.categorical"):
        middle = layers.Lambda(function, name="middle", output_shape=(3,))
    else:
        middle = lam(function)
    found = best(net(middle))
    assert found.name == cause
    assert found.where[:2] == ("middle", "low")
    assert {"low/kernel", "low/bias"} <= set(found.where)
    assert "top/kernel" not in found.where
    assert word in found.evidence[0].text
    assert found.source is not None
    assert found.source.startswith("test_path.py:")
    assert found.fix


@pytest.mark.parametrize("name", CUTS)
def test_the_same_operation_in_the_loss(name):
    function, cause, word = CUTS[name]

    def loss(y_true, y_pred):
        return tf.reduce_mean(tf.cast(function(y_pred), tf.float32))

    found = best(net(), loss=loss)
    assert found.name == cause
    assert found.where[0] == "loss"
    assert word in found.evidence[0].text


# ---- where the line is -----------------------------------------------------------------


class Rounds(layers.Layer):
    def call(self, h):
        h = h * 2.0
        return tf.round(h)  # the line


def own_loss(y_true, y_pred):
    hit = tf.equal(tf.round(y_pred), y_true)  # the line
    return 1.0 - tf.reduce_mean(tf.cast(hit, tf.float32))


class Whole(keras.Model):
    def __init__(self):
        super().__init__()
        self.low = layers.Dense(3, name="low")
        self.top = layers.Dense(1, name="top")

    def call(self, x):
        return self.top(self.helper(self.low(x)))

    def helper(self, h):
        return ops.floor(h)  # the line


class InCond(layers.Layer):
    def call(self, h):
        return tf.cond(tf.shape(h)[0] > 3, lambda: tf.round(h), lambda: tf.round(h) + 1)  # the line


@tf.function
def compiled(h):
    h = h + 1.0
    return tf.math.ceil(h)  # the line


class InFunction(layers.Layer):
    def call(self, h):
        return compiled(h)


class InNestedCond(layers.Layer):
    def call(self, h):
        return self.inner(h)

    @tf.function
    def inner(self, h):
        if tf.reduce_sum(h) > 0:  # noqa: SIM108 - autograph's if is what is tested
            h = tf.round(h)  # the line
        else:
            h = tf.round(h * 3.0)
        return h


def test_line_in_a_layer():
    assert best(net(Rounds(name="r"))).source == line_of(Rounds, "# the line")


def test_line_in_a_lambda():
    found = best(net(layers.Lambda(lambda h: tf.round(h), name="r")))
    assert found.source == line_of(test_line_in_a_lambda, "lambda h")


def test_line_in_a_custom_loss():
    assert best(net(), loss=own_loss).source == line_of(own_loss, "# the line")


def test_line_in_a_method_of_a_subclassed_model():
    model = Whole()
    found = best(model)
    assert found.source == line_of(Whole, "# the line")
    assert "low/kernel" in found.where


def test_line_in_a_nested_model():
    inner = keras.Sequential([keras.Input((3,)), Rounds(name="r")], name="block")
    found = best(net(inner))
    assert found.source == line_of(Rounds, "# the line")
    assert found.where[0] == "r"


def test_line_in_tf_cond():
    found = best(net(InCond(name="c")))
    assert found.source == line_of(InCond, "# the line")
    assert "inside a cond" in found.evidence[0].text
    assert found.where[0] == "c"


def test_line_in_a_tf_function():
    found = best(net(InFunction(name="f")))
    assert found.source == line_of(compiled, "# the line")
    assert found.where[0] == "f"


def test_line_in_autograph_code():
    found = best(net(InNestedCond(name="n")))
    assert found.source == line_of(InNestedCond, "# the line")


def test_a_stock_layer_has_no_line_but_a_name():
    i = keras.Input((4,))
    h = ops.round(layers.Dense(3, name="low")(i))
    model = keras.Model(i, layers.Dense(1, name="top")(h))
    found = best(model)
    assert found.source is None
    assert "round" in found.evidence[0].text


SCRIPT = """
import keras
import tensorflow as tf
from keras_gradguard.diagnosis.path import none_gradient
from keras_gradguard.diagnosis.trace import trace_step

def flow(h):
    h = tf.abs(h)
    return tf.round(h)

model = keras.Sequential([
    keras.Input((4,)), keras.layers.Dense(3), keras.layers.Lambda(flow), keras.layers.Dense(1)])
found = none_gradient(trace_step(model, tf.ones((2, 4)), tf.ones((2, 1)), loss="mse"))
"""


def test_line_in_a_plain_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    scope = {}
    exec(compile(SCRIPT, str(path), "exec"), scope)
    assert scope["found"][0].source == "train.py:9"


# ---- a while loop gives zeros in place of None ----------------------------------------------


class InWhile(layers.Layer):
    def call(self, h):
        def body(i, a):
            a = a * 2.0
            return i + 1, tf.round(a)  # the line

        return tf.while_loop(lambda i, a: i < 3, body, (tf.constant(0), h))[1]


class KerasWhile(layers.Layer):
    def call(self, h):
        return ops.while_loop(
            lambda i, a: i < 3,
            lambda i, a: (i + 1, ops.floor(a)),  # the line
            (0, h),
        )[1]


@pytest.mark.parametrize("layer", [InWhile, KerasWhile])
def test_line_in_a_while_loop(layer):
    trace = trace_step(net(layer(name="w")), X, Y, loss="mse")
    assert none_gradient(trace) == ()
    found = zero_gradient(trace)[0]
    assert found.name == "non_differentiable_op"
    assert found.source == line_of(layer, "# the line")
    assert found.where[0] == "w"
    assert "inside a while" in found.evidence[0].text


# ---- never read, not in the loss, integer ---------------------------------------------------


class Forgets(keras.Model):
    def __init__(self):
        super().__init__()
        self.used = layers.Dense(3, name="used")
        self.spare = layers.Dense(3, name="spare")
        self.spare.build((None, 3))

    def call(self, x):
        return ops.sum(self.used(x), -1, keepdims=True)


class TwoWeights(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")
        self.shift = self.add_weight(shape=(shape[-1],), name="shift")

    def call(self, h):
        return h * self.scale


class Counts(layers.Layer):
    def build(self, shape):
        self.n = self.add_weight(shape=(), dtype="int32", initializer="ones", name="n")

    def call(self, h):
        return h * ops.cast(self.n, "float32")


def test_unused_layer():
    found = best(Forgets())
    assert (found.name, found.where[0]) == ("unused_layer", "spare")


def test_unused_weight():
    found = best(net(TwoWeights(name="affine")))
    assert (found.name, found.where) == ("unused_weight", ("affine", "affine/shift"))


def test_integer_variable():
    found = best(net(Counts(name="counts")))
    assert (found.name, found.where) == ("integer_variable", ("counts", "counts/n"))


def test_output_that_enters_no_loss():
    i = keras.Input((4,))
    h = layers.Dense(3, name="shared")(i)
    model = keras.Model(i, [layers.Dense(1, name="one")(h), layers.Dense(2, name="two")(h)])
    model.compile("sgd", ["mse", None])
    causes = none_gradient(trace_step(model, X, [Y, np.zeros((16, 2))]))
    assert [(c.name, c.where[0]) for c in causes] == [("output_not_in_loss", "two")]


def test_replaced_kernel():
    model = net()
    layer = model.layers[0]
    layer._kernel = tf.convert_to_tensor(layer.kernel) * 0.5
    found = best(model)
    assert (found.name, found.where[0]) == ("variable_replaced", "low")


class Canvas(layers.Layer):
    def build(self, shape):
        self.canvas = self.add_weight(
            shape=(16, shape[-1]), trainable=False, initializer="zeros", name="canvas"
        )

    def call(self, h):
        self.canvas.assign(h)  # the line
        return self.canvas * 1.0


def test_assign_breaks_the_path():
    found = best(net(Canvas(name="paste")))
    assert found.name == "variable_assign_breaks_path"
    assert found.where[:2] == ("paste", "paste/canvas")
    assert found.source == line_of(Canvas, "# the line")


def test_what_was_assigned_before_does_not_matter_to_others():
    class Updates(layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(
                shape=(shape[-1],), trainable=False, initializer="zeros", name="mean"
            )

        def call(self, h):
            out = h - self.mean
            self.mean.assign(ops.mean(h, 0))
            return out

    assert none_gradient(trace_step(net(Updates()), X, Y, loss="mse")) == ()


def test_stop_gradients_inside_of_library_layers_are_not_to_blame():
    deep = []
    for i in range(30):
        deep += [layers.Dense(3, name=f"d{i}"), layers.BatchNormalization(name=f"n{i}")]
    model = net(*deep, lam(lambda h: tf.stop_gradient(tf.round(h))))
    causes = none_gradient(trace_step(model, X, Y, loss="mse"))
    assert {c.where[0] for c in causes} == {"middle"}
    assert causes[0].name == "non_differentiable_op"
    assert {"low/kernel", "n0/gamma", "d29/bias"} <= set(causes[0].where)


def test_a_library_layer_without_a_gradient_is_to_blame():
    model = net(layers.Discretization([-0.5, 0.5], name="bins"))
    found = best(model)
    assert (found.name, found.where[0]) == ("non_differentiable_op", "bins")


def test_custom_gradient_that_returns_none():
    @tf.custom_gradient
    def opaque(h):
        return h * 2.0, lambda up: None

    found = best(net(lam(lambda h: opaque(h))))
    assert found.name == "non_differentiable_op"
    assert "custom_gradient" in found.evidence[0].text


def test_custom_gradient_that_works_is_no_cut():
    @tf.custom_gradient
    def straight(h):
        return tf.round(h), lambda up: up

    trace = trace_step(net(lam(lambda h: straight(h))), X, Y, loss="mse")
    assert none_gradient(trace) == ()
    assert zero_gradient(trace) == ()


def test_one_open_way_is_enough():
    model = net(lam(lambda h: h + tf.round(h) + tf.stop_gradient(h)))
    assert none_gradient(trace_step(model, X, Y, loss="mse")) == ()


def test_variables_can_be_chosen():
    model = net(lam(lambda h: tf.round(h)))
    trace = trace_step(model, X, Y, loss="mse")
    chosen = none_gradient(trace, variables=[model.layers[0].bias])
    assert chosen[0].where == ("middle", "low", "low/bias")


def test_none_in_the_loop_but_not_in_the_trace_is_the_loops_own():
    model = net()
    trace = trace_step(model, X, Y, loss="mse")
    found = none_gradient(trace, variables=model.trainable_variables)
    assert [c.name for c in found] == ["outside_tape"]
    assert found[0].score < 0.7


class Host(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1, name="dense")

    def call(self, x):
        h = self.dense(x)
        return h * float(tf.reduce_mean(h))  # the line


def test_a_step_that_leaves_tensorflow_cannot_be_traced():
    model = Host()
    model(X)
    with pytest.raises(TraceError) as caught:
        trace_step(model, X, Y, loss="mse")
    found = untraceable(caught.value)[0]
    assert found.name == "leaves_tensorflow"
    assert found.source == line_of(Host, "# the line")
    assert untraceable(TraceError("ValueError: something else")) == ()


# ---- recorded loops -------------------------------------------------------------------------


def recorded(forward_and_loss, model=None, before=None):
    model = model or net()
    with EagerRecorder() as recorder:
        ready = before(model) if before else None
        with tf.GradientTape() as tape:
            loss = forward_and_loss(model, ready)
        tape.gradient(loss, model.trainable_variables)
    assert recorder.recording.error is None
    return none_gradient(recorder.recording, model=model, loss=loss)


EAGER = {
    "numpy()": (lambda m, _: tf.reduce_mean(tf.square(m(X).numpy() - Y)), "leaves_tensorflow"),
    "float()": (lambda m, _: tf.constant(float(tf.reduce_mean(m(X)))) * 2, "leaves_tensorflow"),
    "np.asarray": (
        lambda m, _: tf.reduce_mean(tf.square(np.asarray(m(X)) - Y)),
        "leaves_tensorflow",
    ),
    "np loss": (lambda m, _: tf.constant(np.mean((np.array(m(X)) - Y) ** 2)), "leaves_tensorflow"),
    "predict": (
        lambda m, _: tf.reduce_mean(tf.square(m.predict(X, verbose=0) - Y)),
        "leaves_tensorflow",
    ),
    "argmax": (
        lambda m, _: tf.reduce_mean(tf.cast(tf.argmax(m(X), -1), tf.float32)),
        "non_differentiable_op",
    ),
    "stop_gradient": (lambda m, _: tf.reduce_mean(tf.stop_gradient(m(X)) * Y), "stop_gradient"),
    "compiled": (lambda m, _: tf.reduce_mean(compiled(m(X))), "non_differentiable_op"),
}


@pytest.mark.parametrize("name", EAGER)
def test_eager_loop(name):
    function, cause = EAGER[name]
    found = recorded(function)[0]
    assert found.name == cause
    assert "loss" in found.where
    assert {"low/kernel", "top/bias"} <= set(found.where)
    assert found.source.startswith("test_path.py:")


def test_eager_forward_outside_the_tape():
    found = recorded(lambda m, out: tf.reduce_mean(tf.square(out - Y)), before=lambda m: m(X))[0]
    assert (found.name, found.where[0]) == ("outside_tape", "loss")


def test_eager_assign():
    canvas = tf.Variable(tf.zeros((16, 1)), trainable=False, name="board")

    def loss(model, _):
        canvas.assign(model(X))
        return tf.reduce_mean(tf.square(canvas - Y))

    found = recorded(loss)[0]
    assert found.name == "variable_assign_breaks_path"
    assert "board" in found.where


def test_eager_overwritten_variable():
    w = tf.Variable(tf.ones((4, 1)), name="w")
    with EagerRecorder() as recorder:
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.matmul(X, w) - Y))
            (gradient,) = tape.gradient(loss, [w])
            if gradient is not None:
                w = w - 0.1 * gradient
    assert none_gradient(recorder.recording, loss=loss)[0].name == "variable_replaced"


def test_healthy_eager_loop_has_no_cause():
    assert recorded(lambda m, _: tf.reduce_mean(tf.square(m(X) - Y))) == ()


def test_compiled_step_is_seen_when_it_is_traced():
    model = net(lam(lambda h: tf.round(h)))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        return loss, [g for g in gradients if g is not None]

    with EagerRecorder() as recorder:
        step(tf.constant(X), tf.constant(Y))
    found = none_gradient(recorder.recording, model=model)[0]
    assert found.name == "non_differentiable_op"
    assert found.source == line_of(test_compiled_step_is_seen_when_it_is_traced, "lambda h")
    assert {"low/kernel", "low/bias"} <= set(found.where)
