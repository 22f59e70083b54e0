"""GLUE: tasks, prepared data, evaluation, the whole experiment with its table, and the archive for the leaderboard."""
