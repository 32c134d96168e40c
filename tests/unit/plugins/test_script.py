"""The serve script as bash reads it."""

from __future__ import annotations

import pytest
from ansible_collections.dsv4.fleet.plugins.plugin_utils import script
from ansible_collections.dsv4.fleet.plugins.plugin_utils.flags import SettingError

NASTY = "$HOME ; # 'q' \"d\" `x` \\ \n end"
GOOD = f"""#!/usr/bin/env bash
set -euo pipefail
export DSV4_FLEET_STATE={script.PLACEHOLDER}
export A='1'
set -a
source /var/lib/x/env
set +a
cd /var/lib/dsv4/empty
exec python3 -m 'a b' "c"
"""


def test_the_state_is_the_digest_of_everything_but_its_own_line() -> None:
    text, state = script.seal(GOOD)
    assert f"export DSV4_FLEET_STATE={state}\n" in text
    assert script.state(text) == state
    assert script.state(text.replace("A='1'", "A='0'")) != state


def test_bash_says_environment_command_directory_and_secrets_file() -> None:
    text, state = script.seal(GOOD)
    found = script.run(text)
    assert found.environment == {"A": "1", "DSV4_FLEET_STATE": state}
    assert (found.command, found.directory, found.sourced) == (["python3", "-m", "a b", "c"], "/var/lib/dsv4/empty", "/var/lib/x/env")


def test_every_byte_of_a_value_survives_bash() -> None:
    quoted = "'" + NASTY.replace("'", "'\"'\"'") + "'"
    text, _ = script.seal(GOOD.replace("'1'", quoted))
    assert script.run(text).environment["A"] == NASTY


@pytest.mark.parametrize("without", ["python3 -m x", "true", ""])
def test_a_script_that_does_not_end_in_exec_is_refused(without: str) -> None:
    text, _ = script.seal(GOOD.replace('exec python3 -m \'a b\' "c"', without))
    with pytest.raises(SettingError, match="expected the script to end in exec"):
        script.run(text)


def test_two_exports_glued_together_are_seen() -> None:
    # What an inline {% if %} at a line's end makes; `bash -n` passes it.
    text, state = script.seal(GOOD.replace("export A='1'\n", "export A='1'export B=2\n"))
    with pytest.raises(SettingError, match="A: found '1export'"):
        script.verify(text, {"A": "1", "B": "2", "DSV4_FLEET_STATE": state}, ["python3", "-m", "a b", "c"], "/var/lib/dsv4/empty", "/var/lib/x/env")


def test_a_line_after_exec_has_no_effect_and_is_seen() -> None:
    text, state = script.seal(GOOD + "export LATE=1\n")
    with pytest.raises(SettingError, match="LATE: found 'nothing', expected '1'"):
        script.verify(text, {"A": "1", "LATE": "1", "DSV4_FLEET_STATE": state}, ["python3", "-m", "a b", "c"], "/var/lib/dsv4/empty", "/var/lib/x/env")


@pytest.mark.parametrize("broken", [GOOD.replace("\n", "\r\n"), GOOD.replace("export DSV4_FLEET_STATE", "DSV4_FLEET_STATE"), GOOD + f"export DSV4_FLEET_STATE={script.PLACEHOLDER}\n"])
def test_carriage_returns_and_a_lost_state_line_are_refused(broken: str) -> None:
    with pytest.raises(SettingError):
        script.seal(broken)
