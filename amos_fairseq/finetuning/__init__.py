"""Fine-tuning over tasks and seeds, and the tables of its results: the code behind ``amos glue``, ``squad`` and ``tag``.

``benchmark.py`` says what a benchmark has to give; ``glue/``, ``squad.py`` and ``tagging.py`` give it. ``run_benchmark.py``
goes from the first run to the table. It uses ``session.py`` (what the user gave, checked), ``recipes.py`` (hyperparameters),
``runs.py`` (the runs and their results), ``runner.py`` (runs them on the devices and resumes them), ``training.py`` (one
``fairseq-train`` process), and ``report.py`` (statistics over seeds, and the tables).
"""
