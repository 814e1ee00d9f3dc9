"""Which of its two model runners vLLM would build for a configuration, as tables: no vLLM, no GPU.

vLLM decides anew on every access, in every process, and mostly says nothing. Here each version's rules are data, in the
order in which they are asked, and the answer carries its reason. V1 is the dense layout, V2 the slots layout.
Sources: "seed" is vLLM's main branch of September 2026, the last that chose by architecture; "0.33" is vLLM 0.33.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine_core.vllm_config import VllmConfig
from runner_api import UnknownNameError

ENV = "VLLM_USE_V2_MODEL_RUNNER"
NGRAM_METHODS = ("ngram", "ngram_gpu")
V2_POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify", "embed&token_classify")


@dataclass(frozen=True, slots=True)
class Rule:
    """A feature, by the name that vLLM's messages give it, and whether a configuration has it.

    The name is a format of the configuration.
    """

    name: str
    applies: Callable[[VllmConfig], bool]


@dataclass(frozen=True, slots=True)
class VllmDecision:
    """What one version does.

    runner: "V1", "V2", or None where vLLM refuses to start, for the reason in `error`. log: what vLLM itself says of
    the choice; often nothing. notes: what else follows. async_scheduling, max_concurrent_batches: what the choice makes
    of them; None where vLLM does not start, and where this table does not say.
    """

    version: str
    runner: str | None
    reason: str
    log: tuple[str, ...] = ()
    error: str | None = None
    notes: tuple[str, ...] = ()
    async_scheduling: bool | None = None
    max_concurrent_batches: int | None = None

    @property
    def layout(self) -> str | None:
        """The layout of this project with the same design."""
        return {"V1": "dense", "V2": "slots", None: None}[self.runner]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, JSON-ready, with the layout."""
        return {**dataclasses.asdict(self), "layout": self.layout}

    def explain(self) -> str:
        """A few lines, for people."""
        head = f"{self.runner} (the {self.layout} layout)" if self.runner else "does not start"
        lines = [f"vLLM {self.version}: {head}, {f'by {ENV}' if self.reason == 'env' else self.reason}"]
        if self.error:
            lines.append(f"  error   {self.error}")
        lines += [f"  logs    {line}" for line in self.log] or ["  logs    nothing of the choice"]
        if self.async_scheduling is not None:
            what = "asynchronous" if self.async_scheduling else "synchronous"
            lines.append(f"  steps   {what}, up to {self.max_concurrent_batches} at once")
        return "\n".join([*lines, *(f"  note    {note}" for note in self.notes)])


def explain_vllm(config: VllmConfig, version: str = "0.33") -> VllmDecision:
    """The decision of one version. Raises UnknownNameError for a version without a table."""
    if version not in POLICIES:
        raise UnknownNameError("version of vLLM", version, POLICIES, field="version")
    env = _env(config.env)
    if isinstance(env, str):
        return VllmDecision(version, None, "env", error=env)
    decision = POLICIES[version](config, env)
    unread = [
        f.name for f in dataclasses.fields(config)
        if f.name in UNREAD[version] and getattr(config, f.name) != f.default
    ]  # fmt: skip
    if unread:
        decision = _add(decision, notes=(f"not looked at by this version's rules: {', '.join(unread)}",))
    return decision


def _env(text: str | None) -> bool | str | None:
    """The tri-state variable: unset, off, on. A text that is no integer is the error that vLLM stops with."""
    if text is None:
        return None
    try:
        return bool(int(text))
    except ValueError:
        return f"ValueError: {ENV}={text!r} is no integer; unset it, or set it to 0 or 1"


def _names(rules: Sequence[Rule], config: VllmConfig) -> list[str]:
    return [rule.name.format(config) for rule in rules if rule.applies(config)]


def _add(decision: VllmDecision, *, log: tuple[str, ...] = (), notes: tuple[str, ...] = ()) -> VllmDecision:
    return dataclasses.replace(decision, log=(*decision.log, *log), notes=(*decision.notes, *notes))


def _refuse(decision: VllmDecision, error: str) -> VllmDecision:
    return dataclasses.replace(decision, runner=None, error=f"ValueError: {error}")


def _without_triton(version: str) -> VllmDecision:
    warning = "Model Runner V2 requires Triton; using the V1 model runner instead."
    return VllmDecision(version, "V1", "fallback: no Triton", (warning,))


