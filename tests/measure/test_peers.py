"""Contestants of ``amos bench``: order, compilation, equal text and weights, FLOPs of a peer, errors."""

import pytest
import torch

from amos_fairseq.errors import UserError
from amos_fairseq.measure import fairseq_step
from amos_fairseq.measure.configuration import BenchSettings, BenchSetup, build_task, set_up
from amos_fairseq.measure.contest import Contestant, build_contestants, comparable_setup
from amos_fairseq.measure.fairseq_step import FairseqStep, make_synthetic_text, random_blocks
from amos_fairseq.measure.flops import training_flops
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.run import kernels as compilation
from amos_fairseq.tasks.text_pretraining import TextPretrainingTask

VOCABULARY = 600


def setup_of(recipe: str, *overrides: str, **settings) -> BenchSetup:
    settings = {"vocabulary_size": VOCABULARY, "precision": "float32"} | settings
    return set_up(BenchSettings(recipe, ["dataset.batch_size=2", *overrides], **settings))


def prepared(*arguments: str, **settings) -> tuple[BenchSetup, TextPretrainingTask]:
    setup = setup_of(*arguments, **settings)
    return setup, build_task(setup.cfg.task, setup.vocabulary_size)


def test_every_peer_once_in_the_given_order() -> None:
    setup, task = prepared("electra_tiny")
    contestants, refusals = build_contestants(setup, task, ["reference", "hf", "reference"], compile=False)
    named = [(each.name, each.is_ours) for each in contestants]
    assert named == [("ours", True), ("reference", False), ("hf", False)]
    kernels = [each.step.module.cfg.kernels for each in contestants[:2]]
    assert kernels == ["fast", "reference"]
    assert {each.unequal_work for each in contestants} == {""}
    assert refusals == {}


@pytest.fixture
def any_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "require_compiler", lambda device: None)


def compiled_parts(each: Contestant) -> list[bool]:
    """Whether it is compiled as a whole, and whether the layers of each encoder are."""
    modules = list(each.step.module.modules())
    encoders = [module.is_compiled for module in modules if isinstance(module, TransformerEncoder)]
    return [any(module._compiled_call_impl is not None for module in modules), *encoders]


@pytest.mark.usefixtures("any_compiler")
def test_compile_adds_a_compiled_copy_of_each() -> None:
    setup, task = prepared("electra_tiny")
    contestants, refusals = build_contestants(setup, task, ["hf", "reference"], compile=True)
    assert {each.name: (each.compiled, compiled_parts(each)) for each in contestants} == {
        "ours": (False, [False, False, False]),
        "hf": (False, [False]),
        "reference": (False, [False, False, False]),
        "ours, compiled": (True, [False, True, True]),
        "hf, compiled": (True, [True]),
        "reference, compiled": (True, [False, True, True]),
    }
    assert refusals == {}
    contestants, _ = build_contestants(setup.with_model(compile=True), task, [], compile=False)
    assert [(each.name, each.compiled) for each in contestants] == [("ours, compiled", True)]


