"""Text in, text out: the offline front door. Turns prompts into requests and tokens back into text.

Stop strings, several answers to one prompt and chat templates live here, at the edge: the engine below knows tokens
only. A model without a tokenizer (the witness model) is driven with lists of token ids.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from engine_core.engine_config import EngineConfig, build_engine, open_model
from engine_core.executor import Method
from engine_core.plan_builder import EngineCoreOutput
from engine_core.tokenizer import IncrementalDecoder, Tokenizer
from runner_api import EngineError, RunnerFactory, RunnerInfo, SamplingParams
from runner_api.checkpoint import Checkpoint
from runner_api.sampling_params import INT64_MIN

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
# progress(finished requests, all requests, tokens drawn so far), after each step
Progress = Callable[[int, int, int], None]

__all__ = ["LLM", "EngineConfig", "Progress", "Prompt", "RequestOutput"]


@dataclass(slots=True)
class RequestOutput:
    """One answer. `index` counts the answers to one prompt (`SamplingParams.n`).

    prompt: the text that was encoded (after the chat template), None for a prompt of token ids.
    text: without the stop string or stop token that ended it; empty if the model has no tokenizer.
    token_ids: every token drawn, that of a stop included. logprobs: per token, by token id; None if not asked for.
    prompt_logprobs: per prompt token, by token id, None for the first one; None if not asked for.
    finish_reason: "stop", "length", or "error" where no further token could be drawn; `error` says why then.
    stop_reason: the stop string or stop token id, None for end of sequence and for the end of a grammar.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    index: int = 0
    logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    error: str | None = None


