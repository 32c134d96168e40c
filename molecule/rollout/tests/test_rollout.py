"""After rollout-overlap-fix.yml under load: overlap is off in every process, and what was on before still is."""

from __future__ import annotations

import json

from testinfra.host import Host

from tests.local import observe


def test_every_process_parsed_overlap_off_and_kept_ge_diff(host: Host) -> None:
    found = observe.passports(host)
    assert len(found) >= 2
    for passport in found:
        assert passport["flags"]["SGLANG_OPT_USE_MULTI_STREAM_OVERLAP"] is False
        assert passport["flags"]["SGLANG_DSV4_GE_DIFF"] is True


def test_the_fix_is_an_override_until_the_inventory_says_the_same(host: Host) -> None:
    ledger = json.loads(host.file(f"/var/lib/dsv4/units/{observe.UNIT}/ledger.json").content_string)
    assert ledger["overrides"]["multi_stream_overlap"]["value"] is False
    assert ledger["overrides"]["multi_stream_overlap"]["why"] == "rollout-overlap-fix"
