"""Channels: what arrives on the host is what happened, in order, whatever the optimizer does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_gradguard import statistics
from keras_gradguard.taps.base import Cadence
from keras_gradguard.taps.tensorflow import TensorFlowTap

MODES = ["eager", "graph", "xla"]


def variables(*shapes, dtype="float32"):
    rng = np.random.default_rng(0)
    return [
        keras.Variable(rng.normal(size=s).astype(dtype), name=f"v{i}") for i, s in enumerate(shapes)
    ]


class Bench:
    """One optimizer under a tap, stepped with gradients of our choice."""

    def __init__(self, optimizer, targets, mode, *, build=True, **cadence):
        self.optimizer, self.targets = optimizer, targets
        if build:
            optimizer.build(targets)
        cadence = {
            "sample_every": 3,
            "ring": 8,
            "dense": 0,
            "jit_compile": mode == "xla",
            **cadence,
        }
        self.tap = TensorFlowTap(Cadence(**cadence))

        def step(grads):
            optimizer.apply(grads, targets)
            return tf.zeros([])

        self.step = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")

    def run(self, steps):
        moved = []
        with self.tap.installed([self.optimizer]):
            for grads in steps:
                before = [np.array(v, "float64") for v in self.targets]
                self.step([tf.constant(g) for g in grads])
                after = [np.array(v, "float64") for v in self.targets]
                moved.append(
                    [
                        [np.linalg.norm(a - b), np.linalg.norm(b)]
                        for a, b in zip(after, before, strict=True)
                    ]
                )
        return moved

    @property
    def channel(self):
        (channel,) = self.tap.channels.values()
        return channel


def random_steps(count, *shapes, seed=1):
    rng = np.random.default_rng(seed)
    return [[rng.normal(size=s).astype("float32") for s in shapes] for _ in range(count)]


@pytest.mark.parametrize("mode", MODES)
def test_rows_and_samples_are_what_happened(mode):
    bench = Bench(keras.optimizers.Adam(0.1), variables((3, 2), (4,), ()), mode)
    steps = random_steps(8, (3, 2), (4,), ())
    moved = bench.run(steps)
    reading = bench.channel.read()
    assert reading.lost == 0
    assert [r.step for r in reading.rows] == list(range(8))
    for row, grads in zip(reading.rows, steps, strict=True):
        np.testing.assert_allclose(row.norm, [np.linalg.norm(g) for g in grads], rtol=1e-5)
        assert (row.scale, row.skipped, row.update_due) == (1.0, False, True)
    assert [s.step for s in reading.samples] == [0, 3, 6]
    for sample in reading.samples:
        want = np.array(moved[sample.step])
        np.testing.assert_allclose(sample.update, want[:, 0], rtol=1e-4)
        np.testing.assert_allclose(sample.weight, want[:, 1], rtol=1e-4)
        assert sample.learning_rate == pytest.approx(0.1)
        for counts, g in zip(sample.histogram, steps[sample.step], strict=True):
            np.testing.assert_array_equal(counts, statistics.exponent_counts(g))
        np.testing.assert_allclose(
            sample.max_abs, [np.abs(g).max() for g in steps[sample.step]], rtol=1e-6
        )
    assert bench.channel.read().rows == ()


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("count", [7, 8, 9, 20])
def test_a_ring_that_is_read_too_late_says_how_much_is_lost(count, mode):
    bench = Bench(keras.optimizers.SGD(0.1), variables((2,)), mode, ring=8)
    steps = random_steps(count, (2,))
    bench.run(steps)
    reading = bench.channel.read()
    assert reading.lost == max(0, count - 8)
    assert [r.step for r in reading.rows] == list(range(max(0, count - 8), count))
    for row in reading.rows:
        np.testing.assert_allclose(row.norm[0], np.linalg.norm(steps[row.step][0]), rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_reading_in_pieces_gives_every_row_once(mode):
    bench = Bench(keras.optimizers.SGD(0.1), variables((2,)), mode, ring=5)
    steps, seen, samples = random_steps(17, (2,)), [], []
    for start, stop in ((0, 4), (4, 9), (9, 9), (9, 12), (12, 17)):
        bench.run(steps[start:stop])
        if bench.tap.channels:
            reading = bench.channel.read()
            assert reading.lost == 0
            seen += [r.step for r in reading.rows]
            samples += [s.step for s in reading.samples]
    assert seen == list(range(17))
    assert samples == [0, 3, 6, 9, 12, 15]


@pytest.mark.parametrize("mode", MODES)
def test_the_first_steps_are_sampled_densely_and_on_request(mode):
    bench = Bench(
        keras.optimizers.SGD(0.1), variables((2,)), mode, dense=2, ring=20, sample_every=7
    )
    bench.run(random_steps(4, (2,)))
    bench.channel.sample_next(2)
    bench.run(random_steps(5, (2,)))
    assert [s.step for s in bench.channel.read().samples] == [0, 1, 4, 5, 7]


@pytest.mark.parametrize("mode", MODES)
def test_numbering_goes_on_where_the_optimizer_is(mode):
    optimizer, targets = keras.optimizers.SGD(0.1), variables((2,))
    optimizer.build(targets)
    for grads in random_steps(5, (2,)):
        optimizer.apply(grads, targets)
    bench = Bench(optimizer, targets, mode, build=False)
    bench.run(random_steps(3, (2,)))
    assert [r.step for r in bench.channel.read().rows] == [5, 6, 7]


@pytest.mark.parametrize("mode", MODES)
def test_gradient_accumulation_is_due_every_kth_step(mode):
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    bench = Bench(optimizer, variables((2,)), mode, sample_every=1)
    moved = bench.run(random_steps(8, (2,)))
    reading = bench.channel.read()
    assert [r.step for r in reading.rows] == list(range(8))
    due = [r.update_due for r in reading.rows]
    assert due == [False, False, True] * 2 + [False, False]
    assert due == [m[0][0] > 0 for m in moved]
    assert [bool(s.update[0] > 0) for s in reading.samples] == due


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_that_was_left_in_the_middle(mode):
    optimizer, targets = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), variables((2,))
    optimizer.build(targets)
    for grads in random_steps(4, (2,)):
        optimizer.apply(grads, targets)
    bench = Bench(optimizer, targets, mode, build=False)
    moved = bench.run(random_steps(5, (2,)))
    assert [r.update_due for r in bench.channel.read().rows] == [m[0][0] > 0 for m in moved]


@pytest.mark.parametrize("mode", MODES)
def test_loss_scaling_is_taken_out_and_skipped_steps_are_told(mode):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
    bench = Bench(optimizer, variables((2,)), mode, sample_every=1)
    steps = random_steps(5, (2,))
    steps[2][0][1] = np.inf
    scales = [64.0, 64.0, 64.0, 32.0, 32.0]
    moved = bench.run([[g * s for g in grads] for grads, s in zip(steps, scales, strict=True)])
    reading = bench.channel.read()
    assert [r.scale for r in reading.rows] == scales
    assert [r.skipped for r in reading.rows] == [False, False, True, False, False]
    assert [r.update_due for r in reading.rows] == [True, True, False, True, True]
    assert moved[2][0][0] == 0
    for row, grads in zip(reading.rows, steps, strict=True):
        if not row.skipped:
            np.testing.assert_allclose(row.norm[0], np.linalg.norm(grads[0]), rtol=1e-5)
    for sample in reading.samples:
        np.testing.assert_allclose(sample.update[0], moved[sample.step][0][0], rtol=1e-4)
        if sample.step != 2:
            np.testing.assert_array_equal(
                sample.histogram[0], statistics.exponent_counts(steps[sample.step][0])
            )


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_of_none_is_a_column_of_nan(mode):
    targets = variables((2,), (3,))
    bench = Bench(keras.optimizers.SGD(0.1), targets, mode)

    def step(g):
        bench.optimizer.apply([g, None], targets)
        return tf.zeros([])

    step = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    with bench.tap.installed([bench.optimizer]):
        for _ in range(3):
            step(tf.constant([3.0, 4.0]))
    reading = bench.channel.read()
    assert bench.channel.table.none == {1}
    for row in reading.rows:
        np.testing.assert_array_equal(row.norm, [5.0, np.nan])
    assert reading.samples[0].histogram[1].sum() == 0


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_rows_of_an_embedding(mode):
    targets = variables((50, 2))
    bench = Bench(keras.optimizers.SGD(0.1), targets, mode)

    def step(values):
        slices = tf.IndexedSlices(values, tf.constant([4, 7]), tf.constant([50, 2]))
        bench.optimizer.apply([slices], targets)
        return tf.zeros([])

    step = step if mode == "eager" else tf.function(step)
    with bench.tap.installed([bench.optimizer]):
        step(tf.constant([[3.0, 0.0], [0.0, 4.0]]))
    reading = bench.channel.read()
    assert bench.channel.table.variables[0].sparse
    assert reading.rows[0].norm[0] == 5.0
    assert reading.samples[0].histogram.sum() == 4
    np.testing.assert_allclose(reading.samples[0].update[0], 0.5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_other_dtypes(mode, dtype):
    target = keras.Variable(np.ones(4, "float32"), dtype=dtype, name="w")
    optimizer = keras.optimizers.SGD(0.5)
    bench = Bench(optimizer, [target], mode)

    def step(g):
        optimizer.apply([tf.cast(g, dtype)], [target])
        return tf.zeros([])

    step = step if mode == "eager" else tf.function(step)
    with bench.tap.installed([optimizer]):
        step(tf.constant([1.0, -2.0, 0.0, 0.5]))
    reading = bench.channel.read()
    np.testing.assert_allclose(reading.rows[0].norm, [np.sqrt(5.25)], rtol=1e-6)
    np.testing.assert_allclose(reading.samples[0].update, [0.5 * np.sqrt(5.25)], rtol=1e-2)
    np.testing.assert_allclose(reading.samples[0].weight, [2.0], rtol=1e-6)
    assert bench.channel.table.variables[0].dtype == dtype


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_is_overwritten_with_its_gradient_is_left_out(mode):
    plain, statistic = variables((2,), (2,))
    statistic.overwrite_with_gradient = True
    bench = Bench(keras.optimizers.SGD(0.1), [plain, statistic], mode)
    bench.run(random_steps(3, (2,), (2,)))
    assert [v.path for v in bench.channel.table.variables] == ["v0"]
    assert len(bench.channel.read().rows) == 3


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_an_empty_variable(mode):
    bench = Bench(keras.optimizers.SGD(0.1), variables((0, 3), (2,)), mode)
    bench.run(random_steps(3, (0, 3), (2,)))
    reading = bench.channel.read()
    assert all(r.norm[0] == 0 for r in reading.rows)
    assert reading.samples[0].histogram[0].sum() == 0
    assert reading.samples[0].max_abs[0] == 0


def test_the_optimizer_is_as_it_was_afterwards():
    bench = Bench(keras.optimizers.SGD(0.1), variables((2,)), "eager")
    before = dict(vars(bench.optimizer))
    bench.run(random_steps(2, (2,)))
    assert vars(bench.optimizer).keys() == before.keys()
    with pytest.raises(KeyError), bench.tap.installed([bench.optimizer]):
        assert "apply" in vars(bench.optimizer)
        raise KeyError
    assert "apply" not in vars(bench.optimizer)


def test_an_apply_of_the_users_own_is_put_back():
    bench = Bench(keras.optimizers.SGD(0.1), variables((2,)), "eager")
    own = vars(bench.optimizer)
    mine = own["apply"] = lambda grads, variables=None: None
    with bench.tap.installed([bench.optimizer]):
        assert own["apply"] is not mine
    assert own["apply"] is mine


def test_one_tap_wraps_an_optimizer_once():
    bench = Bench(keras.optimizers.SGD(0.1), variables((2,)), "eager")
    with bench.tap.installed([bench.optimizer]):
        bench.run(random_steps(2, (2,)))
        assert "apply" in vars(bench.optimizer)
    assert len(bench.channel.read().rows) == 2


def test_rebase_starts_a_new_run():
    bench = Bench(keras.optimizers.SGD(0.1), variables((2,)), "graph")
    bench.run(random_steps(3, (2,)))
    for grads in random_steps(4, (2,)):
        bench.optimizer.apply(grads, bench.targets)
    bench.channel.rebase()
    assert bench.channel.first_step == 7
    bench.run(random_steps(2, (2,)))
    assert [r.step for r in bench.channel.read().rows] == [7, 8]


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_a_glance_leaves_the_rows_for_the_next_reading(mode):
    bench = Bench(keras.optimizers.SGD(0.1), variables((2,)), mode, ring=12, sample_every=50)
    steps = random_steps(9, (2,))
    bench.run(steps[:2])
    assert bench.channel.glance() is None  # step 0 was sampled
    assert len(bench.channel.read().rows) == 2
    waiting = []
    for start in (2, 5):
        bench.run(steps[start : start + 3])
        glance = bench.channel.glance()
        want = [np.linalg.norm(g[0]) ** 2 / 2 for g in steps[start : start + 3]]
        np.testing.assert_allclose(glance.half_squares[:, 0], want, rtol=1e-5)
        waiting.append(glance.waiting)
    assert waiting == [3, 6]
    bench.run(steps[8:])
    assert [r.step for r in bench.channel.read().rows] == list(range(2, 9))


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_a_glance_asks_for_a_reading_before_the_ring_is_full(mode):
    bench = Bench(keras.optimizers.SGD(0.1), variables((2,)), mode, ring=8, sample_every=50)
    steps = random_steps(9, (2,))
    bench.run(steps[:1])
    bench.channel.read()
    asked = []
    for start in range(1, 9, 2):
        bench.run(steps[start : start + 2])
        asked.append(bench.channel.glance() is None)
    # As many again as came last must still fit.
    assert asked == [False, False, False, True]
    reading = bench.channel.read()
    assert (reading.lost, len(reading.rows)) == (0, 8)


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_glance_never_leaves_a_nan_waiting(mode, bad):
    bench = Bench(keras.optimizers.SGD(0.1), variables((2,)), mode, sample_every=50)
    good = np.ones(2, np.float32)
    bench.run([[good], [good]])
    bench.channel.read()
    bench.run([[good], [good * np.float32(bad)]])
    assert bench.channel.glance() is None


def test_eager_steps_are_on_the_host_already():
    bench = Bench(keras.optimizers.SGD(0.1), variables((2,)), "eager", sample_every=50)
    bench.run(random_steps(3, (2,)))
    assert bench.channel.glance() is None
