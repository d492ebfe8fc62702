"""What the command line accepts, where each flag arrives, and what is refused in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from turbospark import OpenOptions, Runner, cli
from turbospark.cli import bench, talk
from turbospark.cli.console import FLAGS
from turbospark.cli.console import flags as flags_of
from turbospark.cli.parser import COMMANDS, NO_FLAG, option_flags, parse
from turbospark.errors import RunnerClosedError
from turbospark.options import GenerationOptions, KvQuant

Command = Callable[..., Any]

# A value other than the default for every flag.
OPENING = {
    "max_context": 77,
    "min_auto_context": 5,
    "load_guard": "strict",
    "expert_residency": "mapped",
    "expert_cache_slots": 9,
    "ngram_table": "resident",
    "expert_cache_policy": "lru",
    "expert_lookahead": True,
    "expert_disk_io": True,
    "kv_quant": KvQuant.BITS_3_5,
    "acceptance": "match",
    "prefill_chunk": 64,
    "dtype": "bfloat16",
    "device": "cpu",
    "verify": "receipt",
    "verify_reads": True,
    "kernels": "reference",
    "chat_date": date(2031, 5, 4),
}
SAMPLING = {
    "max_new_tokens": 7,
    "temperature": 0.5,
    "draft_tokens": 3,
    "top_k": 3,
    "top_p": 0.25,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 0.75,
    "seed": 2**64 - 1,
    "stop": ("12", "\n"),
    "stop_token_ids": (4, 5),
    "ignore_eos": True,
    "json_schema": '{"type": "integer"}',
    "regex": "12",
    "grammar": 'start: "a"',
}


def flags(name: str, value: Any) -> list[str]:
    """The words that set field `name` to `value`."""
    flag = {"max_new_tokens": "--max-new", "stop_token_ids": "--stop-token-id"}.get(
        name, f"--{name.replace('_', '-')}"
    )
    if value is True:
        return [flag]
    values = value if isinstance(value, tuple) else (value,)
    return [word for v in values for word in (flag, str(v))]


def opened(monkeypatch: pytest.MonkeyPatch, turbospark: Command, *argv: str) -> OpenOptions:
    """The options with which a command opens its model."""
    seen: list[OpenOptions] = []

    def fake(model: str, options: OpenOptions, progress: bool = False) -> Runner:
        seen.append(options)
        raise RunnerClosedError("enough")

    monkeypatch.setattr(Runner, "open", fake)
    assert turbospark(*argv).err == "turbospark: enough\n"
    return seen[0]


def test_every_option_flag_is_tried_below() -> None:
    assert set(OPENING) | NO_FLAG == set(OpenOptions.model_fields)
    assert set(SAMPLING) == set(GenerationOptions.model_fields)


@pytest.mark.parametrize("command", [("run", "m", "hi"), ("chat", "m"), ("bench", "m")])
@pytest.mark.parametrize("name", OPENING)
def test_an_opening_flag_reaches_its_option(
    name: str, command: tuple[str, ...], turbospark: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command[0] == "bench" and name in ("chat_date", "min_auto_context"):
        assert turbospark(*command, *flags(name, OPENING[name])).code == 2
        return
    lookup = ("--speculative-drafter", "lookup") if name == "acceptance" else ()
    found = opened(monkeypatch, turbospark, *command, *flags(name, OPENING[name]), *lookup)
    assert getattr(found, name) == OPENING[name] != OpenOptions.model_fields[name].default


@pytest.mark.parametrize("command", [["run", "m", "hi"], ["chat", "m"]])
@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_flag_reaches_its_option(name: str, command: list[str]) -> None:
    options = talk._generation(parse([*command, *flags(name, SAMPLING[name])]))
    assert getattr(options, name) == SAMPLING[name] != GenerationOptions.model_fields[name].default


def test_commands_for_people_read_the_environment_and_bench_does_not(
    turbospark: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURBOSPARK_PREFILL_CHUNK", "128")
    monkeypatch.setenv("TURBOSPARK_ROUTED_PIPELINE", "0")
    for command in (("run", "m", "hi"), ("chat", "m")):
        found = opened(monkeypatch, turbospark, *command)
        assert (found.prefill_chunk, found.toggles.routed_pipeline) == (128, False)
        assert found.max_context == found.expert_cache_slots == "auto"
        assert (
            opened(monkeypatch, turbospark, *command, "--prefill-chunk", "32").prefill_chunk == 32
        )
    found = opened(monkeypatch, turbospark, "bench", "m", "--prompt-tokens", "10", "--max-new", "5")
    assert found == OpenOptions(max_context=15)


def test_chat_reuses_the_prefix_and_run_does_not(
    turbospark: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opened(monkeypatch, turbospark, "chat", "m").prefix_reuse is True
    assert opened(monkeypatch, turbospark, "run", "m", "hi").prefix_reuse is False


def test_a_prompt_may_stand_before_or_after_flags() -> None:
    words = (["run", "m", "hi", "--seed", "1"], ["run", "m", "--seed", "1", "hi"])
    assert all(parse(w).prompt == "hi" and parse(w).seed == 1 for w in words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*.down_proj.weight=4", ("*.down_proj.weight", {"bits": 4})),
        ("a=6,32", ("a", {"bits": 6, "group_size": 32})),
        ("a=mxfp4", ("a", {"mode": "mxfp4"})),
        ("a=b=keep", ("a=b", None)),
    ],
)
def test_an_override_is_bits_a_group_a_mode_or_keep(text: str, expected: Any) -> None:
    assert parse(["convert", "s", "d", "--override", text]).override == [expected]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["convert"], "arguments are required: source"),
        (["convert", "s", "d", "--override", "4"], "'4' is not PATTERN=BITS"),
        (["convert", "s", "d", "--override", "a=4,x"], "'4,x' is not BITS or BITS,GROUP"),
        (["convert", "s", "d", "--override", "a=4,32,1"], "'4,32,1' is not BITS or BITS,GROUP"),
        (["convert", "s", "d", "--bits", "four"], "invalid int value: 'four'"),
        (["run", "m", "--ids", "1,b"], "'1,b' is not a list of token ids"),
        (["run", "m", "hi", "there"], "unrecognized arguments: there"),
        (["run", "m", "hi", "--temp", "0"], "--temp 0 (did you mean --temperature?); see"),
        (["run", "m", "hi", "--max_tokens=4"], "--max_tokens=4 (did you mean --max-new-tokens?)"),
        (["run", "m", "hi", "--wombat"], "unrecognized arguments: --wombat; see"),
        (["synth", "llama", "d", "--set", "rope=x"], "'rope=x' is not KEY=JSON"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(
    argv: list[str], message: str, turbospark: Command
) -> None:
    found = turbospark(*argv)
    assert (found.code, found.out) == (2, "")
    assert message in found.err and found.err.count("\n") == 1
    assert found.err.startswith("turbospark") and "--help\n" in found.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "tiny", "hi", "--temperature", "-1"], "--temperature -1 is not valid; works: a"),
        (["run", "tiny", "hi", "--max-context", "lots"], "--max-context 'lots' is not valid"),
        (["run", "tiny", "hi", "--ids", "1"], "PROMPT and --ids were both given"),
        (["run", "tiny", "--raw", "--messages-file", "f"], "--raw continues a text, but --mess"),
        (["run", "tiny", "hi", "--raw", "--system", "s"], "--system needs a chat"),
        (["run", "tiny", "--ids", "1", "--reasoning", "low"], "--reasoning needs a chat"),
        (["run", "tiny", "hi", "--raw", "--chat-date", "2020-01-01"], "--chat-date needs a chat"),
        (["run", "tiny", "hi", "--reasoning", "much"], "--reasoning 'much' is not valid"),
        (["bench", "tiny", "--toggle", "prefill_steel=2"], "is not NAME=0 or NAME=1"),
        (["bench", "tiny", "--toggle", "steel=0"], "unknown option 'steel'"),
        (["bench", "tiny", "--toggle", "routed_pipeline=0"], "never reads routed_pipeline"),
        (["bench", "tiny", "--max-new", "1"], "--max-new 1 is too few; at least 2"),
        (["bench", "tiny", "--rounds", "0"], "--rounds 0 is too few; at least 1"),
        (["convert", "s", "d", "--group-size", "32"], "--group-size 32 was given without bits"),
        (
            ["convert", "s", "d", "--bits", "7"],
            "--bits 7, --group-size 64 is not executable; bits one",
        ),
        (
            ["convert", "s", "d", "--override", "a=7"],
            "override 'a': affine quantization with --bits 7",
        ),
        (["convert", "s"], "DEST or --name NAME says where the install goes, and neither was"),
        (["convert", "s", "d", "--name", "n"], "where the install goes, and both were given"),
        (["synth", "llama", "--name", "a/b/c"], "model name 'a/b/c' is not letters"),
        (
            ["run", "wordless", "--ids", "1", "--draft-tokens", "3"],
            "--draft-tokens 3, but no drafter is open; name one by --speculative-drafter or",
        ),
    ],
)
def test_an_option_that_cannot_be_is_one_line_and_exit_code_2(
    argv: list[str], message: str, turbospark: Command
) -> None:
    found = turbospark(*argv)
    assert (found.code, found.out) == (2, "")
    assert message in found.err and found.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "tinny", "hi"], "neither a directory nor an installed model; installed: tiny"),
        (["info", "nothing"], "neither a directory nor an installed model"),
        (["run", "some/model", "hi"], "`turbospark pull some/model` installs from the Hub"),
        (["chat", "wordless"], "a text needs a tokenizer, and "),
        (["info", __file__], "is a file; an install is a directory, `turbospark convert` makes"),
        (["info", str(Path(__file__).parent)], "a checkpoint is opened after `turbospark convert`"),
        (["rm", "nothing"], "no installed model is named 'nothing'"),
        (["convert", "absent", "d"], "absent: does not exist; expected a folder with"),
        (["run", "wordless", "hi"], "; `turbospark run MODEL --ids 1,2,3` takes token ids, or"),
        (
            ["run", "wordless", "--ids", "1", "--stop", "a"],
            "the install has no tokenizer.json; use --stop-token-id",
        ),
        (["bench", "wordless", "--prompt", "hi"], "a text needs a tokenizer, and "),
        (
            ["run", "wordless", "--ids", "1", "--speculative", "4"],
            "no mtp drafter; --draft-model and --speculative-drafter lookup work with every family",
        ),
        (["info", __file__], "`turbospark steering info` looks at a control vector"),
        (["run", "tiny", "--messages-file", "absent.json"], "No such file or directory"),
        (["run", "tiny", "hi", "--max-context", "8", "--max-new", "9"], "exceeds --max-context 8"),
        (["run", "tiny", "hi", "--max-context", "8"], "exceeds --max-context 8"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_1(
    argv: list[str], message: str, turbospark: Command
) -> None:
    found = turbospark(*argv)
    assert (found.code, found.out) == (1, "")
    assert message in found.err and found.err.count("\n") == 1


def test_every_text_that_is_put_into_flags_is_still_raised() -> None:
    room = Path(cli.__file__).parent
    files = [path for path in room.parent.rglob("*.py") if room not in path.parents]
    code = re.sub(r'"\s*f?"', "", "".join(path.read_text("utf-8") for path in files))
    code = code.replace("{asked}", "").replace('", path)', " needs a tokenizer")  # as raised
    assert [said for said in FLAGS if said not in code] == []


@pytest.mark.parametrize(
    ("argv", "said", "shown"),
    [
        (["run"], "kv_quant=4 without balance tables", "--kv-quant 4 without balance tables"),
        (["run"], "reasoning='low': the level is ignored", "--reasoning 'low': the level is"),
        (["run"], "lower max_new_tokens or load_guard", "lower --max-new or --load-guard"),
        (["run"], "ignore_eos goes past", "--ignore-eos goes past"),
        (["run"], "use ignore_eos=True", "use --ignore-eos"),
        (["run"], "regex cannot be honoured: a regex", "--regex cannot be honoured: a regex"),
        (["run"], "grammar needs llguidance", "--grammar needs llguidance"),
        (["run"], "the grammar allows no token", "the grammar allows no token"),
        (["run"], "ignore_eos=False is", "no --ignore-eos is"),
        (["run"], "the seed of a model", "the seed of a model"),
        (["run"], "/a/max_context.gguf: rope.top_k=3", "/a/max_context.gguf: rope.top_k=3"),
        (["run"], "max_context.gguf is no folder", "max_context.gguf is no folder"),
        (["list"], "max_context=3 is past", "max_context=3 is past"),
        (
            ["serve"],
            "session_slots=2 without prefix_reuse allocates caches that no prompt finds again; use "
            "prefix_reuse=True, or session_slots=1",
            "--session-slots 2 with --no-prefix-reuse allocates caches that no prompt finds again; "
            "drop --no-prefix-reuse, or use --session-slots 1",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_the_library_says_of_options_is_said_of_flags(
    argv: list[str], said: str, shown: str
) -> None:
    assert flags_of(said, option_flags(argv)).startswith(shown)


def test_warnings_name_flags_too(turbospark: Command) -> None:
    found = turbospark("run", "tiny", "hi", "--kv-quant", 4, "--max-new", 1)
    assert "turbospark: warning: --kv-quant 4 without balance tables" in found.err


def test_with_json_a_refusal_is_an_object_as_well(turbospark: Command) -> None:
    found = turbospark("info", "nothing", "--json")
    error = json.loads(found.out)["error"]
    assert found.code == 1 and error["type"] == "ModelNotFoundError"
    assert found.err == f"turbospark: {error['message']}\n"


def test_ctrl_c_is_exit_code_130(turbospark: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "bench", interrupted)
    assert turbospark("bench", "tiny").code == cli.INTERRUPTED == 130


def test_a_reader_that_has_gone_is_exit_code_141_and_no_traceback() -> None:
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    assert reader.stdin is not None
    found = subprocess.run(
        [sys.executable, "-m", "turbospark", "info", "tiny"],
        stdout=reader.stdin,
        stderr=subprocess.PIPE,
        text=True,
    )
    reader.stdin.close()
    assert (found.returncode, found.stderr) == (cli.BROKEN_PIPE, "")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("run tiny <&-", 1, "standard input is empty"),
        ("chat tiny <&-", 0, ""),
        ("info tiny >&-", 0, ""),
        ("info tiny 2>&-", 0, ""),
        ("info nothing 2>&-", 1, ""),
        pytest.param(
            "list --json >/dev/full",
            1,
            "turbospark: [Errno 28] No space left on device",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full"),
        ),
    ],
)
def test_closed_and_full_streams_are_no_traceback(words: str, code: int, said: str) -> None:
    found = subprocess.run(
        ["sh", "-c", f'"$0" -m turbospark {words}', sys.executable],
        capture_output=True,
        text=True,
    )
    assert "turbospark: " not in found.stdout, "what is for standard error goes nowhere else"
    assert found.returncode == code and "Traceback" not in found.stderr
    assert said in found.stderr and found.stderr.count("\n") == bool(said)


def test_every_command_has_help_that_names_its_flags(turbospark: Command) -> None:
    overview = turbospark("--help").out
    for name, command in COMMANDS.items():
        found = turbospark(name, "--help")
        assert found.code == 0 and "--json" in found.out
        assert f"    {name:<{max(map(len, COMMANDS)) + 2}}{command.help}\n" in overview
    for flag in ("--max-new", "--expert-residency", "--reasoning", "--ids", "--prefill-chunk"):
        assert flag in turbospark("run", "--help").out


def test_help_loads_neither_mlx_nor_pydantic() -> None:
    script = (
        "import sys\nfrom turbospark.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'mlx', 'pydantic', 'numpy', 'tokenizers', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