class _Stream:
    """One answer while it grows."""

    def __init__(self, output: RequestOutput, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.output = output
        self.params = params
        self._decoder = IncrementalDecoder(tokenizer) if tokenizer else None

    def take(self, step: EngineCoreOutput) -> bool:
        """Add a step's tokens. True: a stop string ended the answer, though the engine does not know it yet."""
        out = self.output
        if step.logprobs is not None:
            out.logprobs = out.logprobs or []
            out.logprobs.append(step.logprobs)
        if step.prompt_logprobs is not None:
            out.prompt_logprobs = step.prompt_logprobs
        for i, token in enumerate(step.new_token_ids):
            out.token_ids.append(token)
            last = i == len(step.new_token_ids) - 1
            hidden = last and step.ends_with_stop  # the token of a stop is no text
            piece = self._decoder.push(token) if self._decoder and not hidden else ""
            if last and step.finish_reason and self._decoder:
                piece += self._decoder.finish()
            if self._grow(piece):
                return step.finish_reason is None or not last
        if step.finish_reason and not step.new_token_ids and self._decoder:
            out.text += self._decoder.finish()
        out.finish_reason, out.stop_reason, out.error = step.finish_reason, step.stop_reason, step.error
        return False

    def _grow(self, piece: str) -> bool:
        """Append text; cut it at the first stop string, if one is complete now."""
        out, before = self.output, len(self.output.text)
        out.text += piece
        if not piece or len(out.token_ids) <= self.params.min_tokens:
            return False
        # A stop string may have begun in earlier text, but only so far back that it was not complete then.
        found = [
            (at, stop) for stop in self.params.stop if (at := out.text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if not found:
            return False
        at, stop = min(found)
        out.text, out.finish_reason, out.stop_reason = out.text[:at], "stop", stop
        return True


class LLM:
    """A model that answers prompts, on the runner of your choice.

    >>> with LLM("smollm2", runner="cpu") as llm:  # doctest: +SKIP
    ...     print(llm.chat([{"role": "user", "content": "Hello"}])[0].text)

    model: a path, `smollm2`, a Checkpoint or a WitnessConfig; options: the other fields of `EngineConfig`.
    Raises UnknownNameError for an option, runner or layout that does not exist, CheckpointError for a bad model.
    """

    def __init__(self, model: Any, runner: str | RunnerFactory = "cpu", **options: Any) -> None:
        self.config = EngineConfig.from_options(model, {"runner": runner, **options})
        facts = open_model(model)
        self.tokenizer: Tokenizer | None = None
        if isinstance(facts.model, Checkpoint):
            self.tokenizer = Tokenizer.from_checkpoint(facts.model)
            eos = dict.fromkeys((*facts.eos_token_ids, *self.tokenizer.eos_token_ids))
            facts = replace(facts, eos_token_ids=tuple(eos))
        self.engine = build_engine(self.config, facts, self.tokenizer)
        self._next_id = 0

    @property
    def runner_info(self) -> RunnerInfo:
        """Which runner serves: class, device, dtype, layout, noise, capabilities."""
        return self.engine.runner_info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answer each prompt (a text or a list of token ids), all in one batch; in the order of the prompts.

        sampling_params: one for all, or one per prompt. With n > 1 a prompt has n consecutive answers, of seeds
        seed, seed + 1, … if a seed is given. chat: each text is a user's message, put through the chat template.

        Raises EngineError, CapabilityError or SamplingParamsError before anything runs if a prompt cannot be served.
        """
        listed = _as_list(prompts)
        params = _params_per_prompt(sampling_params, len(listed))
        if chat:
            for prompt in listed:
                if not isinstance(prompt, str):
                    raise EngineError("a chat message is text", field="prompts", got=prompt, expected="a str")
            return self.chat([[{"role": "user", "content": p}] for p in listed], params, progress=progress)
        return self._run([(*self._encode(p), q) for p, q in zip(listed, params, strict=True)], progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several: lists of {"role": …, "content": …}."""
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = _params_per_prompt(sampling_params, len(conversations))
        tokenizer = self._need_tokenizer("messages")
        texts = [tokenizer.apply_chat_template(c) for c in conversations]
        ids = [tokenizer.encode(t, add_special_tokens=False) for t in texts]  # the template has written them
        return self._run(list(zip(texts, ids, params, strict=True)), progress)

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Words that must not be said, as `SamplingParams.bad_words_token_ids` wants them. Raises EngineError."""
        return self._need_tokenizer("bad_words").encode_bad_words([words] if isinstance(words, str) else words)

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise EngineError("this model has no tokenizer", field=what, hint="Give prompts as lists of token ids")
        return self.tokenizer

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer("prompts").encode(prompt)
        return None, list(prompt)

    def _run(
        self, requests: list[tuple[str | None, list[int], SamplingParams]], progress: Progress | None
    ) -> list[RequestOutput]:
        streams: dict[str, _Stream] = {}
        live: set[str] = set()
        try:
            for prompt, ids, params in requests:
                if params.stop:
                    self._need_tokenizer("stop")
                for index in range(params.n):
                    req_id, self._next_id = str(self._next_id), self._next_id + 1
                    single = replace(params, n=1, seed=_nth_seed(params.seed, index))
                    # The engine may rewrite parameters, as those of a replayed request.
                    single = self.engine.add_request(req_id, ids, single).sampling_params
                    streams[req_id] = _Stream(RequestOutput(prompt, list(ids), index=index), single, self.tokenizer)
                    live.add(req_id)
            self._drain(streams, live, progress)
        finally:
            for req_id in sorted(live, key=int):  # only after a failure or an interruption
                self.engine.abort(req_id)
        return [stream.output for stream in streams.values()]

    def _drain(self, streams: Mapping[str, _Stream], live: set[str], progress: Progress | None) -> None:
        num_tokens = 0
        while self.engine.has_requests:
            for step in self.engine.step():
                stream = streams.get(step.req_id)
                if stream is None or step.req_id not in live:
                    continue
                if stopped := stream.take(step):
                    self.engine.abort(step.req_id)
                num_tokens += len(step.new_token_ids)
                if stopped or step.finish_reason:
                    live.discard(step.req_id)
            if progress:
                progress(len(streams) - len(live), len(streams), num_tokens)

    def collective_rpc(self, method: Method, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a worker method, or `method(worker, …)`, on every rank."""
        return self.engine.collective_rpc(method, *args, **kwargs)

    def shutdown(self) -> None:
        """Give the model's memory back. A second call does nothing."""
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several. A flat list of ints is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, os.PathLike)) or not hasattr(prompts, "__iter__"):
        raise EngineError("not a prompt", field="prompts", got=prompts, expected="a text, token ids, or a list of them")
    items: list[Any] = list(prompts)
    if items and all(hasattr(item, "__index__") for item in items):
        return [items]
    for item in items:
        if not isinstance(item, str) and not hasattr(item, "__iter__"):
            raise EngineError("not a prompt", field="prompts", got=item, expected="a text or a list of token ids")
    return items


def _params_per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)) or not all(isinstance(p, SamplingParams) for p in params):
        raise EngineError(
            "not sampling parameters", field="sampling_params", got=params,
            expected="SamplingParams, or a list of one per prompt",
        )  # fmt: skip
    if len(params) != count:
        raise EngineError(
            "parameters come one for all, or one per prompt", field="sampling_params", got=len(params), expected=count
        )
    return list(params)


def _nth_seed(seed: int | None, index: int) -> int | None:
    """The index-th seed from `seed` on, wrapped into 64 signed bits; -1 is left out, because it reads as "no seed"."""
    if seed is None:
        return None
    value = seed + index + (seed < -1 <= seed + index)
    return (value - INT64_MIN) % 2**64 + INT64_MIN
