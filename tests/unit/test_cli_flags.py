"""Flags: every field of the config structs is one, and whatever is wrong with one is said in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from omni_async.api.config import ApiConfig
from omni_async.cli import deployment, flags, main
from omni_async.cli.help_texts import HELP
from omni_async.config import ServerConfig, StageConfig
from omni_async.errors import ConfigError
from omni_async.image import ImageOptions
from omni_async.speech import SpeechOptions

STRUCTS = (ServerConfig, ApiConfig, SpeechOptions)
ROOT = Path(__file__).parents[2]


def parse(struct: Any, *argv: str) -> Any:
    """The struct that the flags describe."""
    parser = flags.Parser("test", "A test.")
    flags.add_struct(parser, struct, "fields", without=("model",))
    return flags.to_struct(parser.parse_args(argv), struct)


def refusal(struct: Any, *argv: str) -> str:
    """What is said of wrong flags."""
    with pytest.raises(ConfigError) as caught:
        parse(struct, *argv)
    return caught.value.message


def test_every_field_has_a_help_text_and_every_text_a_field() -> None:
    structs = (*STRUCTS, ImageOptions)
    fields = {(struct.__name__, name) for struct in structs for name in struct.__struct_fields__}
    without = {("SpeechOptions", "model"), ("ImageOptions", "model"), ("ImageOptions", "seed")}
    assert set(HELP) == fields - without


@pytest.mark.parametrize("struct", STRUCTS)
def test_without_flags_every_field_has_its_default(struct: Any) -> None:
    assert parse(struct) == struct()


@pytest.mark.parametrize("struct", [ServerConfig, ApiConfig])
def test_every_field_of_a_limit_can_be_set(struct: Any) -> None:
    for field in msgspec.structs.fields(struct):
        flag = "--" + field.name.replace("_", "-")
        if field.type is bool:
            assert getattr(parse(struct, flag), field.name) is True
        elif field.type is not tuple and not isinstance(field.default, tuple):
            assert getattr(parse(struct, flag, "7"), field.name) == ("7" if field.type is str else 7)


def test_a_repeated_flag_fills_a_tuple() -> None:
    assert parse(ApiConfig, "--api-key", "a", "--api-key=b").api_keys == ("a", "b")


def test_speech_fields_are_read_by_their_types() -> None:
    options = parse(
        SpeechOptions,
        *("--speed", "1.5", "--seed", "0", "--voice", "12", "--x-vector-only-mode", "true"),
        *("--speaker-embedding", "[1, 2.5]", "--extra-params", '{"temperature": 0.5}'),
    )
    assert (options.speed, options.seed, options.voice, options.x_vector_only_mode) == (1.5, 0, "12", True)
    assert (options.speaker_embedding, options.extra_params) == ([1.0, 2.5], {"temperature": 0.5})


@pytest.mark.parametrize(
    ("struct", "argv", "said"),
    [
        (ServerConfig, ["--max-queu", "3"], "--max-queu: unknown flag, did you mean --max-queue?"),
        (ServerConfig, ["--queue", "3"], "--queue: unknown flag"),
        (ServerConfig, ["--max-queue", "many"], "--max-queue: 'many' is refused: Expected `int`"),
        (ServerConfig, ["--max-queue", "-1"], "--max-queue: '-1' is refused: Expected `int` >= 0"),
        (ServerConfig, ["--request-timeout", "0"], "--request-timeout: '0' is refused: Expected `float` > 0"),
        (ServerConfig, ["--max-queue"], "--max-queue: expected one argument"),
        (ServerConfig, ["--max"], "--max: unknown flag"),
        (SpeechOptions, ["--speed", "9"], "--speed: '9' is refused"),
        (SpeechOptions, ["--task-type", "Clone"], "--task-type: 'Clone' is refused"),
        (SpeechOptions, ["--extra-params", "{"], "--extra-params: '{' is refused"),
        (ApiConfig, ["--ws-frame-windows", "1"], "did you mean --ws-frame-window?"),
    ],
)
def test_wrong_flags_are_named_with_the_reason(struct: Any, argv: list[str], said: str) -> None:
    assert said in refusal(struct, *argv)


def test_stage_flags_are_taken_from_anywhere_on_the_line() -> None:
    rest, found = flags.take_stage_flags(
        [
            *("echo", "--stage-0-max-num-seqs", "4", "--port", "1", "--stage-12-engine-extras={a: [1]}"),
            *("--stage-0-devices", "0,1", "--stage-0-model", "123", "--stage-0-inputs", "a, b"),
            *("--stage-init-timeout", "9", "--stage-0-final-output", "false"),
        ]
    )
    assert rest == ["echo", "--port", "1", "--stage-init-timeout", "9"]
    assert found == {
        "0": {
            "max_num_seqs": 4,
            "devices": "0,1",
            "model": "123",
            "inputs": ["a", "b"],
            "final_output": False,
        },
        "12": {"engine_extras": {"a": [1]}},
    }


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["--stage-0-max-num-seq", "1"],
            "--stage-0-max-num-seq: unknown flag, did you mean --stage-0-max-num-seqs?",
        ),
        (["--stage-0-max-num-seqs"], "--stage-0-max-num-seqs needs a value"),
        (["--stage-0-engine-extras", "{"], "--stage-0-engine-extras: '{' cannot be read"),
    ],
)
def test_wrong_stage_flags_are_named(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flags.take_stage_flags(argv)
    assert said in caught.value.message


@pytest.mark.parametrize("text", ["{", "[]", '{"0": 1}', "4"])
def test_stage_overrides_must_be_an_object_of_objects(text: str) -> None:
    with pytest.raises(ConfigError, match="--stage-overrides must be JSON like"):
        flags.read_overrides(text)


@pytest.mark.usefixtures("restored_logging")
def test_flags_outrank_overrides() -> None:
    parser = deployment.make_parser("check", "A test.")
    overrides = json.dumps({"0": {"max_num_seqs": 3, "num_replicas": 2}})
    argv = ["echo", "--stage-overrides", overrides, "--stage-0-max-num-seqs", "5", "--max-queue", "8"]
    _, resolved = deployment.parse(parser, [*argv, "--log-level", "error"])
    stage = resolved.pipelines[0].stages[0]
    assert (stage.max_num_seqs, stage.num_replicas, resolved.server.max_queue) == (5, 2, 8)


def omni_async(*argv: str) -> subprocess.CompletedProcess[str]:
    """`omni-async ARGV` as a process."""
    command = [sys.executable, "-m", "omni_async", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_check_prints_what_is_resolved_as_yaml() -> None:
    done = omni_async("check", "echo", "--stage-0-max-num-seqs", "3", "--drain-timeout", "2")
    assert (done.returncode, done.stderr) == (0, "")
    tree = yaml.safe_load(done.stdout)
    assert tree["pipelines"][0]["stages"][0]["max_num_seqs"] == 3
    assert tree["server"]["drain_timeout"] == 2.0
    assert set(tree["pipelines"][0]["stages"][0]) == set(StageConfig.__struct_fields__)


def test_check_takes_a_deploy_yaml(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yml"
    path.write_text("base_config: echo\nname: mine\n")
    assert yaml.safe_load(omni_async("check", str(path)).stdout)["pipelines"][0]["name"] == "mine"


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["check", "ecko"], 2, "Did you mean echo?"),
        (["check", "echo", "--stage-0-kind", "ecko"], 2, "did you mean echo?"),
        (["check", "nothing.yaml"], 2, "nothing.yaml"),
        (["serve", "echo", "--prot", "1"], 2, "--prot: unknown flag, did you mean --port?"),
        (["serve", "echo", "--port", "70000"], 2, "cannot listen on 127.0.0.1:70000"),
        (["serve", "echo", "--host", "203.0.113.1", "--port", "0"], 2, "cannot listen on 203.0.113.1:0"),
        (["run", "echo", "--text", "hi", "--output", "x.wav"], 2, "echo does not speak"),
        (["run", "echo", "--text", "hi", "--output", "x.doc"], 2, "--output must end in one of wav"),
        (["run", "echo", "--text", "hi", "--output", "nowhere/x.wav"], 2, "there is no folder nowhere"),
        (["run", "--text", "hi", "--prompt", "cat", "--output", "x.wav"], 2, "not allowed with argument"),
        (["run", "hibari", "--prompt", "cat", "--output", "x.png"], 2, "hibari does not draw"),
        (["run", "--prompt", "cat", "--output", "x.wav"], 2, "--output must end in one of png"),
        (["run", "--prompt", "cat", "--voice", "heart", "--output", "x.png"], 2, "--voice has no effect"),
        (["run", "--text", "hi", "--size", "64x64", "--output", "x.wav"], 2, "--size has no effect"),
        (
            ["run", "echo", "--text", "hi", "--output", "x.wav", "--max-queue", "1"],
            2,
            "--max-queue: unknown flag",
        ),
        (["run", "echo", "--output", "x.wav"], 2, "--text"),
        (["bench", "--url", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9 does not answer"),
        (["bench", "--clients", "0"], 2, "at least 1"),
        (["srve"], 2, "no command 'srve'"),
        ([], 2, "usage: omni-async"),
    ],
)
def test_what_cannot_be_done_ends_with_a_status_and_a_sentence(
    argv: list[str], status: int, said: str
) -> None:
    done = omni_async(*argv)
    assert done.returncode == status
    assert said in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __import__("omni_async").__version__
