#!/usr/bin/env python3
"""How much of its speed a GPU keeps when many of them share an update: computed from sizes and bandwidths, not measured.

    python examples/benchmark/scaling.py amos_base amos_large

An update is ``update_freq`` micro-batches; gradients are exchanged during the backward pass of the last one, bucket by
bucket. A bucket starts when its gradients are there and the bucket before it is through; the update waits for what is not
through at the end of the backward pass. Left out: the optimizer's step, which costs the same on one GPU, loader processes,
and ranks that wait for a slower one.
"""

import argparse
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from amos_fairseq.errors import report_user_errors

# The GPU. Source: NVIDIA A100 Tensor Core GPU datasheet, dense bf16.
PEAK_FLOPS = 312e12
# Of the peak, reached by a step: the first milestone of this package; nothing here was measured on an A100.
FRACTION_OF_PEAK = 0.4
# Bytes/s on the bus of a ring of eight A100 SXM, of 300e9 in one direction by the datasheet. Source: nccl-tests issue 149
# ("~200 GB/s"); the definition of bus bandwidth is that of nccl-tests' PERFORMANCE.md.
NODE_BANDWIDTH = 200e9
# Bytes/s of one GPU between nodes: an HDR InfiniBand card of 200 Gb/s for each GPU (DGX A100), of which 85 % arrive: in
# nccl-tests issue 119, 24 A100 with half as many cards reached 84.8 of 100 GB/s on average.
LINK_BANDWIDTH = 0.85 * 25e9
# Seconds of a step of the ring, inside a node and between nodes. Assumed.
NODE_LATENCY, LINK_LATENCY = 2e-6, 5e-6
# Multiprocessors of 108 that an exchange takes from the backward pass while it runs. Assumed.
BUSY_WITH_EXCHANGE = 24 / 108
# The backward pass of a product is two products.
BACKWARD_SHARE = 2 / 3
# Of DistributedDataParallel (--bucket-cap-mb 25), in bytes.
BUCKET_CAP = 25 * 2**20
# What travels of a bucket when it holds sums of micro-batches, which are exchanged in float32: compat/master_weights.py.
SUM_OVER_GRADIENT = 2
# Beside the gradients: statistics of the host and of the device, gradient norms, the signal to stop.
SMALL_EXCHANGES = 4


@dataclass(frozen=True)
class Work:
    """What an update of a recipe computes and exchanges.

    Attributes:
        tokens_per_sequence: length of a block.
        flops_per_token: forward and backward pass, today's convention of ``amos flops``.
        gradient_bytes: of all parameters, 2 bytes each in bf16.
        embedding_bytes: of the token embeddings, whose gradient is complete when the backward pass ends.
    """

    tokens_per_sequence: int
    flops_per_token: float
    gradient_bytes: int
    embedding_bytes: int

    def micro_batch_seconds(self, batch_size: int) -> float:
        """Forward and backward pass of ``batch_size`` sequences on one GPU."""
        return batch_size * self.tokens_per_sequence * self.flops_per_token / (FRACTION_OF_PEAK * PEAK_FLOPS)

    def buckets(self) -> list[int]:
        """Bytes of each, in the order of their exchange; the token embeddings close the last one."""
        full, rest = divmod(self.gradient_bytes - self.embedding_bytes, BUCKET_CAP)
        return [BUCKET_CAP] * full + [rest + self.embedding_bytes]


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs, each GPU with a card of its own to the other nodes."""

    num_nodes: int
    gpus_per_node: int

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def all_reduce_seconds(self, size: int) -> float:
        """A sum of ``size`` bytes in three parts, one after the other.

        Each GPU of a node sums its share of the bytes, sums this share with its peers in the other nodes, and gets the
        shares of the others. A ring of n moves (n - 1)/n of the bytes in n - 1 steps to sum or to gather, twice that for
        both.
        """
        gpus, nodes = self.gpus_per_node, self.num_nodes
        inside = 2 * (gpus - 1) * (size / gpus / NODE_BANDWIDTH + NODE_LATENCY)
        between = 2 * (nodes - 1) * (size / gpus / nodes / LINK_BANDWIDTH + LINK_LATENCY)
        return inside + between


@dataclass(frozen=True)
class Update:
    """Seconds of an update, and how they come about.

    Attributes:
        compute: of all micro-batches on one GPU alone.
        exchange: of the gradients, wherever it lies.
        waiting: for gradients, after the last backward pass.
        slowed: that the backward pass takes longer because of the exchange beside it.
        small: exchanges of a few numbers.
    """

    compute: float
    exchange: float
    waiting: float
    slowed: float
    small: float

    @property
    def efficiency(self) -> float:
        """Tokens/s of a GPU here over those of the same GPU alone."""
        return self.compute / (self.compute + self.waiting + self.slowed + self.small)


def plan_update(work: Work, cluster: Cluster, batch_size: int, update_freq: int) -> Update:
    """An update of ``update_freq`` micro-batches of ``batch_size`` sequences on every GPU."""
    micro_batch = work.micro_batch_seconds(batch_size)
    backward = BACKWARD_SHARE * micro_batch
    sizes = work.buckets() if cluster.num_gpus > 1 else []
    if update_freq > 1:
        sizes = [SUM_OVER_GRADIENT * size for size in sizes]
    seconds = [cluster.all_reduce_seconds(size) for size in sizes]
    waiting = waiting_seconds(backward, sizes, seconds)
    return Update(
        compute=update_freq * micro_batch,
        exchange=sum(seconds),
        waiting=waiting,
        slowed=BUSY_WITH_EXCHANGE * (sum(seconds) - waiting),
        small=SMALL_EXCHANGES * cluster.all_reduce_seconds(0),
    )


def waiting_seconds(backward: float, sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """From the end of a backward pass to that of the last exchange; gradients come at an even rate of bytes."""
    arrived, free_at = 0, 0.0
    for size, duration in zip(sizes, seconds, strict=True):
        arrived += size
        free_at = max(free_at, backward * arrived / sum(sizes)) + duration
    return max(0.0, free_at - backward)


def work_of(recipe: str, vocabulary_size: int) -> Work:
    """Sizes and FLOPs of a recipe's own model; raises ``UserError`` for one that there is not."""
    from amos_fairseq.flops.recipe import build_recipe
    from amos_fairseq.flops.source import read_configuration
    from amos_fairseq.flops.training import by_autograd

    # One rank, whatever GPUs this machine has; data is not asked for.
    cfg, _ = read_configuration(recipe, ["distributed_training.distributed_world_size=1"])
    built = build_recipe(cfg, vocabulary_size)
    trained = [parameter.numel() for parameter in built.model.parameters() if parameter.requires_grad]
    return Work(
        tokens_per_sequence=cfg.task.tokens_per_sample,
        flops_per_token=by_autograd(built).per_token,
        gradient_bytes=2 * sum(trained),
        embedding_bytes=2 * built.model.embed_tokens.weight.numel(),
    )


