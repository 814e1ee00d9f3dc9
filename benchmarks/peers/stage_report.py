"""vLLM's kernels as stage adapters, held against our reference stages by the kit's own cases: counts, smallest inputs,
page. `make peers` writes reports/peers/vllm_stages.md with it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conformance.clauses import clause
from conformance.stage_case import KEPT, NO_ROW_SKIPPED, WHOLE, StageCase
from conformance.stage_cases import draw_cases
from conformance.stage_laws import check_stages
from gpu_backend.triton_support import triton
from peers.loader import loaded
from peers.shrink_stages import Arrays, compared_rows, joined, show, shrink
from peers.vllm_package import VLLM
from peers.vllm_stages import vllm_adapter
from runner_api import StageSet, load_stages

SEEDS = range(8)
_NO_TAIL = "vLLM makes an array of exactly so many elements: there is nothing behind them"
_NOBODY = "vLLM has no logits row without a request; the adapter leaves such a row out"
_ALL_ROWS = "vLLM counts also for rows without penalties, where nobody reads it"
# What vLLM has nothing for: (stage, clause, output), None for any; the reason.
NOT_THEIRS: tuple[tuple[tuple[str, str | None, str | None], str], ...] = (
    (("expand_idx_mapping", WHOLE, None), _NO_TAIL),
    (("combine_sampled_and_draft_tokens", WHOLE, "logits_indices"), _NO_TAIL),
    (("gumbel_sample", None, "faults"), "vLLM does not tell rows without a winner"),
    (("count_sampled_tokens", KEPT, None), _ALL_ROWS),
    (("count_sampled_tokens", NO_ROW_SKIPPED, None), _ALL_ROWS),
)
# Stages in which a row of NO_ROW is an index of the batch, which vLLM leaves out too.
SKIPS_ROWS = ("compute_slot_mappings", "post_update", "apply_trace_replay")


@dataclass(slots=True)
class Count:
    """Of one stage and clause. elements: compared; different: of these; calls: with any."""

    elements: int = 0
    different: int = 0
    calls: int = 0
    calls_different: int = 0


@dataclass(slots=True)
class Divergence:
    """One way in which a stage differs: where and how, the smallest input found, and in how many elements."""

    stage: str
    clause_id: str
    output: str
    kind: str
    arrays: Arrays
    text: str = ""
    elements: int = 0


@dataclass(slots=True)
class Result:
    counts: dict[tuple[str, str], Count] = field(default_factory=dict)
    divergences: dict[tuple[str, str, str, str], Divergence] = field(default_factory=dict)
    verdict: Counter[str] = field(default_factory=Counter)  # mismatches by clause, as the kit itself tells them
    errors: list[str] = field(default_factory=list)
    skipped: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)  # (stage, clause, output, reason)


def run(folder: Path, seeds: Sequence[int] = SEEDS) -> Result:
    """Every case of every seed on both sides. folder: where `unpack` wrote the package's files."""
    oracle, result = load_stages("cpu"), Result()
    with loaded(VLLM, folder) as modules, np.errstate(all="ignore"):
        candidate = vllm_adapter(modules).stages()
        for seed in seeds:
            for clause_id, mismatches in check_stages(candidate, oracle, seed).items():
                result.verdict[clause_id] += len(mismatches)
            for case in draw_cases(np.random.default_rng(seed), oracle):
                if case.stage in candidate.stages:
                    compare(candidate, oracle, case, result)
        for divergence in result.divergences.values():
            small = shrink(candidate, oracle, divergence.stage, divergence.output, divergence.arrays)
            divergence.text = show(candidate, oracle, divergence.stage, divergence.output, small)
    return result


def compare(candidate: StageSet, oracle: StageSet, case: StageCase, result: Result) -> None:
    want = oracle.run(case.stage, **case.arrays)
    try:
        got = candidate.run(case.stage, **case.arrays)
    except Exception as error:  # whatever a foreign launch raises is a result of this tool
        result.errors.append(f"{case.stage}: {type(error).__name__}: {error}")
        return
    for clause_id, output, mask in case.regions:
        if reason := _not_theirs(case, clause_id, output):
            result.skipped[case.stage, clause_id, output, reason] += int(mask.sum())
            continue
        mask = mask & compared_rows(case.stage, case.arrays, output, mask.shape)
        if not mask.any():
            continue
        wrong = mask & ~_equal(got[output], want[output], case.bounds.get(output))
        count = result.counts.setdefault((case.stage, clause_id), Count())
        count.elements += int(mask.sum())
        count.different += int(wrong.sum())
        count.calls += 1
        count.calls_different += bool(wrong.any())
        for at in np.argwhere(wrong):
            place = tuple(int(i) for i in at)
            side = _side(case, want[output], place) if case.stage == "apply_top_k_top_p" else ""
            _note(result, case, clause_id, output, place, side)


