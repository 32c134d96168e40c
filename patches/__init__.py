"""Turn an SGLang tree, as a host really has it, into a patched release.

`build` puts an operator's overlays in first and splices our hooks on top. It runs on the
controller alone and works on file contents: nothing of SGLang is imported, and the tree that the
files came from is never written to.
"""

from __future__ import annotations

from patches.errors import PatchError
from patches.hooks import HOOK_FILES
from patches.release import NEW, Overlay, Release, build, needed_files
from patches.version import VERSION as __version__

__all__ = ["HOOK_FILES", "NEW", "Overlay", "PatchError", "Release", "__version__", "build", "needed_files"]
