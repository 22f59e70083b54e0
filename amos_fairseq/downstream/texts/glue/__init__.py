"""GLUE: its tables, their preparation, the benchmark and the files of predictions."""
