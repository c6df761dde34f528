"""Keras' own callbacks beside the guard, before it and after it."""

import keras
import numpy as np
import pytest

from tests.modes.twice import SLOW, assert_unchanged, compiled, data, fitted, guard, row, shows
from tests.training import assert_same


def ema():
    return keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)


CALLBACKS = [
    row(
        "Callbacks",
        "BackupAndRestore",
        lambda d: keras.callbacks.BackupAndRestore(f"{d}/b", save_freq=2),
        id="backup",
    ),
    row(
        "Callbacks",
        "ModelCheckpoint, whole model",
        lambda d: keras.callbacks.ModelCheckpoint(f"{d}/m.keras", monitor="loss"),
        id="checkpoint",
        marks=SLOW,
    ),
    row(
        "Callbacks",
        "ModelCheckpoint, every other batch",
        lambda d: keras.callbacks.ModelCheckpoint(
            f"{d}/m.weights.h5", save_weights_only=True, save_freq=2
        ),
        id="checkpoint_batches",
        marks=SLOW,
    ),
    row(
        "Callbacks",
        "EarlyStopping, restore_best_weights",
        lambda d: keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
        id="early_stopping",
        marks=SLOW,
    ),
    row(
        "Callbacks",
        "SwapEMAWeights",
        lambda d: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        id="swap_ema",
    ),
    row(
        "Callbacks",
        "ReduceLROnPlateau",
        lambda d: keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0),
        id="reduce_rate",
        marks=SLOW,
    ),
    row(
        "Callbacks",
        "LearningRateScheduler",
        lambda d: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
        id="schedule",
        marks=SLOW,
    ),
    row(
        "Callbacks",
        "TensorBoard, in the same directory",
        lambda d: keras.callbacks.TensorBoard(d, histogram_freq=1, update_freq=1),
        id="tensorboard",
    ),
    row(
        "Callbacks",
        "CSVLogger",
        lambda d: keras.callbacks.CSVLogger(f"{d}/l.csv"),
        id="csv",
        marks=SLOW,
    ),
    row(
        "Callbacks",
        "TerminateOnNaN",
        lambda d: keras.callbacks.TerminateOnNaN(),
        id="nan",
        marks=SLOW,
    ),
]


@pytest.mark.parametrize(
    "guard_first",
    [
        pytest.param(True, id="guard_first"),
        pytest.param(False, id="guard_last", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("make", CALLBACKS)
def test_beside_a_callback(make, guard_first, tmp_path, request):
    wants_ema = "swap_ema" in request.node.callspec.id

    def train(guards):
        (tmp_path / f"{bool(guards)}").mkdir()
        model = compiled(optimizer=ema if wants_ema else None)
        other = [make(str(tmp_path / f"{bool(guards)}"))]
        callbacks = [*guards, *other] if guard_first else [*other, *guards]
        return model, fitted(model, callbacks, validation_data=data(20))

    assert_unchanged(train, log_dir=str(tmp_path / "True"))


@shows("Callbacks", "all of them at once, the guard in the middle")
def test_beside_all_of_them(tmp_path):
    makers = [c.values[0] for c in CALLBACKS]

    def train(guards):
        (tmp_path / f"{bool(guards)}").mkdir()
        model = compiled(optimizer=ema)
        others = [make(str(tmp_path / f"{bool(guards)}")) for make in makers]
        return model, fitted(model, [*others[:5], *guards, *others[5:]])

    assert_unchanged(train)


class Stops(keras.callbacks.Callback):
    """Pulls the plug in the middle of the second epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() == 4:
            raise RuntimeError("the machine went away")


@shows("Callbacks", "BackupAndRestore after a crash: the run goes on where it was, without alarm")
def test_a_run_that_was_restored_goes_on(tmp_path):
    def train(guards):
        directory = str(tmp_path / f"{bool(guards)}")
        backup = keras.callbacks.BackupAndRestore(directory)
        model = compiled()
        with pytest.raises(RuntimeError, match="went away"):
            fitted(model, [backup, *guards, Stops()], shuffle=False)
        model = compiled()
        again = keras.callbacks.BackupAndRestore(directory)
        return model, fitted(model, [again, *guards], shuffle=False)

    *_, seen = assert_unchanged(train, steps=3)
    assert [r.step for r in rows(seen)] == [3, 4, 5]


def rows(seen):
    return next(iter(seen._sessions[0].observer.run.recorders.values())).rows


@shows("Callbacks", "a .keras file holds nothing of the guard", same=None)
def test_files_are_those_of_a_plain_run(tmp_path):
    names = []
    for guards in ([], [guard()]):
        model = compiled()
        path = tmp_path / f"{len(guards)}.keras"
        fitted(model, [keras.callbacks.ModelCheckpoint(path), *guards])
        loaded = keras.models.load_model(path)
        assert_same((model, {}), (loaded, {}))
        names.append([v.path.split("/")[-1] for v in loaded.variables])
    assert names[0] == names[1]


@shows("Callbacks", "evaluate and predict in the middle of fit")
def test_evaluate_and_predict_inside_a_callback():
    x, y = data(20)

    class Looks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["seen"] = float(np.sum(self.model.predict(x, verbose=0)))
            logs["lost"] = self.model.evaluate(x, y, verbose=0)

    def train(guards):
        model = compiled()
        return model, fitted(model, [Looks(), *guards])

    assert_unchanged(train)
