"""The engine's own subcommands: `generate` answers prompts, `runners` lists what is installed and what it can do."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from engine_core.explain import (
    EXPLAIN_JSON,
    explain_runners,
    explain_runners_text,
    explain_vllm_versions,
    parse_options,
    vllm_keys,
)
from engine_core.llm import LLM, Progress, RequestOutput
from engine_core.vllm_policy import POLICIES
from runner_api import (
    ConfigError,
    EngineError,
    RunnerConfig,
    RunnerError,
    SamplingParams,
    StructuredOutputsParams,
    UnknownNameError,
    load_runner,
    runner_names,
)
from runner_api.config import DTYPES, LAYOUTS, NOISE_SCHEMES
from runner_api.loader import built_layout, call_factory

GENERATE_JSON = """\
--json prints one object:
  runner     name, class_path, version, device, dtype, layout, noise, capabilities, notes, selection (why this layout:
             see `modelrunner runners --help`, decision)
  outputs    one per answer: prompt, prompt_token_ids, text, token_ids, finish_reason ("stop", "length" or "error"),
             stop_reason (stop string, stop token id or null), index (which of the n answers), error (null, or why
             no further token could be drawn), logprobs (null, or for each token its own and the likeliest,
             by token id; null for a token that cannot come), prompt_logprobs (null)
  num_tokens, seconds, tokens_per_second   of all answers together, loading left out
"""
RUNNERS_JSON = """\
--json prints a list with one object per runner:
  name, target (package.module:factory), error (null, or why it cannot be built here)
  class_path, version, device, dtype, noise, notes, capabilities, layouts (those that it can build),
  selection (which of them it takes, and why: as decision below)   (null where error is set)
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
    p.add_argument("--min-tokens", type=int, default=0, help="no end before so many tokens")
    p.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="against tokens said before")
    p.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="… for each time they were said")
    p.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="… and tokens of the prompt; a factor"
    )
    p.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        type=_bias,
        metavar="ID=VALUE",
        help="add to a token's logit; may be repeated",
    )
    p.add_argument("--allowed-token-ids", type=_token_ids, metavar="ID,…", help="draw no other tokens")
    p.add_argument("--bad-words", action="append", default=[], metavar="TEXT", help="never say this; may be repeated")
    p.add_argument("--logprobs", type=int, metavar="N", help="log probabilities of the N likeliest tokens, with --json")
    form = p.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="answer in JSON that fits this schema")
    form.add_argument("--regex", metavar="TEXT", help="answer with a text that matches this as a whole")
    form.add_argument("--choice", action="append", metavar="TEXT", help="answer with one of these; may be repeated")
    p.add_argument("--max-model-len", type=int, help="longest prompt and answer together")
    p.add_argument("--dtype", choices=DTYPES, default="float32")
    p.add_argument("--device", default="auto")
    p.add_argument("--noise", choices=NOISE_SCHEMES, default="murmur3")
    p.add_argument("--layout", choices=LAYOUTS, help="of the runner's rows (default: its choice)")
    p.add_argument("--async-scheduling", action="store_true", help="plan a step while the one before runs")
    p.add_argument("--json", action="store_true", help="for machines; see below")
    p.set_defaults(run=_run_generate)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, a token id and a number") from e


def _token_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(token) for token in text.split(","))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids, such as 5,17") from e


def _form(args: argparse.Namespace) -> StructuredOutputsParams | None:
    """The form of the answers, if one is asked for."""
    if args.json_schema is not None:
        try:
            with open(args.json_schema, encoding="utf-8") as file:
                return StructuredOutputsParams(json=file.read())
        except (OSError, UnicodeDecodeError) as e:
            raise EngineError(f"cannot be read: {e}", field="--json-schema", got=args.json_schema) from e
    if args.regex is not None:
        return StructuredOutputsParams(regex=args.regex)
    return None if args.choice is None else StructuredOutputsParams(choice=args.choice)


