"""How numbers leave a running training step. The only place, with the layers, that names a backend."""
