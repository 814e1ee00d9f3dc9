"""examples/runner.pl: a runner in a language without NumPy, from docs/json-lines.md alone."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.evaluate import evaluate
from runner_api import SPEC_VERSION, CapabilityError
from runner_api.json_process import JsonProcess

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/runner.pl"
TEXT = EXAMPLE.read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(shutil.which("perl") is None, reason="there is no perl here")


@pytest.fixture
def program() -> Iterator[JsonProcess]:
    process = JsonProcess(f"perl {EXAMPLE}", 20.0)
    yield process
    process.close()


def test_it_passes_every_clause_that_it_claims() -> None:
    assert set(re.findall(r"^(?:use|no|require) (\w+)", TEXT, re.MULTILINE)) == {"strict", "warnings"}
    found = evaluate(f"process:perl {EXAMPLE}", seeds=(0,), steps=20)
    assert found.passed, (found.failed, found.untested, found.errors)
    assert sum(1 for n in found.tested.values() if n) >= 70


@pytest.mark.parametrize(
    ("right", "wrong", "clause_id"),
    [
        ("* $size + $_ % $size } $start", "* $size + ($_ & 1) } $start", "MR-SLOT-001"),
        ("(-1) x ($padded_tokens", "(0) x ($padded_tokens", "MR-PAD-004"),
        ("$logits->[$_] > $logits", "$logits->[$_] >= $logits", "MR-SAMPLE-001"),
        ("$r->{kv} = [map", "our @kv; $r->{kv} = \\@kv; @kv = (map", "MR-META-020"),
    ],
)
def test_a_fault_in_it_is_named(tmp_path: Path, right: str, wrong: str, clause_id: str) -> None:
    faulty = tmp_path / "faulty.pl"
    assert TEXT.count(right) == 1
    text = TEXT.replace(right, wrong)
    faulty.write_text(text.replace("$r->{block_size}];", "$r->{block_size});") if "@kv" in wrong else text)
    found = evaluate(f"process:perl {faulty}", seeds=(0,), steps=20, selected=[clause_id])
    assert found.failed == [clause_id]


def test_its_parser_keeps_what_json_can_say(program: JsonProcess) -> None:
    """Order of keys, all 64 bits of a seed, and ids of any characters."""
    program.ask("start", spec_version=SPEC_VERSION)
    number = program.ask("build", config={"max_num_reqs": 4})["runner"]
    program.ask("load_model", runner=number, model={"witness": {"groups": [{"block_size": 4}]}})
    program.ask("initialize_kv_cache", runner=number, kv_cache_config={"num_blocks": 8, "groups": [], "tensors": []})
    ids, seeds = ['z"\\/\n', "é", "😀", "\\ud83d"], [2**63 - 1, -(2**63), 2**53 + 1, 0]
    news = [
        {"req_id": i, "prompt_token_ids": [1], "prefill_token_ids": [1], "num_computed_tokens": 0, "block_ids": [[n]],
         "sampling_params": {"temperature": 0.0}, "seed": seed}
        for n, (i, seed) in enumerate(zip(ids, seeds, strict=True), 1)
    ]  # fmt: skip
    counts = dict.fromkeys(ids, 1)
    plan = {"scheduled_new_reqs": news, "num_scheduled_tokens": counts, "total_num_scheduled_tokens": 4}
    assert program.ask("step", runner=number, plan=plan) is None
    record = program.ask("record", runner=number)
    assert record["req_ids"] == ids
    assert record["seeds"] == seeds
    assert json.dumps(record["plan"]) == json.dumps(plan)
    with pytest.raises(
        CapabilityError, match=rf"^process:perl {re.escape(str(EXAMPLE))} digest: digest is not offered"
    ):
        program.ask("digest", runner=number)
