"""What a scenario may say: one dataclass per table of the TOML files, and nothing that is not listed is read.

docs/write-a-scenario.md explains the format with an example. A table becomes the dataclass of its place; a key that it
does not have is refused, with the nearest valid ones.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from runner_api import ConfigError, StepRecord, UnknownNameError
from runner_api.checks import check_name, check_options
from runner_api.config import LAYOUTS

CASES = Path(__file__).parent / "cases"
STATUSES = ("runs", "missing")
LEVELS = ("runner", "stage", "engine", "late")
PACKAGES = ("cpu_reference", "gpu_backend", "engine_core")
ALL = "all"
RECORD_FIELDS = tuple(f.name for f in dataclasses.fields(StepRecord))

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group of the witness model. kernel_block_size: of the blocks that attention sees, if they are
    smaller than the allocator's; only where all groups differ in size or window."""

    block_size: int = 4
    window: int | None = None
    kernel_block_size: int | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes. config: fields of `RunnerConfig`. At level "engine", limits: fields of `SchedulerConfig`, which the
    runner's configuration is made from."""

    vocab: int = 50
    groups: tuple[Group, ...] = (Group(),)
    num_blocks: int = 32
    config: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    prefix_caching: bool = False
    depth: int = 2  # steps under way at once, with limits.async_scheduling
    seed: int = 0  # of the engine, which draws seeds for requests that bring none


@dataclass(frozen=True, slots=True)
class Request:
    """One request. name: what the scenario calls it; id: what runner and engine are told (the name by default).

    computed: tokens whose KV is there when it comes (a prefix hit); blocks: what it owns then, one list per group, or a
    single list. At level "engine": at, abort: numbers of the engine's steps before which it is added and aborted;
    seeded False: the engine draws the seed.
    """

    name: str
    prompt: tuple[int, ...] = ()
    id: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    seeded: bool = True
    eos: tuple[int, ...] = ()
    computed: int = 0
    blocks: tuple[Any, ...] | None = None
    at: int = 0
    abort: int | None = None


@dataclass(frozen=True, slots=True)
class Pad:
    """The shape that a step is padded to."""

    tokens: int
    requests: int | None = None
    mode: str = "FULL"


