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
_MAGNITUDE = "return tl.where(signed < 0, ~signed, signed).to(tl.float32)"
_DIVISOR = "divisor = tl.where(changes, t, 1.0)[:, None] + tl.zeros_like(x)"
_TABLE = "table += tl.maximum(row, 0) * tl.load(table_strides + g)"
_COLUMN = "other = tl.load(columns + i * num_columns + c - 1, mask=inside & (c > 0), other=-1).to(tl.int64)"
_NO_BEST = 'shift = tl.where(best == float("-inf"), 0.0, best)'
_ANY_NOISE = "if tl.max(noisy.to(tl.int32), 0) > 0:"
_SERIES = "series = u * 0.125 + 0.14285714285714285"


def _load(line: str) -> str:
    """The load in a line of code: `x = tl.load(…).to(…)` -> `tl.load(…)`."""
    return (
        line[line.index("tl.load") :]
        .removesuffix(".to(DOT_DTYPE)")
        .removesuffix(".to(tl.float32)")
        .removesuffix(".to(tl.int64)")
        .removesuffix(".to(tl.uint64)")
    )


def _without_mask(line: str) -> str:
    load = _load(line)
    return f"{line}: {load} => {load[: load.index(', mask=')]})"


def _other(line: str, old: str = "0") -> str:
    load = _load(line)
    return f"{line}: {load} => {load.replace(f'other={old}', f'other=({old}) + 1')}"


def _offsets(line: str, old: str, *new: str) -> tuple[str, ...]:
    """A constant in a line of code, changed to each of `new`."""
    return tuple(f"{line}: {old} => {value}" for value in new)


_TOKEN = "token = tl.load(token_cache + place, mask=seen, other=0).to(tl.uint64)"
_POSITION = "position = tl.load(position_cache + place, mask=seen, other=0).to(tl.uint64)"

