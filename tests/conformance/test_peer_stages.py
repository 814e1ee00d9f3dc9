"""vLLM's kernels as stages of ours, without vLLM: adapters on stand-ins, the report on candidates of known faults."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gpu_backend.triton_support")  # chooses where kernels run, before anything imports triton

from conformance.stage_cases import draw_cases
from conformance.stage_laws import check_stages
from runner_api import Capability, StageSet, StageSpec, load_stages
from runner_api.partial import StageAdapter

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OURS = load_stages("cpu")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("stage_report", "shrink_stages", "vllm_stages", "vllm_package")
    return SimpleNamespace(**{name: importlib.import_module(f"peers.{name}") for name in names})


def with_fault(name: str, fault: Any) -> StageSet:
    """Our stages, one of them followed by `fault(arrays)`."""
    spec = OURS.stages[name]

    def fn(**arrays: Any) -> None:
        spec.fn(**arrays)
        fault(arrays)

    return StageSet("faulty", {**OURS.stages, name: StageSpec(name, fn, spec.inputs, spec.outputs)})


def judged(peers: Any, candidate: StageSet) -> Any:
    result = peers.stage_report.Result()
    for case in draw_cases(np.random.default_rng(0), OURS):
        peers.stage_report.compare(candidate, OURS, case, result)
    return result


def smallest(peers: Any, candidate: StageSet, result: Any) -> Any:
    (found,) = result.divergences.values()
    return found, peers.shrink_stages.shrink(candidate, OURS, found.stage, found.output, found.arrays)


# -- the report -----------------------------------------------------------------------------------------------


def test_equal_stages_agree_everywhere(peers: Any) -> None:
    result = judged(peers, OURS)
    assert not result.divergences
    assert not result.errors
    assert {stage for stage, _ in result.counts} == set(OURS.stages)
    assert sum(count.elements for count in result.counts.values()) > 5000
    assert all(count.different == 0 < count.calls for count in result.counts.values())


def test_a_wrapping_slot_is_shrunk_to_one_token(peers: Any) -> None:
    def wrap(arrays: Any) -> None:
        arrays["slot_mappings"][:] = arrays["slot_mappings"].astype(np.int32)

    candidate = with_fault("compute_slot_mappings", wrap)
    result = judged(peers, candidate)
    assert {(clause, count.different > 0) for (_, clause), count in result.counts.items() if count.different} == {
        ("MR-STAGE-005", True), ("MR-DCP-008", True),
    }  # fmt: skip
    for found in result.divergences.values():
        small = peers.shrink_stages.shrink(candidate, OURS, found.stage, found.output, found.arrays)
        assert small["slot_mappings"].shape == (1, 1)
        assert small["num_reqs"] == len(small["idx_mapping"]) == len(small["block_tables"]) == 1
        table, size = small["block_tables"][0], small["block_sizes"][0]
        assert table.shape[0] == 1
        assert table[0, -1] * np.int64(size) >= 2**31
        text = peers.shrink_stages.show(candidate, OURS, found.stage, found.output, small)
        assert re_number(text, "block_tables") == table.tolist()


def re_number(text: str, name: str) -> Any:
    """The value that a line of the report tells for an array in a list of one."""
    told = text.split(f"{name} = [", 1)[1].split("]]", 1)[0] + "]]"
    return np.array(eval(told)).tolist()


def test_a_stale_tail_is_shrunk_to_one_request(peers: Any) -> None:
    def stale(arrays: Any) -> None:
        arrays["positions"][arrays["query_start_loc"][arrays["num_reqs"]] :] = 5

    candidate = with_fault("prepare_pos_seq_lens", stale)
    found, small = smallest(peers, candidate, judged(peers, candidate))
    assert (found.clause_id, found.kind) == ("MR-STAGE-001", "an element behind the last")
    assert len(small["idx_mapping"]) == small["num_reqs"] == 1
    assert len(small["positions"]) == small["query_start_loc"][1] + 1
    assert small["at"] == (len(small["positions"]) - 1,)


def test_a_token_too_many_is_shrunk_to_few_tokens(peers: Any) -> None:
    def keep_all_best(arrays: Any) -> None:
        logits, original = arrays["logits"], kept["logits"]
        for i in range(arrays["num_logits"]):
            if arrays["expanded_idx_mapping"][i] >= 0 and np.isfinite(original[i].max()):
                best = original[i] == original[i].max()
                logits[i, best] = original[i, best]

    kept: dict[str, Any] = {}
    spec = OURS.stages["apply_top_k_top_p"]

    def fn(**arrays: Any) -> None:
        kept["logits"] = arrays["logits"].copy()
        spec.fn(**arrays)
        keep_all_best(arrays)

    candidate = StageSet("faulty", {spec.name: StageSpec(spec.name, fn, spec.inputs, spec.outputs)})
    result = peers.stage_report.Result()
    for seed in range(3):
        for case in draw_cases(np.random.default_rng(seed), OURS):
            if case.stage == spec.name:
                peers.stage_report.compare(candidate, OURS, case, result)
    assert result.divergences
    for found in result.divergences.values():
        assert "that ties with one of the set" in found.kind
        small = peers.shrink_stages.shrink(candidate, OURS, found.stage, found.output, found.arrays)
        assert small["logits"].shape[0] == 1
        assert small["logits"].shape[1] <= 3
        assert list(small["logits"][0]).count(small["logits"].max()) >= 2


def test_a_stage_that_raises_is_told(peers: Any) -> None:
    def fail(arrays: Any) -> None:
        raise ZeroDivisionError("no such row")

    result = judged(peers, with_fault("apply_min_p", fail))
    assert set(result.errors) == {"apply_min_p: ZeroDivisionError: no such row"}
    assert ("apply_min_p", "MR-STAGE-003") not in result.counts


def test_the_page_tells_counts_differences_and_what_was_left_out(peers: Any) -> None:
    result = judged(peers, with_fault("expand_idx_mapping", lambda a: a["expanded_local_pos"].__setitem__(0, 7)))
    for found in result.divergences.values():
        found.text = "`expanded_local_pos[0]` is 7, ours 0."
    page = "\n".join(peers.stage_report.page(result, range(1)))
    assert "| `expand_idx_mapping` | MR-STAGE-003 |" in page
    assert "### `expand_idx_mapping`, expanded_local_pos: 1 elements (MR-STAGE-003)" in page
    assert "there is nothing behind them: `combine_sampled_and_draft_tokens` logits_indices (MR-STAGE-001," in page


# -- the adapters ---------------------------------------------------------------------------------------------


def test_the_adapter_is_a_runner_of_stages_alone(peers: Any) -> None:
    adapter = peers.vllm_stages.vllm_adapter({})
    assert isinstance(adapter, StageAdapter)
    assert adapter.info.capabilities == {Capability.STAGES, Capability.FLOAT32}
    listed = adapter.stages().stages
    assert len(listed) == len(peers.vllm_stages.STAGES) == 23
    for name, spec in listed.items():
        assert (spec.inputs, spec.outputs) == (OURS.stages[name].inputs, OURS.stages[name].outputs)


def test_exceptions_name_stages_and_outputs_that_there_are(peers: Any) -> None:
    for (stage, _, output), reason in peers.stage_report.NOT_THEIRS:
        assert output is None or output in OURS.stages[stage].outputs
        assert reason
    assert {stage for stage, _, _ in peers.stage_report.REMARKS} <= set(OURS.stages)


def stand_ins(package: Any) -> dict[str, Any]:
    """Some of vLLM's functions with their parameters, as loops over requests."""

    def prepare_pos_seq_lens(
        idx_mapping: Any, query_start_loc: Any, num_computed_tokens: Any, pos: Any, lens: Any
    ) -> None:
        lens[:] = 0
        for i, row in enumerate(idx_mapping):
            start, end = query_start_loc[i], query_start_loc[i + 1]
            for k in range(start, end):
                pos[k] = num_computed_tokens[row] + k - start
            lens[i] = num_computed_tokens[row] + end - start

    def expand_idx_mapping(idx_mapping: Any, total: int, cu_num_logits: Any, most: int) -> tuple[Any, Any]:
        import torch

        counts = cu_num_logits.diff().long()
        assert counts.max() <= most
        local = torch.cat([torch.arange(int(n)) for n in counts])
        return idx_mapping.repeat_interleave(counts), local.int()[:total]

    def get_num_sampled_and_rejected(sampled: Any, seq_lens: Any, cu: Any, idx_mapping: Any, prefill_len: Any) -> Any:
        rejected = sampled.clone()
        for i, row in enumerate(idx_mapping):
            sampled[i] = 0 if seq_lens[i] < prefill_len[row] else sampled[i]
            rejected[i] = 0 if sampled[i] == 0 else cu[i + 1] - cu[i] - sampled[i]
        return sampled, rejected

    def apply_temperature(logits: Any, rows: Any, temperature: Any) -> None:
        for x, row in zip(logits, rows, strict=True):
            if temperature[row] not in (0, 1):
                x /= temperature[row]

    inputs = SimpleNamespace(
        prepare_pos_seq_lens=prepare_pos_seq_lens, expand_idx_mapping=expand_idx_mapping,
        get_num_sampled_and_rejected=get_num_sampled_and_rejected,
    )  # fmt: skip
    return {package.INPUTS: inputs, package.GUMBEL: SimpleNamespace(apply_temperature=apply_temperature)}


