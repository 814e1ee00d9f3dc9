"""A Hugging Face folder: config.json and one or more .safetensors files, read one tensor at a time.

Gives the names and shapes that the files' headers hold, and each tensor in its stored dtype (bfloat16 as the NumPy
type of `ml_dtypes`). Checkpoints in Python's pickle format are refused: unpickling one runs whatever code it names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from runner_api.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsFolder:
    """The tensors of a folder. `shapes` is known at once, values are read by `read`."""

    def __init__(self, folder: Path) -> None:
        """Open every shard's header. Raises `CheckpointError` for missing, foreign or truncated files."""
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._handles: dict[str, Any] = {}
        self._shard_of: dict[str, str] = {}
        index = folder / INDEX
        if index.is_file():
            self._open_shards(index)
        else:
            shard = find_single_file(folder)
            for name in self._open(shard).keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                self._add(name, shard)

    def read(self, name: str) -> np.ndarray:
        """One tensor, freshly read, in its stored dtype."""
        from safetensors import SafetensorError

        shard = self._shard_of[name]
        try:
            return self._handles[shard].get_tensor(name)
        except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as e:
            raise _broken(self.folder / shard, e) from e

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError("no weight_map", field=str(index), expected='{"weight_map": {name: file, ...}}')
        for name, shard in weight_map.items():
            # A shard lies beside its index: a path that leads out of the folder is not followed.
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise CheckpointError(
                    "not a .safetensors file of this folder", field=f"{index}: weight_map[{name!r}]", got=shard
                )
            if name not in self._open(shard).keys():  # noqa: SIM118
                raise CheckpointError("the index names a tensor that the shard lacks", field=str(index), got=name)
            self._add(name, shard)

    def _open(self, shard: str) -> Any:
        if shard not in self._handles:
            import ml_dtypes  # noqa: F401 (registers the NumPy dtype `bfloat16` by name)
            from safetensors import SafetensorError, safe_open

            path = self.folder / shard
            if not path.is_file():
                raise CheckpointError("a shard is missing", field=str(path), hint=f"{INDEX} names it")
            try:
                self._handles[shard] = safe_open(path, framework="numpy")
            except (SafetensorError, OSError, ValueError) as e:
                raise _broken(path, e) from e
        return self._handles[shard]

    def _add(self, name: str, shard: str) -> None:
        header = self._handles[shard].get_slice(name)
        dtype = header.get_dtype()
        if dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"tensor {name!r} is not in a floating-point type that can be read", field=str(self.folder / shard),
                got=dtype, expected=", ".join(FLOAT_DTYPES),
            )  # fmt: skip
        self.shapes[name] = tuple(header.get_shape())
        self._shard_of[name] = shard


def find_single_file(folder: Path) -> str:
    """The one .safetensors file of a folder without index, or a refusal that says what is there instead."""
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if SINGLE in found:
        return SINGLE
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            "several .safetensors files and no index", field=str(folder), got=found, expected=f"{SINGLE} or {INDEX}"
        )
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLE_SUFFIXES:
            raise refuse_pickle(path)
    raise CheckpointError("no .safetensors file", field=str(folder), expected=f"{SINGLE} or {INDEX}")


def refuse_pickle(path: Path) -> CheckpointError:
    """The refusal of a pickled checkpoint, with the reason."""
    return CheckpointError(
        "a pickled checkpoint is not read: unpickling runs code that the file chooses", field=str(path),
        expected=".safetensors or .gguf", hint="Convert it with a tool you trust, on a machine you can lose",
    )  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises `CheckpointError`."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as e:
        raise CheckpointError("missing", field=str(path)) from e
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"not readable as JSON: {e}", field=str(path)) from e
    if not isinstance(value, dict):
        raise CheckpointError("not a JSON object", field=str(path), got=value)
    return value


def _broken(path: Path, e: Exception) -> CheckpointError:
    return CheckpointError(
        f"not a whole safetensors file: {e}", field=str(path), hint="Fetch it again; it may be truncated"
    )
