"""Probes about dense rows: the same requests told in two ways that must come to the same.

A runner's fingerprint covers what every request has and what rows hold that nobody has, so that two runners which have
come to the same rows by different ways must have the same one. A field that was left behind in a move is in the wrong
row, or in one that should be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.context import Mismatch
from conformance.dense_tale import CONFIG, ONE_GROUP, Tale
from conformance.harness import build_runner
from conformance.layouts import bare
from conformance.probe import RECORDED, probe
from conformance.refusals import changed_parts
from runner_api import Capability, CapabilityError, LogprobsLists, SamplingParams

Found = dict[str, list[Mismatch]]


def _same(clause_id: str, told: Tale, twin: Tale) -> list[Mismatch]:
    parts = changed_parts(twin.digest(), told.digest())
    return [Mismatch(clause_id, "state_digest", None, (), parts, "as the twin's")] if parts else []


PROMPTS = {"a": [1, 2, 3, 4, 5], "b": [8, 7, 6], "c": [9, 12, 13, 14, 2, 15, 16], "d": [21, 22], "e": [31, 7, 32, 33]}


# -- the same rows by different ways ------------------------------------------------------------------------------


@probe("DENSE-021 DENSE-022", *RECORDED, Capability.DENSE_LAYOUT, Capability.STATE_DIGEST)
def moves_take_everything_along(bench: Any) -> Found:
    """c and d are moved into the rows of a and b; in the twin they have always stood there."""
    moved, cleared = "MR-DENSE-022", "MR-DENSE-021"
    tale, twin = (_tale(bench, reorder_batch_threshold=None) for _ in range(2))
    empty = tale.digest()
    for name in "abcd":
        tale.add(name, PROMPTS[name], "abcd".index(name))
    for name in "dc":
        twin.add(name, PROMPTS[name], "abcd".index(name))
    tale.step("abcd")
    twin.step("dc")
    tale.finish("a", "b")
    found: Found = {moved: [], cleared: []}
    for n in range(3):  # d moves into row 0, c into row 1; what draws change goes on in the new rows
        tale.step("dc")
        twin.step("dc")
        found[moved] += _same(moved, tale, twin) if n != 1 else []
    tale.finish("c", "d")
    tale.runner.execute_model(tale.plan(()))
    changed = changed_parts(empty, tale.digest())
    if changed:
        found[cleared].append(Mismatch(cleared, "state_digest", None, (), changed, "as before any request"))
    return found


@probe("DENSE-023", *RECORDED, Capability.DENSE_LAYOUT, Capability.STATE_DIGEST)
def swaps_take_everything_along(bench: Any) -> Found:
    """A long prompt stands in front, in chunks, until decodes swap with it; in the twin it came behind them."""
    clause_id = "MR-DENSE-023"
    tale, twin = _tale(bench), _tale(bench)
    for name in "cbad":
        tale.add(name, PROMPTS[name], "abcd".index(name))
    for name in "abdc":
        twin.add(name, PROMPTS[name], "abcd".index(name))
    tale.step({"c": 2, "b": 9, "a": 9, "d": 9})
    # 0 c 1 b 2 a 3 d: the decodes b, a and d go in front of the long extend c, which goes to the last row
    tale.step({"c": 2, "b": 1, "a": 1, "d": 1})
    decodes = tale.runner.last_step().req_ids[:-1]
    twin.step({**dict.fromkeys(decodes, 9), "c": 2})
    twin.step({**dict.fromkeys(decodes, 1), "c": 2})
    found = _same(clause_id, tale, twin)
    for counts in ({"a": 1, "b": 1, "d": 1, "c": 1}, {"a": 1, "b": 1, "d": 1, "c": 9}):
        tale.step(counts)
        twin.step(counts)
    return {clause_id: [*found, *_same(clause_id, tale, twin)]}


@probe("DENSE-024", *RECORDED, Capability.DENSE_LAYOUT, Capability.STATE_DIGEST)
def sitting_out_changes_nothing(bench: Any) -> Found:
    """b sits out two steps, one of them without anybody; the twin's b just waits for its next step with the others."""
    clause_id = "MR-DENSE-024"
    tale, twin = (_tale(bench, reorder_batch_threshold=None) for _ in range(2))
    for t in (tale, twin):
        t.add("b", PROMPTS["b"], 1)
        t.add("e", PROMPTS["e"], 2)
        t.step("be")
        t.step("be")
    tale.runner.execute_model(tale.plan(()))
    tale.add("d", PROMPTS["d"], 3)
    tale.step("d")
    tale.finish("d")
    for t in (tale, twin):
        t.step("be")
        t.step({"b": 1, "e": 1})
    return {clause_id: _same(clause_id, tale, twin)}


