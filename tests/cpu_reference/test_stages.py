"""Every stage on drawn ragged batches: the law it keeps, its tails, and nothing written or read beyond its contract.

Outputs start out poisoned, free rows hold poison, batches leave gaps and empty rows, tables have stale columns.
"""

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from cpu_reference.block_table import BlockTables
from cpu_reference.models.witness import mix64, witness_attention
from cpu_reference.stages import cpu_stages
from runner_api import KVCacheConfig, KVCacheGroup, KVCacheSpec, load_stages
from runner_api import witness as w

STAGES = cpu_stages()
POISON = -77
N, M, T = 6, 48, 64  # rows, tokens of a request, tokens of a step


def poisoned(shape, dtype=np.int64):
    return np.full(shape, POISON, dtype)


@dataclass
class Ragged:
    """Request i computes counts[i] tokens after computed[i], the last drafts[i] are drafts."""

    rows: np.ndarray
    counts: np.ndarray
    computed: np.ndarray
    prefill_len: np.ndarray
    drafts: np.ndarray
    k: int

    @property
    def num_reqs(self):
        return len(self.rows)

    @property
    def idx_mapping(self):
        return pad(self.rows, N, np.int64)

    @property
    def query_start_loc(self):
        return pad(np.cumsum([0, *self.counts]), N + 1, np.int32, tail=self.counts.sum())

    @property
    def cu_num_logits(self):
        return pad(np.cumsum([0, *(self.drafts + 1)]), N + 1, np.int32, tail=(self.drafts + 1).sum())

    @property
    def seq_lens(self):
        return pad(self.computed + self.counts, N, np.int32, tail=0)

    def by_row(self, values, dtype=np.int32):
        """A table of N rows in which all rows but the batch's are poison."""
        values = np.asarray(values)
        table = poisoned((N, *values.shape[1:]), dtype)
        table[self.rows] = values
        return table

    def tokens(self):
        """(batch index, offset) of each flat token."""
        return [(i, j) for i, n in enumerate(self.counts) for j in range(n)]


def pad(values, length, dtype, tail=POISON):
    out = np.full(length, tail, dtype)
    out[: len(values)] = values
    return out


@st.composite
def ragged(draw, drafts=True, empty_rows=True):
    """Decodes, chunks, final chunks, verifications and padded tails; with empty_rows also requests without tokens."""
    r = draw(st.integers(1, N))
    rows = np.array(draw(st.permutations(range(N)))[:r])
    k = draw(st.integers(0, 3)) if drafts else 0
    counts, computed, prefill_len, num_drafts = [], [], [], []
    for _ in range(r):
        kind = draw(st.sampled_from(["decode", "chunk", "final", *(["empty"] if empty_rows else [])]))
        d = draw(st.integers(0, k)) if kind in ("decode", "final") else 0
        c = draw(st.integers(1, 30))
        if kind == "decode":
            n, p = 1 + d, draw(st.integers(1, c))
        elif kind == "final":
            n = draw(st.integers(1, 6))
            p = c + n
            n += d
        elif kind == "chunk":
            n = draw(st.integers(1, 6))
            p = c + n + draw(st.integers(1, 5))
        else:
            n, p, d = 0, draw(st.integers(1, 40)), 0
        for values, value in zip((counts, computed, prefill_len, num_drafts), (n, c, p, d), strict=True):
            values.append(value)
    return Ragged(rows, *map(np.array, (counts, computed, prefill_len, num_drafts)), k)


def test_the_stages_are_listed_for_the_loader():
    stages = load_stages("cpu_reference.runner:CpuModelRunner")
    assert stages.backend == "cpu"
    assert stages.stages.keys() == STAGES.stages.keys()
    for name, spec in stages.stages.items():
        assert spec.name == name
        assert not set(spec.inputs) & set(spec.outputs)
    assert stages.stages["prepare_pos_seq_lens"].outputs == ("positions", "seq_lens")
    assert stages.stages["prepare_pos_seq_lens"].inputs[0] == "idx_mapping"


def test_running_a_stage_leaves_its_arguments_alone():
    counts, out = np.int32([3]), poisoned(4, np.int32)
    got = STAGES.run("prepare_query_start_loc", num_scheduled_tokens=counts, num_reqs=1, query_start_loc=out)
    assert got["query_start_loc"].tolist() == [0, 3, 3, 3]
    assert (out == POISON).all()


