"""What ``fit`` can be fed with: every kind of data, weights, validation."""

import multiprocessing
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.modes.twice import SLOW, assert_unchanged, compiled, data, fitted, guard, row, shows
from tests.training import mlp


class Batches(keras.utils.PyDataset):
    """Batches by number."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = data()

    def __len__(self):
        return 3

    def __getitem__(self, i):
        part = slice(16 * i, 16 * i + 16)
        return self.x[part], self.y[part]


def stream():
    batches = Batches()
    while True:
        for i in range(3):
            yield batches[i]


def dataset():
    return tf.data.Dataset.from_tensor_slices(data()).batch(16)


FEEDS = [
    row("Data", "NumPy arrays", lambda: {}, id="arrays", marks=SLOW),
    row(
        "Data",
        "a generator",
        lambda: {"x": stream(), "steps_per_epoch": 3},
        id="generator",
        marks=SLOW,
    ),
    row("Data", "tf.data", lambda: {"x": dataset()}, id="tf_data", marks=SLOW),
    row(
        "Data",
        "tf.data that repeats, with steps_per_epoch",
        lambda: {"x": dataset().repeat().prefetch(2), "steps_per_epoch": 3},
        id="tf_data_repeating",
        marks=SLOW,
    ),
    row(
        "Data", "PyDataset", lambda: {"x": Batches(), "shuffle": False}, id="py_dataset", marks=SLOW
    ),
    row(
        "Data",
        "PyDataset with worker threads",
        lambda: {"x": Batches(workers=3, max_queue_size=4), "shuffle": False},
        id="py_dataset_threads",
    ),
    row(
        "Data",
        "class_weight",
        lambda: {"class_weight": {0: 1.0, 1: 0.5, 2: 2.0}},
        id="class_weight",
        marks=SLOW,
    ),
    row(
        "Data",
        "sample_weight",
        lambda: {"sample_weight": np.linspace(0.1, 1, 40)},
        id="sample_weight",
        marks=SLOW,
    ),
    row(
        "Data",
        "validation_data",
        lambda: {"validation_data": data(20)},
        id="validation_data",
        marks=SLOW,
    ),
    row(
        "Data",
        "validation_freq",
        lambda: {"validation_data": data(20), "validation_freq": 2},
        id="validation_freq",
        marks=SLOW,
    ),
    row(
        "Data",
        "validation_split",
        lambda: {"validation_split": 0.2},
        id="validation_split",
        marks=SLOW,
    ),
    row("Data", "initial_epoch", lambda: {"initial_epoch": 3, "epochs": 5}, id="initial_epoch"),
]


@pytest.mark.parametrize("feed", FEEDS)
def test_feeding(feed):
    def train(guards):
        model = compiled()
        return model, fitted(model, guards, **feed())

    kwargs = feed()
    assert_unchanged(train, steps=4 if "validation_split" in kwargs else 6)


@shows("Data", "PyDataset with worker processes (use_multiprocessing, a fork)")
@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system"
)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*os.fork:RuntimeWarning")
def test_worker_processes(tmp_path):
    def train(guards):
        model = compiled()
        feed = Batches(workers=2, use_multiprocessing=True)
        return model, fitted(model, guards, x=feed, shuffle=False)

    # With an event file open when the workers are forked: only the parent writes to it.
    *_, seen = assert_unchanged(train, log_dir=str(tmp_path))
    files = [p for p in tmp_path.rglob("*") if "tfevents" in p.name]
    assert len(files) == 1
    assert f".{os.getpid()}." in files[0].name
    assert seen.steps_seen == 6


class OverRagged(keras.Model):
    """A model of one's own over rows of unequal length; Keras' layers take none."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(20, 4)
        self.out = layers.Dense(3, activation="softmax")

    def call(self, x):
        rows = tf.RaggedTensor.from_row_splits(self.table(x.flat_values), x.row_splits)
        return self.out(tf.reduce_mean(rows, axis=1))


def ragged():
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 5, 40)
    x = tf.RaggedTensor.from_row_lengths(rng.integers(0, 20, lengths.sum()), lengths)
    return tf.data.Dataset.from_tensor_slices((x, data()[1])).batch(16)


def sparse():
    x, y = data()
    return tf.data.Dataset.from_tensor_slices(
        (tf.sparse.from_dense(np.where(x > 0, x, 0)), y)
    ).batch(16)


def over_sparse():
    inputs = keras.Input((6,), sparse=True)
    hidden = layers.Dense(8, activation="relu")(inputs)
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))


@pytest.mark.parametrize(
    ("make", "feed"),
    [
        row("Data", "sparse tensors", over_sparse, sparse, id="sparse"),
        row(
            "Data",
            "ragged tensors, in a subclassed model",
            OverRagged,
            ragged,
            id="ragged",
        ),
    ],
)
def test_composite_tensors(make, feed):
    def train(guards):
        model = compiled(make, jit_compile=False)
        return model, fitted(model, guards, x=feed())

    assert_unchanged(train)


@shows(
    "Data",
    "ragged tensors, into keras.layers.Dense",
    refused="Keras: ValueError, Shapes used to initialize variables must be fully-defined",
)
@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
def test_ragged_tensors_are_refused_by_keras_own_layers(guarded):
    rows = tf.data.Dataset.from_tensor_slices(
        (tf.ragged.constant([[1.0, 2.0], [3.0]] * 8), np.zeros(16))
    ).batch(8)
    model = compiled(lambda: keras.Sequential([layers.Dense(3)]), loss="mse")
    with pytest.raises((ValueError, TypeError), match=r"fully-defined|[Rr]agged"):
        fitted(model, [guard()] if guarded else [], x=rows)


@pytest.mark.slow
@shows("Execution", "train_on_batch, inside watch")
def test_train_on_batch():
    batches = Batches()

    def train(guards):
        model = compiled(mlp)
        losses = []
        if not guards:
            losses = [model.train_on_batch(*batches[i % 3]) for i in range(6)]
            return model, {"loss": [float(v) for v in losses]}
        with guards[0].watch(model):
            for i in range(6):
                losses.append(model.train_on_batch(*batches[i % 3]))
                guards[0].step()
        return model, {"loss": [float(v) for v in losses]}

    assert_unchanged(train)
