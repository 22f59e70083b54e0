"""The model card of an exported folder: the facts of the run, and how to use the class."""

import html
import os
import re
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from amos_fairseq.checkpoints.read import LoadedCheckpoint, parent_of
from amos_fairseq.checkpoints.write import import_source
from amos_fairseq.data.glue_tasks import SCORED
from amos_fairseq.data.tagging import read_manifest
from amos_fairseq.errors import UserError
from amos_fairseq.files import read_header
from amos_fairseq.hugging_face.parts import TASK_FILE, Part
from amos_fairseq.hugging_face.weights import (
    AUTO_CLASSES,
    DETECTION,
    ENCODER,
    ENERGY,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
)
from amos_fairseq.metrics_file import read_records
from amos_fairseq.strangers import plain_name, read_json
from amos_fairseq.tokenization.fast_tokenizer import HUGGING_FACE
from amos_fairseq.versions import version_of

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

UNKNOWN_LICENSE = "unknown"
_LONGEST_CHAIN = 10  # of runs that started from each other
PRETRAINING_TASK = "text_pretraining"
# Units of the validation metrics, by task.
_UNITS = {
    PRETRAINING_TASK: "Losses and entropies in nats, on held-out text. `rtd_`: detection of replaced tokens, which are the "
    "positive class; `mlm_`, `mixture_`: the generator at a depth.",
    "sentence_prediction": "`loss` is divided by log 2, as fairseq does.",
}
_OTHER_UNITS = "Losses in nats."
_LIBRARIES = ("amos_fairseq", "fairseq-fixed", "torch", "transformers", "tokenizers")
_POSITIONS = {"none": "absolute", "t5": "absolute, and relative as in T5", "amos": "absolute, and relative as released"}
# Keys of a validation record that describe speed or position in the run.
_NOT_METRICS = ("split", "update", "epoch", "wps", "ups", "wpb", "bsz", "best_loss", "best_num_updates")
# Weights with one row per token of the vocabulary.
_ROW_PER_TOKEN = ("embed_tokens.weight", "mlm_head.bias")
_PIPELINES = {
    ENCODER: "feature-extraction",
    MASKED_LM: "fill-mask",
    DETECTION: "token-classification",
    SEQUENCE_CLASSIFICATION: "text-classification",
    QUESTION_ANSWERING: "question-answering",
    TOKEN_CLASSIFICATION: "token-classification",
}
_LIMITS = {
    ENCODER: "It was trained without a sentence objective: before it is fine-tuned, do not expect cosine similarities of its "
    "features to mean much. `pooler_output` is tanh of the first state; nothing was trained for it.",
    MASKED_LM: "This is the generator, which makes the training signal; the encoder to fine-tune is the discriminator.",
    DETECTION: "It was trained on the mistakes of its own generator, not on those of people or of other models.",
    ENERGY: "Its output is not the probability of a replaced token: -energy is the log-probability of the token at a position, "
    "given all others, with a normalizer that training brings near 1 without a guarantee.",
    SEQUENCE_CLASSIFICATION: "It predicts the classes of the task that it was fine-tuned on.",
    QUESTION_ANSWERING: "It marks the likeliest span, also if the text has no answer: that is decided by a threshold of the "
    "null score, which is chosen on development data and is not in this folder.",
    TOKEN_CLASSIFICATION: 'Only labels of the first pieces of words were trained: use `aggregation_strategy="first"`. Spaces '
    "separate the words of the training data, also from punctuation. The label of a word is that of the group which covers its "
    "first character: the pipeline divides words at unknown pieces and, with a WordPiece tokenizer, at punctuation.",
}
_NO_PIPELINE = (
    ' `pipeline("token-classification")` must not be used: it builds another class, whose classifier is not in this folder and '
    "starts from random values."
)
_LIMITS[PRETRAINING] = _LIMITS[DETECTION] + _NO_PIPELINE
_LIMITS[ENERGY] += _NO_PIPELINE
# fairseq's name of a score of fine-tuning, in percent | its name on the Hub.
_SCORES = {
    "accuracy": "accuracy", "mcc": "matthews_correlation", "spearman": "spearmanr", "f1": "f1", "precision": "precision",
    "recall": "recall",
}  # fmt: skip
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
    SEQUENCE_CLASSIFICATION: "inputs = tokenizer(\"A text.\", truncation=True, return_tensors=\"pt\")  # or two texts\n"
    "logits = model(**inputs).logits  # [1, classes]",
    QUESTION_ANSWERING: "output = model(**tokenizer(\"A question?\", \"And its answer.\", return_tensors=\"pt\"))\n"
    "start, end = output.start_logits.argmax(), output.end_logits.argmax()",
    TOKEN_CLASSIFICATION: "from transformers import pipeline\n\n"
    "tagger = pipeline(\"token-classification\", model=model, tokenizer=tokenizer, aggregation_strategy=\"first\")\n"
    "spans = tagger(\"Words , separated by spaces .\")",
}  # fmt: skip


