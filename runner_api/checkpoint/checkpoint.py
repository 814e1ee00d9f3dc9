"""A checkpoint: the model's config and its tensors under Hugging Face names, whatever kind of file they lie in.

`load_checkpoint` opens a Hugging Face folder or a .gguf file, reads headers only, and refuses a file whose names or
shapes do not fit its own config. Values are read tensor by tensor when asked for, so that a loader never holds more
than it is copying. Knows nothing of models, devices or compute dtypes.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runner_api.checkpoint.config import ModelConfig, expected_shapes, model_config_from_hf
from runner_api.checkpoint.gguf_file import GGUFFile
from runner_api.checkpoint.safetensors_file import PICKLE_SUFFIXES, SafetensorsFolder, read_json, refuse_pickle
from runner_api.errors import CheckpointError

log = logging.getLogger("modelrunner")

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Tables that some files carry and every runner computes for itself.
UNUSED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


class TensorSource(Protocol):
    """What a kind of file offers: names with shapes, and one tensor at a time."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray: ...


class Checkpoint:
    """An opened checkpoint.

    config: what the file says of the model, with `tie_word_embeddings` as the tensors have it.
    path: the folder or file. metadata: a GGUF file's key-value pairs; empty for a folder.
    """

    def __init__(
        self, config: ModelConfig, path: Path, source: TensorSource, metadata: Mapping[str, Any] | None = None
    ) -> None:
        self.config = config
        self.path = path
        self.metadata: Mapping[str, Any] = metadata or {}
        self._source = source
        self._shapes = {n: s for n, s in source.shapes.items() if not n.endswith(UNUSED_SUFFIXES)}
        self._settle_tying()

    def names(self) -> tuple[str, ...]:
        """Canonical names, e.g. `model.layers.0.self_attn.q_proj.weight`; no `lm_head.weight` when tied."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header. Raises `CheckpointError` for an unknown name."""
        if name not in self._shapes:
            raise CheckpointError("no such tensor", field=str(self.path), got=name)
        return self._shapes[name]

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, read now, in its stored dtype (GGUF: float32). Raises `CheckpointError`."""
        shape = self.shape(name)
        values = self._source.read(name)
        if values.shape != shape:
            raise CheckpointError(
                f"{name} is not what the header says", field=str(self.path), got=values.shape, expected=shape
            )
        return values

    def check_names(self) -> None:
        """Hold names and shapes against the config. Raises `CheckpointError` naming the first that is off."""
        if self.config.num_layers > len(self._shapes):  # before a list is made of a number that may be nonsense
            raise CheckpointError(
                "fewer tensors than layers", field=str(self.path), got=f"{len(self._shapes)} tensors",
                expected=f"{self.config.num_layers} layers",
            )  # fmt: skip
        expected = expected_shapes(self.config)
        missing = [n for n in expected if n not in self._shapes]
        unknown = [n for n in self._shapes if n not in expected]
        if missing or unknown:
            said = [f"{len(names)} {kind}, e.g. {names[0]}" for kind, names in
                    (("missing", missing), ("unknown", unknown)) if names]  # fmt: skip
            raise CheckpointError(f"tensor names do not fit the config: {'; '.join(said)}", field=str(self.path))
        for name, shape in expected.items():
            if self._shapes[name] != shape:
                raise CheckpointError(
                    f"shape of {name} does not fit the config", field=str(self.path), got=self._shapes[name],
                    expected=shape,
                )  # fmt: skip

    def _settle_tying(self) -> None:
        """A tied file may still carry lm_head.weight: a copy of the embedding is dropped, another matrix unties."""
        if not self.config.tie_word_embeddings or LM_HEAD not in self._shapes or EMBEDDING not in self._shapes:
            return
        # Two broken shapes are left to check_names; equal ones may be compared.
        if self._shapes[LM_HEAD] == self._shapes[EMBEDDING] and np.array_equal(
            self.tensor(LM_HEAD), self.tensor(EMBEDDING)
        ):
            del self._shapes[LM_HEAD]
            return
        log.info("%s says tied embeddings but holds another lm_head.weight: untied", self.path)
        self.config = dataclasses.replace(self.config, tie_word_embeddings=False)


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a Hugging Face folder (config.json beside .safetensors) or a .gguf file, and check its names and shapes.

    Raises `CheckpointError`, and nothing else, for whatever is wrong with the files.
    """
    path = Path(path)
    try:
        checkpoint = _open_folder(path) if path.is_dir() else _open_file(path)
    except (OSError, ValueError) as e:  # an unreadable folder, a path with a NUL byte
        raise CheckpointError(f"cannot be read: {e}", field=str(path)) from e
    checkpoint.check_names()
    return checkpoint


def _open_folder(path: Path) -> Checkpoint:
    if not (path / "config.json").is_file():
        raise CheckpointError("a folder without config.json", field=str(path), expected="a Hugging Face model folder")
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else None
    config = model_config_from_hf(read_json(path / "config.json"), generation_config)
    return Checkpoint(config, path, SafetensorsFolder(path))


def _open_file(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError("no such file or folder", field=str(path))
    if path.suffix in PICKLE_SUFFIXES:
        raise refuse_pickle(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(
            "a weight file alone does not say what model it is", field=str(path),
            expected="its folder, with config.json",
        )  # fmt: skip
    file = GGUFFile(path)
    return Checkpoint(file.config, path, file, file.metadata)
