"""Ways to train with Keras: each with the guard and without it, down to the last bit."""