@dataclass(frozen=True)
class CardSettings:
    """Facts that only the user knows.

    Attributes:
        data_license: an identifier of the Hub.
        language: a code such as ``en``.
        base_model: name on the Hub of the model that was imported and trained further.
        datasets: names on the Hub of the training data.
    """

    data_license: str = UNKNOWN_LICENSE
    language: str | None = None
    base_model: str | None = None
    datasets: tuple[str, ...] = ()


def check_card_settings(settings: CardSettings) -> None:
    """Raise :class:`UserError` for a value that would break the card's header, or that a web page would show as HTML."""
    values = [("--data-license", settings.data_license), ("--language", settings.language)]
    values += [("--base-model", settings.base_model), *(("--dataset", name) for name in settings.datasets)]
    for flag, value in values:
        if value is not None and not re.fullmatch(r"(?=.*\w)[\w ./,:+-]{1,200}", value):
            raise UserError(
                f"{flag} {reprlib.repr(value)} is not a name: give an identifier such as cc-by-4.0, en or google/bert, of at "
                "most 200 letters, digits, spaces and . , : / + - _"
            )


class Target(NamedTuple):
    """The exported folder: its name, its class, and whether it contains code."""

    name: str
    class_name: str
    has_code: bool


def write_card(
    folder: Path, target: Target, loaded: LoadedCheckpoint, part: Part, settings: CardSettings, checked: str
) -> None:
    """Write ``README.md`` into ``folder``. ``checked``: the result of the verification, in words."""
    from huggingface_hub import ModelCard, ModelCardData

    results = eval_results(loaded, part)
    data = ModelCardData(
        language=settings.language,
        license=settings.data_license,
        base_model=settings.base_model,
        datasets=list(settings.datasets) or None,
        model_name=target.name if results else None,
        eval_results=results,
        library_name="transformers",
        pipeline_tag=_PIPELINES.get(part.kind),
        tags=["amos_fairseq", "fairseq", *filter(None, [objective(loaded)])],
    )
    sections = [
        f"# {title(loaded, part)}",
        f"A `{target.class_name}`: {part.description} of {origin(loaded)}.",
        "## Use\n\n" + usage(part, target),
        "## The model\n\n" + as_table(model_facts(loaded, part)),
    ]
    if run := run_facts(loaded):
        sections.append("## The run\n\n" + as_table(run))
    if metrics := validation_metrics(loaded):
        units = _UNITS.get(task_name(loaded), _OTHER_UNITS)
        sections.append(f"## Validation\n\n{units}\n\n" + as_table(metrics))
    sections += [
        "## Limits\n\n" + limits(loaded, part),
        "## License\n\n" + license_text(settings, first_source(loaded)),
        f"## Comparison with the checkpoint\n\n{checked}.",
        "## Versions\n\n" + ", ".join(f"{name} {version_of(name)}" for name in _LIBRARIES) + ".",
    ]
    content = f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"
    ModelCard(content).save(folder / "README.md")


