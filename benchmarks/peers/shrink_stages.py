"""Make the input of one stage smaller as long as two backends still differ on it, and say in one line what it is.

Rows first (one logits row, or one request), then rows of the tables, then tokens of the vocabulary or of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from runner_api import StageSet

Arrays = dict[str, Any]
# Stages whose logits columns may be left out: no other input names a token.
ANY_TOKEN = ("apply_temperature", "apply_min_p", "apply_top_k_top_p")
SHOWN = 24  # elements of an array that a line tells


def compared_rows(stage: str, arrays: Arrays, output: str, shape: tuple[int, ...]) -> np.ndarray:
    """bool of `shape`: elements that both sides define. A logits row without a request is defined by nobody."""
    keep = np.ones(shape, bool)
    if "expanded_idx_mapping" in arrays and "num_logits" in arrays:
        nobody = np.flatnonzero(arrays["expanded_idx_mapping"][: shape[0]] < 0)
        keep[nobody] = False
    return keep


def differs(candidate: StageSet, oracle: StageSet, stage: str, output: str, arrays: Arrays) -> tuple[int, ...] | None:
    """Index of the first element of `output` that differs; None if there is none, or if either side fails."""
    given = {k: v for k, v in arrays.items() if k != "at"}
    try:
        a, b = (side.run(stage, **given)[output] for side in (candidate, oracle))
    except Exception:
        return None
    a, b = joined(a), joined(b)
    with np.errstate(invalid="ignore"):
        close = np.abs(a.astype(np.float64) - b.astype(np.float64)) <= (2.0**-20 if a.dtype.kind == "f" else 0)
    wrong = ~((a == b) | ((a != a) & (b != b)) | close) & compared_rows(stage, arrays, output, a.shape)
    return tuple(int(i) for i in np.argwhere(wrong)[0]) if wrong.any() else None


def shrink(candidate: StageSet, oracle: StageSet, stage: str, output: str, arrays: Arrays) -> Arrays:
    """The smallest input found that still differs."""
    smaller = _logits_smaller if "num_logits" in arrays else _batch_smaller
    progress = True
    while progress:
        progress = False
        for case in smaller(stage, arrays):
            if (at := differs(candidate, oracle, stage, output, case)) is not None:
                arrays, progress = case | {"at": at}, True
                break
    return arrays


def show(candidate: StageSet, oracle: StageSet, stage: str, output: str, arrays: Arrays) -> str:
    given = {k: v for k, v in arrays.items() if k != "at"}
    a, b = (joined(side.run(stage, **given)[output]) for side in (candidate, oracle))
    at = arrays["at"]
    where = ", ".join(map(str, at))
    told = _words(given) if stage == "apply_bad_words" and given["num_logits"] == 1 else given
    outputs = () if "num_logits" in given else oracle.stages[stage].outputs
    parts = [f"{name} = {_short(value)}" for name, value in told.items() if name not in outputs]
    return f"`{output}[{where}]` is {a[at]}, ours {b[at]}. Smallest input found: {'; '.join(parts)}."


def _words(given: Arrays) -> Arrays:
    """Bad words as lists, and no more of the request's tokens than there are."""
    row = int(given["expanded_idx_mapping"][0])
    ends = [0, *given["bad_word_ends"][row, : given["num_bad_words"][row]].tolist()]
    tokens = given["bad_word_tokens"][row].tolist()
    return {
        "bad words": str([tokens[i:j] for i, j in pairwise(ends)]),
        "prompt_len": int(given["prompt_len"][row]), "total_len": int(given["total_len"][row]),
        "tokens behind the prompt": given["all_token_ids"][row, given["prompt_len"][row] : given["total_len"][row]],
        "position": int(given["positions"][0]),
    }  # fmt: skip


def joined(value: Any) -> np.ndarray:
    return np.concatenate(value, axis=1) if isinstance(value, list) else np.asarray(value)


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_short(v) for v in value) + "]"
    if not isinstance(value, np.ndarray):
        return str(value)
    if value.size <= SHOWN:
        return str(value.tolist())
    strange = {str(v): np.argwhere(at).tolist() for v, at in ((np.nan, np.isnan(value)), (np.inf, value == np.inf))}
    told = "".join(f", {name} at {places}" for name, places in strange.items() if places)
    return f"{value.dtype} {list(value.shape)}{told}"


# -- logits rows ----------------------------------------------------------------------------------------------------


