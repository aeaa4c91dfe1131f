#!/bin/sh
# Makes a Python environment in `venv`, with the coterie of this folder and what it needs. Nothing else is run.
set -eu
cd "$(dirname "$0")"
sum() { if command -v sha256sum >/dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d' ' -f1; }
check() { [ "$(sum "$1")" = "$2" ] || { echo "$1 is not what user 0 has sent" >&2; exit 1; }; }
echo "the fingerprint of this folder: $(sum manifest.json | cut -c1-32 | sed 's/..../&-/g; s/-$//')"
check {{ wheel }} {{ wheel_digest }}
check {{ lock }} {{ lock_digest }}
if [ -e venv ] || [ -L venv ]; then
  echo "there is a venv already, which need not be yours: remove it first (rm -r venv)" >&2; exit 1
fi
"${PYTHON:-python3}" -I -m venv venv  # -I: imports nothing from this folder
pip="venv/bin/python -I -m pip install --quiet --disable-pip-version-check"
$pip "{{ torch }}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}  # many builds: none is in the lock
$pip --require-hashes -r {{ lock }}
$pip --no-deps ./{{ wheel }}
echo "next: venv/bin/coterie federate accept .   (compare the fingerprint with user 0, by telephone)"
