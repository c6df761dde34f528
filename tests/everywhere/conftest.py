"""Two logical CPUs, so that a training can have two replicas."""

import faulthandler

import pytest
import tensorflow as tf

_CPUS = tf.config.list_physical_devices("CPU")
if len(tf.config.get_logical_device_configuration(_CPUS[0]) or ()) != 2:
    # Has to come before the first operation; it raises when it comes too late.
    tf.config.set_logical_device_configuration(
        _CPUS[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )

# Replicas that wait for each other wait for ever, in C++: nothing but the end of the process
# gets a test out of that.
_SECONDS = 300


@pytest.fixture(autouse=True)
def _time_limit():
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
