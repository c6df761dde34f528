"""What TensorBoard shows of a guarded run: event files, layout and the GradGuard tab."""
