"""The model card of an exported folder: the facts of the run, and how to use the class."""

import html
import os
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from amos_fairseq.checkpoint_files import read_header
from amos_fairseq.checkpoints.read import LoadedCheckpoint, import_source, parent_of
from amos_fairseq.downstream.classification.dataset import TASK_FILE
from amos_fairseq.downstream.classification.glue.tasks import SCORED
from amos_fairseq.downstream.tagging.dataset import MANIFEST
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face import custom_code
from amos_fairseq.hugging_face.families import PartKind
from amos_fairseq.hugging_face.parts import ExportedPart
from amos_fairseq.hugging_face.verify import Agreement
from amos_fairseq.modules.bert_encoder import BertEncoderConfig
from amos_fairseq.process import version_of
from amos_fairseq.run.metrics_file import read_records
from amos_fairseq.strangers import plain_name, read_json
from amos_fairseq.text.tokenization.fast_tokenizer import HUGGING_FACE

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

UNKNOWN_LICENSE = "unknown"
PRETRAINING_TASK = "text_pretraining"
_LONGEST_CHAIN = 10  # of runs that started from each other
# Units of the validation metrics, by task.
_UNITS = {
    PRETRAINING_TASK: "Losses and entropies in nats, on held-out text. `rtd_`: detection of replaced tokens, which are the "
    "positive class; `mlm_`, `mixture_`: the generator at a depth.",
    "sentence_prediction": "`loss` is divided by log 2, as fairseq does.",
}
_OTHER_UNITS = "Losses in nats."
_LIBRARIES = ("amos_fairseq", "fairseq-fixed", "torch", "transformers", "tokenizers")
_POSITIONS = {"none": "absolute", "t5": "absolute, and relative as in T5", "amos": "absolute, and relative as released"}
_ROTARY = "rotary"
# Keys of a validation record that describe speed or position in the run.
_NOT_METRICS = ("split", "update", "epoch", "wps", "ups", "wpb", "bsz", "best_loss", "best_num_updates")
# Weights with one row per token of the vocabulary.
_ROW_PER_TOKEN = ("embed_tokens.weight", "mlm_head.bias")
# The logged name of a score of fine-tuning, in percent | its name on the Hub, if that is another one.
_SCORES = {
    "accuracy": "",
    "mcc": "matthews_correlation",
    "matthews": "matthews_correlation",
    "micro_f1": "f1",
    "spearman": "spearmanr",
    "pearson": "pearsonr",
    "f1": "",
    "precision": "",
    "recall": "",
}


class _KindOfPart(NamedTuple):
    """What a card says of all parts of a kind: how to use them, their limits, and the pipeline of the Hub, if there is one."""

    use: str
    limits: str
    pipeline: str | None = None


_DETECTION_LIMITS = "It was trained on the mistakes of its own generator, not on those of people or of other models."
_NO_PIPELINE = (
    ' `pipeline("token-classification")` must not be used: it builds another class, whose classifier is not in this folder and '
    "starts from random values."
)
_KINDS = {
    PartKind.ENCODER: _KindOfPart(
        'states = model(**tokenizer("A first text.", return_tensors="pt")).last_hidden_state  # [1, tokens, width]',
        "It was trained without a sentence objective: before it is fine-tuned, do not expect cosine similarities of its "
        "features to mean much. `pooler_output` is tanh of the first state; nothing was trained for it.",
        "feature-extraction",
    ),
    PartKind.MASKED_LM: _KindOfPart(
        'text = f"The capital of France is {tokenizer.mask_token}."\n'
        'logits = model(**tokenizer(text, return_tensors="pt")).logits  # [1, tokens, vocabulary]',
        "This is the generator, which makes the training signal; the encoder to fine-tune is the discriminator.",
        "fill-mask",
    ),
    PartKind.DETECTION: _KindOfPart(
        'logits = model(**tokenizer("A text with a wrong word.", return_tensors="pt")).logits\n'
        "replaced = logits.softmax(-1)[..., 1]  # [1, tokens], probability",
        _DETECTION_LIMITS,
        "token-classification",
    ),
    PartKind.PRETRAINING: _KindOfPart(
        'logits = model(**tokenizer("A text with a wrong word.", return_tensors="pt")).logits\n'
        "replaced = logits.sigmoid()  # [1, tokens], probability",
        _DETECTION_LIMITS + _NO_PIPELINE,
    ),
    PartKind.ENERGY: _KindOfPart(
        'energies = model(**tokenizer("A text.", return_tensors="pt")).logits  # [1, tokens], nats\n'
        "log_probs = -energies[:, 1:-1]  # of each token given all others, without <s> and </s>",
        "Its output is not the probability of a replaced token: -energy is the log-probability of the token at a position, "
        f"given all others, with a normalizer that training brings near 1 without a guarantee.{_NO_PIPELINE}",
    ),
    PartKind.SEQUENCE_CLASSIFICATION: _KindOfPart(
        'inputs = tokenizer("A text.", truncation=True, return_tensors="pt")  # or two texts\n'
        "logits = model(**inputs).logits  # [1, classes]",
        "It predicts the classes of the task that it was fine-tuned on.",
        "text-classification",
    ),
    PartKind.QUESTION_ANSWERING: _KindOfPart(
        'output = model(**tokenizer("A question?", "And its answer.", return_tensors="pt"))\n'
        "start, end = output.start_logits.argmax(), output.end_logits.argmax()",
        "It marks the likeliest span, also if the text has no answer: that is decided by a threshold of the null score, which "
        "is chosen on development data and is not in this folder.",
        "question-answering",
    ),
    PartKind.TOKEN_CLASSIFICATION: _KindOfPart(
        "from transformers import pipeline\n\n"
        'tagger = pipeline("token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="first")\n'
        'spans = tagger("Words , separated by spaces .")',
        'Only labels of the first pieces of words were trained: use `aggregation_strategy="first"`. Spaces separate the words '
        "of the training data, also from punctuation. The label of a word is that of the group which covers its first "
        "character: the pipeline divides words at unknown pieces and, with a WordPiece tokenizer, at punctuation. Replace "
        "no-break spaces by plain ones: with other tokenizers, the pipeline joins a word that begins with one to the word "
        "before it.",
        "token-classification",
    ),
}


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


