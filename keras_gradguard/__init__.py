"""True gradients inside Keras training, an honest alarm, the cause and the fix."""
