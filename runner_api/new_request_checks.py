"""Is a request that starts possible, looked at alone? Its tokens, its features and its parameters.

Part of plan validation (runner_api/validation.py); knows nothing of other requests, rows or blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner_api.capabilities import Capability
from runner_api.config import RunnerConfig
from runner_api.constants import MAX_STOP_TOKEN_IDS
from runner_api.errors import CapabilityError, PlanError
from runner_api.live_request import LiveRequest
from runner_api.plan import NewRequestData
from runner_api.sampling_params import INT64_MAX, INT64_MIN, SamplingParams


def check_prompt(new: NewRequestData, max_model_len: int, vocab_size: int) -> None:
    """The known tokens are tokens of the model, begin with the prompt, and leave one to compute."""
    req_id, known = new.req_id, new.prefill_token_ids
    _check_number(req_id, new.prompt_len, known, max_model_len, "prefill_token_ids")
    _check_vocabulary(req_id, known, vocab_size, "prefill_token_ids")
    _check_beginning(req_id, new.prompt_token_ids, known, "prompt_token_ids", "prefill_token_ids")
    _check_computed(req_id, new.num_computed_tokens, len(known), "num_computed_tokens")


def check_resumed_tokens(
    req_id: str, live: LiveRequest, known: Sequence[int], computed: int, max_model_len: int, vocab_size: int
) -> None:
    """The same of a request that comes back as cached; and it knows no more than it can have drawn.

    Fewer is possible: an engine may drop what was drawn in a step that ran while it preempted the request.
    """
    field = "all_token_ids"
    _check_number(req_id, live.prompt_len, known, min(live.known_len, max_model_len), field)
    _check_vocabulary(req_id, known, vocab_size, field)
    _check_beginning(req_id, live.prompt_token_ids, known, field, field)
    _check_computed(req_id, computed, len(known), "scheduled_cached_reqs.num_computed_tokens")


def _check_number(req_id: str, prompt_len: int, known: Sequence[int], most: int, field: str) -> None:
    least = max(1, prompt_len)
    if not least <= len(known) <= most:
        raise PlanError(
            "too few or too many known tokens", code="MR-ERR-024", field=field, req_id=req_id, got=len(known),
            expected=f"from {least} (the prompt's) to {most} (what it can know, and max_model_len)",
        )  # fmt: skip


def _check_vocabulary(req_id: str, known: Sequence[int], vocab_size: int, field: str) -> None:
    if min(known) < 0 or max(known) >= vocab_size:
        raise PlanError(
            "token id out of range", code="MR-ERR-025", field=field, req_id=req_id,
            got=next(t for t in known if not 0 <= t < vocab_size), expected=f"0 <= id < {vocab_size}",
        )  # fmt: skip


def _check_beginning(req_id: str, prompt: Sequence[int], known: Sequence[int], field: str, where: str) -> None:
    if list(known[: len(prompt)]) != list(prompt):
        raise PlanError(
            "the known tokens do not begin with the prompt", code="MR-ERR-024", field=field, req_id=req_id,
            expected=f"{where} = the prompt, then the outputs drawn so far",
        )  # fmt: skip


def _check_computed(req_id: str, computed: int, num_known: int, field: str) -> None:
    if not 0 <= computed < num_known:
        raise PlanError(
            "a request cannot start with so many computed tokens", code="MR-ERR-026", field=field, req_id=req_id,
            got=computed, expected=f"0 <= n < {num_known}: the last known token must be computed to get its logits",
        )  # fmt: skip


def check_features(new: NewRequestData, capabilities: frozenset[Capability]) -> None:
    """What the request asks for is offered, and it is one sequence with a seed."""
    wanted: set[Capability] = set()
    params = new.sampling_params
    if params is not None:
        wanted |= params.required_capabilities()
        if params.extra_args:
            wanted.add(Capability.LOGITS_PROCESSORS)
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
    if params is not None and params.n != 1:
        raise PlanError(
            "one request is one sequence", code="MR-ERR-048", field="sampling_params.n", req_id=new.req_id,
            got=params.n, expected=1, hint="The engine turns n answers into n requests",
        )  # fmt: skip


def check_sampling_params(new: NewRequestData, config: RunnerConfig, vocab_size: int) -> None:
    """The parameters make sense for this model, and the runner was built for them."""
    params = new.sampling_params or SamplingParams(temperature=0.0)
    _check_token_ids(new, params, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > vocab_size:
            raise PlanError(
                "more log probabilities than tokens", code="MR-ERR-046", field=f"sampling_params.{name}",
                req_id=new.req_id, got=wanted, expected=f"-1 .. {vocab_size}",
            )  # fmt: skip
    num_stop = len(new.stop_token_ids)
    if params.min_tokens > 0 and num_stop > MAX_STOP_TOKEN_IDS:
        raise PlanError(
            "min_tokens masks every stop token, its own and the model's", code="MR-ERR-050",
            field="sampling_params.stop_token_ids", req_id=new.req_id, got=num_stop,
            expected=f"at most {MAX_STOP_TOKEN_IDS}",
        )  # fmt: skip
    if params.thinking_token_budget is not None and config.reasoning is None:
        raise CapabilityError(
            "no one said how this model marks its thinking", field="sampling_params.thinking_token_budget",
            req_id=new.req_id, got=params.thinking_token_budget, expected="None",
            hint="Set RunnerConfig.reasoning",
        )  # fmt: skip
    if params.extra_args and not config.logits_processors:
        raise CapabilityError(
            "no logits processor reads them", field="sampling_params.extra_args", req_id=new.req_id,
            got=params.extra_args, expected="None", hint="Set RunnerConfig.logits_processors",
        )  # fmt: skip
    if params.trace_decode_token_ids is not None and config.num_speculative_tokens > 0:
        raise CapabilityError(
            "a trace cannot be replayed where drafts are verified", field="sampling_params.trace_decode_token_ids",
            req_id=new.req_id, hint="Build the runner with num_speculative_tokens = 0",
        )  # fmt: skip


def _check_token_ids(new: NewRequestData, params: SamplingParams, vocab_size: int) -> None:
    lists: tuple[tuple[str, Iterable[int]], ...] = (
        ("sampling_params.allowed_token_ids", params.allowed_token_ids or ()),
        ("sampling_params.logit_bias", params.logit_bias or ()),
        ("sampling_params.bad_words_token_ids", (t for word in params.bad_words_token_ids or () for t in word)),
        ("sampling_params.logprob_token_ids", params.logprob_token_ids or ()),
        ("sampling_params.trace_decode_token_ids", params.trace_decode_token_ids or ()),
        ("sampling_params.stop_token_ids", params.stop_token_ids),
        ("eos_token_ids", new.eos_token_ids),
    )
    for field, ids in lists:
        for token in ids:
            if not 0 <= token < vocab_size:
                raise PlanError(
                    "token id out of range", code="MR-ERR-025", field=field, req_id=new.req_id, got=token,
                    expected=f"0 <= id < {vocab_size}",
                )  # fmt: skip
