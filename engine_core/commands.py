"""The engine's own subcommands: `generate` answers prompts, `runners` lists what is installed and what it can do."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from engine_core.llm import LLM, Progress, RequestOutput
from runner_api import RunnerConfig, RunnerError, SamplingParams, UnknownNameError, load_runner, runner_names
from runner_api.config import DTYPES, LAYOUTS, NOISE_SCHEMES

GENERATE_JSON = """\
--json prints one object:
  runner     name, class_path, version, device, dtype, layout, noise, capabilities
  outputs    one per answer: prompt, prompt_token_ids, text, token_ids, finish_reason ("stop" or "length"),
             stop_reason (stop string, stop token id or null), index (which of the n answers), logprobs (null)
  num_tokens, seconds, tokens_per_second   of all answers together, loading left out
"""
RUNNERS_JSON = """\
--json prints a list with one object per runner:
  name, target (package.module:factory), error (null, or why it cannot be built here)
  class_path, version, device, dtype, noise, notes, capabilities, layouts   (null where error is set)
"""


def generate(subparsers: Any) -> None:
    """Add `modelrunner generate`."""
    p = subparsers.add_parser(
        "generate", help="answer prompts from a checkpoint", epilog=GENERATE_JSON,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("model", metavar="MODEL", help="a Hugging Face folder, a .gguf file, or smollm2")
    p.add_argument("prompts", metavar="PROMPT", nargs="+", help="a text; several are answered in one batch")
    p.add_argument("--runner", default="cpu", help="installed name or package.module:factory (default: cpu)")
    p.add_argument("--chat", action="store_true", help="put each prompt through the model's chat template")
    p.add_argument("--max-tokens", type=int, default=128, help="per answer (default: 128)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    p.add_argument("--top-k", type=int, default=0, help="draw among the k likeliest tokens; 0 = all (default)")
    p.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest tokens of this much mass")
    p.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the likeliest one")
    p.add_argument("--seed", type=int, help="for draws that repeat")
    p.add_argument("--n", type=int, default=1, help="answers per prompt (needs a temperature above 0)")
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end an answer here; may be repeated")
    p.add_argument("--max-model-len", type=int, help="longest prompt and answer together")
    p.add_argument("--dtype", choices=DTYPES, default="float32")
    p.add_argument("--device", default="auto")
    p.add_argument("--noise", choices=NOISE_SCHEMES, default="murmur3")
    p.add_argument("--async-scheduling", action="store_true", help="plan a step while the one before runs")
    p.add_argument("--json", action="store_true", help="for machines; see below")
    p.set_defaults(run=_run_generate)


def _run_generate(args: argparse.Namespace) -> int:
    params = SamplingParams(
        n=args.n, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed,
        max_tokens=args.max_tokens, stop=tuple(args.stop),
    )  # fmt: skip
    with LLM(
        args.model, args.runner, dtype=args.dtype, device=args.device, noise=args.noise,
        max_model_len=args.max_model_len, async_scheduling=args.async_scheduling,
    ) as llm:  # fmt: skip
        start = time.perf_counter()
        with _progress_bar(len(args.prompts) * args.n * args.max_tokens) as progress:
            outputs = llm.generate(args.prompts, params, chat=args.chat, progress=progress)
        seconds = time.perf_counter() - start
        num_tokens = sum(len(o.token_ids) for o in outputs)
        if args.json:
            info = asdict(llm.runner_info)
            info["capabilities"] = sorted(c.value for c in llm.runner_info.capabilities)
            _print_json({
                "runner": info, "outputs": [asdict(o) for o in outputs], "num_tokens": num_tokens, "seconds": seconds,
                "tokens_per_second": num_tokens / seconds,
            })  # fmt: skip
            return 0
        for i, output in enumerate(outputs):
            _print_answer(args.prompts[i // args.n], output, alone=len(outputs) == 1)
        runner = llm.runner_info
        print(
            f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s "
            f"({runner.name} on {runner.device}, {runner.dtype})",
            file=sys.stderr,
        )
    return 0


def _print_answer(prompt: str, output: RequestOutput, *, alone: bool) -> None:
    if not alone:
        print(f"--- {prompt}")
    print(output.text.strip("\n"))


@contextmanager
def _progress_bar(most_tokens: int) -> Iterator[Progress | None]:
    """A bar on stderr while tokens are drawn; nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    text = TextColumn("{task.description}"), TextColumn("{task.completed} tokens")
    with Bar(text[0], BarColumn(), text[1], TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("answering", total=most_tokens)

        def progress(finished: int, requests: int, tokens: int) -> None:
            bar.update(task, completed=tokens, description=f"{finished} of {requests} answered")

        yield progress


def runners(subparsers: Any) -> None:
    """Add `modelrunner runners`."""
    p = subparsers.add_parser(
        "runners", help="what is installed and what it can do", epilog=RUNNERS_JSON,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("names", metavar="RUNNER", nargs="*", help="only these (names or package.module:factory)")
    p.add_argument("--json", action="store_true", help="for machines; see below")
    p.set_defaults(run=_run_runners)


def _run_runners(args: argparse.Namespace) -> int:
    known = runner_names()
    for name in args.names:
        if ":" not in name and name not in known:
            raise UnknownNameError("runner", name, known, field="RUNNER")
    found = [_describe(name) for name in args.names or sorted(known)]
    if args.json:
        _print_json(found)
        return 0
    for entry in found:
        print(f"{entry['name']}  ({entry['target']})")
        if entry["error"]:
            print(f"  cannot be used: {entry['error']}")
            continue
        print(f"  class         {entry['class_path']} {entry['version']}")
        print(f"  device        {entry['device']}, {entry['dtype']} by default")
        print(f"  layouts       {', '.join(entry['layouts'])}")
        print(f"  capabilities  {', '.join(entry['capabilities'])}")
        for note in entry["notes"]:
            print(f"  note          {note}")
    return 0


def _describe(name: str) -> dict[str, Any]:
    """What a runner says of itself when built without a model, or why it cannot be built."""
    target = name if ":" in name else runner_names().get(name)
    entry: dict[str, Any] = dict.fromkeys(
        ("class_path", "version", "device", "dtype", "noise", "notes", "capabilities", "layouts")
    )
    entry = {"name": name, "target": target, "error": None, **entry}
    try:
        runner = load_runner(name, RunnerConfig())
    except RunnerError as e:  # one that cannot be built must not hide the others
        entry["error"] = str(e)
        return entry
    info = runner.describe()
    runner.shutdown()
    for key in ("class_path", "version", "device", "dtype", "noise"):
        entry[key] = getattr(info, key)
    entry["notes"] = list(info.notes)
    entry["capabilities"] = sorted(c.value for c in info.capabilities)
    entry["layouts"] = [layout for layout in LAYOUTS if _accepts(name, layout)]
    return entry


def _accepts(name: str, layout: str) -> bool:
    try:
        load_runner(name, RunnerConfig(layout=layout)).shutdown()
    except RunnerError:
        return False
    return True


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, ensure_ascii=False, indent=2, default=str)
    print()
