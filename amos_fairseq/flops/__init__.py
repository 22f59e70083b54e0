"""Floating point operations: of a configuration (``amos flops``), of a run, and of all recipes (``amos recipes``)."""
