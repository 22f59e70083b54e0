"""Token embeddings that a discriminator shares with its generator without training them (DeBERTaV3: He et al., 2021, 3.2).

Shapes: V padded vocabulary size, E width of the token embeddings.
"""

from torch import Tensor, nn


class DisentangledEmbedding(nn.Module):
    """sg(E) + Delta: the generator trains its embeddings E, the discriminator learns the difference Delta, which starts at 0.

    Detection pulls the embeddings of tokens apart that masked language modeling brings together. With plain sharing both train
    the same table; here each trains its own, and what the generator learns still reaches the discriminator.

    Args:
        shared: E, which the model owns.
    """

    def __init__(self, shared: nn.Embedding):
        super().__init__()
        # In a tuple it is no submodule: it keeps its one name in the state of the model.
        self._shared = (shared,)
        self.delta = nn.Embedding(shared.num_embeddings, shared.embedding_dim, shared.padding_idx)

    def initialize(self) -> None:
        """Set Delta to 0."""
        nn.init.zeros_(self.delta.weight)

    @property
    def weight(self) -> Tensor:
        """The whole table: [V,E]."""
        return self._shared[0].weight.detach() + self.delta.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] int64 -> [...,E]."""
        return self._shared[0](tokens).detach() + self.delta(tokens)