def title(loaded: LoadedCheckpoint, part: Part) -> str:
    shape = part.shape
    name = objective(loaded).upper() or import_source(loaded.task)
    return f"{escape_markup(name)}, {shape.num_layers} layers of width {shape.width}: {part.description}"


def objective(loaded: LoadedCheckpoint) -> str:
    """Return the name of the pretraining objective, such as ``amos``; empty for an imported model."""
    if import_source(loaded.task):
        return ""
    settings = loaded.model.cfg
    name = getattr(settings, "arch", None) or getattr(settings, "_name", None) or type(loaded.model).__name__
    return str(name).partition("_")[0].lower()


def origin(loaded: LoadedCheckpoint) -> str:
    source = import_source(loaded.task)
    if source:
        return f"{escape_markup(source)}, imported with amos_fairseq and not trained further"
    source = first_source(loaded)
    first = f", which started from {escape_markup(source)}" if source else ""
    return f"a model trained with amos_fairseq{first}"


def first_source(loaded: LoadedCheckpoint) -> str:
    """Return what the first of the runs that led to this one was imported from; empty if it was not, or its file is gone."""
    source, parent = import_source(loaded.task), loaded.parent
    for _ in range(_LONGEST_CHAIN):
        if source or not os.path.isfile(parent):  # False also where its folder may not be read
            break
        try:
            state = read_header(parent)
            source, parent = import_source(state["cfg"]["task"]), parent_of(state)
        except (UserError, KeyError, TypeError, AttributeError):  # the file is another one by now
            break
    return source


def usage(part: Part, target: Target) -> str:
    auto_class, trust = AUTO_CLASSES[part.kind], ", trust_remote_code=True" if target.has_code else ""
    lines = [
        "```python",
        f"from transformers import AutoTokenizer, {auto_class}",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{target.name}"{trust})',
        f'model = {auto_class}.from_pretrained("{target.name}"{trust})',
        _USES[part.kind],
        "```",
    ]
    if target.has_code:
        lines.append("\nThe folder contains code, which `trust_remote_code=True` allows to run: read it before.")
    return "\n".join(lines)


def model_facts(loaded: LoadedCheckpoint, part: Part) -> dict[str, str]:
    shape, tokenizer = part.shape, loaded.tokenizer
    return {
        "Layers, width, FFN width, heads": f"{shape.num_layers}, {shape.width}, {shape.ffn_width}, {shape.num_heads}",
        "Longest input": f"{shape.max_positions} tokens",
        "Positions": _POSITIONS[shape.position_scheme],
        "Vocabulary": f"{len(tokenizer):,} pieces, {tokenizer.kind}, {'cased' if tokenizer.cased else 'uncased'}",
        "Parameters": f"{num_parameters(loaded, part):,}",
    }


def num_parameters(loaded: LoadedCheckpoint, part: Part) -> int:
    """Count the part's parameters in our model, without the rows that only round up the vocabulary."""
    num_tokens = len(loaded.dictionary)
    return sum(
        (tensor[:num_tokens] if name in _ROW_PER_TOKEN else tensor).numel() for name, tensor in part.weights.items()
    )


def run_facts(loaded: LoadedCheckpoint) -> dict[str, str]:
    """Return facts of the training from the checkpoint and the log beside it; none for an imported model."""
    if import_source(loaded.task):
        return {}
    task = loaded.task
    facts = {
        "Objective": objective(loaded),
        "Started from": first_source(loaded),
        "Task": task_name(loaded),
        "Updates": f"{loaded.num_updates:,}",
        "Tokens read": num_tokens_read(loaded),
        "Tokens masked": f"{task['mask_prob']:.0%}" if "mask_prob" in task else "",
    }
    return {name: fact for name, fact in facts.items() if fact}


def task_name(loaded: LoadedCheckpoint) -> str:
    return str(loaded.task.get("_name", PRETRAINING_TASK))


