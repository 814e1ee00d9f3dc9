"""Logits processing of vLLM's V2 sampler: bias, penalties, bad words, temperature, min-p, and the top-k/top-p masks.

Oracles are short float32 formulas, evaluated in the kernels' order; the masks are held against an exact sort.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from cpu_reference.sample.min_p import apply_min_p
from peers.cases_inputs import t, unequal
from peers.harness import Arrays, Case, Family, Modules
from peers.vllm_package import BAD_WORDS, BIAS, GUMBEL, MIN_P, PENALTIES
from runner_api import load_stages

STAGES = load_stages("cpu")
F32, I32, I64 = np.float32, np.int32, np.int64
INF = np.float32(np.inf)


def draw_logits(rng: np.random.Generator, size: int, wide: int = 8300) -> Case:
    """L logits rows over N rows, from size 4 on wider than one block of the vocabulary; some already hold -inf."""
    N = size + 2
    counts = rng.integers(1, 4, int(rng.integers(1, N + 1)))
    V = wide if size >= 4 else int(rng.integers(3, 70))
    L = int(counts.sum())
    c: Case = {"N": N, "L": L, "V": V}
    c["expanded_idx_mapping"] = np.repeat(rng.permutation(N)[: len(counts)], counts).astype(I64)
    c["expanded_local_pos"] = np.concatenate([np.arange(n) for n in counts]).astype(I32)
    c["logits"] = (rng.standard_normal((L, V)) * 4).astype(F32)
    c["logits"][rng.random((L, V)) < 0.1] = -INF
    c["input_ids"] = rng.integers(0, V, L).astype(I32)
    return c


def close(want: np.ndarray, have: np.ndarray, name: str = "logits", rtol: float = 2e-6) -> str:
    """The first element that is off by more than float32 rounding, or ""."""
    with np.errstate(invalid="ignore"):
        off = np.abs(want.astype(np.float64) - have) > rtol * np.maximum(1, np.abs(want))
    wrong = np.argwhere(off | (np.isinf(want) != np.isinf(have)) | (np.isnan(want) != np.isnan(have)))
    if not len(wrong):
        return ""
    at = tuple(int(i) for i in wrong[0])
    return f"{name}[{', '.join(map(str, at))}] is {have[at]}, expected {want[at]} ({len(wrong)} elements differ)"


# --- temperature, min-p --------------------------------------------------------------------------------------------


def draw_scalars(rng: np.random.Generator, size: int) -> Case:
    c = draw_logits(rng, size)
    c["temperature"] = rng.choice(np.array([0, 1, 0.5, 0.7, 1.3], F32), c["N"])
    c["min_p"] = rng.choice(np.array([0, 0.01, 0.2, 1], F32), c["N"])
    return c


def run_temperature(modules: Modules, c: Case) -> Arrays:
    logits = t(c["logits"])
    modules[GUMBEL].apply_temperature(logits, t(c["expanded_idx_mapping"]), t(c["temperature"]))
    return {"logits": logits.numpy()}


def differ_temperature(c: Case, got: Arrays, notes: Counter[str]) -> str:
    args = {k: c[k] for k in ("expanded_idx_mapping", "temperature", "logits")}
    return close(STAGES.run("apply_temperature", num_logits=c["L"], **args)["logits"], got["logits"])


def run_min_p(modules: Modules, c: Case) -> Arrays:
    logits = t(c["logits"])
    modules[MIN_P].apply_min_p(logits, t(c["expanded_idx_mapping"]), t(c["min_p"]))
    return {"logits": logits.numpy()}


def differ_min_p(c: Case, got: Arrays, notes: Counter[str]) -> str:
    logits = c["logits"].copy()
    apply_min_p(c["expanded_idx_mapping"], c["min_p"], c["L"], logits)
    return unequal({"logits": logits}, got)


# --- allowed tokens, bias, min tokens ------------------------------------------------------------------------------


def draw_bias(rng: np.random.Generator, size: int) -> Case:
    """Allowed ids, biased ids and stop ids of every row, each list possibly empty and of its own length."""
    c = draw_logits(rng, size)
    N, V = c["N"], c["V"]
    for name, least in (("allowed", 0), ("bias", 0), ("stop", 0)):
        width = 8
        lengths = np.where(rng.random(N) < 0.4, least, rng.integers(0, min(V, width) + 1, N)).astype(I32)
        ids = np.zeros((N, width), I32)
        for row in range(N):
            ids[row, : lengths[row]] = rng.permutation(V)[: lengths[row]]
        c[f"num_{name}"], c[f"{name}_ids"] = lengths, ids
    c["bias"] = rng.standard_normal((N, 8)).astype(F32)
    c["positions"] = rng.integers(0, 9, c["L"]).astype(I64)
    c["min_lens"] = rng.integers(0, 12, N).astype(I32)
    c["restore"] = (rng.random(N) < 0.5).astype(I32)
    return c


def run_bias(modules: Modules, c: Case) -> Arrays:
    logits = t(c["logits"])
    modules[BIAS].apply_logit_bias(
        logits, t(c["expanded_idx_mapping"]), t(c["positions"]), t(c["num_allowed"]), t(c["allowed_ids"]),
        t(c["num_bias"]), t(c["bias_ids"]), t(c["bias"]), t(c["min_lens"]), t(c["num_stop"]), t(c["restore"]),
        t(c["stop_ids"]), bool(c["restore"][c["expanded_idx_mapping"]].any()),
    )  # fmt: skip
    return {"logits": logits.numpy()}


def differ_bias(c: Case, got: Arrays, notes: Counter[str]) -> str:
    logits = c["logits"].copy()
    for j, row in enumerate(c["expanded_idx_mapping"]):
        x = logits[j]
        # 1 allowed tokens only
        if n := c["num_allowed"][row]:
            keep = c["allowed_ids"][row, :n]
            kept = x[keep].copy()
            x[:] = -INF
            x[keep] = kept
        # 2 bias
        n = c["num_bias"][row]
        x[c["bias_ids"][row, :n]] += c["bias"][row, :n]
        # 3 no stop token yet, unless nothing else is left
        if (n := c["num_stop"][row]) and c["positions"][j] + 1 < c["min_lens"][row]:
            stop = c["stop_ids"][row, :n]
            was = x[stop].copy()
            x[stop] = -INF
            if c["restore"][row] and x.max() == -INF:
                x[stop] = was
    return unequal({"logits": logits}, got)


def smaller_bias(c: Case) -> Iterator[Case]:
    """One logits row, one row of parameters; then shorter lists; then as few tokens as the lists name."""
    if c["L"] > 1:
        for j in range(c["L"]):
            yield c | {"L": 1} | {k: c[k][j : j + 1] for k in ("expanded_idx_mapping", "logits", "positions")}
        return
    if c["N"] > 1:
        row = c["expanded_idx_mapping"][0]
        by_row = (
            "num_allowed",
            "allowed_ids",
            "num_bias",
            "bias_ids",
            "bias",
            "num_stop",
            "stop_ids",
            "min_lens",
            "restore",
        )
        yield c | {"N": 1, "expanded_idx_mapping": np.zeros(1, I64)} | {k: c[k][row : row + 1] for k in by_row}
        return
    lists = {name: c[f"{name}_ids"][0, : c[f"num_{name}"][0]].tolist() for name in ("allowed", "bias", "stop")}
    for name, ids in lists.items():
        for i in range(len(ids)):
            rest = np.zeros((1, c[f"{name}_ids"].shape[1]), I32)
            rest[0, : len(ids) - 1] = ids[:i] + ids[i + 1 :]
            yield c | {f"{name}_ids": rest, f"num_{name}": np.array([len(ids) - 1], I32)}
    used = sorted({i for ids in lists.values() for i in ids})
    if len(used) < c["V"] - 1:
        kept = used + [i for i in range(c["V"]) if i not in used][:1]
        number = {token: i for i, token in enumerate(kept)}
        renamed = {f"{n}_ids": np.vectorize(lambda i: number.get(i, 0))(c[f"{n}_ids"]).astype(I32) for n in lists}
        yield c | renamed | {"V": len(kept), "logits": c["logits"][:, kept]}


def show_bias(c: Case) -> str:
    rows = sorted(set(c["expanded_idx_mapping"].tolist()))
    lists = {k: {r: c[f"{k}_ids"][r, : c[f"num_{k}"][r]].tolist() for r in rows} for k in ("allowed", "bias", "stop")}
    return f"V={c['V']}, logits rows of {c['expanded_idx_mapping'].tolist()}, ids by row {lists}"


# --- penalties -----------------------------------------------------------------------------------------------------


def draw_penalties(rng: np.random.Generator, size: int) -> Case:
    c = draw_logits(rng, size)
    N, V = c["N"], c["V"]
    c["repetition"] = rng.choice(np.array([1, 1.3, 0.8], F32), N)
    c["frequency"] = rng.choice(np.array([0, 0.5, -0.25], F32), N)
    c["presence"] = rng.choice(np.array([0, 0.5], F32), N)
    M = 1100 if size >= 4 else 12
    c["prefill_len"] = rng.integers(1, M + 1, N).astype(I32)
    c["prefill_len"][0] = M
    c["prompt_len"] = np.minimum(rng.integers(1, M + 1, N), c["prefill_len"]).astype(I32)
    c["all_token_ids"] = rng.integers(0, V, (N, M)).astype(I32)
    return c


def known_counts(c: Case) -> tuple[np.ndarray, np.ndarray]:
    """in_prompt bool[N, V] and how often each token was output, int32[N, V]."""
    prompt, output = np.zeros((c["N"], c["V"]), bool), np.zeros((c["N"], c["V"]), I32)
    for row in range(c["N"]):
        prompt[row, c["all_token_ids"][row, : c["prompt_len"][row]]] = True
        np.add.at(output[row], c["all_token_ids"][row, c["prompt_len"][row] : c["prefill_len"][row]], 1)
    return prompt, output


def packed(bits: np.ndarray) -> np.ndarray:
    """bool[N, V] as int32[N, ceil(V / 32)], lowest bit first."""
    padded = np.zeros((len(bits), -(-bits.shape[1] // 32) * 32), bool)
    padded[:, : bits.shape[1]] = bits
    return np.packbits(padded, axis=1, bitorder="little").view(I32)


def run_bincount(modules: Modules, c: Case) -> Arrays:
    mask, output = t(packed(np.ones((c["N"], c["V"]), bool))), torch.full((c["N"], c["V"]), 7, dtype=torch.int32)
    rows = torch.arange(c["N"])
    args = (t(c["prompt_len"]), t(c["prefill_len"]), mask, output, int(c["prefill_len"].max()))
    modules[PENALTIES].bincount(rows, t(c["all_token_ids"]), *args)
    return {"prompt_bin_mask": mask.numpy(), "output_bin_counts": output.numpy()}


def differ_bincount(c: Case, got: Arrays, notes: Counter[str]) -> str:
    prompt, output = known_counts(c)
    return unequal({"prompt_bin_mask": packed(prompt), "output_bin_counts": output}, got)


def run_penalties(modules: Modules, c: Case) -> Arrays:
    logits, (prompt, output) = t(c["logits"]), known_counts(c)
    modules[PENALTIES].apply_penalties(
        logits, t(c["expanded_idx_mapping"]), t(c["input_ids"]), t(c["expanded_local_pos"]), t(c["repetition"]),
        t(c["frequency"]), t(c["presence"]), t(packed(prompt)), t(output),
    )  # fmt: skip
    return {"logits": logits.numpy()}


def differ_penalties(c: Case, got: Arrays, notes: Counter[str]) -> str:
    prompt, output = known_counts(c)
    logits = c["logits"].copy()
    for j, row in enumerate(c["expanded_idx_mapping"]):
        counts = output[row].copy()
        local = c["expanded_local_pos"][j]
        np.add.at(counts, c["input_ids"][j - local + 1 : j + 1], 1)
        scale = np.where(prompt[row] | (counts > 0), c["repetition"][row], F32(1))
        if c["repetition"][row] != 1:
            logits[j] *= np.where(logits[j] > 0, F32(1) / scale, scale)
        logits[j] -= c["frequency"][row] * counts.astype(F32)
        logits[j] -= c["presence"][row] * (counts > 0).astype(F32)
    return close(logits, got["logits"])


# --- bad words -----------------------------------------------------------------------------------------------------


def draw_bad_words(rng: np.random.Generator, size: int) -> Case:
    """Words of one to three tokens over a small alphabet, so that histories and drafts often match."""
    c = draw_logits(rng, size, wide=1100)
    N, most = c["N"], 4
    c["words"] = [
        [rng.integers(0, 3, int(rng.integers(1, 4))).tolist() for _ in range(rng.integers(0, most + 1))]
        for _ in range(N)
    ]
    c["words"][int(c["expanded_idx_mapping"][0])] = [[1], [0, 2]]
    c["prompt_len"] = rng.integers(1, 5, N).astype(I32)
    c["total_len"] = c["prompt_len"] + rng.integers(0, 5, N).astype(I32)
    c["all_token_ids"] = rng.integers(0, 3, (N, 16)).astype(I32)
    c["input_ids"] = rng.integers(0, 3, c["L"]).astype(I32)
    return c


def run_bad_words(modules: Modules, c: Case) -> Arrays:
    logits, N = t(c["logits"]), c["N"]
    tokens, offsets = np.zeros((N, 12), I32), np.zeros((N, 5), I32)
    for row, words in enumerate(c["words"]):
        flat = [x for w in words for x in w]
        tokens[row, : len(flat)] = flat
        offsets[row, 1 : len(words) + 1] = np.cumsum([len(w) for w in words])
    counts = np.array([len(w) for w in c["words"]], I32)
    modules[BAD_WORDS].apply_bad_words(
        logits, t(c["expanded_idx_mapping"]), t(tokens), t(offsets), t(counts), t(c["all_token_ids"]),
        t(c["prompt_len"]), t(c["total_len"]), t(c["input_ids"]), t(c["expanded_local_pos"]), int(counts.max()),
    )  # fmt: skip
    return {"logits": logits.numpy()}


def differ_bad_words(c: Case, got: Arrays, notes: Counter[str]) -> str:
    logits = c["logits"].copy()
    for j, row in enumerate(c["expanded_idx_mapping"]):
        local = c["expanded_local_pos"][j]
        output = c["all_token_ids"][row, c["prompt_len"][row] : c["total_len"][row]].tolist()
        history = output + c["input_ids"][j - local + 1 : j + 1].tolist()
        for *before, last in c["words"][row]:
            if len(before) <= len(history) and history[len(history) - len(before) :] == before:
                logits[j, last] = -INF
    return unequal({"logits": logits}, got)


def show_bad_words(c: Case) -> str:
    rows = sorted(set(c["expanded_idx_mapping"].tolist()))
    return f"logits rows of {c['expanded_idx_mapping'].tolist()}, words by row { {r: c['words'][r] for r in rows} }"


_NO_BARRIER = (
    "The kernel stores to a logits row in one step and reads it in the next with other lanes. Between its earlier "
    "steps it has barriers, here it has none. On a GPU other lanes are other threads, whose order nothing then fixes; "
    "the interpreter runs lane after lane, so that values are right here. Not tried on a GPU."
)
_SAME_VALUE = (
    "Two bad words that end in the same token are handled by two programs, and both store -inf: whoever is last, the "
    "result is the same. Harmless as it stands."
)
FAMILIES = (
    Family(
        "allowed tokens, bias, min tokens", BIAS, ("_bias_kernel",), "a NumPy formula", draw_bias, run_bias,
        differ_bias, smaller=smaller_bias, show=show_bias, remarks={"store_then_load": _NO_BARRIER},
    ),
    Family(
        "token counts", PENALTIES, ("_bincount_kernel",), "a NumPy formula", draw_penalties, run_bincount,
        differ_bincount,
    ),
    Family(
        "penalties", PENALTIES, ("_penalties_kernel",), "a NumPy formula", draw_penalties, run_penalties,
        differ_penalties,
    ),
    Family(
        "bad words", BAD_WORDS, ("_bad_words_kernel",), "a NumPy formula", draw_bad_words, run_bad_words,
        differ_bad_words, show=show_bad_words, remarks={"write_write_race": _SAME_VALUE},
    ),
    Family(
        "temperature", GUMBEL, ("_temperature_kernel",), "the NumPy reference stage", draw_scalars, run_temperature,
        differ_temperature,
    ),
    Family("min-p", MIN_P, ("_min_p_kernel",), "our min-p in NumPy", draw_scalars, run_min_p, differ_min_p),
)  # fmt: skip
