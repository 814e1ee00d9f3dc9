"""One logits row on its way to a token: probabilities after each processing step, the noise, the winner, its margin.

The values are exact: float64 from the logits that the record holds, by the reference's own stages
(`conformance.exact_rows`, `conformance.keep_sets`). A step that the request does not ask for has no column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.certificates import Certifier, exact_draw
from conformance.exact_rows import Arithmetic, ExactRows, KnownRequest, RowProcessor
from conformance.keep_sets import Row, keep_sets
from conformance.noise import gumbel_noise
from conformance.replay_layout import plans_for
from conformance.report import fault_of
from runner_api import (
    ConfigError,
    GrammarOutput,
    ReasoningConfig,
    RunnerConfig,
    SamplingParams,
    StepRecord,
    UnknownNameError,
    load_stages,
)

# So many of the likeliest tokens are shown, before the steps and behind them; of equals, those with the best scores.
LIKELIEST = 6
# Each step and the parameters that it needs, in the sampler's order; the first group works on the logits alone.
STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("allowed tokens", ("allowed_token_ids",)),
    ("bias", ("logit_bias",)),
    ("minimum length", ("min_tokens",)),
    ("penalties", ("repetition_penalty", "frequency_penalty", "presence_penalty")),
    ("bad words", ("bad_words_token_ids",)),
    ("thinking budget", ("thinking_token_budget",)),
    ("temperature", ("temperature",)),
    ("min-p", ("min_p",)),
    ("top-k", ("top_k",)),
    ("top-p", ("top_p",)),
)
LIMITS = ("min-p", "top-k", "top-p")
NEUTRAL = SamplingParams()


@dataclass(frozen=True, slots=True)
class SampleStep:
    """One processing step. detail: its parameters, a line each; left: tokens that can still be drawn.

    probabilities: of the tokens shown, in their order; 0 for one that is out. rest: of all others together.
    """

    name: str
    detail: tuple[str, ...]
    left: int
    probabilities: tuple[float, ...]
    rest: float


@dataclass(frozen=True, slots=True)
class SamplingPicture:
    """One row. tokens: those shown, likeliest first. noise: of each, None where the request is greedy.

    scores: processed logit plus noise, -inf for what is out. winner, second: of exact arithmetic; margin: how far the
    winner leads (inf without a second). drawn: what the record says the runner drew; verdict: of its certificate.
    """

    req_id: str
    position: int
    greedy: bool
    tokens: tuple[int, ...]
    steps: tuple[SampleStep, ...]
    not_asked_for: tuple[str, ...]
    logits: tuple[float, ...]
    noise: tuple[float, ...] | None
    scores: tuple[float, ...]
    winner: int
    second: int | None
    margin: float
    drawn: int
    verdict: str


def sampling_data(
    records: StepRecord | Sequence[StepRecord], req_id: str, *, request: KnownRequest | None = None,
    logits: np.ndarray | None = None, row: int = 0, noise: str = "murmur3", grammar: GrammarOutput | None = None,
    reasoning: ReasoningConfig | None = None,
) -> SamplingPicture:  # fmt: skip
    """Follow one row of the last record.

    records: the step, and in front of it the steps that tell what the request wants and has said; or give `request`, as
    it was before the step. logits: float[L, V] of the whole step, where the record holds none. row: which of the
    request's logits rows (one for each draft, and one). noise: the scheme that the runner draws by. grammar, reasoning:
    as the runner had them, where the request uses them.

    Raises UnknownNameError for a request that the step does not hold, ConfigError for what is not known of it, for one
    that asks something of custom logits processors (extra_args), and for a row that gave it no token.
    """
    steps = [records] if isinstance(records, StepRecord) else list(records)
    if not steps:
        raise ConfigError("no record to draw", field="records", got=0, expected="at least one")
    record = steps[-1]
    if req_id not in record.req_ids:
        raise UnknownNameError("request of this step", req_id, record.req_ids, field="req_id")
    known = request or _known(steps, req_id)
    _check(known.params, grammar, reasoning)
    one, values = _one_request(record, req_id, logits, row)
    _check_drawn(record, req_id, row)
    arithmetic = Arithmetic.of("float32")
    processor = RowProcessor(load_stages("cpu"), arithmetic, reasoning)
    # masks have as many rows for each request as the runner takes drafts, and one
    masked = [] if grammar is None else grammar.structured_output_request_ids
    drafts = len(grammar.grammar_bitmask) // len(masked) - 1 if grammar is not None and masked else 0

    def processed(params: SamplingParams) -> ExactRows:
        return processor.process(one, values, [dataclasses.replace(known, params=params)], grammar, drafts)

    # 1 the steps, one more at a time: those that come later are neutral
    greedy = known.params.greedy
    offered = [s for s in STEPS if not (greedy and s[0] in ("temperature", *LIMITS))]
    asked = [(name, fields) for name, fields in offered if _asked(known.params, fields)]
    so_far = dataclasses.replace(NEUTRAL, structured_outputs=known.params.structured_outputs)
    columns: list[tuple[str, tuple[str, ...], np.ndarray]] = [
        ("raw logits" if grammar is None else "grammar", (), processed(so_far).x[row])
    ]
    for name, fields in asked:
        so_far = dataclasses.replace(so_far, **{f: getattr(known.params, f) for f in fields})
        exact = processed(so_far)
        x = exact.x[row]
        if name in LIMITS:
            limits = Row(exact.x[row], exact.error[row], exact.raw[row])
            p, k, nucleus = float(np.float32(so_far.min_p)), so_far.top_k, float(np.float32(so_far.top_p))
            x = np.where(keep_sets(limits, p, k, nucleus, arithmetic.unit).kept, x, -np.inf)
        columns.append((name, _detail(known.params, fields), x))
    # 2 the draw
    exact = processed(known.params)
    gumbel = None
    if not greedy:
        gumbel = gumbel_noise(np.array([known.seed]), exact.positions[[row]], values.shape[1], noise)[0]
    draw = exact_draw(exact, row, known, gumbel, arithmetic)
    scores = draw.scores if greedy else np.where(draw.sets.kept, draw.scores, -np.inf)
    not_asked_for = [name for name, _ in offered if name not in dict(asked)]
    return _picture(record, req_id, row, columns, not_asked_for, exact, gumbel, scores, draw)


def _known(steps: Sequence[StepRecord], req_id: str) -> KnownRequest:
    """The request before the last step, from plans and tokens."""
    certifier = Certifier(RunnerConfig())
    plans = list(plans_for("slots", (s.plan for s in steps)))
    for record, plan in zip(steps[:-1], plans, strict=False):
        certifier.observe(plan)
        certifier.take(record.tokens())
    certifier.observe(plans[-1])
    if req_id not in certifier.requests:
        raise ConfigError(
            "nothing is known of what the request wants: the records do not show how it came", field="request",
            got=req_id, hint="Give the steps since it was admitted, or `request`",
        )  # fmt: skip
    return certifier.requests[req_id]


def _check(params: SamplingParams, grammar: GrammarOutput | None, reasoning: ReasoningConfig | None) -> None:
    if params.extra_args:
        raise ConfigError(
            "what custom logits processors did cannot be followed", field="extra_args", got=sorted(params.extra_args)
        )
    for name, value, given in (
        ("grammar", params.structured_outputs, grammar), ("reasoning", params.thinking_token_budget, reasoning),
    ):  # fmt: skip
        if value is not None and given is None:
            raise ConfigError(
                "the request's logits cannot be followed without it", field=name, expected="as the runner had it"
            )


def _check_drawn(record: StepRecord, req_id: str, row: int) -> None:
    """Refuse a row that gave no token: inside of a prompt, behind a rejected draft, or with a fault."""
    i = record.row_of(req_id)
    if fault := fault_of(record, i):
        raise ConfigError("the request got an error, and no token was drawn", field=req_id, got=fault)
    if row >= int(record.num_sampled[i]):
        raise ConfigError(
            "the request took no token of this row", field=req_id,
            got=f"row {row}, num_sampled {int(record.num_sampled[i])}",
            hint="Within a prompt no token counts, nor one behind a rejected draft: take another step, or a row before",
        )  # fmt: skip


def _one_request(record: StepRecord, req_id: str, logits: np.ndarray | None, row: int) -> tuple[StepRecord, np.ndarray]:
    """The record cut down to one request, and its logits rows."""
    logits = record.logits if logits is None else logits
    if logits is None:
        raise ConfigError(
            "the record holds no logits", field="logits",
            hint='Record them: RunnerConfig(record=frozenset({"logits"})); or give them',
        )  # fmt: skip
    i = record.row_of(req_id)
    first, end = int(record.cu_num_logits[i]), int(record.cu_num_logits[i + 1])
    if not 0 <= row < end - first:
        raise ConfigError("no such logits row of the request", field="row", got=row, expected=f"0 to {end - first - 1}")
    cut = dataclasses.replace(
        record, num_reqs=1, req_ids=(req_id,), logits_indices=record.logits_indices[first:end],
        cu_num_logits=np.array([0, end - first], np.int32),
    )  # fmt: skip
    return cut, np.asarray(logits)[first:end]


def _asked(params: SamplingParams, fields: tuple[str, ...]) -> bool:
    """Whether one of the fields has a value of its own: 0 is one (a thinking budget of 0), an empty list is none."""
    values = ((getattr(params, f), getattr(NEUTRAL, f)) for f in fields)
    return any(value != neutral and value not in (None, (), [], {}) for value, neutral in values)


def _detail(params: SamplingParams, fields: tuple[str, ...]) -> tuple[str, ...]:
    if len(fields) > 1:  # penalties: those that are not neutral
        values = ((f, getattr(params, f), getattr(NEUTRAL, f)) for f in fields)
        return tuple(f"{f.partition('_')[0][:4]}. {value:g}" for f, value, neutral in values if value != neutral)
    value = getattr(params, fields[0])
    return (f"{value:g}" if isinstance(value, (int, float)) else f"{len(value)} given",)


def _probabilities(x: np.ndarray) -> np.ndarray:
    """Softmax in float64; a row with +inf goes to its infinities, one without a token to nobody."""
    best = x.max()
    if np.isnan(best) or best == -np.inf:
        return np.zeros_like(x)
    mass = (x == best) * 1.0 if best == np.inf else np.exp(x - best)
    return mass / mass.sum()


def _picture(
    record: StepRecord, req_id: str, row: int, columns: list[tuple[str, tuple[str, ...], np.ndarray]],
    not_asked_for: list[str], exact: ExactRows, gumbel: np.ndarray | None, scores: np.ndarray, draw: Any,
) -> SamplingPicture:  # fmt: skip
    before, behind = _probabilities(columns[0][2]), _probabilities(columns[-1][2])
    winner = int(draw.winner)
    others = scores.copy()
    others[winner] = -np.inf
    second = int(others.argmax()) if np.isfinite(others.max()) else None
    drawn = int(record.token_ids[record.row_of(req_id), row])
    chosen = {winner, drawn, *([] if second is None else [second])}
    for p in (before, behind):
        chosen |= {int(t) for t in np.lexsort((-scores, -p))[:LIKELIEST] if p[t] > 0}
    tokens = sorted((t for t in chosen if 0 <= t < len(scores)), key=lambda t: (-before[t], -scores[t], t))
    steps = []
    for name, detail, x in columns:
        p = _probabilities(x)
        shown = tuple(float(p[t]) for t in tokens)
        steps.append(SampleStep(name, detail, int((x > -np.inf).sum()), shown, float(np.delete(p, tokens).sum())))
    x = columns[-1][2]
    return SamplingPicture(
        req_id, int(exact.positions[row]), gumbel is None, tuple(tokens), tuple(steps), tuple(not_asked_for),
        tuple(float(x[t]) for t in tokens), None if gumbel is None else tuple(float(gumbel[t]) for t in tokens),
        tuple(float(scores[t]) for t in tokens), winner, second,
        float("inf") if second is None else float(scores[winner] - scores[second]), drawn, draw.certify(drawn).verdict,
    )  # fmt: skip
