"""What surrounds a draw in vLLM's V2 runner: draft ids of logits rows, grammar masks, logprobs and ranks.

Oracles are NumPy formulas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from gpu_backend.triton_support import triton
from peers.cases_inputs import t, unequal
from peers.cases_logits import close, draw_logits, packed
from peers.harness import Arrays, Case, Family, Modules
from peers.vllm_package import GRAMMAR, LOGPROB, VERIFICATION

F32, I32, I64 = np.float32, np.int32, np.int64
INF = np.float32(np.inf)


# --- draft ids of logits rows --------------------------------------------------------------------------------------


def draw_rows(rng: np.random.Generator, size: int) -> Case:
    """Requests with up to three drafts, some of them still inside their known tokens; from size 4 on two programs."""
    R = 600 if size >= 4 else size + 1
    drafts = rng.integers(0, 4, R)
    query = drafts + 1 + rng.integers(0, 3, R)
    ends = np.cumsum(query)
    c: Case = {"R": R, "local": np.concatenate([np.arange(d + 1) for d in drafts]).astype(I32)}
    c["rows"] = np.repeat(rng.permutation(R + 2)[:R], drafts + 1).astype(I64)
    first = ends - drafts - 1
    c["logits_indices"] = (np.repeat(first, drafts + 1) + c["local"]).astype(I64)
    starts = rng.integers(0, 9, R)
    c["positions"] = np.concatenate([s + np.arange(n) for s, n in zip(starts, query, strict=True)]).astype(I64)
    c["input_ids"] = rng.integers(0, 50, int(ends[-1])).astype(I32)
    c["prefill_len"] = rng.integers(1, 12, R + 2).astype(I32)
    return c


def run_rows(modules: Modules, c: Case) -> Arrays:
    ids, positions = modules[VERIFICATION].gather_draft_sampled(
        t(c["input_ids"]), t(c["positions"]), t(c["logits_indices"]), t(c["rows"]), t(c["local"]), t(c["prefill_len"])
    )
    return {"draft_sampled": ids.numpy(), "positions": positions.numpy()}


def differ_rows(c: Case, got: Arrays, notes: Counter[str]) -> str:
    positions = c["positions"][c["logits_indices"]]
    # A draft of a request that had not sampled yet when the step began stands for nothing.
    nothing = (c["local"] > 0) & (positions - c["local"] < c["prefill_len"][c["rows"]])
    ids = np.where(nothing, -1, c["input_ids"][c["logits_indices"]]).astype(I32)
    return unequal({"draft_sampled": ids, "positions": positions}, got)


# --- grammar masks -------------------------------------------------------------------------------------------------


def draw_grammar(rng: np.random.Generator, size: int) -> Case:
    """Masks of some requests, each with K + 1 mask rows of which only the rows of its own drafts count."""
    c = draw_logits(rng, size)
    counts = np.bincount(np.cumsum(c["expanded_local_pos"] == 0) - 1)
    c["K"] = 3
    c["cu_num_logits"] = np.concatenate([[0], np.cumsum(counts)]).astype(I32)
    c["requests"] = rng.permutation(len(counts))[: int(rng.integers(1, len(counts) + 1))].astype(I32)
    c["allowed"] = rng.random((len(c["requests"]) * (c["K"] + 1), c["V"])) < 0.5
    return c


def run_grammar(modules: Modules, c: Case) -> Arrays:
    """The launch alone: the wrapper around it moves the masks by CUDA streams."""
    module, logits, width = modules[GRAMMAR], t(c["logits"]), c["K"] + 1
    rows = (c["requests"][:, None] * width + np.arange(width)).reshape(-1).astype(I32)
    bitmask, block = t(packed(c["allowed"])), module.GRAMMAR_BITMASK_BLOCK_SIZE
    module._apply_grammar_bitmask_kernel[(len(rows), triton.cdiv(c["V"], block))](
        logits, logits.stride(0), t(rows), t(c["cu_num_logits"]), bitmask, bitmask.stride(0), c["V"],
        MASK_STRIDE=width, BLOCK_SIZE=block,
    )  # fmt: skip
    return {"logits": logits.numpy()}


def differ_grammar(c: Case, got: Arrays, notes: Counter[str]) -> str:
    logits = c["logits"].copy()
    for i, request in enumerate(c["requests"]):
        first, end = c["cu_num_logits"][request : request + 2]
        for j in range(end - first):
            logits[first + j, ~c["allowed"][i * (c["K"] + 1) + j]] = -INF
    return unequal({"logits": logits}, got)


# --- logprobs and ranks --------------------------------------------------------------------------------------------


def draw_scores(rng: np.random.Generator, size: int) -> Case:
    c = draw_logits(rng, size)
    c["logits"][:, 0] = 1
    c["sampled"] = rng.integers(0, c["V"], c["L"]).astype(I64)
    c["num_logprobs"] = int(rng.integers(0, min(c["V"], 5) + 1))
    return c


def run_scores(modules: Modules, c: Case) -> Arrays:
    scores = modules[LOGPROB].compute_topk_scores(t(c["logits"]), c["num_logprobs"], t(c["sampled"]))
    ids, ranks = scores.logprob_token_ids, scores.selected_token_ranks
    return {"ids": ids.numpy(), "logprobs": scores.logprobs.numpy(), "ranks": ranks.numpy()}


def differ_scores(c: Case, got: Arrays, notes: Counter[str]) -> str:
    x = c["logits"].astype(np.float64)
    top = x.max(axis=1, keepdims=True)
    logprobs = x - top - np.log(np.exp(x - top).sum(axis=1, keepdims=True))
    own = np.take_along_axis(x, c["sampled"][:, None], axis=1)
    ranks = (x >= own).sum(axis=1)
    for j in np.flatnonzero(got["ranks"] != ranks):
        token = "a token of logit -inf" if own[j] == -INF else "a token of finite logit"
        return f"rank of {token} in row {j}: {got['ranks'][j]}, expected {ranks[j]} of {c['V']} tokens"
    return close(np.take_along_axis(logprobs, got["ids"], axis=1), got["logprobs"], "logprobs", rtol=1e-5)


def smaller_scores(c: Case) -> Iterator[Case]:
    """One row, then fewer tokens; the sampled one stays."""
    if c["L"] > 1:
        for j in range(c["L"]):
            yield c | {"L": 1, "logits": c["logits"][j : j + 1], "sampled": c["sampled"][j : j + 1]}
        return
    for start, stop in ((0, c["V"] // 2), (c["V"] // 2, c["V"]), *((v, v + 1) for v in range(c["V"]))):
        keep = np.ones(c["V"], bool)
        keep[start:stop] = False
        sampled = int(c["sampled"][0])
        if keep[sampled] and keep.sum() > 1:
            V, token = int(keep.sum()), np.array([keep[:sampled].sum()], I64)
            yield c | {"V": V, "logits": c["logits"][:, keep], "sampled": token, "num_logprobs": 0}


def show_scores(c: Case) -> str:
    return f"V={c['V']}, logits {c['logits'][0, :8].tolist()}, sampled {c['sampled'].tolist()}"


_PADDED_LANES = (
    "The kernel counts tokens of at least the sampled token's logit. Where that is -inf the lanes behind the "
    "vocabulary, which are filled with -inf, count too. A drawn token has a finite logit unless its whole row is -inf, "
    "so this is met in such rows only."
)
FAMILIES = (
    Family(
        "draft ids of logits rows", VERIFICATION, ("_gather_draft_sampled_kernel",), "a NumPy formula", draw_rows,
        run_rows, differ_rows,
    ),
    Family(
        "grammar masks", GRAMMAR, ("_apply_grammar_bitmask_kernel",), "a NumPy formula", draw_grammar, run_grammar,
        differ_grammar,
    ),
    Family(
        "logprobs and ranks", LOGPROB, ("_topk_log_softmax_kernel", "_ranks_kernel"), "a float64 formula", draw_scores,
        run_scores, differ_scores, smaller=smaller_scores, show=show_scores, remarks={"value": _PADDED_LANES},
    ),
)  # fmt: skip
