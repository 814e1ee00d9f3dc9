"""`modelrunner show`: a step of a trace as a table, as a picture, or the whole trace as a page with a slider.

Reads traces of ours and recordings of vLLM. What is asked for and does not fit is refused, never guessed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import numpy as np

from conformance.report import batch_table, fault_of, plain_table
from runner_api import ConfigError, StepRecord, Trace, TraceError, UnknownNameError, load_trace

PAGE = ".html"
PICTURES = (".png", ".svg")
# What can be drawn, and which of the other options each needs; none takes an option that it does not need.
WHATS: dict[str, tuple[str, ...]] = {
    "batch": ("step",),
    "rows": ("step",),
    "blocks": ("step",),
    "slots": ("step",),
    "timeline": (),
    "sampling": ("step", "request"),
    "divergence": ("step", "against"),
    "kill-matrix": (),
}
# Options that a picture may have besides those that it needs.
MAY_HAVE = {"blocks": ("block_size",), "slots": ("block_size",)}
LABEL_WIDTH = 1.15  # inches that a row's label may take


def show(subparsers: Any) -> None:
    """`modelrunner show RECORDING`."""
    parser = subparsers.add_parser(
        "show",
        help="look at a step of a recording: table, picture, or a page with a slider",
        description="Without -o: a table of the steps, or of one step (--step). With -o FILE.png or .svg: the picture "
        "that --what names. With -o FILE.html: the whole trace as one page with a slider.",
    )
    parser.add_argument(
        "recording",
        metavar="RECORDING",
        help="a trace or a recording (.jsonl); for kill-matrix, the JSON of `mutants --json`",
    )
    parser.add_argument("--step", type=int, metavar="N", help="which step, from 0")
    parser.add_argument("--what", metavar="PICTURE", help=f"one of {', '.join(WHATS)}")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to: .png, .svg or .html")
    parser.add_argument("--request", metavar="ID", help="with --what sampling: whose token")
    parser.add_argument(
        "--against", metavar="FILE", help="with --what divergence: the other recording of the same plans"
    )
    parser.add_argument(
        "--block-size", type=int, metavar="N", help="with --what blocks or slots: tokens of a block, of all groups "
        "(default: what the trace says)",
    )  # fmt: skip
    parser.set_defaults(run=run_show)


def run_show(args: argparse.Namespace) -> int:
    """The command; 0, or a RunnerError for misuse."""
    ending = None if args.output is None else Path(args.output).suffix.lower()
    _check_options(args, ending)
    if args.what == "kill-matrix":
        _save(_kill_matrix(Path(args.recording)), args.output)
        return 0
    trace = load_trace(args.recording)
    if args.step is not None and not 0 <= args.step < len(trace.steps):
        raise ConfigError("no such step", field="--step", got=args.step, expected=f"0 to {len(trace.steps) - 1}")
    if ending == PAGE:
        _write_page(trace, args.step or 0, Path(args.output))
    elif args.what is not None:
        _save(_draw(trace, args), args.output)
    elif args.step is None:
        print(steps_table(trace))
    else:
        print(step_text(trace, args.step))
    return 0


def _check_options(args: argparse.Namespace, ending: str | None) -> None:
    """Refuse what does not fit together, before a file is read."""
    if args.what is not None and args.what not in WHATS:
        raise UnknownNameError("picture", args.what, WHATS, field="--what")
    if ending is not None and ending not in (*PICTURES, PAGE):
        raise ConfigError("unknown ending", field="-o", got=args.output, expected=".png, .svg or .html")
    if args.what is not None and ending is None:
        raise ConfigError(
            "a picture needs a file", field="--what", got=args.what, hint="Add -o FILE.png or -o FILE.svg"
        )
    if args.what is not None and ending == PAGE:
        raise ConfigError(
            "a page shows the whole trace", field="--what", got=args.what, hint="Leave --what out, or draw a .png"
        )
    if args.what is None and ending in PICTURES:
        raise ConfigError(
            "what to draw is not said", field="-o", got=args.output, expected=f"--what {', '.join(WHATS)}"
        )
    needs = WHATS.get(args.what, ("step",) if ending in (None, PAGE) else ())
    for name in ("step", "request", "against", "block_size"):
        given, option = getattr(args, name) is not None, f"--{name.replace('_', '-')}"
        if args.what is not None and name in needs and not given:
            raise ConfigError(f"--what {args.what} needs it", field=option, got="nothing")
        if given and name not in (*needs, *MAY_HAVE.get(args.what, ())):
            what = f"--what {args.what}" if args.what else "a table" if ending is None else "a page"
            raise ConfigError(f"{what} has no use for it", field=option, got=getattr(args, name), hint="Leave it out")
    if args.block_size is not None and args.block_size < 1:
        raise ConfigError("no size of a block", field="--block-size", got=args.block_size, expected="at least 1")


# -- text -----------------------------------------------------------------------------------------------------


def steps_table(trace: Trace) -> str:
    """All steps, a line each: how much they scheduled, and who came and went."""
    from conformance.figures.timeline import returns

    lines = [["step", "requests", "tokens", "sampled", "what the plan changes"]]
    for number, (record, back) in enumerate(zip(trace.steps, returns(trace.steps), strict=True)):
        faults = [bool(fault_of(record, i)) for i in range(record.num_reqs)]
        sampled = sum(len(t) for t, fault in zip(record.tokens().values(), faults, strict=True) if not fault)
        errors = f" ({sum(faults)} error{'s' * (sum(faults) != 1)})" if any(faults) else ""
        lines.append(
            [
                str(number),
                _padded(record.num_reqs, record.num_reqs_padded),
                _padded(record.num_tokens, record.num_tokens_padded),
                f"{sampled}{errors}",
                "; ".join(_changes(record, back)),
            ]
        )
    return f"{trace.name}: {len(trace.steps)} steps, {_runner(trace)}\n{plain_table(lines)}"


def step_text(trace: Trace, number: int) -> str:
    """One step: what its plan asked, and the batch that was built."""
    from conformance.figures.timeline import returns

    record = trace.steps[number]
    plan = [
        f"plan: {len(record.plan.num_scheduled_tokens)} requests, {record.plan.total_num_scheduled_tokens} tokens",
        *_changes(record, returns(trace.steps[: number + 1])[-1]),
    ]
    shape = (
        f"batch: {_padded(record.num_reqs, record.num_reqs_padded)} requests, "
        f"{_padded(record.num_tokens, record.num_tokens_padded)} tokens, {len(record.logits_indices)} logits rows"
    )
    head = f"{trace.name}, step {number} of {len(trace.steps)}, {_runner(trace)}"
    return "\n".join([head, *plan, shape, "", batch_table(record)])


def _padded(n: int, padded: int) -> str:
    return f"{n} (padded to {padded})" if padded > n else str(n)


def _runner(trace: Trace) -> str:
    return next((s.runner for s in trace.steps if s.runner), "runner unknown")


def _changes(record: StepRecord, back: Set[str]) -> list[str]:
    """What a plan says beyond "go on". back: requests that it brings back from a preemption."""
    plan = record.plan
    come = {
        n.req_id: f"{n.req_id} ({plan.num_scheduled_tokens.get(n.req_id, 0)} of {len(n.prefill_token_ids)} tokens"
        + (f", {n.num_computed_tokens} computed before" if n.num_computed_tokens else "") + ")"
        for n in plan.scheduled_new_reqs
    }  # fmt: skip
    resumed = sorted(back | plan.scheduled_cached_reqs.resumed_req_ids)
    drafts = [f"{r} {len(d)}" for r, d in plan.scheduled_spec_decode_tokens.items()]
    parts = {
        "new": [text for req_id, text in come.items() if req_id not in back],
        "resumed": [come.get(req_id, req_id) for req_id in resumed],
        "preempted": sorted(plan.preempted_req_ids), "finished": sorted(plan.finished_req_ids), "drafts": drafts,
    }  # fmt: skip
    return [f"{what}: {', '.join(who)}" for what, who in parts.items() if who]


# -- pictures -------------------------------------------------------------------------------------------------


def _save(figure: Any, output: str) -> None:
    from conformance.figures import save

    save(figure, output)
    print(f"wrote {output}")


def _draw(trace: Trace, args: argparse.Namespace) -> Any:
    from conformance import figures
    from conformance.figures.timeline import num_blocks_of

    if args.what == "timeline":
        return figures.timeline(trace)
    names = figures.Names(figures.requests_of(trace))
    past = trace.steps[: args.step + 1]
    size = args.block_size or trace.meta.get("block_size")
    draw: dict[str, Callable[[], Any]] = {
        "batch": lambda: figures.batch(past[-1], names=names),
        "rows": lambda: figures.rows(past, num_rows=trace.meta.get("max_num_seqs"), names=names),
        "blocks": lambda: figures.blocks(past, num_blocks=num_blocks_of(trace.meta), block_size=size, names=names),
        "slots": lambda: figures.slots(past[-1], block_size=size, names=names),
        "sampling": lambda: _sampling(trace, args),
        "divergence": lambda: _divergence(trace, args),
    }
    return draw[args.what]()


def _sampling(trace: Trace, args: argparse.Namespace) -> Any:
    from conformance import figures

    record = trace.steps[args.step]
    if args.request not in record.req_ids:
        raise UnknownNameError("request of this step", args.request, record.req_ids, field="--request")
    logits = record.logits
    if logits is None and trace.is_vllm_recording and record.num_reqs:
        logits = _recorded_logits(Path(args.recording), trace, record)
    return figures.sampling(trace.steps[: args.step + 1], args.request, logits=logits, noise=_noise(trace, record))


def _recorded_logits(path: Path, trace: Trace, record: StepRecord) -> np.ndarray:
    """From the file that lies beside a recording, if one does."""
    from conformance.recording import step_logits

    beside = path.with_name(f"{path.stem}_logits.npz")
    if not beside.exists():
        raise TraceError(
            "the recording holds no logits, so that no draw can be followed", field=str(beside), got="no such file",
            hint='Replay it by a runner with RunnerConfig(record=frozenset({"logits"}))',
        )  # fmt: skip
    with np.load(beside, allow_pickle=False) as stored:
        return step_logits(stored, record, trace.name)


def _noise(trace: Trace, record: StepRecord) -> str:
    """The scheme of random numbers: by the version of a recorded vLLM, else as the runner's own line tells."""
    from conformance.recording import NOISE_BY_VERSION

    if trace.is_vllm_recording:
        version = str(trace.meta["source"]).partition(" ")[2]
        found = NOISE_BY_VERSION.get(".".join(version.split(".")[:2]))
    else:
        told = re.search(r"\bnoise=(\w+)", record.runner)
        found = told[1] if told else None
    if found is None:
        raise TraceError("does not tell which random numbers it was drawn with", field=trace.name, got=record.runner)
    return found