def num_tokens_read(loaded: LoadedCheckpoint) -> str:
    """Return updates times the mean number of tokens per update; empty without the log of the run."""
    records = [record for record in read_metrics(loaded) if record.get("split") == "train" and record.get("wpb")]
    if not records:
        return ""
    mean = sum(record["wpb"] for record in records) / len(records)
    return f"about {float(f'{mean * loaded.num_updates:.3g}'):,.0f}"


def validation_metrics(loaded: LoadedCheckpoint) -> dict[str, str]:
    """Return the last validation up to the checkpoint's update, without measurements of speed."""
    records = [record for record in read_metrics(loaded) if record.get("split") != "train"]
    if not records:
        return {}
    record = records[-1]
    values = {name: f"{value:.4g}" for name, value in record.items() if name not in _NOT_METRICS and value is not None}
    return {"update": f"{record['update']:,}", **values}


def read_metrics(loaded: LoadedCheckpoint) -> list[dict[str, Any]]:
    """Return the log's records up to the checkpoint's update; none without a log. A truncated last line is skipped."""
    return [record for record in read_records(loaded.file.parent) if record["update"] <= loaded.num_updates]


def limits(loaded: LoadedCheckpoint, part: Part) -> str:
    case = "keeps upper case" if loaded.tokenizer.cased else "converts upper case to lower case"
    of_import = loaded.tokenizer.kind == HUGGING_FACE or import_source(loaded.task)
    vocabulary = "that of the imported model" if of_import else "from the training text"
    return (
        f"{part.limits or _LIMITS[part.kind]} Its vocabulary is {vocabulary} and {case}; other languages and "
        f"characters that were rare there become unknown. It takes at most {part.shape.max_positions} tokens: "
        "`truncation=True` cuts longer inputs, of a pair the longer text first, as in fine-tuning. A text that spells a "
        "special token is read as that token; `split_special_tokens=True` makes the tokenizer read it as text."
    )


def license_text(settings: CardSettings, source: str) -> str:
    model = settings.base_model or source
    of_model = f" The license of {escape_markup(model)}, from which the weights come, applies too." if model else ""
    if settings.data_license == UNKNOWN_LICENSE:
        return f"Of the training data: unknown. Ask the people who trained this model before you publish it.{of_model}"
    return f"Of the training data: `{settings.data_license}`.{of_model}"


def eval_results(loaded: LoadedCheckpoint, part: Part) -> "list[EvalResult] | None":
    """Return the last validation of a fine-tuned task for the card's ``model-index``; None without its name or a score."""
    from huggingface_hub import EvalResult

    records = [record for record in read_metrics(loaded) if record.get("split") != "train"]
    data = dataset_of(part, Path(str(loaded.task.get("data", ""))))
    if data is None or not records:
        return None
    kind, name = data
    results = [
        EvalResult(
            _PIPELINES[part.kind], kind, name, metric, round(records[-1][key] / 100, 4), dataset_split="validation"
        )
        for key, metric in _SCORES.items()
        if isinstance(records[-1].get(key), (int, float))
    ]
    return results or None


def dataset_of(part: Part, directory: Path) -> tuple[str, str] | None:
    """Return identifier and name of the data that a model was fine-tuned on; None if they are not in ``directory``."""
    try:
        if part.kind == SEQUENCE_CLASSIFICATION:
            task = read_json(directory / TASK_FILE, "prepare the data again")["task"]
            return ("glue", f"GLUE {task}") if task in SCORED else None
        if part.kind == TOKEN_CLASSIFICATION:
            manifest = read_manifest(directory)
            return "unknown", f"{manifest['column']} of {plain_name(manifest['sources']['valid']['name'])}"
    except (UserError, ValueError, KeyError, TypeError):
        pass
    return None


def as_table(rows: dict[str, str]) -> str:
    lines = (f"| {escape_markup(name)} | {escape_markup(value)} |" for name, value in rows.items())
    return "\n".join(["| | |", "|---|---|", *lines])


def escape_markup(text: str) -> str:
    """Escape HTML, links, code and cells of tables in text from a checkpoint or a log, which a web page may show."""
    return re.sub(r"([\\`|\[\]])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
