"""Fine-tuning over tasks and seeds, and the tables of its results: the code behind ``amos glue`` and ``amos squad``.

``glue/`` and ``squad/`` implement the interface in ``benchmark.py``: their tasks, the flags that ``fairseq-train`` needs
for each, and the evaluation of a fine-tuned checkpoint. The other files are shared. ``session.py`` checks what the user
gave, ``recipes.py`` holds hyperparameters, ``runs.py`` plans the runs and stores their results, ``runner.py`` executes
and resumes them on the available devices, ``training.py`` controls one ``fairseq-train`` process, and ``report.py``
computes statistics over seeds and writes the tables.
"""