def _divergence(trace: Trace, args: argparse.Namespace) -> Any:
    from conformance import figures

    other = load_trace(args.against)
    if args.step >= len(other.steps):
        raise ConfigError(
            "the other recording has no such step",
            field="--step",
            got=args.step,
            expected=f"0 to {len(other.steps) - 1}",
        )
    plans = [dict(t.steps[args.step].plan.num_scheduled_tokens) for t in (trace, other)]
    if plans[0] != plans[1]:
        raise ConfigError(
            "the two recordings have other plans in this step", field="--against", got=plans[1], expected=plans[0]
        )
    names = figures.Names([*figures.requests_of(trace), *figures.requests_of(other)])
    return figures.divergence(
        trace.steps[args.step], other.steps[args.step], labels=(_label(trace.name), _label(other.name)), names=names
    )


def _label(name: str) -> str:
    """The name, or as much of its front as there is room for."""
    from conformance.figures.look import CELL, plain
    from conformance.figures.sheet import text_width

    name = plain(name)
    if text_width(name, CELL) <= LABEL_WIDTH:
        return name
    fits = (n for n in range(len(name), 0, -1) if text_width(f"{name[:n]}…", CELL) <= LABEL_WIDTH)
    return f"{name[: next(fits, 1)]}…"


def _kill_matrix(path: Path) -> Any:
    from conformance import figures

    try:
        matrix = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"cannot be read: {e}", field=str(path), expected="the output of `modelrunner mutants --json`"
        ) from e
    return figures.kill_matrix(matrix)


def _write_page(trace: Trace, start: int, path: Path) -> None:
    from conformance.show_html import MANY_STEPS, trace_page

    text = trace_page(trace, start=start)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot be written: {e}", field=str(path)) from e
    slow = ", which is much for a browser" if len(trace.steps) > MANY_STEPS else ""
    print(f"wrote {path}: {len(trace.steps)} steps, {len(text.encode()) / 1e6:.1f} MB{slow}")