@probe("DENSE-025 DENSE-026", *RECORDED, Capability.DENSE_LAYOUT, Capability.STATE_DIGEST)
def preemptions_need_not_be_told(bench: Any) -> Found:
    """a is preempted and comes back two steps later, or in the very plan that preempts it."""
    untold, at_once = "MR-DENSE-025", "MR-DENSE-026"
    found: Found = {untold: [], at_once: []}
    tales = []
    for told, wait in ((True, True), (False, True), (True, False), (False, False)):
        t = _tale(bench, reorder_batch_threshold=None)
        t.add("b", PROMPTS["b"], 1)
        t.add("a", PROMPTS["a"], 0)
        t.step("ba")
        t.step("ba")
        outputs = list(t.players["a"].outputs)
        t.preempt("a", 5, told=told)
        for names in ("b", "ba", "ba") if wait else ("ba", "b", "ba"):
            t.step(names)
        tales.append(t)
    later, later_untold, now, now_untold = tales
    found[untold] += _same(untold, later_untold, later)
    found[at_once] += _same(at_once, now_untold, now)
    # a comes for the first time, with the same tokens known, when the others' a came back
    fresh = _tale(bench, reorder_batch_threshold=None)
    fresh.add("b", PROMPTS["b"], 1)
    fresh.step("b")
    fresh.step("b")
    fresh.add("a", PROMPTS["a"], 0, 5, outputs=outputs)
    for names in ("ba", "b", "ba"):
        fresh.step(names)
    found[at_once] += _same(at_once, now, fresh)
    return found


@probe("DENSE-027", *RECORDED, Capability.DENSE_LAYOUT, Capability.STATE_DIGEST)
def an_id_may_be_used_again(bench: Any) -> Found:
    """a finishes in the middle of its prompt, and another a comes by the same plan: as if the first had never been."""
    clause_id = "MR-DENSE-027"
    tale, twin = _tale(bench), _tale(bench)
    tale.add("a", PROMPTS["c"], 4)
    tale.step({"a": 4})
    tale.finish("a")
    given = []
    for t in (tale, twin):
        t.add("a", PROMPTS["b"], 1)
        given.append([_by_request(t.step("a").get_output()) for _ in range(2)])
    found = _same(clause_id, tale, twin)
    if given[0] != given[1]:
        found.append(Mismatch(clause_id, "output", "a", (), *given))
    return {clause_id: found}


def _tale(bench: Any, **changes: Any) -> Tale:
    return Tale(bare(bench.runner), bench.capabilities, **changes)


# -- outputs, prompts and processors ------------------------------------------------------------------------------


