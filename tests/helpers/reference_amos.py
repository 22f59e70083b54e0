"""AMOS written a second time, to compare with: float64, one sequence at a time and without its padding, loops over heads,
depths and masked positions. The adversarial gradient is not left to autograd but written out as a chain of derivatives.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SPECIAL = (0, 1, 2, 3)  # <s> <pad> </s> <unk>


def t5_row(distance: int, num_buckets: int, max_distance: int) -> int:
    """Raffel et al. (2019): one side per sign, half of it exact, half logarithmic."""
    side = num_buckets // 2
    exact = side // 2
    size = abs(distance)
    if size >= exact:
        size = min(exact + int(math.log(size / exact) / math.log(max_distance / exact) * (side - exact)), side - 1)
    return size + (side if distance > 0 else 0)


@dataclass
class Expected:
    """What one forward and backward pass must give."""

    generator_loss: float  # summed over masked positions and depths
    detection_loss: float  # summed over real tokens, without lambda
    sampled: list[list[int]]  # per sequence, at its masked positions
    mixture_weights: list[Tensor]  # per sequence [masked positions, K]
    gradients: dict[str, Tensor]


class ReferenceAmos:
    """The parameters of ``model`` (an ``AmosModel``) as float64 leaves, and the algorithm over them."""

    def __init__(self, model):
        self.cfg = model.cfg
        self.depths = model.depths
        self.num_words = model.vocabulary.num_tokens - 1  # <mask> is the last token
        self.p = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.p[f"{name}.weight"].T + self.p[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.pow(2).mean(-1, keepdim=True) + self.cfg.layer_norm_eps).sqrt()
        return centred / scale * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]

    def attention(self, name: str, x: Tensor, bias: Tensor) -> Tensor:
        query, key, value = self.linear(f"{name}.query_key_value", x).chunk(3, dim=-1)
        size = x.size(-1) // self.cfg.encoder_attention_heads
        heads = []
        for head in range(self.cfg.encoder_attention_heads):
            part = slice(head * size, (head + 1) * size)
            scores = query[:, part] @ key[:, part].T / math.sqrt(size) + bias[head]
            heads.append(scores.softmax(-1) @ value[:, part])
        return self.linear(f"{name}.output", torch.cat(heads, dim=-1))

    def layer(self, name: str, x: Tensor, bias: Tensor) -> Tensor:
        x = self.norm(f"{name}.attention_norm", x + self.attention(f"{name}.attention", x, bias))
        return self.norm(f"{name}.ffn_norm", x + self.linear(f"{name}.ffn_out", gelu(self.linear(f"{name}.ffn_in", x))))

    def bias(self, encoder: str, length: int) -> Tensor:
        if str(self.cfg.relative_position_scheme) == "none":
            return torch.zeros(self.cfg.encoder_attention_heads, length, length, dtype=torch.float64)
        table = self.p[f"{encoder}.relative_position.table.weight"]
        buckets = self.cfg.relative_position_buckets, self.cfg.relative_position_max_distance
        rows = [[t5_row(key - query, *buckets) for key in range(length)] for query in range(length)]
        return table[torch.tensor(rows)].permute(2, 0, 1)

    def layers(self, encoder: str, embeddings: Tensor, num_layers: int, stops: list[int]) -> list[Tensor]:
        """Outputs of all layers; the layer above a stop starts from a constant."""
        length = len(embeddings)
        bias = self.bias(encoder, length)
        x = self.norm(f"{encoder}.embedding_norm", embeddings + self.p[f"{encoder}.embed_positions.weight"][:length])
        outputs = []
        for number in range(num_layers):
            outputs.append(self.layer(f"{encoder}.layers.{number}", x, bias))
            x = outputs[-1].detach() if number + 1 in stops else outputs[-1]
        return outputs

    def features(self, masked_tokens: Tensor) -> list[Tensor]:
        """f^(d) of every token, K tensors [length, D]."""
        embeddings = self.p["embed_tokens.weight"][masked_tokens]
        if self.cfg.separate_generators:
            return [self.layers(f"generators.{k}", embeddings, depth, [])[-1] for k, depth in enumerate(self.depths)]
        stops = [] if self.cfg.no_stop_gradient else self.depths[:-1]
        outputs = self.layers("generators.0", embeddings, self.depths[-1], stops)
        return [outputs[depth - 1] for depth in self.depths]

    def head(self, k: int) -> str:
        return f"mlm_heads.{k if self.cfg.separate_generators else 0}"

    def gamma(self, features: list[Tensor], position: int, constant: list[float]) -> Tensor:
        if "mixture.v" not in self.p:
            return torch.tensor(constant, dtype=torch.float64)
        return torch.stack([self.p["mixture.v"] @ f[position] for f in features]).softmax(0)

    def run(self, batch: dict, noise: Tensor, weight: float, share: float, constant: list[float] = ()) -> Expected:
        """Forward and backward of a batch, ``noise`` [B,M,V], lambda ``weight``, r ``share``."""
        generator_loss, detection_loss, all_sampled, all_gamma = 0.0, 0.0, [], []
        for row, tokens in enumerate(batch["net_input"]["tokens"]):
            net_input = {name: value[row] for name, value in batch["net_input"].items()}
            length = int((tokens != 1).sum())
            positions = net_input["masked_positions"][net_input["masked_weights"] > 0].tolist()
            features = self.features(net_input["masked_tokens"][:length])
            loss, hidden = self.generator_loss(features, tokens, positions)
            mixtures = [self.mix(features, hidden, i, constant) for i in positions]
            sampled = [int((m["logits"] + noise[row, slot]).argmax()) for slot, m in enumerate(mixtures)]
            detection, upstream = self.detection_loss(tokens[:length], positions, sampled)
            (loss + weight * share * detection).backward(retain_graph=True)
            for slot, mixture in enumerate(mixtures):
                self.adversarial_backward(mixture, noise[row, slot], upstream[slot].grad)
            generator_loss, detection_loss = generator_loss + loss.item(), detection_loss + detection.item()
            all_sampled.append(sampled)
            all_gamma.append(torch.stack([m["gamma"].detach() for m in mixtures]))
        gradients = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in self.p.items()}
        return Expected(generator_loss, detection_loss, all_sampled, all_gamma, gradients)

    def generator_loss(self, features: list[Tensor], tokens: Tensor, positions: list[int]) -> tuple[Tensor, dict]:
        """Eq. 2, and h^(d) of every (position, depth) for the mixture."""
        loss, hidden = torch.zeros((), dtype=torch.float64), {}
        for i in positions:
            for k, f in enumerate(features):
                name = self.head(k)
                h = self.norm(f"{name}.norm", gelu(self.linear(f"{name}.dense", f[i])))
                logits = self.p["embed_tokens.weight"] @ h + self.p[f"{name}.bias"]
                loss = loss + logits.exp().sum().log() - logits[tokens[i]]
                hidden[i, k] = h
        return loss, hidden

    def mix(self, features: list[Tensor], hidden: dict, i: int, constant: list[float]) -> dict:
        """Eq. 3 at position i: gamma with its graph, and numbers without one."""
        gamma = self.gamma(features, i, constant)
        states = [hidden[i, k] for k in range(len(features))]
        embedding = self.p["embed_tokens.weight"].detach()
        of_depth = [
            embedding @ h.detach() + self.p[f"{self.head(k)}.bias"].detach() for k, h in enumerate(states)
        ]  # fmt: skip
        logits = sum(weight * depth for weight, depth in zip(gamma.detach(), of_depth, strict=True))
        for forbidden in (*SPECIAL, *range(self.num_words, len(logits))):
            logits[forbidden] = -math.inf
        return {"gamma": gamma, "states": states, "of_depth": of_depth, "logits": logits}

    def detection_loss(self, tokens: Tensor, positions: list[int], sampled: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Eq. 1 with D = P("original") = sigmoid(-logit), and zeros added to the input embedding of every masked position."""
        corrupted = tokens.tolist()
        for i, token in zip(positions, sampled, strict=True):
            corrupted[i] = token
        embeddings = list(self.p["embed_tokens.weight"][torch.tensor(corrupted)])
        zeros = [torch.zeros_like(embeddings[0]).requires_grad_() for _ in positions]
        for i, zero in zip(positions, zeros, strict=True):
            embeddings[i] = embeddings[i] + zero
        states = self.layers("discriminator", torch.stack(embeddings), self.cfg.encoder_layers, [])[-1]
        original = torch.sigmoid(-self.linear("detection_head.output", states).squeeze(-1))
        loss = torch.zeros((), dtype=torch.float64)
        for i, token in enumerate(corrupted):
            loss = loss - (original[i].log() if token == int(tokens[i]) else (1 - original[i]).log())
        return loss, zeros

    def adversarial_backward(self, mixture: dict, noise: Tensor, upstream: Tensor) -> None:
        """-dL/dgamma into gamma's graph (v and f^(d)), and -m dL/dh^(d) into that of h^(d).

        ``upstream`` is dL/d(input embedding), lambda and r included; y the Gumbel-Softmax; logits_t = sum_d gamma_d l_dt.
        dL/dy_t = E_t . upstream;  dL/dlogits_t = y_t (dL/dy_t - sum_s y_s dL/dy_s) / tau;
        dL/dgamma_d = sum_t l_dt dL/dlogits_t.
        """
        tau, multiplier = self.cfg.gumbel_temperature, self.cfg.adversarial_mlm_multiplier
        embedding = self.p["embed_tokens.weight"].detach()
        y = ((mixture["logits"] + noise.double()) / tau).softmax(-1)
        by_y = embedding @ upstream
        by_logits = y * (by_y - (y * by_y).sum()) / tau
        if mixture["gamma"].requires_grad:
            by_gamma = torch.stack([(by_logits * of_depth).sum() for of_depth in mixture["of_depth"]])
            mixture["gamma"].backward(-by_gamma, retain_graph=True)
        if multiplier:
            for weight, h in zip(mixture["gamma"].detach(), mixture["states"], strict=True):
                h.backward(-multiplier * weight * (embedding.T @ by_logits), retain_graph=True)


def gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


def losses_and_gradients(model, criterion, batch: dict) -> tuple[Tensor, dict, dict[str, Tensor]]:
    """The model's own loss, logging output, and gradients by name (a missing gradient is zeros)."""
    model.zero_grad(set_to_none=True)
    loss, _, log = criterion(model, batch)
    loss.backward()
    named = model.named_parameters()
    return loss.detach(), log, {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    """Every tensor within ``tolerance`` of the largest entry of the one expected (float32 against float64)."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = (got[name].double() - value).abs().max()
        assert error <= tolerance * value.abs().max() + 1e-7, f"{name}: {error} of {value.abs().max()}"
