"""Staged writes and input preparation of vLLM's V2 runner, against our reference stages.

Tails that vLLM leaves as they were and our stages define are not compared.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from peers.harness import Arrays, Case, Family, Modules
from peers.vllm_package import BUFFERS, INPUTS
from runner_api import load_stages

STAGES = load_stages("cpu")
I32, I64 = np.int32, np.int64


def t(array: np.ndarray) -> torch.Tensor:
    """A tensor with a copy of the array, so that a case can be run again."""
    return torch.from_numpy(np.ascontiguousarray(array).copy())


def unequal(expected: Arrays, got: Arrays) -> str:
    """The first element in which two sets of arrays differ, or ""."""
    for name, want in expected.items():
        have = np.asarray(got[name])
        if have.shape != want.shape:
            return f"{name} has shape {have.shape}, expected {want.shape}"
        wrong = np.argwhere((have != want) & ~((have != have) & (want != want)))
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            return (
                f"{name}[{', '.join(map(str, at))}] is {have[at]}, expected {want[at]} ({len(wrong)} elements differ)"
            )
    return ""


# --- staged writes -------------------------------------------------------------------------------------------------


def draw_writes(rng: np.random.Generator, size: int) -> Case:
    """Runs that never overlap: each (group, row) is written at most once. From size 4 on a run needs two programs."""
    groups = int(rng.integers(1, 4)) if size > 1 else 1
    width = 1500 if size >= 4 else 8 * size
    rows = size + 2
    case: Case = {
        "width": width,
        "rows": rows,
        "dtype": "int32" if groups > 1 else str(rng.choice(["int32", "int64", "float32"])),
    }
    case["tables"] = [rng.integers(0, 99, (rows, width)).astype(case["dtype"]) for _ in range(groups)]
    case["writes"] = []
    for g in range(groups):
        for row in rng.permutation(rows)[: rng.integers(1, rows + 1)].tolist():
            start = int(rng.integers(0, width))
            values = rng.integers(-99, 99, int(rng.integers(1, width - start + 1)))
            case["writes"].append((g, row, start, values.tolist()))
    return case


def run_writes(modules: Modules, case: Case) -> Arrays:
    buffers = modules[BUFFERS]
    dtype = getattr(torch, case["dtype"])
    tensors = [buffers.StagedWriteTensor((case["rows"], case["width"]), dtype, "cpu") for _ in case["tables"]]
    for tensor, table in zip(tensors, case["tables"], strict=True):
        tensor.gpu.copy_(t(table))
    for group, row, start, values in case["writes"]:
        tensors[group].stage_write(row, start, values)
    if len(tensors) == 1:
        tensors[0].apply_write()
    else:
        pointers = torch.tensor([x.gpu.data_ptr() for x in tensors], dtype=torch.uint64)
        pointers.points_to = [x.gpu for x in tensors]  # for the sanitizer, which sees addresses otherwise
        strides = torch.tensor([x.gpu.stride(0) for x in tensors])
        buffers.FusedStagedWriter("cpu", len(tensors) * case["rows"]).apply(tensors, pointers, strides)
    return {f"table {g}": x.gpu.numpy() for g, x in enumerate(tensors)}


def differ_writes(case: Case, got: Arrays, notes: Counter[str]) -> str:
    expected = {}
    for g, table in enumerate(case["tables"]):
        mine = [w for w in case["writes"] if w[0] == g]
        out = STAGES.run(
            "apply_staged_writes",
            indices=np.array([w[1] for w in mine], I32),
            starts=np.array([w[2] for w in mine], I32),
            contents=np.array([x for w in mine for x in w[3]], table.dtype),
            cu_lens=np.cumsum([len(w[3]) for w in mine]).astype(I32),
            num_writes=len(mine),
            base=table,
        )
        expected[f"table {g}"] = out["base"]
    return unequal(expected, got)


# --- input preparation ---------------------------------------------------------------------------------------------


def draw_batch(rng: np.random.Generator, size: int) -> Case:
    """Rows in the middle of prefill and of decode, with drafts, as a step meets them. At size 4 one chunk is long."""
    N, K, V = size + 3, int(rng.integers(1, 4)), 4 if size < 4 else 64
    R = int(rng.integers(max(1, size - 1), N + 1))
    long = size >= 4
    M = 2600 if long else 24
    c: Case = {"N": N, "R": R, "K": K, "M": M, "V": V, "lookahead": int(rng.integers(1, 4))}
    c["idx_mapping"] = rng.permutation(N)[:R].astype(I64)
    c["prefill_len"] = rng.integers(1, M // 2, N).astype(I32)
    c["prompt_len"] = np.minimum(c["prefill_len"], rng.integers(1, M // 2, N)).astype(I32)
    c["num_computed_tokens"] = np.zeros(N, I32)
    c["total_len"] = c["prefill_len"].copy()
    drafts, lengths = np.zeros(R, I32), np.zeros(R, I32)
    for i, row in enumerate(c["idx_mapping"]):
        prefill = int(c["prefill_len"][row])
        if rng.random() < 0.5:  # decode
            c["num_computed_tokens"][row] = prefill + int(rng.integers(0, 4))
            c["total_len"][row] = c["num_computed_tokens"][row] + 1
            drafts[i] = rng.integers(0, K + 1)
            lengths[i] = drafts[i] + 1
        else:  # prefill, the last one perhaps with placeholder drafts behind it
            done = 0 if long and i == 0 else int(rng.integers(0, prefill))
            c["num_computed_tokens"][row] = done
            left = prefill - done
            if rng.random() < 0.3:
                drafts[i] = rng.integers(0, K + 1)
                lengths[i] = left + drafts[i]
            else:
                lengths[i] = rng.integers(1, left + 1)
    if long:
        row = c["idx_mapping"][0]
        c["prefill_len"][row] = c["total_len"][row] = 1200
        c["num_computed_tokens"][row], lengths[0], drafts[0] = 7, 1100, 0
    T = int(lengths.sum()) + int(rng.integers(0, 5))
    c["T"], c["t"] = T, int(lengths.sum())
    c["query_start_loc"] = np.full(N + 1, c["t"], I32)
    c["query_start_loc"][0] = 0
    c["query_start_loc"][1 : R + 1] = np.cumsum(lengths)
    c["cu_num_logits"] = np.concatenate([[0], np.cumsum(drafts + 1)]).astype(I32)
    c["L"] = int(c["cu_num_logits"][-1])
    c["all_token_ids"] = rng.integers(1, V, (N, M)).astype(I32)
    c["last_sampled_tokens"] = rng.integers(1, V, N).astype(I64)
    c["draft_tokens"] = rng.integers(1, V, (N, K)).astype(I64)
    c["input_ids"] = rng.integers(1, V, T).astype(I32)
    c["seq_lens"] = np.zeros(N, I32)
    c["seq_lens"][:R] = c["num_computed_tokens"][c["idx_mapping"]] + lengths
    sampled = np.minimum(rng.integers(1, K + 2, R), drafts + 1)
    c["num_sampled"] = sampled.astype(I32)
    c["sampled_token_ids"] = rng.integers(0, V, (R, K + 1)).astype(I64)
    c["output_bin_counts"] = rng.integers(0, 3, (N, V)).astype(I32)
    return c


def show_batch(c: Case) -> str:
    names = ["R", "K", "V", "idx_mapping", "query_start_loc", "num_computed_tokens", "prefill_len", "cu_num_logits"]
    names += ["num_sampled", "sampled_token_ids"]
    return ", ".join(f"{n}={np.asarray(c[n]).tolist()}" for n in names)


def run_prefill(modules: Modules, c: Case) -> Arrays:
    ids, following = t(c["input_ids"]), torch.zeros((c["lookahead"], c["N"]), dtype=torch.int32)
    modules[INPUTS].prepare_prefill_inputs(
        ids, following, t(c["idx_mapping"]), t(c["query_start_loc"]), t(c["all_token_ids"]), t(c["prefill_len"]),
        t(c["num_computed_tokens"]),
    )  # fmt: skip
    return {"input_ids": ids.numpy(), "next_prefill_tokens": following.numpy()}


def stage_arguments(c: Case, *names: str, **more: Any) -> dict[str, Any]:
    """Arguments for a reference stage; idx_mapping in full width."""
    args = {n: c[n] for n in names} | {"num_reqs": c["R"]} | more
    args["idx_mapping"] = np.concatenate([c["idx_mapping"], np.full(c["N"] - c["R"], -1, I64)])
    return args


def differ_prefill(c: Case, got: Arrays, notes: Counter[str]) -> str:
    names = ("query_start_loc", "all_token_ids", "prefill_len", "num_computed_tokens", "input_ids")
    following = np.zeros((c["lookahead"], c["N"]), I32)
    return unequal(
        STAGES.run("prepare_prefill_inputs", **stage_arguments(c, *names, next_prefill_tokens=following)), got
    )


def run_positions(modules: Modules, c: Case) -> Arrays:
    positions, seq_lens = torch.full((c["T"],), -7), torch.full((c["N"],), -7, dtype=torch.int32)
    modules[INPUTS].prepare_pos_seq_lens(
        t(c["idx_mapping"]), t(c["query_start_loc"]), t(c["num_computed_tokens"]), positions, seq_lens
    )
    return {"positions": positions[: c["t"]].numpy(), "seq_lens": seq_lens.numpy()}


def differ_positions(c: Case, got: Arrays, notes: Counter[str]) -> str:
    out = {"positions": np.zeros(c["T"], I64), "seq_lens": np.zeros(c["N"], I32)}
    out = STAGES.run("prepare_pos_seq_lens", **stage_arguments(c, "query_start_loc", "num_computed_tokens", **out))
    return unequal({"positions": out["positions"][: c["t"]], "seq_lens": out["seq_lens"]}, got)


def run_expand(modules: Modules, c: Case) -> Arrays:
    rows, local = modules[INPUTS].expand_idx_mapping(t(c["idx_mapping"]), c["L"], t(c["cu_num_logits"]), c["K"] + 1)
    return {"expanded_idx_mapping": rows.numpy(), "expanded_local_pos": local.numpy()}


def expanded(c: Case) -> Arrays:
    """Each logits row's row and local position, from the reference."""
    out = {"expanded_idx_mapping": np.zeros(c["L"], I64), "expanded_local_pos": np.zeros(c["L"], I32)}
    return STAGES.run("expand_idx_mapping", **stage_arguments(c, "cu_num_logits", **out))


