"""Draws of vLLM's V2 sampler: Gumbel-max and the verification of drafts, against float64 on the same random words."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from cpu_reference.sample.gumbel import gumbel_scores
from cpu_reference.sample.noise import gumbel_noise, philox4x32, uniforms
from peers.cases_inputs import t
from peers.cases_logits import draw_logits
from peers.harness import Arrays, Case, Family, Modules
from peers.vllm_package import GUMBEL, REJECTION

F32, I32, I64 = np.float32, np.int32, np.int64
INF = np.float32(np.inf)

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


FAMILIES = (
    Family(
        "Gumbel-max", GUMBEL, ("_gumbel_sample_kernel",), "our noise in float64", draw_gumbel, run_gumbel, differ_gumbel
    ),
    _drafts("drafts, point mass", False, False),
    _drafts("drafts, with draft logits", True, False),
    _drafts("drafts in blocks, point mass", False, True),
    _drafts("drafts in blocks, with draft logits", True, True),
)  # fmt: skip