def write_card(
    folder: Path,
    name: str,
    loaded: LoadedCheckpoint,
    part: ExportedPart,
    settings: CardSettings,
    agreement: Agreement | None,
) -> None:
    """Write ``README.md`` into ``folder``, which will have the name ``name``.

    ``agreement``: the result of the comparison with the checkpoint; None if they were not compared.
    """
    from huggingface_hub import ModelCard, ModelCardData

    task = str(loaded.task.get("_name", PRETRAINING_TASK))
    dataset = dataset_of(part.kind, Path(str(loaded.task.get("data", ""))))
    # A truncated last line of the log is skipped, and what the run did after this checkpoint does not count.
    records = [record for record in read_records(loaded.file.parent) if record["update"] <= loaded.num_updates]
    validation = next((record for record in reversed(records) if record.get("split") != "train"), None)
    first, imported, objective = first_source(loaded), loaded.imported_from, objective_of(loaded)
    results = eval_results(part.kind, dataset, validation)
    data = ModelCardData(
        language=settings.language,
        license=settings.data_license,
        base_model=settings.base_model,
        datasets=list(settings.datasets) or None,
        model_name=name if results else None,
        eval_results=results,
        library_name="transformers",
        pipeline_tag=_KINDS[part.kind].pipeline,
        tags=["amos_fairseq", "fairseq", *filter(None, [objective])],
    )
    origin = f"a model trained with amos_fairseq{f', which started from {escape_markup(first)}' if first else ''}"
    if imported:
        origin = f"{escape_markup(imported)}, imported with amos_fairseq and not trained further"
    shape, tokenizer, num_tokens = part.shape, loaded.tokenizer, len(loaded.dictionary)
    # In our model, without the rows that only round up the vocabulary.
    num_parameters = sum(
        (tensor[:num_tokens] if key in _ROW_PER_TOKEN else tensor).numel() for key, tensor in part.weights.items()
    )
    model = {
        "Layers, width, FFN width, heads": f"{shape.num_layers}, {shape.width}, {shape.ffn_width}, {shape.num_heads}",
        "Longest input": f"{shape.max_positions} tokens",
        "Positions": _POSITIONS[shape.position_scheme] if isinstance(shape, BertEncoderConfig) else _ROTARY,
        "Vocabulary": f"{len(tokenizer):,} pieces, {tokenizer.kind}, {'cased' if tokenizer.cased else 'uncased'}",
        "Parameters": f"{num_parameters:,}",
    }
    run = {
        "Objective": objective,
        "Started from": first,
        "Task": task,
        "Updates": f"{loaded.num_updates:,}",
        "Tokens read": num_tokens_read(records, loaded.num_updates),
        "Tokens masked": f"{loaded.task['mask_prob']:.0%}" if "mask_prob" in loaded.task else "",
    }
    title = f"{escape_markup(objective.upper() or imported)}, {shape.num_layers} layers of width {shape.width}"
    sections = [
        f"# {title}: {part.description}",
        f"A `{part.class_name}`: {part.description} of {origin}.",
        "## Use\n\n" + usage(part, name, custom_code.is_in(folder)),
        "## The model\n\n" + as_table(model),
    ]
    if not imported:
        sections.append("## The run\n\n" + as_table({key: fact for key, fact in run.items() if fact}))
    if validation is not None:
        metrics = {key: f"{x:.4g}" for key, x in validation.items() if key not in _NOT_METRICS and x is not None}
        table = as_table({"update": f"{validation['update']:,}", **metrics})
        sections.append(f"## Validation\n\n{_UNITS.get(task, _OTHER_UNITS)}\n\n{table}")
    checked = f"Before this folder was written, both were loaded and compared: {agreement}"
    sections += [
        "## Limits\n\n" + limits(loaded, part),
        "## License\n\n" + license_text(settings, first),
        f"## Comparison with the checkpoint\n\n{checked if agreement else 'Not compared (--no-check)'}.",
        "## Versions\n\n" + ", ".join(f"{library} {version_of(library)}" for library in _LIBRARIES) + ".",
    ]
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n").save(folder / "README.md")