def differ_expand(c: Case, got: Arrays, notes: Counter[str]) -> str:
    return unequal(expanded(c), got)


def run_combine(modules: Modules, c: Case) -> Arrays:
    ids = t(c["input_ids"])
    indices = modules[INPUTS].combine_sampled_and_draft_tokens(
        ids, t(c["idx_mapping"]), t(c["last_sampled_tokens"]), t(c["query_start_loc"]), t(c["seq_lens"]),
        t(c["prefill_len"]), t(c["draft_tokens"]), t(c["cu_num_logits"]), c["L"],
    )  # fmt: skip
    return {"input_ids": ids[: c["t"]].numpy(), "logits_indices": indices.numpy()}


def differ_combine(c: Case, got: Arrays, notes: Counter[str]) -> str:
    names = ("query_start_loc", "seq_lens", "prefill_len", "last_sampled_tokens", "draft_tokens", "cu_num_logits")
    args = stage_arguments(c, *names, "input_ids", logits_indices=np.zeros(c["L"], I64))
    out = STAGES.run("combine_sampled_and_draft_tokens", **args)
    return unequal({"input_ids": out["input_ids"][: c["t"]], "logits_indices": out["logits_indices"]}, got)


def run_counts(modules: Modules, c: Case) -> Arrays:
    sampled, rejected = modules[INPUTS].get_num_sampled_and_rejected(
        t(c["num_sampled"]), t(c["seq_lens"]), t(c["cu_num_logits"]), t(c["idx_mapping"]), t(c["prefill_len"])
    )
    return {"num_sampled": sampled.numpy(), "num_rejected": rejected.numpy()}


