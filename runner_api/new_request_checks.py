"""Is a new request possible, looked at alone? Its tokens, its features and its parameters.

Part of plan validation (runner_api/validation.py); knows nothing of other requests, rows or blocks.
"""

from __future__ import annotations

from runner_api.capabilities import Capability
from runner_api.errors import CapabilityError, PlanError
from runner_api.plan import NewRequestData
from runner_api.sampling_params import INT64_MAX, INT64_MIN


def check_prompt(new: NewRequestData, max_model_len: int, vocab_size: int) -> None:
    """The known tokens are tokens of the model, begin with the prompt, and leave one to compute."""
    req_id, known = new.req_id, new.prefill_token_ids
    prefill_len = len(known)
    if prefill_len < 1 or prefill_len < new.prompt_len or prefill_len > max_model_len:
        raise PlanError(
            "too few or too many known tokens",
            code="MR-ERR-024",
            field="prefill_token_ids",
            req_id=req_id,
            got=prefill_len,
            expected=f"from max(1, prompt length {new.prompt_len}) to max_model_len {max_model_len}",
        )
    if min(known) < 0 or max(known) >= vocab_size:
        raise PlanError(
            "token id out of range",
            code="MR-ERR-025",
            field="prefill_token_ids",
            req_id=req_id,
            got=next(t for t in known if not 0 <= t < vocab_size),
            expected=f"0 <= id < {vocab_size}",
        )
    if list(known[: new.prompt_len]) != list(new.prompt_token_ids):
        raise PlanError(
            "the known tokens do not begin with the prompt",
            code="MR-ERR-024",
            field="prompt_token_ids",
            req_id=req_id,
            expected="prefill_token_ids = prompt_token_ids, then the outputs drawn so far",
        )
    if not 0 <= new.num_computed_tokens < prefill_len:
        raise PlanError(
            "a new request cannot have computed so many tokens",
            code="MR-ERR-026",
            field="num_computed_tokens",
            req_id=req_id,
            got=new.num_computed_tokens,
            expected=f"0 <= n < {prefill_len}: the last known token must be computed to get its logits",
        )


def check_features(new: NewRequestData, capabilities: frozenset[Capability], vocab_size: int) -> None:
    """What the request asks for is offered, and its parameters make sense for one row of this model."""
    wanted: set[Capability] = set()
    params = new.sampling_params
    if params is not None:
        wanted |= params.required_capabilities()
    for value, capability in (
        (new.pooling_params, Capability.POOLING),
        (new.lora_request, Capability.LORA),
        (new.mm_features or None, Capability.MULTIMODAL),
        (new.prompt_embeds, Capability.PROMPT_EMBEDS),
    ):
        if value is not None:
            wanted.add(capability)
    refused = sorted(c.value for c in wanted - capabilities)
    if refused:
        raise CapabilityError(
            f"this runner does not offer {', '.join(refused)}",
            field="scheduled_new_reqs",
            req_id=new.req_id,
            hint="`modelrunner runners` lists what each runner offers",
        )
    if not INT64_MIN <= new.seed <= INT64_MAX:
        raise PlanError(
            "seed out of range", code="MR-ERR-027", field="seed", req_id=new.req_id, got=new.seed,
            expected="a signed 64-bit integer",
        )  # fmt: skip
    if params is not None and params.logprobs is not None and params.logprobs > vocab_size:
        raise PlanError(
            "more log probabilities than tokens", code="MR-ERR-046", field="sampling_params.logprobs",
            req_id=new.req_id, got=params.logprobs, expected=f"-1 .. {vocab_size}",
        )  # fmt: skip
    if params is not None and params.n != 1:
        raise PlanError(
            "one request is one sequence", code="MR-ERR-048", field="sampling_params.n", req_id=new.req_id,
            got=params.n, expected=1, hint="The engine turns n answers into n requests",
        )  # fmt: skip
