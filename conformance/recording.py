"""From a recording of vLLM to what a runner may see of it: how it is built, its model, and one ReplayStep a step.

A ReplayStep holds copies of the plan, the padded shape and the outcome to impose; the recorded batch itself, which
the runner is judged by, stays here. Knows the recordings' `meta`; knows nothing of judging.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from conformance.foreign import RAISED, let_go
from conformance.harness import info_of
from conformance.replay_layout import batch_order, plans_for
from runner_api import (
    BatchDescriptor,
    Capability,
    CapabilityError,
    CheckpointError,
    ConfigError,
    ForcedStep,
    KVCacheConfig,
    KVCacheGroup,
    ModelRunner,
    PlanError,
    RunnerConfig,
    RunnerError,
    RunnerFactory,
    RunnerInfo,
    SchedulerOutput,
    StepRecord,
    Trace,
    TraceError,
    UnknownNameError,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
)
from runner_api.errors import safely
from runner_api.loader import call_factory
from runner_api.trace_vllm import RECORDED_LAYOUTS

DATA = Path(__file__).parent / "data"
RECORDINGS = DATA / "recordings"
CHECKPOINTS = DATA / "checkpoints"
LOGITS_SOURCES = ("auto", "recorded", "model")
# Which hash the recorded program drew its random numbers from, by the version in meta.source.
NOISE_BY_VERSION = {"0.26": "philox", "0.33": "murmur3"}
WITNESS_VOCAB_SIZE = 512


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """All that a runner gets of one recorded step.

    forced is None where the step scheduled no tokens. req_ids: whose rows these are, where the runner's batch has
    another order than the recorded one. Nothing in here is shared with the record it came from.
    """

    plan: SchedulerOutput
    descriptor: BatchDescriptor | None
    forced: ForcedStep | None
    req_ids: tuple[str, ...] | None = None

    def forced_for(self, record: StepRecord) -> ForcedStep | None:
        """The outcome in the batch order that the runner tells between its two calls.

        Raises PlanError if that order is not one of the step's requests.
        """
        if self.forced is None or self.req_ids is None:
            return self.forced
        order = batch_order(self.req_ids, record.req_ids)
        if order is None:
            raise PlanError(
                "not the requests of the step", field="req_ids", got=record.req_ids, expected=sorted(self.req_ids)
            )
        forced = self.forced
        logits = None if forced.logits is None else forced.logits[order]
        return ForcedStep(forced.token_ids[order], forced.num_sampled[order], None, logits)

    @classmethod
    def from_record(
        cls,
        record: StepRecord,
        num_speculative_tokens: int = 0,
        next_drafts: Mapping[str, Sequence[int]] | None = None,
        logits: np.ndarray | None = None,
    ) -> ReplayStep:
        """Copy plan, shape and outcome out of a record.

        next_drafts: by request, the drafts that its row must hold when it is next scheduled. logits: float32[L, V] to
        draw from instead of the model's. Raises `TraceError` if the recorded outcome has not one entry per request.
        """
        plan = copy.deepcopy(record.plan)
        if record.num_reqs == 0:
            return cls(plan, None, None)
        r, k = record.num_reqs, num_speculative_tokens
        if record.num_sampled.shape != (r,) or record.token_ids.shape[0] != r or record.token_ids.shape[1] > 1 + k:
            raise TraceError(
                "recorded outcome does not fit the batch", field="sampled",
                got=f"num_sampled {record.num_sampled.shape}, token_ids {record.token_ids.shape}",
                expected=f"{r} rows of at most {1 + k} tokens",
            )  # fmt: skip
        # Entries past num_sampled were never written by the recorded program: they must not reach the runner.
        token_ids = np.zeros((r, 1 + k), np.int64)
        for i, n in enumerate(record.num_sampled.tolist()):
            taken = record.token_ids[i, : max(n, 0)]
            token_ids[i, : len(taken)] = taken
        drafts = None
        if k:
            drafts = np.zeros((r, k), np.int64)
            for i, req_id in enumerate(record.req_ids):
                held = (next_drafts or {}).get(req_id, ())
                if len(held) > k:
                    raise TraceError(
                        "more drafts than may be", field="draft_tokens_state", req_id=req_id, got=held,
                        expected=f"at most {k}",
                    )  # fmt: skip
                drafts[i, : len(held)] = held
        shape = record.descriptor
        descriptor = None if shape is None else BatchDescriptor(shape.cg_mode, shape.num_tokens, shape.num_reqs)
        return cls(plan, descriptor, ForcedStep(token_ids, record.num_sampled.copy(), drafts, logits))


@dataclass(slots=True)
class Setup:
    """How one recording is replayed.

    recorded_layout: of the rows that were recorded; the runner's own is in `config`. model: what `load_model` gets.
    model_name: how reports call it. judge_tokens: whether the logits are those of the recorded model, so that its
    tokens mean something. recorded_logits: whether they are the recorded ones to the bit.
    """

    config: RunnerConfig
    num_groups: int
    recorded_layout: str
    model: Any = None
    model_name: str = ""
    judge_tokens: bool = False
    logits: Any = None
    notes: list[str] = field(default_factory=list)

    @property
    def recorded_logits(self) -> bool:
        return self.logits is not None

    @property
    def by_request(self) -> bool:
        """The runner's rows are of another layout than the recorded ones."""
        return self.config.layout != self.recorded_layout


