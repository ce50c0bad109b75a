#!/bin/sh
# install.sh PREFIX: the server in an environment of its own, from the sources around this script.
# The image's steps, and those of a machine that has no containers. As root on Debian or Ubuntu it
# installs the Python that is missing; otherwise it uses what is there.
# ZINC_RT_EXTRAS, by default server, are the project's extras to install.
set -eu

prefix=${1:?install.sh PREFIX, such as /opt/zinc-rt}
here=$(cd "$(dirname "$0")" && pwd)
sources=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && [ -z "${ZINC_RT_NO_APT:-}" ]; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends python3 python3-venv
    rm -rf /var/lib/apt/lists/*
fi

"$python" -m venv --clear "$prefix"
# A copy, so that nothing is written beside sources that may be read-only.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
for part in pyproject.toml README.md LICENSE contract reference accel harness; do
    cp -R "$sources/$part" "$copy/"
done
"$prefix/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir \
    -c "$sources/ci/constraints.txt" "$copy[${ZINC_RT_EXTRAS:-server}]"
"$prefix/bin/zinc-rt" --version