@probe("DENSE-028", *RECORDED, Capability.DENSE_LAYOUT, Capability.ASYNC_OUTPUT)
def late_outputs_keep_their_requests(bench: Any) -> Found:
    """Outputs of three steps are taken at the end, when everybody has moved."""
    clause_id = "MR-DENSE-028"
    late, soon = _tale(bench), _tale(bench)
    told: list[list[Any]] = []
    for t in (late, soon):
        handles = []
        for n, name in enumerate("cabd"):
            t.add(name, PROMPTS[name], n)
        for gone, counts in (
            ("", {"c": 2, "a": 9, "b": 9, "d": 9}),
            ("", {"c": 2, "a": 1, "b": 1, "d": 1}),
            ("a", "dbc"),
        ):
            t.finish(*gone)
            handles.append(t.step(counts))
            if t is soon:
                handles[-1] = handles[-1].get_output()
        t.finish("b")
        t.step("cd")
        told.append([_by_request(h if t is soon else h.get_output()) for h in handles])
    got, wanted = told
    wrong = [n for n in range(3) if got[n] != wanted[n]]
    return {clause_id: [Mismatch(clause_id, "output", None, (n,), got[n], wanted[n]) for n in wrong]}


def _by_request(output: Any) -> dict[str, str]:
    """What an output says of each request, as text."""
    told = {}
    for i, req_id in enumerate(output.req_ids):
        own = [tuple(output.sampled_token_ids[i])]
        if output.logprobs is not None:
            own += [_row_of(output.logprobs, i)]
        prompt = output.prompt_logprobs.get(req_id)
        told[req_id] = repr([*own, None if prompt is None else _row_of(prompt, slice(None))])
    return told


def _row_of(lists: LogprobsLists, i: Any) -> list[Any]:
    return [np.asarray(part[i]).tolist() for part in (lists.token_ids, lists.logprobs, lists.ranks)]


@probe("DENSE-029", *RECORDED, Capability.DENSE_LAYOUT, Capability.PROMPT_LOGPROBS)
def prompts_are_scored_wherever_they_stand(bench: Any) -> Found:
    """c takes its prompt in four chunks, alone; or among others, moved, swapped and left out in the middle of it."""
    clause_id = "MR-DENSE-029"
    plain, asks = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, prompt_logprobs=2)
    alone, among = _tale(bench), _tale(bench)
    alone.add("c", PROMPTS["c"], 2, params=asks)
    for n, name in enumerate("abcd"):
        among.add(name, PROMPTS[name], n, params=asks if name == "c" else plain)
    for _ in range(3):
        alone.step({"c": 2})
    among.step({"a": 2, "b": 9, "c": 2})
    among.finish("a")
    among.step({"c": 2, "b": 1})  # into the row of a, then behind the decode
    among.step("b")
    among.finish("b")
    among.step({"d": 9, "c": 2})
    scored = []
    for t, counts in ((alone, {"c": 9}), (among, {"d": 1, "c": 9})):
        prompt = t.step(counts).get_output().prompt_logprobs.get("c")
        scored.append("nothing" if prompt is None else repr(_row_of(prompt, slice(None))))
    wrong = scored[0] != scored[1]
    return {clause_id: [Mismatch(clause_id, "prompt_logprobs", "c", (), scored[1], scored[0])] if wrong else []}


class Follower:
    """A processor that follows requests by what it is told, names them by their prompt's first token, edits those where
    that is odd, and looks where they stand when it is asked to edit."""

    arguments = ("follow",)

    def __init__(self, max_num_reqs: int, vocab_size: int, arrays: Any) -> None:
        self.rows: dict[int, int] = {}
        self.faults: list[str] = []
        self.seen: dict[int, int] = {}

    def validate(self, params: SamplingParams) -> None: ...

    def add_request(self, row: int, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]) -> bool:
        if row in self.rows:
            self.faults.append(f"row {row} is given twice")
        self.rows[int(row)] = int(prompt[0])
        return prompt[0] % 2 == 1

    def remove_request(self, row: int) -> None:
        if self.rows.pop(int(row), None) is None:
            self.faults.append(f"row {row} is left, and was nobody's")

    def move_rows(self, moves: Sequence[Any]) -> None:
        for m in moves:
            if m.source not in self.rows or (m.target in self.rows) != m.swap:
                self.faults.append(f"{m} does not fit rows {sorted(self.rows)}")
                continue
            if m.swap:
                self.rows[m.source], self.rows[m.target] = self.rows[m.target], self.rows[m.source]
            else:
                self.rows[m.target] = self.rows.pop(m.source)

    def observe(self, rows: Any, token_ids: Any, num_sampled: Any) -> None: ...

    def apply(self, logits: Any, context: Any) -> None:
        self.seen = dict(zip(context.rows.tolist(), context.positions.tolist(), strict=True))


