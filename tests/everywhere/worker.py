"""One of two workers of a MultiWorkerMirroredStrategy; prints what it saw as one JSON line."""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_gradguard.errors import GradientGuardError
from keras_gradguard.guard import GradientGuard

_STEPS = 24


def main(kind, guarded, log_dir):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        last = {"activation": "relu", "bias_initializer": keras.initializers.Constant(-100.0)}
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, activation="relu"),
                layers.Dense(1, **(last if kind == "dead" else {})),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
    optimizer = model.optimizer
    with strategy.scope():
        optimizer.build(model.trainable_variables)
    x = np.random.default_rng(1).normal(size=(64, 6)).astype("float32")
    y = np.abs(x[:, :1])
    source = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    batches = iter(strategy.experimental_distribute_dataset(source.with_options(options)))

    def one(inputs):
        a, b = inputs
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(model(a, training=True) - b), axis=-1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=8)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step():
        losses = strategy.run(one, args=(next(batches),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    guard = GradientGuard(log_dir=log_dir, sample_every=3, check_every=2)
    found = {"error": None, "step": None}
    try:
        if kind == "fit":
            model.fit(x, y, verbose=0, callbacks=[guard] if guarded else [])
        elif guarded:
            with guard.watch(model, optimizer):
                for _ in range(_STEPS):
                    step()
                    guard.step()
        else:
            for _ in range(_STEPS):
                step()
    except GradientGuardError as error:
        found = {"error": type(error).__name__, "step": error.finding.step}
    except ValueError as error:
        found = {"error": str(error)[-90:], "step": None}
    task = strategy.cluster_resolver.task_id
    found["weights"] = [np.asarray(v).tobytes().hex() for v in model.variables]
    found["seen"] = guard.steps_seen
    found["files"] = sorted(p.name for p in Path(log_dir).rglob("*") if p.is_file())
    found["task"] = task
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "guarded", sys.argv[3])
