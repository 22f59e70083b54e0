"""The share of each part of a step in its time, measured by torch.profiler.

Modules mark their forward pass as ranges of the profile. An operator belongs to the innermost range in which it runs. In the
backward pass it runs in an autograd node, which carries the sequence number of the operator that created it, and belongs to
the range of that operator. On a GPU the time of an operator is that of its kernels. Compiled layers are profiled without
compilation, because compiled code does not call modules.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import set_checkpoint_early_stop

from amos_fairseq.measure.fairseq_step import FairseqStep
from amos_fairseq.measure.measurement import Batch, synchronize
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.modules.bert_encoder import BertLayer, SelfAttention
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.modules.heads import DetectionHead, EmbeddingHead
from amos_fairseq.modules.mixture import MixtureWeights
from amos_fairseq.modules.modern_encoder import FinalNorm, ModernBertLayer, RotaryAttention
from amos_fairseq.modules.relative_position import RelativePositionBias

PREFIX = "part: "
EMBEDDINGS, ATTENTION, FFN = "embeddings", "attention", "feed-forward, residuals, LayerNorm"
HEADS, OUTPUT, LOSS = "heads", "output layer, sampling", "loss, statistics"
OPTIMIZER, OTHER = "clipping, optimizer", "other"
PARTS = (EMBEDDINGS, ATTENTION, FFN, HEADS, OUTPUT, LOSS, OPTIMIZER, OTHER)

# The first class that a module is an instance of; what a model does outside of its modules is its output layer.
PART_OF_MODULE: tuple[tuple[type[nn.Module], str], ...] = (
    (SelfAttention, ATTENTION),
    (RelativePositionBias, ATTENTION),
    (RotaryAttention, ATTENTION),
    (BertLayer, FFN),
    (ModernBertLayer, FFN),
    (FinalNorm, FFN),
    (TransformerEncoder, EMBEDDINGS),
    (nn.Embedding, EMBEDDINGS),
    (EmbeddingHead, HEADS),
    (DetectionHead, HEADS),
    (MixtureWeights, HEADS),
    (PretrainingModel, OUTPUT),
)
# Ranges that fairseq records; they contain no forward pass.
PART_OF_FAIRSEQ = dict.fromkeys(("reduce-grads", "multiply-grads", "clip-grads", "optimizer"), OPTIMIZER)
BACKWARD_NODE = "autograd::engine::evaluate_function"


def shares_of_parts(step: FairseqStep, batch: Batch, device: torch.device, steps: int = 1) -> dict[str, float]:
    """Profile ``steps`` steps after a warm-up and return the share of time of each part; the shares sum to 1."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with marked_parts(step), as_written(), profile(activities=activities, acc_events=True) as profiled:
        for _ in range(steps):
            step.step(batch)
        synchronize(device)
    return shares(profiled.events(), on_gpu=device.type == "cuda")


@contextlib.contextmanager
def marked_parts(step: FairseqStep) -> Iterator[None]:
    """Let every module of a part, and the criterion, mark its forward pass as a range."""
    parts = [(module, part_of(module)) for module in step.module.modules()] + [(step.criterion, LOSS)]
    hooks = []
    for module, part in parts:
        if part is not None:
            before, after = range_hooks(PREFIX + part)
            hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Disable torch.compile, and run a layer that is recomputed in the backward pass to its end, where its range closes."""
    with torch.compiler.set_stance("force_eager"), set_checkpoint_early_stop(False):
        yield


def part_of(module: nn.Module) -> str | None:
    return next((part for kind, part in PART_OF_MODULE if isinstance(module, kind)), None)


def range_hooks(name: str) -> tuple[Callable, Callable]:
    """Return hooks that open and close a range; they use a stack, because a module may run inside itself or twice."""
    opened: list[record_function] = []

    def before(module: nn.Module, inputs: tuple) -> None:
        opened.append(record_function(name))
        opened[-1].__enter__()

    def after(module: nn.Module, inputs: tuple, output: object) -> None:
        opened.pop().__exit__(None, None, None)

    return before, after


def shares(events: list[FunctionEvent], on_gpu: bool) -> dict[str, float]:
    """Return the share of each part in the time of all operators."""
    events = [event for event in events if event.device_type == DeviceType.CPU]  # kernels count at their launch
    part_of_node = parts_of_nodes(events)
    times: dict[str, float] = defaultdict(float)
    for event in events:
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[enclosing_part(event, part_of_node)] += own
    total = sum(times.values())
    return {part: times[part] / total for part in PARTS}


def parts_of_nodes(events: list[FunctionEvent]) -> dict[int, str]:
    """Map a sequence number to the part whose forward pass created the autograd node.

    Several operators may have the same number; the last of them created the node, which increments the counter.
    """
    forward = [event for event in events if event.sequence_nr >= 0 and part_in_forward(event) is not None]
    return {event.sequence_nr: part_in_forward(event) for event in sorted(forward, key=lambda e: e.time_range.start)}


def part_in_forward(event: FunctionEvent | None) -> str | None:
    while event is not None:
        if event.name.startswith(PREFIX):
            return event.name.removeprefix(PREFIX)
        event = event.cpu_parent
    return None


def enclosing_part(event: FunctionEvent | None, part_of_node: dict[int, str]) -> str:
    """Return the part of the innermost range, autograd node or range of fairseq around an operator."""
    while event is not None:
        if event.name.startswith(PREFIX):
            return event.name.removeprefix(PREFIX)
        if event.name in PART_OF_FAIRSEQ:
            return PART_OF_FAIRSEQ[event.name]
        if event.name.startswith(BACKWARD_NODE):
            return part_of_node.get(event.sequence_nr, OTHER)
        event = event.cpu_parent
    return OTHER
