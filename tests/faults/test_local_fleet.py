"""The local fleet itself: what the other tests rely on when they say "fresh" or "up"."""

from __future__ import annotations

from tests.faults.conftest import FaultFleet
from tests.local import handmade
from tests.local.podman import podman
from tests.local.process import run
from tests.local.settings import HOSTS

WORKER = "sglang-dsv4-decode.service"


def identities(fleet: FaultFleet) -> dict[str, str]:
    """Each container by its id: a container made anew has another."""
    return {host: podman("inspect", "--format", "{{.Id}}", fleet.settings.container(host)).out for host in fleet.nodes()}


def test_up_again_leaves_everything_running(fleet: FaultFleet) -> None:
    before = identities(fleet), fleet.main_pid("decode1", WORKER)
    fleet.up(HOSTS)
    assert (identities(fleet), fleet.main_pid("decode1", WORKER)) == before


def test_up_mends_what_is_half_made(fleet: FaultFleet) -> None:
    before = identities(fleet)
    podman("rm", "--force", "--time=0", fleet.settings.container("decode3"))
    podman("stop", "--time=0", fleet.settings.container("prefill2"))
    fleet.write("decode2", "/root/kept", "as it was")
    fleet.up(HOSTS)
    after = identities(fleet)
    assert {host for host in HOSTS if before[host] != after[host]} == {"decode3"}
    assert fleet.read("decode2", "/root/kept") == "as it was"
    assert {host for host, worker in fleet.router_workers().items() if worker["is_healthy"]} == set(HOSTS[1:])


def test_reset_leaves_nothing_behind_and_touches_no_other(fleet: FaultFleet) -> None:
    before = identities(fleet)
    fleet.write("decode1", "/var/lib/dsv4/left", "x")
    fleet.write("decode1", handmade.script_of("decode1"), "#!/bin/sh\nexit 1\n", 0o755)
    fleet.reset("decode1")
    assert fleet.run("decode1", ["test", "-e", "/var/lib/dsv4"], check=False).rc == 1
    assert (
        fleet.read("decode1", handmade.script_of("decode1")) == handmade.files("decode1", [])[handmade.script_of("decode1")].text
    )
    assert {host for host, old in before.items() if identities(fleet)[host] != old} == {"decode1"}


def test_ssh_knows_each_host_by_its_own_key(fleet: FaultFleet) -> None:
    config = str(fleet.settings.directory / "ssh_config")
    assert run(["ssh", "-F", config, "decode2", "hostname"]).out == "decode2\n"
    assert (fleet.settings.directory / "id_ed25519").stat().st_mode & 0o777 == 0o600
    fleet.run("decode2", ["sh", "-ec", "rm /etc/ssh/ssh_host_ed25519_key* && ssh-keygen -A && systemctl restart ssh"])
    refused = run(["ssh", "-F", config, "-o", "ControlPath=none", "decode2", "true"], check=False)
    assert refused.rc == 255 and "HOST IDENTIFICATION HAS CHANGED" in refused.err
    fleet.reset("decode2")
    assert run(["ssh", "-F", config, "decode2", "hostname"]).out == "decode2\n"


def test_hosts_know_each_other_also_when_one_is_added(fleet: FaultFleet) -> None:
    fleet.up(["light1"])
    for host, other in (("decode1", "light1"), ("light1", "router1")):
        assert fleet.address(other) in fleet.run(host, ["getent", "hosts", other]).out
    podman("rm", "--force", "--time=0", fleet.settings.container("light1"))
