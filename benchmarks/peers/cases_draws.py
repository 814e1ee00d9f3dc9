"""Draws of vLLM's V2 sampler: the top-k/top-p masks, Gumbel-max sampling and the verification of drafts.

The masks are held against an exact sort, draws against float64 formulas on the same random words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from cpu_reference.sample.gumbel import gumbel_scores
from cpu_reference.sample.noise import gumbel_noise, philox4x32, uniforms
from peers.cases_inputs import t
from peers.cases_logits import draw_logits
from peers.harness import Arrays, Case, Family, Modules
from peers.vllm_package import GUMBEL, REJECTION, TOP_K_TOP_P

F32, I32, I64 = np.float32, np.int32, np.int64
INF = np.float32(np.inf)

# --- top-k and top-p -----------------------------------------------------------------------------------------------

# The widest step of the searches at their end, as a share of the largest probability (18 halvings).
BAND = 2.0**-17


def draw_masks(rng: np.random.Generator, size: int, use_k: bool, use_p: bool) -> Case:
    """Rows of random width and spread, most without -inf, none with all tokens tied, with k and p over their range."""
    L = 2 * size
    V = int(rng.integers(2, 40)) if size < 4 else 700
    c: Case = {"L": L, "V": V}
    c["logits"] = (rng.standard_normal((L, V)) * rng.choice([0.5, 2, 6], (L, 1))).astype(F32)
    for row in c["logits"]:
        if rng.random() < 0.3:  # what allowed tokens, a grammar or min-p leave: a few tokens
            row[rng.permutation(V)[int(rng.integers(1, V)) :]] = -INF
        elif rng.random() < 0.3:  # half precision logits tie often
            row[:] = row.astype(np.float16) if rng.random() < 0.5 else np.round(row)
    c["k"] = np.minimum(rng.integers(1, V + 3, L), V).astype(I32) if use_k else None
    c["p"] = rng.choice(np.array([0.05, 0.3, 0.5, 0.9, 0.99, 1], F32), L) if use_p else None
    return c


def masked_row(probabilities: list[float], p: float, vocab_size: int) -> Case:
    """A row that holds these probabilities and -inf everywhere else."""
    logits = np.full((1, vocab_size), -INF, F32)
    logits[0, : len(probabilities)] = np.log(np.array(probabilities)).astype(F32)
    return {"L": 1, "V": vocab_size, "logits": logits, "k": None, "p": np.array([p], F32)}


# Rows after allowed tokens, a grammar mask or min-p on which vLLM 0.26 was seen to drop too much.
KNOWN = (masked_row([0.6838, 0.3162], 0.99, 16), masked_row([0.5853, 0.2208, 0.1939], 0.9, 16))


def run_masks(modules: Modules, c: Case) -> Arrays:
    module = modules[TOP_K_TOP_P]
    module._TRITON_BUFFER_CACHE.clear()
    k, p = (None if c[x] is None else t(c[x]) for x in ("k", "p"))
    logits = module.apply_top_k_top_p_triton(t(c["logits"]), k, p)
    return {"logits": logits.numpy()}


def run_split(modules: Modules, c: Case) -> Arrays:
    """The pipeline of small batches, which the wrapper takes on CUDA tensors only."""
    module, logits = modules[TOP_K_TOP_P], t(c["logits"])
    module._TRITON_SPLIT_CACHE.clear()
    module._apply_topp_split(logits, None, t(c["p"]), float("-inf"), 4 * c["L"])
    return {"logits": logits.numpy()}


def exact_keep(x: np.ndarray, k: int | None, p: float | None) -> tuple[np.ndarray, float]:
    """What an exact sort keeps, bool[V], and how near the cut is to another one (difference in mass)."""
    order = np.argsort(-x, kind="stable")
    order = order[x[order] > -INF]
    kept = order if k is None else order[:k]
    near = 1.0
    if p is not None and p < 1:
        y = x[kept].astype(np.float64)
        mass = np.exp(y - y[0])
        before = np.concatenate([[0.0], np.cumsum(mass / mass.sum())[:-1]])
        near = float(np.abs(before - np.float64(p)).min())
        kept = kept[before < p]
    return np.isin(np.arange(len(x)), kept), near


def differ_masks(c: Case, got: Arrays, notes: Counter[str]) -> str:
    for j, x in enumerate(c["logits"]):
        k = None if c["k"] is None else int(c["k"][j])
        p = None if c["p"] is None else float(c["p"][j])
        want, near = exact_keep(x, k, p)
        have = got["logits"][j] > -INF
        if (have == want).all():
            notes["rows equal to the exact sort"] += 1
            if (got["logits"][j][have] != x[have]).any():
                return f"changed the value of a kept token in row {j}"
            continue
        finite = x[x > -INF].astype(np.float64)
        probability = np.exp(x.astype(np.float64) - finite.max())
        probability /= probability.sum()
        disputed = probability[have != want]
        # the least likely token that both keep: what the search could not tell from it is no fault
        edge = probability[want & have].min(initial=1)
        mass = probability[have].sum()
        if p is not None and p < 1 and (near < 1e-5 or (np.abs(disputed - edge) <= BAND * probability.max()).all()):
            notes["rows that differ within the resolution of the search"] += 1
            continue
        if p is not None and p < 1 and len(set(finite.tolist())) == 1:
            notes["rows of one value, kept whole"] += 1
            continue
        side = "drops a token that belongs to the set" if (want & ~have).any() else "keeps a token too many"
        holes = "that holds -inf" if (x == -INF).any() else "without -inf"
        asked = ", ".join(f"{n} {v:g}" for n, v in (("top_k", k), ("top_p", p)) if v is not None)
        return (
            f"{side}, in a row {holes}: {asked} makes {int(want.sum())} tokens, {int(have.sum())} are kept, of mass "
            f"{mass:.6f}; the likeliest wrong one has probability {disputed.max():.6f}"
        )
    return ""


def smaller_masks(c: Case) -> Iterator[Case]:
    """One row; then fewer tokens; then shorter numbers."""
    if c["L"] > 1:
        for j in range(c["L"]):
            yield c | {"L": 1} | {x: None if c[x] is None else c[x][j : j + 1] for x in ("logits", "k", "p")}
        return
    V = c["V"]
    for width in (V // 2, V // 4, 1):
        for start in range(0, V, max(width, 1)):
            keep = np.ones(V, bool)
            keep[start : start + width] = False
            if 0 < keep.sum() < V:
                logits = c["logits"][:, keep]
                if (logits > -INF).sum() > 1:
                    fewer = V - logits.shape[1]
                    for less in (0, fewer) if c["k"] is not None else (0,):
                        k = None if c["k"] is None else np.clip(c["k"] - less, 1, logits.shape[1])
                        yield c | {"V": logits.shape[1], "logits": logits, "k": k}
    for digits in (1, 2):
        short = np.round(c["logits"], digits)
        if (short != c["logits"]).any():
            yield c | {"logits": short}


def show_masks(c: Case) -> str:
    parts = []
    for j, x in enumerate(c["logits"][:1]):
        finite = x > -INF
        probability = np.exp(x[finite].astype(np.float64) - x[finite].max())
        probability /= probability.sum()
        shown = [str(v) for v in x[finite][:8]]
        more = "" if finite.sum() <= 8 else f" and {finite.sum() - 8} more"
        holes = f", -inf in {int((~finite).sum())} others" if (~finite).any() else ""
        parts.append(f"logits [{', '.join(shown)}{more}]{holes}")
        parts.append(f"probabilities {np.round(probability[:8], 4).tolist()}{more}")
        parts += [f"top_{n} = {c[n][j]:g}" for n in ("k", "p") if c[n] is not None]
    return "; ".join(parts)


# --- Gumbel-max ----------------------------------------------------------------------------------------------------


def draw_gumbel(rng: np.random.Generator, size: int) -> Case:
    c = draw_logits(rng, size, wide=2100)
    c["logits"][:, 0] = 1  # no row without a token
    c["temperature"] = rng.choice(np.array([0, 1, 0.6], F32), c["N"])
    c["seeds"] = rng.integers(-(2**63), 2**63 - 1, c["N"])
    c["positions"] = rng.integers(0, 2**20, c["L"])
    c["apply"] = bool(rng.random() < 0.5)
    return c


def run_gumbel(modules: Modules, c: Case) -> Arrays:
    sampled = modules[GUMBEL].gumbel_sample(
        t(c["logits"]), t(c["expanded_idx_mapping"]), t(c["temperature"]), t(c["seeds"]), t(c["positions"]),
        apply_temperature=c["apply"], is_drafting=False,
    )  # fmt: skip
    return {"sampled": sampled.numpy()}


def differ_gumbel(c: Case, got: Arrays, notes: Counter[str]) -> str:
    logits, rows = c["logits"].copy(), c["expanded_idx_mapping"]
    if c["apply"]:
        T = c["temperature"][rows]
        logits /= np.where(T == 0, F32(1), T)[:, None]
    scores = gumbel_scores(rows, c["positions"], c["temperature"], c["seeds"], "murmur3", c["L"], logits)
    return _unlikely(scores, got["sampled"], notes)


def _unlikely(scores: np.ndarray, tokens: np.ndarray, notes: Counter[str], slack: float = 2e-5) -> str:
    """Says which token is not the best of its row, unless rounding explains it."""
    best = scores.argmax(axis=1)
    for j, (token, want) in enumerate(zip(tokens.tolist(), best.tolist(), strict=True)):
        if token == want:
            notes["tokens equal"] += 1
        elif scores[j, want] - scores[j, token] <= slack:
            notes["tokens that tie within rounding"] += 1
        else:
            return (
                f"drew token {token} in row {j}, expected {want}: scores {scores[j, token]:.6f}, {scores[j, want]:.6f}"
            )
    return ""


# --- verification of drafts ----------------------------------------------------------------------------------------


def draw_drafts(rng: np.random.Generator, size: int, with_draft_logits: bool, block: bool) -> Case:
    """Requests with up to K drafts, greedy and random, some drafts placeholders; the drafts are likely tokens."""
    N, K = size + 2, int(rng.integers(1, 4))
    R = int(rng.integers(1, N + 1))
    V = {1: 5, 2: 40, 3: 1100}.get(size, 8300)
    drafts = rng.integers(0, K + 1, R)
    c: Case = {"N": N, "K": K, "R": R, "V": V, "block": block}
    c["cu_num_logits"] = np.concatenate([[0], np.cumsum(drafts + 1)]).astype(I32)
    c["idx_mapping"] = rng.permutation(N)[:R].astype(I64)
    c["rows"] = np.repeat(c["idx_mapping"], drafts + 1)
    c["local"] = np.concatenate([np.arange(d + 1) for d in drafts]).astype(I32)
    L = c["L"] = int(drafts.sum()) + R
    c["logits"] = (rng.standard_normal((L, V)) * rng.choice([2, 8], (L, 1))).astype(F32)
    c["logits"][rng.random((L, V)) < 0.1] = -INF
    c["logits"][:, 0] = 1
    c["draft_logits"] = (rng.standard_normal((N, K, V)) * 2).astype(F32) if with_draft_logits else None
    c["temperature"] = rng.choice(np.array([0, 1, 0.8], F32), N)
    c["seeds"], c["positions"] = rng.integers(-(2**63), 2**63 - 1, N), rng.integers(0, 2**20, L)
    likely = np.argsort(-c["logits"], axis=1)[:, : min(3, V)]
    c["draft_sampled"] = np.zeros(L, I32)
    for j in range(1, L):
        if c["local"][j]:
            c["draft_sampled"][j] = likely[j - 1, int(rng.integers(0, 3)) // 2] if rng.random() < 0.9 else -1
    return c


def run_drafts(modules: Modules, c: Case) -> Arrays:
    sampled, counts = modules[REJECTION].rejection_sample(
        t(c["logits"]), None if c["draft_logits"] is None else t(c["draft_logits"]), t(c["draft_sampled"]),
        t(c["cu_num_logits"]), t(c["positions"]), t(c["idx_mapping"]), t(c["rows"]), t(c["local"]),
        t(c["temperature"]), t(c["seeds"]), c["K"], use_block_verification=c["block"],
    )  # fmt: skip
    beyond = torch.arange(c["K"] + 1)[None] >= counts[:, None]
    return {"sampled": sampled.masked_fill(beyond, -1).numpy(), "num_sampled": counts.numpy()}


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    top = x.max()
    return x - top - np.log(np.exp(x - top).sum())


def _uniform(seed: int, position: int) -> float:
    words = philox4x32(np.array([seed], I64).view(np.uint64), np.array([position], I64).view(np.uint64))
    return float(uniforms(words, "philox")[0])


def _request(c: Case, i: int) -> tuple[list[int], np.ndarray, float]:
    """What request i emits before its last token, the scores of that one, float64[V], and the tightest decision."""
    first, drafts = int(c["cu_num_logits"][i]), int(np.diff(c["cu_num_logits"])[i]) - 1
    row = int(c["idx_mapping"][i])
    T, seed = float(c["temperature"][row]), int(c["seeds"][row])
    x = c["draft_sampled"][first + 1 : first + 1 + drafts].tolist()
    log_p = [_log_softmax(c["logits"][first + j]) for j in range(drafts + 1)]
    q_logits = None if c["draft_logits"] is None else c["draft_logits"][row]
    log_q = [None if q_logits is None or T == 0 else _log_softmax(q_logits[j] / F32(T)) for j in range(drafts)]
    if T == 0:
        accepted = 0
        while accepted < drafts and x[accepted] == int(log_p[accepted].argmax()):
            accepted += 1
        return x[:accepted], c["logits"][first + accepted].astype(np.float64), 1.0
    accepted, tight, ratio = (_block if c["block"] else _one_by_one)(c, i, x, log_p, log_q)
    scores = log_p[accepted].copy()
    if accepted < drafts and x[accepted] >= 0:
        if log_q[accepted] is None:
            scores[x[accepted]] = -np.inf
        else:
            rest = np.exp(scores + ratio) - np.exp(log_q[accepted])
            scores = np.where(rest > 0, np.log(np.maximum(rest, 1e-300)), -np.inf)
    noise = gumbel_noise(np.array([seed]), c["positions"][first + accepted : first + accepted + 1], c["V"], "murmur3")
    return x[:accepted], scores + noise[0], tight


Decision = tuple[int, float, float]  # drafts accepted, tightest margin, log of the joint ratio at the rejected one


def _one_by_one(c: Case, i: int, x: list[int], log_p: list[np.ndarray], log_q: list[Any]) -> Decision:
    """Leviathan et al. 2023: accept draft j while p(x) > u q(x)."""
    first, seed = int(c["cu_num_logits"][i]), int(c["seeds"][c["idx_mapping"][i]])
    tight = 1.0
    for j, token in enumerate(x):
        if token < 0:
            return j, tight, 0.0
        u = _uniform(seed, int(c["positions"][first + j]))
        margin = log_p[j][token] - (0.0 if log_q[j] is None else log_q[j][token]) - np.log(u)
        tight = min(tight, abs(margin))
        if margin <= 0:
            return j, tight, 0.0
    return len(x), tight, 0.0


def _block(c: Case, i: int, x: list[int], log_p: list[np.ndarray], log_q: list[Any]) -> Decision:
    """Sun et al. 2024: the longest prefix whose joint ratio passes its own test."""
    first, seed = int(c["cu_num_logits"][i]), int(c["seeds"][c["idx_mapping"][i]])
    valid = next((j for j, token in enumerate(x) if token < 0), len(x))
    joint, accepted, tight = [0.0], 0, 1.0
    for j in range(valid):
        q = 0.0 if log_q[j] is None else log_q[j][x[j]]
        joint.append(min(joint[-1] + log_p[j][x[j]] - q, 0.0))
    for j in range(valid):
        ratio = np.exp(joint[j + 1])
        h = ratio
        if j + 1 < valid:
            p = np.exp(log_p[j + 1])
            rest = ratio * (1 - p[x[j + 1]])
            if log_q[j + 1] is not None:
                rest = np.maximum(ratio * p - np.exp(log_q[j + 1]), 0).sum()
            h = rest / (rest + 1 - ratio) if rest + 1 - ratio > 0 else 1.0
        # Each draft of a block has a seed of its own: its number is mixed into the high half.
        u = _uniform(seed ^ (j << 32), int(c["positions"][first + j]))
        tight = min(tight, abs(h - u))
        if u <= h:
            accepted = j + 1
    return accepted, tight, joint[accepted]


def differ_drafts(c: Case, got: Arrays, notes: Counter[str]) -> str:
    for i in range(c["R"]):
        before, scores, tight = _request(c, i)
        n = int(got["num_sampled"][i])
        tokens = got["sampled"][i, :n].tolist()
        if tight < 1e-5:
            notes["requests not compared: a decision within rounding"] += 1
            continue
        if n != len(before) + 1 or tokens[:-1] != before:
            return f"request {i} emitted {tokens}, expected {before} and one more"
        if message := _unlikely(scores[None], np.array(tokens[-1:]), notes):
            return f"request {i}: {message}"
        notes[f"requests with {len(before)} drafts accepted"] += 1
    return ""


def show_drafts(c: Case) -> str:
    names = ("V", "cu_num_logits", "idx_mapping", "draft_sampled", "temperature")
    return ", ".join(f"{n}={np.asarray(c[n]).tolist()}" for n in names)


_BOTTOM = (
    "What these rows have in common: the set needs the least likely token that is not -inf. The search for the cut "
    "starts at that token's own value and keeps what lies above the cut, so this token is never among them. In a whole "
    "vocabulary it hardly matters; in a row of a few tokens, as allowed tokens, a grammar, min-p or top-k leave it, a "
    "likely token is lost. It is arithmetic on comparisons, in which nothing is peculiar to the interpreter; the tiles "
    "are those that the wrapper takes on a CPU (256 and 128 wide, on CUDA 8192 and 4096). By its wrapper, vLLM on CUDA "
    "takes this kernel for every batch with top-k, and for top-p alone above 64 rows; below, the kernels `_topp_sb_*`."
)
_BUFFER = (
    "One lane stores an outlier to the scratch buffer, another one reads it, with no barrier in the kernel's source "
    "between the two. On a GPU other lanes are other threads; the interpreter runs them in order, so that values are "
    "right here. What the compiler puts in between was not looked at, and it was not tried on a GPU."
)


def _masks(title: str, kernels: tuple[str, ...], k: bool, p: bool, run: Any = run_masks, **more: Any) -> Family:
    return Family(
        title, TOP_K_TOP_P, kernels, "an exact sort", lambda rng, size: draw_masks(rng, size, k, p), run,
        differ_masks,
        smaller=smaller_masks, show=show_masks, remarks={"value": _BOTTOM, "store_then_load": _BUFFER}, **more,
    )  # fmt: skip


def _drafts(title: str, logits: bool, block: bool) -> Family:
    kernels = [
        "_compute_local_logits_stats_kernel",
        "_rejection_kernel",
        "_resample_kernel",
        "_insert_resampled_kernel",
    ]
    kernels += ["_compute_cumulative_log_p_kernel"] * block + ["_compute_local_residual_mass_kernel"] * (
        block and logits
    )
    return Family(
        title, REJECTION, tuple(kernels), "a float64 formula on the same random words",
        lambda rng, size: draw_drafts(rng, size, logits, block), run_drafts, differ_drafts, show=show_drafts,
    )  # fmt: skip


SPLIT = ("_topp_sb_stats_kernel", "_topp_sb_step_kernel", "_topp_sb_mask_kernel")
FAMILIES = (
    _masks("top-k", ("_topk_topp_kernel",), True, False),
    _masks("top-p, one program a row", ("_topk_topp_kernel",), False, True, fixed=KNOWN),
    _masks("top-k and top-p", ("_topk_topp_kernel",), True, True),
    _masks("top-p, several programs a row", SPLIT, False, True, run_split, fixed=KNOWN, repeats=2),
    Family(
        "Gumbel-max", GUMBEL, ("_gumbel_sample_kernel",), "our noise in float64", draw_gumbel, run_gumbel, differ_gumbel
    ),
    _drafts("drafts, point mass", False, False),
    _drafts("drafts, with draft logits", True, False),
    _drafts("drafts in blocks, point mass", False, True),
    _drafts("drafts in blocks, with draft logits", True, True),
)  # fmt: skip
