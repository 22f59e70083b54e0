"""A benchmark without data, of which a fake training gives the scores."""

import dataclasses
from pathlib import Path

from amos_fairseq.experiments.benchmark import Benchmark, BenchmarkTask, PretrainedCheckpoint, Session
from amos_fairseq.experiments.recipes import Hyperparameters, Recipe

HYPERPARAMETERS = Hyperparameters(lr=1e-3, epochs=2, batch_size=16, warmup=0.1)
START = PretrainedCheckpoint(Path("start.pt"), "c" * 64, "amos", {"max_positions": 80, "encoder_embed_dim": 16}, {}, 7)
START = dataclasses.replace(START, from_scratch=True)  # no run reads the file


SCORES = {"seed1": 60.0, "seed2": 80.0, "seed3": 70.0, "seed4": 75.0}


class Toy(Benchmark):
    """A benchmark whose scores are given by seed."""

    name = trained_as = "toy"

    def __init__(self, out, seeds=(1, 2, 3), trials=(HYPERPARAMETERS,), scores=SCORES, **changed):
        recipe = Recipe("r", "a recipe", "base", {})
        session = Session(START, recipe, {}, seeds, out, ("cpu",), "float32", keep_checkpoints=False)
        self.session = dataclasses.replace(session, **changed)
        self.tasks = {"Toy": BenchmarkTask("Toy", 64, "score", "d" * 64, trials, notes=("toy data",))}
        self.scores, self.evaluated = scores, []

    def train_flags(self, run):
        return ["DATA"]

    def fill_directory(self, run):
        (run.directory / "tokenizer").mkdir(exist_ok=True)

    def evaluate(self, task, checkpoint, device, stop):
        self.evaluated.append((checkpoint.parent.name, device))
        return {"score": self.scores[checkpoint.parent.name], "other": 1.0}