def prepare(
    path: Path, trace: Trace, *, model: str | None = None, logits: str = "auto", dtype: str = "float32",
    device: str = "auto", layout: str | None = None,
) -> Setup:  # fmt: skip
    """Decide how to replay a recording: the runner's configuration, the model, the source of the logits.

    logits: one of LOGITS_SOURCES, or a file of recorded ones (.npz). layout: of the runner's rows; None: the recorded
    one. Raises `TraceError` for a recording that says too little, `CapabilityError` for one that needs what replay
    does not offer, `CheckpointError` where the model cannot be found.
    """
    if not trace.is_vllm_recording:
        raise TraceError("is a trace of our own", field=str(path), expected="a recording of vLLM (first key 'meta')")
    batches = [s for s in trace.steps if s.num_reqs]
    if not batches:
        raise TraceError("holds no step with a batch", field=str(path))
    recorded_layout = RECORDED_LAYOUTS[trace.meta["runner"]]
    config = _config(path, trace, dtype, device, layout or recorded_layout)
    setup = Setup(config, len(batches[0].block_tables), recorded_layout)
    if setup.by_request:
        setup.notes.append(
            f"recorded on the {recorded_layout} layout, replayed on the {config.layout} one: steps are compared by "
            "request, and rows with nothing"
        )
    elif recorded_layout == "dense":
        setup.notes.append(
            "idx_mapping, cu_num_logits, num_sampled and block_tables are not recorded: they follow from the layout "
            "and the recorded plans"
        )
    stored = path.with_name(f"{path.stem}_logits.npz")
    if logits.endswith(".npz"):
        stored, logits = Path(logits), "recorded"
    elif logits not in LOGITS_SOURCES:
        raise UnknownNameError("source of logits", logits, LOGITS_SOURCES, field="--logits")
    if setup.config.num_speculative_tokens:
        _integers_alone(setup, trace, "a recording with drafts, which are forced like their outcome", model, logits)
    elif logits == "recorded" or (logits == "auto" and model is None and stored.is_file()):
        if model is not None:
            raise ConfigError("a model and recorded logits", field="--model", got=model, expected="one of the two")
        setup.logits, setup.judge_tokens = _open_logits(stored), True
        vocab_size = setup.logits[setup.logits.files[0]].shape[1]
        setup.model, setup.model_name = _witness(setup, trace, vocab_size), "recorded logits"
        setup.notes.append("tokens are drawn from the recorded logits; no model is run for them")
    else:
        _find_model(setup, path, trace, model, logits)
    if setup.judge_tokens and dtype in ("float16", "bfloat16"):
        setup.judge_tokens = False
        setup.notes.append(
            f"layout alone: the recorded logits are float32, and {dtype} may draw other tokens; "
            f"`check --model --dtype {dtype}` bounds its logits"
        )
    if setup.judge_tokens:
        setup.config = replace(setup.config, record=frozenset({"logits"}))
    return setup


