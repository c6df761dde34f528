"""The GradGuard tab of TensorBoard."""