def table(recipe: str, work: Work, cluster: Cluster, batch_sizes: Sequence[int], freqs: Sequence[int]) -> Iterator[str]:
    """Lines of Markdown."""
    last = work.buckets()[-1]
    yield (
        f"`{recipe}`: {work.gradient_bytes / 1e6:,.0f} MB of gradients in bf16, {len(work.buckets())} buckets, the last of "
        f"{last / 1e6:.0f} MB; {work.flops_per_token / 1e9:.2f} GFLOP a token, {work.tokens_per_sequence} tokens a sequence."
    )
    yield ""
    yield "| sequences a GPU | update_freq | global batch | compute, ms | exchange, ms | not hidden, ms | efficiency |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    for batch_size in batch_sizes:
        for freq in freqs:
            update = plan_update(work, cluster, batch_size, freq)
            lost = update.waiting + update.slowed + update.small
            numbers = [f"{1e3 * part:.1f}" for part in (update.compute, update.exchange, lost)]
            cells = [str(batch_size), str(freq), str(batch_size * freq * cluster.num_gpus), *numbers]
            yield f"| {' | '.join(cells)} | {update.efficiency:.1%} |"


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", default=["amos_base", "amos_large"], metavar="RECIPE", help="in bf16")
    parser.add_argument("--nodes", type=positive, default=8, help="DGX A100 or their like")
    parser.add_argument("--gpus-per-node", type=positive, default=8, help="A100 in each")
    parser.add_argument(
        "--batch-size", type=positive, nargs="+", default=[8, 16, 32], help="sequences of a micro-batch"
    )
    parser.add_argument("--update-freq", type=positive, nargs="+", default=[1, 2, 4], help="micro-batches of an update")
    parser.add_argument("--vocabulary-size", type=positive, default=32_768, help="entries of the dictionary")
    args = parser.parse_args(words)
    logging.getLogger().setLevel(logging.WARNING)  # importing fairseq has set it to DEBUG
    cluster = Cluster(args.nodes, args.gpus_per_node)
    print(f"{cluster.num_gpus} A100 in {cluster.num_nodes} nodes: computed, not measured.")
    with report_user_errors():
        for recipe in args.recipes:
            work = work_of(recipe, args.vocabulary_size)
            print("", *table(recipe, work, cluster, args.batch_size, args.update_freq), sep="\n")


if __name__ == "__main__":
    main()
