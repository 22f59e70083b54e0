"""Tasks with labels: one folder a task, and what they share: the encoder with a head, runs, results and their table."""
