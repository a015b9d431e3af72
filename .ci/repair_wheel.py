"""Repairs the wheel of a folder with the command that releases use, in place, and checks that releases build one for each
Python that they promise: python .ci/repair_wheel.py FOLDER, with cibuildwheel, auditwheel and patchelf installed."""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

settings = tomllib.loads(Path("pyproject.toml").read_text())
folder = Path(sys.argv[1])

# Every job of the workflow builds one wheel, and no Python that cibuildwheel would build for lacks a job.
promised = re.search(r"python: \[(.*)\]", Path(".github/workflows/wheels.yml").read_text())[1].split(", ")
command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux", "."]
identifiers = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
assert identifiers == [f"{python}-manylinux_x86_64" for python in promised], (identifiers, promised)

(wheel,) = folder.glob("*.whl")
repair = settings["tool"]["cibuildwheel"]["repair-wheel-command"]
with tempfile.TemporaryDirectory() as repaired:
    subprocess.run(repair.format(dest_dir=repaired, wheel=wheel), shell=True, check=True)
    (result,) = Path(repaired).iterdir()
    assert "manylinux" in result.name, result.name
    libraries = [name for name in zipfile.ZipFile(result).namelist() if ".so" in name]
    assert libraries and all(name.startswith("mha_ext/_C") for name in libraries), libraries  # torch's are left out
    (folder / result.name).write_bytes(result.read_bytes())
wheel.unlink()
print(f"{result.name}: {', '.join(libraries)}")
