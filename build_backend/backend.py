"""setuptools' build backend, which also sees the torch that is installed where the package is going to live.

An isolated build hides the environment's packages, so that it would download a second torch to build against. This
backend looks the installed torch up and puts its folder at the end of the search path; only where none is installed does
it ask the installer for one.
"""

import os
import subprocess
import sys

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that need no change)

FLOOR = "torch>=2.11"


def _installed_torch():
    """The folder that holds the torch package in the environment of the interpreter, or None."""
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # which is how pip lays its isolated folders over it
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, env=env, capture_output=True, text=True, cwd=os.sep, check=False).stdout.strip()
    return os.path.dirname(out) if out else None


def _see_torch():
    folder = _installed_torch()
    if folder and folder not in sys.path:
        sys.path.append(folder)
    return folder


def _requires():
    return [] if _see_torch() else [FLOOR]


def get_requires_for_build_wheel(config_settings=None):
    return _requires()


def get_requires_for_build_editable(config_settings=None):
    return _requires()


def get_requires_for_build_sdist(config_settings=None):
    return []


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    _see_torch()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    _see_torch()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
