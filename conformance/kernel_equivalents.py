"""Mutants of our kernels that no run can tell from the original, each with the reason.

By the mutant's id, `function: line of code: old => new`. `conformance.kernel_mutants` reports an entry that is noticed
after all, or that names no mutant any more.
"""

from __future__ import annotations

_ATTENTION, _WITNESS = "_paged_attention_kernel", "_witness_attention_kernel"
_Q = "q = tl.load(place, mask=in_tile, other=0.0).to(DOT_DTYPE)"
_K = "k = tl.load(key_cache + key_place[None, :] + dim[:, None], mask=readable, other=0.0).to(DOT_DTYPE)"
_V = "v = tl.load(value_cache + value_place[:, None] + dim[None, :], mask=readable, other=0.0).to(DOT_DTYPE)"
_KV_BLOCK = "kv_block = tl.load(block_table + i * table_stride + j // BLOCK_SIZE, mask=known, other=0).to(tl.int64)"
_TAIL = "for first_token in range(tail + tile * QUERIES, num_tokens, tl.num_programs(1) * QUERIES):"
_BLANK = "tl.store(place, blank, mask=(owned & (token < num_tokens))[:, None] & in_head[None, :])"
_SHIFT = 'shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)'
_RESULT = "result = acc / tl.where(total == 0.0, 1.0, total)[:, None]"
_BEHIND = "behind = tl.maximum(tl.load(num_computed_tokens + row) - reach, 0) // tl.load(block_sizes + g)"
_SEEN = "seen = known[None, :] & (j[None, :] <= position[:, None])"
_AT = "at = tl.where(own, tl.load(seq_lens + owner, mask=own, other=0) - end + query, -1)"
_ROW_SLOT = "place += ((index % BLOCK_SIZE) * cache_slot_stride)[None, :]"
_MAGNITUDE = "magnitude = tl.where(signed < 0, ~signed, signed).to(tl.float32)"
_DIVISOR = "divisor = tl.where(changes, t, 1.0)[:, None] + tl.zeros_like(x)"
_TABLE = "table += tl.maximum(row, 0) * tl.load(table_strides + g)"
_SERIES = "series = u * 0.125 + 0.14285714285714285"


def _load(line: str) -> str:
    """The load in a line of code: `x = tl.load(…).to(…)` -> `tl.load(…)`."""
    return (
        line[line.index("tl.load") :]
        .removesuffix(".to(DOT_DTYPE)")
        .removesuffix(".to(tl.int64)")
        .removesuffix(".to(tl.uint64)")
    )


def _without_mask(line: str) -> str:
    load = _load(line)
    return f"{line}: {load} => {load[: load.index(', mask=')]})"


def _other(line: str, old: str = "0") -> str:
    load = _load(line)
    return f"{line}: {load} => {load.replace(f'other={old}', f'other=({old}) + 1')}"


_TOKEN = "token = tl.load(token_cache + place, mask=seen, other=0).to(tl.uint64)"
_POSITION = "position = tl.load(position_cache + place, mask=seen, other=0).to(tl.uint64)"

_GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("several programs then blank the same tail tokens: the result is the same, only later", _ATTENTION, (
        f"{_TAIL}: tl.num_programs(1) * QUERIES => (tl.num_programs(1))",
        f"{_TAIL}: tl.num_programs(1) * QUERIES => (QUERIES)",
        f"{_BLANK}: owned & (token < num_tokens) => (token < num_tokens)",
    )),
    ("where one factor of the product is masked to 0, the other may be any number", _ATTENTION, (
        _other(_Q, "0.0"), _other(_K, "0.0"), _other(_V, "0.0"),
    )),
    ("more keys of the same request are loaded, and hidden by `seen`", _ATTENTION, (
        ("end_key = seq_len - query_len + tl.minimum(first_query + QUERIES, query_len): "
        "tl.minimum(first_query + QUERIES, query_len) => (query_len)"),
        ("first_key = tl.maximum(seq_len - query_len + first_query - WINDOW + 1, 0): "
        "seq_len - query_len + first_query => (seq_len - query_len)"),
    )),
    ("the block of a key that is not loaded", _ATTENTION, (_other(_KV_BLOCK),)),
    ("a key behind the end is read from the null block, which is there, and hidden by `seen`", _ATTENTION, (
        "readable = known[None, :] & in_head[:, None]: known[None, :] & in_head[:, None] => (in_head[:, None])",
    )),
    ("no key up to the query's own lies behind the tile's end", _ATTENTION, (
        f"{_SEEN}: known[None, :] & (j[None, :] <= position[:, None]) => (j[None, :] <= position[:, None])",
    )),
    ("only rows behind the last query see no key, and these are not stored", _ATTENTION, (
        f'{_SHIFT}: "-inf" => "inf"', f"{_SHIFT}: 0.0 => 1.0", f"{_SHIFT}: 0.0 => -1.0",
        f"{_RESULT}: 0.0 => 1.0", f"{_RESULT}: 0.0 => -1.0", f"{_RESULT}: 1.0 => 2.0", f"{_RESULT}: 1.0 => 0.0",
    )),
    ("division truncates towards 0, and no column is below a negative bound", "_gather_block_tables_kernel", (
        (f"{_BEHIND}: tl.maximum(tl.load(num_computed_tokens + row) - reach, 0) => "
        "(tl.load(num_computed_tokens + row) - reach)"),
        f"{_BEHIND}: 0 => -1",
    )),
    ("a scalar is stored to every lane as well", "_expand_idx_mapping_kernel", (
        ("tl.store(expanded_idx_mapping + k, tl.zeros((BLOCK,), tl.int64) + row, mask=k < end): "
        "tl.zeros((BLOCK,), tl.int64) + row => (row)"),
    )),
    ("at most the tokens behind the lookahead are loaded, and not stored", "_prepare_prefill_inputs_kernel", (
        ("ids = tl.load(tokens + p, mask=(j < LOOKAHEAD) & (p < known), other=0): "
        "(j < LOOKAHEAD) & (p < known) => (p < known)"),
        "ids = tl.load(tokens + p, mask=(j < LOOKAHEAD) & (p < known), other=0): j < LOOKAHEAD => (j) <= (LOOKAHEAD)",
    )),
    ("lanes without a request read row 0, which is there, and store nothing", "_count_sampled_and_rejected_kernel", (
        ("unfinished = tl.load(seq_lens + i, mask=here, other=0) < tl.load(prefill_len + row, mask=here, other=0): "
        "tl.load(prefill_len + row, mask=here, other=0) => tl.load(prefill_len + row)"),
    )),
    ("any position below 0 sees no key", _WITNESS, (f"{_AT}: 1 => 2",)),
    ("one more tile at most, in which no query sees a key", _WITNESS, (
        "for first_key in range(0, tl.max(at, 0) + 1, KEYS):: 1 => 2",
    )),
    ("a slot of the witness cache is one number, so its stride is 1", _WITNESS, (
        f"{_ROW_SLOT}: (index % BLOCK_SIZE) * cache_slot_stride => (index % BLOCK_SIZE)",
    )),
    ("keys that are not seen are read from the null block, which is there, and left out of the sum", _WITNESS, (
        _without_mask(_TOKEN), _without_mask(_POSITION),
    )),
    ("noise is computed for a tile that needs none, and hidden by `where`", "tile_scores", (
        ("if tl.max(random.to(tl.int32), 0) > 0:: tl.max(random.to(tl.int32), 0) > 0 => "
        "(tl.max(random.to(tl.int32), 0)) >= (0)"),
        "if tl.max(random.to(tl.int32), 0) > 0:: 0 => -1",
    )),
    ("the noise of greedy rows is hidden by `where`", "tile_scores", (
        _other("seed = tl.load(seeds + row, mask=random, other=0)"),
        _other("position = tl.load(positions + i, mask=random, other=0)"),
    )),
    ("a cast to uint32 keeps the low 32 bits by itself", "philox4x32", (
        "k0, k1 = (key & MASK).to(tl.uint32), (key >> 32).to(tl.uint32): key & MASK => (key)",
        "c0, c1 = (counter & MASK).to(tl.uint32), (counter >> 32).to(tl.uint32): counter & MASK => (counter)",
    )),
    ("a cast to uint32 keeps the low 32 bits by itself", "murmur3", (
        "h = _mix(h, (seed & MASK).to(tl.uint32)): seed & MASK => (seed)",
        ("h = _mix(h, (position.to(tl.uint64) & MASK).to(tl.uint32)): "
        "position.to(tl.uint64) & MASK => (position.to(tl.uint64))"),
    )),
    ("a scalar 0 is spread over the lanes by the first operation", "philox4x32", ("c3 = c0 & 0: c0 & 0 => (0)",)),
    ("more tiles, in which no lane is on", "_apply_staged_writes_kernel", (
        "for first in range(0, high - low, BLOCK):: high - low => (high)",
        "for first in range(0, high - low, BLOCK):: high - low => (high) + (low)",
    )),
    ("at 1/8 the series and the logarithm are equally good", "to_gumbel", (
        "return -tl.log(tl.where(u < 0.125, series, exact)): u < 0.125 => (u) <= (0.125)",
    )),
    ("rows behind the last one are not stored", "tile_words", (
        _other("seed = tl.load(seeds + row, mask=row < num_rows, other=0)"),
        _other("position = tl.load(positions + row, mask=row < num_rows, other=0)"),
    )),
    ("dividing by 1 changes nothing", "_apply_temperature_kernel", (
        "changes = (t != 0.0) & (t != 1.0): 1.0 => 0.0",
        "changes = (t != 0.0) & (t != 1.0): (t != 0.0) & (t != 1.0) => (t != 0.0)",
    )),
    ("a row without a request gets temperature 1, which changes nothing either", "_apply_temperature_kernel", (
        _other("t = tl.load(temperature + row, mask=row >= 0, other=0.0)", "0.0"),
    )),
    ("a tile in which nothing changes is loaded, and not stored", "_apply_temperature_kernel", (
        ("if tl.max(changes.to(tl.int32), 0) > 0:: tl.max(changes.to(tl.int32), 0) > 0 => "
        "(tl.max(changes.to(tl.int32), 0)) >= (0)"),
        "if tl.max(changes.to(tl.int32), 0) > 0:: 0 => -1",
    )),
    ("zeros only spread the divisor, and rows that do not change are not stored", "_apply_temperature_kernel", (
        f"{_DIVISOR}: tl.where(changes, t, 1.0)[:, None] + tl.zeros_like(x) => (tl.where(changes, t, 1.0)[:, None])",
        (f"{_DIVISOR}: tl.where(changes, t, 1.0)[:, None] + tl.zeros_like(x) => "
        "(tl.where(changes, t, 1.0)[:, None]) - (tl.zeros_like(x))"),
        f"{_DIVISOR}: 1.0 => 2.0", f"{_DIVISOR}: 1.0 => 0.0",
    )),
    ("the table of a request without a row is not read", "_compute_slot_mappings_kernel", (
        f"{_TABLE}: tl.maximum(row, 0) => (row)", f"{_TABLE}: 0 => -1",
    )),
    ("lanes behind the end are not stored, those without slots are set to PAD", "_compute_slot_mappings_kernel", (
        _other("position = tl.load(positions + k, mask=k < end, other=0)"),
        _other("block = tl.load(table + block_index, mask=k < read_end, other=0).to(tl.int64)"),
    )),
    ("both words give the smallest uniform either way", "to_uniforms", (
        f"{_MAGNITUDE}: signed < 0 => (signed) <= (0)", f"{_MAGNITUDE}: 0 => 1", f"{_MAGNITUDE}: 0 => -1",
    )),
    ("the eighth term is below the resolution of float32 where the series is used", "to_gumbel", (
        f"{_SERIES}: u * 0.125 + 0.14285714285714285 => (0.14285714285714285)",
    )),
)  # fmt: skip

EQUIVALENT = {f"{function}: {change}": reason for reason, function, changes in _GROUPS for change in changes}
