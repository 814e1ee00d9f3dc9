"""The loop: schedule, execute, sample, update. Requests in, tokens out, one step per call.

With synchronous scheduling a step's tokens are known before the next step is planned. With asynchronous scheduling
the engine plans and launches step t+1 while step t runs, and waits only for the oldest step once as many are under
way as the executor allows. Where a step draws under a grammar, its mask depends on the tokens before: the model of
step t+1 is launched, then the tokens of step t are waited for, then step t+1 draws. Knows no text, and reaches the
runner through the executor only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from engine_core.admission import Admission, require
from engine_core.executor import Executor, Method
from engine_core.logprobs import DEFAULT_MAX_LOGPROBS
from engine_core.plan_builder import EngineCoreOutput
from engine_core.request import Request
from engine_core.scheduler import Scheduler
from engine_core.structured_output import GrammarBackend, grammar_output
from runner_api import (
    Capability,
    EngineError,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
)
from runner_api.sampling_params import INT64_MAX, INT64_MIN


class Engine:
    """Drives one executor with one scheduler.

    vocab_size: of the model; token ids of prompts and parameters are checked against it.
    eos_token_ids: tokens that end a request unless it says `ignore_eos`.
    seed: of the generator from which requests without a seed of their own draw one, in the order they are added.
    grammar_backend: builds what compiles grammars; called when the first request needs it. None: there is no tokenizer.
    max_logprobs: the most log probabilities per token that a request may ask for, -1 for no limit.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
        grammar_backend: Callable[[], GrammarBackend] | None = None,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.runner_info = executor.collective_rpc("describe")[0]
        self._rng = np.random.default_rng(seed)
        self.admission = Admission(
            self.runner_info, executor.config.runner_config, vocab_size=vocab_size, eos_token_ids=eos_token_ids,
            grammar_backend=grammar_backend, max_logprobs=max_logprobs,
        )  # fmt: skip
        self._queue: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput | None]]] = deque()
        self._depth = 1
        self._error: Exception | None = None
        self._drafts = scheduler.config.num_speculative_tokens > 0
        if self._drafts:
            require(self.runner_info, {Capability.SPECULATIVE}, None)
        if scheduler.config.async_scheduling:
            require(self.runner_info, {Capability.ASYNC_OUTPUT}, None)
            self._depth = executor.max_concurrent_batches

    # -- requests ---------------------------------------------------------------------------------------------

    def add_request(
        self, req_id: str, prompt_token_ids: list[int], params: SamplingParams, extra_keys: tuple[str, ...] = ()
    ) -> Request:
        """Check a request and queue it.

        Raises EngineError (bad ids, a prompt that can never fit, an id in use, a grammar that cannot be compiled),
        CapabilityError (parameters that the runner does not offer) or SamplingParamsError (a logits processor refuses
        its arguments); nothing is queued then, and no seed is drawn.
        """
        self._check_alive()
        request = self.admission.admit(req_id, prompt_token_ids, params, extra_keys)
        self.scheduler.add_request(request)
        if params.seed is None:
            # Here and not in the runner, so that every rank, and every resume after a preemption, has the same one.
            request.seed = int(self._rng.integers(INT64_MIN, INT64_MAX, endpoint=True))
        return request

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
        outputs: list[EngineCoreOutput] = []
        if self.scheduler.has_requests and len(self._queue) < self._depth:
            plan = self.scheduler.schedule()
            outputs = self._launch(plan)
            if len(self._queue) < self._depth and plan.total_num_scheduled_tokens:
                return outputs
        if outputs or not self._queue:
            return outputs
        return self._take_oldest()

    def _take_oldest(self) -> list[EngineCoreOutput]:
        """Wait for the oldest step under way and apply its result."""
        plan, future = self._queue.popleft()
        output = future.result()
        if output is None:
            raise EngineError("sample_tokens gave no output", field="sample_tokens", expected="a ModelRunnerOutput")
        outputs = self.scheduler.update_from_output(plan, output)
        if self._drafts and plan.total_num_scheduled_tokens:
            self._take_drafts()
        return outputs

    def _launch(self, plan: SchedulerOutput) -> list[EngineCoreOutput]:
        """Queue a step: two calls, because masks are made on the host while the model runs. Returns the results of
        earlier steps, where the masks had to wait for them."""
        executed = self.executor.execute_model(plan, non_block=True)
        if executed.result() is not None:  # a plan without tokens changes state only
            self._queue.append((plan, executed))
            return []
        outputs: list[EngineCoreOutput] = []
        # 1 the tokens that the masks depend on
        if self.scheduler.waits_for_tokens(plan):
            while self._queue:
                outputs += self._take_oldest()
        # 2 the masks, of requests that are still live
        grammar, failed = grammar_output(
            self.scheduler.constrained(plan), self.scheduler.config.num_speculative_tokens, self.vocab_size
        )
        # 3 a grammar that cannot be followed ends its request; what the step draws for it is ignored
        outputs += [self.scheduler.fail(req_id, str(e)) for req_id, e in failed.items()]
        # 4 draw
        self._queue.append((plan, self.executor.sample_tokens(grammar, non_block=True)))
        return outputs

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
