"""Second implementations of AMOS, TEAMS and Electric to compare with: float64, one sequence at a time without its padding,
loops over heads, depths and masked positions. The adversarial gradient of AMOS is written out as a chain of derivatives.
"""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from amos_fairseq.models.electric import ElectricModel
from amos_fairseq.modules.encoder import TransformerEncoder

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
    """The expected results of one forward and backward pass."""

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
        self.num_tokens = model.vocabulary.num_tokens - 1  # <mask> is the last token
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
        return self.feed_forward(name, x)

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        return self.norm(f"{name}.ffn_norm", x + self.linear(f"{name}.ffn_out", gelu(self.linear(f"{name}.ffn_in", x))))

    def bias(self, encoder: str, length: int) -> Tensor:
        if str(self.cfg.relative_position_scheme) == "none":
            return torch.zeros(self.cfg.encoder_attention_heads, length, length, dtype=torch.float64)
        table = self.p[f"{encoder}.relative_position.table.weight"]
        buckets = self.cfg.relative_position_buckets, self.cfg.relative_position_max_distance
        rows = [[t5_row(key - query, *buckets) for key in range(length)] for query in range(length)]
        return table[torch.tensor(rows)].permute(2, 0, 1)

    def first_states(self, encoder: str, embeddings: Tensor) -> Tensor:
        """The input of the first layer; there is no projection if the widths are equal."""
        positions = self.p[f"{encoder}.embed_positions.weight"][: len(embeddings)]
        x = self.norm(f"{encoder}.embedding_norm", embeddings + positions)
        projected = f"{encoder}.embedding_projection"
        return self.linear(projected, x) if f"{projected}.weight" in self.p else x

    def layers(self, encoder: str, embeddings: Tensor, num_layers: int, stops: list[int]) -> list[Tensor]:
        """Outputs of all layers; the layer above a stop starts from a constant."""
        bias = self.bias(encoder, len(embeddings))
        x = self.first_states(encoder, embeddings)
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
        """Eq. 3 at position i: gamma with its graph, the rest without one."""
        gamma = self.gamma(features, i, constant)
        states = [hidden[i, k] for k in range(len(features))]
        embedding = self.p["embed_tokens.weight"].detach()
        of_depth = [embedding @ h.detach() + self.p[f"{self.head(k)}.bias"].detach() for k, h in enumerate(states)]
        logits = sum(weight * depth for weight, depth in zip(gamma.detach(), of_depth, strict=True))
        for forbidden in (*SPECIAL, *range(self.num_tokens, len(logits))):
            logits[forbidden] = -math.inf
        return {"gamma": gamma, "states": states, "of_depth": of_depth, "logits": logits}

    def detection_loss(self, tokens: Tensor, positions: list[int], sampled: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Eq. 1, and zeros added to the input embedding of every masked position."""
        corrupted = tokens.tolist()
        for i, token in zip(positions, sampled, strict=True):
            corrupted[i] = token
        embeddings = list(self.p["embed_tokens.weight"][torch.tensor(corrupted)])
        zeros = [torch.zeros_like(embeddings[0]).requires_grad_() for _ in positions]
        for i, zero in zip(positions, zeros, strict=True):
            embeddings[i] = embeddings[i] + zero
        states = self.layers("discriminator", torch.stack(embeddings), self.cfg.encoder_layers, [])[-1]
        return self.detection(states, torch.tensor(corrupted), tokens), zeros

    def detection(self, states: Tensor, corrupted: Tensor, tokens: Tensor) -> Tensor:
        """Eq. 1 of AMOS and Eq. 4 of TEAMS with D = P("original") = sigmoid(-logit)."""
        original = torch.sigmoid(-self.linear("detection_head.output", states).squeeze(-1))
        is_original = corrupted == tokens
        return -torch.where(is_original, original, 1 - original).log().sum()

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


class ReferenceTeams(ReferenceAmos):
    """The parameters of ``model`` (a ``TeamsModel``) as float64 leaves, one for each that is shared, and the algorithm."""

    def __init__(self, model):
        self.cfg = model.cfg
        self.num_layers = {"generator": len(model.generator.layers), "discriminator": len(model.discriminator.layers)}
        leaves = {value: value.detach().double().requires_grad_() for value in model.parameters()}
        self.p = {name: leaves[value] for name, value in model.named_parameters(remove_duplicate=False)}

    def states(self, encoder: str, tokens: Tensor) -> list[Tensor]:
        """The input of the first layer and the output of every layer."""
        embeddings = self.p["embed_tokens.weight"][tokens]
        return [self.first_states(encoder, embeddings), *self.layers(encoder, embeddings, self.num_layers[encoder], [])]

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

    def losses(self, batch: dict, sampled: Tensor, candidates: Tensor) -> dict[str, Tensor]:
        """Eq. 1, 4 and 8 of a batch, each summed over its own positions, for given replacements and candidates."""
        totals = {"mlm": 0.0, "rtd": 0.0, "mws": 0.0}
        for row, tokens in enumerate(batch["net_input"]["tokens"]):
            inputs = {name: value[row] for name, value in batch["net_input"].items()}
            length = int((tokens != 1).sum())
            positions = inputs["masked_positions"][inputs["masked_weights"] > 0].tolist()
            hidden = self.states("generator", inputs["masked_tokens"][:length])[-1]
            corrupted = tokens[:length].clone()
            for slot, i in enumerate(positions):
                logits = self.p["embed_tokens.weight"] @ self.head("mlm_head", hidden[i]) + self.p["mlm_head.bias"]
                totals["mlm"] = totals["mlm"] + logits.exp().sum().log() - logits[tokens[i]]
                corrupted[i] = sampled[row, slot]
            mws_states, rtd_states = self.branches(corrupted)
            if "detection_head.output.weight" in self.p:
                totals["rtd"] = totals["rtd"] + self.detection(rtd_states, corrupted, tokens[:length])
            if "mws_head.dense.weight" in self.p:
                for slot, i in enumerate(positions):
                    totals["mws"] = totals["mws"] + self.selection(mws_states[i], tokens[i], candidates[row, slot])
        return totals

    def selection(self, state: Tensor, original: Tensor, candidates: Tensor) -> Tensor:
        """Eq. 7 and 8: the set holds the original once, at any place among the candidates."""
        hidden = self.head("mws_head", state)
        scores = {int(c): self.p["embed_tokens.weight"][int(c)] @ hidden for c in candidates}
        assert len(scores) == len(candidates)
        return sum(score.exp() for score in scores.values()).log() - scores[int(original)]


def in_float64(model: ElectricModel) -> ElectricModel:
    return copy.deepcopy(model).double().eval()


def naive_tower(tower: TransformerEncoder, embeddings: Tensor, keys_of) -> Tensor:
    """[L,E] float64, a text without padding -> [L,G]; query i attends to the keys ``keys_of(i, L)`` only."""
    length = len(embeddings)
    states = tower.embedding_norm(embeddings + tower.embed_positions.weight[:length])
    if tower.embedding_projection is not None:
        states = tower.embedding_projection(states)
    bias = torch.zeros(99, length, length) if tower.relative_position is None else tower.relative_position(length)
    for layer in tower.layers:
        heads = layer.attention.num_heads
        query, key, value = (x.view(length, heads, -1) for x in layer.attention.query_key_value(states).chunk(3, -1))
        mixed = torch.zeros_like(value)
        for i in range(length):
            keys = list(keys_of(i, length))
            for h in range(heads):
                products = [query[i, h] @ key[j, h] / math.sqrt(query.size(-1)) + bias[h, i, j] for j in keys]
                scores = torch.stack(products)
                mixed[i, h] = scores.softmax(0) @ value[keys, h]
        states = layer.attention_norm(states + layer.attention.output(mixed.view(length, -1)))
        states = layer.ffn_norm(states + layer.ffn_out(gelu(layer.ffn_in(states))))
    return states


@torch.no_grad()
def naive_cloze(model: ElectricModel, text: Tensor) -> Tensor:
    """Logits [L,V] float64 of every token of ``text`` [L] from both sides of the token."""
    model = in_float64(model)
    embeddings, length = model.embed_tokens(text), len(text)
    past = naive_tower(model.generator.past, embeddings, lambda i, length: range(i + 1))
    future = naive_tower(model.generator.future, embeddings, range)
    before, behind = model.generator.boundaries.weight
    logits = []
    for t in range(length):
        left = past[t - 1] if t > 0 else before
        right = future[t + 1] if t + 1 < length else behind
        hidden = model.mlm_head(torch.cat([left, right]))
        logits.append(model.embed_tokens.weight @ hidden + model.mlm_head.bias)
    return torch.stack(logits)


@torch.no_grad()
def naive_energies(model: ElectricModel, text: Tensor) -> Tensor:
    """E [L] float64 of a text without padding; in ELECTRA-TT the logit of the head."""
    model = in_float64(model)
    states = model.discriminator(model.embed_tokens(text[None]))[-1]
    hidden = gelu(model.detection_head.dense(states))
    return model.detection_head.output(hidden)[0, :, 0]


def naive_noise_probs(model: ElectricModel, logits: Tensor) -> Tensor:
    """q [L,V]: the softmax over the ordinary tokens."""
    allowed = [row for row in range(logits.size(1)) if not model.never_sampled_mask[row]]
    probs = torch.zeros_like(logits)
    probs[:, allowed] = logits[:, allowed].softmax(-1)
    return probs
