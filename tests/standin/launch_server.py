"""Stand-in for `python3 -m sglang.launch_server`: start it as `python3 launch_server.py --model-path …`.

It needs no path to the tree: like the real one it finds `sglang` by the working directory and PYTHONPATH.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def register_package() -> None:
    """Make this folder importable as `standin` without leaving it on `sys.path`.

    Runs again in the scheduler process, which multiprocessing starts by importing this file.
    """
    if "standin" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location("standin", os.path.join(HERE, "__init__.py"), submodule_search_locations=[HERE])
    if spec is None or spec.loader is None:
        raise ImportError(f"found no package in {HERE}, expected the stand-in's __init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["standin"] = module
    spec.loader.exec_module(module)


def search_as_module_run() -> None:
    """Search the working directory where a plain script run searches its own folder, as `python3 -m` does."""
    if not sys.flags.safe_path and sys.path and os.path.abspath(sys.path[0]) == HERE:
        sys.path[0] = os.getcwd()


register_package()

if __name__ == "__main__":
    search_as_module_run()
    importlib.import_module("standin.server").main(sys.argv[1:])
