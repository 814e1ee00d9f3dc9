"""The sampler: state by row, and the one place where the order of the steps is written.

Source: vLLM 0.33 sampling order. The grammar's mask comes before (`grammar.py`), since log probabilities are taken
from what it leaves. Twin: cpu_reference/sample/sampler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpu_backend.packed_copy import PackedCopy
from gpu_backend.request_state import RequestState
from gpu_backend.sample.allowed_token_ids import AllowedTokenIds
from gpu_backend.sample.bad_words import BadWords
from gpu_backend.sample.custom import CustomProcessors
from gpu_backend.sample.draw import draw
from gpu_backend.sample.gumbel import gumbel_sample, gumbel_scores
from gpu_backend.sample.logit_bias import LogitBias
from gpu_backend.sample.logits_rows import LogitsRows
from gpu_backend.sample.logprob import LogprobsTensors, TokenLogprobs
from gpu_backend.sample.min_p import MinP
from gpu_backend.sample.min_tokens import MinTokens
from gpu_backend.sample.penalties import Penalties
from gpu_backend.sample.prompt_logprob import PromptLogprobs
from gpu_backend.sample.row_params import Limits
from gpu_backend.sample.temperature import Temperature
from gpu_backend.sample.thinking_budget import ThinkingBudget
from gpu_backend.sample.top_k_top_p import TopKTopP
from gpu_backend.sample.trace_replay import TraceReplay
from runner_api import NewRequestData, RunnerConfig, SamplingParams
from runner_api.logits_processors import RowMove


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """sampled: int64[L] one token per logits row; faults: int32[L] SampleFault of each; processed: float[L, V] the
    logits after all processing, if anybody looks at them; scores: float32[L, V] what the tokens won by, if asked
    for."""

    sampled: torch.Tensor
    faults: torch.Tensor
    processed: torch.Tensor | None
    scores: torch.Tensor | None


class Sampler:
    """Every step keeps its parameters by row; a row is rewritten whole when a request moves in.

    The host's arrays (`*_np`) hold what was asked; the device's are their copies as of the step's one packed copy.
    Longer tables are the device's alone and get what is staged, after that copy.
    """

    def __init__(self, config: RunnerConfig, vocab_size: int, req_states: RequestState, device: torch.device) -> None:
        n = config.max_num_reqs
        self.vocab_size = vocab_size
        self.noise = config.noise
        self.seeds_np = np.zeros(n, np.int64)
        self.seeds: torch.Tensor  # int64[N], device; set by `bind`
        self.penalties = Penalties(n, vocab_size, req_states, device)
        self.bad_words = BadWords(n, req_states, device)
        self.custom = CustomProcessors(n, vocab_size, config.logits_processors, device)
        self.temperature = Temperature(n)
        self.min_p = MinP(n)
        self.top_k_top_p = TopKTopP(n, vocab_size)
        self.trace_replay = TraceReplay(n, config.max_model_len, device)
        editing_steps = (
            # 1 what a request's own lists say
            AllowedTokenIds(n, vocab_size, device),
            LogitBias(n, device),
            MinTokens(n, device),
            # 2 what it has said before
            self.penalties,
            self.bad_words,
            # 3 a user's own code, and the end of thinking, over all that
            self.custom,
            ThinkingBudget(n, config.reasoning, req_states, device),
        )
        # 4 the shape of the distribution
        self.shaping_steps = (self.temperature, self.min_p, self.top_k_top_p)
        self.steps = (*editing_steps, *self.shaping_steps)
        self.token_logprobs = TokenLogprobs(n, vocab_size, config.logprobs_mode, device)
        self.prompt_logprobs = PromptLogprobs(n, vocab_size, config.logprobs_mode)
        # all that keep tables by row
        self._tables = (*self.steps, self.trace_replay, self.token_logprobs, self.prompt_logprobs)

    # -- the step's copy --------------------------------------------------------------------------------------

    def host_tables(self) -> dict[str, np.ndarray]:
        """What the step's copy sends whole."""
        tables = {"seeds": self.seeds_np}
        for step in self._tables:
            tables |= step.host_tables()
        return tables

    def bind(self, packed: PackedCopy) -> None:
        """Take the device copies of the host's tables."""
        self.seeds = packed.views["seeds"]
        for step in self._tables:
            step.bind(packed)

    def pack(self, packed: PackedCopy) -> None:
        """Hand what is staged to the step's copy."""
        for step in self._tables:
            step.pack(packed)

    # -- what happens to rows ---------------------------------------------------------------------------------

    def add_request(self, row: int, new: NewRequestData) -> None:
        """A request moves into a row; it is complete after `apply_staged_writes`."""
        self.add_to_custom(row, new)
        self.add_to_tables(row, new)

    def add_to_custom(self, row: int, new: NewRequestData) -> None:
        """The half of `add_request` that processors are told. They hear of moves afterwards, by `move_rows`."""
        self.custom.add_request(row, new.sampling_params or SamplingParams(temperature=0.0), new)

    def add_to_tables(self, row: int, new: NewRequestData) -> None:
        """The other half, for the row that the request has when all rows have moved: what is staged is not moved."""
        params = new.sampling_params or SamplingParams(temperature=0.0)
        self.seeds_np[row] = new.seed
        for step in self._tables:
            if step is not self.custom:
                step.add_request(row, params, new)

    def apply_staged_writes(self, packed: PackedCopy) -> None:
        """Lay in what was staged, and set up what is made of the tokens of new requests, which the request state must
        know by now."""
        for step in self._tables:
            step.apply_staged_writes(packed)

    def remove_request(self, row: int) -> None:
        """The row's request leaves it; whoever comes rewrites the row through `add_request`."""
        self.custom.remove_request(row)

    def forget_request(self, req_id: str) -> None:
        """The request is finished or will start over: what was collected for it is of no use."""
        self.prompt_logprobs.forget_request(req_id)

    def move_rows(self, moves: Sequence[RowMove]) -> None:
        """Requests changed rows, in this order. The tables of `row_tables` have moved already (dense layout)."""
        self.custom.move_rows(moves)

    def observe(
        self, batch_rows: np.ndarray, idx_mapping: torch.Tensor, sampled_token_ids: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> None:  # fmt: skip
        """Tokens entered the state, drawn or imposed.

        Shapes: batch_rows: int64[R], the rows on the host; idx_mapping: int64[R]; sampled_token_ids: int64[R, 1+K];
        num_sampled: int32[R].
        """
        if self.penalties.used_by(batch_rows):
            self.penalties.observe(idx_mapping, sampled_token_ids, num_sampled)
        self.custom.observe(idx_mapping, sampled_token_ids, num_sampled)

    # Processors keep tables of their own, which nobody else looks at; which rows they edit is theirs too.

    def row_tables(self) -> dict[str, np.ndarray | torch.Tensor]:
        """Every table by row; one that the host keeps is given as it is there."""
        tables: dict[str, np.ndarray | torch.Tensor] = dict(self.host_tables())
        for step in self._tables:
            if step is not self.custom:
                tables |= step.row_tables()
        return tables

    def unsent_tables(self) -> dict[str, np.ndarray]:
        """Tables by row that the host keeps for itself alone."""
        return {"num_bad_word_tokens": self.bad_words.num_tokens_np}

    def row_widths(self, row: int) -> dict[str, int]:
        """Of a live row: how many elements mean something, in tables where that is not all of them."""
        widths: dict[str, int] = {}
        for step in self._tables:
            if step is not self.custom:
                widths |= step.row_widths(row)
        return widths

    # -- the step ---------------------------------------------------------------------------------------------

    def sample(self, logits: torch.Tensor, rows: LogitsRows, *, keep_scores: bool = False) -> SamplerOutput:
        """Draw one token per logits row. `logits`: float[L, V], contiguous, left as they are."""
        # 1 process, a step at a time; steps that no request of the batch needs are left out, which changes no value
        used = [step for step in self.steps if step.used_by(rows.batch_rows)]
        keep_processed = keep_scores or self.needs_processed(rows.batch_rows)
        if not keep_processed:
            used = [step for step in used if step not in self.shaping_steps]  # `draw` takes them itself
        processed = logits
        if used:
            processed = logits.to(torch.float32, copy=True)
            for step in used:
                step.apply(rows, processed)
        # 2 draw: the noise belongs to (request, place in the sequence) and to nothing else
        arguments = (
            rows.expanded_idx_mapping, rows.positions, self.temperature.temperature, self.seeds, self.noise
        )  # fmt: skip
        sampled = torch.empty(rows.num_logits, dtype=torch.int64, device=logits.device)
        faults = torch.empty(rows.num_logits, dtype=torch.int32, device=logits.device)
        if not keep_processed:
            limits, short = self._limits(rows.batch_rows)
            draw(*arguments, limits, rows.num_logits, processed, sampled, faults, short=short)
            return SamplerOutput(sampled, faults, None, None)
        gumbel_sample(*arguments, rows.num_logits, processed, sampled, faults)
        scores = gumbel_scores(*arguments, rows.num_logits, processed) if keep_scores else None
        return SamplerOutput(sampled, faults, processed, scores)

    def _limits(self, batch_rows: np.ndarray) -> tuple[Limits | None, bool]:
        """What min-p, top-k and top-p ask of the draw, None if nothing; and whether k is small wherever it is used."""
        if not self.min_p.used_by(batch_rows) and not self.top_k_top_p.used_by(batch_rows):
            return None, False
        limits = Limits(self.min_p.min_p, self.top_k_top_p.top_k, self.top_k_top_p.top_p)
        return limits, self.top_k_top_p.has_small_k(batch_rows)

    def needs_processed(self, batch_rows: np.ndarray) -> bool:
        """Does anybody of the batch look at the processed logits? A draw that makes none is for other batches."""
        return self.token_logprobs.of_processed and self.token_logprobs.used_by(batch_rows)

    def logprobs(
        self, rows: LogitsRows, taken: torch.Tensor, raw: torch.Tensor, processed: torch.Tensor | None
    ) -> LogprobsTensors | None:
        """Log probabilities of the tokens that were taken; None if nobody wants any.

        taken: int64[L]; raw, processed: float[L, V] the logits before all steps and after them.
        """
        if not self.token_logprobs.used_by(rows.batch_rows):
            return None
        return self.token_logprobs.compute(rows, taken, processed if self.token_logprobs.of_processed else raw)
