"""The probe: spans pooled by self-attention, and a classifier with one sigmoid per label.

Shapes: N targets, P pieces in all their spans together, D width of the features, C labels.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from amos_fairseq.modules.heads import LayerMixture

PROJECTION = 256  # width of projected pieces and of the hidden layer of the MLP (Tenney et al., 2019b)


class SpanFeatures(NamedTuple):
    """The pieces of N spans, one span after another.

    Attributes:
        features: [P,D], or [P,L,D] if L layers are mixed.
        lengths: [N] int64, the number of pieces of each span, at least 1; their sum is P.
    """

    features: Tensor
    lengths: Tensor


class SpanPooling(nn.Module):
    """Self-attention pooling of a span (Tenney et al., 2019b, section 3.1).

        r = sum_i a_i x_i,  a = softmax(w . x_i)      i: the pieces of the span

    w starts at 0: the initial output is the mean.
    """

    def __init__(self, width: int):
        super().__init__()
        self.score = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    def forward(self, pieces: SpanFeatures) -> Tensor:
        """Return [N,D]. Spans are not padded: long ones cost short ones nothing."""
        x, lengths = pieces
        owner = torch.arange(len(lengths), device=x.device).repeat_interleave(lengths)  # [P], the span of each piece
        scores = self.score(x).squeeze(-1)  # [P]
        largest = scores.new_full(lengths.shape, -torch.inf).scatter_reduce(0, owner, scores.detach(), "amax")
        weights = (scores - largest[owner]).exp().unsqueeze(-1)  # [P,1]
        total = weights.new_zeros(len(lengths), 1).index_add(0, owner, weights)
        return x.new_zeros(len(lengths), x.size(1)).index_add(0, owner, weights * x) / total


class Probe(nn.Module):
    """Logits of every label for targets of one or two spans; each span has its own pooling.

    ``linear`` is AMOS's: one linear layer on the pooled states (section 5.2). ``mlp`` is that of Tenney et al. (2019b): each
    span is projected to 256 dimensions before it is pooled, and a hidden layer of 256 with tanh and LayerNorm follows.

    Args:
        width: D.
        num_layers: layers to mix; 0 for the features of one layer.
    """

    def __init__(self, width: int, num_spans: int, num_labels: int, classifier: str = "linear", num_layers: int = 0):
        super().__init__()
        self.mixture = LayerMixture(num_layers) if num_layers else nn.Identity()
        is_linear = classifier == "linear"
        pooled = width if is_linear else PROJECTION
        self.projections = nn.ModuleList(
            nn.Identity() if is_linear else nn.Linear(width, PROJECTION) for _ in range(num_spans)
        )
        self.poolings = nn.ModuleList(SpanPooling(pooled) for _ in range(num_spans))
        hidden = [nn.Linear(num_spans * pooled, PROJECTION), nn.Tanh(), nn.LayerNorm(PROJECTION)]
        self.hidden = nn.Identity() if is_linear else nn.Sequential(*hidden)
        self.output = nn.Linear(num_spans * pooled if is_linear else PROJECTION, num_labels)
        nn.init.zeros_(self.output.weight)

    @torch.no_grad()
    def set_prior(self, frequencies: Tensor) -> None:
        """Let the untrained probe predict each label with its frequency [C] in training."""
        self.output.bias.copy_(frequencies.clamp(1e-4, 1 - 1e-4).logit())

    def forward(self, spans: list[SpanFeatures]) -> Tensor:
        """Return [N,C] float32 from the first and, if there is one, the second span of every target."""
        pooled = [
            pooling(SpanFeatures(projection(self.mixture(pieces.features)), pieces.lengths))
            for pieces, projection, pooling in zip(spans, self.projections, self.poolings, strict=True)
        ]
        return self.output(self.hidden(torch.cat(pooled, dim=-1)))


def probe_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy summed over the C labels, mean over N targets, in nats.

        L = 1/N sum_n sum_c -[y_nc log s(z_nc) + (1 - y_nc) log(1 - s(z_nc))],  s = sigmoid

    Args:
        logits: z [N,C].
        labels: y [N,C], 0 or 1.
    """
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
    return loss / len(logits)