def _without_features(version: str, lacks: Sequence[str]) -> VllmDecision:
    listed = ", ".join(lacks)
    warning = f"Model Runner V2 does not yet support {listed}; using the V1 model runner instead."
    return VllmDecision(version, "V1", f"fallback: {listed}", (warning,))


def _pooling_checked(c: VllmConfig, decision: VllmDecision) -> VllmDecision:
    """Pooling tasks are looked at last, when V2 is built: there is no way back from there."""
    if c.pooling_task is None or c.pooling_task in V2_POOLING_TASKS:
        return decision
    return _refuse(decision, f"V2 is built and has no pooling task {c.pooling_task!r}")


def _external_pipeline(c: VllmConfig) -> bool:
    return c.pipeline_parallel_size > 1 and c.distributed_executor_backend == "external_launcher"


# -- the seed's version ---------------------------------------------------------------------------------------

# Mixtures of experts that V2 takes by default; dense models need no entry.
SEED_MOE_ARCHITECTURES = frozenset(
    {"DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GlmMoeDsaForCausalLM",
     "GraniteMoeForCausalLM", "InklingForCausalLM", "InklingForConditionalGeneration",
     "KimiK3ForConditionalGeneration", "LongcatFlashNgramForCausalLM", "Qwen2MoeForCausalLM"}
)  # fmt: skip
SEED_FORCED = (
    Rule("prefill context parallelism", lambda c: c.prefill_context_parallel_size > 1),
    Rule("speculative method dspark", lambda c: c.speculative_method == "dspark"),
    Rule("DFlash with mixed sliding and full attention", lambda c: c.dflash_mixed_attention),
    Rule("DFlash with candidate heads", lambda c: c.dflash_candidate_heads),
    Rule("diffusion", lambda c: c.is_diffusion),
)
SEED_NOT_ELIGIBLE = (
    Rule("a hybrid model that is not listed", lambda c: c.is_hybrid and not _is_listed(c)),
    Rule("an attention-free model", lambda c: c.is_attention_free),
    Rule("a mixture of experts that is not listed", lambda c: c.is_moe and not _is_listed(c)),
)
SEED_V2_LACKS = (
    Rule("stock torch.compile", lambda c: c.stock_torch_compile),
    Rule("sequence parallelism with tensor parallelism", lambda c: c.sequence_parallel and c.tensor_parallel_size > 1),
    Rule("pipeline parallelism with external_launcher", _external_pipeline),
    Rule("ngram/ngram_gpu speculative decoding", lambda c: c.speculative_method in NGRAM_METHODS),
    Rule("dual batch overlap", lambda c: c.dual_batch_overlap),
    Rule("elastic expert parallelism", lambda c: c.elastic_expert_parallel),
    Rule("custom logits processors", lambda c: c.custom_logits_processors),
    Rule("KV sharing fast prefill", lambda c: c.kv_sharing_fast_prefill),
)


def _is_listed(c: VllmConfig) -> bool:
    """One listed name is enough."""
    return any(name in SEED_MOE_ARCHITECTURES for name in c.architectures)


def _seed_policy(c: VllmConfig, env: bool | None) -> VllmDecision:
    # 1 the variable
    if env is not None:
        return _seed_checked(c, VllmDecision("seed", "V2" if env else "V1", "env"))
    # 2 features that only V2 has
    forced = _names(SEED_FORCED, c)
    if forced:
        return _seed_checked(c, VllmDecision("seed", "V2", f"forced: {', '.join(forced)}"))
    # 3 the model: nothing is logged
    refused = _names(SEED_NOT_ELIGIBLE, c)
    if refused:
        return VllmDecision("seed", "V1", f"not eligible: {refused[0]}")
    # 4 Triton
    if not c.has_triton:
        return _without_triton("seed")
    # 5 what V2 lacks
    lacks = _names(SEED_V2_LACKS, c)
    if lacks:
        return _without_features("seed", lacks)
    # 6 the default: nothing is logged
    return _seed_checked(c, VllmDecision("seed", "V2", "policy default"))


def _seed_checked(c: VllmConfig, decision: VllmDecision) -> VllmDecision:
    """What was not asked before the choice is asked after it, and then nothing falls back."""
    if decision.runner == "V1":
        only = _names(SEED_FORCED, c)
        return _add(decision, notes=(f"only V2 has {', '.join(only)}",)) if only else decision
    if c.platform == "rocm" and _is_listed(c):
        decision = _add(decision, notes=("on ROCm vLLM strikes some architectures off the list; this table does not",))
    lacks = _names(SEED_V2_LACKS, c)
    if lacks:
        return _refuse(decision, f"V2 was chosen and does not support {', '.join(lacks)}")
    if not c.has_triton:
        return _refuse(decision, "V2 was chosen and needs Triton")
    return _pooling_checked(c, decision)