@given(batch=ragged())
def test_query_start_loc(batch):
    out = STAGES.run(
        "prepare_query_start_loc", num_scheduled_tokens=batch.counts.astype(np.int32), num_reqs=batch.num_reqs,
        query_start_loc=poisoned(N + 1, np.int32),
    )["query_start_loc"]  # fmt: skip
    assert out[0] == 0
    assert np.diff(out[: batch.num_reqs + 1]).tolist() == batch.counts.tolist()
    assert (out[batch.num_reqs :] == batch.counts.sum()).all()


@given(batch=ragged())
def test_positions_and_lengths(batch):
    out = STAGES.run(
        "prepare_pos_seq_lens", idx_mapping=batch.idx_mapping, query_start_loc=batch.query_start_loc,
        num_computed_tokens=batch.by_row(batch.computed), num_reqs=batch.num_reqs,
        positions=poisoned(T), seq_lens=poisoned(N, np.int32),
    )  # fmt: skip
    expected = [batch.computed[i] + j for i, j in batch.tokens()]
    assert out["positions"].tolist() == expected + [0] * (T - len(expected))
    lengths = (batch.computed + batch.counts).tolist()
    assert out["seq_lens"].tolist() == lengths + [0] * (N - len(lengths))


@given(batch=ragged())
def test_expanded_rows(batch):
    size = N * (1 + batch.k)
    out = STAGES.run(
        "expand_idx_mapping", idx_mapping=batch.idx_mapping, cu_num_logits=batch.cu_num_logits,
        num_reqs=batch.num_reqs, expanded_idx_mapping=poisoned(size), expanded_local_pos=poisoned(size, np.int32),
    )  # fmt: skip
    pairs = [(row, j) for row, d in zip(batch.rows, batch.drafts, strict=True) for j in range(d + 1)]
    tail = size - len(pairs)
    assert out["expanded_idx_mapping"].tolist() == [row for row, _ in pairs] + [-1] * tail
    assert out["expanded_local_pos"].tolist() == [j for _, j in pairs] + [0] * tail


@given(batch=ragged(), data=st.data())
def test_input_ids_follow_one_law(batch, data):
    """The token at position p is the known one where p < total_len, the draft p - total_len behind that.

    One law for prompts, decodes, verification and padded tails. The known tokens of a decode are not in the prefill
    copy: they come from the row's last sampled token.
    """
    r = batch.num_reqs
    known = np.arange(N * M, dtype=np.int32).reshape(N, M) + 1000
    drafts = np.arange(N * max(batch.k, 0)).reshape(N, batch.k) + 5000
    last = np.arange(N) + 9000
    total = np.maximum(batch.prefill_len, batch.computed + 1)
    all_tokens, last_rows = poisoned((N, M), np.int32), poisoned(N)
    for i, row in enumerate(batch.rows):
        all_tokens[row, : total[i]] = known[row, : total[i]]
        decoding = batch.computed[i] >= batch.prefill_len[i]
        last_rows[row] = known[row, total[i] - 1] if decoding else last[row]  # stale until the first sample
    mapped = {
        "idx_mapping": batch.idx_mapping, "query_start_loc": batch.query_start_loc, "num_reqs": r,
        "prefill_len": batch.by_row(batch.prefill_len),
    }  # fmt: skip
    first = STAGES.run(
        "prepare_prefill_inputs", **mapped, all_token_ids=all_tokens,
        num_computed_tokens=batch.by_row(batch.computed), input_ids=poisoned(T, np.int32),
        next_prefill_tokens=poisoned((1, N), np.int32),
    )  # fmt: skip
    second = STAGES.run(
        "combine_sampled_and_draft_tokens", **mapped, seq_lens=batch.seq_lens, last_sampled_tokens=last_rows,
        draft_tokens=drafts, cu_num_logits=batch.cu_num_logits, input_ids=first["input_ids"],
        logits_indices=poisoned(N * (1 + batch.k)),
    )  # fmt: skip
    expected = []
    for i, j in batch.tokens():
        p, row = batch.computed[i] + j, batch.rows[i]
        expected.append(known[row, p] if p < total[i] else drafts[row, p - total[i]])
    if (batch.counts > 0).all():  # a request without tokens has no logits rows of its own
        assert second["input_ids"].tolist() == expected + [0] * (T - len(expected))
        ends = np.cumsum(batch.counts)
        indices = [e - m + j for e, m in zip(ends, batch.drafts + 1, strict=True) for j in range(m)]
        assert second["logits_indices"].tolist() == indices + [0] * (N * (1 + batch.k) - len(indices))
    # what follows the chunk, for a drafter; rows that compute no known token keep theirs
    for row in range(N):
        i = batch.rows.tolist().index(row) if row in batch.rows else None
        if i is None or batch.computed[i] >= batch.prefill_len[i]:
            assert first["next_prefill_tokens"][0, row] == POISON
        else:
            p = batch.computed[i] + batch.counts[i]
            assert first["next_prefill_tokens"][0, row] == (known[row, p] if p < batch.prefill_len[i] else 0)


