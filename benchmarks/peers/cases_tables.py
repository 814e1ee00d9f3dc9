"""Block tables and slot mappings of vLLM's V2 runner, against our reference stages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from peers.cases_inputs import I32, I64, STAGES, draw_batch, stage_arguments, stage_family, t, unequal
from peers.harness import Arrays, Case, Modules
from peers.vllm_package import TABLES


def draw_tables(rng: np.random.Generator, size: int) -> Case:
    """Tables of one to three groups, a batch over them and the dirty rows of an earlier one."""
    c = draw_batch(rng, size)
    groups = int(rng.integers(1, 4))
    c["block_sizes"] = rng.choice([1, 2, 8, 16], groups).tolist() if size < 4 else [1] * groups
    widths = [-(-c["M"] // b) for b in c["block_sizes"]]
    c["block_tables"] = [rng.integers(1, 999, (c["N"], w)).astype(I32) for w in widths]
    c["num_blocks"] = np.stack([rng.integers(1, w + 1, c["N"]) for w in widths]).astype(I32)
    c["window_reach"] = rng.choice([0, 3, 9], groups).tolist()
    c["enabled"] = (rng.random(groups) < 0.8).tolist()
    c["rows"] = int(rng.integers(c["R"], c["N"] + 1))
    # a request of a captured graph that owns no row
    c["slot_rows"] = np.where(rng.random(c["R"]) < 0.2, -1, c["idx_mapping"])
    c["cp"] = 1
    return c


def draw_sharded(rng: np.random.Generator, size: int) -> Case:
    """As `draw_tables`, with the KV of each request spread over several ranks."""
    c = draw_tables(rng, size)
    c["cp"], c["interleave"] = int(rng.choice([2, 4])), int(rng.choice([1, 2]))
    c["block_sizes"] = [int(rng.choice([2, 8])) for _ in c["block_sizes"]]
    c["rank"], c["sharded"] = int(rng.integers(0, c["cp"])), (rng.random(len(c["block_sizes"])) < 0.7).tolist()
    c["block_tables"] = [rng.integers(1, 999, (c["N"], -(-c["M"] // b))).astype(I32) for b in c["block_sizes"]]
    return c


def _tables(modules: Modules, c: Case) -> Any:
    more = {"cp_size": c["cp"], "cp_rank": c["rank"], "cp_interleave": c["interleave"]} if c["cp"] > 1 else {}
    tables = modules[TABLES].BlockTables(
        c["block_sizes"], c["N"], c["T"], [x.shape[1] for x in c["block_tables"]], "cpu",
        slot_mapping_enabled=c["enabled"], sliding_window_reach=c["window_reach"],
        dcp_sharded=c.get("sharded"), **more,
    )  # fmt: skip
    for table, values in zip(tables.block_tables, c["block_tables"], strict=True):
        table.gpu.copy_(t(values))
    tables.block_table_ptrs.points_to = [x.gpu for x in tables.block_tables]
    tables.input_block_table_ptrs.points_to = tables.input_block_tables
    tables.num_blocks.np[:] = c["num_blocks"]
    tables.num_blocks.copy_to_uva()
    for out in tables.input_block_tables:
        out.fill_(-7)
    tables.slot_mappings.fill_(-7)
    return tables


def run_gather(modules: Modules, c: Case) -> Arrays:
    tables = _tables(modules, c)
    tables.gather_block_tables(t(c["idx_mapping"]), c["rows"], num_computed_tokens=t(c["num_computed_tokens"]))
    return {f"table {g}": x.numpy() for g, x in enumerate(tables.input_block_tables)}


def differ_gather(c: Case, got: Arrays, notes: Counter[str]) -> str:
    names = ("num_computed_tokens", "num_blocks", "block_sizes", "window_reach", "block_tables")
    out = [np.full_like(x, -7) for x in c["block_tables"]]
    out = STAGES.run("gather_block_tables", **stage_arguments(c, *names, num_rows=c["rows"], input_block_tables=out))
    return unequal({f"table {g}": x for g, x in enumerate(out["input_block_tables"])}, got)


def _positions(c: Case) -> np.ndarray:
    out = {"positions": np.zeros(c["T"], I64), "seq_lens": np.zeros(c["N"], I32)}
    return STAGES.run("prepare_pos_seq_lens", **stage_arguments(c, "query_start_loc", "num_computed_tokens", **out))[
        "positions"
    ]


def run_slots(modules: Modules, c: Case) -> Arrays:
    tables = _tables(modules, c)
    tables.compute_slot_mappings(t(c["slot_rows"]), t(c["query_start_loc"]), t(_positions(c)), c["T"])
    return {"slot_mappings": tables.slot_mappings.numpy()}


def differ_slots(c: Case, got: Arrays, notes: Counter[str]) -> str:
    names = ("query_start_loc", "block_sizes", "block_tables")
    out = np.zeros((len(c["block_sizes"]), c["T"]), I64)
    args = stage_arguments(c, *names, positions=_positions(c), slot_mapping_enabled=c["enabled"], slot_mappings=out)
    args |= {"dcp_sharded": c["enabled"], "dcp_size": 1, "dcp_rank": 0, "dcp_interleave": 1}
    args["idx_mapping"][: c["R"]] = c["slot_rows"]
    return unequal(STAGES.run("compute_slot_mappings", **args), got)


def differ_sharded_slots(c: Case, got: Arrays, notes: Counter[str]) -> str:
    """Token by token: who owns a position, and where its owner keeps it."""
    slots = np.full((len(c["block_sizes"]), c["T"]), -1, I64)
    positions = _positions(c)
    for g, size in enumerate(c["block_sizes"]):
        for i, row in enumerate(c["slot_rows"]):
            for k in range(c["query_start_loc"][i], c["query_start_loc"][i + 1]):
                p = int(positions[k])
                if c["sharded"][g]:
                    lap, within = divmod(p, c["interleave"] * c["cp"])
                    if within // c["interleave"] != c["rank"]:
                        continue
                    p = lap * c["interleave"] + within % c["interleave"]
                if c["enabled"][g] and row >= 0:
                    slots[g, k] = int(c["block_tables"][g][row, p // size]) * size + p % size
    return unequal({"slot_mappings": slots}, got)


FAMILIES = (
    stage_family(
        "block table gather", TABLES, ("_gather_block_tables_kernel",), draw_tables, run_gather, differ_gather
    ),
    stage_family("slot mappings", TABLES, ("_compute_slot_mappings_kernel",), draw_tables, run_slots, differ_slots),
    stage_family(
        "slot mappings, context parallel", TABLES, ("_compute_slot_mappings_kernel",), draw_sharded, run_slots,
        differ_sharded_slots, oracle="a formula, token by token",
    ),
)  # fmt: skip
