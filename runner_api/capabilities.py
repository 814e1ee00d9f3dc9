"""What a runner may offer. A capability that is not declared is refused at the edge, never half done."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """One optional part of the contract. Clauses name the capability they require."""

    GENERATE = "generate"  # whole steps: execute_model and sample_tokens
    STEP_RECORD = "step_record"  # last_step(): what the latest step was asked, built and drew
    # Impossible plans and calls out of order are refused with coded errors; the state is as before.
    PLAN_VALIDATION = "plan_validation"
    STAGES = "stages"  # single stages can be called through the loader
    RECORD_LOGITS = "record_logits"  # StepRecord.logits on request
    RECORD_KV = "record_kv"  # StepRecord.kv on request
    POISON = "poison"  # poison_unused(): fill what nothing may read
    STATE_DIGEST = "state_digest"  # state_digest(): a fingerprint of all persistent state
    SEEDED_SAMPLING = "seeded_sampling"  # temperature > 0 with a reproducible seed
    TOP_K = "top_k"  # the k best tokens stay
    TOP_P = "top_p"  # the best tokens up to this mass stay
    MIN_P = "min_p"  # tokens from this share of the best one's probability on stay
    LOGPROBS = "logprobs"  # log probabilities of what was drawn and of the best tokens
    PROMPT_LOGPROBS = "prompt_logprobs"  # log probabilities of a prompt's own tokens
    PENALTIES = "penalties"  # repetition, presence and frequency penalties
    LOGIT_BIAS = "logit_bias"  # a number added to the logits of single tokens
    ALLOWED_TOKEN_IDS = "allowed_token_ids"  # no other token is drawn
    MIN_TOKENS = "min_tokens"  # no stop token before so many tokens
    BAD_WORDS = "bad_words"  # sequences of tokens that are never completed
    GRAMMAR = "grammar"  # sample_tokens(grammar=…)
    THINKING_BUDGET = "thinking_budget"  # at most so many tokens between the markers of RunnerConfig.reasoning
    TRACE_REPLAY = "trace_replay"  # decode tokens forced from the request's own list
    LOGITS_PROCESSORS = "logits_processors"  # RunnerConfig.logits_processors
    SAMPLE_FAULTS = "sample_faults"  # a row of NaN, or without any token, is an error of that request alone
    FORCED_STEP = "forced_step"  # sample_tokens(forced=…)
    PADDED_BATCH = "padded_batch"  # honours descriptors with more tokens or requests than the plan
    MULTI_GROUP = "multi_group"  # several KV cache groups
    SLIDING_WINDOW = "sliding_window"  # window_reach > 0
    DRAFT_LAYOUT = "draft_layout"  # index stages accept drafts (outcome forced)
    SPECULATIVE = "speculative"  # proposes and verifies drafts itself
    CUDA_GRAPHS = "cuda_graphs"  # capture_graphs(): steps are replayed from captured graphs
    ASYNC_OUTPUT = "async_output"  # get_output may be taken a step later
    DENSE_LAYOUT = "dense_layout"  # live requests are packed into the first rows
    TENSOR_PARALLEL = "tensor_parallel"  # ranks that share each layer
    PIPELINE_PARALLEL = "pipeline_parallel"  # ranks that have some layers each
    CONTEXT_PARALLEL = "context_parallel"  # ranks that keep some positions each
    POOLING = "pooling"  # pool(): embeddings and scores in place of tokens
    LORA = "lora"  # adapters by request
    MULTIMODAL = "multimodal"  # images and other features in a prompt
    PROMPT_EMBEDS = "prompt_embeds"  # prompts of vectors in place of tokens
    FLOAT64 = "float64"  # RunnerConfig.dtype
    FLOAT32 = "float32"  # RunnerConfig.dtype
    FLOAT16 = "float16"  # RunnerConfig.dtype
    BFLOAT16 = "bfloat16"  # RunnerConfig.dtype
