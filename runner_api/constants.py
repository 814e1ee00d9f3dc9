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

# Version of the StepRecord fields and of the trace files that hold them.
SCHEMA_VERSION = 1

# Version of the clauses that this interface is judged by.
SPEC_VERSION = "2026.11"

# Layout of the recordings of vLLM that `load_trace` reads.
VLLM_RECORDING_FORMAT = 1