def counts(c: Case) -> Arrays:
    args = stage_arguments(
        c, "seq_lens", "prefill_len", "cu_num_logits", "num_sampled", num_rejected=np.zeros(c["R"], I32)
    )
    return STAGES.run("count_sampled_and_rejected", **args)


def differ_counts(c: Case, got: Arrays, notes: Counter[str]) -> str:
    return unequal(counts(c), got)


def run_post_update(modules: Modules, c: Case) -> Arrays:
    n = counts(c)
    out = {k: t(c[k]) for k in ("num_computed_tokens", "last_sampled_tokens", "all_token_ids", "total_len")}
    bins, drafts = t(c["output_bin_counts"]), t(c["draft_tokens"])
    modules[INPUTS].post_update(
        t(c["idx_mapping"]), out["num_computed_tokens"], out["last_sampled_tokens"], bins, t(c["sampled_token_ids"]),
        t(n["num_sampled"]), t(n["num_rejected"]), t(c["query_start_loc"]), out["all_token_ids"], out["total_len"],
        t(c["draft_tokens"][: c["R"]] + 1), drafts,
    )  # fmt: skip
    return {k: v.numpy() for k, v in (out | {"output_bin_counts": bins, "draft_tokens": drafts}).items()}


def differ_post_update(c: Case, got: Arrays, notes: Counter[str]) -> str:
    n = counts(c)
    names = ("query_start_loc", "sampled_token_ids", "last_sampled_tokens", "total_len", "all_token_ids")
    expected = STAGES.run("post_update", **stage_arguments(c, *names, "num_computed_tokens", **n))
    # Token counts and drafts have no stage of ours: every sampled token adds one, every draft row is replaced.
    bins, drafts = c["output_bin_counts"].copy(), c["draft_tokens"].copy()
    for i, row in enumerate(c["idx_mapping"]):
        np.add.at(bins[row], c["sampled_token_ids"][i, : n["num_sampled"][i]], 1)
        drafts[row] = c["draft_tokens"][i] + 1
    return unequal(expected | {"output_bin_counts": bins, "draft_tokens": drafts}, got)


