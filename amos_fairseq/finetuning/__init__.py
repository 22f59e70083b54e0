"""Fine-tuning runs over tasks and seeds, and the tables made of them; ``amos glue`` and ``amos squad`` stand on this.

A :class:`~amos_fairseq.finetuning.benchmark.Benchmark` says what its tasks are, which flags ``fairseq-train`` needs for
one, and how a fine-tuned checkpoint is scored. Everything else is shared: recipes, the plan of runs, the runner that goes
through it on the devices at hand and continues where it was stopped, statistics over seeds, files of results.
"""
