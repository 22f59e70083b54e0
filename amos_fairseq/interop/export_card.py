"""The model card of an exported folder: what is known of the run, and how to use the class."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

from amos_fairseq.errors import UserError
from amos_fairseq.interop.checkpoint import Pretrained
from amos_fairseq.interop.export_facts import (
    PRETRAINING_TASK,
    held_out_metrics,
    model_facts,
    objective,
    origin,
    run_facts,
    task_of,
)
from amos_fairseq.interop.export_model import AUTO_CLASSES
from amos_fairseq.interop.export_parts import Part
from amos_fairseq.interop.hugging_face_tables import (
    DETECTION,
    ENCODER,
    ENERGY,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFICATION,
)
from amos_fairseq.interop.imported_checkpoint import source_of
from amos_fairseq.versions import version_of

UNKNOWN_LICENSE = "unknown"
# What the numbers of a validation are, by task.
_UNITS = defaultdict(
    lambda: "Losses in nats.",
    {
        PRETRAINING_TASK: "Losses and entropies in nats, on text that was held out. `rtd_`: detection of replaced tokens, "
        "which are the positive class; `mlm_`, `mixture_`: the generator at a depth.",
        "sentence_prediction": "`loss` is divided by log 2, as fairseq does.",
    },
)
_LIBRARIES = ("amos_fairseq", "fairseq-fixed", "torch", "transformers", "tokenizers")
_PIPELINES = {
    ENCODER: "feature-extraction",
    MASKED_LM: "fill-mask",
    DETECTION: "token-classification",
    SEQUENCE_CLASSIFICATION: "text-classification",
    QUESTION_ANSWERING: "question-answering",
}
_LIMITS = {
    ENCODER: "It was trained without a sentence objective: before it is fine-tuned, do not expect cosine similarities of its "
    "features to mean much. `pooler_output` is tanh of the first state; nothing was trained for it.",
    MASKED_LM: "This is the generator, which makes the training signal; the encoder to fine-tune is the discriminator.",
    DETECTION: "It was trained on the mistakes of its own generator, not on those of people or of other models.",
    ENERGY: "Its output is no probability of a replaced token: -energy is the log-probability of the token that stands there, "
    "given all others, with a normaliser that training brings near 1 and nothing keeps there.",
    SEQUENCE_CLASSIFICATION: "It knows the classes of the task that it was fine-tuned on.",
    QUESTION_ANSWERING: "It marks the likeliest span, also where the text does not answer: whether it does is for a threshold "
    "of the null score, which is found on development data and is not in this folder.",
}
_LIMITS[PRETRAINING] = _LIMITS[DETECTION]
_USES = {
    ENCODER: "states = model(**tokenizer(\"A first text.\", return_tensors=\"pt\")).last_hidden_state  # [1, tokens, width]",
    MASKED_LM: "text = f\"The capital of France is {tokenizer.mask_token}.\"\n"
    "logits = model(**tokenizer(text, return_tensors=\"pt\")).logits  # [1, tokens, vocabulary]",
    DETECTION: "logits = model(**tokenizer(\"A text with a wrong word.\", return_tensors=\"pt\")).logits\n"
    "replaced = logits.softmax(-1)[..., 1]  # [1, tokens], probability",
    PRETRAINING: "logits = model(**tokenizer(\"A text with a wrong word.\", return_tensors=\"pt\")).logits\n"
    "replaced = logits.sigmoid()  # [1, tokens], probability",
    ENERGY: "energies = model(**tokenizer(\"A text.\", return_tensors=\"pt\")).logits  # [1, tokens], nats\n"
    "log_probs = -energies[:, 1:-1]  # of each token given all others, without <s> and </s>",
    SEQUENCE_CLASSIFICATION: "logits = model(**tokenizer(\"A text.\", return_tensors=\"pt\")).logits  # [1, classes]",
    QUESTION_ANSWERING: "output = model(**tokenizer(\"A question?\", \"And its answer.\", return_tensors=\"pt\"))\n"
    "start, end = output.start_logits.argmax(), output.end_logits.argmax()",
}  # fmt: skip


@dataclass(frozen=True)
class CardSettings:
    """What only the user knows. ``data_license``: an identifier of the Hub's; ``language``: a code such as ``en``."""

    data_license: str = UNKNOWN_LICENSE
    language: Optional[str] = None


