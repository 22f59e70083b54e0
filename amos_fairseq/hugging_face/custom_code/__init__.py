"""Code in an exported folder, for the positions and the tokenizer of the released AMOS checkpoint only.

It is needed: no Hugging Face class has these positions and no ``tokenizer.json`` can drop pieces, so a fine-tuned released
model could not be exported otherwise. The files are those that this package runs itself; only their imports of each other are
made relative, so that the folder does not depend on this package.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from amos_fairseq.hugging_face.weights import CUSTOM, FAMILIES, Head, class_name

# Name in the folder -> path in this package.
MODEL_CODE = {
    "modeling_amos.py": "hugging_face/custom_code/modeling_amos.py",
    "relative_position.py": "functional/relative_position.py",
}
TOKENIZER_CODE = {
    "tokenization_amos.py": "hugging_face/custom_code/tokenization_amos.py",
    "standalone.py": "text/tokenization/standalone.py",
}
TOKENIZER_AUTO_MAP = {"AutoTokenizer": ["tokenization_amos.AmosTokenizer", None]}
_OUR_IMPORT = re.compile(r"^from amos_fairseq\.[\w.]+?(\w+) import ", re.MULTILINE)


def model_auto_map() -> dict[str, str]:
    """Return every class of ``modeling_amos.py`` under the class of transformers that loads it."""
    classes = {head.auto_class: class_name(CUSTOM, head) for head in (Head.NONE, *FAMILIES[CUSTOM].heads)}
    return {name: f"modeling_amos.{code}" for name, code in {"AutoConfig": "AmosConfig", **classes}.items()}


def is_in(folder: Path, files: Iterable[str] = (*MODEL_CODE, *TOKENIZER_CODE)) -> bool:
    """Return whether a folder contains code: it is then loaded with ``trust_remote_code=True``."""
    return any((folder / name).exists() for name in files)


def write_code(folder: Path, of_model: bool, of_tokenizer: bool) -> None:
    package = Path(__file__).parents[2]
    for name, source in ((MODEL_CODE if of_model else {}) | (TOKENIZER_CODE if of_tokenizer else {})).items():
        code = _OUR_IMPORT.sub(r"from .\1 import ", (package / source).read_text(encoding="utf-8"))
        (folder / name).write_text(code, encoding="utf-8")