def _not_theirs(case: StageCase, clause_id: str, output: str) -> str | None:
    for (stage, of_clause, of_output), reason in NOT_THEIRS:
        if stage == case.stage and of_clause in (None, clause_id) and of_output in (None, output):
            return reason
    return _NOBODY if clause_id == NO_ROW_SKIPPED and case.stage not in SKIPS_ROWS else None


def _equal(got: Any, want: Any, bound: Any) -> np.ndarray:
    a, b = joined(got), joined(want)
    equal = (a == b) | ((a != a) & (b != b))
    if bound is not None:
        with np.errstate(invalid="ignore"):
            equal |= np.abs(a.astype(np.float64) - b.astype(np.float64)) <= bound
    return equal


def _side(case: StageCase, want: np.ndarray, at: tuple[int, ...]) -> str:
    """What is wrong with a set of tokens at one of them."""
    if not np.isneginf(want[at]):
        return ": a token is missing"
    logits, set_ = case.arrays["logits"], ~np.isneginf(want[at[0]])
    ties = logits[at] in logits[at[0]][set_] and not np.isposinf(logits[at[0]]).any()
    return ": a token too many" + ", that ties with one of the set" * bool(ties)


def _note(result: Result, case: StageCase, clause_id: str, output: str, at: tuple[int, ...], side: str) -> None:
    key = (case.stage, clause_id, output, kind_of(case, clause_id, at) + side)
    if key not in result.divergences:
        result.divergences[key] = Divergence(*key, case.arrays | {"at": at})
    result.divergences[key].elements += 1


def kind_of(case: StageCase, clause_id: str, at: tuple[int, ...]) -> str:
    """What two differences of one cause have in common: what is peculiar about their place."""
    if "logits" not in case.arrays:
        return "an element behind the last" if clause_id == WHOLE else ""
    row = case.arrays["logits"][at[0]]
    if np.isnan(row).any():
        return "a row that holds a NaN"
    if (row == np.inf).any():
        return "a row that holds +inf"
    if (row == -np.inf).all():
        return "a row without a token"
    if "total_len" in case.arrays and case.stage == "apply_bad_words":
        known = case.arrays["total_len"][case.arrays["expanded_idx_mapping"][at[0]]]
        return "a row whose prefill goes on" if case.arrays["positions"][at[0]] + 1 < known else "an ordinary row"
    if len(set(row[row > -np.inf].tolist())) == 1:
        return "a row of one value"
    return "a row that holds -inf" if (row == -np.inf).any() else "a row without -inf"