# -- version 0.33 ---------------------------------------------------------------------------------------------

V033_V2_LACKS = (
    Rule("pipeline parallelism with external_launcher", _external_pipeline),
    Rule("speculative method '{0.speculative_method}'", lambda c: c.speculative_method in ("suffix", "custom_class")),
    Rule(
        "parallel drafting for EAGLE speculative decoding",
        lambda c: c.parallel_drafting and c.speculative_method not in ("dflash", "dspark"),
    ),
    Rule("heterogeneous-vocabulary draft models", lambda c: c.heterogeneous_vocabulary),
)
# Dual batch overlap: all of it while the variable is unset, these combinations once it is set.
V033_OVERLAP = (Rule("dual batch overlap", lambda c: c.dual_batch_overlap),)
V033_OVERLAP_IF_SET = tuple(
    Rule(f"dual batch overlap with {name}", applies)
    for name, applies in (
        ("LoRA", lambda c: c.dual_batch_overlap and c.lora),
        ("speculative decoding", lambda c: c.dual_batch_overlap and c.speculative_method is not None),
        ("pipeline parallelism", lambda c: c.dual_batch_overlap and c.pipeline_parallel_size > 1),
        (
            "context parallelism",
            lambda c: c.dual_batch_overlap and max(c.decode_context_parallel_size, c.prefill_context_parallel_size) > 1,
        ),
        ("multimodal models", lambda c: c.dual_batch_overlap and (c.is_multimodal or c.is_encoder_decoder)),
        ("hybrid models", lambda c: c.dual_batch_overlap and c.is_hybrid),
        ("PIECEWISE CUDA graphs", lambda c: c.dual_batch_overlap and c.cudagraph_mode == "piecewise"),
        ("encoder only models", lambda c: c.dual_batch_overlap and c.mm_encoder_only),
    )
)
V033_V1_LACKS = (
    Rule("prefill context parallel", lambda c: c.prefill_context_parallel_size > 1),
    Rule("dspark speculative decoding", lambda c: c.speculative_method == "dspark"),
    Rule("xpress speculative decoding", lambda c: c.xpress),
    Rule("adaptive draft verification", lambda c: c.adaptive_verification),
    Rule("draft lm_head quantization", lambda c: c.draft_lm_head_quantization),
    Rule("Parse 3.5 MTP", lambda c: c.parse_mtp),
    Rule("mixed sliding/full dflash drafts", lambda c: c.dflash_mixed_attention),
    Rule("DFlash candidate-head drafts", lambda c: c.dflash_candidate_heads),
    Rule("diffusion models", lambda c: c.is_diffusion),
    Rule("batch-sharded sampling", lambda c: c.batch_sharded_sampling),
    Rule("Step5", lambda c: not {"Step5ForCausalLM", "Step5ForConditionalGeneration"}.isdisjoint(c.architectures)),
    # checked apart from the others
    Rule("sampling distribution replay", lambda c: c.sampling_mask),
    Rule("trace replay", lambda c: c.trace_replay),
    Rule("auxiliary outputs", lambda c: c.aux_output and c.platform not in ("tpu", "oot")),
)
# With which V1 has no asynchronous scheduling. The first one is named.
V033_V1_SYNC = (
    Rule(
        "{0.speculative_method}-based speculative decoding",
        lambda c: c.speculative_method in ("ngram", "suffix", "custom_class"),
    ),
    Rule("disable_padded_drafter_batch=True", lambda c: c.disable_padded_drafter_batch),
    Rule("pipeline parallelism", lambda c: c.pipeline_parallel_size > 1),
)