@dataclass(frozen=True, slots=True)
class Mask:
    """A grammar's mask of one request: allow[j] lists the tokens that logits row j may take, for rows 0 .. K."""

    request: str
    allow: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a runner: what is asked (first half) and what must be seen (second half). Tables go by request.

    run: how many known tokens of whom, in the plan's order; a list of names: all that is known. blocks: ids that the
    plan brings, in place of the ones chosen for it. logits: a row (zeros behind what is given), or one per logits row;
    they replace the model's, and then `draws` or `take` says what enters the state. hold: drafts from then on; drafts:
    how many of them are verified. late: the output is taken when all steps have run. spoil: the plan's lists are
    overwritten as soon as execute_model is back. poison: unused memory is filled first.

    seen: fields of the StepRecord, whole (a list) or by request (a table). draws: the runner's own choice. tokens: what
    comes out. faults: names of `SampleFault`. refused: code of the error that the plan must be refused with, and
    nothing may change; or the masks or the outcome, and the step is sampled without them. Nothing else is seen of such
    a step. logprobs: by request, token id to log probability of its returned row; an empty list: none.
    """

    run: Any = ()
    finish: tuple[str, ...] = ()
    preempt: tuple[str, ...] = ()
    blocks: Mapping[str, Any] = field(default_factory=dict)
    zero_blocks: tuple[int, ...] = ()
    logits: Mapping[str, Any] = field(default_factory=dict)
    take: Mapping[str, Any] = field(default_factory=dict)
    hold: Mapping[str, Any] = field(default_factory=dict)
    drafts: Mapping[str, int] = field(default_factory=dict)
    grammar: tuple[Mask, ...] = ()
    pad: Pad | None = None
    poison: bool = False
    late: bool = False
    spoil: bool = False
    repeat: int = 1
    seen: Mapping[str, Any] = field(default_factory=dict)
    draws: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    logprobs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def imposes(self) -> bool:
        """Something goes with the plan when its tokens are drawn."""
        return bool(self.grammar or self.logits or self.take or self.hold)


@dataclass(frozen=True, slots=True)
class Expect:
    """What must hold when all steps have run.

    solo: requests (or "all") that must have drawn what they draw alone: eagerly, unchunked, on a fresh runner. alike,
    differ: groups of requests whose draws must be the same, or not all the same. varied: requests that must not have
    drawn one token all the time. tokens: what came out, by request. At level "engine" besides: finish (the reason) by
    request; refused: code of the error by which a request is not let in; admitted: by request {computed, scheduled} of
    the step that first ran it; preempted: requests that must have been preempted, or the scenario shows nothing;
    scored: requests whose every output must have log probabilities.
    """

    solo: Any = ()
    alike: tuple[tuple[str, ...], ...] = ()
    differ: tuple[tuple[str, ...], ...] = ()
    varied: tuple[str, ...] = ()
    tokens: Mapping[str, Any] = field(default_factory=dict)
    finish: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    admitted: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    preempted: tuple[str, ...] = ()
    scored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """One stage alone. args: by parameter name; {int32 = [...]} is an array of that type, a list of such is one array
    per group. seen: the outputs that must come back, by name."""

    stage: str
    args: Mapping[str, Any]
    seen: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """The described fault: in `path` of the package, `old` (found exactly once) reads `new`.

    also: further changes {path, old, new}, for a fault that takes two places. layout: where it must be noticed, if not
    in every layout of the scenario. crash: the report was a crash, so an exception counts as noticed.
    """

    path: str
    old: str
    new: str
    why: str
    package: str = "cpu_reference"
    also: tuple[Mapping[str, str], ...] = ()
    layout: str = ""
    crash: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """One public bug. status "missing" lists it with the feature that it needs, and nothing else is read.

    runner: on which it runs where nobody names one.
    """

    id: str
    kind: str
    title: str
    source: tuple[str, ...]
    status: str
    missing: str = ""
    level: str = "runner"
    runner: str = "cpu"
    layouts: tuple[str, ...] = ("slots",)
    setup: Setup = field(default_factory=Setup)
    requests: tuple[Request, ...] = ()
    steps: tuple[Step, ...] = ()
    calls: tuple[Call, ...] = ()
    expect: Expect = field(default_factory=Expect)
    variants: tuple[Variant, ...] = ()
    note: str = ""  # where the scenario differs from the report

    def request(self, name: str) -> Request:
        found = next((r for r in self.requests if r.name == name), None)
        if found is None:
            raise UnknownNameError("request", name, [r.name for r in self.requests], field=f"catalogue {self.id}")
        return found


def _keys(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(cls))


_SIZES = frozenset({"vocab", "groups", "num_blocks", "config"})
_PLANNED = frozenset({"name", "prompt", "id", "params", "seed", "eos", "computed", "blocks"})
# What each level looks at, by part of the scenario. Whatever else is said there would change nothing.
READ: Mapping[str, Mapping[str, frozenset[str]]] = {
    "runner": {
        "setup": _SIZES, "requests": _PLANNED, "steps": _keys(Step),
        "expect": frozenset({"solo", "alike", "differ", "varied", "tokens"}),
    },
    "stage": {"calls": _keys(Call)},
    "engine": {
        "setup": _keys(Setup), "expect": _keys(Expect),
        "requests": frozenset({"name", "prompt", "id", "params", "seed", "seeded", "at", "abort"}),
    },
    "late": {
        "setup": _SIZES, "requests": _PLANNED,
        "steps": frozenset({"run", "finish", "preempt", "blocks", "zero_blocks", "drafts", "seen"}),
    },
}  # fmt: skip
# Of a step that must be refused nothing of this is seen.
_SHOWN = frozenset({"seen", "draws", "tokens", "faults", "logprobs", "late", "spoil"})

# Tables inside of tables: (dataclass, key) to what the key holds; in brackets where it is a list of tables.
_NESTED: dict[tuple[type, str], Any] = {
    (Setup, "groups"): [Group], (Step, "pad"): Pad, (Step, "grammar"): [Mask], (Scenario, "setup"): Setup,
    (Scenario, "requests"): [Request], (Scenario, "steps"): [Step], (Scenario, "calls"): [Call],
    (Scenario, "expect"): Expect, (Scenario, "variants"): [Variant],
}  # fmt: skip


def read(cls: type[T], table: Any, where: str) -> T:
    """A TOML table as the dataclass of its place. Raises ConfigError or UnknownNameError, naming the scenario."""
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values = check_options(f"key of {where}", table, set(fields))
    lacking = [
        f.name
        for f in fields.values()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in values
    ]
    if lacking:
        raise ConfigError("a key is missing", field=where, got=sorted(values), expected=", ".join(lacking))
    return cls(**{name: _value(cls, name, value, f"{where}.{name}") for name, value in values.items()})


def _value(cls: type, name: str, value: Any, where: str) -> Any:
    nested = _NESTED.get((cls, name))
    if isinstance(nested, list):
        return tuple(read(nested[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    return read(nested, value, where) if nested else frozen(value)


def frozen(value: Any) -> Any:
    """Lists become tuples, inside of tables too."""
    if isinstance(value, (list, tuple)):
        return tuple(frozen(v) for v in value)
    return {k: frozen(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def parse(text: str, name: str = "scenario") -> tuple[Scenario, ...]:
    """The scenarios of one TOML file (`[[case]]` each). Raises ConfigError for whatever is not as described here."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"not TOML: {e}", field=name) from e
    cases = check_options("table", tables, {"case"}).get("case", [])
    return tuple(_checked(read(Scenario, c, f"{name} {c.get('id', '?')}")) for c in cases)