_WORD = "word = tl.load(words + token // 32, mask=inside, other=0)"
_BIASED = "tl.store(place, tl.load(place, mask=named, other=0.0) + more, mask=named)"
_INDEX = "index = tl.load(seq_lens + i, mask=here, other=0) - tl.load(prompt_len + row, mask=here, other=0)"
_MINIMUM = "least = tl.load(min_len + row, mask=row >= 0, other=0)"
_STOP = "token = tl.load(stop_token_ids + row * stop_stride + tl.arange(0, STOPS), mask=stops, other=0)"
_BEFORE = 'before = tl.load(place, mask=stops, other=float("-inf"))'
_WORD_START = "start = tl.load(ends + w - 1, mask=(w > 0) & (w < num_words), other=0)"
_WORD_LAST = "last = tl.load(ends + w, mask=w < num_words, other=1) - 1"
_BACK = "for back in range(tl.max(tl.where(out, last - start, 0), 0)):"
_SAID_TOKEN = "token = tl.load(words + last - 1 - back, mask=more, other=0)"
_LAST_TOKEN = "token = tl.load(words + last, mask=out, other=0)"
_SCAN = "while (found < 0) & (end > lowest):"
_OLD = "old = tl.load(tokens + place, mask=inside & (place < known), other=0)"
_DRAFT = "draft = tl.load(input_ids + i - (position - place), mask=inside & (place >= known), other=0)"
_KNOWN_TOKEN = "token = tl.load(all_token_ids + row * all_stride + s, mask=s < known, other=0)"
_DRAWN = "n = tl.load(num_sampled + i, mask=row >= 0, other=0)"

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
    ("noise of greedy rows is worked out for nothing, and not taken", "_draw_whole_rows_kernel", (
        f"{_ANY_NOISE}: tl.max(noisy.to(tl.int32), 0) > 0 => (tl.max(noisy.to(tl.int32), 0)) >= (0)",
        *_offsets(_ANY_NOISE, "0", "-1"),
        _other("seed = tl.load(seeds + row, mask=noisy, other=0)"),
        _other("position = tl.load(positions + i, mask=noisy, other=0)"),
    )),
    ("a cast to uint32 keeps the low 32 bits by itself", "row_key", (
        "key = _mix(key, (seed & MASK).to(tl.uint32)): seed & MASK => (seed)",
        ("key = _mix(key, (position.to(tl.uint64) & MASK).to(tl.uint32)): "
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
        _other("local = tl.load(positions + k, mask=k < end, other=0)"),
    )),
    ("lanes outside are not stored", "allowed_by", (_other(_WORD),)),
    ("a scalar that is a tile of one: its least is its largest", "list_cut", (
        ("return key, token, tl.max(cut, 0), tl.max(last, 0), tl.max(found, 0): "
        "tl.max(cut, 0) => tl.min(cut, 0)"),
    )),
    ("a row that stays as it is has no lane inside", "_drop_behind_cuts_kernel", (
        "if tl.max(cut, 0) > KEEP_ALL:: tl.max(cut, 0) > KEEP_ALL => (tl.max(cut, 0)) >= (KEEP_ALL)",
    )),
    ("a row with min-p alone takes another way to the same set", "_list_candidates_kernel", (
        "by_top_p = (k >= vocab_size) & (p < 1.0): p < 1.0 => (p) <= (1.0)",
    )),
    ("pivots elsewhere between the bounds find the same cut", "searched_cut", (
        "pivot = low + (high - low) * share // (PIVOTS + 1): 1 => 2",
    )),
    ("the middle of a row that is done is its low, one below its high", "cut_by_weight", (
        ("low = tl.where(little, low, tl.minimum(middle, high - 1)): "
        "tl.minimum(middle, high - 1) => (middle)"),
    )),
    ("lanes without a pair read the row's first logit, and store nothing", "_apply_logit_bias_kernel", (
        f"{_BIASED}: tl.load(place, mask=named, other=0.0) => tl.load(place)",
    )),
    ("lanes without a request have a list of no length", "_apply_trace_replay_kernel", (
        f"{_INDEX}: tl.load(seq_lens + i, mask=here, other=0) => tl.load(seq_lens + i, mask=here, other=(0) + 1)",
        (f"{_INDEX}: tl.load(prompt_len + row, mask=here, other=0) => "
        "tl.load(prompt_len + row, mask=here, other=(0) + 1)"),
    )),
    ("lanes without a request are not stored", "_first_faults_kernel", (
        _other("start = tl.load(cu_num_logits + i, mask=here, other=0)"),
        _other("n = tl.load(num_sampled + i, mask=here, other=0)"),
    )),
    ("no place comes before the first, and that is as long as 1", "_apply_min_tokens_kernel", (_other(_MINIMUM),)),
    ("lanes without a stop token are not stored", "_apply_min_tokens_kernel", (_other(_STOP),)),
    ("what is not finite does not come back, nor does anything new", "_apply_min_tokens_kernel", (
        f'{_BEFORE}: tl.load(place, mask=stops, other=float("-inf")) => tl.load(place)',
        (f'{_BEFORE}: tl.load(place, mask=stops, other=float("-inf")) => '
        "tl.load(place, mask=stops, other=float('inf'))"),
        f'{_BEFORE}: "-inf" => "inf"',
    )),
    ("lanes without a word are not looked at", "_apply_bad_words_kernel", (
        f"{_WORD_START}: w < num_words => (w) <= (num_words)",
        (f"{_WORD_LAST}: tl.load(ends + w, mask=w < num_words, other=1) => "
        "tl.load(ends + w, mask=w < num_words, other=(1) + 1)"),
        _other(_SAID_TOKEN), f"{_LAST_TOKEN}: {_load(_LAST_TOKEN)} => tl.load(words + last)",
        _other(_LAST_TOKEN),
    )),
    ("more rounds, in which no word has a token left", "_apply_bad_words_kernel", (
        f"{_BACK}: last - start => (last)", f"{_BACK}: last - start => (last) + (start)", f"{_BACK}: 0 => 1",
        f"{_BACK}: 0 => -1",
    )),
    ("the first token is the prompt's, which is not matched", "_apply_bad_words_kernel", (
        ("position - back, back <= position, i, position, input_ids, known, all_token_ids + row * all_stride: "
        "back <= position => (back) < (position)"),
    )),
    ("any number below 0 says that it is nowhere", "last_occurrence", (
        "found = tl.zeros((), tl.int64) - 1: 1 => 2", "found = tl.max(tl.where(here, at, -1), 0): 1 => 2",
    )),
    ("one more round at most, in which no place is left", "last_occurrence", (
        f"{_SCAN}: found < 0 => (found) <= (0)", f"{_SCAN}: 0 => 1", f"{_SCAN}: end > lowest => (end) >= (lowest)",
    )),
    ("the last token of the text is never compared", "_apply_thinking_budget_kernel", (
        "for m in range(END_LENGTH - 1):: END_LENGTH - 1 => (END_LENGTH)", "for m in range(END_LENGTH - 1):: 1 => 0",
    )),
    ("none of the text has always begun", "_apply_thinking_budget_kernel", (
        "said = tl.max(tl.where(begun, n, 0), 0): 0 => -1",
    )),
    ("of each place one of both is taken, and none that is outside", "tokens_seen", (
        _other(_OLD), _other(_DRAFT),
    )),
    ("lanes without a request count nothing", "_count_sampled_tokens_kernel", (
        _other(_DRAWN),
        ("counted = tl.load(penalised + row, mask=row >= 0, other=0) != 0: "
        "tl.load(penalised + row, mask=row >= 0, other=0) => tl.load(penalised + row, mask=row >= 0, other=(0) + 1)"),
    )),
    ("lanes without a token count nothing", "_count_prompt_and_output_tokens_kernel", (_other(_KNOWN_TOKEN),)),
    ("both words give the smallest uniform either way", "_magnitude", (
        f"{_MAGNITUDE}: signed < 0 => (signed) <= (0)", f"{_MAGNITUDE}: 0 => 1", f"{_MAGNITUDE}: 0 => -1",
    )),
    ("the eighth term is below the resolution of float32 where the series is used", "to_gumbel", (
        f"{_SERIES}: u * 0.125 + 0.14285714285714285 => (0.14285714285714285)",
    )),
    ("a tile, or a row, of only -inf sums to 0 whatever is subtracted", "_compute_logprob_stats_kernel", (
        *_offsets(_NO_BEST, "0.0", "1.0", "-1.0"),
    )),
    ("a tile, or a row, of only -inf sums to 0 whatever is subtracted", "_stats_of_tiles_kernel", (
        *_offsets(_NO_BEST, "0.0", "1.0", "-1.0"),
    )),
    ("rows behind the last one are not stored", "_compute_logprob_stats_kernel", (
        _other("own = tl.load(logits + i * vocab_size + taken, mask=i < num_logits, other=0.0).to(tl.float32)", "0.0"),
    )),
    ("a tile that is not there has weight 0", "_stats_of_tiles_kernel", (
        _other("part = tl.load(tile_total + place, mask=inside, other=0.0)", "0.0"),
    )),
    ("no number but NaN has a key near the least", "order_key", (
        *_offsets("return tl.where(x == x, to_key(x), -2147483648)", "2147483648", "2147483647"),
    )),
    ("no token has a key near the least", "_token_keys_kernel", (
        *_offsets("key = tl.where(inside, with_index(order_key(x), token), -9223372036854775808)",
                  "9223372036854775808", "9223372036854775807"),
    )),
    ("one more than NaN is NaN", "_group_keys_kernel", (
        ('x = tl.load(logits + (i * vocab_size)[:, None] + token, mask=inside, other=float("nan")).to(tl.float32): '
        'tl.load(logits + (i * vocab_size)[:, None] + token, mask=inside, other=float("nan")) => '
        "tl.load(logits + (i * vocab_size)[:, None] + token, mask=inside, other=(float('nan')) + 1)"),
    )),
    ("lanes behind the end are not stored", "_token_keys_kernel", (
        _other("group = tl.load(groups + q, mask=i < num_logits, other=0)"),
    )),
    ("lanes behind the end are not stored, column 0 has its token elsewhere, unused columns are set", (
        "_gather_logprobs_kernel"
    ), (
        _other("taken = tl.load(token_ids + i, mask=inside, other=0)"),
        _other(_COLUMN, "-1"),
        _other("x = tl.load(logits + i * vocab_size + token, mask=inside & used, other=0.0).to(tl.float32)", "0.0"),
    )),
    ("with one rank a position is its own local one", "_compute_slot_mappings_kernel", (
        "if DCP_SIZE > 1:: DCP_SIZE > 1 => (DCP_SIZE) >= (1)", "if DCP_SIZE > 1:: 1 => 0",
    )),
)  # fmt: skip

EQUIVALENT = {f"{function}: {change}": reason for reason, function, changes in _GROUPS for change in changes}