# -- the page -------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
Each kernel is called as vLLM calls it, in the place of one of our stages (`benchmarks/peers/vllm_stages.py`), and gets
the batches that the conformance kit gives every runner's stages (`conformance.stage_laws.check_stages`): rows in any
order, drafts, chunks, padding, garbage in every output, block ids beyond 2^27, rows of NaN. It runs in Triton's
interpreter, unchecked: what its accesses are like is in `vllm_kernels.md`. A difference is one from *our* contract;
whether vLLM needs what the contract asks for is said with it."""

_STALE = (
    "vLLM leaves behind the last token what an earlier step wrote there. Padded tokens of a captured graph compute on "
    "it; their slot is -1, so that they write nothing, and nobody reads what comes of them. Our contract asks for 0, "
    "so that a padded step is a function of its plan."
)
_PRODUCT = (
    "The kernel multiplies block number and block size as 32-bit integers. The product wraps where a cache has 2^31 "
    "slots or more: with blocks of 16 tokens from block 2^27 on. No cache of today is that large (2^31 slots of 1 KiB "
    "are 2 TiB), so nobody meets it yet."
)
_BROKEN = (
    "A row that holds a NaN, or +inf, has no distribution. Our min-p, top-k and top-p leave a row with a NaN alone, so "
    "that the draw tells it, and keep +inf, which wins; vLLM cuts such rows as if they were ordinary ones."
)
_TIES = "Tokens tie at the cut. We keep the lowest ids, as an exact sort does; vLLM keeps more of them, or all."
_BOTTOM = "The set needs the row's least likely token, which vLLM's search never keeps: see `vllm_kernels.md`."
_KNOWN = (
    "vLLM matches against every known token, also those behind the position that is computed. The draw of such a row "
    "is thrown away, so that nobody sees it."
)
_NO_WINNER = (
    "A row with a NaN has no winner: ours takes token 0 and tells an error of that request. vLLM draws some token; "
    "which one is a matter of how a maximum treats a NaN, in which a GPU may differ from the interpreter."
)
# (stage, beginning of the kind) -> what is to be said on it.
REMARKS: tuple[tuple[str, str, str], ...] = (
    ("prepare_pos_seq_lens", "", _STALE),
    ("combine_sampled_and_draft_tokens", "", _STALE),
    ("compute_slot_mappings", "", _PRODUCT),
    ("apply_min_p", "a row that holds", _BROKEN),
    ("apply_top_k_top_p", "a row that holds a NaN", _BROKEN),
    ("apply_top_k_top_p", "a row that holds +inf", _BROKEN),
    ("apply_top_k_top_p", "a row of one value", _TIES),
    ("apply_top_k_top_p", "a row that holds -inf: a token too many", _TIES),
    ("apply_top_k_top_p", "a row without -inf: a token too many", _TIES),
    ("apply_top_k_top_p", "a row that holds -inf: a token is missing", _BOTTOM),
    ("apply_top_k_top_p", "a row without -inf: a token is missing", _BOTTOM),
    ("apply_bad_words", "a row whose prefill goes on", _KNOWN),
    ("gumbel_sample", "a row that holds a NaN", _NO_WINNER),
)  # fmt: skip


def page(result: Result, seeds: Sequence[int] = SEEDS) -> Iterator[str]:
    yield f"# vLLM {VLLM.version}: its kernels as stages of ours\n"
    yield (
        f"{date.today().isoformat()}; Python {platform.python_version()}, torch {torch.__version__}, triton "
        f"{triton.__version__}, NumPy {np.__version__}. Command: `make peers`.\n"
    )
    yield INTRODUCTION
    stages = {stage for stage, _ in result.counts}
    total = sum(c.elements for c in result.counts.values())
    different = sum(c.different for c in result.counts.values())
    yield (
        f"\n## Result: {len(stages)} stages, {total} elements compared over {len(seeds)} seeds, {different} differ in "
        f"{len(result.divergences)} ways\n"
    )
    yield "| stage | clause | law | calls | elements | differ |\n|---|---|---|---|---|---|"
    for (stage, clause_id), count in sorted(result.counts.items(), key=lambda item: (_order(item[0][0]), item[0][1])):
        differ = f"**{count.different}** in {count.calls_different} calls" if count.different else "none"
        yield f"| `{stage}` | {clause_id} | {clause(clause_id).law} | {count.calls} | {count.elements} | {differ} |"
    if result.errors:
        yield "\nCalls that failed:\n"
        yield from (f"- {error}" for error in sorted(set(result.errors)))
    yield "\n## Differences\n"
    for d in result.divergences.values():
        what = f", {d.kind}" if d.kind else ""
        yield f"### `{d.stage}`, {d.output}{what}: {d.elements} elements ({d.clause_id})\n"
        yield f"{d.text}\n"
        for stage, kind, remark in REMARKS:
            if stage == d.stage and d.kind.startswith(kind):
                yield f"{remark}\n"
    yield "## Not compared\n"
    for reason, places in _by_reason(result).items():
        yield f"- {reason}: {', '.join(places)}."
    yield f"- Stages that vLLM's chosen files have no kernel for: {', '.join(f'`{s}`' for s in _not_adapted())}."
    yield "\n## What the kit says by itself\n"
    yield (
        "`check_stages` on the same adapters and seeds, which knows nothing of the exceptions above and tells at most "
        "a few mismatches of each call:\n\n| clause | law | mismatches |\n|---|---|---|"
    )
    for clause_id, n in sorted(result.verdict.items()):
        yield f"| {clause_id} | {clause(clause_id).law} | {n or 'none'} |"


def _by_reason(result: Result) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for (stage, clause_id, output, reason), elements in sorted(result.skipped.items()):
        found.setdefault(reason, []).append(f"`{stage}` {output} ({clause_id}, {elements} elements)")
    return found


def _order(stage: str) -> int:
    return list(load_stages("cpu").stages).index(stage)


def _not_adapted() -> list[str]:
    from peers.vllm_stages import STAGES

    return [name for name in load_stages("cpu").stages if name not in {fn.__name__ for fn in STAGES}]
