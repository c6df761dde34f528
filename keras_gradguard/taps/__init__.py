"""How numbers leave a running training step."""
