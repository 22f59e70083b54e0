"""Checkpoints: read, written, loaded as encoders, and imported from the released AMOS checkpoint."""
