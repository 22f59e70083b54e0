"""Fine-tuning over tasks and seeds, and the tables of its results: the code behind ``amos glue``, ``squad`` and ``tag``.

``benchmark.py`` is the interface of a benchmark; ``glue/``, ``squad.py`` and ``tagging.py`` implement it. ``run_benchmark.py``
goes from the first run to the table. It uses ``session.py`` (the checked arguments), ``recipes.py`` (hyperparameters),
``runs.py`` (the runs and their results), ``runner.py`` (runs them on the devices and resumes them), ``training.py`` (one
``fairseq-train`` process), and ``summary.py`` (statistics over seeds, and the papers' results).
"""
