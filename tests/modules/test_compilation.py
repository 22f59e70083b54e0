"""Compiled layers against eager layers, the number of graphs, and what is logged."""

import functools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from saved_models import TEXT, write_run
from small_models import amos_criterion, encoder_config, model_and_criterion, modern_config, small_amos, small_batch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from training_step import FairseqStep, random_batches, set_up

import amos_fairseq
from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.errors import UserError
from amos_fairseq.functional import attention
from amos_fairseq.modules.bert_encoder import BertEncoder
from amos_fairseq.modules.encoder import TransformerEncoder, compiled_call
from amos_fairseq.modules.modern_encoder import ModernBertEncoder
from amos_fairseq.run import kernels as trainers

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
MASK = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
DROPOUTS = {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5}


@pytest.fixture(autouse=True)
def default_of_pytorch(nothing_compiled: None) -> Iterator[None]:
    with torch._dynamo.config.patch(optimize_ddp=True):
        yield


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile traces the layers, but does not spend minutes on generating code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled_call.cache_clear()
    yield
    compiled_call.cache_clear()


def let_compile(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, TransformerEncoder):
            module.is_compiled = True
    return model


def num_graphs() -> int:
    assert not counters["graph_break"], counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def encoder(**settings) -> BertEncoder:
    torch.manual_seed(0)
    return BertEncoder(encoder_config(**(DROPOUTS | settings)))


def gradients(
    module: nn.Module, embeddings: Tensor, mask: Tensor | None = None, seed: int = 0, lengths: list[int] | None = None
) -> list[Tensor]:
    """Outputs of all layers, and all gradients."""
    embeddings = embeddings.clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(seed)
    outputs = torch.stack(list(module(embeddings, mask, lengths=lengths)))
    outputs.pow(3).sum().backward()
    return [outputs.detach(), embeddings.grad, *(parameter.grad.clone() for parameter in module.parameters())]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@needs_compiler
@pytest.mark.slow
def test_compiled_layers_match_eager_layers() -> None:
    """In float64, some thousand roundings; three layers are one graph. Without a gradient they run eagerly."""
    plain, compiled = encoder().double().eval(), let_compile(encoder().double().eval())
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    given = random(2, 6, 8), MASK
    torch.testing.assert_close(gradients(compiled, *given), gradients(plain, *given), rtol=1e-10, atol=1e-10)
    assert num_graphs() == 1
    with torch.no_grad():
        assert all(map(torch.equal, compiled(random(1, 9, 8)), plain(random(1, 9, 8))))
    assert num_graphs() == 1


def test_batches_of_many_sizes_are_two_graphs(traced: None) -> None:
    """As in fine-tuning: one for the sizes of the first batch, one in which they are variables."""
    plain, compiled = encoder().eval(), let_compile(encoder().eval())
    for step, (batch_size, length) in enumerate(((2, 6), (3, 7), (5, 9), (4, 10), (7, 3), (2, 6))):
        given = random(batch_size, length, 8).float(), torch.arange(length).expand(batch_size, -1) >= length - 1
        torch.testing.assert_close(gradients(compiled, *given), gradients(plain, *given))
        assert num_graphs() == min(step + 1, 2)


def test_packed_batches_of_modernbert(traced: None) -> None:
    """The first layer, whose input has been normalized, a local and a global one have at most two graphs each."""

    def modern() -> ModernBertEncoder:
        torch.manual_seed(0)
        return modern_config(num_layers=4, local_attention=4).build().eval()

    plain, compiled = modern(), let_compile(modern())
    for step, lengths in enumerate(([6, 4], [3, 7, 5], [9, 1, 2, 3], [2, 8, 8], [6, 4])):
        embeddings = random(len(lengths), max(lengths), 8).float()
        mask = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
        got, expected = (gradients(module, embeddings, mask, lengths=lengths) for module in (compiled, plain))
        torch.testing.assert_close(got, expected)
        assert num_graphs() == 3 * min(step + 1, 2)


@needs_compiler
@pytest.mark.slow
def test_dropout_of_compiled_layers_follows_the_seed_and_recomputation_repeats_it() -> None:
    module, recomputing = let_compile(encoder().train()), let_compile(encoder(activation_checkpointing=True).train())
    embeddings = random(2, 6, 8).float()
    first, again, other = (gradients(module, embeddings, seed=seed) for seed in (1, 1, 2))
    recomputed = gradients(recomputing, embeddings, seed=1)
    assert num_graphs() == 1
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    torch.testing.assert_close(recomputed, first, rtol=0, atol=0)
    assert not any(torch.equal(one, two) for one, two in zip(first[:2], other[:2], strict=True))


