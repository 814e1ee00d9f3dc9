"""The top-k and top-p masks of vLLM's sampler, against an exact sort."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from peers.cases_inputs import t
from peers.harness import Arrays, Case, Family, Modules
from peers.vllm_package import TOP_K_TOP_P

F32, I32 = np.float32, np.int32
INF = np.float32(np.inf)

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


SPLIT = ("_topp_sb_stats_kernel", "_topp_sb_step_kernel", "_topp_sb_mask_kernel")
FAMILIES = (
    _masks("top-k", ("_topk_topp_kernel",), True, False),
    _masks("top-p, one program a row", ("_topk_topp_kernel",), False, True, fixed=KNOWN),
    _masks("top-k and top-p", ("_topk_topp_kernel",), True, True),
    _masks("top-p, several programs a row", SPLIT, False, True, run_split, fixed=KNOWN, repeats=2),
)  # fmt: skip
