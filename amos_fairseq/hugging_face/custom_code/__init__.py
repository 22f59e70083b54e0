"""Code in an exported folder, for the positions and the tokenizer of the released AMOS checkpoint only.

It is needed: no Hugging Face class has these positions and no ``tokenizer.json`` can drop pieces, so a fine-tuned released
model could not be exported otherwise. The files are those that this package runs itself; only their imports of each other are
made relative, so that the folder does not depend on this package.
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amos_fairseq.hugging_face.config import hugging_face_config
from amos_fairseq.hugging_face.weights import AUTO_CLASSES, FAMILIES
from amos_fairseq.modules.encoder import TransformerConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Name in the folder | path in this package.
MODEL_CODE = {
    "modeling_amos.py": "hugging_face/custom_code/modeling_amos.py",
    "relative_position.py": "functional/relative_position.py",
}
TOKENIZER_CODE = {
    "tokenization_amos.py": "hugging_face/custom_code/tokenization_amos.py",
    "microsoft_text.py": "tokenization/microsoft_text.py",
    "truncation.py": "tokenization/truncation.py",
}
TOKENIZER_AUTO_MAP = {"AutoTokenizer": ["tokenization_amos.AmosTokenizer", None]}
_OUR_IMPORT = re.compile(r"^from amos_fairseq\.[\w.]+?(\w+) import ", re.MULTILINE)


def model_auto_map() -> dict[str, str]:
    """Return every class of ``modeling_amos.py`` under the class of transformers that loads it."""
    classes = {AUTO_CLASSES[part]: name.replace("MPNet", "Amos") for part, name in FAMILIES["mpnet"].classes.items()}
    return {name: f"modeling_amos.{found}" for name, found in {"AutoConfig": "AmosConfig", **classes}.items()}


def build_config(shape: TransformerConfig, num_rows: int, **others: Any) -> "PretrainedConfig":
    """Return MPNet's configuration with the maximum distance of the released positions."""
    from amos_fairseq.hugging_face.custom_code.modeling_amos import AmosConfig

    settings = hugging_face_config("mpnet", shape, num_rows, **others).to_diff_dict()
    settings.pop("model_type")
    return AmosConfig(relative_attention_max_distance=shape.position_max_distance, **settings)


def save_tokenizer(folder: Path, model: bytes, ids: dict[str, int], **settings: Any) -> None:
    """Write the tokenizer with its code; ``model``: content of ``sp.model``, ``settings``: of ``AmosTokenizer``."""
    from amos_fairseq.hugging_face.custom_code.tokenization_amos import AmosTokenizer

    files = {name: folder / file for name, file in AmosTokenizer.vocab_files_names.items()}
    files["vocab_file"].write_bytes(model)
    files["ids_file"].write_text(json.dumps(ids, ensure_ascii=False, indent=0), encoding="utf-8")
    AmosTokenizer(**{name: str(path) for name, path in files.items()}, **settings).save_pretrained(folder)
    write_code(folder, TOKENIZER_CODE)


def write_code(folder: Path, files: dict[str, str]) -> None:
    """Copy ``files`` (name in the folder -> path in this package) into ``folder``, with relative imports."""
    package = Path(__file__).parents[2]
    for name, source in files.items():
        code = _OUR_IMPORT.sub(r"from .\1 import ", (package / source).read_text(encoding="utf-8"))
        (folder / name).write_text(code, encoding="utf-8")