# Kinds of layers of AMOS: of the generator, those with a detached input, its last one, those of the discriminator.
KINDS = {"amos": 4, "teams": 2}


@pytest.mark.slow
@pytest.mark.parametrize("objective", KINDS)
def test_an_objective_compiles_few_graphs_without_breaks(objective: str, traced: None) -> None:
    """Each with and without padding; evaluation of any size and further steps add none.

    Batches of other sizes add as many, whose sizes are variables: of AMOS more than eight in all, PyTorch's default limit,
    beyond which layers would run as written, and nothing would say so.
    """
    num_kinds = KINDS[objective]
    model, criterion = model_and_criterion(objective, **({"dropout": 0.1} if objective == "amos" else {}))
    let_compile(model)
    full, padded = small_batch((12,) * 4), small_batch()
    expected = 0
    for batch in (full, padded, full, padded):
        expected = min(expected + num_kinds, 2 * num_kinds)
        criterion(model, batch)[0].backward()
        assert num_graphs() == expected
    model.eval()
    with torch.no_grad():
        for lengths in ((12, 7), (12,), (9, 9, 9)):
            criterion(model, small_batch(lengths))
    assert num_graphs() == 2 * num_kinds
    model.train()
    for lengths in ((12,) * 3, (12, 7, 12), (12,) * 5, (12, 7)):
        criterion(model, small_batch(lengths))[0].backward()
    assert 2 * num_kinds < num_graphs() <= 5 * num_kinds


def test_a_trainer_compiles_and_trains_what_eager_layers_train(traced: None, caplog: pytest.LogCaptureFixture) -> None:
    """Two updates, of which the first compiles the layer, after the trainer has tried a small function."""
    caplog.set_level(logging.INFO)
    states = []
    for compiled in ("true", "false"):
        overrides = ["dataset.batch_size=2", "model.encoder_layers=1", f"model.compile={compiled}"]
        setup = set_up("mlm_tiny", overrides, precision="float32", device="cpu", vocabulary_size=600)
        step = FairseqStep(setup)
        for batch in random_batches(setup, number=2):
            step.step(batch)
        states.append(step.module.state_dict())
        assert num_graphs() == 2
    torch.testing.assert_close(*states)
    said = [record.getMessage() for record in caplog.records if record.name == trainers.__name__]
    assert said == ["compiling the encoder's layers: the first updates take about a minute longer"]


@pytest.mark.parametrize("backend", ["math", "cudnn"])
def test_the_choice_of_a_fused_kernel_does_not_break_a_graph(backend: attention.Backend) -> None:
    """As an encoder on a GPU calls it; a CPU has one of the kernels, and one that PyTorch takes in place of cuDNN's."""
    operands = [random(2, 2, 8, 4).float() for _ in range(3)]
    mask = random(1, 2, 8, 8).float() if backend == "math" else None
    compiled = torch.compile(attention.fused_attention, backend="eager", fullgraph=True)
    expected = attention.fused_attention(*operands, mask, 0.0, "math")
    torch.testing.assert_close(compiled(*operands, mask, 0.0, backend), expected)


def test_a_model_without_a_trainer_is_not_compiled(traced: None, tmp_path: Path) -> None:
    model = small_amos(compile=True)
    amos_criterion()(model, small_batch())[0].backward()
    run = write_run(tmp_path, "mlm", compile=True, activation_checkpointing=True)
    pretrained = load_checkpoint(run)
    pretrained.model.extract_features(pretrained.tokens(TEXT)[None])
    amos_fairseq.load(run)([TEXT])
    assert num_graphs() == 0


@pytest.mark.parametrize(("device", "remedy"), [("cpu", "a C\\+\\+ compiler"), ("cuda", "the Triton that belongs to")])
def test_a_missing_compiler_is_one_clear_line(device: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Callable) -> Callable:
        raise RuntimeError("torch.compile is not supported here\nand a long story")

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: None)
    with pytest.raises(UserError, match=rf"\(torch.compile is not supported here\): install {remedy}.*compile=false"):
        trainers.require_compiler(torch.device(device))
