"""docs/json-lines.md and examples/json_runner.py: what the page shows is what happens, and is enough to write one."""

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.evaluate import evaluate
from conformance.truth import witness_logits
from runner_api import StepRecord, WitnessConfig, WitnessGroup, witness
from runner_api.json_process import JsonProcess
from runner_api.loader import load_object
from runner_api.serve import OPERATIONS, Server, main, serve
from runner_api.wire_types import ARRAYS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/json-lines.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples/json_runner.py"
EXCHANGES = sorted(
    re.findall(r"^→ (.*)\n← (.*)$", PAGE, re.MULTILINE), key=lambda exchange: json.loads(exchange[0])["id"]
)


def test_every_exchange_of_the_page_happens_as_shown(monkeypatch):
    monkeypatch.delenv("MODELRUNNER_LAYOUT", raising=False)
    requests, shown = zip(*EXCHANGES, strict=True)
    answers = io.StringIO()
    serve(Server("cpu"), requests, answers)
    for request, wanted, got in zip(requests, shown, answers.getvalue().splitlines(), strict=True):
        begin, end, at = wanted.split("…")[0], wanted.split("…")[-1], 0
        assert got.startswith(begin), request
        assert got.endswith(end), request
        for part in wanted.split("…"):
            at = got.index(part, at) + len(part)
        if "…" not in wanted:
            assert got == wanted


def test_every_operation_is_shown():
    assert {json.loads(request)["op"] for request, _ in EXCHANGES} == set(OPERATIONS)


def test_the_table_of_the_record_is_the_record():
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \| ?(\w*) ?\|", PAGE.split("## What a record holds")[1], re.MULTILINE)
    table = {name: dtype for names, dtype in rows for name in re.findall(r"`(\w+)`", names)}
    for name, (dtype, _) in ARRAYS[StepRecord].items():
        assert table.pop(name) == dtype, name
    rest = {f.name for f in dataclasses.fields(StepRecord)} - set(ARRAYS[StepRecord])
    assert set(table) == rest - {"extra", "schema_version"}
    assert set(table.values()) == {""}


def test_the_witness_models_numbers_are_right():
    mix64, logits = (load_object(f"{EXAMPLE}:{name}", name, "example") for name in ("mix64", "logits"))
    formula = PAGE.split("## The witness model")[1]
    for name in ("TOKEN", "POSITION", "INDEX", "VOCAB", "MIX_1", "MIX_2"):
        told = re.search(rf"{name} *= (0x\w+)", formula)
        assert told is not None
        assert int(told[1], 16) == getattr(witness, name)
    tokens, bits = [3, 1, 4, 1, 5], 2**64 - 1
    terms = [
        mix64((t * witness.TOKEN + p * witness.POSITION + (p + 1) * witness.INDEX) & bits) for p, t in enumerate(tokens)
    ]
    for number in (mix64(1), *terms, sum(terms) & bits):
        assert f"{number:#018x}" in formula
    scores = [int(n) for n in re.findall(r"\b\d{6,7}\b", formula)]
    assert scores == logits([(t, p) for p, t in enumerate(tokens)], 16)
    truth = witness_logits(WitnessConfig(16, (WitnessGroup(4),)), [tokens])[0]
    assert scores == (truth * 65536).tolist()


@pytest.fixture
def example():
    process = JsonProcess(f"{sys.executable} -S -E {EXAMPLE}", 20.0)
    yield process
    process.close()


def test_the_example_answers_as_the_page_says(example):
    """The exchanges that it offers: the same results, but for its name and for what it leaves out of a record."""
    for request, answer in EXCHANGES[1:9]:
        if "…" in answer and '"op":"record"' not in request:
            continue
        fields = json.loads(request)
        got, shown = (
            example.ask(fields.pop("op"), **{k: v for k, v in fields.items() if k != "id"}),
            json.loads(answer)["ok"],
        )
        if isinstance(got, dict) and "plan" in got:
            shown = {name: shown[name] for name in got if name != "runner"}
            got.pop("runner")
        if got != {"output": {"req_ids": ["a"], "sampled_token_ids": [[0]]}}:
            assert got == shown, request


def test_a_program_that_imports_nothing_passes_every_clause_that_it_claims():
    text = EXAMPLE.read_text(encoding="utf-8")
    assert set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)) == {"json", "sys", "traceback"}
    found = evaluate(f"process:{sys.executable} -S -E {EXAMPLE}", seeds=(0,), steps=20)
    assert found.passed, (found.failed, found.untested, found.errors)
    assert sum(1 for n in found.tested.values() if n) >= 40


def test_a_fault_in_it_is_found(tmp_path):
    """Without numpy and without us, one changed expression is named by its clause."""
    faulty = tmp_path / "faulty.py"
    text = EXAMPLE.read_text(encoding="utf-8")
    right = "+ position % self.block_size"
    assert text.count(right) == 1
    faulty.write_text(text.replace(right, "+ min(position % self.block_size, 2)"), encoding="utf-8")
    found = evaluate(f"process:{sys.executable} -S -E {faulty}", seeds=(0,), steps=20, enough=lambda e: bool(e.failed))
    assert "MR-SLOT-001" in found.failed


def test_the_server_ends_with_its_input_and_keeps_prints_off_stdout(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import os, sys\nprint('at import')\nos.system('echo from a shell')\n"
        "def factory(config):\n    print('in a call')\n    raise ValueError('no')\n"
    )
    requests = '{"id": 1, "op": "start", "spec_version": "2026.11"}\n{"id": 2, "op": "build", "config": {}}\nnot JSON\n'
    done = subprocess.run(
        [sys.executable, "-m", "runner_api.serve", f"{tmp_path}/loud.py:factory"], input=requests, capture_output=True,
        text=True, timeout=60, check=True,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [a["id"] for a in answers] == [1, 2, None]
    assert answers[1]["error"]["type"] == "ConfigError"
    assert "ValueError: no" in answers[1]["error"]["text"]
    assert answers[2]["error"]["type"] == "JSONDecodeError"
    for said in ("at import", "from a shell", "in a call"):
        assert said in done.stderr
    with pytest.raises(SystemExit):
        main([])