def test_without_a_compiler_the_others_compete(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise UserError("no compiler is found")

    monkeypatch.setattr(compilation, "require_compiler", refuse)
    setup, task = prepared("mlm_tiny")
    contestants, refusals = build_contestants(setup, task, ["reference"], compile=True)
    assert [each.name for each in contestants] == ["ours", "reference"]
    assert refusals == dict.fromkeys(["ours, compiled", "reference, compiled"], "no compiler is found")
    with pytest.raises(UserError, match="no compiler is found"):  # the recipe itself is compiled
        build_contestants(setup.with_model(compile=True), task, [], compile=False)


def test_peers_start_from_the_same_weights_and_see_the_same_text() -> None:
    setup, task = prepared("amos_tiny")
    ours, reference = (each.step for each in build_contestants(setup, task, ["reference"], compile=False)[0])
    for mine, other in zip(ours.module.parameters(), reference.module.parameters(), strict=True):
        assert mine.equal(other)
    texts = [make_synthetic_text(task, 2) for _ in range(2)]
    for one, two in zip(*(text.batches for text in texts), strict=True):
        assert all(one["net_input"][name].equal(two["net_input"][name]) for name in one["net_input"])


def test_synthetic_text_is_full_blocks_masked_by_the_task() -> None:
    _, task = prepared("mlm_tiny", "task.tokens_per_sample=40", "task.mask_prob=0.2")
    text = make_synthetic_text(task, 2)
    assert (text.tokens_per_batch, text.masked_per_batch) == (2 * 40, 2 * 8)
    for batch in text.batches:
        inputs = batch["net_input"]
        assert inputs["masked_weights"].eq(1).all()
        assert not set(inputs["tokens"][:, 1:].flatten().tolist()) & set(task.special_ids)
    assert len({batch["first_id"] for batch in text.batches}) == len(text.batches)
    pieces = {piece for block in range(200) for piece in random_blocks(task, 200)[block]["tokens"][1:].tolist()}
    assert len(pieces) == VOCABULARY - len(task.special_ids)  # 7,800 samples miss a piece with probability 1e-3


def test_loader_speed_is_that_of_the_median_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The i-th batch of 2 x 64 tokens takes i seconds of a fake clock; the first is not counted: 1 to 16, median 8.5."""
    _, task = prepared("mlm_tiny", "task.tokens_per_sample=64")
    dataset = random_blocks(task, 6)
    ticks = iter([second for number in range(17) for second in (0.0, float(number or 100))])
    monkeypatch.setattr(fairseq_step.time, "perf_counter", lambda: next(ticks))
    indices: list[int] = []
    read = type(dataset).__getitem__
    monkeypatch.setattr(type(dataset), "__getitem__", lambda data, i: indices.append(int(i)) or read(data, i))
    assert fairseq_step.loader_speed(dataset, 2) == pytest.approx((128 / 8 + 128 / 9) / 2)
    assert indices == [dataset.ordered_indices()[number % 6] for number in range(34)]


def test_amos_is_compared_with_the_electra_of_its_encoder() -> None:
    """The peer's FLOPs are those of ELECTRA's recipe with AMOS' embedding width, dropout, length and batch."""
    overrides = ["task.tokens_per_sample=32", "model.embedding_dim=48", "model.dropout=0.2"]
    setup, difference = comparable_setup(setup_of("amos_tiny", *overrides))
    assert "ELECTRA instead of amos" in difference
    plain = ["distributed_training.distributed_world_size=1", "dataset.batch_size=2"]
    expected = training_flops(compose_recipe("electra_tiny", [*plain, *overrides]), VOCABULARY)
    found = training_flops(setup.cfg, setup.vocabulary_size)
    assert (found.per_update, found.tokens_per_update) == (expected.per_update, expected.tokens_per_update)
    assert (setup.cfg.model.dropout, setup.cfg.model.embedding_dim) == (0.2, 48)
    assert setup.cfg.task.precision == "float32"  # the peer does not choose its own


def test_amos_on_modernbert_is_compared_with_electra_on_modernbert() -> None:
    setup, difference = comparable_setup(setup_of("amos_modern_mini"))
    assert "ELECTRA instead of amos" in difference
    assert (setup.cfg.model._name, setup.cfg.model.encoder, setup.cfg.model.encoder_ffn_embed_dim) == (
        "electra",
        "modernbert",
        344,
    )


@pytest.mark.parametrize(("supported", "expected"), [(True, "bf16"), (False, "float32")])
def test_default_precision_is_that_of_the_recipe_on_this_device(
    supported: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amos_fairseq.run.precision.supports_bf16", lambda on_gpu: supported)
    found = [setup_of(recipe, precision=None) for recipe in ("mlm_base", "mlm_tiny")]
    assert [setup.precision for setup in found] == [expected, expected]
    assert [setup.cfg.common.bf16 for setup in found] == [supported, supported]
    assert setup_of("mlm_tiny", "common.bf16=true", precision=None).precision == "bf16"


def test_precision_of_the_command_line() -> None:
    assert setup_of("mlm_base", precision="float32").cfg.common.bf16 is False
    assert setup_of("mlm_tiny", precision="bf16").cfg.common.bf16 is True


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("electra_tiny", ["model.relative_position_scheme=t5"], "scheme=t5 is not supported by"),
        ("electra_tiny", ["model.generator_temperature=2"], "model.generator_temperature=2.0 is not supported by"),
        (
            "electra_tiny",
            ["model.disentangled_embeddings=true"],
            "model.disentangled_embeddings=True is not supported by",
        ),
        ("mlm_modern_mini", ["model.dropout=0.1"], "model.dropout=0.1 is not supported by"),
        ("mlm_tiny", ["model.activation_dropout=0.1"], "model.activation_dropout=0.1 is not supported by"),
        ("amos_tiny", ["model.encoder_layers=3"], "no ELECTRA recipe has an encoder of these sizes"),
    ],
)
def test_settings_that_the_library_lacks_are_refused(recipe: str, overrides: list[str], message: str) -> None:
    setup, task = prepared(recipe, *overrides)
    with pytest.raises(UserError, match=message):
        build_contestants(setup, task, ["hf"], compile=False)


@pytest.mark.parametrize("recipe", [("variants/electra_unigram", "+sizes=tiny"), ("electric_tiny",), ("teams_tiny",)])
def test_steps_change_the_weights_of_every_objective(recipe: tuple[str, ...]) -> None:
    """The learning rate is 0 in the first update, and not in the second."""
    setup, task = prepared(*recipe)
    step, batches = FairseqStep(setup, task), make_synthetic_text(task, 2).batches
    before = [parameter.detach().clone() for parameter in step.module.parameters()]
    for batch in batches[:2]:
        step.step(batch)
    changed = [not old.equal(new) for old, new in zip(before, step.module.parameters(), strict=True)]
    assert sum(changed) > len(changed) / 2
    assert step.trainer.get_num_updates() == 2
