"""What a runner may offer. A capability that is not declared is refused at the edge, never half done."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """One optional part of the contract. Clauses name the capability they require."""

    GENERATE = "generate"  # whole steps: execute_model and sample_tokens
    STAGES = "stages"  # single stages can be called through the loader
    RECORD_LOGITS = "record_logits"  # StepRecord.logits on request
    RECORD_KV = "record_kv"  # StepRecord.kv on request
    POISON = "poison"  # poison_unused(): fill what nothing may read
    STATE_DIGEST = "state_digest"  # state_digest(): a fingerprint of all persistent state
    SEEDED_SAMPLING = "seeded_sampling"  # temperature > 0 with a reproducible seed
    TOP_K = "top_k"
    TOP_P = "top_p"
    MIN_P = "min_p"
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    PENALTIES = "penalties"
    LOGIT_BIAS = "logit_bias"
    ALLOWED_TOKEN_IDS = "allowed_token_ids"
    MIN_TOKENS = "min_tokens"
    BAD_WORDS = "bad_words"
    GRAMMAR = "grammar"
    THINKING_BUDGET = "thinking_budget"
    TRACE_REPLAY = "trace_replay"  # decode tokens forced from the request's own list
    LOGITS_PROCESSORS = "logits_processors"  # RunnerConfig.logits_processors
    SAMPLE_FAULTS = "sample_faults"  # a row of NaN, or without any token, is an error of that request alone
    FORCED_STEP = "forced_step"  # sample_tokens(forced=…)
    PADDED_BATCH = "padded_batch"  # honours descriptors with more tokens or requests than the plan
    MULTI_GROUP = "multi_group"  # several KV cache groups
    SLIDING_WINDOW = "sliding_window"  # window_reach > 0
    DRAFT_LAYOUT = "draft_layout"  # index stages accept drafts (outcome forced)
    SPECULATIVE = "speculative"  # proposes and verifies drafts itself
    CUDA_GRAPHS = "cuda_graphs"
    ASYNC_OUTPUT = "async_output"  # get_output may be taken a step later
    DENSE_LAYOUT = "dense_layout"
    TENSOR_PARALLEL = "tensor_parallel"
    PIPELINE_PARALLEL = "pipeline_parallel"
    CONTEXT_PARALLEL = "context_parallel"
    POOLING = "pooling"
    LORA = "lora"
    MULTIMODAL = "multimodal"
    PROMPT_EMBEDS = "prompt_embeds"
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
