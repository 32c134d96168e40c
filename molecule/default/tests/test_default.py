"""After site.yml: script, release, unit and processes of a decode worker say one thing."""

from __future__ import annotations

import hashlib
import re

from testinfra.host import Host

from tests.local import observe


def test_unit_is_enabled_and_running(host: Host) -> None:
    unit = host.service(observe.UNIT)
    assert unit.is_enabled and unit.is_running


def test_script_is_executable_root_owned_and_names_its_own_digest(host: Host) -> None:
    script = host.file(observe.SCRIPT)
    assert (script.user, script.group, script.mode) == ("root", "root", 0o755)
    line = re.search(r"^export DSV4_FLEET_STATE=([0-9a-f]{64})\n", script.content_string, re.MULTILINE)
    assert line
    assert hashlib.sha256(script.content_string.replace(line[0], "").encode()).hexdigest() == line[1]


def test_the_live_process_runs_the_script_on_disk(host: Host) -> None:
    assert (
        f"export DSV4_FLEET_STATE={observe.environment(host)['DSV4_FLEET_STATE']}\n" in host.file(observe.SCRIPT).content_string
    )


def test_every_process_imported_the_release_and_parsed_the_flags(host: Host) -> None:
    environment = observe.environment(host)
    found = observe.passports(host)
    assert len(found) >= 2
    for passport in found:
        assert passport["sglang"].startswith(f"/var/lib/dsv4/releases/{environment['DSV4_FLEET_RELEASE']}/python/")
        assert {name: environment[name] == "1" for name in passport["flags"]} == passport["flags"]


def test_release_is_read_only_and_the_base_is_untouched(host: Host) -> None:
    release = observe.environment(host)["DSV4_FLEET_RELEASE"]
    assert host.check_output("find /var/lib/dsv4/releases/%s -perm /222 -not -type l", release) == ""
    assert not host.file("/root/sglang-dsv4/python/dsv4_probe").exists
    assert "dsv4_probe" not in host.file("/root/sglang-dsv4/python/sglang/srt/environ.py").content_string
    assert "dsv4_probe" in host.file(f"/var/lib/dsv4/releases/{release}/python/sglang/srt/environ.py").content_string


def test_the_router_sends_to_it(host: Host) -> None:
    listed = observe.router_workers(host)
    assert listed[f"http://{host.check_output('hostname')}:30002"] is True
    assert len(listed) == 5


def test_the_boot_unit_is_there(host: Host) -> None:
    assert host.service("dsv4-recover.service").is_enabled