def test_stand_ins_pass_through_the_adapters(peers: Any) -> None:
    names = ("prepare_pos_seq_lens", "expand_idx_mapping", "count_sampled_and_rejected", "apply_temperature")
    stages = peers.vllm_stages.vllm_stages(stand_ins(peers.vllm_package))
    some = StageSet(stages.backend, {n: stages.stages[n] for n in names}, stages.to_device, stages.to_host)
    found = check_stages(some, OURS, 0)
    assert found["MR-STAGE-003"] == found["MR-STAGE-002"] == found["MR-STAGE-009"] == []
    # What vLLM leaves behind the last element is left.
    assert {m.field for m in found["MR-STAGE-001"]} == {
        "prepare_pos_seq_lens.positions", "expand_idx_mapping.expanded_idx_mapping",
        "expand_idx_mapping.expanded_local_pos",
    }  # fmt: skip


# -- names of the recorder ------------------------------------------------------------------------------------


def wheel_with(names: Any, folder: Path, without: str = "", parameter: str = "") -> Path:
    """A wheel of classes that have what the recorder needs. without: an attribute or method to leave out; parameter:
    what `prepare_attn` takes instead."""
    files: dict[str, list[str]] = {}
    for (file, name), attributes in names.READ.items():
        lines = [f"class {name}:", "    pass"] + [f"    {a}: int" for a in attributes if a != without]
        for interface, place in names.HOOKED.items():
            if place == (file, name):
                taken = names.first_parameters(interface)
                for method in names.INTERFACES[interface][0]:
                    first = parameter if parameter and method == "prepare_attn" else taken.get(method, "x")
                    lines += [] if method == without else [f"    def {method}(self, {first}): ..."]
        files.setdefault(file, []).extend(lines)
    params = [*names.RECORDED_PARAMS, *names.UNREAD_PARAMS, *names.REFUSED]
    files[names.PARAMS[0]] = [f"class {names.PARAMS[1]}:", *(f"    {p}: int" for p in params if p != without)]
    if without == "nothing":
        files[names.PARAMS[0]].append("    brand_new: int")
    path = folder / "vllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, lines in files.items():
            archive.writestr(file, "\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),
        ({"without": "free_indices"}, ["RequestState has no free_indices"]),
        ({"without": "prepare_attn"}, ["GPUModelRunner has no method prepare_attn"]),
        ({"parameter": "batch"}, ["prepare_attn takes ['batch'], not input_batch"]),
        ({"without": "nothing"}, ["nobody has decided on brand_new; it is refused where it is set"]),
    ],
    ids=["all there", "an attribute", "a method", "a parameter", "a new sampling parameter"],
)
def test_a_name_that_the_recorder_lacks_is_told(peers: Any, tmp_path: Path, change: Any, told: list[str]) -> None:
    names = importlib.import_module("peers.recorder_names")
    missing = names.missing_names(wheel_with(names, tmp_path, **change))
    assert [line.split(": ", 1)[-1] for line in missing] == told
    page = "\n".join(names.page(missing))
    assert ("are in the wheel" in page) == (not told)
    assert all(line in page for line in missing)
