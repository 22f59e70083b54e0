"""The gain of each fast path: our step with all of them, and with each one replaced by its reference implementation.

    python examples/benchmark/changes.py electra_small --precision float32 --set dataset.batch_size=16

One model runs all steps in turns (all, without A, without B, ..., all, ...) on synthetic text. Prints a Markdown table of the
median ratios within the rounds.
"""

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from bench import Contestant, alternate, ratios
from torch import Tensor, nn
from torch.nn import functional
from training_step import DTYPES, FairseqStep, random_batches, set_up

from amos_fairseq.errors import UserError
from amos_fairseq.functional import output_layer
from amos_fairseq.functional.attention import reference_attention
from amos_fairseq.functional.positions import gather_positions
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.modules import encoder
from amos_fairseq.modules.bert_encoder import SelfAttention
from amos_fairseq.modules.encoder import LayerOutputs, TransformerEncoder


@contextlib.contextmanager
def attention(model: nn.Module) -> Iterator[None]:
    """Compute softmax(q k^T + bias) v with PyTorch's products and dropout."""
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    fast = [layer.attend for layer in layers]
    for layer in layers:
        layer.attend = reference_attention
    yield
    for layer, attend in zip(layers, fast, strict=True):
        layer.attend = attend


def hidden_dropout(model: nn.Module) -> contextlib.AbstractContextManager:
    return mock.patch.object(encoder, "fast_dropout", lambda x, probability: functional.dropout(x, probability))


def output_layer_and_sampling(model: nn.Module) -> contextlib.AbstractContextManager:
    return mock.patch.object(PretrainingModel, "is_fast", False)


def kept_logits(model: nn.Module) -> contextlib.AbstractContextManager:
    return mock.patch.object(output_layer, "CPU_CACHE_BYTES", 0)


def masked_positions_of_the_last_layer(model: nn.Module) -> contextlib.AbstractContextManager:
    narrow = TransformerEncoder.forward

    def forward(
        encoder: TransformerEncoder, *args: Any, last_positions: Tensor | None = None, **kwargs: Any
    ) -> LayerOutputs:
        outputs = narrow(encoder, *args, **kwargs)
        if last_positions is not None:
            outputs.sums[-1] = gather_positions(outputs.sums[-1], last_positions)
        return outputs

    return mock.patch.object(TransformerEncoder, "forward", forward)


CHANGES: tuple[Callable[[nn.Module], contextlib.AbstractContextManager], ...] = (
    attention,
    hidden_dropout,
    output_layer_and_sampling,
    kept_logits,
    masked_positions_of_the_last_layer,
)


class Without:
    """Run ``step`` with one fast path replaced by ``change``; None replaces nothing."""

    def __init__(self, step: FairseqStep, change: Callable[[nn.Module], contextlib.AbstractContextManager] | None):
        self.of, self.change, self.module = step, change, step.module

    def step(self, batch: dict[str, Any]) -> None:
        with contextlib.nullcontext() if self.change is None else self.change(self.module):
            self.of.step(batch)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("recipe", help="a recipe of amos_fairseq/recipes, or the path of a YAML")
    parser.add_argument("--precision", choices=DTYPES, default="float32", help="precision of the step")
    parser.add_argument("--steps", type=int, default=15, help="measured rounds")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE", help="settings to change"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    setup = set_up(arguments.recipe, arguments.overrides, arguments.precision, device="cpu")
    batches, step = random_batches(setup), FairseqStep(setup)
    contestants = [
        Contestant("all" if change is None else change.__name__.replace("_", " "), Without(step, change), setup)
        for change in (None, *CHANGES)
    ]
    alternate(contestants, batches, 2)
    for contestant in contestants:
        contestant.seconds.clear()
    alternate(contestants, batches, arguments.steps)
    everything, *others = contestants
    print(f"{arguments.recipe}, {arguments.precision}, {batches[0]['ntokens']:,} tokens a step, all: ", end="")
    print(f"{1e3 * statistics.median(everything.seconds):,.0f} ms a step\n")
    print("| without | ms a step | all is faster by |\n| --- | ---: | ---: |")
    for other in others:
        faster = ratios(everything.seconds, other.seconds)
        print(f"| {other.name} | {1e3 * statistics.median(other.seconds):,.0f} | ", end="")
        print(f"{statistics.median(faster):.3f} ({faster[0]:.2f} to {faster[-1]:.2f}) |")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"amos_fairseq: error: {error}") from error
