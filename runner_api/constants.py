"""Numbers that both sides of the contract must agree on, each with the reason for its value."""

# A token that owns no KV place. Negative, so that a consumer which forgets to skip it fails on a bounds check
# of its own; NumPy and PyTorch would read -1 as "the last element", so consumers must test `slot >= 0` first.
PAD_SLOT_ID = -1

# Block 0 is never handed out: padding rows of a block table point at it, so that reading one is harmless.
NULL_BLOCK_ID = 0

# A draft whose id the scheduler does not know (the runner takes the real id from its own table).
PLACEHOLDER_TOKEN_ID = -1

# A batch row that belongs to no request.
NO_ROW = -1

# Rows of a block table are widened to whole multiples of this many tokens, so that kernels may read a row in
# aligned chunks. (vLLM's value.)
BLOCK_TABLE_TOKEN_ALIGNMENT = 128

# How much one request may ask of the sampler: the width of the tables that hold it by row. More is refused when the
# request is admitted. (vLLM's values; allowed token ids are kept as bits and have no limit.)
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_LOGPROB_TOKEN_IDS = 128

# What thinking-budget forcing writes over the logit of the token that must come next. (vLLM's value.)
FORCED_LOGIT = 1e9

# Version of the StepRecord fields and of the trace files that hold them.
SCHEMA_VERSION = 1

# Version of the clauses that this interface is judged by.
SPEC_VERSION = "2026.11"

# Layout of the recordings of vLLM that `load_trace` reads.
VLLM_RECORDING_FORMAT = 1