def run_advance(modules: Modules, c: Case) -> Arrays:
    computed = t(c["num_computed_tokens"])
    modules[INPUTS].post_update_num_computed_tokens(t(c["idx_mapping"]), computed, t(c["query_start_loc"]))
    return {"num_computed_tokens": computed.numpy()}


def differ_advance(c: Case, got: Arrays, notes: Counter[str]) -> str:
    computed = c["num_computed_tokens"].copy()
    computed[c["idx_mapping"]] += np.diff(c["query_start_loc"])[: c["R"]]
    return unequal({"num_computed_tokens": computed}, got)


_ONE_WARP = (
    "A request that draws the same token twice in one step: the count is stored, then read again by the next turn of "
    "the loop, both as scalars. The launch asks for one warp, which the sanitizer does not take into account; threads "
    "of one warp that run together keep this order."
)


def stage_family(
    title: str, file: str, kernels: tuple[str, ...], draw: Any, run: Any, differ: Any, **more: Any
) -> Family:
    oracle = more.pop("oracle", "the NumPy reference stage")
    return Family(title, file, kernels, oracle, draw, run, differ, **more)


def _input(title: str, kernel: str, run: Any, differ: Any, **more: Any) -> Family:
    return stage_family(title, INPUTS, (kernel,), draw_batch, run, differ, show=show_batch, **more)


FAMILIES = (
    stage_family("staged writes", BUFFERS, ("_apply_write_kernel",), draw_writes, run_writes, differ_writes),
    _input("prefill copy", "_prepare_prefill_inputs_kernel", run_prefill, differ_prefill),
    _input("positions and lengths", "_prepare_pos_seq_lens_kernel", run_positions, differ_positions),
    _input("expanded rows", "_expand_idx_mapping_kernel", run_expand, differ_expand),
    _input("sampled and draft tokens", "_combine_sampled_and_draft_tokens_kernel", run_combine, differ_combine),
    _input("sampled and rejected counts", "_get_num_sampled_and_rejected_kernel", run_counts, differ_counts),
    _input(
        "state after sampling", "_post_update_kernel", run_post_update, differ_post_update,
        oracle="the NumPy reference stage; counts and drafts: a NumPy formula", remarks={"store_then_load": _ONE_WARP},
    ),
    _input(
        "state after a step without sampling", "_post_update_num_computed_tokens_kernel", run_advance, differ_advance,
        oracle="a NumPy formula",
    ),
)  # fmt: skip
