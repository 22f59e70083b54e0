"""TEAMS written a second time, to compare with: float64, one sequence at a time and without its padding, over lists."""

import torch
from reference_amos import ReferenceAmos, gelu
from torch import Tensor


class ReferenceTeams(ReferenceAmos):
    """The parameters of ``model`` (a ``TeamsModel``) as float64 leaves, one for each that is shared, and the algorithm."""

    def __init__(self, model):
        self.cfg = model.cfg
        self.num_layers = {"generator": len(model.generator.layers), "discriminator": len(model.discriminator.layers)}
        leaves = {value: value.detach().double().requires_grad_() for value in model.parameters()}
        self.p = {name: leaves[value] for name, value in model.named_parameters(remove_duplicate=False)}

    def entrance(self, encoder: str, tokens: Tensor) -> Tensor:
        """What the first layer reads, without the projection where the widths are equal."""
        embeddings = self.p["embed_tokens.weight"][tokens] + self.p[f"{encoder}.embed_positions.weight"][: len(tokens)]
        x = self.norm(f"{encoder}.embedding_norm", embeddings)
        projected = f"{encoder}.embedding_projection"
        return self.linear(projected, x) if f"{projected}.weight" in self.p else x

    def states(self, encoder: str, tokens: Tensor) -> list[Tensor]:
        """The entrance and the output of every layer."""
        outputs = [self.entrance(encoder, tokens)]
        bias = self.bias(encoder, len(tokens))
        for number in range(self.num_layers[encoder]):
            outputs.append(self.layer(f"{encoder}.layers.{number}", outputs[-1], bias))
        return outputs

    def head(self, name: str, x: Tensor) -> Tensor:
        return self.norm(f"{name}.norm", gelu(self.linear(f"{name}.dense", x)))

    def branches(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """h_MWS and h_RTD of every token (section 3.2, Figure 2)."""
        states = self.states("discriminator", tokens)
        if "rtd_layer.ffn_in.weight" in self.p:
            return states[-1], self.layer("rtd_layer", states[-2], self.bias("discriminator", len(tokens)))
        if "rtd_ffn.ffn_in.weight" in self.p:
            return self.feed_forward("mws_ffn", states[-1]), self.feed_forward("rtd_ffn", states[-1])
        return states[-1], states[-1]

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        return self.norm(f"{name}.ffn_norm", x + self.linear(f"{name}.ffn_out", gelu(self.linear(f"{name}.ffn_in", x))))

    def losses(self, batch: dict, sampled: Tensor, candidates: Tensor) -> dict[str, Tensor]:
        """Eq. 1, 4 and 8 of a batch, each summed over its own positions, for given replacements and candidates."""
        totals = {"mlm": 0.0, "rtd": 0.0, "mws": 0.0}
        for row, tokens in enumerate(batch["net_input"]["tokens"]):
            inputs = {name: value[row] for name, value in batch["net_input"].items()}
            length = int((tokens != 1).sum())
            positions = inputs["masked_positions"][inputs["masked_weights"] > 0].tolist()
            guessing = self.states("generator", inputs["masked_tokens"][:length])[-1]
            corrupted = tokens[:length].clone()
            for slot, i in enumerate(positions):
                logits = self.p["embed_tokens.weight"] @ self.head("mlm_head", guessing[i]) + self.p["mlm_head.bias"]
                totals["mlm"] = totals["mlm"] + logits.exp().sum().log() - logits[tokens[i]]
                corrupted[i] = sampled[row, slot]
            mws_states, rtd_states = self.branches(corrupted)
            if "detection_head.output.weight" in self.p:
                totals["rtd"] = totals["rtd"] + self.detection(rtd_states, corrupted, tokens)
            if "mws_head.dense.weight" in self.p:
                for slot, i in enumerate(positions):
                    totals["mws"] = totals["mws"] + self.selection(mws_states[i], tokens[i], candidates[row, slot])
        return totals

    def detection(self, states: Tensor, corrupted: Tensor, tokens: Tensor) -> Tensor:
        """Eq. 4 with P("original") = sigmoid(-logit)."""
        original = torch.sigmoid(-self.linear("detection_head.output", states).squeeze(-1))
        terms = [
            -original[i].log() if token == int(tokens[i]) else -(1 - original[i]).log()
            for i, token in enumerate(corrupted.tolist())
        ]
        return sum(terms)

    def selection(self, state: Tensor, original: Tensor, candidates: Tensor) -> Tensor:
        """Eq. 7 and 8: the set holds the original once, wherever it stands among the candidates."""
        hidden = self.head("mws_head", state)
        scores = {int(c): self.p["embed_tokens.weight"][int(c)] @ hidden for c in candidates}
        assert len(scores) == len(candidates)
        return sum(score.exp() for score in scores.values()).log() - scores[int(original)]
