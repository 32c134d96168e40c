"""Secrets: the bytes that arrive, in files that only root reads, under a digest that tells nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from agent import paths, secrets
from agent.errors import AgentError

UNIT = "x.service"
KEY = "ab" * 32
NASTY = [
    "plain",
    "",
    "a b",
    "$HOME `id` $(id)",
    'it\'s "quoted"',
    "a\\b",
    "line\nline",
    "# no; comment",
    "é ü 😀",
    "-n",
    "~",
]


@pytest.mark.parametrize("value", NASTY)
def test_bash_reads_the_same_bytes_back(tmp_path: Path, value: str) -> None:
    file = tmp_path / "env"
    file.write_text(secrets.env_file({"TOKEN": value}))
    script = f"set -euo pipefail; set -a; source {file}; set +a; printf %s \"$TOKEN\"; env -0 | grep -zq '^TOKEN='"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, env={"PATH": "/usr/bin:/bin"})
    assert done.stdout == value.encode()


@pytest.mark.parametrize("value", [*NASTY, "\x7f\x85\u2028\ufeff", True, 7, 0.5, "yes", "010", "1:30", "null"])
def test_yaml_reads_the_same_value_back(value: str | int | float | bool) -> None:
    assert yaml.safe_load(secrets.args_file({"api-key": value})) == {"api-key": value}


@pytest.mark.parametrize("env", [{"A B": "x"}, {"A=": "x"}, {"": "x"}, {"A": "x\0y"}, {"A": 1}])
def test_what_no_shell_can_hold_is_refused_without_its_value(env: dict[str, str]) -> None:
    with pytest.raises(AgentError) as error:
        secrets.env_file(env)
    assert "x\0y" not in str(error.value)


def test_the_digest_depends_on_the_hosts_key_and_on_every_value() -> None:
    one = {"env": {"A": "1"}, "args": {}}
    assert secrets.digest(one, KEY) != secrets.digest(one, "cd" * 32)
    assert secrets.digest(one, KEY) != secrets.digest({"env": {}, "args": {"A": "1"}}, KEY)
    assert secrets.digest({"env": {}, "args": {}}, None) == "none" and secrets.digest(one, None) is None


def test_files_are_roots_alone_and_written_once(root: Path) -> None:
    content = {"env": {"HF_TOKEN": "t"}, "args": {"api-key": "k"}}
    digest = secrets.digest(content, KEY)
    assert digest is not None
    assert secrets.write(UNIT, content, digest, KEY) is True and secrets.write(UNIT, content, digest, KEY) is False
    directory = Path(secrets.directory(UNIT, digest))
    assert os.stat(directory).st_mode & 0o777 == 0o700
    assert {path.name: os.stat(path).st_mode & 0o777 for path in directory.iterdir()} == {
        "env": 0o600,
        "args.yaml": 0o600,
    }
    (directory / "env").write_text("HF_TOKEN='someone else'\n")
    assert secrets.write(UNIT, content, digest, KEY) is True and (directory / "env").read_text() == "HF_TOKEN='t'\n"


def test_other_secrets_than_the_scripts_are_refused(root: Path) -> None:
    with pytest.raises(AgentError, match="as the script names it"):
        secrets.write(UNIT, {"env": {"A": "1"}, "args": {}}, "00" * 32, KEY)


def test_an_offered_host_key_is_taken_only_where_there_is_none(root: Path) -> None:
    assert secrets.ensure_host_key(KEY) == KEY and secrets.ensure_host_key("cd" * 32) == KEY
    assert os.stat(paths.HOST_KEY).st_mode & 0o777 == 0o600


def test_secrets_of_a_transaction_live_in_memory_only(root: Path) -> None:
    identity = "20260921T101500-1a2b3c4d"
    secrets.store(identity, {"api_key": "k"})
    assert os.stat(paths.secrets(identity)).st_mode & 0o777 == 0o600 and paths.secrets(identity).startswith(paths.RUN)
    assert secrets.load(identity) == {"api_key": "k"}
    secrets.forget(identity)
    assert secrets.load(identity) == {}


def test_the_key_of_a_server_is_the_one_it_was_started_with(root: Path) -> None:
    old = {"env": {}, "args": {"api-key": 'old "key"'}}
    key = secrets.ensure_host_key("a" * 64)
    wanted = secrets.digest(old, key)
    assert wanted and secrets.write("x.service", old, wanted, key)
    assert secrets.api_key("x.service", wanted, "new") == 'old "key"'
    for unknown in (None, secrets.NONE, "0" * 64):
        assert secrets.api_key("x.service", unknown, "new") == "new"
