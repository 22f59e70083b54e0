"""Time of single operations of the step, fast and reference implementation, beside the minimum that the machine needs.

Shapes: B sequences, T tokens, M masked positions per sequence, N = B M, K depths, H heads, D hidden size of the encoder, E of
the token embeddings, V padded vocabulary size. FLOPs count a multiplication and an addition as two; a backward pass has twice
the products of its forward pass. Bytes are those of inputs, weights, results and their gradients, each as often as a step
has to read or write it at least.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from fairseq import models, optim
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from amos_fairseq.functional.cross_entropy import linear_cross_entropy
from amos_fairseq.functional.output_layer import output_layer
from amos_fairseq.functional.reference_sampling import gumbel_max, gumbel_noise
from amos_fairseq.functional.sampling import ReplacementSampler
from amos_fairseq.measure.bench_report import MicroBenchmarkTime
from amos_fairseq.measure.configuration import BenchSetup
from amos_fairseq.measure.measurement import Batch, Progress, best_seconds
from amos_fairseq.models.configuration import PaddedVocabulary, embedding_width, transformer_config
from amos_fairseq.modules.mixture import Adversary, OutputLayerWeights, predict_chunked, predict_reference
from amos_fairseq.optim.grouped_adam import first, parse_betas
from amos_fairseq.tasks.text_pretraining import TextPretrainingTask

WAYS = ("fast", "reference")
SAMPLED_POSITIONS = 512  # the logits of more do not fit into a processor's caches; neither do those of a chunk
SECONDS = 0.5  # for the repetitions of each


@dataclass(frozen=True)
class MicroBenchmark:
    """One operation of the step; ``ways`` has a call that runs it once for each of :data:`WAYS`."""

    name: str
    sizes: str
    flops: float
    bytes: float
    ways: dict[str, Callable[[], object]]


def time_micro_benchmark(
    benchmark: MicroBenchmark,
    device: torch.device,
    peak: float,
    bandwidth: float,
    progress: Progress,
    seconds: float = SECONDS,
) -> MicroBenchmarkTime:
    """Time the fastest repetition of each implementation; ``peak`` in FLOP/s, ``bandwidth`` in bytes/s."""
    progress(f"by itself: {benchmark.name}")
    floor = max(benchmark.flops / peak, benchmark.bytes / bandwidth)
    times = {way: best_seconds(benchmark.ways[way], device, seconds) for way in WAYS}
    return MicroBenchmarkTime(benchmark.name, benchmark.sizes, benchmark.flops, benchmark.bytes, floor, times)


def all_micro_benchmarks(setup: BenchSetup, task: TextPretrainingTask, batch: Batch) -> Iterator[MicroBenchmark]:
    """Yield those of the recipe's step, each built when it is needed, so that they do not share the memory."""
    num_sequences, num_masked = batch["net_input"]["masked_positions"].shape
    layer = SyntheticOutputLayer.of(setup, PaddedVocabulary.of(task.source_dictionary), num_sequences, num_masked)
    yield attention(setup, num_sequences)
    yield output_layer_alone(layer)
    if setup.cfg.criterion._name != "mlm":
        yield sampling(layer)
    if len(layer.hidden) > 1 and setup.cfg.model.mixture == "learned":
        yield mixture(setup, layer)
    yield optimizer(setup, task)


def attention(setup: BenchSetup, num_sequences: int) -> MicroBenchmark:
    """Self-attention of one layer of the main encoder, with its projections and the bias that the encoder passes."""
    shape, length = transformer_config(setup.cfg.model), setup.cfg.task.tokens_per_sample
    width, heads, size = shape.width, shape.num_heads, setup.dtype.itemsize
    products = 8 * num_sequences * length * width**2 + 4 * num_sequences * length**2 * width
    bias = heads * length**2 if shape.has_learned_bias else 0
    return MicroBenchmark(
        "attention" + (" with a learned bias" if bias else ""),
        f"B={num_sequences} T={length} H={heads} D={width}",
        flops=3 * products,
        bytes=size * (4 * num_sequences * length * width + 3 * 4 * width**2 + 3 * bias),
        ways={way: attention_step(setup, way, num_sequences) for way in WAYS},
    )


