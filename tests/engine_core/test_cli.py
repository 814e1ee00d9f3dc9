"""The program: exit codes, one-line errors, broken subcommands, and output for machines."""

import json
from importlib.metadata import EntryPoint

import pytest

import engine_core.cli as cli
from engine_core import commands
from engine_core.llm import LLM, RequestOutput
from runner_api import EngineError, RunnerInfo, SamplingParams, StructuredOutputsParams, WitnessConfig, __version__

GOOD = EntryPoint("good", "test_cli:add_good", cli.ENTRY_POINT_GROUP)
BROKEN = EntryPoint("broken", "no_such_module_xyz:command", cli.ENTRY_POINT_GROUP)


def add_good(subparsers):
    parser = subparsers.add_parser("good", help="does as it is told")
    parser.add_argument("what")
    parser.set_defaults(run=run_good)


def run_good(args):
    if args.what == "refuse":
        raise EngineError("two\nlines", field="x", got=1, expected=2)
    if args.what == "interrupt":
        raise KeyboardInterrupt
    if args.what == "break":
        raise ZeroDivisionError("in our\nown code")
    if args.what == "leave":
        raise SystemExit(0)
    if args.what == "give up":
        raise GeneratorExit
    if args.what == "diverge":
        return 1
    print("done")
    return 0


@pytest.fixture
def program(monkeypatch, capsys):
    monkeypatch.setattr(cli, "entry_points", lambda group: [GOOD, BROKEN])

    def run(*argv):
        code = cli.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_exit_codes(program):
    assert program("good", "x") == (0, "done\n", "")
    assert program("good", "diverge")[0] == 1
    assert program("good", "interrupt")[0] == 130
    assert program("good", "refuse") == (2, "", "error: MR-ERR-010 x: two lines (got 1, expected 2)\n")
    for argv in ((), ("nonsense",), ("good",), ("good", "x", "--what"), ("--log-level", "loud", "good", "x")):
        code, out, err = program(*argv)
        assert (code, out) == (2, "")
        assert "modelrunner" in err


def test_an_error_of_our_own_is_no_verdict(program, caplog):
    code, out, err = program("good", "break")
    assert (code, out) == (3, "")
    assert err.startswith("error: not foreseen: ZeroDivisionError: in our own code")
    assert err.count("\n") == 1
    assert "report" in err
    for what, name in (("leave", "SystemExit"), ("give up", "GeneratorExit")):
        code, out, err = program("good", what)
        assert (code, out) == (3, "")
        assert f"not foreseen: {name}" in err
    with caplog.at_level("DEBUG", "modelrunner"):
        assert program("--log-level", "debug", "good", "break")[0] == 3
    assert "in run_good" in caplog.text


def test_version_and_help(program):
    assert program("--version")[:2][0] == 0
    assert __version__ in program("--version")[1]
    code, out, _ = program("--help")
    assert code == 0
    assert "does as it is told" in out


def test_a_broken_command_is_listed_and_refuses(program):
    assert "no_such_module_xyz" in program("--help")[1].replace("\n", " ")
    for argv in (("broken",), ("broken", "--option", "value")):
        code, out, err = program(*argv)
        assert (code, out) == (2, "")
        assert err.startswith("error: command 'broken' is unavailable: ModuleNotFoundError")
        assert err.count("\n") == 1


def run_command(add, argv, capsys):
    parser = cli.argparse.ArgumentParser()
    add(parser.add_subparsers())
    args = parser.parse_args(argv)
    code = args.run(args)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_runners_lists_what_can_and_what_cannot_be_used(capsys):
    argv = ["runners", "cpu", "engine_fake_runner:FakeRunner", "no_such_module_xyz:Runner"]
    code, out, _ = run_command(commands.runners, [*argv, "--json"], capsys)
    assert code == 0
    cpu, fake, missing = json.loads(out)
    assert cpu["class_path"] == "cpu_reference.runner.CpuModelRunner"
    assert cpu["layouts"][0] == "slots"
    assert "generate" in cpu["capabilities"]
    assert fake["layouts"] == ["slots", "dense"]
    assert "no_such_module_xyz" in missing["error"]
    assert missing["capabilities"] is None
    code, out, _ = run_command(commands.runners, argv, capsys)
    assert code == 0
    assert "cannot be used" in out
    assert "device        cpu" in out


def test_an_unknown_runner_is_misuse(capsys):
    assert cli.main(["runners", "nope"]) == 2
    assert "expected one of cpu" in capsys.readouterr().err


def test_runners_help_documents_every_key(capsys):
    _, out, _ = run_command(commands.runners, ["runners", "cpu", "--json"], capsys)
    for key in json.loads(out)[0]:
        assert key in commands.RUNNERS_JSON


def test_generate(monkeypatch, capsys):
    class Characters:
        eos_token_ids = ()

        def encode(self, text):
            return [ord(c) - 64 for c in text]

        def decode(self, ids, skip_special_tokens=True):
            return "".join(chr(64 + i) for i in ids)

    built = []

    def witness(model, runner, **options):
        built.append((model, runner, options))
        llm = LLM(WitnessConfig(64), runner, **{**options, "max_model_len": 64})
        llm.tokenizer = Characters()
        return llm

    monkeypatch.setattr(commands, "LLM", witness)
    argv = ["generate", "some-model", "AB", "C", "--max-tokens", "5", "--dtype", "float64"]
    code, out, err = run_command(commands.generate, argv, capsys)
    assert code == 0
    lines = out.splitlines()
    assert (lines[0], len(lines[1]), lines[2], len(lines[3])) == ("--- AB", 5, "--- C", 5)
    assert err.startswith("10 tokens in ")
    assert "tokens/s (cpu on cpu, float64)" in err
    assert built[0][:2] == ("some-model", "cpu")

    code, out, err = run_command(
        commands.generate, [*argv, "--json", "--n", "2", "--temperature", "1", "--seed", "3"], capsys
    )
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert [o["index"] for o in result["outputs"]] == [0, 1, 0, 1]
    assert result["num_tokens"] == 20
    assert result["runner"]["dtype"] == "float64"
    for key in [*result, *result["outputs"][0], *result["runner"]]:
        assert key in commands.GENERATE_JSON or key == "notes"