@dataclass(frozen=True, slots=True)
class Launch:
    """All that building the runner needs: nothing in here leads to a recorded step.

    num_groups: KV cache groups of the recording. needs: capabilities that its steps ask for.
    """

    name: str
    config: RunnerConfig
    model: Any
    num_blocks: int
    block_size: int
    num_groups: int
    needs: frozenset[Capability]


def launch_of(setup: Setup, trace: Trace, num_steps: int) -> Launch:
    """How to build a runner for the first `num_steps` steps."""
    return Launch(
        trace.name, setup.config, setup.model, trace.meta["num_gpu_blocks_override"], trace.meta["block_size"],
        setup.num_groups, frozenset(_needs(setup, trace.steps[:num_steps])),
    )  # fmt: skip


def check_offered(factory: str | RunnerFactory, launch: Launch) -> None:
    """Raise `CapabilityError` if the runner lacks what a step needs; ConfigError if it cannot be built."""
    try:
        runner = call_factory(factory, launch.config)
    except RunnerError:  # what it offers in no layout says more than the first field that it refuses
        _check_offered(info_of(factory), replace(launch, needs=launch.needs - {Capability.DENSE_LAYOUT}))
        raise
    try:
        _check_offered(runner.describe(), launch)
    finally:
        let_go(runner)


def build_runner(factory: str | RunnerFactory, launch: Launch) -> ModelRunner:
    """A runner ready for the first step. Raises a RunnerError alone, before any step."""
    runner = call_factory(factory, launch.config)
    try:
        _check_offered(runner.describe(), launch)
        runner.load_model(launch.model)
        runner.initialize_kv_cache(_kv_cache_config(runner, launch))
        if Capability.CUDA_GRAPHS in runner.describe().capabilities:
            runner.capture_graphs()
    except RAISED as e:  # foreign code
        let_go(runner)
        if isinstance(e, RunnerError):
            raise
        raise ConfigError(
            f"the runner cannot be made ready: {type(e).__name__}: {safely(str, e)}", field="runner",
            hint="Nothing was replayed; `modelrunner check` finds what is wrong with an adapter",
        ) from e  # fmt: skip
    return runner


def _check_offered(info: RunnerInfo, launch: Launch) -> None:
    missing = sorted(c.value for c in launch.needs - info.capabilities)
    if missing:
        raise CapabilityError(
            f"{info.name} does not offer {', '.join(missing)}", field=launch.name,
            hint="Nothing was replayed; `modelrunner runners` lists what each runner offers",
        )  # fmt: skip


def replay_steps(setup: Setup, trace: Trace, num_steps: int) -> Iterator[ReplayStep]:
    """The recorded steps in order, each as a runner may see it."""
    steps = trace.steps[:num_steps]
    plans = plans_for(setup.config.layout or setup.recorded_layout, (record.plan for record in steps))
    for record, plan, drafts in zip(steps, plans, drafts_to_hold(trace.steps), strict=False):
        logits = None
        if setup.logits is not None and record.num_reqs:
            logits = step_logits(setup.logits, record, trace.name)
        told = replace(record, plan=plan)
        step = ReplayStep.from_record(told, setup.config.num_speculative_tokens, drafts, logits)
        yield replace(step, req_ids=record.req_ids) if setup.by_request else step


def drafts_to_hold(steps: Sequence[StepRecord]) -> list[dict[str, list[int]]]:
    """For each step and request, the drafts that the recording shows in its row when it is next scheduled."""
    held: dict[str, list[int]] = {}
    result: list[dict[str, list[int]]] = []
    for record in reversed(steps):
        result.append({r: held[r] for r in record.req_ids if r in held})
        if record.draft_token_ids is not None:
            held.update(zip(record.req_ids, record.draft_token_ids.tolist(), strict=False))
    return result[::-1]


