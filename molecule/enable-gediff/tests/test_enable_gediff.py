"""After enable-gediff.yml under load: GE_DIFF is on and the canary off, in every process of every decode worker."""

from __future__ import annotations

import json

from testinfra.host import Host

from tests.local import observe

FLAGS = {"SGLANG_DSV4_GE_DIFF": True, "SGLANG_DSV4_IDXK_CANARY": False, "SGLANG_DSV4_BF16_INDEX_K": True}


def test_every_process_parsed_the_flags(host: Host) -> None:
    found = observe.passports(host)
    assert len(found) >= 2
    for passport in found:
        assert passport["flags"].items() >= FLAGS.items()


def test_the_override_says_who_and_why(host: Host) -> None:
    ledger = json.loads(host.file(f"/var/lib/dsv4/units/{observe.UNIT}/ledger.json").content_string)
    assert ledger["overrides"]["ge_diff"]["value"] is True
    assert ledger["overrides"]["ge_diff"]["why"] == "enable-gediff"
    assert "idxk_canary" not in ledger["overrides"]


def test_the_router_has_all_workers_back(host: Host) -> None:
    listed = observe.router_workers(host)
    assert len(listed) == 5 and all(listed.values())