@pytest.mark.parametrize(
    ("computed", "counts", "drafts", "prefill_len", "last", "held", "expected", "indices"),
    [
        ([5, 6], [4, 4], [3, 0], [5, 10], [40, 0], [[60, 61, 62], [0, 0, 0]],
         [40, 60, 61, 62, 27, 28, 29, 30], [0, 1, 2, 3, 7]),
        ([8, 10], [4, 4], [3, 3], [5, 10], [44, 45], [[80, 81, 82], [90, 91, 92]],
         [44, 80, 81, 82, 45, 90, 91, 92], range(8)),
        ([5], [4], [3], [6], [99], [[0, 0, 0]], [16, 0, 0, 0], range(4)),
    ],
    ids=["verify and prompt", "verify both", "padded prefill tail"],
)  # fmt: skip
def test_drafts_in_the_input(computed, counts, drafts, prefill_len, last, held, expected, indices):
    """Worked by hand: A in row 5 has the prompt 11 .., B in row 4 the prompt 21 .. 30."""
    rows = np.array([5, 4][: len(counts)])
    batch = Ragged(rows, *map(np.array, (counts, computed, prefill_len, drafts)), 3)
    known = np.stack([np.arange(11, 11 + M), np.arange(21, 21 + M)])[: len(counts)]
    mapped = {
        "idx_mapping": batch.idx_mapping, "query_start_loc": batch.query_start_loc, "num_reqs": len(counts),
        "prefill_len": batch.by_row(prefill_len),
    }  # fmt: skip
    out = STAGES.run(
        "prepare_prefill_inputs", **mapped, all_token_ids=batch.by_row(known),
        num_computed_tokens=batch.by_row(computed), input_ids=poisoned(T, np.int32),
        next_prefill_tokens=poisoned((1, N), np.int32),
    )  # fmt: skip
    out = STAGES.run(
        "combine_sampled_and_draft_tokens", **mapped, seq_lens=batch.seq_lens,
        last_sampled_tokens=batch.by_row(last, np.int64), draft_tokens=batch.by_row(held, np.int64),
        cu_num_logits=batch.cu_num_logits, input_ids=out["input_ids"], logits_indices=poisoned(N * 4),
    )  # fmt: skip
    assert out["input_ids"][: len(expected)].tolist() == expected
    assert out["logits_indices"][: len(indices)].tolist() == list(indices)


# -- block tables and slots --------------------------------------------------------------------------------------


