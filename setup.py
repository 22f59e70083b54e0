"""Package, command and extras of amos_fairseq; tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.+?)"', (ROOT / "amos_fairseq/__init__.py").read_text(encoding="utf-8"), re.M)

setup(
    name="amos_fairseq",
    version=VERSION.group(1),
    description="Pretrain text encoders with an adversarial mixture of training signals (AMOS), as a fairseq plugin",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    project_urls={"AMOS (paper)": "https://openreview.net/forum?id=sX3XaHwotOg"},
    keywords=[
        "AMOS",
        "ELECTRA",
        "TEAMS",
        "Electric",
        "BERT",
        "text encoder",
        "fairseq",
        "sentencepiece",
        "fastBPE",
        "apex",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
    ],
    # docs/limits.md says what was run with each.
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["amos_fairseq", "amos_fairseq.*"]),
    py_modules=["amos_start"],
    package_data={
        "amos_fairseq.recipes": ["**/*.yaml", "costs.tsv"],
        "amos_fairseq.functional.cuda": ["tuned_launches.json"],
        "amos_fairseq.report": ["page.html"],
        "amos_fairseq.hugging_face": ["model_card.jinja"],
        "amos_fairseq.experiments": ["recipes/*.yaml"],
    },
    entry_points={"console_scripts": ["amos=amos_start:main"]},
    install_requires=[
        # The one fairseq that imports on Python 3.11 and later; the original 0.12.2 does not.
        "fairseq-fixed==0.12.3.1",
        # From 2.6 on the loader is weights-only; 2.15 is the newest with which the complete suite was run.
        "torch>=2.6,<2.16",
        "filelock>=4",  # the first that leaves the content of a held lock alone: it names the holder
        "huggingface_hub",
        "jinja2",
        "matplotlib",
        "networkx",
        "numpy",
        "packaging",
        "protobuf",  # what sentencepiece reads its own model files with
        "PyYAML",
        "rich",
        "safetensors",
        "scikit-learn",
        "scipy",
        "sentencepiece>=0.2.3",  # 0.2.2 ends the process where a required character is not in the text
        "tensorboard",
        # 0.23.2 cuts each text of a pair to the limit before it compares their lengths: pairs are truncated otherwise.
        "tokenizers!=0.23.2",
        "tqdm",
        "transformers>=4.57,<6",
        "zstandard",
    ],
    extras_require={
        "test": [
            "pytest",
            "pytest-xdist",
            # Its interpreter runs the kernels of functional/cuda on a CPU. CUDA builds of torch pin their version of it.
            "triton; platform_system == 'Linux' and platform_machine == 'x86_64'",
            "ruff",
            # Clients of what `amos export` writes; each takes the torch and the transformers above as they are.
            "onnx",
            "onnxruntime",
            "onnxscript",  # what torch.onnx.export(..., dynamo=True) writes with
            "sentence-transformers>=5,<6",
            "pyarrow>=14.0.1",
            "datasets",
            "amos_fairseq[docs]",  # a test builds the site
        ],
        # Tables as Parquet and as folders of datasets, GLUE. Older versions run code of a file's schema (CVE-2023-47248).
        "data": ["pyarrow>=14.0.1", "datasets"],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9", "mkdocstrings[python]>=0.26"],
        "fastbpe": ["fastBPE==0.1.0"],  # a test compares with it; compiled by Cython, so with --no-build-isolation
        "completion": ["argcomplete>=3"],  # eval "$(register-python-argcomplete amos)" in the shell's start file
        "wandb": ["wandb"],
    },
)