def _run_generate(args: argparse.Namespace) -> int:
    params = SamplingParams(
        n=args.n, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed,
        max_tokens=args.max_tokens, min_tokens=args.min_tokens, stop=tuple(args.stop), logprobs=args.logprobs,
        presence_penalty=args.presence_penalty, frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty, logit_bias=dict(args.logit_bias) or None,
        allowed_token_ids=args.allowed_token_ids, structured_outputs=_form(args),
    )  # fmt: skip
    with LLM(
        args.model, args.runner, dtype=args.dtype, device=args.device, noise=args.noise,
        max_model_len=args.max_model_len, async_scheduling=args.async_scheduling, layout=args.layout,
    ) as llm:  # fmt: skip
        if args.bad_words:
            params = replace(params, bad_words_token_ids=llm.encode_bad_words(args.bad_words))
        start = time.perf_counter()
        with _progress_bar(len(args.prompts) * args.n * args.max_tokens) as progress:
            outputs = llm.generate(args.prompts, params, chat=args.chat, progress=progress)
        seconds = time.perf_counter() - start
        num_tokens = sum(len(o.token_ids) for o in outputs)
        if args.json:
            info = asdict(llm.runner_info)
            info["capabilities"] = sorted(c.value for c in llm.runner_info.capabilities)
            _print_json({
                "runner": info, "outputs": [_as_json(o) for o in outputs], "num_tokens": num_tokens, "seconds": seconds,
                "tokens_per_second": num_tokens / seconds,
            })  # fmt: skip
            return _exit_code(outputs)
        for i, output in enumerate(outputs):
            _print_answer(args.prompts[i // args.n], output, alone=len(outputs) == 1)
        runner = llm.runner_info
        print(
            f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s "
            f"({runner.name} on {runner.device}, {runner.dtype})",
            file=sys.stderr,
        )
    return _exit_code(outputs)


def _exit_code(outputs: list[RequestOutput]) -> int:
    """2, as for anything refused, if an answer could not be drawn to its end; its reason goes to stderr."""
    for i, output in enumerate(outputs):
        if output.error:
            print(f"error: answer {i + 1} of {len(outputs)}: {output.error}", file=sys.stderr)
    return 2 if any(output.error for output in outputs) else 0


def _as_json(output: RequestOutput) -> dict[str, Any]:
    """JSON has no infinity: the log probability of a token that cannot come is null."""
    values = asdict(output)
    if output.logprobs is not None:
        values["logprobs"] = [
            {token: value if math.isfinite(value) else None for token, value in one.items()} for one in output.logprobs
        ]
    return values


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
        "runners", help="what is installed and what it can do", epilog=RUNNERS_JSON + EXPLAIN_JSON + vllm_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("names", metavar="RUNNER", nargs="*", help="only these (names or package.module:factory)")
    what = p.add_mutually_exclusive_group()
    what.add_argument("--explain", action="store_true", help="which row layout each would take, and why")
    what.add_argument("--explain-vllm", metavar="CONFIG.json", help="which runner vLLM would build for this, and why")
    p.add_argument("--layout", choices=LAYOUTS, help="with --explain: if the configuration asks for this one")
    p.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE",
        help="with --explain: an option of RunnerConfig, such as num_speculative_tokens=2; may be repeated",
    )  # fmt: skip
    p.add_argument("--vllm-version", choices=tuple(POLICIES), help="with --explain-vllm: this one (default: all)")
    p.add_argument("--json", action="store_true", help="for machines; see below")
    p.set_defaults(run=_run_runners)


def _run_runners(args: argparse.Namespace) -> int:
    _check_combination(args)
    if args.explain_vllm is not None:
        decisions = explain_vllm_versions(args.explain_vllm, args.vllm_version)
        if args.json:
            _print_json([decision.to_dict() for decision in decisions])
        else:
            print("\n".join(decision.explain() for decision in decisions))
        return 0
    known = runner_names()
    for name in args.names:
        if ":" not in name and name not in known:
            raise UnknownNameError("runner", name, known, field="RUNNER")
    if args.explain:
        asked = {} if args.layout is None else {"layout": args.layout}
        entries = explain_runners(args.names, {**parse_options(args.option), **asked})
        if args.json:
            _print_json([{**e, "decision": e["decision"] and e["decision"].to_dict()} for e in entries])
        else:
            print(explain_runners_text(entries))
        return 0
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
        print(f"  layout        {entry['selection']['layout']}, by {entry['selection']['reason']}")
        print(f"  capabilities  {', '.join(entry['capabilities'])}")
        for note in entry["notes"]:
            print(f"  note          {note}")
    return 0


def _check_combination(args: argparse.Namespace) -> None:
    """An option that the rest of the line leaves no use for is refused."""
    unused = []
    if not args.explain:
        unused += ["--layout"] * (args.layout is not None) + ["--option"] * bool(args.option)
    if args.explain_vllm is None:
        unused += ["--vllm-version"] * (args.vllm_version is not None)
    else:
        unused += ["RUNNER"] * bool(args.names)
    if unused:
        raise ConfigError(
            "changes nothing here", field=unused[0], hint="It belongs to another use; see `modelrunner runners --help`"
        )


def _describe(name: str) -> dict[str, Any]:
    """What a runner says of itself when built without a model, or why it cannot be built."""
    target = name if ":" in name else runner_names().get(name)
    entry: dict[str, Any] = dict.fromkeys(
        ("class_path", "version", "device", "dtype", "noise", "notes", "capabilities", "layouts", "selection")
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
    entry["selection"] = built_layout(RunnerConfig(), info).to_dict()
    return entry


def _accepts(name: str, layout: str) -> bool:
    try:
        call_factory(name, RunnerConfig(layout=layout)).shutdown()
    except RunnerError:
        return False
    return True


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, ensure_ascii=False, indent=2, default=str)
    print()