class Target(NamedTuple):
    """What the folder is: its name, its class, and whether it brings code of its own."""

    name: str
    class_name: str
    trusts: bool


def write_card(
    folder: Path, target: Target, pretrained: Pretrained, part: Part, settings: CardSettings, checked: str
) -> None:
    """``README.md`` in ``folder``, which will get its name later. ``checked``: what --check found, in words."""
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(
        language=settings.language,
        license=settings.data_license,
        library_name="transformers",
        pipeline_tag=_PIPELINES.get(part.kind),
        tags=["amos_fairseq", "fairseq", *filter(None, [objective(pretrained)])],
    )
    sections = [
        f"# {folder_title(pretrained, part)}",
        f"A `{target.class_name}`: {part.description} of {origin(pretrained)}.",
        "## Use\n\n" + usage(part, target),
        "## The model\n\n" + as_table(model_facts(pretrained, part)),
    ]
    if run := run_facts(pretrained):
        sections.append("## The run\n\n" + as_table(run))
    if metrics := held_out_metrics(pretrained):
        sections.append(f"## Validation\n\n{_UNITS[task_of(pretrained)]}\n\n" + as_table(metrics))
    sections += [
        "## Limits\n\n" + limits(pretrained, part),
        "## Licence\n\n" + license_text(settings.data_license),
        f"## Comparison with the checkpoint\n\n{checked}.",
        "## Versions\n\n" + ", ".join(f"{name} {version_of(name)}" for name in _LIBRARIES) + ".",
    ]
    content = f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"
    ModelCard(content).save(folder / "README.md")


def folder_title(pretrained: Pretrained, part: Part) -> str:
    shape = part.shape
    name = objective(pretrained).upper() or source_of(pretrained.task)
    return f"{name}, {shape.num_layers} layers of width {shape.width}: {part.description}"


def usage(part: Part, target: Target) -> str:
    auto_class, trust = AUTO_CLASSES[part.kind], ", trust_remote_code=True" if target.trusts else ""
    lines = [
        "```python",
        f"from transformers import AutoTokenizer, {auto_class}",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{target.name}"{trust})',
        f'model = {auto_class}.from_pretrained("{target.name}"{trust})',
        _USES[part.kind],
        "```",
    ]
    if target.trusts:
        lines.append(
            "\nThe folder brings code of its own, which `trust_remote_code=True` allows to run: read it before."
        )
    return "\n".join(lines)


def limits(pretrained: Pretrained, part: Part) -> str:
    treatment = "keeps upper case" if pretrained.tokenizer.cased else "lowers upper case"
    return (
        f"{part.limits or _LIMITS[part.kind]} Its vocabulary comes from the training text and {treatment}; other languages and "
        f"characters that were rare there become unknown. It reads at most {part.shape.max_positions} tokens. A text that "
        "spells a special token is read as that token; `split_special_tokens=True` makes the tokenizer read it as text."
    )


def license_text(data_license: str) -> str:
    if data_license == UNKNOWN_LICENSE:
        return "Of the training data: unknown. Ask whoever trained this model before you pass it on."
    return f"Of the training data: `{data_license}`."


def as_table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def check_settings(settings: CardSettings) -> None:
    """:class:`UserError` where a value would break the card's header."""
    for flag, value in (("--data-license", settings.data_license), ("--language", settings.language)):
        if value is not None and (not value.strip() or "\n" in value):
            raise UserError(f"{flag} {value!r} is no name: give an identifier such as cc-by-4.0, or en")