class Recorded:
    """Stands for `LLM`: keeps the parameters, answers with what the test says."""

    params: list = []  # noqa: RUF012
    outputs: list = []  # noqa: RUF012
    runner_info = RunnerInfo("cpu", "x.Y", "0", "cpu", "float32", "slots", "murmur3", frozenset())

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def encode_bad_words(self, words):
        return tuple((ord(word),) for word in words)

    def generate(self, prompts, params, *, chat, progress):
        Recorded.params.append(params)
        return list(Recorded.outputs)


def test_sampling_options_reach_the_parameters(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(commands, "LLM", Recorded)
    Recorded.outputs = [RequestOutput("x", [1], "ok", [2], "stop")]
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    argv = [
        "generate",
        "m",
        "x",
        "--presence-penalty",
        "-1.5",
        "--frequency-penalty",
        "0.25",
        "--repetition-penalty",
        "1.5",
        "--min-tokens",
        "3",
        "--logit-bias",
        "5=-100",
        "--logit-bias",
        "6=2.5",
        "--allowed-token-ids",
        "5,6,7",
        "--bad-words",
        "a",
        "--bad-words",
        "b",
        "--logprobs",
        "2",
        "--json",
    ]
    code, out, _ = run_command(commands.generate, [*argv, "--json-schema", str(schema)], capsys)
    assert code == 0
    assert json.loads(out)["outputs"][0]["text"] == "ok"
    assert Recorded.params[-1] == SamplingParams(
        temperature=0.0, max_tokens=128, min_tokens=3, presence_penalty=-1.5, frequency_penalty=0.25,
        repetition_penalty=1.5, logit_bias={5: -100.0, 6: 2.5}, allowed_token_ids=(5, 6, 7), logprobs=2,
        bad_words_token_ids=((97,), (98,)), structured_outputs={"json": {"type": "integer"}},
    )  # fmt: skip
    for more, form in (
        (["--regex", "a+"], {"regex": "a+"}), (["--choice", "a", "--choice", "b c"], {"choice": ["a", "b c"]}),
    ):  # fmt: skip
        run_command(commands.generate, ["generate", "m", "x", *more], capsys)
        assert Recorded.params[-1].structured_outputs == StructuredOutputsParams(**form)
    run_command(commands.generate, ["generate", "m", "x"], capsys)
    assert Recorded.params[-1] == SamplingParams(temperature=0.0, max_tokens=128)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--json-schema", "/no/such/file"], "--json-schema"),
        (["--json-schema", "SCHEMA"], "structured_outputs.json: not JSON"),
        (["--regex", "a", "--choice", "b"], "not allowed with"),
        (["--logit-bias", "5"], "'5' is not ID=VALUE"),
        (["--logit-bias", "5=x"], "is not ID=VALUE"),
        (["--allowed-token-ids", "5,x"], "is not a list of token ids"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--min-tokens", "200"], "min_tokens"),
        (["--regex", ""], "structured_outputs.regex"),
    ],
)
def test_bad_sampling_options_are_misuse(monkeypatch, capsys, tmp_path, argv, says):
    monkeypatch.setattr(commands, "LLM", Recorded)
    schema = tmp_path / "schema.json"
    schema.write_text("{")
    argv = [str(schema) if a == "SCHEMA" else a for a in argv]
    assert cli.main(["generate", "m", "x", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert "error: " in captured.err.splitlines()[-1]


def test_an_answer_that_could_not_be_drawn_is_told(monkeypatch, capsys):
    monkeypatch.setattr(commands, "LLM", Recorded)
    Recorded.outputs = [
        RequestOutput("x", [1], "fine", [2], "length"),
        RequestOutput("y", [1], "so fa", [3, 4], "error", error="no token"),
    ]
    code, out, err = run_command(commands.generate, ["generate", "m", "x", "y"], capsys)
    assert code == 2
    assert out == "--- x\nfine\n--- y\nso fa\n"
    assert err.splitlines()[-1] == "error: answer 2 of 2: no token"
    code, out, _ = run_command(commands.generate, ["generate", "m", "x", "y", "--json"], capsys)
    assert code == 2
    assert [o["error"] for o in json.loads(out)["outputs"]] == [None, "no token"]


def test_log_probabilities_are_json(monkeypatch, capsys):
    monkeypatch.setattr(commands, "LLM", Recorded)
    Recorded.outputs = [RequestOutput("x", [1], "", [2], "stop", logprobs=[{2: -0.5, 3: float("-inf")}])]
    _, out, _ = run_command(commands.generate, ["generate", "m", "x", "--json"], capsys)
    assert "Infinity" not in out
    assert json.loads(out)["outputs"][0]["logprobs"] == [{"2": -0.5, "3": None}]


def test_the_installed_program_finds_its_commands(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "answer prompts from a checkpoint" in out
    assert "what is installed and what it can do" in out
    assert cli.main(["generate", "/no/such/model", "x"]) == 2
    assert capsys.readouterr().err.startswith("error: MR-ERR-007")
