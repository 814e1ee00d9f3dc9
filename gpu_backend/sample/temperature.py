"""Temperature: divide a row by its request's temperature. Twin: cpu_reference/sample/temperature.py."""

from __future__ import annotations

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.sample.logits_rows import LogitsRows
from gpu_backend.sample.noise import vocab_tiles
from gpu_backend.triton_support import entry, launch, signature, tl, triton
from runner_api import NewRequestData, SamplingParams


@entry
@signature({"*i64": "expanded_idx_mapping", "*fp32": "temperature logits"}, ROWS=1, BLOCK=2048)
@triton.jit(do_not_specialize=["num_logits"])
def _apply_temperature_kernel(
    expanded_idx_mapping,
    temperature,
    num_logits,
    vocab_size,
    logits,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # 1 each row's temperature
    row = tl.load(expanded_idx_mapping + i, mask=i < num_logits, other=-1)
    t = tl.load(temperature + row, mask=row >= 0, other=0.0)
    # 2 divide where it changes anything, rounded as IEEE division is
    changes = (t != 0.0) & (t != 1.0)
    if tl.max(changes.to(tl.int32), 0) > 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = logits + (i * vocab_size)[:, None] + token[None, :]
        inside = changes[:, None] & (token < vocab_size)[None, :]
        x = tl.load(place, mask=inside, other=0.0)
        divisor = tl.where(changes, t, 1.0)[:, None] + tl.zeros_like(x)
        tl.store(place, tl.div_rn(x, divisor), mask=inside)


def apply_temperature(
    expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor, num_logits: int, logits: torch.Tensor
) -> None:
    """Divide each row by its request's temperature; rows of temperature 0 (greedy) and 1 stay as they are.

    Shapes: expanded_idx_mapping: int64[>= L] row of each logits row (NO_ROW is taken as greedy); temperature:
    float32[N] by row; logits: float32[L, V], contiguous. Writes: logits.
    """
    vocab_size = logits.shape[1]
    grid, tiling = vocab_tiles(num_logits, vocab_size)
    launch(_apply_temperature_kernel, grid, expanded_idx_mapping, temperature, num_logits, vocab_size, logits, **tiling)


class Temperature:
    """The temperatures; 0 = greedy, which also tells the draw to add no noise."""

    def __init__(self, max_num_reqs: int) -> None:
        self.temperature_np = np.zeros(max_num_reqs, np.float32)
        self.temperature: torch.Tensor  # float32[N], device; set by `bind`

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        return {"temperature": self.temperature_np}

    def bind(self, packed: PackedCopy) -> None:
        self.temperature = packed.views["temperature"]

    def row_tables(self) -> dict[str, torch.Tensor]:
        """Device tables by row that no step's copy overwrites."""
        return {}

    def row_widths(self, row: int) -> dict[str, int]:
        """How much of the row's part of a table means anything, where that is not all of it."""
        return {}

    def add_request(self, row: int, params: SamplingParams, new: NewRequestData) -> None:
        self.temperature_np[row] = params.temperature

    def pack(self, packed: PackedCopy) -> None:
        """Nothing is staged."""

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        """Nothing was staged."""

    def used_by(self, batch_rows: np.ndarray) -> bool:
        t = self.temperature_np[batch_rows]
        return bool(((t != 0) & (t != 1)).any())

    def apply(self, rows: LogitsRows, logits: torch.Tensor) -> None:
        apply_temperature(rows.expanded_idx_mapping, self.temperature, rows.num_logits, logits)
