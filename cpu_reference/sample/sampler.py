"""The sampler: state by row, and the one place where the order of the steps is written.

Source: vLLM 0.33 sampling order. The grammar's mask comes before (`grammar.py`), since log probabilities are taken
from what it leaves; trace replay comes behind, over what is drawn. Twin: gpu_backend/sample/sampler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpu_reference.request_state import RequestState
from cpu_reference.sample.allowed_token_ids import AllowedTokenIds
from cpu_reference.sample.bad_words import BadWords
from cpu_reference.sample.custom import CustomProcessors
from cpu_reference.sample.gumbel import gumbel_sample, gumbel_scores
from cpu_reference.sample.logit_bias import LogitBias
from cpu_reference.sample.logits_rows import LogitsRows
from cpu_reference.sample.logprob import TokenLogprobs
from cpu_reference.sample.min_p import MinP
from cpu_reference.sample.min_tokens import MinTokens
from cpu_reference.sample.penalties import Penalties
from cpu_reference.sample.prompt_logprob import PromptLogprobs
from cpu_reference.sample.temperature import Temperature
from cpu_reference.sample.thinking_budget import ThinkingBudget
from cpu_reference.sample.top_k_top_p import TopKTopP
from cpu_reference.sample.trace_replay import TraceReplay
from runner_api import LogprobsLists, NewRequestData, RunnerConfig, SamplingParams
from runner_api.logits_processors import RowMove


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """sampled: int64[L] one token per logits row; faults: int32[L] SampleFault of each; processed: float[L, V] the
    logits after all processing; scores: float64[L, V] what the tokens won by, if asked for."""

    sampled: np.ndarray
    faults: np.ndarray
    processed: np.ndarray
    scores: np.ndarray | None


class Sampler:
    """Every step keeps its parameters by row; a row is rewritten whole when a request moves in."""

    def __init__(self, config: RunnerConfig, vocab_size: int, req_states: RequestState) -> None:
        n = config.max_num_reqs
        self.vocab_size = vocab_size
        self.noise = config.noise
        self.seeds = np.zeros(n, np.int64)
        self.penalties = Penalties(n, vocab_size, req_states)
        self.custom = CustomProcessors(n, vocab_size, config.logits_processors)
        self.temperature = Temperature(n)
        self.trace_replay = TraceReplay(n, config.max_model_len)
        self.steps = (
            # 1 what a request's own lists say
            AllowedTokenIds(n, vocab_size),
            LogitBias(n),
            MinTokens(n),
            # 2 what it has said before
            self.penalties,
            BadWords(n, req_states),
            # 3 a user's own code, and the end of thinking, over all that
            self.custom,
            ThinkingBudget(n, config.reasoning, req_states),
            # 4 the shape of the distribution
            self.temperature,
            MinP(n),
            TopKTopP(n, vocab_size),
        )
        self.token_logprobs = TokenLogprobs(n, vocab_size, config.logprobs_mode)
        self.prompt_logprobs = PromptLogprobs(n, vocab_size, config.logprobs_mode)
        # all that keep tables by row
        self._tables = (*self.steps, self.trace_replay, self.token_logprobs, self.prompt_logprobs)

    # -- what happens to rows ---------------------------------------------------------------------------------

    def add_request(self, row: int, new: NewRequestData) -> None:
        """A request moves into a row; it is complete after `apply_staged_writes`."""
        params = new.sampling_params or SamplingParams(temperature=0.0)
        self.seeds[row] = new.seed
        for step in self._tables:
            step.add_request(row, params, new)

    def apply_staged_writes(self) -> None:
        """Set up what is made of the tokens of new requests, which the request state must know by now."""
        self.penalties.apply_staged_writes()

    def remove_request(self, row: int) -> None:
        """The row's request leaves it; whoever comes rewrites the row through `add_request`."""
        self.custom.remove_request(row)

    def forget_request(self, req_id: str) -> None:
        """The request is finished or will start over: what was collected for it is of no use."""
        self.prompt_logprobs.forget_request(req_id)

    def move_rows(self, moves: Sequence[RowMove]) -> None:
        """Requests changed rows, in this order. The tables of `row_tables` have moved already (dense layout)."""
        self.custom.move_rows(moves)

    def observe(self, idx_mapping: np.ndarray, sampled_token_ids: np.ndarray, num_sampled: np.ndarray) -> None:
        """Tokens entered the state, drawn or imposed.

        Shapes: idx_mapping: int64[R]; sampled_token_ids: int64[R, 1+K]; num_sampled: int32[R].
        """
        for step in (self.penalties, self.custom):
            step.observe(idx_mapping, sampled_token_ids, num_sampled)

    # Processors keep tables of their own, which nobody else looks at; which rows they edit is theirs too.

    def row_tables(self) -> dict[str, np.ndarray]:
        """Every table by row."""
        tables = {"seeds": self.seeds}
        for step in self._tables:
            if step is not self.custom:
                tables |= step.row_tables()
        return tables

    def row_widths(self, row: int) -> dict[str, int]:
        """Of a live row: how many elements mean something, in tables where that is not all of them."""
        widths: dict[str, int] = {}
        for step in self._tables:
            if step is not self.custom:
                widths |= step.row_widths(row)
        return widths

    # -- the step ---------------------------------------------------------------------------------------------

    def sample(self, logits: np.ndarray, rows: LogitsRows, *, keep_scores: bool = False) -> SamplerOutput:
        """Draw one token per logits row. `logits`: float[L, V], left as they are."""
        # 1 process, a step at a time; steps that no request of the batch needs are left out, which changes no value
        processed = logits.copy()
        for step in self.steps:
            if step.used_by(rows.batch_rows):
                step.apply(rows, processed)
        # 2 draw: the noise belongs to (request, place in the sequence) and to nothing else
        arguments = (
            rows.expanded_idx_mapping, rows.positions, self.temperature.temperature, self.seeds, self.noise,
            rows.num_logits, processed,
        )  # fmt: skip
        sampled, faults = np.zeros(rows.num_logits, np.int64), np.zeros(rows.num_logits, np.int32)
        gumbel_sample(*arguments, sampled, faults)
        scores = gumbel_scores(*arguments) if keep_scores else None
        return SamplerOutput(sampled, faults, processed, scores)

    def logprobs(
        self, rows: LogitsRows, taken: np.ndarray, raw: np.ndarray, processed: np.ndarray
    ) -> LogprobsLists | None:
        """Log probabilities of the tokens that were taken; None if nobody wants any.

        taken: int64[L]; raw, processed: float[L, V] the logits before all steps and after them.
        """
        if not self.token_logprobs.used_by(rows.batch_rows):
            return None
        return self.token_logprobs.compute(rows, taken, processed if self.token_logprobs.of_processed else raw)
