"""The task of docs/adding_a_task.md: its code in a folder of its own trains, and its checkpoint is loaded."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from fine_tuning_tasks import set_up
from omegaconf import OmegaConf
from small_models import ELECTRA_SETTINGS, small_dictionary
from tiny_runs import ROOT

import amos_fairseq
from amos_fairseq import downstream
from amos_fairseq.checkpoints.read import restore_model
from amos_fairseq.models.electra import ElectraConfig
from amos_fairseq.text.encoding import BinarizedFile


def test_a_folder_and_a_name_make_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is imported from a folder, as those of ``DOWNSTREAM_TASKS`` are."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding_a_task.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "parity").mkdir()
    (tmp_path / "parity" / "task.py").write_text(code)
    monkeypatch.setattr(downstream, "__path__", [*downstream.__path__, str(tmp_path)])
    parity = importlib.import_module("amos_fairseq.downstream.parity.task")
    files = [f"amos_fairseq/downstream/{name.replace('.', '/')}.py" for name in amos_fairseq.DOWNSTREAM_TASKS]
    assert all((ROOT / file).is_file() for file in files)
    dictionary, draw = small_dictionary(), np.random.default_rng(1)
    small_dictionary().save(str(tmp_path / "dict.txt"))
    for split, count in (("train", 60), ("valid", 10)):
        with BinarizedFile(f"{tmp_path / split}", len(dictionary)) as file:
            for _ in range(count):
                file.add_line(draw.integers(4, 40, draw.integers(1, 9)).tolist())
            if split == "valid":
                file.add_line([5] * 30)  # longer than tokens_per_text
    task = set_up("parity", tmp_path, tokens_per_text=12)
    settings = OmegaConf.structured(ElectraConfig(**ELECTRA_SETTINGS))
    OmegaConf.set_struct(settings, False)
    settings._name = "electra"
    torch.manual_seed(1)
    model, criterion = task.build_model(settings), parity.ParityCriterion(task)
    adam, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    task.load_dataset("train")
    task.load_dataset("valid")
    assert len(task.datasets["valid"][10]["tokens"]) == task.datasets["valid"].sizes[10] == 12
    for epoch in range(1, 11):
        iterator = task.get_batch_iterator(task.datasets["train"], max_sentences=20, max_positions=128, epoch=epoch)
        for batch in iterator.next_epoch_itr():
            adam.zero_grad()
            loss, size, _ = criterion(model, batch)
            (loss / size).backward()
            adam.step()
            losses.append(float(loss) / size)
    assert losses[-1] < 0.5 * losses[0]
    restored = restore_model(tmp_path / "checkpoint.pt", settings, model.state_dict(), task.dictionary)
    assert type(restored) is parity.ParityModel
    tokens = batch["net_input"]["src_tokens"]
    assert torch.equal(restored.eval()(tokens), model.eval()(tokens))
