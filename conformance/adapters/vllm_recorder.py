"""Record a live vLLM: what its model runner was asked, built and drew, in a file that `modelrunner replay` reads.

    with record(llm, "trace.jsonl"):
        llm.generate(prompts, params)

The recorder puts itself around four methods of the model runner (three of a V1 one) and takes itself out again; vLLM
is not imported. Known interfaces: V2 and V1 of 0.26 and 0.33. One thing is changed: requests that finish in one step
leave in the order of their ids, as in 0.33 (0.26 walks a set, so that row numbers could not be repeated).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conformance.adapters.vllm_batch import dense_batch, dense_sampled, host, meta_of, slots_batch, slots_sampled
from conformance.adapters.vllm_find import check_signatures, find_model_runner, interface_of, vllm_version
from conformance.adapters.vllm_plan import plan_json
from runner_api import CallOrderError, CapabilityError, ConfigError, TraceError

Hook = tuple[Any, str, Callable[..., Any]]  # an object, the method to sit around, and what is called with it


@contextmanager
def record(engine: Any, path: str | Path, *, logits: bool = False, version: str | None = None) -> Iterator[Recorder]:
    """Record every step that `engine` takes inside of the block, and write the trace to `path`.

    engine: an `LLM`, an engine, a worker, or a model runner; idle when the block begins. logits: also keep each step's
    raw logits (`<name>_logits.npz` beside the trace; large), so that sampling can be replayed without the model.
    version: of vLLM, if it is not installed under that name. Raises ConfigError where nothing can be recorded or
    nothing was, CapabilityError, inside of the step, for what a recording has no place for.
    """
    recorder = Recorder(find_model_runner(engine), Path(path), version or vllm_version(), logits)
    try:
        yield recorder
    finally:
        recorder.close()
    if not recorder.steps:
        raise ConfigError(
            "nothing was recorded: the engine took no step", field=str(path), hint="Generate inside of the block"
        )


class Recorder:
    """Sits around one model runner's methods. steps: how many were written. Use `record`."""

    def __init__(self, runner: Any, path: Path, version: str, logits: bool) -> None:
        self.runner, self.path, self.steps = runner, path, 0
        interface = interface_of(runner)
        assert interface is not None
        self._v2, self._with_logits = interface == "V2", logits
        self._hooks = self._choose_hooks(logits)
        for holder, name, _ in self._hooks:
            if name in vars(holder):
                raise ConfigError("somebody else sits around this method", field=name, hint="Record once at a time")
        check_signatures(runner, interface)
        meta = meta_of(runner, interface, version, path.stem)
        self._drafts = "speculative_config" in meta
        self._step: dict[str, Any] | None = None  # the one being recorded
        self._cg_mode = ""
        self._outputs: dict[str, list[int]] = {}
        self._step_logits: np.ndarray | None = None
        self._all_logits: dict[str, np.ndarray] = {}
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except OSError as e:
            raise TraceError(f"cannot be written: {e}", field=str(path)) from e
        self._write({"meta": meta})
        for holder, name, around in self._hooks:
            setattr(holder, name, partial(around, getattr(holder, name)))

    def close(self) -> None:
        """Take the hooks out and end the file with what was drawn. A step that was not finished is left out."""
        for holder, name, _ in self._hooks:
            delattr(holder, name)
        self._hooks = []
        if not self._file.closed:
            self._write({"outputs": {r: {"token_ids": tokens} for r, tokens in self._outputs.items()}})
            self._file.close()
            if self._all_logits:
                np.savez_compressed(self.path.with_name(f"{self.path.stem}_logits.npz"), **self._all_logits)  # type: ignore[arg-type]

    # -- hooks ------------------------------------------------------------------------------------------------

    def _choose_hooks(self, logits: bool) -> list[Hook]:
        """What to sit around. Methods are looked up on the object before its class: an attribute there comes first."""
        runner = self.runner
        hooks: list[Hook] = [(runner, "execute_model", self._execute_model)]
        if self._v2:
            hooks += [
                (runner, "prepare_inputs", self._prepare_inputs),
                (runner, "prepare_attn", self._prepare_attn),
                (runner, "sample", self._sample),
            ]
        else:
            hooks += [
                (runner, "_prepare_inputs", self._dense_prepare_inputs),
                (runner, "_sample", self._dense_sample),
            ]
        return hooks + ([(runner.model, "compute_logits", self._compute_logits)] if logits else [])

    def _execute_model(self, original: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run") or (self._v2 and args[1:2] == (True,)):
            return original(scheduler_output, *args, **kwargs)
        if self._step is not None:
            raise CallOrderError(
                "the step before drew no tokens: not the rank that samples, or a pooling model", field="execute_model"
            )
        plan, finished = plan_json(scheduler_output), scheduler_output.finished_req_ids
        self._check_draws(plan)
        self._step, self._step_logits = {"step": self.steps, "plan": plan}, None
        scheduler_output.finished_req_ids = _SortedSet(finished)
        try:
            result = original(scheduler_output, *args, **kwargs)
        except BaseException:
            self._step = None
            raise
        finally:
            scheduler_output.finished_req_ids = finished
        self._add_seeds(plan)
        if plan["total"] == 0:
            self._finish_step()
        elif "batch" not in self._step:
            raise CallOrderError("tokens were scheduled and no batch was built", field="execute_model")
        return result

    def _prepare_inputs(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        descriptor = next((a for a in (*args, *kwargs.values()) if hasattr(a, "cg_mode")), None)
        self._cg_mode = "NONE" if descriptor is None else descriptor.cg_mode.name
        return original(*args, **kwargs)

    def _prepare_attn(self, original: Callable[..., Any], input_batch: Any) -> Any:
        tables, slot_mappings = original(input_batch)
        if self._step is not None:
            self._step["batch"] = slots_batch(self.runner, input_batch, self._cg_mode, tables, slot_mappings)
        return tables, slot_mappings

    def _sample(self, original: Callable[..., Any], hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        if grammar_output is not None:
            raise CapabilityError("grammar masks are not recorded", field="grammar_output", expected="None")
        result = original(hidden_states, input_batch, grammar_output)
        if self._step is not None:
            self._finish_step(slots_sampled(result[0], self._drafts))
        return result

    def _dense_prepare_inputs(self, original: Callable[..., Any], scheduler_output: Any, *args: Any) -> Any:
        result = original(scheduler_output, *args)
        if self._step is not None:
            self._step["batch"] = dense_batch(self.runner, scheduler_output, result[0])
        return result

    def _dense_sample(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if self._step is not None:
            self._finish_step(dense_sampled(self.runner, output))
        return output

    def _compute_logits(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The first call of a step is for the rows that are sampled; later ones score prompts or drafts."""
        logits = original(*args, **kwargs)
        if self._step is not None and self._step_logits is None and logits is not None:
            self._step_logits = host(logits).astype(np.float32)
        return logits

    # -- steps ------------------------------------------------------------------------------------------------

    def _check_draws(self, plan: dict[str, Any]) -> None:
        for new in () if self._v2 else plan["new"]:
            if new["sampling_params"].get("temperature", 1.0) != 0.0:
                raise CapabilityError(
                    "a V1 runner draws from PyTorch's generators, which no replay can follow", field="temperature",
                    req_id=new["req_id"], got=new["sampling_params"].get("temperature", 1.0), expected=0.0,
                )  # fmt: skip

    def _add_seeds(self, plan: dict[str, Any]) -> None:
        """A request without a seed got one when it took its row; the replay needs it."""
        if not self._v2:
            return
        for new in plan["new"]:
            params = new["sampling_params"]
            if params.get("seed") is None and params.get("temperature", 1.0) != 0.0:
                row = self.runner.req_states.req_id_to_index[new["req_id"]]
                params["seed"] = int(self.runner.sampler.sampling_states.seeds.np[row])

    def _finish_step(self, sampled: dict[str, Any] | None = None) -> None:
        step = self._step
        assert step is not None
        if sampled is not None:
            self._keep_logits(step, sampled)
            step["sampled"] = sampled
            for req_id, tokens, n in zip(
                step["batch"]["req_ids"], sampled["token_ids"], sampled["num_sampled"], strict=True
            ):
                self._outputs.setdefault(req_id, []).extend(tokens[:n])
        self._write(step)
        self._step = None
        self.steps += 1

    def _keep_logits(self, step: dict[str, Any], sampled: dict[str, Any]) -> None:
        if not self._with_logits:
            return
        logits = self._step_logits
        if logits is None or len(logits) != len(step["batch"]["logits_indices"]):
            raise CapabilityError(
                "not the logits of the rows that are sampled: they are computed in another place, or elsewhere",
                field="logits", got="none" if logits is None else len(logits),
                expected=len(step["batch"]["logits_indices"]), hint="Record without logits",
            )  # fmt: skip
        self._all_logits[f"logits_{step['step']}"] = logits
        top = np.partition(logits, -2, axis=1)[:, -2:]
        sampled["top2_margin"] = (top[:, 1] - top[:, 0]).astype(float).tolist()

    def _write(self, value: dict[str, Any]) -> None:
        self._file.write(json.dumps(value) + "\n")


class _SortedSet(set[str]):
    """A set that is walked in order, also after `union`."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))

    def union(self, *others: Any) -> _SortedSet:
        return _SortedSet(super().union(*others))