def objective_of(loaded: LoadedCheckpoint) -> str:
    """Return the name of the pretraining objective, such as ``amos``; empty for an imported model."""
    settings = loaded.model.cfg
    name = getattr(settings, "arch", None) or getattr(settings, "_name", None) or type(loaded.model).__name__
    return "" if loaded.imported_from else str(name).partition("_")[0].lower()


def first_source(loaded: LoadedCheckpoint) -> str:
    """Return what the first of the runs that led to this one was imported from; empty if it was not, or its file is gone."""
    source, parent = loaded.imported_from, loaded.parent
    for _ in range(_LONGEST_CHAIN):
        if source or not os.path.isfile(parent):  # False also where its folder may not be read
            break
        try:
            settings = read_header(parent, whole=False)["cfg"]
            source, parent = import_source(settings["task"]), parent_of(settings)
        except (UserError, KeyError, TypeError, AttributeError):  # the file is another one by now
            break
    return source


def usage(part: ExportedPart, name: str, has_code: bool) -> str:
    model_class, trust = part.kind.auto_class, ", trust_remote_code=True" if has_code else ""
    lines = [
        "```python",
        f"from transformers import AutoTokenizer, {model_class}",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})',
        f'model = {model_class}.from_pretrained("{name}"{trust})',
        _KINDS[part.kind].use,
        "```",
    ]
    if has_code:
        lines.append("\nThe folder contains code, which `trust_remote_code=True` allows to run: read it before.")
    return "\n".join(lines)


def num_tokens_read(records: Sequence[dict[str, Any]], num_updates: int) -> str:
    """Return updates times the mean number of tokens per update; empty without the log of the run."""
    tokens = [record["wpb"] for record in records if record.get("split") == "train" and record.get("wpb")]
    if not tokens:
        return ""
    return f"about {float(f'{sum(tokens) / len(tokens) * num_updates:.3g}'):,.0f}"


def limits(loaded: LoadedCheckpoint, part: ExportedPart) -> str:
    case = "keeps upper case" if loaded.tokenizer.cased else "converts upper case to lower case"
    of_import = loaded.tokenizer.kind == HUGGING_FACE or loaded.imported_from
    vocabulary = "that of the imported model" if of_import else "from the training text"
    return (
        f"{part.limits or _KINDS[part.kind].limits} Its vocabulary is {vocabulary} and {case}; other languages and "
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


def eval_results(
    kind: PartKind, dataset: tuple[str, str] | None, validation: dict[str, Any] | None
) -> "list[EvalResult] | None":
    """Return scores of the last validation of a fine-tuned task for the card's ``model-index``, if its data have a name."""
    from huggingface_hub import EvalResult

    if dataset is None or validation is None:
        return None
    scores = {metric or key: validation.get(key) for key, metric in _SCORES.items()}
    results = [
        EvalResult(_KINDS[kind].pipeline, *dataset, metric, round(score / 100, 4), dataset_split="validation")
        for metric, score in scores.items()
        if isinstance(score, (int, float))
    ]
    return results or None


def dataset_of(kind: PartKind, directory: Path) -> tuple[str, str] | None:
    """Return identifier and name of the data that a model was fine-tuned on; None if they are not in ``directory``."""
    try:
        if kind == PartKind.SEQUENCE_CLASSIFICATION:
            task = read_json(directory / TASK_FILE, "")["task"]
            return ("glue", f"GLUE {task}") if task in SCORED else None
        if kind == PartKind.TOKEN_CLASSIFICATION:
            manifest = read_json(directory / MANIFEST, "")
            return "unknown", f"{plain_name(manifest['column'])} of {plain_name(manifest['sources']['valid']['name'])}"
    except (UserError, ValueError, KeyError, TypeError):  # the card does without
        pass
    return None


def as_table(rows: dict[str, str]) -> str:
    lines = (f"| {escape_markup(name)} | {escape_markup(value)} |" for name, value in rows.items())
    return "\n".join(["| | |", "|---|---|", *lines])


def escape_markup(text: str) -> str:
    """Escape HTML, links, code and cells of tables in text from a checkpoint or a log, which a web page may show."""
    return re.sub(r"([\\`|\[\]])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
