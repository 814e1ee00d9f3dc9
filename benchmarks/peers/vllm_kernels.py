"""Run all families of vLLM's kernels and write reports/peers/vllm_kernels.md; used by __main__.py."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path

import numpy as np
import torch

from conformance.triton_sanitizer import KernelFault, sanitize
from gpu_backend.triton_support import triton
from peers import cases_draws, cases_inputs, cases_logits, cases_masks, cases_rows, cases_tables
from peers.harness import Finding, Judge, Outcome
from peers.loader import loaded
from peers.vllm_package import PATCHES, TOP_K_TOP_P, VLLM

CASES = (cases_inputs, cases_tables, cases_logits, cases_masks, cases_draws, cases_rows)
FAMILIES = tuple(family for module in CASES for family in module.FAMILIES)

INTRODUCTION = """\
vLLM's own files, as released, with the patches listed below, run in Triton's interpreter on the CPU. Every case is run
twice. Once checked, with programs in a permuted order: bounds against each tensor's own extent, reads of memory that
nothing wrote, races between programs, lanes of one store that collide, loads of what another lane stored without a
barrier, int32 overflow, use of lanes masked off without `other`. A kind of fault that was found is let through
afterwards, so that it hides no other one. Once plainly: its values are compared with the oracle, and with those of the
checked run, which must be the same.

A finding of the checked run says what the kernel's source leaves open. It is no proof that a GPU shows it: neither the
compiler nor a GPU took part. A finding on values is arithmetic, and comes with an input to try."""

KINDS = {"value": "wrong values", "error": "does not run"}


def run(folder: Path) -> list[Outcome]:
    """Judge all families with the files that `unpack` wrote to `folder`."""
    with sanitize() as session:
        if not session.active:
            raise SystemExit(f"the sanitizer does not know triton {triton.__version__}: nothing would be checked")
    outcomes = []
    with ExitStack() as stack:
        modules = stack.enter_context(loaded(VLLM, folder))
        # Lanes that are masked off hold anything; what NumPy says on them is of no interest.
        stack.enter_context(np.errstate(all="ignore"))
        judge = Judge(modules, lambda allow, order: sanitize(poison="auto", allow=allow, order=order), KernelFault)
        for family in FAMILIES:
            outcomes.append(judge.judge(family))
            print(f"{family.title}: {outcomes[-1].cases} cases, {len(outcomes[-1].findings)} findings", flush=True)
    return outcomes


def known_rows(folder: Path) -> list[tuple[str, str, int, int]]:
    """(kernel, row, tokens an exact sort keeps, tokens kept) for the rows on which a defect was known."""
    rows = []
    with loaded(VLLM, folder, [TOP_K_TOP_P]) as modules, np.errstate(all="ignore"):
        for name, launch in (("_topk_topp_kernel", cases_masks.run_masks), ("_topp_sb_*", cases_masks.run_split)):
            for case in cases_masks.KNOWN:
                want, _ = cases_masks.exact_keep(case["logits"][0], None, float(case["p"][0]))
                have = launch(modules, case)["logits"][0] > -np.inf
                rows.append((name, cases_masks.show_masks(case), int(want.sum()), int(have.sum())))
    return rows


def page(outcomes: Sequence[Outcome], known: Sequence[tuple[str, str, int, int]], folder: Path) -> Iterator[str]:
    """The report, line by line."""
    findings = [f.wrong for o in outcomes for f in o.findings]
    groups = {(w.kernel, w.kind) for w in findings}
    yield f"# The Triton kernels of vLLM {VLLM.version}, judged without a GPU\n"
    yield (
        f"{date.today().isoformat()}; Python {platform.python_version()}, torch {torch.__version__}, triton "
        f"{triton.__version__}, NumPy {np.__version__}. Command: `make peers`. How to add a package: `docs/peers.md`.\n"
    )
    yield INTRODUCTION
    cases = sum(o.cases for o in outcomes)
    yield f"\n## Result: {len(findings)} findings, {len(groups)} by kernel and kind, in {cases} cases\n"
    yield "| what | kernels | cases | checked launches | programs | accesses | compared with | findings |"
    yield "|---|---|---|---|---|---|---|---|"
    for o in outcomes:
        kernels = ", ".join(f"`{k}`" for k in o.family.kernels)
        yield (
            f"| {o.family.title} | {kernels} | {o.cases} | {o.launches.total()} | {o.programs.total()} | {o.accesses} "
            f"| {o.family.oracle} | {len(o.findings) or 'nothing found'} |"
        )
    yield "\nBy kernel:\n\n| kernel | file | launches | programs |\n|---|---|---|---|"
    yield from by_kernel(outcomes)
    yield "\n## Findings\n"
    yield from findings_by_kernel(outcomes, folder)
    yield "## Rows on which top-p was known to be wrong\n"
    yield "| kernel | row | tokens of the exact set | tokens kept |\n|---|---|---|---|"
    for name, row, want, have in known:
        yield f"| `{name}` | {row} | {want} | {have}{'' if want == have else ': **wrong**'} |"
    yield "\n## What was compared\n"
    for o in outcomes:
        if o.notes:
            yield f"- {o.family.title}: " + "; ".join(f"{n} {what}" for what, n in sorted(o.notes.items())) + "."
    yield "\n## Patches of the source\n\nOne line each; without them the interpreter cannot run the file.\n"
    for patch in PATCHES:
        yield f"- `{patch.file}`: {patch.reason}."
    yield (
        "\n## Not judged\n\nKernels of the drafters, of watermarks, thinking budgets, prompt logprobs, Mamba and "
        "multimodal models; half precision logits; deferred verification, synthetic acceptance; compiled code."
    )


def by_kernel(outcomes: Sequence[Outcome]) -> Iterator[str]:
    seen: dict[str, tuple[str, int, int]] = {}
    for o in outcomes:
        for kernel in o.family.kernels:
            _, launches, programs = seen.get(kernel, ("", 0, 0))
            seen[kernel] = (o.family.file, launches + o.launches[kernel], programs + o.programs[kernel])
    for kernel, (file, launches, programs) in seen.items():
        yield f"| `{kernel}` | `{file}` | {launches} | {programs} |"


def findings_by_kernel(outcomes: Sequence[Outcome], folder: Path) -> Iterator[str]:
    """Findings of one kind in one kernel together, each with its smallest input; then what is to be said on them."""
    groups: dict[tuple[str, str], list[tuple[Outcome, Finding]]] = {}
    for o in outcomes:
        for finding in o.findings:
            groups.setdefault((finding.wrong.kernel, finding.wrong.kind), []).append((o, finding))
    for (kernel, kind), found in groups.items():
        yield f"### `{kernel}`: {KINDS.get(kind, kind.replace('_', ' '))}\n"
        for o, finding in found:
            yield f"- {o.family.title}, in {finding.cases} of {o.cases} cases:"
            yield f"  {finding.wrong.message.replace(f'{folder}/', '')}."
            if shown := o.family.show(finding.case):
                yield f"  Smallest input found: {shown}."
        remark = found[0][0].family.remarks.get(kind)
        yield f"\n{remark}\n" if remark else ""
