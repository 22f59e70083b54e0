"""Code in an exported folder: for classification heads on the mean of the states, for the positions and the tokenizer of the
released AMOS checkpoint, and for spans in raw text.

It is needed: no Hugging Face class but ModernBERT's has such a head, none has these positions, no ``tokenizer.json`` can drop
pieces, and no pipeline has the words of the training. The files are those that this package runs itself; only their imports of
each other are made relative, so that the folder does not depend on this package.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from amos_fairseq.hugging_face.weights import CUSTOM, FAMILIES, Head, class_name

# Name in the folder -> path in this package.
MEAN_CODE = {"modeling_mean.py": "hugging_face/custom_code/modeling_mean.py"}
AMOS_CODE = MEAN_CODE | {
    "modeling_amos.py": "hugging_face/custom_code/modeling_amos.py",
    "relative_position.py": "functional/relative_position.py",
}
MODEL_CODE = {"": {}, "modeling_mean": MEAN_CODE, "modeling_amos": AMOS_CODE}  # by the module with the class
TOKENIZER_CODE = {
    "tokenization_amos.py": "hugging_face/custom_code/tokenization_amos.py",
    "standalone.py": "text/tokenization/standalone.py",
}
# The pipeline ``spans``, of a folder that loads without code.
SPANS_CODE = {
    "spans.py": "hugging_face/custom_code/spans.py",
    "raw_words.py": "inputs/raw_words.py",
    "schemes.py": "inputs/schemes.py",
    "word_pieces.py": "text/tokenization/word_pieces.py",
}
SPANS_PIPELINE = {"spans": {"impl": "spans.SpansPipeline", "pt": ["AutoModelForTokenClassification"]}}
TOKENIZER_AUTO_MAP = {"AutoTokenizer": ["tokenization_amos.AmosTokenizer", None]}
_OUR_IMPORT = re.compile(r"^from amos_fairseq\.[\w.]+?(\w+) import ", re.MULTILINE)


def model_auto_map(model: type, head: Head) -> dict[str, str]:
    """Return the exported class, and every other of ``AmosConfig``, under the classes of transformers that load them."""
    code = model.config_class.__name__
    others = (Head.NONE, *FAMILIES[CUSTOM].heads) if code == "AmosConfig" else ()
    classes = {other.auto_class: class_name(CUSTOM, other) for other in others}
    classes |= {"AutoConfig": code, head.auto_class: model.__name__}
    return {name: f"{model.__module__.rpartition('.')[2]}.{code}" for name, code in classes.items()}


def is_in(folder: Path, files: Iterable[str] = (*AMOS_CODE, *TOKENIZER_CODE)) -> bool:
    """Return whether a folder contains code: it is then loaded with ``trust_remote_code=True``."""
    return any((folder / name).exists() for name in files)


def write_code(folder: Path, files: Mapping[str, str]) -> None:
    """Copy modules of this package: name in the folder -> path in this package."""
    package = Path(__file__).parents[2]
    for name, source in files.items():
        code = _OUR_IMPORT.sub(r"from .\1 import ", (package / source).read_text(encoding="utf-8"))
        (folder / name).write_text(code, encoding="utf-8")
