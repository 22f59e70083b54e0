"""The encoder with a head: one folder a task with labels, and what they share. Tasks do not import each other."""