# -- configuration --------------------------------------------------------------------------------------------


def _config(path: Path, trace: Trace, dtype: str, device: str, layout: str) -> RunnerConfig:
    meta = trace.meta
    name, _, version = str(meta["source"]).partition(" ")
    noise = NOISE_BY_VERSION.get(".".join(version.split(".")[:2])) if name == "vllm" else None
    if noise is None:
        raise TraceError(
            "recorded by a version whose random numbers are not known", field=f"{path}:1 meta.source",
            got=meta["source"], expected=" or ".join(f"'vllm {v}.x'" for v in NOISE_BY_VERSION),
        )  # fmt: skip
    fixed_rows = layout == RECORDED_LAYOUTS[meta["runner"]] == "slots"
    if fixed_rows and "free_rows" not in meta:
        raise TraceError("missing field", field=f"{path}:1 meta.free_rows")
    num_groups = max(len(s.block_tables) for s in trace.steps)
    asked = RunnerConfig(noise=noise, dtype=dtype, device=device, layout=layout)
    try:
        return replace(
            asked,
            max_num_reqs=meta["max_num_seqs"],
            max_num_batched_tokens=meta["max_num_batched_tokens"],
            max_model_len=meta["max_model_len"],
            num_speculative_tokens=(meta.get("speculative_config") or {}).get("num_speculative_tokens", 0),
            initial_free_rows=tuple(meta["free_rows"]) if fixed_rows else None,
            # Without a word the recorded program keeps table entries behind a sliding window, as 0.26 does.
            window_reach=tuple(meta.get("window_reach", (0,) * num_groups)),
        )
    except ConfigError as e:
        raise TraceError(f"broken meta: {e}", field=f"{path}:1 meta") from e


def _kv_cache_config(runner: ModelRunner, launch: Launch) -> KVCacheConfig:
    """The recorded number of blocks and block size; the witness model has one group per layer, others group theirs."""
    specs = {n: replace(s, block_size=launch.block_size) for n, s in runner.get_kv_cache_specs().items()}
    if isinstance(launch.model, WitnessConfig):
        return KVCacheConfig(launch.num_blocks, tuple(KVCacheGroup((n,), s) for n, s in specs.items()))
    config = group_kv_cache_specs(specs, launch.num_blocks)
    if len(config.groups) != launch.num_groups:
        raise TraceError(
            "KV cache groups of the model and of the recording differ", field=launch.name, got=launch.num_groups,
            expected=len(config.groups),
        )  # fmt: skip
    return config


def _needs(setup: Setup, steps: Sequence[StepRecord]) -> set[Capability]:
    needs = {Capability.GENERATE, Capability.FORCED_STEP}
    for record in steps:
        for new in record.plan.scheduled_new_reqs:
            if new.sampling_params is not None:
                needs |= new.sampling_params.required_capabilities()
        if record.num_tokens_padded > record.num_tokens or record.num_reqs_padded > record.num_reqs:
            needs.add(Capability.PADDED_BATCH)
    for capability, needed in (
        (Capability.DENSE_LAYOUT, setup.config.layout == "dense"),
        (Capability.MULTI_GROUP, setup.num_groups > 1),
        (Capability.SLIDING_WINDOW, isinstance(setup.model, WitnessConfig) and _has_window(setup.model)),
        (Capability.DRAFT_LAYOUT, setup.config.num_speculative_tokens > 0),
        (Capability.RECORD_LOGITS, setup.judge_tokens),
    ):
        if needed:
            needs.add(capability)
    return needs


def _has_window(model: WitnessConfig) -> bool:
    return any(group.sliding_window is not None for group in model.groups)


# -- model and logits -----------------------------------------------------------------------------------------


