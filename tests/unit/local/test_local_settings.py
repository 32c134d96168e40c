"""Names, addresses and pins: what is refused, and what a host is made of."""

from __future__ import annotations

import subprocess
import tarfile
from io import BytesIO
from itertools import pairwise

import pytest

from tests.local import handmade, settings
from tests.local.fleet import Fleet, Node
from tests.local.settings import HOSTS, FleetSettings, LocalError, role_of


@pytest.fixture(autouse=True)
def no_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DSV4_LOCAL_FLEET", "DSV4_LOCAL_SUBNET", "DSV4_SGLANG_VERSION", "DSV4_SGLANG_SHA256"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ["", "Test", "a-b", "1a", "../x", "a" * 21, "a\n"])
def test_fleet_names_that_are_refused(name: str) -> None:
    with pytest.raises(LocalError, match="DSV4_LOCAL_FLEET"):
        FleetSettings(name=name)


@pytest.mark.parametrize("subnet", ["198.51.100.0/29", "198.51.100.1/26", "fd00::/64", "yes"])
def test_ranges_that_are_refused(subnet: str) -> None:
    with pytest.raises(LocalError, match="DSV4_LOCAL_SUBNET"):
        FleetSettings(name="x", subnet_text=subnet)


def test_demo_tests_and_molecule_can_be_up_at_once() -> None:
    ranges = [FleetSettings(name=name).subnet for name in ("local", "test", "molecule", "workers")]
    assert not any(a.overlaps(b) for a in ranges for b in ranges if a is not b)


@pytest.mark.parametrize("host", ["decode", "decode0", "decode01", "node1", "decode1;id", "decode1\n", "Decode1", "-decode1"])
def test_host_names_that_are_refused(host: str) -> None:
    with pytest.raises(LocalError, match="host name"):
        role_of(host)


def test_another_sglang_needs_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.sglang_wheel().version == settings.SGLANG_VERSION
    monkeypatch.setenv("DSV4_SGLANG_VERSION", "0.5.19")
    with pytest.raises(LocalError, match="DSV4_SGLANG_SHA256"):
        settings.sglang_wheel()
    monkeypatch.setenv("DSV4_SGLANG_SHA256", "ab" * 32)
    assert settings.sglang_wheel() == settings.Wheel("sglang", "0.5.19", "ab" * 32)
    monkeypatch.setenv("DSV4_SGLANG_SHA256", "AB" * 32)
    with pytest.raises(LocalError, match="64 hexadecimal"):
        settings.sglang_wheel()


def test_addresses_are_fixed_for_usual_hosts_and_kept_for_others() -> None:
    fleet = Fleet(FleetSettings(name="x", subnet_text="198.51.100.0/28"))
    there = {"light2": Node("light2", "running", "198.51.100.9", "", "")}
    addresses = fleet._addresses(["decode1", "light1", "light2"], there)
    assert addresses == {"decode1": "198.51.100.5", "light1": "198.51.100.8", "light2": "198.51.100.9"}


def test_a_range_that_is_full_is_an_error() -> None:
    fleet = Fleet(FleetSettings(name="x", subnet_text="198.51.100.0/28"))
    with pytest.raises(LocalError, match="larger DSV4_LOCAL_SUBNET"):
        fleet._addresses([f"light{number}" for number in range(1, 9)], {})


def test_the_hand_made_script_gives_the_engine_what_it_says() -> None:
    """Compared by what bash makes of it, not by its text."""
    script = handmade.files("prefill1", HOSTS[1:])[handmade.script_of("prefill1")].text
    shown = script.replace("exec python3", 'exec sh -c \'env; printf "%s\\n" "$@"\'').replace("cd /root/sglang-dsv4", "cd /")
    out = subprocess.run(["bash", "-euc", shown], capture_output=True, text=True, check=True).stdout.splitlines()
    assert set(out) >= {
        "SGLANG_DSV4_BF16_INDEX_K=1",
        "SGLANG_DSV4_IDXK_CANARY=1",
        "PYTHONPATH=/root/sglang-dsv4/python",
    }
    assert out[out.index("--disaggregation-bootstrap-port") + 1] == "8998"
    assert out[out.index("--port") + 1] == "30000"


def test_the_router_is_told_every_worker() -> None:
    arguments = handmade.router_arguments(["prefill1", "decode1", "decode2"])
    pairs = list(pairwise(arguments))
    assert ("--prefill", "http://prefill1:30000") in pairs and ("http://prefill1:30000", "8998") in pairs
    assert {value for name, value in pairs if name == "--decode"} == {"http://decode1:30002", "http://decode2:30002"}


def test_files_arrive_with_mode_and_link() -> None:
    contents = handmade.files("decode1", [])
    with tarfile.open(fileobj=BytesIO(handmade.archive(contents))) as tar:
        assert tar.getmember("root/sglang-dsv4/serve_dsv4_decode.sh").mode == 0o755
        link = tar.getmember("etc/systemd/system/multi-user.target.wants/sglang-dsv4-decode.service")
        assert (link.issym(), link.linkname) == (True, "/etc/systemd/system/sglang-dsv4-decode.service")


def test_a_light_host_has_no_worker() -> None:
    assert handmade.files("light1", HOSTS) == {}
