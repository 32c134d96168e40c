"""Check mode and diff tell the truth and touch nothing; secrets are in neither, nor anywhere else. Cases H1 to H5, A9."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.faults import operate
from tests.faults.conftest import FaultFleet

UNIT = "sglang-dsv4-decode.service"
SCRIPT = "/root/sglang-dsv4/serve_dsv4_decode.sh"
TOKEN = "hf_thisisthesecret4217"
KEY = "sk-thisisthekey4217"
SECRETS = {
    "sglang_serve_secret_env": {"HF_TOKEN": TOKEN},
    "sglang_serve_secret_arguments": {"api-key": KEY},
    "sglang_worker_api_key": KEY,
}


def files(fleet: FaultFleet) -> str:
    """A digest of every file on the host that is not volatile, with its metadata."""
    listing = "find /etc /root /var/lib/dsv4 /usr/local /opt -xdev -type f -printf '%p %s %m %T@\\n' 2>/dev/null | sort"
    return hashlib.sha256(fleet.run("decode1", ["sh", "-c", listing]).out.encode()).hexdigest()


@pytest.fixture(scope="module")
def hand_made(fleet: FaultFleet) -> FaultFleet:
    fleet.reset("decode1")
    return fleet


@pytest.mark.parametrize("playbook", ["enable-gediff", "rollout-overlap-fix", "site", "rollback", "disable-diagnostics"])
def test_check_mode_ends_well_on_a_hand_made_worker_and_touches_nothing(hand_made: FaultFleet, playbook: str) -> None:
    before, pid = files(hand_made), hand_made.main_pid("decode1", UNIT)
    more = {"dsv4_partial": True} if playbook == "rollout-overlap-fix" else {}
    outcome = hand_made.playbook(playbook, limit="decode1", check=True, diff=True, extra_vars=more)
    assert outcome.ok, outcome.stdout
    assert (files(hand_made), hand_made.main_pid("decode1", UNIT)) == (before, pid)
    end = outcome.dsv4["decode1"]
    assert end["end_state"] == "unchanged"
    if playbook != "rollback":  # a hand-made worker has nothing to go back to
        assert {"script", "release", "unit", "restart"} <= set(end["would_change"])
    assert "applied" not in outcome.stdout and "rolled" not in outcome.stdout


def test_a_patch_that_does_not_compile_is_reported_in_check_mode(hand_made: FaultFleet, tmp_path: Path) -> None:
    before = files(hand_made)
    base = hand_made.run("decode1", ["sha256sum", "/root/sglang-dsv4/python/sglang/srt/constants.py"]).out.split()[0]
    source = tmp_path / "constants.py"
    source.write_text("def broken(:\n")
    overlays = [{"file": "sglang/srt/constants.py", "source": str(source), "base_sha256": base}]
    more = {"sglang_release_overlays": overlays, "dsv4_flag_bf16_index_k": False, "dsv4_flag_triton_indexer": False}
    outcome = hand_made.playbook("enable-gediff", limit="decode1", check=True, extra_vars=more)
    assert not outcome.ok
    assert "sglang/srt/constants.py" in outcome.stdout and "compile" in outcome.stdout
    assert files(hand_made) == before


def test_what_check_mode_said_is_what_comes_to_be(hand_made: FaultFleet) -> None:
    foreseen = hand_made.playbook("enable-gediff", limit="decode1", check=True, diff=True)
    done = hand_made.playbook("enable-gediff", limit="decode1")
    assert done.ok, done.stdout
    # The flag is live and its instrument is in the release; a flag without an instrument is not complained of.
    assert done.dsv4["decode1"]["gate"]["armed"]["SGLANG_DSV4_GE_DIFF"], done.dsv4["decode1"]["gate"]
    assert "no instrument" not in done.stdout
    assert done.dsv4["decode1"]["state"]["now"] == foreseen.dsv4["decode1"]["state"]["wanted"]
    script = hand_made.read("decode1", SCRIPT)
    added = [line[1:] for line in foreseen.stdout.splitlines() if line.startswith("+export SGLANG_")]
    assert added and set(added) <= set(script.splitlines())
    again = hand_made.playbook("enable-gediff", limit="decode1", check=True)
    assert again.dsv4["decode1"].get("would_change") is None
    mode = hand_made.run("decode1", ["stat", "-c", "%a %U", SCRIPT]).out.strip()
    assert mode == "755 root"


def test_x28_bytecode_of_that_release_is_bound_to_its_source_and_not_to_its_time(hand_made: FaultFleet) -> None:
    """tests/unit/agent shows that a file of the same size and time runs as patched; here what lies on a worker."""
    release = operate.live(hand_made, "decode1")["DSV4_FLEET_RELEASE"]
    script = (
        f"cd /var/lib/dsv4/releases/{release}/python/sglang/srt; ls __pycache__/environ.cpython-*.pyc; "
        "od --address-radix=n --format=u4 --skip-bytes=4 --read-bytes=4 __pycache__/environ.cpython-*.pyc"
    )
    _, flags = hand_made.run("decode1", ["sh", "-ec", script]).out.split()
    assert flags == "3"  # by hash, and checked


def test_secrets_reach_the_server_and_are_seen_nowhere_else(hand_made: FaultFleet) -> None:
    outcome = hand_made.playbook("enable-gediff", limit="decode1", diff=True, extra_vars=SECRETS, arguments=("-vvv",))
    assert outcome.ok, outcome.stdout[-3000:]
    pid = hand_made.main_pid("decode1", UNIT)
    assert f"HF_TOKEN={TOKEN}" in hand_made.run("decode1", ["cat", f"/proc/{pid}/environ"]).out
    for secret in (TOKEN, KEY):
        # -e itself is the caller's command line; what we add to it is what counts.
        said = [line for line in outcome.stdout.splitlines() if secret in line and "extravars" not in line]
        assert said == []
        assert secret not in hand_made.run("decode1", ["ps", "axww", "-o", "args"]).out
        assert secret not in hand_made.run("decode1", ["journalctl", "--no-pager", "-o", "cat"]).out
        holders = hand_made.run(
            "decode1", ["sh", "-c", f"grep -rlF -e {secret} /etc /root/sglang-dsv4/*.sh /var/lib/dsv4 /run/dsv4 || test $? = 1"]
        )
        found = holders.out.split()
        assert found and all("/secrets/" in path for path in found), found
        for path in found:
            assert hand_made.run("decode1", ["stat", "-c", "%a %U", path]).out.strip() == "600 root"
    # Another secret is another state: the change shows, the secret does not.
    other = {**SECRETS, "sglang_serve_secret_env": {"HF_TOKEN": TOKEN + "x"}}
    changed = hand_made.playbook("enable-gediff", limit="decode1", check=True, diff=True, extra_vars=other)
    assert "restart" in changed.dsv4["decode1"]["would_change"]
    assert "DSV4_FLEET_SECRETS=" in changed.stdout and TOKEN not in changed.stdout
    same = hand_made.playbook("enable-gediff", limit="decode1", check=True, extra_vars=SECRETS)
    assert same.dsv4["decode1"].get("would_change") is None
