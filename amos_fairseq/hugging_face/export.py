"""Write a checkpoint as a folder that Hugging Face's libraries load: weights, configuration, tokenizer, and a model card.

The card states what is in the checkpoint and in the result beside it, in the words of ``model_card.jinja``.
"""

import dataclasses
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from amos_fairseq.checkpoints.read import CheckpointPath, LoadedCheckpoint, origin_of
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.records import LINEAR, RESULT_FILE, SCORES_OF_TEST, read_result
from amos_fairseq.files import check_new_folder, explain_write_errors, file_sha256, json_text, whole_folder, write_text
from amos_fairseq.hugging_face import custom_code
from amos_fairseq.hugging_face.config import CONFIG_FILE, hugging_face_config
from amos_fairseq.hugging_face.import_folder import (
    GENERATOR_CONFIG_FILE,
    GENERATOR_FILE,
    PICKLED_WEIGHTS_FILE,
    WEIGHTS_FILE,
    import_folder,
    load_model,
)
from amos_fairseq.hugging_face.parts import PAIR, Part, choose_part, parts_of, state_of
from amos_fairseq.hugging_face.verify import verify_folder
from amos_fairseq.hugging_face.weights import CUSTOM, DEBERTA_V2, Head, in_their_rows, to_hugging_face
from amos_fairseq.text import MASK_SYMBOL
from amos_fairseq.text.tokenization.exported import exported_tokenizer, with_padding_at_1
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer, row_map
from amos_fairseq.text.tokenization.microsoft_tokenizer import MicrosoftAmosTokenizer
from amos_fairseq.text.tokenization.tokenizer import BOS, EOS, PAD, UNK, token_ids
from amos_fairseq.text.tokenization.word_pieces import unspell_piece
from amos_fairseq.untrusted import read_json

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# The role in Hugging Face's tokenizers | fairseq's symbol. Some clients use the cls/sep names, others bos/eos.
_ROLES = {
    "bos_token": BOS,
    "cls_token": BOS,
    "eos_token": EOS,
    "sep_token": EOS,
    "pad_token": PAD,
    "unk_token": UNK,
    "mask_token": MASK_SYMBOL,
}
# These compute positions from the padding id, which must be 1.
_PADDING_AT_1 = ("mpnet", CUSTOM)
# The other classes refuse, or ignore, an input that they do not have.
_WITH_TOKEN_TYPES = ("bert", "electra")
_TEMPLATE = Path(__file__).with_name("model_card.jinja")
# The settings that the authors' code reads.
_OF_AUTHORS = (
    *(
        "model_type",
        "attention_probs_dropout_prob",
        "hidden_act",
        "hidden_dropout_prob",
        "hidden_size",
        "initializer_range",
    ),
    *("intermediate_size", "max_position_embeddings", "relative_attention", "position_buckets", "norm_rel_ebd"),
    *("share_att_key", "pos_att_type", "layer_norm_eps", "max_relative_positions", "position_biased_input"),
    *("num_attention_heads", "type_vocab_size", "vocab_size", "num_hidden_layers"),
)
_HALF = 2.0**-10  # rounding to float16, relative to the largest value
_PAIR = (
    "and the generator beside it, in the form of DeBERTa's authors, whose code needs the spm.model of the tokenizer too"
)
_SPECIAL_IDS = {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS}


class TokenIds(NamedTuple):
    """How the ids of a folder's tokenizer relate to the rows of our vocabulary.

    Attributes:
        ids: [dictionary size] int64, the id of each of our rows, -1 where there is no token for it.
        num_rows: number of vocabulary rows of the folder's model.
        special_ids: fairseq's symbol -> its id, or None if it has none.
        unknown_ids: those of pieces that are ``<unk>`` here, because the dictionary of the corpus lacks them.
    """

    ids: Tensor
    num_rows: int
    special_ids: dict[str, int | None]
    unknown_ids: tuple[int, ...] = ()


def write_tokenizer(folder: Path, loaded: LoadedCheckpoint, family: str, max_length: int) -> TokenIds:
    """Write our tokenizer for a model of ``family``; longer inputs are truncated as in fine-tuning, where a client asks."""
    tokenizer, end = loaded.tokenizer, loaded.dictionary.eos()
    if loaded.separator not in (None, end):
        raise UserError(
            f"{loaded.file} was fine-tuned with --separator-token {loaded.separator}: exported tokenizers write only </s>, "
            f"token {end}, between two texts"
        )
    if isinstance(tokenizer, FastTokenizer):
        return _write_fast_tokenizer(folder, tokenizer, family, max_length, loaded.num_separators)
    return _write_tokenizer_with_code(folder, tokenizer, max_length, loaded.num_separators)