@probe("DENSE-030 DENSE-031", *RECORDED, Capability.DENSE_LAYOUT, Capability.LOGITS_PROCESSORS)
def processors_follow_their_requests(bench: Any) -> Found:
    """Told rows lead to the rows of the step, and edits reach the rows that the record names."""
    told, edits = "MR-DENSE-030", "MR-DENSE-031"
    made: list[Follower] = []

    def factory(max_num_reqs: int, vocab_size: int, arrays: Any) -> Follower:
        made.append(Follower(max_num_reqs, vocab_size, arrays))
        return made[-1]

    t, found = _tale(bench, logits_processors=(factory,)), {told: [], edits: []}
    if not made:
        return {told: [Mismatch(told, "logits_processors", None, (), "none built", "one built")], edits: []}
    for n, name in enumerate("cabde"):
        t.add(name, PROMPTS[name], n, params=SamplingParams(temperature=0.0, extra_args={"follow": 1}))
    story: tuple[tuple[str, Any], ...] = (
        ("", {"c": 2, "a": 9, "b": 9, "d": 9, "e": 9}), ("", {"c": 2, "a": 1, "b": 1, "d": 1, "e": 1}),
        ("ad", "ceb"), ("", "be"), ("b", "ec"), ("", "ce"),
    )  # fmt: skip
    for gone, counts in story:
        t.finish(*gone)
        t.step(counts)
        record = t.runner.last_step()
        rows = dict(zip(record.idx_mapping.tolist(), (t.players[r].prompt[0] for r in record.req_ids), strict=True))
        if made[-1].faults or made[-1].rows != rows:
            got = made[-1].faults or sorted(made[-1].rows.items())
            found[told].append(Mismatch(told, "move_rows", None, (), got, sorted(rows.items())))
            break
        ends = record.positions[record.logits_indices].tolist()
        wanted = {
            row: end for row, end in zip(record.expanded_idx_mapping.tolist(), ends, strict=True) if rows[row] % 2 == 1
        }
        if made[-1].seen != wanted:
            found[edits].append(Mismatch(edits, "apply", None, (), made[-1].seen, wanted))
            break
    return found


@probe("DENSE-032", Capability.GENERATE, Capability.DENSE_LAYOUT)
def what_dense_rows_lack_is_refused(bench: Any) -> Found:
    clause_id, found = "MR-DENSE-032", []
    for name, value in (("num_speculative_tokens", 2), ("initial_free_rows", (1, 0, 2, 3, 4, 5))):
        if name == "num_speculative_tokens" and Capability.DRAFT_LAYOUT in bench.capabilities:
            continue
        try:
            build_runner(bare(bench.runner), ONE_GROUP, replace(CONFIG, layout="dense", **{name: value}), 20)
        except CapabilityError:
            continue
        except Exception as e:  # any other error is a crash, not a refusal
            found.append(Mismatch(clause_id, name, None, (), repr(e), "CapabilityError"))
        else:
            found.append(Mismatch(clause_id, name, None, (), "accepted", "CapabilityError"))
    return {clause_id: found}


DENSE_PROBES: tuple[Callable[[Any], Found], ...] = (
    moves_take_everything_along, swaps_take_everything_along, sitting_out_changes_nothing,
    preemptions_need_not_be_told, an_id_may_be_used_again, late_outputs_keep_their_requests,
    prompts_are_scored_wherever_they_stand, processors_follow_their_requests, what_dense_rows_lack_is_refused,
)  # fmt: skip
