"""Does vLLM have the names that the recorder hooks and reads? Looked up in the wheel's source, which is not imported.

`conformance.adapters.vllm_recorder` works by name alone, and is tested against fakes with these names: this says that
the release has them too.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path

from conformance.adapters.vllm_find import INTERFACES, first_parameters
from conformance.adapters.vllm_plan import RECORDED_PARAMS, UNREAD_PARAMS

GPU, V1 = "vllm/v1/worker/gpu", "vllm/v1/worker"
PLAN = "vllm/v1/core/sched/output.py"
SIZES = ("max_num_reqs", "max_num_tokens", "max_model_len", "model_config", "speculative_config", "kv_cache_config")
# (file, class) -> attributes that the recorder reads: fields of the class, or set on self somewhere in it.
READ: dict[tuple[str, str], tuple[str, ...]] = {
    (f"{GPU}/model_runner.py", "GPUModelRunner"): (*INTERFACES["V2"][1], *SIZES, "sampler"),
    (f"{GPU}/input_batch.py", "InputBatch"): (
        "req_ids", "num_reqs", "num_reqs_after_padding", "num_tokens", "num_tokens_after_padding", "idx_mapping",
        "query_start_loc", "seq_lens", "input_ids", "positions", "logits_indices", "cu_num_logits",
        "num_scheduled_tokens", "expanded_idx_mapping", "expanded_local_pos", "num_draft_tokens_per_req",
    ),
    (f"{GPU}/states.py", "RequestState"): ("free_indices", "req_id_to_index", "draft_tokens"),
    (f"{GPU}/block_table.py", "BlockTables"): ("block_sizes",),
    (f"{GPU}/sample/states.py", "SamplingStates"): ("seeds",),
    (f"{GPU}/sample/sampler.py", "Sampler"): ("sampling_states",),
    (f"{GPU}/sample/output.py", "SamplerOutput"): (
        "sampled_token_ids", "num_sampled", "num_rejected", "logprobs_tensors",
    ),
    ("vllm/v1/outputs.py", "LogprobsTensors"): ("logprob_token_ids", "logprobs", "selected_token_ranks"),
    ("vllm/v1/outputs.py", "SamplerOutput"): ("sampled_token_ids", "logprobs_tensors"),
    (f"{V1}/gpu_model_runner.py", "GPUModelRunner"): (
        *INTERFACES["V1"][1], *SIZES, "positions", "input_ids", "discard_request_mask",
    ),
    (f"{V1}/gpu_input_batch.py", "InputBatch"): ("num_reqs", "req_ids", "block_table"),
    (f"{V1}/block_table.py", "BlockTable"): ("slot_mapping",),
    (PLAN, "NewRequestData"): (
        "req_id", "prompt_token_ids", "prefill_token_ids", "sampling_params", "block_ids", "num_computed_tokens",
        "mm_features", "pooling_params", "lora_request", "prompt_embeds",
    ),
    (PLAN, "CachedRequestData"): (
        "req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens",
    ),
    (PLAN, "SchedulerOutput"): (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens", "finished_req_ids", "preempted_req_ids", "scheduled_encoder_inputs",
        "kv_connector_metadata", "ec_connector_metadata",
    ),
}  # fmt: skip
HOOKED = {"V2": (f"{GPU}/model_runner.py", "GPUModelRunner"), "V1": (f"{V1}/gpu_model_runner.py", "GPUModelRunner")}
PARAMS = ("vllm/sampling_params.py", "SamplingParams")
# Parameters that the recorder refuses where they are set.
REFUSED = frozenset({"structured_outputs", "extra_args", "thinking_token_budget", "watermarking"})


def missing_names(wheel: Path) -> list[str]:
    """What the recorder needs and the wheel has not, each in a line; and sampling parameters nobody decided on."""
    with zipfile.ZipFile(wheel) as archive:
        files = {file for file, _ in READ} | {PARAMS[0]}
        trees = {file: ast.parse(archive.read(file).decode()) for file in files}
    classes = {
        (f, node.name): node for f, tree in trees.items() for node in tree.body if isinstance(node, ast.ClassDef)
    }
    return [*_missing_reads(classes), *_missing_methods(classes), *_undecided(classes)]


Classes = dict[tuple[str, str], ast.ClassDef]


def _missing_reads(classes: Classes) -> Iterator[str]:
    for (file, name), wanted in READ.items():
        node = classes.get((file, name))
        if node is None:
            yield f"{file} has no class {name}"
            continue
        held = _attributes(node)
        yield from (f"{file}: {name} has no {attribute}" for attribute in wanted if attribute not in held)


def _missing_methods(classes: Classes) -> Iterator[str]:
    for interface, place in HOOKED.items():
        node = classes.get(place)
        methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)} if node else {}
        for method in INTERFACES[interface][0]:
            if method not in methods:
                yield f"{place[0]}: {place[1]} has no method {method}"
        for method, parameter in first_parameters(interface).items():
            given = [a.arg for a in methods[method].args.args[1:2]] if method in methods else [parameter]
            if given != [parameter]:
                yield f"{place[0]}: {method} takes {given}, not {parameter}"


def _undecided(classes: Classes) -> Iterator[str]:
    for name in sorted(_fields(classes[PARAMS]) - RECORDED_PARAMS.keys() - UNREAD_PARAMS - REFUSED):
        yield f"{PARAMS[0]}: nobody has decided on {name}; it is refused where it is set"


def _fields(node: ast.ClassDef) -> set[str]:
    return {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def _attributes(node: ast.ClassDef) -> set[str]:
    """Annotated fields, properties, and whatever is assigned to self."""
    stored = {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and getattr(n.value, "id", "") == "self"
    }
    return _fields(node) | stored | {n.name for n in node.body if isinstance(n, ast.FunctionDef) and _is_property(n)}


def _is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id in ("property", "cached_property") for d in node.decorator_list)


def page(missing: list[str]) -> Iterator[str]:
    """A section for a page: what was looked for and what was not found."""
    names = sum(map(len, READ.values())) + sum(len(INTERFACES[i][0]) for i in HOOKED)
    yield "\n## Names that the recorder of `docs/record-vllm.md` hooks and reads\n"
    if not missing:
        yield f"All {names} are in the wheel, and every sampling parameter is recorded, refused, or read by no runner."
    yield from (f"- {line}." for line in missing)