@given(
    batch=ragged(), sizes=st.lists(st.sampled_from([1, 3, 4, 16]), min_size=1, max_size=3), data=st.data(),
    dirty=st.integers(0, N),
)  # fmt: skip
def test_gathered_tables(batch, sizes, data, dirty):
    """Defined columns in batch order, null behind a window, padding rows blank, stale columns untouched."""
    r, num_groups = batch.num_reqs, len(sizes)
    reach = [data.draw(st.sampled_from([0, 1, 3, 8, 31])) for _ in sizes]
    padded = data.draw(st.integers(r, N))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    width = [M // s + 2 for s in sizes]
    tables = [rng.integers(1, 999, (N, wd)).astype(np.int32) for wd in width]
    num_blocks = poisoned((num_groups, N), np.int32)
    for g, size in enumerate(sizes):
        num_blocks[g, batch.rows] = -(-(batch.computed + batch.counts) // size)
    outs = STAGES.run(
        "gather_block_tables", idx_mapping=batch.idx_mapping, num_computed_tokens=batch.by_row(batch.computed),
        num_blocks=num_blocks, block_sizes=sizes, window_reach=reach, num_reqs=r, num_rows=max(padded, dirty, r),
        block_tables=tables, input_block_tables=[poisoned((N, wd), np.int32) for wd in width],
    )["input_block_tables"]  # fmt: skip
    for g, out in enumerate(outs):
        for i, row in enumerate(batch.rows):
            n = num_blocks[g, row]
            for c in range(n):
                hidden = reach[g] > 0 and (c + 1) * sizes[g] <= batch.computed[i] - reach[g]
                assert out[i, c] == (0 if hidden else tables[g][row, c])
            assert (out[i, n:] == POISON).all()
        blank = max(padded, dirty, r)
        assert not out[r:blank].any()
        assert (out[blank:] == POISON).all()


def test_a_smaller_batch_blanks_what_a_larger_one_left():
    """8 rows, then 2, then a full graph of 4: rows 2 to 7 are blanked by the second step, not by the third."""
    spec = KVCacheSpec(4, 1, 1, "int64", kind="token_position")
    tables = BlockTables(KVCacheConfig(99, (KVCacheGroup(("a",), spec),)), 8, 16, 16, [0])
    for row in range(8):
        tables.append_block_ids(row, [[row + 1, row + 11]], overwrite=True)
    tables.apply_staged_writes()

    def gather(rows, padded):
        STAGES.stages["gather_block_tables"].fn(
            pad(rows, 8, np.int64), np.zeros(8, np.int32), tables.num_blocks, tables.block_sizes, [0], len(rows),
            tables.rows_to_fill(len(rows), padded), tables.block_tables, tables.input_block_tables,
        )  # fmt: skip
        return tables.input_block_tables[0][:, :2].tolist()

    assert gather(range(8), 8) == [[i + 1, i + 11] for i in range(8)]
    assert gather([5, 0], 2) == [[6, 16], [1, 11]] + [[0, 0]] * 6
    tables.input_block_tables[0][4:] = POISON  # not read and not written by the next
    assert gather([7, 6, 5], 4)[:4] == [[8, 18], [7, 17], [6, 16], [0, 0]]


def test_an_overwritten_row_may_keep_a_stale_tail_but_not_a_stale_count():
    spec = KVCacheSpec(4, 1, 1, "int64", kind="token_position")
    tables = BlockTables(KVCacheConfig(99, (KVCacheGroup(("a",), spec),)), 1, 16, 16, [0])
    tables.append_block_ids(0, [[7, 8, 9]], overwrite=True)
    tables.apply_staged_writes()
    tables.append_block_ids(0, [[4]], overwrite=True)
    tables.append_block_ids(0, [[5]], overwrite=False)
    tables.apply_staged_writes()
    assert tables.num_blocks[0, 0] == 2
    assert tables.block_tables[0][0, :3].tolist() == [4, 5, 9]


@given(batch=ragged(), sizes=st.lists(st.sampled_from([1, 3, 4, 16]), min_size=1, max_size=3), data=st.data())
def test_slot_mappings(batch, sizes, data):
    """table[row][p // size] * size + p % size; -1 for disabled groups, for rows of nobody, and from the real end on."""
    enabled = [data.draw(st.booleans()) for _ in sizes]
    nobody = data.draw(st.booleans())
    idx_mapping = batch.idx_mapping
    positions = poisoned(T)
    flat = batch.tokens()
    positions[: len(flat)] = [batch.computed[i] + j for i, j in flat]
    if nobody:  # its positions are not to be trusted either
        idx_mapping[0] = -1
        positions[: batch.counts[0]] = 10**9
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    tables = [poisoned((N, M // s + 2), np.int32) for s in sizes]
    for g, size in enumerate(sizes):
        for i, row in enumerate(batch.rows):
            n = -(-(batch.computed[i] + batch.counts[i]) // size)
            tables[g][row, :n] = rng.integers(1, 2**27, n)  # 2^27 blocks of 16: slots past 2^31
    out = STAGES.run(
        "compute_slot_mappings", idx_mapping=idx_mapping, query_start_loc=batch.query_start_loc, positions=positions,
        block_sizes=sizes, slot_mapping_enabled=enabled, dcp_sharded=enabled, dcp_size=1, dcp_rank=0, dcp_interleave=1,
        num_reqs=batch.num_reqs, block_tables=tables, slot_mappings=poisoned((len(sizes), T)),
    )["slot_mappings"]  # fmt: skip
    for g, size in enumerate(sizes):
        expected = [-1] * T
        for t, (i, j) in enumerate(flat):
            p = int(batch.computed[i] + j)
            if enabled[g] and not (nobody and i == 0):
                expected[t] = int(tables[g][batch.rows[i], p // size]) * size + p % size
        assert out[g].tolist() == expected


def test_slots_are_computed_in_64_bits():
    out = poisoned((1, 1))
    STAGES.stages["compute_slot_mappings"].fn(
        np.zeros(1, np.int64), np.int32([0, 1]), np.int64([5]), [16], [True], [True], 1, 0, 1, 1,
        [np.int32([[2**27]])], out,
    )  # fmt: skip
    assert out[0, 0] == 2**31 + 5


@given(slots=st.lists(st.integers(-1, 23), max_size=12, unique=True), data=st.data())
def test_keys_and_values_go_to_their_slots_only(slots, data):
    slots = data.draw(st.permutations([*slots, *[-1] * data.draw(st.integers(0, 3))]))
    key = np.arange(len(slots) * 2, dtype=np.float32).reshape(-1, 2, 1) + 1
    empty = np.full((6, 4, 2, 1), -99, np.float32)
    out = STAGES.run(
        "reshape_and_cache", key=key, value=-key, slot_mapping=np.array(slots, np.int64), key_cache=empty,
        value_cache=empty,
    )  # fmt: skip
    expected = np.full((24, 2, 1), -99, np.float32)
    for t, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = key[t]
    assert np.array_equal(out["key_cache"].reshape(24, 2, 1), expected)
    assert np.array_equal(out["value_cache"].reshape(24, 2, 1), np.where(expected == -99, -99, -expected))


# -- staged writes -------------------------------------------------------------------------------------------------


@given(data=st.data(), order=st.randoms())
def test_staged_writes_in_any_order(data, order):
    """Disjoint runs: the result is that of a plain loop, whatever their order."""
    runs = []
    for row in range(4):
        start = 0
        for length in data.draw(st.lists(st.integers(0, 4), max_size=3)):
            start += data.draw(st.integers(0, 2))
            runs.append((row, start, [100 * row + start + j for j in range(length)]))
            start += length
    expected = poisoned((4, 20), np.int32)
    for row, start, values in runs:
        expected[row, start : start + len(values)] = values
    order.shuffle(runs)
    runs = [run for run in runs if run[2]]
    out = STAGES.run(
        "apply_staged_writes", indices=np.array([r for r, _, _ in runs], np.int32),
        starts=np.array([s for _, s, _ in runs], np.int32),
        contents=np.array([v for _, _, values in runs for v in values], np.int32),
        cu_lens=np.cumsum([len(values) for _, _, values in runs]).astype(np.int32), num_writes=len(runs),
        base=poisoned((4, 20), np.int32),
    )["base"]  # fmt: skip
    assert np.array_equal(out, expected)


# -- after sampling ---------------------------------------------------------------------------------------------------


@given(batch=ragged(empty_rows=False), data=st.data())
def test_counting_and_advancing(batch, data):
    """num_sampled is 0 exactly for unfinished prefills; accepted and rejected fill the logits rows; rows advance."""
    r, k = batch.num_reqs, batch.k
    unfinished = batch.computed + batch.counts < batch.prefill_len
    offered = np.array([data.draw(st.integers(1, d + 1)) for d in batch.drafts], np.int32)
    counted = STAGES.run(
        "count_sampled_and_rejected", idx_mapping=batch.idx_mapping, seq_lens=batch.seq_lens,
        prefill_len=batch.by_row(batch.prefill_len), cu_num_logits=batch.cu_num_logits, num_reqs=r,
        num_sampled=pad(offered, N, np.int32), num_rejected=poisoned(N, np.int32),
    )  # fmt: skip
    num_sampled, num_rejected = counted["num_sampled"], counted["num_rejected"]
    assert num_sampled[:r].tolist() == np.where(unfinished, 0, offered).tolist()
    assert num_rejected[:r].tolist() == np.where(unfinished, 0, batch.drafts + 1 - offered).tolist()
    assert (num_rejected[r:] == POISON).all()
    assert (num_sampled[r:] == POISON).all()

    nobody = data.draw(st.booleans())
    idx_mapping = batch.idx_mapping
    if nobody:
        idx_mapping[0] = -1
    total = np.maximum(batch.prefill_len, batch.computed + 1)
    tokens = np.arange(N * (1 + k)).reshape(N, 1 + k) + 100
    before = {
        "last_sampled_tokens": poisoned(N), "total_len": batch.by_row(total),
        "all_token_ids": poisoned((N, M), np.int32), "num_computed_tokens": batch.by_row(batch.computed),
    }  # fmt: skip
    after = STAGES.run(
        "post_update", idx_mapping=idx_mapping, query_start_loc=batch.query_start_loc, sampled_token_ids=tokens,
        num_sampled=num_sampled, num_rejected=num_rejected, num_reqs=r, **before,
    )  # fmt: skip
    expected = {name: a.copy() for name, a in before.items()}
    for i, row in enumerate(batch.rows):
        if nobody and i == 0:
            continue
        for j in range(num_sampled[i]):
            expected["all_token_ids"][row, total[i] + j] = tokens[i, j]
            expected["last_sampled_tokens"][row] = tokens[i, j]
        expected["total_len"][row] += num_sampled[i]
        expected["num_computed_tokens"][row] += batch.counts[i] - num_rejected[i]
        if num_sampled[i]:  # the sampled token is the only one whose KV is not written yet
            assert after["total_len"][row] == after["num_computed_tokens"][row] + 1
    for name, value in expected.items():
        assert np.array_equal(after[name], value), name


# -- the witness's attention -----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=4),
    size=st.sampled_from([1, 3, 4]), window=st.sampled_from([None, 1, 5]), group=st.integers(0, 2),
)  # fmt: skip
def test_witness_attention(lengths, size, window, group):
    """The hash of all pairs seen, one query at a time in Python's integers; poison lies everywhere else."""
    rng = np.random.default_rng(3)
    tokens, positions = poisoned((60, size, 1, 1)), poisoned((60, size, 1, 1))
    table, free = poisoned((len(lengths), 20), np.int32), iter(rng.permutation(np.arange(1, 60)))
    query_start_loc = np.cumsum([0, *(n for n, _ in lengths)]).astype(np.int32)
    seq_lens = np.int32([n + c if n else 0 for n, c in lengths])
    hidden = np.full(int(query_start_loc[-1]) + 2, 5, np.uint64)
    expected = [5] * len(hidden)
    for i, (n, c) in enumerate(lengths):
        known = rng.integers(0, 1000, n + c)
        table[i, : -(-(n + c) // size)] = [next(free) for _ in range(-(-(n + c) // size))]
        for p in range(n + c):
            tokens[table[i, p // size], p % size], positions[table[i, p // size], p % size] = known[p], p
        for j in range(n):
            at, total = c + j, 0
            for p in range(0 if window is None else max(0, at - window + 1), at + 1):
                word = int(known[p]) * w.TOKEN + p * w.POSITION + (p + 1) * w.INDEX
                total += int(mix64(np.array([word % 2**64], np.uint64))[0])
            flat = query_start_loc[i] + j
            expected[flat] = (5 + total * (2 * group + 1)) % 2**64
    witness_attention(tokens, positions, table, query_start_loc, seq_lens, len(lengths), window, group, hidden)
    assert hidden.tolist() == expected


def test_mix64_is_the_splitmix_finaliser():
    """Known answer: the first outputs of splitmix64 seeded with 0 are the finaliser of multiples of its increment."""
    states = np.array([0x9E3779B97F4A7C15, 2 * 0x9E3779B97F4A7C15 % 2**64], np.uint64)
    assert [hex(int(x)) for x in mix64(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


@pytest.mark.parametrize("name", ["temperature", "gumbel"])
def test_sampling_stages_write_their_rows_only(name):
    logits = np.full((3, 4), 2.0, np.float32)
    rows, t = np.int64([1, 0, POISON]), np.float32([0.5, 0.0])
    if name == "temperature":
        out = STAGES.run("apply_temperature", expanded_idx_mapping=rows, temperature=t, num_logits=2, logits=logits)[
            "logits"
        ]
        assert out.tolist() == [[2] * 4, [4] * 4, [2] * 4]
    else:
        out = STAGES.run(
            "gumbel_sample", expanded_idx_mapping=rows, positions=np.int64([3, 4, POISON]), temperature=t,
            seeds=np.int64([5, 6]), noise="murmur3", num_logits=2, logits=logits, sampled=poisoned(3),
            faults=poisoned(3, np.int32),
        )  # fmt: skip
        assert out["faults"].tolist() == [0, 0, POISON]
        out = out["sampled"]
        assert out[0] == 0
        assert 0 <= out[1] < 4
        assert out[2] == POISON
