"""Messages put together as bytes read back as the message classes would have them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.util import tensor_util

from keras_gradguard.tensorboard import wire
from keras_gradguard.tensorboard.summaries import EventBuilder


@given(st.integers(0, 2**63 - 1))
def test_numbers_of_any_size(number):
    step = event_pb2.Event.FromString(b"\x10" + wire.varint(number)).step
    assert step == number


@settings(deadline=None)
@given(st.text(max_size=300))
def test_strings_of_any_length(text):
    value = summary_pb2.Summary.Value.FromString(wire.text(1, text))
    assert value.tag == text


@settings(deadline=None, max_examples=50)
@given(
    st.floats(width=32),
    st.lists(st.integers(0, 200), max_size=3),
    st.text(max_size=200).filter(lambda t: t.isprintable()),
)
def test_events_of_numbers_tables_and_texts(number, shape, tag):
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    described = set()
    for described_before in (False, True):
        event = EventBuilder(described)
        event.scalar(f"a/{tag}", number)
        event.tensor(f"b/{tag}", array)
        event.text(f"c/{tag}", tag)
        read = event_pb2.Event.FromString(event.serialized(7, 1.5))
        assert (read.step, read.wall_time, len(event)) == (7, 1.5, 3)
        values = {v.tag: v for v in read.summary.value}
        assert [v.HasField("metadata") for v in read.summary.value] == [not described_before] * 3
        np.testing.assert_array_equal(
            tensor_util.make_ndarray(values[f"a/{tag}"].tensor), np.float32(number)
        )
        np.testing.assert_array_equal(tensor_util.make_ndarray(values[f"b/{tag}"].tensor), array)
        assert values[f"c/{tag}"].tensor.string_val[0].decode() == tag