def _v033_policy(c: VllmConfig, env: bool | None) -> VllmDecision:
    # 1 a feature that only V2 has, and that the variable may not forbid
    if c.hisparse:
        decision = VllmDecision("0.33", "V2", "forced: HiSparse")
        if env is False:
            return _refuse(decision, f"HiSparse requires V2, and {ENV}=0 forbids it")
        return _v033_checked(c, env, decision)
    # 2 one that overrules the variable
    if c.watermarking:
        said = (f"Watermarking requires Model Runner V2 and overrides {ENV}=0.",) if env is False else ()
        return _v033_checked(c, env, VllmDecision("0.33", "V2", "forced: watermarking", said))
    # 3 the variable
    if env is not None:
        return _v033_checked(c, env, VllmDecision("0.33", "V2" if env else "V1", "env"))
    # 4 Triton
    if not c.has_triton and c.platform != "unspecified":
        return _v033_checked(c, env, _without_triton("0.33"))
    # 5 what V2 lacks
    lacks = _names(V033_V2_LACKS + V033_OVERLAP, c)
    if lacks:
        return _v033_checked(c, env, _without_features("0.33", lacks))
    # 6 the default
    return _v033_checked(c, env, VllmDecision("0.33", "V2", "policy default"))


def _v033_checked(c: VllmConfig, env: bool | None, decision: VllmDecision) -> VllmDecision:
    """What was not asked before the choice is asked after it, and then nothing falls back."""
    checked = _v033_v1_checked(c, decision) if decision.runner == "V1" else _v033_v2_checked(c, env, decision)
    return checked if checked.runner is None else _v033_steps(c, checked)


def _v033_v1_checked(c: VllmConfig, decision: VllmDecision) -> VllmDecision:
    lacks = _names(V033_V1_LACKS, c)
    if c.async_scheduling:
        lacks += [f"asynchronous scheduling with {name}" for name in _names(V033_V1_SYNC, c)[:1]]
    return _refuse(decision, f"V1 was chosen and does not support {', '.join(lacks)}") if lacks else decision


def _v033_v2_checked(c: VllmConfig, env: bool | None, decision: VllmDecision) -> VllmDecision:
    # 1 a compiler that takes no graphs
    if c.stock_torch_compile and c.cudagraph_mode != "none":
        decision = _add(decision, notes=(f"stock torch.compile: cudagraph_mode {c.cudagraph_mode} becomes none",))
        c = dataclasses.replace(c, cudagraph_mode="none")
    # 2 the features that V2 lacks: reached where the variable or a feature forced it
    lacks = _names(V033_V2_LACKS + (V033_OVERLAP if env is None else V033_OVERLAP_IF_SET), c)
    if lacks:
        return _refuse(decision, f"V2 was chosen and does not support {', '.join(lacks)}")
    # 3 the worker
    if not c.has_triton and c.platform == "unspecified":
        decision = _add(decision, notes=("no device was found: a worker would need Triton, but none is built",))
    elif not c.has_triton:
        return _refuse(decision, "the worker's V2 needs Triton")
    return _pooling_checked(c, _add(decision, log=("Using V2 Model Runner",)))


def _v033_steps(c: VllmConfig, decision: VllmDecision) -> VllmDecision:
    """Asynchronous scheduling is on unless something forbids it; how many steps may be under way depends on both."""
    sync = _names(V033_V1_SYNC, c)[:1] if decision.runner == "V1" else []
    if c.async_scheduling is not None:
        is_async = c.async_scheduling
    else:
        is_async = c.pooling_task is None and not sync
        if sync and c.pooling_task is None:
            decision = _add(decision, notes=(f"asynchronous scheduling is switched off: V1 has none with {sync[0]}",))
    stages = c.pipeline_parallel_size
    return dataclasses.replace(
        decision, async_scheduling=is_async, max_concurrent_batches=stages + 1 if is_async else stages
    )


# What a version's rules never look at.
UNREAD = {
    "seed": frozenset(
        {"is_multimodal", "is_encoder_decoder", "mm_encoder_only", "decode_context_parallel_size", "async_scheduling",
         "batch_sharded_sampling", "cudagraph_mode", "lora", "hisparse", "watermarking", "sampling_mask",
         "trace_replay", "aux_output", "parallel_drafting", "heterogeneous_vocabulary", "draft_lm_head_quantization",
         "adaptive_verification", "disable_padded_drafter_batch", "parse_mtp", "xpress"}
    ),
    "0.33": frozenset(
        {"is_moe", "is_attention_free", "tensor_parallel_size", "sequence_parallel", "elastic_expert_parallel",
         "custom_logits_processors", "kv_sharing_fast_prefill"}
    ),
}  # fmt: skip
POLICIES: dict[str, Callable[[VllmConfig, bool | None], VllmDecision]] = {"seed": _seed_policy, "0.33": _v033_policy}
