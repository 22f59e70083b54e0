"""Fine-tuning with a head, and reading a checkpoint, on a fake CUDA device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.logging import metrics
from fake_cuda import FakeCuda, fake_cuda, replace_tensors
from omegaconf import open_dict
from saved_models import write_run
from small_models import small_dictionary
from torch._subclasses.fake_tensor import unset_fake_temporarily
from training_step import UnsavedTrainer, set_up

import amos_fairseq
from amos_fairseq.data.corpus import Vocabulary
from amos_fairseq.downstream.multi_task.task import MultiTask, MultiTaskConfig, MultiTaskCriterion, TextTask
from amos_fairseq.downstream.spans.task import SquadConfig, SquadCriterion, SquadTask
from amos_fairseq.downstream.texts.scores import SCORES
from amos_fairseq.downstream.texts.task import (
    TextClassificationConfig,
    TextClassificationCriterion,
    TextClassificationTask,
)
from amos_fairseq.downstream.words.dataset import NO_LABEL
from amos_fairseq.downstream.words.model import TREES
from amos_fairseq.downstream.words.task import (
    Column,
    DependencyParsingConfig,
    DependencyParsingCriterion,
    DependencyParsingTask,
    SequenceTaggingConfig,
    SequenceTaggingCriterion,
    SequenceTaggingTask,
)
from amos_fairseq.downstream.words.views import WORD_DROPOUT
from amos_fairseq.experiments import PARSING_VIEWS, TAGGING_VIEWS

VOCABULARY = Vocabulary(Path("dict.txt"), dictionary_sha256="", tokenizer_directory=None, tokenizer_sha256=None)


def texts(length: int) -> torch.Tensor:
    """Three texts [3,T], two of them padded; 4 and above are words, 2 ends a text, 1 is padding."""
    tokens = torch.randint(4, 44, (3, length), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 0
    tokens[1, length // 2 :] = 1
    tokens[2, -1:] = 1
    return tokens


def batch_of(length: int, **more: Any) -> dict[str, Any]:
    """A batch as our data sets collate it; ``more`` is what the net gets too."""
    tokens = texts(length)
    net_input = {"src_tokens": tokens, "lengths": tokens.ne(1).sum(1).tolist()} | more
    ntokens = int(tokens.ne(1).sum())
    return {"id": torch.arange(3), "first_id": 0, "nsentences": 3, "ntokens": ntokens, "net_input": net_input}


def squad(head: str, length: int) -> tuple[Any, Any, dict[str, Any]]:
    task = SquadTask(SquadConfig(data="DATA", span_head=head, seed=1), VOCABULARY, small_dictionary())
    mask, targets = texts(length).ne(1), (torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3]))
    return task, SquadCriterion(task), batch_of(length, answer_mask=mask, span_targets=targets)


def number(length: int) -> tuple[Any, Any, dict[str, Any]]:
    record = {"task": "texts", "kind": "number", "labels": [], "num_classes": 1, "mean": 1e3, "deviation": 50.0}
    task = TextClassificationTask(TextClassificationConfig(data="DATA", seed=1), VOCABULARY, small_dictionary(), record)
    target = torch.tensor([900.0, 1e3, 1e3]).double()
    return task, TextClassificationCriterion(task), batch_of(length) | {"target": target, "num_rows": 7}


def several_tasks(length: int) -> tuple[Any, Any, dict[str, Any]]:
    """A row of classes, two with a number, and a task without a row in the batch; all with teachers."""
    kinds = {"A": "classes", "B": "number", "C": "labels"}
    records = {
        name: {"task": name, "kind": kind, "labels": [], "num_classes": 1 if name == "B" else 3, "scores": SCORES[kind]}
        for name, kind in kinds.items()
    }
    tasks = {name: TextTask(Path(name), own, (1.0, 4.0) if name == "B" else None) for name, own in records.items()}
    cfg = MultiTaskConfig(data="A:B:C", seed=1, teacher="teacher.npy", gold_weight="0.5", max_update=9)
    task = MultiTask(cfg, VOCABULARY, small_dictionary(), tasks)
    rows = {"A": torch.tensor([1]), "B": torch.tensor([0, 2]), "C": torch.tensor([], dtype=torch.int64)}
    targets = {"A": torch.tensor([2]), "B": torch.tensor([1.0, 5.0]).double(), "C": torch.zeros(0, 3).bool()}
    teachers = {"A": torch.full((1, 3), 1 / 3), "B": torch.ones(2, 1), "C": torch.zeros(0, 3)}
    labels = {
        name: {"target": targets[name], "teacher": teachers[name].double(), "id": torch.arange(len(own)), "num_rows": 5}
        for name, own in rows.items()
    }
    return task, MultiTaskCriterion(task), batch_of(length, rows_of_heads=rows) | {"labels": labels}


def words(length: int) -> tuple[Any, Any, dict[str, Any]]:
    """Sentences of two words and of one, in two slots; the first is of one column, the others of another one. Half of the
    updates have no unlabeled sentence."""
    settings = {"unlabeled_start": 0.5, "max_update": 2, "total_num_update": 0}
    views = ",".join((*TAGGING_VIEWS, WORD_DROPOUT))
    cfg = SequenceTaggingConfig(data="DATA", seed=1, views=views, **settings)
    columns = {
        f"{name}_labels": Column(Path(name), name, ["A", "B", "O"], has_spans=False) for name in ("upos", "chunk")
    }
    task = SequenceTaggingTask(cfg, VOCABULARY, small_dictionary(), columns)
    rows = dict(zip(columns, (torch.tensor([0]), torch.tensor([1, 2])), strict=True))
    batch = batch_of(length, word_positions=torch.tensor([[1, 2], [1, 0], [1, 3]]), rows_of_heads=rows)
    target, labels = torch.tensor([[0, 1], [2, NO_LABEL], [1, 0]]), [[0, 1], [2], [1, 0]]
    batch |= {"target": target, "labels": labels, "nwords": 5}
    batch["parts"] = {
        head: {"target": target[own], "labels": [labels[row] for row in own.tolist()]} for head, own in rows.items()
    }
    return task, SequenceTaggingCriterion(task, 0.1), with_unlabeled(batch, length)


def with_unlabeled(batch: dict[str, Any], length: int) -> dict[str, Any]:
    positions = {"word_positions": torch.tensor([[1, 3], [1, 2], [2, 0]])}
    positions["last_positions"] = torch.tensor([[2, 3], [1, 4], [3, 0]])
    batch["net_input"]["unlabeled"] = batch_of(length)["net_input"] | positions
    return batch | {"num_unlabeled_words": 5, "unlabeled_weight": 1.5}


def trees(length: int) -> tuple[Any, Any, dict[str, Any]]:
    """Sentences of two words and of one, in two slots."""
    views = ",".join(PARSING_VIEWS)
    cfg = DependencyParsingConfig(data="DATA", seed=1, views=views, unlabeled_start=0.5, max_update=2)
    column = Column(Path("DATA"), "deprel", ["root", "det"], has_spans=False)
    task = DependencyParsingTask(cfg, VOCABULARY, small_dictionary(), {TREES: column})
    batch = batch_of(length, word_positions=torch.tensor([[1, 2], [1, 0], [1, 3]]))
    # Head * 2 + relation: the second word depends on the root, the first one on it.
    batch |= {"target": torch.tensor([[5, 0], [0, NO_LABEL], [5, 0]]), "nwords": 5, "all_words": 5}
    return task, DependencyParsingCriterion(task), with_unlabeled(batch, length)


JOBS = {
    "number": number,
    "several tasks": several_tasks,
    "words with views": words,
    "trees with views": trees,
    "spans, independent": lambda length: squad("independent", length),
    "spans, joint": lambda length: squad("joint", length),
}


def fine_tune(cuda: FakeCuda, recipe: str, job: str, length: int, precision: str, **settings: Any) -> None:
    """Two updates and a batch of validation; every parameter gets a gradient, and an update reads the device once."""
    metrics.reset()
    with unset_fake_temporarily():
        cfg = set_up(recipe, ["model.max_positions=512"], precision).cfg
        with open_dict(cfg.model):
            cfg.model.update(settings)
        task, criterion, batch = JOBS[job](length)
    replace_tensors(criterion, cuda.mode.from_tensor)
    trainer = UnsavedTrainer(cfg, task, task.build_model(cfg.model), criterion)
    assert all(getattr(trainer.get_model().cfg, name) == value for name, value in settings.items())
    reached: set[str] = set()
    for name, parameter in trainer.get_model().named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: reached.add(name))
    for _ in range(2):
        reads = cuda.host_reads
        trainer.train_step([cuda.fake(batch)])
        assert cuda.host_reads - reads == (2 if precision == "fp16" else 1)
    assert reached == {name for name, parameter in trainer.get_model().named_parameters() if parameter.requires_grad}
    if isinstance(criterion, SequenceTaggingCriterion):
        return  # the host computes its scores, from values that a fake device lacks
    reads = cuda.host_reads
    trainer.valid_step(cuda.fake(batch))
    assert cuda.host_reads - reads == 1


CASES = [
    *(("amos_tiny", job, 65, "bf16", {}) for job in JOBS),
    ("electra_tiny", "spans, joint", 128, "bf16", {}),
    ("amos_tiny", "several tasks", 65, "fp16", {"pooling": "mean"}),
    ("amos_tiny", "spans, independent", 65, "bf16", {}),
    ("mlm_tiny", "several tasks", 65, "float32", {}),
    ("teams_tiny", "several tasks", 65, "fp16", {}),
    ("electric_tiny", "several tasks", 65, "float32", {}),
    ("electra_modern_mini", "several tasks", 65, "fp16", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "job", "length", "precision", "settings"), CASES)
def test_heads_are_trained(recipe: str, job: str, length: int, precision: str, settings: dict[str, Any]) -> None:
    """With and without relative positions and padded rows of the mask; other lengths are in test_steps.py."""
    with fake_cuda() as cuda:
        fine_tune(cuda, recipe, job, length, precision, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_read_on_the_device(tmp_path: Path, dtype: torch.dtype) -> None:
    """As ``amos_fairseq.load(path, device="cuda", dtype=dtype)`` does, but for the reading of the file."""
    write_run(tmp_path)
    encoder = amos_fairseq.load(tmp_path)
    with fake_cuda() as cuda:
        replace_tensors(encoder, cuda.mode.from_tensor)
        texts = ["the lazy dog jumps", "the end", ("the quick fox", "over the dog")]
        features = encoder.to("cuda", dtype)(texts, all_layers=True)
        assert {tensor.device.type for tensor in (*features[:3], *features.layers)} == {"cuda"}
        assert features.pooled().dtype == dtype
        assert cuda.host_reads == 0