def _checked(case: Scenario) -> Scenario:
    where = f"catalogue {case.id}"
    check_name(f"{where} status", case.status, STATUSES)
    check_name(f"{where} level", case.level, LEVELS)
    for layout in case.layouts:
        check_name(f"{where} layout", layout, LAYOUTS)
    if (case.status == "missing") != bool(case.missing):
        raise ConfigError("a case that cannot run names what it waits for, and no other does", field=where)
    if case.status == "runs":
        acted = case.calls if case.level == "stage" else case.requests
        if not acted or not case.variants or not case.layouts:
            raise ConfigError(
                "nothing to run, or no fault to show that it would be seen", field=where, expected="calls or requests, "
                "layouts and variants",
            )  # fmt: skip
        for name in _names(case):
            case.request(name)  # refuses one that there is not
        for step in case.steps if case.level == "runner" else ():
            for name in step.seen:
                check_name(f"{where} seen", name, RECORD_FIELDS)
        unread = list(_unread(case))
        if unread:
            raise ConfigError(
                f"level {case.level!r} never looks at this", field=where, got=", ".join(unread),
                expected="what conformance.catalogue.scenario.READ lists for it",
            )  # fmt: skip
        if not _expects(case):
            raise ConfigError("nothing is expected, so every runner would pass", field=where)
        for variant in case.variants:
            check_name(f"{where} package", variant.package, PACKAGES)
            if variant.layout and variant.layout not in case.layouts:
                raise ConfigError("a layout that the scenario does not run in", field=where, got=variant.layout)
            if variant.package == "engine_core" and case.level != "engine":
                raise ConfigError("the engine takes part at its own level alone", field=where, got=case.level)
    return case


def _names(case: Scenario) -> Iterator[str]:
    """Every request that steps and expectations speak of."""
    for step in case.steps:
        yield from (*step.run, *step.finish, *step.preempt, *(mask.request for mask in step.grammar))
        for table in (step.blocks, step.logits, step.take, step.hold, step.drafts, step.draws, step.tokens):
            yield from table
        for table in (step.faults, step.logprobs, *(v for v in step.seen.values() if isinstance(v, Mapping))):
            yield from table
    expect = case.expect
    yield from (*(() if expect.solo == ALL else expect.solo), *expect.varied, *expect.preempted, *expect.scored)
    for group in (*expect.alike, *expect.differ):
        yield from group
    for table in (expect.tokens, expect.finish, expect.refused, expect.admitted):
        yield from table


def _expects(case: Scenario) -> bool:
    """Is there anything that a runner could get wrong?"""
    in_steps = any(s.draws or s.tokens or s.faults or s.refused or s.logprobs for s in case.steps)
    seen = any(value != {} for part in (*case.steps, *case.calls) for value in part.seen.values())
    alike = tuple(group for group in case.expect.alike if len(group) > 1)
    return in_steps or seen or dataclasses.replace(case.expect, alike=alike) != Expect()


def _unread(case: Scenario) -> Iterator[str]:
    """What the scenario says where its level does not look."""
    for part in ("setup", "requests", "steps", "calls", "expect"):
        keys, said = READ[case.level].get(part), getattr(case, part)
        tables = said if isinstance(said, tuple) else (said,)
        for n, table in enumerate(tables, 1):
            name = f"{part}[{n}]" if said is tables else part
            told = _told(table)
            if keys is None and told:
                yield name
            elif keys is not None:
                shown = _SHOWN if part == "steps" and table.refused else frozenset()
                yield from (f"{name}.{key}" for key in sorted(told - keys | told & shown))


def _told(table: Any) -> frozenset[str]:
    """The keys of a table that say something else than what goes without saying."""
    usual = {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(table)
    }
    return frozenset(name for name, value in usual.items() if getattr(table, name) != value)


def parse_file(path: str | Path) -> tuple[Scenario, ...]:
    """The scenarios of a file of one's own. Raises ConfigError also where it has none."""
    try:
        found = parse(Path(path).read_text(encoding="utf-8"), Path(path).name)
    except OSError as e:
        raise ConfigError(f"cannot be read: {e}", field=str(path)) from e
    if not found:
        raise ConfigError("no scenario", field=str(path), expected="[[case]] tables")
    return found


@functools.cache
def catalogue() -> Mapping[str, Scenario]:
    """Every scenario by id, in the order of the ids."""
    found: dict[str, Scenario] = {}
    for file in sorted(CASES.glob("*.toml")):
        for case in parse_file(file):
            if case.id in found:
                raise ConfigError("an id is used twice", field="id", got=case.id)
            found[case.id] = case
    return dict(sorted(found.items(), key=lambda item: int(item[0][1:])))


def select(ids: Sequence[str] | None) -> tuple[Scenario, ...]:
    """Scenarios by id or kind ("B21", "K4"); None: all. Raises UnknownNameError, and ConfigError for an empty list."""
    cases = catalogue()
    if ids is None:
        return tuple(cases.values())
    kinds = {c.kind for c in cases.values()}
    for name in ids:
        if name not in cases and name not in kinds:
            raise UnknownNameError("catalogue case", name, [*cases, *kinds], field="ids")
    chosen = tuple(c for c in cases.values() if c.id in ids or c.kind in ids)
    if not chosen:
        raise ConfigError("no case is selected", field="ids", got=ids, expected="ids or kinds, or None for all")
    return chosen
