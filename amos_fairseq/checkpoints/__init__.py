"""Read the checkpoints of this package, and load their encoders."""
