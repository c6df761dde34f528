"""Two logical CPUs, so that a training can have two replicas."""

import tensorflow as tf

_CPUS = tf.config.list_physical_devices("CPU")
if len(tf.config.get_logical_device_configuration(_CPUS[0]) or ()) != 2:
    # Has to come before the first operation; it raises when it comes too late.
    tf.config.set_logical_device_configuration(
        _CPUS[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
