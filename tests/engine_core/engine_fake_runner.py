"""A runner without tensors: it checks every plan and draws tokens as a function of a request's history alone.

It keeps KV as the engine promises it: what a slot holds is written when a token is scheduled and read back through
the block list, so a block that two requests wrongly share, or a wrong prefix hit, changes the tokens. Under a grammar
it draws the first allowed token at or after its own. `ParityBackend` is a grammar to go with it.
"""

from __future__ import annotations

import numpy as np

from engine_core.engine import Engine
from engine_core.executor import make_executor
from engine_core.kv_cache_manager import KVCacheManager
from engine_core.plan_builder import SchedulerConfig
from engine_core.scheduler import Scheduler
from engine_core.structured_output import GrammarError
from engine_core.worker import WorkerConfig
from runner_api import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    CallOrderError,
    Capability,
    DraftTokenIds,
    EngineError,
    KVCacheSpec,
    ModelRunnerOutput,
    PlanValidator,
    RunnerConfig,
    RunnerInfo,
    SampleFault,
    WitnessConfig,
    WitnessGroup,
    group_kv_cache_specs,
)

CAPABILITIES = frozenset(
    {Capability.GENERATE, Capability.SEEDED_SAMPLING, Capability.ASYNC_OUTPUT, Capability.MULTI_GROUP,
     Capability.SLIDING_WINDOW, Capability.TOP_K, Capability.SPECULATIVE, Capability.GRAMMAR,
     Capability.SAMPLE_FAULTS}
)  # fmt: skip


def next_token(history: list[int], seed: int, vocab_size: int, window: int | None = None) -> int:
    """A token from (token, position) pairs read back; the whole history, or its last `window` tokens."""
    start = max(0, len(history) - window) if window else 0
    value = seed & 0xFFFF
    for position in range(start, len(history)):
        value = (value * 1000003 + history[position] * 8191 + position * 131 + 7) & 0xFFFFFFFF
    return (value >> 7) % vocab_size