def _write_fast_tokenizer(
    folder: Path, tokenizer: FastTokenizer, family: str, max_length: int, num_separators: int
) -> TokenIds:
    from transformers import PreTrainedTokenizerFast

    special_tokens = tokenizer.special_tokens
    ids, library = row_map(tokenizer), exported_tokenizer(tokenizer, num_separators)
    if family in _PADDING_AT_1:
        library, ids = with_padding_at_1(library, special_tokens[PAD], ids)
    library.enable_truncation(max_length, strategy="longest_first")
    present = {token.content: token for token in library.get_added_tokens_decoder().values()}
    types = ["token_type_ids"] if family in _WITH_TOKEN_TYPES else []
    PreTrainedTokenizerFast(
        tokenizer_object=library,
        model_max_length=max_length,
        model_input_names=["input_ids", *types, "attention_mask"],
        clean_up_tokenization_spaces=False,
        **{role: present[special_tokens[symbol]] for role, symbol in _ROLES.items() if symbol in special_tokens},
    ).save_pretrained(folder)
    # transformers 5 writes its new names, with which transformers 4 cannot load the folder; both know the former names.
    former = {"additional_special_tokens": list(tokenizer.protected)} if tokenizer.protected else {}
    _add_to_json(folder / TOKENIZER_CONFIG_FILE, tokenizer_class="PreTrainedTokenizerFast", **former)
    all_ids = library.get_vocab(with_added_tokens=True).values()
    special_ids = {symbol: library.token_to_id(token) for symbol, token in special_tokens.items()}
    return TokenIds(ids, max(all_ids) + 1, special_ids, tuple(sorted({*all_ids} - {*ids.tolist()})))


def _write_tokenizer_with_code(
    folder: Path, tokenizer: MicrosoftAmosTokenizer, max_length: int, num_separators: int
) -> TokenIds:
    from amos_fairseq.hugging_face.custom_code.tokenization_amos import AmosTokenizer

    ids, special_tokens = token_ids([unspell_piece(symbol) for symbol in tokenizer.dictionary_symbols])
    files = {name: folder / file for name, file in AmosTokenizer.vocab_files_names.items()}
    files["vocab_file"].write_bytes(tokenizer.model)
    files["ids_file"].write_text(json.dumps(ids, ensure_ascii=False, indent=0), encoding="utf-8")
    roles = {role: special_tokens[symbol] for role, symbol in _ROLES.items()}
    settings = {"model_max_length": max_length, "num_separators": num_separators, **roles}
    AmosTokenizer(**{name: str(path) for name, path in files.items()}, **settings).save_pretrained(folder)
    _add_to_json(folder / TOKENIZER_CONFIG_FILE, auto_map=custom_code.TOKENIZER_AUTO_MAP)
    return TokenIds(torch.arange(len(ids)), len(ids), {symbol: ids[token] for symbol, token in special_tokens.items()})


def _add_to_json(path: Path, **entries: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | entries, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def write_card(
    folder: Path, name: str, loaded: LoadedCheckpoint, part: Part, num_parameters: int, agreement: str | None
) -> None:
    """Write ``README.md`` into ``folder``, which will have the name ``name``: what is in the checkpoint and in the result
    beside it.

    ``num_parameters``: of the exported class; ``agreement`` None: not compared.
    """
    from huggingface_hub import ModelCard, ModelCardData
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS_FILE, "pt") as weights:
        names = weights.keys()
    has_pooler = any("pooler." in each for each in names)
    result = read_result(loaded.file.parent)
    if result is not None and (result.checkpoint != loaded.file.name or len(loaded.heads) > 1):
        result = None  # of several tasks it has the scores of all
    files = loaded.file.absolute().parent.parent.parent.glob(f"*/seed*/{RESULT_FILE}") if result else ()
    data_of = [read_result(file.parent).settings.get("data_sha256") for file in files]
    num_compared = result and data_of.count(result.settings["data_sha256"])
    on_test = read_json(loaded.file.parent / SCORES_OF_TEST, "remove it", optional=True) or {}
    data = ModelCardData(
        license="unknown",
        library_name="transformers",
        pipeline_tag=part.head.pipeline,
        tags=["amos_fairseq", "fairseq"],
    )
    card = ModelCard.from_template(
        data,
        str(_TEMPLATE),
        escape=escape_markup,
        name=name,
        imported=loaded.imported_from,
        part=part,
        num_parameters=num_parameters,
        has_code=custom_code.is_in(folder),
        loaded=loaded,
        sha256=file_sha256(loaded.file),
        result=result,
        scores=shown_scores(result.scores) if result else {},
        is_linear=bool(result and result.trial == LINEAR),
        has_pooler=has_pooler,
        on_test=shown_scores({score: on_test[score] for score in result.scores if score in on_test}) if result else {},
        num_runs=num_compared,
        # The model whose weights the run started from; empty without one.
        started_from=loaded.imported_from or origin_of(loaded.parent) or "/".join(Path(loaded.parent).parts[-2:]),
        agreement=agreement,
    )
    card.save(folder / "README.md")


