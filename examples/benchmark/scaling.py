#!/usr/bin/env python3
"""Throughput per GPU when many GPUs share an update, computed from sizes and bandwidths, not measured.

    python examples/benchmark/scaling.py amos_base amos_large

An update has ``update_freq`` micro-batches; gradients are exchanged during the backward pass of the last one, bucket by
bucket. A bucket starts when its gradients are complete and the previous bucket has finished; the update waits for the buckets
that are unfinished at the end of the backward pass. Not included: the optimizer's step, which costs the same on one GPU,
loader processes, and ranks that wait for a slower one.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from amos_fairseq.errors import report_user_errors

# FLOP/s of the GPU. Source: NVIDIA A100 Tensor Core GPU datasheet, dense bf16.
PEAK_FLOPS = 312e12
# Fraction of the peak that a step reaches: the first milestone of this package; nothing was measured on an A100.
FRACTION_OF_PEAK = 0.4
# Bytes/s on the bus of a ring of eight A100 SXM, of 300e9 in one direction by the datasheet. Source: nccl-tests issue 149
# ("~200 GB/s"); bus bandwidth is defined in nccl-tests' PERFORMANCE.md.
NODE_BANDWIDTH = 200e9
# Bytes/s of one GPU between nodes: an HDR InfiniBand card of 200 Gb/s for each GPU (DGX A100), 85 % of it: in
# nccl-tests issue 119, 24 A100 with half as many cards reached 84.8 of 100 GB/s on average.
LINK_BANDWIDTH = 0.85 * 25e9
# Seconds of a step of the ring, inside a node and between nodes. Assumed.
NODE_LATENCY, LINK_LATENCY = 2e-6, 5e-6
# Fraction of the 108 multiprocessors that an exchange takes from the backward pass. Assumed.
BUSY_WITH_EXCHANGE = 24 / 108
# The backward pass of a product is two products.
BACKWARD_SHARE = 2 / 3
# Bytes of a bucket of DistributedDataParallel (--bucket-cap-mb 25).
BUCKET_CAP = 25 * 2**20
# Bytes exchanged for a bucket of micro-batch sums (float32), relative to one of gradients: compat/mixed_precision.py.
SUM_OVER_GRADIENT = 2
# Exchanges besides the gradients: statistics of the host and of the device, gradient norms, the signal to stop.
SMALL_EXCHANGES = 4


@dataclass(frozen=True)
class Work:
    """Computation and exchange of an update.

    Attributes:
        tokens_per_sequence: length of a block.
        flops_per_token: forward and backward pass, convention "today" of ``amos flops``.
        gradient_bytes: gradients of all parameters, 2 bytes each in bf16.
        embedding_bytes: gradient of the token embeddings, which is complete when the backward pass ends.
    """

    tokens_per_sequence: int
    flops_per_token: float
    gradient_bytes: int
    embedding_bytes: int

    def micro_batch_seconds(self, batch_size: int) -> float:
        """Return the seconds of the forward and backward pass of ``batch_size`` sequences on one GPU."""
        return batch_size * self.tokens_per_sequence * self.flops_per_token / (FRACTION_OF_PEAK * PEAK_FLOPS)

    def buckets(self) -> list[int]:
        """Return the bytes of each bucket in the order of their exchange; the last one ends with the token embeddings."""
        full, rest = divmod(self.gradient_bytes - self.embedding_bytes, BUCKET_CAP)
        return [BUCKET_CAP] * full + [rest + self.embedding_bytes]


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs; each GPU has its own network card."""

    num_nodes: int
    gpus_per_node: int

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def all_reduce_seconds(self, size: int) -> float:
        """Return the seconds of a sum of ``size`` bytes in three consecutive parts.

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
    """Seconds of an update.

    Attributes:
        compute: all micro-batches on one GPU alone.
        exchange: exchange of the gradients, hidden or not.
        waiting: time that the last backward pass waits for gradients.
        slowed: time that the exchange adds to the backward pass.
        small: small exchanges.
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
    """Compute an update of ``update_freq`` micro-batches of ``batch_size`` sequences on every GPU."""
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
    """Return the time from the end of a backward pass to the end of the last exchange; gradients come at an even rate."""
    ready, free_at = 0, 0.0
    for size, duration in zip(sizes, seconds, strict=True):
        ready += size
        free_at = max(free_at, backward * ready / sum(sizes)) + duration
    return max(0.0, free_at - backward)


def work_of(recipe: str, vocabulary_size: int) -> Work:
    """Return sizes and FLOPs of a recipe's model; raise ``UserError`` if there is no such recipe."""
    from amos_fairseq.flops.configuration import build_counted_update, read_configuration
    from amos_fairseq.flops.counting import by_autograd

    # One rank, however many GPUs this machine has; no data is needed.
    cfg, _ = read_configuration(recipe, ["distributed_training.distributed_world_size=1"])
    built = build_counted_update(cfg, vocabulary_size, reference=True)
    trained = [parameter.numel() for parameter in built.model.parameters() if parameter.requires_grad]
    return Work(
        tokens_per_sequence=cfg.task.tokens_per_sample,
        flops_per_token=by_autograd(built).per_token,
        gradient_bytes=2 * sum(trained),
        embedding_bytes=2 * built.model.embed_tokens.weight.numel(),
    )


def table(recipe: str, work: Work, cluster: Cluster, batch_sizes: Sequence[int], freqs: Sequence[int]) -> Iterator[str]:
    """Yield lines of Markdown."""
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
            milliseconds = [f"{1e3 * part:.1f}" for part in (update.compute, update.exchange, lost)]
            cells = [str(batch_size), str(freq), str(batch_size * freq * cluster.num_gpus), *milliseconds]
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
    parser.add_argument("--nodes", type=positive, default=8, help="number of nodes like DGX A100")
    parser.add_argument("--gpus-per-node", type=positive, default=8, help="A100 in each node")
    parser.add_argument(
        "--batch-size", type=positive, nargs="+", default=[8, 16, 32], help="sequences of a micro-batch"
    )
    parser.add_argument("--update-freq", type=positive, nargs="+", default=[1, 2, 4], help="micro-batches of an update")
    parser.add_argument("--vocabulary-size", type=positive, default=32_768, help="entries of the dictionary")
    args = parser.parse_args(words)
    cluster = Cluster(args.nodes, args.gpus_per_node)
    print(f"{cluster.num_gpus} A100 in {cluster.num_nodes} nodes: computed, not measured.")
    with report_user_errors():
        for recipe in args.recipes:
            work = work_of(recipe, args.vocabulary_size)
            print("", *table(recipe, work, cluster, args.batch_size, args.update_freq), sep="\n")


if __name__ == "__main__":
    main()
