"""Every faulty kernel is found out, by kind, kernel, line and argument, and every correct twin passes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

from faulty_kernels import CASES, Case

from conformance.triton_sanitizer import FaultKind, KernelFault, check_order_independence, sanitize
from gpu_backend.triton_support import INTERPRETED

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not INTERPRETED, reason="kernels are judged in the interpreter"),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def judge(case: Case, kernel: Any) -> None:
    """With every check on; what depends on the order only shows when it is changed."""
    with sanitize() as session:
        case.launch(kernel, session)
    if case.kind == FaultKind.ORDER_DEPENDENCE:
        check_order_independence(lambda: case.launch(kernel, None), seeds=range(4))


@each_case
def test_a_fault_is_found(case: Case) -> None:
    with pytest.raises(KernelFault) as raised:
        judge(case, case.faulty)
    fault = raised.value
    assert fault.kind == case.kind
    assert fault.where.kernel == case.faulty.__name__
    assert fault.where.source.endswith("# fault")
    assert fault.argument == case.argument
    assert f"{fault.where.file}:{fault.where.line}: {fault.where.source}" in str(fault)


@each_case
def test_a_correct_twin_passes(case: Case) -> None:
    judge(case, case.correct)


@each_case
@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_correct_twin_passes_in_another_order(case: Case, order: int) -> None:
    with sanitize(order=order) as session:
        case.launch(case.correct, session)
        assert session.accesses


def test_there_are_several_cases_of_each_kind() -> None:
    assert len(CASES) >= 30
    assert len({case.name for case in CASES}) == len(CASES)
    for kind in FaultKind:
        assert sum(case.kind == kind for case in CASES) >= 3


@pytest.mark.parametrize(
    ("name", "program", "index", "extent", "other"),
    [
        ("mask_of_one_axis_only", (1, 0, 0), 140, 140, None),
        ("placeholder_slot_written", (3, 0, 0), -16, 128, None),
        ("past_a_tensor_behind_a_table", (1, 0, 0), 16, 16, None),
        ("key_after_the_last", (0, 0, 0), 5, 32, None),
        ("tiles_overlap", (1, 0, 0), 31, 70, (0, 0, 0)),
        ("shifted_in_place", (1, 0, 0), 32, 70, (0, 0, 0)),
    ],
)
def test_a_report_says_which_element_and_which_program(
    name: str, program: tuple[int, ...], index: int, extent: int, other: tuple[int, ...] | None
) -> None:
    case = next(case for case in CASES if case.name == name)
    with pytest.raises(KernelFault) as raised:
        judge(case, case.faulty)
    fault = raised.value
    assert (fault.program, fault.index, fault.extent, fault.other) == (program, index, extent, other)
    assert f"{case.argument}[{index}] of {extent} elements" in str(fault)
