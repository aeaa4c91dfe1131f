"""Print the lower bounds of what users install, as constraints for `make test-oldest`; a number is torch's."""

import re
import sys
import tomllib
from pathlib import Path

OLDEST = ("tensorboard", "flare", "privacy")  # Hugging Face's packages are imported by nothing here
project = tomllib.loads(
    (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
)["project"]
extras = project["optional-dependencies"]
groups = [project["dependencies"], *(extras[name] for name in extras if name in OLDEST)]
oldest: dict[str, tuple[int, ...]] = {}
for need in (need for group in groups for need in group):
    if found := re.match(
        r"([\w-]+)(?:\[.*\])?>=([\d.]+)", need
    ):  # of two bounds, pip takes the higher
        bound = tuple(int(part) for part in found[2].split("."))
        oldest[found[1]] = max(bound, oldest.get(found[1], (0,)))
for name, bound in oldest.items():
    version = ".".join(map(str, bound))
    print(f"{name}=={sys.argv[1] if name == 'torch' and sys.argv[1:] else version}")
