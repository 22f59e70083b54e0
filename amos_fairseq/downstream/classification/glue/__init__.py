"""GLUE: its tables, their preparation, the benchmark and the files of predictions."""

# Of GLUE's official files; the variable names a mirror.
GLUE_BASE_URL, GLUE_BASE_URL_VARIABLE = "https://dl.fbaipublicfiles.com", "GLUE_BASE_URL"