def attention_step(setup: BenchSetup, way: str, num_sequences: int) -> Callable[[], None]:
    """Return the forward and backward pass of the first layer's attention, with the arguments that the encoder passes."""
    shape = dataclasses.replace(transformer_config(setup.cfg.model), num_layers=1, kernels=way)
    encoder = shape.build().to(setup.device, setup.dtype).train()
    module = encoder.layers[0].attention
    arguments: list[object] = []
    hook = module.register_forward_pre_hook(
        lambda module, args, kwargs: arguments.extend((args, kwargs)), with_kwargs=True
    )
    length, width = setup.cfg.task.tokens_per_sample, shape.embedding_width or shape.width
    encoder(torch.randn(num_sequences, length, width, device=setup.device, dtype=setup.dtype))
    hook.remove()
    positional, named = tree_map_only(Tensor, as_leaf, arguments)
    leaves = [leaf for leaf in tree_leaves((positional, named)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    leaves += module.parameters()

    def step() -> None:
        attended = module(*positional, **named)
        differentiate(attended, leaves, attended.detach())

    return step


def differentiate(result: Tensor, leaves: Sequence[Tensor], gradient: Tensor | None = None) -> None:
    """Compute the gradients of ``leaves`` without accumulation; a training step allocates them again, too."""
    result.backward(gradient)
    for leaf in leaves:
        leaf.grad = None


def as_leaf(tensor: Tensor) -> Tensor:
    """Return the same values as a leaf that requires a gradient if ``tensor`` does."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class SyntheticOutputLayer:
    """hidden: K leaves [B,M,E]; gamma: [B,M,K] float32, a leaf; originals: [B,M] int64."""

    hidden: list[Tensor]
    gamma: Tensor
    originals: Tensor
    weights: OutputLayerWeights

    @classmethod
    def of(
        cls, setup: BenchSetup, vocabulary: PaddedVocabulary, num_sequences: int, num_masked: int
    ) -> "SyntheticOutputLayer":
        model, device, dtype = setup.cfg.model, setup.device, setup.dtype
        depths = model.generator_depths.split(",") if setup.cfg.criterion._name == "amos" else [""]
        width, shape = embedding_width(model), (num_sequences, num_masked)

        def leaf(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).mul_(model.init_std).to(dtype).requires_grad_()

        embedding, biases = leaf(vocabulary.padded_size, width), leaf(1, vocabulary.padded_size)
        weights = OutputLayerWeights(
            embedding, biases, vocabulary.never_sampled_indices().to(device), embedding.detach()
        )
        gamma = torch.full((*shape, len(depths)), 1 / len(depths), device=device).requires_grad_()
        originals = torch.randint(vocabulary.num_tokens, shape, device=device)
        return cls([leaf(*shape, width) for _ in depths], gamma, originals, weights)

    @property
    def sizes(self) -> str:
        vocabulary_size, width = self.weights.embedding.shape
        return f"K={len(self.hidden)} N={self.originals.numel()} E={width} V={vocabulary_size}"

    @property
    def product(self) -> int:
        """FLOPs of all logits."""
        return 2 * len(self.hidden) * self.originals.numel() * self.weights.embedding.numel()

    @property
    def traffic(self) -> int:
        """Bytes of hidden states and embeddings, forward and backward, and of their gradients."""
        return 3 * self.weights.embedding.nbytes + 3 * sum(h.nbytes for h in self.hidden)

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.hidden, self.gamma, self.weights.embedding, self.weights.biases]


def output_layer_alone(layer: SyntheticOutputLayer) -> MicroBenchmark:
    """Cross entropy of every depth, forward and backward."""
    embedding, biases = layer.weights.embedding, layer.weights.biases

    def fast() -> None:
        hidden = torch.stack([h.flatten(0, 1) for h in layer.hidden])
        nll = output_layer(hidden, embedding, biases, layer.originals.flatten()).nll
        differentiate(nll.sum(), layer.leaves)

    def reference() -> None:
        losses = [linear_cross_entropy(h, embedding, biases[0], layer.originals)[0] for h in layer.hidden]
        differentiate(torch.stack(losses).sum(), layer.leaves)

    return MicroBenchmark(
        "output layer", layer.sizes, 3 * layer.product, layer.traffic, {"fast": fast, "reference": reference}
    )


def sampling(layer: SyntheticOutputLayer) -> MicroBenchmark:
    """Sample a token for each of some positions from given logits: from the exponentials of the cross entropy (fast), or
    with Gumbel noise for every logit (reference)."""
    num_positions = min(layer.originals.numel(), SAMPLED_POSITIONS)
    logits = torch.randn(num_positions, len(layer.weights.embedding), device=layer.gamma.device)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    sampler, chunk = ReplacementSampler(), slice(0, num_positions)
    ways = {
        "fast": lambda: sampler(logits[None], weights[None], chunk),
        "reference": lambda: gumbel_max(logits, gumbel_noise(logits)),
    }
    return MicroBenchmark("sampling", f"N={num_positions} V={logits.size(1)}", 0, logits.nbytes, ways)


def mixture(setup: BenchSetup, layer: SyntheticOutputLayer) -> MicroBenchmark:
    """AMOS: cross entropy of every depth, a sample from their mixture, and the Gumbel-Softmax gradient of the mixture."""
    model = setup.cfg.model
    adversary = Adversary(model.gumbel_temperature, model.adversarial_mlm_multiplier, model.gumbel_entries)

    def step(predict: Callable) -> None:
        prediction = predict(layer.hidden, layer.gamma, layer.originals, layer.weights, adversary)
        differentiate(prediction.nll.sum() + prediction.adversarial_term.float().sum(), layer.leaves)

    ways = {"fast": lambda: step(predict_chunked), "reference": lambda: step(predict_reference)}
    return MicroBenchmark("output layer, mixture, its gradient", layer.sizes, 3 * layer.product, layer.traffic, ways)


def optimizer(setup: BenchSetup, task: TextPretrainingTask) -> MicroBenchmark:
    """The recipe's optimizer on float32 weights (fast), and AdamW in a loop over the parameters (reference)."""
    cfg = setup.cfg
    model = models.build_model(cfg.model, task).to(setup.device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    ours = optim.build_optimizer(cfg.optimizer, parameters)
    loop = torch.optim.AdamW(
        [nn.Parameter(parameter.detach().clone()) for parameter in parameters],
        lr=first(cfg.optimization.lr),
        betas=parse_betas(cfg.optimizer.adam_betas),
        eps=cfg.optimizer.adam_eps,
        weight_decay=cfg.optimizer.weight_decay,
        foreach=False,
        fused=False,
    )
    for group in loop.param_groups:
        for copy, parameter in zip(group["params"], parameters, strict=True):
            copy.grad = parameter.grad
    number = sum(parameter.numel() for parameter in parameters)
    traffic = 4 * 7 * number  # read weight, gradient and two moments; write weight and moments
    return MicroBenchmark(
        "optimizer", f"{number:,} parameters", 0, traffic, {"fast": ours.step, "reference": loop.step}
    )