def _integers_alone(
    setup: Setup, trace: Trace, reason: str, model: str | None, logits: str, window: int | None = None
) -> None:
    """Use the witness model, whose tokens are not the recorded ones; refuse options that would then be ignored."""
    for name, value, neutral in (("--model", model, None), ("--logits", logits, "auto")):
        if value != neutral:
            raise CapabilityError(
                f"{trace.name} is replayed on the witness model ({reason})", field=name, got=value,
                hint=f"Leave {name} out",
            )  # fmt: skip
    setup.model, setup.model_name = _witness(setup, trace, window=window), "witness"
    setup.notes.append(f"integer fields alone, on the witness model: {reason}; tokens are not judged")


def _find_model(setup: Setup, path: Path, trace: Trace, given: str | None, logits: str) -> None:
    """Set model, name and notes: the recorded model, or the witness where its family is not supported."""
    from runner_api.checkpoint import resolve_model
    from runner_api.checkpoint.config import HF_ARCHITECTURES

    name = str(trace.meta["model"])
    places = [resolve_model(given)] if given else [path.parent / "checkpoints" / name, CHECKPOINTS / name]
    folder = next((p for p in places if p.exists()), None)
    if folder is None:
        raise CheckpointError(
            f"model {name!r} of recording {trace.name!r} is not found", field="model",
            got=[str(p) for p in places], hint="Give its folder with --model",
        )  # fmt: skip
    config = _model_config(folder)
    architecture = _architecture(folder, config)
    if architecture is None or architecture in HF_ARCHITECTURES:
        setup.model, setup.model_name, setup.judge_tokens = str(folder), given or name, True
        return
    # Blocks behind a window were handed to other requests. Which groups have the window the recording does not say.
    window = config.get("sliding_window")
    _integers_alone(setup, trace, f"{architecture} is not supported", None, logits, window=window)


def _model_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder; empty where `load_checkpoint` must find out what lies there."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"cannot be read: {e}", field=str(file)) from e
    if not isinstance(config, dict):
        raise CheckpointError("is no object", field=str(file), got=type(config).__name__)
    return config


def _architecture(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The family that the folder names."""
    if not config:
        return None
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(
            "names no architecture", field=f"{folder / 'config.json'}: architectures", got=names, expected="a list"
        )
    return names[0]


def _witness(setup: Setup, trace: Trace, vocab_size: int | None = None, window: int | None = None) -> WitnessConfig:
    groups = (WitnessGroup(trace.meta["block_size"], window),) * setup.num_groups
    if vocab_size is None:
        drawn = (t for s in trace.steps for tokens in s.tokens().values() for t in tokens)
        largest = max(*(int(s.input_ids.max(initial=0)) for s in trace.steps), *drawn)
        vocab_size = max(WITNESS_VOCAB_SIZE, 1 + largest)
    return WitnessConfig(vocab_size, groups)


def _open_logits(path: Path) -> Any:
    try:
        stored = np.load(path, allow_pickle=False)
        first = stored[stored.files[0]]
    except (OSError, ValueError, IndexError, AttributeError) as e:
        raise TraceError(f"recorded logits cannot be read: {e}", field=str(path)) from e
    if first.ndim != 2:
        raise TraceError("recorded logits", field=str(path), got=first.shape, expected="[rows, vocabulary]")
    return stored


def step_logits(stored: Any, record: StepRecord, name: str) -> np.ndarray:
    """The recorded logits of a step, in the batch order of the record: float32[L, V]."""
    key = f"logits_{record.extra['step']}"
    if key not in stored.files:
        raise TraceError("missing field", field=f"{name}_logits.npz {key}")
    logits = np.array(stored[key], np.float32)
    if logits.ndim != 2 or len(logits) != len(record.logits_indices):
        raise TraceError(
            "not one row for each of the step's", field=f"{name}_logits.npz {key}", got=logits.shape,
            expected=f"{len(record.logits_indices)} rows",
        )  # fmt: skip
    # In another batch order than the recorded one, it says which rows these are.
    return logits[record.extra["logits_rows"]] if "logits_rows" in record.extra else logits
