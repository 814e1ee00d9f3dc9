"""The loop: schedule, execute, sample, update. Requests in, tokens out, one step per call.

With synchronous scheduling a step's tokens are known before the next step is planned. With asynchronous scheduling
the engine plans and launches step t+1 while step t runs, and waits only for the oldest step once as many are under
way as the executor allows. Knows no text, and reaches the runner through the executor only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np

from engine_core.executor import Executor, Method
from engine_core.plan_builder import EngineCoreOutput
from engine_core.request import Request
from engine_core.scheduler import Scheduler
from runner_api import (
    Capability,
    CapabilityError,
    EngineError,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
)
from runner_api.checks import is_integer
from runner_api.sampling_params import INT64_MAX, INT64_MIN


class Engine:
    """Drives one executor with one scheduler.

    vocab_size: of the model; token ids of prompts and parameters are checked against it.
    eos_token_ids: tokens that end a request unless it says `ignore_eos`.
    seed: of the generator from which requests without a seed of their own draw one, in the order they are added.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.runner_info = executor.collective_rpc("describe")[0]
        self._rng = np.random.default_rng(seed)
        self._queue: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput | None]]] = deque()
        self._depth = 1
        self._error: Exception | None = None
        self._drafts = scheduler.config.num_speculative_tokens > 0
        if self._drafts:
            self._require({Capability.SPECULATIVE}, None)
        if scheduler.config.async_scheduling:
            self._require({Capability.ASYNC_OUTPUT}, None)
            self._depth = executor.max_concurrent_batches

    # -- requests ---------------------------------------------------------------------------------------------

    def add_request(
        self, req_id: str, prompt_token_ids: list[int], params: SamplingParams, extra_keys: tuple[str, ...] = ()
    ) -> Request:
        """Check a request and queue it.

        Raises EngineError (bad ids, a prompt that can never fit, an id in use) or CapabilityError (parameters that the
        runner does not offer); nothing is queued then, and no seed is drawn.
        """
        self._check_alive()
        self._check_types(req_id, prompt_token_ids, params, extra_keys)
        self._check_tokens(req_id, "prompt_token_ids", prompt_token_ids)
        self._check_params(req_id, params)
        request = Request(
            req_id, tuple(map(int, prompt_token_ids)), params, params.seed or 0, self.eos_token_ids, tuple(extra_keys)
        )
        self.scheduler.add_request(request)
        if params.seed is None:
            # Here and not in the runner, so that every rank, and every resume after a preemption, has the same one.
            request.seed = int(self._rng.integers(INT64_MIN, INT64_MAX, endpoint=True))
        return request

    def _check_types(self, req_id: str, tokens: Any, params: Any, extra_keys: Any) -> None:
        if not isinstance(req_id, str):
            raise EngineError("a request is named by a string", field="req_id", got=req_id, expected="a str")
        if not isinstance(tokens, (list, tuple, range, np.ndarray)):
            raise EngineError(
                "not a list of token ids", field="prompt_token_ids", req_id=req_id, got=tokens, expected="a list"
            )
        if not isinstance(params, SamplingParams):
            raise EngineError(
                "not sampling parameters", field="params", req_id=req_id, got=params, expected="SamplingParams"
            )
        if not isinstance(extra_keys, (list, tuple)) or not all(isinstance(key, str) for key in extra_keys):
            raise EngineError(
                "keys are strings", field="extra_keys", req_id=req_id, got=extra_keys, expected="a tuple of str"
            )

    def _check_params(self, req_id: str, params: SamplingParams) -> None:
        """What the runner would refuse in a plan must be refused here: there it would end every other request too."""
        self._check_tokens(req_id, "allowed_token_ids", params.allowed_token_ids or ())
        self._check_tokens(req_id, "logit_bias", params.logit_bias or ())
        for word in params.bad_words_token_ids or ():
            self._check_tokens(req_id, "bad_words_token_ids", word)
        self._require(params.required_capabilities(), req_id)
        if params.logprobs is not None and params.logprobs > self.vocab_size:
            raise EngineError(
                "more log probabilities than tokens", field="logprobs", req_id=req_id, got=params.logprobs,
                expected=f"-1 .. {self.vocab_size}",
            )  # fmt: skip
        if params.prompt_logprobs is not None:
            raise CapabilityError(
                "this engine does not hand out log probabilities of prompts",
                field="prompt_logprobs",
                req_id=req_id,
                got=params.prompt_logprobs,
                expected="None",
            )
        if params.logprobs is not None and self._drafts:
            raise CapabilityError(
                "log probabilities together with drafts",
                field="logprobs",
                req_id=req_id,
                got=params.logprobs,
                expected="None, or num_speculative_tokens = 0",
            )
        if params.n != 1:
            raise EngineError(
                "one request is one sequence",
                field="n",
                req_id=req_id,
                got=params.n,
                expected="1",
                hint="Add n requests with a seed each, as LLM.generate does",
            )

    def _check_tokens(self, req_id: str, field: str, tokens: Iterable[Any]) -> None:
        for token in tokens:
            if not is_integer(token) or not 0 <= token < self.vocab_size:
                raise EngineError(
                    "not a token id", field=field, req_id=req_id, got=token, expected=f"0 <= id < {self.vocab_size}"
                )

    def _require(self, wanted: frozenset[Capability] | set[Capability], req_id: str | None) -> None:
        missing = sorted(c.value for c in wanted - self.runner_info.capabilities)
        if missing:
            raise CapabilityError(
                f"runner {self.runner_info.name!r} does not offer {', '.join(missing)}",
                req_id=req_id,
                hint="`modelrunner runners` lists what each runner offers",
            )

    def abort(self, req_id: str) -> EngineCoreOutput | None:
        """Finish a request now; None if it is not live."""
        return self.scheduler.abort(req_id)

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests

    @property
    def has_requests(self) -> bool:
        """Is there anything to step for: live requests, steps under way, or finished ids the runner still holds?

        The last kind matters: an engine that stopped at the last token would leave its rows occupied.
        """
        return self.scheduler.has_requests or bool(self._queue)

    # -- steps ------------------------------------------------------------------------------------------------

    def step(self) -> list[EngineCoreOutput]:
        """Advance by one plan; an empty list if no result is due yet, or nothing is left to do.

        A failure leaves runner and scheduler apart, so it is final: every later call raises EngineError.
        """
        self._check_alive()
        try:
            return self._step()
        except Exception as e:
            self._error = e
            raise

    def _step(self) -> list[EngineCoreOutput]:
        if self.scheduler.has_requests and len(self._queue) < self._depth:
            plan = self.scheduler.schedule()
            self._queue.append((plan, self._launch(plan)))
            if len(self._queue) < self._depth and plan.total_num_scheduled_tokens:
                return []
        if not self._queue:
            return []
        plan, future = self._queue.popleft()
        output = future.result()
        if output is None:
            raise EngineError("sample_tokens gave no output", field="sample_tokens", expected="a ModelRunnerOutput")
        outputs = self.scheduler.update_from_output(plan, output)
        if self._drafts and plan.total_num_scheduled_tokens:
            self._take_drafts()
        return outputs

    def _launch(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput | None]:
        """Queue a step: two calls, because a mask made on the host may still be under way after the first."""
        executed = self.executor.execute_model(plan, non_block=True)
        if executed.result() is None:
            return self.executor.sample_tokens(None, non_block=True)
        return executed  # a plan without tokens changes state only

    def _take_drafts(self) -> None:
        drafts = self.executor.collective_rpc("take_draft_token_ids")[0]
        if drafts is not None:
            self.scheduler.update_draft_token_ids(dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True)))

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineError(
                f"the engine stopped after {type(self._error).__name__}: {self._error}",
                field="engine",
                hint="Build a new one",
            ) from self._error

    def collective_rpc(self, method: Method, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a worker method, or `method(worker, …)`, on every rank; results in rank order."""
        return self.executor.collective_rpc(method, args, kwargs)

    def shutdown(self) -> None:
        self.executor.shutdown()
