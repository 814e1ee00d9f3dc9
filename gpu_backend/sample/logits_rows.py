"""What every step of the sampler is told about its logits rows. Twin: cpu_reference/sample/logits_rows.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """L logits rows. A request with d drafts owns d + 1 of them, one behind the other; without drafts it owns one.

    Parameters of requests are kept by state row and looked up through `expanded_idx_mapping`, never by batch index.
    """

    num_logits: int  # L
    expanded_idx_mapping: torch.Tensor  # int64[L] state row; NO_ROW belongs to no request
    expanded_local_pos: torch.Tensor  # int32[L] how many drafts of the request come before this row
    positions: torch.Tensor  # int64[L] place of the row's input token in its sequence; what is sampled goes one behind
    input_ids: torch.Tensor  # int32[L] that token: the last known one, or a draft
    batch_rows: np.ndarray  # int64[R] on the host: state row of each request, for questions about the batch as a whole
    batch_num_logits: np.ndarray  # int32[R] on the host: how many logits rows each request owns