def _logits_smaller(stage: str, arrays: Arrays) -> Iterator[Arrays]:
    size, at = len(arrays["logits"]), arrays["at"][0]
    # 1 one logits row, or those of its request up to it
    if size > 1:
        first = at - _drafts_before(arrays, at)
        for start in sorted({at, first}, reverse=True):
            yield _rows(arrays, size, start, at + 1)
        return
    # 2 the one row of the tables that it reads
    by_row = ("temperature", "min_p", "top_k", "num_bad_words", "prompt_len")
    n = next((len(arrays[k]) for k in by_row if k in arrays), 1)
    if n > 1:
        row = int(arrays["expanded_idx_mapping"][0])
        kept = {k: v[row : row + 1] for k, v in arrays.items() if _first(v) == n}
        yield arrays | kept | {"expanded_idx_mapping": np.zeros_like(arrays["expanded_idx_mapping"])}
        return
    # 3 fewer tokens
    width = arrays["logits"].shape[1]
    if stage in ANY_TOKEN:
        for step in (width // 2, width // 4, 1):
            for start in range(0, width, max(step, 1)):
                keep = np.ones(width, bool)
                keep[start : start + max(step, 1)] = False
                if keep.sum() >= 1 and not keep.all():
                    case = arrays | {"logits": np.ascontiguousarray(arrays["logits"][:, keep])}
                    if "top_k" in arrays:
                        case["top_k"] = np.minimum(arrays["top_k"], keep.sum()).astype(np.int32)
                    yield case


def _drafts_before(arrays: Arrays, at: int) -> int:
    """How many logits rows of the same request lie before this one."""
    if "expanded_local_pos" in arrays:
        return int(arrays["expanded_local_pos"][at])
    rows = arrays["expanded_idx_mapping"]
    k = 0
    while k < at and rows[at - k - 1] == rows[at]:
        k += 1
    return k


def _rows(arrays: Arrays, size: int, start: int, stop: int) -> Arrays:
    cut = {k: v[start:stop] for k, v in arrays.items() if _first(v) == size}
    return arrays | cut | {"num_logits": stop - start}


def _first(value: Any) -> int:
    return len(value) if isinstance(value, np.ndarray) and value.ndim else -1


# -- requests -------------------------------------------------------------------------------------------------------

# Stages of whole batches that can be cut to one request, and which of their inputs are per request of the batch, per
# token, and per KV cache group; what else has as many rows as the tables is per row.
OF_BATCH = ("compute_slot_mappings", "prepare_pos_seq_lens", "combine_sampled_and_draft_tokens")
BY_REQUEST, BY_TOKEN = ("idx_mapping", "seq_lens"), ("positions", "input_ids", "slot_mappings")
STARTS = ("query_start_loc", "cu_num_logits")
BY_GROUP = ("block_sizes", "slot_mapping_enabled", "dcp_sharded", "block_tables")


def _batch_smaller(stage: str, arrays: Arrays) -> Iterator[Arrays]:
    """One request; one row of the tables; one group; no more tokens than it takes."""
    if stage not in OF_BATCH:
        return
    if arrays["num_reqs"] > 1:
        for i in range(arrays["num_reqs"]):
            yield _one_request(arrays, i)
    elif len(arrays["idx_mapping"]) > 1:
        yield _one_row(arrays)
    else:
        yield from _fewer_groups(arrays)
        yield from _fewer_tokens(arrays)


def _one_request(arrays: Arrays, i: int) -> Arrays:
    """Request i is the only one; what follows it stays behind it."""
    first = int(arrays["query_start_loc"][i])
    case = arrays | {"num_reqs": 1}
    case |= {k: np.roll(arrays[k], -i) for k in BY_REQUEST if k in arrays}
    case |= {k: np.ascontiguousarray(np.roll(arrays[k], -first, axis=-1)) for k in BY_TOKEN if k in arrays}
    for name in STARTS:
        if name in arrays:
            starts = np.full(len(arrays[name]), arrays[name][i + 1] - arrays[name][i], np.int32)
            starts[0] = 0
            case[name] = starts
    return case


def _one_row(arrays: Arrays) -> Arrays:
    n, row = len(arrays["idx_mapping"]), int(arrays["idx_mapping"][0])
    case = arrays | {k: v[row : row + 1] for k, v in arrays.items() if _first(v) == n}
    case |= {k: arrays[k][:1] for k in BY_REQUEST if k in arrays} | {"idx_mapping": np.zeros(1, np.int64)}
    case |= {k: arrays[k][:2] for k in STARTS if k in arrays}
    if "logits_indices" in arrays:
        case["logits_indices"] = arrays["logits_indices"][: int(arrays["cu_num_logits"][1])]
    if "block_tables" in arrays:
        case["block_tables"] = [table[row : row + 1] for table in arrays["block_tables"]]
    return case


def _fewer_groups(arrays: Arrays) -> Iterator[Arrays]:
    groups = len(arrays.get("block_sizes", ()))
    for g in range(groups if groups > 1 else 0):
        cut = {k: arrays[k][g : g + 1] for k in BY_GROUP}
        yield arrays | cut | {"slot_mappings": arrays["slot_mappings"][g : g + 1]}


def _fewer_tokens(arrays: Arrays) -> Iterator[Arrays]:
    """A buffer that ends one element behind the last token; for slots the first token alone, at a lower position."""
    count = int(arrays["query_start_loc"][1])
    for name in BY_TOKEN[:2]:
        if name in arrays and arrays[name].shape[-1] > count + 1 and "slot_mappings" not in arrays:
            yield arrays | {name: arrays[name][: count + 1]}
    if "slot_mappings" not in arrays or len(arrays["block_sizes"]) > 1:
        return
    if arrays["slot_mappings"].shape[1] > 1:
        for k in range(count):
            yield arrays | {
                "query_start_loc": np.array([0, 1], np.int32), "positions": arrays["positions"][k : k + 1],
                "slot_mappings": np.ascontiguousarray(arrays["slot_mappings"][:, k : k + 1]),
            }  # fmt: skip
        return
    position, table = int(arrays["positions"][0]), arrays["block_tables"][0]
    needed = position // arrays["block_sizes"][0] + 1
    if needed < table.shape[1]:
        yield arrays | {"block_tables": [np.ascontiguousarray(table[:, :needed])]}
    for lower in sorted({0, position // 2, position - 1}):
        if 0 <= lower < position:
            yield arrays | {"positions": np.array([lower], np.int64)}