def masked(token: int, words) -> int | None:
    """The first allowed token at or after `token`, around the end; None if none is allowed."""
    if words is None:
        return token
    allowed = [v for v in range(32 * len(words)) if words[v // 32] >> (v % 32) & 1]
    return next((v for v in allowed if v >= token), allowed[0] if allowed else None)


class Output:
    def __init__(self, output: ModelRunnerOutput, fetched=lambda: None) -> None:
        self.output = output
        self.fetched = fetched

    def get_output(self) -> ModelRunnerOutput:
        self.fetched()
        return self.output


class FakeRunner:
    LAYOUTS = ("slots", "dense")

    def __init__(self, config) -> None:
        self.config = config
        self.layout = config.layout or "slots"
        self.model: WitnessConfig | None = None
        self.tokens: dict[str, list[int]] = {}
        self.seeds: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, tuple[list[int], ...]] = {}
        self.plans = []
        self.grammars = []  # of each step that sampled
        self.calls = []  # (what, number of the step), in the order of the calls
        self.faults: dict[str, int] = {}  # request to the number of outputs after which its logits are broken
        self.pending = None
        self.drafts: dict[str, list[int]] = {}
        self.is_shut_down = False

    def describe(self) -> RunnerInfo:
        return RunnerInfo("fake", "engine_fake_runner.FakeRunner", "0", "cpu", "float32",
                          self.layout, self.config.noise, CAPABILITIES)  # fmt: skip

    def load_model(self, model) -> None:
        self.model = model

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.model.kv_cache_specs()

    def initialize_kv_cache(self, kv_cache_config) -> None:
        self.groups = kv_cache_config.groups
        self.validator = PlanValidator(self.config, kv_cache_config, self.model.vocab_size, CAPABILITIES, self.layout)
        sizes = [kv_cache_config.num_blocks * g.spec.block_size for g in self.groups]
        self.kv = [np.full((size, 2), -1, dtype=np.int64) for size in sizes]

    def capture_graphs(self) -> tuple:
        return ()

    def _slot(self, g: int, req_id: str, position: int) -> int:
        size = self.groups[g].spec.block_size
        return self.blocks[req_id][g][position // size] * size + position % size

    def execute_model(self, plan, *, descriptor=None, intermediate_tensors=None):
        if self.pending is not None:
            raise CallOrderError("sample_tokens was not called", field="execute_model")
        self.validator.check(plan)
        self.validator.commit(plan)
        self.calls.append(("execute", len(self.plans)))
        self.plans.append(plan)
        for req_id in plan.finished_req_ids | plan.preempted_req_ids:
            if self.layout == "slots" or req_id in plan.finished_req_ids:
                self.tokens.pop(req_id, None)
        for new in plan.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prefill_token_ids)
            self.seeds[new.req_id] = new.seed
            self.computed[new.req_id] = new.num_computed_tokens
            self.blocks[new.req_id] = tuple(list(ids) for ids in new.block_ids)
        cached = plan.scheduled_cached_reqs
        for req_id, computed, ids in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                assert self.tokens[req_id] == list(cached.all_token_ids[req_id])
                self.blocks[req_id] = tuple(list(more) for more in ids)
                self.computed[req_id] = computed
            elif ids is not None:
                for owned, more in zip(self.blocks[req_id], ids, strict=True):
                    owned.extend(more)
        for req_id, n in plan.num_scheduled_tokens.items():
            drafts = self.drafts.get(req_id, [])[: len(plan.scheduled_spec_decode_tokens.get(req_id, ()))]
            start, known = self.computed[req_id], self.tokens[req_id] + drafts
            for position in range(start, start + n):
                for g in range(len(self.groups)):
                    self.kv[g][self._slot(g, req_id, position)] = known[position], position
        self.pending = plan
        if not plan.total_num_scheduled_tokens:
            self.pending = None
            return EMPTY_MODEL_RUNNER_OUTPUT
        return None

    def _read(self, req_id: str, length: int) -> int:
        """The token after the first `length`, from what the KV holds in each group's window."""
        total = 0
        for g, group in enumerate(self.groups):
            window = group.spec.sliding_window
            start = max(0, length - window) if window else 0
            history = [0] * start
            for position in range(start, length):
                token, stored = self.kv[g][self._slot(g, req_id, position)]
                assert stored == position, f"{req_id}: position {position} of group {g} holds {stored}"
                history.append(int(token))
            total += next_token(history, self.seeds[req_id], self.model.vocab_size, window) * (g + 1)
        return total % self.model.vocab_size

    def sample_tokens(self, grammar=None, *, forced=None) -> Output:
        if self.pending is None:
            raise CallOrderError("execute_model was not called", field="sample_tokens")
        plan, self.pending = self.pending, None
        step = len(self.plans) - 1
        self.calls.append(("sample", step))
        self.grammars.append(grammar)
        sampled, errors = {}, {}
        for req_id, n in plan.num_scheduled_tokens.items():
            drafts = self.drafts.pop(req_id, [])[: len(plan.scheduled_spec_decode_tokens.get(req_id, ()))]
            end = self.computed[req_id] + n
            got: list[int] = []
            if end - len(drafts) >= len(self.tokens[req_id]):
                masks, limit = self._masks(grammar, req_id, len(drafts))
                for i in range(len(drafts) + 1):
                    token = masked(self._read(req_id, end - len(drafts) + i), masks[i])
                    if token is None or len(self.tokens[req_id]) >= self.faults.get(req_id, 1 << 30):
                        errors[req_id] = SampleFault.NO_TOKEN if token is None else SampleFault.NAN
                        token = 0
                    got.append(token)
                    if i >= limit or drafts[i] != token:
                        break
                self.tokens[req_id] += got
                end -= len(drafts) - (len(got) - 1)
            self.computed[req_id] = end
            sampled[req_id] = tuple(got)
        self._propose(sampled)
        # Batch order is the runner's own business; any order must do.
        ids = tuple(sorted(sampled, reverse=True))
        return Output(
            ModelRunnerOutput(ids, tuple(() if r in errors else sampled[r] for r in ids), errors=errors),
            lambda: self.calls.append(("fetch", step)),
        )

    def _masks(self, grammar, req_id: str, num_drafts: int):
        """The request's mask rows, or None for each logits row; and how many of its drafts may be accepted."""
        if grammar is None or req_id not in grammar.structured_output_request_ids:
            return [None] * (1 + num_drafts), num_drafts
        g, stride = grammar.structured_output_request_ids.index(req_id), 1 + self.config.num_speculative_tokens
        assert grammar.grammar_bitmask.dtype == np.int32
        assert grammar.grammar_bitmask.shape == (
            len(grammar.structured_output_request_ids) * stride, -(-self.model.vocab_size // 32)
        )  # fmt: skip
        acceptable = (grammar.num_acceptable_drafts or [0] * (g + 1))[g]
        return grammar.grammar_bitmask[g * stride : (g + 1) * stride], min(num_drafts, acceptable)

    def _propose(self, sampled) -> None:
        """Drafts: the right tokens, wrong from a place on that depends on the history."""
        if not self.config.num_speculative_tokens or len(self.groups) > 1:
            return
        for req_id, got in sampled.items():
            if not got:
                continue
            history = list(self.tokens[req_id])
            drafts = []
            for i in range(self.config.num_speculative_tokens):
                token = next_token(history, self.seeds[req_id], self.model.vocab_size)
                if (len(history) + history[-1]) % 3 == i:
                    token = (token + 1) % self.model.vocab_size
                history.append(token)
                drafts.append(token)
            self.drafts[req_id] = drafts

    def take_draft_token_ids(self):
        return DraftTokenIds(tuple(self.drafts), tuple(tuple(d) for d in self.drafts.values()))

    def shutdown(self) -> None:
        self.is_shut_down = True


def expected(prompt: list[int], seed: int, max_tokens: int, model: WitnessConfig, max_model_len: int) -> list[int]:
    """What a request must yield, computed without any engine."""
    history = list(prompt)
    while len(history) < min(len(prompt) + max_tokens, max_model_len):
        total = sum(
            next_token(history, seed, model.vocab_size, group.sliding_window) * (g + 1)
            for g, group in enumerate(model.groups)
        )
        history.append(total % model.vocab_size)
    return history[len(prompt) :]


class ParityMatcher:
    """`length` tokens, even and odd in turn, the end-of-sequence tokens excepted; from `least` tokens on it may end."""

    def __init__(self, length: int, least: int, vocab_size: int, eos: tuple[int, ...]) -> None:
        self.length, self.least, self.vocab_size, self.eos = length, least, vocab_size, eos
        self.taken: list[int] = []
        self.fails_after: int | None = None

    def allows(self, token: int) -> bool:
        if self.is_terminated():
            return False
        if token in self.eos:
            return len(self.taken) >= self.least
        return token % 2 == len(self.taken) % 2

    def fill_bitmask(self, words) -> None:
        assert not self.is_terminated(), "nobody asks what comes after the end"
        if self.fails_after is not None and len(self.taken) >= self.fails_after:
            raise GrammarError("too complex")
        words[:] = 0
        for v in range(self.vocab_size):
            if self.allows(v):
                words.view(np.uint32)[v // 32] |= np.uint32(1 << v % 32)

    def accept(self, token: int) -> bool:
        if not self.allows(token):
            return False
        self.taken.append(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self.taken)
        del self.taken[-num_tokens:]

    def is_terminated(self) -> bool:
        return len(self.taken) >= self.length or bool(self.taken and self.taken[-1] in self.eos)


class ParityBackend:
    """Compiles `regex="LENGTH"` or `regex="LENGTH,LEAST"`."""

    name = "parity"

    def __init__(self, vocab_size: int, eos: tuple[int, ...]) -> None:
        self.vocab_size, self.eos = vocab_size, eos
        self.compiled: list[ParityMatcher] = []

    def compile(self, params):
        length, _, least = params.regex.partition(",")
        if not length.isdecimal():
            raise EngineError("cannot be compiled", field="structured_outputs.regex", got=params.regex)
        self.compiled.append(ParityMatcher(int(length), int(least or length), self.vocab_size, self.eos))
        return self.compiled[-1]


def build_engine(*, num_blocks=32, model=None, prefix_caching=None, eos=(), depth=2, grammar=True, **limits):
    """An engine over a FakeRunner, and that runner. grammar: with a `ParityBackend`."""
    model = model or WitnessConfig(vocab_size=32, groups=(WitnessGroup(4),))
    limits = {"max_num_reqs": 4, "max_num_batched_tokens": 16, "max_model_len": 48, **limits}
    config = SchedulerConfig(**limits)
    runner_config = RunnerConfig(
        max_num_reqs=config.max_num_reqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        layout=config.layout,
        num_speculative_tokens=config.num_speculative_tokens,
        max_concurrent_batches=depth,
    )
    executor = make_executor(WorkerConfig("engine_fake_runner:FakeRunner", model, runner_config))
    kv_cache_config = group_kv_cache_specs(executor.get_kv_cache_specs()[0], num_blocks)
    executor.initialize_from_config([kv_cache_config])
    manager = KVCacheManager(kv_cache_config, config.max_model_len, enable_prefix_caching=prefix_caching)
    engine = Engine(
        executor, Scheduler(config, manager), vocab_size=model.vocab_size, eos_token_ids=eos,
        grammar_backend=(lambda: ParityBackend(model.vocab_size, eos)) if grammar else None,
    )  # fmt: skip
    return engine, executor.worker.runner


def run_to_end(engine, max_steps=2000) -> dict[str, list[int]]:
    """Step until nothing is left; tokens by request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_requests:
            return tokens
        for output in engine.step():
            tokens.setdefault(output.req_id, []).extend(output.new_token_ids)
        engine.scheduler.kv_cache_manager.check_conservation()
    raise AssertionError(f"not finished after {max_steps} steps")
