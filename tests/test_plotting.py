"""Figures hold the numbers they are made of, need no pyplot and no global state."""

import subprocess
import sys

import numpy as np
import pytest

from keras_gradguard import Finding, GradientGuard, Policy, Report, diagnose
from keras_gradguard.findings import GradientSize
from keras_gradguard.plotting import Panel, flow_figure


def panel(**changes):
    norms = np.array([[1e-3, 1.0, 0.0], [1e-2, np.nan, 0.0], [1e-1, 3.0, 5.0]], np.float32)
    given = {
        "title": "adam",
        "names": ("a/kernel", "b/kernel", "c/kernel"),
        "steps": np.array([0, 1, 2]),
        "norms": norms,
        "marks": ((1, "non_finite"),),
    }
    return Panel(**(given | changes))


def meshes(axis):
    """Return the arrays that an axis colours, the main one first."""
    return [np.ma.filled(mesh.get_array(), np.nan) for mesh in axis.collections]


def test_the_heat_map_shows_each_number_once():
    figure = flow_figure([panel(none=frozenset([0]))])
    heat = figure.axes[0]
    live, zero, bad, none = meshes(heat)
    np.testing.assert_allclose(
        live, [[np.nan] * 3, [0.0, np.nan, np.log10(3)], [np.nan, np.nan, np.log10(5)]], atol=1e-6
    )
    np.testing.assert_array_equal(zero == 1, [[False] * 3, [False] * 3, [True, True, False]])
    np.testing.assert_array_equal(bad == 1, [[False] * 3, [False, True, False], [False] * 3])
    np.testing.assert_array_equal(none == 1, [[True] * 3, [False] * 3, [False] * 3])
    assert [t.get_text() for t in heat.get_yticklabels()] == ["a/kernel", "b/kernel", "c/kernel"]
    assert heat.get_ylim()[0] > heat.get_ylim()[1]  # the input side on top
    assert {t.get_text() for t in heat.get_legend().get_texts()} == {"0", "NaN, Inf", "None"}
    assert "non_finite" in [t.get_text() for t in heat.texts]
    assert heat.get_title(loc="left") == "adam"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"steps": np.array([7]), "norms": np.ones((1, 3), np.float32)}, id="one step"),
        pytest.param({"norms": np.zeros((3, 3), np.float32), "marks": ()}, id="all zero"),
        pytest.param({"norms": np.full((3, 3), np.nan, np.float32)}, id="all NaN"),
        pytest.param({"none": frozenset([0, 1, 2])}, id="all None"),
        pytest.param(
            {
                "names": tuple(f"layer_{i}/kernel" for i in range(400)),
                "norms": np.ones((3, 400), np.float32),
            },
            id="400 variables",
        ),
    ],
)
def test_any_run_can_be_drawn(changes, tmp_path):
    figure = flow_figure([panel(**changes), panel()])
    figure.savefig(tmp_path / "flow.png", dpi=40)
    assert (tmp_path / "flow.png").read_bytes().startswith(b"\x89PNG")
    assert figure.get_size_inches()[1] < 40


def trained(policy=None):
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, activation="relu", name="hidden"),
            keras.layers.Dense(1, name="out"),
        ]
    )
    model.layers[0].bias.assign([-1e3] * 3)
    model.compile("sgd", "mse")
    guard = GradientGuard(log_dir=None, policy=policy, diagnose=False)
    x = np.ones((32, 4), "float32")
    model.fit(x, x[:, :1], epochs=5, batch_size=8, callbacks=[guard], verbose=0)
    return guard


@pytest.mark.filterwarnings("ignore::keras_gradguard.GradientGuardWarning")
def test_a_guard_draws_its_run(tmp_path):
    guard = trained(Policy(zero_gradient="warn"))
    figure = guard.plot()
    heat = figure.axes[0]
    assert [t.get_text() for t in heat.get_yticklabels()] == [
        "hidden/kernel",
        "hidden/bias",
        "out/kernel",
        "out/bias",
    ]
    zero = meshes(heat)[1]
    assert zero.shape == (4, guard.steps_seen)
    assert (zero[:2] == 1).all()
    assert (zero[3] != 1).all()
    assert "zero_gradient" in [t.get_text() for t in heat.texts]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_it_draws_into_the_figure_that_is_given():
    from matplotlib.figure import Figure

    mine = Figure()
    assert flow_figure([panel()], mine) is mine
    assert len(mine.axes) == 3  # heat map, colour bar, sizes


def test_a_guard_that_saw_nothing_says_so():
    with pytest.raises(ValueError, match="Train with this guard first"):
        GradientGuard(log_dir=None).plot()


def test_a_report_draws_its_gradients():
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="out")])
    x = np.ones((8, 4), "float32")
    report = diagnose(model, x, 9 * x[:, :1], loss="mse")
    assert [g.name for g in report.gradients] == ["out/kernel", "out/bias"]
    output = np.asarray(model(x))
    bias = abs(float(2 * (output - 9).mean()))
    assert report.gradients[1].norm == pytest.approx(bias, rel=1e-5)
    axis = report.plot().axes[0]
    np.testing.assert_allclose([b.get_width() for b in axis.patches], [2 * bias, bias], rtol=1e-5)
    assert axis.get_xscale() == "log"


def test_a_report_names_what_cannot_be_a_bar():
    sizes = {"a": None, "b": 0.0, "c": float("nan"), "d": 2.0}
    made = Report(gradients=tuple(GradientSize(name=n, norm=v) for n, v in sizes.items()))
    assert [t.get_text() for t in made.plot().axes[0].texts] == ["None", "0", "nan"]
    assert '"norm": "nan"' in made.to_json()


def test_a_report_without_gradients_says_so():
    made = Report(findings=(Finding(symptom="vanishing", summary="It is."),))
    with pytest.raises(ValueError, match="no gradients to plot"):
        made.plot()


def test_without_matplotlib_the_extra_is_named():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from keras_gradguard.findings import GradientSize, Report\n"
        "Report(gradients=(GradientSize(name='a', norm=1.0),)).plot()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError" in done.stderr
    assert "pip install 'keras-gradguard[plot]'" in done.stderr


def test_drawing_leaves_pyplot_alone():
    code = (
        "import sys\n"
        "from keras_gradguard.findings import GradientSize, Report\n"
        "Report(gradients=(GradientSize(name='a', norm=1.0),)).plot()\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
