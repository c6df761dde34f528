"""The models of the soak: small, and of every kind that Keras trains."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers

FEATURES = 6
CLASSES = 3


def _mlp(x):
    return layers.Dense(8, activation="relu")(layers.Dense(8, activation="tanh")(x))


def _regularised(x):
    y = layers.Dense(8, kernel_regularizer="l2", bias_regularizer="l1", activation="gelu")(x)
    return layers.ActivityRegularization(1e-3)(y)


def _constrained(x):
    return layers.Dense(8, kernel_constraint=keras.constraints.MaxNorm(1.0), activation="elu")(x)


def _normalised(x):
    y = layers.BatchNormalization()(layers.Dense(8)(x))
    return layers.Dropout(0.3)(layers.Activation("relu")(y))


def _recurrent(x):
    return layers.GRU(5)(layers.Reshape((3, 2))(x))


def _lstm_bidirectional(x):
    return layers.Bidirectional(layers.LSTM(3))(layers.Reshape((3, 2))(x))


def _attention(x):
    y = layers.Dense(4)(layers.Reshape((3, 2))(x))
    y = layers.LayerNormalization()(y + layers.MultiHeadAttention(2, 2)(y, y))
    return layers.Flatten()(y)


def _convolution(x):
    y = layers.Conv1D(4, 2, padding="same", activation="relu")(layers.Reshape((3, 2))(x))
    return layers.Flatten()(layers.MaxPooling1D(2, padding="same")(y))


def _shared(x):
    dense = layers.Dense(FEATURES, activation="tanh")
    return dense(dense(x)) + x


def _nested(x):
    inner = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(4)])
    inner.build((None, FEATURES))
    return inner(x)


def _partly_frozen(x):
    frozen = layers.Dense(8, activation="relu")
    y = frozen(x)
    frozen.trainable = False
    return layers.Dense(8, activation="relu")(y)


def _embedding(x):
    ids = layers.Lambda(lambda t: keras.ops.cast(keras.ops.abs(t) * 10, "int32") % 20)(x)
    return layers.Flatten()(layers.Embedding(20, 3)(ids))


def _seeded_noise(x):
    return layers.GaussianNoise(0.1)(layers.Dense(8, activation="swish")(x))


def _gated(x):
    return layers.Dense(8)(x) * layers.Dense(8, activation="sigmoid")(x)


def _causal(x):
    y = layers.Conv1D(4, 2, padding="causal", activation="relu")(layers.Reshape((3, 2))(x))
    y = layers.SeparableConv1D(4, 2, padding="same", activation="silu")(y)
    return layers.GlobalAveragePooling1D()(y)


def _orthogonal(x):
    straight = keras.regularizers.OrthogonalRegularizer()
    y = layers.Dense(8, kernel_regularizer=straight, activation="tanh")(x)
    return layers.Dense(
        8, kernel_constraint="unit_norm", bias_constraint="max_norm", activation="softplus"
    )(y)


def _group_normalised(x):
    y = layers.GroupNormalization(2)(layers.Dense(8)(x))
    return layers.AlphaDropout(0.1)(layers.PReLU()(y))


def _shared_submodel(x):
    inner = keras.Sequential([layers.Dense(FEATURES, activation="relu")])
    inner.build((None, FEATURES))
    outer = keras.Sequential([inner, layers.Dense(FEATURES)])
    outer.build((None, FEATURES))
    return layers.Concatenate()([outer(x), inner(x)])


MODELS = {
    "causal": _causal,
    "orthogonal": _orthogonal,
    "group_normalised": _group_normalised,
    "shared_submodel": _shared_submodel,
    "mlp": _mlp,
    "regularised": _regularised,
    "constrained": _constrained,
    "normalised": _normalised,
    "recurrent": _recurrent,
    "lstm_bidirectional": _lstm_bidirectional,
    "attention": _attention,
    "convolution": _convolution,
    "shared": _shared,
    "nested": _nested,
    "partly_frozen": _partly_frozen,
    "embedding": _embedding,
    "seeded_noise": _seeded_noise,
    "gated": _gated,
}


def one_head(y):
    """Return the output that the losses of the soak are made for."""
    return layers.Dense(CLASSES, activation="softmax", dtype="float32")(y)


def two_in_two_out():
    """Return a functional model with two named inputs and two named outputs."""
    a = keras.Input((FEATURES,), name="a")
    b = keras.Input((FEATURES,), name="b")
    y = layers.Dense(8, activation="relu")(layers.Concatenate()([a, b]))
    left = layers.Dense(CLASSES, activation="softmax", dtype="float32", name="left")(y)
    right = layers.Dense(CLASSES, activation="softmax", dtype="float32", name="right")(y)
    return keras.Model({"a": a, "b": b}, {"left": left, "right": right})


class Subclassed(keras.Model):
    """Unbuilt until its first batch, with a loss of its own."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activation="relu")
        self.out = layers.Dense(CLASSES, activation="softmax", dtype="float32")

    def call(self, x):
        y = self.hidden(x)
        self.add_loss(1e-3 * keras.ops.mean(keras.ops.square(keras.ops.cast(y, "float32"))))
        return self.out(y)


class OwnStep(keras.Model):
    """A ``train_step`` that was written by hand, with two updates a step."""

    def train_step(self, data):
        x, y = data[:2]
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
                scaled = self.optimizer.scale_loss(loss)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(scaled, variables), variables)
        self._loss_tracker.update_state(loss)
        return self.compute_metrics(x, y, self(x, training=False))
