"""A training without a process."""

import pytest
import torch

from amos_fairseq.experiments import runner as runner_module


@pytest.fixture
def trainings(monkeypatch):
    """Record the calls of training, and write checkpoints instead of starting a process."""
    calls = []

    def train(command, directory, variables, stop, report):
        calls.append(directory.name)
        state = {"last_optimizer_state": {"m": torch.zeros(9)}, "model": {"w": torch.ones(2)}}
        state |= {"optimizer_history": [{"num_updates": 4}], "extra_state": {"previous_training_time": 2.5}}
        for name in ("best", "last"):
            torch.save(state, directory / f"checkpoint_{name}.pt")
        report(8, [])

    monkeypatch.setattr(runner_module, "train", train)
    return calls