def shown_scores(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of a model, without what was fitted and standard errors, by readable names."""
    names = [name for name in scores if not name.endswith(("_error", "_before", "temperature"))]
    return {name.replace("_", " ").replace("f1", "F1").replace("ece", "ECE"): scores[name] for name in names}


def escape_markup(text: str) -> str:
    """Escape HTML, links, code and cells of tables in text from a checkpoint or a log, which a web page may show."""
    return re.sub(r"([\\`|\[\]])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def export(
    checkpoint: CheckpointPath,
    out: Path,
    tokenizer: CheckpointPath | None = None,
    force: bool = False,
    part: str | None = None,
    head: str | None = None,
    check: bool = True,
) -> tuple[Part, str | None]:
    """Write the folder ``out``, completely or not at all.

    Args:
        checkpoint: see ``load_model``.
        tokenizer: as ``checkpoint``.
        out: the folder to write; with ``force`` an existing exported folder is replaced.
        part: see ``choose_part``.
        head: as ``part``.
        check: load the folder and compare it with the checkpoint.

    Returns:
        what the folder holds and, with ``check``, how well it agrees.

    Raises:
        UserError: the part does not exist, no class or tokenizer computes the same, ``out`` exists or cannot be written, or
            a folder differs from the checkpoint.
    """
    from transformers.utils import logging

    run = Path(checkpoint)
    if run.is_dir() and (scored := read_result(run)) is not None and (run / scored.checkpoint).is_file():
        checkpoint = run / scored.checkpoint  # --keep-checkpoints, or a kill, leaves the last one beside it
    loaded = load_model(checkpoint, tokenizer)
    is_pair = part == PAIR and part in parts_of(loaded.model)
    chosen = choose_part(loaded, None if is_pair else part, head)
    check_output_folder(out, force)
    # transformers 5 shows a bar for each file of weights, and a table of those that a class does not read, such as the pooler.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    explained = explain_write_errors(out, "make room, permit writing, or give another folder")
    with explained, whole_folder(out, force) as folder:
        if is_pair:
            return dataclasses.replace(chosen, description=_PAIR), write_pair(folder, loaded)
        rows = write_tokenizer(folder, loaded, chosen.family, chosen.shape.max_positions)
        num_parameters = write_model(folder, chosen, rows)
        files = custom_code.MODEL_CODE[chosen.code] | (custom_code.SPANS_CODE if "words" in chosen.settings else {})
        custom_code.write_code(
            folder, files if isinstance(loaded.tokenizer, FastTokenizer) else files | custom_code.TOKENIZER_CODE
        )
        agreement = verify_folder(folder, loaded, chosen, rows.ids) if check else None
        write_card(folder, out.name, loaded, chosen, num_parameters, agreement)
    return chosen, agreement


@torch.no_grad()
def write_model(folder: Path, part: Part, rows: TokenIds) -> int:
    """Write ``model.safetensors``, float32, and ``config.json``; return the number of parameters of the class.

    AutoModel adds a pooling layer to a bare encoder. Unless one was imported, it gets the identity: ``pooler_output`` is then
    tanh of the first state, not random.
    """
    ids = {name: rows.special_ids.get(symbol) for name, symbol in _SPECIAL_IDS.items()}
    model_class = part.model_class
    others = part.settings | ids | {"architectures": [part.class_name]}
    config = hugging_face_config(part.family, part.shape, rows.num_rows, model_class.config_class, **others)
    if part.code:
        config.auto_map = custom_code.model_auto_map(model_class, part.head)
    model = model_class(config)
    weights = in_their_rows(part.weights, rows.ids, rows.num_rows)
    if rows.unknown_ids and rows.special_ids.get(UNK) is not None:
        embedding = weights["embed_tokens.weight"]
        embedding[list(rows.unknown_ids)] = embedding[rows.special_ids[UNK]].clone()
    state = to_hugging_face(part.family, part.head, weights)
    if not part.head.has_class and getattr(model, "pooler", None) is not None:
        width = part.shape.width
        state = {"pooler.dense.weight": torch.eye(width), "pooler.dense.bias": torch.zeros(width)} | state
    # A masked language model has no pooler, but AutoModel reads it from the same file.
    known = model.state_dict().keys()
    pooler = {name: tensor for name, tensor in state.items() if ".pooler." in name and name not in known}
    model.load_state_dict({name: tensor for name, tensor in state.items() if name not in pooler}, strict=True)
    model.eval().save_pretrained(folder, safe_serialization=True, state_dict=model.state_dict() | pooler)
    # safetensors creates files that only their owner can read; all other files follow the user's umask.
    (folder / WEIGHTS_FILE).chmod((folder / CONFIG_FILE).stat().st_mode)
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def write_pair(folder: Path, loaded: LoadedCheckpoint) -> str:
    """Write DeBERTaV3's two networks as its authors do: float16, the discriminator's table as Delta and as the whole. Return
    how well they agree with the checkpoint when they are imported again.
    """
    model = loaded.model
    rows = write_tokenizer(folder, loaded, DEBERTA_V2, model.max_positions())
    shared, delta = model.embed_tokens.weight, model.disentangled_embedding.delta.weight
    networks = {
        PICKLED_WEIGHTS_FILE: (model.discriminator, delta, Head.PRETRAINING, model.detection_head, CONFIG_FILE),
        GENERATOR_FILE: (model.generator, shared, Head.MASKED_LM, model.mlm_head, GENERATOR_CONFIG_FILE),
    }
    states = []
    for encoder, table, head, module, config_file in networks.values():
        weights = {"embed_tokens.weight": table} | state_of("encoder.", encoder) | state_of(head.prefix, module)
        states.append(to_hugging_face(DEBERTA_V2, head, in_their_rows(weights, rows.ids, rows.num_rows)))
        config = hugging_face_config(DEBERTA_V2, encoder.shape, rows.num_rows).to_dict() | {"pos_att_type": "p2c|c2p"}
        write_text(folder / config_file, json_text({name: config[name] for name in _OF_AUTHORS}))
    discriminator, generator = states
    for table in ("word_embeddings", "position_embeddings"):
        name = f"deberta.embeddings.{table}"
        shared = generator[f"{name}.weight"].half()
        # The discriminator has positions of its own that it never reads; their difference stays 0.
        delta = discriminator.get(f"{name}.weight", torch.zeros_like(shared)).half()
        discriminator |= {f"{name}._weight": delta, f"{name}.weight": shared + delta}
    for file, state in zip(networks, states, strict=True):
        torch.save({name: tensor.half() for name, tensor in state.items()}, folder / file)
    again, num_rows = import_folder(folder).model.state_dict(), len(loaded.dictionary)
    largest = 0.0
    for name, tensor in model.state_dict().items():
        of_tokens = slice(num_rows if len(tensor) == model.vocabulary.padded_size else None)
        largest = max(
            largest, ((again[name] - tensor)[of_tokens].abs().max() / tensor.abs().max().clamp(min=1e-9)).item()
        )
    if not largest <= _HALF:
        raise UserError(
            f"the exported pair differs from the checkpoint by {largest:.1e}: its weights do not fit into float16, which the "
            "authors have: give --part encoder"
        )
    return (
        f"float16; imported again, {len(again)} weights differ by {largest:.1e} of the largest value of each, or less"
    )


def check_output_folder(path: Path, replace: bool) -> None:
    """Refuse a ``path`` that an export must not create or, with ``replace``, remove: a folder with other files."""
    check_new_folder(path, replace)
    if path.exists() and not (path / CONFIG_FILE).is_file() and any(path.iterdir()):
        raise UserError(
            f"{path} holds no exported model ({CONFIG_FILE} is missing in it), and --force replaces nothing else: give "
            "another folder, or remove this one"
        )
