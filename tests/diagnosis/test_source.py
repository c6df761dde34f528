"""Which frames are the user's."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_gradguard.diagnosis import source
from keras_gradguard.diagnosis.source import Frame


@pytest.mark.parametrize(
    ("filename", "users"),
    [
        pytest.param("/home/me/train.py", True, id="script"),
        pytest.param(__file__, True, id="test"),
        pytest.param(np.__file__, False, id="numpy"),
        pytest.param(keras.__file__, False, id="keras"),
        pytest.param(tf.__file__, False, id="tensorflow"),
        pytest.param(source.__file__, False, id="this package"),
        pytest.param("<frozen importlib>", False, id="frozen"),
        pytest.param("<ipython-input-3>", True, id="notebook"),
        pytest.param("/tmp/__autograph_generated_filexy.py", False, id="autograph"),
        pytest.param("", False, id="empty"),
    ],
)
def test_is_user_file(filename, users):
    assert source.is_user_file(filename) is users


def test_stack_ends_at_the_caller():
    frames = source.stack_frames(sys._getframe())
    assert frames[-1].function == "test_stack_ends_at_the_caller"
    assert frames[-1].short.startswith("test_source.py:")
    assert str(frames[-1]).endswith(" in test_stack_ends_at_the_caller")


def test_traceback_frames_leave_libraries_out():
    try:
        np.zeros((2,)).reshape((3,))
    except ValueError as problem:
        frames = source.traceback_frames(problem.__traceback__)
    assert [f.function for f in frames] == ["test_traceback_frames_leave_libraries_out"]


class Entry:
    def __init__(self, filename, lineno, name):
        self.filename, self.lineno, self.name = filename, lineno, name


def test_outer_frames_are_stripped_and_the_keras_function_named():
    entries = [
        Entry("/me/train.py", 3, "<module>"),
        Entry("/me/net.py", 9, "call"),
        Entry("/x/site-packages/keras/src/ops/numpy.py", 100, "argmax"),
        Entry("/x/site-packages/keras/src/backend/tensorflow/numpy.py", 5, "argmax"),
    ]
    stack = source.user_stack(entries, [Frame("/me/train.py", 3, "<module>")])
    assert stack.frames == (Frame("/me/net.py", 9, "call"),)
    assert stack.api == "argmax"
    only = source.user_stack(entries[:1], [Frame("/me/train.py", 3, "<module>")])
    assert only == source.EMPTY
    assert source.user_stack(None) == source.EMPTY
